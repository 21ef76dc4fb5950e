"""Arrays as native code sees them: addresses, strides, and the bounds that ``check`` asks for."""

from __future__ import annotations

from typing import NamedTuple

from anycell.engines import cpu
from anycell.layer.arguments import Array, Host

CHUNK = -1  # a size that is the rows of a chunk


class Matrix(NamedTuple):
    """A matrix as the driver multiplies it: an array, or its part that belongs to a chunk of time.

    Attributes:
        address: of the first number, at the first time.
        shape: rows and columns; ``CHUNK`` for as many as a chunk has rows.
        strides: from row to row and from column to column.
        time, window: bytes from step to step, of the sequence or of the segment at hand.
        size: bytes of a number.
        bounds: the array's, for ``check``.
    """

    address: int
    shape: tuple[int, int]
    strides: tuple[int, int]
    time: int = 0
    window: int = 0
    size: int = 4
    bounds: cpu.check.Bounds | None = None

    @property
    def T(self) -> Matrix:
        """Its transpose."""
        return self._replace(shape=self.shape[::-1], strides=self.strides[::-1])

    def columns(self, begin: int, end: int) -> Matrix:
        """Some of its columns."""
        return self._replace(
            address=self.address + begin * self.strides[1] * self.size,
            shape=(self.shape[0], end - begin),
        )

    @classmethod
    def of(cls, host: Host, array: Array) -> Matrix:
        """An array of two axes."""
        strides = [s if n > 1 else 1 for n, s in zip(array.shape, host.strides(array), strict=True)]
        size = array.dtype.itemsize
        bounds = bounds_of(host, array)
        return cls(host.pointer(array), tuple(array.shape), tuple(strides), 0, 0, size, bounds)  # type: ignore[arg-type]


def extent(host: Host, array: Array) -> cpu.check.Bounds:
    """The first byte of an array and that behind its last."""
    address, size = host.pointer(array), array.dtype.itemsize
    if 0 in array.shape:
        return address, address
    reach = [(n - 1) * s * size for n, s in zip(array.shape, host.strides(array), strict=True)]
    first, last = sum(min(0, r) for r in reach), sum(max(0, r) for r in reach)
    return address + first, address + last + size


def bounds_of(host: Host, array: Array) -> cpu.check.Bounds | None:
    """``extent``, where it is looked at."""
    return extent(host, array) if cpu.check.ON else None
