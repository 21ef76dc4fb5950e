"""Long short-term memory."""

from anycell.lang.cell import Gates, cell
from anycell.lang.expr import Expr
from anycell.lang.ops import sigmoid, tanh


@cell(gates="i f g o", state="h c")
def LSTM(x: Gates, r: Gates, s: Gates) -> tuple[Expr, Expr]:
    """Long short-term memory, the cell of ``torch.nn.LSTM`` and ``keras.layers.LSTM``.

    i, f, o = sigmoid(x + r), g = tanh(x + r)
    c' = f c + i g
    h' = o tanh(c')

    Source: Hochreiter & Schmidhuber, *Long Short-Term Memory*, 1997; forget gate of Gers,
    Schmidhuber & Cummins, *Learning to Forget*, 2000.
    """
    i, f, g, o = x + r
    c = sigmoid(f) * s.c + sigmoid(i) * tanh(g)
    h = sigmoid(o) * tanh(c)
    return h, c
