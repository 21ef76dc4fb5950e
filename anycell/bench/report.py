"""Shows what was measured: tables in the terminal and a JSON file with every sample."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any, NamedTuple

from anycell.bench.machine import busy
from anycell.bench.problem import rounds
from anycell.bench.runner import APART, FAR, Entry, Report, Row, Settings, mean
from anycell.bench.stats import geometric_mean
from anycell.plan.dtype import DTYPES

SCHEMA = 1
MiB = 1 << 20
MARK = "!"  # next to a time that differs from the time alone


# -- JSON ------------------------------------------------------------------------------------------

SETTINGS = "modes dtype threads subject peers seconds seed".split()
ROW = "cell mode shape flops matmul_gflops bound_ms over_bound".split()
ENTRY = """
    status reason engine median_ms iqr_ms alone_ms disagrees first_call_ms fresh_process_extra_ms
    training_peak_bytes remarks errors samples_ms alone_samples_ms
""".split()


def as_json(report: Report) -> dict[str, Any]:
    """Returns everything that was measured, and everything needed to judge it."""
    settings = report.settings
    document = {
        "schema": SCHEMA,
        "date": report.date,
        "ok": report.ok,
        "interrupted": report.interrupted,
        "machine": {**report.machine, "matmul_gflops": report.matmul_gflops},
        "settings": {
            "cells": [cell.origin for cell in settings.cells],
            "shapes": [shape.name for shape in settings.shapes],
            **{name: getattr(settings, name) for name in SETTINGS},
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
    return {
        **{key: getattr(row, key) for key in ROW},
        "shape": asdict(row.shape),
        "contenders": {
            name: {key: getattr(entry, key) for key in ENTRY} | {"ratio": row.ratio(name)}
            for name, entry in row.entries.items()
        },
    }


def _means(rows: list[Row], peers: Any, alone: bool = False) -> dict[str, float]:
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


# -- tables ----------------------------------------------------------------------------------------

Table = tuple[str, list[str], list[list[str]]]
Part = tuple[Table | str, str]  # of what is shown, and its style
TITLES = ("geometric mean", "the same, alone")  # of the lines over all shapes
WORDS = {"wrong": "REFUSED", "failed": "FAILED", "skipped": "skipped", "unsupported": "-"}


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        header: its title.
        text: its text for a row.
        last: its text below all rows, about times in turns or alone.
    """

    header: str
    text: Callable[[Row], str]
    last: Callable[[bool], str] = lambda alone: ""


def tables(report: Report) -> list[Table]:
    """Title, headers and lines of one table per cell and mode."""
    settings, shown = report.settings, []
    threads = f"{settings.threads} thread{'s' * (settings.threads > 1)}"
    for cell, mode, rows in report.tables():
        columns = list(_columns(settings, rows)) if rows else []
        body = [[column.text(row) for column in columns] for row in rows]
        body += [[c.last(alone) for c in columns] for alone in (False, True)[: 1 + settings.alone]]
        if rows:
            title = f"{cell} {mode}, {settings.dtype}, {threads}"
            shown.append((title, [column.header for column in columns], body))
    return shown


def _columns(settings: Settings, rows: list[Row]) -> Iterator[Column]:
    subject, *peers = settings.contenders

    def of(name: str) -> Iterator[Column]:
        yield Column(f"{name} ms", lambda row: _spread(row.entries[name]))
        if rounds(settings.dtype):  # a time without the error says little
            yield Column("error", lambda row: _errors(row.entries[name]))
        if name != subject:
            yield Column(
                "ratio",
                lambda row: _number("{:.2f}x", row.ratio(name)),
                lambda alone: _number("{:.2f}x", mean(rows, name, alone)),
            )

    def reached(alone: bool) -> str:
        measured = [row.over_bound for row in rows if row.ours.timed]
        return "" if alone else _share(geometric_mean(measured))

    yield Column("shape", lambda row: row.shape.name, TITLES.__getitem__)
    yield Column("T B I H L D", lambda row: " ".join(map(str, astuple(row.shape)[2:])))
    yield Column("bound ms", lambda row: _ms(row.bound_ms) if row.ours.timed else "")
    yield from of(subject)
    yield Column("of bound", lambda row: _share(row.over_bound), reached)
    for peer in peers:
        if any(row.entries[peer].status != "unsupported" for row in rows):
            yield from of(peer)
    if any(row.ours.fresh_process_extra_ms for row in rows):
        yield Column("first call +ms", _first_call)
    for name in settings.contenders:
        if any(row.entries[name].training_peak_bytes for row in rows):
            yield Column(f"{name} MiB", functools.partial(_mib, name))


def _mib(name: str, row: Row) -> str:
    peak = row.entries[name].training_peak_bytes
    return _number("{:.1f}", peak and peak / MiB)


def _first_call(row: Row) -> str:
    extra = row.ours.fresh_process_extra_ms or {}
    return " / ".join(f"{value:.0f}" for value in extra.values())


def _ms(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _share(over: float) -> str:
    """The part of our time that the bound is; an empty string if it was not measured."""
    percent = 100 / over
    return "<1%" if percent < 1 else _number("{:.0f}%", percent)


def _number(form: str, value: float | None) -> str:
    """Formats a number; returns an empty string if it was not measured."""
    return "" if value is None or math.isnan(value) else form.format(value)


def _errors(entry: Entry) -> str:
    """The error of the output, and in training of the worst gradient."""
    errors = entry.errors.items()
    parts = [[e for name, e in errors if (name == "output") is output] for output in (True, False)]
    return " / ".join(f"{max(part):.0e}" for part in parts if part)


def _spread(entry: Entry) -> str:
    """The median, and half the interquartile range in percent of it; or why there is none."""
    if not entry.timed:
        return WORDS.get(entry.status, "")
    spread = 50 * entry.iqr_ms / entry.median_ms
    return f"{_ms(entry.median_ms)}{MARK * bool(entry.disagrees)} ±{spread:.0f}%"


def summary(report: Report) -> str:
    """One line about the machine."""
    m = report.machine
    versions = ", ".join(f"{name} {v}" for name, v in m["versions"].items() if v)
    return (
        f"{m['cpu']}, {report.settings.threads} of {m['cores']} cores, "
        f"{DTYPES[report.settings.dtype].storage.name} matmul {report.matmul_gflops:.0f} GFLOP/s; "
        f"{m['python']}, {versions}"
        + (f", revision {m['revision']}" if m["revision"] else "")
        + f"; {report.date[:10]}"
    )


def notes(report: Report) -> list[str]:
    """Explains missing numbers in the tables; every refusal is spelled out."""
    remarks = []
    if report.interrupted:
        remarks.append(f"interrupted after {len(report.rows)} rows: the rest is missing")
    for name in report.settings.contenders:
        lacking = [row for row in report.rows if row.entries[name].status == "unsupported"]
        if lacking and len(lacking) == len(report.rows):
            remarks.append(f"{name} is left out: {lacking[0].entries[name].reason}")
            continue
        remarks += dict.fromkeys(
            f"{name} is left out of {row.cell} {row.mode}: {row.entries[name].reason}"
            for row in lacking
        )
    for row in report.rows:
        where = f"{row.cell} {row.mode}, {row.shape.name}"
        for name, entry in row.entries.items():
            remarks += [f"{where}: {remark}" for remark in entry.remarks]
            if entry.disagrees:
                times = f"{_ms(entry.median_ms)} ms in turns, {_ms(entry.alone_ms)} ms alone"
                remarks.append(f"{where}, {name}: {times}")
            if name != row.subject and row.far(name):
                remarks.append(
                    f"{row.cell} {row.mode}: no mean for {name}, because of {row.shape.name}: "
                    f"{row.ratio(name):.2f}x in turns and {row.ratio(name, alone=True):.2f}x alone "
                    f"are more than a factor of {FAR:g} apart; measure again on an idle machine"
                )
            if entry.status not in ("ok", "unsupported"):
                differs = ", results differ from float64" * (entry.status == "wrong")
                remarks.append(f"{where}, {name}: {WORDS[entry.status]}{differs}: {entry.reason}")
            elif name == row.subject and entry.engine and entry.engine["name"] != "cpu":
                engine, reason = entry.engine.values()
                remarks.append(f"{where}: not fused, it ran on {engine!r}: {reason}")
    return remarks


LEGEND = {  # by the ends of the headers that a line explains
    "ms": "ms: median ± half the interquartile range of interleaved runs.",
    "ratio": "ratio: peer's time over ours, median of the ratios within rounds; above 1 ours is "
    "faster.",
    "bound ms": "bound: the matmuls alone at the rate of a large one, which small ones do not "
    "reach.",
    "of bound": "of bound: what part of our time that is.",
    "error": "error: relative, against float64, of the output and in training of the worst "
    "gradient.",
    "first call +ms": "first call: what it takes longer than a later one, in a fresh process, "
    "kernel cache empty / filled.",
    "MiB": "MiB: what a process grows by in a training step.",
}
MARKED = f"{MARK}: alone in a process of its own it takes another time, by over {APART - 1:.0%}."


def legend(shown: list[Table]) -> str:
    """Explains the columns and the mark that these tables have."""
    headers = {header for _, headers, _ in shown for header in headers}
    lines = [line for end, line in LEGEND.items() if any(h.endswith(end) for h in headers)]
    marked = any(MARK in text for _, _, body in shown for line in body for text in line)
    return " ".join(lines + [MARKED] * marked)


def show(report: Report) -> None:
    """Prints the tables, a legend, and the notes: in colour where rich is installed."""
    shown = tables(report)
    parts: list[Part] = [(warning, "bold yellow")] if (warning := busy(report.machine)) else []
    parts += [(table, "") for table in shown]
    parts += [(line, "dim") for line in (legend(shown), summary(report)) if line]
    for note in notes(report):
        bad = "REFUSED" in note or "FAILED" in note
        parts.append((note, "bold red" if bad else "yellow"))
    (_plain if importlib.util.find_spec("rich") is None else _rich)(parts)


def _plain(parts: list[Part]) -> None:
    for part, _ in parts:
        print(textwrap.fill(part, 110) if isinstance(part, str) else _grid(part))


def _grid(table: Table) -> str:
    """The text of a table, whose columns are aligned as `_rich` aligns them."""
    title, headers, body = table
    widths = [max(map(len, column)) for column in zip(headers, *body, strict=True)]
    lines = [
        "  ".join(
            text.ljust(width) if k < 2 else text.rjust(width)
            for k, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in [headers, ["-" * width for width in widths], *body]
    ]
    return "\n".join(["", title, *lines, ""])


def _rich(parts: list[Part]) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    for part, style in parts:
        if isinstance(part, str):
            width = min(console.width, 110) if style == "dim" else None
            console.print(Padding(Text(part, style=style), (0, 1)), width=width)
        else:
            console.print(_rich_grid(part))


def _rich_grid(table: Table) -> Any:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    title, headers, body = table
    grid = RichTable(title=title, box=box.SIMPLE_HEAD, title_style="bold", header_style="bold cyan")
    for k, header in enumerate(headers):
        grid.add_column(header, justify="left" if k < 2 else "right", no_wrap=k < 2)
    for line in body:
        if line[0] == TITLES[0]:
            grid.add_section()
        texts = [Text(t, style=_style(h, t)) for h, t in zip(headers, line, strict=True)]
        grid.add_row(*texts, style="" if line[1] else "bold")
    return grid


def _style(header: str, text: str) -> str:
    if text in ("REFUSED", "FAILED"):
        return "bold red"
    if header == "ratio" and text:
        return "green" if float(text.removesuffix("x")) >= 1 else "red"
    return "dim" if header in ("T B I H L D", "bound ms", "error") else ""
