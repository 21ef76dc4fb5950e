"""What people write today when ``nn.LSTM`` does not know their cell: a Python loop over time.

These are good loops, not straw men: the input projection of all steps is one matmul, both biases
join it where the equations allow, a step is one ``addmm`` and a few element-wise operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anycell.bench.problem import Problem
from anycell.engines import reference
from anycell.lang.cell import Cell

Weights = Mapping[str, Tensor]  # of one direction of one layer
Scan = Callable[[Tensor, Weights, bool], Tensor]  # [T, B, in] -> [T, B, H], backwards if True


def _steps(gates: Tensor, reverse: bool) -> Sequence[Tensor]:
    steps = gates.unbind(0)
    return steps[::-1] if reverse else steps


def _in_time_order(outputs: list[Tensor], reverse: bool) -> Tensor:
    return torch.stack(outputs[::-1] if reverse else outputs)


def _project(x: Tensor, w: Weights) -> Tensor:
    return F.linear(x, w["weight_ih"], w["bias_ih"] + w["bias_hh"])


def _zeros(x: Tensor, w: Weights) -> Tensor:
    return x.new_zeros(x.shape[1], w["weight_hh"].shape[1])


def lstm(x: Tensor, w: Weights, reverse: bool) -> Tensor:
    """Gates i f g o."""
    weight = w["weight_hh"].t()
    h = c = _zeros(x, w)
    outputs = []
    for gates in _steps(_project(x, w), reverse):
        i, f, g, o = torch.addmm(gates, h, weight).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        outputs.append(h)
    return _in_time_order(outputs, reverse)


def peephole_lstm(x: Tensor, w: Weights, reverse: bool) -> Tensor:
    """i and f see the old c, o the new one."""
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


def gru(x: Tensor, w: Weights, reverse: bool) -> Tensor:
    """Gates r z n, the reset after the matmul."""
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


def rnn(x: Tensor, w: Weights, reverse: bool) -> Tensor:
    """Elman's, with tanh."""
    weight = w["weight_hh"].t()
    h = _zeros(x, w)
    outputs = []
    for gates in _steps(_project(x, w), reverse):
        h = torch.tanh(torch.addmm(gates, h, weight))
        outputs.append(h)
    return _in_time_order(outputs, reverse)


def layer_norm_lstm(x: Tensor, w: Weights, reverse: bool) -> Tensor:
    """The norms of both projections per gate, and of c."""
    weight = w["weight_hh"].t()
    h = c = _zeros(x, w)
    hidden = (h.shape[1],)
    gain_x, gain_r, bias = (torch.stack([w[f"{part}_{k}"] for k in "ifgo"]) for part in "xrb")
    # The norm of the input projection does not depend on time either: all steps at once.
    projected = F.linear(x, w["weight_ih"]).unflatten(2, (4, -1))
    outputs = []
    for gates in _steps(F.layer_norm(projected, hidden) * gain_x + bias, reverse):
        recurrent = F.layer_norm((h @ weight).unflatten(1, (4, -1)), hidden)
        i, f, g, o = (gates + recurrent * gain_r).unbind(1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(F.layer_norm(c, hidden, w["c_gain"], w["c_shift"]))
        outputs.append(h)
    return _in_time_order(outputs, reverse)


SCANS: dict[str, Scan] = {
    "LSTM": lstm,
    "GRU": gru,
    "RNN": rnn,
    "PeepholeLSTM": peephole_lstm,
    "LayerNormLSTM": layer_norm_lstm,
}


def any_cell(cell: Cell, seed: int | None, stream: int, static: Tensor | None) -> Scan:
    """A scan for a cell without one by hand: its graph, operation by operation, in torch."""

    def scan(x: Tensor, w: Weights, reverse: bool) -> Tensor:
        gates = F.linear(x, w["weight_ih"], w.get("bias_ih"))
        output, _ = reference.run(
            cell,
            gates,
            {n: w.get(n) for linear in cell.linears for n in (linear.weight, linear.bias_name)},
            params={name: w[name] for name in cell.param_names},
            static=static,
            reverse=reverse,
            training=seed is not None,
            seed=seed,
            stream=stream,
        )
        return output

    return scan


class Loop(nn.Module):
    """Layers and directions around a scan, with ``torch.nn``'s parameter names."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.cell = problem.cell.definition
        self.scan = SCANS.get(problem.cell.origin)
        for name, value in problem.weights.items():
            self.register_parameter(name, nn.Parameter(torch.from_numpy(value.copy())))
        parameters = dict(self.named_parameters())

        def direction(suffix: str) -> dict[str, Tensor]:
            return {k.removesuffix(suffix): p for k, p in parameters.items() if k.endswith(suffix)}

        self.stack = [
            [direction(f"_l{layer}" + "_reverse" * d) for d in range(problem.shape.D)]
            for layer in range(problem.shape.L)
        ]

    def forward(self, x: Tensor, static: Tensor | None = None) -> Tensor:
        """``[T, B, I] -> [T, B, D * H]``."""
        seed = None
        if self.training and self.cell.keeps:  # drawn as the fused layer draws it: the same masks
            seed = int(torch.randint(2**63 - 1, ()))
        for k, layer in enumerate(self.stack):
            outputs = []
            for d, w in enumerate(layer):
                scan = self.scan or any_cell(self.cell, seed, 2 * k + d, static)
                outputs.append(scan(x, w, d == 1))
            x = torch.cat(outputs, 2) if len(outputs) > 1 else outputs[0]
        return x
