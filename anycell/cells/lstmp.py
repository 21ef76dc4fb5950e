"""LSTM with a projected output."""

from anycell.lang.cell import Gates, cell, linear
from anycell.lang.expr import Expr
from anycell.lang.ops import clip, sigmoid, tanh


@cell(gates="i f g o", state="h:P c")
def LSTMP(
    x: Gates, r: Gates, s: Gates, *, cell_clip: float | None = None, proj_clip: float | None = None
) -> tuple[Expr, Expr]:
    """LSTM whose output is projected to P numbers: ``torch.nn.LSTM`` with ``proj_size=P``.

    i, f, o = sigmoid(x + r), g = tanh(x + r)
    c' = f c + i g
    h' = W_hr (o tanh(c'))                     h of size P, all else of size H

    Args:
        cell_clip, proj_clip: c' and h' are clipped to between minus and plus this bound, as in
            TensorFlow's v1 ``LSTMCell``.

    Source: Sak, Senior & Beaufays, *Long Short-Term Memory Recurrent Neural Network Architectures
    for Large Scale Acoustic Modeling*, 2014.
    """
    i, f, g, o = x + r
    c = sigmoid(f) * s.c + sigmoid(i) * tanh(g)
    if cell_clip is not None:
        c = clip(c, -cell_clip, cell_clip)
    h = linear(sigmoid(o) * tanh(c), "hr")
    if proj_clip is not None:
        h = clip(h, -proj_clip, proj_clip)
    return h, c
