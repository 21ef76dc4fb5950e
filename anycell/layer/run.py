"""A pass: the tables of its kernel's door and of the driver, and the call."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Mapping

from anycell.engines import cpu
from anycell.engines.cpu import driver
from anycell.layer import bounds
from anycell.layer.arguments import Array, Direction, Entering, Host, Kept, reset_values
from anycell.layer.form import WORTH_A_THREAD, form_of, slot_bytes, sparse
from anycell.layer.matrix import CHUNK, Matrix, bounds_of, extent
from anycell.layer.products import kind_of
from anycell.layer.schedule import segment_steps
from anycell.plan import CODES, Options, Plan, padded

_SIGN, _WORD = 1 << 63, (1 << 64) - 1  # a seed is 64 bits, an entry a signed number


class Run:
    """A pass of a layer: what its door and the driver are called with.

    Attributes:
        before, after: rows of ``driver.PRODUCT``, of what is multiplied before the steps of a chunk
            and after them.
        moves: rows of ``driver.MOVE``.
        again: the pass that computes the states of a segment once more.
    """

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
        self.alive: list[object] = []  # what the tables point at, as long as they do
        self.before: list[list[int]] = []
        self.after: list[list[int]] = []
        self.moves: list[list[int]] = []
        self.again: Run | None = None
        # For ``check``: directions, rows and matrices of products; what moves, and where to.
        self.checked: list[tuple[int, list[int], tuple[Matrix, ...]]] = []
        self.moved: list[tuple[int, str, cpu.check.Bounds]] = []
        self.segment_length = given.x.shape[0]
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

    @functools.cached_property
    def segment(self) -> int:
        """Steps of which the backward pass needs all at once."""
        return segment_steps(self.options.checkpoint, self.steps, self.form.chunk)

    def over_steps(self, array: Array, window: bool = False, first: int = 0) -> Matrix:
        """The rows of a chunk of an array ``[T, B, n]`` whose rows lie at one distance.

        Args:
            window: along the steps of a segment.
            first: the time, or slot, that stands for the first.
        """
        (steps, row, column), size = self.host.strides(array), array.dtype.itemsize
        self.alive.append(array)
        width, between = array.shape[2], steps * size
        return Matrix(
            self.host.pointer(array) + first * between, (CHUNK, width),
            (steps if self.batch == 1 else row, column if width > 1 else 1),
            0 if window else between, between if window else 0, size, bounds_of(self.host, array),
        )  # fmt: skip

    def entering(self, when: list[list[int]], d: int, mask: Array | None = None) -> Matrix:
        """The rows of the input of a chunk: where they are, or gathered first.

        Args:
            when, d: see ``multiply``.
            mask: under it there shall be zeros.
        """
        x, host = self.x, self.host
        steps, row, _ = host.strides(x)
        if mask is None and (steps == row * self.batch or self.batch == 1 or self.steps < 2):
            return self.over_steps(x)
        buffer, size = Rows(host, self.form.chunk * self.batch, x.shape[2]), x.dtype.itemsize
        source = Matrix(
            host.pointer(x), (CHUNK, x.shape[2]), (row, steps), steps * size, 0, size,
            bounds_of(host, x),
        )  # fmt: skip
        flags = Matrix(0, (1, 1), (1, 1))
        if mask is not None:
            flags = Matrix(
                host.pointer(mask), (1, 1), (1, 1), self.batch, 0, 1, bounds_of(host, mask)
            )
        self.alive += x, mask
        rows = self.rows(buffer)
        self.multiply(when, d, source, flags, rows, kind=driver.GATHER)
        return rows

    def moving(
        self, d: int, name: str, moving: Array, rest: Array | None = None
    ) -> list[list[int]]:
        """Rows of ``moves``, which set the address and the strides of an entry before each segment.

        Args:
            moving: ``[segments, B, n]``.
            rest: ``[B, n]``, where the entry is set to in between.
        """
        host, entries = self.host, self.entries
        at = self.form.firsts[d] + self.kernel.each[name]
        place = entries.buffer_info()[0] + 8 * at
        segments, *strides = host.strides(moving)
        first, between = host.pointer(moving), segments * moving.dtype.itemsize
        there = (0, 0, 0) if rest is None else (host.pointer(rest), *host.strides(rest))
        self.alive += moving, rest
        if cpu.check.ON:
            self.moved.append((d, name, extent(host, moving)))
        return [
            [place, first, between, there[0]],
            *([place + 8 * axis, strides[axis - 1], 0, there[axis]] for axis in (1, 2)),
        ]

    def rows(self, rows: Rows) -> Matrix:
        """A buffer of the rows of a chunk."""
        self.alive.append(rows.whole)
        host, whole = self.host, rows.whole
        return Matrix(
            host.pointer(whole), (CHUNK, rows.width), (rows.padded, 1), 0, 0,
            whole.dtype.itemsize, bounds_of(host, whole),
        )  # fmt: skip

    def multiply(
        self,
        when: list[list[int]],
        d: int,
        a: Matrix,
        b: Matrix,
        out: Matrix,
        add: bool = False,
        sums: bool = False,
        scales: int = 0,
        kind: int | None = None,
    ) -> None:
        """Adds a product to those of each chunk: ``out = a @ b``.

        Args:
            when: ``before`` or ``after``.
            d: the direction whose chunk it is.
            add: ``out += a @ b``; ``sums`` from the second chunk on.
            scales: address of the scales of the columns of ``b``, integers.
            kind: of ``driver.KINDS``; None lets the rule of the library choose.
        """
        along = 0 if a.shape[0] == CHUNK else 2 if a.shape[1] == CHUNK else 1
        rows, inner, columns = *a.shape, out.shape[1]
        if kind is None:
            kind = kind_of(self.host, self.plan)
        row = [
            rows, columns, inner, a.address, *a.strides, b.address, *b.strides,
            out.address, out.strides[0], add, scales, kind, along, self.options.reverse[d], sums,
            a.time, a.window, b.time, b.window, out.time, out.window,
        ]  # fmt: skip
        when.append(row)
        if cpu.check.ON:
            self.checked.append((d, row, (a, b, out)))

    def call(self) -> None:
        """Runs all steps, and gives memory back."""
        if cpu.check.ON:
            bounds.check_pass(self)
        runs = [self] if self.again is None else [self, self.again]
        cpu.run_pass(self.plan.dtype, [run._table() for run in runs])
        for run in reversed(runs):
            cpu.scratch.give_back(run.block)

    def _table(self) -> array[int]:
        """The table of the driver."""
        at, options = self.kernel.shared, self.options
        threads = min(options.threads, cpu.pool.MOST)
        values = [
            self.kernel.address, self.entries.buffer_info()[0],
            *[at[name] for name in ("begin", "count", "pack", "origin", "span")],
            self.backward, self.steps, self.batch, 0, self.steps, self.form.chunk,
            self.segment_length, 0, len(self.moves), len(self.before), len(self.after),
            self.entries[at["gang"]], threads, WORTH_A_THREAD,
            self.host.blas, 0, 0,
        ]  # fmt: skip
        for row in (*self.moves, *self.before, *self.after):
            values += row
        return array("q", values)


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
