"""The demo runs as a newcomer would run it, with PyTorch and without, and says what is true."""

import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
from tolerances import LIMITS, assert_close

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
pytest.importorskip("statsmodels")

EXAMPLES = Path(__file__).parents[2] / "examples"
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None"  # what is None cannot be imported


@pytest.fixture(scope="module")
def demo() -> Iterator[Any]:
    """The demo as a module; the script's folder is on the path, as when it is run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        import demo

        yield demo


def run(out: Path, *arguments: str, first: str = "") -> str:
    """What the demo prints, in a process of its own, where warnings are errors.

    On one thread: threads that wait for each other take many times longer beside other tests.
    """
    code = f"""{first}
import runpy, sys
sys.argv[0] = {str(EXAMPLES / "demo.py")!r}
sys.path.insert(0, {str(EXAMPLES)!r})
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    options = ["--quick", "--out", str(out), *arguments]
    said = processes.run("-W", "error", "-c", code, *options, quiet=True, OMP_NUM_THREADS="1")
    assert_picture(out / "demo.png")
    return " ".join(said.split())


def assert_picture(path: Path) -> None:
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:])
    assert width > 1000 and height > 1000


def row(text: str, name: str) -> list[str]:
    """The numbers of a model in the table: weights, loss, ppm, seconds, ratio."""
    numbers = r"([\d,]+) ([\d.]+) ([\d.]+) ppm ([\d.]+) ([\d.]+) x"
    found = re.search(rf"{re.escape(name)} {numbers}", text)
    assert found, f"no row for {name} in: {text}"
    return list(found.groups())


@pytest.mark.slow
def test_in_pytorch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    text = run(tmp_path)
    theirs, ours, own = (
        row(text, name) for name in ("torch.nn.LSTM", "anycell.torch.LSTM", "Pendulum")
    )
    assert theirs[:3] == ours[:3]
    assert own[:3] != ours[:3]
    found = re.search(r"loss curves are the same: they differ by at most (\S+), relatively", text)
    assert found and float(found[1]) < LIMITS["float32", "training"]
    found = re.search(r"its forecasts are the same to (\S+) ppm", text)
    assert found and float(found[1]) < 1e-4
    assert str(tmp_path / "demo.png") in text.replace(" ", "")


@pytest.mark.slow
def test_without_pytorch(tmp_path: Path) -> None:
    text = run(tmp_path, first=WITHOUT_TORCH)
    assert "torch." not in text
    assert row(text, "anycell.numpy.LSTM")[0] != row(text, "Pendulum")[0]


def test_the_series(demo: Any) -> None:
    """Nothing of the held-out years reaches training, and the windows are what they say."""
    series = demo.load(104)
    assert len(series.co2) == 2284 and np.isfinite(series.co2).all()
    split = len(series.co2) - demo.HELD_OUT
    assert series.train.max() + 104 + 52 <= split  # the last week that a training window touches
    assert series.test.min() + 104 >= split  # the first week that a forecast is judged by
    assert series.test.max() + 104 + 52 == len(series.co2)
    windows = np.array([0, 700])
    x, y = series.seen(windows), series.ahead(windows)
    assert x.shape == (2, 104, 1) and y.shape == (2, 52, 52)
    assert x.dtype == y.dtype == np.float32
    made = 700 + 104 - 1  # the week of the last forecast of the second window
    change = series.co2[made + 1 : made + 53] - series.co2[made]
    assert_close(y[1, -1] * demo.PPM, change, "float32", "forward")
    assert_close(x[1, -1, 0] * demo.PPM, series.co2[made] - series.co2[700], "float32", "forward")
    assert round(series.error(series.last_year(series.test), series.test), 2) == 1.01


def test_the_pendulum_swings(demo: Any) -> None:
    """Unpushed, its state turns once around in a year of 52 weeks, and fades."""
    from anycell import recurrence

    gates = np.full((52, 1, 3), [-1e3, 0.0, 1e3])  # the input gate shut, the output gate open
    start = [np.zeros((1, 1)), np.ones((1, 1)), np.zeros((1, 1))]
    params = {"a": np.ones(1), "b": np.full(1, 0.12), "decay": np.full(1, 4.0)}
    _, (_, u, v) = recurrence(demo.Pendulum, gates, {"weight_hh": np.zeros((3, 1))}, start, params)
    turned = np.angle(u + 1j * v).item()
    assert abs(turned) < 0.1
    assert np.abs(u + 1j * v).item() == pytest.approx((1 / (1 + np.exp(-4.0))) ** 52)


def test_a_year_of_the_numpy_forecaster_learns(demo: Any) -> None:
    """A small model on a part of the data comes within what the last year alone says."""
    import forecaster_numpy

    series = demo.load(60)
    model = forecaster_numpy.rnn(demo.Pendulum, 16, 52)
    rng = np.random.default_rng(0)
    losses = []
    for _ in range(4):
        for batch in demo.shuffled(series.train, rng):
            losses.append(model.fit(series.seen(batch), series.ahead(batch)))
    assert losses[-1] < 0.25 * losses[0]
    forecast = model.predict(series.seen(series.test))[:, -1]
    assert series.error(forecast, series.test) < 1.3
