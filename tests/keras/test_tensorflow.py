"""The Keras layers when TensorFlow traces, compiles, exports, replicates and differentiates them.

One file, because all of it is about graphs of one small model.
"""

import contextlib
import gc
import json
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

keras = pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")
if keras.backend.backend() != "tensorflow":
    pytest.skip("Keras runs on another backend", allow_module_level=True)

from problems import assert_solved, axes, draw  # noqa: E402
from processes import at_once, python  # noqa: E402
from roads import ROADS  # noqa: E402
from tolerances import assert_close, is_slope  # noqa: E402

import anycell.keras as ak  # noqa: E402
from anycell import cell, cells, keep, sigmoid, tanh  # noqa: E402
from anycell.keras import backends  # noqa: E402
from anycell.keras.rule import Facts, choose  # noqa: E402
from anycell.keras.tensorflow import fused, passes  # noqa: E402
from anycell.keras.tensorflow.framework import TensorFlow  # noqa: E402
from anycell.plan import Layer  # noqa: E402
from tests.conformance.on_keras import by_layer  # noqa: E402


@cell(gates="f g", state="h m")
def Leaky(x: Any, r: Any, s: Any, *, rate: float = 0.9) -> Any:
    f, g = x + r
    m = rate * s.m + (1.0 - rate) * sigmoid(f)
    return m * s.h + (1.0 - m) * tanh(g), m


@cell(gates="g", state="h")
def Noisy(x: Any, r: Any, s: Any, *, rate: float = 0.5) -> Any:
    kept = keep(rate)
    return kept * tanh(x.g + r.g) + (1.0 - kept) * s.h


def calls_python(function: Any) -> bool:
    """Whether a concrete function, or one that it calls, leaves the graph."""
    graph = function.graph.as_graph_def()
    nodes = [*graph.node, *[n for f in graph.library.function for n in f.node_def]]
    return any("PyFunc" in node.op for node in nodes)


def data(rng: np.random.Generator, *shape: int) -> Any:
    return tf.constant(rng.normal(size=shape).astype("float32"))


# -- graphs ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "step",
    [cells.LSTM, Leaky, pytest.param(cells.LayerNormLSTM, marks=pytest.mark.slow)],
    ids=lambda c: c.name,
)
@pytest.mark.sample(1)
def test_under_xla(step: Any, rng: np.random.Generator) -> None:
    problem = draw(step, (5, 3, 2, 6), ("state",))
    assert_solved(by_layer(xla=True)(problem), problem)
    layer = ak.RNN(step, 6, return_sequences=True, return_state=True, dtype="float64")
    inner = tf.function(lambda x: layer(x)[0], autograph=False)
    outer = tf.function(lambda x: inner(x), jit_compile=True, autograph=False)
    plain = tf.function(lambda x: layer(x)[0], autograph=False)
    x = tf.constant(rng.normal(size=(3, 5, 2)))
    assert not calls_python(outer.get_concrete_function(x))
    assert calls_python(plain.get_concrete_function(x))
    assert_close(outer(x).numpy(), plain(x).numpy(), "float64", "forward")


def test_fit(rng: np.random.Generator) -> None:
    x, y = data(rng, 8, 5, 3), data(rng, 8, 1)
    trained = []
    for module in (ak, keras.layers):
        given = keras.Input((None, 3))
        model = keras.Model(given, keras.layers.Dense(1)(module.LSTM(4)(given)))
        model.set_weights(trained[0] if trained else model.get_weights())
        trained.append(model.get_weights())
        model.compile("sgd", "mse")
        model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        trained.append(model.get_weights())
    for a, b in zip(trained[1], trained[3], strict=True):
        assert_close(a, b, "float32", "gradient")


@pytest.mark.slow
def test_fit_by_xla(rng: np.random.Generator) -> None:
    """XLA runs the layer step by step if asked to; the number of rows is unknown."""
    x, y = data(rng, 6, 2, 3), data(rng, 6, 4)
    trained = []
    for xla in (False, True):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((2, 3)), ak.RNN(cells.LayerNormLSTM, 4)])
        with ak.step_by_step() if xla else contextlib.nullcontext():
            model.compile("sgd", "mse", jit_compile=xla)
            model.fit(x, y, batch_size=3, shuffle=False, verbose=0)
        assert model.jit_compile is xla
        trained.append(model.get_weights())
    for ours, right in zip(*trained, strict=True):
        assert_close(ours, right, "float32", "gradient")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["drop-in", *[n for n in cells.__all__ if n != "EALSTM"]])
def test_every_cell_trains_by_xla(name: str, rng: np.random.Generator) -> None:
    sizes = {"P": 4} if name == "LSTMP" else {}
    layer = ak.LSTM(4) if name == "drop-in" else ak.RNN(getattr(cells, name), 4, **sizes)
    model, x, y = (
        keras.Sequential([keras.Input((5, 3)), layer]),
        data(rng, 4, 5, 3),
        data(rng, 4, 4),
    )
    before = tf.reduce_mean((layer(x) - y) ** 2)
    with ak.step_by_step():
        model.compile("sgd", "mse", jit_compile=True)
        model.fit(x, y, epochs=10, verbose=0)
    assert model.jit_compile
    assert tf.reduce_mean((layer(x) - y) ** 2) < before  # for any random masks


def test_the_engine_inside_a_graph(rng: np.random.Generator) -> None:
    layer, found = ak.LSTM(4), {}
    for xla in (False, True):
        tf.function(
            lambda x, xla=xla: (found.setdefault(xla, layer.engine), layer(x))[1],
            jit_compile=xla,
            autograph=False,
        ).get_concrete_function(tf.TensorSpec([2, 5, 3]))
    compiled = "cpu" if fused.obstacle() is None else "keras"
    assert [found[xla].name for xla in (False, True)] == ["cpu", compiled]


@pytest.mark.parametrize("count", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_what_cannot_run_elsewhere_says_what_to_do(count: int, rng: np.random.Generator) -> None:
    """XLA and TensorFlow Lite refuse models of any number of layers, with the remedy."""
    layers = [ak.LSTM(4, return_sequences=True) for _ in range(count)]
    model, x = keras.Sequential(layers), data(rng, 2, 5, 3)
    model(x)
    inner = tf.function(lambda x: model(x), autograph=False)
    inner(x)
    outer = tf.function(lambda x: inner(x), jit_compile=True, autograph=False)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"anycell\.keras\.step_by_step"):
        outer(x)
    with ak.step_by_step():
        apart = tf.function(lambda x: model(x), autograph=False)
        apart.get_concrete_function(x)
    outer = tf.function(lambda x: apart(x), jit_compile=True, autograph=False)
    assert_close(outer(x).numpy(), inner(x).numpy(), "float32", "forward")
    traced = inner.get_concrete_function(tf.TensorSpec([2, 5, 3]))
    converter = tf.lite.TFLiteConverter.from_concrete_functions([traced], model)
    with pytest.raises(Exception, match=r"Trace it in anycell\.keras\.step_by_step\(\)"):
        converter.convert()


def test_losses_that_are_scaled_may_overflow() -> None:
    """The overflow causes no warning, as in Keras's own layers."""
    wide = np.array([1.0, 1e30], "float32")
    assert TensorFlow.of("float16").narrow(wide).tolist() == [1.0, np.inf]


def test_unknown_shapes_in_one_graph(rng: np.random.Generator) -> None:
    layer = ak.RNN(Leaky, 5, return_sequences=True)
    layer.build((None, None, 3))
    signature = [tf.TensorSpec([None, None, 3]), tf.TensorSpec([None, None], "bool")]
    graph = tf.function(
        lambda x, mask: layer(x, mask=mask), input_signature=signature, autograph=False
    )
    for rows, steps in ((1, 4), (3, 7), (0, 2)):
        x, mask = data(rng, rows, steps, 3), tf.constant(rng.random((rows, steps)) < 0.7)
        assert_close(graph(x, mask).numpy(), layer(x, mask=mask).numpy(), "float32", "forward")
    assert graph.experimental_get_tracing_count() == 1


@pytest.mark.parametrize(
    ("name", "shape", "what"),
    [
        ("initial_state", (3, 4), r"initial_state, h: given shape \(3, 4\); expected \(2, 4\)"),
        ("initial_state", (1, 4), r"initial_state, h: given shape \(1, 4\); expected \(2, 4\)"),
        ("mask", (2, 1), r"mask: given shape \(2, 1\); expected \(2, 5\)"),
        ("resets", (2, 4), r"resets: given shape \(2, 4\); expected \(2, 5\)"),
        ("static", (2, 3), r"static: given shape \(2, 3\); expected \(2, 4\)"),
    ],
)
def test_shapes_known_only_when_the_graph_runs(
    name: str, shape: tuple[int, ...], what: str, rng: np.random.Generator
) -> None:
    layer = ak.RNN(cells.EALSTM, 4)
    layer.build((None, None, 3))
    flag = name in ("mask", "resets")

    def call(x: Any, static: Any, given: Any) -> Any:
        if name == "static":
            return layer(x, static=given)
        return layer(x, static=static, **{name: [given, given] if name[0] == "i" else given})

    kinds = [tf.TensorSpec([None] * n, t) for n, t in ((3, "float32"), (2, "float32"))]
    kinds += [tf.TensorSpec([None, None], "bool" if flag else "float32")]
    graph = tf.function(call, input_signature=kinds, autograph=False)
    with pytest.raises(tf.errors.InvalidArgumentError, match=what):
        graph(data(rng, 2, 5, 3), data(rng, 2, 4), tf.ones(shape, "bool" if flag else "float32"))


def test_a_mask_does_not_lengthen_sequences_of_one_step(rng: np.random.Generator) -> None:
    layer = ak.LSTM(4, return_sequences=True)
    layer.build((None, None, 3))
    signature = [tf.TensorSpec([None, None, 3]), tf.TensorSpec([None, None], "bool")]
    graph = tf.function(
        lambda x, mask: layer(x, mask=mask), input_signature=signature, autograph=False
    )
    with pytest.raises(tf.errors.InvalidArgumentError):
        graph(data(rng, 2, 1, 3), tf.ones((2, 6), "bool"))


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("name", ["LSTM", "ZoneoutLSTM", "PeepholeLSTM", "RNN"])
@pytest.mark.sample(1)
def test_an_input_that_the_kernel_projects(
    name: str, graph: bool, set_layer: Callable[..., None]
) -> None:
    """The kernel projects, as it does for larger inputs than a test has."""
    asked = []
    set_layer(projects=lambda *_: asked.append(1) or True)
    for ways in ((), ("reverse",)):
        problem = draw(getattr(cells, name), (5, 3, 2, 6), ("state", "mask", *ways))
        assert_solved(by_layer(graph=graph)(problem), problem)
    assert asked


def test_second_derivatives_through_a_projection_in_the_kernel(
    set_layer: Callable[..., None],
) -> None:
    problem, found = draw(cells.LSTM, (5, 3, 2, 6), ("state",)), []
    along = {name: np.ones_like(a) for name, a in problem.arrays.items() if name[:2] != "d "}
    for inside in (False, True):
        set_layer(projects=lambda *_, inside=inside: inside)
        found.append(by_layer()(problem, along))
    for name, value in found[0].items():
        assert_close(found[1][name], value, "float64", "gradient", name, axes(name))


def derive(layer: Any, x: Any, watched: bool = True) -> list[Any]:
    """Returns output and gradients, including the input's if it is watched."""
    with tf.GradientTape() as tape:
        if watched:
            tape.watch(x)
        y = layer(x, training=True)
    return [y, *tape.gradient(y, [x] * watched + [v.value for v in layer.trainable_variables])]


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_variables_of_tensorflow_are_read(graph: bool, rng: np.random.Generator) -> None:
    layer = ak.EALSTM(4, return_sequences=True)
    flags = rng.random((2, 2, 5)) < 0.5
    given = *(data(rng, 2, 4) for _ in range(3)), flags[0], flags[1].astype("float32")
    x, found = data(rng, 2, 5, 3), []

    def derive(h: Any, c: Any, static: Any, mask: Any, resets: Any) -> Any:
        further = {"mask": mask, "static": static, "resets": resets}
        with tf.GradientTape() as tape:
            tape.watch([h, c, static])
            y = layer(x, initial_state=[h, c], **further)
        return [y, *tape.gradient(y, [h, c, static])]

    run = tf.function(derive, autograph=False) if graph else derive
    for kind in (tf.constant, tf.Variable):
        found.append([t.numpy().tobytes() for t in run(*map(kind, given))])
    assert found[0] == found[1]


def test_the_same_bits_in_eager_mode_and_graphs_on_any_number_of_threads(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, runs: list[Any]
) -> None:
    layer, x, found = ak.LSTM(64, return_sequences=True), data(rng, 40, 30, 48), []
    layer.build(x.shape)
    for threads in (1, 2, 3):
        threading = tf.config.threading
        monkeypatch.setattr(threading, "get_intra_op_parallelism_threads", lambda n=threads: n)
        runs.clear()
        for derived in (derive, tf.function(derive, autograph=False)):
            found.append([part.numpy().tobytes() for part in derived(layer, x)])
        several = ROADS["several threads"]
        assert [several(run) for run in runs] == [threads > 1] * len(runs) and runs
    assert all(bits == found[0] for bits in found)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_no_gradient_that_nobody_watches(
    graph: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x, asked = ak.LSTM(4), data(rng, 2, 5, 3), []
    layer(x)
    backward = passes.backward

    def spy(*args: Any, wanted: set[str], **more: Any) -> Any:
        asked.append(wanted)
        return backward(*args, wanted=wanted, **more)

    monkeypatch.setattr(passes, "backward", spy)
    for watched in (True, False):
        run = tf.function(derive, autograph=False) if graph else derive
        assert all(part is not None for part in run(layer, x, watched))
    weights = {"weight_ih", "weight_hh", "bias_ih"}
    assert asked == [weights | {"x"}, weights]


def test_inside_a_while_loop_and_a_condition(rng: np.random.Generator) -> None:
    layer, x = ak.LSTM(4), data(rng, 2, 5, 3)
    layer(x)

    @tf.function
    def many(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.constant(0.0)
            for _ in tf.range(3):
                total += tf.reduce_sum(layer(x, training=True))
            if total > -1e9:
                total = 2.0 * total
        return total, tape.gradient(total, x)

    with tf.GradientTape() as tape:
        tape.watch(x)
        once = 6.0 * tf.reduce_sum(layer(x))
    total, gradient = many(x)
    assert_close(total.numpy(), once.numpy(), "float32", "forward")
    assert_close(gradient.numpy(), tape.gradient(once, x).numpy(), "float32", "gradient")


# -- gradients -------------------------------------------------------------------------------------
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("watched", ["input", "weight", "loss"])
@pytest.mark.parametrize("name", ["LSTM", "GRU"])
@pytest.mark.sample(1)
@pytest.mark.more
def test_forward_mode(name: str, watched: str, graph: bool, rng: np.random.Generator) -> None:
    """Jacobian- and Hessian-vector products, forwards and forwards over reverse, equal Keras's."""
    ours, theirs = (getattr(m, name)(3, dtype="float64") for m in (ak, keras.layers))
    x, scale = tf.constant(rng.normal(size=(2, 2, 4))), tf.constant(rng.normal(size=(2, 3)))
    ours.build(x.shape)
    theirs.build(x.shape)
    theirs.set_weights(ours.get_weights())

    def products(layer: Any) -> Any:
        weight = layer.cell.recurrent_kernel.value
        about = {"input": x, "weight": weight, "loss": scale}[watched]
        with tf.autodiff.ForwardAccumulator(about, tf.ones_like(about)) as forward:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = layer(x)
                total = tf.reduce_sum(scale * y)
            gradient = tape.gradient(total, x)
        return [forward.jvp(r, tf.UnconnectedGradients.ZERO) for r in (y, gradient)]

    run = tf.function(products, autograph=False) if graph else products
    found, right = run(ours), products(theirs)
    assert np.abs(right[1].numpy()).max() > 1e-3
    for a, b in zip(found, right, strict=True):
        assert_close(a.numpy(), b.numpy(), "float64", "gradient")


WITHIN: dict[str, Callable[[Any, Any], Any]] = {
    "vectorized_map": lambda layer, x: tf.vectorized_map(layer, x),
    "map_fn": tf.function(lambda layer, x: tf.map_fn(layer, x), autograph=False),
    "cond": tf.function(
        lambda layer, x: tf.cond(tf.size(x) > 0, lambda: layer(x[0])[None], lambda: x[..., 0, :]),
        autograph=False,
    ),
}


@pytest.mark.parametrize("within", ["map_fn", "cond"])
@pytest.mark.parametrize("traced", ["outside", pytest.param("within", marks=pytest.mark.more)])
def test_a_function_in_loops_and_branches(
    within: str, traced: str, rng: np.random.Generator
) -> None:
    layer = ak.SimpleRNN(2, dtype="float64")
    x = tf.constant(rng.normal(size=(1 if within == "cond" else 2, 3, 4, 2)))
    layer.build((None, None, 2))
    parts = [x, *layer.trainable_weights]

    def gradients(run: Any, layer: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.reduce_sum(tf.sin(run(layer, x)))
        gradients: list[Any] = tape.gradient(total, parts)
        return gradients

    function, outer = (
        tf.function(lambda x: layer(x), autograph=False),
        tf.function(WITHIN[within].python_function),
    )
    right = gradients(_each, layer)
    if traced == "outside":  # its own gradient exists then, too
        gradients(_each, function)
    found = gradients(outer, function)
    del function
    gc.collect()
    for a, b, c in zip(found, right, gradients(outer, layer), strict=True):
        assert_close(a.numpy(), b.numpy(), "float64", "gradient")
        assert_close(c.numpy(), b.numpy(), "float64", "gradient")


def _each(layer: Any, x: Any) -> Any:
    return tf.stack([layer(part) for part in tf.unstack(x)])


@pytest.mark.more  # the gradient of a Jacobian is two derivatives in a vectorized loop, too
@pytest.mark.parametrize("within", ["vectorized_map", "cond", "map_fn"])
def test_two_derivatives_through_loops_and_branches(within: str, rng: np.random.Generator) -> None:
    calls = 1 if within == "cond" else 2
    layer, x = ak.SimpleRNN(2, dtype="float64"), tf.constant(rng.normal(size=(calls, 3, 4, 2)))
    layer.build((None, None, 2))
    kernel, found = layer.cell.recurrent_kernel.value, []
    for run in (WITHIN[within], _each):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                total = tf.reduce_sum(tf.sin(run(layer, x)))
            first = inner.gradient(total, [x, kernel])
            total = sum(tf.reduce_sum(part**2) for part in first)
        found.append([*first, *outer.gradient(total, [x, kernel])])
    for a, b in zip(*found, strict=True):
        assert_close(a.numpy(), b.numpy(), "float64", "gradient")


@pytest.mark.parametrize(
    "loop", [pytest.param(tf.map_fn, marks=pytest.mark.more), tf.vectorized_map]
)
def test_a_loop_that_is_vectorized(loop: Any, rng: np.random.Generator) -> None:
    """Values are right; under a tape an error, because TensorFlow would lose the gradient."""
    layer, x = ak.SimpleRNN(2, dtype="float64"), tf.constant(rng.normal(size=(2, 2, 3, 4, 2)))
    right = tf.stack([_each(layer, part) for part in x])
    ours = tf.vectorized_map(lambda part: loop(layer, part), x)
    assert_close(ours.numpy(), right.numpy(), "float64", "forward")
    with tf.GradientTape() as tape:
        tape.watch(x)
        with pytest.raises(NotImplementedError, match="vectorized_map: given a loop or a branch"):
            tf.vectorized_map(lambda part: loop(layer, part), x)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.more
def test_the_gradient_of_a_jacobian(graph: bool, rng: np.random.Generator) -> None:
    """A penalty on a Jacobian has the same gradient in TensorFlow's vectorized loop as without."""
    layer, x = ak.GRU(3, dtype="float64"), tf.constant(rng.normal(size=(2, 4, 3)))
    layer.build(x.shape)

    def penalty(vectorized: bool) -> Any:
        with tf.GradientTape() as outer:
            with tf.GradientTape(persistent=True) as inner:
                inner.watch(x)
                y = layer(x)
            slope = inner.batch_jacobian(y, x, experimental_use_pfor=vectorized)
            total = tf.reduce_sum(slope**2)
        return outer.gradient(total, layer.trainable_weights)

    run = tf.function(penalty, autograph=False) if graph else penalty
    for a, b in zip(run(True), penalty(False), strict=True):
        assert_close(a.numpy(), b.numpy(), "float64", "gradient")


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_second_derivatives_draw_the_same_masks(graph: bool, rng: np.random.Generator) -> None:
    x, d = (tf.constant(rng.normal(size=(2, 4, 2))) for _ in range(2))
    layer = ak.RNN(Noisy, 3, dtype="float64", seed=5)

    def slope(x: Any) -> Any:
        """The gradient along d, of a call like the first."""
        for variable in layer.non_trainable_variables:
            variable.assign(first[variable.path])
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(layer(x, training=True) ** 2)
        return tf.reduce_sum(tape.gradient(y, x) * d)

    def second(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = slope(x)
        return tape.gradient(value, x)

    layer.build(x.shape)
    first = {variable.path: variable.numpy() for variable in layer.non_trainable_variables}
    assert first
    found = (tf.function(second, autograph=False) if graph else second)(x)
    right = (slope(x + 1e-5 * d) - slope(x - 1e-5 * d)) / 2e-5
    assert is_slope(float(tf.reduce_sum(found * d)), float(right), "layer")


def test_second_derivatives_of_a_cell_without_a_tangent(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run step by step, and not with random masks, which the kernels have drawn."""
    monkeypatch.setattr(fused, "along", lambda *_: None)
    for step in (cells.GRU, Noisy):
        layer, x = ak.RNN(step, 3, dtype="float64"), tf.constant(rng.normal(size=(2, 4, 2)))

        def twice(training: bool, layer: Any = layer, x: Any = x) -> Any:
            with tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    y = layer(x, training=training) ** 2
                first = inner.gradient(y, x)
            return outer.gradient(first, x)

        if step is Noisy:
            with pytest.raises(NotImplementedError, match="training=False"):
                twice(True)
        found = twice(False)
        with ak.step_by_step():
            assert_close(found.numpy(), twice(False).numpy(), "float64", "gradient")


def test_a_tape_that_is_read_twice(rng: np.random.Generator) -> None:
    layer, x = ak.GRU(4, return_sequences=True), data(rng, 3, 5, 2)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = layer(x, training=True)
    before = y.numpy()
    first, again = tape.gradient(y, x), tape.gradient(y, x)
    assert np.array_equal(first, again)
    assert np.array_equal(before, y.numpy())


def test_random_masks_are_the_same_in_both_directions(rng: np.random.Generator) -> None:
    """No gradient flows to the input from a unit that is held in every step."""
    layer, x = ak.RNN(Noisy, 64), data(rng, 2, 1, 3)

    @tf.function
    def run(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
        return y, tape.jacobian(y, x, experimental_use_pfor=False)

    y, slope = run(x)
    held = y.numpy() == 0.0
    assert 20 < held.sum() < 108
    flows = np.abs(slope.numpy()).sum((2, 3, 4)) > 0
    assert np.array_equal(held, ~flows)
    assert not np.array_equal(y, run(x)[0])
    assert not (layer(x).numpy() == 0.0).any()


# -- what graphs leave behind ----------------------------------------------------------------------
def left_behind() -> tuple[int, int, int]:
    """The numbers of live graphs, callbacks of graphs, and registered gradients."""
    from tensorflow.python.framework import ops
    from tensorflow.python.framework.func_graph import FuncGraph
    from tensorflow.python.ops import script_ops

    from anycell.keras.tensorflow.passes import WORK as work

    gc.collect()
    graphs = sum(issubclass(type(o), FuncGraph) for o in gc.get_objects())  # no proxy is asked
    return graphs, script_ops._py_funcs.size() + len(work), len(ops.gradient_registry._registry)


@pytest.mark.parametrize("order", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_no_graph_outlives_its_function(order: int, rng: np.random.Generator) -> None:
    layer, x = ak.LSTM(4), data(rng, 2, 3, 2)

    def use() -> None:
        function = tf.function(lambda x: layer(x, training=True), autograph=False)

        def derived(x: Any, order: int) -> Any:
            if order == 0:
                return function(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = derived(x, order - 1)
            return tape.gradient(y, x)

        derived(x, order)
        tf.function(derived, autograph=False)(x, order)

    use()
    before = left_behind()
    for _ in range(3 if order == 1 else 1):
        use()
    assert left_behind() == before


def fit_one_model(rng: np.random.Generator) -> None:
    keras.backend.clear_session()
    model = keras.Sequential([keras.Input((3, 2)), ak.PeepholeLSTM(4)])
    model.compile("sgd", "mse")
    model.fit(data(rng, 4, 3, 2), data(rng, 4, 4), verbose=0)


@pytest.mark.parametrize("count", [3, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_no_graph_outlives_its_model(
    count: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    # TensorFlow keeps the graph of a step of every fitted model, whatever its layers: the optimizer
    # sums gradients over replicas with tf.custom_gradient. This patch excludes these graphs.
    monkeypatch.setattr(tf.distribute.ReplicaContext, "all_reduce", lambda self, op, value: value)
    for _ in range(2):
        fit_one_model(rng)
    before = left_behind()
    tracemalloc.start()
    try:
        fit_one_model(rng)
        gc.collect()
        first = tracemalloc.get_traced_memory()[0]
        for _ in range(count):
            fit_one_model(rng)
        assert left_behind() == before
        grown = 1 << 18  # a table of the process, once; a graph takes megabytes
        assert tracemalloc.get_traced_memory()[0] - first < count * 16384 + grown
    finally:
        tracemalloc.stop()


# -- training --------------------------------------------------------------------------------------
@pytest.mark.more
def test_a_train_step_of_ones_own(rng: np.random.Generator) -> None:
    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent, self.dense = ak.PeepholeLSTM(8, cell_clip=3.0), keras.layers.Dense(1)

        def call(self, x: Any, training: bool = False) -> Any:
            return self.dense(self.recurrent(x, training=training))

        def train_step(self, given: Any) -> dict[str, Any]:
            x, y = given
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    x = data(rng, 32, 6, 2)
    y = tf.reduce_sum(x[..., :1], axis=1)
    model = Model()
    model.compile(keras.optimizers.Adam(0.02))
    before = np.mean((model.predict(x, verbose=0) - y) ** 2)
    model.fit(x, y, batch_size=16, epochs=10, verbose=0)
    assert np.mean((model.predict(x, verbose=0) - y) ** 2) < 0.7 * before


@pytest.mark.skipif(
    tuple(map(int, keras.__version__.split(".")[:2])) < (3, 8),
    reason="Keras's own layers do not either",
)
@pytest.mark.slow
def test_mirrored_strategy_with_two_replicas() -> None:
    """Two replicas with half a batch each train like one replica with the whole batch."""
    out = python(
        """
        import numpy as np, tensorflow as tf, keras, json
        import anycell.keras as ak
        from anycell import cells
        keras.config.set_dtype_policy("float64")  # float32 rounds halves of a batch otherwise
        cpus = tf.config.list_physical_devices("CPU")
        two = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(cpus[0], two)
        x = np.random.default_rng(0).normal(size=(16, 5, 3))
        y = x.sum((1, 2))[:, None]
        found = []
        for devices in (["CPU:0"], ["CPU:0", "CPU:1"]):
            keras.utils.set_random_seed(1)
            strategy = tf.distribute.MirroredStrategy(devices)
            assert strategy.num_replicas_in_sync == len(devices)
            with strategy.scope():
                model = keras.Sequential([
                    keras.Input((None, 3)), ak.LSTM(4, return_sequences=True),
                    ak.RNN(cells.LayerNormLSTM, 4), keras.layers.Dense(1),
                ])
                model.compile(keras.optimizers.SGD(0.1), "mse")
            model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
            found.append([w.tolist() for w in model.get_weights()])
        print(json.dumps(found))
        """
    )
    one, two = json.loads(out.splitlines()[-1])
    for a, b in zip(one, two, strict=True):
        assert_close(a, b, "float64", "gradient")


@pytest.mark.slow
def test_two_worker_processes() -> None:
    """``MultiWorkerMirroredStrategy`` keeps the replicas' weights equal."""
    import socket

    ports = []
    for _ in range(2):
        with socket.socket() as s:
            s.bind(("localhost", 0))
            ports.append(s.getsockname()[1])
    source = """
        import numpy as np, tensorflow as tf, json
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        import keras
        import anycell.keras as ak
        from anycell import cells
        with strategy.scope():
            keras.utils.set_random_seed(1)
            layer, dense = ak.RNN(cells.PeepholeLSTM, 4), keras.layers.Dense(1)
            layer.build((None, None, 3)); dense.build((None, 4))
        weights = [v.value for l in (layer, dense) for v in l.trainable_variables]
        rank = strategy.cluster_resolver.task_id
        x = np.random.default_rng(rank).normal(size=(8, 5, 3)).astype("float32")

        @tf.function
        def train():
            def step():
                with tf.GradientTape() as tape:
                    error = dense(layer(x, training=True)) - x.sum((1, 2))[:, None]
                    loss = tf.reduce_mean(error ** 2)
                grads = tape.gradient(loss, weights)
                group = tf.distribute.get_replica_context()
                grads = group.all_reduce(tf.distribute.ReduceOp.MEAN, grads)
                for w, g in zip(weights, grads):
                    w.assign_sub(0.1 * g)
                return loss
            return strategy.run(step)

        losses = [float(strategy.reduce("MEAN", train(), axis=None)) for _ in range(5)]
        total = float(sum(np.abs(w.numpy()).sum() for w in weights))
        print(json.dumps([losses, total]))
        """
    cluster = {"worker": [f"localhost:{port}" for port in ports]}
    tasks = [{"cluster": cluster, "task": {"type": "worker", "index": rank}} for rank in range(2)]
    said = at_once(*[partial(python, source, TF_CONFIG=json.dumps(task)) for task in tasks])
    first, second = (json.loads(out.splitlines()[-1]) for out in said)
    assert first == second
    assert first[0][-1] < first[0][0]


# -- models that leave -----------------------------------------------------------------------------
def assert_runs_elsewhere(path: str, call: str, x: Any, right: Any) -> None:
    """Asserts that a saved model has the same results in a process without anycell."""
    np.save(f"{path}.npy", x)
    found = python(f"""
        import json, numpy as np, sys, tensorflow as tf
        found = tf.saved_model.load({path!r})
        y = ({call})(tf.constant(np.load({path + ".npy"!r})))
        assert not any(name.startswith("anycell") for name in sys.modules)
        print(json.dumps(np.asarray(y).tolist()))
    """)
    assert_close(np.float32(json.loads(found.splitlines()[-1])), right, "float32", "forward")


def model_for_export() -> Any:
    given = keras.Input((None, 3))
    hidden = keras.layers.Bidirectional(ak.LSTM(4, return_sequences=True))(given)
    hidden = ak.RNN(cells.LayerNormGRU, 3, return_sequences=True)(hidden)
    return keras.Model(given, keras.layers.Dense(2)(ak.RNN(Leaky, 4)(hidden)))


def test_exported_models_call_no_python(tmp_path: Path, rng: np.random.Generator) -> None:
    given, x = keras.Input((None, 3)), data(rng, 2, 5, 3)
    model = keras.Model(given, ak.RNN(Leaky, 4)(given))
    right = model.predict(x, verbose=0)  # a graph with the kernels exists then
    model.export(str(tmp_path))
    found = tf.saved_model.load(str(tmp_path))
    assert not any(map(calls_python, found.signatures.values()))
    assert_close(found.serve(x).numpy(), right, "float32", "forward")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["export", "saved_model", "traced before", "compiled before"])
def test_exported_models_run_without_anycell(
    way: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    model, x = model_for_export(), data(rng, 2, 5, 3)
    right = model.predict(x, verbose=0)  # a graph with the kernels exists then
    path = str(tmp_path / "model")
    if way == "export":
        model.export(path)
    else:
        module = tf.Module()
        module.model = model
        module.call = tf.function(
            lambda x: model(x),
            input_signature=[tf.TensorSpec([None, None, 3])],
            jit_compile=way == "compiled before",
            autograph=False,
        )
        if way.endswith("before"):
            module.call(x)
        tf.saved_model.save(module, path)
    assert_runs_elsewhere(path, "found.serve" if way == "export" else "found.call", x, right)


@pytest.mark.slow
def test_a_signature_traced_before_it_is_saved(tmp_path: Path, rng: np.random.Generator) -> None:
    module, x, path = tf.Module(), data(rng, 2, 5, 3), str(tmp_path / "model")
    module.layer = layer = ak.PeepholeLSTM(4)
    right = layer(x).numpy()
    module.weights = [w.value for w in layer.weights]
    with ak.step_by_step():
        traced = tf.function(lambda x: layer(x), autograph=False).get_concrete_function(
            tf.TensorSpec([None, 5, 3], name="x")
        )
    assert not calls_python(traced)
    tf.saved_model.save(module, path, signatures=traced)
    call = "lambda x: found.signatures['serving_default'](x=x)['output_0']"
    assert_runs_elsewhere(path, call, x, right)


@pytest.mark.parametrize("way", ["signature", "attribute", "caller"])
def test_saving_what_was_traced_before_is_refused(
    way: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Saving fails with the remedy, rather than serving the saved model."""
    module, x = tf.Module(), tf.TensorSpec([None, 5, 3], name="x")
    module.layer = layer = ak.PeepholeLSTM(4)
    layer.build((None, 5, 3))
    module.weights = [w.value for w in layer.weights]
    traced = tf.function(lambda x: layer(x), autograph=False).get_concrete_function(x)
    assert calls_python(traced)
    signatures = traced if way == "signature" else None
    if way == "attribute":
        module.call = traced
    elif way == "caller":
        module.call = tf.function(lambda x: traced(x), input_signature=[x], autograph=False)
    with pytest.raises(AssertionError, match=r"trace it within anycell\.keras\.step_by_step\(\)"):
        tf.saved_model.save(module, str(tmp_path / "model"), signatures=signatures)


def test_a_frozen_graph_names_the_remedy(rng: np.random.Generator) -> None:
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    layer, x = ak.LSTM(4), data(rng, 2, 5, 3)
    layer.build(x.shape)
    trace = tf.function(lambda x: layer(x), autograph=False).get_concrete_function
    frozen = convert_variables_to_constants_v2(trace(tf.TensorSpec([2, 5, 3])))
    with pytest.raises(TypeError, match=r"anycell\.keras\.step_by_step"):
        frozen(x)
    with ak.step_by_step():
        traced = tf.function(lambda x: layer(x), autograph=False).get_concrete_function(
            tf.TensorSpec([2, 5, 3])
        )
    (found,) = convert_variables_to_constants_v2(traced)(x)
    assert_close(found.numpy(), layer(x).numpy(), "float32", "forward")


# -- which engine ----------------------------------------------------------------------------------
PLAIN = Layer(cells.LSTM, (("H", 8),), dtype="float32")


@pytest.mark.parametrize(
    ("facts", "name", "why"),
    [
        ({}, "cpu", "fused kernel"),
        ({"gpu": True}, "gpu", "fused kernel"),
        ({"gpu": True, "refusal": "no driver"}, "composite", "no driver"),
        ({"gpu": True, "cudnn": True, "drop_in": True}, "cudnn", "cuDNN"),
        ({"gpu": True, "drop_in": True, "refusal": "no driver"}, "keras", "no driver"),
        ({"gpu": True, "cudnn": True, "refusal": "an export"}, "cudnn", "cuDNN"),
        ({"gpu": True, "cudnn": True, "drop_in": True, "obstacle": "odd"}, "keras", "odd"),
        ({"gpu": True, "layer": PLAIN._replace(dtype="float64")}, "composite", "float64"),
        ({"refusal": "XLA"}, "composite", "XLA"),
        ({"layer": None, "obstacle": "replaced"}, "keras", "replaced"),
        ({"layer": PLAIN._replace(dtype="bfloat16")}, "cpu", "fused kernel"),
        ({"layer": PLAIN._replace(cell=cells.LSTMP)}, "composite", "size P"),
        ({"layer": Layer(cells.LSTMP, (("H", 8), ("P", 3)), dtype="float32")}, "cpu", "2"),
    ],
    ids=str,
)
def test_the_rule(facts: dict[str, Any], name: str, why: str) -> None:
    found = choose(Facts(**{"layer": PLAIN, **facts}))
    assert found.name == name
    assert why in found.reason


def test_backends_that_cannot_call_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backends.home() is fused
    monkeypatch.setattr(keras.backend, "backend", lambda: "openvino")
    home = backends.home.__wrapped__()
    assert not home.gpu_visible() and not home.on_gpu(tf.zeros(1)) and home.obstacle() is None
    found = choose(Facts(PLAIN, home.on_gpu(tf.zeros(1)), refusal=home.refusal(False)))
    assert found.name == "composite" and "backend 'openvino'" in found.reason
    with ak.step_by_step():
        assert "step_by_step" in home.refusal(False)
