"""The machine: its processor, and the cores that this process may use."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

SIMD = (
    *("neon", "asimd", "sve", "avx2", "fma", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16"),
    *("amx_bf16", "amx_int8"),
)


def usable_cores() -> int:
    """Cores this process may run on, which in a container is fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpuinfo(key: str) -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    except OSError:
        pass
    return ""


def cpu_name() -> str:
    """What the maker calls it."""
    if sys.platform == "darwin":
        return output("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def instruction_sets() -> list[str]:
    """Those that matter for matmuls."""
    flags = set((_cpuinfo("flags") or _cpuinfo("Features")).split())
    return [name for name in SIMD if name in flags]


def output(*command: str) -> str:
    """What a command prints; empty if it fails, or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
