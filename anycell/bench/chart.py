"""The picture: how many times faster, shape by shape, on a log scale around 1."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from anycell.bench.errors import need
from anycell.bench.report import summary
from anycell.bench.runner import Report, Row

INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"
COLORS = ("#2f6fb3", "#e08e45", "#4c9a6b", "#a05195", "#c0504d", "#6b7b8c")
SLOWER = "#f7eeee"  # the half-plane where we lose


def draw(report: Report, folder: Path) -> Path | None:
    """Write ``bench.png``: one panel per cell and mode, one bar per shape and peer.

    Nothing where there is nothing to compare.
    """
    panels = [panel for panel in report.tables() if any(_ratios(panel[2], report).values())]
    if not panels:
        return None
    matplotlib = need("matplotlib", "the chart")
    matplotlib.use("Agg")  # no window: this also runs where there is no display
    plt: Any = need("matplotlib.pyplot", "the chart")

    peers = [
        peer
        for peer in report.settings.contenders[1:]
        if any(_has(rows, peer) for _, _, rows in panels)
    ]
    colors = dict(zip(peers, COLORS * len(peers), strict=False))
    columns = min(len(panels), len(report.settings.modes))
    lines = -(-len(panels) // columns)
    bars = max(len(rows) for _, _, rows in panels) * len(peers)
    height = 0.9 + 0.16 * len(peers) + 0.15 * bars + 0.1 * len(report.settings.shapes)
    style = {
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "text.color": INK,
        "axes.labelcolor": MUTED,
        "xtick.color": MUTED,
        "ytick.color": INK,
    }
    with plt.rc_context(style):
        figure, axes = plt.subplots(
            lines,
            columns,
            figsize=(1.2 + 5.4 * columns, 1.0 + height * lines),
            squeeze=False,
            layout="constrained",
        )
        for axis in axes.flat[len(panels) :]:
            axis.set_axis_off()
        limits = _limits([r for p in panels for rs in _ratios(p[2], report).values() for r in rs])
        for axis, (cell, mode, rows) in zip(axes.flat, panels, strict=False):
            _panel(axis, f"{cell} {mode}", rows, report, colors, limits)
        title = f"How many times faster {report.settings.subject} is"
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        footer = textwrap.fill(summary(report), 88 * columns)
        figure.supxlabel(footer, x=0.01, ha="left", fontsize=7, color=MUTED)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "bench.png"
        figure.savefig(path, dpi=160, facecolor="white")
        plt.close(figure)
    return path


def _has(rows: list[Row], peer: str) -> bool:
    return any(row.ratio(peer) is not None for row in rows)


def _ratios(rows: list[Row], report: Report) -> dict[str, list[float]]:
    return {
        peer: [ratio for row in rows if (ratio := row.ratio(peer)) is not None]
        for peer in report.settings.contenders[1:]
    }


def _limits(ratios: list[float]) -> tuple[float, float]:
    """The same for all panels, so that they can be compared; with room for the numbers."""
    return min([0.8, *(0.72 * r for r in ratios)]), max([1.25, *(1.5 * r for r in ratios)])


def _panel(
    axis: Any,
    title: str,
    rows: list[Row],
    report: Report,
    colors: dict[str, str],
    limits: tuple[float, float],
) -> None:
    present = [peer for peer in colors if _has(rows, peer)]
    thickness = 0.8 / max(1, len(present))
    axis.axvspan(limits[0], 1, color=SLOWER, zorder=0, linewidth=0)
    for k, peer in enumerate(present):
        # Our own legend: as many lines in every panel, so that the panels stay aligned.
        above = {
            "xy": (0, 1),
            "xycoords": "axes fraction",
            "textcoords": "offset points",
            "fontsize": 8.5,
        }
        height = 6 + 13 * (len(colors) - 1 - k)
        mean = report.geometric_mean(rows, peer)
        axis.annotate("\N{BLACK SQUARE}", xytext=(0, height), color=colors[peer], **above)
        axis.annotate(peer, xytext=(12, height), **above)
        axis.annotate(f"geometric mean {mean:.2f}x", xytext=(90, height), color=MUTED, **above)
        for number, row in enumerate(rows):
            ratio = row.ratio(peer)
            y = number + (k - (len(present) - 1) / 2) * thickness
            small = {"textcoords": "offset points", "va": "center", "fontsize": 7}
            if ratio is None:
                reason = {"wrong": "refused", "failed": "failed"}.get(row.entries[peer].status, "")
                axis.annotate(reason, (1, y), xytext=(3, 0), color=colors[peer], **small)
                continue
            # A bar on a log axis has no zero to start from; it starts at "equally fast".
            axis.barh(
                y,
                ratio - 1,
                left=1,
                height=0.88 * thickness,
                color=colors[peer],
                zorder=2,
            )
            axis.annotate(
                f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}" if ratio < 100 else f"{ratio:.0f}",
                (ratio, y),
                xytext=(3 if ratio >= 0.995 else -3, 0),
                ha="left" if ratio >= 0.995 else "right",
                color=INK,
                **small,
            )
    axis.set_xscale("log")
    axis.set_xlim(*limits)
    axis.set_xticks(_ticks(*limits), [f"{tick:g}x" for tick in _ticks(*limits)])
    axis.set_xticks([], minor=True)
    axis.axvline(1, color=INK, linewidth=1, zorder=3)
    axis.grid(axis="x", color=GRID, linewidth=0.8, zorder=1)
    axis.set_axisbelow(True)
    axis.set_yticks(range(len(rows)), [_label(row) for row in rows])
    axis.set_ylim(len(rows) - 0.45, -0.55)
    axis.tick_params(length=0)
    for spine in axis.spines.values():
        spine.set_visible(False)
    axis.set_title(title, loc="left", fontsize=10.5, fontweight="bold", pad=10 + 13 * len(colors))


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers, not too many: matplotlib's own ticks on a log axis are powers of ten.

    >>> _ticks(0.8, 3.0)
    [0.8, 1, 1.5, 2, 3]
    """
    fine = [0.5, 0.6, 0.8, 1, 1.5, 2, 3]
    candidates = fine if low > 0.45 and high < 4 else [2.0**k for k in range(-10, 15)]
    inside = [tick for tick in candidates if low <= tick <= high]
    steps = -(-len(inside) // 9)
    middle = inside.index(1)
    return [tick for k, tick in enumerate(inside) if (k - middle) % steps == 0]


def _label(row: Row) -> str:
    broken = row.entries[row.subject].status not in ("ok", "unsupported")
    return f"{row.shape.name}{' (refused)' if broken else ''}"
