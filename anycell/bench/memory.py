"""Measures the memory that this process takes for a step, exactly, on Linux."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path

from anycell.usage import need

# A fixed threshold sends every larger buffer to mmap, so that what is freed leaves the process at
# once. (glibc otherwise raises it as it goes, and a reused heap hides what a step allocates.)
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
PROC = Path("/proc/self")


def supported() -> bool:
    """Whether this system tells a peak that starts again, which psutil does not."""
    return sys.platform == "linux"


def _bytes(file: str, key: str) -> int:
    (line,) = [line for line in (PROC / file).read_text().splitlines() if line.startswith(key)]
    return int(line.split()[1]) * 1024


def growth(step: Callable[[], object]) -> int:
    """Bytes by which the process grew at most while `step` ran.

    `step` must have run on a small problem before, so that libraries are loaded and threads exist.
    """
    gc.collect()
    psutil = need("psutil", "a measurement of memory")
    getattr(psutil, "heap_trim", lambda: None)()  # freed memory is not the next step's; glibc only
    before = _bytes("smaps_rollup", "Rss:")  # the counters of ``status`` lag behind
    (PROC / "clear_refs").write_text("5")  # the high-water mark starts again
    step()
    return max(0, _bytes("status", "VmHWM:") - before)
