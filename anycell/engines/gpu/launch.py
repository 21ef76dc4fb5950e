"""Starts kernels on a device, through the CUDA driver's own interface.

Frameworks only have to provide addresses and a stream. The driver library is loaded when the first
kernel starts.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping
from typing import Any

from anycell.engines.gpu import build
from anycell.engines.gpu.arrays import DeviceArrays
from anycell.engines.gpu.build import Binary
from anycell.engines.gpu.capacity import Device
from anycell.engines.gpu.refusals import Refused
from anycell.engines.gpu.text import Printed

_SHARED_LIMIT = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_WITHOUT_ASKING = 48 << 10  # bytes of shared memory that every kernel may use
# CU_DEVICE_ATTRIBUTE_...: COMPUTE_CAPABILITY_MAJOR, _MINOR, MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
# MAX_REGISTERS_PER_MULTIPROCESSOR, MULTIPROCESSOR_COUNT
_ATTRIBUTES = (75, 76, 97, 82, 16)
# Driver errors that mean that a kernel does not fit, and leave the context usable. All others are
# raised as they are: after some of them, such as an illegal address, nothing runs any more.
_INVALID_VALUE = 1
_NO_ROOM = {
    701: "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
    720: "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE",
    801: "CUDA_ERROR_NOT_SUPPORTED",
}
_NOT_FOR_THIS_DEVICE = {
    200: "CUDA_ERROR_INVALID_IMAGE",
    209: "CUDA_ERROR_NO_BINARY_FOR_GPU",
    218: "CUDA_ERROR_INVALID_PTX",
    222: "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
}


class Launch:
    """A kernel with its arguments; called once for each step.

    The constructor and a call raise ``Refused`` if the kernel does not fit on the device.

    Args:
        printed: the kernel.
        values: by name an array for each pointer and an int for each number; others are ignored.
        grid: programs along each axis.
        host: of the arrays, which must outlive what runs on its stream.
    """

    def __init__(
        self, printed: Printed, values: Mapping[str, Any], grid: tuple[int, int], host: DeviceArrays
    ) -> None:
        self.printed, self.grid, self.stream = printed, grid, host.stream()
        names = [name for name, _ in printed.arguments]
        self.place = names.index("t") if "t" in names else None
        if build.interpreted():
            self.function = build.function(printed)
            self.arguments = [0 if name == "t" else values[name] for name in names]
            self.start: Callable[[int], None] = self._interpret
            return
        self.kept = values  # arrays stay alive as long as the launch
        numbers = [
            host.pointer(values[name]) if kind[0] == "*" else int(values.get(name, 0))
            for name, kind in printed.arguments
        ]
        aligned = frozenset(
            name
            for (name, kind), number in zip(printed.arguments, numbers, strict=True)
            if number % 16 == 0 and (kind == "i64" or kind[0] == "*")
        )
        context = _context(host.ordinal)
        self.binary, self.handle = _loaded(printed, aligned, host.ordinal, context)
        # Triton's own arguments come last: scratch memory, which our kernels do not need.
        count = len(numbers) + self.binary.hidden
        # The driver reads the lowest bytes of each, as many as its type has.
        self.cells = (ctypes.c_uint64 * count)(*numbers)
        first = ctypes.addressof(self.cells)
        self.parameters = (ctypes.c_void_p * count)(*range(first, first + 8 * count, 8))
        self.start = self._launch

    def __call__(self, t: int) -> None:
        """Runs the kernel for step t of the call; asynchronous on a device."""
        self.start(t)

    def _interpret(self, t: int) -> None:
        if self.place is not None:
            self.arguments[self.place] = t
        self.function[self.grid](*self.arguments)

    def _launch(self, t: int) -> None:
        if self.place is not None:
            self.cells[self.place] = t
        shape = *self.grid, 1, 32 * self.binary.warps, 1, 1, self.binary.shared
        stream, parameters = ctypes.c_void_p(self.stream), self.parameters
        if self.printed.cooperative:  # refused, unless all programs can run at once
            result = _driver().cuLaunchCooperativeKernel(self.handle, *shape, stream, parameters)
        else:
            result = _driver().cuLaunchKernel(self.handle, *shape, stream, parameters, None)
        if result in _NO_ROOM:
            why = f"the driver does not launch {' x '.join(map(str, self.grid))} programs at once"
            programs = self.grid[0] * self.grid[1] if self.printed.cooperative else 0
            raise Refused(self.printed, f"{why} ({_NO_ROOM[result]})", programs)
        _check(result, f"the launch of {self.printed.name}")


@functools.cache
def _driver() -> Any:
    """The CUDA driver."""
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise RuntimeError(
        "the GPU engine found no CUDA driver (libcuda.so.1); expected one with every NVIDIA GPU. "
        "Move the layer to the CPU, or install the driver."
    )


def missing() -> str | None:
    """Why there is no CUDA driver; None if there is one."""
    try:
        _driver()
    except RuntimeError as error:
        return str(error)
    return None


def _check(result: int, what: str) -> None:
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(result, ctypes.byref(text))
        name = (text.value or b"unknown").decode()
        raise RuntimeError(f"{what} failed: CUDA driver error {result}, {name}.")


def _call(name: str, *arguments: Any) -> None:
    """Calls the driver, and raises its errors."""
    _check(getattr(_driver(), name)(*arguments), name)


def _context(device: int) -> int:
    """The context of the calling thread. A new thread, such as one of PyTorch's autograd, may have
    none: it gets the device's primary context, which frameworks share.
    """
    current = ctypes.c_void_p()
    _call("cuCtxGetCurrent", ctypes.byref(current))
    if current.value:
        return current.value
    context = _primary(device)
    _call("cuCtxSetCurrent", ctypes.c_void_p(context))
    return context


@functools.cache
def _primary(device: int) -> int:
    """The primary context of a device, which is retained from now on."""
    context = ctypes.c_void_p()
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), _handle(device))
    return int(context.value or 0)


def _handle(device: int) -> ctypes.c_int:
    """The driver's handle of a device."""
    handle = ctypes.c_int()
    _call("cuInit", 0)
    _call("cuDeviceGet", ctypes.byref(handle), device)
    return handle


def limits(device: int) -> Device:
    """The limits of a device, as ``capacity`` knows them."""
    handle, value, values = _handle(device), ctypes.c_int(), []
    for attribute in _ATTRIBUTES:
        _call("cuDeviceGetAttribute", ctypes.byref(value), attribute, handle)
        values.append(value.value)
    major, minor, shared, registers, processors = values
    name = ctypes.create_string_buffer(100)
    _call("cuDeviceGetName", name, len(name), handle)
    return Device(
        name.value.decode(), 10 * major + minor, shared, registers, processors, build.compiler()
    )


@functools.lru_cache(maxsize=4096)
def _loaded(
    printed: Printed, aligned: frozenset[str], device: int, context: int
) -> tuple[Binary, ctypes.c_void_p]:
    """The kernel's machine code, and its handle in a context."""
    card = limits(device)
    binary = build.binary(printed, card.capability, aligned)
    misfit = binary.misfit(card.shared)
    if misfit is not None:
        raise Refused(printed, misfit)
    module, handle = ctypes.c_void_p(), ctypes.c_void_p()
    driver = _driver()
    result = driver.cuModuleLoadData(ctypes.byref(module), binary.cubin)
    if result in _NOT_FOR_THIS_DEVICE:
        raise Refused(printed, f"the driver does not load it ({_NOT_FOR_THIS_DEVICE[result]})")
    _check(result, "cuModuleLoadData")
    symbol = binary.symbol.encode()
    _call("cuModuleGetFunction", ctypes.byref(handle), module, symbol)
    if binary.shared > _WITHOUT_ASKING:
        result = driver.cuFuncSetAttribute(handle, _SHARED_LIMIT, ctypes.c_int(binary.shared))
        what = f"asking for {binary.shared:,} bytes of shared memory"
        if result == _INVALID_VALUE:
            raise Refused(printed, f"{what} failed (CUDA_ERROR_INVALID_VALUE)")
        _check(result, what)
    return binary, handle
