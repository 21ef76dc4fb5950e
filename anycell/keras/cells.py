"""The cells behind Keras's own layers: their gates in the order of Keras's weights.

A layer's activations select the cell, so that any of ``ACTIVATIONS`` runs fused.
"""

from __future__ import annotations

from collections.abc import Callable

from anycell.lang.cell import Gates, cell, linear
from anycell.lang.expr import Expr
from anycell.lang.ops import (
    abs,
    clip,
    exp,
    hard_sigmoid,
    log_sigmoid,
    minimum,
    relu,
    sigmoid,
    softplus,
    tanh,
    where,
)

_SELU = (1.0507009873554805, 1.6732632423543772)  # scale and alpha, Klambauer et al., 2017


def _elu(v: Expr, above: Expr, alpha: float = 1.0) -> Expr:
    # The branch not taken is differentiated too: it must not overflow.
    return where(above, v, alpha * (exp(minimum(v, 0.0)) - 1.0))


# Keras's activations in the cell language, by the name of Keras's function. At points without a
# derivative Keras's backends differ; these do the same as TensorFlow.
ACTIVATIONS: dict[str, Callable[[Expr], Expr]] = {
    "elu": lambda v: _elu(v, v > 0.0),
    "exponential": exp,
    "hard_sigmoid": hard_sigmoid,
    "hard_silu": lambda v: v * hard_sigmoid(v),
    "hard_tanh": lambda v: clip(v, -1.0, 1.0),
    "leaky_relu": lambda v: where(v > 0.0, v, 0.2 * v),
    "linear": lambda v: v,
    "log_sigmoid": log_sigmoid,
    "mish": lambda v: v * tanh(softplus(v)),
    "relu": relu,
    "relu6": lambda v: where(v >= 6.0, 6.0, relu(v)),  # the derivative is 0 at both bounds
    "selu": lambda v: _SELU[0] * _elu(v, v >= 0.0, _SELU[1]),
    "sigmoid": sigmoid,
    "silu": lambda v: v * sigmoid(v),
    "softplus": softplus,
    "softsign": lambda v: v / (1.0 + abs(v)),
    "tanh": tanh,
}


@cell(gates="i f c o", state="h c")
def LSTM(
    x: Gates, r: Gates, s: Gates, *, activation: str = "tanh", recurrent_activation: str = "sigmoid"
) -> tuple[Expr, Expr]:
    """Long short-term memory, with a choice of Keras's activations.

    i, f, o = recurrent_activation(x + r)
    c' = f c + i activation(x_c + r_c)
    h' = o activation(c')

    Source: as ``anycell.cells.LSTM``.
    """
    inner, gate = ACTIVATIONS[activation], ACTIVATIONS[recurrent_activation]
    i, f, g, o = x + r
    c = gate(f) * s.c + gate(i) * inner(g)
    return gate(o) * inner(c), c


@cell(gates="z r h", state="h")
def GRU(
    x: Gates,
    r: Gates,
    s: Gates,
    *,
    activation: str = "tanh",
    recurrent_activation: str = "sigmoid",
    reset_after: bool = True,
) -> Expr:
    """Gated recurrent unit, with a choice of Keras's activations.

    z, r = recurrent_activation(x + r)
    n = activation(x_h + r * r_h)                with ``reset_after``, one matmul
    n = activation(x_h + W_h (r * h))            without, two matmuls
    h' = z h + (1 - z) n

    Source: as ``anycell.cells.GRU``.
    """
    inner, gate = ACTIVATIONS[activation], ACTIVATIONS[recurrent_activation]
    z, reset = gate(x.z + r.z), gate(x.r + r.r)
    n = inner(x.h + (reset * r.h if reset_after else linear(reset * s.h, "h")))
    return z * s.h + (1.0 - z) * n


@cell(gates="h", state="h")
def SimpleRNN(x: Gates, r: Gates, s: Gates, *, activation: str = "tanh") -> Expr:
    """Elman network, with a choice of Keras's activations: h' = activation(x + r).

    Source: as ``anycell.cells.RNN``.
    """
    return ACTIVATIONS[activation](x.h + r.h)
