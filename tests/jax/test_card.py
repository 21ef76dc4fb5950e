"""JAX on a card, without one: real XLA on the CPU calls the real handler, through a shim that puts
a stream into XLA's frames; the driver interprets the kernels.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from problems import assert_solved, draw
from processes import at_once
from shim import STREAM, Launched, jax_on_a_card, word
from tolerances import assert_close

import anycell
from anycell import cells
from anycell.engines.gpu import launch, refusals
from anycell.engines.gpu.interpreter import Interpreter, Started

pytest.importorskip("jax")

import jax
import jax.numpy as jnp

import anycell.jax as aj
from anycell.jax import batching, device, fused
from anycell.layer import card, recipe
from tests.conformance import on_jax

pytestmark = pytest.mark.sample(every=3)


DOUBT = device.doubt


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launched]:
    """Makes JAX run layers for a card on the CPU; lists the launches."""
    with jax_on_a_card(monkeypatch) as seen:
        yield seen


HAS = ("state", "d state", "mask", "resets", "reset_state", "bidirectional")
CELLS = [
    (cells.LSTM, 1, HAS),
    (cells.GRU, 1, ()),
    (cells.PeepholeLSTM, 2, ("mask", "reverse")),
    pytest.param(cells.LSTM, 2, HAS, marks=pytest.mark.slow),
    pytest.param(cells.GRU, 2, HAS, marks=pytest.mark.slow),
    pytest.param(cells.GRU(reset_after=False), 1, HAS, marks=pytest.mark.slow),
    pytest.param(cells.LSTMP, 1, HAS, marks=pytest.mark.slow),
    pytest.param(cells.LSTMP, 2, HAS, marks=pytest.mark.slow),
    pytest.param(cells.sLSTM, 1, (), marks=pytest.mark.slow),
    pytest.param(cells.EALSTM, 1, HAS, marks=pytest.mark.slow),
    pytest.param(cells.LayerNormLSTM, 1, HAS, marks=pytest.mark.slow),
    pytest.param(cells.LayerNormLSTM, 2, HAS, marks=pytest.mark.slow),
    pytest.param(cells.ZoneoutLSTM, 1, ("bidirectional", "training"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("cell", "tier", "has"), CELLS)
def test_results_and_gradients(
    cell: Any, tier: int, has: Any, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of masked, reset and reversed layers; launches go to XLA's stream."""
    monkeypatch.setattr(device.JaxDevice, "tier", tier)
    problem = draw(cell, (3, 3, 4, 9), has, "float32")
    assert_solved(on_jax.solve(on_jax.layer_of, "gpu", problem), problem)
    assert launched and {one.stream for one in launched} == {STREAM}
    assert (tier == 2) is any(one.cooperative for one in launched)


# -- what goes wrong -------------------------------------------------------------------------------
X, LAYER = jnp.ones((3, 2, 4)), aj.RNN(cells.LSTM, 4, 9)
PARAMS = LAYER.init(jax.random.key(0))


def call() -> Any:
    return jax.block_until_ready(LAYER(PARAMS, X, engine="gpu")[0])


@pytest.mark.parametrize(("tier", "name"), [(1, "forward_resident"), (2, "forward_cooperative")])
def test_a_refused_launch_is_an_error(
    tier: int, name: str, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the driver's error and the cell; the next call runs."""
    monkeypatch.setattr(device.JaxDevice, "tier", tier)
    launched.fails = {name: 720}
    with pytest.raises(Exception, match="720 is the error of the CUDA driver at a launch of LSTM"):
        call()
    launched.fails = {}
    near(call(), jax.jit(partial(LAYER, engine="reference"))(PARAMS, X)[0])


@pytest.mark.slow
def test_checkpoints_are_not_made(launched: Launched) -> None:
    """Gradients of weights need what all steps have kept."""
    gradients = []
    for checkpoint in (None, 2):
        layer = aj.RNN(cells.LSTM, 4, 9, checkpoint=checkpoint)
        loss = jax.jit(jax.grad(lambda p, layer=layer: layer(p, X, engine="gpu")[0].sum()))
        gradients.append(loss(PARAMS))
    assert launched
    jax.tree.map(near, *gradients)


def test_programs_that_gave_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call says so, once."""
    monkeypatch.setattr(device.JaxDevice, "tier", 2)
    right = call()
    device.JaxDevice.of("float32").trouble.value = 1
    with pytest.raises(Exception, match=r"gave up.*JaxDevice.tier = 3"):
        call()
    assert np.array_equal(call(), right)


def test_xla_has_no_stream_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler by itself passes XLA's own error on."""
    monkeypatch.setattr(card, "PLATFORM", "cpu")
    monkeypatch.setattr(device, "_target", REAL)
    with pytest.raises(Exception, match="GPU context is not available"):
        call()


REAL = device._target.__wrapped__


# -- which engine ----------------------------------------------------------------------------------
def test_the_engine_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """If JAX's default device is a card, layers say what runs them, and why not these kernels."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert LAYER.engine == ("gpu", "fused kernel, 1 matmul a step")
    large = aj.RNN(cells.GRU(reset_after=False), 4, 4000).engine
    assert large.name == "reference" and "one step per launch" in large.reason
    monkeypatch.setattr(launch, "missing", lambda: "no driver")
    assert LAYER.engine == ("reference", "no driver")
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert LAYER.engine.name == "reference"


def test_calls_that_go_step_by_step(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states of all steps, exported programs, and batches that take tier 3."""
    reference = LAYER(PARAMS, X, engine="reference")[0]
    near(LAYER(PARAMS, X, engine="gpu", return_states=True)[0], reference)
    exported = jax.export.export(jax.jit(partial(LAYER, engine="gpu")))(PARAMS, X)
    near(exported.call(PARAMS, X)[0], reference)
    assert not launched
    x, wide = jnp.ones((2, 40_000, 4)), aj.RNN(cells.LSTM, 4, 200)  # too many rows for tier 2
    params = wide.init(jax.random.key(0))
    shapes = jax.eval_shape(partial(wide, engine="gpu"), params, x)
    assert shapes[0].shape == (2, 40_000, 200) and not launched
    text = jax.jit(partial(wide, engine="gpu")).lower(params, x).as_text()
    assert "shim" not in text and "while" in text


def test_a_refused_kernel_is_another_choice(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a compilation, the next choice runs; if there is none but tier 3, step by step."""
    loaded, reference = launch.loaded, LAYER(PARAMS, X, engine="reference")[0]
    refused: list[str] = []

    def load(printed: Any, *given: Any) -> Any:
        if printed.alone and (forever or not refused):
            refused.append(printed.name)
            raise launch.Refused(printed, "the test says so")
        return loaded(printed, *given)

    monkeypatch.setattr(launch, "loaded", load)
    for forever in (False, True):
        refusals.forget()
        recipe.known.clear()
        fused._drafted.cache_clear()
        jax.clear_caches()
        refused.clear()
        launched.clear()
        near(call(), reference)
        assert bool(launched) is not forever and refused
    refusals.forget()
    recipe.known.clear()


@pytest.mark.slow
def test_a_doubtful_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process first compares a small layer of each tier with the layer step by step."""
    doubt = DOUBT.__wrapped__
    assert doubt(1) is None and doubt(2) is None
    monkeypatch.setattr(device.JaxDevice, "product", lambda _, a, b: 2 * jnp.matmul(a, b))
    assert "computed a small layer wrongly here, by" in doubt(1)
    monkeypatch.setattr(Interpreter, "launch", lambda *_: 700)
    assert "failed at a small layer here" in doubt(1) and "700 is the error" in doubt(1)
    monkeypatch.setattr(device, "doubt", lambda tier: f"doubts of tier {tier}")
    with pytest.raises(ValueError, match=r"engine: given 'gpu'; .*doubts of tier 1"):
        call()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert LAYER.engine == ("reference", "doubts of tier 1")


# -- transformations -------------------------------------------------------------------------------
@pytest.mark.slow
def test_transformations(launched: Launched) -> None:
    """``vmap`` of rows is one call; forward mode and second derivatives go step by step."""

    def total(x: Any, engine: str = "gpu") -> Any:
        return (LAYER(PARAMS, x, engine=engine)[0] ** 2).sum()

    several = jnp.stack([X, 2 * X, -X])
    found = jax.block_until_ready(jax.vmap(jax.grad(total))(several))
    count = len(launched)
    right = jax.vmap(jax.grad(partial(total, engine="reference")))(several)
    near(found, right)
    launched.clear()
    jax.block_until_ready(jax.grad(total)(X))
    assert len(launched) == count  # as many as for one
    for derive in (jax.hessian, jax.jacfwd):
        small = jnp.ones((2, 1, 4))
        near(derive(total)(small), derive(partial(total, engine="reference"))(small))


@anycell.cell(gates="i f g o", state="h c", static="e")
def Blended(x: Any, r: Any, s: Any, static: Any) -> Any:
    """An LSTM whose state is blended by a static input, with random masks."""
    h, c = cells.LSTM.function(x, r, s)
    return anycell.keep(0.5) * h + anycell.sigmoid(static) * s.h, c


MEMBERS = 3
ALONE = {"params": 0, "x": None, "static": None, "resets": None, "mask": None, "key": None}
EACH = dict.fromkeys(ALONE, 0)
APART = [
    (1, cells.LSTM, EACH, {}),
    (2, cells.GRU, EACH | {"x": None}, {}),
    (1, cells.LSTM, ALONE | {"params": None, "resets": 0}, {}),  # gradients per element
    pytest.param(1, Blended, EACH, {}, marks=pytest.mark.slow),
    pytest.param(2, Blended, ALONE | {"static": 0}, {}, marks=pytest.mark.slow),
    (1, Blended, EACH, {"bidirectional": True}),
    pytest.param(2, cells.LSTM, ALONE, {"bidirectional": True}, marks=pytest.mark.slow),
    pytest.param(1, cells.LayerNormLSTM, ALONE, {"num_layers": 2}, marks=pytest.mark.slow),
    pytest.param(2, cells.MultiplicativeLSTM, EACH, {}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("tier", "cell", "axes", "has"), APART)
@pytest.mark.parametrize("outside", ["grad", "vmap"])
def test_elements_with_weights_of_their_own(
    tier: int, cell: Any, axes: Any, has: Any, outside: str, launched: Launched,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """They have the bits of calls one after the other, in as many launches as one call."""
    monkeypatch.setattr(device.JaxDevice, "tier", tier)
    layer, rng = aj.RNN(cell, 4, 9, **has), np.random.default_rng(0)
    keys = jax.random.split(jax.random.key(0), MEMBERS)
    arrays: dict[str, Any] = {
        "params": jax.vmap(layer.init)(keys),
        "x": jnp.asarray(rng.normal(size=(MEMBERS, 3, 2, 4)), jnp.float32),
        "static": jnp.asarray(rng.normal(size=(MEMBERS, 2, 9)), jnp.float32),
        "resets": jnp.asarray(rng.random((MEMBERS, 3, 2)) < 0.4),
        "mask": jnp.asarray(rng.random((MEMBERS, 3, 2)) < 0.7),
        "key": keys,
    }
    first = {n: jax.tree.map(lambda a: a[0], array) for n, array in arrays.items()}
    arrays |= {name: first[name] for name, axis in axes.items() if axis is None}

    def loss(params: Any, x: Any, others: Any) -> Any:
        how = {name: others[name] for name in ("resets", "mask")}
        if cell is Blended:
            how |= {"static": others["static"], "training": True, "seed": others["key"]}
        output, states = layer(params, x, engine="gpu", **how)
        return (output**2).sum() + sum(map(jnp.sum, states))

    def run(over: Any) -> Any:
        """All losses and gradients, of which elements ``over`` one function or another."""
        others = {name: arrays[name] for name in axes if name not in ("params", "x")}
        given = arrays["params"], arrays["x"], others
        places = axes["params"], axes["x"], {name: axes[name] for name in others}
        if outside == "vmap":
            return jax.jit(over(jax.value_and_grad(loss, (0, 1)), places))(*given)
        total = lambda *some: over(loss, places)(*some).sum()  # noqa: E731
        return jax.jit(jax.value_and_grad(total, (0, 1)))(*given)

    def in_turns(function: Any, places: Any) -> Any:
        def every(*given: Any) -> Any:
            def element(n: int) -> Any:
                def pick(axis: Any, part: Any) -> Any:
                    return part if axis is None else jax.tree.map(lambda a: a[n], part)

                whole = {name: pick(axes[name], a) for name, a in given[2].items()}
                return function(pick(places[0], given[0]), pick(places[1], given[1]), whole)

            return jax.tree.map(lambda *a: jnp.stack(a), *map(element, range(MEMBERS)))

        return every

    found = jax.block_until_ready(run(jax.vmap))
    together = len(launched)
    launched.clear()
    right = jax.block_until_ready(run(in_turns))
    jax.tree.map(near, found, right)
    assert together * MEMBERS == len(launched)


@pytest.mark.parametrize("most", [6, 5])
def test_elements_of_two_axes(
    most: int, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All run in the same launches; if these are too many, those of the outer axis in turns."""
    monkeypatch.setattr(batching, "MOST", most)
    keys = jax.random.split(jax.random.key(0), 6).reshape(2, 3)
    params = jax.vmap(jax.vmap(LAYER.init))(keys)

    def total(params: Any, engine: str = "gpu") -> Any:
        return (LAYER(params, X, engine=engine)[0] ** 2).sum()

    def run(**how: str) -> Any:
        return jax.vmap(jax.vmap(jax.grad(partial(total, **how))))(params)

    near_all = partial(jax.tree.map, near)
    near_all(run(), run(engine="reference"))
    assert {one.grid[2] for one in launched} == {6 if most == 6 else 3}
    if most < 6:
        return
    tangents = jax.tree.map(jnp.ones_like, params)
    moved = [
        jax.jvp(jax.vmap(jax.vmap(partial(total, engine=engine))), (params,), (tangents,))
        for engine in ("gpu", "reference")
    ]
    near_all(*moved)
    none = jax.tree.map(lambda a: a[0, :0], params)
    assert jax.vmap(total)(none).shape == (0,)


BOTH = aj.RNN(cells.GRU, 4, 9, bidirectional=True)


@pytest.mark.more
@pytest.mark.parametrize("outside", ["grad", pytest.param("vmap", marks=pytest.mark.slow)])
def test_two_axes_that_share_no_array(outside: str, launched: Launched) -> None:
    """Weights have one axis, inputs and resets the other: of a layer of two directions."""
    params = jax.vmap(BOTH.init)(jax.random.split(jax.random.key(0), 2))
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(3, *X.shape)), jnp.float32)
    resets = jnp.asarray(rng.random((3, *X.shape[:2])) < 0.4)

    def run(engine: str) -> Any:
        def total(params: Any, x: Any, resets: Any) -> Any:
            return (BOTH(params, x, resets=resets, engine=engine)[0] ** 2).sum()

        def every(f: Any) -> Any:
            return jax.vmap(jax.vmap(f, (0, None, None)), (None, 0, 0))

        if outside == "vmap":
            return jax.jit(every(jax.grad(total, (0, 1))))(params, x, resets)
        return jax.jit(jax.grad(lambda *a: every(total)(*a).sum(), (0, 1)))(params, x, resets)

    jax.tree.map(near, run("gpu"), run("reference"))
    assert {one.grid[2] for one in launched} <= {6, 12}


def test_elements_that_differ_in_the_weights_of_one_direction(launched: Launched) -> None:
    """What differs from direction to direction then differs from element to element, too: so each
    has launches of its own.
    """
    params = BOTH.init(jax.random.key(0))
    several = params["weight_hh_l0"] * jnp.arange(1.0, 4)[:, None, None]

    def output(weight: Any, engine: str) -> Any:
        return BOTH(params | {"weight_hh_l0": weight}, X, engine=engine)[0]

    near(*(jax.vmap(partial(output, engine=e))(several) for e in ("gpu", "reference")))
    assert {one.grid[2] for one in launched} >= {2, 6}


def test_elements_that_do_not_fit_in_a_launch(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where not all programs can run at once, each element has a launch of its own."""
    monkeypatch.setattr(device.JaxDevice, "tier", 2)
    loaded = launch.loaded
    monkeypatch.setattr(launch, "loaded", lambda *given: loaded(*given)._replace(together=2))
    params = jax.vmap(LAYER.init)(jax.random.split(jax.random.key(0), 3))
    near(*(jax.vmap(partial(LAYER, x=X, engine=e))(params)[0] for e in ("gpu", "reference")))
    assert [one.grid[2] for one in launched if one.cooperative] == [1, 1, 1]
    assert {one.grid[2] for one in launched if not one.cooperative} == {3}


def test_threads_call_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled program, whose handler keeps nothing between calls; no kernel runs."""
    seen: list[tuple[int, ...]] = []

    def started(_: Interpreter, one: Started) -> int:
        seen.append(tuple(word(one.parameters[n]).value for n in range(2)))
        return 0

    monkeypatch.setattr(Interpreter, "launch", started)
    run = jax.jit(partial(LAYER, engine="gpu")).lower(PARAMS, X).compile()
    at_once(*[lambda: [jax.block_until_ready(run(PARAMS, X)) for _ in range(50)]] * 3)
    assert len(seen) % 150 == 0 and seen


def test_a_program_reads_what_it_needs(launched: Launched) -> None:
    """No array that the backward pass does not read is kept for it or passed to it."""
    text = jax.jit(jax.grad(lambda p: LAYER(p, X, engine="gpu")[0].sum())).lower(PARAMS).as_text()
    calls = [line for line in text.splitlines() if "stablehlo.custom_call @shim" in line]
    assert len(calls) == 2 and not launched
    _, backward = (line.partition(" : (")[2].partition(") -> ")[0] for line in calls)
    assert "tensor<4x9" not in backward  # no part of the input's projection
    assert backward.count("tensor<3x2x36xf32>") == 1  # the saved gates


def test_both_directions_are_one_call(launched: Launched) -> None:
    layer = aj.RNN(cells.LSTM, 4, 9, bidirectional=True)
    params = layer.init(jax.random.key(0))

    def total(params: Any) -> Any:
        return layer(params, X, engine="gpu")[0].sum()

    text = jax.jit(jax.grad(total)).lower(params).as_text()
    assert text.count("stablehlo.custom_call @shim") == 2 and not launched


def near(result: Any, right: Any) -> None:
    assert_close(np.asarray(result), np.asarray(right), "float32", "gradient", axes=())
