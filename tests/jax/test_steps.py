"""JAX: a layer step by step, on prepared weights and on parameters."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tolerances import assert_close

from anycell import cell, cells, sigmoid, tanh
from anycell.engines import cpu
from anycell.engines.cpu import isa
from anycell.engines.gpu import launch

jax = pytest.importorskip("jax")
jnp = jax.numpy

import anycell.jax as aj  # noqa: E402
from anycell.jax import streaming  # noqa: E402

T, B, I, H = 7, 5, 3, 6
KEY = jax.random.key(0)
Call = Callable[..., Any]


@pytest.fixture
def x(rng: np.random.Generator) -> Any:
    return jnp.asarray(rng.standard_normal((T, B, I)), jnp.float32)


@pytest.fixture
def resets(rng: np.random.Generator) -> Any:
    return jnp.asarray(rng.random((T, B)) < 0.3)


@cell(gates="f g e:P", state="h p:P")
def Apart(x: Any, r: Any, s: Any) -> Any:
    """Its gates have sizes of their own."""
    return sigmoid(x.f + r.f) * s.h + tanh(x.g + r.g), 0.5 * (tanh(x.e) + s.p)


def near(one: Any, other: Any) -> None:
    """Asserts that all arrays of two trees are equal but for their last bits."""
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert_close(np.asarray(a), np.asarray(b), "float32", "forward")


def stepped(layer: aj.RNN, params: Any, state: Any, *series: Any, **further: Any) -> Any:
    """The outputs of all steps in a ``lax.scan``, and the final state."""

    def step(state: Any, now: Any) -> Any:
        x, *resets = now
        named = {"resets": resets[0]} if resets else {}
        return layer.step(params, x, state, **named, **further)[::-1]

    state, output = jax.jit(lambda *given: jax.lax.scan(step, *given))(state, series)
    return output, state


# -- states ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("cell", "sizes"),
    [(cells.LSTM, {}), (cells.GRU, {}), (cells.LSTMP, {"P": 4}), (cells.sLSTM, {})],
    ids=["LSTM", "GRU", "LSTMP", "sLSTM"],
)
@pytest.mark.sample(1)
def test_the_initial_state(cell: Any, sizes: Any, dtype: str, x: Any) -> None:
    """It has the form of a call's, and is what a call without one starts from."""
    layer = aj.RNN(cell, I, H, 2, bidirectional=True, **sizes)
    params, x, state = layer.init(KEY, dtype), x.astype(dtype), layer.initial_state(B, dtype)
    expected = layer(params, x)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), state) == jax.tree.map(
        lambda a: (a.shape, a.dtype), expected[1]
    )
    for one, other in zip(
        jax.tree.leaves(layer(params, x, state)), jax.tree.leaves(expected), strict=True
    ):
        assert (one == other).all()
    alone = layer.initial_state(None, dtype)
    near(layer(params, x[:, 0], alone)[1], jax.tree.map(lambda a: a[:, 0], layer(params, x)[1]))


# -- steps -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("cell", "sizes"),
    [
        (cells.LSTM, {}), (cells.GRU, {}), (cells.PeepholeLSTM, {}), (cells.LayerNormLSTM, {}),
        (Apart, {"P": 4}), (cells.LSTMP, {"P": 4}), (cells.sLSTM, {}),
    ],
    ids=lambda c: c.name if hasattr(c, "name") else "",
)  # fmt: skip
@pytest.mark.sample(every=4)
def test_steps_are_the_call(cell: Any, sizes: Any, x: Any, resets: Any) -> None:
    """On prepared weights and on parameters, with resets; of two layers."""
    layer = aj.RNN(cell, I, H, 2, **sizes)
    params, begin = layer.init(KEY), layer.initial_state(B)
    restored = jax.tree.map(lambda a: a + 0.5, begin)
    expected = layer(params, x, begin, resets=resets, reset_state=restored)
    prepared = layer.prepare(params)
    near(stepped(layer, prepared, begin, x, resets, reset_state=restored), expected)
    near(stepped(layer, params, begin, x, resets, reset_state=restored), expected)
    near(layer.step(prepared, x[0]), layer.step(params, x[0]))


def test_forms_of_a_step(x: Any, resets: Any) -> None:
    """Without a batch, or with the batch first, where a step has no time axis all the same."""
    layer, first = aj.GRU(I, H), aj.GRU(I, H, batch_first=True)
    params = layer.init(KEY)
    for weights in (params, layer.prepare(params)):
        whole = layer.step(weights, x[0], resets=resets[0])
        row = layer.step(weights, x[0, 1], layer.initial_state(None), resets=resets[0, 1])
        near(row, jax.tree.map(lambda a, i: a[i], whole, (1, (slice(None), 1))))
    for weights in (params, first.prepare(params)):
        near(first.step(weights, x[0], resets=resets[0]), whole)


def test_a_static_input(x: Any, rng: np.random.Generator) -> None:
    kind = next(c for c in map(cells.__dict__.get, cells.__all__) if c.static is not None)
    layer = aj.RNN(kind, I, H)
    params, static = layer.init(KEY), jnp.asarray(rng.random((B, H)), jnp.float32)
    expected = layer(params, x, static=static)
    near(stepped(layer, layer.prepare(params), layer.initial_state(B), x, static=static), expected)


def test_the_kernel_reads_packed_weights(x: Any) -> None:
    """In float32 on the CPU; elsewhere steps read the parameters."""
    layer = aj.LSTM(I, H)
    params = layer.init(KEY)
    nothing = jax.tree.map(jnp.zeros_like, params)
    prepared = replace(layer.prepare(params), params=nothing)
    near(layer.step(prepared, x[0]), layer.step(params, x[0]))
    narrow = layer.init(KEY, "bfloat16")
    unpacked = layer.prepare(narrow)
    assert not unpacked.packed
    output, _ = layer.step(unpacked, x[0].astype("bfloat16"))
    assert (output == layer.step(narrow, x[0].astype("bfloat16"))[0]).all()
    run = jax.jit(lambda weights: layer.step(weights, x[0])).trace(layer.prepare(params))
    assert "custom_call @anycell" in run.lower().as_text()
    assert "custom_call @anycell" not in run.lower(lowering_platforms=("cuda",)).as_text()
    pack = jax.jit(lambda params: layer.prepare(params).packed).trace(params)
    assert "custom_call @anycell" not in pack.lower(lowering_platforms=("cuda",)).as_text()


def test_where_no_kernel_packs(x: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = aj.LSTM(I, H)
    params = layer.init(KEY)
    prepared = layer.prepare(params)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(launch, "missing", lambda: "there is no driver")
    assert not layer.prepare(params).packed
    near(layer.step(prepared, x[0]), layer.step(params, x[0]))


def test_any_number_of_threads_has_the_same_bits(rng: np.random.Generator) -> None:
    """Of a step that is worth several, and of one that is not."""
    layer = aj.LSTM(33, 64)
    params = layer.init(KEY)
    for rows in (2, 64):
        x, made = jnp.asarray(rng.standard_normal((rows, 33)), jnp.float32), []
        for count in (1, 3):
            cpu.threads.set_threads(count)
            try:
                made.append(layer.step(layer.prepare(params), x)[0])
            finally:
                cpu.threads.set_threads(None)
        assert (made[0] == made[1]).all()


# -- transformations -------------------------------------------------------------------------------
def test_gradients(x: Any) -> None:
    """By parameters from a step with these; by input and state from prepared weights too."""
    layer = aj.LSTM(I, H)
    params, state = layer.init(KEY), layer.initial_state(B)
    prepared = layer.prepare(params)

    def loss(weights: Any, x: Any, state: Any) -> Any:
        output, state = layer.step(weights, x, state)
        return (output**2).sum() + state[1].sum()

    expected = jax.grad(loss, (0, 1, 2))(params, x[0], state)
    near(jax.grad(loss, (1, 2))(prepared, x[0], state), expected[1:])
    whole = jax.grad(lambda p: (layer(p, x[:1])[0] ** 2).sum() + layer(p, x[:1])[1][1].sum())
    for name, gradient in whole(params).items():
        assert_close(np.asarray(expected[0][name]), np.asarray(gradient), "float32", "gradient")
    for of in (
        lambda p: loss(layer.prepare(p), x[0], state),
        lambda p: loss(replace(prepared, params=p), x[0], state),
    ):
        with pytest.raises(TypeError, match=r"given prepared weights.*call the layer on the seq"):
            jax.grad(of)(params)


def test_vmap(x: Any) -> None:
    """Over seeds, whose weights differ; and over rows, with the same weights."""
    layer = aj.LSTM(I, H)
    several = jax.vmap(layer.init)(jax.random.split(KEY, 3))
    begin = layer.initial_state(B)
    output, _ = jax.vmap(lambda p: stepped(layer, layer.prepare(p), begin, x))(several)
    for k in range(3):
        params = jax.tree.map(lambda a: a[k], several)  # noqa: B023
        near(output[k], layer(params, x)[0])
    prepared, states = layer.prepare(params), jax.tree.map(lambda a: jnp.stack([a] * T), begin)
    rows, _ = jax.vmap(lambda x, s: layer.step(prepared, x, s))(x, states)
    near(rows[3], layer.step(params, x[3], begin)[0])


# -- refusals --------------------------------------------------------------------------------------
REFUSED: dict[str, tuple[Call, str]] = {
    "a sequence": (lambda l, w, x: l.step(w, x), r"x: given float32 \[7, 5, 3\]; .*one step"),
    "a wide x": (lambda l, w, x: l.step(w, x[0, :, :2]), r"expected float32 \[5, 3\], one step"),
    "a state": (lambda l, w, x: l.step(w, x[0], x), "state: given float32"),
    "resets of all steps": (
        lambda l, w, x: l.step(w, x[0], resets=x[..., 0] > 0), "resets: .*a flag per row",
    ),
    "no rows": (lambda l, w, x: l.initial_state(-1), "batch: given -1"),
    "integers": (lambda l, w, x: l.initial_state(1, int), "dtype: given .*floating point"),
}  # fmt: skip


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("case", REFUSED)
def test_refusals(x: Any, case: str, packed: bool) -> None:
    layer, (call, says) = aj.LSTM(I, H), REFUSED[case]
    params = layer.init(KEY)
    with pytest.raises((TypeError, ValueError), match=says):
        call(layer, layer.prepare(params) if packed else params, x)


def test_whose_weights_are_prepared(x: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, both = aj.LSTM(I, H), aj.LSTM(I, H, bidirectional=True)
    params = layer.init(KEY)
    prepared = layer.prepare(params)
    with pytest.raises(ValueError, match=r"weights prepared by .*; expected LSTM"):
        aj.LSTM(I, H, bias=False).step(prepared, x[0])
    for refused in (lambda: both.prepare(params), lambda: both.step(params, x[0])):
        with pytest.raises(ValueError, match="bidirectional=True"):
            refused()
    again = pickle.loads(pickle.dumps(prepared))
    assert (again.packed[0] == prepared.packed[0]).all()
    other = replace(isa.current(), name="other")
    monkeypatch.setattr(streaming.cpu.isa, "current", lambda: other)
    with pytest.raises(ValueError, match=r"packed for .* 'other', which is in use. Call prepare"):
        layer.step(prepared, x[0])


# -- modules ---------------------------------------------------------------------------------------
def test_modules(x: Any, resets: Any) -> None:
    pytest.importorskip("flax")
    pytest.importorskip("equinox")
    from flax import nnx

    from anycell.jax import equinox
    from anycell.jax.nnx import RNN

    for model in (RNN(cells.LSTM, I, H, rngs=nnx.Rngs(0)), equinox.RNN(cells.LSTM, I, H, key=KEY)):
        state, prepared = model.initial_state(B), model.prepare()
        expected = model(x[:1], state, resets=resets[:1])
        for one in (
            model.step(x[0], state, resets=resets[0]),
            model.step(x[0], state, prepared=prepared, resets=resets[0]),
        ):
            near(one, (expected[0][0], expected[1]))
