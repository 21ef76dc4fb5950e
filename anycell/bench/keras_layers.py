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
from keras import ops

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


def loop(problem: Problem) -> Contender:
    """``keras.layers.RNN`` over a cell class: by hand for peepholes, else one step of ours."""
    cell, units = problem.cell, problem.shape.H
    if problem.static is not None:
        raise Unsupported("keras.layers.RNN has no input once per sequence")
    RNNCell: Any = anycell.keras.RNNCell
    step: Callable[[], Any] = functools.partial(RNNCell, cell.definition, units, **problem.others)
    if cell.origin == "PeepholeLSTM":
        step = functools.partial(PeepholeCell, units)
    return _layers(problem, lambda: keras.layers.RNN(step(), return_sequences=True))


def block(problem: Problem) -> Contender:
    """``tf.raw_ops.BlockLSTMV2`` and its gradient: TensorFlow's fused LSTM, with peepholes."""
    shape, name = problem.shape, problem.cell.origin
    if name not in ("LSTM", "PeepholeLSTM"):
        raise Unsupported(f"BlockLSTMV2 is no {name}")
    set_threads(problem.threads)
    zeros = tf.zeros((shape.B, shape.H))

    def run(x: Tensor, weights: Direction, back: bool) -> Tensor:
        """Runs time-major, which suits the op. TensorFlow registers the gradient of BlockLSTM."""
        peepholes = [weights.get(name, zeros[0]) for name in ("p_i", "p_f", "p_o")]
        names = "x w b wci wcf wco".split()
        rest = {"cs_prev": zeros, "h_prev": zeros, "use_peephole": "p_i" in weights}
        rest["seq_len_max"] = tf.constant(shape.T, tf.int64)

        @tf.custom_gradient
        def fused(*arrays: Tensor) -> Any:
            given = {**rest, **dict(zip(names, arrays, strict=True))}
            out = tf.raw_ops.BlockLSTMV2(**given, cell_clip=0.0)

            def gradient(dh: Tensor) -> Any:
                arriving = {"cs_grad": tf.zeros_like(dh), "h_grad": dh}
                grads = tf.raw_ops.BlockLSTMGradV2(**given, **out._asdict(), **arriving)
                return [getattr(grads, f"{name}_grad") for name in names]

            return out.h, gradient

        x = tf.reverse(x, [0]) if back else x
        w = tf.concat([weights["kernel"], weights["recurrent_kernel"]], 0)
        y = fused(x, w, weights["bias"], *peepholes)
        return tf.reverse(y, [0]) if back else y

    def layer(weights: Sequence[Direction], x: Tensor, training: bool) -> Tensor:
        return tf.concat([run(x, w, d == 1) for d, w in enumerate(weights)], 2)

    stack: list[Parts] = []
    for directions in by_direction(problem.weights, shape):
        arrays = [_as_keras(problem, weights, False) for weights in directions]
        variables = [{name: tf.Variable(v) for name, v in part.items()} for part in arrays]
        stack.append((functools.partial(layer, variables), variables))
    return _contender(problem, stack, time_major=True)


@keras.saving.register_keras_serializable("anycell")
class PeepholeCell(keras.layers.Layer):
    """An LSTM whose gates see the cell state, as people write it for ``keras.layers.RNN``."""

    def __init__(self, units: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.units, self.state_size, self.output_size = units, [units, units], units

    def build(self, input_shape: Sequence[int]) -> None:
        wide = 4 * self.units
        self.kernel = self.add_weight((input_shape[-1], wide), name="kernel")
        self.recurrent_kernel = self.add_weight((self.units, wide), name="recurrent_kernel")
        self.bias = self.add_weight((wide,), name="bias")
        self.peepholes = [self.add_weight((self.units,), name=f"p_{g}") for g in "ifo"]

    def call(self, inputs: Tensor, states: Any, training: bool = False) -> Any:
        h, c = states
        z = ops.matmul(inputs, self.kernel) + ops.matmul(h, self.recurrent_kernel) + self.bias
        i, f, g, o = ops.split(z, 4, axis=1)
        p_i, p_f, p_o = self.peepholes
        new = ops.sigmoid(f + p_f * c) * c + ops.sigmoid(i + p_i * c) * ops.tanh(g)
        h = ops.sigmoid(o + p_o * new) * ops.tanh(new)
        return h, [h, new]


# -- weights: the problem's have torch's names and layouts -----------------------------------------


def _keras_name(name: str) -> str:
    """The name of a weight in Keras, which has both biases in one variable."""
    kind, _, rest = name.partition("_")
    prefix = {"ih": "", "hh": "recurrent_"}.get(rest, f"{rest}_")
    if name in ("bias_ih", "bias_hh"):
        return "bias"
    return {"weight": f"{prefix}kernel", "bias": f"{prefix}bias"}.get(kind, name)


def _as_keras(problem: Problem, weights: Direction, reorder: bool) -> dict[str, Tensor]:
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
    """Gradients by torch's names, from Keras's gradients by the derivative of `_as_keras`."""
    weights = {name: tf.constant(value) for name, value in problem.weights.items()}
    with tf.GradientTape() as tape:
        tape.watch(weights)
        turned = [
            [_as_keras(problem, direction, reorder) for direction in layer]
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
    return _layers(problem, lambda: layer(return_sequences=True), origin == "GRU", compiled)


def _layers(
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
            values = _as_keras(problem, weights, reorder)
            assert set(values) == set(named), (set(values), set(named))
            for name, variable in named.items():
                variable.assign(values[name])
            variables.append({name: variable.value for name, variable in named.items()})
        stack.append((layer, variables))
    return _contender(problem, stack, reorder, compiled)


def _contender(
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
