"""``recurrence``, one direction of one layer: documented and checked here for every frontend.

Its arguments, besides the arrays and options of every call, and its results:

    cell: a cell of G gates. Its hidden size H, and its other sizes, follow from the arrays.
    x: ``[T, B, I]``. If ``weights`` have no ``weight_ih``, x must be projected already, like
        ``gates``.
    weights: what the layer learns, by public names (``cell.learned``). W is the sum of the gates'
        sizes, G*H where each has H units: ``weight_ih`` ``[W, I]`` and ``weight_hh`` ``[W, size of
        the first state]``, with rows in the cell's order of gates, in ``weight_hh`` of those of
        size H only; optionally ``bias_ih`` and ``bias_hh`` with the same rows; ``weight_<name>``
        and ``bias_<name>`` of each further matmul, ``[out, in]`` or ``[heads, out/heads,
        in/heads]``; each parameter of the cell, ``[size]``. A value of None means that the weight
        is absent.
    state: ``[B, size]`` per state, or the array itself for one state; None, for all states or one
        of them, is the declared value. ``reset_state`` may also be ``[size]``.
    params: the cell's parameters, if they are kept apart from the weights.
    gates: ``[T, B, W]``, laid out as x, the input's projection onto the gates, side by side, in
        place of x: ``recurrence(cell, None, weights, gates=gates)``. ``bias_ih`` is still added, if
        given.
    output: ``[T, B, size of the first state]``, laid out as x.
    final: a tuple of the states ``[B, size]`` after each row's last step.
    states: with ``return_states``, a dictionary of ``[T, B, size]``, laid out as x, by names of
        states; at masked steps see ``masked_output``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from anycell.lang.cell import ONE, Cell
from anycell.layer.checks import (
    check_cell,
    check_options,
    choice,
    describe,
    dtype_of,
    per_state,
    refuse,
)
from anycell.layer.framework import Framework
from anycell.layer.layers import Stack
from anycell.layer.signature import shapes
from anycell.plan import ARRAYS, OPTIONS, REALS, Layer, Options


class Call(NamedTuple):
    """A call of ``recurrence``, checked.

    Attributes:
        layer: one direction, with the engine that the user asks for, and without a seed.
        x: the input, or the projected input, as the user passes it.
        learned: what the cell learns, by name.
        states: by the names of ``signature``, with an axis of one direction.
        seed: as the user passes it.
    """

    layer: Layer
    x: Any
    learned: dict[str, Any]
    states: dict[str, Any]
    seed: int | None

    def results(self, stack: Stack, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        """The results of ``recurrence``, which a stack of one layer runs."""
        output, final, *sequences = stack.call(self.x, None, arguments, self.states)
        final = final if len(self.layer.cell.states) > 1 else (final,)
        return (output, tuple([state[0] for state in final]), *sequences)


def check_call(
    framework: type[Framework],
    function: Callable[..., Any],
    cell: Cell,
    x: Any,
    weights: Any,
    state: Any,
    params: Any,
    arguments: Any,
    *,
    convert: Callable[[Any], Any] | None = None,
    unpack: Callable[[str, Any], tuple[Any, int | None]] | None = None,
    engines: tuple[str, ...] = ("cpu", "reference"),
) -> Call:
    """Checks what distinguishes a call of ``recurrence`` from one of a layer; ``Stack`` checks the
    rest. Takes the ``reset_state`` out of the arguments.

    Args:
        function: ``recurrence`` of the frontend; errors list its arguments.
        cell, x, weights, state, params, arguments: as users pass them.
        convert: makes arrays of what stands for arrays, in tuples and dictionaries.
        unpack: from the name of the input, and the input, its array, and of a packed one the rows.
        engines: that users may ask for.
    """
    check_cell(cell)
    if convert is not None:
        x, weights, state, params = convert((x, weights, state, params))
        arguments |= convert({n: a for n, a in arguments.items() if n in ("gates", *REALS)})
    learned = learned_by_name(framework, cell, cell.learned, weights, params)
    name, series = _input(x, arguments.get("gates"), learned)
    data, rows = unpack(name, series) if unpack else (series, None)
    check_input(framework, cell, name, data, "weight_ih" not in learned, rows is not None)
    like = learned.get("weight_hh", [*learned.values(), data][0])
    rows = data.shape[1] if rows is None else rows
    states, sizes = fit_arrays(framework, cell, data, learned, rows, like, state, arguments)
    framework.check_array(name, data, data.shape, "as the weights", like)
    options, seed = check_rest(function, arguments, engines)
    layer = Layer(cell, tuple(sizes.items()), options, engine=arguments.get("engine"))
    return Call(layer, series, learned, states, seed)


def check_rest(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    engines: tuple[str, ...] = ("cpu", "reference"),
    without: tuple[str, ...] = (),
) -> tuple[Options, int | None]:
    """The options of one direction, without a seed, and the seed that the user passes.

    Args:
        function: ``recurrence`` of the frontend; errors list its arguments.
        arguments: of a call, by name.
        engines: that users may ask for.
        without: arguments that the frontend does not have.
    """
    choice("engine", arguments.get("engine"), None, *engines)
    others = {"gates", "engine", *ARRAYS}.difference(without)
    checked = check_options(arguments, OPTIONS.keys() - {*without}, function, others)
    seed = checked.pop("seed", None)
    checked["reverse"] = (checked.get("reverse", False),)
    return Options(**checked), seed


def learned_by_name(
    framework: type[Framework], cell: Cell, names: Sequence[str], weights: Any, params: Any
) -> dict[str, Any]:
    """Collects the arrays that a cell learns from dictionaries by ``names``; leaves out None."""
    learned: dict[str, Any] = {}
    known = ", ".join(names) or "no names"
    for argument, mapping in (("weights", weights), ("params", {} if params is None else params)):
        if not isinstance(mapping, Mapping):
            hint = "Pass a dictionary."
            expected = f"a dictionary of arrays by name: {known}"
            refuse(argument, describe(mapping), expected, hint, TypeError)
        for name, value in mapping.items():
            if name not in names or (name in learned and value is not None):
                problem = "twice" if name in names else "unknown"
                expected = f"each name of cell {cell.name} once: {known}"
                refuse(argument, f"{name!r}, {problem}", expected, "Leave it out.")
            if value is not None:
                if not isinstance(value, framework.kind):
                    expected = f"a {framework.kind.__name__}"
                    refuse(name, describe(value), expected, "Convert it.", TypeError)
                learned[name] = value
    return learned


def _input(x: Any, gates: Any, named: Mapping[str, Any]) -> tuple[str, Any]:
    """The name of the input, "gates" if it is projected already, and the input itself."""
    if (x is None) is (gates is None):
        given = "neither" if x is None else "both"
        hint = "Pass x, or None and gates=... if the input is projected already."
        refuse("x, gates", given, "one of them", hint, TypeError)
    if gates is not None and "weight_ih" in named:
        expected = "no weight_ih, because gates are already projected"
        refuse("weights", "weight_ih with gates", expected, "Pass x, or leave weight_ih out.")
    return ("x", x) if gates is None else ("gates", gates)


def check_input(
    framework: type[Framework], cell: Cell, name: str, x: Any, projected: bool, packed: bool = False
) -> None:
    """Refuses an x that is not ``[time, batch, input size]``, or ``[..., gates]`` if projected."""
    width = cell.shown_width
    last = width if projected else "input size"
    expected = f"[steps of all rows, {last}]" if packed else f"[time, batch, {last}]"
    hint = "RNN(cell, ...) takes other layouts."
    if projected:
        passed = ", or pass weight_ih" if name == "x" else ""
        hint = f"Project the input onto the gates {' '.join(cell.gates)}{passed}."
    if not isinstance(x, framework.kind):
        refuse(name, describe(x), f"{expected}, a {framework.kind.__name__}", hint, TypeError)
    count = x.shape[-1] if len(x.shape) == 3 - packed else 0
    if (count == 0 and cell.gates) or (projected and _unfit(cell, count)):
        refuse(name, describe(x), expected, hint)


def _unfit(cell: Cell, width: int) -> bool:
    """Whether no size of its gates could make the projected input of a cell so wide."""
    alike = set(cell.gate_sizes.values())
    return bool(width % len(cell.gates)) if len(alike) == 1 else width < len(cell.gates)


def fit_arrays(
    framework: type[Framework],
    cell: Cell,
    x: Any,
    learned: Mapping[str, Any],
    rows: int,
    like: Any,
    state: Any,
    arguments: Any,
) -> tuple[dict[str, Any], dict[str, int]]:
    """The states of a call, and the sizes of all symbols of its cell.

    Args:
        x: as ``check_input`` takes it.
        learned: as ``learned_by_name`` returns it.
        rows: the batch.
        like: an array with the dtype and the device that all arrays must have.
        state: as users pass it.
        arguments: of the call by name, as users pass them; ``reset_state`` is taken out.

    Returns:
        the states, and those that resets restore, by the names of ``signature``, with an axis of
        one direction; and the sizes.
    """
    states = {
        kind: _states(framework, kind, given, cell)
        for kind, given in (("state", state), ("reset_state", arguments.pop("reset_state", None)))
    }
    sizes = _sizes(cell, x, learned, arguments.get("static"), states["state"])
    for name, shape in shapes(cell, sizes, x.shape[-1], True).items():
        what = f"which cell {cell.name} learns with H = {sizes['H']}"
        if name in learned:
            framework.check_array(name, learned[name], shape, what, like)
        elif name not in ("weight_ih", "bias_ih", "bias_hh"):
            expected = f"{dtype_of(like)} {list(shape)}, {what}"
            refuse(name, "nothing", expected, "Pass it among the weights.")
    arrays: dict[str, Any] = {}
    for kind, values in states.items():
        for declared, value in zip(cell.states, values, strict=True):
            if value is not None:
                size = sizes[declared.size]
                shape = (size,) if len(value.shape) == 1 else (rows, size)
                value = framework.check_array(
                    kind, value, shape, f"the state {declared.name!r}", like
                )
                arrays[f"{kind} {declared.name}"] = value[None]
    return arrays, sizes


def _states(framework: type[Framework], kind: str, states: Any, cell: Cell) -> tuple[Any, ...]:
    """An array or None for each state."""
    if states is None:
        return (None,) * len(cell.states)
    values = per_state(kind, states, cell)
    axes = (2,) if kind == "state" else (1, 2)
    for name, value in zip(cell.state_names, values, strict=True):
        array = isinstance(value, framework.kind)
        if value is not None and (not array or len(value.shape) not in axes):
            expected = f"[B, size] for the state {name!r}"
            refuse(kind, describe(value), expected, "Pass None for the declared value.", TypeError)
    return values


def _sizes(
    cell: Cell, x: Any, learned: Mapping[str, Any], static: Any, states: Sequence[Any]
) -> dict[str, int]:
    """Sizes of all symbols, from the shapes of the arrays."""
    weight = learned.get("weight_ih")
    for l in cell.linears:
        axes, layout = (2, "[out, in]") if l.heads == 1 else (3, "[heads, out/heads, in/heads]")
        array = learned.get(l.weight)
        if array is None or len(array.shape) != axes:
            given = "nothing" if array is None else describe(array)
            refuse(l.weight, given, f"{layout}, as {l} multiplies", "Pass it among the weights.")
    expected = f"[{cell.shown_width}, input size], with rows for the gates {' '.join(cell.gates)}"
    if weight is not None and (
        len(weight.shape) != 2 or not weight.shape[0] or _unfit(cell, weight.shape[0])
    ):
        refuse("weight_ih", describe(weight), expected, "Pass a weight with these rows.")
    rows = x.shape[-1] if weight is None else weight.shape[0]
    sizes = sizes_of(cell, rows, {**learned, "static": static}, states)
    if rows != cell.width(sizes):
        known = ", ".join(f"{symbol} = {size}" for symbol, size in sizes.items() if symbol != ONE)
        name, array = ("gates", x) if weight is None else ("weight_ih", weight)
        wide = f"[time, batch, {cell.shown_width}]" if weight is None else expected
        refuse(name, describe(array), f"{wide}, with {known}", "Pass an array of that width.")
    return sizes


def sizes_of(
    cell: Cell, width: int, arrays: Mapping[str, Any], state: Sequence[Any] | None
) -> dict[str, int]:
    """Finds the size symbols of a cell from the shapes of its arrays.

    Args:
        width: of the projected input.
        arrays: weights, parameters and the static input, by name.

    Raises:
        ValueError: if a size is unknown, or heads or groups of the cell do not divide one.
    """
    size = {ONE: 1} if cell.broadcasts else {}
    alike = set(cell.gate_sizes.values())
    if len(alike) == 1:  # all gates have this size
        size |= dict.fromkeys(alike - {ONE}, width // len(cell.gates))
    known = zip(cell.states, state, strict=True) if state else ()
    for declared, value in known:
        if value is not None:
            size.setdefault(declared.size, value.shape[-1])
    for l in cell.linears:
        *_, outer, inner = arrays[l.weight].shape
        size.setdefault(l.in_size, inner * l.heads)
        size.setdefault(l.out_size, outer * l.heads // len(l.declared))
    vectors = {param.name: param.size for param in cell.params} | {"static": cell.static_size}
    for name, symbol in vectors.items():
        if getattr(arrays.get(name), "shape", ()):
            size.setdefault(symbol, arrays[name].shape[-1])
    rest = Counter(symbol for symbol in cell.gate_sizes.values() if symbol not in size)
    if len(rest) == 1:  # what the other gates leave is for the gates of one size
        ((symbol, count),) = rest.items()
        others = sum(size.get(symbol, 0) for symbol in cell.gate_sizes.values())
        size[symbol] = max(width - others, 0) // count
    named = [("state", state.name, state.size) for state in cell.states]
    named += [("gate", *gate) for gate in cell.gate_sizes.items()]
    for kind, name, symbol in named:
        if symbol not in size:
            raise ValueError(
                f"cell {cell.name}: the size {symbol} of {kind} {name!r} is unknown. Pass an "
                "initial state."
            )
    size.setdefault("H", 1)  # nothing has this size
    cell.check_sizes(size)
    return size
