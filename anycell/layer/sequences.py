"""The states after every step, ``return_states=``: their names, and how a pass returns them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from anycell.lang.cell import Cell
from anycell.lang.namespaces import Array, namespace
from anycell.layer.arguments import Kept
from anycell.layer.checks import refuse
from anycell.plan import Layer, Plan


def check_return_states(cell: Cell, wanted: Any) -> tuple[str, ...]:
    """``return_states`` as names of states."""
    if wanted is None or isinstance(wanted, bool):
        return cell.state_names if wanted else ()
    names = (wanted,) if isinstance(wanted, str) else wanted
    if not isinstance(names, (tuple, list)) or not set(names) <= set(cell.state_names):
        has = f"names among the states of cell {cell.name}: {', '.join(cell.state_names)}"
        refuse("return_states", repr(wanted), has, "Pass True for all of them.")
    return tuple(names)


def besides_output(names: Sequence[str], cell: Cell) -> tuple[str, ...]:
    """The states that are not the output."""
    first = cell.state_names[:1]
    return tuple([name for name in dict.fromkeys(names) if name not in first])


def by_name(names: Sequence[str], cell: Cell, output: Any, others: Sequence[Any]) -> dict[str, Any]:
    """The sequences of these states, from the output and the sequences of the others."""
    by_state = dict(zip(besides_output(names, cell), others, strict=True))
    return {name: by_state.get(name, output) for name in names}


@functools.lru_cache(maxsize=512)
def keeping(plan: Plan, states: tuple[str, ...]) -> Plan:
    """The plan whose forward pass also keeps the sequences of these states."""
    kept = [name for name in plan.cell.state_names if name in (*plan.states, *states)]
    return plan if len(kept) == len(plan.states) else replace(plan, states=tuple(kept))


def sequences(layer: Layer, arrays: Mapping[str, Array], kept: Kept) -> list[Array]:
    """``layer.sequences``, ``[T, B, D * size]`` each, from what a forward pass of a plan of
    ``keeping`` has kept without checkpoints.
    """
    wholes, x, options = [], arrays["x"], layer.options
    xp, mask = namespace(x), arrays.get("mask") if options.apart(True) else None
    for name in layer.sequences:
        i, directions = layer.cell.state_names.index(name), []
        for states, reverse in zip(kept.states, options.reverse, strict=True):
            slots = states[i]
            assert slots is not None, name
            # The slot before the first step is the first one, in the reverse direction the last.
            directions.append(slots[:-1] if reverse else slots[1:])
        whole = directions[0] if len(directions) == 1 else xp.concatenate(directions, -1)
        whole = xp.array(whole, x)
        if mask is not None:
            whole = xp.where(mask[..., None], whole, xp.zeros_like(whole))
        wholes.append(whole)
    return wholes
