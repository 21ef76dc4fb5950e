"""Variants of an array: the same numbers with other strides, overlaps and alignments."""

import itertools
from collections.abc import Container, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

Array = npt.NDArray[Any]


def variants(array: Array, torch: bool = False) -> Iterator[tuple[str, Array]]:
    """Yields names and variants of an array; variants that repeat a part have other numbers.

    Args:
        torch: leaves out variants that PyTorch cannot represent: negative strides, and strides that
            are not a whole number of elements.
    """
    axes = range(array.ndim)
    for order in list(itertools.permutations(axes))[1:]:
        yield f"axes {order} in memory", array.transpose(order).copy().transpose(np.argsort(order))
    for axis in axes:
        yield f"axis {axis} sliced", _within(array, {axis: slice(2, -1)})
        yield f"axis {axis} in steps of 2", _within(array, {axis: slice(0, None, 2)})
        yield f"axis {axis} expanded", _expanded(array, [axis])
        if not torch:
            yield f"axis {axis} backwards", np.flip(np.flip(array, axis).copy(), axis)
    if array.ndim > 1:
        yield "all axes sliced", _within(array, dict.fromkeys(axes, slice(1, -2)))
        yield "all axes in steps of 2", _within(array, dict.fromkeys(axes, slice(0, None, 2)))
    if array.size:
        yield "all axes expanded", _expanded(array, axes)
    if array.itemsize > 1:
        for offset in (1, 2, 3):
            yield f"{offset} bytes past an element", _misaligned(array, offset)
        if not torch:
            record = np.zeros(array.shape, [("flag", "i1"), ("value", array.dtype)])
            record["value"] = array
            yield "a field of packed records", record["value"]
            if array.ndim:
                rows = np.zeros(
                    array.shape[:-1], [("flag", "i1"), ("row", array.dtype, array.shape[-1:])]
                )
                rows["row"] = array
                yield "rows of packed records", rows["row"]


def _expanded(array: Array, axes: Container[int]) -> Array:
    """Repeats the first part along these axes; the result is writable, as PyTorch requires."""
    strides = [0 if axis in axes else stride for axis, stride in enumerate(array.strides)]
    return as_strided(array.copy(), array.shape, strides)


def _within(array: Array, cuts: dict[int, slice]) -> Array:
    """Returns a view into a larger array, which is NaN elsewhere."""
    shape = list(array.shape)
    for axis, cut in cuts.items():
        shape[axis] = shape[axis] * 2 if cut.step else shape[axis] + 3
    larger = np.full(shape, np.nan if array.dtype.kind == "f" else 1, array.dtype)
    view = larger[tuple(cuts.get(axis, slice(None)) for axis in range(array.ndim))]
    view[...] = array
    return view


def _misaligned(array: Array, offset: int) -> Array:
    memory = np.zeros(array.nbytes + offset, np.uint8)
    view = np.frombuffer(memory.data, array.dtype, array.size, offset).reshape(array.shape)
    view[...] = array
    return view
