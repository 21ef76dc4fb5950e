"""Recurrent steps written in JAX, through ``anycell.jax.scan``, against ``jax.lax.scan``.

Outputs and the gradients of weights, initial states and inputs are compared in float64. The cells
are in ``cells_jax.py``, written by another hand than the reader.
"""

import inspect
import re
from typing import Any

import numpy as np
import pytest
from corpus import Entry, Numbers

jax = pytest.importorskip("jax")
pytest.importorskip("flax")
pytest.importorskip("equinox")

import jax.numpy as jnp  # noqa: E402
from cells_jax import corpus  # noqa: E402
from tolerances import assert_close  # noqa: E402

import anycell.jax as aj  # noqa: E402

X64 = jax if hasattr(jax, "enable_x64") else jax.experimental


def is_float(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.floating)


def named(tree: Any) -> dict[str, np.ndarray]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves if is_float(leaf)
    }


def results(made: Any, scan: Any, jit: bool = False) -> dict[str, np.ndarray]:
    """The results of a program, and the gradients of its weights, states and inputs."""
    program, *trees = made
    leaves, tree = jax.tree.flatten(jax.tree.map(jnp.asarray, trees))
    floats = [k for k, leaf in enumerate(leaves) if is_float(leaf)]

    def forward(chosen: Any) -> Any:
        merged = list(leaves)
        for k, leaf in zip(floats, chosen, strict=True):
            merged[k] = leaf
        return program(scan, *jax.tree.unflatten(tree, merged))

    def loss(chosen: Any) -> Any:
        out = forward(chosen)
        random, total = Numbers("cotangents"), 0.0
        for leaf in jax.tree.leaves(out):
            if is_float(leaf):
                total = total + jnp.sum(leaf * random(*leaf.shape))
        return total, out

    both = jax.value_and_grad(loss, has_aux=True)
    (_, out), slopes = (jax.jit(both) if jit else both)([leaves[k] for k in floats])
    names = named(jax.tree.unflatten(tree, list(range(len(leaves))))) or None
    paths = [
        jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_flatten_with_path(
            jax.tree.unflatten(tree, list(range(len(leaves))))
        )[0]
    ]
    del names
    got = {f"output{name}": value for name, value in named(out).items()}
    got |= {f"gradient{paths[k]}": np.asarray(g) for k, g in zip(floats, slopes, strict=True)}
    return got
