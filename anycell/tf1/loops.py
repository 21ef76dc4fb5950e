"""``dynamic_rnn`` and ``bidirectional_dynamic_rnn``, as TensorFlow 1 had them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from anycell.keras.call import Tensor
from anycell.tf1.modules import RNNCell


def dynamic_rnn(
    cell: RNNCell,
    inputs: Tensor,
    sequence_length: Tensor = None,
    initial_state: Any = None,
    dtype: Any = None,
    parallel_iterations: int | None = None,
    swap_memory: bool = False,
    time_major: bool = False,
    scope: Any = None,
) -> tuple[Tensor, Any]:
    """Runs a cell over sequences.

    Args:
        cell: one of this package.
        inputs: ``[B, T, width]``, or ``[T, B, width]`` if ``time_major``.
        sequence_length: integers ``[B]``: past it outputs are zero and the state is held.
        initial_state: as the cell has it; None is zero.
        dtype: that of the cell, or None.
        parallel_iterations, swap_memory, scope: change nothing; variables are the cell's.

    Returns:
        outputs, laid out as the inputs, and the final state.
    """
    given = inputs, dtype, time_major, sequence_length
    return _direction(cell, *given, initial_state, False)


def bidirectional_dynamic_rnn(
    cell_fw: RNNCell,
    cell_bw: RNNCell,
    inputs: Tensor,
    sequence_length: Tensor = None,
    initial_state_fw: Any = None,
    initial_state_bw: Any = None,
    dtype: Any = None,
    parallel_iterations: int | None = None,
    swap_memory: bool = False,
    time_major: bool = False,
    scope: Any = None,
) -> tuple[tuple[Tensor, Tensor], tuple[Any, Any]]:
    """Runs one cell forwards, and another backwards from each row's end.

    Returns:
        the pair of outputs, and the pair of final states; all else is as in ``dynamic_rnn``.
    """
    given = inputs, dtype, time_major, sequence_length
    forwards = _direction(cell_fw, *given, initial_state_fw, False)
    backwards = _direction(cell_bw, *given, initial_state_bw, True)
    return (forwards[0], backwards[0]), (forwards[1], backwards[1])


def _direction(
    cell: RNNCell,
    inputs: Tensor,
    dtype: Any,
    time_major: bool,
    sequence_length: Tensor,
    initial_state: Any,
    reverse: bool,
) -> tuple[Tensor, Any]:
    if not isinstance(cell, RNNCell):
        raise TypeError(
            f"cell: given {type(cell).__name__}; expected a cell of anycell.tf1: LSTMCell, "
            "LSTMBlockCell, GRUCell."
        )
    x = cell.read(inputs, "[T, B, width]" if time_major else "[B, T, width]", dtype)
    x = x if time_major else tf.transpose(x, (1, 0, 2))
    outputs, final = cell.run(x, initial_state, sequence_length, reverse)
    return (outputs if time_major else tf.transpose(outputs, (1, 0, 2))), final
