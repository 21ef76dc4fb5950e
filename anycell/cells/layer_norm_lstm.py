"""LSTM with layer normalisation."""

from anycell.lang.cell import Gates, cell
from anycell.lang.expr import Expr
from anycell.lang.ops import layer_norm, sigmoid, tanh


@cell(
    gates="i f g o",
    state="h c",
    params="x_i=1 x_f=1 x_g=1 x_o=1 r_i=1 r_f=1 r_g=1 r_o=1 "
    "b_i=0 b_f=0 b_g=0 b_o=0 c_gain=1 c_shift=0",
    bias=False,
)
def LayerNormLSTM(
    x: Gates, r: Gates, s: Gates, p: Gates, *, eps: float = 1e-5
) -> tuple[Expr, Expr]:
    """LSTM with layer normalisation of both projections, per gate, and of the cell state.

    a_k = gain_xk LN(x_k) + gain_rk LN(r_k) + b_k        for each gate k; the bias follows the norm
    c' = sigmoid(a_f) c + sigmoid(a_i) tanh(a_g)
    h' = sigmoid(a_o) tanh(gain_c LN(c') + shift_c)

    Source: Ba, Kiros & Hinton, *Layer Normalization*, 2016, equations 20 to 22, with one norm per
    gate.
    """
    i = p.x_i * layer_norm(x.i, eps) + p.r_i * layer_norm(r.i, eps) + p.b_i
    f = p.x_f * layer_norm(x.f, eps) + p.r_f * layer_norm(r.f, eps) + p.b_f
    g = p.x_g * layer_norm(x.g, eps) + p.r_g * layer_norm(r.g, eps) + p.b_g
    o = p.x_o * layer_norm(x.o, eps) + p.r_o * layer_norm(r.o, eps) + p.b_o
    c = sigmoid(f) * s.c + sigmoid(i) * tanh(g)
    h = sigmoid(o) * tanh(p.c_gain * layer_norm(c, eps) + p.c_shift)
    return h, c
