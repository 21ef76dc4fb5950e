"""A readout of Keras that is its layer's next input: against a loop in float64."""

import contextlib
from typing import Any

import numpy as np
import pytest

keras = pytest.importorskip("keras")

from keras_layers import BACKEND, derive, double, number, real  # noqa: E402
from problems import Problem  # noqa: E402
from tolerances import assert_close  # noqa: E402

import anycell  # noqa: E402
import anycell.keras as ak  # noqa: E402
import anycell.numpy as an  # noqa: E402
from anycell import Cell, cell, cells, compress  # noqa: E402
from anycell.keras import weights  # noqa: E402
from anycell.keras.cells import GRU, LSTM, SimpleRNN  # noqa: E402
from anycell.layer.compression import numbers  # noqa: E402
from tests.conformance.on_keras import DROP_INS, from_keras, made, places  # noqa: E402
from tests.frontends.test_feedback import Arrays, assert_solved, by_loop, draw, poisoned, turned  # noqa: E402

# Keras's matmul on torch is of float32.
DTYPE = "float32" if BACKEND == "torch" else "float64"
STEPS, ROWS, INPUTS, HIDDEN, WIDTH = 5, 4, 3, 6, 2
LAYERS: list[tuple[Cell, Any]] = [
    (LSTM, ak.LSTM),
    (GRU, ak.GRU),
    (SimpleRNN, ak.SimpleRNN),
    (cells.PeepholeLSTM, lambda units, **more: ak.RNN(cells.PeepholeLSTM, units, **more)),
    (cells.IndRNN, lambda units, **more: ak.RNN(cells.IndRNN, units, **more)),
    (cells.LSTMP, lambda units, **more: ak.RNN(cells.LSTMP, units, P=4, **more)),
]


def weights_of(layer: Any, parameters: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Those of a layer of Keras by the names of NumPy's; of one bias the second half is 0."""
    learned = weights.weights_of(layer)
    named = {f"{name}_l0": numbers(weight) for name, weight in learned.items()}
    assert named.keys() <= parameters.keys()
    return {name: np.zeros_like(array) for name, array in parameters.items()} | named


@pytest.mark.parametrize("way", ["eager", "graph", "step by step"])
@pytest.mark.parametrize("cell", [cell for cell, _ in LAYERS], ids=str)
@pytest.mark.parametrize("masked", [(), ("mask",)], ids=["", "masked"])
@pytest.mark.sample(every=10)  # each way, under masks and without
def test_layers(cell: Cell, masked: tuple[str, ...], way: str) -> None:
    if way == "graph" and BACKEND != "tensorflow":
        pytest.skip("a graph is TensorFlow's")
    problem = draw(cell, (STEPS, ROWS, INPUTS, HIDDEN, WIDTH), *masked)
    stepwise = ak.step_by_step() if way == "step by step" else contextlib.nullcontext()
    with double(DTYPE), stepwise:
        solution = by_keras(problem.astype(DTYPE), graph=way == "graph")
    assert_solved(solution, by_loop(problem), DTYPE)


def by_keras(problem: Problem, graph: bool) -> Arrays:
    layer = made(problem, problem.cell in DROP_INS)
    readout = keras.layers.Dense(WIDTH, dtype=DTYPE)
    feedback = ak.Feedback(layer, readout, return_state=True, dtype=DTYPE)
    feedback.build((ROWS, STEPS, INPUTS))
    readout.set_weights([problem["weight"].T, problem["bias"]])
    flags = {n: problem[n].T for n in ("forced", "mask") if n in problem.arrays}
    arriving = [turned(problem["d y"]), *(d[0] for d in problem.group("d final"))]
    given = [turned(poisoned(problem, DTYPE)), *(s[0] for s in problem.group("state"))]

    def call(tensors: Any) -> list[Any]:
        more = {n: keras.ops.convert_to_tensor(flag) for n, flag in flags.items()}
        return list(feedback(tensors[0], initial_state=list(tensors[1:]), **more))

    def loss(values: list[Any]) -> Any:
        weights = map(keras.ops.convert_to_tensor, arriving)
        return sum(keras.ops.sum(v * w) for v, w in zip(values, weights, strict=True))

    values, grads = derive(feedback, call, loss, given, graph)
    names = ["y", *[f"final {n}" for n in problem.cell.state_names]]
    names += ["d x", *[f"d state {n}" for n in problem.cell.state_names]]
    found = zip(names, map(number, [*values, *grads]), strict=False)
    solution = {n: turned(a) if a.ndim > 2 else a[None] for n, a in found}
    for weight, grad in zip(feedback.trainable_variables, grads[len(given) :], strict=True):
        inside = any(weight is own for own in layer.trainable_variables)
        of_readout = ["bias" if weight is readout.bias else "weight"]
        names = places(problem, weight) if inside else of_readout
        learned = from_keras(problem, names, number(grad))
        solution |= {f"d {n}": g for n, g in learned.items()}
    return solution


@pytest.mark.parametrize("prepared", [False, True], ids=["", "prepared"])
@pytest.mark.parametrize(("cell", "kind"), LAYERS, ids=lambda value: str(value)[:20])
@pytest.mark.sample(every=5)
def test_steps_are_one_call(cell: Cell, kind: Any, prepared: bool) -> None:
    """Forced and free, by rows and for all; and resets begin anew."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(ROWS, STEPS, INPUTS)).astype(DTYPE)
    forced = rng.random((ROWS, STEPS)) < 0.4
    forced[:, 2], forced[:, 3] = True, False
    poisoned = x.copy()
    poisoned[..., :WIDTH][~forced] = np.nan
    with double(DTYPE):
        feedback = ak.Feedback(
            kind(HIDDEN, dtype=DTYPE), keras.layers.Dense(WIDTH, dtype=DTYPE), return_state=True,
            dtype=DTYPE,
        )  # fmt: skip
        flags = keras.ops.convert_to_tensor(forced)
        right, *finals = [number(r) for r in feedback(poisoned, forced=flags)]
        if prepared:
            assert feedback.prepare() is feedback
        states: Any = None
        for resets in (None, np.ones(ROWS, bool)):
            for t in range(STEPS):
                now: Any = {2: True, 3: 0.0}.get(t, forced[:, t])
                more = {} if t or resets is None else {"resets": resets}
                y, states = feedback.step(poisoned[:, t], states, forced=now, **more)
                assert_close(number(y), right[:, t], DTYPE, "forward", axes=())
            for state, final in zip(states, finals, strict=True):
                assert_close(number(state), final, DTYPE, "forward", axes=())


def small() -> tuple[Any, np.ndarray]:
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(4, 6, 2)).astype("float32")
    return ak.Feedback(ak.LSTM(5, return_sequences=True), keras.layers.Dense(1), seed=1), x


def test_the_engine_is_that_of_the_fed_cell() -> None:
    feedback, x = small()
    feedback.build(x.shape)
    assert feedback.engine.name == "cpu" and "3" in feedback.engine.reason
    with ak.step_by_step():
        assert feedback.engine.name == "composite"


def test_probabilities() -> None:
    feedback, x = small()
    y = number(feedback(x))
    teacher = number(feedback.readout(feedback.layer(x)))
    assert_close(y, teacher, "float32", "forward")
    assert np.array_equal(number(feedback(x, forced=1.0)), y)
    free = number(feedback(x, forced=0.0))
    flags = keras.ops.convert_to_tensor(np.zeros((4, 6), bool))
    assert np.array_equal(free, number(feedback(x, forced=flags)))
    assert not np.array_equal(number(feedback(x, forced=0.5)), number(feedback(x, forced=0.5)))


@pytest.mark.parametrize("cell", [ak.LSTM, ak.PeepholeLSTM])
@pytest.mark.sample(1)
def test_resets(cell: Any) -> None:
    """From a reset on it runs as from the beginning."""
    x = np.random.default_rng(0).normal(size=(4, 6, 2)).astype("float32")
    feedback, resets = ak.Feedback(cell(5), keras.layers.Dense(1)), np.zeros((4, 6), bool)
    resets[:, 2] = True
    for forced in (True, False):
        y = number(feedback(x, forced=forced, resets=keras.ops.convert_to_tensor(resets)))
        assert_close(y[:, :2], number(feedback(x[:, :2], forced=forced)), "float32", "forward")
        assert_close(y[:, 2:], number(feedback(x[:, 2:], forced=forced)), "float32", "forward")


def test_it_trains_and_is_saved(tmp_path: Any) -> None:
    feedback, x = small()
    inputs = keras.Input((6, 2))
    model = keras.Model(inputs, feedback(inputs, forced=0.7))
    model.compile(keras.optimizers.Adam(0.05), "mse")
    target = np.roll(x[..., :1], -1, 1)
    losses = model.fit(x, target, epochs=15, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    layer = next(l for l in again.layers if isinstance(l, ak.Feedback))
    assert np.array_equal(number(layer(x, forced=0.0)), number(feedback(x, forced=0.0)))


@cell(gates="a b:P", state="h c:P")
def Delayed(x, r, s):
    """Has gates of two sizes."""
    return anycell.tanh(x.a + r.a + anycell.linear(s.c, "back")), anycell.tanh(x.b + s.c)


class Bounded(keras.layers.Dense):
    """Computes something else than its weights say."""

    def call(self, x: Any) -> Any:
        return keras.ops.tanh(super().call(x))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ak.Feedback(keras.layers.LSTM(3), keras.layers.Dense(1)), "layer: given LSTM"),
        (lambda: ak.Feedback(ak.LSTM(3, dropout=0.5), keras.layers.Dense(1)), "given dropout=0.5"),
        (lambda: ak.Feedback(ak.LSTM(3, stateful=True), keras.layers.Dense(1)), "given stateful"),
        (lambda: ak.Feedback(ak.RNN(cells.EALSTM, 3), keras.layers.Dense(1)), "static input 'e'"),
        (
            lambda: ak.Feedback(ak.RNN(Delayed, 3, P=2), keras.layers.Dense(1)),
            r"cell: given Delayed, .* H \+ P units .* hidden size H. Call the layer's step",
        ),
        (lambda: ak.Feedback(ak.LSTM(3), keras.layers.Dense(1, "relu")), "readout: given"),
        (lambda: ak.Feedback(ak.LSTM(3), Bounded(1)), "readout: given <Bounded .* fed back as it"),
        (
            lambda: ak.Feedback(ak.LSTM(3), keras.layers.Dense(3)).build((None, None, 2)),
            "at most 2 outputs",
        ),
        (lambda: small()[0](small()[1][0], forced=1.0), "expected ndim=3, found ndim=2"),
        (lambda: small()[0](small()[1], forced=2.0), "forced: given 2.0"),
        (
            lambda: small()[0](small()[1], forced=np.ones((6, 4))),
            r"forced: given shape \(6, 4\); expected \(4, 6\), that is \[rows, steps\]",
        ),
        (lambda: small()[0](small()[1], lengths=[6] * 4), "lengths: given .* Pass a mask"),
        (lambda: small()[0].step(small()[1], forced=True), r"x: given shape \(4, 6, 2\)"),
        (lambda: small()[0].step(small()[1][:, 0], forced=0.5), "forced: given 0.5; .* each row"),
        (lambda: small()[0].step(small()[1][:, 0], forced=[[True]]), r"forced: given shape \(1, 1"),
    ],
)
def test_refusals(call: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call()


# -- with weights of 8 bits ------------------------------------------------------------------------
@pytest.mark.parametrize("cell", ["LSTM", "PeepholeLSTM"])
@pytest.mark.sample(1)
def test_weights_of_8_bits(cell: str, tmp_path: Any) -> None:
    """Trained, quantized, saved and loaded: as before, and with the bits of NumPy's."""
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 6, 3)).astype("float32")
    made = {"LSTM": ak.LSTM, "PeepholeLSTM": lambda n: ak.RNN(cells.PeepholeLSTM, n)}
    readout = keras.layers.Dense(WIDTH)
    feedback = ak.Feedback(made[cell](16), readout, return_state=True, seed=1)
    forced = keras.ops.arange(6) < 3
    wanted = [number(r) for r in feedback(x, forced=forced)]
    inputs, flags = keras.Input((6, 3)), keras.Input((6,), dtype="bool")
    model = keras.Model([inputs, flags], feedback(inputs, forced=flags))
    full = np.broadcast_to(number(forced), (4, 6))
    small_ = compress.quantize(model, data=[([x, full],)])
    layer = next(l for l in small_.layers if isinstance(l, ak.Feedback))
    assert isinstance(layer.layer, ak.Quantized) and 0 < layer.layer.error < 0.02
    assert f"error {layer.layer.error:.1e}" in repr(layer.layer)
    y, *states = (number(r) for r in small_.predict([x, full], verbose=0))
    for value, right in zip([y, *states], wanted, strict=True):
        assert_close(value, right, "int8", "forward", axes=())
    small_.save(tmp_path / "small.keras")
    loaded = keras.saving.load_model(tmp_path / "small.keras")
    for again in (loaded, keras.Model([inputs, flags], again_with(feedback)(inputs, forced=flags))):
        assert np.array_equal(again.predict([x, full], verbose=0)[1], states[0])
    if BACKEND == "jax":
        return  # there it runs in float32
    assert layer.engine.name == "cpu"
    ours = an.RNN(getattr(cells, cell), 3, 16, batch_first=True)
    if cell == "LSTM":
        ours = an.RNN(LSTM, 3, 16, batch_first=True)
    dense = an.Dense(16, WIDTH)
    ours.set_parameters(weights_of(feedback.layer, dict(ours.parameters)))
    dense.set_parameters({"weight": number(readout.kernel).T, "bias": number(readout.bias)})
    small_ours = compress.quantize(an.Feedback(ours, dense))
    _, final = small_ours.forward(x, forced=number(forced))
    for state, right in zip(states, final, strict=True):
        assert np.array_equal(state, right[0])


def again_with(feedback: Any) -> Any:
    """A feedback made of the quantized layer."""
    return ak.Feedback(compress.quantize(feedback.layer), feedback.readout, return_state=True)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="a tape of TensorFlow's")
def test_gradients_are_those_of_real_weights() -> None:
    import tensorflow as tf

    feedback, x = small()
    feedback.build(x.shape)
    small_ = ak.Feedback(compress.quantize(feedback.layer), feedback.readout)
    same = ak.Feedback(real(small_.layer, feedback.layer), feedback.readout)
    grads = []
    for run in (small_, same):
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(run(x, forced=0.0) ** 2)
        grads.append(
            [number(g) for g in tape.gradient(total, feedback.readout.trainable_variables)]
        )
    for mine, right in zip(*grads, strict=True):
        assert_close(mine, right, "float32", "gradient")
