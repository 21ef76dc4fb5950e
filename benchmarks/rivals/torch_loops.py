"""Loops over time in Python, which people write when ``nn.LSTM`` does not know their cell.

These are good loops, not straw men: the input projection of all steps is one matmul, both biases
join it where the equations allow, a step is one ``addmm`` and a few element-wise operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anycell.bench.problem import Problem, by_direction
from anycell.bench.tasks import Contender, Unsupported
from anycell.bench.torch_layers import Loop, from_module

Weights = Mapping[str, Tensor]  # of one direction of one layer
Scan = Callable[[Tensor, Weights, bool], Tensor]  # [T, B, in] -> [T, B, H], backwards if True
Step = Callable[[Tensor, Tensor, Tensor, Weights], tuple[Tensor, Tensor]]  # gates, h, c -> h, c


def transposed(w: Weights) -> dict[str, Tensor]:
    """The transpose that every step multiplies by, made once."""
    return {"hh": w["weight_hh"].t()}


def with_gains(w: Weights) -> dict[str, Tensor]:
    """Adds the gains of the recurrent norm, one row per gate."""
    return {**transposed(w), "gain_r": torch.stack([w[f"r_{k}"] for k in "ifgo"])}


def over_time(
    inputs: Callable[[Tensor, Weights], Tensor],
    step: Step,
    constants: Callable[[Weights], dict[str, Tensor]] = transposed,
) -> Scan:
    """A scan that projects all inputs at once, then takes step after step."""

    def scan(x: Tensor, w: Weights, reverse: bool) -> Tensor:
        w = {**w, **constants(w)}
        h = c = x.new_zeros(x.shape[1], w["weight_hh"].shape[1])
        outputs = []
        projected = inputs(x, w).unbind(0)
        for gates in projected[::-1] if reverse else projected:
            h, c = step(gates, h, c, w)
            outputs.append(h)
        return torch.stack(outputs[::-1] if reverse else outputs)

    return scan


def both_biases(x: Tensor, w: Weights) -> Tensor:
    """The projection of all inputs, with the recurrent bias, which is only added to it."""
    return F.linear(x, w["weight_ih"], w["bias_ih"] + w["bias_hh"])


def one_bias(x: Tensor, w: Weights) -> Tensor:
    """The projection of all inputs, for a GRU, whose reset multiplies the recurrent bias."""
    return F.linear(x, w["weight_ih"], w["bias_ih"])


def normalised(x: Tensor, w: Weights) -> Tensor:
    """The projection of all inputs, normalised per gate, which also needs no loop over time."""
    gain, bias = (torch.stack([w[f"{part}_{k}"] for k in "ifgo"]) for part in "xb")
    projected = F.linear(x, w["weight_ih"]).unflatten(2, (4, -1))
    return F.layer_norm(projected, projected.shape[-1:]) * gain + bias


def lstm(gates: Tensor, h: Tensor, c: Tensor, w: Weights) -> tuple[Tensor, Tensor]:
    """A step with gates i f g o."""
    i, f, g, o = torch.addmm(gates, h, w["hh"]).chunk(4, 1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def peephole_lstm(gates: Tensor, h: Tensor, c: Tensor, w: Weights) -> tuple[Tensor, Tensor]:
    """A step in which i and f see the old c, and o the new one."""
    i, f, g, o = torch.addmm(gates, h, w["hh"]).chunk(4, 1)
    i, f = torch.sigmoid(i + w["p_i"] * c), torch.sigmoid(f + w["p_f"] * c)
    c = f * c + i * torch.tanh(g)
    return torch.sigmoid(o + w["p_o"] * c) * torch.tanh(c), c


def layer_norm_lstm(gates: Tensor, h: Tensor, c: Tensor, w: Weights) -> tuple[Tensor, Tensor]:
    """A step with norms of the recurrent projection per gate, and of c."""
    recurrent = F.layer_norm((h @ w["hh"]).unflatten(1, (4, -1)), h.shape[1:])
    i, f, g, o = (gates + recurrent * w["gain_r"]).unbind(1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    shown = F.layer_norm(c, c.shape[1:], w["c_gain"], w["c_shift"])
    return torch.sigmoid(o) * torch.tanh(shown), c


def gru(gates: Tensor, h: Tensor, c: Tensor, w: Weights) -> tuple[Tensor, Tensor]:
    """A step with gates r z n, the reset after the matmul."""
    x_r, x_z, x_n = gates.chunk(3, 1)
    h_r, h_z, h_n = F.linear(h, w["weight_hh"], w["bias_hh"]).chunk(3, 1)
    z = torch.sigmoid(x_z + h_z)
    n = torch.tanh(x_n + torch.sigmoid(x_r + h_r) * h_n)
    return n + z * (h - n), c


def rnn(gates: Tensor, h: Tensor, c: Tensor, w: Weights) -> tuple[Tensor, Tensor]:
    """A step of Elman's network, with tanh."""
    return torch.tanh(torch.addmm(gates, h, w["hh"])), c


SCANS: dict[str, Scan] = {
    "LSTM": over_time(both_biases, lstm),
    "GRU": over_time(one_bias, gru),
    "RNN": over_time(both_biases, rnn),
    "PeepholeLSTM": over_time(both_biases, peephole_lstm),
    "LayerNormLSTM": over_time(normalised, layer_norm_lstm, with_gains),
}


class ByHand(Loop):
    """A scan for each layer and direction."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.scan = SCANS[problem.cell.origin]
        self.stack = by_direction(dict(self.named_parameters()), problem.shape)

    def forward(self, x: Tensor, static: Tensor | None = None) -> Tensor:
        """``[T, B, I] -> [T, B, D * H]``."""
        for layer in self.stack:
            outputs = [self.scan(x, w, d == 1) for d, w in enumerate(layer)]
            x = torch.cat(outputs, 2) if len(outputs) > 1 else outputs[0]
        return x


def loop(problem: Problem) -> Contender:
    """A Python loop over time: by hand, or for cells without one operation by operation."""
    kind = ByHand if problem.cell.origin in SCANS else Loop
    return from_module(functools.partial(kind, problem), problem)


def compiled(problem: Problem) -> Contender:
    """The loop under ``torch.compile``, whose first call takes minutes if T is large."""
    if problem.cell.origin not in SCANS:
        raise Unsupported(f"no loop for {problem.cell.name} that torch.compile could take whole")

    def build() -> Any:
        module = ByHand(problem)
        module.compile(fullgraph=False, dynamic=False)
        return module

    torch._dynamo.reset()
    contender = from_module(build, problem)
    contender.again = False
    return contender
