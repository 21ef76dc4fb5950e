"""The shapes that are measured: recurrent layers of real projects, kept in ``shapes.json``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from anycell.usage import UsageError, did_you_mean

GPU_SIZED = frozenset({"basecaller"})  # minutes per step on a CPU: only when named
QUICK = ("deepar", "rl-policy", "stream")  # short ones, for a first look


@dataclass(frozen=True)
class Shape:
    """T steps, B batch, I inputs, H hidden units, L layers, D directions."""

    name: str
    source: str
    T: int
    B: int
    I: int
    H: int
    L: int
    D: int

    def __str__(self) -> str:
        return f"T{self.T} B{self.B} I{self.I} H{self.H} L{self.L} D{self.D}"


@cache
def all_shapes() -> dict[str, Shape]:
    """Every shape by its name."""
    text = files("anycell.bench").joinpath("shapes.json").read_text(encoding="utf-8")
    return {entry["name"]: Shape(**entry) for entry in json.loads(text)["shapes"]}


SIZES = re.compile(r"T(\d+)B(\d+)I(\d+)H(\d+)(?:L(\d+))?(?:D([12]))?")


def select(names: Iterable[str]) -> list[Shape]:
    """Returns shapes by name, or by sizes such as ``T20B4I64H128L2D1``, in which L and D default to
    1. ``all`` stands for every shape but the ``GPU_SIZED`` ones.
    """
    known = all_shapes()
    chosen: dict[str, Shape] = {}
    for name in names:
        if name == "all":
            chosen |= {key: shape for key, shape in known.items() if key not in GPU_SIZED}
        elif name in known:
            chosen[name] = known[name]
        elif sizes := SIZES.fullmatch(name):
            numbers = [int(size or 1) for size in sizes.groups()]
            if not all(numbers):
                raise UsageError(f"shape {name!r}: all sizes must be at least 1")
            chosen[name] = Shape(name, "sizes as given", *numbers)
        else:
            raise UsageError(f"unknown shape {name!r}{did_you_mean(name, ['all', *known])}")
    return list(chosen.values())
