"""LSTM with layer normalisation."""

from anycell.lang.cell import Gates, cell
from anycell.lang.expr import Expr
from anycell.lang.ops import layer_norm, mean, sigmoid, sqrt, tanh
from anycell.refusal import refuse

_FORMS = ("gate", "ba", "addons")


def _norms(form: str, values: Gates, eps: float) -> list[Expr]:
    """Normalises each gate by itself, or all of them as one vector, the result of their matmul."""
    if form == "gate":
        return [layer_norm(v, eps) for v in values]
    share = 1.0 / len(values)
    centre = sum((mean(v) for v in values), start=0.0) * share
    centred = [v - centre for v in values]
    scale = 1.0 / sqrt(sum((mean(v * v) for v in centred), start=0.0) * share + eps)
    return [v * scale for v in centred]


@cell(
    gates="i f g o",
    state="h c",
    params="x_i=1 x_f=1 x_g=1 x_o=1 r_i=0.1 r_f=0.1 r_g=0.1 r_o=0.1 "
    "b_i=0 b_f=1 b_g=0 b_o=0 c_gain=1 c_shift=0",
    bias=False,
)
def LayerNormLSTM(
    x: Gates, r: Gates, s: Gates, p: Gates, *, form: str = "gate", eps: float = 1e-5
) -> tuple[Expr, Expr]:
    """LSTM with layer normalisation of both projections and of the cell state.

    a_k = x_k LN(W_k input) + r_k LN(U_k h) + b_k        the bias of gate k follows both norms
    c' = sigmoid(a_f) c + sigmoid(a_i) tanh(a_g)
    h' = sigmoid(a_o) tanh(c_gain LN(c') + c_shift)

    The gains r_k start at 0.1 (Cooijmans et al., *Recurrent Batch Normalization*, 2017), and b_f at
    1. With gains of 1, as in other libraries, a norm undoes the effect of small weights, and long
    sequences are chaotic: rounding errors and gradients grow until they dominate.

    Args:
        form: "gate" normalises each gate by itself; "ba" normalises all gates as one vector of 4 H
            numbers, as in the paper and in Haste; "addons" does the same, and c' stays normalised,
            h' = o tanh(c'), as in TensorFlow Addons (with eps=1e-3).

    Source: Ba, Kiros & Hinton, *Layer Normalization*, 2016, equations 20 to 22.
    """
    if form not in _FORMS:
        refuse("form", repr(form), f"one of {', '.join(_FORMS)}")
    nx, nr = _norms(form, x, eps), _norms(form, r, eps)
    i = p.x_i * nx[0] + p.r_i * nr[0] + p.b_i
    f = p.x_f * nx[1] + p.r_f * nr[1] + p.b_f
    g = p.x_g * nx[2] + p.r_g * nr[2] + p.b_g
    o = p.x_o * nx[3] + p.r_o * nr[3] + p.b_o
    c = sigmoid(f) * s.c + sigmoid(i) * tanh(g)
    normed = p.c_gain * layer_norm(c, eps) + p.c_shift
    return sigmoid(o) * tanh(normed), normed if form == "addons" else c
