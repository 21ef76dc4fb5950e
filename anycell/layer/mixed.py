"""Products of 16-bit arrays, added up in float32 by the CPU engine's own matmul; and those of
float32 arrays as sums of two numbers of bfloat16.

Frameworks round the results of theirs to 16 bits, and NumPy has none.
"""

from __future__ import annotations

from typing import Any

from anycell.engines import cpu
from anycell.layer.arguments import Array
from anycell.layer.run import extent
from anycell.layer.signature import DENSE


class Mixed:
    """Mixin of hosts whose arrays, or what they multiply, have fewer bits than what a cell computes
    with.
    """

    dtype: Any
    wide: Any
    number: str  # the name of the dtype's row

    def threads(self) -> int:
        """At most so many for a matmul."""
        return cpu.pool.threads()

    def project(self, x: Array, weight: Array) -> Array:
        """``x @ weight.T`` in float32."""
        out = self.wide.empty((x.shape[0], weight.shape[0]))
        self._product(x, weight.T, out, add=False)
        return out

    def matmul(self, a: Array, b: Array, out: Array) -> None:
        """``out = a @ b``; rounded once where ``out`` has 16 bits."""
        if out.dtype == self.wide.dtype:
            self._product(a, b, out, add=False)
            return
        total = self.wide.empty(tuple(out.shape))
        self._product(a, b, total, add=False)
        out[:] = self.narrow(total)

    def matmul_add(self, a: Array, b: Array, out: Array) -> None:
        """``out += a @ b``."""
        if out.dtype == self.wide.dtype:
            self._product(a, b, out, add=True)
            return
        total = self.widen(out)
        self._product(a, b, total, add=True)
        out[:] = self.narrow(total)

    def widen(self, array: Array) -> Array:
        """The array in the dtype that the cell computes in."""
        raise NotImplementedError

    def narrow(self, array: Array) -> Array:
        """The array in this dtype."""
        raise NotImplementedError

    def _product(self, a: Array, b: Array, out: Array, add: bool) -> None:
        (a, left), (b, right), (out, into) = (self._matrix(array) for array in (a, b, out))
        sizes = a.shape[0], b.shape[1], a.shape[1]
        bounds = tuple(extent(self, array) for array in (a, b, out)) if cpu.check.ON else ()  # type: ignore[arg-type]
        cpu.multiply(self.number, sizes, left, right, into[:2], add, self.threads(), bounds)

    def _matrix(self, array: Array) -> tuple[Array, tuple[int, int, int]]:
        """A matrix with dense rows or columns, its address and strides; 1 of an axis that nobody
        steps along.
        """
        host: Any = self
        (rows, columns), strides = array.shape, host.strides(array)
        row, column = (s if n > 1 else 1 for n, s in zip((rows, columns), strides, strict=True))
        if 1 not in (row, column):
            return self._matrix(host.fit(array, DENSE))
        return array, (host.pointer(array), row, column)
