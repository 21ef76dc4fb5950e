"""Long short-term memory."""

from anycell.lang.cell import Gates, cell
from anycell.lang.expr import Expr
from anycell.lang.ops import clip, sigmoid, tanh


@cell(gates="i f g o", state="h c")
def LSTM(
    x: Gates,
    r: Gates,
    s: Gates,
    *,
    coupled: bool = False,
    forget_bias: float | None = None,
    cell_clip: float | None = None,
    gate_clip: float | None = None,
) -> tuple[Expr, Expr]:
    """Long short-term memory, the cell of ``torch.nn.LSTM`` and ``keras.layers.LSTM``.

    i, f, o = sigmoid(x + r), g = tanh(x + r)
    c' = f c + i g
    h' = o tanh(c')

    Args:
        coupled: i = 1 - f (Greff et al., *LSTM: A Search Space Odyssey*, 2017); gate i is unused.
        forget_bias: added to the forget gate's argument, as TensorFlow's v1 cells do.
        cell_clip: c' is clipped to [-cell_clip, cell_clip] before anything reads it (TensorFlow).
        gate_clip: clips the argument of each gate likewise, like the attribute ``clip`` of ONNX.

    Source: Hochreiter & Schmidhuber, *Long Short-Term Memory*, 1997; forget gate of Gers,
    Schmidhuber & Cummins, *Learning to Forget*, 2000.
    """
    i, f, g, o = x + r
    if forget_bias is not None:
        f = f + forget_bias
    if gate_clip is not None:
        i, f, g, o = (clip(a, -gate_clip, gate_clip) for a in (i, f, g, o))
    forget = sigmoid(f)
    c = forget * s.c + (1.0 - forget if coupled else sigmoid(i)) * tanh(g)
    if cell_clip is not None:
        c = clip(c, -cell_clip, cell_clip)
    h = sigmoid(o) * tanh(c)
    return h, c
