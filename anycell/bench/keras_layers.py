"""Layers of Keras on TensorFlow, ours and others', each in a ``tf.function``.

Inputs are batch-major, as Keras has them. A training step asks for the gradients of the weights, as
``fit`` does; that of the input, which the gate wants to see too, comes from a call of its own.
"""

from __future__ import annotations

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
from anycell.bench.errors import Unsupported
from anycell.bench.problem import Problem
from anycell.bench.tasks import Array, Contender, Task
from anycell.engines import cpu

Tensor = Any
Direction = Mapping[str, Any]  # weights of one direction of one layer, by Keras's names
Parts = tuple[Callable[..., Tensor], Sequence[Direction]]  # a layer, the weights of its directions


def ours(problem: Problem) -> Contender:
    """``anycell.keras``: the layers of Keras's names; ``RNN(cell, ...)`` for other cells."""
    return _keras(problem, anycell.keras)


def theirs(problem: Problem, compiled: bool = False) -> Contender:
    """``keras.layers.LSTM``, ``GRU``, ``SimpleRNN``."""
    if not problem.cell.classic or problem.cell.name not in ("LSTM", "GRU", "RNN"):
        raise Unsupported(f"Keras has no {problem.cell.name}")
    return _keras(problem, keras.layers, compiled)


def xla(problem: Problem) -> Contender:
    """The same under ``jit_compile=True``."""
    return theirs(problem, compiled=True)


def loop(problem: Problem) -> Contender:
    """``keras.layers.RNN`` over a cell class: by hand for peepholes, else one step of ours."""
    cell, shape = problem.cell.definition, problem.shape
    if problem.static is not None:
        raise Unsupported("keras.layers.RNN has no input once per sequence")

    def make() -> Any:
        if problem.cell.origin == "PeepholeLSTM":
            step: Any = PeepholeCell(shape.H)
        else:
            sizes: dict[str, Any] = {**problem.others}
            step = anycell.keras.RNNCell(cell, shape.H, **sizes)
        return keras.layers.RNN(step, return_sequences=True)

    return _contender(problem, _stack(problem, make))


def block(problem: Problem) -> Contender:
    """``tf.raw_ops.BlockLSTMV2`` and its gradient: TensorFlow's fused LSTM, with peepholes."""
    shape, name = problem.shape, problem.cell.origin
    if name not in ("LSTM", "PeepholeLSTM"):
        raise Unsupported(f"BlockLSTMV2 is no {name}")
    zeros = tf.zeros((shape.B, shape.H))

    def run(x: Tensor, weights: Direction, back: bool) -> Tensor:
        """Time-major, which suits it; its gradient by hand: TensorFlow registers another's."""
        names = ("p_i", "p_f", "p_o")
        peepholes = [weights[p] if p in weights else zeros[0] for p in names]
        options = {"use_peephole": names[0] in weights}

        @tf.custom_gradient
        def fused(x: Tensor, w: Tensor, b: Tensor, wci: Tensor, wcf: Tensor, wco: Tensor) -> Any:
            given = {
                "seq_len_max": tf.constant(shape.T, tf.int64), "x": x, "cs_prev": zeros,
                "h_prev": zeros, "w": w, "wci": wci, "wcf": wcf, "wco": wco, "b": b, **options,
            }  # fmt: skip
            out = tf.raw_ops.BlockLSTMV2(**given, cell_clip=0.0)

            def gradient(dh: Tensor) -> Any:
                grads = tf.raw_ops.BlockLSTMGradV2(
                    **given, **out._asdict(), cs_grad=tf.zeros_like(dh), h_grad=dh
                )
                return [getattr(grads, f"{key}_grad") for key in "x w b wci wcf wco".split()]

            return out.h, gradient

        x = tf.reverse(x, [0]) if back else x
        w = tf.concat([weights["kernel"], weights["recurrent_kernel"]], 0)
        y = fused(x, w, weights["bias"], *peepholes)
        return tf.reverse(y, [0]) if back else y

    stack: list[Parts] = []
    for number in range(shape.L):
        directions = [
            {k: tf.Variable(v) for k, v in _weights(problem, number, d).items()}
            for d in range(shape.D)
        ]

        def layer(
            x: Tensor, training: bool = False, weights: Sequence[Direction] = directions
        ) -> Tensor:
            return tf.concat([run(x, w, d == 1) for d, w in enumerate(weights)], 2)

        stack.append((layer, directions))
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


def _weights(problem: Problem, layer: int, direction: int) -> dict[str, Array]:
    """Those of one direction of one layer, by Keras's names."""
    suffix = f"_l{layer}" + "_reverse" * direction
    weights = {
        name.removesuffix(suffix): value
        for name, value in problem.weights.items()
        if name.endswith(suffix)
    }
    arrays = {
        "kernel": _ordered(problem, weights.pop("weight_ih")).T,
        "recurrent_kernel": _ordered(problem, weights.pop("weight_hh")).T,
    }
    if "bias_ih" in weights:
        pair = [_ordered(problem, weights.pop(f"bias_{k}")) for k in ("ih", "hh")]
        arrays["bias"] = np.stack(pair) if _two_biases(problem) else pair[0] + pair[1]
    for name, value in weights.items():
        kind, _, rest = name.partition("_")
        if kind == "weight":
            arrays[f"{rest}_kernel"] = np.swapaxes(value, -1, -2)
        else:
            arrays[f"{rest}_bias" if kind == "bias" else name] = value
    return arrays


def _gradients(problem: Problem, layer: int, direction: int, grads: Direction) -> dict[str, Array]:
    """The way back."""
    suffix, arrays = f"_l{layer}" + "_reverse" * direction, {}
    for name, value in grads.items():
        stem = name.removesuffix("kernel").removesuffix("bias").rstrip("_")
        if name in ("kernel", "recurrent_kernel"):
            key = "weight_ih" if name == "kernel" else "weight_hh"
            arrays[key + suffix] = _ordered(problem, value.T)
        elif name == "bias":
            pair = value if _two_biases(problem) else (value, value)
            for key, one in zip(("bias_ih", "bias_hh"), pair, strict=True):
                arrays[key + suffix] = _ordered(problem, one)
        elif name.endswith("_kernel"):
            arrays[f"weight_{stem}{suffix}"] = np.swapaxes(value, -1, -2)
        else:
            arrays[(f"bias_{stem}" if name.endswith("_bias") else name) + suffix] = value
    return arrays


def _two_biases(problem: Problem) -> bool:
    cell = problem.cell.definition
    return any(gate not in cell.fused for gate in cell.gates)


def _ordered(problem: Problem, rows: Array) -> Array:
    """``[G * H, ...]`` of a GRU with the gates in Keras's order, z r h, from r z n, or back."""
    if problem.cell.origin != "GRU":
        return rows
    r, z, n = np.split(rows, 3)
    return np.concatenate([z, r, n])


# -- the way to run them ---------------------------------------------------------------------------


def _keras(problem: Problem, module: Any, compiled: bool = False) -> Contender:
    """Layers of a module that has Keras's names."""
    named = {"LSTM": "LSTM", "GRU": "GRU", "RNN": "SimpleRNN"}.get(problem.cell.origin)
    shape = problem.shape

    def make() -> Any:
        if named:
            return getattr(module, named)(shape.H, return_sequences=True)
        return module.RNN(problem.cell.definition, shape.H, return_sequences=True, **problem.others)

    return _contender(problem, _stack(problem, make), compiled)


def _stack(problem: Problem, make: Callable[[], Any]) -> list[Parts]:
    shape, stack, inputs = problem.shape, list[Parts](), problem.shape.I
    for number in range(shape.L):
        layer = make()
        if shape.D == 2:
            layer = keras.layers.Bidirectional(layer)
        layer.build((shape.B, shape.T, inputs))
        inputs = shape.D * problem.width
        parts = [layer.forward_layer, layer.backward_layer] if shape.D == 2 else [layer]
        named = [{v.path.rpartition("/")[2]: v for v in p.trainable_variables} for p in parts]
        for direction, variables in enumerate(named):
            values = _weights(problem, number, direction)
            assert set(values) == set(variables), (set(values), set(variables))
            for name, variable in variables.items():
                variable.assign(values[name])
        directions = [{name: v.value for name, v in d.items()} for d in named]
        stack.append((layer, directions))
    return stack


def _contender(
    problem: Problem, stack: Sequence[Parts], compiled: bool = False, time_major: bool = False
) -> Contender:
    """Any layers on TensorFlow; ``compiled`` by XLA."""
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
    kept: list[Any] = [None]

    def call(function: Any, *args: Tensor) -> None:
        kept[0] = function(*args)

    def prepare() -> None:
        kept[0] = None

    def output(y: Tensor) -> Array:
        return y.numpy() if time_major else np.swapaxes(y.numpy(), 0, 1)

    def gradients() -> dict[str, Array]:
        y, grads = kept[0]
        results = {"output": output(y), "x": output(of_input(x, dy))}
        for number, layer in enumerate(grads):
            for direction, tensors in enumerate(layer):
                arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
                results |= _gradients(problem, number, direction, arrays)
        return results

    engine = getattr(stack[0][0], "engine", None)
    return Contender(
        {
            "inference": Task(lambda: call(infer, x), lambda: {"output": output(kept[0])}, prepare),
            "training": Task(lambda: call(train, x, dy), gradients, prepare),
        },
        _alone,
        None if engine is None else (engine.name, engine.reason),
    )


@contextmanager
def _alone() -> Iterator[None]:
    """Our kernels on threads of their own, as where there is no torch in the process."""
    cpu.pool.attach(None)
    try:
        yield
    finally:
        cpu.pool.attach("torch")


def set_threads(count: int) -> None:
    """So many for TensorFlow, which takes that before its first operation only."""
    for kind in ("intra", "inter"):
        if getattr(tf.config.threading, f"get_{kind}_op_parallelism_threads")() != count:
            getattr(tf.config.threading, f"set_{kind}_op_parallelism_threads")(count)
