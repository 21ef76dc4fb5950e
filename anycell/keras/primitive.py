"""``recurrence``: one direction of one layer of any cell, on tensors that the user owns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import keras

from anycell.keras.backends import Variable, as_written
from anycell.keras.call import Tensor
from anycell.keras.rule import FUSED
from anycell.lang.cell import Cell
from anycell.layer import primitive
from anycell.layer.checks import refuse
from anycell.plan import RecurrenceArguments, takes

if TYPE_CHECKING:
    from typing_extensions import Unpack


@as_written
@takes(RecurrenceArguments, about=primitive.__doc__)
def recurrence(
    cell: Cell,
    x: Tensor | None,
    weights: Mapping[str, Tensor | None],
    state: Tensor | Sequence[Tensor | None] | None = None,
    params: Mapping[str, Tensor | None] | None = None,
    **arguments: Unpack[RecurrenceArguments],
) -> tuple[Any, ...]:
    """Runs ``cell`` over a sequence: one direction of one layer, whose tensors are the user's.

    It takes tensors and variables of Keras's backend. On TensorFlow it works in eager mode and in
    graphs, and is differentiable, also twice, in every float tensor that it is given but a
    ``recurrent_mask``. On torch and JAX it is ``anycell.torch.recurrence`` and
    ``anycell.jax.recurrence``. The weights are laid out as there, not as Keras lays them out.

    Args:
        {cell x weights state params}
        engine: "cpu" (the fused kernel) or "reference" (step by step, in operations of the
            backend); None takes the kernel where it can be called.
        {arguments}

    Returns:
        {output final states}

    In TensorFlow, in training without a ``seed``, ``tf.random`` draws one for each run. An
    export, ``step_by_step`` and forward mode run step by step; a loop over the steps draws other
    random masks for a seed than the kernel.

    Raises:
        TypeError, ValueError: with the argument, what was given, what is expected, and what to do.

    Example:
        >>> import tensorflow as tf
        >>> import anycell
        >>> weights = {"weight_ih": tf.zeros((32, 3)), "weight_hh": tf.zeros((32, 8))}
        >>> output, (h, c) = recurrence(anycell.cells.LSTM, tf.zeros((5, 2, 3)), weights)
        >>> tuple(output.shape), tuple(c.shape)
        ((5, 2, 8), (2, 8))
    """
    name = keras.backend.backend()
    if name not in FUSED:
        expected, hint = " or ".join(FUSED), "Choose one by KERAS_BACKEND."
        refuse("recurrence", f"Keras's backend {name!r}", expected, hint, NotImplementedError)
    parts, arguments = keras.tree.map_structure(_value, ((x, weights, state, params), arguments))
    place = "keras.tensorflow.primitive" if name == "tensorflow" else name
    module = import_module(f"anycell.{place}")
    return module.recurrence(cell, *parts, **arguments)


def _value(leaf: Any) -> Any:
    """The tensor behind a variable of Keras; anything else as it is."""
    return leaf.value if isinstance(leaf, Variable) else leaf
