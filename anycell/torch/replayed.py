"""Calls of a step that was read, as earlier ones: their tape, and one native operator.

What a reading depends on is compared in a few steps of C: the objects around the step by their
identity, the tensors by their layout. A call that differs goes the ordinary way, which reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from anycell.layer.sequences import keeping
from anycell.plan import Plan
from anycell.torch import fused
from anycell.torch.around import Surroundings
from anycell.torch.fused import plan_on
from anycell.torch.native import play
from anycell.torch.passes import as_given, form_of, learn_forward
from anycell.torch.planned import ReadStep, States, layered
from anycell.torch.stepwise import Steps
from anycell.torch.tape import Tape
from anycell.torch.warm import Front, ordinary, settings, wanted


def layouts(tensors: Sequence[Tensor]) -> tuple[Any, ...] | None:
    """Returns the facts of tensors that a tape depends on; None if one is no plain memory."""
    if not ordinary(map(type, tensors)):
        return None
    try:
        return tuple([(t.shape, t.stride(), t.dtype) for t in tensors])
    except RuntimeError:  # a sparse tensor
        return None


def time_first(x: Tensor) -> Tensor:
    """``[B, T, ...]`` as ``[T, B, ...]``; ``[T]`` as it is."""
    return x.transpose(0, 1) if x.dim() > 1 else x


def batch_first(output: Any, rows: int) -> Any:
    """Tensors ``[T, B, ...]`` as ``[B, T, ...]``; those without rows as they are."""

    def swapped(t: Tensor) -> Tensor:
        return t.transpose(0, 1) if t.dim() > 1 and t.shape[1] == rows else t

    return pytree.tree_map_only(Tensor, swapped, output)


class Replayed:
    """A call that was replayed, for all that are laid out like it.

    Args:
        first: whether users have the batch as the first axis of x and the output.
    """

    def __init__(
        self, plan: ReadStep, tape: Tape, around: Surroundings, call: Steps, first: bool
    ) -> None:
        self.plan, self.tape = plan, tape
        self.facts = [around, call.x_tree, call.state_tree, first]
        self.rows = call.rows if first and call.batched else 0
        self.call = call._replace(xs=[], state=[])
        self.places = slice(-len(call.xs) - len(call.state), -len(call.state))
        self.fronts: dict[Any, Front | None] = {}

    def run(self, tensors: list[Tensor]) -> tuple[Any, Any]:
        """Returns the output and the last state of a call with these tensors."""
        if self.rows:
            tensors[self.places] = [time_first(t) for t in tensors[self.places]]
        arrays, memory = self.tape.enter(tensors)
        now = settings()
        if now not in self.fronts:
            self.fronts[now] = self._front(arrays)
        states = self._states(self.fronts[now], arrays)
        output, last = self.tape.leave(tensors, states, memory)
        return (batch_first(output, self.rows) if self.rows else output), last

    def _states(self, front: Front | None, arrays: dict[str, Tensor]) -> States:
        plan, given = self.plan, [*arrays.values()]
        if front is None:
            return plan.recur(self.call, arrays)
        if front.layer.sequences or (torch.is_grad_enabled() and wanted(given)):
            return plan.recur(self.call, arrays, again=front.run)
        if results := play(given, front.form.number, 0):
            return plan.states_of(results[0], results[1:])
        states = plan.recur(self.call, arrays)
        learn_forward(front.form, fused.ready(front.layer), layered(arrays), False, flat=True)
        return states

    def _front(self, arrays: dict[str, Tensor]) -> Front | None:
        """Returns a call of the kernel that does not look at its arrays; None if it must look."""
        layer = self.plan.layer_for(self.call, arrays)
        x = arrays["x"]
        if any(t.dtype is not x.dtype for t in arrays.values()):
            return None
        plan = plan_on(x.device.type, layer.cell, layer.sizes, x.dtype)
        if not isinstance(plan, Plan) or plan.engine != "cpu" or not as_given(plan, arrays):
            return None
        layer, names = layer._replace(plan=keeping(plan, layer.sequences)), tuple(arrays)
        ready = fused.ready(layer)
        flat, keeping_form = (form_of(ready, names, *f) for f in (["flat"], ["forward", True]))
        if flat is None or keeping_form is None:
            return None
        return Front((), (), flat, keeping_form, layer, names, plain=True)
