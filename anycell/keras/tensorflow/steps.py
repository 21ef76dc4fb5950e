"""Steps that were read in TensorFlow's graphs: their arrays, and their runs over a sequence."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from anycell import read
from anycell.engines import cpu
from anycell.keras.call import TURNED, Tensor
from anycell.keras.reading import MOST, LoopCall, LoopOptions, last_output, masked, over_time
from anycell.keras.rule import OURS
from anycell.keras.tensorflow.framework import sizes_of
from anycell.keras.tensorflow.fused import engine_of, recur, watched
from anycell.keras.tensorflow.graph import Traced, World, part
from anycell.plan import Engine, Layer, Options
from anycell.read import Reading, Variable
from anycell.recent import add_recent


class Arrays(read.Arrays):
    """Functions of a reading on tensors, whose sizes a graph may not know yet. What would change
    nothing adds no operation to the graph.
    """

    cat, cast, zeros = map(staticmethod, (tf.concat, tf.cast, tf.zeros))
    constant, transpose = map(staticmethod, (tf.constant, tf.transpose))

    @staticmethod
    def broadcast(array: Tensor, shape: Sequence[Any]) -> Tensor:
        """Repeats axes of one unit; axes whose size the graph does not know are whole."""
        if array.shape.rank == len(shape) and all(
            n != 1 or (isinstance(size, int) and size == 1)
            for n, size in zip(array.shape.as_list(), shape, strict=True)
        ):
            return array
        return tf.broadcast_to(array, shape)

    @staticmethod
    def reshape(array: Tensor, shape: Sequence[Any]) -> Tensor:
        if array.shape.rank == len(shape) and all(
            size is None or (isinstance(size, int) and size in (n, -1))
            for n, size in zip(array.shape.as_list(), shape, strict=True)
        ):
            return array
        units = array.shape[1:]
        if len(shape) == 2 and shape[1] == -1 and units.is_fully_defined():
            shape = [-1, units.num_elements()]  # of [rows, ...], so that the graph knows the size
        unknown = [axis for axis, size in enumerate(shape) if size is None]
        if len(unknown) == 1:
            shape = [-1 if size is None else size for size in shape]
        elif unknown:  # of leading axes, which stay
            sizes = tf.shape(array)
            shape = [sizes[axis] if size is None else size for axis, size in enumerate(shape)]
        return tf.reshape(array, shape)

    @classmethod
    def block(cls, matrix: Tensor, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        for axis, (first, end) in enumerate((rows, columns)):
            matrix = part(matrix, axis, first, end - first)
        return cls.move(matrix, 0, 1)

    @staticmethod
    def gather(array: Tensor, at: np.ndarray) -> Tensor:
        return tf.gather(array, at, axis=-1)


class Run:
    """A call of a step that was read: values outside of the loop, as readings ask for them."""

    def __init__(
        self, traced: Traced, x: Tensor, others: Mapping[Variable, Tensor], more: Any
    ) -> None:
        self.steps, self.rows = sizes_of(x, 2)
        self.dtype, self.memo = x.dtype, dict[Any, Any]()
        self._traced, self._x = traced, x
        self._once = World(traced, self.rows, others, **more)
        every = tf.reshape(x, [self.steps * self.rows, *x.shape[2:]])
        tiled = {v: tf.tile(t, [self.steps, *[1] * (t.shape.rank - 1)]) for v, t in others.items()}
        known = {traced.x[0]: every, **tiled}
        self._every = World(traced, self.steps * self.rows, known, once=self._once, **more)

    def fixed(self, name: Variable) -> Tensor:
        """A value of kind F."""
        return self._once[name]

    def moving(self, name: Variable) -> Tensor:
        """A value of kind X, ``[steps, ...]``."""
        if name is self._traced.x[0]:
            return self._x
        shape = self._traced.shapes[name]
        axis = shape.index(None)
        split = [*shape[:axis], self.steps, self.rows, *shape[axis + 1 :]]
        return Arrays.move(tf.reshape(self._every[name], split), axis, 0)

    def after(self, name: Variable, known: Mapping[Variable, Tensor]) -> Tensor:
        """A value of any kind at every step, ``[steps, rows, ...]``, from values of states."""
        lead = [self.steps * self.rows]
        rows = {n: tf.reshape(t, [*lead, *t.shape[2:]]) for n, t in known.items()}
        self._every.update(rows)
        value = self._every[name]
        return tf.reshape(value, [self.steps, self.rows, *value.shape[1:]])


@dataclass(eq=False)
class Step:
    """A step that was read.

    Attributes:
        of_state: the number of the state that the output is, or None.
        functions: its loops as graphs, for calls in eager mode; None after the first of a sort.
    """

    traced: Traced
    reading: Reading
    of_state: int | None = None
    functions: dict[Any, Any] = field(default_factory=dict)

    @property
    def engine(self) -> Engine:
        """The engine that runs the cell that was read, and why."""
        dtype = self.traced.dtypes[self.traced.states[0]].name
        name, reason = engine_of(self.reading.layer._replace(dtype=dtype))
        return Engine(name, f"read as it is written; {reason}" if name in OURS else reason)

    def run(
        self, x: Tensor, states: Sequence[Tensor], others: Sequence[Tensor], *,
        mask: Tensor | None = None, reverse: bool = False, sequences: bool = True,
        engine: str | None = None, sure: bool = False, **more: Any,
    ) -> tuple[Tensor | None, list[Tensor]]:  # fmt: skip
        """Runs all steps.

        Args:
            x: ``[T, B, ...]``.
            states: before the first step.
            others: further tensors of the step.
            mask: bool ``[T, B]``, False where the states are held.
            reverse: whether to run from the last step to the first.
            sequences: whether the output is wanted even if it is a state.
            sure: see ``recur``.
            more: arguments of ``World``.

        Returns:
            the output of all steps, and the final states. At masked steps it is the held state, or
            anything if it is no state; None if it is a state and not wanted.
        """
        traced, reading = self.traced, self.reading
        run = Run(traced, x, dict(zip(traced.others, others, strict=True)), more)
        arrays = reading.arrays_of(run, states)
        if mask is not None:
            arrays["mask"] = mask & arrays["mask"] if "mask" in arrays else mask
        wanted = [self.of_state] * sequences if self.of_state is not None else traced.seen()
        first, *_ = every = reading.cell.state_names

        def one_way(layer: Layer, arrays: Mapping[str, Tensor]) -> Any:
            named: dict[str, Tensor] = {}
            for name, array in arrays.items():  # what was turned need not be copied
                kernel = kernel_of(array) if name.startswith("weight_") else None
                named |= {name: array} if kernel is None else {TURNED + name: kernel}
            output, ends = recur(layer, named, sure)
            return output, ends[: len(every)], ends[len(every) :]

        ends, values = reading.ran(
            one_way, arrays, wanted, Options((reverse,)), engine=engine,
            outputs=any(first in reading.names_of(k) for k in wanted),
        )  # fmt: skip
        final, known = traced.unpacked(reading, states, ends, values, wanted, reverse)
        if self.of_state is not None:
            return known.get(traced.outputs[0]), final
        return run.after(traced.outputs[0], known), final


def kernel_of(weight: Tensor) -> Tensor | None:
    """In a graph, the tensor whose last two axes were swapped to make a weight; None if there is
    none.
    """
    if tf.executing_eagerly():
        return None
    operation, rank = weight.op, weight.shape.rank
    if operation.type == "Transpose":
        order = tf.get_static_value(operation.inputs[1])
        swap = [*range(rank - 2), rank - 1, rank - 2]
        return operation.inputs[0] if order is not None and [*order] == swap else None
    if operation.type == "ConcatV2":
        *parts, axis = operation.inputs
        kernels = [kernel_of(part) for part in parts]
        if tf.get_static_value(axis) == rank - 2 and all(part is not None for part in kernels):
            return tf.concat(kernels, rank - 1)
    return None


def loop(step: Step, call: LoopCall) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Runs a step that was read, see ``reading.loop``.

    In eager mode calls after the first of a sort are one call of a graph: the operations around
    the kernel are many, and small.
    """
    sequences = tf.convert_to_tensor(call.sequences)  # it may be a variable
    flat = [sequences, *call.states, *call.masks, *([] if call.mask is None else [call.mask])]
    counts, options = (len(call.states), len(call.masks)), call.options
    if not tf.executing_eagerly() or tf.config.functions_run_eagerly():
        return _loop(step, options, counts, flat)
    outer = list(step.traced.outer.values())
    taped = watched([*flat, *outer])
    sort = options, counts, taped, cpu.threads.current()
    if taped is None or sort not in step.functions:
        add_recent(step.functions, sort, None, MOST)
        return _loop(step, options, counts, flat)
    if step.functions[sort] is None:
        body = functools.partial(_alone, step, options, counts, taped)
        step.functions[sort] = tf.function(body, autograph=False, reduce_retracing=True), {}
    function, known = step.functions[sort]
    shapes = tuple([tensor.shape for tensor in flat])
    if shapes not in known:  # a function looks longer for the graph that fits its arguments
        add_recent(known, shapes, function.get_concrete_function(*flat), MOST)
    last, outputs, final = known[shapes](*flat)
    return last, outputs, list(final)


def _alone(
    step: Step, options: LoopOptions, counts: tuple[int, int], taped: Sequence[bool], *flat: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The loop in a graph of its own, of which no other gradients are wanted than the ``taped``."""
    if not any(taped):
        return _loop(step, options, counts, flat)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        inputs = zip([*flat, *step.traced.outer.values()], taped, strict=True)
        tape.watch([tensor for tensor, wanted in inputs if wanted])
        return _loop(step, options, counts, flat, sure=True)


def _loop(
    step: Step, options: LoopOptions, counts: tuple[int, int], flat: Sequence[Tensor],
    sure: bool = False,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """The loop over a sequence, so many states, so many further tensors and perhaps a mask."""
    sequences, *rest = flat
    ends = counts[0], sum(counts)
    states, others, masks = rest[: ends[0]], rest[ends[0] : ends[1]], rest[ends[1] :]

    def run(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        outputs, final = step.run(
            x, states, others, mask=mask, reverse=options.reverse, sequences=options.every,
            sure=sure,
        )  # fmt: skip
        end = 0 if options.reverse else -1
        if step.of_state is None:
            assert outputs is not None
            outputs = outputs if mask is None else masked(outputs, mask, options, False)
            return outputs[end], outputs, final
        last = final[step.of_state]
        if mask is not None:
            last = last_output(last, mask, options)
            outputs = None if outputs is None else masked(outputs, mask, options, True)
        return last, outputs, final

    return over_time(run, sequences, next(iter(masks), None), options)
