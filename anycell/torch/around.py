"""Things that a step takes from elsewhere: tensors, modules, all else that decides what it does."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

_ORDINARY = frozenset(nn.Module().__dict__) - {"training"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_WALKED = nn.Module, types.FunctionType, types.MethodType, functools.partial
_TORCH = str(Path(torch.__file__).parent)


@dataclass
class Surroundings:
    """Things that a step reads besides its arguments.

    Attributes:
        step: the module or the function.
        places: where its tensors are: a dictionary or the cell of a closure, and the name there.
        modules: the modules among them.
        labels: what the tensors are called.
        guards: what else decides what the step does, hashable; ``held`` keeps it alive.
        watched: variables of modules, attributes of classes and objects among them: the dictionary,
            the name, the value.
        cells: variables of enclosing functions, and their values.
        containers: lists and dictionaries among them, which may change in place, and copies.
        token: a number that stands for the guards.
    """

    step: Any
    places: list[tuple[Any, str]] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    guards: list[Any] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    watched: list[tuple[Mapping[str, Any], str, Any]] = field(default_factory=list)
    cells: list[tuple[types.CellType, Any]] = field(default_factory=list)
    containers: list[tuple[Any, Any]] = field(default_factory=list)
    seen: set[Any] = field(default_factory=set)
    token: int = 0

    @classmethod
    def of(cls, step: Any) -> Surroundings:
        around = cls(step)
        around.walk(step)
        return around

    @property
    def title(self) -> str:
        """The name of the step."""
        return str(getattr(self.step, "__name__", type(self.step).__name__))

    @property
    def fresh(self) -> bool:
        """Whether all variables are what they were; False if containers may differ."""
        if self.containers or any(_content(cell) is not value for cell, value in self.cells):
            return False
        return all(holder.get(name) is value for holder, name, value in self.watched)

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
            self.guards.append(self._frozen((value.args, tuple(value.keywords.items()))))
        elif isinstance(value, types.FunctionType):
            if _of_user(value):
                self._function(value)
        elif hasattr(value, "__dict__") and not isinstance(value, type):
            self.guards.append(type(value))
            if callable(value):
                self.walk(type(value).__call__)
            for name in vars(value):
                self._item(value.__dict__, name, name)

    def _function(self, function: types.FunctionType) -> None:
        code = function.__code__
        self.guards.append(code)
        names = frozenset(_names(code))
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        for label, cell in cells:
            value = _content(cell)
            if not isinstance(value, Tensor):
                self.cells.append((cell, value))
            self._item(cell, "cell_contents", label)
            self._object(value, names)
        variables = function.__globals__
        for name in sorted(names & variables.keys()):
            self._watch(variables, name, names)
            self._item(variables, name, name)
        self.guards.append(self._frozen(function.__defaults__))

    def _watch(self, holder: Mapping[str, Any], name: str, names: frozenset[str]) -> None:
        value = holder[name]
        if not isinstance(value, Tensor):
            self.watched.append((holder, name, value))
            self._object(value, names)

    def _object(self, value: Any, names: frozenset[str]) -> None:
        """Watches the attributes of an object of the user's that code with these names may read."""
        attributes = getattr(value, "__dict__", None)
        known = isinstance(value, (*_WALKED, Tensor, type, types.ModuleType))
        if known or type(attributes) is not dict or (id(value), names) in self.seen:
            return
        self.seen.add((id(value), names))
        for name in sorted(names & attributes.keys()):
            self._watch(attributes, name, names)
            self.guards.append((name, self._frozen(attributes[name])))

    def _module(self, module: nn.Module) -> None:
        if any(module is other for other in self.modules):
            return
        self.modules.append(module)
        self.guards += [type(module), *module._modules]
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    self.add(tensors, name, name)
                self.guards.append((name, tensor is None))
        for name in [*module.__dict__]:
            if name not in _ORDINARY:
                self._item(module.__dict__, name, name)
        names, done = ["forward"], set[str]()
        while names:  # methods that forward calls, with the variables that they read
            name = names.pop()
            if name in done:
                continue
            done.add(name)
            kinds = [kind for kind in type(module).__mro__ if not _of_torch(kind)]
            for place, kind in enumerate(kinds):
                if name in vars(kind):
                    self.watched.append((vars(kind), name, vars(kind)[name]))
                    self.watched += [(vars(nearer), name, None) for nearer in kinds[:place]]
                    method = vars(kind)[name]
                    method = getattr(method, "fget", None) or getattr(method, "__func__", method)
                    if isinstance(method, types.FunctionType):
                        self.walk(method)
                        names += _names(method.__code__)
                    else:
                        self.guards.append((name, self._frozen(method)))
                    break
        read = frozenset(done)
        for name, value in module.__dict__.items():
            if name not in _ORDINARY:
                self._object(value, read)

    def add(self, holder: Any, name: Any, label: str) -> None:
        """Adds a tensor in a dictionary or in the cell of a closure."""
        self.places.append((holder, name))
        self.labels.append(label)

    def _item(self, holder: Any, name: str, label: str) -> None:
        try:
            value = holder[name] if type(holder) is dict else holder.cell_contents
        except ValueError:  # a variable that has no value yet
            return
        if isinstance(value, Tensor):
            self.add(holder, name, label)
        elif isinstance(value, _WALKED):
            self.walk(value)
        else:
            self.guards.append((label, self._frozen(value)))

    def _frozen(self, value: Any) -> Any:
        """The value, or what stands for it: its parts, or its identity."""
        kind = type(value)
        if kind in (int, float, bool, str, bytes, type(None), torch.dtype, torch.device):
            return kind, value
        if kind in (list, dict, set):
            self.containers.append((value, value.copy()))
        if kind in (tuple, list, dict) and len(value) <= 16:
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


def _of_user(function: types.FunctionType) -> bool:
    return not function.__code__.co_filename.startswith(_TORCH)


def _of_torch(kind: type) -> bool:
    return kind is object or kind.__module__.partition(".")[0] == "torch"


def _content(cell: types.CellType) -> Any:
    """The value of a variable, None if it has no value yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _names(code: types.CodeType) -> Iterator[str]:
    """The names that code may read from its module, functions inside it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
