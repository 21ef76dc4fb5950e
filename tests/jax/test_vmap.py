"""JAX: ``vmap`` and ``grad`` at the edges: no values kept, no elements, no resets; sweeps."""

from typing import Any

import numpy as np
import pytest

import anycell
from anycell import cells, keep

jax = pytest.importorskip("jax")
jnp = jax.numpy

from jax_layers import Arrays, B, H, I, T, drawn, same  # noqa: E402

import anycell.jax as aj  # noqa: E402

N = 3  # elements of a mapped axis


@pytest.fixture
def layer() -> aj.RNN:
    return aj.LSTM(I, H, num_layers=2, bidirectional=True)


@pytest.fixture
def params(layer: aj.RNN) -> Arrays:
    return layer.init(jax.random.key(0))


@pytest.fixture
def x(rng: np.random.Generator) -> Any:
    return drawn(rng, T, B, I)


@anycell.cell(gates="g", state="h")
def Plain(x: Any, r: Any, s: Any) -> Any:
    return anycell.tanh(x.g + r.g)


@pytest.mark.parametrize("cell", [Plain, cells.IndRNN(nonlinearity="tanh")])
@pytest.mark.parametrize("wanted", ["x", "parameters"])
@pytest.mark.sample(every=3)
def test_gradients_per_element_where_no_value_is_kept(
    rng: np.random.Generator, cell: anycell.Cell, wanted: str
) -> None:
    """The backward pass of such a cell reads nothing but the output."""
    layer = aj.RNN(cell, I, H)
    params, several = layer.init(jax.random.key(1)), drawn(rng, N, T, B, I)

    def loss(x: Any, params: Arrays) -> Any:
        return (layer(params, x, lengths=[7, 3, 0, 5, 1])[0] ** 2).sum()

    of_one = jax.grad(loss, 0 if wanted == "x" else 1)
    found = jax.vmap(of_one, (0, None))(several, params)
    for n in range(N):
        same(jax.tree.map(lambda a, n=n: a[n], found), of_one(several[n], params))


@pytest.mark.parametrize("mapped", ["x", "parameters"])
def test_vmap_of_no_elements(layer: aj.RNN, params: Arrays, x: Any, mapped: str) -> None:
    """As rows of the batch, and one by one."""
    none_x, none_params = jax.tree.map(lambda a: jnp.zeros((0, *a.shape)), (x, params))
    run = jax.value_and_grad(lambda p, x: layer(p, x)[0].sum(), (0, 1))
    if mapped == "x":
        found = jax.vmap(run, (None, 0))(params, none_x)
    else:
        found = jax.vmap(run, (0, None))(none_params, x)
    right = jnp.zeros(0), (none_params, none_x)
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, right)


@pytest.mark.parametrize("how", ["alone", "jit", "vmap", "recurrence"])
def test_without_resets_what_they_restore_has_a_gradient_of_zero(
    layer: aj.RNN, params: Arrays, x: Any, how: str
) -> None:
    def loss(restored: Any) -> Any:
        if how == "recurrence":
            weights = {n.removesuffix("_l0"): params[n] for n in params if n.endswith("_l0")}
            return aj.recurrence(cells.LSTM, x, weights, reset_state=restored)[0].sum()
        return layer(params, x, reset_state=restored)[0].sum()

    shapes = {"recurrence": (B, H), "vmap": (N, 4, B, H)}
    restored = (jnp.ones(shapes.get(how, (4, B, H))),) * 2
    d = {"jit": jax.jit, "vmap": jax.vmap}.get(how, lambda f: f)(jax.grad(loss))(restored)
    same(d, jax.tree.map(jnp.zeros_like, restored))


@anycell.cell(gates="i f g o", state="h c", params="zoneout=0.5")
def Swept(x: Any, r: Any, s: Any, p: Any) -> Any:
    """A cell whose rate is a parameter, as the start page has it."""
    h, c = cells.LSTM.function(x, r, s)
    kept = keep(1 - p.zoneout)
    return kept * h + (1 - kept) * s.h, c


def test_a_sweep_over_rates(x: Any) -> None:
    layer = aj.RNN(Swept, I, H)
    params, keys = layer.init(jax.random.key(0)), jax.random.split(jax.random.key(1), N)

    def run(rate: Any, key: Any) -> Any:
        rates = {"zoneout_l0": jnp.full(H, rate)}
        return layer({**params, **rates}, x, training=True, seed=key)[0]

    rates = jnp.asarray([0.0, 0.5, 1.0])
    found = jax.jit(jax.vmap(run))(rates, keys)
    del params["zoneout_l0"]
    same(found[0], aj.LSTM(I, H)(params, x)[0])
    same(found[2], jnp.zeros((T, B, H)))
    params["zoneout_l0"] = jnp.zeros(H)
    same(found[1], run(0.5, keys[1]))
    assert (found[1] != found[0]).any() and (found[1] == 0).any()
    with pytest.raises(anycell.CellError, match="zoneout_c is a BatchTracer"):
        jax.vmap(lambda rate: cells.ZoneoutLSTM(zoneout_c=rate))(rates)
