"""``jax.vmap`` of the passes of a layer: several calls run as one where they can.

Elements of the mapped axis become rows of the batch if all that differs between them has rows:
input, states, masks. Otherwise a pass runs once for each element, see ``fused``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from anycell.layer.signature import FLAGS, OF_STATES

Array = Any
Arrays = Mapping[str, Array]
MOST = 32_767  # elements of a launch, whose third axis has one or two programs for each


def row_axis(name: str, array: Array) -> int | None:
    """The axis of rows in an array of a call; None for what all rows share."""
    if name == "static":
        return 0
    if name == "recurrent_mask":
        return int(array.ndim) - 2
    state = name.startswith(OF_STATES) and array.ndim == 3
    return 1 if state or name in ("x", *FLAGS) else None


def foldable(arrays: Arrays, batched: Mapping[str, bool], wanted: Iterable[str] = ()) -> bool:
    """Whether elements may become rows: where arrays without rows are the same for all, none of
    them has a gradient, which would be a sum over elements, and no random masks are drawn, which
    differ from row to row.

    Args:
        arrays: of one element, or their shapes.
    """
    apart = {name for name, array in arrays.items() if row_axis(name, array) is None}
    of_all = {name for name, is_batched in batched.items() if is_batched and name in apart}
    return not (of_all or apart.intersection(wanted) or "seed" in arrays)


def fold(array: Array, axis: int, batched: bool, size: int) -> Array:
    """An array of all elements, ``[size, ...]`` if batched, with all their rows in one axis."""
    whole = array if batched else jnp.broadcast_to(array, (size, *array.shape))
    moved = jnp.moveaxis(whole, 0, axis)
    rows = size * moved.shape[axis + 1]
    return moved.reshape(*moved.shape[:axis], rows, *moved.shape[axis + 2 :])


def unfold(array: Array, axis: int, size: int, rows: int) -> Array:
    """The inverse of ``fold``, for a batched array; an element has ``rows`` rows."""
    apart = array.reshape(*array.shape[:axis], size, rows, *array.shape[axis + 1 :])
    return jnp.moveaxis(apart, axis, 0)


def fold_all(arrays: Arrays, batched: Mapping[str, bool], size: int) -> dict[str, Array]:
    """Arrays of a call, folded where they have rows."""
    folded = {}
    for name, values in element(arrays, batched).items():
        array, axis = arrays[name], row_axis(name, values)
        folded[name] = array if axis is None else fold(array, axis, batched[name], size)
    return folded


def element(arrays: Arrays, batched: Mapping[str, bool]) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of the arrays of one element; there may be none."""
    return {
        name: jax.ShapeDtypeStruct(array.shape[batched[name] :], array.dtype)
        for name, array in arrays.items()
    }


def of_both(array: Array, outer: bool, inner: bool, sizes: tuple[int, int]) -> Array:
    """An array of the elements of two nested axes, which has one of them or both, with an axis of
    all elements.
    """
    if not (outer or inner):
        return array
    shape = array.shape[outer + inner :]
    apart = array.reshape(sizes[0] if outer else 1, sizes[1] if inner else 1, *shape)
    return jnp.broadcast_to(apart, (*sizes, *shape)).reshape(-1, *shape)


def one_by_one(run: Callable[..., Any], flat: Sequence[Array], batched: Sequence[bool]) -> Any:
    """Runs elements one after the other."""

    def of_element(parts: list[Array]) -> Any:
        rest = iter(parts)
        return run(*(next(rest) if mapped else a for a, mapped in zip(flat, batched, strict=True)))

    return jax.lax.map(of_element, [a for a, mapped in zip(flat, batched, strict=True) if mapped])
