"""LSTM with one dropout mask per sequence on its recurrent connections."""

from anycell.lang.cell import Gates, cell, keep, linear
from anycell.lang.expr import Expr
from anycell.lang.ops import sigmoid, tanh


@cell(gates="i f g o", state="h c")
def VariationalLSTM(x: Gates, r: Gates, s: Gates, *, dropout: float = 0.25) -> tuple[Expr, Expr]:
    """LSTM that drops, in training, the same hidden units at every step of a sequence.

    d: 0 with probability dropout, else 1 / (1 - dropout), drawn once per sequence, row and unit
    i, f, o = sigmoid(x + W_r (d h)), g = tanh(x + W_r (d h))
    c' = f c + i g
    h' = o tanh(c')

    In evaluation d = 1: an LSTM with ``W_r`` as ``W_hh``, and with both biases in ``b_ih``.

    Args:
        dropout: a probability below 1.

    Source: Gal & Ghahramani, *A Theoretically Grounded Application of Dropout in Recurrent Neural
    Networks*, 2016, with one mask for all gates (their tied weights).
    """
    kept = 1.0 - dropout
    masked = keep(kept, per="sequence") / kept * s.h
    i, f, g, o = x + linear(masked, "r", gates="i f g o")
    c = sigmoid(f) * s.c + sigmoid(i) * tanh(g)
    return sigmoid(o) * tanh(c), c
