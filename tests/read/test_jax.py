"""Recurrent steps written in JAX, through ``anycell.jax.scan``, against ``jax.lax.scan``.

Outputs and the gradients of weights, initial states and inputs are compared in float64. The cells
are in ``cells_jax.py``, written by another hand than the reader.
"""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from corpus import Entry, Numbers, check_results, check_verdict
from tolerances import assert_close

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


@pytest.mark.sample(every=16)
@pytest.mark.parametrize("entry", corpus.entries, ids=corpus.names)
def test_cell(entry: Entry) -> None:
    refusals = []

    def door(f: Any, init: Any, xs: Any = None, **options: Any) -> Any:
        said = aj.explain_scan(f, init, xs, **options)
        refusals.append(said.removeprefix(REFUSED) if said.startswith(REFUSED) else None)
        return aj.scan(f, init, xs, **options)

    made = entry()
    expected = results(made, lax.scan)
    if os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS", "0") != "0":
        # Then lax.scan may give a NaN as the derivative of a maximum, which anycell does not.
        expected = {name: a for name, a in expected.items() if not np.isnan(a).any()}
    got = results(made, door)
    check_results({name: got[name] for name in expected}, expected)
    check_verdict(entry, next(filter(None, refusals), None))


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", range(60))
def test_random_step(number: int, seed: int) -> None:
    outcome = random_steps.check("jax", seed + number)
    assert not outcome.error and not outcome.wrong, (
        f"{outcome.error}{outcome.wrong}\n{outcome.source}"
    )


# -- transformations, and bodies that are alike ---------------------------------------------------
Scanned = Any  # (scan, weights, initial state, inputs) -> a tree


def gru(scan: Any, w: Any, h: Any, xs: Any) -> Any:
    def step(h: Any, x: Any) -> Any:
        z, r, n = jnp.split(x @ w["x"] + h @ w["h"] + w["b"], 3, axis=-1)
        z = jax.nn.sigmoid(z)
        h = z * h + (1 - z) * jnp.tanh(n + jax.nn.sigmoid(r) * jnp.sum(h, -1, keepdims=True))
        return h, h

    return scan(step, h, xs)[1]


def total(scan: Any, *arguments: Any) -> Any:
    return jnp.sum(jnp.sin(gru(scan, *arguments)))


def _chunks(scan: Any, w: Any, h: Any, xs: Any) -> Any:
    """Truncated backpropagation: a loop over chunks, around the loop over steps."""

    def chunk(h: Any, part: Any) -> Any:
        ys = gru(scan, w, lax.stop_gradient(h), part)
        return ys[-1], ys

    return lax.scan(chunk, h, xs.reshape(2, -1, *xs.shape[1:]))


TRANSFORMS: dict[str, Any] = {
    "jit": lambda scan, w, h, xs: jax.jit(lambda *a: gru(scan, *a))(w, h, xs),
    "jvp": lambda scan, *a: jax.jvp(lambda *b: gru(scan, *b), a, jax.tree.map(jnp.cos, a)),
    "jacfwd": lambda scan, w, h, xs: jax.jacfwd(lambda h: total(scan, w, h, xs))(h),
    "jacrev": lambda scan, w, h, xs: jax.jacrev(lambda h: gru(scan, w, h, xs)[-1])(h),
    "vmap of sequences": lambda scan, w, h, xs: jax.vmap(lambda xs: gru(scan, w, h, xs))(
        jnp.stack([xs, -xs])
    ),
    "vmap of weights": lambda scan, w, h, xs: jax.vmap(lambda w: gru(scan, w, h, xs))(
        jax.tree.map(lambda a: jnp.stack([a, 2 * a]), w)
    ),
    "gradients of rows": lambda scan, w, h, xs: jax.vmap(
        jax.grad(lambda w, h, xs: total(scan, w, h, xs)), (None, 0, 1)
    )(w, h, xs),
    "gradient of a gradient": lambda scan, w, h, xs: jax.grad(
        lambda xs: jnp.sum(jax.grad(lambda xs: total(scan, w, h, xs))(xs) ** 2)
    )(xs),
    "checkpoint": lambda scan, *a: jax.grad(jax.checkpoint(lambda *b: total(scan, *b)))(*a),
    "cond": lambda scan, w, h, xs: lax.cond(
        xs[0, 0, 0] > 9, lambda h: gru(scan, w, h, xs), lambda h: gru(scan, w, -h, xs), h
    ),
    "chunks": _chunks,
    "gradient through chunks": lambda scan, *a: jax.grad(
        lambda *b: jnp.sum(_chunks(scan, *b)[1] ** 2)
    )(*a),
}


def check_trees(ours: Any, expected: Any, kind: str) -> None:
    jax.tree.map(
        lambda a, b: assert_close(np.asarray(a), np.asarray(b), "float64", kind), ours, expected
    )


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transformations(transform: Scanned) -> None:
    n = Numbers("gru")
    w = {"x": n(5, 18), "h": n(6, 18), "b": n(18)}
    arguments = jax.tree.map(jnp.asarray, (w, n(3, 6), n(4, 3, 5)))
    ours, expected = (transform(scan, *arguments) for scan in (aj.scan, lax.scan))
    check_trees(ours, expected, "gradient")


def test_bodies_that_differ_in_constants() -> None:
    """Bodies of one text, one shape, and other constants: arrays, numbers, flags, functions."""
    n = Numbers("constants")
    w, h, xs = jnp.asarray(n(6, 6)), jnp.asarray(n(3, 6)), jnp.asarray(n(4, 3, 6))

    def body(constant: Any, number: float, flag: bool, act: Any) -> Any:
        def step(h: Any, x: Any) -> Any:
            h = act(x * constant + number * (h @ w))
            return h, -h if flag else h

        return step

    arrays = np.ones(6), np.arange(6.0), jnp.arange(6.0) - 2
    bodies = [
        body(array, number, flag, act)
        for array in arrays
        for number, flag, act in ((0.5, True, jnp.tanh), (0.7, False, jnp.sin))
    ]
    for number, step in enumerate(bodies):
        reverse = number % 3 == 0
        ours, expected = (scan(step, h, xs, reverse=reverse) for scan in (aj.scan, lax.scan))
        check_trees(ours, expected, "forward")


@pytest.mark.parametrize("steps", [9, 1])
def test_clocks_and_thresholds_after_the_proof(steps: int) -> None:
    """What changes only after some steps, or far from where random numbers lie."""
    n = Numbers("late")
    w, xs = jnp.asarray(n(6, 6)), jnp.asarray(n(steps, 3, 6, scale=3.0))

    def step(carry: Any, x: Any) -> Any:
        t, h = carry
        new = jnp.tanh(x + h @ w)
        new = jnp.where(t >= 5, -new, new)
        new = jnp.where(jnp.abs(new) > 0.95, new * 3, new)
        return (t + 1, new), (t, new)

    init = jnp.int32(0), jnp.asarray(n(3, 6))
    ours, expected = (scan(step, init, xs) for scan in (aj.scan, lax.scan))
    check_trees(ours, expected, "forward")
