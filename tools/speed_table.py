"""Prints a speed table, such as the README's, from results of the benchmark.

python tools/speed_table.py benchmarks/results/DATE_CPU_THREADS.json [PEER]
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

MARK = "!"  # beside a time that is another one alone


def table(report: dict[str, Any], peer: str = "torch.nn") -> str:
    """A line per shape, a column per cell and mode: milliseconds of the peer / ours = times faster.

    A time is marked where the contender takes another one alone; both are told below the table.
    """
    rows = {(row["cell"], row["mode"], row["shape"]["name"]): row for row in report["rows"]}
    shapes = {row["shape"]["name"]: row["shape"] for row in report["rows"]}
    columns = list(dict.fromkeys((cell, mode) for cell, mode, _ in rows))
    lines = ["| | " + " | ".join(f"{cell} {mode}" for cell, mode in columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    ratios: dict[tuple[str, str], list[float]] = {column: [] for column in columns}
    apart = []
    for name, s in shapes.items():
        cells = [f"{name} ({s['T']}, {s['B']}, {s['I']}, {s['H']}, {s['L']} x {s['D']})"]
        for column in columns:
            contenders = rows.get((*column, name), {}).get("contenders", {})
            ours, theirs = (contenders.get(who) for who in (report["settings"]["subject"], peer))
            if not (ours and theirs and ours["samples_ms"] and theirs["samples_ms"]):
                cells.append("")
                continue
            ratio = statistics.median(
                b / a for a, b in zip(ours["samples_ms"], theirs["samples_ms"], strict=True)
            )
            ratios[column].append(ratio)
            cells.append(f"{_time(theirs)} / {_time(ours)} = **{ratio:.2f}**")
            for who, entry in ((peer, theirs), ("ours", ours)):
                if entry.get("disagrees"):
                    alone = _digits(entry["alone_ms"])
                    apart.append(f"{' '.join(column)} of {name}, {who}: {alone} ms")
        lines.append("| " + " | ".join(cells) + " |")
    means = [statistics.geometric_mean(values) if values else None for values in ratios.values()]
    lines.append(_last("geometric mean", means))
    alone = {
        (mean["cell"], mean["mode"]): mean.get("ratios_alone", {}).get(peer)
        for mean in report["geometric_means"]
    }
    if any(alone.values()):
        lines.append(_last("the same, alone", [alone[column] for column in columns]))
    if apart:
        lines += ["", f"{MARK} another time alone: {'; '.join(apart)}."]
    return "\n".join(lines)


def _last(title: str, means: list[float | None]) -> str:
    return " | ".join([f"| {title}", *(f"**{mean:.2f}**" if mean else "" for mean in means)]) + " |"


def _time(entry: dict[str, Any]) -> str:
    return _digits(entry["median_ms"]) + MARK * bool(entry.get("disagrees"))


def _digits(milliseconds: float) -> str:
    """Three of them, without an exponent."""
    return f"{milliseconds:.3g}" if milliseconds < 1000 else f"{milliseconds:.0f}"


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), *sys.argv[2:]))
