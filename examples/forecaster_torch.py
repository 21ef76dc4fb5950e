"""The forecaster in PyTorch: one module around ``torch.nn.LSTM`` and around anycell's layers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

import anycell.torch
from anycell import Cell

Array = npt.NDArray[np.float32]


class Forecaster(nn.Module):
    """Maps ``[B, T, 1]`` to ``[B, horizon, horizon]``: forecasts from each of the last steps."""

    def __init__(self, layer: nn.Module, hidden: int, horizon: int) -> None:
        super().__init__()
        self.layer, self.horizon = layer, horizon
        self.readout = nn.Linear(hidden, horizon)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=3e-3)

    @property
    def size(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.layer(x)
        return self.readout(output[:, -self.horizon :])

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
    layer = nn.LSTM(1, hidden, batch_first=True)
    # Units initially remember from one week up to a year (Tallec & Ollivier, 2018).
    memory = torch.empty(hidden).uniform_(1.0, horizon).log()
    with torch.no_grad():
        layer.bias_hh_l0.zero_()
        i, f, g, o = layer.bias_ih_l0.chunk(4)
        i.copy_(-memory), f.copy_(memory), g.zero_(), o.zero_()
    return Forecaster(layer, hidden, horizon)


def lstm(hidden: int, horizon: int) -> Forecaster:
    return Forecaster(anycell.torch.LSTM(1, hidden, batch_first=True), hidden, horizon)


def rnn(cell: Cell, hidden: int, horizon: int) -> Forecaster:
    torch.manual_seed(0)
    return Forecaster(anycell.torch.RNN(cell, 1, hidden, batch_first=True), hidden, horizon)


class PendulumLoop(nn.Module):
    """The demo's Pendulum written without anycell, on the weights of an anycell layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        p = {name.removesuffix("_l0"): value for name, value in self.layer.named_parameters()}
        gates = nn.functional.linear(x, p["weight_ih"], p["bias_ih"])
        swing = p["decay"].sigmoid() / (p["a"] * p["a"] + p["b"] * p["b"]).sqrt()
        h = u = v = x.new_zeros(x.shape[0], self.layer.hidden_size)
        outputs = []
        for t in range(x.shape[1]):
            r = nn.functional.linear(h, p["weight_hh"], p["bias_hh"])
            i, g, o = (gates[:, t] + r).chunk(3, dim=1)
            u, v = (
                swing * (p["a"] * u - p["b"] * v) + i.sigmoid() * g.tanh(),
                swing * (p["b"] * u + p["a"] * v),
            )
            h = o.sigmoid() * u.tanh()
            outputs.append(h)
        return torch.stack(outputs, dim=1), None


def pendulum_loop(pendulum: Forecaster) -> Forecaster:
    model = Forecaster(PendulumLoop(pendulum.layer), pendulum.layer.hidden_size, pendulum.horizon)
    model.readout.load_state_dict(pendulum.readout.state_dict())
    return model
