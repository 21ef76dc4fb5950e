"""A driver without a device: its launches run in Triton's interpreter, on the host's memory.

It has those functions of CUDA's driver that start kernels, as C functions, so all that starts
kernels starts them here too. A kernel's handle is its number.

Programs of a cooperative kernel run by turns, so that they can wait for one another.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from anycell.engines.gpu import build
from anycell.engines.gpu.build import Binary
from anycell.engines.gpu.text import Printed

FAILED = 999  # CUDA_ERROR_UNKNOWN
_turn = threading.Lock()  # Triton replaces functions of its language while it interprets a kernel
_TYPES: dict[str, Any] = {"i32": np.int32, "i64": np.int64, "u64": np.uint64}
_POINTER, _SIZES = ctypes.c_void_p, [ctypes.c_uint32] * 7
_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int32, _POINTER, *_SIZES, _POINTER, ctypes.POINTER(_POINTER), _POINTER
)
_COOPERATIVE = ctypes.CFUNCTYPE(
    ctypes.c_int32, _POINTER, *_SIZES, _POINTER, ctypes.POINTER(_POINTER)
)
_CURRENT = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.POINTER(ctypes.c_uint64))


class Started(NamedTuple):
    """A launch as the driver gets it; ``parameters`` are the addresses of the arguments."""

    handle: int
    grid: tuple[int, int, int]
    threads: tuple[int, ...]
    shared: int
    stream: int | None
    parameters: Any
    cooperative: bool


class HostDriver:
    """The functions of CUDA's driver that start kernels, as C functions that call ``launch``."""

    def __init__(self) -> None:
        self.cuLaunchKernel = _LAUNCH(lambda *given: self._launch(*given[:-1], together=False))
        self.cuLaunchCooperativeKernel = _COOPERATIVE(
            lambda *given: self._launch(*given, together=True)
        )
        self.cuCtxGetCurrent = _CURRENT(self.current)

    def _launch(self, handle: int, *given: Any, together: bool) -> int:
        *shape, shared, stream, parameters = given
        x, y, z, *threads = shape
        one = Started(handle, (x, y, z), tuple(threads), shared, stream, parameters, together)
        return self.launch(one)

    def launch(self, one: Started) -> int:
        """Starts a kernel; returns the driver's error, or 0."""
        raise NotImplementedError

    def current(self, context: Any) -> int:
        """Writes the context of the calling thread."""
        context[0] = 1
        return 0


class Interpreter(HostDriver):
    """The driver.

    Attributes:
        kernels: by handle, which begin at 1.
        raised: the error of the last launch that failed; None after it has been raised.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Printed] = []
        self.raised: BaseException | None = None

    def load(self, printed: Printed) -> tuple[Binary, int]:
        """A stand-in for the kernel's machine code, and its handle."""
        self.kernels.append(printed)
        return Binary(printed.name, b"", "", 0, printed.warps, 0, 0), len(self.kernels)

    def launch(self, one: Started) -> int:
        try:
            self.start(self.kernels[one.handle - 1], one.grid, one.parameters)
        except BaseException as error:  # it must not pass through C
            self.raised = error
            return FAILED
        return 0

    def start(self, printed: Printed, grid: tuple[int, ...], parameters: Any) -> None:
        """Runs all programs of a kernel."""
        import triton.language as tl
        from triton.runtime.interpreter import TensorHandle, interpreter_builder

        from anycell.engines.gpu.library import call

        values: list[Any] = []
        none = [None] * (tl.str_to_ty.__code__.co_argcount - 1)  # Triton 3.3 takes the name alone
        for n, (_, kind) in enumerate(printed.arguments):
            of = tl.str_to_ty(kind, *none)
            cell = bytes(ctypes.c_uint64.from_address(parameters[n]))
            number = np.frombuffer(cell, _TYPES.get(kind, np.uint64), 1).copy()
            values.append(tl.tensor(TensorHandle(number, of), of))
        function = build.function(printed)
        with _turn, warnings.catch_warnings():
            # The largest of numbers that are all NaN is NaN, as on a device.
            warnings.filterwarnings("ignore", "All-NaN slice", RuntimeWarning)
            if printed.cooperative:
                turns = Turns(lambda: function(*values), grid, interpreter_builder)
                call[(1,)](turns.run)  # which makes the language the interpreter's
            else:
                function[grid](*values)


class Turns:
    """The programs of a grid, one at a time: each runs until its next barrier of threads, then the
    next one. Each has a thread of Python.
    """

    def __init__(self, program: Callable[[], None], grid: tuple[int, ...], builder: Any) -> None:
        self.program, self.builder, self.shape = program, builder, (*grid, *[1] * (3 - len(grid)))
        self.places = [*itertools.product(*map(range, self.shape))]
        self.turns = [threading.Semaphore(0) for _ in self.places]
        self.running = [*range(len(self.places))]
        self.current = 0
        self.raised: BaseException | None = None

    def run(self) -> None:
        """Runs all programs."""
        self.builder.set_grid_dim(*self.shape)
        self.builder.create_barrier = self.barrier
        try:
            errors = np.geterr()
            threads = [threading.Thread(target=self._run, args=(n, errors)) for n in self.running]
            for thread in threads:
                thread.start()
            self.turns[0].release()
            for thread in threads:
                thread.join()
        finally:
            del self.builder.create_barrier
        if self.raised is not None:
            raise self.raised

    def _run(self, n: int, errors: Any) -> None:
        """Runs a program in its thread; ``errors``: what NumPy does about errors."""
        self._take(n)
        try:
            if self.raised is None:
                with np.errstate(**errors):
                    self.program()
        except BaseException as error:
            self.raised = self.raised or error
        following = self._next()
        self.running.remove(n)
        self.turns[following].release()

    def _next(self) -> int:
        """The program whose turn comes next."""
        place = self.running.index(self.current) + 1
        return self.running[place % len(self.running)]

    def _take(self, n: int) -> None:
        """Waits for the turn of a program."""
        self.turns[n].acquire()
        self.current = n
        self.builder.set_grid_idx(*self.places[n])

    def barrier(self) -> None:
        """Runs the other programs until their barriers."""
        mine, following = self.current, self._next()
        self.turns[following].release()
        self._take(mine)
        if self.raised is not None:
            raise self.raised
