"""Cells of TensorFlow 1 that users wrote, read as they are written in a graph of TensorFlow 1."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from anycell.keras.call import Tensor
from anycell.keras.tensorflow.fused import gpu_visible, refusal
from anycell.keras.tensorflow.read import read_step
from anycell.keras.tensorflow.steps import Step
from anycell.read import Refused


def read(cell: Any, x: Tensor, state: Any) -> Step | str:
    """The step of a cell over ``x`` ``[T, B, width]``, or why it is not read."""
    if tf.compat.v1.executing_eagerly_outside_functions():
        return "cells of your own are read in graphs of TensorFlow 1"
    why = refusal(gpu_visible())
    if why is not None:
        return why
    cell(x[0], state)  # makes the variables, which a trace must not make

    def step(x: Tensor, states: list[Tensor], others: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        with tf.variable_creator_scope(_refuse):
            output, new = cell(x, tf.nest.pack_sequence_as(state, states))
        return output, tf.nest.flatten(new)

    step.__name__ = type(cell).__name__
    specs = [((None, *t.shape[1:]), t.dtype) for t in (x[0], *tf.nest.flatten(state))]
    try:
        return read_step(step, specs[0], specs[1:], [])
    except Refused as why:
        return str(why).rstrip(".")


def _refuse(*_: Any, **__: Any) -> Any:
    raise Refused("a call of the cell makes a variable")


def run(
    step: Step, x: Tensor, state: Any, mask: Tensor | None, reverse: bool
) -> tuple[Tensor, Any]:
    """Runs a step that was read; outputs are zero past the lengths, and the state is held."""
    outputs, final = step.run(x, tf.nest.flatten(state), [], mask=mask, reverse=reverse)
    assert outputs is not None
    if mask is not None:
        outputs = tf.where(mask[..., None], outputs, tf.zeros((), outputs.dtype))
    return outputs, tf.nest.pack_sequence_as(state, final)
