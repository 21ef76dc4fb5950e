"""One step of a user's cell as a graph of TensorFlow: traced once, and run on other numbers.

Its operations run one by one, as they are: on a single step in float64, which proves a reading, or
on all steps at once, where steps and rows are one axis.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context  # eager mode within graphs has no public name
from tensorflow.python.framework import ops as graphs
from tensorflow.python.framework.func_graph import func_graph_from_py_func

from anycell.keras.call import Tensor
from anycell.read import Arrays, Body, Equation, Refused, Values, Variable, mapped, places

ROWS = 3  # of the batch, where a number of rows is needed to read a step
places.skip(keras, tf)
# Operations with effects or with graphs inside, by how their names begin, and what errors say.
_EFFECTS = {
    "Assign": ("changes a variable in a step", "keep the number as a state of the cell"),
    "PyFunc EagerPyFunc": ("calls Python in each step", "write it in operations of the framework"),
    "Print": ("prints in each step", "print the layer's outputs"),
    "While": ("has a loop within a step", "write the turns of the loop one after the other"),
    "If Case": ("branches on data", "where(condition, a, b)"),
    "PartitionedCall": ("calls a tf.function", "call the undecorated function"),
    "Random": ("draws random numbers in a step", "draw them for all steps, and pass them as x"),
    "Multinomial": ("draws random numbers in a step", "draw them for all steps, as part of x"),
}
_RESHAPES = "ellipsis", "new_axis", "shrink_axis"  # what slices do besides, by their masks
SHAPES = "Shape", "ZerosLike", "OnesLike"  # operations that read no numbers
_EXACT = "swish", "swish_impl", "silu"  # of TensorFlow, whose custom gradient is the derivative


class Traced(Body):
    """The graph of a step, as equations.

    Args:
        step: from x, a list of states, and further tensors, to the output and the new states.
        x, states, others: shape and dtype of each argument; the batch is None.

    Attributes:
        others: the further tensors.
        shapes, dtypes: of each tensor; None stands for the batch.
        rowed: the tensors of kind F that depend on the number of rows.
        outer: variables and tensors of the user's, by those of the body.

    Raises:
        Refused: if the step cannot be traced, or has effects.
    """

    def __init__(
        self, step: Callable[..., Any], x: Any, states: Sequence[Any], others: Sequence[Any]
    ) -> None:
        with tf.init_scope():
            specs = [tf.TensorSpec(s.shape, s.dtype) for s in (x, *states, *others)]
            try:
                graph = func_graph_from_py_func("step", _flat(step, len(states)), specs, {})
            except Refused:
                raise
            except Exception as error:
                # Keras puts the message in bold, between lines of its own.
                text = str(error).split("\x1b[1m")[-1].split("\x1b[0m")[0].strip()
                problem = text.splitlines()[0] if text else type(error).__name__
                raise Refused(
                    f"tracing the step fails: {problem}", where=places.raised(error)
                ) from error
        super().__init__([], [], [], [], [], [])
        self.shapes: dict[Variable, tuple[int | None, ...]] = {}
        self.dtypes: dict[Variable, Any] = {}
        self._known: dict[str, Variable] = {}  # by the names of tensors
        for op in graph.get_operations():
            self._add(op)
        find = lambda tensor: self._known[tensor.name]  # noqa: E731
        inputs, end = list(map(find, graph.inputs[: len(specs)])), 1 + len(states)
        self.x, self.states, self.others = inputs[:1], inputs[1:end], inputs[end:]
        results = list(map(find, graph.outputs))
        self.outputs, self.after = results[:1], results[1:]
        for k, v in enumerate(self.after):
            if v is self.states[k]:  # the state of the cell is there, though it stays as it is
                self.after[k] = self._variable(graph.outputs[1 + k])
                self.equations.append(
                    Equation("Snapshot", (v,), {}, [self.after[k]], "", "", lambda value: value)
                )
        variables = {id(v.handle): v for v in graph.variables}
        self.outer: dict[Variable, Any] = {
            find(inner): variables.get(id(outer), outer) for outer, inner in graph.captures
        }
        self.fixed = [*self.others, *self.outer]
        self.sort()
        self.rowed = set(self.others)
        for equation in self.equations:
            whole = None in equation.options.get("sizes", ())
            if whole or any(v in self.rowed for v in equation.operands):
                self.rowed |= {v for v in equation.results if v.kind == "F"}

    def _variable(self, tensor: Any) -> Variable:
        sizes = () if tensor.shape.rank is None else tuple(tensor.shape.as_list())
        unknown = [axis for axis, size in enumerate(sizes) if size is None]
        shape = tuple(ROWS if size is None else size for size in sizes)
        v = Variable(shape, tensor.dtype.name, axis=unknown[0] if unknown else None)
        self.shapes[v], self.dtypes[v] = sizes, tensor.dtype
        return v

    def _add(self, op: Any) -> None:
        if op.type == "Identity":
            self._known[op.outputs[0].name] = self._known[op.inputs[0].name]
            return
        results = [self._variable(tensor) for tensor in op.outputs]
        self._known |= zip([tensor.name for tensor in op.outputs], results, strict=True)
        if op.type == "Const":
            (v,) = results
            v.constant = tf.get_static_value(op.outputs[0])
            if np.size(v.constant) == 1 and v.floating:
                v.number = float(np.reshape(v.constant, ()))
        if op.type in ("Const", "Placeholder", "NoOp"):
            return
        frames = reversed(list(op.traceback))
        where = places.place((frame.filename, frame.lineno) for frame in frames)
        kind = op.type.removeprefix("Stateless")
        for starts, (problem, instead) in _EFFECTS.items():
            effect = op.op_def.is_stateful or starts in ("While", "If Case", "PartitionedCall")
            if kind.removeprefix("Stateful").startswith((*starts.split(),)) and effect:
                raise Refused(f"this {problem}", instead, where)
        if op.op_def.is_stateful and op.type not in ("ReadVariableOp", "ResourceGather"):
            raise Refused(f"{op.type} has effects beyond its result", where=where)
        if "_gradient_op_type" in op.node_def.attr and not _exact(op.traceback):
            raise Refused(
                "this has a derivative of its own (tf.custom_gradient, or a gradient that is "
                "overridden), which a reading would lose",
                where=where,
            )
        inputs = [self._known[tensor.name] for tensor in op.inputs]
        arguments, options, source = _described(op, inputs, where)
        if op.type in SHAPES:
            arguments, options = (), {"sizes": self.shapes[inputs[0]]}
        self.equations.append(
            Equation(op.type, arguments, options, results, where, op.type, source)
        )


def _flat(step: Callable[..., Any], count: int) -> Callable[..., list[Tensor]]:
    """The step as a function of tensors, to a list of tensors."""

    def flat(x: Tensor, *rest: Tensor) -> list[Tensor]:
        output, after = step(x, list(rest[:count]), list(rest[count:]))
        return [tf.convert_to_tensor(result) for result in (output, *after)]

    return flat


def _described(
    op: Any, inputs: Sequence[Variable], where: str
) -> tuple[tuple[Any, ...], dict[str, Any], Callable[..., Any]]:
    """The arguments and options of an operation, and the function that computes it."""
    if op.type == "ReadVariableOp":
        return (inputs[0],), {}, lambda value: value
    function = getattr(tf.raw_ops, op.type, None)
    if function is None:
        raise Refused(f"{op.type} is no operation of tf.raw_ops", where=where)
    known = inspect.signature(function).parameters
    names, arguments, left = [], list[Any](), iter(inputs)
    for argument in op.op_def.input_arg:
        # The functions call axes so, which operations call reduction_indices, dim or split_dim.
        names.append(argument.name if argument.name in known else "axis")
        count = op.get_attr(argument.number_attr) if argument.number_attr else None
        if argument.type_list_attr:
            count = len(op.get_attr(argument.type_list_attr))
        arguments.append(next(left) if count is None else [next(left) for _ in range(count)])
    options = {}
    for attribute in op.op_def.attr:
        name = "axis" if attribute.name == "squeeze_dims" else attribute.name
        if name in known and name not in names:
            value = op.get_attr(attribute.name)
            options[name] = value.decode() if isinstance(value, bytes) else value
    if op.type == "ResourceGather":  # rows of a variable
        batch = options["batch_dims"]
        return tuple(arguments), {}, lambda table, rows: tf.gather(table, rows, batch_dims=batch)

    def source(*values: Any, **more: Any) -> Any:
        return function(**dict(zip(names, values, strict=True)), **more)

    return tuple(arguments), options, source


class World(Values):
    """Values of the tensors of a traced step, for some rows.

    Args:
        rows: their number; an int, or a tensor.
        dtype: what all reals are computed in; None keeps the dtypes of the graph.
        known: values by name, to begin with.
        once: the world of the tensors that do not depend on the rows, if it is another.
        variable: reads a variable or tensor of the user's.
    """

    def __init__(
        self, traced: Traced, rows: Any, known: Mapping[Variable, Tensor], dtype: Any = None,
        once: World | None = None, variable: Callable[[Variable], Tensor] | None = None,
    ) -> None:  # fmt: skip
        self.traced, self.rows, self.dtype, self.once = traced, rows, dtype, once
        super().__init__(known, self._execute, self._elsewhere)
        self.variable = variable or (lambda v: _read(traced.outer[v]))

    def lifted(self, tensor: Tensor) -> Tensor:
        real = self.dtype is not None and tensor.dtype.is_floating
        return tf.cast(tensor, self.dtype) if real else tensor

    def _elsewhere(self, v: Variable) -> Tensor | None:
        if self.once is not None and v.kind == "F" and v not in self.traced.rowed:
            return self.once[v]
        if v in self.traced.outer:
            return self.lifted(self.variable(v))
        if v.constant is None:
            return None
        return self.lifted(tf.constant(v.constant, self.traced.dtypes[v]))

    def _execute(self, equation: Equation, values: Values) -> Sequence[Tensor]:
        if equation.op in SHAPES:
            return [self._of_shape(equation)]
        if equation.op == "StridedSlice" and (piece := self._slice(equation)) is not None:
            return [piece]
        options = equation.options
        if self.dtype is not None:
            options = {
                name: self.dtype if isinstance(o, tf.DType) and o.is_floating else o
                for name, o in options.items()
            }
        made = equation.source(*mapped(values.__getitem__, equation.arguments), **options)
        return list(made) if isinstance(made, (list, tuple)) else [made]

    def _slice(self, equation: Equation) -> Tensor | None:
        """A slice of a weight, by ``part``; None for any other."""
        (source, *bounds), options = equation.arguments, equation.options
        known = source.kind == "F" and all(bound.constant is not None for bound in bounds)
        if not known or any(options[f"{name}_mask"] for name in _RESHAPES):
            return None
        array = self[source]
        for axis, (first, end, step) in enumerate(zip(*(b.constant for b in bounds), strict=True)):
            first, end = (
                None if options[f"{name}_mask"] >> axis & 1 else int(bound)
                for name, bound in (("begin", first), ("end", end))
            )
            places = range(array.shape.as_list()[axis] or 0)[first:end]
            if step != 1 or not places:
                return None
            array = part(array, axis, places[0], len(places))
        return array

    def _of_shape(self, equation: Equation) -> Tensor:
        """A value that only depends on the shape of another, which need not be computed."""
        dtype = self.traced.dtypes[equation.results[0]]
        sizes = [self.rows if n is None else n for n in equation.options["sizes"]]
        if equation.op == "Shape":
            return tf.stack([tf.cast(size, dtype) for size in sizes])
        fill = tf.zeros if equation.op == "ZerosLike" else tf.ones
        return self.lifted(fill(sizes, dtype))


def _read(variable: Any) -> Tensor:
    return variable.read_value() if isinstance(variable, tf.Variable) else variable


def part(array: Tensor, axis: int, start: int, size: int) -> Tensor:
    """Neighbouring places of an axis of a weight.

    In a graph the parts of a weight come from the same splits. Their gradient is one concatenation;
    that of a slice is as large as the weight, for each slice.
    """
    whole = array.shape.as_list()[axis]  # an int; TensorFlow 1's shapes have another type of number
    if whole in (None, size) or getattr(array, "graph", None) is not graphs.get_default_graph():
        return Arrays.take(array, axis, start, size)
    for split in array.consumers():
        if split.type == "SplitV" and tf.get_static_value(split.inputs[2]) == axis:
            first = 0
            for piece in split.outputs:
                end = first + piece.shape.as_list()[axis]
                if first <= start and start + size <= end:
                    return part(piece, axis, start - first, size)
                first = end
    sizes = [n for n in (start, size, whole - start - size) if n]
    return tf.split(array, sizes, axis)[start > 0]


def eagerly() -> Any:
    """A context in which TensorFlow computes at once, whatever is being traced."""
    return context.eager_mode()


def _exact(frames: Iterable[Any]) -> bool:
    """Whether TensorFlow itself made an operation, in a function of known derivative."""
    names = [f.name for f in frames if os.path.basename(f.filename) == "nn_impl.py"]
    return any(name in _EXACT for name in names)
