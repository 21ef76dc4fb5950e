"""NumPy arrays on memory that TensorFlow takes over without a copy."""

from __future__ import annotations

import math

from anycell.engines import cpu
from anycell.keras import blas
from anycell.numpy.host import Array, NumpyHost

LINE = 64  # bytes: what TensorFlow takes as it is begins on such a border


class AlignedHost(NumpyHost):
    """Arrays that begin on a cache line; those of three axes, if ``second``, with their second row.

    The outputs of a layer are the second row, and on, of its hidden states.
    """

    def __init__(self, dtype: str, threads: int, second: bool = False) -> None:
        super().__init__(dtype)
        self.threads, self.second = threads, second

    def empty(self, shape: tuple[int, ...]) -> Array:
        """Memory as it comes, warm where there is a lot of it."""
        size = math.prod(shape) * self.dtype.itemsize
        lead = size // shape[0] if self.second and len(shape) == 3 and shape[0] else 0
        block = cpu.memory.empty((size + LINE,), "uint8")
        start = -(self.pointer(block) + lead) % LINE
        return block[start : start + size].view(self.dtype).reshape(shape)

    def lasting(self, shape: tuple[int, ...]) -> Array:
        """The same: all of it is kept."""
        return self.empty(shape)

    def matmul(self, a: Array, b: Array, out: Array) -> None:
        """``out = a @ b``."""
        blas.matmul(a, b, out, self.threads)

    def matmul_add(self, a: Array, b: Array, out: Array) -> None:
        """``out += a @ b``."""
        blas.matmul_add(a, b, out, self.threads)
