"""Recurrent steps written in JAX, through ``anycell.jax.scan``, against ``jax.lax.scan``.

Outputs and the gradients of weights, initial states and inputs are compared in float64. The cells
are in ``cells_jax.py``, written by another hand than the reader.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from corpus import Entry, Numbers, check_results, check_verdict

jax = pytest.importorskip("jax")
pytest.importorskip("flax")
pytest.importorskip("equinox")

import jax.numpy as jnp  # noqa: E402
from cells_jax import corpus  # noqa: E402
from jax import lax  # noqa: E402

import anycell.jax as aj  # noqa: E402
from tools import random_steps  # noqa: E402

X64 = jax if hasattr(jax, "enable_x64") else jax.experimental
REFUSED = "jax.lax.scan runs this body: "


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    with X64.enable_x64(True):
        yield


def is_float(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.floating)


def leaves_of(tree: Any) -> dict[str, Any]:
    """The leaves of a tree, by their paths."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def results(made: Any, scan: Any) -> dict[str, np.ndarray]:
    """The results of a program, and the gradients of its weights, states and inputs."""
    program, *trees = made
    trees = jax.tree.map(jnp.asarray, trees)
    names, treedef = list(leaves_of(trees)), jax.tree.structure(trees)
    leaves = dict(zip(names, jax.tree.leaves(trees), strict=True))

    def loss(floats: Any) -> Any:
        merged = leaves | floats
        out = program(scan, *jax.tree.unflatten(treedef, [merged[name] for name in names]))
        out = {name: leaf for name, leaf in leaves_of(out).items() if is_float(leaf)}
        random = Numbers("cotangents")
        return sum(jnp.sum(leaf * random(*leaf.shape)) for leaf in out.values()), out

    floats = {name: leaf for name, leaf in leaves.items() if is_float(leaf)}
    (_, out), slopes = jax.value_and_grad(loss, has_aux=True)(floats)
    got = {f"output{name}": np.asarray(leaf) for name, leaf in out.items()}
    return got | {f"gradient{name}": np.asarray(slope) for name, slope in slopes.items()}


@pytest.mark.sample(every=5)
@pytest.mark.parametrize("entry", corpus.entries, ids=corpus.names)
def test_cell(entry: Entry) -> None:
    refusals = []

    def door(f: Any, init: Any, xs: Any = None, **options: Any) -> Any:
        said = aj.explain_scan(f, init, xs, **options)
        refusals.append(said.removeprefix(REFUSED) if said.startswith(REFUSED) else None)
        return aj.scan(f, init, xs, **options)

    made = entry()
    check_results(results(made, door), results(made, lax.scan))
    check_verdict(entry, next(filter(None, refusals), None))


@pytest.mark.sample(10)
@pytest.mark.parametrize("number", range(60))
def test_random_step(number: int, seed: int) -> None:
    outcome = random_steps.check("jax", seed + number)
    assert not outcome.error and not outcome.wrong, (
        f"{outcome.error}{outcome.wrong}\n{outcome.source}"
    )
