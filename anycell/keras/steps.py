"""Steps that were read in TensorFlow's graphs: their arrays, and their runs over a sequence."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf
from keras import ops

from anycell import read
from anycell.keras.call import Tensor
from anycell.keras.graph import Traced, World
from anycell.keras.reading import LoopOptions
from anycell.keras.rule import planned
from anycell.keras.tensors import recurrence
from anycell.plan import Engine
from anycell.plan.call import HELD
from anycell.read import Reading, Variable


class Arrays(read.Arrays):
    """Functions of a reading on tensors, whose sizes a graph may not know yet."""

    cat = staticmethod(tf.concat)
    cast = staticmethod(tf.cast)
    zeros = staticmethod(tf.zeros)
    transpose = staticmethod(tf.transpose)
    broadcast = staticmethod(tf.broadcast_to)

    @staticmethod
    def constant(array: np.ndarray, dtype: Any) -> Tensor:
        return tf.constant(array, dtype)

    @staticmethod
    def reshape(array: Tensor, shape: Sequence[Any]) -> Tensor:
        units = array.shape[1:]
        if len(shape) == 2 and shape[1] == -1 and units.is_fully_defined():
            shape = [-1, units.num_elements()]  # of [rows, ...], so that the graph knows the size
        unknown = [axis for axis, size in enumerate(shape) if size is None]
        if len(unknown) == 1:
            shape = [-1 if size is None else size for size in shape]
        elif unknown:  # of leading axes, which stay
            given = tf.shape(array)
            shape = [given[axis] if size is None else size for axis, size in enumerate(shape)]
        return tf.reshape(array, shape)

    @staticmethod
    def gather(array: Tensor, at: np.ndarray) -> Tensor:
        return tf.gather(array, at, axis=-1)


class Run:
    """A call of a step that was read: values outside of the loop, as readings ask for them."""

    def __init__(
        self, traced: Traced, x: Tensor, others: Mapping[Variable, Tensor], more: Any
    ) -> None:
        sizes = tf.shape(x)
        self.steps, self.rows = (
            sizes[k] if n is None else n for k, n in enumerate(x.shape.as_list()[:2])
        )
        self.dtype, self.memo = x.dtype, dict[Any, Any]()
        self._traced = traced
        self._once = World(traced, self.rows, others, **more)
        every = tf.reshape(x, [self.steps * self.rows, *x.shape[2:]])
        self._tiled = {name: self._tile(tensor) for name, tensor in others.items()}
        self._every = World(
            traced, self.steps * self.rows, {traced.x: every, **self._tiled}, once=self._once,
            **more,
        )  # fmt: skip

    def _tile(self, tensor: Tensor) -> Tensor:
        return tf.tile(tensor, [self.steps, *[1] * (tensor.shape.rank - 1)])

    def fixed(self, name: Variable) -> Tensor:
        """A value of kind F."""
        return self._once.value(name)

    def moving(self, name: Variable) -> Tensor:
        """A value of kind X, ``[steps, ...]``."""
        shape = self._traced.shapes[name]
        axis = shape.index(None)
        split = [*shape[:axis], self.steps, self.rows, *shape[axis + 1 :]]
        return Arrays.move(tf.reshape(self._every.value(name), split), axis, 0)

    def after(self, name: Variable, known: Mapping[Variable, Tensor]) -> Tensor:
        """A value of any kind at every step, ``[steps, rows, ...]``, from values of states."""
        lead = [self.steps * self.rows]
        rows = {n: tf.reshape(t, [*lead, *t.shape[2:]]) for n, t in known.items()}
        self._every.values.update(rows)
        value = self._every.value(name)
        return tf.reshape(value, [self.steps, self.rows, *value.shape[1:]])


@dataclass(eq=False)
class Step:
    """A step that was read.

    Attributes:
        of_state: the number of the state that the output is, or None.
        reads: the states, before and after a step, that the output follows from if it is none.
        graphs: what ``_call`` has made.
    """

    traced: Traced
    reading: Reading
    of_state: int | None = None
    reads: set[Variable] = field(default_factory=set)
    graphs: dict[str, Any] = field(default_factory=dict)

    @property
    def engine(self) -> Engine:
        """The engine that runs the cell that was read, and why."""
        reading, dtype = self.reading, self.traced.dtypes[self.traced.states[0]].name
        chosen = planned(reading.cell, reading.size, dtype, reading.sizes)
        if isinstance(chosen, str):
            return Engine("composite", chosen)
        return Engine("cpu", f"read as it is written; {chosen.reason}")

    def run(
        self,
        x: Tensor,
        states: Sequence[Tensor],
        others: Sequence[Tensor],
        *,
        mask: Tensor | None = None,
        reverse: bool = False,
        sequences: bool = True,
        engine: str | None = None,
        **more: Any,
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Runs all steps.

        Args:
            x: ``[T, B, ...]``.
            states: before the first step.
            others: further tensors of the step.
            mask: bool ``[T, B]``, False where the states are held.
            reverse: whether to run from the last step to the first.
            sequences: whether the output is wanted even if it is a state.
            more: arguments of ``World``.

        Returns:
            the output of all steps, and the final states. At masked steps it is the held state, or
            anything if it is no state; None if it is a state and not wanted.
        """
        traced, reading = self.traced, self.reading
        x_and_others = x, list(others)
        arguments = self._call("_arguments", more, *x_and_others, list(states))
        held = arguments.pop("mask", None)
        mask = held if mask is None else mask if held is None else mask & held
        before = {name: k for k, name in enumerate(traced.states)}
        after = {name: k for k, name in reversed(list(enumerate(traced.after)))}
        wanted = {after.get(name, before.get(name, 0)) for name in self.reads}
        if self.of_state is not None:
            wanted = {self.of_state} if sequences else set()
        names = [name for k in sorted(wanted) for name in reading.names_of(k)]
        _, final, *values = recurrence(
            reading.cell, mask=mask, **HELD, reverse=reverse, engine=engine,
            return_states=names, **arguments,
        )  # fmt: skip
        named = dict(zip(reading.cell.state_names, final, strict=True))
        ends = [reading.joined(k, named) for k in range(len(states))]
        every = {k: reading.joined(k, values[0]) for k in wanted}
        if self.of_state is not None:
            return every.get(self.of_state), ends
        known = {}
        for name in self.reads:
            if name in after:
                known[name] = every[after[name]]
            else:
                k = traced.states.index(name)
                first, sequence = tf.cast(states[k], x.dtype)[None], every[k]
                parts = [sequence[1:], first] if reverse else [first, sequence[:-1]]
                known[name] = tf.concat(parts, 0)
        return self._call("_outputs", more, *x_and_others, list(known.values())), ends

    def _call(self, name: str, more: dict[str, Any], *tensors: Any) -> Any:
        """Calls a method; in eager mode as a graph, whose many small operations are fast."""
        if more or not tf.executing_eagerly():
            return getattr(self, name)(*tensors, **more)
        if name not in self.graphs:
            method = functools.partial(getattr(self, name))
            self.graphs[name] = tf.function(method, autograph=False, reduce_retracing=True)
        return self.graphs[name](*tensors)

    def _run(self, x: Tensor, others: Sequence[Tensor], more: dict[str, Any]) -> Run:
        return Run(self.traced, x, dict(zip(self.traced.others, others, strict=True)), more)

    def _arguments(
        self, x: Tensor, others: Sequence[Tensor], states: Sequence[Tensor], **more: Any
    ) -> dict[str, Any]:
        """The arguments of ``recurrence``."""
        arguments = self.reading.call(self._run(x, others, more), states)
        return {name: a for name, a in arguments.items() if name not in HELD}

    def _outputs(
        self, x: Tensor, others: Sequence[Tensor], states: Sequence[Tensor], **more: Any
    ) -> Tensor:
        """Outputs that are no state, from the states at every step."""
        known = dict(zip(self.reads, states, strict=True))
        return self._run(x, others, more).after(self.traced.output, known)


def loop(
    step: Step,
    call: Any,
    structure: Any,
    sequences: Tensor,
    states: Sequence[Tensor],
    others: Sequence[Tensor],
    mask: Tensor | None,
    options: LoopOptions,
) -> tuple[Tensor, list[Tensor]]:
    """Runs a step that was read over ``[B, T, ...]``, like Keras's loop; returns outputs in the
    order of processing, or the last one, and final states.
    """
    x, reverse = ops.swapaxes(sequences, 0, 1), options.reverse
    mask = None if mask is None else ops.swapaxes(mask, 0, 1)
    outputs, final = step.run(
        x, states, others, mask=mask, reverse=reverse, sequences=options.every
    )
    if outputs is None:  # the output is a state, which is held under a mask
        assert step.of_state is not None
        last = final[step.of_state]
        if mask is not None:
            end = 0 if reverse else -1
            seen = mask[end] if options.zero else ops.any(mask, axis=0)
            last = ops.where(ops.expand_dims(seen, -1), last, ops.zeros_like(last))
        return ops.expand_dims(last, 1), final
    if reverse:
        outputs = ops.flip(outputs, axis=0)
        mask = None if mask is None else ops.flip(mask, axis=0)
    if mask is not None:
        outputs = _masked(outputs, mask, options.zero, step.of_state is not None)
    return ops.swapaxes(outputs if options.every else outputs[-1:], 0, 1), final


def _masked(outputs: Tensor, mask: Tensor, zero: bool, held: bool) -> Tensor:
    """Outputs ``[T, B, ...]`` like those of Keras's loop at masked steps: zero, or the output of
    the step before, and zero before a row's first step.

    Args:
        held: whether they are states, which are held already.
    """
    counts = ops.cumsum(ops.cast(mask, "int32"), axis=0)
    shown = mask if zero else counts > 0
    if not (zero or held):
        # The k-th of a row's steps that are not masked is the k-th in this order.
        time = ops.cumsum(ops.ones_like(counts), axis=0)
        order = ops.argsort(ops.where(mask, time, time + ops.shape(mask)[0]), axis=0)
        at = ops.take_along_axis(order, ops.maximum(counts - 1, 0), axis=0)
        lead = tuple(range(2, len(outputs.shape)))
        outputs = ops.take_along_axis(outputs, ops.expand_dims(at, lead), axis=0)
    shown = ops.reshape(shown, (*ops.shape(shown), *[1] * (len(outputs.shape) - 2)))
    return ops.where(shown, outputs, ops.zeros_like(outputs))
