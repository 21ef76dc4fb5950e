"""One layer, and a stack of layers, as functions of tensors.

A layer runs on the fused engine under one ``torch.autograd.Function``, or as a *composite*: the input
projection by ``torch.nn.functional.linear``, then the reference engine under plain autograd. The composite
is slow and can do everything torch can: it serves double backward, vmap, forward-mode derivatives,
tracing, and the cells, dtypes and devices that no fused kernel carries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from anycell.engines import reference
from anycell.lang.cell import Cell
from anycell.plan import Plan, plan

States = tuple[Tensor, ...]


@dataclass
class Weights:
    """The learned tensors of one direction of one layer."""

    ih: Tensor
    hh: Tensor | None = None
    bias_ih: Tensor | None = None
    bias_hh: Tensor | None = None
    params: dict[str, Tensor] = field(default_factory=dict)  # the cell's, [H] each
    linears: dict[str, Tensor] = field(default_factory=dict)  # of further matmuls inside a step


@dataclass(frozen=True)
class Options:
    """What all layers of one call share."""

    mask: Tensor | None = None
    resets: Tensor | None = None
    static: Tensor | None = None
    masked_output: str = "zero"
    training: bool = False
    seed: int = 0


def stack(
    cell: Cell,
    x: Tensor,
    state: States | None,
    weights: Sequence[Sequence[Weights]],
    options: Options,
    dropout: float = 0.0,
) -> tuple[Tensor, States]:
    """Layers on top of each other.

    Args:
        x: ``[T, B, input]``.
        state: per state of the cell ``[layers * directions, B, size]``; None for what the cell declares.
        weights: per layer, per direction.
        dropout: between layers, in training, by torch's generator as in ``torch.nn``.

    Returns:
        the output ``[T, B, directions * size]`` and the final state, as ``state``.
    """
    finals = []
    for k, directions in enumerate(weights):
        if k and dropout and options.training:
            x = F.dropout(x, dropout)
        first = k * len(directions)
        initial = state and tuple(s[first : first + len(directions)] for s in state)
        x, final = layer(cell, x, initial, directions, options, stream=first)
        finals.append(final)
    if len(finals) == 1:
        return x, finals[0]
    return x, tuple(map(torch.cat, zip(*finals, strict=True)))


def layer(
    cell: Cell,
    x: Tensor,
    initial: States | None,
    weights: Sequence[Weights],
    options: Options,
    stream: int = 0,
) -> tuple[Tensor, States]:
    """One layer of one or two directions; initial and final states are ``[directions, B, size]`` each."""
    return composite(cell, x, initial, weights, options, stream)


def composite(
    cell: Cell,
    x: Tensor,
    initial: States | None,
    weights: Sequence[Weights],
    options: Options,
    stream: int = 0,
) -> tuple[Tensor, States]:
    """``layer`` as differentiable torch operations, step by step."""
    outputs, finals = [], []
    for d, w in enumerate(weights):
        output, final = reference.run(
            cell,
            F.linear(x, w.ih, w.bias_ih),
            {"hh": w.hh, "hh_bias": w.bias_hh, **w.linears},
            initial and tuple(s[d] for s in initial),
            w.params,
            static=options.static,
            mask=options.mask,
            resets=options.resets,
            masked_output=options.masked_output,
            reverse=d == 1,
            training=options.training,
            seed=options.seed,
            stream=stream + d,
        )
        outputs.append(output)
        finals.append(final)
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
    return output, tuple(map(torch.stack, zip(*finals, strict=True)))


# -- which engine ----------------------------------------------------------------------------------------


class Engine(NamedTuple):
    """What runs a layer: "cpu" (fused), "reference" (step by step) or "torch" (its own layer); and why."""

    name: str
    reason: str


_DTYPES = {torch.float32: "float32", torch.float64: "float64"}
_MEMORY = (Tensor, torch.nn.Parameter)


def fused_plan(cell: Cell, hidden_size: int, weight: Tensor) -> Plan | str:
    """The plan of the fused kernel for such weights, or why there is none."""
    if weight.device.type != "cpu":
        return f"no fused kernel for device {weight.device.type!r} as yet"
    dtype = _DTYPES.get(weight.dtype)
    if dtype is None:
        return f"no fused kernel for {weight.dtype} as yet"
    found = plan(cell, hidden_size, dtype)
    return found if found.engine == "cpu" else found.reason


def traced() -> bool:
    """Whether torch.compile, export or jit records the call: pointers mean nothing then."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def transformed() -> bool:
    """Whether tensors carry more than their memory: torch.func's transforms, or forward-mode tangents."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def memory(x: Tensor) -> bool:
    """Whether ``x`` is an ordinary tensor, with its numbers in memory (a FakeTensor, say, is not)."""
    return type(x) in _MEMORY and x.layout is torch.strided


autocast: Callable[[], bool] = getattr(
    torch._C, "_is_any_autocast_enabled", torch.is_autocast_enabled
)
