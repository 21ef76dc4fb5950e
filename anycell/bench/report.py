"""What the benchmark shows: a table in the terminal and a JSON file with every sample."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anycell.bench.problem import rounds
from anycell.bench.runner import APART, Entry, Report, Row
from anycell.plan.dtype import DTYPES

SCHEMA = 1
MiB = 1 << 20
MARK = "!"  # next to a time that differs from the time alone


# -- JSON ------------------------------------------------------------------------------------------


def as_json(report: Report) -> dict[str, Any]:
    """Everything that was measured and everything needed to judge it."""
    settings = report.settings
    return {
        "schema": SCHEMA,
        "date": report.date,
        "ok": report.ok,
        "interrupted": report.interrupted,
        "machine": report.machine | {"matmul_gflops": _number(report.matmul_gflops)},
        "settings": {
            "cells": [cell.origin for cell in settings.cells],
            "shapes": [shape.name for shape in settings.shapes],
            "modes": list(settings.modes),
            "dtype": settings.dtype,
            "threads": settings.threads,
            "subject": settings.subject,
            "peers": list(settings.peers),
            "seconds": settings.seconds,
            "seed": settings.seed,
        },
        "rows": [_row_json(row) for row in report.rows],
        "geometric_means": [
            {
                "cell": cell,
                "mode": mode,
                "ratios": _means(report, rows),
                "ratios_alone": _means(report, rows, alone=True),
            }
            for cell, mode, rows in report.tables()
        ],
    }


def _means(report: Report, rows: list[Row], alone: bool = False) -> dict[str, float]:
    means = {peer: report.geometric_mean(rows, peer, alone) for peer in report.settings.peers}
    return {peer: mean for peer, mean in means.items() if mean is not None}


def _row_json(row: Row) -> dict[str, Any]:
    timed = row.entries[row.subject].timed
    return {
        "cell": row.cell,
        "mode": row.mode,
        "shape": row.shape.asdict(),
        "flops": row.flops,
        "matmul_gflops": _number(row.gflops),
        "bound_ms": _number(row.bound_ms) if timed else None,
        "over_bound": row.over_bound,
        "contenders": {
            name: _entry_json(entry) | {"ratio": row.ratio(name)}
            for name, entry in row.entries.items()
        },
    }


def _entry_json(entry: Entry) -> dict[str, Any]:
    return {
        "status": entry.status,
        "reason": entry.reason,
        "engine": entry.engine and dict(zip(("name", "reason"), entry.engine, strict=True)),
        "median_ms": entry.median_ms if entry.timed else None,
        "iqr_ms": entry.iqr_ms if entry.timed else None,
        "alone_ms": entry.alone_ms,
        "disagrees": entry.disagrees,
        "first_call_ms": entry.first_call_ms,
        "fresh_process_extra_ms": entry.fresh_process_ms,
        "training_peak_bytes": entry.peak_bytes,
        "remarks": entry.remarks,
        "errors": {name: _number(error) for name, error in entry.errors.items()},
        "samples_ms": entry.samples_ms,
        "alone_samples_ms": entry.alone_samples_ms,
    }


def _number(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else None


def write_json(report: Report, folder: Path) -> Path:
    """``bench.json`` in that folder, which need not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "bench.json"
    path.write_text(json.dumps(as_json(report), indent=1) + "\n", encoding="utf-8")
    return path


# -- tables ----------------------------------------------------------------------------------------

Table = tuple[str, list[str], list[list[str]]]


def summary(report: Report) -> str:
    """One line about the machine."""
    m = report.machine
    versions = ", ".join(f"{name} {v}" for name, v in m["versions"].items() if v)
    return (
        f"{m['cpu']}, {report.settings.threads} of {m['cores']} cores, "
        f"{DTYPES[report.settings.dtype].storage.name} matmul {report.matmul_gflops:.0f} GFLOP/s; "
        f"{m['python']}, {versions}" + (f", revision {m['revision']}" if m["revision"] else "")
    )


def tables(report: Report) -> list[Table]:
    """Title, headers and lines of one table per cell and mode."""
    return [_table(report, f"{cell} {mode}", rows) for cell, mode, rows in report.tables() if rows]


def _table(report: Report, title: str, rows: list[Row]) -> Table:
    settings = report.settings
    peers = [
        peer
        for peer in settings.contenders[1:]
        if any(row.entries[peer].status != "unsupported" for row in rows)
    ]
    probed = any(row.entries[row.subject].fresh_process_ms for row in rows)
    weighed = [
        name for name in settings.contenders if any(row.entries[name].peak_bytes for row in rows)
    ]
    wide = 1 + rounds(settings.dtype)  # columns of a contender: there a time says little alone
    headers = ["shape", "T B I H L D", "bound ms"]
    headers += [*[f"{settings.subject} ms", "error"][:wide], "/bound"]
    headers += [t for peer in peers for t in (*[f"{peer} ms", "error"][:wide], "ratio")]
    headers += ["first call +ms"] * probed + [f"{name} MiB" for name in weighed]

    body = []
    for row in rows:
        s, ours = row.shape, row.entries[row.subject]
        line = [s.name, f"{s.T} {s.B} {s.I} {s.H} {s.L} {s.D}"]
        line += [
            _ms(row.bound_ms) if ours.timed else "",
            *[_spread(ours), _errors(ours)][:wide],
            "" if row.over_bound is None else f"{row.over_bound:.2f}",
        ]
        for peer in peers:
            entry = row.entries[peer]
            line += [*[_spread(entry), _errors(entry)][:wide], _times(row.ratio(peer))]
        if probed:
            extra = ours.fresh_process_ms or {}
            line.append(" / ".join(f"{extra[key]:.0f}" for key in ("cold", "warm") if key in extra))
        line += [_mib(row.entries[name].peak_bytes) for name in weighed]
        body.append(line)

    over = [row.over_bound for row in rows if row.over_bound is not None]
    mean = math.prod(over) ** (1 / len(over)) if over else None
    blank = [""] * (2 + wide)
    lasts = [["geometric mean", *blank, "" if mean is None else f"{mean:.2f}"]]
    if settings.alone:
        lasts.append(["the same, alone", *blank, ""])
    for alone, last in enumerate(lasts):
        for peer in peers:
            last += [*[""] * wide, _times(report.geometric_mean(rows, peer, bool(alone)))]
        body.append(last + [""] * (len(headers) - len(last)))
    threads = f"{settings.threads} thread{'s' * (settings.threads > 1)}"
    return f"{title}, {settings.dtype}, {threads}", headers, body


def _ms(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _spread(entry: Entry) -> str:
    """Median and half the distance of the quartiles in percent of it, or why there is none."""
    if entry.timed:
        mark = MARK * bool(entry.disagrees)
        return f"{_ms(entry.median_ms)}{mark} ±{50 * entry.iqr_ms / entry.median_ms:.0f}%"
    words = {"wrong": "REFUSED", "failed": "FAILED", "skipped": "skipped", "unsupported": "-"}
    return words.get(entry.status, "")


def _errors(entry: Entry) -> str:
    """Of the output, and in training of the worst gradient."""
    return " / ".join(f"{error:.0e}" for error in entry.worst_errors)


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"


def _mib(value: int | None) -> str:
    return "" if value is None else f"{value / MiB:.1f}"


def notes(report: Report) -> list[str]:
    """Why a table has no number somewhere; every refusal is spelled out."""
    busy = report.machine["load"] or 0
    warning = (
        f"the machine was busy when this began (load {busy:.1f} on {report.machine['cores']} "
        "cores): take these times with a grain of salt"
    )
    words = {
        "wrong": "REFUSED, results differ from float64",
        "failed": "FAILED",
        "skipped": "skipped",
    }
    remarks = [warning] * (busy > 0.5 * report.machine["cores"])
    if report.interrupted:
        remarks.append(f"interrupted after {len(report.rows)} rows: the rest is missing")
    for name in report.settings.contenders:
        entries = [row.entries[name] for row in report.rows]
        if entries and all(entry.status == "unsupported" for entry in entries):
            remarks.append(f"{name} is left out: {entries[0].reason}")
            continue
        for cell, mode, rows in report.tables():
            lacking = [e for row in rows if (e := row.entries[name]).status == "unsupported"]
            for reason in dict.fromkeys(entry.reason for entry in lacking):
                remarks.append(f"{name} is left out of {cell} {mode}: {reason}")
    for row in report.rows:
        where = f"{row.cell} {row.mode}, {row.shape.name}"
        for name, entry in row.entries.items():
            remarks += [f"{where}: {remark}" for remark in entry.remarks]
            if entry.disagrees and entry.alone_ms is not None:
                times = f"{_ms(entry.median_ms)} ms in turns, {_ms(entry.alone_ms)} ms alone"
                remarks.append(f"{where}, {name}: {times}")
            if entry.status in words:
                remarks.append(f"{where}, {name}: {words[entry.status]}: {entry.reason}")
            elif name == row.subject and entry.engine and entry.engine[0] != "cpu":
                engine, reason = entry.engine
                remarks.append(f"{where}: not fused, it ran on {engine!r}: {reason}")
    return remarks


LEGEND = (
    "ms: median ± half the interquartile range of interleaved runs. ratio: peer's time over ours, "
    "median of the ratios within rounds; above 1 ours is faster. bound: the matmuls alone at the "
    f"rate of a large one. {MARK}: alone in a process of its own it takes another time, by over "
    f"{APART - 1:.0%}. error: relative, against float64, of the output and in "
    "training of the worst gradient. first call: what it takes longer than a later one, in a fresh "
    "process, kernel cache empty / filled."
)


def show(report: Report, console: Any = None) -> None:
    """Print the tables, with ``rich`` where it is installed."""
    if importlib.util.find_spec("rich") is None:
        print("\n".join(plain(table) for table in tables(report)))
        print("\n".join([LEGEND, summary(report), *notes(report)]))
        return
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = console or Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    for table in tables(report):
        console.print(_rich(table))
    for line in (LEGEND, summary(report)):
        console.print(Padding(Text(line, style="dim"), (0, 1)), width=min(console.width, 110))
    for note in notes(report):
        bad = "REFUSED" in note or "FAILED" in note
        console.print(Padding(Text(note, style="bold red" if bad else "yellow"), (0, 1)))


def _rich(table: Table) -> Any:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    title, headers, body = table
    grid = RichTable(title=title, box=box.SIMPLE_HEAD, title_style="bold", header_style="bold cyan")
    for k, header in enumerate(headers):
        grid.add_column(header, justify="left" if k < 2 else "right", no_wrap=k < 2)
    for number, line in enumerate(body):
        last = not line[1]  # of all shapes
        if last and body[number - 1][1]:
            grid.add_section()
        texts = [Text(t, style=_style(h, t)) for h, t in zip(headers, line, strict=True)]
        grid.add_row(*texts, style="bold" if last else "")
    return grid


def _style(header: str, text: str) -> str:
    if text in ("REFUSED", "FAILED"):
        return "bold red"
    if header == "ratio" and text:
        return "green" if float(text.removesuffix("x")) >= 1 else "red"
    return "dim" if header in ("T B I H L D", "bound ms", "error") else ""


def plain(table: Table) -> str:
    """The table in aligned text.

    >>> print(plain(("t", ["name", "ms"], [["a", "10.5"], ["bcdef", "1"]])))
    t
      name     ms
      a      10.5
      bcdef     1
    """
    title, headers, body = table
    lines: Sequence[Sequence[str]] = [headers, *body]
    widths = [max(len(line[k]) for line in lines) for k in range(len(headers))]
    return "\n".join(
        [
            title,
            *(
                "  "
                + "  ".join(
                    text.ljust(width) if k < 1 else text.rjust(width)
                    for k, (text, width) in enumerate(zip(line, widths, strict=True))
                ).rstrip()
                for line in lines
            ),
        ]
    )
