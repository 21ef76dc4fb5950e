"""``recurrence`` of Keras on TensorFlow: what users pass, checked, as one run of a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from anycell.keras.call import OF_STATES, Tensor, flags
from anycell.keras.framework import TensorFlow
from anycell.keras.tensorflow import recur
from anycell.lang.cell import Cell
from anycell.layer.checks import check_cell, choice, refuse
from anycell.layer.layers import Layout
from anycell.layer.primitive import (
    arguments,
    check_input,
    input_of,
    learned_by_name,
    options_and_seed,
)
from anycell.layer.sequences import besides_output, by_name, check_return_states
from anycell.plan import Layer

# The arguments that are tensors, or dictionaries and sequences of them.
_OF_TENSORS = "x gates weights params state reset_state static recurrent_mask".split()


def recur_over(
    function: Callable[..., Any], cell: Cell, given: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[Any, ...]:
    """``anycell.keras.recurrence`` on TensorFlow.

    Args:
        function: that one, which errors name.
        given: its arguments by name, but for the options.
    """
    check_cell(cell)
    given = {**given, **{name: _tensors(given[name]) for name in _OF_TENSORS}}
    weights, params = given["weights"], {} if given["params"] is None else given["params"]
    named = learned_by_name(TensorFlow, cell, cell.learned, weights=weights, params=params)
    name, series = input_of(given["x"], given["gates"], named)
    if isinstance(series, tf.Tensor) and (series.shape.rank is None or series.shape[-1] is None):
        expected = "[time, batch, features], of which the features are known in a graph"
        refuse(name, f"shape {series.shape}", expected, f"Set them with {name}.set_shape.")
    check_input(TensorFlow, cell, name, series, "weight_ih" not in named)
    like = named.get("weight_hh", [*named.values(), series][0])
    steps, rows, _ = series.shape.as_list()
    others = [given[name] for name in ("state", "reset_state", "static", "recurrent_mask")]
    arrays, sizes = arguments(TensorFlow, cell, series, named, rows, like, *others)
    TensorFlow.check_array(name, series, series.shape, "as the weights", like)
    engine, mask, lengths, resets = (given[n] for n in ("engine", "mask", "lengths", "resets"))
    choice("engine", engine, None, "cpu", "reference")
    how, seed = options_and_seed(options, function)
    wanted = check_return_states(cell, given["return_states"])
    if lengths is not None and (None in (steps, rows) or not _visible(lengths)):
        lengths = tf.convert_to_tensor(lengths)
        within = TensorFlow.within(tf.shape(series)[0], lengths)
        lengths, mask = None, within if mask is None else within & flags("mask", mask)
    layout = Layout(TensorFlow, series, steps, rows)
    arrays |= {"x": series, **named, "mask": layout.valid(mask, lengths)}
    arrays["resets"] = None if resets is None else layout.flags("resets", resets)
    if how.training and cell.keeps:
        arrays["seed"] = _seed(seed)
    arrays = {n: a[0] if n.startswith(OF_STATES) else a for n, a in arrays.items() if a is not None}
    for declared in cell.states:
        shape = tf.shape(series)[1], sizes[declared.size]
        if f"state {declared.name}" not in arrays:
            value = tf.constant(declared.initial, series.dtype)
            arrays[f"state {declared.name}"] = tf.fill(shape, value)
    sequences = besides_output(wanted, cell)
    layer = Layer(cell, tuple(sizes.items()), how, sequences=sequences, engine=engine)
    output, values = recur(layer, arrays)
    final, further = values[: len(cell.states)], values[len(cell.states) :]
    return (output, final, by_name(wanted, cell, output, further)) if wanted else (output, final)


def _tensors(values: Any) -> Any:
    """Variables and NumPy's arrays in a structure as tensors."""

    def tensor(leaf: Any) -> Any:
        readable = isinstance(leaf, (tf.Variable, np.ndarray)) and not isinstance(leaf, tf.Tensor)
        return tf.convert_to_tensor(leaf) if readable else leaf

    return tf.nest.map_structure(tensor, values)


def _visible(values: Any) -> bool:
    """Whether the values can be read now, outside of a graph."""
    return not tf.is_tensor(values) or hasattr(values, "numpy")


def _seed(given: int | None) -> Tensor:
    """The seed of random masks as two words; see ``lowered``. Each run draws one if None is given.

    The kernel draws the same masks for a number as in every other frontend.
    """
    if given is None:
        return tf.random.uniform([2], maxval=2**31 - 1, dtype=tf.int64)
    return tf.constant([given % 2**31, given >> 31], tf.int64)
