"""Checks of what users pass to a layer, worded once for every frontend.

Every error says what was given, what was expected, and what to do.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Container, Iterable, Mapping
from numbers import Integral, Real
from typing import Any

from anycell.lang.cell import ONE, Cell
from anycell.lang.declare import RESERVED
from anycell.plan import ARRAYS, OF_CALL, OPTIONS
from anycell.refusal import did_you_mean
from anycell.refusal import refuse as refuse

MOST = (1 << 31) - 1  # the largest size; frameworks report products of sizes that are too large


def remedy(value: Any, axes: int, otherwise: str) -> str:
    """The remedy for an input with a wrong number of axes, which may be several steps in place of
    one, or ids; ``otherwise`` is the remedy for anything else.
    """
    if axes <= 2 and len(value.shape) == 3:
        return "Take out one step: x[t], or x[:, t] if the batch comes first."
    if axes == 3 and len(value.shape) == 2 and "int" in str(value.dtype):
        return "If these are ids, embed them first; an embedding turns each id into a vector."
    return otherwise


def describe(value: Any) -> str:
    """A value as errors show it: an array by its dtype, shape and device."""
    if value is None:
        return "None"
    kind = type(value).__name__
    if isinstance(value, (tuple, list)) and any(map(is_array, value)):
        return f"{kind} ({', '.join(map(describe, value))})"
    if is_array(value):
        device = str(getattr(value, "device", "cpu"))
        where = "" if "cpu" in device.lower() or not device else f" on {device}"
        label = f"{kind} " if type(value).__module__ == "numpy" else ""
        return f"{label}{dtype_of(value)} {list(value.shape)}{where}"
    shown = " ".join(repr(value).split())
    return f"{kind} {shown if len(shown) < 60 else shown[:56] + ' ...'}"


def dtype_of(array: Any) -> str:
    """The dtype of an array of any framework, as errors show it."""
    of_tensorflow = hasattr(array.dtype, "as_datatype_enum")
    return str(array.dtype.name if of_tensorflow else array.dtype)


def is_array(value: Any) -> bool:
    """Whether a value is an array of any framework: not its shape alone, nor Flax's ``Rngs``, which
    have every attribute.
    """
    shape = getattr(value, "shape", None)
    indexed = hasattr(type(value), "__getitem__") and not isinstance(value, type)
    return indexed and hasattr(value, "dtype") and isinstance(shape, Iterable)


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
        given = repr(value) if isinstance(value, str) else describe(value)
        refuse(name, given, f"{', '.join(others)} or {last}", "Pass one of them.")
    return value


def seed(value: Any) -> int:
    """The value as the seed of random masks."""
    return integer("seed", value, 0, (1 << 64) - 1)


def check_checkpoint(value: Any) -> str | int | None:
    """The value, if it is a checkpoint of ``Options``."""
    word = isinstance(value, str) and value == "sqrt"
    number = isinstance(value, int) and not isinstance(value, bool) and value > 0
    if value is None or word or number:
        return value
    expected = "'sqrt', a positive number of steps, or None to keep all that a backward pass needs"
    refuse("checkpoint", repr(value), expected)


def check_one_direction(method: str, layer: Any) -> None:
    """Refuses ``method`` of a layer of both directions."""
    if layer.bidirectional:
        hint = "The reverse direction begins at the end: call the layer on whole sequences."
        refuse(method, "bidirectional=True", "a layer of one direction", hint)


# -- cells and their sizes -------------------------------------------------------------------------


def check_cell(cell: Any, more: str = "") -> None:
    """Refuses a value that is not a cell; ``more`` is a further hint."""
    if not isinstance(cell, Cell):
        hint = (
            "Pass one of anycell.cells, for instance anycell.cells.LSTM, or decorate a function of "
            f"one step with @anycell.cell.{more}"
        )
        refuse("cell", describe(cell), "a cell", hint, TypeError)


def declared_sizes(cell: Cell) -> list[str]:
    """The size symbols of a cell besides H."""
    of_matmuls = {size for l in cell.linears for size in (l.in_size, l.out_size)}
    return sorted((cell.declared_sizes | of_matmuls) - {"H", ONE})


def check_names(cell: Cell, sizes: Mapping[str, Any]) -> None:
    """Refuses keywords that are not sizes of the cell."""
    declared, of_cell = declared_sizes(cell), [*cell.hyper, *cell.structure]
    for name in sorted(sizes.keys() - declared):
        has = f"only the sizes {', '.join(declared)}" if declared else "no sizes"
        expected = f"no such argument: cell {cell.name} declares {has} besides H"
        hint = "Check the spelling."
        if name in of_cell:
            hint = f"The cell takes it: {cell.name}({name}={sizes[name]!r})."
        elif name in RESERVED:
            hint = "Leave it out: layers of other frameworks take it."
        elif meant := did_you_mean(name, [*declared, *of_cell, *sorted(RESERVED)], 0.8):
            expected, hint = "no such argument", meant
        refuse(name, repr(sizes[name]), expected, hint, TypeError)


def check_sizes(cell: Cell, hidden_size: Any, sizes: Mapping[str, Any]) -> dict[str, int]:
    """Returns the sizes of all symbols of a cell: H, and the sizes given by keyword.

    Raises:
        TypeError, ValueError: for sizes that are unknown, missing, not positive integers, or not
            divisible by the heads or groups of the cell.
    """
    if hidden_size is None and "units" in sizes:
        given, hint = repr(sizes["units"]), "Did you mean hidden_size?"
        refuse("units", given, "no such argument", hint, TypeError)
    check_names(cell, sizes)  # first, because a misspelt hidden_size is among ``sizes``
    hidden_size = integer("hidden_size", hidden_size)
    if not cell.gates:
        expected = "a cell with a gate, by which the input enters it"
        hint = "recurrence(cell, ...) runs it, on gates [T, B, 0]."
        refuse("cell", f"{cell.name}, which has no gates", expected, hint)
    for name in declared_sizes(cell):
        if name not in sizes:
            expected = f"the size {name} that cell {cell.name} declares besides H"
            refuse(name, "nothing", expected, f"Pass {name}=... besides the size H.", TypeError)
    known = {"H": hidden_size, **{name: integer(name, size) for name, size in sizes.items()}}
    known |= {ONE: 1} if cell.broadcasts else {}
    cell.check_sizes(known)
    return known


# -- arguments of a call --------------------------------------------------------------------------


def per_state(kind: str, states: Any, cell: Cell) -> tuple[Any, ...]:
    """``states`` as a tuple with a value for each state of the cell.

    Args:
        kind: what errors call the argument.
        states: a tuple or list; for a cell with one state also its value alone.
    """
    values = tuple(states) if isinstance(states, (tuple, list)) else (states,)
    if len(values) != len(cell.states):
        names = ", ".join(cell.state_names)
        alone = "" if len(cell.states) > 1 else f" or {names} alone"
        expected = f"a tuple ({names}){alone}, the state of cell {cell.name}"
        refuse(kind, describe(states), expected, "Pass one array for each state.", TypeError)
    return values


def check_options(
    arguments: Mapping[str, Any],
    names: Iterable[str] = OF_CALL,
    function: Callable[..., Any] | None = None,
    others: Container[str] = ARRAYS,
) -> dict[str, Any]:
    """Checks the options among the arguments of a call, and returns them for ``Options``.

    Args:
        arguments: of the call by name, as users pass them.
        names: the options that may be passed.
        function: the function that was called; an error lists its other arguments.
        others: the arguments that are not options.
    """
    options = [name for name in arguments if name not in others]
    return {name: _option(name, arguments[name], names, function) for name in options}


def _option(
    name: str, value: Any, names: Iterable[str], function: Callable[..., Any] | None
) -> Any:
    if name not in names:
        parameters = inspect.signature(function).parameters.values() if function else ()
        others = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name != "self"]
        known = list(dict.fromkeys([*others, *names]))
        meant = "state" if name in ("hx", "initial_state") else name
        hint = did_you_mean(meant, known) or "Leave it out."
        expected = f"no such argument; this call takes {', '.join(known)}"
        refuse(name, describe(value), expected, hint, TypeError)
    match OPTIONS[name].kind:
        case "bool":
            return boolean(name, value)
        case "seed":
            return value if value is None else seed(value)
        case "checkpoint":
            return check_checkpoint(value)
    return choice(name, value, *OPTIONS[name].codes or ())
