"""LSTM with dropout on what enters its memory."""

from anycell.lang.cell import Gates, cell, keep
from anycell.lang.expr import Expr
from anycell.lang.ops import sigmoid, tanh


@cell(gates="i f g o", state="h c")
def RecurrentDropoutLSTM(
    x: Gates, r: Gates, s: Gates, *, dropout: float = 0.25, per: str = "step"
) -> tuple[Expr, Expr]:
    """LSTM that drops candidates in training, and never anything that it remembers.

    i, f, o = sigmoid(x + r), g = tanh(x + r)
    c' = f c + i d(g)                          d: 0 with probability dropout, else g / (1 - dropout)
    h' = o tanh(c')

    In evaluation d(g) = g: the cell is an LSTM with the same weights.

    Args:
        dropout: a probability below 1.
        per: a mask for each "step", or one for the whole "sequence"; the paper has both.

    Source: Semeniuta, Severyn & Barth, *Recurrent Dropout without Memory Loss*, 2016.
    """
    i, f, g, o = x + r
    kept = 1.0 - dropout
    c = sigmoid(f) * s.c + sigmoid(i) * (keep(kept, per) / kept * tanh(g))
    return sigmoid(o) * tanh(c), c
