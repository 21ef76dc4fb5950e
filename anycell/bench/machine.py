"""The machine: what it is, and how fast its large matmuls are (the bound that nobody beats)."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from anycell.bench.stats import median
from anycell.bench.timing import once, settle

PACKAGES = (
    "anycell", "numpy", "llvmlite", "torch", "onnxruntime", "keras", "tensorflow", "tensorflow-cpu",
)  # fmt: skip
SIMD = ("neon", "asimd", "sve", "avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8")
ROOT = Path(__file__).resolve().parents[2]


def describe() -> dict[str, Any]:
    """CPU, cores, instruction sets, versions, and the revision if this is a checkout."""
    return {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "isa": instruction_sets(),
        "load": load(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "versions": {name: version(name) for name in PACKAGES},
        "revision": revision(),
    }


def version(package: str) -> str | None:
    """The installed version, without importing the package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def usable_cores() -> int:
    """Cores this process may run on, which in a container is fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load() -> float | None:
    """How many processes wanted a core in the last minute: with a busy machine all bets are off."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


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
        return _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def instruction_sets() -> list[str]:
    """Those that matter for matmuls."""
    flags = set((_cpuinfo("flags") or _cpuinfo("Features")).split())
    return [name for name in SIMD if name in flags]


def revision() -> str | None:
    """``1a2b3c4`` or ``1a2b3c4+changes``; nothing for an installed package."""
    if not (ROOT / ".git").exists():
        return None
    commit = _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")
    if not commit:
        return None
    return commit + "+changes" * bool(_output("git", "-C", str(ROOT), "status", "--porcelain"))


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


class Matmul:
    """A square matmul far out of cache, in the framework's own library with its own threads.

    The rate is measured again around every row of the table, because the same machine has another
    rate ten minutes later.
    """

    SIZE = 2048

    def __init__(self, dtype: str) -> None:
        import torch

        self._mm = torch.mm
        kind = getattr(torch, dtype)
        self._a, self._b, self._out = (torch.ones(self.SIZE, self.SIZE, dtype=kind) for _ in "abc")
        self.samples: list[float] = []
        self.sample(2)
        self.samples.clear()

    def prepare(self) -> None: ...

    def call(self) -> None:
        self._mm(self._a, self._b, out=self._out)

    def sample(self, times: int = 3) -> list[float]:
        """GFLOP/s of a few runs, also kept in ``samples``."""
        settle()
        rates = [2e-9 * self.SIZE**3 / once(self) for _ in range(times)]
        self.samples += rates
        return rates

    @property
    def gflops(self) -> float:
        return median(self.samples or self.sample())
