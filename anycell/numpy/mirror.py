"""A copy of a step and of all that it reads, which says what decides what the step does.

A step in Python may read anything, so what it depends on is found by letting it read nothing else:
a copy of it runs, with copies of its variables in place of its own, each made and noted when it is
read, and with stand-ins for arrays. A thing that cannot be copied ends the attempt.
"""

from __future__ import annotations

import abc
import builtins
import functools
import itertools
import math
import operator
import types
from collections.abc import Callable
from typing import Any, Generic, NoReturn

import numpy as np

from anycell.numpy.read import TABLE
from anycell.read.places import operations
from anycell.read.watched import MISSING, Watched, same, value_of

_PLAIN = int, float, complex, bool, str, bytes, type(None), type(...), range
_MODULES = math, operator, itertools
_BUILTINS = (
    "abs all any bool bytes callable complex dict divmod enumerate filter float frozenset getattr "
    "hasattr int isinstance issubclass iter len list map max min next object pow range reversed "
    "round set slice sorted str sum super tuple type zip"
)
_NUMPY = (
    "arange array asarray ascontiguousarray dtype empty errstate eye finfo full full_like identity "
    "iinfo linspace ndarray ndim ones ones_like shape size zeros zeros_like"
)
# Functions and classes whose results follow from their arguments alone.
_PURE = [
    *map(builtins.__dict__.get, _BUILTINS.split()), *map(np.__dict__.get, _NUMPY.split()),
    *(v for m in _MODULES for n, v in vars(m).items() if callable(v) and n[0] != "_"),
    *TABLE, functools.reduce,
    *(v for v in vars(np).values() if isinstance(v, np.ufunc)),
    # Those that a stand-in of an array overrides.
    *(
        v for module in (np, np.linalg) for name, v in vars(module).items()
        if hasattr(v, "_implementation") and not name.startswith("save")
    ),
    *(v for v in vars(np).values() if isinstance(v, type) and issubclass(v, np.generic)),
    *(v for v in vars(builtins).values() if isinstance(v, type) and issubclass(v, Exception)),
]  # fmt: skip
PURE = set(map(id, _PURE))
_EFFECTS = {"STORE_GLOBAL", "DELETE_GLOBAL", "IMPORT_NAME", "LOAD_BUILD_CLASS", "LOAD_NAME"}
# Ways around the copies.
_HIDDEN = {
    "__globals__", "__closure__", "__builtins__", "__subclasses__", "__dict__", "__code__",
    "__reduce__", "__reduce_ex__", "__setattr__", "__delattr__", "__self__", "__func__",
    "gi_frame", "tb_frame", "f_back",
}  # fmt: skip
_METACLASSES = type, abc.ABCMeta
_ROOTS = object, abc.ABC, Generic  # classes that have nothing for a step
# What classes have that are not simply Python's; the last is of functions of Cython.
_SLOTS = ("__getattribute__", "__setattr__", "__delattr__", "__slots__", "__qualname__")
_MOST = 256  # things in a list, and numbers in an array that are compared
_SKIPPED = {"__dict__", "__weakref__", "__init_subclass__", "__del__", "__set_name__"}


class Unknown(Exception):
    """Something that cannot be copied."""


class Mirror(Watched):
    """A copy of a step, and what it has read.

    Args:
        holder, name: the variable that is the step.
        stand_in: makes what the copy has in place of an array.

    Attributes:
        why: what the copy would have read that cannot be copied; None if there was nothing.
    """

    def __init__(self, holder: Any, name: str, stand_in: Callable[[np.ndarray], Any]) -> None:
        super().__init__()
        self._stand_in = stand_in
        # The variables that are arrays, what these are like, and their number among all arrays.
        self._arrays: list[tuple[Any, Any, Any, int]] = []
        self._contents: list[tuple[Any, Any, Any, bytes]] = []
        self._keys: list[tuple[Any, list[Any]]] = []
        self.why: str | None = None
        self._numbers: dict[int, int] = {}  # of arrays, by id
        self._copies: dict[int, Any] = {}  # by the ids of what they are copies of
        self._objects: dict[int, Any] = {}  # what copies of objects are copies of, by their ids
        self._made: list[tuple[Any, Any]] = []  # copies of lists and such, and what is in them
        self._held: list[Any] = []
        self._cells: list[tuple[str, Any, Any]] = []
        self._depth = 0
        mirror = self

        class Copied:
            def __getattribute__(self, name: str) -> Any:
                mirror._attribute(self, name)
                return object.__getattribute__(self, name)

            def __setattr__(self, name: str, value: Any) -> None:
                if id(self) in mirror._objects:
                    mirror.unknown(f"assigns to {name}")
                object.__setattr__(self, name, value)

            def __delattr__(self, name: str) -> None:
                mirror.unknown(f"deletes {name}")

        self._base = Copied
        self._place = holder, name

    def begin(self) -> Any:
        """The copy of the step.

        Raises:
            Unknown: if it cannot be copied.
        """
        try:
            return self.of(*self._place)
        except Exception as error:
            self.unknown(f"is {error}")

    # -- later calls -----------------------------------------------------------------------------
    @property
    def arrays(self) -> list[np.ndarray] | None:
        """The arrays of a call, if the step does what its copy did; None if it may do otherwise."""
        if not self.fresh:
            return None
        arrays: list[np.ndarray] = []
        for holder, name, layout, number in self._arrays:
            array = value_of(holder, name)
            if number == len(arrays):
                if type(array) is not np.ndarray or (array.shape, array.dtype) != layout:
                    return None
                arrays.append(array)
            elif array is not arrays[number]:
                return None
        return arrays if len(set(map(id, arrays))) == len(arrays) else None

    @property
    def fresh(self) -> bool:
        """Whether all variables but the arrays are what they were."""
        for container, keys in self._keys:
            if not same(_names(container), keys):
                return False
        for holder, name, layout, numbers in self._contents:
            array = value_of(holder, name)
            if type(array) is not np.ndarray or (array.shape, array.dtype) != layout:
                return False
            if array.tobytes() != numbers:
                return False
        return super().fresh

    def finish(self) -> None:
        """Ends the reading: the step has returned.

        Raises:
            Unknown: if it has changed what is around it, or read what cannot be copied.
        """
        for copy, inside in self._made:
            if not same(_inside(copy), inside):
                self.unknown("changes what is around it")
        if self.why is not None:
            raise Unknown(self.why)
        self.watched, self._arrays = _once(self.watched), _once(self._arrays)
        for table in (self._copies, self._objects, self._numbers, self._made, self._held):
            table.clear()

    # -- copies ----------------------------------------------------------------------------------
    def unknown(self, what: str) -> NoReturn:
        self.why = self.why or what
        raise Unknown(what)

    def of(self, holder: Any, name: Any) -> Any:
        """The copy of a variable's value, which decides what the step does."""
        value = value_of(holder, name)
        if type(value) is np.ndarray and value.dtype.kind in "biufc":
            return self._array(value, holder, name)
        self.watched.append((holder, name, value))
        return self._copy(value)

    def read(self, holder: Any, name: Any, shown: str | None = None) -> Any:
        """The copy for a step that reads it now: one that cannot be made ends the attempt."""
        try:
            return self.of(holder, name)
        except Exception as error:  # also one that its class raises
            self.unknown(f"reads {shown or name} ({error})")

    def _array(self, array: np.ndarray, holder: Any, name: Any) -> Any:
        layout = array.shape, array.dtype
        if array.ndim == 0 or (array.dtype.kind in "biu" and array.size <= _MOST):
            self._contents.append((holder, name, layout, array.tobytes()))
            copy = array.copy()
            copy.flags.writeable = False
            return copy
        number = self._numbers.setdefault(id(array), len(self._numbers))
        self._arrays.append((holder, name, layout, number))
        if id(array) not in self._copies:
            self._keep(array, self._stand_in(array))
        return self._copies[id(array)]

    def _keep(self, value: Any, copy: Any) -> Any:
        self._held.append(value)
        self._copies[id(value)] = copy
        return copy

    def _copy(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN or id(value) in PURE:
            return value
        if id(value) in self._copies:
            return self._copies[id(value)]
        self._depth += 1
        try:
            copy = self._made_of(value, kind)
        finally:
            self._depth -= 1
        while self._cells and not self._depth:
            name, old, new = self._cells.pop()
            new.cell_contents = self.read(old, "cell_contents", name)
            self._made.append((new, _inside(new)))
        return copy

    def _made_of(self, value: Any, kind: Any) -> Any:
        if kind in (tuple, list, dict, set) and len(value) > _MOST:
            raise Unknown(f"a {kind.__name__} of {len(value)}")
        if kind is tuple:
            return self._keep(value, tuple([self.of(value, k) for k in range(len(value))]))
        if kind is list:
            copy: Any = self._keep(value, [])
            copy += [self.of(value, k) for k in range(len(value))]
        elif kind is set and all(type(part) in _PLAIN for part in value):
            copy = self._keep(value, value.copy())
        elif kind is dict and all(type(key) in _PLAIN for key in value):
            copy = self._keep(value, {})
            copy.update([(key, self.of(value, key)) for key in value])
        elif kind is types.FunctionType:
            return self._function(value)
        elif kind is types.MethodType:
            parts = self._copy(value.__func__), self._copy(value.__self__)
            return self._keep(value, types.MethodType(*parts))
        elif kind is functools.partial:
            args, keywords = self._copy(value.args), self._copy(value.keywords)
            return self._keep(value, functools.partial(self._copy(value.func), *args, **keywords))
        elif kind in (staticmethod, classmethod):
            return kind(self._copy(value.__func__))
        elif kind is property:
            return property(self._copy(value.fget))
        elif kind is types.ModuleType:
            return self._keep(value, _Module(self, vars(value)))
        elif kind in _METACLASSES:
            return self._class(value)
        elif isinstance(value, (np.number, np.bool_)) or (
            isinstance(value, np.dtype) and value.fields is None
        ):
            return value
        elif type(kind) in _METACLASSES and type(getattr(value, "__dict__", None)) is dict:
            return self._object(value, kind)
        else:
            raise Unknown(f"a {kind.__name__}")
        self._keys.append((value, _names(value)))
        self._made.append((copy, _inside(copy)))
        return copy

    def _function(self, function: Any) -> Any:
        effects, asked = operations(function.__code__)
        for name in sorted(asked & _HIDDEN):
            raise Unknown(f"a function that uses {name}")
        if effects & _EFFECTS:
            raise Unknown("a function that imports, or assigns to a global variable")
        cells = tuple([types.CellType() for _ in function.__code__.co_freevars])
        space = self._copies.get(id(function.__globals__))
        if space is None:
            space = _Variables(self, function.__globals__, function.__builtins__)
            self._keep(function.__globals__, space)
        code, name = function.__code__, function.__name__
        copy: Any = self._keep(function, types.FunctionType(code, space, name, None, cells))
        self._cells += zip(code.co_freevars, function.__closure__ or (), cells, strict=True)
        self.watched.append((function, "__code__", code))
        for name in ("__defaults__", "__kwdefaults__"):
            setattr(copy, name, self.of(function, name))
        copy.__dict__.update(self.of(function, "__dict__"))
        self._made.append((copy.__dict__, _inside(copy.__dict__)))
        return copy

    def _class(self, kind: Any) -> Any:
        attributes = vars(kind)
        if issubclass(kind, tuple) and hasattr(kind, "_fields"):
            self._keys.append((attributes, [*attributes]))
            self.watched += [(attributes, name, value) for name, value in attributes.items()]
            return self._keep(kind, kind)
        of_python = any(id(base) in PURE for base in kind.__mro__[:-1])
        if of_python or not attributes.keys().isdisjoint(_SLOTS):
            raise Unknown(f"a {kind.__name__}")
        self.watched.append((kind, "__mro__", kind.__mro__))
        self._keys.append((attributes, [*attributes]))
        roots = [base for base in kind.__bases__ if base not in _ROOTS]
        bases = [self._copy(base) for base in roots] or [self._base]
        space: dict[str, Any] = {}
        for name in attributes.keys() - _SKIPPED:
            try:
                space[name] = self.of(attributes, name)
            except Unknown as error:
                space[name] = _Poison(self, f"reads {name} ({error})")
        copy = self._keep(kind, type(kind.__name__, tuple(bases), space))
        self._made.append((vars(copy), _inside(vars(copy))))
        return copy

    def _object(self, value: Any, kind: type) -> Any:
        if id(kind) in PURE:
            raise Unknown(f"a {kind.__name__}")
        copy = object.__new__(self._copy(kind))
        self.watched += [(value, "__class__", kind), (value, "__dict__", vars(value))]
        self._objects[id(copy)] = value
        return self._keep(value, copy)

    def _attribute(self, copy: Any, name: str) -> None:
        """Makes an attribute that an object's copy is asked for."""
        value = self._objects.get(id(copy), MISSING)
        if value is MISSING:
            return
        if name == "__dict__":
            self.unknown(f"reads {name}")
        copied, attributes = object.__getattribute__(copy, "__dict__"), vars(value)
        if name in attributes and name not in copied:
            copied[name] = MISSING
            copied[name] = self.read(attributes, name)
        elif name not in attributes:
            self.watched.append((attributes, name, MISSING))


class _Variables(dict[str, Any]):
    """The copies of variables, made as functions read them, each of the first dictionary that has
    it.
    """

    def __init__(self, mirror: Mirror, *holders: dict[str, Any]) -> None:
        super().__init__(__builtins__={})
        self._mirror, self._holders = mirror, holders

    def __missing__(self, name: str) -> Any:
        for holder in self._holders:
            if name in holder:
                self[name] = self._mirror.read(holder, name)
                return self[name]
            self._mirror.watched.append((holder, name, MISSING))
        self._mirror.unknown(f"reads {name}")


class _Module:
    """The copy of a module."""

    def __init__(self, mirror: Mirror, variables: dict[str, Any]) -> None:
        vars(self).update(_mirror=mirror, _variables=_Variables(mirror, variables))

    def __setattr__(self, name: str, value: Any) -> None:
        self._mirror.unknown(f"assigns to {name}")

    def __getattr__(self, name: str) -> Any:
        return self._variables[name]


class _Poison:
    """A thing that cannot be copied, until it is read."""

    def __init__(self, mirror: Mirror, why: str) -> None:
        self._mirror, self._why = mirror, why

    def __get__(self, *_: Any) -> Any:
        self._mirror.unknown(self._why)


def _once(variables: list[Any]) -> list[Any]:
    """Each variable once, however often it was read."""
    return list(
        {(id(holder), name): (holder, name, *of) for holder, name, *of in variables}.values()
    )


def _names(container: Any) -> list[Any]:
    return [*(range(len(container)) if type(container) is list else container)]


def _inside(copy: Any) -> list[Any]:
    if isinstance(copy, types.CellType):
        return [copy.cell_contents]
    return [*copy] if isinstance(copy, (list, set)) else [*copy, *copy.values()]


__all__ = ["Mirror", "Unknown"]
