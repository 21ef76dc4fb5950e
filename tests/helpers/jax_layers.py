"""What the tests of layers on JAX share."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

T, B, I, H = 7, 5, 3, 6
Arrays = dict[str, Any]


def drawn(rng: np.random.Generator, *shape: int) -> Any:
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def same(one: Any, other: Any) -> None:
    """Asserts that all arrays of two trees have the same bits."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    assert all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)
