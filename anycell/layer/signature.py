"""The signature of a layer: the names and shapes of its arrays.

One vocabulary serves every frontend. The arrays of a call go in one dict, by these names:

    x                            [T, B, I]; or, of one direction, projected gates [T, B, G*H] and no
                                 weight_ih
    mask, resets                 [T, B]
    static                       [B, size]
    recurrent_mask               [B, size], or [G, B, size] for one per gate
    state <name>                 [D, B, size], before the first step
    reset_state <name>           [D, B, size] or [D, size], what resets restore
    weight_ih, weight_hh         [G*H, I], [G*H, size of the first state]
    weight_<name>                of a further matmul, see ``Linear.shape``
    bias_ih, bias_hh, bias_<name>, and each parameter of the cell by its own name
    scales weight_<name>         of an integer weight: one for each of its outputs

For a cell whose gates have sizes of their own, the input's G*H is the sum of these sizes; weight_hh
and bias_hh have rows for the gates of size H.

Names of what the second direction learns end in ``_reverse``. A gradient has the name of its array.
Within a pass each direction has a dict of its own, a ``Direction``.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from anycell.lang.cell import RECURRENT, Cell
from anycell.lang.transform import with_recurrent_mask
from anycell.plan import Plan, scales_of

Shape = tuple[int, ...]
ENDS = ("", "_reverse")  # of the names of what each direction learns

OF_STATES = "state ", "reset_state "  # how the names begin that have an axis of directions
FLAGS = "mask", "resets"  # of any dtype that flags may have

# Layouts that the contract asks for: any strides, a dense last axis, dense rows or columns, or
# contiguous as a whole.
ANY, ROWS, MATRIX, DENSE = range(4)


class Learned(NamedTuple):
    """An array that a direction learns; ``optional`` if a layer may lack it, ``integers`` if it has
    the integer dtype that matmuls multiply, which other arrays do not have.
    """

    name: str
    shape: Shape
    layout: int
    optional: bool
    integers: bool = False


def shapes(cell: Cell, sizes: dict[str, int], width: int, bias: bool) -> dict[str, Shape]:
    """Name and shape of what one direction of one layer learns, in the order of creation.

    Args:
        sizes: what the size symbols of the cell stand for.
        width: the last axis of x.
        bias: whether the projections of x and of the first state have biases.

    Raises:
        ValueError: for sizes that heads or groups of the cell do not divide.
    """
    cell.check_sizes(sizes)
    gates, recurrent = cell.width(sizes), cell.by_weight.get(f"weight_{RECURRENT}")
    named: dict[str, Shape] = {"weight_ih": (gates, width)}
    if recurrent:
        named["weight_hh"] = recurrent.shape(sizes)
    if bias:
        named["bias_ih"] = (gates,)
        if recurrent:
            named["bias_hh"] = named["weight_hh"][:1]
    for l in cell.linears:
        if not l.recurrent:
            named[l.weight] = l.shape(sizes)
            if l.bias:
                named[l.bias_name] = (len(l.declared) * sizes[l.out_size],)
    return named | {param.name: (sizes[param.size],) for param in cell.params}


def parameters(
    cell: Cell, sizes: dict[str, int], width: int, bias: bool, layers: int, directions: int
) -> Iterator[tuple[str, Shape]]:
    """Name and shape of what all layers learn, in the order of creation: names of ``shapes``,
    followed by ``_l{k}`` for layer k, and by ``_reverse`` for the second direction.
    """
    for k in range(layers):
        for end in ENDS[:directions]:
            for name, shape in shapes(cell, sizes, width, bias).items():
                yield f"{name}_l{k}{end}", shape
        width = directions * sizes[cell.states[0].size]


_place_names: dict[tuple[tuple[str, ...], int, int], dict[str, str]] = {}


def places(learned: tuple[str, ...], k: int, directions: int) -> dict[str, str]:
    """The names of a layer's parameters by the names of this file; ``learned`` is the cell's."""
    # Not with functools.lru_cache: torch.compile warns of it.
    key = learned, k, directions
    if key not in _place_names:
        public = [name + end for end in ENDS[:directions] for name in learned]
        _place_names[key] = {name: place(name, k) for name in public}
    return _place_names[key]


@functools.lru_cache(maxsize=512)
def learned(plan: Plan, inputs: int | None) -> tuple[Learned, ...]:
    """The arrays that one direction learns.

    Args:
        inputs: the last axis of x; None if x is projected already.
    """
    named = shapes(plan.cell, dict(plan.sizes), inputs or 0, True)
    if inputs is None:
        del named["weight_ih"]
    arrays, quantized = [], plan.types.quantized
    for name, shape in named.items():
        if len(shape) > 1:
            arrays.append(Learned(name, shape, MATRIX, False, quantized))
            if quantized:
                arrays.append(Learned(scales_of(name), shape[:-1], DENSE, False))
        else:
            arrays.append(Learned(name, shape, DENSE, name not in plan.cell.param_names))
    return tuple(arrays)


@functools.lru_cache(maxsize=512)
def states(plan: Plan) -> tuple[tuple[str, int], ...]:
    """Name and size of each state."""
    return tuple((s.name, plan.sizes[s.size]) for s in plan.cell.states)


def state_names(kind: str, cell: Cell) -> tuple[str, ...]:
    """The public names of the states of a call: ``kind`` is "state" or "reset_state"."""
    return tuple([f"{kind} {name}" for name in cell.state_names])


def names(cell: Cell, directions: int) -> tuple[str, ...]:
    """All names that the arrays of a call may have, in a fixed order."""
    weights = [name for name in cell.learned if name.startswith("weight_")]
    return (
        *("x", "static", *FLAGS, "recurrent_mask"),
        *state_names("state", cell),
        *state_names("reset_state", cell),
        *(name + end for end in ENDS[:directions] for name in cell.learned),
        *(scales_of(name) + end for end in ENDS[:directions] for name in weights),
    )


def of_layer(cell: Cell, arrays: Mapping[str, Any], k: int, directions: int) -> dict[str, Any]:
    """Picks what layer k of several learns, by the names of a call, with the scales of integers.

    Args:
        arrays: of all layers, by the names of parameters: ``place(name, k)``, and
            ``{place(name, k)}_scales``.
        k: the layer's number.
    """
    learned = {}
    for name, place in places(cell.learned, k, directions).items():
        if place in arrays:
            learned[name] = arrays[place]
        if f"{place}_scales" in arrays:
            learned[scales_of(name)] = arrays[f"{place}_scales"]
    return learned


def place(name: str, k: int) -> str:
    """The name of a parameter: for ``weight_ih_reverse`` in layer 1, ``weight_ih_l1_reverse``."""
    bare = name.removesuffix(ENDS[1])
    return f"{bare}_l{k}{name[len(bare) :]}"


def direction(
    plan: Plan,
    arrays: Mapping[str, Any],
    d: int,
    part: Callable[[Any, int], Any] = operator.getitem,
) -> dict[str, Any]:
    """Picks the arrays of one direction from those that ``contract.fit`` returns: what it learns,
    what all share, its ``part`` of states and resets; all by their names without ``_reverse``.
    """
    named = {}
    for name, public, parted in _places(plan, d):
        array = arrays.get(public)
        if array is not None:
            named[name] = part(array, d) if parted else array
    return named


@functools.lru_cache(maxsize=512)
def _places(plan: Plan, d: int) -> tuple[tuple[str, str, bool], ...]:
    """Name in a direction, name in a call, and whether the call's has an axis of directions."""
    learns = [(name, name + ENDS[d], False) for name in plan.cell.learned]
    if plan.types.quantized:
        weights = [scales_of(name) for name in plan.cell.learned if name.startswith("weight_")]
        learns += [(name, name + ENDS[d], False) for name in weights]
    shared = [(name, name, False) for name in ("static", "recurrent_mask")]
    parted = *state_names("state", plan.cell), *state_names("reset_state", plan.cell), "resets"
    return (*learns, *shared, *[(name, name, True) for name in parted])


def of_a_matmul(name: str) -> bool:
    """Whether an array is a weight or a bias, whose gradient is computed outside the kernel."""
    return name.startswith(("weight_", "bias_"))


def stepped(cell: Cell, recurrent_mask: object) -> Cell:
    """The cell that a kernel runs: with a recurrent mask, one that multiplies its state by this."""
    if recurrent_mask is None:
        return cell
    return with_recurrent_mask(cell, len(recurrent_mask.shape) == 3)  # type: ignore[attr-defined]
