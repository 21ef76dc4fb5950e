"""A driver without a device: its launches run in Triton's interpreter, on the host's memory.

It has those functions of CUDA's driver that start kernels, as C functions, so all that starts
kernels starts them here too. A kernel's handle is its number.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any, NamedTuple

import numpy as np

from anycell.engines.gpu import build
from anycell.engines.gpu.build import Binary
from anycell.engines.gpu.text import Printed

FAILED = 999  # CUDA_ERROR_UNKNOWN
_turn = threading.Lock()  # Triton replaces functions of its language while it interprets a kernel
_TYPES = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "u64": ctypes.c_uint64}
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
        from triton.runtime.interpreter import TensorHandle

        values: list[Any] = []
        for n, (_, kind) in enumerate(printed.arguments):
            number = _TYPES.get(kind, ctypes.c_uint64).from_address(parameters[n]).value
            if kind[0] == "*":
                pointer = tl.str_to_ty(kind, None)
                handle = TensorHandle(np.array([number], np.uint64), pointer)
                values.append(tl.tensor(handle, pointer))
            else:
                values.append(number)
        with _turn:
            build.function(printed)[grid](*values)
