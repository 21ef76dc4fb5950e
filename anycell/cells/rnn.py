"""Elman network."""

from anycell.lang.cell import Gates, cell
from anycell.lang.expr import Expr
from anycell.lang.ops import relu, tanh
from anycell.refusal import refuse

_ACTIVATIONS = {"tanh": tanh, "relu": relu}


@cell(gates="h", state="h")
def RNN(x: Gates, r: Gates, s: Gates, *, nonlinearity: str = "tanh") -> Expr:
    """Elman network, the cell of ``torch.nn.RNN`` and ``keras.layers.SimpleRNN``.

    h' = tanh(x + r), or relu(x + r) with ``nonlinearity="relu"``

    Source: Elman, *Finding Structure in Time*, 1990.
    """
    if nonlinearity not in _ACTIVATIONS:
        refuse("nonlinearity", repr(nonlinearity), f"one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[nonlinearity](x.h + r.h)
