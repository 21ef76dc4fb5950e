"""The words of an error: about an argument, what was given, what was expected, and what to do;
about a name that a module lacks, the names near to it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable
from typing import NoReturn


def refuse(
    name: str, given: str, expected: str, hint: str = "", error: type[Exception] = ValueError
) -> NoReturn:
    """Raises the error about an argument."""
    raise error(f"{name}: given {given}; expected {expected}. {hint}".rstrip())


def did_you_mean(name: str, names: Iterable[str], near: float = 0.6) -> str:
    """The hint that ``name`` is one of ``names`` misspelt, or "" if none is near."""
    lowered = {other.lower(): other for other in names}
    close = difflib.get_close_matches(name.lower(), lowered, 1, near)
    return f"Did you mean {lowered[close[0]]}?" if close else ""


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
