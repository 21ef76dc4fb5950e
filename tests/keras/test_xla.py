"""Layers of Keras on TensorFlow in what XLA compiles (``jit_compile=True``): fused, or why not."""

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

keras = pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")
if keras.backend.backend() != "tensorflow":
    pytest.skip("Keras runs on another backend", allow_module_level=True)

from tolerances import assert_close  # noqa: E402

import anycell.keras as ak  # noqa: E402
from anycell import cell, cells, linear, sigmoid, tanh  # noqa: E402
from anycell.compress import quantize  # noqa: E402
from anycell.engines.cpu import xla as handler  # noqa: E402
from anycell.keras.tensorflow import fused as kernels  # noqa: E402
from anycell.keras.tensorflow import xla  # noqa: E402
from anycell.layer import foreign  # noqa: E402

pytestmark = pytest.mark.sample(every=3)

if kernels.obstacle() is not None:
    pytest.skip(f"XLA calls no kernels here: {kernels.obstacle()}", allow_module_level=True)

B, T, I, H = 3, 5, 4, 6
ENDS = {"return_sequences": True, "return_state": True}


def data(rng: np.random.Generator, *shape: int, dtype: str = "float32") -> Any:
    return tf.constant(rng.normal(size=shape), dtype)


def fused(function: Any, *arguments: Any) -> bool:
    """Whether what XLA compiles calls the kernels, and has no loop over the steps."""
    graph = function.get_concrete_function(*arguments).graph.as_graph_def()
    nodes = {n.op for n in graph.node} | {n.op for f in graph.library.function for n in f.node_def}
    return "XlaCallModule" in nodes and not any("While" in op for op in nodes)


def derived(call: Callable[..., Any], variables: Any = ()) -> Callable[..., list[Any]]:
    """Results of a call, and gradients of its tensors and of variables, for some weights."""

    def run(*tensors: Any) -> list[Any]:
        wanted = [t for t in tensors if t.dtype.is_floating] + [v.value for v in variables]
        with tf.GradientTape() as tape:
            tape.watch(wanted)
            results = tf.nest.flatten(call(*tensors))
        return [*results, *tape.gradient(results, wanted, unconnected_gradients="zero")]

    return run


def compiled(run: Any, *tensors: Any, known: bool = False) -> Any:
    """The function that XLA compiles, where no more than the last axes is known."""
    specs = [tf.TensorSpec([None] * (t.shape.rank - 1) + [t.shape[-1]], t.dtype) for t in tensors]
    flags = [tf.TensorSpec([None, None], t.dtype) for t in tensors]
    open_sizes = [f if s.dtype == tf.bool else s for s, f in zip(specs, flags, strict=True)]
    signature = None if known else open_sizes
    return tf.function(run, jit_compile=True, autograph=False, input_signature=signature)


def assert_same(run: Any, *tensors: Any, dtype: str = "float32", known: bool = False) -> Any:
    """Asserts that XLA runs the kernels, with the results of eager mode."""
    function = compiled(run, *tensors, known=known)
    assert fused(function, *(tensors if known else ()))
    for ours, right in zip(function(*tensors), run(*tensors), strict=True):
        assert_close(ours.numpy(), right.numpy(), dtype, "gradient")
    return function


# -- every kind of call ----------------------------------------------------------------------------
@cell(gates="f g", state="h m")
def Halves(x: Any, r: Any, s: Any) -> Any:
    """Uses one output of two of a further matmul, so that its bias has a gradient of 0 in part."""
    m = sigmoid(x.f + r.f) * s.m
    return tanh(x.g + r.g) + linear(m, "w", bias=True), m


KINDS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "LSTM": (lambda **k: ak.LSTM(H, **k), ()),
    "mask": (lambda **k: ak.LSTM(H, **k), ("mask",)),
    "zeros under a mask": (lambda **k: ak.GRU(H, zero_output_for_mask=True, **k), ("mask",)),
    "backwards": (lambda **k: ak.GRU(H, go_backwards=True, **k), ("mask", "resets")),
    "resets": (lambda **k: ak.RNN(cells.PeepholeLSTM, H, **k), ("resets",)),
    "two matmuls": (lambda **k: ak.GRU(H, reset_after=False, **k), ()),
    "static": (lambda **k: ak.RNN(cells.EALSTM, H, **k), ("static",)),
    "reductions": (lambda **k: ak.RNN(cells.LayerNormGRU, H, **k), ()),
    "sizes of its own": (lambda **k: ak.RNN(cells.LSTMP, H, P=2, **k), ("mask",)),
    "a further bias": (lambda **k: ak.RNN(Halves, H, **k), ()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
@pytest.mark.sample(1)
def test_sizes_that_only_xla_knows(kind: str, dtype: str, rng: np.random.Generator) -> None:
    """One graph runs any number of steps and rows."""
    make, more = KINDS[kind]
    layer = make(**ENDS, dtype=dtype)
    layer.build((None, None, I))

    def arguments(steps: int, rows: int) -> list[Any]:
        shapes = {"mask": (rows, steps), "resets": (rows, steps), "static": (rows, H)}
        others = [
            data(rng, *shapes[n], dtype=dtype) if n == "static" else rng.random(shapes[n]) > 0.3
            for n in more
        ]
        return [data(rng, rows, steps, I, dtype=dtype), *map(tf.convert_to_tensor, others)]

    run = derived(
        lambda x, *others: layer(x, **dict(zip(more, others, strict=True))),
        layer.trainable_variables,
    )
    function = assert_same(run, *arguments(T, B), dtype=dtype)
    for steps, rows in ((T, 70), (1, 1), (3, 0)):
        tensors = arguments(steps, rows)
        for ours, right in zip(function(*tensors), run(*tensors), strict=True):
            assert_close(ours.numpy(), right.numpy(), dtype, "gradient")


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in cells.__all__ if n != "EALSTM"])
def test_every_cell(name: str, rng: np.random.Generator) -> None:
    definition, sizes = getattr(cells, name), {"P": 4} if name == "LSTMP" else {}
    layer = ak.RNN(definition, H, **ENDS, **sizes)
    layer.build((None, None, I))
    # In evaluation random masks have their mean, which the composite also has.
    run = derived(lambda x: layer(x, training=False), layer.trainable_variables)
    assert_same(run, data(rng, B, T, I))


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_sixteen_bits(policy: str, rng: np.random.Generator) -> None:
    layer = ak.LSTM(H, **ENDS, dtype=policy)
    layer.build((None, None, I))
    run = derived(layer, layer.trainable_variables)
    x = data(rng, B, T, I)
    for ours, right in zip(compiled(run, x)(x), run(x), strict=True):
        assert np.array_equal(ours, right)


@pytest.mark.parametrize("number", [7, 2**40 + 3])
def test_random_masks(number: int, rng: np.random.Generator) -> None:
    """A seed gives the masks of eager mode."""
    weights = {"weight_ih": data(rng, 4 * H, I), "weight_hh": data(rng, 4 * H, H)}
    names = list(weights)

    def call(x: Any, *flat: Any) -> Any:
        given = dict(zip(names, flat, strict=True))
        return ak.recurrence(cells.ZoneoutLSTM, x, given, seed=number, training=True)

    assert_same(derived(call), data(rng, T, B, I), *weights.values(), known=True)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint": 2, "training": True},
        {"return_states": True, "reverse": True},
        {"recurrent_mask": (B, H)},
        {"recurrent_mask": (4, B, H)},
    ],
    ids=str,
)
def test_options_of_recurrence(
    options: dict[str, Any], known: bool, rng: np.random.Generator
) -> None:
    shape = options.get("recurrent_mask")
    options = options | ({} if shape is None else {"recurrent_mask": data(rng, *shape)})
    weights = {"weight_ih": data(rng, 4 * H, I), "weight_hh": data(rng, 4 * H, H)}
    call = derived(lambda x: ak.recurrence(cells.LSTM, x, weights, **options))
    assert_same(call, data(rng, T, B, I), known=known)


def test_weights_of_eight_bits(rng: np.random.Generator) -> None:
    model = keras.Sequential([keras.Input((None, I)), ak.LSTM(H, return_sequences=True)])
    small, x = quantize(model), data(rng, B, T, I)
    function = compiled(lambda x: [small(x)], x)
    assert fused(function)
    assert np.array_equal(function(x)[0], small(x))


def test_sizes_that_do_not_match(rng: np.random.Generator) -> None:
    weights = {"weight_ih": data(rng, 4 * H, I), "weight_hh": data(rng, 4 * H, H)}
    call = compiled(
        lambda x, h, c: ak.recurrence(cells.LSTM, x, weights, (h, c))[0],
        *(x := data(rng, T, B, I), data(rng, B, H), data(rng, B, H)),
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match="12 values"):
        call(x, data(rng, 2, H), data(rng, B, H))


# -- derivatives, loops ----------------------------------------------------------------------------
def test_a_tape_outside(rng: np.random.Generator) -> None:
    """Then TensorFlow asks the operations of the graph for their gradients."""
    layer, x = ak.LSTM(H), data(rng, B, T, I)
    layer.build(x.shape)
    run = derived(compiled(layer, x), layer.trainable_variables)
    for ours, right in zip(run(x), derived(layer, layer.trainable_variables)(x), strict=True):
        assert_close(ours, right, "float32", "gradient")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["twice", "while", "cond", "vectorized_map"])
def test_derivatives_and_control_flow(way: str, rng: np.random.Generator) -> None:
    layer, x = ak.LSTM(I, return_sequences=True), data(rng, B, T, I)
    layer.build(x.shape)

    def twice(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x) ** 2
        return tape.gradient(y, x)

    def looped(x: Any) -> Any:
        return tf.while_loop(
            lambda i, x: i < 2, lambda i, x: (i + 1, layer(x)), (0, x), maximum_iterations=2
        )[1]

    calls = {
        "twice": twice,
        "while": looped,
        "cond": lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: layer(x), lambda: layer(-x)),
        "vectorized_map": lambda x: tf.vectorized_map(lambda row: layer(row[None])[0], x),
    }
    run = derived(calls[way])
    for ours, right in zip(compiled(run, x, known=True)(x), run(x), strict=True):
        assert_close(ours, right, "float32", "gradient")


# -- Keras -----------------------------------------------------------------------------------------
class Leaky(keras.layers.Layer):
    """A cell as a user writes it."""

    units = state_size = H

    def build(self, shape: Any) -> None:
        self.w = self.add_weight(shape=(shape[-1], H))
        self.u = self.add_weight(shape=(H, H))

    def call(self, x: Any, states: Any) -> Any:
        h = 0.5 * states[0] + keras.ops.tanh(x @ self.w + states[0] @ self.u)
        return h, [h]


LAYERS: dict[str, Callable[[], Any]] = {
    "LSTM": lambda: ak.LSTM(H, return_sequences=True),
    "Bidirectional": lambda: keras.layers.Bidirectional(ak.GRU(H, return_sequences=True)),
    "a user's cell": lambda: ak.RNN(Leaky(), return_sequences=True),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.more
def test_fit(kind: str, rng: np.random.Generator) -> None:
    """The same training with and without XLA; the last batch has fewer rows."""
    trained, x, y = [], data(rng, 7, T, I), data(rng, 7, T, 2)
    for by_xla in (False, True):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((T, I)), LAYERS[kind](), keras.layers.Dense(2)])
        model.compile("sgd", "mse", jit_compile=by_xla)
        assert model.jit_compile is by_xla
        model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        trained.append([*model.get_weights(), model.predict(x, verbose=0)])
        if by_xla:
            spec = [tf.TensorSpec([None, T, I])]
            assert fused(tf.function(model, spec, jit_compile=True, autograph=False))
    for ours, right in zip(*trained, strict=True):
        assert_close(ours, right, "float32", "gradient")


@pytest.mark.parametrize("rate", ["dropout", "recurrent_dropout"])
def test_dropout(rate: str, rng: np.random.Generator) -> None:
    """The masks are those that Keras's layer draws under XLA; without XLA it may draw others."""
    results, x = [], data(rng, B, T, I)
    for module in (ak, keras.layers):
        keras.utils.set_random_seed(1)
        layer = module.LSTM(H, return_sequences=True, seed=3, **{rate: 0.5})
        layer.build(x.shape)
        function = tf.function(
            lambda x, layer=layer: layer(x, training=True), jit_compile=True, autograph=False
        )
        assert fused(function, x) is (module is ak)
        results.append(function(x))
    assert_close(*results, "float32", "forward")


def test_states_that_stay(rng: np.random.Generator) -> None:
    layer, x = ak.LSTM(H, stateful=True), data(rng, B, T, I)
    layer.build(x.shape)
    right = [layer(x), layer(x)]
    layer.reset_state()
    function = tf.function(layer, jit_compile=True, autograph=False)
    assert fused(function, x)
    for ours, once in zip([function(x), function(x)], right, strict=True):
        assert_close(ours, once, "float32", "forward")


def test_a_function_that_was_compiled_is_not_saved(tmp_path: Path) -> None:
    """It would call kernels that only this process has."""
    module, layer = tf.Module(), ak.LSTM(H)
    layer.build((B, T, I))
    module.weights = [w.value for w in layer.weights]
    compiled = tf.function(layer, jit_compile=True, autograph=False)
    module.call = compiled.get_concrete_function(tf.TensorSpec([B, T, I]))
    with pytest.raises(ValueError, match="Error when tracing gradients") as error:
        tf.saved_model.save(module, str(tmp_path))
    assert "trace it within anycell.keras.step_by_step()" in str(error.value.__cause__)


# -- where XLA cannot call the kernels -------------------------------------------------------------
def fails(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("no such operation\non any device")


class Refusing(ctypes.Structure):
    """XLA's functions, of which none registers a handler."""

    _fields_ = [("words", ctypes.c_size_t * 12)]


REGISTER = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: 1)


def table(version: int) -> Any:
    words = [0] * 12
    words[xla.VERSION // 8], words[xla.MAJOR // 8] = xla.VERSION_BYTES, version
    words[xla.REGISTER // 8] = ctypes.cast(REGISTER, ctypes.c_void_p).value or 0
    return Refusing((ctypes.c_size_t * 12)(*words))


TABLES = {name: table(version) for name, version in (("newer", 1), ("refusing", 0))}


class Library:
    """A library of TensorFlow whose XLA has another table of functions."""

    def __init__(self, kind: str) -> None:
        api = ctypes.CFUNCTYPE(ctypes.c_void_p)(lambda: ctypes.addressof(TABLES[kind]))
        setattr(self, xla.SYMBOLS[0], api)


FAILURES: dict[str, tuple[str, str, Any, str]] = {
    "no entry": ("xla", "SYMBOLS", ("XLA_has_none",), "exports no function"),
    "a newer version": ("ctypes", "CDLL", lambda _: Library("newer"), "another version than 0"),
    "a refusal": ("ctypes", "CDLL", lambda _: Library("refusing"), "did not register"),
    "no operation": ("xla", "call_module", fails, "NotImplementedError: no such operation"),
    "wrong numbers": ("xla", "composite", lambda layer, arrays: xla_of_zeros(arrays), "differ"),
    "a TPU": ("config", "list_logical_devices", lambda kind: kind == "TPU" and ["one"], "a TPU"),
}


def xla_of_zeros(arrays: Any) -> Any:
    zero = 0.0 * sum(map(tf.reduce_sum, arrays.values()))
    h, c = arrays["state h"] + zero, arrays["state c"] + zero
    return tf.stack([h] * arrays["x"].shape[0]), (h, c)


@pytest.fixture
def unproven() -> Iterator[None]:
    """A process that has not tried yet whether XLA calls the kernels, before and after a test."""
    kernels.obstacle.cache_clear()
    yield
    kernels.obstacle.cache_clear()


@pytest.mark.parametrize("kind", FAILURES)
@pytest.mark.usefixtures("unproven")
def test_a_road_that_does_not_work_is_not_taken(
    kind: str, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    module, name, instead, why = FAILURES[kind]
    places = {"xla": xla, "ctypes": xla.ctypes, "config": tf.config}
    layer, x, engines = ak.LSTM(H), data(rng, B, T, I), []
    right = layer(x)
    monkeypatch.setattr(places[module], name, instead)
    function = tf.function(
        lambda x: (engines.append(layer.engine), layer(x))[1], jit_compile=True, autograph=False
    )
    assert not fused(function, x)
    monkeypatch.undo()
    assert_close(function(x), right, "float32", "forward")
    ((engine, reason),) = engines
    assert engine == "keras" and why in reason and "\n" not in reason, reason
    assert not layer.supports_jit and why in str(kernels.obstacle())
    model = keras.Sequential([keras.Input((T, I)), layer])
    with pytest.warns(UserWarning, match="doesn't support `jit_compile=True`"):
        model.compile("sgd", "mse", jit_compile=True)


@pytest.mark.usefixtures("unproven")
def test_it_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[Any] = []
    monkeypatch.setattr(xla, "obstacle", lambda run: tries.append(run))
    layer = ak.LSTM(H)
    for _ in range(2):
        tf.function(layer, jit_compile=True, autograph=False).get_concrete_function(
            tf.TensorSpec([B, T, I])
        )
    assert len(tries) == 1


def test_a_pass_that_cannot_be_drafted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rng: np.random.Generator
) -> None:
    """It is an error of the program, and no crash."""
    assert kernels.obstacle() is None  # tried before ``fails`` is there
    layer, x = ak.RNN(cells.JANET, 11), data(rng, B, T, I)  # as in no other test
    function = tf.function(layer, jit_compile=True, autograph=False)
    monkeypatch.setattr(foreign, "record", fails)
    with pytest.raises(tf.errors.FailedPreconditionError, match="has not compiled"):
        function(x)
    assert "no such operation" in capsys.readouterr().err
    monkeypatch.undo()
    assert_close(function(x), layer(x), "float32", "forward")


def test_many_forms(rng: np.random.Generator) -> None:
    """A table of names that grows while a record is drafted has the new names."""
    names = handler.process()
    for i in range(200):
        names.name(f"{i}", 1)
    layer = ak.LSTM(H)
    for steps in range(1, 4):
        x = data(rng, B, steps + 1, I)
        assert_close(
            tf.function(layer, jit_compile=True, autograph=False)(x), layer(x), "float32", "forward"
        )
