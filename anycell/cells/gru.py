"""Gated recurrent unit."""

from anycell.lang.cell import Gates, cell, linear
from anycell.lang.expr import Expr
from anycell.lang.ops import sigmoid, tanh


@cell(gates="r z n", state="h")
def GRU(x: Gates, r: Gates, s: Gates, *, reset_after: bool = True) -> Expr:
    """Gated recurrent unit, the cell of ``torch.nn.GRU`` and ``keras.layers.GRU``.

    r, z = sigmoid(x + r)
    n = tanh(x_n + r * (W_hn h + b_hn))      with ``reset_after``, one matmul (torch, Keras, cuDNN)
    n = tanh(x_n + W_hn (r * h))             without, two matmuls (the paper)
    h' = (1 - z) n + z h

    Source: Cho et al., *Learning Phrase Representations using RNN Encoder-Decoder*, 2014.
    """
    reset, z = sigmoid(x.r + r.r), sigmoid(x.z + r.z)
    n = tanh(x.n + (reset * r.n if reset_after else linear(reset * s.h, "hn")))
    return (1.0 - z) * n + z * s.h
