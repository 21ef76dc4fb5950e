"""One layer, and layers on top of each other, as functions of tensors; who runs them, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from anycell.engines.gpu import refusals
from anycell.lang.cell import Cell
from anycell.plan import Plan
from anycell.torch import fused, ops
from anycell.torch.composite import Call, Inputs, Sizes, States, Weights, composite
from anycell.torch.ranges import span


def stack(
    call: Call,
    inputs: Inputs,
    weights: Sequence[Sequence[Weights]],
    drop: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, States]:
    """Layers on top of each other.

    Args:
        call: of the first layer.
        inputs: of the first layer, but with the states of all, ``[layers * directions, B, size]``.
        weights: per layer, per direction.
        drop: the dropout between layers, if any.

    Returns:
        the output ``[T, B, directions * size]`` and the final states of all layers.
    """
    if len(weights) == 1:
        return layer(call, inputs)
    x, finals = inputs.x, []
    for k, directions in enumerate(weights):
        if k and drop is not None:
            x = drop(x)
        mine = slice(k * len(directions), (k + 1) * len(directions))
        initial = inputs.initial and tuple(s[mine] for s in inputs.initial)
        reset = inputs.reset and tuple(s[mine] for s in inputs.reset)
        one = Inputs(x, inputs.static, initial, reset, directions)
        x, final = layer(call._replace(layer=k), one)
        finals.append(final)
    return x, tuple(map(torch.cat, zip(*finals, strict=True)))


def layer(call: Call, inputs: Inputs) -> tuple[Tensor, States]:
    """One layer of one or two directions, on the engine that fits."""
    if compiled() or faked(inputs.x):
        found = ops.run(call, inputs) if ops.AVAILABLE and not for_onnx() else None
        if found is not None:
            return found
    if compiled():  # the graph breaks here
        return torch.compiler.disable(layer)(call, inputs)
    if not (traced() or transformed()):
        plan = fused_plan(call.stepped, call.hidden_size, inputs.x, call.sizes)
        if isinstance(plan, Plan) and _memory(inputs):
            with span(call.cell, "forward"):
                return fused.run(call, plan, inputs)
    with span(call.cell, "step by step"):
        return composite(call, inputs)


# -- which engine ----------------------------------------------------------------------------------


class Engine(NamedTuple):
    """What runs a layer, and why.

    Attributes:
        name: "cpu" or "gpu" (fused kernel), "reference" (step by step) or "torch" (its own layer).
        reason: in words.
    """

    name: str
    reason: str


_ORDINARY = (Tensor, torch.nn.Parameter)


def fused_plan(cell: Cell, hidden_size: int, weight: Tensor, sizes: Sizes = ()) -> Plan | str:
    """The plan of the fused kernel for such weights, or why there is none."""
    return fused.plan_on(weight.device.type, cell, hidden_size, weight.dtype, sizes)


def reason(plan: Plan) -> str:
    """Why this engine, and what devices have refused of the plan."""
    return "; ".join([plan.reason, *map(str, refusals.of_plan(plan))])


def memory(x: Tensor | None, dtype: torch.dtype | None = None) -> bool:
    """Whether ``x``, if any, is plain memory on a device with kernels; a FakeTensor is not."""
    return x is None or (
        type(x) in _ORDINARY
        and x.device.type in fused.ENGINES
        and x.layout is torch.strided
        and not x.is_neg()
        and (dtype is None or x.dtype is dtype)
    )


def _memory(inputs: Inputs) -> bool:
    """Whether all inputs are plain memory of one dtype."""
    x, static, initial, reset, weights = inputs
    rest = (static, *(initial or ()), *(reset or ()))
    learned = (t for w in weights for t in (*w[:4], *w.params, *[t for _, t in w.linears]))
    return memory(x) and all(
        memory(t, x.dtype) and (t is None or t.device == x.device) for t in (*rest, *learned)
    )


def compiled() -> bool:
    """Whether torch.compile, or a strict torch.export, looks at the call."""
    return torch.compiler.is_dynamo_compiling()


def faked(x: Tensor) -> bool:
    """Whether ``x`` is a shape without numbers, as of export and of ``FakeTensorMode``."""
    return type(x) not in _ORDINARY and isinstance(x, FakeTensor)


def for_onnx() -> bool:
    """Whether the graph is for ONNX, which knows nothing of our operators."""
    return exporting() and torch.onnx.is_in_onnx_export()


def traced() -> bool:
    """Whether export or jit records the call: pointers mean nothing then."""
    return exporting() or torch._C._get_tracing_state() is not None


def transformed() -> bool:
    """Whether tensors carry more than memory: torch.func's transforms, or forward-mode tangents."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def autocast_dtype(weight: Tensor) -> torch.dtype:
    """What a layer of such weights computes in under autocast.

    On a card what its own layers would, that is autocast's dtype; on the CPU, where no kernel has
    16 bits, that of the weights.
    """
    if weight.is_cuda and torch.is_autocast_enabled() and weight.dtype is not torch.float64:
        if hasattr(torch, "get_autocast_dtype"):  # since PyTorch 2.4
            return torch.get_autocast_dtype("cuda")
        return torch.get_autocast_gpu_dtype()
    return weight.dtype


exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)
autocast: Callable[[], bool] = getattr(
    torch._C, "_is_any_autocast_enabled", torch.is_autocast_enabled
)
