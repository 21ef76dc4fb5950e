"""Cells of Keras and TensorFlow read as they are written: the table of TensorFlow's operations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf
from keras import ops

from anycell.keras.call import Tensor
from anycell.keras.graph import ROWS, Node, Traced, World, eagerly
from anycell.keras.reading import LoopOptions
from anycell.keras.tensors import recurrence
from anycell.plan.call import HELD
from anycell.read import Graph, Outer, Reading, Refused, Value, read
from anycell.read.proof import STEPS, difference

ELEMENTWISE = {
    "Abs": "abs", "Add": "add", "AddV2": "add", "BiasAdd": "add", "Cos": "cos", "Div": "div",
    "Elu": "elu", "Equal": "eq", "Erf": "erf", "Exp": "exp", "Expm1": "expm1", "Greater": "gt",
    "GreaterEqual": "ge", "Identity": "identity", "Inv": "reciprocal", "LeakyRelu": "leaky_relu",
    "Less": "lt", "LessEqual": "le", "Log": "log", "Log1p": "log1p", "LogicalAnd": "logical_and",
    "LogicalNot": "logical_not", "LogicalOr": "logical_or", "Maximum": "maximum",
    "Minimum": "minimum", "Mul": "mul", "Neg": "neg", "NotEqual": "ne", "RealDiv": "div",
    "Reciprocal": "reciprocal", "Relu": "relu", "Rsqrt": "rsqrt", "Select": "where",
    "SelectV2": "where", "Sigmoid": "sigmoid", "Sign": "sign", "Sin": "sin",
    "Snapshot": "identity", "Softplus": "softplus", "Softsign": "softsign", "Sqrt": "sqrt",
    "Square": "square", "StopGradient": "stop_gradient", "Sub": "sub", "Tanh": "tanh",
}  # fmt: skip
CONDITIONS = frozenset("lt le gt ge eq ne logical_and logical_or logical_not".split())
# Run as they are, on arrays of ids.
STRUCTURAL = frozenset(
    "BroadcastTo ConcatV2 ExpandDims GatherV2 Pack Reshape ReverseV2 Roll Slice Split SplitV "
    "Squeeze StridedSlice Tile Transpose Unpack".split()
)
REDUCED = {"Sum": "sum", "Mean": "sum", "Max": "max", "Min": "max"}
AFFINE = frozenset("add sub neg mul div identity".split())
_PRODUCTS = "MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum"


class Arrays:
    """What a reading does with tensors, whose sizes a graph may not know yet."""

    cat = staticmethod(tf.concat)
    cast = staticmethod(tf.cast)
    zeros = staticmethod(tf.zeros)
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
    def move(array: Tensor, axis: int, to: int) -> Tensor:
        if axis == to:
            return array
        order = list(range(array.shape.rank))
        order.insert(to, order.pop(axis))
        return tf.transpose(array, order)

    @staticmethod
    def take(array: Tensor, axis: int, start: int, size: int) -> Tensor:
        return array[(slice(None),) * axis + (slice(start, start + size),)]

    @staticmethod
    def index(array: Tensor, at: np.ndarray) -> Tensor:
        if len(at) == array.shape[-1] and (at == np.arange(len(at))).all():
            return array
        if (np.diff(at) == 1).all():
            return array[..., int(at[0]) : int(at[-1]) + 1]
        return tf.gather(array, at, axis=-1)


class Run:
    """A call of a step that was read: values outside of the loop, as readings ask for them."""

    def __init__(self, traced: Traced, x: Tensor, others: Mapping[str, Tensor], more: Any) -> None:
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

    def fixed(self, name: str) -> Tensor:
        """A value of kind F."""
        return self._once.value(name)

    def moving(self, name: str) -> Tensor:
        """A value of kind X, ``[steps, ...]``."""
        shape = self._traced.shapes[name]
        axis = shape.index(None)
        split = [*shape[:axis], self.steps, self.rows, *shape[axis + 1 :]]
        return Arrays.move(tf.reshape(self._every.value(name), split), axis, 0)

    def after(self, name: str, known: Mapping[str, Tensor]) -> Tensor:
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
    reads: set[str] = field(default_factory=set)
    graphs: dict[str, Any] = field(default_factory=dict)

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
        return self._call("_outputs", more, *x_and_others, known), ends

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
        self, x: Tensor, others: Sequence[Tensor], known: Mapping[str, Tensor], **more: Any
    ) -> Tensor:
        """Outputs that are no state, from the states at every step."""
        return self._run(x, others, more).after(self.traced.output, known)


def read_step(
    call: Callable[..., Any], structure: Any, x: Any, states: Sequence[Any], others: Sequence[Any]
) -> Step | str:
    """Traces a step, reads it, and proves the reading; see ``keras.jax.read_step``.

    Raises:
        Refused: if it cannot be read, or does something else than the step.
    """
    if tf.distribute.has_strategy():
        return "cells are not read within a tf.distribute strategy"
    x, *rest = [tf.TensorSpec(*spec) for spec in (x, *states, *others)]
    traced = Traced(call, x, rest[: len(states)], rest[len(states) :])
    with tf.init_scope(), eagerly():
        step = _Reader(traced, call.__name__).step
        problem = _compared(step)
    if problem is not None:
        raise Refused(f"{problem}.")
    return step


class _Reader:
    def __init__(self, traced: Traced, name: str) -> None:
        self.traced, self.graph = traced, Graph(Arrays, ROWS)
        self.world = World(traced, ROWS, {})
        self.values: dict[str, Any] = {}
        for state in traced.states:
            if traced.shapes[state][:1] != (None,) or not traced.dtypes[state].is_floating:
                raise Refused(f"a state of {traced.dtypes[state].name} {traced.shapes[state]}.")
            self.values[state] = self.graph.state(self._shape(state), 0)
        for node in dict.fromkeys(traced.nodes.values()):
            self._add(node)
        self.graph.where = ""
        pairs = [
            (self.values[before], self._value(after))
            for before, after in zip(traced.states, traced.after, strict=True)
        ]
        for before, after in zip(traced.states, traced.after, strict=True):
            if traced.dtypes[before] != traced.dtypes[after]:
                kinds = f"{traced.dtypes[before].name} becomes {traced.dtypes[after].name}"
                raise Refused(f"a state of {kinds}. Instead: return states of one dtype.")
        self.step = Step(traced, read(self.graph, pairs, name))
        if traced.output in traced.after:
            self.step.of_state = traced.after.index(traced.output)
        else:
            if traced.shapes[traced.output][:1] != (None,):
                raise Refused("the output has no axis of the batch.")
            self.step.reads = self._reads(traced.output)

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(ROWS if size is None else size for size in self.traced.shapes[name])

    def _reads(self, output: str) -> set[str]:
        """The states, before or after the step, that the output is computed from."""
        traced, todo, found = self.traced, [output], set()
        ends, seen = {*traced.states, *traced.after}, set[str]()
        while todo:
            name = todo.pop()
            if name in ends and traced.kinds[name] == "S":
                found.add(name)
            elif name in traced.nodes and name not in seen:
                todo += traced.nodes[name].inputs
            seen.add(name)
        return found

    # -- values ----------------------------------------------------------------------------------
    def _value(self, name: str) -> Any:
        if name not in self.values:
            self.values[name] = self._outer(name)
        return self.values[name]

    def _outer(self, name: str, units: Value | None = None) -> Outer:
        """A value that TensorFlow computes outside of the loop."""
        traced, boolean = self.traced, self.traced.dtypes[name] == tf.bool
        shape, node = self._shape(name), traced.nodes.get(name)
        if traced.kinds[name] == "X":
            if None not in traced.shapes[name]:
                self.graph.refuse("this takes numbers of x from several rows of the batch")
            return Outer("X", shape, lambda run: run.moving(name), boolean, units=units)
        number = None
        if node is not None and node.type == "Const" and np.size(node.value) == 1:
            number = float(np.reshape(node.value, ()))
        per_row = None in traced.shapes[name]
        return Outer("F", shape, lambda run: run.fixed(name), boolean, per_row, number)

    def _static(self, name: str) -> np.ndarray:
        """Numbers that no weight and no input enters, such as axes and shapes."""
        if self.traced.kinds[name] != "F":
            self.graph.refuse("this takes positions or sizes from x or from a state")
        return np.asarray(self.world.value(name).numpy())

    def _add(self, node: Node) -> None:
        graph, kind = self.graph, self.traced.kinds[node.outputs[0]]
        graph.where = node.where
        if kind == "F" or node.type == "NoOp":
            return
        if kind == "S":
            made = self._apply(node, [self._operand(name) for name in node.inputs])
            self._keep(node, made)
            return
        try:
            made = self._affine(node)
        except Refused:
            made = None
        parts = made if isinstance(made, list) else [made] * len(node.outputs)
        for name, units in zip(node.outputs, parts, strict=True):
            if None in self.traced.shapes[name]:
                units = units if isinstance(units, Value) else None
                self.values[name] = self._outer(name, units)

    def _keep(self, node: Node, made: Any) -> None:
        parts = made if isinstance(made, list) else [made]
        for name, value in zip(node.outputs, parts, strict=True):
            self.values[name] = value

    def _operand(self, name: str) -> Any:
        """A value, or the name of a tensor of kind F, which may be an axis or a shape."""
        return name if self.traced.kinds[name] == "F" else self._value(name)

    def _affine(self, node: Node) -> Any:
        """The units of an X value that is affine in others."""
        op = ELEMENTWISE.get(node.type)
        if op not in AFFINE and node.type not in (*STRUCTURAL, *_PRODUCTS):
            return None
        operands = []
        for name in node.inputs:
            operand = self._operand(name)
            if isinstance(operand, Outer):
                operand = self.graph.base(operand, self.traced.shapes[name].index(None))
            operands.append(operand)
        return self._apply(node, operands)

    # -- operations ------------------------------------------------------------------------------
    def _apply(self, node: Node, operands: list[Any]) -> Any:
        graph, kind = self.graph, node.type

        def every() -> list[Any]:
            return [self._value(o) if isinstance(o, str) else o for o in operands]

        if kind in ELEMENTWISE:
            op, values = ELEMENTWISE[kind], every()
            if kind == "LeakyRelu":
                values.append(node.options["alpha"])
            return graph.elementwise(op, *values, boolean=op in CONDITIONS or _boolean(op, values))
        if kind in STRUCTURAL:
            return self._structural(node, operands)
        if kind in REDUCED:
            return self._reduce(node, *operands)
        if kind == "Cumsum":
            return self._cumsum(node, *operands)
        if kind == "Einsum":
            return self._einsum(node.options["equation"], *every())
        if kind in _PRODUCTS:
            return self._matmul(node, *every())
        special = getattr(self, f"_{kind.lower()}", None)
        if special is None:
            graph.refuse(f"this is {kind} of a value that depends on a state")
        return special(node, *every())

    def _structural(self, node: Node, operands: list[Any]) -> Any:
        graph, traced = self.graph, self.traced
        # Of the operands of kind F only those are moved whose dtype is that of the result.
        dtype = traced.dtypes[node.outputs[0]]
        data = [
            not isinstance(o, str) or (traced.dtypes[o] == dtype and dtype.is_floating)
            for o in operands
        ]
        moved = [self._value(o) if isinstance(o, str) else o
                 for o, is_data in zip(operands, data, strict=True) if is_data]  # fmt: skip
        fixed = [None if is_data else self._static(o)
                 for o, is_data in zip(operands, data, strict=True)]  # fmt: skip

        def run(*ids: np.ndarray) -> Any:
            left = iter(ids)
            values = iter([next(left) if f is None else f for f in fixed])
            arguments = {
                name: next(values) if count is None else [next(values) for _ in range(count)]
                for name, count in node.arguments
            }
            assert node.function is not None
            made = node.function(**arguments, **node.options)
            if isinstance(made, (list, tuple)):
                return [part.numpy() for part in made]
            return made.numpy()

        return graph.structural(run, *moved)

    def _cumsum(self, node: Node, value: Any, axis: str) -> Any:
        at = int(self._static(axis)) % len(value.shape)
        size = value.shape[at]
        sums = np.triu(np.ones((size, size)), int(node.options["exclusive"]))  # [in, out]
        sums = sums.T if node.options["reverse"] else sums
        weight = functools.partial(_constant, sums)
        made = self.graph.product(value, (at,), (size,), weight)
        return Value(np.moveaxis(made.ids, -1, at))

    def _reduce(self, node: Node, value: Any, axes: str) -> Any:
        at = np.atleast_1d(self._static(axes)).tolist()
        if node.type == "Min":
            most = self.graph.elementwise("neg", value)
            most = self.graph.reduce("max", most, at, node.options["keep_dims"])
            return self.graph.elementwise("neg", most)
        total = self.graph.reduce(REDUCED[node.type], value, at, node.options["keep_dims"])
        if node.type != "Mean":
            return total
        count = int(np.prod([value.shape[axis] for axis in at]))
        return self.graph.elementwise("mul", total, 1.0 / count)

    def _matmul(self, node: Node, left: Any, right: Any) -> Any:
        options, rank = node.options, len(right.shape)
        names = ("transpose_a", "transpose_b") if node.type == "MatMul" else ("adj_x", "adj_y")
        turned = [bool(options.get(name)) for name in names]
        letters = "abcdefgh"
        batch = letters[: max(len(left.shape), rank) - 2]
        a = batch[len(batch) + 2 - len(left.shape) :] + ("yx" if turned[0] else "xy")
        b = batch[len(batch) + 2 - rank :] + ("zy" if turned[1] else "yz")
        return self._einsum(f"{a},{b}->{batch}xz", left, right)

    def _einsum(self, equation: str, *operands: Any) -> Any:
        graph = self.graph
        inputs, out = equation.replace(" ", "").split("->")
        letters = inputs.split(",")
        if len(operands) != 2 or "." in equation:
            graph.refuse(f"this is einsum({equation!r})", "products of two arrays, without '...'")
        pairs = list(zip(letters, operands, strict=True))
        (a, value), (b, weight) = pairs if isinstance(pairs[0][1], Value) else pairs[::-1]
        if not (isinstance(weight, Outer) and weight.kind == "F" and not weight.per_row):
            graph.refuse(
                "this multiplies a state by a matrix that depends on x, on a state or on the row",
                "multiply by a matrix of weights, or element by element",
            )
        sizes = dict(zip(b, weight.shape, strict=True))
        shared = [k for k in a if k in b]
        heads = [k for k in shared if k in out and sizes[k] != 1]
        summed = [k for k in shared if k not in out]
        new = [k for k in b if k not in a]
        if len(heads) > 1 or {*a, *b} - {*summed} != {*out} or len({*a}) < len(a):
            graph.refuse(f"this is einsum({equation!r})", "products over the last axis of a state")
        order = [b.index(k) for k in [*heads, *summed, *new]]
        lead = [sizes[k] for k in heads]
        inner = int(np.prod([sizes[k] for k in summed]))
        shape = [*lead, inner, int(np.prod([sizes[k] for k in new]))]

        def fetch(run: Any) -> Tensor:
            return tf.reshape(tf.transpose(weight.get(run), order), shape)

        axes, parts = tuple(a.index(k) for k in summed), tuple(sizes[k] for k in new)
        if heads:
            made = graph.heads(value, a.index(heads[0]), axes, parts, fetch)
        else:
            made = graph.product(value, axes, parts, fetch)
        got = [*heads, *[k for k in a if k not in (*heads, *summed)], *new]
        return Value(np.transpose(made.ids, [got.index(k) for k in out]), made.boolean)

    # -- operations that are several of the language ---------------------------------------------
    def _squareddifference(self, node: Node, a: Any, b: Any) -> Any:
        return self.graph.elementwise("square", self.graph.elementwise("sub", a, b))

    def _identityn(self, node: Node, *values: Any) -> Any:
        return list(values)

    def _addn(self, node: Node, *values: Any) -> Any:
        total = values[0]
        for value in values[1:]:
            total = self.graph.elementwise("add", total, value)
        return total

    def _relu6(self, node: Node, value: Any) -> Any:
        high = self.graph.elementwise("ge", value, 6.0, boolean=True)
        return self.graph.elementwise("where", high, 6.0, self.graph.elementwise("relu", value))

    def _selu(self, node: Node, value: Any) -> Any:
        scale, alpha = 1.0507009873554805, 1.6732632423543772  # Klambauer et al., 2017
        made = self.graph.elementwise("elu_alpha", value, alpha)
        return self.graph.elementwise("mul", made, scale)

    def _cast(self, node: Node, value: Any) -> Any:
        source, target = (self.traced.dtypes[n] for n in (node.inputs[0], node.outputs[0]))
        if source == target:
            return value
        if target.is_floating and source == tf.bool:
            return self.graph.elementwise("number", value)
        if target == tf.bool and source.is_floating:
            return self.graph.elementwise("truth", value, boolean=True)
        return self.graph.refuse(
            f"this casts a value that depends on a state from {source.name} to {target.name}",
            "compute the step in one dtype",
        )

    def _pow(self, node: Node, base: Any, exponent: Any) -> Any:
        number = getattr(exponent, "number", None)
        if number is None:
            self.graph.refuse("this is a power whose exponent is no fixed number")
        if number == int(number) and 1 <= number <= 16:
            result = base
            for _ in range(int(number) - 1):
                result = self.graph.elementwise("mul", result, base)
            return result
        return self.graph.elementwise("pow", base, number)

    def _clipbyvalue(self, node: Node, value: Any, low: Any, high: Any) -> Any:
        return self.graph.elementwise(
            "minimum", self.graph.elementwise("maximum", value, low), high
        )

    def _divnonan(self, node: Node, value: Any, divisor: Any) -> Any:
        graph = self.graph
        zero = graph.elementwise("eq", divisor, 0.0, boolean=True)
        quotient = graph.elementwise("div", value, graph.elementwise("where", zero, 1.0, divisor))
        return graph.elementwise("where", zero, 0.0, quotient)

    def _erfc(self, node: Node, value: Any) -> Any:
        return self.graph.elementwise("sub", 1.0, self.graph.elementwise("erf", value))

    def _isfinite(self, node: Node, value: Any) -> Any:
        difference = self.graph.elementwise("sub", value, value)
        return self.graph.elementwise("eq", difference, 0.0, boolean=True)

    def _raised(self, value: Any) -> tuple[Any, Any, Any]:
        """The value less its maximum over the last axis; the exponential of that; its sum."""
        graph, last = self.graph, [len(value.shape) - 1]
        most = graph.elementwise("stop_gradient", graph.reduce("max", value, last, True))
        less = graph.elementwise("sub", value, most)
        raised = graph.elementwise("exp", less)
        return less, raised, graph.reduce("sum", raised, last, True)

    def _softmax(self, node: Node, value: Any) -> Any:
        _, raised, total = self._raised(value)
        return self.graph.elementwise("div", raised, total)

    def _logsoftmax(self, node: Node, value: Any) -> Any:
        less, _, total = self._raised(value)
        return self.graph.elementwise("sub", less, self.graph.elementwise("log", total))


def _constant(array: np.ndarray, run: Any) -> Tensor:
    return tf.constant(array, run.dtype)


def _boolean(op: str, values: Sequence[Any]) -> bool:
    """Whether an op that keeps its operand's dtype has a boolean one."""
    return op == "identity" and values[0].boolean


# -- proof -----------------------------------------------------------------------------------------


def _compared(step: Step) -> str | None:
    """Why a reading is not the step; None if their results and gradients agree in float64."""
    traced, rng, kind = step.traced, np.random.default_rng(0), tf.float64

    def draw(shape: Sequence[int | None], *lead: int) -> Tensor:
        sizes = [ROWS + 1 if size is None else size for size in shape]
        return tf.constant(rng.normal(size=(*lead, *sizes)), kind)

    # Rows of zeros meet the ties of ``maximum`` and the corners of ``abs``.
    zeroed = np.arange(ROWS + 1) < 2
    states = []
    for name in traced.states:
        state = draw(traced.shapes[name])
        states.append(state * zeroed.reshape(-1, *[1] * (state.shape.rank - 1)).astype(float))
    x = draw(traced.shapes[traced.x], STEPS)
    others = [tf.cast(draw(traced.shapes[name]) > 0.0, kind) * 2.0 for name in traced.others]
    variables = {name: _sample(outer, rng) for name, outer in traced.outer.items()}
    real = {name: value for name, value in variables.items() if value.dtype.is_floating}
    watched = {"the input": x, **real}
    watched |= {f"initial state {k}": state for k, state in enumerate(states)}
    more = {"dtype": kind, "variable": variables.__getitem__}
    results = []
    for run in (_by_steps, _by_reading):
        with tf.GradientTape() as tape:
            tape.watch(list(watched.values()))
            output, final = run(step, x, states, others, more)
        named = {"the output": output}
        named |= {f"final state {k}": state for k, state in enumerate(final)}
        arriving = np.random.default_rng(1)
        weights = [tf.constant(arriving.normal(size=r.shape), kind) for r in named.values()]
        grads = tape.gradient(list(named.values()), watched, weights, unconnected_gradients="zero")
        named |= {f"the gradient of {name}": grad for name, grad in grads.items()}
        results.append({name: _numbers(value) for name, value in named.items()})
    expected, found = results
    return difference(expected, found, "float64", "random states and states of zeros")


def _numbers(value: Any) -> np.ndarray:
    return np.asarray(tf.convert_to_tensor(value).numpy())


def _sample(outer: Any, rng: np.random.Generator) -> Tensor:
    """A variable of the user's, moved off its initial value."""
    value = outer.read_value() if isinstance(outer, tf.Variable) else outer
    if not value.dtype.is_floating:
        return value
    value, noise = tf.cast(value, tf.float64), rng.normal(size=(2, *value.shape))
    return value * (1.0 + 0.1 * noise[0]) + 0.02 * noise[1]


def _by_steps(step: Step, x: Tensor, states: list[Tensor], others: Any, more: Any) -> Any:
    traced, outputs = step.traced, []
    once = World(traced, x.shape[1], {}, **more)
    for one in tf.unstack(x):
        known = {traced.x: one, **dict(zip(traced.others, others, strict=True))}
        known |= dict(zip(traced.states, states, strict=True))
        world = World(traced, x.shape[1], known, once=once, **more)
        outputs.append(world.value(traced.output))
        states = [world.value(name) for name in traced.after]
    return tf.stack(outputs), states


def _by_reading(step: Step, x: Tensor, states: list[Tensor], others: Any, more: Any) -> Any:
    return step.run(x, states, others, engine="reference", **more)


# -- whole runs ------------------------------------------------------------------------------------


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
