"""The demo's picture: forecasts above, loss curves and time per epoch below."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np

mpl.use("agg")  # to a file; no screen needed

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

if TYPE_CHECKING:
    from demo import Run, Windows

INK, FAINT = "#2b2d42", "#c9ced6"
STYLE = {
    "figure.facecolor": "white",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlepad": 10,
    "grid.color": "#eceff3",
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
}
YEARS = 4  # of forecasts to show


def draw(runs: Sequence[Run], data: Windows, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        figure = plt.figure(figsize=(11, 8))
        grid = figure.add_gridspec(
            2, 2, height_ratios=(1.25, 1), left=0.07, right=0.97, top=0.85, bottom=0.08,
            hspace=0.36, wspace=0.26,
        )  # fmt: skip
        figure.text(0.07, 0.945, "A year of CO₂ in the air, forecast", size=17, weight="bold")
        figure.text(
            0.07,
            0.912,
            f"Weekly means at Mauna Loa. Each forecast sees {data.weeks} weeks and gives the "
            f"{data.horizon} that follow; no model was trained on the years shown.",
            color="#5c6370",
        )
        _forecasts(figure.add_subplot(grid[0, :]), runs, data)
        _losses(figure.add_subplot(grid[1, 0]), runs)
        _times(figure.add_subplot(grid[1, 1]), runs)
        figure.savefig(path, dpi=160)
        plt.close(figure)


def _forecasts(axes: Axes, runs: Sequence[Run], data: Windows) -> None:
    rows = np.arange(len(data.now) - 1, -1, -data.horizon)[:YEARS][::-1]
    first = data.now[rows[0]] - data.horizon // 2
    dates = data.dates
    axes.plot(
        dates[first:], data.co2[first:], ".", color="#9aa3b2", markersize=5, label="measured"
    )
    for run in runs[-2:]:
        for row in rows:
            now = data.now[row]
            weeks = slice(now, now + data.horizon + 1)
            change = np.concatenate([[0.0], run.forecast[row]]) * data.scale
            axes.plot(
                dates[weeks],
                data.co2[now] + change,
                color=run.color,
                linewidth=1.8,
                label=f"{run.name}, off by {run.error[-1]:.2f} ppm" if row == rows[0] else None,
            )
    for row in rows:
        axes.axvline(dates[data.now[row]], color=FAINT, linewidth=1, linestyle=(0, (2, 3)))
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.12 * (high - low))
    axes.annotate(
        "forecast made here",
        (dates[data.now[rows[0]]], high),
        xytext=(6, 4),
        textcoords="offset points",
        color="#5c6370",
        size=9,
    )
    axes.set_title("Forecast and measurement, ppm")
    axes.legend(loc="lower right")
    axes.margins(x=0.01)


def _losses(axes: Axes, runs: Sequence[Run]) -> None:
    for k, run in enumerate(runs):
        epochs = np.arange(1, len(run.loss) + 1)
        below = k == 0 and len(runs) == 3  # the other LSTM runs on top of it
        axes.plot(
            epochs,
            run.loss,
            color=run.color,
            linewidth=6 if below else 1.8,
            alpha=0.45 if below else 1,
            solid_capstyle="round",
            label=run.name,
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_title("Training loss: the same curve from the same weights")
    axes.set_xlabel("epoch")
    axes.legend()


def _times(axes: Axes, runs: Sequence[Run]) -> None:
    slowest = max(max(run.seconds[1:] or run.seconds) for run in runs)
    for k, run in enumerate(runs):
        axes.barh(k, run.epoch, height=0.56, color=run.color, alpha=0.85)
        epochs = run.seconds[1:] or run.seconds  # the first one also compiles
        spread = k + np.linspace(-0.2, 0.2, len(epochs))
        axes.plot(epochs, spread, ".", color=INK, markersize=3, alpha=0.45)
        faster = "" if k == 0 else f"   {runs[0].epoch / run.epoch:.2f} x as fast"
        axes.text(0, k - 0.42, f"{run.name}   {run.epoch:.2f} s{faster}", va="bottom")
    axes.set_ylim(len(runs) - 0.5, -0.75)
    axes.set_yticks([])
    axes.set_xlim(0, slowest * 1.05)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    axes.set_title("Time per epoch: median, and each epoch")
    axes.set_xlabel("seconds")
