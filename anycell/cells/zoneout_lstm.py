"""LSTM with zoneout."""

from anycell.lang.cell import Gates, cell, keep
from anycell.lang.expr import Expr
from anycell.lang.ops import sigmoid, tanh


@cell(gates="i f g o", state="h c")
def ZoneoutLSTM(
    x: Gates, r: Gates, s: Gates, *, zoneout_h: float = 0.05, zoneout_c: float = 0.5
) -> tuple[Expr, Expr]:
    """LSTM some of whose units, drawn at each step, keep their old state in training.

    C = f c + i g,  H = o tanh(C)              what an LSTM would do
    c' = c with probability zoneout_c, else C
    h' = h with probability zoneout_h, else H

    In evaluation the mean of both: c' = zoneout_c c + (1 - zoneout_c) C, and h' likewise. The
    default rates are the paper's for characters of text; Tacotron 2 takes 0.1 for both.

    Source: Krueger et al., *Zoneout: Regularizing RNNs by Randomly Preserving Hidden Activations*,
    2017.
    """
    i, f, g, o = x + r
    c = sigmoid(f) * s.c + sigmoid(i) * tanh(g)
    h = sigmoid(o) * tanh(c)
    new_h, new_c = keep(1.0 - zoneout_h), keep(1.0 - zoneout_c)
    return new_h * h + (1.0 - new_h) * s.h, new_c * c + (1.0 - new_c) * s.c
