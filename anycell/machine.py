"""The machine: its processor, and the cores that this process may use."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SIMD = "neon sve avx2 fma avx_vnni avx512f avx512_vnni avx512_bf16 amx_bf16 amx_int8".split()


def usable_cores() -> int:
    """The number of cores that this process may use; a container may allow fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def busy_cores(seconds: float, stat: str = "/proc/stat") -> float | None:
    """The number of usable cores that were busy while this process slept; None where the system
    does not say, as on all but Linux.
    """
    idle, total = _ticks(stat)
    time.sleep(seconds)
    later = _ticks(stat)
    idle, total = later[0] - idle, later[1] - total
    return usable_cores() * (1 - idle / total) if total else None


def _ticks(stat: str) -> tuple[int, int]:
    """The ticks of the clock that the usable cores were idle, and all; zeros if none is known."""
    idle = total = 0
    with contextlib.suppress(OSError), open(stat) as file:
        names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        for name, *numbers in map(str.split, file):
            if name in names:
                ticks = list(map(int, numbers[:8]))  # what follows is part of the first two
                idle, total = idle + sum(ticks[3:5]), total + sum(ticks)
    return idle, total


def cpu_name() -> str:
    """The processor, as its maker calls it."""
    name = output("sysctl", "-n", "machdep.cpu.brand_string") if sys.platform == "darwin" else ""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        name = next((line.split(":", 1)[1] for line in file if line.startswith("model name")), "")
    return name.strip() or platform.processor() or platform.machine()


def instruction_sets() -> list[str]:
    """The instruction sets that matter for matmuls, as LLVM finds them; none if it cannot tell."""
    import llvmlite.binding as llvm

    try:
        host = {name.replace("-", "") for name, on in llvm.get_host_cpu_features().items() if on}
    except RuntimeError:
        return []
    return [name for name in SIMD if name.replace("_", "") in host]


def version(*packages: str) -> str | None:
    """The version of the first of these packages that is installed, without importing it."""
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(package)
    return None


def output(*command: str) -> str:
    """Runs a command and returns its output, or "" if it fails or does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def revision() -> str | None:
    """The revision, ``1a2b3c4`` or ``1a2b3c4+changes``; None for an installed package."""
    if not (ROOT / ".git").exists():
        return None
    commit = output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")
    if not commit:
        return None
    return commit + "+changes" * bool(output("git", "-C", str(ROOT), "status", "--porcelain"))
