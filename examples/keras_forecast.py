"""Trains a cell of your own as a layer of Keras, by `fit`, to forecast a seasonal series.

    pip install '.[tensorflow]'
    python examples/keras_forecast.py            (--quick: a few seconds)

The cell is a leaky unit with a gate that sees a slow average of its own output. No library has a
kernel for its few lines; here it trains on a fused kernel.
"""

from __future__ import annotations

import argparse
from typing import Any

import keras
import numpy as np

import anycell.keras
from anycell import cell, sigmoid, tanh

PAST, AHEAD = 48, 12


@keras.saving.register_keras_serializable("examples")
@cell(gates="f g", state="h slow", params="w")
def Seasonal(x: Any, r: Any, s: Any, p: Any, *, rate: float = 0.95) -> Any:
    """A minimal gated unit whose gate sees a slow average of its state."""
    f, g = x + r
    slow = rate * s.slow + (1.0 - rate) * s.h
    h = sigmoid(f + p.w * slow) * s.h + sigmoid(-(f + p.w * slow)) * tanh(g)
    return h, slow


def series(length: int) -> np.ndarray:
    """Two seasons, a trend that turns, and noise."""
    rng, t = np.random.default_rng(7), np.arange(length)
    seasons = np.sin(2 * np.pi * t / 12) + 0.5 * np.sin(2 * np.pi * t / 28 + 1)
    return (seasons + np.cumsum(0.05 * rng.normal(size=length))).astype("float32")


def windows(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pasts ``[N, PAST, 1]`` and futures ``[N, AHEAD]``, relative to the last value of the past."""
    both = np.lib.stride_tricks.sliding_window_view(values, PAST + AHEAD)
    level = both[:, PAST - 1 : PAST]
    return (both[:, :PAST] - level)[..., None], both[:, PAST:] - level


def main(arguments: list[str] | None = None) -> float:
    """Trains; prints and returns the error relative to a forecast that repeats the last season."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a short run")
    quick = parser.parse_args(arguments).quick
    keras.utils.set_random_seed(1)
    x, y = windows(series(900 if quick else 4000))
    split = int(0.8 * len(x))

    model = keras.Sequential(
        [
            keras.Input((None, 1)),
            anycell.keras.RNN(Seasonal, 32, return_sequences=True),
            anycell.keras.LSTM(32),
            keras.layers.Dense(AHEAD),
        ]
    )
    for layer in model.layers[:2]:
        print(f"{layer.name} runs on {layer.engine.name} ({layer.engine.reason})")
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model.fit(x[:split], y[:split], batch_size=64, epochs=4 if quick else 20, verbose=0)

    wrong = np.sqrt(np.mean((model.predict(x[split:], verbose=0) - y[split:]) ** 2))
    naive = np.sqrt(np.mean((x[split:, PAST - 12 : PAST, 0] - y[split:]) ** 2))
    print(f"error {wrong:.3f}, of repeating the last season {naive:.3f}")
    return float(wrong / naive)


if __name__ == "__main__":
    main()
