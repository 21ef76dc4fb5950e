"""The cells behind Keras's own layers: their gates in the order of Keras's weights.

A layer's activations select the cell, so that any of ``ACTIVATIONS`` runs fused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras import activations

from anycell.lang import ops
from anycell.lang.cell import Gates, cell, linear
from anycell.lang.expr import Expr


def _selu(v: Expr) -> Expr:
    scale, alpha = 1.0507009873554805, 1.6732632423543772  # Klambauer et al., 2017
    return scale * ops.where(v >= 0.0, v, ops.elu(v, alpha))


# Keras's activations in the cell language, by the name of Keras's function. At points without a
# derivative Keras's backends differ; these do the same as TensorFlow.
_SAME = "elu gelu hard_sigmoid log_sigmoid relu sigmoid silu softplus softsign tanh"
ACTIVATIONS: dict[str, Callable[[Expr], Expr]] = {n: getattr(ops, n) for n in _SAME.split()} | {
    "exponential": ops.exp,
    "hard_silu": lambda v: v * ops.hard_sigmoid(v),
    "hard_tanh": lambda v: ops.clip(v, -1.0, 1.0),
    "leaky_relu": lambda v: ops.leaky_relu(v, 0.2),
    "linear": lambda v: v,
    "mish": lambda v: v * ops.tanh(ops.softplus(v)),
    "relu6": lambda v: ops.where(v >= 6.0, 6.0, ops.relu(v)),  # the derivative is 0 at both bounds
    "selu": _selu,
}


def activation_name(function: Any) -> str | None:
    """Returns the name of a function of Keras that the cell language has, else None."""
    for name in ACTIVATIONS:
        if function is getattr(activations, name, None):
            return name
    return None


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
