"""PyTorch's threads, and the BLAS that is in it."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Any

import torch

from anycell.engines import cpu


def threads() -> int:
    """Returns the largest number of threads for a call, which is torch's."""
    return cpu.threads.within() or torch.get_num_threads()


@functools.cache
def function(name: str) -> Any:
    """A function of PyTorch, or of a library that it is linked to; None where there is none."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return getattr(library, name)
    except (OSError, AttributeError):
        return None


@functools.cache
def blas(name: str) -> int:
    """The address of a function of the MKL in PyTorch; 0 where there is none."""
    return address(name) if torch.backends.mkl.is_available() else 0


def address(name: str) -> int:
    """The address of a function of PyTorch; 0 where there is none."""
    known = function(name)
    return 0 if known is None else address_of(known)


def address_of(function: Any) -> int:
    """The address of a function of ``ctypes``."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


class _Forks:
    """Keeps torch's operators usable in forked children.

    GNU's OpenMP runtime does not survive a fork: in a child, operators and MKL wait for threads
    that only the parent has. So before a fork the runtime ends its threads; both processes start
    new ones when they need them. Where it cannot (the runtime is older than GCC 9, or this process
    was forked before this import) torch gets one thread in the child.

    Attributes:
        safe: whether operators may use several threads in this process.
    """

    def __init__(self) -> None:
        self.safe, self._ended = True, False
        if cpu.pool.FORKED:
            self._settle()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(before=self._prepare, after_in_child=self._settle)

    def _prepare(self) -> None:
        pause = function("omp_pause_resource_all")
        self._ended = pause is not None and pause(1) == 0  # omp_pause_soft

    def _settle(self) -> None:
        if not self._ended:
            self.safe = False
            torch.set_num_threads(1)


forks = _Forks()
