"""Makes the n-th call of a kind fail, for every n until no call is left: as SQLite is tested.

>>> for fault in until_it_succeeds(lambda: OSError(errno.EIO, "broken")):
...     with fault.of_files(module):
...         ...
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import itertools
import os
import tracemalloc
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

FILE_CALLS = [
    *("open", "close", "stat", "lstat", "fstat", "scandir", "listdir", "getcwd"),
    *("mkdir", "replace", "rename", "unlink"),
]
MOST = 10_000  # more calls than anything tested makes


class Fault:
    """Raises an error at the n-th call that is reported to it."""

    def __init__(self, at: int, error: Callable[[], BaseException]) -> None:
        self.at, self.error = at, error
        self.calls = 0
        self.active = True

    @property
    def struck(self) -> bool:
        return self.calls >= self.at

    def due(self) -> bool:
        """Counts a call; returns whether it is the one that fails."""
        self.calls += self.active
        return self.active and self.calls == self.at

    def tick(self) -> None:
        if self.due():
            raise self.error()

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function, which may fail instead of doing its work."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            return function(*args, **kwargs)

        return call

    def after(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function, which may fail after its work is done."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self.tick()
            return result

        return call

    @contextlib.contextmanager
    def of_files(self, *modules: ModuleType, dir_fd: bool = True, most: int = 0) -> Iterator[None]:
        """Applies the fault to file operations: those of `os`, and the `open` of these modules.

        Args:
            dir_fd: whether the system can reach files by the descriptor of their directory.
            most: the most bytes of one read or write; 0 for no limit.
        """
        with pytest.MonkeyPatch.context() as patch:
            calls = {name: self.before(getattr(os, name)) for name in FILE_CALLS}
            calls["close"] = self.after(os.close)  # the file is closed in any case
            calls["scandir"] = self.before(functools.partial(_Listing, self, os.scandir))
            for name, call in calls.items():
                patch.setattr(os, name, call)
            everything = {*calls.values()} if dir_fd else set()
            patch.setattr(os, "supports_dir_fd", everything)
            patch.setattr(os, "supports_fd", everything)
            for module in modules:
                patch.setattr(module, "open", functools.partial(_open, self, most), raising=False)
            yield


def until_it_succeeds(error: Callable[[], BaseException]) -> Iterator[Fault]:
    """Yields faults at the first call, the second, and so on, until one is not reached."""
    for at in itertools.count(1):
        fault = Fault(at, error)
        yield fault
        fault.active = False
        if not fault.struck:
            return
        assert at < MOST, "it never succeeds"


# -- files ---------------------------------------------------------------------------------------
class _Listing:
    """The iterator of `os.scandir`, which may fail at each item."""

    def __init__(self, fault: Fault, scandir: Callable[..., Any], path: Any) -> None:
        self.fault, self.items = fault, scandir(path)

    def __enter__(self) -> _Listing:
        return self

    def __exit__(self, *_: object) -> None:
        self.items.close()

    def __iter__(self) -> Iterator[Any]:
        for item in self.items:
            self.fault.tick()
            yield _Item(self.fault, item)


class _Item:
    def __init__(self, fault: Fault, item: os.DirEntry[str]) -> None:
        self.name = item.name
        self.stat, self.is_file = fault.before(item.stat), fault.before(item.is_file)


class _Raw(io.FileIO):
    """A file whose reads, writes and close may fail, and whose reads and writes may be short."""

    fault: Fault
    most: int

    def read(self, size: int | None = -1) -> bytes | None:  # type: ignore[override]
        self.fault.tick()
        size = -1 if size is None else size
        return super().read(min(size, self.most) if self.most and size >= 0 else size)

    def readall(self) -> bytes | None:  # type: ignore[override]
        return io.RawIOBase.readall(self)  # type: ignore[return-value]

    def readinto(self, buffer: Any) -> int:
        self.fault.tick()
        view = memoryview(buffer)
        return super().readinto(view[: self.most] if self.most else view)

    def write(self, data: Any) -> int:
        self.fault.tick()
        view = memoryview(data)
        return super().write(view[: self.most] if self.most else view)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self.fault.tick()


def _open(
    fault: Fault, most: int, path: Any, mode: str = "r", *, opener: Any = None, **text: Any
) -> Any:
    if opener is None:
        fault.tick()
    raw = _Raw(path, mode.replace("b", ""), opener=opener)
    raw.fault, raw.most = fault, most
    buffered = io.BufferedReader(raw) if "r" in mode else io.BufferedWriter(raw)
    return buffered if "b" in mode else io.TextIOWrapper(buffered, **text)


# -- memory --------------------------------------------------------------------------------------
_SIZE, _POINTER = ctypes.c_size_t, ctypes.c_void_p
_MALLOC = ctypes.CFUNCTYPE(_POINTER, _POINTER, _SIZE)
_CALLOC = ctypes.CFUNCTYPE(_POINTER, _POINTER, _SIZE, _SIZE)
_REALLOC = ctypes.CFUNCTYPE(_POINTER, _POINTER, _POINTER, _SIZE)
_FREE = ctypes.CFUNCTYPE(None, _POINTER, _POINTER, _SIZE)


class _Allocator(ctypes.Structure):
    _fields_ = [
        ("context", _POINTER),
        ("malloc", _MALLOC),
        ("calloc", _CALLOC),
        ("realloc", _REALLOC),
        ("free", _FREE),
    ]


class _Handler(ctypes.Structure):
    """NumPy's `PyDataMem_Handler`."""

    _fields_ = [
        ("name", ctypes.c_char * 127),
        ("version", ctypes.c_uint8),
        ("allocator", _Allocator),
    ]


class Memory:
    """Intercepts all memory that NumPy allocates for arrays in a block, temporary ones included.

    Attributes:
        fault: makes allocations fail; None for no faults.
    """

    def __init__(self) -> None:
        self.fault: Fault | None = None
        libc = ctypes.CDLL(None)
        for name in ("malloc", "calloc", "realloc"):
            getattr(libc, name).restype = _POINTER
        libc.malloc.argtypes, libc.calloc.argtypes = [_SIZE], [_SIZE, _SIZE]
        libc.realloc.argtypes = [_POINTER, _SIZE]

        def refused() -> bool:
            return self.fault is not None and self.fault.due()

        def malloc(_: object, size: int) -> int:
            return 0 if refused() else libc.malloc(size) or 0

        def calloc(_: object, count: int, size: int) -> int:
            return 0 if refused() else libc.calloc(count, size) or 0

        def realloc(_: object, address: int | None, size: int) -> int:
            return 0 if refused() else libc.realloc(address, size) or 0

        # NumPy frees arrays while an exception propagates, when no Python code may run. So NumPy's
        # own function frees.
        capsule = _set_handler(None)
        free = _Handler.from_address(_pointer(capsule, b"mem_handler")).allocator.free
        functions = _MALLOC(malloc), _CALLOC(calloc), _REALLOC(realloc), free
        self._handler = _Handler(b"anycell's tests", 1, _Allocator(None, *functions))
        self._alive = capsule, functions
        _ALIVE.append(self)  # an array may outlive the block

    def __enter__(self) -> Memory:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [_POINTER, ctypes.c_char_p, _POINTER]
        self._before = _set_handler(new(ctypes.addressof(self._handler), b"mem_handler", None))
        tracemalloc.start()
        return self

    def __exit__(self, *_: object) -> None:
        tracemalloc.stop()
        self.fault = None
        _set_handler(self._before)

    def taken(self) -> int:
        """Returns the bytes that NumPy has allocated since the block began and has not freed."""
        arrays = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
        snapshot = tracemalloc.take_snapshot().filter_traces([arrays])
        return sum(trace.size for trace in snapshot.traces)


_ALIVE: list[Memory] = []


def _pointer(capsule: object, name: bytes | None) -> int:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = _POINTER, [ctypes.py_object, ctypes.c_char_p]
    return get(capsule, name) or 0


def _set_handler(handler: object) -> object:
    """Calls NumPy's `PyDataMem_SetHandler`, at a fixed place in its table of C functions; None
    restores NumPy's own handler.
    """
    core: Any = np._core if hasattr(np, "_core") else np.core  # type: ignore[attr-defined]
    table = _pointer(core._multiarray_umath._ARRAY_API, None)
    function = ctypes.cast(table, ctypes.POINTER(_POINTER))[304]
    argument = ctypes.py_object if handler is not None else _POINTER
    return ctypes.PYFUNCTYPE(ctypes.py_object, argument)(function)(handler)
