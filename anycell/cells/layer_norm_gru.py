"""GRU with layer normalisation."""

from anycell.lang.cell import Gates, cell
from anycell.lang.expr import Expr
from anycell.lang.ops import layer_norm, sigmoid, tanh


@cell(
    gates="r z n",
    state="h",
    params="x_r=1 x_z=1 x_n=1 r_r=1 r_z=1 r_n=1 b_r=0 b_z=0 b_n=0 b_hn=0",
    bias=False,
)
def LayerNormGRU(x: Gates, r: Gates, s: Gates, p: Gates, *, eps: float = 1e-5) -> Expr:
    """GRU with layer normalisation of both projections, per gate; the reset follows the matmul.

    r = sigmoid(x_r LN(W_r input) + r_r LN(U_r h) + b_r),  z likewise
    n = tanh(x_n LN(W_n input) + b_n + r (r_n LN(U_n h) + b_hn))
    h' = (1 - z) n + z h

    Source: Ba, Kiros & Hinton, *Layer Normalization*, 2016, appendix, with one norm per gate.
    """
    reset = sigmoid(p.x_r * layer_norm(x.r, eps) + p.r_r * layer_norm(r.r, eps) + p.b_r)
    z = sigmoid(p.x_z * layer_norm(x.z, eps) + p.r_z * layer_norm(r.z, eps) + p.b_z)
    recurrent = p.r_n * layer_norm(r.n, eps) + p.b_hn
    n = tanh(p.x_n * layer_norm(x.n, eps) + p.b_n + reset * recurrent)
    return (1.0 - z) * n + z * s.h
