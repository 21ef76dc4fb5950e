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
from anycell.layer import stepped
from anycell.plan import Plan
from anycell.torch import fused, ops
from anycell.torch.composite import Arrays, Call, Sizes, States, composite
from anycell.torch.ranges import span


def stack(
    call: Call,
    arrays: Arrays,
    weights: Sequence[Arrays],
    drop: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, States]:
    """Layers on top of each other.

    Args:
        call: of the first layer.
        arrays: the input of the first layer and what all share; the states are those of all
            layers, ``[layers * directions, B, size]``.
        weights: what each layer learns.
        drop: the dropout between layers, if any.

    Returns:
        the output ``[T, B, directions * size]`` and the final states of all layers.
    """
    if len(weights) == 1:
        return layer(call, {**arrays, **weights[0]})
    x, finals, count = arrays["x"], [], len(call.options.reverse)
    for k, learned in enumerate(weights):
        if k and drop is not None:
            x = drop(x)
        directions = slice(k * count, (k + 1) * count)
        one = {n: t[directions] if _is_state(n) else t for n, t in arrays.items()}
        options = call.options._replace(stream=k)
        x, final = layer(call._replace(options=options), {**one, "x": x, **learned})
        finals.append(final)
    return x, tuple(map(torch.cat, zip(*finals, strict=True)))


def _is_state(name: str) -> bool:
    return name.startswith(("state ", "reset_state "))


def layer(call: Call, arrays: Arrays) -> tuple[Tensor, States]:
    """One layer of one or two directions, on the engine that fits."""
    x = arrays["x"]
    if compiled() or faked(x):
        results = ops.run(call, arrays) if ops.AVAILABLE and not for_onnx() else None
        if results is not None:
            return results
    if compiled():  # the graph breaks here
        return torch.compiler.disable(layer)(call, arrays)
    if not (traced() or transformed()):
        cell = stepped(call.cell, arrays.get("recurrent_mask"))
        plan = fused_plan(cell, call.hidden_size, x, call.sizes)
        if isinstance(plan, Plan) and _memory(arrays):
            with span(call.cell, "forward"):
                return fused.run(call, plan, arrays)
    with span(call.cell, "step by step"):
        return composite(call, arrays)


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


def _memory(arrays: Arrays) -> bool:
    """Whether all arrays are plain memory, and all but flags of one dtype."""
    x = arrays["x"]
    return all(
        memory(t, None if name in ("mask", "resets") else x.dtype) and t.device == x.device
        for name, t in arrays.items()
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
