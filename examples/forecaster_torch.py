"""A forecaster in PyTorch: the same module around each of the recurrent layers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

import anycell
from anycell import Cell

Array = npt.NDArray[np.float32]


class Forecaster(nn.Module):
    """The last output of a recurrent layer, read out linearly: ``[B, T, 1]`` to ``[B, horizon]``."""

    def __init__(self, layer: nn.Module, hidden: int, horizon: int) -> None:
        super().__init__()
        self.layer = layer
        self.readout = nn.Linear(hidden, horizon)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=3e-3)

    @property
    def size(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output, _ = self.layer(x)
        return self.readout(output[:, -1])

    @torch.no_grad()
    def predict(self, x: Array) -> Array:
        return self(torch.from_numpy(x)).numpy()

    def fit(self, x: Array, y: Array) -> float:
        loss = nn.functional.mse_loss(self(torch.from_numpy(x)), torch.from_numpy(y))
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()


def nn_lstm(hidden: int, horizon: int) -> Forecaster:
    torch.manual_seed(0)
    return Forecaster(nn.LSTM(1, hidden, batch_first=True), hidden, horizon)


def lstm(hidden: int, horizon: int) -> Forecaster:
    return Forecaster(anycell.torch.LSTM(1, hidden, batch_first=True), hidden, horizon)


def rnn(cell: Cell, hidden: int, horizon: int) -> Forecaster:
    torch.manual_seed(0)
    return Forecaster(anycell.torch.RNN(cell, 1, hidden, batch_first=True), hidden, horizon)
