"""LSTM with peepholes, and the options of TensorFlow's block LSTM and of ONNX."""

from anycell.lang.cell import Gates, cell
from anycell.lang.expr import Expr
from anycell.lang.ops import clip, sigmoid, tanh


@cell(gates="i f g o", state="h c", params="p_i p_f p_o")
def PeepholeLSTM(
    x: Gates,
    r: Gates,
    s: Gates,
    p: Gates,
    *,
    coupled: bool = False,
    forget_bias: float = 0.0,
    cell_clip: float | None = None,
    gate_clip: float | None = None,
) -> tuple[Expr, Expr]:
    """LSTM whose gates see the cell state: i and f the old one, o the new one.

    i = sigmoid(x_i + r_i + p_i c),  f = sigmoid(x_f + r_f + forget_bias + p_f c)
    c' = f c + i tanh(x_g + r_g)
    o = sigmoid(x_o + r_o + p_o c'),  h' = o tanh(c')

    Args:
        coupled: i = 1 - f (Greff et al., *LSTM: A Search Space Odyssey*, 2017); gate i is then
            unused.
        forget_bias: added to the forget gate's argument, as TensorFlow's v1 cells do.
        cell_clip: c' is clipped to [-cell_clip, cell_clip] before the output gate, as in
            TensorFlow.
        gate_clip: clips the argument of each gate likewise, like the attribute ``clip`` of ONNX.

    Source: Gers & Schmidhuber, *Recurrent Nets that Time and Count*, 2000.
    """

    def gate(a: Expr) -> Expr:
        return a if gate_clip is None else clip(a, -gate_clip, gate_clip)

    i, f, g, o = x + r
    forget = sigmoid(gate(f + forget_bias + p.p_f * s.c))
    enter = 1.0 - forget if coupled else sigmoid(gate(i + p.p_i * s.c))
    c = forget * s.c + enter * tanh(gate(g))
    if cell_clip is not None:
        c = clip(c, -cell_clip, cell_clip)
    h = sigmoid(gate(o + p.p_o * c)) * tanh(c)
    return h, c
