"""JAX on a card: XLA's own call of the handler, and launches by CUDA's own driver."""

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # other processes share the card

import numpy as np
import pytest
from problems import assert_solved, draw
from processes import at_once
from tolerances import assert_close

from anycell import cells

pytest.importorskip("jax")

import jax
import jax.numpy as jnp

import anycell.jax as aj
from anycell.jax import device
from tests.conformance import on_jax

HAS = "state", "d state", "mask", "resets", "reset_state"
X, LAYER = jnp.ones((20, 16, 32)), aj.RNN(cells.PeepholeLSTM, 32, 64)


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    """A card that JAX sees, with products in float32."""
    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no card")
    with jax.default_matmul_precision("float32"):
        yield


@pytest.mark.gpu
@pytest.mark.parametrize("tier", [1, 2])
def test_the_kernels_are_trusted(tier: int) -> None:
    assert device.doubt(tier) is None
    assert LAYER.engine.name == "gpu"


@pytest.mark.gpu
@pytest.mark.parametrize("cell", [cells.LSTM, cells.GRU, cells.PeepholeLSTM, cells.LayerNormLSTM])
@pytest.mark.parametrize("tier", [1, 2])
@pytest.mark.parametrize("ways", ["", "reverse", "bidirectional"])
def test_results_and_gradients(
    cell: Any, tier: int, ways: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device.JaxDevice, "tier", tier)
    problem = draw(cell, (20, 16, 32, 64), (*HAS, ways), "float32")
    assert_solved(on_jax.solve(on_jax.layer_of, "gpu", problem), problem)


@pytest.mark.gpu
@pytest.mark.parametrize("tier", [1, 2])
def test_calls_that_follow_each_other(tier: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, inside of a larger program, which XLA may capture as a graph, and in two threads."""
    monkeypatch.setattr(device.JaxDevice, "tier", tier)
    params = LAYER.init(jax.random.key(0))

    def loss(params: Any, x: Any) -> Any:
        for _ in range(3):
            x = LAYER(params, x, engine="gpu")[0][..., :32]
        return jnp.square(x).sum()

    step = jax.jit(jax.value_and_grad(loss))
    results = [jax.block_until_ready(step(params, X)) for _ in range(20)]
    results += at_once(*2 * [partial(step, params, X)])
    for result in results[1:]:
        assert jax.tree.all(jax.tree.map(np.array_equal, results[0], result))


@pytest.mark.gpu
@pytest.mark.parametrize("tier", [1, 2])
def test_elements_with_weights_of_their_own(tier: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All in the same launches, with the results of a call for each."""
    monkeypatch.setattr(device.JaxDevice, "tier", tier)
    members = jax.vmap(LAYER.init)(jax.random.split(jax.random.key(0), 5))

    def loss(params: Any) -> Any:
        return jnp.square(LAYER(params, X, engine="gpu")[0]).sum()

    step = jax.jit(jax.value_and_grad(loss))
    together = jax.jit(jax.vmap(jax.value_and_grad(loss)))(members)
    for n in range(5):
        alone, one = (jax.tree.map(lambda a, n=n: a[n], tree) for tree in (members, together))
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(step(alone)), strict=True):
            assert_close(np.asarray(a), np.asarray(b), "float32", "gradient", axes=())
