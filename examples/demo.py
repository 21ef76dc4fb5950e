"""Forecast a year of CO2 in the air, three times: with PyTorch's LSTM, with anycell's, and with a
cell that no library has, because it is written below.

    python examples/demo.py                    in PyTorch; without it, on the NumPy layers
    python examples/demo.py --backend numpy    on the NumPy layers in any case
    python examples/demo.py --quick            seconds instead of minutes, and worse forecasts

The data are the weekly means of Mauna Loa, 1958 to 2001, which ship with statsmodels.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from picture import draw
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from anycell import cell, sigmoid, sqrt, tanh

Array = npt.NDArray[np.float32]


# -- the cell: all that it takes ----------------------------------------------------------------------


@cell(gates="i g o", state="h u v", params="a=1 b=0.12 decay=4")
def Pendulum(x, r, s, p):
    """Every unit is a pendulum that the input pushes: seasons are its natural motion.

    (u, v) turns by the angle of (a, b) each week, at first once around a year, and fades slowly.
    """
    i, g, o = x + r
    turn = sigmoid(p.decay) / sqrt(p.a * p.a + p.b * p.b)
    u = turn * (p.a * s.u - p.b * s.v) + sigmoid(i) * tanh(g)
    v = turn * (p.b * s.u + p.a * s.v)
    return sigmoid(o) * tanh(u), u, v


# -- the data -----------------------------------------------------------------------------------------

SCALE = 3.0  # ppm, about the swing of the seasons: networks like numbers around 1
HELD_OUT = 520  # weeks at the end that no model sees in training


@dataclass
class Windows:
    """Cut from the series: ``weeks`` to look at, and the year after them to forecast.

    Numbers are relative to the last week seen, in units of ``SCALE``: CO2 rises, so that what is to be
    forecast lies above everything seen before.
    """

    dates: npt.NDArray[np.datetime64]
    co2: Array  # [weeks of the series], ppm
    weeks: int
    horizon: int = 52
    scale: float = SCALE

    def __post_init__(self) -> None:
        starts = np.arange(len(self.co2) - self.weeks - self.horizon + 1)
        windows = self.co2[starts[:, None] + np.arange(self.weeks + self.horizon)]
        self.now = starts + self.weeks - 1  # index of the last week seen
        self.anchor = windows[:, self.weeks - 1, None]
        windows = (windows - self.anchor) / np.float32(SCALE)
        self.x, self.y = windows[:, : self.weeks, None], windows[:, self.weeks :]
        split = len(self.co2) - HELD_OUT
        self.train = np.flatnonzero(self.now + self.horizon < split)
        self.test = np.flatnonzero(self.now + 1 >= split)

    def again(self) -> Array:
        """The forecast without learning: last year once more, raised by what the year brought."""
        year = self.x[:, :, 0]
        return year[:, -self.horizon :] + (year[:, -1:] - year[:, -1 - self.horizon, None])

    def error(self, forecast: Array, rows: npt.NDArray[np.int64]) -> float:
        """Root mean square error in ppm."""
        return SCALE * float(np.sqrt(np.mean(np.square(forecast - self.y[rows]))))


def load(weeks: int) -> Windows:
    from statsmodels.datasets import co2

    series = co2.load_pandas().data["co2"].interpolate()  # 59 of 2284 weeks have no measurement
    return Windows(series.index.to_numpy(), series.to_numpy(np.float32), weeks)


# -- the models ---------------------------------------------------------------------------------------


class Forecaster(Protocol):
    """What ``forecaster_torch`` and ``forecaster_numpy`` make of a recurrent layer."""

    size: int  # numbers learned

    def fit(self, x: Array, y: Array) -> float:
        """One training step on a batch; its loss."""
        ...

    def predict(self, x: Array) -> Array: ...


@dataclass
class Run:
    """A model and how its training went, epoch by epoch."""

    name: str
    model: Forecaster
    color: str
    loss: list[float] = field(default_factory=list)  # on the training windows
    error: list[float] = field(default_factory=list)  # ppm, on the held-out windows
    seconds: list[float] = field(default_factory=list)
    forecast: Array | None = None

    @property
    def epoch(self) -> float:
        return statistics.median(self.seconds)


def models(backend: str, hidden: int, horizon: int) -> list[Run]:
    if backend == "numpy":
        import forecaster_numpy as made

        return [
            Run("anycell.numpy.LSTM", made.lstm(hidden, horizon), "#d1495b"),
            Run("your own cell", made.rnn(Pendulum, hidden, horizon), "#00798c"),
        ]
    import forecaster_torch as made

    theirs, ours = made.nn_lstm(hidden, horizon), made.lstm(hidden, horizon)
    ours.load_state_dict(theirs.state_dict())  # the same names and shapes: it simply loads
    return [
        Run("torch.nn.LSTM", theirs, "#8d99ae"),
        Run("anycell.torch.LSTM", ours, "#d1495b"),
        Run("your own cell", made.rnn(Pendulum, hidden, horizon), "#00798c"),
    ]


def train(runs: list[Run], data: Windows, epochs: int, batch: int, console: Console) -> None:
    """Trains all models side by side, epoch by epoch: a noisy moment of the machine hits them all."""
    rng = np.random.default_rng(0)
    columns = (
        TextColumn("{task.description:<20}"),
        BarColumn(24),
        MofNCompleteColumn(),
        TextColumn("epochs, {task.fields[error]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bars = [progress.add_task(run.name, total=epochs, error="compiling") for run in runs]
        for _ in range(epochs):
            order = rng.permutation(data.train)
            batches = [order[k : k + batch] for k in range(0, len(order) - batch + 1, batch)]
            for run, bar in zip(runs, bars, strict=True):
                start = perf_counter()
                losses = [run.model.fit(data.x[rows], data.y[rows]) for rows in batches]
                run.seconds.append(perf_counter() - start)
                run.loss.append(statistics.fmean(losses))
                run.error.append(data.error(run.model.predict(data.x[data.test]), data.test))
                progress.update(bar, advance=1, error=f"off by {run.error[-1]:.2f} ppm")
    for run in runs:
        run.forecast = run.model.predict(data.x)


# -- what came out ------------------------------------------------------------------------------------


def difference(a: Run, b: Run) -> float:
    """The largest relative difference between two loss curves."""
    return max(abs(x - y) / x for x, y in zip(a.loss, b.loss, strict=True))


def table(runs: list[Run], data: Windows) -> Table:
    out = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("", "weights", "train", "held out", "s / epoch", "speed"):
        out.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    again = data.again()
    errors = [f"{data.error(again[rows], rows):.2f} ppm" for rows in (data.train, data.test)]
    out.add_row("last year, raised", "0", *errors, "", "", style="dim")
    for run in runs:
        out.add_row(
            run.name,
            f"{run.model.size:,}",
            f"{SCALE * math.sqrt(run.loss[-1]):.2f} ppm",
            f"{run.error[-1]:.2f} ppm",
            f"{run.epoch:.3f}",
            f"{runs[0].epoch / run.epoch:.2f} x",
        )
    return out


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    have_torch = importlib.util.find_spec("torch") is not None
    parser.add_argument(
        "--backend", choices=("torch", "numpy"), default="torch" if have_torch else "numpy"
    )
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--weeks", type=int, default=104, help="that a model looks at")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), metavar="DIR")
    parser.add_argument("--quick", action="store_true", help="a small model and two epochs")
    options = parser.parse_args(arguments)
    if options.quick:
        options.epochs, options.hidden, options.weeks = 2, 8, 53
    console = Console()
    data = load(options.weeks)
    runs = models(options.backend, options.hidden, data.horizon)

    console.print("[bold]A year of CO2 in the air, forecast[/bold]")
    console.print(
        f"{len(data.co2)} weekly means from Mauna Loa. Three models look at {options.weeks} weeks and "
        f"forecast the {data.horizon} that follow: {len(data.train)} such windows to learn from, "
        f"{len(data.test)} of the last ten years to be judged by."
    )
    train(runs, data, options.epochs, 64, console)
    console.print(table(runs, data))
    draw(runs, data, options.out / "demo.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
