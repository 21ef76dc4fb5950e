"""NumPy's matmuls on threads that sleep when they have nothing to do.

OpenBLAS, which NumPy's wheels bring, keeps its threads spinning for tens of milliseconds after each
call, on the cores that the kernels want next: a small layer took five times as long. So within a
call of ours it gets one thread, and the rows of a large matmul are split over threads of our own.
"""

from __future__ import annotations

import ctypes
import glob
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
WORTH_A_THREAD = 1 << 23  # multiply-adds of a part: waking a thread costs as much as a tenth of it

_lock = threading.Lock()
_inside = 0  # calls of ours at work
_before = 0  # OpenBLAS's own number of threads
_pool: tuple[int, int, ThreadPoolExecutor] | None = None


@contextmanager
def alone() -> Iterator[None]:
    """Within it OpenBLAS starts no threads."""
    global _inside, _before
    found = _openblas()
    if found is None:
        yield
        return
    get, change = found
    with _lock:
        _inside += 1
        if _inside == 1:
            _before = get()
            change(1)
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                change(_before)


def matmul(a: Array, b: Array, out: Array, threads: int) -> None:
    """``out = a @ b``."""
    _split(lambda part: np.matmul(a[part], b, out=out[part]), a, b, threads)


def matmul_add(a: Array, b: Array, out: Array, threads: int) -> None:
    """``out += a @ b``."""

    def add(part: slice) -> None:
        out[part] += a[part] @ b

    _split(add, a, b, threads)


def _split(work: Callable[[slice], Any], a: Array, b: Array, threads: int) -> None:
    """``work`` on all rows of ``a``, on up to so many threads."""
    rows, columns = a.shape[0], b.shape[1]
    if _openblas() is None:  # another library, whose threads are its own affair
        work(slice(None))
        return
    parts = min(threads, rows, rows * a.shape[1] * columns // WORTH_A_THREAD)
    if parts <= 1:
        work(slice(None))
        return
    bounds = [rows * i // parts for i in range(parts + 1)]
    slices = [slice(low, high) for low, high in itertools.pairwise(bounds)]
    others = [_helpers(threads).submit(work, part) for part in slices[1:]]
    work(slices[0])
    for other in others:
        other.result()


def _helpers(threads: int) -> ThreadPoolExecutor:
    """Threads of this process; those of a parent do not survive a fork."""
    global _pool
    with _lock:
        if _pool is None or _pool[0] != os.getpid() or _pool[1] < threads:
            executor = ThreadPoolExecutor(threads - 1, thread_name_prefix="anycell-matmul")
            _pool = os.getpid(), threads, executor
        return _pool[2]


@lru_cache(maxsize=1)
def _openblas() -> tuple[Callable[[], int], Callable[[int], Any]] | None:
    """How to ask NumPy's own OpenBLAS for its number of threads, and to change it."""
    home = os.path.dirname(np.__file__)
    places = (f"{home}.libs", os.path.join(home, ".libs"), os.path.join(home, ".dylibs"))
    for place in places:
        for path in glob.glob(os.path.join(place, "*openblas*")):
            try:
                library = ctypes.CDLL(path)  # is loaded: NumPy is
            except OSError:
                continue
            for prefix in ("scipy_openblas", "openblas"):
                for suffix in ("64_", ""):
                    get = getattr(library, f"{prefix}_get_num_threads{suffix}", None)
                    change = getattr(library, f"{prefix}_set_num_threads{suffix}", None)
                    if get is not None and change is not None:
                        return get, change
    return None
