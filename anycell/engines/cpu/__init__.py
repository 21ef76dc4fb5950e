"""The CPU engine: plans as LLVM kernels, run on all cores.

It takes addresses, shapes and strides, never a framework's arrays.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from anycell.engines.cpu import kernel as _kernel
from anycell.engines.cpu import memory, pool
from anycell.engines.cpu.kernel import Kernel
from anycell.plan import Plan

LINE = 64  # bytes of a cache line: weights and scratch start on one


def compiled(plan: Plan, backward: bool = False) -> Kernel:
    """The machine code of a plan, forward or backward; see ``kernel.compiled``."""
    return _kernel.compiled(plan, backward)


class Arguments:
    """The argument table of one kernel call: 64-bit integers and addresses by name, 0 until set."""

    __slots__ = ("address", "barrier", "index", "table")

    def __init__(self, kernel: Kernel) -> None:
        self.index = kernel.index
        # Behind the entries, on a cache line of its own, the counter of the threads' barrier.
        self.table = np.zeros(len(self.index) + 2 * LINE // 8, np.int64)
        self.address = self.table.__array_interface__["data"][0]
        self.barrier = self.address + (len(self.index) + LINE // 8) * 8

    def set(self, **values: int) -> None:
        """Sets entries; each must exist in this kernel."""
        table, index = self.table, self.index
        for name, value in values.items():
            table[index[name]] = value

    def start(self, steps: int) -> None:
        """Makes the table ready for a call over so many steps."""
        self.table[len(self.index) + LINE // 8] = 0
        self.table[self.index["steps"]] = steps


_NOTHING = np.empty(0, np.uint8)


class Scratch(threading.local):
    """Memory of a thread that calls kernels, kept from call to call:
    fresh pages cost more than the work.
    """

    def __init__(self) -> None:
        self.buffer = _NOTHING

    def take(self, sizes: Sequence[int]) -> tuple[np.ndarray, list[int]]:
        """Addresses of blocks of these sizes in bytes, each on its own cache line,
        and what keeps them alive.

        Give the buffer back for the next call; without that (an error, or a call within a call from
        a signal handler) the next one allocates.
        """
        total = sum(sizes) + LINE * (len(sizes) + 1)
        buffer, self.buffer = self.buffer, _NOTHING
        if buffer.size < total:
            buffer = np.empty(total, np.uint8)
        at, addresses = buffer.__array_interface__["data"][0], []
        for size in sizes:
            at += -at % LINE
            addresses.append(at)
            at += size
        return buffer, addresses

    def give_back(self, buffer: np.ndarray) -> None:
        self.buffer = buffer


scratch = Scratch()


def pack(
    kernel: Kernel,
    packed: int,
    source: int,
    strides: tuple[int, ...],
    bias_x: int,
    bias_h: int,
    threads: int,
) -> None:
    """Packs a recurrent weight ``[G*H, H]`` and its biases for ``kernel``.

    Args:
        packed: address of ``kernel.packed_elements`` numbers, on a cache line.
        source, strides: the weight, strides in elements; one of them must be 1.
        bias_x, bias_h: addresses of ``[G*H]``, 0 where absent.
        threads: at most so many.
    """
    if not kernel.pack:
        return
    table = np.array([source, *strides, bias_x, bias_h, packed], np.int64)
    # Below that a second thread takes longer to wake than to help.
    parts = threads if kernel.packed_elements > 1 << 16 else 1
    pool.parallel(kernel.pack, table.__array_interface__["data"][0], parts)


def hyperparameters(plan: Plan) -> np.ndarray:
    """The values of a cell's run-time hyperparameters, as its kernels read them."""
    return np.array(list(plan.cell.hyper.values()) or [0.0], plan.dtype)


def run(kernel: Kernel, calls: Sequence[Arguments], threads: int) -> None:
    """Runs one call per direction, all of the same kernel, on up to ``threads`` threads."""
    header = np.array([len(calls), *(call.address for call in calls)], np.int64)
    pool.parallel(kernel.run, header.__array_interface__["data"][0], threads)


__all__ = [
    "LINE",
    "Arguments",
    "Kernel",
    "compiled",
    "hyperparameters",
    "memory",
    "pack",
    "pool",
    "run",
    "scratch",
]
