"""Gives ``anycell.layer`` access to NumPy's arrays."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from anycell.engines import cpu
from anycell.layer.products import multiply
from anycell.layer.signature import ANY, FLAGS, MATRIX, ROWS
from anycell.numpy import threads
from anycell.plan import DTYPES
from anycell.requirement import require

Array = npt.NDArray[Any]
SMALL = 1 << 18  # multiply-adds up to which NumPy's OpenBLAS stays in the calling thread


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Returns NumPy's dtype of a name; bfloat16 needs ml_dtypes, which frameworks install.

    Raises:
        ModuleNotFoundError: for bfloat16 without ml_dtypes.
    """
    if name == "bfloat16":
        require("ml_dtypes", "bfloat16 in NumPy", "bfloat16")
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


@functools.lru_cache(maxsize=16)
def host_of(dtype: npt.DTypeLike) -> NumpyHost:
    """Returns the host for arrays of a dtype that has a row in ``DTYPES``."""
    types = DTYPES[dtype if isinstance(dtype, str) else np.dtype(dtype).name]
    wide = host_of(types.math.name) if types.mixed else None
    return NumpyHost(numpy_dtype(types.storage.name), wide)


class NumpyHost:
    """Arrays of one dtype. For 16 bits, ``wide`` is the host of the dtype that cells compute in.
    ``layer.Host`` describes the methods.
    """

    wide_states, blas, trace = True, 0, None

    def __init__(self, dtype: npt.DTypeLike, wide: NumpyHost | None = None) -> None:
        self.dtype = np.dtype(dtype)
        self.wide: NumpyHost = self if wide is None else wide

    @functools.cached_property
    def eight_bits(self) -> NumpyHost:
        return NumpyHost(np.int8)

    def widen(self, array: Array) -> Array:
        # Order "K" would put a broadcast axis last, where kernels want a dense one.
        return array if self.wide is self else array.astype(self.wide.dtype, "C", copy=False)

    def narrow(self, array: Array) -> Array:
        return array if self.wide is self else array.astype(self.dtype, copy=False)

    def empty(self, shape: tuple[int, ...]) -> Array:
        return np.empty(shape, self.dtype)

    def zeros(self, shape: tuple[int, ...]) -> Array:
        return np.zeros(shape, self.dtype)

    def lasting(self, shape: tuple[int, ...]) -> Array:
        return cpu.memory.empty(shape, f"u{self.dtype.itemsize}").view(self.dtype)

    def template(self, shape: tuple[int, ...]) -> Array:
        return np.broadcast_to(self.empty(()), shape)

    def like(self, array: Array) -> Array:
        return np.empty_like(array)

    def split(self, array: Array, sizes: Sequence[int]) -> list[Array]:
        ends = itertools.accumulate(sizes)
        return [array[end - size : end] for end, size in zip(ends, sizes, strict=True)]

    def fit(self, array: Array, layout: int, wide: bool = False) -> Array | None:
        flags = array.flags
        if array.dtype != (self.wide.dtype if wide else self.dtype):
            return None
        if not flags.aligned:  # in its address, or in its strides
            return array.copy()
        if layout == ANY or flags.c_contiguous:
            return array
        size, strides = array.itemsize, array.strides
        rows = layout == ROWS and (strides[-1] == size or array.shape[-1] < 2)
        return array if rows or (layout == MATRIX and size in strides[-2:]) else array.copy()

    def layout(self, arrays: Mapping[Any, Array]) -> tuple[Any, ...]:
        key: list[Any] = []
        for name, array in arrays.items():
            if name not in FLAGS:
                key += name, array.shape, array.strides, array.dtype, array.flags.aligned
        return tuple(key)

    def as_flags(self, array: Array) -> Array | None:
        if array.dtype not in (np.bool_, np.uint8):
            return None
        return np.ascontiguousarray(array).view(np.uint8)

    def misaligned(self, arrays: Iterable[Array]) -> bool:
        return False in [array.flags.aligned for array in arrays]

    def pointer(self, array: Array) -> int:
        return int(array.__array_interface__["data"][0])

    def pointers(self, arrays: Iterable[Array]) -> list[int]:
        """Returns the addresses of several arrays, faster than by calls of ``pointer``."""
        return [array.__array_interface__["data"][0] for array in arrays]

    def strides(self, array: Array) -> tuple[int, ...]:
        # Without a Python call per axis, because strides are read often.
        return tuple(map(array.itemsize.__rfloordiv__, array.strides))

    def matmul(self, a: Array, b: Array) -> Array:
        """Returns ``a @ b`` in the dtype that cells compute in. Small products not of 16 bits use
        NumPy's matmul in one thread; others use ours, whose threads sleep as soon as it is done.
        """
        wide = self.wide
        if wide is self and a.size * b.shape[1] <= SMALL:
            return a @ b
        out = wide.empty((a.shape[0], b.shape[1]))
        multiply(self, self.dtype.name, a, b, out, False, threads.current())
        return out
