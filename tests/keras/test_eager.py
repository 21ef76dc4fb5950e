"""Loops of cells that were read, in eager mode: one call of a graph from the second call on."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

keras = pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")
from tolerances import assert_close  # noqa: E402

import anycell  # noqa: E402
import anycell.keras as ak  # noqa: E402

if keras.backend.backend() != "tensorflow":
    pytest.skip("about TensorFlow's eager mode", allow_module_level=True)
from anycell.keras.tensorflow import fused, passes, steps  # noqa: E402
from anycell.keras.tensorflow.graph import part  # noqa: E402

ops = keras.ops
B, T, I, H = 3, 4, 2, 5


class Leaky(keras.layers.Layer):
    """A leaky unit, whose output is no state."""

    state_size = H

    def build(self, shape: Any) -> None:
        self.w = self.add_weight(shape=(shape[-1], H), name="w")
        self.u = self.add_weight(shape=(H, H), name="u")
        self.leak = self.add_weight(shape=(H,), name="leak", initializer="ones")

    def call(self, inputs: Any, states: Any) -> Any:
        (h,) = states
        new = ops.tanh(ops.matmul(inputs, self.w) + ops.matmul(h, self.u))
        h = ops.sigmoid(self.leak) * h + new
        return h * self.leak, [h]


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Any, Any]]:
    """anycell's layer, and Keras's of the same cell, in float64."""
    cell = Leaky(dtype="float64")
    made = [kind(cell, return_sequences=True, return_state=True, dtype="float64")
            for kind in (ak.RNN, keras.layers.RNN)]  # fmt: skip
    for layer in made:
        layer(np.zeros((B, T, I)))
    assert made[0].engine.name == "cpu", made[0].engine
    yield made[0], made[1]


def step_of(layer: Any) -> Any:
    (step,) = {id(s): s for s in layer._readings.known.values()}.values()
    return step


def results(layer: Any, x: Any, **call: Any) -> list[Any]:
    """Outputs, states, and the gradients of x and of all variables."""
    x = tf.convert_to_tensor(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        ends = layer(x, **call)
        loss = sum(tf.reduce_sum(tf.sin(end)) for end in ends)
    return [*ends, *tape.gradient(loss, [x, *layer.trainable_variables])]


def assert_alike(pair: tuple[Any, Any], x: Any, **call: Any) -> None:
    for mine, theirs in zip(*(results(layer, x, **call) for layer in pair), strict=True):
        assert_close(mine.numpy(), theirs.numpy(), "float64", "gradient")


def test_later_calls_are_calls_of_one_graph(pair: Any, rng: np.random.Generator) -> None:
    layer, functions = pair[0], step_of(pair[0]).functions
    functions.clear()
    for number in range(3):
        layer.cell.leak.assign(rng.normal(size=H))  # variables are read in every call
        assert_alike(pair, rng.normal(size=(B, T, I)))
        (graphs,) = functions.values()
        assert (graphs is None) is (number == 0)
    assert_alike(pair, rng.normal(size=(B + 1, T + 2, I)))
    assert_alike(pair, rng.normal(size=(B + 2, T + 3, I)))
    function, known = graphs
    assert len(known) == 3 and function.experimental_get_tracing_count() == 2  # of any sizes
    inference = layer(rng.normal(size=(B, T, I)))
    assert len(functions) == 2 and len(inference) == 2  # without a tape, nothing is kept


def test_masks_and_states_are_arguments(pair: Any, rng: np.random.Generator) -> None:
    for _ in range(3):
        mask, state = rng.random((B, T)) < 0.6, rng.normal(size=(B, H))
        assert_alike(pair, rng.normal(size=(B, T, I)), mask=mask, initial_state=[state])


def test_only_what_is_watched_has_a_gradient(
    pair: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of x costs a product of its own."""
    layer, x, wanted = pair[0], tf.constant(rng.normal(size=(B, T, I))), list[Any]()
    backward = passes.Kernels._backward

    def _backward(self: Any, *arrays: Any) -> Any:
        wanted.append(self.wanted)
        return backward(self, *arrays)

    monkeypatch.setattr(passes.Kernels, "_backward", _backward)
    step_of(layer).functions.clear()
    for frozen in (False, True):
        layer.cell.w.trainable = not frozen
        for _ in range(3):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer(x)[0])
            grads = tape.gradient(loss, layer.cell.trainable_variables)
            assert all(grad is not None for grad in grads) and len(grads) == 3 - frozen
    layer.cell.w.trainable = True
    assert wanted and not any("x" in names for names in wanted)
    wanted.clear()
    assert_alike(pair, x)
    assert all("x" in names for names in wanted)


def test_nothing_is_watched(pair: Any, rng: np.random.Generator) -> None:
    layer, x, other = pair[0], tf.constant(rng.normal(size=(B, T, I))), tf.constant(1.0)
    for _ in range(3):
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(other)
            loss = tf.reduce_sum(layer(x)[0]) * tf.cast(other, tf.float64)
        assert tape.gradient(loss, other) is not None


@pytest.mark.slow
def test_derivatives_of_higher_order(pair: Any, rng: np.random.Generator) -> None:
    x, direction = (tf.constant(rng.normal(size=(B, T, I))) for _ in range(2))
    found = []
    for layer in (*pair, pair[0]):
        with tf.GradientTape(persistent=True) as outer:
            outer.watch(x)
            with tf.GradientTape(persistent=True) as inner:
                inner.watch(x)
                loss = tf.reduce_sum(tf.sin(layer(x)[0]))
            grads = inner.gradient(loss, [x, layer.cell.u])
            again = inner.gradient(loss, x)
            first = tf.reduce_sum(grads[0] * direction)
        second = outer.gradient(first, [x, layer.cell.w])
        found.append([*grads, again, *second])
    for mine, theirs, later in zip(*found, strict=True):
        assert_close(mine.numpy(), theirs.numpy(), "float64", "gradient")
        assert_close(later.numpy(), theirs.numpy(), "float64", "gradient")


def test_forward_mode_takes_the_steps(pair: Any, rng: np.random.Generator) -> None:
    x, tangent = (tf.constant(rng.normal(size=(B, T, I))) for _ in range(2))
    found = []
    for layer in pair:
        layer(x), layer(x)
        with tf.autodiff.ForwardAccumulator(x, tangent) as over_x:
            output = layer(x)[0]
        variable = layer.cell.u.value
        with tf.autodiff.ForwardAccumulator(variable, tf.ones_like(variable)) as over_u:
            other = layer(x)[0]
        found.append([over_x.jvp(output), over_u.jvp(other)])
    for mine, theirs in zip(*found, strict=True):
        assert_close(mine.numpy(), theirs.numpy(), "float64", "gradient")


def test_functions_run_eagerly(pair: Any, rng: np.random.Generator) -> None:
    step_of(pair[0]).functions.clear()
    tf.config.run_functions_eagerly(True)
    try:
        for _ in range(2):
            assert_alike(pair, rng.normal(size=(B, T, I)))
    finally:
        tf.config.run_functions_eagerly(False)
    assert not step_of(pair[0]).functions


def test_a_number_of_threads_has_its_own_graph(pair: Any, rng: np.random.Generator) -> None:
    layer, x = pair[0], rng.normal(size=(B, T, I))
    step_of(layer).functions.clear()
    for count in (1, 2):
        with anycell.threads(count):
            layer(x), layer(x)
    assert len(step_of(layer).functions) == 2


def test_graphs_are_few(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = pair[0]
    monkeypatch.setattr(steps, "MOST", 2)
    step_of(layer).functions.clear()
    for count in (1, 2, 3):
        with anycell.threads(count):
            layer(np.zeros((B, T, I)))
    assert len(step_of(layer).functions) == 2
    step_of(layer).functions.clear()
    with anycell.threads(3):
        for rows in range(1, 5):
            layer(np.zeros((rows, T, I)))
    ((_, known),) = step_of(layer).functions.values()
    assert len(known) == 2


# -- arrays of a reading ---------------------------------------------------------------------------


def test_what_changes_nothing_is_no_operation() -> None:
    arrays = steps.Arrays

    @tf.function(input_signature=[tf.TensorSpec((None, 3)), tf.TensorSpec((1, 3))])
    def traced(a: Any, b: Any) -> Any:
        rows = tf.shape(a)[0]
        assert arrays.reshape(a, (None, 3)) is a and arrays.reshape(a, (rows, -1)) is not a
        assert arrays.reshape(b, (1, -1)) is b and arrays.reshape(b, (3,)) is not b
        assert arrays.broadcast(a, (rows, 3)) is a and arrays.broadcast(b, (1, 3)) is b
        assert arrays.take(b, 0, 0, 1) is b and arrays.take(b, 1, 0, 1) is not b
        return arrays.broadcast(b, (rows, 3)), arrays.reshape(b, (3,)), arrays.take(b, 1, 1, 2)

    b = np.array([[1.0, 2.0, 3.0]], "float32")
    wide, flat, part = traced(np.zeros((2, 3), "float32"), b)
    assert np.array_equal(wide, [b[0], b[0]]) and np.array_equal(flat, b[0])
    assert np.array_equal(part, b[:, 1:])


def _swapped(w: Any) -> Any:
    return tf.transpose(w, [1, 0])


def _parts(w: Any) -> Any:
    return tf.concat([tf.transpose(part) for part in tf.split(w, 4, 1)], 0)


def _other_axis(w: Any) -> Any:
    return tf.concat([tf.transpose(part) for part in tf.split(w, 2, 0)], 1)


def _one_of_them(w: Any) -> Any:
    first, second = tf.split(w, 2, 1)
    return tf.concat([tf.transpose(first), tf.reshape(second, (-1, 2))], 0)


def _other_order(w: Any) -> Any:
    return tf.transpose(w[None], [1, 0, 2])[0]


PLAIN = {_swapped: True, _parts: True, _other_axis: False, _one_of_them: False, _other_order: False}


@pytest.mark.parametrize("turn", PLAIN)
def test_a_weight_that_was_transposed(turn: Any) -> None:
    kernel = np.arange(8.0).reshape(2, 4)

    @tf.function(autograph=False)
    def traced(w: Any) -> Any:
        found = steps.kernel_of(turn(w))
        return tf.zeros(()) if found is None else found

    found = traced(tf.constant(kernel)).numpy()
    assert found.shape == ((2, 4) if PLAIN[turn] else ())
    assert not PLAIN[turn] or np.array_equal(found, kernel)
    assert steps.kernel_of(tf.transpose(tf.constant(kernel))) is None  # in eager mode


def test_kernels_read_the_weights_of_a_cell_as_they_are(pair: Any) -> None:
    layer = pair[0]
    graph = (
        tf.function(layer, autograph=False)
        .get_concrete_function(tf.zeros((B, T, I), tf.float64))
        .graph
    )
    (source,) = [op for op in graph.get_operations() if op.type == "PyFuncStateless"]
    parts = fused._behind(source.inputs[0]).parts
    assert {"turned weight_ih", "turned weight_hh"} < {*parts}


class Joined(Leaky):
    """A gated unit on ``[x, h]``, whose weight has a part for each, and which takes the columns
    and the bias of each gate itself.
    """

    def build(self, shape: Any) -> None:
        self.w = self.add_weight(shape=(shape[-1] + H, 2 * H), name="w")
        self.b = self.add_weight(shape=(2 * H,), name="b")

    def call(self, inputs: Any, states: Any) -> Any:
        (h,) = states
        both = ops.concatenate([inputs, h], axis=-1)
        new = ops.tanh(ops.matmul(both, self.w[:, :H]) + self.b[:H])
        h = h + ops.sigmoid(ops.matmul(both, self.w[:, H:]) + self.b[H:]) * (new - h)
        return h, [h]


class Turned(Joined):
    """Slices that are no parts: every other place, one place, and the reverse."""

    def call(self, inputs: Any, states: Any) -> Any:
        both = ops.concatenate([inputs, *states], axis=-1)
        h = ops.tanh(ops.matmul(both, self.w[::-1, ::2]) + self.b[1::2] * self.b[0])
        return h, [h]


@pytest.mark.parametrize("kind", [Joined, Turned])
def test_gradients_of_a_weight_are_joined_of_its_parts(kind: Any, rng: np.random.Generator) -> None:
    """The gradient of a slice would be as large as the weight, for each slice."""
    cell = kind(dtype="float64")
    mine, theirs = (
        rnn(cell, return_sequences=True, return_state=True, dtype="float64")
        for rnn in (ak.RNN, keras.layers.RNN)
    )
    x = tf.constant(rng.normal(size=(B, T, I)))
    theirs(x)
    train = tf.function(lambda x: results(mine, x), autograph=False)
    for got, expected in zip(train(x), results(theirs, x), strict=True):
        assert_close(got.numpy(), expected.numpy(), "float64", "gradient")
    made = [op.type for op in train.get_concrete_function(x).graph.get_operations()]
    assert made.count("PyFuncStateless") == 2
    assert not {"StridedSliceGrad", "AddN"} & {*made} or kind is Turned


# Axis, first place, size: three that are all of the weight, some columns, and one across others.
PLACES = [(0, 3, 2), (0, 5, 3), (0, 0, 3), (1, 1, 2), (0, 2, 4), (0, 6, 1), (1, 0, 3)]


def _taken(w: Any, take: Any = part) -> list[Any]:
    with tf.GradientTape() as tape:
        tape.watch(w)
        pieces = [take(w, *places) for places in PLACES]
        loss = sum(tf.reduce_sum(tf.sin((1.0 + k) * piece)) for k, piece in enumerate(pieces))
    return [*pieces, tape.gradient(loss, w)]


def _in_branches(w: Any) -> list[Any]:
    """They are of another graph than the weight."""
    return list(tf.cond(tf.reduce_sum(w) > 1e6, lambda: _taken(-w), lambda: _taken(w)))


@pytest.fixture
def shapes_of_tensorflow_1() -> Iterator[None]:
    tf.compat.v1.disable_v2_tensorshape()
    yield
    tf.compat.v1.enable_v2_tensorshape()


@pytest.mark.usefixtures("shapes_of_tensorflow_1")
def test_parts_where_shapes_are_those_of_tensorflow_1() -> None:
    test_parts_of_a_weight("graph")


@pytest.mark.parametrize("where", ["eager", "graph", "branches"])
def test_parts_of_a_weight(where: str) -> None:
    w = tf.constant(np.arange(24.0).reshape(8, 3))
    expected = _taken(w, steps.Arrays.take)
    graph = tf.function(_in_branches if where == "branches" else _taken, autograph=False)
    got = _taken(w) if where == "eager" else graph(w)
    for piece, same in zip(got, expected, strict=True):
        assert_close(piece.numpy(), same.numpy(), "float64", "gradient")
    if where == "graph":
        made = [op.type for op in graph.get_concrete_function(w).graph.get_operations()]
        assert made.count("SplitV") == 4 and "StridedSlice" not in made
