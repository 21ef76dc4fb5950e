"""One layer as a function of tensors; which engine runs it, and why."""

from __future__ import annotations

import torch
from torch import Tensor

from anycell.engines.gpu import refusals
from anycell.lang.cell import Cell
from anycell.layer import stepped
from anycell.layer.checks import refuse
from anycell.layer.compression import sharded
from anycell.layer.rounding import SCALES, with_integers
from anycell.layer.signature import FLAGS, state_names
from anycell.plan import Engine, Layer, Plan, Sizes, scales_of
from anycell.torch.framework import ENGINES, Torch
from anycell.torch.observers import (
    ORDINARY,
    TRACERS,
    compiled,
    exporting,
    observed,
    transformed,
    watched,
)
from anycell.torch.operators import derivatives, fused, nodes, ops
from anycell.torch.operators.composite import Arrays, Result, composite
from anycell.torch.operators.fused import enter


def run_layer(layer: Layer, arrays: Arrays) -> Result:
    """Runs one layer of one or two directions, on the engine that fits."""
    if SCALES in arrays and not _multiplies_integers(layer, arrays):
        arrays = dequantized(arrays)
    elif SCALES in arrays:
        arrays = with_integers(Torch.xp, arrays)
    x, engine = arrays["x"], layer.engine
    plan: Plan | str = "asked for"
    if observed() or type(x) not in ORDINARY:
        if torch.onnx.is_in_onnx_export():
            if (results := nodes.run(layer, arrays)) is not None:
                return results
            if nodes.scans(x.shape[0]):
                return composite(layer, arrays, nodes.scan)
        if engine != "reference" and _as_operator(layer, arrays):
            results = ops.run(layer, arrays, derivatives.forward if transformed() else None)
            if results is not None:
                return results
        if compiled():  # the graph breaks here
            return torch.compiler.disable(run_layer)(layer, arrays)
        plan = (
            "tensors of a trace, of torch.func, of a mode or of another type are not plain memory"
        )
    elif engine != "reference":
        plan = _plan_for(layer, arrays)
        if isinstance(plan, Plan):
            if engine is None or engine == plan.engine:
                return enter(layer.cell, "forward", fused.run, layer._replace(plan=plan), arrays)
            plan = f"these tensors are for the engine {plan.engine!r}"
    if engine not in (None, "reference"):
        raise ValueError(f"engine={engine!r} cannot run this call: {plan}. Leave engine out.")
    _check_distributed(layer, arrays)
    if SCALES in arrays:
        arrays = dequantized(arrays)
    return enter(layer.cell, "step by step", composite, layer, arrays)


def in_its_dtype(layer: Layer, arrays: Arrays) -> Result:
    """Runs one layer in the dtype that autocast asks for."""
    learned = [arrays[name] for name in layer.cell.learned if name in arrays]
    integers = SCALES in arrays
    # Inputs from other layers may have 16 bits, whatever the dtype of this layer.
    dtype = torch.float32 if integers else autocast_dtype([*learned, arrays["x"]][0])
    same = {name for name in arrays if name in FLAGS or (integers and name.startswith("weight_"))}
    return run_layer(layer, {n: t if n in same else t.to(dtype) for n, t in arrays.items()})


def _check_distributed(layer: Layer, arrays: Arrays) -> None:
    """Refuses a ``DTensor`` beside plain tensors, of which torch's own errors name neither. States
    that were not passed would be plain.
    """
    names = dict.fromkeys([*arrays, *state_names("state", layer.cell)])
    parts = {name: sharded(arrays.get(name)) for name in names}
    if len({*parts.values()}) > 1:
        (first, *_), (plain, *_) = (
            [n for n in names if parts[n] is kind] for kind in (True, False)
        )
        expected = f"plain tensors, or DTensors for {plain} and all others as well"
        hint = "Pass whole tensors, t.full_tensor(), or the part of this process, t.to_local()."
        refuse(first, "a DTensor", expected, hint, TypeError)


# -- which engine ----------------------------------------------------------------------------------


def _as_operator(layer: Layer, arrays: Arrays) -> bool:
    """Whether those who observe a call can see it as one operator. Not ONNX, jit and forward mode,
    which have no rule for it, and users' types of tensors, which may have none.
    """
    if transformed():
        return not compiled() and derivatives.fits(layer, arrays)
    if exporting() and torch.onnx.is_in_onnx_export():
        return False
    if compiled():
        return True
    if not (watched() or type(arrays["x"]) in TRACERS):
        return False
    return {*map(type, arrays.values())}.issubset((*ORDINARY, *TRACERS))


def fused_plan(cell: Cell, sizes: Sizes, weight: Tensor) -> Plan | str:
    """Returns the plan of the fused kernel for a weight's device and dtype, or why none exists."""
    return fused.plan_on(weight.device.type, cell, sizes, weight.dtype)


def _plan_for(layer: Layer, arrays: Arrays) -> Plan | str:
    """Returns the plan of the fused kernel for a call, or why the call runs step by step."""
    x, cell, mask = arrays["x"], layer.cell, arrays.get("recurrent_mask")
    if mask is not None:
        cell = stepped(cell, mask)
        if mask.requires_grad and torch.is_grad_enabled():
            return "no fused kernel has the gradient of recurrent_mask"
    dtype, device = x.dtype, x.device
    integers = SCALES in arrays
    for name, t in arrays.items():  # checks the same as ``memory``, without a call for each tensor
        plain = type(t) in ORDINARY and t.layout is torch.strided and not t.is_neg()
        same = t.dtype is dtype or name in FLAGS or (integers and name.startswith("weight_"))
        if not plain or t.device != device or not same:
            return f"{name} is not a plain tensor with the dtype and the device of x"
    like = arrays["weight_ih"] if integers else x
    return fused_plan(cell, layer.sizes, like)


def _multiplies_integers(layer: Layer, arrays: Arrays) -> bool:
    """Returns whether the kernels for integers may run: for an input in float32 on the CPU, without
    gradients, and if those who observe the call can see it as one operator.
    """
    x = arrays["x"]
    if observed() and not _as_operator(layer, arrays):
        return False
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in arrays.values())
    return x.device.type == "cpu" and x.dtype is torch.float32 and not wanted


def dequantized(arrays: Arrays) -> Arrays:
    """Returns the weights with the real numbers that the integers stand for."""
    real = {}
    for name, t in arrays.items():
        if not name.startswith(scales_of("")):
            scales = arrays.get(scales_of(name))
            real[name] = t if scales is None else t.to(scales.dtype) * scales.unsqueeze(-1)
    return real


def engine_of(plan: Plan | str, otherwise: str = "reference") -> Engine:
    """Returns the engine that runs a plan, and why; the reason lists what devices have refused.

    Args:
        otherwise: the engine that runs if ``plan`` is a reason why there is no plan.
    """
    if isinstance(plan, str):
        return Engine(otherwise, plan)
    return Engine(plan.engine, "; ".join([plan.reason, *map(str, refusals.of_plan(plan))]))


def autocast_dtype(weight: Tensor) -> torch.dtype:
    """Returns the dtype in which a layer computes: like torch's own layers, autocast's dtype if
    autocast is on for the weight's device, unless the weight is float64; else the weight's dtype.
    """
    kind = weight.device.type
    if weight.dtype is torch.float64 or kind not in ENGINES:
        return weight.dtype
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
