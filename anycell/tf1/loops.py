"""The loops of TensorFlow 1: over tensors and lists of steps, in one and in both directions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from anycell.keras.call import Tensor
from anycell.layer.checks import refuse
from anycell.tf1.base import Result, like_cell, read, run, v1


def dynamic_rnn(
    cell: Any, inputs: Tensor, sequence_length: Tensor = None, initial_state: Any = None,
    dtype: Any = None, parallel_iterations: int | None = None, swap_memory: bool = False,
    time_major: bool = False, scope: Any = None,
) -> Result:  # fmt: skip
    """Runs a cell over sequences.

    Args:
        cell: a cell of this package, or another of TensorFlow 1, which runs step by step.
        inputs: ``[B, T, width]``, or ``[T, B, width]`` if ``time_major``.
        sequence_length: integers ``[B]``: past it outputs are zero and the state is held.
        initial_state: in the cell's own form; None is zero.
        dtype: the dtype of inputs and states; None takes that of the cell, or of the inputs.
        parallel_iterations, swap_memory: change nothing.
        scope: the scope of variables; None is ``"rnn"``.

    Returns:
        outputs, laid out as the inputs, and the final state.
    """
    like_cell("cell", cell)
    with v1.variable_scope(scope or "rnn"):
        return _direction(cell, inputs, dtype, time_major, sequence_length, initial_state, False)


def bidirectional_dynamic_rnn(
    cell_fw: Any, cell_bw: Any, inputs: Tensor, sequence_length: Tensor = None,
    initial_state_fw: Any = None, initial_state_bw: Any = None, dtype: Any = None,
    parallel_iterations: int | None = None, swap_memory: bool = False, time_major: bool = False,
    scope: Any = None,
) -> tuple[tuple[Tensor, Tensor], tuple[Any, Any]]:  # fmt: skip
    """Runs one cell forwards, and another backwards from each row's end.

    Returns:
        the pair of outputs, and the pair of final states; all else is as in ``dynamic_rnn``, but
        for the scope, which is ``"bidirectional_rnn"``, and within it ``fw`` and ``bw``.
    """
    like_cell("cell_fw", cell_fw), like_cell("cell_bw", cell_bw)
    series = inputs, dtype, time_major, sequence_length
    with v1.variable_scope(scope or "bidirectional_rnn"):
        with v1.variable_scope("fw"):
            y_fw, state_fw = _direction(cell_fw, *series, initial_state_fw, False)
        with v1.variable_scope("bw"):
            y_bw, state_bw = _direction(cell_bw, *series, initial_state_bw, True)
    return (y_fw, y_bw), (state_fw, state_bw)


def stack_bidirectional_dynamic_rnn(
    cells_fw: list[Any], cells_bw: list[Any], inputs: Tensor,
    initial_states_fw: list[Any] | None = None, initial_states_bw: list[Any] | None = None,
    dtype: Any = None, sequence_length: Tensor = None, parallel_iterations: int | None = None,
    time_major: bool = False, scope: Any = None, swap_memory: bool = False,
) -> tuple[Tensor, tuple[Any, ...], tuple[Any, ...]]:  # fmt: skip
    """``tf.contrib.rnn.stack_bidirectional_dynamic_rnn``: each layer reads both directions of the
    previous layer.

    Args:
        cells_fw, cells_bw: lists of cells, one in each list per layer.
        initial_states_fw, initial_states_bw: lists of states, one per layer; None is zero.
        scope: the scope of variables; None is ``"stack_bidirectional_rnn"``, and within it a layer
            is ``cell_0/bidirectional_rnn``.

    Returns:
        outputs of the last layer, forwards and backwards side by side, and for each direction the
        tuple of the layers' final states; all else is as in ``dynamic_rnn``.
    """
    for name, cells in {"cells_fw": cells_fw, "cells_bw": cells_bw}.items():
        if not isinstance(cells, list) or not cells:
            refuse(name, _shown(cells), "a list of cells", "Pass one cell for each layer.")
    depth = len(cells_fw)
    if len(cells_bw) != depth:
        hint = "Pass one cell for each layer."
        refuse("cells_bw", _shown(cells_bw), f"{depth} cells, as in cells_fw", hint)
    begin = {"initial_states_fw": initial_states_fw, "initial_states_bw": initial_states_bw}
    for name, states in begin.items():
        if states is not None and not (isinstance(states, list) and len(states) == depth):
            hint = "Pass one state for each layer."
            refuse(name, _shown(states), f"a list of {depth} states", hint)
    states = [states or [None] * depth for states in begin.values()]
    layers = zip(cells_fw, cells_bw, *states, strict=True)
    final = []
    with v1.variable_scope(scope or "stack_bidirectional_rnn"):
        for k, (forwards, backwards, state_fw, state_bw) in enumerate(layers):
            with v1.variable_scope(f"cell_{k}"):
                outputs, pair = bidirectional_dynamic_rnn(
                    forwards, backwards, inputs, sequence_length, state_fw, state_bw, dtype,
                    time_major=time_major,
                )  # fmt: skip
            inputs = tf.concat(outputs, 2)
            final.append(pair)
    states_fw, states_bw = zip(*final, strict=True)
    return inputs, states_fw, states_bw


def static_rnn(
    cell: Any, inputs: Sequence[Tensor], initial_state: Any = None, dtype: Any = None,
    sequence_length: Tensor = None, scope: Any = None,
) -> tuple[list[Tensor], Any]:  # fmt: skip
    """Runs a cell over a list of steps, ``[B, width]`` each.

    Returns:
        the list of outputs, and the final state; all else is as in ``dynamic_rnn``.
    """
    outputs, final = dynamic_rnn(
        cell, _stacked(inputs), sequence_length, initial_state, dtype, time_major=True, scope=scope
    )
    return tf.unstack(outputs, len(inputs)), final


def static_bidirectional_rnn(
    cell_fw: Any, cell_bw: Any, inputs: Sequence[Tensor], initial_state_fw: Any = None,
    initial_state_bw: Any = None, dtype: Any = None, sequence_length: Tensor = None,
    scope: Any = None,
) -> tuple[list[Tensor], Any, Any]:  # fmt: skip
    """Runs two cells over a list of steps, ``[B, width]`` each, in both directions.

    Returns:
        the list of outputs, forwards and backwards side by side, and the two final states; all else
        is as in ``bidirectional_dynamic_rnn``.
    """
    outputs, (final_fw, final_bw) = bidirectional_dynamic_rnn(
        cell_fw, cell_bw, _stacked(inputs), sequence_length, initial_state_fw, initial_state_bw,
        dtype, time_major=True, scope=scope,
    )  # fmt: skip
    return tf.unstack(tf.concat(outputs, 2), len(inputs)), final_fw, final_bw


def _shown(value: Any) -> str:
    return f"a list of {len(value)}" if isinstance(value, list) else type(value).__name__


def _stacked(inputs: Sequence[Tensor]) -> Tensor:
    """Stacks a list of steps; arrays stay NumPy's, and later take the dtype of the cell."""
    if not isinstance(inputs, (list, tuple)):
        hint = "tf.unstack(inputs, axis=1) makes one; dynamic_rnn takes a tensor."
        refuse("inputs", type(inputs).__name__, "a list of steps, [B, width] each", hint, TypeError)
    if not inputs:
        refuse("inputs", "no steps", "a list of one or more", "Pass [B, width] for each.")
    stack = tf.stack if any(tf.is_tensor(tensor) for tensor in inputs) else np.stack
    return stack(inputs)


def _direction(
    cell: Any, x: Tensor, dtype: Any, time_major: bool, lengths: Tensor, state: Any, reverse: bool
) -> Result:
    x = read(cell, x, "[T, B, width]" if time_major else "[B, T, width]", dtype)
    outputs, final = run(cell, x if time_major else _swapped(x), state, lengths, reverse)
    if not time_major:  # the outputs of a foreign cell may be several
        outputs = tf.nest.map_structure(_swapped, outputs)
    return outputs, final


def _swapped(x: Tensor) -> Tensor:
    """Swaps the first two axes."""
    return tf.transpose(x, (1, 0, *range(2, x.shape.rank)))
