"""``prepare()`` and ``step()``: one step at a time, on weights packed once."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from anycell.layer.rounding import quantized
from anycell.layer.signature import places
from anycell.layer.stream import Stream
from anycell.plan import Plan
from anycell.torch.framework import Torch, memory
from anycell.torch.functional import fused_plan, plain
from anycell.torch.observers import autocast, observed
from anycell.torch.threads import threads


class Prepared:
    """The packed weights of a module, and the very tensors that they were packed from.

    They serve that module only, and only while it has these tensors. Libraries copy modules, and
    their attributes, in many ways; a copy may bring this object along, but packs its own weights at
    its first step. Copies by ``deepcopy`` and pickles do not carry the weights.
    """

    def __init__(self, module: Any = None) -> None:
        self.stream: Stream | None = None
        self.draws = False
        self.attributes: dict[str, Any] | None = None  # the module's
        # Where the module looks for weights, and what is there; None where there is nothing.
        self.places: list[tuple[dict[str, Any], str, Any]] = []
        self.stamps: list[tuple[Tensor, int | None, int, tuple[int, ...], Tensor]] = []
        if module is None or observed():  # then it is stale, and packs at its first step
            return
        self.attributes = module.__dict__
        _watch()
        self.written = _WRITTEN[0]
        owners = _modules(module)  # a child holds the originals of a parametrised weight
        for owner, _ in owners:
            for kind in ("_parameters", "_buffers"):
                tensors = owner.__dict__[kind]
                self.places.append((owner.__dict__, kind, tensors))
                self._stamp(tensors)
            self._stamp(owner.__dict__)  # weights that are not parameters, as in replicas
        for k in range(module.num_layers):
            for name in places(module.cell.learned, k, 1).values():
                if module._parameters.get(name) is None:
                    for place in (module._parameters, module._buffers, module.__dict__):
                        if place.get(name) is None:
                            self.places.append((place, name, None))
        self.cell = module.cell
        # Only with parametrisations, which may differ in training, or be replaced.
        self.mode = (module.training, owners) if len(owners) > 1 else None
        weight = module.weight_ih_l0
        self.dtype: torch.dtype = module._like.dtype
        # In training, the cell may draw random masks, and a parametrisation may drop weights.
        self.draws = bool(module.cell.keeps) or len(owners) > 1
        plan = fused_plan(module.cell, module._sizes, weight)
        if isinstance(plan, Plan) and plan.engine == "cpu" and not plan.types.mixed:
            with torch.no_grad():
                self.stream = self._pack(module, plan)

    def _stamp(self, tensors: dict[str, Any]) -> None:
        """Notes the tensors of a dictionary, and the version and the memory of each."""
        for name, tensor in tensors.items():
            if isinstance(tensor, Tensor):
                self.places.append((tensors, name, tensor))
                # Autograd does not count writes to tensors made in inference mode.
                version = None if tensor.is_inference() else tensor._version
                # An alias, because freed memory may become that of the next weight.
                alias = tensor.detach()
                stamp = tensor, version, tensor.data_ptr(), tensor.stride(), alias
                self.stamps.append(stamp)

    def _pack(self, module: Any, plan: Plan) -> Stream | None:
        weights = module._weights(module.cell)
        for learned in weights:
            kinds = (self.dtype, torch.int8) if quantized(learned) else (self.dtype,)
            if not all(memory(t) and t.dtype in kinds for t in learned.values()):
                return None
        detached = [{name: t.detach() for name, t in learned.items()} for learned in weights]
        return Stream(Torch.of(plan.dtype), plan, detached, threads())

    def stale(self, module: Any) -> bool:
        """Whether this was packed for another module, or the module's cell or weights have changed,
        as far as torch can tell.
        """
        if module.__dict__ is not self.attributes or module.cell is not self.cell:
            return True
        if self.written is not _WRITTEN[0]:
            return True
        if self.mode is not None and self.mode != (module.training, _modules(module)):
            return True
        for place, name, value in self.places:
            if place.get(name) is not value:
                return True
        for tensor, version, address, strides, _ in self.stamps:
            if tensor.data_ptr() != address or tensor.stride() != strides:
                return True
            if version is not None and tensor._version != version:
                return True
        return False

    def step(
        self, x: Any, state: Any, static: Any, resets: Any, reset_state: Any
    ) -> tuple[Tensor, tuple[Tensor, ...] | Tensor] | None:
        """Runs a step on the packed weights; returns None if it has to be an ordinary call."""
        stream = self.stream
        if stream is None or type(x) is not Tensor or x.dim() != 2:
            return None
        if (static is None) is not (stream.static is None):
            return None
        rows = x.size(0)
        arrays = [x]
        shapes: list[tuple[int, ...]] = [(rows, stream.width)]
        if static is not None:
            arrays.append(static)
            shapes.append((rows, stream.static_width))
        before, restored = _together(state), _together(reset_state)
        for states in (before, restored):
            if states is not None:
                if len(states) != len(stream.shape):
                    return None
                arrays += states
                shapes += [(layers, rows, width) for layers, width in stream.shape]
        if not plain(arrays, self.dtype, shapes):
            return None
        if resets is not None:
            if type(resets) is not Tensor or not resets.is_cpu or resets.shape != (rows,):
                return None
            given, resets = resets, resets.bool().contiguous()
            if given is not resets and (
                given.is_complex() or not torch.equal(resets.type(given.dtype), given)
            ):
                return None
        output, new = stream.step(rows, x, before, static, threads(), resets, restored)
        return output, tuple(new) if len(new) > 1 else new[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return Prepared, ()


def _together(states: Any) -> tuple[Any, ...] | None:
    """Puts a single state into a tuple."""
    return states if states is None or type(states) is tuple else (states,)


def elsewhere() -> bool:
    """Whether gradients or autocast are on, or tensors may be more or less than their memory."""
    return torch.is_grad_enabled() or autocast() or observed()


def _modules(module: torch.nn.Module) -> list[tuple[torch.nn.Module, int]]:
    """The module and those within it, each with the ``id`` of its attributes; a parametrisation
    registered twice is listed twice.
    """
    return [(m, id(m.__dict__)) for _, m in module.named_modules(remove_duplicate=False)]


_WRITTEN = [object()]  # replaced after each step of an optimizer whose writes torch does not count


@functools.cache
def _watch() -> None:
    """Makes torch report the steps of all optimizers from now on."""
    register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Notes a step with ``fused=True``: autograd does not count the writes of its kernels."""
    if any(group.get("fused") for group in optimizer.param_groups):
        _WRITTEN[0] = object()
