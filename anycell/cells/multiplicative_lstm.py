"""Multiplicative LSTM."""

from anycell.lang.cell import Gates, cell, linear
from anycell.lang.expr import Expr
from anycell.lang.ops import sigmoid, tanh


@cell(gates="i f g o m", state="h c")
def MultiplicativeLSTM(
    x: Gates, r: Gates, s: Gates, *, gate_inside: bool = False
) -> tuple[Expr, Expr]:
    """LSTM whose recurrent matrix depends on the input: between h and the gates stands m.

    m = x_m (W_mh h)
    i, f, o = sigmoid(x + W_hm m), g = tanh(x + W_hm m)
    c' = f c + i g
    h' = o tanh(c')

    The paper's x_m has no bias; to match it, hold the layer's, rows m of ``bias_ih``, at zero.

    Args:
        gate_inside: h' = tanh(o c'), as some implementations have it.

    Source: Krause, Lu, Murray & Renals, *Multiplicative LSTM for Sequence Modelling*, 2016.
    """
    m = x.m * linear(s.h, "mh")
    i, f, g, o = linear(m, "hm", gates="i f g o") + x
    c = sigmoid(f) * s.c + sigmoid(i) * tanh(g)
    o = sigmoid(o)
    return tanh(o * c) if gate_inside else o * tanh(c), c
