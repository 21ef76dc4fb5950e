"""The cells of TensorFlow 1, in its order of gates: the columns of its variables."""

from __future__ import annotations

import inspect
from typing import Any

from anycell.keras.cells import ACTIVATIONS, SimpleRNN
from anycell.lang.cell import Cell, Gates, cell, linear
from anycell.lang.expr import Expr
from anycell.lang.ops import clip, sigmoid


def _lstm(name: str, state: str, params: str, doc: str) -> Cell:
    """Makes an LSTM, with peepholes if it has parameters, with a projection if h has a size."""

    def with_peepholes(
        x: Gates, r: Gates, s: Gates, p: Gates | None, *, forget_bias: float = 1.0,
        cell_clip: float | None = None, proj_clip: float | None = None, activation: str = "tanh",
    ) -> tuple[Expr, Expr]:  # fmt: skip
        inner = ACTIVATIONS[activation]
        i, g, f, o = x + r
        if p is not None:
            i, f = i + p.w_i_diag * s.c, f + p.w_f_diag * s.c
        c = sigmoid(f + forget_bias) * s.c + sigmoid(i) * inner(g)
        if cell_clip is not None:
            c = clip(c, -cell_clip, cell_clip)
        if p is not None:
            o = o + p.w_o_diag * c
        h = sigmoid(o) * inner(c)
        if ":" in state:
            h = linear(h, "projection")
            h = h if proj_clip is None else clip(h, -proj_clip, proj_clip)
        return h, c

    def without(x: Gates, r: Gates, s: Gates, **hyper: Any) -> tuple[Expr, Expr]:
        return with_peepholes(x, r, s, None, **hyper)

    whole = inspect.signature(with_peepholes)
    others = [argument for name, argument in whole.parameters.items() if name != "p"]
    without.__signature__ = whole.replace(parameters=others)  # type: ignore[attr-defined]
    step = with_peepholes if params else without
    step.__name__ = step.__qualname__ = name  # pickles find the cell by this name
    step.__doc__ = doc
    return cell(gates="i g f o", state=state, params=params)(step)


_ADDED = "``forget_bias`` is added to f in every step and is no part of the weights."
_SEEN = "i and f see the old c, and o the new one."
_PROJECTED = "The output is projected to P numbers."
_DIAGONALS = "w_i_diag w_f_diag w_o_diag"
LSTM = _lstm("LSTM", "h c", "", f"LSTM. {_ADDED}")
PeepholeLSTM = _lstm("PeepholeLSTM", "h c", _DIAGONALS, f"LSTM. {_SEEN}")
ProjectedLSTM = _lstm("ProjectedLSTM", "h:P c", "", f"LSTM. {_PROJECTED}")
ProjectedPeepholeLSTM = _lstm(
    "ProjectedPeepholeLSTM", "h:P c", _DIAGONALS, f"LSTM. {_SEEN} {_PROJECTED}"
)


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
