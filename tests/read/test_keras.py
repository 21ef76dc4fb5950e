"""Recurrent cells written in Keras on TensorFlow, against ``keras.layers.RNN``.

Outputs, last states and the gradients of weights, initial states and inputs are compared in
float64. The cells are in ``cells_keras.py``, written by another hand than the reader.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from corpus import Entry, Numbers, check_results, check_verdict

keras = pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")
if keras.backend.backend() != "tensorflow":
    pytest.skip("the cells are written for TensorFlow", allow_module_level=True)

from cells_keras import corpus  # noqa: E402
from tolerances import assert_close  # noqa: E402

import anycell.keras as ak  # noqa: E402
from anycell.keras import reading  # noqa: E402
from anycell.keras.tensorflow import fused as kernels  # noqa: E402
from anycell.read.short import MOST  # noqa: E402
from tools import random_steps  # noqa: E402


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    """float64 is what new layers compute in."""
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(policy)


def results(made: Any, rnn: Any, graph: bool = False) -> dict[str, np.ndarray]:
    """The sequences and last states of a layer, and the gradients of all that enters it."""
    cell, x, state = made
    layer = rnn(cell, return_sequences=True, return_state=True)
    x, state = tf.constant(x), tf.nest.map_structure(tf.constant, state)
    layer(x, initial_state=state)
    random = Numbers("weights")
    for weight in layer.weights:
        weight.assign(random(*weight.shape))
    watched = [x, *tf.nest.flatten(state)]

    def both() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(watched)
            out = tf.nest.flatten(layer(x, initial_state=state))
            cotangents = Numbers("cotangents")
            total = tf.add_n([tf.reduce_sum(leaf * cotangents(*leaf.shape)) for leaf in out])
        weights = [weight.value for weight in layer.trainable_weights]
        return out, tape.gradient(
            total, [*watched, *weights], unconnected_gradients=tf.UnconnectedGradients.ZERO
        )

    out, slopes = (tf.function(both, autograph=False) if graph else both)()
    names = [f"argument {k}" for k in range(len(watched))]
    names += [f"{k}, {weight.name}" for k, weight in enumerate(layer.trainable_weights)]
    got = {f"output {k}": leaf.numpy() for k, leaf in enumerate(out)}
    for name, slope in zip(names, slopes, strict=True):
        got[f"gradient of {name}"] = tf.convert_to_tensor(slope).numpy()
    return got


@pytest.mark.sample(every=15)
@pytest.mark.filterwarnings("ignore:`build")  # of cells that make their layers' weights in a call
@pytest.mark.parametrize("entry", corpus.entries, ids=corpus.names)
def test_cell(entry: Entry) -> None:
    layers = []

    def door(cell: Any, **options: Any) -> Any:
        layers.append(ak.RNN(cell, **options))
        return layers[-1]

    expected = results(entry(), keras.layers.RNN)
    check_results(results(entry(), door), expected)
    (engine,) = (layer.engine for layer in layers)
    check_verdict(entry, engine.reason if engine.name == "keras" else None)


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", range(60))
def test_random_step(number: int, seed: int) -> None:
    outcome = random_steps.check("tensorflow", seed + number)
    assert not outcome.error and not outcome.wrong, (
        f"{outcome.error}{outcome.wrong}\n{outcome.source}"
    )


# -- the options of the layer, and what may change between calls ----------------------------------
class Mutable(keras.layers.Layer):
    """A leaky cell with a number, a flag, a weight that is not trained and a start of its own."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.state_size, self.leak, self.signed = [6, 2], 0.3, True

    def build(self, input_shape: Any) -> None:
        self.w = self.add_weight(shape=(input_shape[-1] + 8, 6), name="w")
        self.v = self.add_weight(shape=(6, 2), name="v", trainable=False)

    def get_initial_state(self, batch_size: Any = None) -> Any:
        return [keras.ops.ones((batch_size, 6)) * 0.5, keras.ops.zeros((batch_size, 2))]

    def call(self, x: Any, states: Any, training: bool = False) -> Any:
        h, y = states
        new = tf.tanh(tf.concat([x, h, y], -1) @ self.w)
        h = (1 - self.leak) * h + self.leak * new
        y = tf.sigmoid(h @ self.v) if self.signed else h @ self.v
        return (2 * h if training else h), [h, y]


def _assigned(layer: Any) -> None:
    layer.cell.v.assign(-layer.cell.v)


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {
    # options of the layer, of its calls, and what is done between two of them
    "the last output": ({"return_sequences": False, "return_state": False}, {}, None),
    "backwards": ({"go_backwards": True}, {}, None),
    "unrolled": ({"unroll": True}, {}, None),
    "stateful": ({"stateful": True}, {}, None),
    "stateful, reset": ({"stateful": True}, {}, lambda layer: layer.reset_state()),
    "a mask": ({}, {"mask": True}, None),
    "a mask, zeros": ({"zero_output_for_mask": True}, {"mask": True}, None),
    "a mask, backwards": ({"go_backwards": True}, {"mask": True}, None),
    "training": ({}, {"training": True}, None),
    "a weight is assigned": ({}, {}, _assigned),
    "a number is set": ({}, {}, lambda layer: setattr(layer.cell, "leak", 0.7)),
    "a flag is set": ({}, {}, lambda layer: setattr(layer.cell, "signed", False)),
    "in 32 bits": ({"dtype": "float32"}, {}, None),
}


@pytest.mark.parametrize("case", CALLS.values(), ids=CALLS)
@pytest.mark.sample(every=3)
def test_calls_of_a_layer(case: Any) -> None:
    options, call, change = case
    options = {"return_sequences": True, "return_state": True, "dtype": "float64"} | options
    n = Numbers("calls")
    x = n(3, 4, 5).astype(options["dtype"])
    call = dict(call)
    if "mask" in call:
        call["mask"] = np.array([[1, 1, 1, 1], [0, 1, 0, 1], [1, 0, 0, 0]], bool)
    layers = [rnn(Mutable(dtype=options["dtype"]), **options) for rnn in (keras.layers.RNN, ak.RNN)]
    for layer in layers:
        layer.build(x.shape)
        layer.set_weights([Numbers(w.name)(*w.shape) for w in layer.cell.weights])
    for turn in range(3):
        expected, ours = (tf.nest.flatten(layer(x, **call)) for layer in layers)
        assert len(ours) == len(expected)
        for a, b in zip(ours, expected, strict=True):
            assert_close(a.numpy(), b.numpy(), options["dtype"], "forward")
        if change is not None and turn == 0:
            for layer in layers:
                change(layer)
    assert layers[1].engine.name != "keras", layers[1].engine.reason


def test_few_steps_run_in_keras_loop_where_a_graph_calls_kernels_through_python(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    run, ran = reading.loop, list[Any]()
    monkeypatch.setattr(reading, "loop", lambda *call: ran.append(call) or run(*call))
    monkeypatch.setitem(MOST, "tensorflow", 12)
    layer = ak.RNN(Mutable())
    x = tf.constant(rng.normal(size=(3, 12, 5)))
    expected = layer(x)
    assert len(ran) == 1  # in eager mode
    graph = tf.function(layer, autograph=False)
    assert_close(graph(x), expected, "float64", "forward")
    assert len(ran) == 1
    for shape, kernel in {
        (3, 2): False, (3, 1): True, (3, 13): True, (1400, 12): True, (3, None): True,
        (None, 12): True,
    }.items():  # fmt: skip
        ran.clear()
        graph.get_concrete_function(tf.TensorSpec([*shape, 5], tf.float64))
        assert bool(ran) == kernel, shape
    ran.clear()
    tf.function(layer, jit_compile=True, autograph=False).get_concrete_function(x)
    assert bool(ran) == (kernels.obstacle() is None)
