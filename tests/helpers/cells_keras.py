"""Recurrent cells as people write them in Keras on TensorFlow, for ``tests/read/test_keras.py``.

Each function draws the numbers of a cell and returns ``(cell, x, state)``: the cell as
``keras.layers.RNN`` takes it, its input [B, T, features], and its initial state, one array or a
list. The weights are drawn when they are built. Or ``cell`` enters a class of cells.

One file, because it is a list of cells, each of which is read by itself.
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from corpus import BATCH, HIDDEN, INPUT, STEPS, Corpus, Numbers, cell
from keras import layers, ops

B, T, I, H = BATCH, STEPS, INPUT, HIDDEN
corpus = Corpus()
reads, either, refused = corpus.reads, corpus.either, corpus.refused


def one(n: Numbers, cell: Any) -> Any:
    """A cell of one state."""
    return cell, n(B, T, I), n(B, H)


def two(n: Numbers, cell: Any) -> Any:
    """A cell of two states."""
    return cell, n(B, T, I), [n(B, H), n(B, H)]


class Cell(layers.Layer):
    """What the cells below share: a number of units, and one state of as many."""

    def __init__(self, units: int = H, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.units = units
        self.state_size: Any = units

    def kernel(self, name: str, *shape: int) -> Any:
        return self.add_weight(shape=shape, initializer="glorot_uniform", name=name)


# -- LSTMs --------------------------------------------------------------------------------------
@cell(reads, two, H)
class basic_lstm(layers.Layer):
    """Products of [x, h] with one matrix, as in TensorFlow 1, typed for Keras."""

    def __init__(self, num_units: int, forget_bias: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_units, self.forget_bias = num_units, forget_bias

    @property
    def state_size(self) -> Any:
        return [self.num_units, self.num_units]

    @property
    def output_size(self) -> int:
        return self.num_units

    def build(self, input_shape: Any) -> None:
        depth = input_shape[-1] + self.num_units
        self.w = self.add_weight(
            name="kernel", shape=(depth, 4 * self.num_units), initializer="glorot_uniform"
        )
        self.b = self.add_weight(name="bias", shape=(4 * self.num_units,), initializer="zeros")
        self.built = True

    def call(self, inputs: Any, states: Any) -> Any:
        c, h = states
        gates = tf.matmul(tf.concat([inputs, h], 1), self.w)
        gates = tf.nn.bias_add(gates, self.b)
        i, j, f, o = tf.split(value=gates, num_or_size_splits=4, axis=1)
        new_c = c * tf.sigmoid(f + self.forget_bias) + tf.sigmoid(i) * tf.tanh(j)
        new_h = tf.tanh(new_c) * tf.sigmoid(o)
        return new_h, [new_c, new_h]


@cell(reads, two, H)
class lstm_gate_layers(layers.Layer):
    """A dense layer for each gate, made in the constructor."""

    def __init__(self, units: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.units = units
        self.state_size = [units, units]
        self.forget_gate = layers.Dense(units, activation="sigmoid")
        self.input_gate = layers.Dense(units, activation="sigmoid")
        self.output_gate = layers.Dense(units, activation="sigmoid")
        self.candidate = layers.Dense(units, activation="tanh")

    def call(self, x: Any, states: Any) -> Any:
        h, c = states
        z = ops.concatenate([h, x], axis=-1)
        c = self.forget_gate(z) * c + self.input_gate(z) * self.candidate(z)
        h = self.output_gate(z) * ops.tanh(c)
        return h, [h, c]


@reads
def lstm_sliced_weights(n: Numbers) -> Any:
    """Slices of the weights, a product for each gate."""

    class LSTMCell(Cell):
        def __init__(self, units: int, **kwargs: Any) -> None:
            super().__init__(units, **kwargs)
            self.state_size = (units, units)

        def build(self, input_shape: Any) -> None:
            self.W = self.kernel("W", input_shape[-1], 4 * self.units)
            self.U = self.kernel("U", self.units, 4 * self.units)
            self.b = self.kernel("b", 1, 4 * self.units)

        def call(self, x: Any, states: Any, training: Any = None) -> Any:
            h, c = states
            u = self.units

            def gate(k: int) -> Any:
                cut = slice(k * u, (k + 1) * u)
                return x @ self.W[:, cut] + h @ self.U[:, cut] + self.b[:, cut]

            i, f, o = (keras.activations.hard_sigmoid(gate(k)) for k in range(3))
            c = f * c + i * keras.activations.tanh(gate(3))
            h = o * keras.activations.tanh(c)
            return h, (h, c)

    cell, x, state = two(n, LSTMCell(H))
    return cell, x, tuple(state)


@cell(reads, two, H)
class lstm_peephole(layers.LSTMCell):
    """A subclass of Keras's own cell whose gates also see the cell."""

    def build(self, input_shape: Any) -> None:
        super().build(input_shape)
        self.peep = [
            self.add_weight(shape=(self.units,), name=f"peephole_{g}", initializer="ones")
            for g in "ifo"
        ]

    def call(self, inputs: Any, states: Any, training: Any = None) -> Any:
        h, c = states
        z = ops.matmul(inputs, self.kernel) + ops.matmul(h, self.recurrent_kernel) + self.bias
        zi, zf, zc, zo = ops.split(z, 4, axis=1)
        i = self.recurrent_activation(zi + self.peep[0] * c)
        f = self.recurrent_activation(zf + self.peep[1] * c)
        c = f * c + i * self.activation(zc)
        o = self.recurrent_activation(zo + self.peep[2] * c)
        h = o * self.activation(c)
        return h, [h, c]


@cell(reads, two, H)
class lstm_layer_norm(layers.LSTMCell):
    """Keras's LSTM cell with layers of norm in it, as add-ons have had it."""

    def __init__(self, units: int, **kwargs: Any) -> None:
        super().__init__(units, **kwargs)
        self.kernel_norm = layers.LayerNormalization(epsilon=1e-3)
        self.recurrent_norm = layers.LayerNormalization(epsilon=1e-3)
        self.state_norm = layers.LayerNormalization(epsilon=1e-3)

    def call(self, inputs: Any, states: Any, training: Any = None) -> Any:
        h, c = states
        z = self.kernel_norm(ops.dot(inputs, self.kernel))
        z = z + self.recurrent_norm(ops.dot(h, self.recurrent_kernel)) + self.bias
        i, f, g, o = ops.split(z, 4, axis=-1)
        i, f, o = ops.sigmoid(i), ops.sigmoid(f), ops.sigmoid(o)
        c = self.state_norm(f * c + i * ops.tanh(g))
        h = o * ops.tanh(c)
        return h, [h, c]


@reads
def lstm_projected(n: Numbers) -> Any:
    class LSTMPCell(Cell):
        def __init__(self, units: int, projection: int, **kwargs: Any) -> None:
            super().__init__(units, **kwargs)
            self.projection = projection
            self.state_size = [projection, units]
            self.output_size = projection

        def build(self, input_shape: Any) -> None:
            self.w = self.kernel("w", input_shape[-1] + self.projection, 4 * self.units)
            self.p = self.kernel("p", self.units, self.projection)

        def call(self, x: Any, states: Any) -> Any:
            r, c = states
            z = tf.reshape(tf.concat([x, r], -1) @ self.w, [-1, 4, self.units])
            i, f, o, g = tf.unstack(z, axis=1)
            c = tf.nn.sigmoid(f) * c + tf.nn.sigmoid(i) * tf.nn.tanh(g)
            r = tf.linalg.matmul(tf.nn.sigmoid(o) * tf.nn.tanh(c), self.p)
            return r, [r, c]

    return LSTMPCell(H, 3), n(B, T, I), [n(B, 3), n(B, H)]


@reads
def lstm_stacked(n: Numbers) -> Any:
    """Keras's wrapper around cells, one of them of one's own."""

    class Minimal(Cell):
        def build(self, input_shape: Any) -> None:
            self.f, self.g = layers.Dense(self.units), layers.Dense(self.units)
            self.f.build((None, input_shape[-1] + self.units))
            self.g.build((None, input_shape[-1] + self.units))

        def call(self, x: Any, states: Any) -> Any:
            (h,) = states
            f = ops.sigmoid(self.f(ops.concatenate([x, h], -1)))
            g = ops.tanh(self.g(ops.concatenate([x, f * h], -1)))
            h = (1 - f) * h + f * g
            return h, [h]

    cell = layers.StackedRNNCells([layers.LSTMCell(H), Minimal(H)])
    return cell, n(B, T, I), [[n(B, H), n(B, H)], [n(B, H)]]


@reads
def lstm_residual(n: Numbers) -> Any:
    """A cell around a cell: the input is added to what it puts out."""

    class ResidualWrapper(layers.Layer):
        def __init__(self, cell: Any, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.cell = cell

        @property
        def state_size(self) -> Any:
            return self.cell.state_size

        def build(self, input_shape: Any) -> None:
            self.cell.build(input_shape)

        def call(self, x: Any, states: Any, training: Any = None) -> Any:
            out, states = self.cell(x, states, training=training)
            return out + x, states

    return ResidualWrapper(layers.LSTMCell(H)), n(B, T, H), [n(B, H), n(B, H)]


@cell(reads, two, H)
class lstm_time_aware(Cell):
    """The last feature of x is the time that has passed."""

    def __init__(self, units: int, **kwargs: Any) -> None:
        super().__init__(units, **kwargs)
        self.state_size = [units, units]

    def build(self, input_shape: Any) -> None:
        self.decompose = self.kernel("decompose", self.units, self.units)
        self.w = self.kernel("w", input_shape[-1] - 1, 4 * self.units)
        self.u = self.kernel("u", self.units, 4 * self.units)

    def call(self, inputs: Any, states: Any) -> Any:
        x, elapsed = inputs[:, :-1], inputs[:, -1:]
        h, c = states
        short = tf.tanh(tf.matmul(c, self.decompose))
        c = c - short + short / tf.math.log(np.e + tf.abs(elapsed))
        f, i, o, g = tf.split(tf.matmul(x, self.w) + tf.matmul(h, self.u), 4, axis=-1)
        c = tf.sigmoid(f) * c + tf.sigmoid(i) * tf.tanh(g)
        h = tf.sigmoid(o) * tf.tanh(c)
        return h, [h, c]


@cell(reads, two, H)
class nas_cell(Cell):
    def __init__(self, units: int, **kwargs: Any) -> None:
        super().__init__(units, **kwargs)
        self.state_size = [units, units]

    def build(self, input_shape: Any) -> None:
        self.x = self.kernel("x", input_shape[-1], 8 * self.units)
        self.h = self.kernel("h", self.units, 8 * self.units)

    def call(self, x: Any, states: Any) -> Any:
        c, h = states
        u = tf.split(tf.matmul(x, self.x), 8, axis=1)
        a = tf.split(tf.matmul(h, self.h), 8, axis=1)
        s, t, r = tf.sigmoid, tf.tanh, tf.nn.relu
        l1 = [s(u[0] + a[0]), r(u[1] + a[1]), s(u[2] + a[2]), r(u[3] * a[3])]
        l1 += [t(u[4] + a[4]), s(u[5] + a[5]), t(u[6] + a[6]), s(u[7] + a[7])]
        l2 = [t(t(l1[0] * l1[1]) + c), t(l1[2] + l1[3]), t(l1[4] * l1[5]), s(l1[6] + l1[7])]
        c = l2[0] * l2[1]
        h = t(c * t(l2[2] + l2[3]))
        return h, [c, h]


@reads
def slstm(n: Numbers) -> Any:
    class SLSTMCell(Cell):
        def __init__(self, units: int, heads: int, **kwargs: Any) -> None:
            super().__init__(units, **kwargs)
            self.heads = heads
            self.state_size = [units] * 4
            self.output_size = units

        def build(self, input_shape: Any) -> None:
            size = self.units // self.heads
            self.w = self.kernel("w", input_shape[-1], 4 * self.units)
            self.r = self.kernel("r", 4, self.heads, size, size)
            self.b = self.kernel("b", 4 * self.units)

        def call(self, x: Any, states: Any) -> Any:
            h, c, norm, m = states
            size = self.units // self.heads
            split = ops.reshape(h, (-1, self.heads, size))
            rec = ops.einsum("bnd,gnde->bgne", split, self.r)
            z = ops.matmul(x, self.w) + self.b + ops.reshape(rec, (-1, 4 * self.units))
            z, i, f, o = ops.split(z, 4, axis=-1)
            f = ops.log_sigmoid(f)
            new_m = ops.maximum(f + m, i)
            i, f = ops.exp(i - new_m), ops.exp(f + m - new_m)
            c = f * c + i * ops.tanh(z)
            norm = f * norm + i
            h = ops.sigmoid(o) * c / norm
            return h, [h, c, norm, new_m]

    return SLSTMCell(H, 2), n(B, T, I), [n(B, H), n(B, H), n.positive(B, H), n(B, H)]


# -- GRUs ---------------------------------------------------------------------------------------
@cell(reads, one, H)
class gru_by_hand(Cell):
    def build(self, input_shape: Any) -> None:
        for gate in "zrh":
            setattr(self, f"W_{gate}", self.kernel(f"W_{gate}", input_shape[-1], self.units))
            setattr(self, f"U_{gate}", self.kernel(f"U_{gate}", self.units, self.units))
            setattr(self, f"b_{gate}", self.kernel(f"b_{gate}", 1, self.units))

    def call(self, x: Any, states: Any) -> Any:
        h_prev = states[0]
        z = tf.sigmoid(x @ self.W_z + h_prev @ self.U_z + self.b_z)
        r = tf.sigmoid(x @ self.W_r + h_prev @ self.U_r + self.b_r)
        h = tf.tanh(x @ self.W_h + (r * h_prev) @ self.U_h + self.b_h)
        h = (1 - z) * h_prev + z * h
        return h, [h]


@cell(reads, one, H, reset_after=False)
class gru_subclass(layers.GRUCell):
    """Keras's own call, and a norm of what comes out of it."""

    def build(self, input_shape: Any) -> None:
        super().build(input_shape)
        self.gain = self.add_weight(shape=(self.units,), name="gain", initializer="ones")

    def call(self, inputs: Any, states: Any, training: Any = None) -> Any:
        h, _ = super().call(inputs, states, training=training)
        mean = ops.mean(h, axis=-1, keepdims=True)
        h = self.gain * (h - mean) / ops.sqrt(ops.var(h, axis=-1, keepdims=True) + 1e-4)
        return h, [h]


@reads
def gru_d(n: Numbers) -> Any:
    """x holds values, masks and times since the last value, one after the other."""

    class GRUDCell(Cell):
        def __init__(self, units: int, features: int, **kwargs: Any) -> None:
            super().__init__(units, **kwargs)
            self.features = features
            self.state_size = [units, features]
            self.output_size = units

        def build(self, input_shape: Any) -> None:
            d = self.features
            self.decay_x = self.kernel("decay_x", 1, d)
            self.decay_h = self.kernel("decay_h", d, self.units)
            self.w = self.kernel("w", 2 * d, 3 * self.units)
            self.u = self.kernel("u", self.units, 3 * self.units)
            self.mean = self.add_weight(shape=(1, d), trainable=False, name="mean")

        def call(self, inputs: Any, states: Any) -> Any:
            h, last = states
            x, m, d = ops.split(inputs, 3, axis=-1)
            observed = m > 0
            last = ops.where(observed, x, last)
            gx = ops.exp(-ops.relu(d * self.decay_x))
            x = ops.where(observed, x, gx * last + (1 - gx) * self.mean)
            h = ops.exp(-ops.relu(d @ self.decay_h)) * h
            xz, xr, xn = ops.split(ops.concatenate([x, m], axis=-1) @ self.w, 3, axis=-1)
            hz, hr, hn = ops.split(h @ self.u, 3, axis=-1)
            z, r = ops.sigmoid(xz + hz), ops.sigmoid(xr + hr)
            h = (1 - z) * h + z * ops.tanh(xn + r * hn)
            return h, [h, last]

    x = np.concatenate([n(B, T, 2), n.flags(B, T, 2).astype(float), n.positive(B, T, 2)], axis=-1)
    return GRUDCell(H, 2), x, [n(B, H), n(B, 2)]


@cell(reads, one, H)
class gru_einsum(Cell):
    def build(self, input_shape: Any) -> None:
        self.w = self.kernel("w", 3, input_shape[-1], self.units)
        self.u = self.kernel("u", 3, self.units, self.units)

    def call(self, x: Any, states: Any) -> Any:
        h = states[0]
        xs = tf.einsum("bi,giu->gbu", x, self.w)
        hs = tf.einsum("bk,gku->gbu", h, self.u)
        r, z = tf.sigmoid(xs[0] + hs[0]), tf.sigmoid(xs[1] + hs[1])
        new = tf.tanh(xs[2] + r * hs[2])
        h = z * h + (1.0 - z) * new
        return h, [h]


@reads
def gru_resets(n: Numbers) -> Any:
    """The last feature says that an episode begins."""

    class ResetCell(Cell):
        def __init__(self, units: int, **kwargs: Any) -> None:
            super().__init__(units, **kwargs)
            self.inner = layers.GRUCell(units)

        def build(self, input_shape: Any) -> None:
            self.inner.build((None, input_shape[-1] - 1))

        def call(self, inputs: Any, states: Any) -> Any:
            x, start = inputs[..., :-1], inputs[..., -1:]
            h = states[0] * (1.0 - start)
            return self.inner(x, [h])

    cell, x, h = one(n, ResetCell(H))
    x[..., -1] = n.flags(B, T)
    return cell, x, h


# -- Simple and continuous-time networks --------------------------------------------------------
@cell(reads, one, H)
class minimal_rnn(layers.Layer):
    """The cell of Keras's guide."""

    def __init__(self, units: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.units = units
        self.state_size = units

    def build(self, input_shape: Any) -> None:
        self.kernel = self.add_weight(
            shape=(input_shape[-1], self.units), initializer="uniform", name="kernel"
        )
        self.recurrent_kernel = self.add_weight(
            shape=(self.units, self.units), initializer="uniform", name="recurrent_kernel"
        )

    def call(self, inputs: Any, states: Any) -> Any:
        prev_output = states[0]
        h = ops.matmul(inputs, self.kernel)
        output = h + ops.matmul(prev_output, self.recurrent_kernel)
        return output, [output]


@cell(reads, one, H)
class ct_rnn(Cell):
    def build(self, input_shape: Any) -> None:
        self.w = self.kernel("w", input_shape[-1] + self.units, self.units)
        self.b = self.kernel("b", 1, self.units)
        self.tau = self.kernel("tau", 1, self.units)

    def call(self, x: Any, states: Any) -> Any:
        h = states[0]
        for _ in range(6):
            f = tf.nn.tanh(tf.concat([x, h], axis=-1) @ self.w + self.b)
            h = h + 0.1 * (f - h / (1.0 + tf.nn.softplus(self.tau)))
        return h, [h]


@cell(reads, one, H)
class liquid_time_constant(Cell):
    def build(self, input_shape: Any) -> None:
        self.w, self.u = self.kernel("w", I, self.units), self.kernel("u", H, self.units)
        self.a, self.tau = self.kernel("a", 1, self.units), self.kernel("tau", 1, self.units)

    def call(self, x: Any, states: Any) -> Any:
        h, dt = states[0], 0.2
        drive = ops.matmul(x, self.w)
        for _ in range(3):
            f = ops.sigmoid(drive + ops.matmul(h, self.u))
            h = ops.divide(h + dt * f * self.a, 1 + dt * (ops.exp(self.tau) + f))
        return h, [h]


@cell(reads, one, H)
class recurrent_highway(Cell):
    def build(self, input_shape: Any) -> None:
        self.w = self.kernel("w", input_shape[-1], 2 * self.units)
        self.r = [self.kernel(f"r{k}", self.units, 2 * self.units) for k in range(3)]
        self.b = [self.kernel(f"b{k}", 2 * self.units) for k in range(3)]

    def call(self, x: Any, states: Any) -> Any:
        s = states[0]
        for depth in range(3):
            z = ops.matmul(s, self.r[depth]) + self.b[depth]
            if depth == 0:
                z = z + ops.matmul(x, self.w)
            h, t = ops.tanh(z[:, : self.units]), ops.sigmoid(z[:, self.units :])
            s = h * t + s * (1 - t)
        return s, [s]


@cell(reads, one, H)
class echo_state(Cell):
    """A reservoir: weights that are not trained, a leak."""

    def build(self, input_shape: Any) -> None:
        self.w_in = self.add_weight(
            shape=(input_shape[-1], self.units), trainable=False, name="w_in"
        )
        self.w = self.add_weight(shape=(self.units, self.units), trainable=False, name="w")
        self.b = self.kernel("b", self.units)

    def call(self, x: Any, states: Any) -> Any:
        s = tf.tanh(tf.matmul(x, self.w_in) + tf.matmul(states[0], self.w) + self.b)
        s = 0.3 * s + 0.7 * states[0]
        return s, [s]


@cell(reads, one, H)
class independent_units(Cell):
    def build(self, input_shape: Any) -> None:
        self.w, self.u = self.kernel("w", input_shape[-1], self.units), self.kernel("u", H)

    def call(self, x: Any, states: Any) -> Any:
        h = tf.nn.leaky_relu(tf.matmul(x, self.w) + tf.multiply(states[0], self.u), alpha=0.1)
        return h, [h]


@either
def clockwork(n: Numbers) -> Any:
    """A float for each row counts the steps."""

    class ClockworkCell(Cell):
        def __init__(self, units: int, **kwargs: Any) -> None:
            super().__init__(units, **kwargs)
            self.state_size = [units, 1]
            self.output_size = units
            self.periods = np.repeat([1.0, 2.0, 4.0], units // 3)

        def build(self, input_shape: Any) -> None:
            self.w = self.kernel("w", input_shape[-1], self.units)
            self.u = self.kernel("u", self.units, self.units)
            self.mask = (self.periods[:, None] >= self.periods[None]).astype(float)

        def call(self, x: Any, states: Any) -> Any:
            h, t = states
            new = tf.tanh(x @ self.w + h @ (self.u * self.mask))
            on = tf.equal(tf.math.floormod(t, self.periods), 0.0)
            h = tf.where(on, new, h)
            return h, [h, t + 1.0]

    return ClockworkCell(H), n(B, T, I), [n(B, H), np.zeros((B, 1))]


# -- Other shapes -------------------------------------------------------------------------------
@reads
def simple_recurrent_unit(n: Numbers) -> Any:
    class SRUCell(Cell):
        def build(self, input_shape: Any) -> None:
            self.w = layers.Dense(3 * self.units, use_bias=False)
            self.w.build(input_shape)
            self.bf, self.br = self.kernel("bf", 1, self.units), self.kernel("br", 1, self.units)

        def call(self, x: Any, states: Any) -> Any:
            c = states[0]
            u, f, r = tf.split(self.w(x), 3, axis=-1)
            f, r = tf.sigmoid(f + self.bf), tf.sigmoid(r + self.br)
            c = f * c + (1 - f) * u
            return r * tf.tanh(c) + (1 - r) * x, [c]

    return SRUCell(H), n(B, T, H), n(B, H)


@reads
def decoder_with_readout(n: Numbers) -> Any:
    """Output feedback: the last prediction enters beside x, and is what comes out."""

    class Decoder(Cell):
        def __init__(self, units: int, **kwargs: Any) -> None:
            super().__init__(units, **kwargs)
            self.state_size, self.output_size = [units, 2], 2
            self.rnn, self.out = layers.GRUCell(units), layers.Dense(2, activation="softmax")

        def build(self, input_shape: Any) -> None:
            self.rnn.build((None, input_shape[-1] + 2))
            self.out.build((None, self.units))

        def call(self, x: Any, states: Any) -> Any:
            h, y = states
            h, _ = self.rnn(ops.concatenate([x, y], axis=-1), [h])
            y = self.out(h)
            return y, [h, y]

    return Decoder(H), n(B, T, I), [n(B, H), n(B, 2)]


@reads
def quasi_recurrent(n: Numbers) -> Any:
    class QRNNCell(Cell):
        def __init__(self, units: int, features: int, **kwargs: Any) -> None:
            super().__init__(units, **kwargs)
            self.state_size, self.output_size = [features, units], units

        def build(self, input_shape: Any) -> None:
            self.w = self.kernel("w", 2, input_shape[-1], 3 * self.units)

        def call(self, x: Any, states: Any) -> Any:
            prev, c = states
            z = tf.tensordot(tf.stack([prev, x], axis=1), self.w, axes=[[1, 2], [0, 1]])
            z, f, o = z[:, :H], tf.sigmoid(z[:, H : 2 * H]), tf.sigmoid(z[:, 2 * H :])
            c = f * c + (1 - f) * tf.tanh(z)
            return o * c, [x, c]

    return QRNNCell(H, I), n(B, T, I), [n(B, I), n(B, H)]


@cell(reads, two, H)
class dropout_asleep(Cell):
    """Keras's cell with dropout that is not on, in a cell of one's own with a layer of it."""

    def __init__(self, units: int, **kwargs: Any) -> None:
        super().__init__(units, **kwargs)
        self.state_size = [units, units]
        self.inner, self.drop = layers.LSTMCell(units), layers.Dropout(0.3)

    def build(self, input_shape: Any) -> None:
        self.inner.build(input_shape)

    def call(self, x: Any, states: Any, training: Any = None) -> Any:
        h, states = self.inner(self.drop(x, training=training), states)
        return self.drop(h, training=training), states


@cell(reads, two, H)
class oscillators(Cell):
    def __init__(self, units: int, **kwargs: Any) -> None:
        super().__init__(units, **kwargs)
        self.state_size = [units, units]

    def build(self, input_shape: Any) -> None:
        self.layer = layers.Dense(self.units)
        self.layer.build((None, input_shape[-1] + 2 * self.units))

    def call(self, x: Any, states: Any) -> Any:
        y, z = states
        z = z + 0.05 * (tf.tanh(self.layer(tf.concat([x, y, z], 1))) - 2.0 * y - 4.0 * z)
        y = y + 0.05 * z
        return y, [y, z]


@cell(reads, one, H)
class deep_transition(Cell):
    """A small network of layers as the transition."""

    def __init__(self, units: int, **kwargs: Any) -> None:
        super().__init__(units, **kwargs)
        self.net = keras.Sequential([layers.Dense(7, activation="gelu"), layers.Dense(units)])

    def build(self, input_shape: Any) -> None:
        self.net.build((None, input_shape[-1] + self.units))

    def call(self, x: Any, states: Any) -> Any:
        h = states[0] + 0.5 * ops.silu(self.net(ops.concatenate([x, states[0]], -1)))
        return h, [h]


@cell(reads, one, H)
class unit_norm(Cell):
    """A state of length one, and weights of columns of length one."""

    def build(self, input_shape: Any) -> None:
        self.w = self.kernel("w", input_shape[-1], self.units)
        self.u = self.kernel("u", self.units, self.units)

    def call(self, x: Any, states: Any) -> Any:
        u = tf.math.l2_normalize(self.u, axis=0)
        h = tf.nn.elu(x @ self.w + states[0] @ u)
        h = h * tf.math.rsqrt(tf.reduce_sum(tf.square(h), axis=-1, keepdims=True) + 1e-3)
        return h, [h]


# -- What cannot be read ------------------------------------------------------------------------
@refused()
def turing_memory(n: Numbers) -> Any:
    class NTMCell(Cell):
        def __init__(self, units: int, **kwargs: Any) -> None:
            super().__init__(units, **kwargs)
            self.state_size, self.output_size = [units, (4, 3)], units

        def build(self, input_shape: Any) -> None:
            self.key, self.add = (
                self.kernel("key", self.units, 3),
                self.kernel("add", self.units, 3),
            )
            self.w = self.kernel("w", input_shape[-1] + 3 + self.units, self.units)

        def call(self, x: Any, states: Any) -> Any:
            h, memory = states
            w = ops.softmax(ops.einsum("bms,bs->bm", memory, h @ self.key))
            read = ops.einsum("bm,bms->bs", w, memory)
            h = ops.tanh(ops.concatenate([x, read, h], axis=-1) @ self.w)
            memory = memory + w[..., None] * (h @ self.add)[:, None]
            return h, [h, memory]

    return NTMCell(H), n(B, T, I), [n(B, H), n(B, 4, 3)]


@refused()
def fast_weights(n: Numbers) -> Any:
    class FastWeights(Cell):
        def __init__(self, units: int, **kwargs: Any) -> None:
            super().__init__(units, **kwargs)
            self.state_size, self.output_size = [units, (units, units)], units

        def build(self, input_shape: Any) -> None:
            self.w = self.kernel("w", input_shape[-1], self.units)

        def call(self, x: Any, states: Any) -> Any:
            h, a = states
            h = tf.tanh(tf.matmul(x, self.w) + tf.linalg.matvec(a, h))
            a = 0.9 * a + 0.5 * h[:, :, None] * h[:, None, :]
            return h, [h, a]

    return FastWeights(H), n(B, T, I), [n(B, H), n(B, H, H)]


@cell(refused(), one, H)
class branch_on_data(Cell):
    def build(self, input_shape: Any) -> None:
        self.w = self.kernel("w", input_shape[-1], self.units)
        self.u = self.kernel("u", self.units, self.units)

    def call(self, x: Any, states: Any) -> Any:
        z = tf.tanh(tf.matmul(x, self.w) + tf.matmul(states[0], self.u))
        h = tf.cond(tf.reduce_sum(z) > 0, lambda: z * 0.5, lambda: z - 0.1)
        return h, [h]


@cell(refused(), one, H)
class batch_norm(Cell):
    def build(self, input_shape: Any) -> None:
        self.w = self.kernel("w", input_shape[-1], self.units)
        self.u = self.kernel("u", self.units, self.units)

    def call(self, x: Any, states: Any) -> Any:
        z = tf.matmul(states[0], self.u)
        mean, var = tf.nn.moments(z, axes=[0])
        h = tf.tanh(tf.matmul(x, self.w) + (z - mean) * tf.math.rsqrt(var + 1e-3))
        return h, [h]


@tf.custom_gradient
def spike(v: Any) -> Any:
    return tf.cast(v > 0, v.dtype), lambda g: g / tf.square(1.0 + 10.0 * tf.abs(v))


@refused()
def spiking(n: Numbers) -> Any:
    class LIFCell(Cell):
        def __init__(self, units: int, **kwargs: Any) -> None:
            super().__init__(units, **kwargs)
            self.state_size = [units, units]

        def build(self, input_shape: Any) -> None:
            self.w = self.kernel("w", input_shape[-1], self.units)
            self.u = self.kernel("u", self.units, self.units)

        def call(self, x: Any, states: Any) -> Any:
            s, v = states
            v = 0.9 * v + tf.matmul(x, self.w) + tf.matmul(s, self.u) - 0.3 * s
            s = spike(v - 0.3)
            return s, [s, v]

    return LIFCell(H), n(B, T, I), [np.zeros((B, H)), n(B, H)]


@cell(refused(), one, H)
class winners_take_all(Cell):
    def build(self, input_shape: Any) -> None:
        self.w = self.kernel("w", input_shape[-1], self.units)
        self.u = self.kernel("u", self.units, self.units)

    def call(self, x: Any, states: Any) -> Any:
        z = tf.tanh(tf.matmul(x, self.w) + tf.matmul(states[0], self.u))
        least = tf.math.top_k(z, k=2).values[:, -1:]
        h = tf.where(z >= least, z, tf.zeros_like(z))
        return h, [h]


@cell(refused(), one, H)
class half_inside(Cell):
    def build(self, input_shape: Any) -> None:
        self.w = self.kernel("w", input_shape[-1], self.units)
        self.u = self.kernel("u", self.units, self.units)

    def call(self, x: Any, states: Any) -> Any:
        z = tf.cast(tf.matmul(x, self.w) + tf.matmul(states[0], self.u), tf.float16)
        h = tf.cast(tf.tanh(z), x.dtype)
        return h, [h]


@cell(refused(), one, H)
class counts_its_calls(Cell):
    """A variable that each step changes."""

    def build(self, input_shape: Any) -> None:
        self.w = self.kernel("w", input_shape[-1] + self.units, self.units)
        self.seen = self.add_weight(shape=(), trainable=False, name="seen")

    def call(self, x: Any, states: Any) -> Any:
        self.seen.assign_add(1.0)
        h = tf.tanh(tf.concat([x, states[0]], 1) @ self.w)
        return h, [h]
