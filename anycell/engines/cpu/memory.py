"""Memory for what a layer writes of every step: large, and of the same size call after call.

A fresh block costs a page fault every 4 KiB, more than the kernel that fills it. So blocks come
back here when their last array is gone, and the next call takes them warm.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

SMALL = 1 << 20  # bytes below which the framework's own allocator does well
GRAIN = 1 << 21  # sizes are rounded up to this, so that nearly equal ones serve each other
LIMIT = 512 << 20  # bytes kept idle at most; beyond, blocks go back to the system

_idle: list[np.ndarray] = []
_lock = threading.RLock()  # a finaliser may run within `empty`, in the same thread


def _unlock() -> None:
    """A forked child may inherit a lock that is held by a thread which does not exist in it."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock)


class _Lease:
    """A block in use, as NumPy sees it; it goes idle with its last array."""

    def __init__(self, block: np.ndarray, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.block = block
        address = block.__array_interface__["data"][0]
        self.__array_interface__ = {
            "shape": shape,
            "typestr": dtype.str,
            "data": (address, False),
            "version": 3,
        }

    def __del__(self) -> None:
        with _lock:
            _idle.append(self.block)
            while sum(block.size for block in _idle) > LIMIT:
                _idle.pop(0)


def empty(shape: Sequence[int], dtype: str) -> np.ndarray:
    """An uninitialised array, on a warm block where one is idle."""
    kind = np.dtype(dtype)
    size = kind.itemsize * math.prod(shape)
    if size < SMALL:
        return np.empty(shape, kind)
    size = -(-size // GRAIN) * GRAIN
    with _lock:
        at = next((i for i in reversed(range(len(_idle))) if _idle[i].size == size), None)
        block = np.empty(size, np.uint8) if at is None else _idle.pop(at)
    return np.asarray(_Lease(block, tuple(shape), kind))
