"""One step of a user's cell as a graph of TensorFlow: traced once, and run on other numbers.

Its operations run one by one, as they are: on a single step in float64, which proves a reading, or
on all steps at once, where steps and rows are one axis.
"""

from __future__ import annotations

import inspect
import os
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.eager import context  # eager mode within graphs has no public name
from tensorflow.python.framework.func_graph import func_graph_from_py_func

from anycell.keras.call import Tensor
from anycell.read import Refused

ROWS = 3  # of the batch, where a number of rows is needed to read a step
# Whose frames are not the user's.
_PACKAGES = (
    os.path.dirname(keras.__file__), os.path.dirname(tf.__file__), sysconfig.get_path("stdlib"),
    str(Path(__file__).parent.parent),
)  # fmt: skip
_SITE = sysconfig.get_path("purelib")
# Operations with effects or with graphs inside, by how their names begin, and what errors say.
_EFFECTS = {
    "Assign": ("changes a variable in a step", "keep the number as a state of the cell"),
    "PyFunc": ("calls Python in each step", "write it in operations of the framework"),
    "EagerPyFunc": ("calls Python in each step", "write it in operations of the framework"),
    "Print": ("prints in each step", "print the layer's outputs"),
    "While": ("has a loop within a step", "write the turns of the loop one after the other"),
    "If": ("branches on data", "where(condition, a, b)"),
    "Case": ("branches on data", "where(condition, a, b)"),
    "PartitionedCall": ("calls a tf.function", "call the undecorated function"),
    "Random": ("draws random numbers in a step", "draw them for all steps, and pass them as x"),
    "Multinomial": ("draws random numbers in a step", "draw them for all steps, as part of x"),
}
SHAPES = "Shape", "ZerosLike", "OnesLike"  # operations that read no numbers
_EXACT = "swish", "swish_impl", "silu"  # of TensorFlow, whose custom gradient is the derivative


@dataclass(eq=False)
class Node:
    """An operation of a traced step.

    Attributes:
        inputs, outputs: names of tensors.
        where: the user's file and line.
        function: what computes it, from ``arguments``, which are names, with None or the length of
            a list for each, and from ``options``.
    """

    type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    where: str
    value: Any = None  # of a constant
    function: Callable[..., Any] | None = None
    arguments: tuple[tuple[str, int | None], ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


class Traced:
    """The graph of a step.

    Args:
        step: from x, a list of states, and further tensors, to the output and the new states.
        x, states, others: shape and dtype of each argument; the batch is None.

    Attributes:
        nodes: by the names of the tensors that they make, in the order of the step.
        shapes, dtypes: of each tensor; None stands for the batch.
        kinds: F, X or S of each tensor: what it depends on.
        rowed: the tensors of kind F that depend on the number of rows.
        outer: variables and tensors of the user's, by the names under which the graph reads them.

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
                raise Refused(f"{_line(error)}tracing the step fails: {problem}") from error
        self.x, *rest = (t.name for t in graph.inputs[: len(specs)])
        self.states, self.others = rest[: len(states)], rest[len(states) :]
        self.output, *self.after = (t.name for t in graph.outputs)
        self.outer: dict[str, Any] = {}
        variables = {id(v.handle): v for v in graph.variables}
        for outer, inner in graph.captures:
            self.outer[inner.name] = variables.get(id(outer), outer)
        self.nodes: dict[str, Node] = {}
        self.shapes: dict[str, tuple[int | None, ...]] = {}
        self.dtypes: dict[str, Any] = {}
        for op in graph.get_operations():
            for tensor in op.outputs:
                unknown = tensor.shape.rank is None
                self.shapes[tensor.name] = () if unknown else tuple(tensor.shape.as_list())
                self.dtypes[tensor.name] = tensor.dtype
            if op.type != "Placeholder":
                self._add(op)
        self._classify()
        self.output = self.source(self.output)
        self.after = [self.source(name) for name in self.after]

    def _add(self, op: Any) -> None:
        where = _place(op.traceback)
        kind = op.type.removeprefix("Stateless")
        for start, (problem, instead) in _EFFECTS.items():
            effect = op.op_def.is_stateful or start in ("While", "If", "Case", "PartitionedCall")
            if kind.removeprefix("Stateful").startswith(start) and effect:
                raise Refused(f"{where}: this {problem}. Instead: {instead}.")
        if op.op_def.is_stateful and op.type not in ("ReadVariableOp", "ResourceGather"):
            raise Refused(f"{where}: {op.type} has effects beyond its result.")
        if "_gradient_op_type" in op.node_def.attr and not _exact(op.traceback):
            raise Refused(
                f"{where}: this has a derivative of its own (tf.custom_gradient, or a gradient "
                "that is overridden), which a reading would lose."
            )
        inputs, outputs = (tuple(t.name for t in ends) for ends in (op.inputs, op.outputs))
        node = Node(op.type, inputs, outputs, where)
        if op.type == "Const":
            node.value = tf.get_static_value(op.outputs[0])
        elif op.type not in ("ReadVariableOp", "NoOp"):
            _describe(node, op)
        for tensor in node.outputs:
            self.nodes[tensor] = node

    def _classify(self) -> None:
        kinds = {self.x: "X", **dict.fromkeys(self.states, "S")}
        kinds |= dict.fromkeys([*self.others, *self.outer], "F")
        rowed = set(self.others)
        for name, node in self.nodes.items():
            inputs = {kinds[i] for i in node.inputs}
            shape = node.type in SHAPES
            kinds[name] = "F" if shape else "S" if "S" in inputs else "X" if "X" in inputs else "F"
            if (shape and inputs & {"S", "X"}) or any(i in rowed for i in node.inputs):
                rowed.add(name)
        self.kinds, self.rowed = kinds, rowed

    def source(self, name: str) -> str:
        """The tensor that this one is the same as."""
        while name in self.nodes and self.nodes[name].type == "Identity":
            name = self.nodes[name].inputs[0]
        return name


def _flat(step: Callable[..., Any], count: int) -> Callable[..., list[Tensor]]:
    """The step as a function of tensors, to a list of tensors."""

    def flat(x: Tensor, *rest: Tensor) -> list[Tensor]:
        output, after = step(x, list(rest[:count]), list(rest[count:]))
        return [tf.convert_to_tensor(result) for result in (output, *after)]

    return flat


def _describe(node: Node, op: Any) -> None:
    """Finds the function of ``tf.raw_ops`` for an operation, and its arguments."""
    node.function = getattr(tf.raw_ops, op.type, None)
    if node.function is None:
        raise Refused(f"{node.where}: {op.type} is no operation of tf.raw_ops.")
    known = inspect.signature(node.function).parameters
    arguments = []
    for argument in op.op_def.input_arg:
        # The functions call axes so, which operations call reduction_indices, dim or split_dim.
        name = argument.name if argument.name in known else "axis"
        count = op.get_attr(argument.number_attr) if argument.number_attr else None
        if argument.type_list_attr:
            count = len(op.get_attr(argument.type_list_attr))
        arguments.append((name, count))
    node.arguments = tuple(arguments)
    taken = {name for name, _ in arguments}
    for attribute in op.op_def.attr:
        name = "axis" if attribute.name == "squeeze_dims" else attribute.name
        if name in known and name not in taken:
            value = op.get_attr(attribute.name)
            node.options[name] = value.decode() if isinstance(value, bytes) else value


class World:
    """Values of the tensors of a traced step, for some rows.

    Args:
        rows: their number; an int, or a tensor.
        dtype: what all reals are computed in; None keeps the dtypes of the graph.
        known: values by name, to begin with.
        once: the world of the tensors that do not depend on the rows, if it is another.
        variable: reads a variable or tensor of the user's.
    """

    def __init__(
        self,
        traced: Traced,
        rows: Any,
        known: Mapping[str, Tensor],
        dtype: Any = None,
        once: World | None = None,
        variable: Callable[[str], Tensor] | None = None,
    ) -> None:
        self.traced, self.rows, self.dtype = traced, rows, dtype
        self.values, self.once = dict(known), once
        self.variable = variable or (lambda name: _read(traced.outer[name]))

    def value(self, name: str) -> Tensor:
        """The value of a tensor."""
        if name not in self.values:
            kind, once = self.traced.kinds[name], self.once
            if once is not None and kind == "F" and name not in self.traced.rowed:
                self.values[name] = once.value(name)
            elif name in self.traced.outer:
                self.values[name] = self.lifted(self.variable(name))
            else:
                self._run(self.traced.nodes[name])
        return self.values[name]

    def lifted(self, tensor: Tensor) -> Tensor:
        real = self.dtype is not None and tensor.dtype.is_floating
        return tf.cast(tensor, self.dtype) if real else tensor

    def _run(self, node: Node) -> None:
        if node.type == "Const":
            dtype = self.traced.dtypes[node.outputs[0]]
            made: Any = self.lifted(tf.constant(node.value, dtype))
        elif node.type == "ReadVariableOp":
            made = self.value(node.inputs[0])
        elif node.type == "ResourceGather":  # rows of a variable
            table, rows = map(self.value, node.inputs)
            made = tf.gather(table, rows, batch_dims=node.options["batch_dims"])
        elif node.type in SHAPES:
            made = self._of_shape(node)
        else:
            made = self._call(node)
        made = list(made) if isinstance(made, (list, tuple)) else [made]
        self.values.update(zip(node.outputs, made, strict=True))

    def _of_shape(self, node: Node) -> Tensor:
        """A value that only depends on the shape of another, which need not be computed."""
        dtype = self.traced.dtypes[node.outputs[0]]
        sizes = [self.rows if n is None else n for n in self.traced.shapes[node.inputs[0]]]
        if node.type == "Shape":
            return tf.stack([tf.cast(size, dtype) for size in sizes])
        fill = tf.zeros if node.type == "ZerosLike" else tf.ones
        return self.lifted(fill(sizes, dtype))

    def _call(self, node: Node) -> Any:
        values, arguments = iter(node.inputs), {}
        for name, count in node.arguments:
            if count is None:
                arguments[name] = self.value(next(values))
            else:
                arguments[name] = [self.value(next(values)) for _ in range(count)]
        options = node.options
        if self.dtype is not None:
            options = {
                name: self.dtype if isinstance(o, tf.DType) and o.is_floating else o
                for name, o in options.items()
            }
        assert node.function is not None
        return node.function(**arguments, **options)


def _read(variable: Any) -> Tensor:
    return variable.read_value() if isinstance(variable, tf.Variable) else variable


def eagerly() -> Any:
    """A context in which TensorFlow computes at once, whatever is being traced."""
    return context.eager_mode()


# -- whose line it is ------------------------------------------------------------------------------


def _place(frames: Iterable[Any]) -> str:
    """The user's file and line, from the frames of a traceback, the innermost last."""
    for frame in reversed(list(frames)):
        file = frame.filename
        if not file.startswith("<") and not _ours(file):
            return f"{os.path.basename(file)}:{frame.lineno}"
    return "the step"


def _ours(file: str) -> bool:
    package = next((p for p in _PACKAGES if file.startswith(p + os.sep)), None)
    of_stdlib = package == _PACKAGES[2] and file.startswith(_SITE)
    return package is not None and not of_stdlib


def _line(error: BaseException) -> str:
    frames = inspect.getinnerframes(error.__traceback__) if error.__traceback__ else []
    place = _place(frames)
    return "" if place == "the step" else f"{place}: "


def _exact(frames: Iterable[Any]) -> bool:
    """Whether TensorFlow itself made an operation, in a function of known derivative."""
    names = [f.name for f in frames if os.path.basename(f.filename) == "nn_impl.py"]
    return any(name in _EXACT for name in names)
