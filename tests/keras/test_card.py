"""Keras on TensorFlow on a card, without one: TensorFlow's XLA on the CPU calls the real handler,
see ``shim``.
"""
# ruff: noqa: E402

import json
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from problems import Odd, Tied, assert_solved, draw
from processes import at_once
from shim import STREAM, Launched, Shim, launches
from tolerances import assert_close

keras = pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")
if keras.backend.backend() != "tensorflow":
    pytest.skip("Keras runs on another backend", allow_module_level=True)

import anycell.keras as ak
import anycell.tf1 as t1
from anycell import cells
from anycell.engines.gpu import launch, refusals
from anycell.engines.gpu.interpreter import Interpreter, Started
from anycell.keras.tensorflow import fused, xla
from anycell.keras.tensorflow.xla import XlaCard
from anycell.layer import card, recipe
from tests.conformance import on_keras
from tests.keras.test_xla import Leaky

pytestmark = pytest.mark.sample(every=3)

DOUBT = fused.doubt.__wrapped__
REAL, MOST = xla.of_card.handler, card.most_rows
B, T, I, H = 3, 5, 4, 6


@cache
def shim() -> Shim:
    return Shim(REAL(False, forms=True))


@cache
def register() -> None:
    xla._register(PLACE, shim().address)


PLACE = xla.Place("CPU:0", "CPU", "Host", "shim_of_a_card")


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launched]:
    """Makes TensorFlow run layers for a card on the CPU; lists the launches."""
    register()
    monkeypatch.setattr(xla, "CARD", PLACE)
    monkeypatch.setattr(fused, "on_gpu", lambda _: True)
    monkeypatch.setattr(fused, "gpu_visible", lambda: True)
    monkeypatch.setattr(fused, "doubt", lambda _: None)
    forget()
    with launches(monkeypatch) as seen:
        yield seen
    assert not shim().memory
    forget()


def forget() -> None:
    fused._fits.cache_clear()
    xla._form.cache_clear()
    MOST.cache_clear()


# -- results and gradients -------------------------------------------------------------------------
HAS = ("state", "d state", "mask", "resets")
EVERY = [getattr(cells, name) for name in cells.__all__]
WAYS = {"eager": {}, "graph": {"graph": True}, "XLA": {"xla": True}}
# Cells that tier 2 runs: their steps have one matmul.
SINGLE = [cells.LSTM, cells.GRU, cells.PeepholeLSTM, cells.LayerNormLSTM]


def cases() -> Iterator[Any]:
    yield cells.LSTM, 1, HAS, "eager"
    yield cells.GRU, 2, HAS, "graph"
    yield cells.PeepholeLSTM, 2, ("mask", "reverse"), "XLA"
    products = [(c, 1) for c in [*EVERY, Odd, Tied]] + [(c, 2) for c in SINGLE]
    for cell, tier in products:
        for way in WAYS:
            has = () if way == "XLA" else HAS
            yield pytest.param(cell, tier, has, way, marks=pytest.mark.slow)
    yield pytest.param(cells.LSTM, 2, (*HAS, "reverse"), "graph", marks=pytest.mark.slow)


@pytest.mark.parametrize(("cell", "tier", "has", "way"), [*cases()], ids=str)
@pytest.mark.sample(3)
def test_results_and_gradients(
    cell: Any, tier: int, has: Any, way: str, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of masked, reset and reversed layers of open sizes; launches go to XLA's stream."""
    monkeypatch.setattr(XlaCard, "tier", tier)
    problem = draw(cell, (3, 3, 4, 9 + (cell is Odd)), has, "float32")  # Odd has two heads
    assert_solved(on_keras.by_layer(**WAYS[way])(problem), problem)
    assert launched and {one.stream for one in launched} == {STREAM}
    assert (tier == 2) is any(one.cooperative for one in launched)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["eager", "graph"])
def test_sixteen_bits(way: str, launched: Launched) -> None:
    """float16 alone: the interpreter multiplies bfloat16 wrongly."""
    problem = draw(cells.GRU, (3, 3, 4, 9), ("mask", "state"), "float16")
    assert_solved(on_keras.by_layer(**WAYS[way])(problem), problem)
    assert launched


@pytest.mark.slow
@pytest.mark.parametrize("way", ["eager", "graph"])
@pytest.mark.parametrize("extra", ["recurrent_mask", "masks of gates", "reset_state", "static"])
def test_recurrence(extra: str, way: str, launched: Launched) -> None:
    cell = cells.EALSTM if extra == "static" else cells.LSTM
    more = {"recurrent_mask": ("recurrent_mask",), "masks of gates": ("recurrent_mask", "gated")}
    has = more.get(extra, ("resets", extra) if extra == "reset_state" else ())
    problem = draw(cell, (3, 3, 4, 9), has, "float32")
    assert_solved(on_keras.by_recurrence(**WAYS[way])(problem), problem)
    assert launched


def data(rng: np.random.Generator, *shape: int) -> Any:
    return tf.constant(rng.normal(size=shape), "float32")


def near(result: Any, right: Any) -> None:
    assert_close(np.asarray(result), np.asarray(right), "float32", "gradient", axes=())


def by_steps(call: Callable[..., Any], *given: Any) -> Any:
    with ak.step_by_step():
        return call(*given)


@pytest.mark.slow
@pytest.mark.parametrize("number", [2**40 + 3, 7])
def test_random_masks(
    number: int, rng: np.random.Generator, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A seed gives the masks of the CPU."""
    weights = {"weight_ih": data(rng, 4 * H, I), "weight_hh": data(rng, 4 * H, H)}

    def call(x: Any) -> Any:
        options = {"seed": number, "training": True}
        return ak.recurrence(cells.ZoneoutLSTM, x, weights, **options)[0]

    x = data(rng, T, B, I)
    results = [call(x), tf.function(call, [tf.TensorSpec([None, None, I])], autograph=False)(x)]
    assert launched
    monkeypatch.setattr(fused, "on_gpu", lambda _: False)
    for result in results:
        near(result, call(x))


@pytest.mark.parametrize("sizes", [(1, 1), (7, 40), (4, 0)])
def test_sizes_that_only_the_run_knows(
    sizes: tuple[int, int], rng: np.random.Generator, launched: Launched
) -> None:
    """One graph runs any number of steps and rows; the third one has no rows."""
    layer = ak.LSTM(H, use_cudnn=False, return_sequences=True)
    layer.build((None, None, I))
    function = tf.function(layer, [tf.TensorSpec([None, None, I])], autograph=False)
    near(function(x := data(rng, B, T, I)), by_steps(layer, x))
    assert launched
    length, rows = sizes
    result = function(x := data(rng, rows, length, I))
    assert result.shape == (rows, length, H)
    if rows:  # Keras's loop takes no empty batch
        near(result, by_steps(layer, x))


def test_rows_beyond_what_runs_at_once(
    rng: np.random.Generator, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph of an unknown number of rows has both ways; a known number has one."""
    monkeypatch.setattr(XlaCard, "tier", 1)
    monkeypatch.setattr(card, "most_rows", lambda *_: 4)
    layer = ak.RNN(cells.GRU, H)
    layer.build((None, None, I))

    def run(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
        return [y, *tape.gradient(y, [x, *(v.value for v in layer.trainable_variables)])]

    function = tf.function(run, [tf.TensorSpec([None, T, I])], autograph=False)
    for rows in (4, 5):
        launched.clear()
        x = data(rng, rows, T, I)
        for result, right in zip(function(x), by_steps(run, x), strict=True):
            near(result, right)
        assert bool(launched) is (rows == 4)


# -- Keras, TensorFlow 1 ---------------------------------------------------------------------------
LAYERS: dict[str, Callable[[], Any]] = {
    "a user's cell": lambda: ak.RNN(Leaky(), return_sequences=True),
    "LSTM": lambda: ak.LSTM(H, use_cudnn=False, return_sequences=True),
    "Bidirectional": lambda: keras.layers.Bidirectional(
        ak.RNN(cells.PeepholeLSTM, H, return_sequences=True)
    ),
}


@pytest.mark.parametrize("by_xla", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.sample(1)
def test_fit(
    kind: str,
    by_xla: bool,
    rng: np.random.Generator,
    launched: Launched,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same training as on the CPU; the last batch has fewer rows."""
    trained, x, y = [], data(rng, 7, T, I), data(rng, 7, T, 2)
    for on_card in (True, False):
        monkeypatch.setattr(fused, "on_gpu", lambda _, on_card=on_card: on_card)
        monkeypatch.setattr(fused, "gpu_visible", lambda on_card=on_card: on_card)
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((T, I)), LAYERS[kind](), keras.layers.Dense(2)])
        model.compile("sgd", "mse", jit_compile=by_xla and on_card)
        launched.clear()
        model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        assert bool(launched) is on_card
        trained.append([*model.get_weights(), model.predict(x, verbose=0)])
    for ours, right in zip(*trained, strict=True):
        near(ours, right)


@pytest.mark.slow
def test_states_that_stay(rng: np.random.Generator, launched: Launched) -> None:
    layer, x = ak.RNN(cells.LSTM, H, stateful=True), data(rng, B, T, I)
    layer.build(x.shape)
    results = [layer(x), layer(x)]
    layer.reset_state()
    assert launched
    for result in results:
        near(result, by_steps(layer, x))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["eager", "session"])
def test_tensorflow_1(way: str, rng: np.random.Generator, launched: Launched) -> None:
    x = rng.normal(size=(T, B, I)).astype("float32")

    def run() -> Any:
        cell = t1.LSTMCell(H, use_peepholes=True)
        return cell.run(tf.constant(x), sequence_length=[T, 2, 1])[0], cell

    if way == "eager":
        result, cell = run()
        assert cell.engine.name == "gpu"
        right = by_steps(lambda: cell.run(tf.constant(x), sequence_length=[T, 2, 1]))[0]
    else:
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            output, cell = run()
            right = by_steps(lambda: cell.run(tf.constant(x), sequence_length=[T, 2, 1]))[0]
            session.run(tf.compat.v1.global_variables_initializer())
            result, right = session.run([output, right])
    assert launched
    near(result, right)


@pytest.mark.slow
def test_second_derivatives(rng: np.random.Generator, launched: Launched) -> None:
    layer, x = ak.RNN(cells.GRU, H), data(rng, B, T, I)
    layer.build(x.shape)

    def twice(x: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = layer(x) ** 2
            first = tape.gradient(y, x)
        return outer.gradient(first, x)

    result = tf.function(twice, jit_compile=True, autograph=False)(x)
    assert launched
    near(result, by_steps(twice, x))


# -- which engine ----------------------------------------------------------------------------------
def test_the_engine_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers say what runs them on a card, and why not these kernels."""
    layer = ak.RNN(cells.PeepholeLSTM, H)
    assert layer.engine == ("gpu", "fused kernel, 1 matmul a step")
    assert layer.supports_jit
    assert ak.LSTM(H).engine.name == "cudnn"
    assert ak.LSTM(H, use_cudnn=False).engine.name == "gpu"
    engines, drop_in = list[str](), ak.LSTM(H)
    tf.function(
        lambda: engines.append(drop_in.engine.name), jit_compile=True, autograph=False
    ).get_concrete_function()
    assert engines == ["gpu"]  # XLA compiles no operation of cuDNN
    assert t1.LSTMCell(H).engine.name == "gpu"
    wide = ak.RNN(cells.GRU(reset_after=False), 4000).engine
    assert wide.name == "composite" and "one step per launch" in wide.reason
    assert "float64" in ak.RNN(cells.LSTM, H, dtype="float64").engine.reason
    with ak.step_by_step():
        assert layer.engine.name == "composite"
    monkeypatch.setattr(fused, "doubt", lambda tier: f"doubts of tier {tier}")
    assert layer.engine == ("composite", "doubts of tier 1")
    monkeypatch.setattr(launch, "missing", lambda: "no driver")
    assert layer.engine == ("composite", "no driver")
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda _: ["one", "two"])
    assert "several" in layer.engine.reason
    with pytest.raises(ValueError, match="'cpu', but the kernels run on one GPU"):
        ak.recurrence(cells.LSTM, tf.ones((T, B, 4 * H)), {"weight_hh": tf.ones((4 * H, H))},
                      engine="cpu")  # fmt: skip


def test_calls_that_go_step_by_step(
    rng: np.random.Generator, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states of all steps; a pass whose kernels the device refuses."""
    weights = {"weight_ih": data(rng, 4 * H, I), "weight_hh": data(rng, 4 * H, H)}

    def call(**options: Any) -> Any:
        return ak.recurrence(cells.LSTM, x, weights, **options)

    x = data(rng, T, B, I)
    right = by_steps(lambda: call()[0])
    near(call(return_states=True)[0], right)
    loaded = launch.loaded

    def load(printed: Any, *given: Any) -> Any:
        if printed.alone:
            raise launch.Refused(printed, "the test says so")
        return loaded(printed, *given)

    monkeypatch.setattr(launch, "loaded", load)
    recipe.known.clear()
    near(call()[0], right)
    assert not launched
    refusals.forget()


# -- what goes wrong -------------------------------------------------------------------------------
@pytest.mark.parametrize(("tier", "name"), [(1, "forward_resident"), (2, "forward_cooperative")])
@pytest.mark.sample(1)
def test_a_refused_launch_is_an_error(
    tier: int,
    name: str,
    rng: np.random.Generator,
    launched: Launched,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It names the driver's error and the cell; the next call runs."""
    monkeypatch.setattr(XlaCard, "tier", tier)
    layer, x = ak.RNN(cells.LSTM, H), data(rng, B, T, I)
    layer.build(x.shape)
    by_xla = tf.function(layer, jit_compile=True, autograph=False)
    for run in (layer, by_xla):
        launched.fails = {name: 720}
        with pytest.raises(tf.errors.OpError, match="720 is the error of the CUDA driver at a la"):
            run(x)
        launched.fails = {}
        near(run(x), by_steps(layer, x))


@pytest.mark.slow
def test_programs_that_gave_up(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call says so, once."""
    monkeypatch.setattr(XlaCard, "tier", 2)
    layer, x = ak.RNN(cells.LSTM, H), data(rng, B, T, I)
    right = layer(x)
    XlaCard.of("float32").trouble.value = 1
    with pytest.raises(tf.errors.OpError, match=r"gave up.*XlaCard.tier = 3"):
        layer(x)
    assert np.array_equal(layer(x), right)


def test_sizes_that_no_kernel_runs(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pass that cannot be drafted when the graph runs is an error, and no crash."""
    layer = ak.RNN(cells.LSTM, H)
    layer.build((None, None, I))
    function = tf.function(layer, [tf.TensorSpec([None, None, I])], autograph=False)
    function.get_concrete_function()

    def unfit(_: Any) -> Any:
        raise card.Unfit("the test says so")

    monkeypatch.setattr(card, "played", unfit)
    with pytest.raises(tf.errors.OpError, match="no kernels for these sizes"):
        function(data(rng, 2, 3, I))
    assert "the test says so" in capsys.readouterr().err


def test_threads_call_at_once(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled program, whose handler keeps nothing between calls; no kernel runs."""
    seen: list[int] = []

    def started(_: Interpreter, one: Started) -> int:
        seen.append(one.handle)
        return 0

    monkeypatch.setattr(Interpreter, "launch", started)
    layer, x = ak.RNN(cells.LSTM, H), data(rng, B, T, I)
    layer.build(x.shape)
    function = tf.function(layer, jit_compile=True, autograph=False)
    function(x)
    once = len(seen)
    at_once(*[lambda: [function(x).numpy() for _ in range(50)]] * 2)
    assert len(seen) == 101 * once


@pytest.mark.slow
def test_the_tool(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What a card will run says what runs, and that it is right."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "tools"))
    import gpu_keras

    sizes = {"CASES": [(cells.GRU, H)], "STEPS": 3, "ROWS": 2, "CALLS": 1}
    for name, value in sizes.items():
        monkeypatch.setattr(gpu_keras, name, value)
    monkeypatch.setattr(sys, "argv", ["gpu_keras"])
    with pytest.raises(SystemExit) as ended:
        gpu_keras.main()
    assert not ended.value.code
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line.get("way") for line in lines] == [None, None, "eager", "graph", "XLA"]
    assert all(line["engine"] == "gpu" and line["apart"] < 1e-4 for line in lines[2:])
    monkeypatch.setattr(fused, "gpu_visible", lambda: False)
    with pytest.raises(SystemExit, match="1"):
        gpu_keras.main()


@pytest.mark.slow
def test_a_doubtful_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process first compares a small layer of each tier with the layer step by step."""
    monkeypatch.setattr(xla.of_card, "handler", lambda *_, **__: shim().address)
    assert DOUBT(1) is None and DOUBT(2) is None
    product = XlaCard.product

    def twice(host: XlaCard, a: Any, b: Any) -> Any:
        made = product(host, a, b)
        return made + made

    monkeypatch.setattr(XlaCard, "product", twice)
    assert "computed a small layer wrongly here, by" in DOUBT(1)
    monkeypatch.setattr(Interpreter, "launch", lambda *_: 700)
    why = DOUBT(1)
    assert "failed at a small layer here" in why and "700 is the error" in why
    monkeypatch.setattr(xla, "SYMBOLS", ("XLA_has_none",))
    assert "exports no function" in DOUBT(1)


def test_xla_has_no_stream_on_the_cpu(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler by itself passes XLA's own error on."""
    place = PLACE._replace(target="a_card_itself")
    xla._register(place, REAL(False, forms=True))
    monkeypatch.setattr(xla, "CARD", place)
    with pytest.raises(tf.errors.OpError, match="GPU context is not available"):
        ak.RNN(cells.LSTM, H)(data(rng, B, T, I))
