"""JANET: just another network."""

from anycell.lang import Expr, Gates, cell, sigmoid, tanh


@cell(gates="f g", state="h")
def JANET(x: Gates, r: Gates, s: Gates, *, beta: float = 1.0) -> Expr:
    """LSTM with nothing but its forget gate.

    h' = sigmoid(a_f) h + (1 - sigmoid(a_f - beta)) tanh(a_g)        with a = x + r

    Args:
        beta: how much more is let in than is forgotten.

    Source: van der Westhuizen & Lasenby, *The Unreasonable Effectiveness of the Forget Gate*, 2018.
    """
    f, g = x + r
    return sigmoid(f) * s.h + (1.0 - sigmoid(f - beta)) * tanh(g)
