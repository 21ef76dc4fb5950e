"""Loops over time of Keras and TensorFlow: cells by hand, and TensorFlow's own fused LSTM."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from anycell.bench.keras_layers import (  # first: it says how TensorFlow is to log
    Direction,
    Parts,
    Tensor,
    as_keras,
    contender,
    layers,
    set_threads,
)

# isort: split
import keras
import tensorflow as tf
from keras import ops

import anycell.keras
from anycell.bench.problem import Problem, by_direction
from anycell.bench.tasks import Contender, Unsupported


def loop(problem: Problem) -> Contender:
    """``keras.layers.RNN`` over a cell class: by hand for peepholes, else one step of ours."""
    cell, units = problem.cell, problem.shape.H
    if problem.static is not None:
        raise Unsupported("keras.layers.RNN has no input once per sequence")
    RNNCell: Any = anycell.keras.RNNCell
    step: Callable[[], Any] = functools.partial(RNNCell, cell.definition, units, **problem.others)
    if cell.origin == "PeepholeLSTM":
        step = functools.partial(PeepholeCell, units)
    return layers(problem, lambda: keras.layers.RNN(step(), return_sequences=True))


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
        arrays = [as_keras(problem, weights, False) for weights in directions]
        variables = [{name: tf.Variable(v) for name, v in part.items()} for part in arrays]
        stack.append((functools.partial(layer, variables), variables))
    return contender(problem, stack, time_major=True)


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
