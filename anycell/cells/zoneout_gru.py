"""GRU with zoneout."""

from anycell.lang.cell import Gates, cell, keep
from anycell.lang.expr import Expr
from anycell.lang.ops import sigmoid, tanh


@cell(gates="r z n", state="h")
def ZoneoutGRU(x: Gates, r: Gates, s: Gates, *, zoneout: float = 0.1) -> Expr:
    """GRU some of whose units, drawn at each step, keep their old state in training.

    r, z = sigmoid(x + r),  n = tanh(x_n + r * (W_hn h + b_hn))
    h' = h with probability zoneout, else (1 - z) n + z h; in evaluation the mean of both

    Source: Krueger et al., *Zoneout: Regularizing RNNs by Randomly Preserving Hidden Activations*,
    2017.
    """
    reset, z = sigmoid(x.r + r.r), sigmoid(x.z + r.z)
    n = tanh(x.n + reset * r.n)
    new = keep(1.0 - zoneout)
    return new * ((1.0 - z) * n + z * s.h) + (1.0 - new) * s.h
