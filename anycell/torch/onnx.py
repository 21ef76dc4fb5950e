"""Gives ``anycell.onnx.load`` modules of PyTorch, and ONNX's operators on tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anycell.lang.cell import Cell
from anycell.torch.rnn import RNN


class Program(nn.Module):
    """A module whose ``plan`` calls its parts; a part has the name that the plan gives it."""

    def __init__(self, plan: Any, parts: Iterable[nn.Module]) -> None:
        super().__init__()
        self.plan, self.parts = plan, nn.ModuleList(parts)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Calls the plan with the parts; see ``anycell.onnx.load``."""
        return self.plan(self.parts, *inputs, **named)

    def __getitem__(self, name: Any) -> Any:
        return self.parts[self.plan.index(name)]


def layer(cell: Cell, weights: Mapping[str, np.ndarray[Any, Any]], **options: Any) -> RNN:
    """Makes a layer with these weights."""
    named = {name: torch.from_numpy(np.array(weight)) for name, weight in weights.items()}
    made = RNN(cell, **options, dtype=named["weight_ih_l0"].dtype)
    made.load_state_dict(named)
    return made


def operator(name: str, inputs: Sequence[Any], **attributes: Any) -> Any:
    """Runs an operator of ``OPERATORS``: arrays of real numbers become tensors, others lists."""
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    like = next((tensor for tensor in tensors if tensor.is_floating_point()), None)

    def taken(value: Any) -> Any:
        if not isinstance(value, (np.ndarray, np.generic)):
            return value
        if value.dtype.kind != "f":
            return value.tolist()
        return torch.tensor(
            value, device=tensors[0].device, dtype=None if like is None else like.dtype
        )

    return OPERATORS[name](*map(taken, inputs), **attributes)


def _unsqueeze(a: Tensor, axes: list[int]) -> Tensor:
    for axis in sorted(axis % (a.dim() + len(axes)) for axis in axes):
        a = a.unsqueeze(axis)
    return a


def _slice(a: Tensor, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Tensor:
    axes, steps = axes or range(len(starts)), steps or [1] * len(starts)
    for axis, *part in zip(axes, starts, ends, steps, strict=True):
        a = _gather(a, [*range(a.shape[axis])[slice(*part)]], axis)
    return a


def _gather(a: Tensor, indices: Any, axis: int = 0) -> Tensor:
    places = torch.as_tensor(indices, dtype=torch.int64, device=a.device)
    return a[(slice(None),) * (axis % a.dim()) + (places,)]


def _gemm(
    a: Tensor, b: Tensor, c: Any = 0.0, *,
    alpha: float = 1.0, beta: float = 1.0, transA: int = 0, transB: int = 0,
) -> Tensor:  # fmt: skip
    return alpha * ((a.T if transA else a) @ (b.T if transB else b)) + beta * c


_DTYPES = {1: torch.float32, 6: torch.int32, 7: torch.int64, 9: torch.bool, 11: torch.float64}
# What lies between recurrent nodes and behind them, with ONNX's arguments.
OPERATORS: dict[str, Callable[..., Any]] = {
    **{name: getattr(torch, name.lower()) for name in "Add Div MatMul Mul Relu Sub Tanh".split()},
    "Cast": lambda a, to: a.to(_DTYPES[to]),
    "Concat": lambda *parts, axis: torch.cat(parts, axis),
    "Equal": lambda a, b: a == b,
    "Gather": _gather,
    "Gemm": _gemm,
    "Identity": lambda a: a,
    "Reshape": lambda a, shape, allowzero=0: a.reshape(
        [a.shape[i] if n == 0 and not allowzero else n for i, n in enumerate(shape)]
    ),
    "Shape": lambda a, start=0, end=None: np.array(a.shape[start:end]),
    "Sigmoid": torch.sigmoid,
    "Slice": _slice,
    "Softmax": lambda a, axis=-1: torch.softmax(a, axis),
    "Split": lambda a, split=None, axis=0, num_outputs=1: a.split(
        split or -(-a.shape[axis] // num_outputs), axis
    ),
    "Squeeze": lambda a, axes=None: a.squeeze() if axes is None else a.squeeze(tuple(axes)),
    "Transpose": lambda a, perm=None: a.permute(perm or [*range(a.dim())][::-1]),
    "Unsqueeze": _unsqueeze,
    "Where": lambda condition, a, b: torch.where(torch.as_tensor(condition), a, b),
}
