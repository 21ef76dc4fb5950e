"""Independently recurrent network."""

from anycell.lang.cell import Gates, cell
from anycell.lang.expr import Expr
from anycell.lang.ops import relu, tanh
from anycell.refusal import refuse

_ACTIVATIONS = {"relu": relu, "tanh": tanh}


@cell(gates="h", state="h", params="u=1")
def IndRNN(x: Gates, r: Gates, s: Gates, p: Gates, *, nonlinearity: str = "relu") -> Expr:
    """Network whose units each see only their own past: there is no recurrent matmul.

    h' = relu(x + u h), or tanh(x + u h) with ``nonlinearity="tanh"``

    The weights u, one per unit, start at 1, which remembers everything. For sequences of T steps
    the paper keeps them within ± 2 ** (1 / T), and draws them from [0, 1] if a net should forget at
    many rates; do both to the parameter yourself.

    Source: Li et al., *Independently Recurrent Neural Network (IndRNN): Building A Longer and
    Deeper RNN*, 2018.
    """
    if nonlinearity not in _ACTIVATIONS:
        refuse("nonlinearity", repr(nonlinearity), f"one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[nonlinearity](x.h + p.u * s.h)
