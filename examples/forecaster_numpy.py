"""The forecaster on anycell's NumPy layers: readout, loss, clipping, Adam, and no framework."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from anycell import Cell
from anycell.numpy import LSTM, RNN, Adam, Dense, clip_by_global_norm, mse

Array = npt.NDArray[np.float32]


class Forecaster:
    """Maps ``[B, T, 1]`` to ``[B, horizon, horizon]``: forecasts from each of the last steps."""

    def __init__(self, layer: RNN, horizon: int) -> None:
        self.layer, self.horizon = layer, horizon
        self.readout = Dense(layer.hidden_size, horizon, seed=1)
        self.optimizer = Adam([layer, self.readout], lr=3e-3)

    @property
    def size(self) -> int:
        layers = (self.layer, self.readout)
        return sum(p.size for layer in layers for p in layer.parameters.values())

    def predict(self, x: Array) -> Array:
        output, _ = self.layer.forward(x)
        return self.readout.forward(output[:, -self.horizon :])

    def fit(self, x: Array, y: Array) -> float:
        output, _ = self.layer.forward(x, training=True)
        forecast = self.readout.forward(output[:, -self.horizon :], training=True)
        loss, grad = mse(forecast, y)
        grad_output = np.zeros_like(output)
        grad_output[:, -self.horizon :] = self.readout.backward(grad)
        self.layer.backward(grad_output)
        clip_by_global_norm([self.layer, self.readout], 1.0)
        self.optimizer.step()
        return loss


def lstm(hidden: int, horizon: int) -> Forecaster:
    layer = LSTM(1, hidden, batch_first=True, seed=0)
    # Units initially remember from one week up to a year (Tallec & Ollivier, 2018).
    memory = np.log(np.random.default_rng(0).uniform(1.0, horizon, hidden))
    i, f, _, _ = np.split(layer.parameters["bias_ih_l0"], 4)
    i[:], f[:] = -memory, memory
    return Forecaster(layer, horizon)


def rnn(cell: Cell, hidden: int, horizon: int) -> Forecaster:
    return Forecaster(RNN(cell, 1, hidden, batch_first=True, seed=0), horizon)
