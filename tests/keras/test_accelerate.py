"""``accelerate`` and ``recurrent_layers`` of the Keras layers, on any backend."""

import logging
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

keras = pytest.importorskip("keras")

from keras_layers import BACKEND, number  # noqa: E402
from tolerances import assert_close  # noqa: E402

import anycell.keras as ak  # noqa: E402
from anycell import cells  # noqa: E402

layers = keras.layers


class OfMine(layers.LSTM):
    """A subclass whose loop is another."""

    def inner_loop(self, *args: Any, **kwargs: Any) -> Any:
        return super().inner_loop(*args, **kwargs)


@keras.saving.register_keras_serializable("tests")
class Short(layers.GRU):
    """A subclass that only spares its users arguments."""

    def __init__(self, units: int = 3, **kwargs: Any) -> None:
        super().__init__(units, **kwargs)


@keras.saving.register_keras_serializable("tests")
class OfUnits(layers.RNN):
    """A subclass that makes a cell of ours, and has arguments of its own."""

    def __init__(self, units: int, **kwargs: Any) -> None:
        super().__init__(ak.RNNCell(cells.GRU, units), **kwargs)

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        return {"units": self.cell.units, **{n: v for n, v in config.items() if n != "cell"}}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "OfUnits":
        return cls(**config)


class CellOfMine(layers.LSTMCell):
    """An LSTM centred over the batch, which nothing but Keras's loop can run."""

    def call(self, inputs: Any, states: Any, training: bool = False) -> Any:
        h, (_, c) = super().call(inputs, states, training=training)
        h = h - keras.ops.mean(h, axis=0)
        return h, [h, c]


@keras.saving.register_keras_serializable("tests")
class Nested(keras.Model):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.inside = keras.Sequential([layers.Bidirectional(layers.GRU(3), name="both")])
        self.dense = layers.Dense(2)

    def call(self, x: Any) -> Any:
        return self.dense(self.inside(x))


def sequential() -> Any:
    return keras.Sequential(
        [
            layers.LSTM(4, return_sequences=True),
            layers.GRU(3, reset_after=False, go_backwards=True, return_sequences=True),
            layers.SimpleRNN(4, activation="relu"),
            layers.Dense(2),
        ]
    )


def functional() -> Any:
    """Of masks, wrappers, a layer that is called twice, and a cell in a layer."""
    words = keras.Input((None,), dtype="int32")
    x = layers.Embedding(5, 3, mask_zero=True)(words)
    x = layers.Bidirectional(layers.LSTM(2, return_sequences=True), merge_mode="sum")(x)
    shared = layers.GRU(2, return_sequences=True)
    x = shared(shared(x))
    x = layers.RNN(layers.LSTMCell(3), return_sequences=True)(x)
    x = layers.RNN(ak.RNNCell(cells.PeepholeLSTM, 3))(x)
    return keras.Model(words, layers.Dense(2)(x))


def distributed() -> Any:
    given = keras.Input((3, 5, 3))
    x = layers.TimeDistributed(layers.LSTM(4))(given)
    return keras.Model(given, layers.Dense(2)(layers.GRU(3, trainable=False)(x)))


MODELS: dict[str, Callable[[], Any]] = {
    "sequential": sequential,
    "functional": functional,
    "distributed": distributed,
    "subclassed": Nested,
}


def data(name: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    shape = {"functional": (8, 5), "distributed": (8, 3, 5, 3)}.get(name, (8, 5, 3))
    x = rng.integers(0, 5, shape) if len(shape) == 2 else rng.normal(size=shape).astype("float32")
    return x, rng.normal(size=(8, 2)).astype("float32")


SLOW = {name: pytest.mark.slow for name in MODELS if name != "subclassed"}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_an_accelerated_model_is_the_same_model(name: str, tmp_path: Any) -> None:
    """In what it predicts, how it goes on training, and in its files."""
    if BACKEND == "torch" and name == "functional":
        pytest.skip("keras.layers on torch takes no mask that starts with a masked step")
    x, y = data(name)
    given = {} if name != "sequential" else {"clipnorm": 1.0}
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(1)
        model = MODELS[name]()
        model.compile(keras.optimizers.Adam(0.01, **given), "mse", jit_compile=False)
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
        models.append(model)
    plain, ours = models
    kept = [id(w) for w in ours.weights], [id(v) for v in ours.optimizer.variables]
    before = ours.predict(x, verbose=0)
    assert ak.accelerate(ours) is ours
    assert kept == ([id(w) for w in ours.weights], [id(v) for v in ours.optimizer.variables])
    assert {found.engine for found in ak.recurrent_layers(ours)} <= {"cpu"}
    assert_close(ours.predict(x, verbose=0), before, "float32", "forward")

    steps = [number(plain(x)), number(ours(x))]
    assert_close(steps[1], steps[0], "float32", "forward")
    weights = ours.get_weights()
    for model in models:
        # Whose step is the gradient, and no sign of it.
        model.compile("sgd", "mse", jit_compile=False)
        model.fit(x, y, batch_size=8, verbose=0)
    for a, b, start in zip(ours.get_weights(), plain.get_weights(), weights, strict=True):
        assert_close(a, b, "float32", "gradient")
        assert start.dtype != np.float32 or name == "distributed" or not np.array_equal(a, start)

    right = ours.predict(x, verbose=0)
    ours.save_weights(tmp_path / "our.weights.h5")
    plain.load_weights(tmp_path / "our.weights.h5")
    assert_close(number(plain(x)), right, "float32", "forward")
    ours.save(tmp_path / "our.keras")
    again = keras.models.load_model(tmp_path / "our.keras")
    assert_close(number(again(x)), right, "float32", "forward")
    if name != "subclassed":  # which makes layers of Keras when it is loaded, too
        theirs, found = (list(map(str, ak.recurrent_layers(m))) for m in (again, ours))
        assert theirs == found


@pytest.mark.slow
def test_a_compiled_model_leaves_its_old_graph() -> None:
    """And XLA with it, which would keep the kernels out; what it counted stays."""
    x, y = data("sequential")
    model = sequential()
    model.compile("adam", "mse")
    model.fit(x, y, verbose=0)
    model.evaluate(x, y, verbose=0)
    model.predict(x, verbose=0)
    run, count = [], int(model.optimizer.iterations)
    ak.accelerate(model)
    assert int(model.optimizer.iterations) == count
    if BACKEND == "tensorflow":
        assert model.jit_compile is False
    for layer in model.layers[:3]:
        inner, name = layer.inner_loop, layer.name
        layer.inner_loop = lambda *a, inner=inner, name=name, **k: (
            run.append(name) or inner(*a, **k)
        )
    for use in (model.fit, model.evaluate):
        run.clear()
        use(x, y, verbose=0)
        assert {layer.name for layer in model.layers[:3]} <= set(run)
    run.clear()
    model.predict(x, verbose=0)
    assert {layer.name for layer in model.layers[:3]} <= set(run)


@pytest.mark.parametrize("dtype", ["float64", "mixed_bfloat16"])
def test_what_a_layer_was_told_stays(dtype: str) -> None:
    if BACKEND == "jax" and dtype == "float64":
        pytest.skip("JAX has float64 only if asked for it")
    if keras.__version__.startswith("3.3.") and dtype == "mixed_bfloat16":
        pytest.skip("Keras 3.3's own stateful layers do not run in it")
    layer = layers.LSTM(4, stateful=True, dropout=0.3, seed=3, dtype=dtype, name="memory")
    x = np.random.default_rng(0).normal(size=(2, 5, 3))
    layer(x)
    states, config = [number(s) for s in layer.states], layer.get_config()
    model = keras.Sequential([keras.Input(batch_shape=(2, 5, 3)), layer])
    layer.trainable = False
    ak.accelerate(model)
    assert type(layer) is ak.LSTM
    assert not layer.trainable
    assert layer.get_config() == {**config, "trainable": False}
    for before, after in zip(states, layer.states, strict=True):
        assert np.array_equal(before, number(after))


def test_what_is_left_and_why(caplog: pytest.LogCaptureFixture) -> None:
    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.mine, self.patched = OfMine(4, name="mine"), layers.GRU(4, name="patched")
            self.patched.cell.call = lambda x, states, training=False: (states[0], states)
            self.called = layers.LSTM(4, name="called")
            self.called.call = lambda x, **_: x
            self.cell = layers.RNN(CellOfMine(4), name="changed")
            self.cell.build((None, 5, 3))
            self.images = layers.ConvLSTM1D(2, 3, name="images")
            self.step = layers.GRUCell(4, name="step")
            self.taken = layers.SimpleRNN(4, name="taken")

    model = Model()
    with caplog.at_level(logging.INFO, logger="anycell"):
        ak.accelerate(model)
    found = {layer.name: layer for layer in ak.recurrent_layers(model)}
    assert [record.message for record in caplog.records] == list(map(str, found.values()))
    for name, (kind, reason) in {
        "mine": ("OfMine", "inner_loop of its own"),
        "patched": ("GRU", "call of the GRUCell has been replaced"),
        "called": ("LSTM", "its call has been replaced"),
        "changed": ("RNN", "CellOfMine"),
        "images": ("ConvLSTM1D", "only LSTM, GRU, SimpleRNN"),
        "step": ("GRUCell", "one step"),
    }.items():
        assert found.pop(name).engine == "keras", name
        layer = next(inner for inner in model._flatten_layers() if inner.name == name)
        assert reason in str(ak.recurrent_layers(layer)[0])
        assert type(layer).__name__ == kind
    assert [(name, layer.kind, layer.engine) for name, layer in found.items()] == [
        ("taken", "SimpleRNN of anycell", "cpu")
    ]


@pytest.mark.parametrize(
    ("kind", "called"), [(Short, "Short (GRU of anycell)"), (OfUnits, "OfUnits (RNN of anycell)")]
)
def test_a_subclass_without_a_call_of_its_own(kind: Any, called: str, tmp_path: Any) -> None:
    """Is swapped, and stays what it is, in files too."""
    model = keras.Sequential([keras.Input((5, 3)), kind(units=3, name="mine")])
    x = data("sequential")[0]
    right = number(model(x))
    (found,) = ak.recurrent_layers(ak.accelerate(model))
    assert (found.kind, found.engine) == (called, "cpu")
    assert isinstance(model.layers[0], kind)
    assert_close(number(model(x)), right, "float32", "forward")
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert type(again.layers[0]) is kind
    assert_close(number(again(x)), right, "float32", "forward")
    assert type(keras.layers.Bidirectional(model.layers[0]).backward_layer) is kind


def test_a_frozen_cell_is_frozen_in_a_file(tmp_path: Any) -> None:
    frozen = layers.RNN(ak.RNNCell(cells.GRU, 3, trainable=False))
    model = keras.Sequential([keras.Input((5, 3)), frozen, layers.Dense(1)])
    ak.accelerate(model).save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert len(again.trainable_weights) == len(model.trainable_weights) == 2


def test_paths_and_what_has_not_been_accelerated() -> None:
    model = keras.Sequential([Nested(name="nested"), layers.Dense(1)])
    first, second = ak.recurrent_layers(model)
    assert first.name.startswith("nested/sequential")
    assert (first.name.split("/")[-2], second.name.split("/")[-2]) == ("both", "both")
    assert "GRU of keras runs on keras (accelerate(model) has not been called)" in str(first)
    layer = ak.accelerate(layers.LSTM(3))
    assert type(layer) is ak.LSTM
    assert str(ak.recurrent_layers(layer)[0]).startswith("the model: LSTM of anycell runs on")
    for given, hint in ((keras.Sequential, "Call it first"), (3, "Pass a model")):
        with pytest.raises(TypeError, match=rf"model: given .*; expected a model .* {hint}"):
            ak.accelerate(given)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=SLOW.get(n, pytest.mark.more)) for n in MODELS]
)
def test_the_way_back(name: str) -> None:
    """The same layers, of the classes that they were of, with the weights that they have by now."""
    x, y = data(name)
    model = MODELS[name]()
    model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False)
    kinds = recurrent(model)
    ak.accelerate(model).fit(x, y, verbose=0)
    right, weights = model.predict(x, verbose=0), [id(w) for w in model.weights]
    assert ak.restore(model) is model
    assert kinds and recurrent(model) == kinds
    assert weights == [id(w) for w in model.weights]
    left = [str(found) for found in ak.recurrent_layers(model) if found.engine != "keras"]
    assert len(left) == (name == "functional") and all("RNN of anycell" in text for text in left)
    if BACKEND != "torch" or name != "functional":  # whose own layers refuse this mask
        assert_close(model.predict(x, verbose=0), right, "float32", "forward")
        model.fit(x, y, verbose=0)


def recurrent(model: Any) -> list[tuple[int, type]]:
    """Which object is of which class; an ``RNN`` of a cell of ours stays ours."""
    found = [layer for layer in model._flatten_layers() if isinstance(layer, layers.RNN)]
    found = [layer for layer in found if not isinstance(layer.cell, ak.RNNCell)]
    return [(id(layer), type(layer)) for layer in found]


def test_a_restored_file_needs_no_anycell(tmp_path: Any) -> None:
    """Reading one imports the modules that its config names."""
    both = layers.Bidirectional(layers.LSTM(3, return_sequences=True))
    model = keras.Sequential([keras.Input((5, 3)), both, layers.RNN(layers.GRUCell(2))])
    for change, named in ((ak.accelerate, True), (ak.restore, False)):
        change(model).save(tmp_path / "model.keras")
        with zipfile.ZipFile(tmp_path / "model.keras") as archive:
            assert any(b"anycell" in archive.read(name) for name in archive.namelist()) is named
    keras.models.load_model(tmp_path / "model.keras")


def test_how_often_a_model_calls_its_layers() -> None:
    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.whole = layers.GRU(4, return_sequences=True, name="whole")
            self.loop = ak.LSTM(4, name="loop")
            self.step, self.unused = layers.LSTMCell(4, name="step"), layers.GRU(4, name="unused")
            self.unused.build((2, 5, 3))
            self.both = layers.Bidirectional(layers.GRU(4, name="inner"), name="both")

        def call(self, x: Any) -> Any:
            y, states = self.whole(x), [keras.ops.zeros((2, 4))] * 2
            for t in range(5):
                self.loop(y[:, t : t + 1])
                _, states = self.step(y[:, t], states)
            return self.both(y)

    model = Model()
    assert {layer.calls for layer in ak.recurrent_layers(model)} == {None}
    x = np.ones((2, 5, 3), "float32")
    found = {layer.name.split("/")[-1]: layer for layer in ak.recurrent_layers(model, x)}
    counts = {"whole": 1, "loop": 5, "step": 5, "unused": 0, "forward_inner": 1}
    assert {name: found[name].calls for name in counts} == counts
    assert "called 5 times, 1 step each: call it once with all steps" in found["loop"].reason
    assert "anycell.keras.RNN" in found["loop"].reason
    assert found["step"].reason.endswith("; called 5 times, 1 step each")
    assert found["unused"].reason.endswith("; not called") and found["loop"].engine == "cpu"
    assert "call" not in vars(model.loop) and ak.recurrent_layers(model)[0].calls is None


def test_a_model_without_a_layer_to_swap_is_told(caplog: pytest.LogCaptureFixture) -> None:
    ak.accelerate(keras.Sequential([layers.Dense(3)]))
    assert caplog.messages == ["accelerate has swapped nothing: the model has no recurrent layers"]
    caplog.clear()
    ak.accelerate(ak.accelerate(keras.Sequential([layers.GRU(3)])))
    assert not caplog.messages


def test_what_has_no_way_back(caplog: pytest.LogCaptureFixture) -> None:
    """Stays, and is said: what Keras has no layer for, and subclasses of ours."""

    class Mine(ak.LSTM):
        pass

    kept = [Mine(3), ak.RNN(cells.LSTM, 3), ak.PeepholeLSTM(3)]
    assert [type(ak.restore(layer)) for layer in kept] == [Mine, ak.RNN, ak.PeepholeLSTM]
    assert len(caplog.messages) == 3
    assert caplog.messages[1] == "the model: RNN of anycell stays: Keras has no layer in its place"
    feedback = ak.restore(ak.Feedback(ak.LSTM(3), layers.Dense(1)))
    assert tuple(feedback(np.zeros((2, 5, 3), "float32")).shape) == (2, 5, 1)
    assert type(ak.restore(ak.LSTM(3))) is layers.LSTM
    short = ak.accelerate(Short(3))
    assert type(short) is not Short and type(ak.restore(short)) is Short
    with pytest.raises(TypeError, match=r"model: given .*Call it first: restore\(Model\(\)\)"):
        ak.restore(keras.Sequential)
