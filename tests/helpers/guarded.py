"""Arrays between forbidden pages: a kernel that reads or writes beyond an array ends the process.

They stand in for a sanitizer, which cannot check the machine code that we generate. ``main`` runs
each problem twice on this memory: first all arrays end at a forbidden page, then all begin after
one. It needs a process of its own, and prints each problem before it runs it.
"""

import ctypes
import functools
import itertools
import math
import mmap
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
from problems import Problem, by_cpu, random_problem
from tolerances import assert_close

from anycell import Cell, cell, cells, layer, linear, mean, sigmoid, tanh
from anycell.engines import cpu
from anycell.engines.cpu import isa
from anycell.numpy.check import numpy_dtype
from anycell.numpy.framework import Numpy
from anycell.plan import DTYPES
from anycell.plan.dtype import dtypes

Array = npt.NDArray[Any]
PAGE = mmap.PAGESIZE
FORBIDDEN, READ_AND_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def guarded(shape: tuple[int, ...], dtype: npt.DTypeLike, end: bool, align: int = 1) -> Array:
    """Returns memory full of NaN (of ones, if the dtype has no NaN) whose last or first byte is
    next to a forbidden page; with ``align``, up to ``align - 1`` bytes may lie behind the last.
    """
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    middle = max(1, -(-size // PAGE)) * PAGE
    memory = mmap.mmap(-1, middle + 2 * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (start, start + PAGE + middle):
        assert _libc.mprotect(page, PAGE, FORBIDDEN) == 0, ctypes.get_errno()
    offset = PAGE + (middle - size) // align * align * end
    array = np.frombuffer(memory, kind, math.prod(shape), offset).reshape(shape)
    array.fill(np.nan if kind.kind in "fV" else 1)
    return array


class GuardedHost(Numpy):
    """A host whose arrays all lie next to forbidden pages."""

    def __init__(self, dtype: str, end: bool = True) -> None:
        types = DTYPES[dtype]
        wide = GuardedHost(types.math.name, end) if types.mixed else None
        super().__init__(numpy_dtype(dtype), wide)
        self.end = end

    @functools.cached_property
    def eight_bits(self) -> Any:
        return GuardedHost("int8", self.end)

    def empty(self, shape: tuple[int, ...]) -> Array:
        return guarded(shape, self.dtype, self.end)

    def copy(self, array: Array) -> Array:
        """Returns a copy of an array in guarded memory."""
        copy = guarded(array.shape, array.dtype, self.end)
        copy[...] = array
        return copy

    def zeros(self, shape: tuple[int, ...]) -> Array:
        return self.copy(np.zeros(shape, self.dtype))

    def lasting(self, shape: tuple[int, ...]) -> Array:
        return self.empty(shape)

    def like(self, array: Array) -> Array:
        return self.empty(array.shape)


def scratch(end: bool) -> Callable[..., Any]:
    """Returns a ``cpu.Scratch.take`` that allocates guarded memory."""

    def take(_: cpu.Scratch, size: int) -> cpu.Block:
        block = cpu.Block(0)
        block.memory = guarded((size,), "uint8", end, cpu.LINE)
        block.size, block.address = size, block.memory.__array_interface__["data"][0]
        return block

    return take


# -- problems --------------------------------------------------------------------------------------
@cell(gates="a b", state="h:P m", params="w", static="e")
def Everything(x: Any, r: Any, s: Any, p: Any, e: Any) -> Any:
    """Every kind of argument: a second size, a parameter, a static input, a matmul inside the step,
    a reduction."""
    m = sigmoid(x.a + r.a) * s.m + tanh(x.b - p.w * r.b) * e
    return tanh(linear(m - mean(m), "down", bias=True)), m


BUILT_IN = [getattr(cells, name) for name in cells.__all__]
SIZES = 1, 7, 33
# Shapes (T, B): on both sides of a panel of rows, of a vector of groups of rows, and of the road on
# which the kernel multiplies the input; and shapes without steps or rows.
SHAPES = [(3, 5), (1, 1), (2, 49), (6, 43), (0, 3), (4, 0)]


def problems(
    which: list[Cell], sizes: tuple[int, ...], every: int, seed: int
) -> Iterator[tuple[str, Problem, dict[str, Any]]]:
    """Yields names, problems, and how to solve each: one of every ``every`` combinations."""
    count, rng = itertools.count(seed), np.random.default_rng(seed)
    rounded = ["float32 high", "float32 medium"] if isa.current().tiles else []
    for one, hidden, row in itertools.product(which, sizes, [*dtypes("cpu"), *rounded]):
        if row != "float32" and one not in (cells.LSTM, cells.sLSTM, Everything):
            continue
        dtype, _, precision = row.partition(" ")
        roads = itertools.product(SHAPES, (False, True), (1, 2, 3), (False, True))
        for shape, masked, threads, projected in roads:
            if next(count) % every:
                continue
            options: dict[str, Any] = {"masked": masked, "resets": masked}
            if masked:
                options |= {"masked_output": "repeat" if threads == 2 else "zero"}
                options |= {"reverse": threads == 3}
            if one is cells.LSTM and threads > 1:
                options["dropped"] = "each" if threads == 2 else "all"
            problem = random_problem(one, (*shape, hidden), rng, "float64", **options)
            how = {"threads": threads, "projected": projected}
            if precision:
                how["precision"] = precision
            name = f"{one} H={hidden} {dtype} T={shape[0]} B={shape[1]} {options} {how}"
            yield name, problem.astype(dtype), how


def main(which: list[Cell], sizes: tuple[int, ...], every: int = 1, seed: int = 0) -> None:
    """Solves problems on ordinary memory and between forbidden pages, and compares the results."""
    count, layer.heuristics.WORTH_A_THREAD = 0, 0  # as many threads as are asked for
    for name, problem, how in problems(which, sizes, every, seed):
        wanted = by_cpu(problem, **how)
        for end in (True, False):
            print(name, "end" if end else "begin", flush=True)
            dtype = problem.dtype
            host = GuardedHost(dtype, end)
            with ExitStack() as stack:
                stack.enter_context(mock.patch.object(cpu.Scratch, "take", scratch(end)))
                stack.enter_context(mock.patch.object(cpu.scratch, "give_back", lambda _: None))
                copies = {name: host.copy(array) for name, array in problem.arrays.items()}
                solution = by_cpu(problem.but(copies), **how, host=host)
            within = f"{dtype} {how['precision']}" if "precision" in how else dtype
            for key, value in wanted.items():
                kind = "gradient" if key.startswith("d ") else "forward"
                assert_close(solution[key], value, within, kind, key)
            count += 1
    print(f"{count} cases", flush=True)
