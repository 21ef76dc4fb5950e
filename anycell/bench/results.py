"""The results of a run, and ``bench.json``, which has every sample."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from anycell.bench.contenders import DEFAULT_PEERS, SUBJECT
from anycell.bench.problem import CellSpec
from anycell.bench.shapes import Shape
from anycell.bench.stats import geometric_mean, iqr, median, paired_ratio
from anycell.bench.tasks import Mode

SCHEMA = 1
MODES: tuple[Mode, ...] = ("inference", "training")
APART = 1.1  # times in turns and alone that differ by more than this factor do not agree
FAR = 3.0  # ratios in turns and alone that differ by more than this factor mean a busy machine
Status = Literal["ok", "wrong", "unsupported", "failed"]


@dataclass(frozen=True)
class Settings:
    """The cells, shapes and options of a run; see ``python -m anycell bench --help``."""

    cells: Sequence[CellSpec]
    shapes: Sequence[Shape]
    modes: Sequence[Mode] = MODES
    dtype: str = "float32"
    threads: int = 1
    subject: str = SUBJECT
    peers: Sequence[str] = DEFAULT_PEERS
    seconds: float = 5.0
    alone: bool = True
    first_call: bool = True
    memory: bool = False
    seed: int = 0

    @property
    def contenders(self) -> list[str]:
        return list(dict.fromkeys([self.subject, *self.peers]))


@dataclass
class Entry:
    """One contender in one row."""

    status: Status = "ok"
    reason: str | None = None
    first_call_ms: float | None = None  # a fresh layer in this process, which is warm otherwise
    fresh_process_extra_ms: dict[str, float] | None = None  # of the first call, cold and warm
    training_peak_bytes: int | None = None
    engine: dict[str, str] | None = None  # name and reason of what ran it
    remarks: list[str] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    samples_ms: list[float] = field(default_factory=list)
    alone_samples_ms: list[float] = field(default_factory=list)  # in a process of its own

    @property
    def timed(self) -> bool:
        return bool(self.samples_ms)

    @property
    def median_ms(self) -> float:
        return median(self.samples_ms)

    @property
    def iqr_ms(self) -> float:
        return iqr(self.samples_ms)

    @property
    def alone_ms(self) -> float:
        return median(self.alone_samples_ms)

    @property
    def disagrees(self) -> bool | None:
        """Whether the times in turns and alone differ; None without both."""
        factor = self.median_ms / self.alone_ms
        return None if math.isnan(factor) else max(factor, 1 / factor) > APART


@dataclass
class Row:
    """One cell on one shape in one mode."""

    cell: str
    mode: Mode
    shape: Shape
    subject: str
    flops: int
    matmul_gflops: float = math.nan
    entries: dict[str, Entry] = field(default_factory=dict)

    @property
    def bound_ms(self) -> float:
        """The time of the matmuls alone at the rate of a large one, measured around this row."""
        return self.flops / self.matmul_gflops * 1e-6

    @property
    def title(self) -> str:
        return f"{self.cell} {self.shape.name} {self.mode}"

    @property
    def ours(self) -> Entry:
        return self.entries[self.subject]

    @property
    def over_bound(self) -> float:
        """Our time over the bound; NaN if it was not measured."""
        return self.ours.median_ms / self.bound_ms

    def ratio(self, peer: str, alone: bool = False) -> float:
        """The peer's time over ours: above 1 we are faster. NaN without two valid timings."""
        ours, theirs = self.ours, self.entries[peer]
        if alone:
            return theirs.alone_ms / ours.alone_ms
        if not (ours.timed and theirs.timed):
            return math.nan
        return paired_ratio(theirs.samples_ms, ours.samples_ms)

    def far(self, peer: str) -> bool:
        """Whether the ratios in turns and alone are so far apart that neither means anything."""
        factor = self.ratio(peer) / self.ratio(peer, alone=True)
        return max(factor, 1 / factor) > FAR  # not if one is NaN


@dataclass
class Report:
    """The results of a run."""

    settings: Settings
    machine: dict[str, Any]
    date: str
    rows: list[Row] = field(default_factory=list)
    matmul_gflops: float = math.nan
    interrupted: bool = False

    @property
    def ok(self) -> bool:
        """Whether the run was not interrupted, no result was wrong, and no contender failed."""
        statuses = {entry.status for row in self.rows for entry in row.entries.values()}
        return not self.interrupted and not statuses & {"wrong", "failed"}

    def tables(self) -> Iterator[tuple[str, Mode, list[Row]]]:
        """The rows of each cell and mode, in the order asked for."""
        for cell, mode in itertools.product(self.settings.cells, self.settings.modes):
            rows = [row for row in self.rows if (row.cell, row.mode) == (cell.name, mode)]
            yield cell.name, mode, rows


def ratios(rows: Sequence[Row], peer: str, alone: bool = False) -> list[float]:
    """The ratios of a peer in all rows that have one."""
    found = [row.ratio(peer, alone) for row in rows]
    return [ratio for ratio in found if not math.isnan(ratio)]


def mean(rows: Sequence[Row], peer: str, alone: bool = False) -> float:
    """The geometric mean of a peer's ratios; NaN without ratios, or if one cannot be trusted."""
    if any(row.far(peer) for row in rows):
        return math.nan
    return geometric_mean(ratios(rows, peer, alone))


# -- JSON ------------------------------------------------------------------------------------------


def as_json(report: Report) -> dict[str, Any]:
    """Returns everything that was measured, and everything needed to judge it."""
    settings = report.settings
    kept = "modes dtype threads subject peers seconds seed".split()
    document = {
        "schema": SCHEMA,
        "date": report.date,
        "ok": report.ok,
        "interrupted": report.interrupted,
        "machine": {**report.machine, "matmul_gflops": report.matmul_gflops},
        "settings": {
            "cells": [cell.origin for cell in settings.cells],
            "shapes": [shape.name for shape in settings.shapes],
            **{name: getattr(settings, name) for name in kept},
        },
        "rows": [_row(row) for row in report.rows],
        "geometric_means": [
            {
                "cell": cell,
                "mode": mode,
                "ratios": _means(rows, settings.peers),
                "ratios_alone": _means(rows, settings.peers, alone=True),
            }
            for cell, mode, rows in report.tables()
        ],
    }
    return dict(_finite(document))


def _row(row: Row) -> dict[str, Any]:
    kept = "cell mode flops matmul_gflops bound_ms over_bound".split()
    computed = "median_ms iqr_ms alone_ms disagrees".split()
    contenders = {
        name: asdict(entry)
        | {key: getattr(entry, key) for key in computed}
        | {"ratio": row.ratio(name)}
        for name, entry in row.entries.items()
    }
    measured = {key: getattr(row, key) for key in kept}
    return {**measured, "shape": asdict(row.shape), "contenders": contenders}


def _means(rows: list[Row], peers: Sequence[str], alone: bool = False) -> dict[str, float]:
    means = {peer: mean(rows, peer, alone) for peer in peers}
    return {peer: value for peer, value in means.items() if not math.isnan(value)}


def _finite(value: Any) -> Any:
    """The value with None for numbers that JSON lacks: NaN and infinity."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(report: Report, folder: Path) -> Path:
    """Writes ``bench.json`` into a folder, which need not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "bench.json"
    path.write_text(json.dumps(as_json(report), indent=1) + "\n", encoding="utf-8")
    return path
