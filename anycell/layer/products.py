"""Products that are parallel in time: whose matmul multiplies, ours or the framework's.

Ours runs on the gang of the kernels: no second pool of threads fights it for the cores, and its
bits do not depend on the number of threads. The framework's multiplies where it is faster. That
depends on the library and on who made the processor; ``RULES`` has the figures.
``ANYCELL_MATMUL=ours`` or ``host`` overrides the rule wherever both can multiply.
"""

from __future__ import annotations

import math
import os
from typing import Any, NamedTuple

from anycell.engines import cpu
from anycell.layer.arguments import Array
from anycell.layer.run import extent
from anycell.layer.signature import MATRIX

ENV = "ANYCELL_MATMUL"


class Rule(NamedTuple):
    """When our matmul multiplies.

    Attributes:
        least: multiply-adds of a product from which it does.
        few: rows, or columns, of a result with fewer of which it does not: to pack the other matrix
            costs more than it saves.
        why: a sentence for ``anycell doctor``.
    """

    least: float
    few: int
    why: str

    def ours(self, rows: int, columns: int, inner: int) -> bool:
        """Whether it multiplies ``[rows, inner]`` by ``[inner, columns]``."""
        return rows >= self.few <= columns and rows * columns * inner >= self.least


# The rate of our matmul over the library's, at the products of shapes.json in float32, one thread /
# two: medians, each library in a process of its own.
#
#     processor                       MKL (PyTorch)      OpenBLAS (NumPy)
#     AMD Zen 5, AVX-512              - / 2.0            -
#     AMD Zen 4, AVX-512              1.1 / 1.15         1.1 / 1.15
#     AMD Zen 3, AVX2                 0.93 / 1.2         0.87 / 0.86
#     Intel Cascade Lake, AVX-512     0.9 / 0.9          -
#
# On AMD MKL is slower from 2^21 multiply-adds on; from 2^22 on that outweighs what our call costs.
# NumPy's OpenBLAS stays in the calling thread up to 2^18 multiply-adds; beyond, its threads spin
# for a while after each matmul, on cores that the kernels need. Other processors have not been
# measured, and there PyTorch may bring another library.
_THREADS = "OpenBLAS's idle threads spin on the cores of the kernels"
RULES = {
    ("numpy", True): Rule(2**18 + 1, 4, f"ours from 2^18 multiply-adds on: {_THREADS}"),
    ("numpy", False): Rule(2**18 + 1, 4, f"ours from 2^18 multiply-adds on: {_THREADS}"),
    ("torch", True): Rule(2**22, 12, "ours from 2^22 multiply-adds on: MKL is slower on AMD"),
    ("torch", False): Rule(math.inf, 0, "PyTorch's: it is as fast as ours or faster here"),
}
NARROW = Rule(math.inf, 0, "the library's: without fused multiply-adds its vectors may be wider")


CHOSEN: dict[str, Rule] = {}  # by library, from the first product on


def rule(library: str) -> Rule:
    """The rule for arrays of a framework, "numpy" or "torch", in this process.

    Raises:
        ValueError: for an ``ANYCELL_MATMUL`` that is neither "ours" nor "host".
    """
    if library not in CHOSEN:
        CHOSEN[library] = _choose(library)
    return CHOSEN[library]


def _choose(library: str) -> Rule:
    said = os.environ.get(ENV, "")
    if said not in ("", "ours", "host"):
        raise ValueError(f"{ENV}={said!r}: expected ours or host. Set it to one, or unset it.")
    if said == "ours":
        return Rule(0, 0, f"ours, as {ENV} says")
    if said == "host":
        return Rule(math.inf, 0, f"the library's, as {ENV} says")
    return RULES[library, cpu.isa.amd()] if cpu.isa.current().fma else NARROW


def multiply(
    host: Any, number: str, a: Array, b: Array, out: Array, add: bool, threads: int, scales: int = 0
) -> None:
    """``out = a @ b``, or ``out += a @ b``, by our matmul.

    Args:
        host: of the arrays. One of the last two strides of ``a`` and ``b`` is 1, and the rows of
            ``out`` are dense.
        number: the row of ``DTYPES`` that says what they consist of.
        scales: address of the scales of columns, where ``b`` consists of integers.
    """
    places = []  # addresses and strides; 1 of an axis that nobody steps along
    for array in (a, b, out):
        (rows, columns), (row, column) = array.shape, host.strides(array)
        places.append((host.pointer(array), row if rows > 1 else 1, column if columns > 1 else 1))
    left, right, into = places
    bounds = tuple(extent(host, array) for array in (a, b, out)) if cpu.check.ON else ()
    sizes = a.shape[0], b.shape[1], a.shape[1]
    cpu.multiply(number, sizes, left, right, into[:2], add, threads, bounds, scales)


class Products:
    """Mixin of hosts: their matmuls, ours by the rule of the library or the library's own."""

    dtype: Any
    wide: Any
    number: str  # the row of DTYPES
    library: str  # whose matmul is the other one

    def threads(self) -> int:
        """The threads of a matmul, at most."""
        return cpu.pool.threads()

    def project(self, x: Array, weight: Array) -> Array:
        """``x @ weight.T`` as a new array of what the cell computes with."""
        out = self.wide.empty((x.shape[0], weight.shape[0]))
        self.matmul(x, weight.T, out)
        return out

    def matmul(self, a: Array, b: Array, out: Array, add: bool = False) -> None:
        """``out = a @ b``."""
        if not (self.ours(a, b) and self._multiply(a, b, out, add)):
            self.theirs(a, b, out, add)

    def matmul_add(self, a: Array, b: Array, out: Array) -> None:
        """``out += a @ b``."""
        self.matmul(a, b, out, True)

    def ours(self, a: Array, b: Array) -> bool:
        """Whether our matmul multiplies ``a @ b``."""
        try:
            least, few, _ = CHOSEN[self.library]
        except KeyError:
            least, few, _ = rule(self.library)
        (rows, inner), columns = a.shape, b.shape[1]
        return rows >= few <= columns and rows * columns * inner >= least

    def theirs(self, a: Array, b: Array, out: Array, add: bool) -> None:
        """``out = a @ b``, or ``out += a @ b``, by the library."""
        raise NotImplementedError

    def _multiply(self, a: Array, b: Array, out: Array, add: bool) -> bool:
        """Computes the product by our matmul; returns False, without computing, where the rows of
        ``out`` are not dense.
        """
        host: Any = self
        if out.shape[1] > 1 and host.strides(out)[1] != 1:
            return False
        a, b = host.fit(a, MATRIX), host.fit(b, MATRIX)
        multiply(self, self.number, a, b, out, add, self.threads())
        return True


class Mixed(Products):
    """Products of hosts whose arrays, or operands, have fewer bits than the cell computes with.

    All products are ours and add up in float32: frameworks round theirs to 16 bits, and NumPy has
    none.
    """

    def ours(self, a: Array, b: Array) -> bool:
        """Always."""
        return True

    def matmul(self, a: Array, b: Array, out: Array, add: bool = False) -> None:
        """``out = a @ b``, rounded once where ``out`` has 16 bits."""
        narrow = out.dtype != self.wide.dtype
        total = out
        if narrow:
            total = self.widen(out) if add else self.wide.empty(tuple(out.shape))
        self._multiply(a, b, total, add)
        if narrow:
            out[:] = self.narrow(total)

    def widen(self, array: Array) -> Array:
        """The array in the dtype that the cell computes in."""
        raise NotImplementedError

    def narrow(self, array: Array) -> Array:
        """The array in this dtype."""
        raise NotImplementedError
