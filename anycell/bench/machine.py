"""The machine: what it is, and how fast its large matmuls are (an upper bound)."""

from __future__ import annotations

import functools
import math
import os
import platform
from typing import Any

from anycell.bench.stats import median
from anycell.bench.tasks import Task
from anycell.bench.timing import once, settle
from anycell.machine import cpu_name, instruction_sets, revision, usable_cores, version

PACKAGES = (
    "anycell", "numpy", "llvmlite", "torch", "onnxruntime", "openvino", "keras", "tensorflow",
    "tensorflow-cpu", "jax", "flax",
)  # fmt: skip


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


def load() -> float:
    """The threads that wanted to run in the last minute; NaN if the system does not say."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):  # Windows has no such call
        return math.nan


def busy(machine: dict[str, Any]) -> str:
    """A warning if the machine was busy when it was described, else an empty string."""
    if not machine["load"] > 0.5 * machine["cores"]:  # also if the load is NaN
        return ""
    return (
        f"this machine is busy (load {machine['load']:.1f} on {machine['cores']} cores): take the "
        "times with a grain of salt"
    )


class Matmul(Task):
    """A square matmul far out of cache, in the framework's own library with its own threads.

    The rate is measured again around every row of the table, because the rate of a machine changes
    within minutes.
    """

    SIZE = 2048

    def __init__(self, dtype: str) -> None:
        import torch

        kind = getattr(torch, dtype)
        a, b, out = (torch.ones(self.SIZE, self.SIZE, dtype=kind) for _ in range(3))
        super().__init__(functools.partial(torch.mm, a, b, out=out))
        self.samples: list[float] = []
        self.sample(2)
        self.samples.clear()

    def sample(self, times: int = 3) -> list[float]:
        """Measures the GFLOP/s of a few runs, and also adds them to ``samples``."""
        settle()
        rates = [2e-9 * self.SIZE**3 / once(self) for _ in range(times)]
        self.samples += rates
        return rates

    @property
    def gflops(self) -> float:
        return median(self.samples or self.sample())
