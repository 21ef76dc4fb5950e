"""Cells of Keras as users write them, run fused without being written again.

One file, because most tests run the same cells.
"""

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

keras = pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")
from keras_layers import BACKEND, assert_right, copy_weights, number, random_mask, solve  # noqa: E402
from tolerances import assert_close  # noqa: E402

import anycell.keras as ak  # noqa: E402

if BACKEND not in ("tensorflow", "jax", "torch"):
    pytest.skip(f"cells are not read on {BACKEND}", allow_module_level=True)
tensorflow = pytest.mark.skipif(BACKEND != "tensorflow", reason="about tensors of TensorFlow")
layers, ops = keras.layers, keras.ops
B, T, I, H = 4, 5, 3, 6
EXACT = "float64" if BACKEND == "tensorflow" else "float32"  # in which Keras computes elsewhere


# -- cells, in the words of their documents ------------------------------------------------------
class OfUnits(layers.Layer):
    """What the cells below have in common."""

    states = 1

    def __init__(self, units: int = H, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.units = units
        self.state_size = units if self.states == 1 else [units] * self.states

    def weight(self, name: str, *shape: int) -> Any:
        return self.add_weight(shape=shape, name=name, initializer="glorot_uniform")

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "units": self.units}


class Minimal(OfUnits):
    """The cell of Keras's page on RNN."""

    def build(self, input_shape: Any) -> None:
        self.kernel = self.weight("kernel", input_shape[-1], self.units)
        self.recurrent_kernel = self.weight("recurrent_kernel", self.units, self.units)

    def call(self, inputs: Any, states: Any) -> Any:
        prev_output = states[0]
        h = ops.matmul(inputs, self.kernel)
        output = h + ops.matmul(prev_output, self.recurrent_kernel)
        return output, [output]


@keras.saving.register_keras_serializable("tests")
class Concat(OfUnits):
    """LSTM on ``[x, h]``."""

    states = 2

    def build(self, shape: Any) -> None:
        self.w = self.weight("w", shape[-1] + self.units, 4 * self.units)
        self.b = self.add_weight(shape=(4 * self.units,), name="b", initializer="zeros")

    def call(self, inputs: Any, states: Any) -> Any:
        h, c = states
        z = ops.matmul(ops.concatenate([inputs, h], axis=1), self.w) + self.b
        i, f, g, o = ops.split(z, 4, axis=1)
        c = ops.sigmoid(f + 1.0) * c + ops.sigmoid(i) * ops.tanh(g)
        h = ops.sigmoid(o) * ops.tanh(c)
        return h, [h, c]


class InTensorFlow(Concat):
    """The same in functions of TensorFlow."""

    def call(self, inputs: Any, states: Any) -> Any:
        h, c = states
        z = tf.nn.bias_add(tf.matmul(tf.concat([inputs, h], -1), self.w), self.b)
        i, f, g, o = tf.split(z, num_or_size_splits=4, axis=-1)
        c = tf.multiply(tf.nn.sigmoid(f), c) + tf.nn.sigmoid(i) * tf.nn.tanh(g)
        h = tf.nn.sigmoid(o) * tf.nn.tanh(c)
        return h, (h, c)


class Normalized(Concat):
    """LSTM whose gates and cell state are normalised by layers."""

    def __init__(self, units: int = H, **kwargs: Any) -> None:
        super().__init__(units, **kwargs)
        self.norms = [layers.LayerNormalization() for _ in range(2)]

    def build(self, shape: Any) -> None:
        super().build(shape)
        self.norms[0].build((None, 4 * self.units))
        self.norms[1].build((None, self.units))

    def call(self, inputs: Any, states: Any) -> Any:
        h, c = states
        z = self.norms[0](ops.matmul(ops.concatenate([inputs, h], axis=-1), self.w))
        i, f, g, o = ops.split(z + self.b, 4, axis=-1)
        c = ops.sigmoid(f) * c + ops.sigmoid(i) * ops.tanh(g)
        return ops.sigmoid(o) * ops.tanh(self.norms[1](c)), [ops.sigmoid(o) * ops.tanh(c), c]


class ResetBefore(OfUnits):
    """GRU with a weight for each gate, and the reset before its matmul."""

    def build(self, shape: Any) -> None:
        for gate in "zrn":
            setattr(self, f"w_{gate}", self.weight(f"w_{gate}", shape[-1], self.units))
            setattr(self, f"u_{gate}", self.weight(f"u_{gate}", self.units, self.units))
            setattr(self, f"b_{gate}", self.add_weight(shape=(self.units,), name=f"b_{gate}"))

    def call(self, x: Any, states: Any) -> Any:
        (h,) = states
        z = ops.sigmoid(x @ self.w_z + h @ self.u_z + self.b_z)
        r = ops.sigmoid(x @ self.w_r + h @ self.u_r + self.b_r)
        n = ops.tanh(x @ self.w_n + (r * h) @ self.u_n + self.b_n)
        h = (1.0 - z) * n + z * h
        return h, [h]


@keras.saving.register_keras_serializable("tests")
class WithLayers(OfUnits):
    """A highway cell, made of Dense layers, with an activation by its name."""

    def __init__(self, units: int = H, activation: str = "silu", **kwargs: Any) -> None:
        super().__init__(units, **kwargs)
        self.act = keras.activations.get(activation)
        self.carry = layers.Dense(units, activation="hard_sigmoid")
        self.new = layers.Dense(units)

    def build(self, shape: Any) -> None:
        self.carry.build((None, shape[-1] + self.units))
        self.new.build((None, shape[-1] + self.units))

    def call(self, x: Any, states: Any) -> Any:
        h = states[0]
        both = ops.concatenate([h, x], axis=-1)
        keep = self.carry(both)
        h = keep * h + (1 - keep) * self.act(self.new(both))
        return h, [h]


class Around(OfUnits):
    """A layer around an LSTMCell, which projects what goes in and what comes out."""

    states = 2

    def __init__(self, units: int = H, **kwargs: Any) -> None:
        super().__init__(units, **kwargs)
        self.cell = layers.LSTMCell(units)
        self.before, self.after = layers.Dense(units, activation="relu"), layers.Dense(3)
        self.output_size = 3

    def build(self, shape: Any) -> None:
        self.before.build(shape)
        self.cell.build((None, self.units))
        self.after.build((None, self.units))

    def call(self, inputs: Any, states: Any, training: bool = False) -> Any:
        h, states = self.cell(self.before(inputs), states, training=training)
        return self.after(h), states


class OfLSTM(layers.LSTMCell):
    """An LSTM with a residual connection: a call of its own."""

    def call(self, inputs: Any, states: Any, training: bool = False) -> Any:
        h, states = super().call(inputs, states, training=training)
        return h + 0.5 * states[1], states


class OfGRU(layers.GRUCell):
    """A GRU whose state is scaled to length 1."""

    def call(self, inputs: Any, states: Any, training: bool = False) -> Any:
        h, _ = super().call(inputs, states, training=training)
        h = h * ops.rsqrt(ops.sum(ops.square(h), axis=-1, keepdims=True) + 1e-3)
        return h, [h]


class Independent(OfUnits):
    """IndRNN: a recurrent weight for each unit, bounded."""

    def build(self, shape: Any) -> None:
        self.kernel = self.weight("kernel", shape[-1], self.units)
        self.u = self.add_weight(shape=(self.units,), name="u", initializer="ones")

    def call(self, inputs: Any, states: Any) -> Any:
        u = ops.clip(self.u, -1.5, 1.5)
        h = ops.relu(ops.dot(inputs, self.kernel) + u * states[0])
        return h, [h]


class Heads(OfUnits):
    """A block-diagonal recurrent matmul by einsum, and softmax over the units of each head."""

    def build(self, shape: Any) -> None:
        self.kernel = self.weight("kernel", shape[-1], self.units)
        self.blocks = self.weight("blocks", 2, self.units // 2, self.units // 2)

    def call(self, inputs: Any, states: Any) -> Any:
        parts = ops.reshape(states[0], (-1, 2, self.units // 2))
        mixed = ops.reshape(ops.einsum("bhi,hij->bhj", parts, self.blocks), (-1, self.units))
        h = ops.tanh(ops.matmul(inputs, self.kernel) + mixed)
        return ops.softmax(h), [h]


class Gated(OfUnits):
    """Steps with a flag in the last feature start anew; the memory decays at its own rate."""

    def __init__(self, units: int = H, **kwargs: Any) -> None:
        super().__init__(units, **kwargs)
        self.state_size = [units, 2]

    def build(self, shape: Any) -> None:
        self.kernel = self.weight("kernel", shape[-1] + self.units + 2, self.units)
        self.write = self.weight("write", self.units, 2)

    def call(self, x: Any, states: Any) -> Any:
        h, memory = states
        start = x[:, -1:] > 0.8
        h, memory = ops.where(start, 0.0, h), ops.where(start, 0.0, memory)
        h = ops.tanh(ops.concatenate([x, h, memory], -1) @ self.kernel)
        memory = 0.9 * memory + ops.softplus(h @ self.write)
        return h, [h, memory]


class Clock:
    """A cell that is no layer: a leaky integrator."""

    state_size, compute_dtype = H, EXACT

    def __call__(self, x: Any, states: Any) -> Any:
        return self.call(x, states)

    def call(self, x: Any, states: Any) -> Any:
        # Positive, so that no sum of it cancels in float32.
        h = 0.8 * states[0] + 0.2 * ops.sigmoid(ops.sum(x, axis=-1, keepdims=True) + states[0])
        return h, [h]


def stacked() -> Any:
    return layers.StackedRNNCells([Concat(), Minimal(4), layers.GRUCell(5)])


CELLS: dict[str, Callable[[], Any]] = {
    "LSTM on [x, h]": Concat,
    "GRU of separate weights": ResetBefore,
    "around an LSTMCell": Around,
    "subclass of LSTMCell": lambda: OfLSTM(H),
    "heads": Heads,
    "stacked": stacked,
    "minimal": Minimal,
    "in TensorFlow": InTensorFlow,
    "normalised": Normalized,
    "of layers": WithLayers,
    "subclass of GRUCell": lambda: OfGRU(H),
    "IndRNN": Independent,
    "resets and two sizes": Gated,
    "no layer": Clock,
    "GRU with the reset before": lambda: OfGRU(H, reset_after=False, activation="elu"),
    "relu6": lambda: WithLayers(H, activation="relu6"),
}


def both(make: Callable[[], Any], dtype: str = EXACT, **options: Any) -> tuple[Any, Any]:
    """A layer of ours and one of Keras with the same weights."""
    with_dtype = keras.config.dtype_policy()
    keras.config.set_dtype_policy(dtype)
    try:
        ours, theirs = ak.RNN(make(), **options), layers.RNN(make(), **options)
    finally:
        keras.config.set_dtype_policy(with_dtype)
    copy_weights(theirs, ours, (None, None, I))
    return ours, theirs


def data(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape)


def assert_same(ours: Any, theirs: Any, x: np.ndarray, dtype: str = EXACT, **how: Any) -> None:
    graph = how.pop("graph", False)
    assert ours.engine.name == "cpu", ours.engine.reason
    assert_right(solve(ours, x, graph=graph, **how), solve(theirs, x, **how), dtype)


# -- what is read --------------------------------------------------------------------------------
@pytest.mark.parametrize("name", CELLS)
@pytest.mark.sample(1)
def test_a_cell_runs_fused(name: str, rng: np.random.Generator) -> None:
    """Results, and gradients of x and of all weights, as in Keras's loop."""
    if name == "in TensorFlow" and BACKEND != "tensorflow":
        pytest.skip("a cell of TensorFlow")
    ours, theirs = both(CELLS[name], return_sequences=True, return_state=True)
    assert_same(ours, theirs, data(rng, B, T, I))


HOW = {
    "last output": {},
    "states": {"return_state": True},
    "backwards": {"go_backwards": True, "return_sequences": True, "return_state": True},
    "zero under a mask": {"zero_output_for_mask": True, "return_sequences": True},
    "unrolled": {"unroll": True},
}


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("make", [Concat, Around], ids=["a state", "no state"])
@pytest.mark.sample(every=7)
def test_as_keras_runs_it(
    make: Any, how: str, graph: bool, masked: bool, rng: np.random.Generator
) -> None:
    """For cells whose output is a state, and for one whose output is none."""
    if BACKEND == "jax" and masked and make is Around and not HOW[how].get("zero_output_for_mask"):
        pytest.skip("there Keras's loop holds a state in place of the output")
    ours, theirs = both(make, **HOW[how])
    mask = random_mask(rng, B, T) if masked else None
    graph = graph and how != "unrolled"  # Keras knows the number of steps there
    assert_same(ours, theirs, data(rng, B, T, I), graph=graph, mask=mask)


def test_initial_states_have_gradients(rng: np.random.Generator) -> None:
    ours, theirs = both(Gated, return_sequences=True)
    states = [data(rng, B, H), data(rng, B, 2)]
    assert_same(ours, theirs, data(rng, B, T, I), states=states)


def test_stateful(rng: np.random.Generator) -> None:
    ours, theirs = (
        kind(Concat(name="c"), stateful=True, return_sequences=True)
        for kind in (ak.RNN, layers.RNN)
    )
    copy_weights(theirs, ours, (B, T, I))
    for _ in range(2):
        x = ops.convert_to_tensor(data(rng, B, T, I), "float32")
        assert_close(number(ours(x)), number(theirs(x)), "float32", "forward")
    ours.reset_state(), theirs.reset_state()
    assert_close(number(ours(x)), number(theirs(x)), "float32", "forward")


@pytest.mark.parametrize("implementation", [1, 2])
@pytest.mark.sample(1)
def test_dropout_has_keras_masks(implementation: int, rng: np.random.Generator) -> None:
    """One mask for all steps, and the same ones for the same seed."""
    given = {"dropout": 0.4, "recurrent_dropout": 0.3, "implementation": implementation}
    x = ops.convert_to_tensor(data(rng, B, T, I), "float32")
    ours, theirs = (
        kind(OfLSTM(H, seed=3, **given), return_sequences=True) for kind in (ak.RNN, layers.RNN)
    )
    copy_weights(theirs, ours, (B, T, I))
    for _ in range(2):
        dropped = number(theirs(x, training=True))
        assert_close(number(ours(x, training=True)), dropped, "float32", "forward")
    assert ours.engine.name == "cpu" and ours.cell._dropout_mask is None
    x = x[1:]
    dropped = number(theirs(x, training=True))
    assert_close(number(ours(x, training=True)), dropped, "float32", "forward")
    assert_close(number(ours(x)), number(theirs(x)), "float32", "forward")
    assert ours.engine.name == "cpu", ours.engine.reason


@pytest.mark.slow
def test_it_trains_as_keras_does(rng: np.random.Generator) -> None:
    """In ``fit``: regularizers, constraints and the optimizer see the user's own variables."""
    x, y = data(rng, 8, T, I).astype("float32"), data(rng, 8, 1).astype("float32")
    trained: list[Any] = []
    for module in (ak, layers):
        cell = OfLSTM(H, kernel_regularizer="l2", bias_constraint="non_neg")
        model = keras.Sequential([keras.Input((None, I)), module.RNN(cell), layers.Dense(1)])
        model.set_weights(trained[0] if trained else model.get_weights())
        trained.append(model.get_weights())
        model.compile("adam", "mse")
        model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        trained.append(model.get_weights())
    assert [w.path.split("/")[-1] for w in cell.trainable_variables] == [
        "kernel", "recurrent_kernel", "bias",
    ]  # fmt: skip
    for ours, right in zip(trained[1], trained[3], strict=True):
        assert_close(ours, right, "float32", "gradient")


@tensorflow
def test_accelerate_takes_them_and_files_fit(tmp_path: Path, rng: np.random.Generator) -> None:
    model = keras.Sequential(
        [keras.Input((None, I)), layers.Bidirectional(layers.RNN(Concat(), name="memory"))]
    )
    x = ops.convert_to_tensor(data(rng, B, T, I), "float32")
    before = model(x)
    [forwards, backwards] = ak.recurrent_layers(ak.accelerate(model))
    assert forwards.engine == backwards.engine == "cpu", forwards
    assert_close(model(x), before, "float32", "forward")
    model.save(tmp_path / "ours.keras")
    again = keras.models.load_model(tmp_path / "ours.keras")
    assert_close(again(x), before, "float32", "forward")
    assert {found.engine for found in ak.recurrent_layers(again)} == {"cpu"}
    model.save_weights(tmp_path / "ours.weights.h5")
    ak.restore(model)
    assert type(model.layers[0].forward_layer) is layers.RNN
    model.load_weights(tmp_path / "ours.weights.h5")
    assert_close(model(x), before, "float32", "forward")


@tensorflow
def test_changes_of_a_cell_are_seen(rng: np.random.Generator) -> None:
    """A number, a function or a variable that is replaced after the first call."""
    x = ops.convert_to_tensor(data(rng, B, T, I), "float32")
    ours, theirs = both(WithLayers, "float32")
    for change in (
        lambda cell: setattr(cell, "act", ops.tanh),
        lambda cell: setattr(cell, "units", cell.units),
        lambda cell: cell.new.kernel.assign(2.0 * cell.new.kernel),
    ):
        for layer in (ours, theirs):
            change(layer.cell)
        assert_close(ours(x), theirs(x), "float32", "forward")
    copied = copy.deepcopy(ours)
    copied.cell.carry.bias.assign_add(tf.ones(H))
    assert float(tf.norm(copied(x) - ours(x))) > 1e-3
    assert ours.engine.name == copied.engine.name == "cpu"


def test_mixed_precision(rng: np.random.Generator) -> None:
    narrow = "bfloat16" if BACKEND == "torch" else "float16"  # which Keras multiplies in float32
    x = ops.convert_to_tensor(data(rng, B, T, I), narrow)
    ours, theirs = both(Concat, f"mixed_{narrow}", return_sequences=True)
    assert keras.backend.standardize_dtype(ours(x).dtype) == narrow and ours.engine.name == "cpu"
    assert_close(number(ours(x)), number(theirs(x)), narrow, "forward")


def test_explain_shows_the_cell() -> None:
    layer = ak.RNN(OfLSTM(H))
    assert layer.engine.name == "keras" and "once the layer is built" in layer.engine.reason
    layer.build((None, None, I))
    assert layer.text is not None and layer.text.startswith("from anycell import cell")
    shown = str(layer.explain())
    assert "OfLSTM" in shown and "tanh" in shown and "cpu" in shown


# -- the table of operations ---------------------------------------------------------------------
def noise(*shape: int) -> Any:
    return tf.Variable(np.random.default_rng(sum(shape)).normal(size=shape) / 3, dtype=tf.float32)


W, U, R, HEADS, TABLE = (noise(*s) for s in ((I, 8), (8, 8), (8, 32), (2, 4, 4), (9, 8)))
X4 = noise(I, 32)


def unstacked(x: Any, h: Any) -> Any:
    a, b, c, d = tf.unstack(tf.reshape(x @ X4 + h @ R, (-1, 4, 8)), axis=1)
    return tf.tanh(a) * tf.sigmoid(b) + h * tf.sigmoid(c) + d


def interleaved(x: Any, h: Any) -> Any:
    z = x @ X4 + h @ R
    return tf.tanh(z[:, ::4]) * tf.sigmoid(z[:, 1::4]) + h * tf.sigmoid(z[:, 2::4]) + z[:, 3::4]


def with_moments(x: Any, h: Any) -> Any:
    z = x @ W + h @ U
    mean, variance = tf.nn.moments(z, [1], keepdims=True)
    return tf.nn.batch_normalization(z, mean, variance, None, U[0], 1e-3)


def headed(x: Any, h: Any) -> Any:
    return x @ W + tf.reshape(tf.einsum("bhi,hij->bhj", tf.reshape(h, (-1, 2, 4)), HEADS), (-1, 8))


def embedded(x: Any, h: Any) -> Any:
    return tf.tanh(tf.gather(TABLE, tf.cast(tf.abs(x[:, 0]), tf.int32) % 9) + h @ U)


OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "unstack": unstacked,
    "strides": interleaved,
    "moments": with_moments,
    "einsum": headed,
    "gather of a variable": embedded,
    "silu": lambda x, h: tf.nn.silu(x @ W + h @ U),
    "log_softmax": lambda x, h: tf.nn.log_softmax(x @ W + h @ U),
    "softmax": lambda x, h: tf.nn.softmax(x @ W + h @ U),
    "logsumexp": lambda x, h: x @ W + h @ U - tf.reduce_logsumexp(h, -1, keepdims=True),
    "gelu": lambda x, h: tf.nn.gelu(x @ W + h @ U),
    "gelu by tanh": lambda x, h: tf.nn.gelu(x @ W + h @ U, approximate=True),
    "selu": lambda x, h: tf.nn.selu(x @ W + h @ U),
    "relu6": lambda x, h: tf.nn.relu6(3.0 * (x @ W + h @ U)),
    "leaky_relu": lambda x, h: tf.nn.leaky_relu(x @ W + h @ U, 0.1),
    "hard_sigmoid": lambda x, h: keras.activations.hard_sigmoid(x @ W + h @ U),
    "power": lambda x, h: 0.1 * (x @ W + h @ U) ** 2 + tf.pow(tf.abs(h) + 1.0, 1.5),
    "clip": lambda x, h: tf.clip_by_value(x @ W + h @ U, -0.5, 0.5),
    "minimum of units": lambda x, h: tf.tanh(x @ W) + tf.reduce_min(h @ U, -1, keepdims=True),
    "cumsum": lambda x, h: x @ W + tf.cumsum(h, axis=1, exclusive=True, reverse=True),
    "divide_no_nan": lambda x, h: tf.math.divide_no_nan(x @ W, h),
    "stop_gradient": lambda x, h: tf.tanh(x @ W + tf.stop_gradient(h @ U)),
    "booleans": lambda x, h: tf.where((h > 0.0) & (x @ W > 0.0), h, 0.5 * h + x @ W),
    "cast of a boolean": lambda x, h: h * tf.cast(h > 0.0, tf.float32) + x @ W,
    "transposed weight": lambda x, h: tf.tanh(x @ W + tf.matmul(h, U, transpose_b=True)),
    "batch last": lambda x, h: tf.transpose(tf.matmul(U, h, True, True)) + x @ W,
    "permutation": lambda x, h: tf.tanh(x @ W + tf.gather(h, [1, 0, 3, 2, 5, 4, 7, 6], axis=1)),
    "repeat": lambda x, h: tf.tanh(x @ W + tf.repeat(h[:, :2], 4, axis=1)),
    "add_n": lambda x, h: tf.tanh(tf.add_n([x @ W, h @ U, h])),
    "ones of the batch": lambda x, h: tf.tanh(
        tf.concat([h, tf.ones((tf.shape(x)[0], 1))], 1) @ TABLE + x @ W
    ),
    "a weight of weights": lambda x, h: tf.tanh(x @ W + h @ (U / tf.norm(U))),
}


@tensorflow
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.sample(every=3)
def test_an_operation_is_read(name: str) -> None:
    """And proved, by the reader itself, against the operation."""
    from anycell.keras.tensorflow.read import read_step

    def step(x: Any, states: Any, others: Any) -> Any:
        h = OPERATIONS[name](x, states[0])
        return h, [h]

    read = read_step(step, ((None, I), "float32"), [((None, 8), "float32")], [])
    assert not isinstance(read, str) and read.reading.cell.states


# -- what is not read ----------------------------------------------------------------------------
def cell_of(step: Callable[[Any, Any, Any], Any]) -> Any:
    """A cell of one state with a kernel, whose step is a function of itself, x and h."""

    class Refused(Minimal):
        calls = 0

        def call(self, inputs: Any, states: Any) -> Any:
            h = step(self, inputs @ self.kernel, states[0])
            return h, [h]

    return Refused


@tf.custom_gradient
def surrogate(x: Any) -> Any:
    return tf.cast(x > 0.0, x.dtype), lambda up: up / (1.0 + tf.abs(x))


def counting(self: Any, x: Any, h: Any) -> Any:
    self.calls = self.calls + 1
    return ops.tanh(x + h)


def branching(self: Any, x: Any, h: Any) -> Any:
    return ops.cond(ops.sum(h) > 0.0, lambda: x + h, lambda: x - h)


def looping(self: Any, x: Any, h: Any) -> Any:
    return ops.while_loop(lambda k, v: k < 2, lambda k, v: (k + 1, ops.tanh(v)), (0, x + h))[1]


def adding(self: Any, x: Any, h: Any) -> Any:
    self.add_loss(ops.mean(h))
    return ops.tanh(x + h)


REFUSED = {
    "this branches on data": branching,
    "this has a loop within a step": looping,
    "this takes the sum over the rows of the batch": lambda self, x, h: x + h - ops.mean(h, axis=0),
    "the matrix of this product depends on a state":
        lambda self, x, h: x + ops.einsum("bi,bj,bj->bi", h, h, h),
    "a value that depends on a state is converted from":
        lambda self, x, h: ops.cast(ops.cast(x + h, "float16"), "float32"),
    "this has a derivative of its own": lambda self, x, h: x + surrogate(h),
    "this calls Python in each step":
        lambda self, x, h: x + tf.ensure_shape(tf.numpy_function(np.sin, [h], h.dtype), h.shape),
    "this changes a variable": lambda self, x, h: x + h * self.kernel.assign(self.kernel)[0, 0],
    "this draws random numbers": lambda self, x, h: x + h * tf.random.uniform([H]),
    "has an effect on Refused.calls": counting,
    "has an effect on add_loss": adding,
    "no cell has Lgamma of a value": lambda self, x, h: x + tf.math.lgamma(2.0 + ops.abs(h)),
}  # fmt: skip


@tensorflow
@pytest.mark.parametrize("why", REFUSED)
def test_what_is_not_read_runs_in_keras_loop(why: str, rng: np.random.Generator) -> None:
    make = cell_of(REFUSED[why])
    layer = ak.RNN(make())
    layer.build((None, None, I))
    name, reason = layer.engine
    assert name == "keras" and why in reason, reason
    assert "test_read.py:" in reason or "has an effect" in reason
    assert not layer.losses


@tensorflow
def test_a_refused_cell_has_keras_results(rng: np.random.Generator) -> None:
    x = ops.convert_to_tensor(data(rng, B, T, I), "float32")
    ours, theirs = both(
        cell_of(REFUSED["this takes the sum over the rows of the batch"]), "float32"
    )
    assert np.array_equal(ours(x), theirs(x)) and ours.engine.name == "keras"
    with pytest.raises(ValueError, match=r"resets: given a tensor; expected None, because Keras's"):
        ours(x, resets=tf.zeros((B, T)))


@tensorflow
def test_a_wrong_reading_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the table had an error, the proof would say so, and Keras's loop would run."""
    from anycell.keras.tensorflow import read

    monkeypatch.setitem(read.TABLE, "Tanh", "sigmoid")
    layer = ak.RNN(Concat())
    layer.build((None, None, I))
    name, reason = layer.engine
    assert name == "keras" and "the reading was tried against the step" in reason


@tensorflow
def test_step_by_step_runs_keras_loop_and_xla_the_kernels(rng: np.random.Generator) -> None:
    x = ops.convert_to_tensor(data(rng, B, T, I), "float32")
    ours, theirs = both(Concat, "float32")
    with ak.step_by_step():
        assert ours.engine.name == "keras"
        assert np.array_equal(ours(x), theirs(x))
    from anycell.keras.tensorflow import fused as kernels

    function = tf.function(ours, jit_compile=True, autograph=False)
    assert_close(function(x), theirs(x), "float32", "forward")
    nodes = {node.op for node in function.get_concrete_function(x).graph.as_graph_def().node}
    assert ("XlaCallModule" in nodes) is (kernels.obstacle() is None)


# -- what may change between calls -----------------------------------------------------------------
GAIN = 1.0


@pytest.mark.parametrize(
    "change",
    [
        "a class", "a base", "a list in a dictionary", "a closure", "a variable of the file",
        "a default", "a new attribute",
    ],
)  # fmt: skip
@pytest.mark.sample(every=2)
def test_the_next_call_sees_what_has_changed(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scale = 1.0

    class Base(OfUnits):
        leak = 1.0

    class Changing(Base):
        rate = 1.0

        def build(self, input_shape: Any) -> None:
            self.kernel = self.weight("kernel", I, H)
            self.options = {"gains": [1.0]}

        def call(self, inputs: Any, states: Any, more: float = 1.0) -> Any:
            gain = self.options["gains"][0] * self.rate * self.leak * GAIN * more
            h = ops.tanh(gain * ops.matmul(inputs, self.kernel) + scale * states[0])
            return h, [h]

    cell = Changing()
    x = np.random.default_rng(0).normal(size=(B, T, I)).astype("float32")
    ours, theirs = ak.RNN(cell), layers.RNN(cell)
    before = [number(ours(x)) for _ in range(2)][1]
    if change == "a closure":
        scale = 2.0
    elif change == "a default":
        Changing.call.__defaults__ = (2.0,)
    elif change == "a new attribute":
        cell.leak = 2.0
    elif change == "a variable of the file":
        monkeypatch.setitem(globals(), "GAIN", 2.0)
    elif change == "a list in a dictionary":
        cell.options["gains"][0] = 2.0
    else:
        setattr(*((Changing, "rate") if change == "a class" else (Base, "leak")), 2.0)
    after = number(ours(x))
    assert_close(after, number(theirs(x)), "float32", "forward")
    assert ours.engine.name == "cpu" and np.abs(after - before).max() > 1e-3


def test_later_calls_do_not_call_the_cell() -> None:
    """In eager mode neither: what was read, or compiled, sees other weights and x."""
    calls = itertools.count()  # by identity it stays what it was

    class Counting(Minimal):
        def call(self, inputs: Any, states: Any) -> Any:
            next(calls)
            return super().call(inputs, states)

    ours, rng = ak.RNN(Counting(), return_sequences=True), np.random.default_rng(0)
    for count in range(4):
        x = rng.normal(size=(B, T, I)).astype("float32")
        if count == 3:
            ours.cell.kernel.assign(2.0 * ours.cell.kernel)
            known = str(calls)
        result = number(ours(x))
    assert str(calls) == known
    assert_close(
        result, number(layers.RNN(ours.cell, return_sequences=True)(x)), "float32", "forward"
    )


@tensorflow
def test_variables_are_sequences_too() -> None:
    x = tf.Variable(np.random.default_rng(0).normal(size=(B, T, I)).astype("float32"))
    cell = Minimal()
    for layer in (ak.RNN(cell), ak.RNN(cell, return_sequences=True)):
        for _ in range(3):
            assert_close(number(layer(x)), number(layer(x.value())), "float32", "forward")
        assert layer.engine.name == "cpu"
