"""Starts kernels on a device, through the CUDA driver's own interface.

Frameworks only have to provide addresses and a stream. The driver library is loaded when the first
kernel starts. Kernels belong to no context, which needs a driver of CUDA 12.0 or newer: so one
recipe serves all contexts of a device.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from anycell.engines.gpu import build
from anycell.engines.gpu.arrays import DeviceArrays
from anycell.engines.gpu.build import Binary
from anycell.engines.gpu.capacity import Device
from anycell.engines.gpu.interpreter import Interpreter
from anycell.engines.gpu.refusals import Refused
from anycell.engines.gpu.text import Printed

_PORTABLE_AND_MAPPED = 3  # CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP
_SHARED_LIMIT = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_WITHOUT_ASKING = 48 << 10  # bytes of shared memory that every kernel may use
MANY = 1 << 30  # programs that the interpreter runs: one after the other
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


class Loaded(NamedTuple):
    """A kernel on a device.

    Attributes:
        handle: the driver's, which no context owns.
        together: the most programs that can run at once, of kernels whose programs must.
    """

    binary: Binary
    handle: int
    together: int = 0


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
        self.kept = values  # arrays stay alive as long as the launch
        numbers = [
            host.pointer(values[name]) if kind[0] == "*" else int(values.get(name, 0))
            for name, kind in printed.arguments
        ]
        self.loaded = loaded(printed, aligned(printed, numbers), host.ordinal)
        self.driver = driver()
        use_context(host.ordinal)
        # Triton's own arguments come last: scratch memory, which our kernels do not need.
        count = len(numbers) + self.loaded.binary.hidden
        # The driver reads the lowest bytes of each, as many as its type has.
        self.cells = (ctypes.c_uint64 * count)(*numbers)
        first = ctypes.addressof(self.cells)
        self.parameters = (ctypes.c_void_p * count)(*range(first, first + 8 * count, 8))

    def __call__(self, t: int) -> None:
        """Runs the kernel for step t of the call; asynchronous on a device."""
        if self.place is not None:
            self.cells[self.place] = t
        binary, handle, _ = self.loaded
        shape = *self.grid, 1, 32 * binary.warps, 1, 1, binary.shared
        given = ctypes.c_void_p(handle), *shape, ctypes.c_void_p(self.stream), self.parameters
        check_launch(self.driver.cuLaunchKernel(*given, None), self.printed, self.grid)


def aligned(printed: Printed, numbers: Iterable[int]) -> frozenset[str]:
    """The names of the arguments that 16 divides, of those that the compiler is told about."""
    pairs = zip(printed.arguments, numbers, strict=True)
    return frozenset(
        name for (name, kind), n in pairs if n % 16 == 0 and (kind == "i64" or kind[0] == "*")
    )


def check_launch(result: int, printed: Printed, grid: tuple[int, ...]) -> None:
    """Raises the error of a launch."""
    if result in _NO_ROOM:
        why = f"the driver does not launch {' x '.join(map(str, grid))} programs at once"
        programs = math.prod(grid) if printed.cooperative else 0
        raise Refused(printed, f"{why} ({_NO_ROOM[result]})", programs)
    _check(result, f"the launch of {printed.name}")


@functools.cache
def driver() -> Any:
    """The CUDA driver, or Triton's interpreter in its place."""
    if build.interpreted():
        return Interpreter()
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        if not hasattr(library, "cuLibraryLoadData"):
            raise RuntimeError(
                "the GPU engine found a CUDA driver older than 12.0; expected 12.0 (525) or newer. "
                "Install a newer driver, or move the layer to the CPU."
            )
        return library
    raise RuntimeError(
        "the GPU engine found no CUDA driver (libcuda.so.1); expected one with every NVIDIA GPU. "
        "Move the layer to the CPU, or install the driver."
    )


def missing() -> str | None:
    """Why there is no CUDA driver for the engine; None if there is one."""
    try:
        driver()
    except RuntimeError as error:
        return str(error)
    return None


def _check(result: int, what: str) -> None:
    if result:
        here = driver()
        if raised := getattr(here, "raised", None):
            here.raised = None
            raise raised
        text = ctypes.c_char_p()
        here.cuGetErrorName(result, ctypes.byref(text))
        name = (text.value or b"unknown").decode()
        raise RuntimeError(f"{what} failed: CUDA driver error {result}, {name}.")


def _call(name: str, *arguments: Any) -> None:
    """Calls the driver, and raises its errors."""
    _check(getattr(driver(), name)(*arguments), name)


def use_context(device: int) -> None:
    """Gives the calling thread a context if it has none, as a new one of PyTorch's autograd: the
    device's primary context, which frameworks share.
    """
    current = ctypes.c_uint64()
    _call("cuCtxGetCurrent", ctypes.byref(current))
    if not current.value:
        _call("cuCtxSetCurrent", ctypes.c_void_p(_primary(device)))


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


@functools.cache
def shared_word() -> ctypes.c_int32:
    """An int32 in memory that the host and all devices reach, at the same address; 0 at first."""
    if build.interpreted():
        return ctypes.c_int32(0)
    use_context(0)
    pointer = ctypes.c_void_p()
    _call("cuMemHostAlloc", ctypes.byref(pointer), ctypes.c_size_t(4), _PORTABLE_AND_MAPPED)
    word = ctypes.c_int32.from_address(pointer.value or 0)
    word.value = 0
    return word


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
def loaded(printed: Printed, aligned: frozenset[str], device: int) -> Loaded:
    """The kernel on a device, ready to be launched.

    Raises:
        Refused: if it does not fit.
    """
    here = driver()
    if build.interpreted():
        binary, number = here.load(printed)
        return Loaded(binary, number, MANY)
    card = limits(device)
    binary = build.binary(printed, card.capability, aligned)
    misfit = binary.misfit(card.shared)
    if misfit is not None:
        raise Refused(printed, misfit)
    use_context(device)
    library, kernel, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    no_options = None, None, 0
    for name, *arguments in (
        ("cuLibraryLoadData", ctypes.byref(library), binary.cubin, *no_options, *no_options),
        ("cuLibraryGetKernel", ctypes.byref(kernel), library, binary.symbol.encode()),
        ("cuKernelGetFunction", ctypes.byref(function), kernel),  # loads it now, not when launched
    ):
        result = getattr(here, name)(*arguments)
        if result in _NOT_FOR_THIS_DEVICE:
            raise Refused(printed, f"the driver does not load it ({_NOT_FOR_THIS_DEVICE[result]})")
        _check(result, name)
    shared, together = ctypes.c_int(binary.shared), ctypes.c_int()
    if binary.shared > _WITHOUT_ASKING:
        result = here.cuKernelSetAttribute(_SHARED_LIMIT, shared, kernel, _handle(device))
        what = f"asking for {binary.shared:,} bytes of shared memory"
        if result == _INVALID_VALUE:
            raise Refused(printed, f"{what} failed (CUDA_ERROR_INVALID_VALUE)")
        _check(result, what)
    if printed.cooperative:  # the driver takes a kernel in the place of a function
        size = ctypes.c_int(32 * binary.warps), ctypes.c_size_t(binary.shared)
        name = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        _call(name, ctypes.byref(together), kernel, *size)
    return Loaded(binary, kernel.value or 0, together.value * card.processors)
