"""Draws the demo's picture: forecasts above, loss curves and time per epoch below."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np

mpl.use("agg")  # to a file; no screen needed

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

if TYPE_CHECKING:
    from demo import Run, Series

INK, SOFT, DOTS, FAINT = "#2b2d42", "#5c6370", "#9aa3b2", "#c9ced6"
STYLE = {
    "figure.facecolor": "white",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.grid": True,
    "axes.axisbelow": True,
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
YEARS = 4  # years of forecasts to show


def draw(runs: Sequence[Run], series: Series, path: Path) -> None:
    """Writes the picture to ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        figure = plt.figure(figsize=(11, 8.2))
        grid = figure.add_gridspec(
            2, 2, left=0.06, right=0.97, top=0.845, bottom=0.075,
            height_ratios=(1.25, 1), hspace=0.36, wspace=0.16,
        )  # fmt: skip
        figure.text(0.06, 0.945, "A year of CO₂ in the air, forecast", size=17, weight="bold")
        figure.text(
            0.06,
            0.912,
            f"Weekly means from Mauna Loa. A network reads {series.weeks} weeks and forecasts the "
            "next 52. None was trained on the years shown.",
            color=SOFT,
        )
        _forecasts(figure.add_subplot(grid[0, :]), runs[-2:], series)
        _losses(figure.add_subplot(grid[1, 0]), runs)
        _times(figure.add_subplot(grid[1, 1]), runs)
        figure.savefig(path, dpi=160)
        plt.close(figure)


def _forecasts(axes: Axes, runs: Sequence[Run], series: Series) -> None:
    windows = series.test[::-52][:YEARS][::-1]
    made = windows + series.weeks - 1  # the week in which each forecast is made
    shown = slice(made[0] - 26, None)
    axes.plot(series.dates[shown], series.co2[shown], ".", color=DOTS, ms=5, label="measured")
    for run in runs:
        both = " (torch.nn.LSTM lies beneath)" if run.name == "anycell.torch.LSTM" else ""
        label = f"{run.name}{both}, off by {run.error[-1]:.2f} ppm"
        for week, change in zip(made, run.forecast(series, windows), strict=True):
            weeks = slice(week, week + 53)
            level = series.co2[week] + series.ppm * np.concatenate([[0.0], change])
            axes.plot(series.dates[weeks], level, color=run.color, lw=1.8, label=label)
            label = "_"  # one entry in the legend
    for week in made:
        axes.axvline(series.dates[week], color=FAINT, lw=1, ls=(0, (2, 3)), zorder=0)
    axes.annotate(
        "forecast made here",
        (series.dates[made[0]], 1),
        xycoords=("data", "axes fraction"),
        xytext=(5, -12),
        textcoords="offset points",
        color=SOFT,
        size=9,
    )
    axes.set_title("Measured and forecast, ppm")
    axes.legend(loc="lower right")
    axes.margins(x=0.01)


def _losses(axes: Axes, runs: Sequence[Run]) -> None:
    for run in runs:
        beneath = run.name == "torch.nn.LSTM"  # anycell's runs on top of it
        axes.plot(
            np.arange(1, len(run.loss) + 1),
            run.loss,
            color=run.color,
            lw=7 if beneath else 1.8,
            alpha=0.5 if beneath else 1.0,
            solid_capstyle="round",
            label=run.name,
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title("Training loss")
    axes.set_xlabel("epoch")
    axes.legend()


def _times(axes: Axes, runs: Sequence[Run]) -> None:
    for k, run in enumerate(runs):
        axes.barh(k, run.epoch, height=0.5, color=run.color, alpha=0.85)
        spread = k + np.linspace(-0.17, 0.17, len(run.seconds))
        axes.plot(run.seconds, spread, ".", color="white", ms=6, mec=INK, mew=0.6)
        speed = f"{runs[0].epoch / run.epoch:.2f} x the speed" if k else ""
        axes.text(0, k - 0.3, f"{run.name}   {run.epoch:.2f} s   {speed}", va="bottom")
    axes.set_ylim(len(runs) - 0.6, -0.65)
    axes.set_xlim(
        0, 1.6 * max(run.epoch for run in runs)
    )  # a first epoch that compiles may lie outside
    axes.set_yticks([])
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    axes.set_title("Time per epoch: the median, and each one")
    axes.set_xlabel("seconds")
