"""Memory for the arrays that a layer writes for all steps: large, and of equal size at each call.

A fresh block causes a page fault every 4 KiB, which costs more than the kernel that fills it. So a
block returns here when its last array is gone, and the next call reuses it while it is warm.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

SMALL = 1 << 20  # bytes below which NumPy's own allocator does well
GRAIN = 1 << 21  # sizes are rounded up to a multiple of this, so that similar arrays share blocks
LIMIT = 512 << 20  # most bytes kept idle; the oldest blocks beyond it go back to the system

_idle: list[np.ndarray] = []
_lock = threading.RLock()  # a finaliser may run within `empty`, in the same thread


def _unlock() -> None:
    """Replaces the lock in a forked child, where the thread that held it may not exist."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock)


class _Lease:
    """A block in use, as NumPy sees it; the block becomes idle when its last array is gone."""

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
        if self.block.size > LIMIT:  # it would push out all others, and then go itself
            return
        with _lock:
            _idle.append(self.block)
            while sum(block.size for block in _idle) > LIMIT:
                _idle.pop(0)


def empty(shape: Sequence[int], dtype: str) -> np.ndarray:
    """An uninitialised array, in an idle block if one has the right size."""
    kind = np.dtype(dtype)
    size = kind.itemsize * math.prod(shape)
    if size < SMALL:
        return np.empty(shape, kind)
    size = -(-size // GRAIN) * GRAIN
    with _lock:
        at = next((i for i in reversed(range(len(_idle))) if _idle[i].size == size), None)
        block = np.empty(size, np.uint8) if at is None else _idle.pop(at)
    return np.asarray(_Lease(block, tuple(shape), kind))
