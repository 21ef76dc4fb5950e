"""A driver without a device: its launches run in Triton's interpreter, on the host's memory.

It has those functions of CUDA's driver that start kernels, as C functions, so all that starts
kernels starts them here too. A kernel's handle is its number.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from anycell.engines.gpu import build
from anycell.engines.gpu.build import Binary
from anycell.engines.gpu.text import Printed

FAILED = 999  # CUDA_ERROR_UNKNOWN
_TYPES = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "u64": ctypes.c_uint64}
_POINTER, _SIZES = ctypes.c_void_p, [ctypes.c_uint32] * 7
_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int32, _POINTER, *_SIZES, _POINTER, ctypes.POINTER(_POINTER), _POINTER
)
_COOPERATIVE = ctypes.CFUNCTYPE(
    ctypes.c_int32, _POINTER, *_SIZES, _POINTER, ctypes.POINTER(_POINTER)
)
_CURRENT = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.POINTER(ctypes.c_uint64))


class HostDriver:
    """The functions of CUDA's driver that start kernels, as C functions that call ``launch``."""

    def __init__(self) -> None:
        self.cuLaunchKernel = _LAUNCH(self._launch)
        self.cuLaunchCooperativeKernel = _COOPERATIVE(self._launch_together)
        self.cuCtxGetCurrent = _CURRENT(self.current)

    def _launch(self, handle: int, x: int, y: int, z: int, threads: int, *given: Any) -> int:
        *_, parameters, _ = given
        return self.launch(handle, (x, y), threads, parameters, False)

    def _launch_together(
        self, handle: int, x: int, y: int, z: int, threads: int, *given: Any
    ) -> int:
        return self.launch(handle, (x, y), threads, given[-1], True)

    def launch(
        self, handle: int, grid: tuple[int, int], threads: int, parameters: Any, cooperative: bool
    ) -> int:
        """Starts a kernel, whose arguments lie at the addresses ``parameters``."""
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
        """What stands for the kernel's machine code, and its handle."""
        self.kernels.append(printed)
        return Binary(printed.name, b"", "", 0, printed.warps, 0, 0), len(self.kernels)

    def launch(
        self, handle: int, grid: tuple[int, int], threads: int, parameters: Any, cooperative: bool
    ) -> int:
        try:
            self.start(self.kernels[handle - 1], grid, parameters)
        except BaseException as error:  # it must not pass through C
            self.raised = error
            return FAILED
        return 0

    def start(self, printed: Printed, grid: tuple[int, int], parameters: Any) -> None:
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
        build.function(printed)[grid](*values)
