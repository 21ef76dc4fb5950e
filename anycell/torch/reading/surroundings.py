"""Things that a step takes from elsewhere: tensors, modules, all else that decides what it does."""

from __future__ import annotations

import array
import functools
import io
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from anycell.read.places import module_variables, operations
from anycell.read.watched import CONTAINERS, MISSING, Watched, alike, equal, value_of

_ORDINARY = frozenset(nn.Module().__dict__) - {"training"}
_TABLES = "_parameters", "_buffers", "_modules"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_WALKED = nn.Module, types.FunctionType, types.MethodType, functools.partial
_FOREIGN = "builtins", "numpy", "torch"  # whose classes have nothing that changes
# Things whose changes cannot be seen, nor undone.
_CHANGING = Iterator, io.IOBase, bytearray, array.array
_PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)
_TORCH = str(Path(torch.__file__).parent)


@dataclass(eq=False)
class Surroundings(Watched):
    """Things that a step reads besides its arguments.

    Attributes:
        step: the module or the function; ``run``, that as (x, state) -> (output, state).
        places: the variables that are tensors, and what these are called.
        modules: the modules among them.
        guards: what else decides what the step does, hashable; ``held`` keeps it alive.
        watched: variables of code, of classes and of objects among them; see ``Watched``.
        sizes: the dictionaries of modules, and how many variables they have.
        changing: what code reads that changes unseen, if there is any.
        owners: classes by the ids of their variables.
        few: by the shapes of a call of few steps, which runs as it is written, its rows if x has
            the batch first, else 0.
        token: a number that stands for the guards.
    """

    step: Any
    run: Any = None
    places: list[tuple[Any, Any, str]] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    guards: list[Any] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)
    seen: set[Any] = field(default_factory=set)
    sizes: list[tuple[Any, int]] = field(default_factory=list)
    owners: dict[int, type] = field(default_factory=dict)
    few: dict[Any, int] = field(default_factory=dict)
    changing: str = ""
    token: int = 0

    @classmethod
    def of(cls, step: Any, run: Any) -> Surroundings:
        surroundings = cls(step, run)
        surroundings.walk(step)
        return surroundings

    @property
    def title(self) -> str:
        """The name of the step."""
        return str(getattr(self.step, "__name__", type(self.step).__name__))

    def again(self, step: Any, unhooked: bool = True) -> list[Tensor] | None:
        """Returns the tensors if, but for them, a call of the step does what an earlier one did.

        Args:
            unhooked: whether there may be no hooks.
        """
        if self.step is not step:
            return None
        try:
            tensors = self._compared(unhooked)
        except (LookupError, ValueError, AttributeError):  # a variable is gone
            return None
        # Calls that are replayed look at the types of all tensors.
        known = unhooked or all(isinstance(tensor, Tensor) for tensor in tensors or ())
        return tensors if known else None

    @functools.cached_property
    def _compared(self) -> Callable[[bool], list[Tensor] | None]:
        """Returns the tensors if all variables are as they were, and hooks as the argument says:
        comparisons printed as one expression, which takes a fifth of their time in loops.
        """
        space: dict[str, Any] = {}

        def name(value: Any) -> str:
            space[f"v{id(value)}"] = value
            return f"v{id(value)}"

        def item(holder: Any, key: Any) -> str:
            return name(holder) + (f"[{key!r}]" if type(key) in (str, int) else f"[{name(key)}]")

        def read(holder: Any, key: Any) -> str:
            return item(holder, key) if isinstance(holder, CONTAINERS) else f"{name(holder)}.{key}"

        checks = []
        for holder, key, value in self.watched:
            if value is MISSING:
                checks.append(f"{name(key)} not in {name(holder)}")
                continue
            now, old = read(holder, key), name(value)
            checks.append(f"({now} is {old} or {name(equal)}({now}, {old}))")
        checks += [f"{name(alike)}({name(of)}, {name(copy)})" for of, copy in self.containers]
        sizes = [(name(of), size) for of, size in self.sizes]
        checks += [f"len({of}) == {size}" if size else f"not {of}" for of, size in sizes]
        hooks = [item(vars(module), key) for module in self.modules for key in _HOOKS]
        hooks += [name(getattr(modules, f"_global{key}")) for key in _HOOKS]
        checks.append(f"not (unhooked and ({' or '.join(hooks)}))")
        tensors = ", ".join(read(holder, key) for holder, key, _ in self.places)
        text = f"def compared(unhooked):\n    if {' and '.join(checks)}: return [{tensors}]\n"
        exec(compile(text, "<around>", "exec"), space)
        return space["compared"]

    def tensors(self) -> list[Tensor]:
        return [value_of(holder, name) for holder, name, _ in self.places]

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
            if not value.__code__.co_filename.startswith(_TORCH):
                self._function(value)
        elif hasattr(value, "__dict__") and not isinstance(value, type):
            self.guards.append(type(value))
            if callable(value):
                self.walk(type(value).__call__)
            for name in vars(value):
                self._variable(value.__dict__, name)

    def _function(self, function: types.FunctionType) -> None:
        code, variables = function.__code__, function.__globals__
        self.guards.append(code)
        for name in ("__code__", "__defaults__", "__kwdefaults__"):
            self._variable(function, name)
        _, names = operations(code)
        for label, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._variable(cell, "cell_contents", label, names)
        for name in sorted(module_variables(code) & variables.keys()):
            self._variable(variables, name, name, names)

    def _object(self, value: Any, names: frozenset[str]) -> None:
        """Adds the attributes of an object of the user's that code with these names may read."""
        known = isinstance(value, (nn.Module, types.MethodType, functools.partial, Tensor))
        kind: Any = value if isinstance(value, type) else type(value)
        foreign = _package(kind) in _FOREIGN and kind is not types.FunctionType
        if known or foreign or (id(value), names) in self.seen:
            return
        self.seen.add((id(value), names))
        attributes: Any = getattr(value, "__dict__", {})
        if kind is value:
            self.owners[id(attributes)] = value
        else:
            self._object(kind, names)
        for name in sorted(names & attributes.keys()):
            self._variable(attributes, name, name, names)
        if kind is value:
            return
        for name in names - attributes.keys():
            if isinstance(getattr(kind, name, None), types.MemberDescriptorType):  # of __slots__
                self._variable(value, name, name, names)
            elif hasattr(kind, name):  # what the object may have of its own later
                self.watched.append((attributes, name, MISSING))

    def _note_changing(self, value: Any, label: str) -> None:
        """Notes a thing, or what is in it, that changes unseen when code reads it."""
        inside = value.values() if type(value) is dict else value
        parts = inside if type(value) in (dict, list, tuple) else ()
        if any(isinstance(part, _CHANGING) for part in (value, *parts)):
            self.changing = f"{label}, a {type(value).__name__}"

    def _module(self, module: nn.Module) -> None:
        if any(module is other for other in self.modules):
            return
        self.modules.append(module)
        self.guards += [type(module), *module._modules]
        held, tables = vars(module), [vars(module)[name] for name in _TABLES]
        self.watched += [(held, name, held[name]) for name in _TABLES if held[name]]
        self.watched += [(module._modules, *child) for child in module._modules.items()]
        self.sizes += [(table, len(table)) for table in (held, *tables)]
        for tensors in (module._parameters, module._buffers):
            for name in tensors:
                self._variable(tensors, name)
        names, read = ["forward"], set[str]()
        while names:  # methods that forward calls, with the variables that they read
            name = names.pop()
            kinds = [kind for kind in type(module).__mro__[:-1] if _package(kind) != "torch"]
            holders = [vars(kind) for kind in kinds]
            self.owners |= {id(of): kind for of, kind in zip(holders, kinds, strict=True)}
            place = next((k for k, holder in enumerate(holders) if name in holder), -1)
            known = name in read or place < 0
            read.add(name)
            if known:
                continue
            self.watched += [(of, name, value_of(of, name)) for of in holders[: place + 1]]
            method = holders[place][name]
            method = getattr(method, "fget", None) or getattr(method, "__func__", method)
            if isinstance(method, types.FunctionType):
                self.walk(method)
                names += operations(method.__code__)[1]
            else:
                self.guards.append((name, self._frozen(method)))
        for name, value in [*held.items()]:
            if name not in _ORDINARY:
                self._variable(held, name)
                self._object(value, frozenset(read))
                if name in read:
                    self._note_changing(value, name)

    def add(self, holder: Any, name: Any, label: str) -> None:
        """Adds a tensor in a dictionary or in the cell of a closure."""
        self.places.append((holder, name, label))

    def _variable(
        self, holder: Any, name: str, label: str = "", names: frozenset[str] | None = None
    ) -> None:
        """Adds a variable; if code with these names reads it, with what is in it."""
        value, label = value_of(holder, name), label or name
        if isinstance(value, Tensor):
            self.add(holder, name, label)
            return
        self.watched.append((holder, name, value))
        if names is not None:
            self._object(value, names)
            self._note_changing(value, label)
        if isinstance(value, _WALKED):
            self.walk(value)
        else:
            self.guards.append((label, self._frozen(value)))

    def _frozen(self, value: Any) -> Any:
        """The value, or what stands for it: its parts, or its identity."""
        kind = type(value)
        if kind in _PLAIN:
            return kind, value
        if kind in (list, dict, set):
            self.containers.append((value, value.copy()))
        if kind in (tuple, list, dict) and len(value) <= 16:
            return kind, tuple(map(self._frozen, value.items() if kind is dict else value))
        self.held.append(value)
        if kind not in (list, dict, set):
            return id(value)
        parts = [*value, *(value.values() if kind is dict else ())]
        self.held += parts
        known = [(type(v), v) if type(v) in _PLAIN else id(v) for v in parts]
        return kind, frozenset(known) if kind is set else tuple(known)

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
        for (holder, name, _), tensor in zip(self.places, tensors, strict=True):
            self.assign(holder, name, tensor)

    def assign(self, holder: Any, name: Any, value: Any) -> None:
        """Sets a variable; ``MISSING`` deletes it."""
        owner = self.owners.get(id(holder), holder)
        if isinstance(owner, dict):
            owner.pop(name, None) if value is MISSING else owner.update({name: value})
        else:
            delattr(owner, name) if value is MISSING else setattr(owner, name, value)

    def hooked(self) -> str | None:
        """Why hooks are in the way, if there are any."""
        for module in self.modules:
            if any(getattr(module, name) for name in _HOOKS):
                return (
                    f"{type(module).__name__} has hooks, which a fused step would not call. "
                    "Instead: remove them, or compute in the module what they compute."
                )
        if any(getattr(modules, f"_global{name}") for name in _HOOKS):
            return "torch has hooks for all modules, which a fused step would not call"
        return None


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]
