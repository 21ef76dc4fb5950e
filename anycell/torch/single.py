"""A single step on the CPU, with little around it; see ``anycell.layer.single``."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from anycell.layer import Kept, shapes, single
from anycell.layer.signature import ANY, Shape
from anycell.plan import Call, Plan
from anycell.torch import fused
from anycell.torch.composite import Arrays, States
from anycell.torch.entry import enter
from anycell.torch.functional import fused_plan, observed, plain
from anycell.torch.host import HOSTS


def run(call: Call, arrays: Arrays) -> States | None:
    """The new states ``[B, size]``, or None where the step must go as a sequence of one.

    Args:
        arrays: x ``[B, I]``, states ``[B, size]``, static and what is learned, by the names of
            ``anycell.layer.signature``.
    """
    if observed():
        return None
    x = arrays["x"]
    plan = fused_plan(call.cell, call.hidden_size, x, call.sizes)
    if isinstance(plan, str) or not single.suits(plan):
        return None
    if not plain(arrays.values(), x.dtype, _shapes(plan, *x.shape, tuple(arrays))):
        return None
    call = call._replace(options=fused.on_threads(call.options))
    if torch.is_grad_enabled() and any(t.requires_grad for t in arrays.values()):
        step: Any = _Step.apply
        new: States = enter(call.cell, "forward", step, call, plan, tuple(arrays), *arrays.values())
        return new
    return tuple(enter(call.cell, "forward", _forward, call, plan, arrays, False)[0])


@functools.lru_cache(maxsize=256)
def _shapes(plan: Plan, batch: int, inputs: int, names: tuple[str, ...]) -> list[Shape]:
    """The shapes of the arrays of these names."""
    sizes = dict(plan.sizes)
    expected = shapes(plan.cell, sizes, inputs, True)
    expected |= {"x": (batch, inputs), "static": (batch, plan.hidden_size)}
    expected |= {f"state {s.name}": (batch, sizes[s.size]) for s in plan.cell.states}
    return [expected[name] for name in names]


def _forward(call: Call, plan: Plan, arrays: Arrays, keep: bool) -> tuple[list[Tensor], Kept]:
    host, (x, w) = HOSTS[plan.dtype], _apart(arrays)
    return single.forward(host, plan, x, w, call.options, keep=keep)


def _apart(arrays: Arrays) -> tuple[Tensor, dict[str, Tensor]]:
    """x, and all others."""
    others = dict(arrays)
    return others.pop("x"), others


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, plan: Plan, names: tuple[str, ...], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        arrays = dict(zip(names, tensors, strict=True))
        new, kept = _forward(call, plan, arrays, keep=True)
        saved = (*tensors, *kept.flat())
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.plan, ctx.names = call, plan, names
        ctx.shapes = [t.shape for t in saved]
        ctx.states = [array is not None for array in kept.states[0]]
        return tuple(new)

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor | None) -> tuple[Any, ...]:
        call, plan, names, needs = ctx.call, ctx.plan, ctx.names, ctx.needs_input_grad[3:]
        if all(gradient is None for gradient in arriving):
            return None, None, None, *[None for _ in needs]
        tensors = ctx.saved_tensors
        arrays = dict(zip(names, tensors, strict=False))
        wanted = {name for name, need in zip(names, needs, strict=True) if need}
        # Hooks on saved tensors may hand on others than were saved.
        fits = plain(tensors, arrays["x"].dtype, ctx.shapes)
        run: Any
        given: tuple[Any, ...]
        if not fits or torch.is_grad_enabled() or any(map(fused.batched, arriving)):
            run, given = _as_a_sequence, (call, arrays, wanted, arriving)
        else:
            parts = Kept.of(tensors[len(names) :], ctx.states, 1)
            run, given = _backward, (call, plan, arrays, wanted, arriving, parts)
        gradients = enter(call.cell, "backward", run, *given)
        return None, None, None, *[gradients.get(n) if n in wanted else None for n in names]


def _backward(
    call: Call,
    plan: Plan,
    arrays: Arrays,
    wanted: set[str],
    arriving: tuple[Tensor | None, ...],
    kept: Kept,
) -> dict[str, Tensor]:
    host, (x, w) = HOSTS[plan.dtype], _apart(arrays)
    fit = [None if d is None else host.fit(d.resolve_neg(), ANY) for d in arriving]
    return single.backward(host, plan, x, w, call.options, kept, fit, wanted)


def _as_a_sequence(
    call: Call, arrays: Arrays, wanted: set[str], arriving: tuple[Tensor | None, ...]
) -> dict[str, Tensor | None]:
    """The gradients as something to differentiate again."""
    whole = sequence_of_one(arrays)
    final = [None if d is None else d.unsqueeze(0) for d in arriving]
    gradients = fused.differentiable(call, whole, wanted, (None, *final))
    return {
        name: d.squeeze(0) if d is not None and whole[name] is not arrays[name] else d
        for name, d in gradients.items()
    }


def sequence_of_one(arrays: Arrays) -> dict[str, Tensor]:
    """The arrays of a step with the axes that a layer has: x of time, states of directions."""
    return {
        name: t.unsqueeze(0) if name == "x" or name.startswith("state ") else t
        for name, t in arrays.items()
    }
