"""Cells of Keras and TensorFlow read as they are written: the table of TensorFlow's operations."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from anycell import read
from anycell.keras.call import Tensor
from anycell.keras.tensorflow.fused import gpu_visible
from anycell.keras.tensorflow.graph import ROWS, Traced, World, eagerly
from anycell.keras.tensorflow.passes import compiled
from anycell.keras.tensorflow.steps import Arrays, Step
from anycell.keras.tensorflow.steps import loop as loop
from anycell.read import Outer, Refused, Rule, Variable, row
from anycell.read.proof import STEPS, difference


def read_step(
    call: Callable[..., Any], x: Any, states: Sequence[Any], others: Sequence[Any]
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
        step = _read(traced, call.__name__)
        problem = _compared(step)
    if problem is not None:
        raise Refused(problem)
    return step


def short(steps: int | None, rows: int | None, states: Sequence[Any]) -> bool:
    """Whether a loop takes less time than a kernel that the graph being traced calls through
    Python, see ``anycell.read.short``. A loop of TensorFlow's for one step does not.
    """
    called = not (tf.executing_eagerly() or compiled() or gpu_visible())
    if steps is None or rows is None or steps == 1 or not called:
        return False
    numbers = sum(rows * math.prod(state.shape[1:]) for state in states)
    return read.short("tensorflow", steps, numbers)


# -- rules -----------------------------------------------------------------------------------------


def _structural(reader: Reader, *arguments: Any, **options: Any) -> Any:
    places = [v for v in reader.equation.operands if not (v.floating or v.boolean)]
    if any(v.kind != "F" for v in places):
        reader.graph.refuse("this takes positions or sizes from x or from a state")
    return reader.moved(*arguments, **options)


def _reduced(name: str) -> Rule:
    def rule(reader: Reader, value: Any, axes: Any, keep_dims: bool, **_: Any) -> Any:
        return getattr(reader, name)(value, axes, keep_dims)

    return rule


def _matmul(reader: Reader, a: Any, b: Any, **options: Any) -> Any:
    names = ("transpose_a", "adj_x"), ("transpose_b", "adj_y")
    left, right = (any(options.get(name) for name in pair) for pair in names)
    return reader.matmul(a, b, (left, right))


def _einsum(reader: Reader, operands: Sequence[Any], equation: str) -> Any:
    if len(operands) != 2 or "." in equation:
        reader.graph.refuse(
            f"this is einsum({equation!r})", "products of two arrays, without '...'"
        )
    return reader.einsum(equation, *operands)


# Those that have their names in the language.
_OPS = (
    "Abs Add Cos Div Elu Erf Exp Expm1 Log Log1p Maximum Minimum Mul Neg Reciprocal Relu Rsqrt "
    "Sigmoid Sign Sin Softplus Softsign Sqrt Square Sub Tanh"
)
TABLE: dict[str, Rule] = {name: name.lower() for name in _OPS.split()}
TABLE |= {
    "AddV2": "add", "BiasAdd": "add", "Equal": "eq", "Greater": "gt", "GreaterEqual": "ge",
    "Inv": "reciprocal", "Less": "lt", "LessEqual": "le", "LogicalAnd": "logical_and",
    "LogicalNot": "logical_not", "LogicalOr": "logical_or", "NotEqual": "ne", "RealDiv": "div",
    "Snapshot": "identity", "StopGradient": "stop_gradient",
}  # fmt: skip
TABLE |= dict.fromkeys(
    "BroadcastTo ConcatV2 ExpandDims GatherV2 Pack Reshape ReverseV2 Roll Slice Split SplitV "
    "Squeeze StridedSlice Tile Transpose Unpack".split(),
    _structural,
)
TABLE |= dict.fromkeys(("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), _matmul)
TABLE |= {
    "AddN": row("total"), "Cast": row("convert"), "ClipByValue": row("clamp"),
    "DivNoNan": row("divide_no_nan"), "Einsum": _einsum, "Erfc": row("erfc"),
    "IsFinite": row("is_finite"), "LogSoftmax": row("log_softmax"), "Max": _reduced("max"),
    "Mean": _reduced("mean"), "Min": _reduced("min"), "Pow": row("power"), "Relu6": row("relu6"),
    "Select": row("where"), "SelectV2": row("where"), "Selu": row("selu"),
    "Softmax": row("softmax"), "SquaredDifference": row("squared_difference"),
    "Sum": _reduced("sum"),
}  # fmt: skip
TABLE |= {
    "Cumsum": lambda reader, v, axis, reverse, exclusive, **_: reader.cumsum(
        v, int(axis), reverse, exclusive
    ),
    "IdentityN": lambda reader, values, **_: list(values),
    "LeakyRelu": lambda reader, v, alpha, **_: reader.op("leaky_relu", v, alpha),
}


class Reader(read.Reader):
    """Reads the operations of a traced step."""

    table = TABLE

    def __init__(self, traced: Traced) -> None:
        super().__init__(traced, Arrays, 0, traced.states[0].dtype)
        self.traced, self.world = traced, World(traced, ROWS, {})

    def operand(self, v: Variable) -> Any:
        if v.kind == "F" and not (v.floating or v.boolean):  # axes and sizes, known numbers
            return np.asarray(self.world[v].numpy())
        return super().operand(v)

    def outer(self, v: Variable) -> Outer:
        if v.kind == "X" and v.axis is None:
            self.graph.refuse("this takes numbers of x from several rows of the batch")
        return super().outer(v)

    def axis_of(self, v: Variable) -> int | None:
        return v.axis


def _read(traced: Traced, name: str) -> Step:
    states = traced.states
    for before, after in zip(states, traced.after, strict=True):
        if traced.shapes[before][:1] != (None,) or not before.floating:
            raise Refused(f"a state of {before.dtype} {traced.shapes[before]}")
        if before.dtype != after.dtype:
            kinds = f"{before.dtype} becomes {after.dtype}"
            raise Refused(f"a state of {kinds}", "return states of one dtype")
    step = Step(traced, Reader(traced).read([""] * len(states), name))
    (output,) = traced.outputs
    if output in traced.after:
        step.of_state = traced.after.index(output)
    elif traced.shapes[output][:1] != (None,):
        raise Refused("the output has no axis of the batch")
    return step


# -- proof -----------------------------------------------------------------------------------------


def _compared(step: Step) -> str | None:
    """Why a reading is not the step; None if their results and gradients agree in float64."""
    traced, rng, kind = step.traced, np.random.default_rng(0), tf.float64

    def draw(v: Variable, *lead: int) -> Tensor:
        sizes = [ROWS + 1 if size is None else size for size in traced.shapes[v]]
        return tf.constant(rng.normal(size=(*lead, *sizes)), kind)

    # Rows of zeros meet the ties of ``maximum`` and the corners of ``abs``.
    zeroed = (np.arange(ROWS + 1) < 2).astype(float)
    states = [draw(v) * zeroed.reshape(-1, *[1] * (len(v.shape) - 1)) for v in traced.states]
    x = draw(traced.x[0], STEPS)
    others = [tf.cast(draw(v) > 0.0, kind) * 2.0 for v in traced.others]
    variables = {v: _sample(outer, rng) for v, outer in traced.outer.items()}
    reals = [value for value in variables.values() if value.dtype.is_floating]
    real = {f"variable {k}": value for k, value in enumerate(reals)}
    watched = {"the input": x, **real}
    watched |= {f"initial state {k}": state for k, state in enumerate(states)}
    more = {"dtype": kind, "variable": variables.__getitem__}
    results = []
    runs: Sequence[Any] = _by_steps, functools.partial(Step.run, engine="reference")
    for run in runs:
        with tf.GradientTape() as tape:
            tape.watch(list(watched.values()))
            output, final = run(step, x, states, others, **more)
        named = {"the output": output}
        named |= {f"final state {k}": state for k, state in enumerate(final)}
        arriving = np.random.default_rng(1)
        weights = [tf.constant(arriving.normal(size=r.shape), kind) for r in named.values()]
        grads = tape.gradient(list(named.values()), watched, weights, unconnected_gradients="zero")
        named |= {f"the gradient of {name}": grad for name, grad in grads.items()}
        results.append({name: np.asarray(tf.convert_to_tensor(v)) for name, v in named.items()})
    of_step, of_reading = results
    return difference(of_step, of_reading, "float64", "random states and states of zeros")


def _sample(outer: Any, rng: np.random.Generator) -> Tensor:
    """A variable of the user's, moved off its initial value; in a graph of TensorFlow 1, where it
    has none yet, random numbers.
    """
    source = getattr(outer, "handle", None) if isinstance(outer, tf.Variable) else outer
    if not hasattr(source, "numpy"):
        if not outer.dtype.is_floating:
            raise Refused("the step reads integers from a graph of TensorFlow 1")
        shape = outer.shape.as_list()
        return tf.constant(rng.normal(size=shape) / np.sqrt(max([1, *shape])))
    value = outer.read_value() if isinstance(outer, tf.Variable) else outer
    if not value.dtype.is_floating:
        return value
    # Drawing numbers is most of a proof's work for large weights: these serve twice.
    value, noise = tf.cast(value, tf.float64), rng.normal(size=value.shape)
    return value * (1.0 + 0.1 * noise) + 0.02 * np.flip(noise)


def _by_steps(step: Step, x: Tensor, states: list[Tensor], others: Any, **more: Any) -> Any:
    traced, outputs = step.traced, []
    once = World(traced, x.shape[1], {}, **more)
    for one in tf.unstack(x):
        before = (*traced.x, *traced.others, *traced.states)
        known = dict(zip(before, (one, *others, *states), strict=True))
        world = World(traced, x.shape[1], known, once=once, **more)
        outputs.append(world[traced.outputs[0]])
        states = [world[v] for v in traced.after]
    return tf.stack(outputs), states
