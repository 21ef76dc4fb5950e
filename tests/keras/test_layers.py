"""The Keras layers, against ``keras.layers`` if it has them, else against the NumPy layers.

One process has one backend of Keras: run the tests with KERAS_BACKEND set to each backend.

One file, because every test compares layers of the pairs defined at its top.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

keras = pytest.importorskip("keras")

from keras_layers import (  # noqa: E402
    BACKEND,
    assert_right,
    config_of,
    copy_weights,
    number,
    random_mask,
    solve,
)
from processes import calls_of_ours  # noqa: E402
from tolerances import NO_WORSE_THAN_16, assert_close  # noqa: E402
from variants import variants  # noqa: E402

import anycell.keras as ak  # noqa: E402
from anycell import cell, cells, keep, linear, sigmoid, tanh  # noqa: E402
from anycell.engines import cpu  # noqa: E402
from anycell.keras.cells import ACTIVATIONS  # noqa: E402
from anycell.keras.rule import Engine  # noqa: E402
from anycell.lang.transform import low_rank  # noqa: E402

KERAS = ["LSTM", "GRU", "SimpleRNN"]
FLAGS: list[dict[str, Any]] = [
    {},
    {"return_sequences": True},
    {"return_sequences": True, "return_state": True},
    {"return_state": True, "go_backwards": True},
    {"return_sequences": True, "return_state": True, "go_backwards": True},
    {"return_sequences": True, "zero_output_for_mask": True, "return_state": True},
    {"zero_output_for_mask": True, "go_backwards": True},
]
EXACT = BACKEND == "tensorflow"  # on torch and JAX, Keras's own loop loses digits
SLOW_FLOAT32 = pytest.param("float32", marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def _float64(request: pytest.FixtureRequest) -> Iterator[None]:
    """Enables float64 in JAX, which disables it by default, for tests of that dtype."""
    given = getattr(request.node, "callspec", None)
    if BACKEND != "jax" or given is None or given.params.get("dtype") != "float64":
        yield
        return
    import jax

    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def pair(name: str, units: int, **kwargs: Any) -> tuple[Any, Any]:
    """Returns Keras's layer and ours."""
    if BACKEND == "jax" and name == "SimpleRNN" and kwargs.get("dtype") == "float64":
        pytest.skip("Keras's own fails: its step returns float32")
    return getattr(keras.layers, name)(units, **kwargs), getattr(ak, name)(units, **kwargs)


# -- LSTM, GRU and SimpleRNN are Keras's -----------------------------------------------------------
@pytest.mark.parametrize("dtype", [SLOW_FLOAT32, "float64"] if EXACT else ["float32"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("flags", FLAGS, ids=lambda f: " ".join(f) or "plain")
@pytest.mark.parametrize("name", KERAS)
@pytest.mark.sample(every=11)
def test_results_and_gradients(
    name: str, flags: dict[str, Any], masked: bool, dtype: str, rng: np.random.Generator
) -> None:
    rows, steps, width, units = 4, 6, 3, 6
    theirs, ours = pair(name, units, dtype=dtype, **flags)
    copy_weights(theirs, ours, (rows, steps, width))
    x = rng.normal(size=(rows, steps, width))
    states = [rng.normal(size=(rows, units)) for _ in range(1 + (name == "LSTM"))]
    mask = random_mask(rng, rows, steps) if masked else None
    own = solve(theirs, x, states, mask)
    if dtype == "float64" or BACKEND == "jax":
        right = own
    else:
        exact = type(theirs)(units, dtype="float64", **flags)
        exact.build(x.shape)
        exact.set_weights(theirs.get_weights())
        right = solve(exact, np.float32(x), [np.float32(s) for s in states], mask)
    assert_right(solve(ours, x, states, mask), right, dtype, own)
    if BACKEND == "tensorflow":
        assert_right(solve(ours, x, states, mask, graph=True), right, dtype, own)
        assert_right(solve(ours, x, states, mask, training=True, graph=True), right, dtype, own)
    assert ours.engine.name == "cpu"


@pytest.mark.skipif(BACKEND == "torch", reason="Keras's own layer is no oracle in float64")
@pytest.mark.parametrize(
    "kwargs",
    [
        {"activation": "relu"},
        {"activation": None},
        {"activation": "softsign", "recurrent_activation": "hard_sigmoid"},
        {"activation": "elu"},
        {"activation": "selu"},
        {"activation": "silu"},
        {"activation": "mish"},
        {"activation": "hard_silu"},
        {"activation": "softplus", "recurrent_activation": "relu6"},
        {"activation": "exponential", "recurrent_activation": "hard_sigmoid"},
        {"activation": "hard_tanh", "recurrent_activation": "log_sigmoid"},
        {"use_bias": False},
        {"unit_forget_bias": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", KERAS)
@pytest.mark.parametrize("dtype", ["float64"])
@pytest.mark.sample(every=8)
def test_arguments_that_the_cell_language_knows(
    dtype: str, name: str, kwargs: dict[str, Any], rng: np.random.Generator
) -> None:
    named = [v for k, v in kwargs.items() if k.endswith("activation") and v]
    if not all(hasattr(keras.activations, function) for function in named):
        pytest.skip(f"Keras {keras.__version__} has no such function")
    own = {k: v for k, v in kwargs.items() if name == "LSTM" or k != "unit_forget_bias"}
    if name == "SimpleRNN":
        own.pop("recurrent_activation", None)
    theirs, ours = pair(name, 6, return_sequences=True, dtype=dtype, **own)
    copy_weights(theirs, ours, (3, 4, 2))
    # exp of exp overflows in a few steps.
    steps = 2 if own.get("activation") == "exponential" else 4
    x = 0.5 * rng.normal(size=(3, steps, 2))
    assert_right(solve(ours, x), solve(theirs, x), dtype if EXACT else "float32")
    assert ours.engine.name == "cpu"


# Points at which functions have kinks, or exp overflows.
EDGES = np.array([0, 1, -1, 3, -3, 6, -6, 100, -100, 1e30, -1e30, np.nan], "float32")
# Points at which the derivatives of other backends differ from TensorFlow's; at -3 torch's gelu is
# a hundred times as far from the right number as ours.
APART: dict[str, list[float]] = {
    "torch": {"selu": [0.0], "hard_tanh": [1.0, -1.0], "gelu": [-3.0]},
    "jax": {"selu": [0.0], "leaky_relu": [0.0]},
}.get(BACKEND, {})


@pytest.mark.parametrize("function", ACTIVATIONS)
@pytest.mark.sample(every=4)
def test_activations_at_their_edges(function: str) -> None:
    if not hasattr(keras.activations, function):
        pytest.skip(f"Keras {keras.__version__} has no such function")
    rows = EDGES[~np.isin(EDGES, APART.get(function, []))]
    x = np.stack([np.full_like(rows, 0.5), rows], axis=1)[..., None]
    found, right = (
        solve(layer, x)
        for layer in pair(
            "SimpleRNN", 1, activation=function, return_sequences=True,
            kernel_initializer="ones", recurrent_initializer="zeros",
        )[::-1]
    )  # fmt: skip
    for name, there in (("result 0", slice(None)), ("d x", ~np.isnan(rows))):
        ours, theirs = found[name][there, :, 0], right[name][there, :, 0]
        unknown = np.isnan(theirs)
        assert np.array_equal(np.isnan(ours), unknown)
        kind = "gradient" if name == "d x" else "forward"
        ours, theirs = (np.where(unknown, 0.0, a) for a in (ours, theirs))
        assert_close(ours, theirs, "float32", kind, name, axes=(0,))


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"activation": "log_softmax"}, "activation=log_softmax is not in the cell language"),
        ({"activation": lambda v: v}, "activation=<lambda> is not in the cell language"),
        ({"dropout": 0.5, "implementation": 1}, ""),  # drops the inputs of each gate separately
    ],
    ids=["log_softmax", "lambda", "implementation"],
)
def test_arguments_that_keras_runs_otherwise(kwargs: dict[str, Any], reason: str) -> None:
    theirs, ours = pair("LSTM", 4, seed=4, **kwargs)
    theirs.use_cudnn = ours.use_cudnn = False  # Keras's fails with these arguments
    copy_weights(theirs, ours, (3, 4, 2))
    x = np.ones((3, 4, 2), "float32")
    for training in (False, True):
        assert_close(
            number(ours(x, training=training)), number(theirs(x, training=training)), "float32",
            "forward",
        )  # fmt: skip
    assert f"runs on {'keras' if reason else 'cpu'}" in ours.explain(training=True)
    assert reason in ours.explain(training=True)


def test_gru_with_the_reset_before_the_matmul() -> None:
    theirs, ours = pair("GRU", 4, reset_after=False)
    copy_weights(theirs, ours, (3, 4, 2))
    x = np.ones((3, 4, 2), "float32")
    assert_close(number(ours(x)), number(theirs(x)), "float32", "forward")
    if ours.engine.name != "cpu":
        assert "matmul" in ours.engine.reason


@pytest.mark.parametrize("name", KERAS)
@pytest.mark.sample(1)
def test_dropout_draws_what_keras_draws(name: str) -> None:
    theirs, ours = pair(name, 4, dropout=0.5, seed=4, return_sequences=True)
    copy_weights(theirs, ours, (3, 4, 20))
    x = np.ones((3, 4, 20), "float32")
    for training in (True, False, True):
        assert_close(
            number(ours(x, training=training)), number(theirs(x, training=training)), "float32",
            "forward",
        )  # fmt: skip


@pytest.mark.parametrize("dtype", ["float64"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", KERAS)
@pytest.mark.sample(every=7)
def test_recurrent_dropout_draws_what_keras_draws(
    name: str, masked: bool, dropout: float, dtype: str
) -> None:
    theirs, ours = pair(
        name, 6, recurrent_dropout=0.4, dropout=dropout, seed=4, return_sequences=True,
        dtype=dtype,
    )  # fmt: skip
    copy_weights(theirs, ours, (3, 4, 2))
    x = np.random.default_rng(0).normal(size=(3, 4, 2))
    mask = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 1, 1]], bool) if masked else None
    # Keras's matmul on torch, and its tanh on JAX, compute in float32 for any dtype.
    assert_right(
        solve(ours, x, training=True, mask=mask),
        solve(theirs, x, training=True, mask=mask),
        dtype if EXACT else "float32",
    )
    apart = name != "GRU" or hasattr(ours.cell, "dropout_mask_count")  # since Keras 3.8
    assert f"training runs on {'cpu' if apart else 'keras'}" in ours.explain(training=True)


@pytest.mark.parametrize("name", KERAS)
def test_same_seed_same_initial_weights(name: str, seed: int) -> None:
    found = []
    for module in (keras.layers, ak):
        keras.utils.set_random_seed(seed)
        layer = getattr(module, name)(6, name="layer")
        layer.build((None, None, 3))
        found.append(layer)
    theirs, ours = found
    for a, b in zip(theirs.weights, ours.weights, strict=True):
        assert a.path == b.path
        assert np.array_equal(number(a), number(b))


@pytest.mark.parametrize("name", KERAS)
@pytest.mark.sample(1)
def test_config_and_files(name: str, tmp_path: Any) -> None:
    theirs, ours = pair(name, 4, return_sequences=True, dropout=0.1, kernel_regularizer="l2")
    assert config_of(theirs) == config_of(ours)
    x = np.random.default_rng(0).normal(size=(2, 5, 3)).astype("float32")
    models = []
    for layer in (theirs, ours):
        layer_in = keras.Input((None, 3))
        models.append(keras.Model(layer_in, keras.layers.Dense(2)(layer(layer_in))))
    first, second = models
    first.save_weights(tmp_path / "their.weights.h5")
    second.load_weights(tmp_path / "their.weights.h5")
    assert_close(number(second(x)), number(first(x)), "float32", "forward")
    second.save(tmp_path / "our.keras")
    again = keras.models.load_model(tmp_path / "our.keras")
    assert isinstance(again.layers[1], getattr(ak, name))
    assert np.array_equal(number(again(x)), number(second(x)))
    second.save_weights(tmp_path / "our.weights.h5")
    first.set_weights([0 * w for w in first.get_weights()])
    first.load_weights(tmp_path / "our.weights.h5")
    assert_close(number(second(x)), number(first(x)), "float32", "forward")


@pytest.mark.parametrize("name", KERAS)
@pytest.mark.sample(1)
def test_constraints_and_regularizers(name: str) -> None:
    layer = getattr(ak, name)(
        4, kernel_regularizer="l2", bias_regularizer="l1", kernel_constraint="non_neg",
        activity_regularizer=keras.regularizers.L2(0.1), bias_initializer="ones",
    )  # fmt: skip
    model = keras.Sequential([keras.Input((5, 3)), layer])
    model.compile("sgd", "mse")
    x, y = np.ones((4, 5, 3), "float32"), np.zeros((4, 4), "float32")
    model.fit(x, y, verbose=0, epochs=2)
    kept = 3 if name != "SimpleRNN" else 2  # Keras forgets its activity's
    assert BACKEND == "jax" or len(model.losses) == kept
    assert number(layer.cell.kernel).min() >= 0.0


@pytest.mark.parametrize("name", KERAS)
def test_stateful(name: str, rng: np.random.Generator) -> None:
    theirs, ours = pair(name, 4, stateful=True, return_sequences=True)
    x = rng.normal(size=(2, 6, 3)).astype("float32")
    copy_weights(theirs, ours, x.shape)
    for part in (x[:, :3], x[:, 3:]):
        assert_close(number(ours(part)), number(theirs(part)), "float32", "forward")
    ours.reset_state()
    assert not any(number(s).any() for s in ours.states)
    with pytest.raises(ValueError, match="stateful"):
        getattr(ak, name)(4, stateful=True)(keras.Input((None, 3)))


@pytest.mark.parametrize("name", KERAS)
@pytest.mark.parametrize("merge", ["concat", "sum", None])
@pytest.mark.sample(every=8)
def test_bidirectional(name: str, merge: str | None, rng: np.random.Generator) -> None:
    theirs, ours = (
        keras.layers.Bidirectional(l, merge_mode=merge)
        for l in pair(name, 4, return_sequences=True)
    )
    x = rng.normal(size=(3, 6, 2)).astype("float32")
    copy_weights(theirs, ours, x.shape)
    for mask in (None, random_mask(rng, 3, 6)):
        a, b = theirs(x, mask=mask), ours(x, mask=mask)
        pairs = zip(a, b, strict=True) if merge is None else [(a, b)]
        for p, q in pairs:
            assert_close(number(q), number(p), "float32", "forward")
    assert ours.forward_layer.use_cudnn is False if name != "SimpleRNN" else True
    assert isinstance(ours.backward_layer, getattr(ak, name))


def test_models_with_masks(rng: np.random.Generator) -> None:
    words = rng.integers(0, 5, (6, 9))
    words[:, 0] = 0  # masked on the left, in holes, and a whole row

    words[2] = 0

    def model(module: Any) -> Any:
        given = keras.Input((None,), dtype="int32")
        x = keras.layers.Embedding(5, 4, mask_zero=True)(given)
        x = keras.layers.Bidirectional(module.GRU(3, return_sequences=True))(x)
        x = keras.layers.Masking()(x)
        return keras.Model(given, keras.layers.Dense(1)(module.LSTM(3)(x)))

    first, second = model(keras.layers), model(ak)
    second.set_weights(first.get_weights())
    assert_close(
        second.predict(words, verbose=0), first.predict(words, verbose=0), "float32", "forward"
    )


def test_time_distributed(rng: np.random.Generator) -> None:
    theirs, ours = (keras.layers.TimeDistributed(l) for l in pair("LSTM", 4))
    x = rng.normal(size=(2, 3, 5, 2)).astype("float32")
    copy_weights(theirs, ours, x.shape)
    assert_close(number(ours(x)), number(theirs(x)), "float32", "forward")


def test_encoder_decoder_states_in_the_functional_api(rng: np.random.Generator) -> None:
    def model(module: Any) -> Any:
        source, target = keras.Input((None, 2)), keras.Input((None, 2))
        _, *states = module.LSTM(4, return_state=True)(source)
        return keras.Model([source, target], module.LSTM(4)(target, initial_state=states))

    first, second = model(keras.layers), model(ak)
    second.set_weights(first.get_weights())
    x = [rng.normal(size=(3, n, 2)).astype("float32") for n in (5, 4)]
    assert_close(second.predict(x, verbose=0), first.predict(x, verbose=0), "float32", "forward")


@pytest.mark.parametrize("name", KERAS)
@pytest.mark.parametrize("kind", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.sample(1)
@pytest.mark.more
def test_mixed_precision(name: str, kind: str, rng: np.random.Generator) -> None:
    theirs, ours = pair(name, 8, return_sequences=True, dtype=kind)
    exact = getattr(keras.layers, name)(8, return_sequences=True)
    x = rng.normal(size=(4, 6, 3)).astype("float32")
    copy_weights(theirs, ours, x.shape)
    exact.build(x.shape)
    exact.set_weights(ours.get_weights())
    right, a, b = number(exact(x)), theirs(x), ours(x)
    assert str(a.dtype) == str(b.dtype)
    wrong = [
        np.linalg.norm(number(keras.ops.cast(y, "float32")) - right) / np.linalg.norm(right)
        for y in (a, b)
    ]
    assert wrong[1] <= NO_WORSE_THAN_16 * wrong[0]
    model = keras.Sequential([keras.Input((6, 3)), ours, keras.layers.Dense(1, dtype="float32")])
    model.compile("sgd", "mse")
    history = model.fit(x, np.zeros((4, 6, 1)), epochs=2, verbose=0).history["loss"]
    assert np.isfinite(history).all()


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("LSTM", "cell: given str 'LSTM'; expected a cell. Pass one of anycell.cells"),
        (keras.layers.Dense(3), "cell: given Dense .*; expected a cell"),
        (cells.LSTM, "invalid value for argument `units`, expected a positive integer, got None"),
    ],
)
def test_what_is_given_without_units_is_checked_first(cell: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        ak.RNN(cell)
    with pytest.raises((TypeError, ValueError), match=message):
        ak.RNN(cell=cell)


def test_the_other_name_of_units() -> None:
    with pytest.raises(TypeError, match=r"^hidden_size: given 4; .* Did you mean units\?"):
        ak.RNN(cells.LSTM, hidden_size=4)


def test_errors_are_keras_own() -> None:
    with pytest.raises(ValueError, match="Received an invalid value for argument `units`"):
        ak.LSTM(0)
    with pytest.raises(ValueError, match="expected ndim=3"):
        ak.LSTM(3)(np.zeros((2, 3), "float32"))
    with pytest.raises(ValueError):
        ak.LSTM(3, activation="no such function")
    with pytest.raises(ValueError, match="use_cudnn"):
        ak.LSTM(3, use_cudnn="maybe")


def test_is_keras_own_by_isinstance() -> None:
    for name in KERAS:
        assert issubclass(getattr(ak, name), getattr(keras.layers, name))
        step = f"{name}Cell"
        assert issubclass(getattr(ak, step), getattr(keras.layers, step))


# -- shapes ----------------------------------------------------------------------------------------
X, H, FLAG = np.ones((2, 5, 3), "float32"), np.ones((2, 4), "float32"), np.ones((2, 5), bool)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"initial_state": [H]}, r"given 1 tensor\(s\); expected 2"),
        ({"initial_state": H}, r"given 1 tensor\(s\); expected 2"),
        ({"initial_state": [H, H, H]}, r"given 3 tensor\(s\); expected 2"),
        ({"initial_state": [H, np.ones((3, 4))]}, r"c: given shape \(3, 4\); expected \(2, 4\)"),
        ({"initial_state": [H[:, :3], H]}, r"h: given shape \(2, 3\); expected \(2, 4\)"),
        ({"initial_state": [H[None], H[None]]}, r"h: given shape \(1, 2, 4\); expected \(2, 4\)"),
        ({"mask": FLAG[:, :1]}, r"mask: given shape \(2, 1\); expected \(2, 5\)"),
        ({"mask": FLAG[:, 1:]}, r"mask: given shape \(2, 4\); expected \(2, 5\)"),
        ({"mask": FLAG.T}, r"mask: given shape \(5, 2\); expected \(2, 5\)"),
        ({"mask": FLAG[0, 0]}, r"mask: given shape \(\); expected \(2, 5\)"),
        ({"mask": FLAG[..., None] & FLAG[:, None]}, r"mask: given shape \(2, 5, 5\); expected"),
        ({"mask": [[True] * 4] * 2}, r"mask: given shape \(2, 4\); expected \(2, 5\)"),
        ({"resets": FLAG[:1]}, r"resets: given shape \(1, 5\); expected \(2, 5\)"),
        ({"resets": FLAG[:, :1]}, r"resets: given shape \(2, 1\); expected \(2, 5\)"),
        ({"resets": FLAG[:, 1:]}, r"resets: given shape \(2, 4\); expected \(2, 5\)"),
        ({"resets": FLAG[:, 0]}, r"resets: given shape \(2,\); expected \(2, 5\)"),
        ({"resets": FLAG.T}, r"resets: given shape \(5, 2\); expected \(2, 5\)"),
        ({"resets": FLAG[..., None]}, r"resets: given shape \(2, 5, 1\); expected \(2, 5\)"),
        ({"static": H[:, :3]}, r"static: given shape \(2, 3\); expected \(2, 4\)"),
        ({"static": H[:1]}, r"static: given shape \(1, 4\); expected \(2, 4\)"),
        ({"static": np.ones((3, 4))}, r"static: given shape \(3, 4\); expected \(2, 4\)"),
        ({"static": np.ones((2, 8))}, r"static: given shape \(2, 8\); expected \(2, 4\)"),
        ({"static": np.ones((2, 5, 4))}, r"static: given shape \(2, 5, 4\); expected \(2, 4\)"),
    ],
    ids=lambda v: "" if isinstance(v, str) else next(iter(v)),
)
def test_shapes_that_do_not_fit_are_refused(given: dict[str, Any], what: str) -> None:
    """Kernels address memory by these shapes."""
    layer = ak.RNN(cells.EALSTM if "static" in given else cells.LSTM, 4)
    convert = keras.ops.convert_to_tensor
    with pytest.raises(ValueError, match=what):
        layer(X, **keras.tree.map_structure(convert, given))
    if "resets" not in given and "static" not in given:
        with pytest.raises(ValueError, match=what):
            ak.LSTM(4)(X, **keras.tree.map_structure(convert, given))


def test_complex_numbers_are_refused() -> None:
    """A cast would silently keep only their real parts."""
    what = "{}: given complex64; expected real numbers"
    # Keras 3.3 casts whatever a layer is called with, and NumPy warns.
    casts = keras.__version__.startswith("3.3.")
    error, called = (Warning, "discards") if casts else (TypeError, what)
    for layer in (ak.RNN(cells.LSTM, 4), ak.LSTM(4)):
        with pytest.raises(error, match=called.format("sequences")):
            layer(X.astype("complex64"))
        with pytest.raises(TypeError, match=what.format("x")):
            layer.step(X[:, 0].astype("complex64"))
    with pytest.raises(error, match=called.format("static")):
        ak.RNN(cells.EALSTM, 4)(X, static=H.astype("complex64"))


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
@pytest.mark.sample(1)
def test_resets_are_numbers_of_any_dtype(dtype: str) -> None:
    layer = ak.RNN(cells.LSTM, 4, dtype=dtype)
    as_numbers, as_flags = (layer(X, resets=FLAG.astype(kind)) for kind in ("float32", "bool"))
    assert np.array_equal(*map(keras.ops.convert_to_numpy, (as_numbers, as_flags)))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dropout": 2.0}, ValueError, r"dropout: given 2.0; expected a number in \[0, 1\]"),
        ({"recurrent_dropout": -0.1}, ValueError, "recurrent_dropout: given -0.1; expected a"),
        ({"use_bias": "no"}, TypeError, "use_bias: given str 'no'; expected True or False"),
    ],
)
def test_options_are_checked(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ak.RNN(cells.LSTM, 4, **options)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="other backends have no strings")
def test_strings_are_no_resets() -> None:
    with pytest.raises(ValueError, match="resets: given a value of b'a'; expected bool"):
        ak.RNN(cells.LSTM, 4)(X, resets=keras.ops.convert_to_tensor([["a"] * 5] * 2))


def test_features_that_do_not_fit_are_refused() -> None:
    layer = ak.RNN(cells.LSTM, 4)
    layer.build((None, None, 2))
    with pytest.raises(ValueError, match=r"given shape \(2, 5, 3\); expected \(2, 5, 2\)"):
        layer(X)


@pytest.mark.parametrize("step", [cells.LSTM, cells.GRU], ids=lambda c: c.name)
def test_one_row_of_states_or_mask_stands_for_all(step: Any, rng: np.random.Generator) -> None:
    layer, x = ak.RNN(step, 4), keras.ops.convert_to_tensor(rng.normal(size=(3, 5, 2)), "float32")
    states = [rng.normal(size=(1, 4)).astype("float32") for _ in step.states]
    mask = np.array([[True, False, True, True, False]])
    for more in ({"initial_state": states}, {"mask": mask}):
        all_rows = keras.tree.map_structure(lambda a: np.repeat(a, 3, axis=0), more)
        one, every = (
            layer(x, **keras.tree.map_structure(keras.ops.convert_to_tensor, given))
            for given in (more, all_rows)
        )
        assert np.array_equal(number(one), number(every))


def test_masks_and_static_inputs_in_lists(rng: np.random.Generator) -> None:
    """Lists of rows, and of one mask, as Keras passes it after a layer with several inputs."""
    layer, x = ak.RNN(cells.EALSTM, 4), rng.normal(size=(2, 5, 3)).astype("float32")
    mask, static = np.array([[1, 0, 1, 1, 0], [1, 1, 1, 0, 0]], bool), np.ones((2, 4), "float32")
    right = number(layer(x, mask=mask, static=static))
    for given in (mask.tolist(), [*mask], mask.astype(int).tolist(), [mask]):
        assert np.array_equal(number(layer(x, mask=given, static=static.tolist())), right)
    with pytest.raises(ValueError, match=r"static: given of shape \(2, 4\); expected None"):
        ak.LSTMP(4, P=2)(x, static=static.tolist())


@pytest.mark.parametrize("what", ["static", "resets"])
@pytest.mark.sample(1)
def test_an_automatic_mask_beside_another_tensor(what: str, rng: np.random.Generator) -> None:
    """The mask arrives; Keras itself passes masks on only to calls with one tensor."""
    convert = keras.ops.convert_to_tensor
    ids = np.array([[1, 2, 0, 0], [3, 4, 5, 6]])
    embed = keras.layers.Embedding(10, 3, mask_zero=True)
    if what == "static":
        layer, given = ak.EALSTM(4), rng.normal(size=(2, 4)).astype("float32")
    else:
        layer, given = ak.PeepholeLSTM(4), np.eye(2, 4, 1, "bool")
    more = {what: convert(given)}
    right = number(layer(embed(ids), mask=convert(ids != 0), **more))
    assert not np.allclose(right, number(layer(convert(number(embed(ids))), **more)))
    assert np.array_equal(number(layer(embed(ids), **more)), right)
    inputs = keras.Input((4,)), keras.Input((4,), dtype=given.dtype.name)
    model = keras.Model(inputs, layer(embed(inputs[0]), **{what: inputs[1]}))
    assert_close(model.predict([ids, given], verbose=0), right, "float32", "forward")


SHORT_CUTS = [("torch", "LSTM"), ("torch", "GRU"), ("jax", "GRU")]


@pytest.mark.parametrize("what", ["dropout", "recurrent_dropout"])
@pytest.mark.parametrize("name", KERAS)
@pytest.mark.sample(every=5)
def test_a_dropout_rate_of_one(name: str, what: str) -> None:
    """In Keras, a rate of one drops nothing in ``LSTM`` and ``GRU``, and all in ``SimpleRNN``."""
    if what == "dropout" and (BACKEND, name) in SHORT_CUTS:
        pytest.skip("Keras has a path beside its loop, which drops all")
    theirs, ours = pair(name, 4, **{what: 1.0})
    copy_weights(theirs, ours, X.shape)
    try:
        right = number(theirs(X, training=True))
    except ValueError as error:  # such as TensorFlow 2.16's dropout
        pytest.skip(f"this Keras refuses it: {error}")
    assert_close(number(ours(X, training=True)), right, "float32", "forward")


@pytest.mark.parametrize("name", ["PeepholeLSTM", *KERAS])
@pytest.mark.sample(1)
def test_stateful_layers_train(name: str, rng: np.random.Generator) -> None:
    x = rng.normal(size=(4, 5, 3)).astype("float32")
    given = keras.Input(batch_shape=(2, 5, 3))
    model = keras.Model(given, getattr(ak, name)(4, stateful=True)(given))
    model.compile("sgd", "mse")
    before = model.get_weights()
    model.fit(x, np.ones((4, 4), "float32"), batch_size=2, shuffle=False, verbose=0)
    assert not np.array_equal(before[0], model.get_weights()[0])


def test_step_by_step_is_asked_for(rng: np.random.Generator) -> None:
    for layer, loop in ((ak.GRU(4), "keras"), (ak.PeepholeLSTM(4), "composite")):
        right = number(layer(X))
        with ak.step_by_step():
            assert layer.engine.name == loop
            assert "step_by_step" in layer.explain()
            assert_close(number(layer(X)), right, "float32", "forward")
            made_within = type(layer)(4)
        assert layer.engine.name == "cpu"
        assert made_within.supports_jit == layer.supports_jit


# -- RNN(cell, units) ------------------------------------------------------------------------------
@keras.saving.register_keras_serializable("tests")
@cell(gates="f g", state="h m=0.5", params="a=1 b")
def Odd(x: Any, r: Any, s: Any, p: Any, *, rate: float = 0.9, deep: bool = False) -> Any:
    """Uses x and r apart, has a state with an initial value, and parameters."""
    f = sigmoid(r.f + x.f * p.a)
    m = rate * s.m + (1.0 - rate) * f * p.b
    g = tanh(x.g + f * r.g)
    return (1 - f) * s.h + f * g * m, tanh(m) if deep else m


@cell(gates="z", state="h")
def NotRegistered(x: Any, r: Any, s: Any) -> Any:
    return tanh(x.z + r.z)


def namesake() -> Any:
    """Returns a cell with the name of a built-in cell, but another step."""

    @cell(gates="z", state="h")
    def PeepholeLSTM(x: Any, r: Any, s: Any, *, scales: Any = (1.0, (2.0, 3.0))) -> Any:
        outer, (inner, beyond) = scales
        return outer * tanh(inner * x.z + beyond * r.z)

    return PeepholeLSTM


@cell(gates="g", state="h")
def Mixed(x: Any, r: Any, s: Any) -> Any:
    return keep(0.5) * keep(0.5, per="sequence") * tanh(x.g + r.g)


@pytest.mark.skipif(BACKEND == "jax", reason="refused there")
def test_random_masks_of_single_steps() -> None:
    """In ``keras.layers.RNN``, cells draw masks once per sequence or at every step, as declared."""

    @cell(gates="g", state="h total")
    def Count(x: Any, r: Any, s: Any, *, per: str = "step") -> Any:
        kept = keep(0.5, per=per)
        return 0.0 * x.g + kept, s.total + kept

    steps, x = 16, np.ones((3, 16, 2), "float32")
    totals = {}
    for per in ("step", "sequence"):
        layer = keras.layers.RNN(ak.RNNCell(Count(per=per), 8, seed=1), return_state=True)
        totals[per] = [number(layer(x, training=True)[2]) for _ in range(2)]
        assert not np.array_equal(*totals[per]), "each sequence has its own masks"
    for total in totals["sequence"]:
        assert set(np.unique(total)) == {0, steps}
    for total in totals["step"]:
        assert np.all((total > 0) & (total < steps))


def test_refuses_random_masks_of_single_steps() -> None:
    x = np.ones((2, 4, 3), "float32")
    refused = [ak.RNNCell(Mixed, 4)]
    if BACKEND == "jax":
        refused += [ak.RNNCell(cells.ZoneoutLSTM, 4), ak.RNNCell(cells.LSTM, 4, dropout=0.5)]
    for step in refused:
        layer = keras.layers.RNN(step)
        layer(x)
        with pytest.raises(NotImplementedError, match=r"Use anycell\.keras\.RNN"):
            layer(x, training=True)
    ak.RNN(Mixed, 4)(x, training=True)


@cell(gates="g", state="h m")
def Drawn(x: Any, r: Any, s: Any) -> Any:
    """Its output shows the random masks, for an input of zeros."""
    return keep(0.25) + 2.0 * keep(0.5, per="sequence") + x.g, keep(0.25)


@pytest.mark.parametrize("engine", ["composite", None])
def test_random_masks(engine: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if engine is not None:
        monkeypatch.setattr("anycell.keras.layers.choose", lambda facts: Engine(engine, ""))
    layer = ak.RNN(Drawn, 64, return_sequences=True, return_state=True, seed=5)
    x = np.zeros((8, 16, 2), "float32")
    first, h, m = (number(result) for result in layer(x, training=True))
    assert set(np.unique(first)) == {0.0, 1.0, 2.0, 3.0}
    steps, once = first % 2, first // 2
    assert np.array_equal(first[:, -1], h)
    assert abs(steps.mean() - 0.25) < 0.02  # of 8192 draws
    assert abs(once[:, 0].mean() - 0.5) < 0.09  # of 512
    assert np.array_equal(once, np.broadcast_to(once[:, :1], once.shape))
    # 37.5 % of the values differ between two steps, units, rows, masks or calls.
    again = number(layer(x, training=True)[0]) % 2
    for a, b in (
        (steps[:, 1:], steps[:, :-1]), (steps[:, :, 1:], steps[:, :, :-1]), (steps[1:], steps[:-1]),
        (steps[:, -1], m), (steps, again), (steps[:, 1:], again[:, :-1]),
    ):  # fmt: skip
        assert abs((a != b).mean() - 0.375) < 0.1
    assert np.array_equal(number(layer(x)[0]), np.full((8, 16, 64), 1.25))

    model = keras.Sequential([keras.Input((6, 2)), ak.ZoneoutLSTM(8)])
    model.compile(keras.optimizers.SGD(0.2), "mse")  # whose steps are larger than the masks' noise
    history = model.fit(np.ones((8, 6, 2)), np.ones((8, 8)), batch_size=4, epochs=5, verbose=0)
    assert history.history["loss"][-1] < 0.9 * history.history["loss"][0]


def test_a_cell_in_a_layer_of_keras(rng: np.random.Generator) -> None:
    x = rng.normal(size=(3, 5, 2)).astype("float32")
    layer = ak.RNN(Odd, 6)
    right = number(layer(x))
    assert_close(number(keras.layers.RNN(layer.cell)(x)), right, "float32", "forward")


def test_config_of_cells(tmp_path: Any) -> None:
    layer = ak.RNN(
        Odd(rate=0.5, deep=True), 6, return_sequences=True, dropout=0.2, kernel_regularizer="l2",
        param_initializer="ones", seed=7, go_backwards=True,
    )  # fmt: skip
    factored = ak.RNN(low_rank(Odd(rate=0.5), ["hh"], bias=False), 6, rank=2)
    for some in (layer, factored):
        again = ak.RNN.from_config(some.get_config())
        assert config_of(again) == config_of(some)
        assert again.cell.cell == some.cell.cell
    model = keras.Sequential([keras.Input((None, 3)), layer, ak.RNN(cells.PeepholeLSTM, 4)])
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    x = np.ones((2, 5, 3), "float32")
    assert np.array_equal(number(loaded(x)), number(model(x)))
    assert loaded.layers[1].cell.cell == cells.PeepholeLSTM
    model = keras.Sequential([keras.Input((None, 3)), ak.RNN(NotRegistered, 4)])
    model.save(tmp_path / "model.keras")
    with pytest.raises(Exception, match="register_keras_serializable"):
        keras.models.load_model(tmp_path / "model.keras")
    loaded = keras.models.load_model(
        tmp_path / "model.keras", custom_objects={"NotRegistered": NotRegistered}
    )
    assert np.array_equal(number(loaded(x)), number(model(x)))


def test_no_cell_is_taken_for_a_built_in_one(tmp_path: Any) -> None:
    """A name alone restores no cell, even without loading; hyperparameters stay nested tuples."""
    mine, path = namesake()(scales=(0.5, (2.0, 3.0))), tmp_path / "model.keras"
    model = keras.Sequential([keras.Input((None, 3)), ak.RNN(mine, 4)])
    model.save(path)
    readers = {
        "load_model": lambda: keras.models.load_model(path).layers[0],
        "clone_model": lambda: keras.models.clone_model(model).layers[0],
        "Bidirectional": lambda: keras.layers.Bidirectional(ak.RNN(mine, 4)).backward_layer,
        "keras.layers.RNN": lambda: keras.layers.RNN.from_config(
            keras.layers.RNN(ak.RNNCell(mine, 4)).get_config()
        ),
    }
    for read in readers.values():
        with pytest.raises(Exception, match=r"given the name 'PeepholeLSTM' in a config"):
            read()
    with keras.saving.custom_object_scope({"PeepholeLSTM": namesake()}):
        found = {name: read().cell for name, read in readers.items()}
    for name, step in found.items():
        assert step.cell == mine, name
        assert step.cell.given == mine.given, name
    built_in = keras.layers.Bidirectional(ak.RNN(cells.PeepholeLSTM(cell_clip=3.0), 4))
    assert built_in.backward_layer.cell.cell == cells.PeepholeLSTM(cell_clip=3.0)


def test_forget_bias_and_declared_values() -> None:
    layer = ak.RNN(cells.PeepholeLSTM, 2)
    layer.build((None, None, 3))
    assert number(layer.cell.bias).tolist() == [0, 0, 1, 1, 0, 0, 0, 0]
    layer = ak.RNN(Odd, 2, stateful=True, return_state=True)
    layer(np.zeros((3, 4, 1), "float32"))
    layer.reset_state()
    assert [number(s).tolist()[0] for s in layer.states] == [[0, 0], [0.5, 0.5]]
    assert number(layer.cell._further["a"]).tolist() == [1, 1]
    assert tuple(layer.cell.bias.shape) == (2, 4)


def test_refusals() -> None:
    with pytest.raises(TypeError, match=r"cell: given .*; expected a cell"):
        ak.RNN(keras.layers.Dense(3), 4)
    with pytest.raises(ValueError, match="units"):
        ak.RNN(cells.LSTM, -1)
    with pytest.raises(TypeError, match=r"P: given nothing; expected the size P that cell"):
        ak.RNN(cells.LSTMP, 4)
    with pytest.raises(ValueError, match="P"):
        ak.RNN(cells.LSTM, 4, P=3)
    with pytest.raises(ValueError, match=r"'return_sequence'\. Did you mean return_sequences\?"):
        ak.RNN(cells.LSTM, 4, return_sequence=True)
    with pytest.raises(ValueError, match=r"static: given None; expected \[B, 4\]"):
        ak.RNN(cells.EALSTM, 4)(np.zeros((2, 3, 1), "float32"))


@pytest.mark.parametrize("in_list", [False, True], ids=["one", "list"])
def test_cells_of_keras_have_units_of_their_own(in_list: bool) -> None:
    cell: Any = keras.layers.LSTMCell(3)
    cell = [cell] if in_list else cell
    for arguments, named in (
        ((cell, 4), {}),
        ((cell,), {"units": 4}),
        ((), {"cell": cell, "units": 4}),
    ):
        with pytest.raises(TypeError, match=r"units: given 4; expected None .*Leave it out"):
            ak.RNN(*arguments, **named)
    x = np.zeros((2, 5, 1), "float32")
    assert ak.RNN(cell=cell)(x).shape == (2, 3)
    assert ak.RNN(cell, True)(x).shape == (2, 5, 3)  # ``return_sequences``, as in Keras


def test_subclasses_have_arguments_of_their_own() -> None:
    class OfUnits(ak.RNN):  # type: ignore[misc]
        def __init__(self, *, units: int) -> None:
            super().__init__(cells.JANET, units)

    assert OfUnits(units=4).units == ak.JANET(units=4).units == 4


@pytest.mark.slow
def test_fit_learns() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 10, 2)).astype("float32")
    y = x.cumsum(axis=1)[:, -1, :1]
    given = keras.Input((None, 2))
    hidden = ak.RNN(Odd, 16, return_sequences=True)(given)
    hidden = ak.RNN(cells.LayerNormLSTM, 16, dropout=0.1)(hidden)
    model = keras.Model(given, keras.layers.Dense(1)(hidden))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    losses = model.fit(x, y, epochs=8, batch_size=16, verbose=0).history["loss"]
    assert losses[-1] < 0.7 * losses[0]


# -- cells that are not as they were made ----------------------------------------------------------
def halving(call: Any) -> Any:
    """Returns a cell's call that halves the first state, which is also the output."""

    def half(self: Any, inputs: Any, states: Any, training: bool = False) -> Any:
        _, new = call(self, inputs, states, training=training)
        new = list(new) if isinstance(new, (list, tuple)) else [new]
        return 0.5 * new[0], [0.5 * new[0], *new[1:]]

    return half


@pytest.mark.parametrize("way", ["replaced", "instance", "class"])
@pytest.mark.parametrize("name", [*KERAS, "PeepholeLSTM"])
@pytest.mark.sample(every=2)  # each layer, and each way
def test_a_changed_cell_is_honoured(
    name: str, way: str, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    made = getattr(ak, name)
    kind = ak.RNNCell if name == "PeepholeLSTM" else getattr(keras.layers, f"{name}Cell")
    given = (cells.PeepholeLSTM, 4) if name == "PeepholeLSTM" else (4,)
    half = type("Half", (kind,), {"call": halving(kind.call)})

    class Replaced(made):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.cell = half(*given)

    x = rng.normal(size=(3, 5, 2)).astype("float32")
    plain = made(4, return_sequences=True)
    theirs = keras.layers.RNN(half(*given), return_sequences=True)
    copy_weights(plain, theirs, x.shape)
    right = number(theirs(x))
    ours = (Replaced if way == "replaced" else made)(4, return_sequences=True)
    ours.build(x.shape)
    ours.set_weights(theirs.get_weights())
    if way == "instance":
        ours.cell.call = half.call.__get__(ours.cell)
    elif way == "class":
        monkeypatch.setattr(kind, "call", half.call)
    assert ours.engine.name == "keras"
    assert ("of class Half" if way == "replaced" else "call of the") in ours.engine.reason
    assert ours.engine.reason in ours.explain()
    assert_close(number(ours(x)), right, "float32", "forward")
    assert_close(number(ours(x, training=True)), right, "float32", "forward")
    monkeypatch.undo()
    assert not np.allclose(number(plain(x)), right)
    assert plain.engine.name == "cpu"


def test_a_layer_of_another_cell_of_keras() -> None:
    """The cell decides how the layer runs."""

    class Mine(ak.LSTM):
        def __init__(self, units: int, **kwargs: Any) -> None:
            super().__init__(units, **kwargs)
            self.cell = keras.layers.SimpleRNNCell(units)
            self.state_size, self.single_state = [units], True

    theirs, ours = keras.layers.SimpleRNN(4), Mine(4)
    copy_weights(theirs, ours, X.shape)
    assert_close(number(ours(X)), number(theirs(X)), "float32", "forward")
    assert ours.engine.name == "cpu"


def test_attributes_of_a_cell_that_are_set_later() -> None:
    theirs, ours = pair("LSTM", 4)
    copy_weights(theirs, ours, X.shape)
    before = number(ours(X))
    for layer in (theirs, ours):
        layer.use_cudnn = False
        layer.cell.activation = keras.activations.relu
    assert_close(number(ours(X)), number(theirs(X)), "float32", "forward")
    assert not np.allclose(number(ours(X)), before)
    assert ours.engine.name == "cpu"


@pytest.mark.parametrize("what", ["static", "resets"])
def test_a_changed_cell_takes_nothing_beside_the_sequence(what: str) -> None:
    layer = ak.EALSTM(4) if what == "static" else ak.PeepholeLSTM(4)
    layer.cell.call = lambda inputs, states, training=False: (states[0], states)
    given = keras.ops.convert_to_tensor(H if what == "static" else FLAG)
    with pytest.raises(ValueError, match=rf"{what}: .*Keras's loop.* call of the RNNCell has been"):
        layer(X, **{what: given})


@pytest.mark.parametrize(
    ("options", "call", "message"),
    [
        ({"activation": lambda v: v}, {}, "resets: .*Keras's loop.* activation=<lambda> is"),
        ({"recurrent_dropout": 0.5, "reset_after": False}, {"training": True}, "resets: .*dropout"),
    ],
)
def test_a_loop_of_keras_takes_no_resets(options: Any, call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ak.GRU(4, **options)(X, resets=keras.ops.convert_to_tensor(FLAG), **call)


def test_what_other_frontends_take_is_refused_with_a_remedy() -> None:
    for layer in (ak.LSTM(4), ak.PeepholeLSTM(4)):
        with pytest.raises(TypeError, match=r"lengths: given to \w+ .* Pass a mask: "):
            layer(X, lengths=[5, 3])
        with pytest.raises(TypeError, match=r"return_states: .* return_sequences=True"):
            layer(X, return_states=True)


@pytest.mark.skipif(BACKEND != "torch", reason="of torch")
@pytest.mark.parametrize("name", ["LSTM", "PeepholeLSTM"])
def test_torch_compile_takes_a_layer_as_it_is(name: str) -> None:
    """It does not compile the plan and the printer of kernels, about which torch would warn."""
    import torch

    layer, x = getattr(ak, name)(4), torch.ones(X.shape)
    layer.build(X.shape)
    compiled = torch.compile(lambda x: layer(x), backend="eager")
    with torch.no_grad():  # with gradients, Dynamo warns about its own access to non-leaves
        assert_close(number(compiled(x)), number(layer(x)), "float32", "forward")


# -- memory ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.sample(1)
def test_memory_of_any_kind(rows: int, rng: np.random.Generator) -> None:
    """Calls take NumPy arrays of any layout, whether or not the kernel projects the input."""
    shape, layer = (rows, 8, 16), ak.LSTM(12, return_sequences=True)
    given = {
        "x": rng.normal(size=shape).astype("float32"),
        "h": rng.normal(size=(rows, 12)).astype("float32"),
        "mask": rng.random(shape[:2]) < 0.8,
    }

    def call(x: Any, h: Any, mask: Any) -> np.ndarray:
        return number(layer(x, initial_state=[h, h], mask=mask))

    for name, array in given.items():
        for guise, turned in variants(array, BACKEND == "torch"):
            plain = call(**{**given, name: turned.copy()})
            assert np.array_equal(call(**{**given, name: turned}), plain), (name, guise)


# -- arguments -------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:Do not pass an `input_shape`:UserWarning")
def test_arguments_of_the_layer_reach_it() -> None:
    layer = ak.RNN(cells.PeepholeLSTM, 4, input_shape=(5, 3), autocast=False)
    model = keras.Sequential([layer])
    assert model.built
    assert model.input_shape == (None, 5, 3)
    assert not layer.autocast
    assert not layer.cell.autocast


def test_integers_of_numpy() -> None:
    layer = ak.LSTMP(np.int64(4), P=np.int32(2), seed=np.int64(1))
    assert layer(X).shape == (2, 2)
    config = layer.get_config()
    assert (type(config["units"]), type(config["P"])) == (int, int)


def test_custom_objects_of_a_config() -> None:
    @cell(gates="g", state="h")
    def Unregistered(x: Any, r: Any, s: Any, *, scale: float = 1.0) -> Any:
        return tanh(scale * (x.g + r.g))

    config = ak.RNN(Unregistered(scale=2.0), 4).get_config()
    with pytest.raises(ValueError, match="custom_objects"):
        ak.RNN.from_config(config)
    found = ak.RNN.from_config(config, custom_objects={"Unregistered": Unregistered})
    assert found.get_config() == config
    named = ak.PeepholeLSTM(4)
    assert type(named).from_config(named.get_config(), custom_objects={}).units == 4


def test_unknown_arguments_say_where_they_go() -> None:
    with pytest.raises(ValueError, match=r"RNN: .*'cell_clip'.* write PeepholeLSTM\(cell_clip=3"):
        ak.RNN(cells.PeepholeLSTM, 4, cell_clip=3.0)
    with pytest.raises(ValueError, match=r"JANET: .*'kernel_initialiser'"):
        ak.JANET(4, kernel_initialiser="zeros")


# -- sizes within a step ---------------------------------------------------------------------------
@cell(gates="a", state="h")
def Bottleneck(x, r, s):
    return tanh(x.a + linear(tanh(linear(s.h, "down", size="R")), "up"))


def test_a_bottleneck_says_its_size() -> None:
    layer = ak.RNN(Bottleneck, 9, R=2)
    assert layer(np.ones((2, 3, 4), "float32")).shape == (2, 9)
    shapes = {w.name: tuple(w.shape) for w in layer.weights}
    assert (shapes["down_kernel"], shapes["up_kernel"]) == ((9, 2), (2, 9))
    with pytest.raises(TypeError, match="R: given nothing; expected the size R"):
        ak.RNN(Bottleneck, 9)


@pytest.mark.parametrize("make", [ak.RNN, ak.RNNCell])
def test_sizes_that_heads_do_not_divide(make: Any) -> None:
    """They are refused when the layer is created, not when it is called."""
    with pytest.raises(ValueError, match=r"given H=10 .* a multiple of 4, .*Choose 8 or 12"):
        make(cells.sLSTM(heads=4), 10)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.sample(2)
def test_a_call_is_few_calls(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An eager call of a warm layer traces no cell again."""
    monkeypatch.setattr(cpu.check, "ON", False)
    layer = ak.RNN(cells.PeepholeLSTM, 64) if kind == "RNN" else getattr(ak, kind)(64)
    x = keras.ops.ones((8, 20, 32))
    most = {"tensorflow": 100, "torch": 160}.get(keras.backend.backend())
    assert most is None or calls_of_ours(lambda: layer(x)) <= most


# -- torch's modes ---------------------------------------------------------------------------------
@pytest.mark.skipif(BACKEND != "torch", reason="other backends have no modes")
@pytest.mark.parametrize("kind", ["LSTM", "RNN", "mask", "step"])
def test_traces_by_modes_of_torch(kind: str) -> None:
    """No native call passes them by, also not a prepared step."""
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx

    shape = (2, 3) if kind == "step" else (2, 4, 3)
    layer = ak.RNN(cells.PeepholeLSTM, 7) if kind == "RNN" else ak.LSTM(7)
    layer.build((None, None, 3))
    layer.prepare()
    mask = torch.tensor([[True, True, False, True], [True, False, True, True]])

    def call(x: Any) -> Any:
        with torch.no_grad():
            if kind == "step":
                return layer.step(x)[0]
            return layer(x, mask=mask if kind == "mask" else None)

    x, y = torch.randn(shape), torch.randn(shape)
    assert_close(number(make_fx(call)(x)(y)), number(call(y)), "float32", "forward")
