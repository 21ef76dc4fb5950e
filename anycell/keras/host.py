"""NumPy arrays on memory that TensorFlow takes over without a copy."""

from __future__ import annotations

import functools
import math

import numpy as np

from anycell.engines import cpu
from anycell.numpy.host import Array, NumpyHost, numpy_dtype
from anycell.plan.dtype import Dtype

LINE = 64  # bytes: TensorFlow copies memory unless it begins at a multiple of this


class AlignedHost(NumpyHost):
    """Arrays that begin on a cache line."""

    def empty(self, shape: tuple[int, ...]) -> Array:
        """Returns uninitialized memory, from warm blocks if it is large."""
        size = math.prod(shape) * self.dtype.itemsize
        block = cpu.memory.empty((size + LINE,), "uint8")
        start = -block.__array_interface__["data"][0] % LINE  # saves the call of ``pointer``
        return block[start : start + size].view(self.dtype).reshape(shape)

    def zeros(self, shape: tuple[int, ...]) -> Array:
        array = self.empty(shape)
        array[...] = 0
        return array

    lasting = empty  # which uses warm blocks already

    def like(self, array: Array) -> Array:
        return self.empty(array.shape)

    def narrow(self, array: Array) -> Array:
        if self.wide is self or array.dtype == self.dtype:
            return array
        narrow = self.empty(array.shape)
        with np.errstate(over="ignore"):  # a scaled loss may overflow to infinity
            narrow[...] = array
        return narrow


@functools.lru_cache(maxsize=16)
def host_of(types: Dtype) -> AlignedHost:
    """The host of arrays of a dtype."""
    wide = AlignedHost(types.math.name) if types.mixed else None
    return AlignedHost(numpy_dtype(types.storage.name), wide)
