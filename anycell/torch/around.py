"""What a step takes from elsewhere: tensors, modules, and all else that decides what it does."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

_ORDINARY = frozenset(nn.Module().__dict__) - {"training"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TORCH = str(Path(torch.__file__).parent)


@dataclass
class Surroundings:
    """What a step reads besides its arguments.

    Attributes:
        step: the module or the function.
        places: where its tensors are: a dictionary or the cell of a closure, and the name there.
        modules: the modules among them.
        guards: what else decides what the step does, hashable; ``held`` keeps it alive.
        loose: whether a list or a dictionary is among them, which may change in place.
    """

    step: Any
    places: list[tuple[Any, str]] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    guards: list[Any] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)
    loose: bool = False
    seen: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, step: Any) -> Surroundings:
        around = cls(step)
        around.walk(step)
        return around

    def tensors(self) -> list[Tensor]:
        return [
            holder[name] if type(holder) is dict else holder.cell_contents
            for holder, name in self.places
        ]

    def walk(self, value: Any) -> None:
        """Adds a module, or what a function reads."""
        if id(value) in self.seen:
            return
        self.seen.add(id(value))
        self.held.append(value)
        if isinstance(value, nn.Module):
            for module in value.modules():
                self._module(module)
        elif isinstance(value, types.MethodType):
            self.walk(value.__self__)
            self.walk(value.__func__)
        elif isinstance(value, functools.partial):
            self.walk(value.func)
            self.guards.append(self._frozen([*value.args, *value.keywords.items()]))
        elif isinstance(value, types.FunctionType):
            if not value.__code__.co_filename.startswith(_TORCH):
                self._function(value)
        elif hasattr(value, "__dict__") and not isinstance(value, type):
            self.guards.append(type(value))
            for name in vars(value):
                self._item(value.__dict__, name)

    def _function(self, function: types.FunctionType) -> None:
        code = function.__code__
        self.guards.append(code)
        for cell in function.__closure__ or ():
            self._item(cell, "cell_contents")
        for name in _names(code):
            if name in function.__globals__:
                self._item(function.__globals__, name)
        self.guards.append(self._frozen([*(function.__defaults__ or ())]))

    def _module(self, module: nn.Module) -> None:
        if any(module is other for other in self.modules):
            return
        self.modules.append(module)
        self.guards += [type(module), *module._modules]
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    self.places.append((tensors, name))
                self.guards.append((name, tensor is None))
        for name in module.__dict__:
            if name not in _ORDINARY:
                self._item(module.__dict__, name)

    def _item(self, holder: Any, name: str) -> None:
        try:
            value = holder[name] if type(holder) is dict else holder.cell_contents
        except ValueError:  # a variable that has no value yet
            return
        if isinstance(value, Tensor):
            self.places.append((holder, name))
        elif isinstance(value, (nn.Module, types.FunctionType, types.MethodType)):
            self.walk(value)
        elif isinstance(value, functools.partial):
            self.walk(value)
        else:
            self.guards.append((name, self._frozen(value)))

    def _frozen(self, value: Any) -> Any:
        """The value, or what stands for it: its parts, or its identity."""
        kind = type(value)
        if kind in (int, float, bool, str, bytes, type(None), torch.dtype, torch.device):
            return kind, value
        if kind in (tuple, list, dict) and len(value) <= 16:
            self.loose |= kind is not tuple
            return kind, tuple(map(self._frozen, value.items() if kind is dict else value))
        self.held.append(value)
        return id(value), len(value) if kind in (tuple, list, dict, set) else None

    @contextmanager
    def swapped(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Puts other tensors in the places of the step's own, for a while."""
        old = self.tensors()
        try:
            self._put(tensors)
            yield
        finally:
            self._put(old)

    def _put(self, tensors: Sequence[Tensor]) -> None:
        for (holder, name), tensor in zip(self.places, tensors, strict=True):
            if type(holder) is dict:
                holder[name] = tensor
            else:
                holder.cell_contents = tensor

    def hooked(self) -> str | None:
        """Why hooks are in the way, if there are any."""
        for module in self.modules:
            if any(getattr(module, name) for name in _HOOKS):
                return (
                    f"{type(module).__name__} has hooks, which a fused step would not call. "
                    "Instead: remove them, or compute in the module what they compute."
                )
        glob = modules._global_forward_hooks or modules._global_forward_pre_hooks
        if glob or modules._global_backward_hooks or modules._global_backward_pre_hooks:
            return "torch has hooks for all modules, which a fused step would not call"
        return None


def _names(code: types.CodeType) -> Iterator[str]:
    """The names that code may read from its module, functions inside it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
