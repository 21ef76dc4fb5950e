"""Measures the memory that this process takes for a step, exactly, on Linux."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from pathlib import Path

# A fixed threshold sends every larger buffer to mmap, so that what is freed leaves the process at
# once. (glibc otherwise raises the threshold, and a reused heap hides what a step allocates.)
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
PROC = Path("/proc/self")


def supported() -> bool:
    """Whether this system has a peak that can be reset."""
    return sys.platform == "linux"


def _bytes(file: str, key: str) -> int:
    (line,) = [line for line in (PROC / file).read_text().splitlines() if line.startswith(key)]
    return int(line.split()[1]) * 1024


def growth(step: Callable[[], object]) -> int:
    """Returns the largest growth of the process while `step` runs, in bytes.

    `step` must have run on a small problem before, so that libraries are loaded and threads exist.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda kept: None)  # of glibc only
    trim(0)  # gives back the memory of earlier steps
    before = _bytes("smaps_rollup", "Rss:")  # the counters of ``status`` lag behind
    (PROC / "clear_refs").write_text("5")  # resets the high-water mark
    step()
    return max(0, _bytes("status", "VmHWM:") - before)
