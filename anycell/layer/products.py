"""Products that are parallel in time, by our matmul or by the framework's.

Our matmul runs on the gang of the kernels: no second pool of threads competes with it for the
cores, and its bits do not depend on the number of threads. The framework's matmul is used if it is
faster and native code can call it, as the MKL in PyTorch.
``ANYCELL_MATMUL=ours`` or ``host`` overrides the rule.
"""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

from anycell.engines import cpu
from anycell.engines.cpu.driver import BLAS, COLUMNS, OURS
from anycell.engines.cpu.ir import X86
from anycell.layer.arguments import Array
from anycell.layer.framework import Framework, extent
from anycell.layer.recipe import CHUNK, View
from anycell.layer.signature import MATRIX
from anycell.plan import Plan

ENV = "ANYCELL_MATMUL"


class Rule(NamedTuple):
    """The choice between the two matmuls.

    Attributes:
        host: whether the library's matmul is used, if there is one to call.
        why: a sentence for ``anycell doctor``.
    """

    host: bool
    why: str


# The speed of our matmul divided by the library's, for the products of shapes.json in float32, with
# one thread / two threads: medians, each library in a process of its own.
#
#     processor                       MKL (PyTorch)      OpenBLAS (NumPy)
#     AMD Zen 5, AVX-512              - / 2.0            -
#     AMD Zen 4, AVX-512              1.1 / 1.15         1.1 / 1.15
#     AMD Zen 3, AVX2                 1.05 / 0.95        0.99 / 0.89
#     Intel Cascade Lake, AVX-512     0.9 / 0.9          -
#
# On Intel's Sapphire Rapids (AVX-512, two threads) layers with our matmul take 0.99 (inference) and
# 1.07 (training) times as long as with MKL. Other processors have not been measured.
AMD = Rule(False, "ours: MKL is slower on AMD")
OTHERS = Rule(True, "MKL, which PyTorch has: it is as fast as ours or faster here")
NO_MKL = Rule(False, "ours: PyTorch has MKL only on x86-64")
NARROW = Rule(True, "the library's: without fused multiply-adds its vectors may be wider")
# NumPy's hosts, and so Keras's, name no library for native code to call.
NUMPY = "ours: OpenBLAS's idle threads spin on the cores of the kernels"


@functools.cache
def rule() -> Rule:
    """The rule for PyTorch's tensors, in this process.

    Raises:
        ValueError: for an ``ANYCELL_MATMUL`` that is neither "ours" nor "host".
    """
    choice = os.environ.get(ENV, "")
    if choice not in ("", "ours", "host"):
        raise ValueError(f"{ENV}={choice!r}: expected ours or host. Set it to one, or unset it.")
    if choice == "ours":
        return Rule(False, f"ours, as {ENV} says")
    if choice == "host":
        return Rule(True, f"the library's, as {ENV} says")
    if not X86:
        return NO_MKL
    if not cpu.isa.current().fma:
        return NARROW
    return AMD if cpu.isa.amd() else OTHERS


def kind_of(host: Framework, plan: Plan, a: View, b: View) -> int:
    """The kind of a product of a pass, see ``driver.KINDS``."""
    if plan.types.plain and rule().host and host.blas and _apart(a) and _apart(b):
        return BLAS
    return OURS if a.strides[1] == 1 else COLUMNS


def _apart(matrix: View) -> bool:
    """Whether the rows, or the columns, of a matrix do not overlap, as BLAS requires. In expanded
    arrays and in windows they share memory.
    """
    return any(
        dense == 1 and (lines == 1 or between >= length > CHUNK)
        for dense, between, lines, length in (
            (*matrix.strides[::-1], *matrix.shape), (*matrix.strides, *matrix.shape[::-1])
        )
    )  # fmt: skip


def multiply(
    host: Framework,
    dtype: str,
    a: Array,
    b: Array,
    out: Array,
    add: bool,
    threads: int,
    scales: int = 0,
) -> None:
    """``out = a @ b``, or ``out += a @ b``, by our matmul.

    Args:
        host: of the arrays. The rows of ``out`` are dense.
        dtype: the row of ``DTYPES`` for their types.
        scales: address of the scales of columns, if ``b`` consists of integers.
    """
    places = []  # addresses and strides, which are 1 for an axis of one element
    right_host = host.eight_bits if scales else host
    arrays: list[Array] = [host.fit(a, MATRIX), right_host.fit(b, MATRIX), out]
    for array in arrays:
        (rows, columns), (row, column) = array.shape, host.strides(array)
        places.append((host.pointer(array), row if rows > 1 else 1, column if columns > 1 else 1))
    left, right, into = places
    bounds = tuple(extent(host, array) for array in arrays) if cpu.check.ON else ()
    sizes = a.shape[0], b.shape[1], a.shape[1]
    cpu.multiply(dtype, sizes, left, right, into[:2], add, threads, bounds, scales)
