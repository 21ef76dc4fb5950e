"""The words of an error: about an argument, what was given, what was expected, and what to do;
about a name that a module lacks, the names near to it.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any, NoReturn, TypeVar

Constructor = TypeVar("Constructor", bound=Callable[..., None])
_ELSEWHERE = {"units": "hidden_size", "hidden_size": "units"}  # in Keras, and elsewhere


def refuse(
    name: str, given: str, expected: str, hint: str = "", error: type[Exception] = ValueError
) -> NoReturn:
    """Raises the error about an argument."""
    raise error(f"{name}: given {given}; expected {expected}. {hint}".rstrip())


def did_you_mean(name: str, names: Iterable[str], near: float = 0.6) -> str:
    """The hint that ``name`` is one of ``names`` misspelt, or "" if none is near."""
    lowered = {other.lower(): other for other in names}
    meant = _ELSEWHERE.get(name, "")
    close = difflib.get_close_matches(name.lower(), lowered, 1, near)
    close = [meant] if meant in lowered else close
    return f"Did you mean {lowered[close[0]]}?" if close else ""


def explained(initialise: Constructor) -> Constructor:
    """A constructor whose errors about names of arguments say what the class takes, and what is
    near. Python's name the class that it inherits the constructor from.
    """

    @functools.wraps(initialise)
    def __init__(self: Any, *values: Any, **named: Any) -> None:
        try:
            return initialise(self, *values, **named)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise  # from within
            problem = error
        kind: Any = type(self)
        parameters = [*inspect.signature(initialise).parameters.values()][1:]
        count = len(values)
        if "__signature__" in vars(kind):  # the layer of a cell, which passes the cell first
            parameters, count = [*kind.__signature__.parameters.values()], count - 1
        _refuse_names(kind.__name__, parameters, count, named)
        raise problem

    return __init__  # type: ignore[return-value]


def _refuse_names(
    kind: str, parameters: list[inspect.Parameter], count: int, named: dict[str, Any]
) -> None:
    """Refuses what a call names that is no parameter, or else what it lacks."""
    names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
    takes = f"{kind} takes {', '.join(names)}"
    unknown = [name for name in named if name not in names]
    for name in unknown if len(names) == len(parameters) else ():
        hint = did_you_mean(name, names) or "Leave it out."
        value = named[name]
        plain = isinstance(value, (int, float, str, type(None)))
        given = repr(value) if plain else type(value).__name__
        refuse(name, given, f"no such argument; {takes}", hint, TypeError)
    for parameter in parameters[count:]:
        needed = parameter.default is parameter.empty and parameter.name in names
        if needed and parameter.name not in named:
            hint = f"Pass {parameter.name}."
            refuse(parameter.name, "nothing", f"a value; {takes}", hint, TypeError)


def missing(module: str, names: Collection[str]) -> Callable[[str], NoReturn]:
    """Returns a ``__getattr__`` for a module, whose error says which of its names are close."""

    def unknown(name: str) -> NoReturn:
        problem = f"module {module!r} has no attribute {name!r}"
        raise AttributeError(problem + close_to(name, names), name=name)

    return unknown


def close_to(name: str, names: Collection[str]) -> str:
    """The end of an error about ``name``: those of ``names`` that are close to it, if any are."""
    # Names that start with "_" are asked for by Python's own machinery.
    close = [] if name.startswith("_") else difflib.get_close_matches(name, names, cutoff=0.7)
    return f". Close to it: {', '.join(close)}." if close else ""
