"""Shows what was measured, as tables in the terminal."""

from __future__ import annotations

import importlib.util
import math
import textwrap
from collections.abc import Iterator
from dataclasses import astuple

from anycell.bench.machine import busy
from anycell.bench.problem import rounds
from anycell.bench.results import APART, FAR, Entry, Report, Row, Settings, mean
from anycell.bench.stats import geometric_mean
from anycell.plan.dtype import DTYPES

MiB = 1 << 20
MARK = "!"  # next to a time that differs from the time alone
Table = tuple[str, list[str], list[list[str]]]  # title, headers, lines
TITLES = ("geometric mean", "the same, alone")  # of the lines over all shapes
WORDS = {"wrong": "REFUSED", "failed": "FAILED", "unsupported": "-"}


def tables(report: Report) -> list[Table]:
    """Title, headers and lines of one table per cell and mode."""
    settings, shown = report.settings, []
    threads = f"{settings.threads} thread{'s' * (settings.threads > 1)}"
    for cell, mode, rows in report.tables():
        if rows:
            headers, *body = map(list, zip(*_columns(settings, rows), strict=True))
            body = body if settings.alone else body[:-1]
            shown.append((f"{cell} {mode}, {settings.dtype}, {threads}", headers, body))
    return shown


def _columns(settings: Settings, rows: list[Row]) -> Iterator[list[str]]:
    """The header of each column, its text for each row, and its means, in turns and alone."""
    subject, *peers = settings.contenders

    def times(name: str) -> Iterator[list[str]]:
        yield [f"{name} ms", *[_spread(row.entries[name]) for row in rows], "", ""]
        if rounds(settings.dtype):  # a time without the error says little
            yield ["error", *[_errors(row.entries[name]) for row in rows], "", ""]

    yield ["shape", *[row.shape.name for row in rows], *TITLES]
    yield ["T B I H L D", *[" ".join(map(str, astuple(row.shape)[2:])) for row in rows], "", ""]
    yield ["bound ms", *[_ms(row.bound_ms) if row.ours.timed else "" for row in rows], "", ""]
    yield from times(subject)
    reached = geometric_mean([row.over_bound for row in rows if row.ours.timed])
    yield ["of bound", *[_share(row.over_bound) for row in rows], _share(reached), ""]
    for peer in peers:
        if any(row.entries[peer].status != "unsupported" for row in rows):
            yield from times(peer)
            ratios = [row.ratio(peer) for row in rows]
            ratios += mean(rows, peer), mean(rows, peer, alone=True)
            yield ["ratio", *["" if math.isnan(ratio) else f"{ratio:.2f}x" for ratio in ratios]]
    if any(row.ours.fresh_process_extra_ms for row in rows):
        extras = [(row.ours.fresh_process_extra_ms or {}).values() for row in rows]
        shown = [" / ".join(f"{ms:.0f}" for ms in extra) for extra in extras]
        yield ["first call +ms", *shown, "", ""]
    for name in settings.contenders:
        peaks = [row.entries[name].training_peak_bytes for row in rows]
        if any(peaks):
            yield [f"{name} MiB", *[f"{peak / MiB:.1f}" if peak else "" for peak in peaks], "", ""]


def _ms(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _share(over: float) -> str:
    """The part of our time that the bound is; an empty string if it was not measured."""
    percent = 100 / over
    return "" if math.isnan(percent) else "<1%" if percent < 1 else f"{percent:.0f}%"


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


# -- below the tables ------------------------------------------------------------------------------


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
        everywhere = len(lacking) == len(report.rows)
        remarks += dict.fromkeys(
            f"{name} is left out{'' if everywhere else f' of {row.cell} {row.mode}'}: "
            f"{row.entries[name].reason}"
            for row in lacking
        )
    for row in report.rows:
        for name in row.entries:
            remarks += _of_entry(row, name)
    return remarks


def _of_entry(row: Row, name: str) -> Iterator[str]:
    entry, where = row.entries[name], f"{row.cell} {row.mode}, {row.shape.name}"
    for remark in entry.remarks:
        yield f"{where}: {remark}"
    if entry.disagrees:
        times = f"{_ms(entry.median_ms)} ms in turns, {_ms(entry.alone_ms)} ms alone"
        yield f"{where}, {name}: {times}"
    if name != row.subject and row.far(name):
        yield (
            f"{row.cell} {row.mode}: no mean for {name}, because of {row.shape.name}: "
            f"{row.ratio(name):.2f}x in turns and {row.ratio(name, alone=True):.2f}x alone "
            f"are more than a factor of {FAR:g} apart; measure again on an idle machine"
        )
    if entry.status in ("wrong", "failed"):
        differs = ", results differ from float64" * (entry.status == "wrong")
        yield f"{where}, {name}: {WORDS[entry.status]}{differs}: {entry.reason}"
    elif name == row.subject and entry.timed and entry.engine and entry.engine["name"] != "cpu":
        engine, reason = entry.engine.values()
        yield f"{where}: not fused, it ran on {engine!r}: {reason}"


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


# -- in the terminal -------------------------------------------------------------------------------

COLOURS = {r"\bREFUSED\b|\bFAILED\b": "bold red", r"[1-9]\d*\.\d+x": "green", r"\b0\.\d+x": "red"}


def show(report: Report) -> None:
    """Prints the tables, a legend, and the notes: in colour where rich is installed."""
    shown = tables(report)
    prose = [busy(report.machine)], [legend(shown), summary(report), *notes(report)]
    first, last = ([textwrap.fill(line, 110) for line in lines if line] for lines in prose)
    say = print if importlib.util.find_spec("rich") is None else _in_colour
    for text in (*first, *map(_grid, shown), *last):
        say(text)


def _grid(table: Table) -> str:
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


def _in_colour(text: str) -> None:
    from rich.console import Console
    from rich.text import Text

    painted = Text(text)
    for words, style in COLOURS.items():
        painted.highlight_regex(words, style)
    Console(soft_wrap=True, highlight=False).print(painted)
