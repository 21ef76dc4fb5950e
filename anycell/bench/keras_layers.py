"""Layers of Keras on TensorFlow, ours and others', each in a ``tf.function``.

Inputs are batch-major, as in Keras. A training step computes the gradients of the weights, as
``fit`` does; the input's gradient, which the gate checks too, comes from a separate call.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import anycell.keras
from anycell.bench.problem import Problem, by_direction
from anycell.bench.tasks import Array, Contender, Mode, Task, Unsupported
from anycell.engines import cpu

Tensor = Any
Direction = Mapping[str, Any]  # weights of one direction of one layer, by Keras's names
Parts = tuple[Callable[..., Tensor], Sequence[Direction]]  # a layer, the weights of its directions
NAMED = {"LSTM": "LSTM", "GRU": "GRU", "RNN": "SimpleRNN"}  # cells that Keras has layers for


def ours(problem: Problem) -> Contender:
    """``anycell.keras``: the layers of Keras's names; ``RNN(cell, ...)`` for other cells."""
    return _named(problem, anycell.keras)


def theirs(problem: Problem, compiled: bool = False) -> Contender:
    """``keras.layers.LSTM``, ``GRU``, ``SimpleRNN``; ``jit_compile=True`` if compiled."""
    if problem.cell.origin not in NAMED:
        raise Unsupported(f"Keras has no {problem.cell.name}")
    return _named(problem, keras.layers, compiled)


# -- weights: the problem's have torch's names and layouts -----------------------------------------


def _keras_name(name: str) -> str:
    """The name of a weight in Keras, which has both biases in one variable."""
    kind, _, rest = name.partition("_")
    prefix = {"ih": "", "hh": "recurrent_"}.get(rest, f"{rest}_")
    if name in ("bias_ih", "bias_hh"):
        return "bias"
    return {"weight": f"{prefix}kernel", "bias": f"{prefix}bias"}.get(kind, name)


def as_keras(problem: Problem, weights: Direction, reorder: bool) -> dict[str, Tensor]:
    """The weights of a direction by Keras's names; `reorder` turns gates r z n into z r n."""
    arrays: dict[str, list[Tensor]] = {}
    for name, value in weights.items():
        if name.startswith("weight"):
            value = tf.linalg.matrix_transpose(value)
        if reorder:
            first, second, third = tf.split(value, 3, -1)
            value = tf.concat([second, first, third], -1)
        arrays.setdefault(_keras_name(name), []).append(value)
    cell = problem.cell.definition
    join = tf.stack if any(gate not in cell.fused for gate in cell.gates) else tf.add_n
    return {name: join(values) if name == "bias" else values[0] for name, values in arrays.items()}


def _as_torch(problem: Problem, gradients: Any, reorder: bool) -> dict[str, Array]:
    """Gradients by torch's names, from Keras's gradients by the derivative of `as_keras`."""
    weights = {name: tf.constant(value) for name, value in problem.weights.items()}
    with tf.GradientTape() as tape:
        tape.watch(weights)
        turned = [
            [as_keras(problem, direction, reorder) for direction in layer]
            for layer in by_direction(weights, problem.shape)
        ]
    of_torch = tape.gradient(turned, weights, output_gradients=gradients)
    return {name: gradient.numpy() for name, gradient in of_torch.items()}


# -- the way to run them ---------------------------------------------------------------------------


def _named(problem: Problem, module: Any, compiled: bool = False) -> Contender:
    """Layers of a module that has Keras's names, with the gates in Keras's order."""
    origin, units = problem.cell.origin, problem.shape.H
    if origin in NAMED:
        layer = functools.partial(getattr(module, NAMED[origin]), units)
    else:
        layer = functools.partial(module.RNN, problem.cell.definition, units, **problem.others)
    return layers(problem, lambda: layer(return_sequences=True), origin == "GRU", compiled)


def layers(
    problem: Problem, make: Callable[[], Any], reorder: bool = False, compiled: bool = False
) -> Contender:
    """A stack of layers of Keras's kind, with the weights of the problem."""
    set_threads(problem.threads)
    shape, stack, inputs = problem.shape, list[Parts](), problem.shape.I
    for directions in by_direction(problem.weights, shape):
        layer = make()
        if shape.D == 2:
            layer = keras.layers.Bidirectional(layer)
        layer.build((shape.B, shape.T, inputs))
        inputs = shape.D * problem.width
        parts = [layer.forward_layer, layer.backward_layer] if shape.D == 2 else [layer]
        variables = []
        for part, weights in zip(parts, directions, strict=True):
            named = {v.path.rpartition("/")[2]: v for v in part.trainable_variables}
            values = as_keras(problem, weights, reorder)
            assert set(values) == set(named), (set(values), set(named))
            for name, variable in named.items():
                variable.assign(values[name])
            variables.append({name: variable.value for name, variable in named.items()})
        stack.append((layer, variables))
    return contender(problem, stack, reorder, compiled)


def contender(
    problem: Problem,
    stack: Sequence[Parts],
    reorder: bool = False,
    compiled: bool = False,
    time_major: bool = False,
) -> Contender:
    """A contender of any layers on TensorFlow, by XLA if ``compiled``."""
    if problem.dtype != "float32":
        raise Unsupported(f"no {problem.dtype} on TensorFlow here")

    def turned(array: Array) -> Array:
        return np.ascontiguousarray(array if time_major else np.swapaxes(array, 0, 1))

    x, dy = tf.constant(turned(problem.x)), tf.constant(turned(problem.dy))
    once = {} if problem.static is None else {"static": tf.constant(problem.static)}
    variables = [[dict(weights) for weights in directions] for _, directions in stack]

    def model(x: Tensor, training: bool) -> Tensor:
        for layer, _ in stack:
            x = layer(x, training=training, **once)
        return x

    def step(x: Tensor, dy: Tensor, wanted: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(wanted)
            y = model(x, True)
        return y, tape.gradient(y, wanted, output_gradients=dy)

    infer = tf.function(lambda x: model(x, False), jit_compile=compiled)
    train = tf.function(lambda x, dy: step(x, dy, variables), jit_compile=compiled)
    of_input = tf.function(lambda x, dy: step(x, dy, x)[1], jit_compile=compiled)

    def output(y: Tensor) -> dict[str, Array]:
        return {"output": turned(y.numpy())}

    def arrays(kept: Any) -> dict[str, Array]:
        y, grads = kept
        x_grad = turned(of_input(x, dy).numpy())
        return {**output(y), "x": x_grad, **_as_torch(problem, grads, reorder)}

    tasks: dict[Mode, Task] = {
        "inference": Task(functools.partial(infer, x), output),
        "training": Task(functools.partial(train, x, dy), arrays),
    }
    return Contender(tasks, _alone, getattr(stack[0][0], "engine", None))


@contextmanager
def _alone() -> Iterator[None]:
    """Runs our kernels on threads of their own, as in a process without torch."""
    cpu.pool.attach(None)
    try:
        yield
    finally:
        cpu.pool.attach("torch")


def set_threads(count: int) -> None:
    """Sets TensorFlow's threads, which works only before its first operation."""
    for kind in ("intra", "inter"):
        if getattr(tf.config.threading, f"get_{kind}_op_parallelism_threads")() != count:
            getattr(tf.config.threading, f"set_{kind}_op_parallelism_threads")(count)
