"""NumPy arrays on memory that TensorFlow takes over without a copy."""

from __future__ import annotations

import functools
import math

from anycell.engines import cpu
from anycell.numpy.host import Array, MixedNumpyHost, NumpyHost
from anycell.plan import DTYPES

LINE = 64  # bytes: what TensorFlow takes as it is begins on such a border


class AlignedHost(NumpyHost):
    """Arrays that begin on a cache line."""

    def empty(self, shape: tuple[int, ...]) -> Array:
        """Memory as it comes, warm where there is a lot of it."""
        size = math.prod(shape) * self.dtype.itemsize
        block = cpu.memory.empty((size + LINE,), "uint8")
        start = -self.pointer(block) % LINE
        return block[start : start + size].view(self.dtype).reshape(shape)

    def zeros(self, shape: tuple[int, ...]) -> Array:
        """The same, all zeros."""
        array = self.empty(shape)
        array[...] = 0
        return array

    def lasting(self, shape: tuple[int, ...]) -> Array:
        """The same as ``empty``: all of it is kept."""
        return self.empty(shape)


class MixedAlignedHost(MixedNumpyHost, AlignedHost):
    """The same for arrays of 16 bits."""


@functools.lru_cache(maxsize=16)
def host_of(dtype: str) -> AlignedHost:
    """The host of arrays of a dtype."""
    types = DTYPES[dtype]
    if types.mixed:
        return MixedAlignedHost(types.name, host_of(types.math.name))
    return AlignedHost(types.storage.name)
