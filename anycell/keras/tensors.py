"""``recurrence`` of Keras on TensorFlow: what users pass, checked, as one run of a layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from anycell.keras.call import OF_STATES, Tensor, flags
from anycell.keras.primitive import recurrence as public
from anycell.keras.tensorflow import recur
from anycell.lang.cell import Cell
from anycell.layer.checks import (
    Frontend,
    Shape,
    describe,
    dtype_of,
    refuse,
)
from anycell.layer.layers import Stack
from anycell.layer.primitive import check_call
from anycell.plan import Layer


def recurrence(
    cell: Cell, x: Any, weights: Any, state: Any = None, params: Any = None, **arguments: Any
) -> tuple[Any, ...]:
    """``anycell.keras.recurrence`` on TensorFlow."""
    call = check_call(
        TENSORFLOW, public, cell, x, weights, state, params, arguments, convert=_tensors,
        unpack=_with_features,
    )  # fmt: skip
    series, (steps, rows, _) = call.x, call.x.shape.as_list()
    mask, lengths = arguments.get("mask"), arguments.get("lengths")
    if lengths is not None and (None in (steps, rows) or not _visible(lengths)):
        within = _within(tf.shape(series)[0], tf.convert_to_tensor(lengths))
        mask = within if mask is None else within & flags("mask", mask)
        arguments |= {"lengths": None, "mask": mask}
    if call.layer.options.training and cell.keeps:
        call.learned["seed"] = _seed(call.seed)
    return call.results(Stack(TENSORFLOW, _run, call.layer, [call.learned]), arguments)


def _run(layer: Layer, arrays: Mapping[str, Tensor]) -> Any:
    """Runs a layer of one direction; see ``Stack``."""
    x, states = arrays["x"], layer.cell.states
    arrays = {n: a[0] if n.startswith(OF_STATES) else a for n, a in arrays.items()}
    for declared in states:
        if f"state {declared.name}" not in arrays:
            shape, value = (tf.shape(x)[1], layer.size(declared.size)), declared.initial
            arrays[f"state {declared.name}"] = tf.fill(shape, tf.constant(value, x.dtype))
    output, values = recur(layer, arrays)
    final = [(state,) for state in values[: len(states)]]  # the axis of one direction
    return output, final, values[len(states) :]


def _with_features(name: str, series: Any) -> tuple[Any, None]:
    """The input, padded; refuses one whose last axis is unknown."""
    if isinstance(series, tf.Tensor) and (series.shape.rank is None or series.shape[-1] is None):
        expected = "[time, batch, features], of which the features are known in a graph"
        refuse(name, f"shape {series.shape}", expected, f"Set them with {name}.set_shape.")
    return series, None


def _tensors(values: Any) -> Any:
    """Variables and NumPy's arrays in a structure as tensors."""

    def tensor(leaf: Any) -> Any:
        readable = isinstance(leaf, (tf.Variable, np.ndarray)) and not isinstance(leaf, tf.Tensor)
        return tf.convert_to_tensor(leaf) if readable else leaf

    return tf.nest.map_structure(tensor, values)


def _visible(values: Any) -> bool:
    """Whether the values can be read now, outside of a graph."""
    return not tf.is_tensor(values) or hasattr(values, "numpy")


def _fit(name: str, value: Any, shape: Sequence[int | None], axes: str, like: Tensor) -> Tensor:
    """Returns ``value``; refuses all but tensors of this shape, as far as it is known, and of
    ``like``'s dtype.
    """
    expected = f"{dtype_of(like)} {list(shape)}, {axes}"
    if not isinstance(value, tf.Tensor):
        hint = f"Pass tf.convert_to_tensor({name})."
        refuse(name, describe(value), f"a tensor, {expected}", hint, TypeError)
    if not value.shape.is_compatible_with(shape):
        refuse(name, describe(value), expected, "Reshape it, or broadcast it.")
    if value.dtype != like.dtype:
        hint = f"Convert it: tf.cast({name}, tf.{dtype_of(like)})."
        refuse(name, describe(value), expected, hint)
    return value


def _flags(name: str, value: Any, shape: Shape, axes: str, like: Tensor) -> Tensor:
    """Converts flags of this shape to bool; outside of graphs, their values must be 0 or 1."""
    given = tf.convert_to_tensor(value)
    if not given.shape.is_compatible_with(shape):
        turned = given.shape.rank == 2 and given.shape[::-1].is_compatible_with(shape)
        hint = f"Transpose it: tf.transpose({name})." if turned else "Pass one per step and row."
        refuse(name, describe(given), f"bool {list(shape)}, {axes}", hint)
    return flags(name, given)


def _counts(name: str, value: Any, expected: str) -> tuple[Any, bool]:
    try:
        counts = np.asarray(value)
    except (TypeError, ValueError):
        refuse(name, describe(value), expected, "Pass a list of int, or a tensor.", TypeError)
    if counts.size and counts.dtype.kind not in "iu":
        refuse(name, describe(counts), expected, "Cast them to tf.int32.", TypeError)
    return counts.astype(np.int64), True


def _within(steps: Any, lengths: Tensor) -> Tensor:
    """Marks the steps within lengths that only the graph knows, ``[T, B]``."""
    if not lengths.dtype.is_integer or not lengths.shape.is_compatible_with((None,)):
        expected = "integers [B], the number of steps of each row"
        refuse("lengths", describe(lengths), expected, "Pass one length per row of the input.")
    return tf.range(tf.cast(steps, lengths.dtype))[:, None] < lengths[None]


TENSORFLOW = Frontend(
    tf.Tensor,
    _fit,
    _flags,
    _counts,
    lambda flags: flags,
    lambda steps, counts, like: _within(tf.shape(like)[0], tf.constant(counts[0])),
    tf.experimental.numpy,
)


def _seed(given: int | None) -> Tensor:
    """The seed of random masks as two words; see ``lowered``. Each run draws one if None is given.

    The kernel draws the same masks for a number as in every other frontend.
    """
    if given is None:
        return tf.random.uniform([2], maxval=2**31 - 1, dtype=tf.int64)
    return tf.constant([given % 2**31, given >> 31], tf.int64)
