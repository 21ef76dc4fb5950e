"""Variables that decide what a step does: what was read of them is valid while they stay."""

from __future__ import annotations

import operator
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

MISSING = object()  # the value of a variable that has none
_PLAIN = int, float, str, bytes
CONTAINERS = dict, list, tuple, types.MappingProxyType


@dataclass(eq=False)
class Watched:
    """Variables and their values.

    A variable is a holder, which is a dictionary, a list, a tuple, or an object such as a function
    or the cell of a closure, and a key or an attribute there.

    Attributes:
        watched: the variables.
        containers: lists and dictionaries among their values, which may change in place, and
            copies.
    """

    watched: list[tuple[Any, Any, Any]] = field(default_factory=list, init=False)
    containers: list[tuple[Any, Any]] = field(default_factory=list, init=False)

    @property
    def changed(self) -> Iterator[tuple[Any, Any, Any]]:
        """The variables that are not what they were, with their old values."""
        for holder, name, value in self.watched:
            now = value_of(holder, name)
            if now is not value and not equal(now, value):
                yield holder, name, value

    @property
    def fresh(self) -> bool:
        """Whether all variables are what they were."""
        return next(self.changed, None) is None and all(
            alike(container, copy) for container, copy in self.containers
        )


def equal(a: Any, b: Any) -> bool:
    """Whether two values are one number or text, down to its type and its sign."""
    return type(a) is type(b) and type(a) in _PLAIN and repr(a) == repr(b)


def value_of(holder: Any, name: Any) -> Any:
    """The value of a variable, ``MISSING`` if it has none."""
    try:
        return holder[name] if isinstance(holder, CONTAINERS) else getattr(holder, name)
    except (LookupError, ValueError, AttributeError):
        return MISSING


def same(old: list[Any], new: list[Any]) -> bool:
    """Whether these are the same objects."""
    return len(old) == len(new) and all(map(operator.is_, old, new))


def alike(a: Any, b: Any) -> bool:
    """Whether two containers have the same things in them."""
    if type(a) is set:
        return bool(a == b)
    return same([*a], [*b]) and (not isinstance(a, dict) or same([*a.values()], [*b.values()]))
