"""``anycell.compress`` on layers of Keras: what is Keras's of it, see also ``test_compress.py``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

keras = pytest.importorskip("keras")

from keras_layers import BACKEND, number, real  # noqa: E402
from tolerances import assert_close  # noqa: E402

import anycell  # noqa: E402
import anycell.keras as ak  # noqa: E402
import anycell.numpy as an  # noqa: E402
from anycell import cells, compress  # noqa: E402
from tests.frontends.test_compress import COUNT, Blocks  # noqa: E402

# TensorFlow's arrays under NumPy 2, when Keras reads them
LAYERS: dict[str, Callable[..., Any]] = {
    "LSTM": lambda **k: ak.LSTM(COUNT, **k),
    "GRU": lambda **k: ak.GRU(COUNT, **k),
    "GRU, reset before": lambda **k: ak.GRU(COUNT, reset_after=False, use_bias=False, **k),
    "SimpleRNN": lambda **k: ak.SimpleRNN(COUNT, **k),
    "both directions": lambda **k: keras.layers.Bidirectional(ak.GRU(COUNT, **k)),
    "LSTMP": lambda **k: ak.RNN(cells.LSTMP, COUNT, P=8, **k),
    "PeepholeLSTM": lambda **k: ak.RNN(cells.PeepholeLSTM, COUNT, **k),
    "sLSTM": lambda **k: ak.RNN(cells.sLSTM(heads=2), COUNT, **k),
    "Blocks": lambda **k: ak.RNN(Blocks, COUNT, P=8, **k),
}
SIZES = [(name, "H") for name in LAYERS] + [("LSTMP", "P"), ("Blocks", "P")]


def made(name: str, **options: Any) -> tuple[Any, Any, np.ndarray]:
    """A layer, a readout, and their input."""
    layer = LAYERS[name](return_sequences=True, **options)
    x = np.random.default_rng(0).normal(size=(4, 5, 3)).astype("float32")
    width = layer(x).shape[-1]
    head = keras.layers.Dense(2)
    head.build((None, None, width))
    return layer, head, x


def restored(layer: Any, x: np.ndarray) -> Any:
    """A layer of its config."""
    with keras.saving.custom_object_scope({"Blocks": Blocks}):
        again = type(layer).from_config(layer.get_config())
    again.build(x.shape)
    return again


def chosen(layer: Any, size: str) -> np.ndarray:
    """Every second unit, in other directions the others."""
    model = compress._Model(layer, [], size)
    return np.stack([np.arange(d % 2, model.count, 2) for d in range(model.directions)])


@pytest.mark.parametrize(("name", "size"), SIZES)
@pytest.mark.sample(1)
def test_units_that_nothing_reads(name: str, size: str) -> None:
    """Without them the readout says what it said, and the layer is one of that size."""
    layer, head, x = made(name)
    model, kept = compress._Model(layer, [head], size), chosen(layer, size)
    for weight, index in model.taken(kept):
        if len(weight.shape) > 1:  # what reads the other units is 0
            *heads, rows, columns = index if len(weight.shape) == 3 else (*index,)
            rows = np.arange(weight.shape[-2])
            rows = rows[None, :, None] if heads else rows[:, None]
            reads = np.zeros(weight.variable.shape, "float32")
            weight.turned(reads)[(*heads, rows, columns)] = 1.0
            weight.variable.assign(weight.variable * reads)
    before = number(head(layer(x)))
    paths, variables = [v.path for v in layer.variables], list(layer.variables)
    stayed = compress.shrink(layer, kept, readouts=[head], size=size)
    assert np.array_equal(stayed, kept)
    assert_close(number(head(layer(x))), before, "float32", "forward")
    assert [v.path for v in layer.variables] == paths
    assert all(a is b for a, b in zip(layer.variables, variables, strict=True))
    again = restored(layer, x)
    assert [tuple(v.shape) for v in again.variables] == [tuple(v.shape) for v in variables]
    again.set_weights(layer.get_weights())
    assert np.array_equal(number(again(x)), number(layer(x)))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.sample(3)
def test_norms(name: str) -> None:
    """The squares of all that belongs to a unit, with a slope that training can use."""
    layer, head, _ = made(name)
    model = compress._Model(layer, [head], "H")
    norms = number(compress.unit_norms(layer, readouts=[head]))
    assert norms.shape == (model.directions, COUNT)
    for d in range(model.directions):
        for unit in range(COUNT):
            total = 0.0
            others = np.delete(np.arange(COUNT), unit)
            if model.split > 1:  # one unit of each part goes, or none
                continue
            kept = np.tile(others, (model.directions, 1))
            kept[1 - d :: 2] = np.arange(COUNT - 1)  # of the other direction any
            for weight, index in model.taken(kept):
                inside = any(weight.variable is v.variable for v in model.learned(0, d).values())
                if len(weight.shape) > 1 and (inside or weight.variable is head.kernel):
                    values = np.array(keras.ops.convert_to_numpy(weight.value), np.float64)
                    if weight.variable is head.kernel:
                        width = COUNT if model.columns else 0
                        total += (values[:, d * width + unit] ** 2).sum() if width else 0.0
                    else:
                        total += (values**2).sum() - (values[index] ** 2).sum()
            assert_close(norms[d, unit], np.sqrt(total), "float32", "forward")


@pytest.mark.skipif(BACKEND != "tensorflow", reason="a tape of TensorFlow's")
def test_norms_have_a_gradient() -> None:
    import tensorflow as tf

    layer, head, _ = made("LSTM")
    layer.cell.kernel.assign(keras.ops.zeros_like(layer.cell.kernel))
    layer.cell.recurrent_kernel.assign(keras.ops.zeros_like(layer.cell.recurrent_kernel))
    head.kernel.assign(keras.ops.zeros_like(head.kernel))
    with tf.GradientTape() as tape:
        norms = compress.unit_norms(layer, readouts=[head])
        total = tf.reduce_sum(norms)
    assert not norms.numpy().any()
    grads = tape.gradient(total, [layer.cell.kernel.value, head.kernel.value])
    assert all(np.array_equal(grad, np.zeros(grad.shape)) for grad in grads)


def compiled(optimizer: Any = "adam", **options: Any) -> tuple[Any, np.ndarray, np.ndarray]:
    """A trained model of two layers and a readout."""
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(32, 6, 3)), rng.normal(size=(32, 2))
    model = keras.Sequential(
        [
            keras.Input((6, 3)),
            ak.LSTM(COUNT, return_sequences=True),
            ak.RNN(cells.PeepholeLSTM, COUNT),
            keras.layers.Dense(2),
        ]
    )
    model.compile(optimizer, "mse", **options)
    model.fit(x, y, epochs=1, batch_size=16, verbose=0)
    return model, x, y


def stepped(kind: str) -> tuple[Any, Any, Any]:
    """A layer, a readout, and an optimizer that has taken a step with both."""
    layer, head, _ = made("LSTM")
    optimizer = keras.optimizers.get(kind)
    variables = [*layer.trainable_variables, *head.trainable_variables]
    optimizer.build(variables)
    apply(optimizer, variables)
    return layer, head, optimizer


def apply(optimizer: Any, variables: list[Any]) -> None:
    grads = [keras.ops.cast(np.arange(np.prod(v.shape)).reshape(v.shape), v.dtype) + 1.0
             for v in variables]  # fmt: skip
    optimizer.apply(grads, variables)


def test_moments_follow() -> None:
    layer, head, optimizer = stepped("adam")
    before = [number(m) for m in (*optimizer._momentums, *optimizer._velocities)]
    (kept,) = compress.shrink(layer, 8, readouts=[head], optimizer=optimizer)
    columns = (kept + COUNT * np.arange(4)[:, None]).reshape(-1)
    rows, every = np.arange(3), slice(None)
    places = [np.ix_(rows, columns), np.ix_(kept, columns), columns, np.ix_(kept, [0, 1]), every]
    for moment, old, place in zip(
        (*optimizer._momentums, *optimizer._velocities), before, [*places, *places], strict=True
    ):
        assert np.array_equal(number(moment), old[place])
    apply(optimizer, [*layer.trainable_variables, *head.trainable_variables])


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["ema", "adam", "sgd", "rmsprop", "lion"])
def test_training_goes_on(optimizer: str, tmp_path: Path) -> None:
    """With the moments of what is left, in a compiled model, which then is saved and loaded."""
    kind: Any = optimizer
    if optimizer == "sgd":
        kind = keras.optimizers.SGD(0.01, momentum=0.9)
    elif optimizer == "ema":
        kind = keras.optimizers.Adam(use_ema=True, gradient_accumulation_steps=2)
        if BACKEND == "jax":
            pytest.skip("Keras's second fit with use_ema fails on JAX")
    model, x, y = compiled(kind)
    first, second, head = model.layers
    before = {id(v): number(v) for v in model.optimizer.variables}
    kept = compress.shrink(first, 0.5, readouts=[second], optimizer=model.optimizer)
    assert first.units == 8 and second.cell.kernel.shape == (8, 4 * COUNT)
    compress.shrink(second, 8, readouts=[head], optimizer=model.optimizer)
    columns = (kept + COUNT * np.arange(4)[:, None]).reshape(-1)
    for slots in vars(model.optimizer).values():
        if isinstance(slots, list) and len(slots) == len(model.trainable_variables):
            for slot, variable in zip(slots, model.trainable_variables, strict=True):
                assert slot.shape == variable.shape
            if slots is not model.optimizer._trainable_variables:
                assert np.array_equal(number(slots[0]), before[id(slots[0])][:, columns])
    assert model.predict(x, verbose=0).shape == (32, 2)
    losses = model.fit(x, y, epochs=10, batch_size=16, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    assert tuple(first.cell.recurrent_kernel.shape) == (8, 32)
    path = tmp_path / "model.keras"
    model.save(path)
    loaded = keras.models.load_model(path)
    assert loaded.layers[0].units == 8
    # A loaded weight may lie otherwise in memory, where the backend's matmul sums in another order.
    outputs = [one.predict(x, verbose=0) for one in (loaded, model)]
    assert_close(*outputs, "float32", "forward")
    loaded.fit(x, y, epochs=1, verbose=0)


@pytest.mark.parametrize("kind", ["both directions", "RNN of a cell"])
def test_readouts_with_layers_within_are_loaded(kind: str, tmp_path: Path) -> None:
    """Which a file builds for the width that is left."""
    readout: Any = keras.layers.Bidirectional(ak.LSTM(3))
    if kind == "RNN of a cell":
        readout = ak.accelerate(keras.layers.RNN(keras.layers.GRUCell(3)))
    layer, x = ak.GRU(COUNT, return_sequences=True), np.ones((4, 5, 3), "float32")
    model = keras.Sequential([keras.Input((5, 3)), layer, readout])
    compress.shrink(layer, 8, readouts=[readout])
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert_close(number(loaded(x)), number(model(x)), "float32", "forward")


def test_stateful_layers_start_anew() -> None:
    layer = ak.RNN(cells.LSTMP, COUNT, P=8, stateful=True)
    x = np.ones((4, 5, 3), "float32")
    layer(x)
    compress.shrink(layer, 4, size="P", multiple=4)
    assert [tuple(s.shape) for s in layer.states] == [(4, 4), (4, COUNT)]
    assert not any(number(s).any() for s in layer.states)
    fresh = number(layer(x))
    layer.reset_state()
    assert np.array_equal(number(layer(x)), fresh)
    for other in (compress.quantize(layer), compress.factorize(layer, 4)):
        first, second = number(other(x)), number(other(x))
        assert not np.array_equal(first, second)
        other.reset_state()
        assert np.array_equal(number(other(x)), first)
    model = keras.Sequential([keras.Input(batch_shape=x.shape), layer])
    small = compress.quantize(model)
    assert_close(number(small(x)), fresh, "int8", "forward")


@pytest.mark.parametrize("name", ["LSTM", "Blocks", "GRU", "both directions", "sLSTM", "LSTMP"])
@pytest.mark.sample(2)
def test_full_rank_changes_nothing(name: str) -> None:
    layer, _, x = made(name)
    matmuls = ["mix"] if name == "Blocks" else None
    whole = compress.factorize(layer, 8 if name == "LSTMP" else COUNT, matmuls=matmuls)
    assert_close(number(whole(x)), number(layer(x)), "float32", "forward")
    small = compress.factorize(layer, 4)
    assert small.count_params() < whole.count_params()
    again = restored(small, x)
    again.set_weights(small.get_weights())
    assert np.array_equal(number(again(x)), number(small(x)))


@pytest.mark.parametrize("kind", ["LSTM", "RNN of an LSTMCell", "RNN"])
def test_what_a_factorized_layer_was_told_stays(kind: str) -> None:
    of_layer = {"return_sequences": True, "go_backwards": True, "activity_regularizer": "l1"}
    of_layer["name"] = "memory"
    of_cell = {"dropout": 0.1, "recurrent_dropout": 0.2, "seed": 3, "kernel_regularizer": "l2"}
    of_cell["recurrent_constraint"], of_cell["use_bias"] = "non_neg", False
    layer: Any
    if kind == "LSTM":
        layer = ak.LSTM(COUNT, **of_cell, **of_layer)
    elif kind == "RNN":
        layer = ak.RNN(cells.LSTM, COUNT, **of_cell, **of_layer)
    else:
        cell = keras.layers.LSTMCell(COUNT, **of_cell)
        layer = ak.accelerate(keras.layers.RNN(cell, **of_layer))
    layer(np.zeros((2, 5, 3), "float32"))
    given = layer.cell.get_config() | layer.get_config()
    for name, value in compress.factorize(layer, 4).get_config().items():
        assert value == given[name] if name in {*of_cell, *of_layer} else True, name
        given.pop(name, None)
    assert not given.keys() & {*of_cell, *of_layer}


def test_a_prepared_layer_packs_again() -> None:
    layer, x = ak.GRU(COUNT), np.ones((4, 5, 3), "float32")
    layer(x)
    compress.shrink(layer.prepare(), 8)
    assert_close(number(layer.step(x[:, 0])[0]), number(layer(x[:, :1])), "float32", "forward")


# -- weights of 8 bits -----------------------------------------------------------------------------
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.sample(1)
def test_quantized_layers(name: str, tmp_path: Path) -> None:
    """They are about what they were, know it, and are saved and loaded."""
    layer, _, x = made(name)
    model = keras.Sequential([keras.Input(x.shape[1:]), layer])
    with keras.saving.custom_object_scope({"Blocks": Blocks}):
        small = compress.quantize(model, data=[x, x])
        inner = small.layers[0]
        assert_close(number(small(x)), number(layer(x)), "int8", "forward")
        parts = [part for part in small._flatten_layers() if isinstance(part, ak.Quantized)]
        assert len(parts) == 1 + (name == "both directions")
        for part in parts:
            assert 0 < part.error < 0.02 and f"error {part.error:.1e}" in repr(part)
            assert part.cell.kernel.dtype == "int8" and not small.trainable_variables
            assert part.engine.name == "cpu" and "fused kernel" in part.engine.reason
        path = tmp_path / "model.keras"
        small.save(path)
        loaded = keras.models.load_model(path)
        assert np.array_equal(number(loaded(x)), number(small(x)))
        again = restored(inner, x)
        again.set_weights(inner.get_weights())
        assert np.array_equal(number(again(x)), number(inner(x)))


@pytest.mark.skipif(BACKEND == "jax", reason="there it runs in float32")
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.sample(1)
def test_quantized_layers_have_the_bits_of_every_other_frontend(reverse: bool) -> None:
    """With a mask, states, and in a graph."""
    rng = np.random.default_rng(0)
    layer = ak.LSTM(24, return_sequences=True, return_state=True, go_backwards=reverse)
    x, mask = rng.normal(size=(3, 7, 5)).astype("float32"), rng.random((3, 7)) < 0.8
    mask[:, 0] = mask[:, -1] = True
    states = [rng.normal(size=(3, 24)).astype("float32") for _ in range(2)]
    layer.build(x.shape)
    theirs = an.RNN(ak.cells.LSTM, 5, 24)
    kernel, recurrent, bias = layer.get_weights()
    theirs.set_parameters(
        {"weight_ih_l0": kernel.T, "weight_hh_l0": recurrent.T, "bias_ih_l0": bias,
         "bias_hh_l0": 0 * bias}
    )  # fmt: skip
    order = slice(None, None, -1 if reverse else 1)
    right, final = compress.quantize(theirs).forward(
        x.swapaxes(0, 1)[order], [s[None] for s in states], mask=mask.T[order],
        masked_output="repeat",
    )  # fmt: skip
    small = compress.quantize(layer)
    call = lambda x: small(x, initial_state=states, mask=mask)  # noqa: E731
    for run in (call, *([tf_function(call)] if BACKEND == "tensorflow" else [])):
        outputs, *ends = run(keras.ops.convert_to_tensor(x))
        assert np.array_equal(number(outputs), right.swapaxes(0, 1))
        for end, state in zip(ends, final, strict=True):
            assert np.array_equal(number(end), state[0])


def tf_function(call: Callable[..., Any]) -> Callable[..., Any]:
    import tensorflow as tf

    run: Callable[..., Any] = tf.function(call, autograph=False)
    return run


def test_real_weights_where_integers_do_not_do() -> None:
    """In single steps, in training, and for gradients."""
    layer = ak.LSTM(16)
    x = np.random.default_rng(0).normal(size=(3, 6, 5)).astype("float32")
    layer(x)
    small = compress.quantize(layer)
    same = real(small, layer)
    right = number(same(x))
    assert_close(number(keras.layers.RNN(small.cell)(x)), right, "float32", "forward")
    with ak.step_by_step():
        assert_close(number(small(x)), right, "float32", "forward")
    assert_close(number(small(x)), right, "int8", "forward")
    if BACKEND != "tensorflow":
        return
    import tensorflow as tf

    assert_close(number(small(x, training=True)), right, "float32", "forward")
    given, grads = tf.constant(x), []
    for each in (small, same):
        with tf.GradientTape() as tape:
            tape.watch(given)
            total = tf.reduce_sum(each(given) ** 2)
        grads.append(number(tape.gradient(total, given)))
    assert_close(*grads, "float32", "gradient")

    @tf.function
    def late(x: Any) -> Any:
        return tf.gradients(tf.reduce_sum(small(x)), x)

    with pytest.raises(NotImplementedError, match="gradients: asked for outside of a tape"):
        late(given)


def test_models_of_models() -> None:
    """What is not quantized is copied; masks arrive, and layers stay as they were."""
    words, x = keras.Input((None,)), np.random.default_rng(0).integers(0, 9, (4, 6))
    embedded = keras.layers.Embedding(9, 8, mask_zero=True)(words)
    both = keras.layers.Bidirectional(ak.LSTM(16, name="memory"))(embedded)
    given = keras.Input((None, 32))
    inner = keras.Model(given, keras.layers.Dropout(0.5)(ak.GRU(16)(given)))
    model = keras.Model(words, keras.layers.Dense(3)(inner(keras.layers.RepeatVector(4)(both))))
    model.compile("adam", "mse")
    before = model.get_weights()
    small = compress.quantize(model, data=[(x,)])
    assert_close(number(small(x)), number(model(x)), "int8", "forward", axes=())
    kinds = [found.kind for found in ak.recurrent_layers(small)]
    assert kinds == ["Quantized of anycell"] * 3
    for old, new in zip(before, model.get_weights(), strict=True):
        assert np.array_equal(old, new)
    assert not any("inner_loop" in vars(part) for part in model._flatten_layers())
    assert not any("get_config" in vars(part) for part in model._flatten_layers())
    assert number(small.layers[1].embeddings).tobytes() == before[0].tobytes()


def test_models_of_several_inputs() -> None:
    """Their batches are a list, as Keras's models take it, or a tuple; targets are none of them."""
    inputs = [keras.Input((5, 3)), keras.Input((5, 2))]
    model = keras.Model(inputs, keras.layers.Add()([ak.LSTM(8)(inputs[0]), ak.GRU(8)(inputs[1])]))
    x = [np.ones((2, 5, 3), "float32"), np.ones((2, 5, 2), "float32")]
    for batch in (x, tuple(x), (x,)):
        small = compress.quantize(model, data=[batch])
        assert [layer.error > 0 for layer in small.layers if hasattr(layer, "error")] == [True] * 2
    single = keras.Sequential([keras.Input((5, 3)), ak.LSTM(8)])
    with pytest.raises(TypeError, match=r"data: given 2 argument.*Leave targets out"):
        compress.quantize(single, data=[(x[0], np.ones((2, 8), "float32"))])


def test_what_is_not_quantized() -> None:
    layer = ak.LSTM(4)
    layer(np.zeros((1, 2, 3), "float32"))
    narrow = ak.LSTM(4, dtype="mixed_float16")
    narrow(np.zeros((1, 2, 3), "float32"))
    small = compress.quantize(layer)
    for wrong, kind, message in (
        (small, TypeError, "model: given Quantized without a float32 layer of anycell.keras"),
        (keras.Sequential([keras.layers.Dense(2)]), TypeError, "given Sequential without"),
        (keras.layers.LSTM(4), TypeError, "given LSTM without a float32 layer of anycell.keras"),
        (ak.LSTM(4), ValueError, "has no weights yet"),
        (narrow, ValueError, "of mixed_float16; expected float32"),
    ):
        with pytest.raises(kind, match=message):
            compress.quantize(wrong)
    layer.cell.kernel.assign(np.full(layer.cell.kernel.shape, np.inf))
    with pytest.raises(ValueError, match="infinities or NaN"):
        compress.quantize(layer)


# -- refusals --------------------------------------------------------------------------------------
def test_refusals() -> None:
    layer, head, _ = made("LSTM")
    for wrong, message in (
        (keras.layers.LSTM(4), "layer: given LSTM; expected a layer of anycell.torch"),
        (ak.LSTM(4), "which has no weights yet. Call it first"),
        (keras.layers.Bidirectional(ak.LSTM(4), merge_mode="sum"), "merge_mode='sum'; expected"),
        (keras.layers.Bidirectional(keras.layers.LSTM(4)), "a layer of Keras"),
        (ak.LSTM(4, activation=lambda v: v * v), "is not in the cell language"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            compress.shrink(wrong, 2)
    with pytest.raises(TypeError, match=r"readouts: .* expected layers that are built, .*\[16, "):
        compress.shrink(layer, 8, readouts=[keras.layers.Dense(2)])
    with pytest.raises(TypeError, match="readouts: given Dense; expected a list"):
        compress.shrink(layer, 8, readouts=head)
    fed = ak.Feedback(ak.GRU(COUNT), keras.layers.Dense(1))
    fed.build((None, None, 3))
    with pytest.raises(ValueError, match=r"readouts: given \[\].*readouts=\[feedback.readout\]"):
        compress.shrink(fed.layer, 8)
    compress.shrink(fed.layer, 8, readouts=[fed.readout])
    assert fed(np.zeros((2, 5, 3), "float32")).shape == (2, 5, 1)
    with pytest.raises(ValueError, match="two places"):
        compress.shrink(layer, 8, readouts=[tied(layer)])
    wide = ak.GRU(COUNT)
    wide.build((None, None, COUNT))
    small = compress.quantize(wide)
    for change in (
        lambda: compress.shrink(small, 8),
        lambda: compress.shrink(layer, 8, readouts=[small]),
        lambda: compress.unit_norms(small),
        lambda: compress.factorize(small, 4),
        lambda: compress.factorize(compress.quantize(made("both directions")[0]), 4),
    ):
        with pytest.raises(TypeError, match="with weights of 8 bits; expected float32"):
            change()
    assert small.units == COUNT and layer.units == COUNT
    layer, head, optimizer = stepped("adafactor")
    with pytest.raises(ValueError, match="optimizer: given Adafactor, whose state"):
        compress.shrink(layer, 8, readouts=[head], optimizer=optimizer)
    with pytest.raises(ValueError, match="optimizer: given Adam without parameters of the layer"):
        compress.shrink(layer, 8, readouts=[head], optimizer=stepped("adam")[2])
    assert layer.cell.kernel.shape == (3, 4 * COUNT) and head.kernel.shape == (COUNT, 2)


def tied(layer: Any) -> Any:
    """A readout that has a layer's own variable for its kernel."""
    head = keras.layers.Dense(4 * COUNT)
    head.build((None, None, COUNT))
    vars(head)["_kernel"] = layer.cell.recurrent_kernel
    return head


# -- cells of one's own ----------------------------------------------------------------------------
class Own(keras.layers.LSTMCell):
    """A cell with a step of its own."""

    def call(self, inputs: Any, states: Any, training: bool = False) -> Any:
        return super().call(2 * inputs, states, training)


X = np.zeros((4, 5, 3), "float32")
NEEDS_WEIGHTS: dict[str, Callable[[Any], Any]] = {
    "prepare": lambda layer: layer.prepare(),
    "quantize": compress.quantize,
    "shrink": lambda layer: compress.shrink(layer, 0.5),
    "export": lambda layer: anycell.export(layer, "unused"),
    "onnx": lambda layer: anycell.onnx.export(layer, "unused"),
    "feedback": lambda layer: ak.Feedback(layer, keras.layers.Dense(1)),
    "resets": lambda layer: layer(X, resets=X[..., 0]),
}


@pytest.mark.parametrize("what", NEEDS_WEIGHTS)
def test_weights_are_the_cells_own(what: str) -> None:
    """So what needs the step or the weights as ours have them refuses the layer."""
    cell = Own(COUNT)
    if what == "resets":
        cell = keras.layers.StackedRNNCells([cell, Own(COUNT)])
    layer = ak.RNN(cell)
    layer.build(X.shape)
    of = f"the cell is of class {type(cell).__name__}, whose step and weights are its own"
    with pytest.raises(ValueError, match=rf"{of}(?s:.*)Write its step as an @anycell.cell, for .*"):
        NEEDS_WEIGHTS[what](layer)


def test_layers_of_keras_are_turned_into_ours() -> None:
    layer = keras.layers.Bidirectional(keras.layers.LSTM(COUNT))
    with pytest.raises(ValueError, match=r"a layer of Keras; expected .* anycell.keras.accelerate"):
        compress.shrink(layer, 0.5)
