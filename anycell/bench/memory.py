"""Measured memory of this process, on Linux exactly, elsewhere as well as the system tells."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from pathlib import Path

# A fixed threshold sends every larger buffer to mmap, so that what is freed leaves the process at
# once. (glibc otherwise raises it as it goes, and a reused heap hides what a step allocates.)
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def supported() -> bool:
    """Whether this system tells."""
    return sys.platform == "linux"


def resident() -> int:
    """Bytes in memory now, by ``smaps_rollup``: the counters of ``status`` lag behind."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise OSError("no Rss in /proc/self/smaps_rollup")


def peak() -> int:
    """The high-water mark since `reset_peak`, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("no VmHWM in /proc/self/status")


def reset_peak() -> None:
    """Let the high-water mark start again from what is in memory now."""
    Path("/proc/self/clear_refs").write_text("5")


def tidy() -> None:
    """Give freed memory back to the system, so that it is not counted as the next step's."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def growth(step: Callable[[], object]) -> int:
    """Bytes by which the process grew at most while `step` ran.

    `step` must have run on a small problem before, so that libraries are loaded and threads exist.
    """
    tidy()
    before = resident()
    reset_peak()
    step()
    return max(0, peak() - before)
