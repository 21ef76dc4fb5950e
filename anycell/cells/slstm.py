"""sLSTM, the scalar memory of xLSTM."""

from anycell.lang.cell import Gates, cell, linear
from anycell.lang.expr import Expr
from anycell.lang.ops import exp, log_sigmoid, maximum, sigmoid, tanh
from anycell.refusal import refuse

_FORGET = ("sigmoid", "exp")


@cell(gates="i f z o", state="h c n m=-inf")
def sLSTM(
    x: Gates, r: Gates, s: Gates, *, heads: int = 1, forget: str = "sigmoid"
) -> tuple[Expr, Expr, Expr, Expr]:
    """LSTM with exponential gates, a normaliser n, and a stabiliser m against overflow.

    a = x + W_r h                              W_r block-diagonal, one block per head
    i = exp(a_i), f = sigmoid(a_f) or exp(a_f), z = tanh(a_z), o = sigmoid(a_o)
    m' = max(log f + m, a_i)
    c' = f exp(m - m') c + i exp(-m') z
    n' = f exp(m - m') n + i exp(-m')
    h' = o c' / n'

    h depends on m only by rounding. m starts from -inf, so that m' = a_i in the first step.

    Args:
        heads: blocks of W_r, a divisor of the hidden size; the paper's models have 4.
        forget: "sigmoid" or "exp"; the paper leaves it open, its published code has "sigmoid".

    Source: Beck et al., *xLSTM: Extended Long Short-Term Memory*, 2024, equations 8 to 17.
    """
    if forget not in _FORGET:
        refuse("forget", repr(forget), f"one of {', '.join(_FORGET)}")
    i, f, z, o = x + linear(s.h, "r", gates="i f z o", heads=heads)
    stay = (log_sigmoid(f) if forget == "sigmoid" else f) + s.m
    m = maximum(stay, i)
    enter, stay = exp(i - m), exp(stay - m)
    c = stay * s.c + enter * tanh(z)
    n = stay * s.n + enter
    return sigmoid(o) * (c / n), c, n, m
