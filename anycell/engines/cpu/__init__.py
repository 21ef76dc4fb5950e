"""The CPU engine: plans as LLVM kernels, run on all cores.

It takes addresses, shapes and strides, never a framework's arrays.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from anycell.engines.cpu import check, memory, pool
from anycell.engines.cpu import kernel as _kernel
from anycell.engines.cpu.kernel import Kernel
from anycell.plan import Plan

LINE = 64  # bytes of a cache line: weights and scratch start on one
WORTH_SPREADING = 1 << 16  # numbers to pack below which another thread takes longer to wake


def compiled(plan: Plan, backward: bool = False) -> Kernel:
    """The machine code of a plan, forward or backward; see ``kernel.compiled``."""
    return _kernel.compiled(plan, backward)


class Table:
    """The argument table of one kernel call: 64-bit integers and addresses by name, 0 until set.

    Attributes:
        bounds: of the arrays that addresses point into, for ``check``; empty if it is off.
    """

    __slots__ = ("address", "bounds", "entries", "index")

    def __init__(self, index: dict[str, int], entries: array[int] | None = None) -> None:
        self.index = index
        self.bounds: dict[str, check.Bounds] = {}
        # Behind the entries, on a cache line of its own, the counter of the threads' barrier.
        self.entries = entries or array("q", bytes(8 * (len(index) + 2 * LINE // 8)))
        self.address, _ = self.entries.buffer_info()
        self.set(barrier=self.address + 8 * self._barrier)

    @property
    def _barrier(self) -> int:
        return len(self.index) + LINE // 8

    def copy(self) -> Table:
        """A table of its own with the same entries."""
        table = Table(self.index, self.entries[:])
        if check.ON:
            table.bounds.update(self.bounds)
        return table

    def set(self, **values: int) -> None:
        """Sets entries; each must exist in this kernel."""
        entries, index = self.entries, self.index
        for name, value in values.items():
            entries[index[name]] = value

    def step(self, name: str, time: int, row: int) -> None:
        """Sets the strides of an array, in elements, per step and per row of the batch."""
        entries, at = self.entries, self.index[name]  # they follow the address
        entries[at + 1], entries[at + 2] = time, row

    def start(self, steps: int) -> None:
        """Makes the table ready for a call over so many steps."""
        self.entries[self._barrier] = 0
        self.set(steps=steps)


class Block:
    """Memory, and where it lies: NumPy takes longer to say it than to allocate."""

    __slots__ = ("address", "memory", "size")

    def __init__(self, size: int) -> None:
        self.memory, self.size = np.empty(size, np.uint8), size
        self.address = self.memory.__array_interface__["data"][0]


class Scratch:
    """Memory for calls of kernels, kept from call to call: fresh pages cost more than the work.

    Threads share it, since those of a framework may come to Python for one call only; there are as
    many blocks as there were calls at a time. Both methods are one operation of a list's: atomic.
    """

    def __init__(self) -> None:
        self.idle: list[Block] = []

    def take(self, sizes: Sequence[int]) -> tuple[Block, list[int]]:
        """Addresses of blocks of these sizes in bytes, each on its own cache line,
        and what keeps them alive.

        Give that back for the next call; without it (an error) a later one allocates.
        """
        total = sum(sizes) + LINE * (len(sizes) + 1)
        try:
            block = self.idle.pop()
        except IndexError:
            block = Block(total)
        if block.size < total:
            block = Block(total)
        at, addresses = block.address, []
        for size in sizes:
            at += -at % LINE
            addresses.append(at)
            at += size
        return block, addresses

    def give_back(self, block: Block) -> None:
        """Keeps it for the next call."""
        self.idle.append(block)


scratch = Scratch()


def pack(
    kernel: Kernel,
    number: int,
    packed: int,
    source: int,
    strides: tuple[int, ...],
    bias_x: int,
    bias_h: int,
    threads: int,
    inputs: int = 0,
    bounds: check.Bounds | None = None,
) -> None:
    """Packs the weight of a matmul, and its biases, for ``kernel``.

    Args:
        number: which matmul of the cell.
        packed: address of ``kernel.packed_elements[number]`` numbers, on a cache line.
        source, strides: the weight ``[out, in]`` or ``[heads, out/heads, in/heads]``, strides in
            elements; one of the last two must be 1.
        bias_x, bias_h: addresses of ``[out]``, 0 where absent.
        threads: at most so many.
        inputs: if not 0 it is the weight of the input, ``[out, inputs]``, that is packed, and
            ``packed`` has place for ``kernel.projection(inputs).packed_elements``.
        bounds: of the weight's array, for ``check``.
    """
    heads, rows, columns = (0, *strides)[-3:]
    inner = inputs or kernel.inner[number]
    if check.ON:
        shape = kernel.sources[number] if not inputs else (1, kernel.sources[number][1], inputs)
        axes = tuple(zip(shape, (heads, rows, columns), strict=True))
        for span in check.reach("weight", source, kernel.itemsize, 1, axes):
            check.inside(span, bounds)
    table = array("q", [source, heads, rows, columns, bias_x, bias_h, packed, inner])
    parts = threads if kernel.packed_elements[number] > WORTH_SPREADING else 1
    pool.parallel(kernel.pack[number], table.buffer_info()[0], parts)


def hyperparameters(plan: Plan) -> np.ndarray:
    """The values of a cell's run-time hyperparameters, as its kernels read them."""
    return np.array(list(plan.cell.hyper.values()) or [0.0], plan.dtype)


def run(kernel: Kernel, calls: Sequence[Table], threads: int) -> None:
    """Runs one call per direction, all of the same kernel, on up to ``threads`` threads."""
    if check.ON:
        for call in calls:
            check.check(kernel, call.index, call.entries, call.bounds, threads)
    header = array("q", [len(calls), *[call.address for call in calls]])
    pool.parallel(kernel.run, header.buffer_info()[0], threads)


__all__ = [
    "LINE",
    "Block",
    "Kernel",
    "Scratch",
    "Table",
    "check",
    "compiled",
    "hyperparameters",
    "memory",
    "pack",
    "pool",
    "run",
    "scratch",
]
