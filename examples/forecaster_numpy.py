"""A forecaster on anycell's NumPy layers: layer, readout, loss, Adam, and no framework."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from anycell import Cell
from anycell.numpy import LSTM, RNN, Adam, Dense, clip_by_global_norm, mse

Array = npt.NDArray[np.float32]


class Forecaster:
    """The last output of a recurrent layer, read out linearly: ``[B, T, 1]`` to ``[B, horizon]``."""

    def __init__(self, layer: RNN, horizon: int) -> None:
        self.layer = layer
        self.readout = Dense(layer.hidden_size, horizon, seed=1)
        self.optimizer = Adam([layer, self.readout], lr=3e-3)

    @property
    def size(self) -> int:
        parts = (self.layer, self.readout)
        return sum(p.size for part in parts for p in part.parameters.values())

    def predict(self, x: Array) -> Array:
        output, _ = self.layer.forward(x)
        return self.readout.forward(output[:, -1])

    def fit(self, x: Array, y: Array) -> float:
        output, _ = self.layer.forward(x, training=True)
        loss, grad = mse(self.readout.forward(output[:, -1], training=True), y)
        grad_output = np.zeros_like(output)
        grad_output[:, -1] = self.readout.backward(grad)
        self.layer.backward(grad_output)
        clip_by_global_norm([self.layer, self.readout], 1.0)
        self.optimizer.step()
        return loss


def lstm(hidden: int, horizon: int) -> Forecaster:
    return Forecaster(LSTM(1, hidden, batch_first=True, seed=0), horizon)


def rnn(cell: Cell, hidden: int, horizon: int) -> Forecaster:
    return Forecaster(RNN(cell, 1, hidden, batch_first=True, seed=0), horizon)
