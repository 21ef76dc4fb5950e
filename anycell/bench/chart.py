"""The picture: how many times faster, shape by shape, on a log scale around 1."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Any

from anycell.bench.report import WORDS, summary
from anycell.bench.results import Report, Row, mean, ratios
from anycell.usage import need

MUTED, GRID, SLOWER = "#7b8794", "#e4e7eb", "#f7eeee"  # SLOWER: the half-plane where we are
COLORS = ("#2f6fb3", "#e08e45", "#4c9a6b", "#a05195", "#c0504d", "#6b7b8c")


def draw(report: Report, folder: Path) -> Path | None:
    """Writes ``bench.png``: one panel per cell and mode, one bar per shape and peer.

    Returns None, and writes nothing, if there is nothing to compare.
    """
    peers = [peer for peer in report.settings.contenders[1:] if ratios(report.rows, peer)]
    panels = [
        (f"{cell} {mode}", rows)
        for cell, mode, rows in report.tables()
        if any(ratios(rows, peer) for peer in peers)
    ]
    if not panels:
        return None
    matplotlib = need("matplotlib", "the chart")
    matplotlib.use("Agg")  # no window: this also runs where there is no display
    plt: Any = need("matplotlib.pyplot", "the chart")

    columns = min(len(panels), len(report.settings.modes))
    lines = -(-len(panels) // columns)
    most = max(len(rows) for _, rows in panels)
    height = 0.9 + 0.16 * len(peers) + 0.15 * most * len(peers) + 0.1 * most
    # The same limits for all panels, so that they can be compared; with room for the numbers.
    found = [ratio for peer in peers for ratio in ratios(report.rows, peer)]
    limits = min(0.8, 0.72 * min(found)), max(1.25, 1.5 * max(found))
    with plt.rc_context({"font.size": 9, "xtick.color": MUTED}):
        size = 1.2 + 5.4 * columns, 1.0 + height * lines
        form = {"figsize": size, "squeeze": False, "layout": "constrained"}
        figure, axes = plt.subplots(lines, columns, **form)
        for axis in axes.flat[len(panels) :]:
            axis.set_axis_off()
        for axis, (title, rows) in zip(axes.flat, panels, strict=False):
            _panel(axis, title, rows, peers, limits)
        title = f"How many times faster {report.settings.subject} is"
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        footer = textwrap.fill(summary(report), 88 * columns)
        figure.supxlabel(footer, x=0.01, ha="left", fontsize=7, color=MUTED)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "bench.png"
        figure.savefig(path, dpi=160, facecolor="white")
        plt.close(figure)
    return path


def _panel(
    axis: Any, title: str, rows: list[Row], peers: list[str], limits: tuple[float, float]
) -> None:
    present = [peer for peer in peers if ratios(rows, peer)]
    thickness = 0.8 / len(present)
    axis.axvspan(limits[0], 1, color=SLOWER, zorder=0, linewidth=0)
    for k, peer in enumerate(present):
        of_peer = [row.ratio(peer) for row in rows]
        bars = axis.barh(
            [number + (k - (len(present) - 1) / 2) * thickness for number in range(len(rows))],
            # A bar on a log axis has no zero to start from; it starts at "equally fast".
            [0 if math.isnan(ratio) else ratio - 1 for ratio in of_peer],
            left=1,
            height=0.88 * thickness,
            color=COLORS[peers.index(peer) % len(COLORS)],
            label=f"{peer}: geometric mean {mean(rows, peer):.2f}x".replace("nanx", "unknown"),
            zorder=2,
        )
        axis.bar_label(bars, [_word(row, peer) for row in rows], padding=3, fontsize=7)
    axis.axvline(1, color="black", linewidth=1, zorder=3)
    axis.set(xscale="log", xlim=limits, ylim=(len(rows) - 0.45, -0.55))
    narrow = math.log10(limits[1] / limits[0]) < 1
    axis.xaxis.get_major_locator().set_params(subs=(1, 1.5, 2, 3, 5, 8) if narrow else (1, 2, 5))
    axis.xaxis.set_major_formatter("{x:g}x")
    axis.minorticks_off()
    axis.grid(axis="x", color=GRID, linewidth=0.8, zorder=1)
    axis.set_axisbelow(True)
    refused = [" (refused)" * (row.ours.status in ("wrong", "failed")) for row in rows]
    names = [row.shape.name + note for row, note in zip(rows, refused, strict=True)]
    axis.set_yticks(range(len(rows)), names)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    above = {"loc": "lower left", "bbox_to_anchor": (0, 1), "alignment": "left", "frameon": False}
    heading = {"size": 10.5, "weight": "bold"}
    axis.legend(title=title, title_fontproperties=heading, fontsize=8.5, **above)


def _word(row: Row, peer: str) -> str:
    """The ratio with three digits, or why there is none."""
    ratio = row.ratio(peer)
    if math.isnan(ratio):
        return WORDS.get(row.entries[peer].status, "").lower().removeprefix("-")
    return f"{ratio:#.3g}".removesuffix(".")
