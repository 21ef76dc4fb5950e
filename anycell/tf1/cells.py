"""The cells of TensorFlow 1, in its order of gates: the columns of its variables."""

from __future__ import annotations

from anycell.keras.cells import ACTIVATIONS
from anycell.lang.cell import Gates, cell, linear
from anycell.lang.expr import Expr
from anycell.lang.ops import clip, sigmoid


def _step(
    x: Gates,
    r: Gates,
    c: Expr,
    p: Gates | None,
    forget_bias: float,
    cell_clip: float | None,
    activation: str,
) -> tuple[Expr, Expr]:
    """The new cell state and the output of an LSTM; ``p`` has peepholes."""
    inner = ACTIVATIONS[activation]
    i, g, f, o = x + r
    if p is not None:
        i, f = i + p.w_i_diag * c, f + p.w_f_diag * c
    new = sigmoid(f + forget_bias) * c + sigmoid(i) * inner(g)
    if cell_clip is not None:
        new = clip(new, -cell_clip, cell_clip)
    if p is not None:
        o = o + p.w_o_diag * new
    return new, sigmoid(o) * inner(new)


def _projected(h: Expr, proj_clip: float | None) -> Expr:
    h = linear(h, "projection")
    return h if proj_clip is None else clip(h, -proj_clip, proj_clip)


@cell(gates="i g f o", state="h c")
def LSTM(
    x: Gates,
    r: Gates,
    s: Gates,
    *,
    forget_bias: float = 1.0,
    cell_clip: float | None = None,
    activation: str = "tanh",
) -> tuple[Expr, Expr]:
    """LSTM; ``forget_bias`` is added to f in every step and is no part of the weights."""
    c, h = _step(x, r, s.c, None, forget_bias, cell_clip, activation)
    return h, c


@cell(gates="i g f o", state="h c", params="w_i_diag w_f_diag w_o_diag")
def PeepholeLSTM(
    x: Gates,
    r: Gates,
    s: Gates,
    p: Gates,
    *,
    forget_bias: float = 1.0,
    cell_clip: float | None = None,
    activation: str = "tanh",
) -> tuple[Expr, Expr]:
    """LSTM whose i and f see the old c, and o the new one."""
    c, h = _step(x, r, s.c, p, forget_bias, cell_clip, activation)
    return h, c


@cell(gates="i g f o", state="h:P c")
def ProjectedLSTM(
    x: Gates,
    r: Gates,
    s: Gates,
    *,
    forget_bias: float = 1.0,
    cell_clip: float | None = None,
    proj_clip: float | None = None,
    activation: str = "tanh",
) -> tuple[Expr, Expr]:
    """LSTM whose output is projected to P numbers."""
    c, h = _step(x, r, s.c, None, forget_bias, cell_clip, activation)
    return _projected(h, proj_clip), c


@cell(gates="i g f o", state="h:P c", params="w_i_diag w_f_diag w_o_diag")
def ProjectedPeepholeLSTM(
    x: Gates,
    r: Gates,
    s: Gates,
    p: Gates,
    *,
    forget_bias: float = 1.0,
    cell_clip: float | None = None,
    proj_clip: float | None = None,
    activation: str = "tanh",
) -> tuple[Expr, Expr]:
    """Both."""
    c, h = _step(x, r, s.c, p, forget_bias, cell_clip, activation)
    return _projected(h, proj_clip), c


@cell(gates="r u c", state="h")
def GRU(x: Gates, r: Gates, s: Gates, *, activation: str = "tanh") -> Expr:
    """GRU as its first paper has it: the reset before the matmul.

    r, u = sigmoid(x + W h)
    c = activation(x_c + W_c (r h))
    h' = u h + (1 - u) c
    """
    reset, u = linear(s.h, "gates", gates="r u") + x
    u = sigmoid(u)
    c = ACTIVATIONS[activation](x.c + linear(sigmoid(reset) * s.h, "candidate"))
    return u * s.h + (1.0 - u) * c


@cell(gates="h", state="h")
def RNN(x: Gates, r: Gates, s: Gates, *, activation: str = "tanh") -> Expr:
    """Elman network: h' = activation(x + r)."""
    return ACTIVATIONS[activation](x.h + r.h)
