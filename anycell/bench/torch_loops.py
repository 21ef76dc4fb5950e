"""What people write today when ``nn.LSTM`` does not know their cell: a Python loop over time.

These are good loops, not straw men: the input projection of all steps is one matmul, both biases join
it where the equations allow, a step is one ``addmm`` and a few element-wise operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anycell.bench.problem import Problem

Scan = Callable[[Tensor, Mapping[str, Tensor], bool], list[Tensor]]


def _steps(gates: Tensor, reverse: bool) -> list[Tensor]:
    steps = list(gates.unbind(0))
    return steps[::-1] if reverse else steps


def _in_time_order(outputs: list[Tensor], reverse: bool) -> list[Tensor]:
    return outputs[::-1] if reverse else outputs


def _project(x: Tensor, w: Mapping[str, Tensor]) -> Tensor:
    return F.linear(x, w["weight_ih"], w["bias_ih"] + w["bias_hh"])


def _zeros(x: Tensor, w: Mapping[str, Tensor]) -> Tensor:
    return x.new_zeros(x.shape[1], w["weight_hh"].shape[1])


def lstm(x: Tensor, w: Mapping[str, Tensor], reverse: bool) -> list[Tensor]:
    weight = w["weight_hh"].t()
    h = c = _zeros(x, w)
    outputs = []
    for gates in _steps(_project(x, w), reverse):
        i, f, g, o = torch.addmm(gates, h, weight).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        outputs.append(h)
    return _in_time_order(outputs, reverse)


def peephole_lstm(x: Tensor, w: Mapping[str, Tensor], reverse: bool) -> list[Tensor]:
    weight = w["weight_hh"].t()
    h = c = _zeros(x, w)
    outputs = []
    for gates in _steps(_project(x, w), reverse):
        i, f, g, o = torch.addmm(gates, h, weight).chunk(4, 1)
        i, f = torch.sigmoid(i + w["p_i"] * c), torch.sigmoid(f + w["p_f"] * c)
        c = f * c + i * torch.tanh(g)
        h = torch.sigmoid(o + w["p_o"] * c) * torch.tanh(c)
        outputs.append(h)
    return _in_time_order(outputs, reverse)


def gru(x: Tensor, w: Mapping[str, Tensor], reverse: bool) -> list[Tensor]:
    h = _zeros(x, w)
    outputs = []
    for gates in _steps(F.linear(x, w["weight_ih"], w["bias_ih"]), reverse):
        x_r, x_z, x_n = gates.chunk(3, 1)
        h_r, h_z, h_n = F.linear(h, w["weight_hh"], w["bias_hh"]).chunk(3, 1)
        z = torch.sigmoid(x_z + h_z)
        n = torch.tanh(x_n + torch.sigmoid(x_r + h_r) * h_n)
        h = n + z * (h - n)
        outputs.append(h)
    return _in_time_order(outputs, reverse)


def rnn(x: Tensor, w: Mapping[str, Tensor], reverse: bool) -> list[Tensor]:
    weight = w["weight_hh"].t()
    h = _zeros(x, w)
    outputs = []
    for gates in _steps(_project(x, w), reverse):
        h = torch.tanh(torch.addmm(gates, h, weight))
        outputs.append(h)
    return _in_time_order(outputs, reverse)


SCANS: dict[str, Scan] = {"LSTM": lstm, "GRU": gru, "RNN": rnn, "PeepholeLSTM": peephole_lstm}


class Loop(nn.Module):
    """Layers and directions around a scan, with ``torch.nn``'s parameter names."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.scan = SCANS[problem.cell.name]
        for name, value in problem.weights.items():
            self.register_parameter(name, nn.Parameter(torch.from_numpy(value.copy())))
        parameters = dict(self.named_parameters())

        def direction(suffix: str) -> dict[str, Tensor]:
            return {k.removesuffix(suffix): p for k, p in parameters.items() if k.endswith(suffix)}

        self.stack = [
            [direction(f"_l{layer}" + "_reverse" * d) for d in range(problem.shape.D)]
            for layer in range(problem.shape.L)
        ]

    def forward(self, x: Tensor) -> Tensor:
        """``[T, B, I] -> [T, B, D * H]``."""
        for layer in self.stack:
            outputs = [torch.stack(self.scan(x, w, d == 1)) for d, w in enumerate(layer)]
            x = torch.cat(outputs, 2) if len(outputs) > 1 else outputs[0]
        return x
