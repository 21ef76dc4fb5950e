"""Entity-aware LSTM."""

from anycell.lang.cell import Gates, cell
from anycell.lang.expr import Expr
from anycell.lang.ops import sigmoid, tanh


@cell(gates="f g o", state="h c", static="e")
def EALSTM(x: Gates, r: Gates, s: Gates, e: Expr) -> tuple[Expr, Expr]:
    """LSTM whose input gate knows the entity, such as a river's catchment, and not the weather.

    i = sigmoid(e)                             e: ``static``, [B, H], once per sequence
    f, o = sigmoid(x + r), g = tanh(x + r)
    c' = f c + i g
    h' = o tanh(c')

    With the paper's static attributes, ``static = attributes @ W_i.T + b_i``: a linear layer of
    yours, through which gradients pass.

    Source: Kratzert et al., *Towards learning universal, regional, and local hydrological behaviors
    via machine learning applied to large-sample datasets*, 2019.
    """
    f, g, o = x + r
    c = sigmoid(f) * s.c + sigmoid(e) * tanh(g)
    return sigmoid(o) * tanh(c), c
