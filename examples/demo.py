"""Forecasts a year of CO2 in the air: with PyTorch's and anycell's LSTM, and with a cell that no
library has, because it is defined below.

    python examples/demo.py                    in PyTorch if it is installed, else in NumPy
    python examples/demo.py --backend numpy    in NumPy
    python examples/demo.py --quick            a toy run of seconds

The data, weekly means from Mauna Loa, 1958 to 2001, ship with statsmodels and are in the public
domain: Keeling & Whorf, *Atmospheric CO2 Concentrations*, Oak Ridge National Laboratory, 2004.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Protocol

import numpy as np
import numpy.typing as npt
import picture
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from anycell import cell, sigmoid, sqrt, tanh

Array = npt.NDArray[np.float32]
Index = npt.NDArray[np.int64]


# -- the complete cell -----------------------------------------------------------------------------


@cell(gates="i g o", state="h u v", params="a=1 b=0.12 decay=4")
def Pendulum(x, r, s, p):
    """Each unit is a pendulum that the input pushes: seasons are its natural motion.

    Every week, (u, v) turns by the angle of (a, b), initially a full turn in a year, and decays a
    little. anycell derives the backward pass and the kernels from these lines.
    """
    i, g, o = x + r
    swing = sigmoid(p.decay) / sqrt(p.a * p.a + p.b * p.b)
    u = swing * (p.a * s.u - p.b * s.v) + sigmoid(i) * tanh(g)
    v = swing * (p.b * s.u + p.a * s.v)
    return sigmoid(o) * tanh(u), u, v


# -- the data --------------------------------------------------------------------------------------

YEAR = 52  # weeks
HELD_OUT = 10 * YEAR  # at the end of the series; no model sees them in training
PPM = 3.0  # roughly the seasonal amplitude; networks see the data in this unit


@dataclass
class Series:
    """Windows of ``weeks`` weeks, by the index of their first week.

    A model reads a window and forecasts the year ahead in each week of the window's last year. CO2
    rises, so inputs are relative to the window's first week, and a forecast to the week it is made.
    """

    dates: npt.NDArray[np.datetime64]
    co2: Array
    weeks: int
    ppm: float = PPM

    def __post_init__(self) -> None:
        last = len(self.co2) - self.weeks - YEAR  # the last window whose forecast can be judged
        split = len(self.co2) - HELD_OUT
        self.train = np.arange(split - self.weeks - YEAR)
        self.test = np.arange(split - self.weeks, last + 1)
        ahead = np.arange(len(self.co2) - YEAR)[:, None] + np.arange(1, YEAR + 1)
        self._change = (self.co2[ahead] - self.co2[: len(ahead), None]) / np.float32(PPM)

    def seen(self, windows: Index) -> Array:
        """The inputs ``[B, weeks, 1]`` of these windows."""
        levels = self.co2[windows[:, None] + np.arange(self.weeks)]
        return (levels - levels[:, :1])[:, :, None] / np.float32(PPM)

    def ahead(self, windows: Index) -> Array:
        """The targets ``[B, 52, 52]``: the 52 changes ahead, in each week of the last year."""
        return self._change[windows[:, None] + np.arange(self.weeks - YEAR, self.weeks)]

    def last_year(self, windows: Index) -> Array:
        """A forecast without learning, which repeats the last year."""
        return self._change[windows + self.weeks - 1 - YEAR]

    def error(self, forecast: Array, windows: Index) -> float:
        """Root mean square, in ppm, of the forecast made in the last week of each window."""
        truth = self._change[windows + self.weeks - 1]
        return PPM * float(np.sqrt(np.mean(np.square(forecast - truth))))


def load(weeks: int) -> Series:
    from statsmodels.datasets import co2

    series = co2.load_pandas().data["co2"].interpolate()  # 59 of 2284 weeks were not measured
    return Series(series.index.to_numpy(), series.to_numpy(np.float32), weeks)


# -- the models ------------------------------------------------------------------------------------


class Forecaster(Protocol):
    """A recurrent layer and a readout, as in ``forecaster_torch`` and ``forecaster_numpy``."""

    size: int  # the number of learned parameters

    def fit(self, x: Array, y: Array) -> float:
        """Takes one training step; returns the loss before it."""
        ...

    def predict(self, x: Array) -> Array: ...


@dataclass
class Run:
    """One model, and its training results epoch by epoch."""

    name: str
    model: Forecaster
    color: str
    loss: list[float] = field(default_factory=list)
    error: list[float] = field(default_factory=list)  # on the held-out years, ppm
    seconds: list[float] = field(default_factory=list)  # of training alone

    @property
    def epoch(self) -> float:
        return median(self.seconds)

    def forecast(self, series: Series, windows: Index) -> Array:
        return self.model.predict(series.seen(windows))[:, -1]


def models(backend: str, hidden: int) -> list[Run]:
    grey, red, teal = "#8d99ae", "#d1495b", "#00798c"
    if backend == "numpy":
        import forecaster_numpy as numpy

        return [
            Run("anycell.numpy.LSTM", numpy.lstm(hidden, YEAR), red),
            Run("Pendulum", numpy.rnn(Pendulum, hidden, YEAR), teal),
        ]
    import forecaster_torch as torch
    from torch import set_num_threads

    # PyTorch's threads wait for each other in busy loops: with two, torch.nn.LSTM takes 0.7 of the
    # time where both cores are free, and 10 to 40 times as long where other processes want them.
    set_num_threads(1)
    theirs, ours = torch.nn_lstm(hidden, YEAR), torch.lstm(hidden, YEAR)
    ours.load_state_dict(theirs.state_dict())  # both have the same names and shapes
    return [
        Run("torch.nn.LSTM", theirs, grey),
        Run("anycell.torch.LSTM", ours, red),
        Run("Pendulum", torch.rnn(Pendulum, hidden, YEAR), teal),
    ]


def train(runs: list[Run], series: Series, epochs: int, console: Console) -> None:
    """Trains all models side by side, so that a slow phase of the machine affects them all."""
    rng = np.random.default_rng(0)
    columns = (
        TextColumn("  {task.description:<19}"),
        BarColumn(22),
        MofNCompleteColumn(),
        TextColumn("epochs  {task.fields[news]:<16}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bars = [progress.add_task(run.name, total=epochs, news="") for run in runs]
        for _ in range(epochs):
            batches = shuffled(series.train, rng)
            for run, bar in zip(runs, bars, strict=True):
                start = perf_counter()
                losses = [run.model.fit(series.seen(b), series.ahead(b)) for b in batches]
                run.seconds.append(perf_counter() - start)
                run.loss.append(fmean(losses))
                run.error.append(series.error(run.forecast(series, series.test), series.test))
                progress.update(bar, advance=1, news=f"off by {run.error[-1]:.2f} ppm")


def shuffled(windows: Index, rng: np.random.Generator, size: int = 64) -> list[Index]:
    """Full batches in a random order."""
    order = rng.permutation(windows)
    return [order[k : k + size] for k in range(0, len(order) - size + 1, size)]


# -- the results -----------------------------------------------------------------------------------

SAME = 1e-4  # the largest relative difference between loss curves that count as equal


def table(runs: list[Run], series: Series) -> Table:
    out = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    out.add_column("  model", no_wrap=True)
    for heading in ("weights", "train loss", "off by", "s / epoch", "speed"):
        out.add_column(heading, justify="right", no_wrap=True)
    error = series.error(series.last_year(series.test), series.test)
    out.add_row("  last year, again", "0", "", f"{error:.2f} ppm", "", "", style="dim")
    for run in runs:
        out.add_row(
            f"  {run.name}",
            f"{run.model.size:,}",
            f"{run.loss[-1]:.4f}",
            f"{run.error[-1]:.2f} ppm",
            f"{run.epoch:.3f}",
            f"{runs[0].epoch / run.epoch:.2f} x",
        )
    return out


def difference(one: Run, other: Run) -> float:
    """The largest relative difference between two loss curves."""
    return max(abs(a - b) / a for a, b in zip(one.loss, other.loss, strict=True))


def against_loop(pendulum: Run, series: Series) -> tuple[float, float]:
    """The time of the Pendulum as a PyTorch loop over ours, and their forecasts' gap in ppm."""
    from forecaster_torch import pendulum_loop

    ours = Run("copy", deepcopy(pendulum.model), "")  # the original is drawn later, unchanged
    loop = Run("loop", pendulum_loop(ours.model), "")
    some = series.test[:64]
    apart = np.abs(loop.forecast(series, some) - ours.forecast(series, some)).max()
    slower = []
    for batch in shuffled(series.train, np.random.default_rng(0))[:5]:
        seconds = []
        for model in (loop.model, ours.model):  # in turns, as in training
            start = perf_counter()
            model.fit(series.seen(batch), series.ahead(batch))
            seconds.append(perf_counter() - start)
        slower.append(seconds[0] / seconds[1])
    return median(slower), PPM * float(apart)


def main() -> int:
    parser = argparse.ArgumentParser(description="Forecast a year of CO2 in the air.")
    framework = "torch" if importlib.util.find_spec("torch") else "numpy"
    add = parser.add_argument
    add("--backend", choices=("torch", "numpy"), default=framework, help="default: %(default)s")
    add("--epochs", type=int, default=20, metavar="N", help="default: %(default)s")
    add("--hidden", type=int, default=128, metavar="H", help="units; default: %(default)s")
    add("--weeks", type=int, default=104, metavar="T", help="read; default: %(default)s")
    add("--out", type=Path, default=Path("out/demo"), metavar="DIR", help="default: %(default)s")
    add("--quick", action="store_true", help="three epochs of eight units")
    options = parser.parse_args()
    if options.quick:
        options.epochs, options.hidden, options.weeks = 3, 8, YEAR

    console = Console(highlight=False)
    series = load(options.weeks)
    runs = models(options.backend, options.hidden)
    console.print(
        f"[bold]A year of CO2 in the air, forecast[/bold]\n\n"
        f"Weekly means from Mauna Loa, {len(series.co2)} weeks. {len(runs)} recurrent networks of "
        f"{options.hidden} units read {options.weeks} weeks and forecast the next {YEAR}. They "
        f"learn from {len(series.train)} windows and are judged by ten years they never saw.\n"
    )
    train(runs, series, options.epochs, console)
    console.print()
    console.print(table(runs, series))
    console.print()
    fine = True
    if options.backend == "torch":
        theirs, ours, own = runs
        apart = difference(theirs, ours)
        fine = apart <= SAME
        says = "[green]the same[/green]" if fine else "[red]NOT the same[/red]"
        console.print(
            "- Both LSTMs start from the same weights and train on one thread, and their loss "
            f"curves are {says}: they differ by at most {apart:.0e}, relatively."
        )
        slower, apart = against_loop(own, series)
        console.print(
            "- The Pendulum is defined in demo.py. Through anycell it trains "
            f"{slower:.1f} times as fast as the same lines in a PyTorch loop (five batches were "
            f"timed, in turns), and its forecasts are the same to {apart:.0e} ppm."
        )
    path = options.out / "demo.png"
    picture.draw(runs, series, path)
    console.print(f"- Picture: {path}")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
