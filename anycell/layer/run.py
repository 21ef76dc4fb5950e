"""A pass: the table of its kernel's door, and the calls of it, chunk by chunk of time."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

from anycell.engines import cpu
from anycell.layer.arguments import Array, Direction, Entering, Host, Kept, reset_values
from anycell.layer.form import form_of, slot_bytes, sparse
from anycell.layer.schedule import Chunk, chunks, segment_steps
from anycell.plan import CODES, Options, Plan, padded

_SIGN, _WORD = 1 << 63, (1 << 64) - 1  # a seed is 64 bits, an entry a signed number


class Run:
    """A pass of a layer: what its door is called with."""

    def __init__(
        self,
        host: Host,
        plan: Plan,
        given: Entering,
        options: Options,
        backward: bool,
    ) -> None:
        self.host, self.plan, self.options, self.given = host, plan, options, given
        self.x, self.directions, self.backward = given.x, given.directions, backward
        if plan.types.mixed:
            self.directions = [_widened(host, plan, arrays) for arrays in given.directions]
        self.steps, self.batch, width = given.x.shape
        self.form = form = form_of(
            plan, backward, cpu.isa.current(), self.steps, self.batch, options.reverse,
            width if "weight_ih" in self.directions[0] else None, given.resets is not None,
            given.mask is not None and sparse(given.mask), options.threads,
        )  # fmt: skip
        self.kernel, self.entries = form.kernel, form.entries[:]
        self.block = cpu.scratch.take(form.scratch + form.packed + form.slots)
        self.alive: list[object] = []  # what the table points at, as long as it does
        entries, at, scratch = self.entries, self.kernel.shared, self.block.address
        self.slots = scratch + form.scratch + form.packed  # those not yet taken, see place_slots
        # Of the arrays of the whole call, and of each direction; for ``check``.
        self.bounds: cpu.check.CallBounds = {}, [{} for _ in form.firsts if cpu.check.ON]
        entries[at["scratch"]] = scratch
        switch(entries, at, options)
        if given.mask is not None:
            self.place("mask", given.mask)
        if given.resets is not None:
            self.place("resets", given.resets)
        for d, arrays in enumerate(self.directions):
            self.place_of(d, arrays)
            if given.resets is not None:
                values = reset_values(host.empty, plan, arrays, host.wide.empty)
                names = [f"reset_state {name}" for name in plan.cell.state_names]
                self.place_of(d, dict(zip(names, values, strict=True)))
        packed = scratch + form.scratch
        if form.packed:
            entries[at["packed"]] = packed
        if cpu.check.ON:
            self.bounds[0].update(
                scratch=(scratch, scratch + form.scratch), packed=(packed, packed + form.packed)
            )

    def place(self, name: str, value: Array, axes: int = 0) -> None:
        """Sets the address of an array of the whole call, and strides of its first ``axes``."""
        at = self.kernel.shared[name]
        self.entries[at] = self.host.pointer(value)
        self.alive.append(value)
        if axes:
            self.entries[at + 1], self.entries[at + 2] = self.host.strides(value)[:axes]
        if cpu.check.ON:
            self.bounds[0][name] = extent(self.host, value)

    def place_of(self, d: int, arrays: Mapping[str, Array]) -> None:
        """Sets the addresses of arrays of one direction, and the strides that their names have."""
        place(self.host, self.kernel, self.entries, self.form.firsts[d], arrays)
        self.alive.append(arrays)
        if cpu.check.ON:
            bounds = {name: extent(self.host, value) for name, value in arrays.items()}
            self.bounds[1][d].update(bounds)

    def place_parts(self, arrays: Mapping[str, Array]) -> None:
        """Sets addresses and strides of arrays whose first axis is directions, ``[D, B, size]``."""
        host, kernel, entries = self.host, self.kernel, self.entries
        for name, value in arrays.items():
            address, (parts, *strides) = host.pointer(value), host.strides(value)
            parts *= value.dtype.itemsize
            for d, first in enumerate(self.form.firsts):
                at = first + kernel.each[name]
                entries[at] = address + d * parts
                if name in kernel.axes:
                    entries[at + 1], entries[at + 2] = strides
                if cpu.check.ON:
                    self.bounds[1][d][name] = extent(host, value[d])
        self.alive.append(arrays)

    def place_steps(self, d: int, name: str, value: Array, steps: int, rows: int) -> None:
        """Sets the address of an array of every step, and its strides from step to step and from
        row to row.
        """
        entries, at = self.entries, self.form.firsts[d] + self.kernel.each[name]
        entries[at], entries[at + 1], entries[at + 2] = self.host.pointer(value), steps, rows
        self.alive.append(value)
        if cpu.check.ON:
            self.bounds[1][d][name] = extent(self.host, value)

    def place_rows(self, d: int, name: str, rows: Rows) -> None:
        """Sets the address and strides of a buffer of the rows of a chunk."""
        self.place_steps(d, name, rows.whole, self.batch * rows.padded, rows.padded)

    def place_slots(self, d: int, name: str, size: int) -> None:
        """Memory for a state whose sequence nobody reads: two slots, which take turns."""
        address, self.slots = self.slots, self.slots + slot_bytes(self.plan, self.batch, size)
        self.entries[self.form.firsts[d] + self.kernel.each[f"sequence {name}"]] = address
        if cpu.check.ON:
            self.bounds[1][d][f"sequence {name}"] = address, self.slots

    def place_kept(self, kept: Kept) -> None:
        """Says where the sequences of states lie, and the values that are saved."""
        self.place("hidden", kept.hidden)
        names = self.plan.cell.state_names
        for d, states in enumerate(kept.states):
            arrays = {"saved": kept.values[d]} if kept.values else {}
            for name, sequence in zip(names, states, strict=True):
                if sequence is not None:
                    arrays[f"sequence {name}"] = sequence
            if arrays:
                self.place_of(d, arrays)

    def chunks(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Steps done and steps to do, chunk by chunk, between two steps of the forward pass."""
        return chunks(begin, end, self.form.chunk, self.steps, self.backward)

    def span(self, d: int, done: int, count: int) -> Chunk:
        """The chunk of ``count`` steps of a direction after ``done`` steps."""
        return Chunk.of(self.options.reverse[d] is not self.backward, self.steps, done, count)

    @property
    def segment(self) -> int:
        """Steps of which the backward pass needs all at once."""
        return segment_steps(self.options.checkpoint, self.steps, self.form.chunk)

    def run(self, done: int, count: int) -> None:
        """Runs ``count`` steps of all directions, after those that are done."""
        at, entries = self.kernel.shared, self.entries
        entries[at["begin"]], entries[at["count"]] = done, count
        cpu.run(self.kernel, entries, self.bounds)
        entries[at["pack"]] = 0

    def close(self) -> None:
        """Gives memory back, after the last call."""
        cpu.scratch.give_back(self.block)


def switch(entries: array[int], at: Mapping[str, int], options: Options) -> None:
    """Sets what a table says of the options of a call, and its threads."""
    if options.threads > 1:
        entries[at["gang"]] = cpu.pool.gang(options.threads)
    for name, codes in CODES.items():
        entries[at[name]] = codes[getattr(options, name)]
    entries[at["seed"]] = ((options.seed + _SIGN) & _WORD) - _SIGN
    entries[at["stream"]] = options.stream


def place(
    host: Host, kernel: cpu.Kernel, entries: array[int], first: int, arrays: Mapping[str, Array]
) -> None:
    """Sets the addresses of arrays in the table of a call, and those strides that their names have.

    Args:
        first: where the entries of a direction begin.
        arrays: by name; those that the table has no entry for are left out.
    """
    each, axes, pointer = kernel.each, kernel.axes, host.pointer
    for name, value in arrays.items():
        if name in each:
            at = first + each[name]
            entries[at] = pointer(value)
            if name in axes:
                strides = array("q", host.strides(value))
                last = at + 1 + axes[name]
                entries[last - len(strides) : last] = strides


def extent(host: Host, array: Array) -> cpu.check.Bounds:
    """The first byte of an array and that behind its last."""
    address, size = host.pointer(array), array.dtype.itemsize
    if 0 in array.shape:
        return address, address
    reach = [(n - 1) * s * size for n, s in zip(array.shape, host.strides(array), strict=True)]
    first, last = sum(min(0, r) for r in reach), sum(max(0, r) for r in reach)
    return address + first, address + last + size


class Rows:
    """A buffer for the rows of a chunk, ``[rows, width]``; ``dense`` if others read it whole."""

    def __init__(self, host: Host, rows: int, width: int, dense: bool = False) -> None:
        self.width, self.padded = width, width if dense else padded(host.dtype.itemsize, width)
        self.whole = host.empty((rows, self.padded))

    def __getitem__(self, rows: int) -> Array:
        if self.whole.shape[0] == rows and self.width == self.padded:
            return self.whole
        return self.whole[:rows, : self.width]


def _widened(host: Host, plan: Plan, arrays: Direction) -> Direction:
    """The arrays of a direction, its states but the first as the kernel keeps them."""
    wide = dict(arrays)
    for name in plan.cell.state_names[1:]:
        for state in (f"state {name}", f"reset_state {name}"):
            if state in wide:
                wide[state] = host.widen(wide[state])
    return wide


def keeps_state(plan: Plan, i: int) -> bool:
    """Whether it keeps the sequence of state i > 0, without checkpoints."""
    return plan.cell.states[i].name in plan.states
