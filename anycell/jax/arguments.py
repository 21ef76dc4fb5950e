"""Checks the arrays that users pass.

Every error names the argument, what was given, what is expected, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anycell.layer.checks import Frontend, describe, refuse, remedy

Array = Any


def known(array: Array) -> bool:
    """Whether NumPy can read the values of an array now; JAX, while it traces, reads none."""
    return not isinstance(array, jax.core.Tracer)


def as_arrays(values: Any) -> Any:
    """NumPy's arrays in a tree as JAX's."""
    return jax.tree.map(lambda a: jnp.asarray(a) if isinstance(a, np.ndarray) else a, values)


def check_array(name: str, value: Any, shape: Sequence[int], axes: str, like: Array) -> Array:
    """Returns ``value``; refuses all but arrays of this shape and of ``like``'s dtype."""
    value, expected = as_arrays(value), f"{like.dtype} {list(shape)}, {axes}"
    if not isinstance(value, jax.Array):
        refuse(name, describe(value), expected, "Pass jnp.asarray of it.", TypeError)
    if value.shape != tuple(shape):
        hint = "Reshape it, or broadcast it."
        refuse(name, describe(value), expected, remedy(value, len(shape), hint))
    if value.dtype != like.dtype:
        refuse(name, describe(value), expected, f"Convert it: {name}.astype({like.dtype}).")
    return value


def check_flags(name: str, value: Any, shape: Sequence[int], axes: str, like: Array) -> Array:
    """Converts flags of this shape to bool: from bool, or where they are not a mask, from any real
    dtype. Values that can be read must be 0 or 1; in a traced program every value but 0 is True.
    """
    value, expected = as_arrays(value), f"bool {list(shape)}, {axes}"
    if not isinstance(value, jax.Array):
        refuse(name, describe(value), expected, f"Pass jnp.asarray({name}).", TypeError)
    if value.shape != tuple(shape):
        turned = len(shape) == 2 and value.shape == tuple(shape)[::-1]
        hint = f"Transpose it: {name}.T." if turned else "Pass one flag per step and row."
        refuse(name, describe(value), expected, hint)
    if value.dtype == jnp.bool_:
        return value
    if (name == "mask" and value.dtype != jnp.uint8) or jnp.issubdtype(
        value.dtype, jnp.complexfloating
    ):
        refuse(name, describe(value), expected, f"Cast it: {name}.astype(bool).", TypeError)
    if known(value) and not np.isin(np.asarray(value), (0, 1)).all():
        hint = f"Say which values are meant, as in {name} > 0.5."
        refuse(name, describe(value), f"{expected}, or 0 and 1", hint)
    return value != 0


def _counts(name: str, value: Any, expected: str) -> tuple[Array, bool]:
    """Lengths as integers, and whether their values can be read."""
    try:
        counts = np.asarray(value) if known(value) else value
    except (TypeError, ValueError):
        refuse(name, describe(value), expected, "Pass a list of int, or an array.", TypeError)
    if counts.size and not jnp.issubdtype(counts.dtype, jnp.integer):
        refuse(name, describe(counts), expected, f"Cast them: {name}.astype(int).", TypeError)
    return counts.astype(np.int32), known(value)


def _below(steps: int, counts: Array, like: Array) -> Array:
    return jnp.arange(steps)[:, None] < counts


JAX = Frontend(jax.Array, check_array, check_flags, _counts, lambda flags: flags, _below)
