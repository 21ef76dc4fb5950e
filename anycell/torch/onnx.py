"""What ``anycell.onnx.load`` needs of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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


def operator(name: str, inputs: Iterable[Any], **attributes: Any) -> Any:
    """Runs an operator of ``OPERATORS``; its real numbers become tensors like its first tensor."""
    like = next(value for value in inputs if isinstance(value, Tensor))
    real = (isinstance(value, np.ndarray) and value.dtype.kind == "f" for value in inputs)
    pairs = zip(inputs, real, strict=True)
    return OPERATORS[name](*[like.new_tensor(v) if r else v for v, r in pairs], **attributes)


def _numbers(value: Any) -> list[int]:
    return [int(number) for number in value]


def _reshape(a: Tensor, shape: Any, allowzero: int = 0) -> Tensor:
    sizes = enumerate(_numbers(shape))
    return a.reshape([a.shape[i] if n == 0 and not allowzero else n for i, n in sizes])


def _unsqueeze(a: Tensor, axes: Any) -> Tensor:
    for axis in sorted(axis % (a.dim() + len(axes)) for axis in _numbers(axes)):
        a = a.unsqueeze(axis)
    return a


def _slice(a: Tensor, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Tensor:
    axes, steps = (range(len(starts)) if axes is None else axes), steps or [1] * len(starts)
    for axis, *part in zip(*map(_numbers, (axes, starts, ends, steps)), strict=True):
        a = _gather(a, [*range(a.shape[axis])[slice(*part)]], axis)
    return a


def _gather(a: Tensor, indices: Any, axis: int = 0) -> Tensor:
    return a[(slice(None),) * axis + (torch.as_tensor(indices, device=a.device),)]


def _gemm(
    a: Tensor, b: Tensor, c: Any = 0.0, *,
    alpha: float = 1.0, beta: float = 1.0, transA: int = 0, transB: int = 0,
) -> Tensor:  # fmt: skip
    return alpha * ((a.T if transA else a) @ (b.T if transB else b)) + beta * c


_DTYPES = {
    1: torch.float32, 6: torch.int32, 7: torch.int64, 9: torch.bool, 10: torch.float16,
    11: torch.float64, 16: torch.bfloat16,
}  # fmt: skip
# What lies between recurrent nodes and behind them, in the order and by the names of ONNX.
OPERATORS: dict[str, Callable[..., Any]] = {
    "Add": torch.add,
    "Cast": lambda a, to: a.to(_DTYPES[to]),
    "Concat": lambda *parts, axis: torch.cat(parts, axis),
    "Div": torch.div,
    "Gather": _gather,
    "Gemm": _gemm,
    "Identity": lambda a: a,
    "MatMul": torch.matmul,
    "Mul": torch.mul,
    "Relu": torch.relu,
    "Reshape": _reshape,
    "Shape": lambda a, start=0, end=None: np.array(a.shape[start:end]),
    "Sigmoid": torch.sigmoid,
    "Slice": _slice,
    "Softmax": lambda a, axis=-1: torch.softmax(a, axis),
    "Split": lambda a, split, axis=0: a.split(_numbers(split), axis),
    "Squeeze": lambda a, axes: a.squeeze(tuple(_numbers(axes))),
    "Sub": torch.sub,
    "Tanh": torch.tanh,
    "Transpose": lambda a, perm: a.permute(perm),
    "Unsqueeze": _unsqueeze,
}
