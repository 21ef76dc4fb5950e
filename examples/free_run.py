"""Forecasts a year ahead, week by week, from a series with gaps, without a framework.

    pip install . statsmodels
    python examples/free_run.py            (--quick: seconds)

A layer sees the CO2 of each week and forecasts the next. To look a year ahead, and in weeks without
a measurement, it must read its own forecasts: `Feedback` puts the readout inside the loop. One
model trains with teacher forcing, which always gives the true value if there is one; the other with
scheduled sampling, which gives it less and less often. Both see the same batches, and keep the
weights that forecast best in years that neither learns from. This series is so smooth that both
models come out alike, and both far ahead of a forecast that repeats the last year.

The data, weekly means from Mauna Loa, 1958 to 2001, ship with statsmodels and are in the public
domain: Keeling & Whorf, *Atmospheric CO2 Concentrations*, Oak Ridge National Laboratory, 2004.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from statsmodels.datasets import co2

from anycell.numpy import (
    LSTM,
    Adam,
    Dense,
    EarlyStopping,
    Feedback,
    Standardise,
    clip_by_global_norm,
    cosine,
    inverse_sigmoid,
    mse,
)

Array = npt.NDArray[np.float64]
YEAR = 52
WEEKS = 3 * YEAR  # of a window: two years that are seen, one to forecast
SEEN = 2 * YEAR


def windows(every: int) -> tuple[Array, Array, Array]:
    """Windows ``[T, B, 3]`` of the series and the season, for training, choosing, and testing.

    CO2 rises, so values are relative to the mean of the window's first year.
    """
    series = co2.load_pandas().data["co2"]
    angle = 2.0 * np.pi * series.index.day_of_year.to_numpy() / 365.25
    columns = np.stack([series.to_numpy(), np.sin(angle), np.cos(angle)], -1)
    first = np.arange(0, len(columns) - WEEKS, every)
    both = columns[first[:, None] + np.arange(WEEKS + 1)].swapaxes(0, 1)
    level = np.nanmean(both[:YEAR, :, :1], axis=0)
    both[..., :1] -= level
    choose, test = np.searchsorted(first, [len(columns) - years * YEAR for years in (16, 10)])
    # No training window shares a week with the windows of choosing and testing.
    apart = WEEKS // every
    return both[:, : choose - apart], both[:, choose : test - apart], both[:, test:]


def error(feedback: Feedback, scale: Standardise, x: Array) -> float:
    """The root mean square error, in ppm, over the last year, which the model must forecast."""
    given = np.isfinite(x[:-1, :, 0])
    given[SEEN + 1 :] = False
    y, _ = feedback.forward(entering(scale, x), forced=given)
    wrong = scale.inverse(y[SEEN:]) - x[SEEN + 1 :, :, :1]
    return float(np.sqrt(np.nanmean(np.square(wrong))))


def entering(scale: Standardise, x: Array) -> Array:
    """The inputs of the layer: the series, and the season of the next step, which it forecasts."""
    return np.concatenate([scale.forward(x[:-1, :, :1]), x[1:, :, 1:]], -1)


def train(
    forced: Callable[[int], float], train: Array, choose: Array, scale: Standardise, epochs: int
) -> Feedback:
    """Trains a model; ``forced(step)`` is the share of time steps that get the true value."""
    layer, readout = LSTM(3, 32, seed=0), Dense(32, 1, seed=1)
    feedback = Feedback(layer, readout, seed=2)
    batches = -(-train.shape[1] // 32)
    optimizer, rate = Adam([layer, readout]), cosine(0.01, epochs * batches, warmup=batches)
    stop, rng, step = EarlyStopping([layer, readout], patience=10), np.random.default_rng(3), 0
    for _ in range(epochs):
        for rows in np.array_split(rng.permutation(train.shape[1]), batches):
            x = train[:, rows]
            truth = scale.forward(x[1:, :, :1])
            given = np.isfinite(x[:-1, :, 0]) & (rng.random(x[:-1, :, 0].shape) < forced(step))
            y, _ = feedback.forward(entering(scale, x), forced=given, training=True)
            _, grad = mse(y, np.where(np.isfinite(truth), truth, y))  # gaps do not count
            feedback.backward(grad)
            clip_by_global_norm([layer, readout], 1.0)
            optimizer.lr = rate(step)
            optimizer.step()
            step += 1
        if stop(error(feedback, scale, choose)):
            break
    stop.restore()
    return feedback


def main(arguments: list[str] | None = None) -> tuple[float, float, float]:
    """Prints and returns the errors of teacher forcing, scheduled sampling and a repeated year."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a short run")
    quick = parser.parse_args(arguments).quick
    learn, choose, test = windows(every=8 if quick else 2)
    epochs = 12 if quick else 40
    scale = Standardise(1).fit(learn[..., :1])
    batches = -(-learn.shape[1] // 32)
    sampled = inverse_sigmoid(epochs * batches / 8)

    teacher = error(train(lambda step: 1.0, learn, choose, scale, epochs), scale, test)
    sampling = error(train(sampled, learn, choose, scale, epochs), scale, test)
    again = test[SEEN + 1 - YEAR : -YEAR, :, 0] - test[SEEN + 1 :, :, 0]
    repeat = float(np.sqrt(np.nanmean(np.square(again))))
    print(f"{np.isnan(learn[..., 0]).mean():.1%} of the weeks were not measured")
    print("a year ahead, root mean square error in ppm")
    print(f"  the year that was, once more  {repeat:.2f}")
    print(f"  taught, and then left alone   {teacher:.2f}")
    print(f"  by scheduled sampling         {sampling:.2f}")
    return teacher, sampling, repeat


if __name__ == "__main__":
    main()
