"""``recurrence`` of Keras on TensorFlow: what users pass, checked, as one run of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from anycell.keras.call import Tensor, flags
from anycell.keras.primitive import recurrence as public
from anycell.keras.tensorflow.framework import TensorFlow
from anycell.keras.tensorflow.fused import recur
from anycell.lang.cell import Cell
from anycell.layer.checks import refuse
from anycell.layer.layers import Stack
from anycell.layer.primitive import check_call
from anycell.layer.signature import OF_STATES
from anycell.plan import Layer


def recurrence(
    cell: Cell, x: Any, weights: Any, state: Any = None, params: Any = None, **arguments: Any
) -> tuple[Any, ...]:
    """``anycell.keras.recurrence`` on TensorFlow."""
    call = check_call(
        TensorFlow, public, cell, x, weights, state, params, arguments, convert=_tensors,
        unpack=_with_features,
    )  # fmt: skip
    series, (steps, rows, _) = call.x, call.x.shape.as_list()
    mask, lengths = arguments.get("mask"), arguments.get("lengths")
    if lengths is not None and (None in (steps, rows) or not _visible(lengths)):
        within = TensorFlow.within(tf.shape(series)[0], tf.convert_to_tensor(lengths))
        mask = within if mask is None else within & flags("mask", mask)
        arguments |= {"lengths": None, "mask": mask}
    if call.layer.options.training and cell.keeps:
        call.learned["seed"] = _seed(call.seed)
    return call.results(Stack(TensorFlow, _run, call.layer, [call.learned]), arguments)


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


def _seed(seed: int | None) -> Tensor:
    """The seed of random masks as two words; see ``lowered``. Each run draws one if None is given.

    The kernel draws the same masks for a number as in every other frontend.
    """
    if seed is None:
        return tf.random.uniform([2], maxval=2**31 - 1, dtype=tf.int64)
    return tf.constant([seed % 2**31, seed >> 31], tf.int64)
