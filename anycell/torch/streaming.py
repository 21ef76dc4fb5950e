"""``prepare()`` and ``step()``: one step at a time, on weights packed once."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from anycell.layer.stream import Place, Prepared, Stream, Writes, names_of, steps
from anycell.torch.framework import Torch, memory
from anycell.torch.functional import fused_plan, plain
from anycell.torch.observers import autocast, observed
from anycell.torch.threads import threads


class Packed(Prepared):
    """The packed weights of a module, and the very tensors that they were packed from."""

    draws = False
    mode: Any = None

    def __init__(self, module: Any) -> None:
        if observed():  # then it is stale, and packs at its first step
            return
        owners = _modules(module)  # a child holds the originals of a parametrised weight
        places: list[Place] = []
        for held in (owner.__dict__ for owner, _ in owners):
            places += [(held, "_parameters"), (held, "_buffers")]
            for tensors in (held["_parameters"], held["_buffers"], held):  # as in replicas
                places += [(tensors, n) for n, t in tensors.items() if isinstance(t, Tensor)]
        for name in names_of(module):  # those that the module lacks may appear
            if module._parameters.get(name) is None:
                places += [(t, name) for t in (module._parameters, module._buffers, vars(module))]
        _watch()
        self.note(module, places, [_FUSED])
        # Autograd does not count writes to tensors made in inference mode. An alias is kept,
        # because freed memory may become that of the next weight.
        self.stamps = [
            (t, None if t.is_inference() else t._version, t.data_ptr(), t.stride(), t.detach())
            for *_, t in self.places
            if isinstance(t, Tensor)
        ]
        # Only with parametrisations, which may differ in training, or be replaced.
        self.mode = (module.training, owners) if len(owners) > 1 else None
        self.dtype: torch.dtype = module._like.dtype
        # In training, the cell may draw random masks, and a parametrisation may drop weights.
        self.draws = bool(module.cell.keeps) or len(owners) > 1
        plan: Any = fused_plan(module.cell, module._sizes, module.weight_ih_l0)
        if steps(plan):
            with torch.no_grad():
                weights = module._weights(module.cell)
            weights = [{name: t.detach() for name, t in learned.items()} for learned in weights]
            tensors, kinds = [t for w in weights for t in w.values()], (self.dtype, torch.int8)
            if all(memory(t) and t.dtype in kinds for t in tensors):
                self.stream = Stream(Torch.of(plan.dtype), plan, weights, threads())

    def stale(self, module: Any) -> bool:
        if super().stale(module):
            return True
        if self.mode is not None and self.mode != (module.training, _modules(module)):
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
        before = state if state is None or type(state) is tuple else (state,)
        restored = reset_state
        if restored is not None and type(restored) is not tuple:
            restored = (restored,)
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


def elsewhere() -> bool:
    """Whether gradients or autocast are on, or tensors may be more or less than their memory."""
    return torch.is_grad_enabled() or autocast() or observed()


def _modules(module: torch.nn.Module) -> list[tuple[torch.nn.Module, int]]:
    """The module and those within it, each with the ``id`` of its attributes; a parametrisation
    registered twice is listed twice.
    """
    return [(m, id(m.__dict__)) for _, m in module.named_modules(remove_duplicate=False)]


_FUSED = Writes()  # by optimizers whose writes torch does not count


@functools.cache
def _watch() -> None:
    """Makes torch report the steps of all optimizers from now on."""
    register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Notes a step with ``fused=True``: autograd does not count the writes of its kernels."""
    _FUSED.count += any(group.get("fused") for group in optimizer.param_groups)
