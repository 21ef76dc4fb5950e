"""NumPy's arrays as ``anycell.layer`` wants them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from anycell.engines import cpu
from anycell.layer.signature import ANY, FLAGS, MATRIX, ROWS

Array = npt.NDArray[Any]


class NumpyHost:
    """Arrays of one dtype; the matmuls are those of the BLAS that NumPy was built with."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self.dtype = np.dtype(dtype)

    def empty(self, shape: tuple[int, ...]) -> Array:
        """Memory as it comes."""
        return np.empty(shape, self.dtype)

    def zeros(self, shape: tuple[int, ...]) -> Array:
        """All zeros."""
        return np.zeros(shape, self.dtype)

    def lasting(self, shape: tuple[int, ...]) -> Array:
        """Memory as it comes, kept for the next call when its last array is gone."""
        return cpu.memory.empty(shape, str(self.dtype))

    def like(self, array: Array) -> Array:
        """Memory as it comes, of the shape of an array."""
        return np.empty_like(array)

    def fit(self, array: Array, layout: int, wide: bool = False) -> Array | None:
        """The array, or a contiguous copy; None for another dtype."""
        flags = array.flags
        if array.dtype != self.dtype:
            return None
        if not flags.aligned:  # in its address, or in its strides
            return array.copy()
        if layout == ANY or flags.c_contiguous:
            return array
        size, strides = array.itemsize, array.strides
        rows = layout == ROWS and (strides[-1] == size or array.shape[-1] < 2)
        return array if rows or (layout == MATRIX and size in strides[-2:]) else array.copy()

    def layout(self, arrays: Mapping[Any, Array]) -> tuple[Any, ...]:
        """All that ``fit`` looks at."""
        key: list[Any] = []
        for name, array in arrays.items():
            if array is not None and name not in FLAGS:
                key += name, array.shape, array.strides, array.dtype, array.flags.aligned
        return tuple(key)

    def as_flags(self, array: Array) -> Array | None:
        """Flags as contiguous uint8."""
        if array.dtype not in (np.bool_, np.uint8):
            return None
        return np.ascontiguousarray(array).view(np.uint8)

    def pointer(self, array: Array) -> int:
        """Address of the first element."""
        return int(array.__array_interface__["data"][0])

    def strides(self, array: Array) -> tuple[int, ...]:
        """In elements, of an array that fits."""
        return tuple(stride // array.itemsize for stride in array.strides)

    def project(self, x: Array, weight: Array) -> Array:
        """``x @ weight.T``."""
        result: Array = x @ weight.T
        return result

    def matmul(self, a: Array, b: Array, out: Array) -> None:
        """``out = a @ b``."""
        np.matmul(a, b, out=out)

    def matmul_add(self, a: Array, b: Array, out: Array) -> None:
        """``out += a @ b``."""
        out += a @ b

    def masked(self, x: Array, mask: Array) -> Array:
        """A copy of ``x [T, B, I]`` with 0 where ``mask [T, B]`` is 0, NaN or not."""
        return np.where(mask[..., None], x, self.dtype.type(0))
