"""GRU-D, for series with gaps."""

from anycell.lang.cell import Gates, cell, linear
from anycell.lang.expr import Expr
from anycell.lang.ops import exp, relu, sigmoid, tanh


@cell(gates="r z n d", state="h")
def GRUD(x: Gates, r: Gates, s: Gates) -> Expr:
    """GRU whose state fades with the time since each variable was last observed.

    k = exp(-max(0, x_d)) h                    h, faded
    r, z = sigmoid(x + W_k k)
    n = tanh(x_n + W_kn (r k))
    h' = (1 - z) k + z n

    The layer's input is [v, m, t] side by side: the values, their mask, the time since the last
    observation of each. Fill the gaps of v beforehand, v = m v + (1 - m) (w last + (1 - w) mean)
    with w = exp(-max(0, a t + b)): this needs no state, and is a line in any framework. In the
    paper x_d sees only t, and the other gates see only v and m: hold other columns at zero.

    Source: Che et al., *Recurrent Neural Networks for Multivariate Time Series with Missing
    Values*, 2018.
    """
    faded = exp(-relu(x.d)) * s.h
    reset, z = linear(faded, "k", gates="r z") + x
    n = tanh(x.n + linear(sigmoid(reset) * faded, "kn"))
    z = sigmoid(z)
    return (1.0 - z) * faded + z * n
