"""Prints the README's speed table from a result of the benchmark.

python tools/speed_table.py benchmarks/results/DATE_CPU_THREADS.json
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

COLUMNS = [(cell, mode) for cell in ("LSTM", "GRU") for mode in ("inference", "training")]
PEER = "torch.nn"


def table(report: dict[str, Any]) -> str:
    """A line per shape: milliseconds of the peer / ours = times faster."""
    rows = {(row["cell"], row["mode"], row["shape"]["name"]): row for row in report["rows"]}
    shapes = {row["shape"]["name"]: row["shape"] for row in report["rows"]}
    lines = ["| | " + " | ".join(f"{cell} {mode}" for cell, mode in COLUMNS) + " |"]
    lines.append("|---" * (len(COLUMNS) + 1) + "|")
    ratios: dict[tuple[str, str], list[float]] = {column: [] for column in COLUMNS}
    for name, s in shapes.items():
        cells = [f"{name} ({s['T']}, {s['B']}, {s['I']}, {s['H']}, {s['L']} x {s['D']})"]
        for column in COLUMNS:
            ours, theirs = (rows[(*column, name)]["contenders"][who] for who in ("anycell", PEER))
            ratio = statistics.median(
                b / a for a, b in zip(ours["samples_ms"], theirs["samples_ms"], strict=True)
            )
            ratios[column].append(ratio)
            times = f"{_digits(theirs['median_ms'])} / {_digits(ours['median_ms'])}"
            cells.append(f"{times} = **{ratio:.2f}**")
        lines.append("| " + " | ".join(cells) + " |")
    means = [f"**{statistics.geometric_mean(ratios[column]):.2f}**" for column in COLUMNS]
    return "\n".join([*lines, "| geometric mean | " + " | ".join(means) + " |"])


def _digits(milliseconds: float) -> str:
    """Three of them, without an exponent."""
    return f"{milliseconds:.3g}" if milliseconds < 1000 else f"{milliseconds:.0f}"


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
