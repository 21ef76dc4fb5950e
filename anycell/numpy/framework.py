"""NumPy's arrays for ``anycell.layer``."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from anycell.engines import cpu
from anycell.lang.namespaces import NUMPY
from anycell.layer.checks import describe, refuse
from anycell.layer.framework import Framework
from anycell.layer.products import multiply
from anycell.layer.signature import ANY, FLAGS, MATRIX, ROWS, Shape
from anycell.numpy import check, threads
from anycell.plan import LINE

Array = npt.NDArray[Any]
SMALL = 1 << 18  # multiply-adds up to which NumPy's OpenBLAS stays in the calling thread


def _objects() -> int:
    array, place = np.empty(1), object.__basicsize__
    if sys.implementation.name != "cpython":
        return 0
    known = ctypes.c_void_p.from_address(id(array) + place).value == array.ctypes.data
    return place if known else 0


def on_lines(array: Array) -> Array:
    """A copy that begins with a line of the cache. NumPy's own arrays begin within one, so each
    vector of a weight lies on two, and a step of one row takes a tenth longer.
    """
    room = np.empty(array.nbytes + LINE, np.uint8)
    first = -room.ctypes.data % LINE
    copy = room[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


class Numpy(Framework):
    """NumPy's arrays of one dtype."""

    kind, xp, objects = np.ndarray, NUMPY, _objects()
    dtype: np.dtype[Any]
    dtype_named = staticmethod(check.numpy_dtype)

    def __init__(self, dtype: npt.DTypeLike, wide: Numpy | None = None) -> None:
        super().__init__(np.dtype(dtype), wide)

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

    def widen(self, array: Array) -> Array:
        # Order "K" would put a broadcast axis last, where kernels want a dense one.
        return array if self.wide is self else array.astype(self.wide.dtype, "C", copy=False)

    def narrow(self, array: Array) -> Array:
        return array if self.wide is self else array.astype(self.dtype, copy=False)

    def empty(self, shape: Shape) -> Array:
        return np.empty(shape, self.dtype)

    def zeros(self, shape: Shape) -> Array:
        return np.zeros(shape, self.dtype)

    def lasting(self, shape: Shape) -> Array:
        return cpu.memory.empty(shape, f"u{self.dtype.itemsize}").view(self.dtype)

    def template(self, shape: Shape) -> Array:
        return np.broadcast_to(self.empty(()), shape)

    like: Any = staticmethod(np.empty_like)

    def pointer(self, array: Array, /) -> int:
        return int(array.__array_interface__["data"][0])

    def pointers(self, arrays: Iterable[Array]) -> list[int]:
        return [array.__array_interface__["data"][0] for array in arrays]

    def strides(self, array: Array, /) -> Shape:
        # Without a Python call per axis, because strides are read often.
        return tuple(map(array.itemsize.__rfloordiv__, array.strides))

    def misaligned(self, arrays: Iterable[Array]) -> bool:
        return False in [array.flags.aligned for array in arrays]

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

    @classmethod
    def check_array(
        cls, name: str, value: Any, shape: Sequence[Any], axes: str, like: Any
    ) -> Array:
        if value is None:
            refuse(name, "None", f"{like.dtype} {list(shape)}, {axes}", "Pass an array.", TypeError)
        return check.array(name, value, shape, like.dtype, axes)

    @classmethod
    def check_flags(
        cls, name: str, value: Any, shape: Sequence[Any], axes: str, like: Any
    ) -> Array:
        return check.flags(name, value, shape, axes)

    @classmethod
    def copy_flags(cls, flags: Array) -> Array:
        return np.ascontiguousarray(flags)

    @classmethod
    def check_counts(cls, name: str, value: Any, expected: str) -> tuple[npt.NDArray[Any], bool]:
        counts = check.numbers(name, value, expected)
        if counts.dtype.kind not in "iu" and counts.size:
            hint = f"Convert them: {name}.astype(int)."
            refuse(name, describe(counts), expected, hint, TypeError)
        return counts.astype(np.int64), True

    @classmethod
    def below(cls, steps: int, counts: Array, like: Any) -> Array:
        return np.arange(steps)[:, None] < counts


class Strict(Numpy):
    """NumPy's arrays for functions that convert none."""

    @classmethod
    def check_array(
        cls, name: str, value: Any, shape: Sequence[Any], axes: str, like: Any
    ) -> Array:
        if not isinstance(value, np.ndarray):
            expected = f"a NumPy array {list(shape)}, {axes}"
            refuse(name, describe(value), expected, "Pass np.asarray of it.", TypeError)
        if not value.dtype.isnative or value.dtype != like.dtype:
            hint = f"Convert one of them, as in {name}.astype(np.{like.dtype})."
            expected = f"{like.dtype}, the dtype of gates_x"
            refuse(name, f"dtype {value.dtype}", expected, hint, TypeError)
        if value.shape != tuple(shape):
            expected = f"shape {list(shape)}, {axes}"
            refuse(name, f"shape {list(value.shape)}", expected, "Reshape it.")
        return value
