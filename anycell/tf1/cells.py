"""The cells of TensorFlow 1, in its order of gates: the columns of its variables."""

from __future__ import annotations

from anycell.keras.cells import ACTIVATIONS, SimpleRNN
from anycell.lang.cell import Gates, cell, linear
from anycell.lang.expr import Expr
from anycell.lang.ops import clip, sigmoid


def _after(
    x: Gates, r: Gates, s: Gates, p: Gates | None, forget_bias: float, cell_clip: float | None,
    activation: str,
) -> tuple[Expr, Expr]:  # fmt: skip
    """The output of an LSTM, with the peepholes ``p`` if it has some, and its c."""
    inner = ACTIVATIONS[activation]
    i, g, f, o = x + r
    if p is not None:
        i, f = i + p.w_i_diag * s.c, f + p.w_f_diag * s.c
    c = sigmoid(f + forget_bias) * s.c + sigmoid(i) * inner(g)
    if cell_clip is not None:
        c = clip(c, -cell_clip, cell_clip)
    if p is not None:
        o = o + p.w_o_diag * c
    return sigmoid(o) * inner(c), c


def _projected(h: Expr, proj_clip: float | None) -> Expr:
    h = linear(h, "projection")
    return h if proj_clip is None else clip(h, -proj_clip, proj_clip)


@cell(gates="i g f o", state="h c")
def LSTM(
    x: Gates, r: Gates, s: Gates, *, forget_bias: float = 1.0, cell_clip: float | None = None,
    activation: str = "tanh",
) -> tuple[Expr, Expr]:  # fmt: skip
    """LSTM. ``forget_bias`` is added to f in every step and is no part of the weights."""
    return _after(x, r, s, None, forget_bias, cell_clip, activation)


@cell(gates="i g f o", state="h c", params="w_i_diag w_f_diag w_o_diag")
def PeepholeLSTM(
    x: Gates, r: Gates, s: Gates, p: Gates, *, forget_bias: float = 1.0,
    cell_clip: float | None = None, activation: str = "tanh",
) -> tuple[Expr, Expr]:  # fmt: skip
    """LSTM whose gates i and f see the old c, and o the new one."""
    return _after(x, r, s, p, forget_bias, cell_clip, activation)


@cell(gates="i g f o", state="h:P c")
def ProjectedLSTM(
    x: Gates, r: Gates, s: Gates, *, forget_bias: float = 1.0, cell_clip: float | None = None,
    proj_clip: float | None = None, activation: str = "tanh",
) -> tuple[Expr, Expr]:  # fmt: skip
    """LSTM whose output is projected to P numbers."""
    h, c = _after(x, r, s, None, forget_bias, cell_clip, activation)
    return _projected(h, proj_clip), c


@cell(gates="i g f o", state="h:P c", params="w_i_diag w_f_diag w_o_diag")
def ProjectedPeepholeLSTM(
    x: Gates, r: Gates, s: Gates, p: Gates, *, forget_bias: float = 1.0,
    cell_clip: float | None = None, proj_clip: float | None = None, activation: str = "tanh",
) -> tuple[Expr, Expr]:  # fmt: skip
    """LSTM whose gates i and f see the old c, and o the new one; the output is projected."""
    h, c = _after(x, r, s, p, forget_bias, cell_clip, activation)
    return _projected(h, proj_clip), c


@cell(gates="r u c", state="h")
def GRU(x: Gates, r: Gates, s: Gates, *, activation: str = "tanh") -> Expr:
    """GRU as in its first paper, with the reset before the matmul.

    r, u = sigmoid(x + W h)
    c = activation(x_c + W_c (r h))
    h' = u h + (1 - u) c
    """
    reset, u = linear(s.h, "gates", gates="r u") + x
    u = sigmoid(u)
    c = ACTIVATIONS[activation](x.c + linear(sigmoid(reset) * s.h, "candidate"))
    return u * s.h + (1.0 - u) * c


RNN = SimpleRNN
