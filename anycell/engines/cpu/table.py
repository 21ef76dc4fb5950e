"""The tables of 64-bit numbers with which kernels are called: the call's, and a kernel's own.

The caller fills the call's table. From it the door fills a kernel's own table, for one direction
and one chunk of steps. Both tables refer to the arrays of ``anycell.plan.arrays``. Address 0 stands
for an absent array. Strides count elements.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from anycell.engines.cpu.ir import Builder, Value
from anycell.plan import CODES, LINE, Plan, arrays, scales_of

Count = TypeVar("Count", int, Value)  # known when the kernel is printed, or when it runs

# Entries of a kernel's own table that are numbers, not addresses; strides are numbers, too.
NUMBERS = [
    *"steps batch row_group time time_step units_split workspace_stride first_row".split(),
    *"seed stream inputs input_block".split(),
    *CODES,
]
ADDRESSES = "gang done workspace hyper".split()
# Entries that the door copies unchanged from the call's table to a kernel's own table.
PASSED_ON = [*"batch row_group units_split gang hyper first_row seed".split(), *CODES]


class Names(NamedTuple):
    """The entries of a call's table: the entries ``shared`` by all directions, then, once for each
    direction, the entries ``each``.

    Attributes:
        shared: of the whole call:

            lay_out                 1 to fill the kernel's tables and do nothing else
            directions, reverse     how many; a bit for each direction that begins at the last step
            steps, batch            of the input
            begin, count            steps done, in the order of the pass, and steps to do
            origin, span            first step, in the forward pass's order, and steps of the arrays
                                    of states and saved values; 0 and all without checkpoints
            whole                   forward: a bit for each state whose array has all steps; other
                                    arrays have two slots, used in turn
            pack                    1 to pack the weights, 0 where ``packed`` holds them
            threads, least_work     most threads; multiply-adds from which a second thread pays
            sparse                  1 if a mask leaves few steps
            row_group               rows that share sums of parameter gradients
            gang                    address of a record, see ``pool.gang``; 0 for one thread
            scratch, packed         memory, on a cache line; ``needs`` says how many bytes
            parts, units_split      outputs: the threads of the call, and whether they split units
            hyper                   values of the cell's hyperparameters
            first_row               where the rows of the call begin in the batch, for random masks
            seed, stream            see ``Options``; and each option that has ``codes``
            inputs                  forward: size of the ``input`` if a kernel multiplies it, else 0
            arrays of the whole call, see ``anycell.plan.arrays``

        each: of one direction: its arrays, weights, and initial and final states:

            weight_ih, ...          each with the strides of its last three axes
            state, reset_state      per state: its initial value, and the value that resets restore
            final, d_final          states after the last step, and their gradients, per state
    """

    shared: tuple[str, ...]
    each: tuple[str, ...]


@functools.lru_cache(maxsize=256)
def names(plan: Plan, backward: bool) -> Names:
    """The entries of a call, in order."""
    cell = plan.cell
    shared = [*CODES]
    shared += (
        "lay_out directions reverse steps batch begin count origin span whole pack threads "
        "least_work sparse row_group gang scratch packed scratch_bytes packed_bytes parts "
        "units_split hyper first_row seed stream inputs"
    ).split()
    each: list[str] = []
    for name, array in arrays(plan, backward).items():
        entries = [name, f"{name} steps", f"{name} rows"] if array.strided else [name]
        if not name.startswith("reset_state "):
            (shared if array.whole else each).extend(entries)
    weights = dict.fromkeys(l.weight for l in cell.linears)
    for name in weights if backward else ["weight_ih", *weights]:
        each += [name, f"{name} heads", f"{name} rows", f"{name} columns"]
        if plan.types.quantized:
            each.append(scales_of(name))
    each += [l.bias_name for l in cell.linears]
    for name in cell.state_names:
        for what in ("reset_state", *(("d_final",) if backward else ("state", "final"))):
            each += [f"{what} {name}", f"{what} {name} rows", f"{what} {name} columns"]
    return Names(tuple(shared), tuple(dict.fromkeys(each)))


def axes(name: str) -> int:
    """Counts the strides that follow an address: three for a weight's last axes; two (rows and
    columns) for an initial or final state, or for the gradient of a final state.
    """
    what, *of = name.split()
    if what in ("state", "reset_state", "d_final", "final"):
        return 2 if len(of) == 1 else 0
    return 3 if what.startswith("weight_") and not of else 0


@functools.lru_cache(maxsize=256)
def entries(plan: Plan, backward: bool) -> dict[str, int]:
    """The entries of a kernel's own table, and their places.

    " steps" and " rows" are strides between steps and between rows; strides between steps are
    negative if time runs backwards. A state's array has the state before each step: " turns" says
    that it has only two slots, " next" is the stride to the state after the step.
    """
    listed = [*NUMBERS, *ADDRESSES]
    listed += [f"packed {l.name}" for l in plan.cell.linears] + ["packed input"]
    for name, array in arrays(plan, backward).items():
        listed.append(name)
        if "T" in array.axes:
            listed += [f"{name} steps", f"{name} rows"]
        if name.startswith("reset_state "):
            listed.append(f"{name} rows")
        if array.begins == "states":
            listed.append(f"{name} next" if backward else f"{name} turns")
    return {name: place for place, name in enumerate(listed)}


def align(size: Count) -> Count:
    """Rounds bytes up to whole cache lines."""
    return (size + (LINE - 1)) // LINE * LINE


class Entries:
    """A table of 64-bit numbers in memory; ``names`` lists its entries in order."""

    def __init__(self, b: Builder, address: Value, names: Iterable[str]) -> None:
        self.b, self.address = b, address
        self.index = {name: place for place, name in enumerate(names)}

    def at(self, name: str) -> Value:
        """The address of an entry."""
        return self.b.gep(self.address, self.index[name], "i64")

    def __getitem__(self, name: str) -> Value:
        return self.b.load(self.at(name), "i64")

    def pointer(self, name: str) -> Value:
        return self.b.load(self.at(name), "ptr")

    def __setitem__(self, name: str, value: Value | int) -> None:
        self.b.store(self.b.value(value), self.at(name))

    def set(self, **values: Value | int) -> None:
        """Writes several entries."""
        for name, value in values.items():
            self[name] = value
