"""``prepare`` and ``step`` of Keras layers, on any backend."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest

keras = pytest.importorskip("keras")

from keras_layers import BACKEND, double, number  # noqa: E402
from tolerances import assert_close  # noqa: E402

import anycell  # noqa: E402
import anycell.keras as ak  # noqa: E402
from anycell import cells, compress  # noqa: E402

LAYERS = {
    "LSTM": lambda **how: ak.LSTM(5, **how),
    "GRU": lambda **how: ak.GRU(5, **how),
    "reset before": lambda **how: ak.GRU(5, reset_after=False, **how),
    "SimpleRNN": lambda **how: ak.SimpleRNN(5, activation="relu", **how),
    "projected": lambda **how: ak.LSTMP(5, P=3, **how),
    "static": lambda **how: ak.EALSTM(5, **how),
    "declared": lambda **how: ak.sLSTM(5, **how),
}
rng = np.random.default_rng(0)
X, STATIC = rng.normal(size=(4, 6, 3)), rng.normal(size=(4, 5))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.sample(every=5)  # both dtypes
def test_steps_are_those_of_a_call(name: str, dtype: str) -> None:
    """With weights packed, and without, in a copy; episodes begin as a call does."""
    with double(dtype):
        layer, x = LAYERS[name](return_sequences=True, dtype=dtype), X.astype(dtype)
        static = {"static": STATIC.astype(dtype)} if name == "static" else {}
        right, later = number(layer(x, **static)), number(layer(x[:, 2:], **static))
        for prepared in (layer.prepare(), copy.deepcopy(layer)):  # of which the second is not
            states, again = None, None
            for t in range(6):
                output, states = prepared.step(x[:, t], states, **static)
                resets = np.array([t == 2, False, t == 2, False])
                row, again = prepared.step(x[:, t], again, resets=resets, **static)
                assert_close(number(output), right[:, t], dtype, "forward")
                reset = later[:, t - 2] if t >= 2 else right[:, t]
                expected = np.where(
                    np.array([True, False, True, False])[:, None], reset, right[:, t]
                )
                assert_close(number(row), expected, dtype, "forward")
    assert (layer._prepared.stream is None) is (BACKEND == "jax")


def test_what_was_prepared_stays_until_it_is_prepared_again() -> None:
    layer = ak.LSTM(5)
    layer(X)
    before = number(layer.prepare().step(X[:, 0])[0])
    layer.set_weights([2 * w for w in layer.get_weights()])
    if BACKEND != "jax":
        assert np.array_equal(number(layer.step(X[:, 0])[0]), before)
    after = number(layer.prepare().step(X[:, 0])[0])
    assert_close(after, number(layer(X[:, :1])), "float32", "forward")
    assert not np.allclose(before, after)


def by_dictionary(layer: Any) -> Any:
    made = layer.__new__(type(layer))
    vars(made).update(vars(layer))
    return made


def by_dictionary_with_a_cell(layer: Any) -> Any:
    made = by_dictionary(layer)
    vars(made)["cell"] = with_weights(layer.cell)
    return made


def with_weights(cell: Any) -> Any:
    """Another cell with variables of its own."""
    made = type(cell).from_config(cell.get_config())
    made.build((None, 3))
    return made


def steps_are_calls(layer: Any) -> None:
    x = X.astype("float32")
    _, states = layer.step(x[:, 0])
    assert_close(
        number(layer.step(x[:, 1], states)[0]), number(layer(x[:, :2])), "float32", "forward"
    )


def serves(layer: Any) -> bool:
    """Whether steps of a layer run on packed weights."""
    return layer._prepared.stream is not None and not layer._prepared.stale(layer)


COPIES: dict[str, Any] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "config": lambda layer: type(layer).from_config(layer.get_config()),
    "dictionary": by_dictionary,
    "dictionary, own cell": by_dictionary_with_a_cell,
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.sample(every=2)
def test_copies_step_with_their_own_weights(way: str) -> None:
    layer = ak.LSTM(5)
    layer(X)
    made = COPIES[way](layer.prepare())
    made(X)
    for _ in range(2):
        if way != "dictionary":  # which has the variables of the layer
            for variable in made.cell.weights:
                if "seed" not in variable.path:
                    variable.assign(2 * variable)
        assert not serves(made) and serves(layer) is (BACKEND != "jax")
        steps_are_calls(layer)
        steps_are_calls(made)
        steps_are_calls(copy.deepcopy(made).prepare())


@pytest.mark.parametrize("what", ["cell", "variable", "further variable", "hyperparameters"])
def test_what_a_prepared_layer_gets_in_exchange(what: str) -> None:
    layer = ak.PeepholeLSTM(5)
    layer(X)
    if what == "hyperparameters":
        layer = ak.RNN(cells.LSTM(cell_clip=0.5), 5)
        layer(X)
    steps_are_calls(layer.prepare())
    assert serves(layer) is (BACKEND != "jax")
    if what == "cell":
        vars(layer)["cell"] = with_weights(layer.cell)
    elif what == "hyperparameters":
        layer.cell.cell = layer.cell.cell(cell_clip=0.01)
    else:
        holder, name = vars(layer.cell), "kernel"
        if what == "further variable":
            holder, name = layer.cell._further, "p_i"
        layer.cell._tracker.unlock()
        holder[name] = keras.Variable(2 * number(holder[name]))
    assert not serves(layer)
    steps_are_calls(layer)
    steps_are_calls(layer.prepare())


@pytest.mark.parametrize("prepared", [False, True])
def test_steps_take_lists_and_a_row_for_all(prepared: bool) -> None:
    """Numbers of Python keep the digits that a layer of float64 has."""
    both, x = rng.normal(size=(2, 4, 5)), X[:, 0]
    for name, states in (("LSTM", both), ("GRU", both[:1]), ("static", both)):
        with double("float64"):
            layer = LAYERS[name](dtype="float64")
            static = {"static": STATIC} if name == "static" else {}
            layer(X, **static)
            if prepared:
                layer.prepare()
            right, lists = number(layer.step(x, [*states], **static)[0]), states.tolist()
            nested = {key: value.tolist() for key, value in static.items()}
            results = [layer(X[:, :1], initial_state=lists, **nested)]
            for given in (lists, tuple(lists), *lists[: len(lists) == 1]):
                results.append(layer.step(x.tolist(), given, **nested)[0])
            for result in results:
                assert_close(number(result), right, "float64", "forward")
            row = number(layer.step(x, [*states[:, :1]], **static)[0])
            same = [*np.repeat(states[:, :1], 4, 1)]
            assert_close(row, number(layer.step(x, same, **static)[0]), "float64", "forward")


@pytest.mark.skipif(BACKEND == "jax", reason="nothing is packed there")
def test_a_gradient_goes_through_steps_that_are_prepared() -> None:
    """To the input, and the weights as they are now."""
    layer, x = ak.LSTM(5), X.astype("float32")
    layer(x)
    layer.prepare().set_weights([2 * w for w in layer.get_weights()])

    def gradients(run: Any) -> list[Any]:
        given = keras.ops.convert_to_tensor(x)
        weights = [w.value for w in layer.trainable_weights]
        if BACKEND == "torch":
            given.requires_grad_()
            (run(given) ** 2).sum().backward()
            return [number(t.grad) for t in (given, *weights)]
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(given)
            total = tf.reduce_sum(run(given) ** 2)
        return [number(g) for g in tape.gradient(total, [given, *weights])]

    def steps(given: Any) -> Any:
        states = None
        for t in range(6):
            output, states = layer.step(given[:, t], states)
        return output

    found = gradients(steps)
    layer.zero_grad() if BACKEND == "torch" else None
    for a, b in zip(found, gradients(layer), strict=True):
        assert_close(a, b, "float32", "gradient")


@pytest.mark.parametrize("kind", ["16 bits", "8 bits"])
def test_what_is_not_packed_is_a_call(kind: str) -> None:
    layer = ak.GRU(5, dtype="mixed_bfloat16" if kind == "16 bits" else "float32")
    layer(X)
    layer = layer if kind == "16 bits" else compress.quantize(layer)
    assert layer.prepare()._prepared.stream is None
    right = number(layer(X[:, :1])).astype("float32")
    assert np.array_equal(number(layer.step(X[:, 0])[0]).astype("float32"), right)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="a graph of TensorFlow")
def test_a_step_in_a_graph() -> None:
    import tensorflow as tf

    layer = ak.PeepholeLSTM(5)
    layer(X)
    layer.prepare()
    x = tf.constant(X[:, 0], tf.float32)
    traced, (h, c) = tf.function(lambda x: layer.step(x), autograph=False)(x)
    eager, states = layer.step(x)
    for a, b in ((traced, eager), (h, states[0]), (c, states[1])):
        assert_close(number(a), number(b), "float32", "forward")


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_explained(name: str) -> None:
    """By what runs it, and why, in training or inference; then by the page of its cell."""
    layer = LAYERS[name]()
    for training in (True, False):
        page = layer.explain(training, backward=training)
        first, _, heading, *_ = str(page).splitlines()
        what = "training" if training else "inference"
        assert first.startswith(f"{layer.name}: {what} runs on {layer.engine.name} (")
        assert ": hidden size 5, float32" in heading and f"\nengine: {layer.engine.name}\n" in page
        assert "forward kernel" in page
        assert ("kept for the backward pass" in page) is training
    assert str(anycell.explain(layer)) == str(layer.explain())
    if name == "projected":
        assert page.plan.sizes == {"H": 5, "P": 3}


def test_a_layer_of_an_unknown_step_is_explained_in_a_line() -> None:
    layer = ak.LSTM(5, activation=lambda v: v)
    page = layer.explain()
    assert page.plan is page.llvm is page.triton is None
    assert str(page) == f"{layer.name}: training runs on keras ({layer.engine.reason})"


BAD: list[tuple[Any, str]] = [
    (lambda e: ak.LSTM(3, go_backwards=True).step(X[:, 0]), "step: given go_backwards=True"),
    (lambda e: ak.LSTM(3, go_backwards=True).prepare(), "prepare: given go_backwards=True"),
    (lambda e: ak.LSTM(3).prepare(), "no weights yet. Call it first"),
    (lambda e: ak.LSTM(3).step(X), r"x: given shape \(4, 6, 3\); expected \[B, in\], one step"),
    (
        lambda e: ak.GRU(5).step(X[:, 0], static=STATIC),
        r"static: given of shape .*; expected None, for cell GRU",
    ),
    (lambda e: e.step(X[:, 0]), "static"),
    (
        lambda e: e.step(X[:, 0], [STATIC], static=STATIC),
        r"states: given 1 of them; expected 2, each \[B, size\]",
    ),
    (lambda e: e.step(X[:, 0], [STATIC, STATIC[:2]], static=STATIC), r"shape [\[(]2, 5"),
    (lambda e: e.step(X[:, 0], [STATIC[:, :2], STATIC], static=STATIC), r"shape [\[(]4, 2"),
    (lambda e: e.step(X[:, 0, :2], static=STATIC), "shape"),
    (lambda e: e.step(X[:, 0], static=STATIC[:2]), "static"),
    (
        lambda e: e.step(X[:, 0], static=STATIC, resets=[True]),
        r"resets: given shape \(1,\); expected \(4,\)",
    ),
    (lambda e: e.step(X[:, 0], static=STATIC, resets=np.ones((4, 1))), r"resets: given shape"),
]


@pytest.mark.parametrize("bad", range(len(BAD)))
@pytest.mark.parametrize("prepared", [False, True])
def test_a_step_refuses(prepared: bool, bad: int) -> None:
    layer = ak.RNN(cells.EALSTM, 5)
    layer(X.astype("float32"), static=STATIC)
    call, message = BAD[bad]
    with pytest.raises(ValueError, match=message):
        call(layer.prepare() if prepared else layer)


def test_resets_are_flags() -> None:
    """0 and 1 of any dtype; other values are refused where they can be looked at."""
    layer = ak.RNN(cells.GRU, 4, return_sequences=True)
    x, resets = rng.normal(size=(2, 4, 3)), np.zeros((2, 4), bool)
    resets[1, 2] = True
    right = number(layer(x, resets=resets))
    assert np.array_equal(number(layer(x, resets=resets.astype("float32"))), right)
    if BACKEND == "jax":
        pytest.skip("nothing is looked at there")
    for call in (
        lambda: layer(x, resets=np.full((2, 4), 0.3)),
        lambda: layer.step(x[:, 0], resets=np.full(2, 0.3)),
    ):
        with pytest.raises(ValueError, match=r"resets: given a value of 0\.3; .* resets > 0\.5"):
            call()
