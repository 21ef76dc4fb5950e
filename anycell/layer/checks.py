"""Checks of what users pass to a layer, worded once for every frontend.

Every error says what was given, what was expected, and what to do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, NoReturn

from anycell.lang.cell import Cell

MOST = (1 << 31) - 1  # of a size: frameworks have their own words for products that are too large


def refuse(
    name: str, given: str, expected: str, hint: str, error: type[Exception] = ValueError
) -> NoReturn:
    """Raises the error about an argument."""
    raise error(f"{name}: given {given}; expected {expected}. {hint}")


def describe(value: Any) -> str:
    """A value as errors show it: an array by its dtype, shape and device."""
    kind = type(value).__name__
    if isinstance(value, (tuple, list)) and any(map(is_array, value)):
        return f"{kind} ({', '.join(map(describe, value))})"
    if is_array(value):
        device = str(getattr(value, "device", "cpu"))
        where = "" if device.startswith("cpu") else f" on {device}"
        what = f"{kind} " if type(value).__module__ == "numpy" else ""
        return f"{what}{value.dtype} {list(value.shape)}{where}"
    shown = repr(value)
    return f"{kind} {shown if len(shown) < 60 else shown[:56] + ' ...'}"


def is_array(value: Any) -> bool:
    """Whether a value is an array of any framework."""
    return hasattr(value, "dtype") and hasattr(value, "shape") and not isinstance(value, type)


# -- values ----------------------------------------------------------------------------------------


def integer(name: str, value: Any, low: int = 1, high: int = MOST) -> int:
    """The value as an int from ``low`` to ``high``; integers of NumPy are integers."""
    expected = f"an int from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, Integral):
        hint = f"Pass {name}." if value is None else f"Pass int({name})."
        refuse(name, describe(value), expected, hint, TypeError)
    if not low <= int(value) <= high:
        refuse(name, repr(value), expected, "Pass one in that range.")
    return int(value)


def boolean(name: str, value: Any) -> bool:
    """The value as a bool; 0 and 1 count, and the booleans of NumPy."""
    if value is True or value is False:
        return value
    of_numpy = str(getattr(value, "dtype", "")) == "bool" and value.shape == ()
    if not of_numpy and not (isinstance(value, Integral) and value in (0, 1)):
        refuse(name, describe(value), "True or False", "Pass one of them.", TypeError)
    return bool(value)


def number(
    name: str, value: Any, low: float = -math.inf, below: float = math.inf, closed: bool = False
) -> float:
    """The value as a float in ``[low, below)``, or ``[low, below]`` if ``closed``; never NaN."""
    real = isinstance(value, Real) and not isinstance(value, bool)
    try:
        number = float(value) if real else math.nan
    except OverflowError:
        number = math.inf
    if not (low <= number < below or (closed and number == below)):
        expected = f"a number in [{low:g}, {below:g}{']' if closed else ')'}"
        given = repr(value) if real else describe(value)
        refuse(name, given, expected, "Pass one in that range.")
    return number


def choice(name: str, value: Any, *expected: Any) -> Any:
    """The value, if it is one of the expected words."""
    if not isinstance(value, (str, type(None))) or value not in expected:
        *others, last = map(repr, expected)
        refuse(name, describe(value), f"{', '.join(others)} or {last}", "Pass one of them.")
    return value


def seed(value: Any) -> int:
    """The value as the seed of random masks."""
    return integer("seed", value, 0, (1 << 64) - 1)


# -- cells and their sizes -------------------------------------------------------------------------


def check_cell(cell: Any, more: str = "") -> None:
    """Refuses what is no cell; ``more`` is a further hint."""
    if not isinstance(cell, Cell):
        hint = (
            "Pass one of anycell.cells, for instance anycell.cells.LSTM, or decorate a function of "
            f"one step with @anycell.cell.{more}"
        )
        refuse("cell", describe(cell), "a cell", hint, TypeError)


def declared_sizes(cell: Cell) -> list[str]:
    """The size symbols of a cell besides H."""
    symbols = {state.size for state in cell.states}
    symbols |= {size for l in cell.linears for size in (l.in_size, l.out_size)}
    return sorted(symbols - {"H"})


def check_names(cell: Cell, sizes: Mapping[str, Any]) -> None:
    """Refuses keywords that are no sizes of the cell."""
    declared = declared_sizes(cell)
    for name in sorted(sizes.keys() - declared):
        has = ", ".join(declared) or "none"
        expected = f"no such argument: the sizes that cell {cell.name} declares besides H are {has}"
        refuse(name, repr(sizes[name]), expected, "Check the spelling.", TypeError)


def check_sizes(cell: Cell, hidden_size: int, sizes: Mapping[str, Any]) -> dict[str, int]:
    """What all size symbols of a cell stand for: H, and those that were given by keyword.

    Raises:
        TypeError, ValueError: for sizes that are unknown, missing or no positive integers, and
            for those that heads or groups of the cell do not divide.
    """
    check_names(cell, sizes)
    for name in declared_sizes(cell):
        if name not in sizes:
            expected = f"the size {name} that cell {cell.name} declares besides H"
            refuse(name, "nothing", expected, f"Pass {name}=... beside the size H.", TypeError)
    known = {"H": hidden_size, **{name: integer(name, size) for name, size in sizes.items()}}
    cell.check_sizes(known)
    return known
