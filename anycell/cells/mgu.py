"""Minimal gated unit."""

from anycell.lang.cell import Gates, cell, linear
from anycell.lang.expr import Expr
from anycell.lang.ops import sigmoid, tanh


@cell(gates="f n", state="h")
def MGU(x: Gates, r: Gates, s: Gates, *, reset_after: bool = False) -> Expr:
    """GRU with a single gate that resets, forgets and lets in.

    f = sigmoid(x_f + r_f)
    n = tanh(x_n + W_hn (f h))                 the paper, two matmuls
    n = tanh(x_n + f (W_hn h + b_hn))          with ``reset_after``, one matmul, as a GRU of cuDNN
    h' = (1 - f) h + f n

    Source: Zhou, Wu, Zhang & Zhou, *Minimal Gated Unit for Recurrent Neural Networks*, 2016.
    """
    f = sigmoid(x.f + r.f)
    n = tanh(x.n + (f * r.n if reset_after else linear(f * s.h, "hn")))
    return (1.0 - f) * s.h + f * n
