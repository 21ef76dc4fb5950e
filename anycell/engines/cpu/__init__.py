"""The CPU engine: plans as LLVM kernels, run on all cores.

It takes addresses, shapes and strides, never a framework's arrays.
"""

from __future__ import annotations

import dataclasses
import functools
from array import array
from collections.abc import Sequence

import numpy as np

from anycell.engines.cpu import check, driver, gemm, isa, memory, pool, threads
from anycell.engines.cpu.door import WORTH_SPREADING
from anycell.engines.cpu.kernel import Kernel, compiled
from anycell.plan import DTYPES, LINE, Plan


def rounded(plan: Plan, precision: str) -> Plan:
    """Returns a layer's plan with matmuls that round as far as a framework's precision allows:
    float32 to sums of two bfloat16 numbers ("high") or to one ("medium"). Returns the plan itself
    if that gains nothing: without an instruction for it, and for other dtypes.
    """
    target = isa.current()
    gained = target.tiles or (target.pairs and precision == "medium")
    return _rounded(plan, precision) if gained else plan


@functools.lru_cache(maxsize=512)
def _rounded(plan: Plan, precision: str) -> Plan:
    dtype = f"{plan.dtype} {precision}"
    return dataclasses.replace(plan, dtype=dtype) if dtype in DTYPES else plan


class Block:
    """Memory on a cache line, and its address, which takes NumPy longer than the allocation."""

    __slots__ = ("address", "memory", "size")

    def __init__(self, size: int) -> None:
        self.memory, self.size = np.empty(size + LINE, np.uint8), size
        address = self.memory.__array_interface__["data"][0]
        self.address = address + -address % LINE


class Scratch:
    """Memory for calls of kernels, kept from call to call: fresh pages cost more than the work.

    Threads share it, since a framework's thread may enter Python for a single call only. There are
    as many blocks as there were concurrent calls. Each method is one atomic operation on a list.
    """

    def __init__(self) -> None:
        self.idle: list[Block] = []

    def take(self, size: int) -> Block:
        """Returns a block of at least ``size`` bytes.

        Give the block back for the next call. If an error prevents this, a later call allocates.
        """
        try:
            block = self.idle.pop()
        except IndexError:
            return Block(size)
        return block if block.size >= size else Block(size)

    def give_back(self, block: Block) -> None:
        """Keeps the block for the next call."""
        self.idle.append(block)


scratch = Scratch()


def hyperparameters(plan: Plan) -> np.ndarray:
    """The values of a cell's run-time hyperparameters, as its kernels read them."""
    return np.array(list(plan.cell.hyper.values()) or [0.0], plan.types.math.name)


def room(dtype: str, table: Sequence[int]) -> int:
    """Returns the bytes of memory that the driver needs for a pass's table, see ``driver``."""
    entries = array("q", table)
    driver.compiled(dtype, isa.current()).room(entries.buffer_info()[0])
    return entries[driver.PASS.index("scratch_bytes")]


def multiply(
    dtype: str,
    sizes: tuple[int, int, int],
    a: tuple[int, int, int],
    b: tuple[int, int, int],
    c: tuple[int, int],
    add: bool,
    threads: int,
    bounds: tuple[check.Bounds, ...] = (),
    scales: int = 0,
) -> None:
    """``C = A @ B``, or ``C += A @ B``, see ``gemm``.

    Args:
        dtype: of A and B; C has the type in which products add up. Only B may have integers.
        sizes: rows, columns, and the length of the sums.
        a, b: address, strides between rows and between columns, in elements; one stride is 1.
        c: address, stride between rows.
        threads: the maximum number of threads.
        bounds: of the three arrays, for ``check``.
        scales: address of the scales of B's columns, dense, if B has integers.
    """
    matmul = driver.matmul("gemm" if a[2] == 1 else "columns", dtype, isa.current())
    gang = pool.gang(threads)
    entries = array("q", [*sizes, *a, *b, *c, add, min(threads, pool.MOST), gang, scales, 0, 0])
    if check.ON:
        types = DTYPES[dtype]
        sizes_ = types.storage.bytes, types.weights.bytes, types.accumulate.bytes
        check.check_product(sizes_, entries, bounds)
    address = entries.buffer_info()[0]
    matmul.needs(address)
    block = scratch.take(entries[-1])
    entries[-2] = block.address
    matmul.run(address)
    scratch.give_back(block)


__all__ = [
    "WORTH_SPREADING", "Block", "Kernel", "Scratch", "check", "compiled", "driver", "gemm",
    "hyperparameters", "isa", "memory", "multiply", "pool", "room", "scratch", "threads",
]  # fmt: skip
