"""Prints the code that finds, loads and stores rows of arrays, one vector of units at a time, and
the steps of rows that only hold their states or pass their gradients on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from anycell.engines.cpu.geometry import Matmul
from anycell.engines.cpu.idioms import narrow, widen
from anycell.engines.cpu.ir import Builder, Value, constant, integer_of, vector
from anycell.engines.cpu.layout import Layout
from anycell.engines.cpu.table import ADDRESSES
from anycell.plan import CODES

AHEAD = 8  # rows from the loaded row to the prefetched row


class Row(NamedTuple):
    """The address of a row of an array, and LLVM's type of its numbers."""

    address: Value
    type: str


class RowAt(NamedTuple):
    """A row of the batch at a step."""

    t: Value
    row: Value


class Task(NamedTuple):
    """A row that takes a step, and its memory.

    Attributes:
        span: the span of units to work on; None for all units.
        results, scratch: addresses, see ``layout``.
        group: the group of rows that share sums of parameter gradients.
        reset: whether the row begins the step with reset states.
    """

    at: RowAt
    span: Value | None
    results: Value
    scratch: Value
    group: Value
    reset: Value


class Lanes(NamedTuple):
    """The vector of units at hand, in a span or among all units.

    Attributes:
        vector: its number.
        unit: the first unit.
        left: the number of units from ``unit`` on; None if every lane of every vector holds one.
        mask: the lanes that hold a unit; None if every lane does.
    """

    span: Value | None
    vector: Value
    unit: Value
    left: Value | None
    mask: Value | None


class Rows:
    """Rows of the arrays whose addresses and strides are in the kernel's table."""

    def __init__(self, b: Builder, layout: Layout) -> None:
        self.b, self.layout, self.plan, self.cell = b, layout, layout.plan, layout.cell
        self.zero = constant(0.0, b.vec)
        self.arg: dict[str, Value] = {}
        for name, i in layout.entries.items():
            address = name in layout.arrays or name in ADDRESSES or name.startswith("packed ")
            self.arg[name] = b.load(b.gep(b.args[0], i, "i64"), "ptr" if address else "i64")
        self.optional = {name: self.given(name) for name in ("mask", "resets")}
        states = self.cell.states
        self.states = [(i, s.name, layout.plan.sizes[s.size]) for i, s in enumerate(states)]

    # ---- where rows are --------------------------------------------------------------------------
    def given(self, name: str) -> Value:
        """Whether the caller passes an optional argument."""
        return self.arg[name].ne(0)

    def array(self, name: str, offset: Value | None = None) -> Row:
        """The first row of an array, or the row that begins at number ``offset``."""
        type, address = self.layout.arrays[name].number.llvm, self.arg[name]
        return Row(address if offset is None else self.b.gep(address, offset, type), type)

    def of(self, name: str, row: Value) -> Row:
        """A row of a contiguous array."""
        return self.array(name, row * self.layout.arrays[name].width)

    def at(self, name: str, at: RowAt) -> Row:
        """A row at a step of an array over time."""
        steps, rows = self.arg[f"{name} steps"], self.arg[f"{name} rows"]
        return self.array(name, at.t * steps + at.row * rows)

    def state(self, i: int, at: RowAt, after: bool = False) -> Row:
        """The row of state i before, or after, the step."""
        b, arg, (t, row), name = self.b, self.arg, at, self.layout.sequences[i]
        if self.layout.backward:
            offset = t * arg[f"{name} steps"] + row * arg[f"{name} rows"]
            if after:
                offset += arg[f"{name} next"]
            return self.array(name, offset)
        t = t + 1 if after else t
        slot = b.select(arg[f"{name} turns"].ne(0), t & 1, t)
        return self.at(name, RowAt(slot, row))

    def before(self, i: int, at: RowAt, reset: Value) -> Row:
        """The row that the step reads as state i: that of the initial value after a reset."""
        name = f"reset_state {self.cell.state_names[i]}"
        initial = self.array(name, at.row * self.arg[f"{name} rows"])
        state = self.state(i, at)
        return Row(self.b.select(reset, initial.address, state.address), state.type)

    def flagged(self, name: str, at: RowAt, unequal: bool = True) -> Value:
        """Whether the optional flags are given and set (or, with ``unequal`` False, not set)."""
        b, (t, row) = self.b, at
        flagged = b.variable(0, "i1")
        with b.when(self.optional[name]):
            place = t * self.arg[f"{name} steps"] + row
            flag = b.load(b.gep(self.arg[name], place, "i8"), "i8")
            flagged.value = flag.ne(0) if unequal else flag.eq(0)
        return flagged.value

    def arriving(self, i: int) -> str:
        """The name of the array of the gradients that reach the sequence of state i."""
        return f"d_sequence {self.cell.state_names[i]}" if i else "d_output"

    # ---- vectors of units ------------------------------------------------------------------------
    def origin(self, span: Value | None) -> Value:
        """The first vector of units of a span."""
        return self.b.value(0) if span is None else span * self.layout.geometry.span

    @contextmanager
    def vectors(self, span: Value | None, units: int) -> Iterator[Lanes]:
        """A loop over the vectors of units of a span, or of all."""
        b, layout, begin = self.b, self.layout, self.origin(span)
        end = constant(-(-units // layout.lanes), "i64")
        if span is not None:
            end = b.smin(begin + layout.geometry.span, end)
        with b.loop(begin, end, layout.width) as number:
            unit = number * layout.lanes
            left = units - unit if units % b.lanes else None
            yield Lanes(span, number, unit, left, None if left is None else b.lane_mask(left))

    def load(self, row: Row, lanes: Lanes, offset: int = 0) -> Value:
        """The vector of units at hand from a row of an array in user layout (no padding)."""
        b, vec = self.b, vector(self.b.lanes, self._bits(row.type))
        address = b.gep(row.address, lanes.unit + offset, row.type)
        if lanes.mask is None:
            value = b.load(address, vec)
        else:
            value = b.masked_load(address, lanes.mask, 0, vec)
        return widen(b, value, row.type)

    def load_one(self, row: Row, place: int) -> Value:
        """One number of a row, in every lane."""
        b, address = self.b, self.b.gep(row.address, place, row.type)
        return b.splat(widen(b, b.load(address, self._bits(row.type)), row.type))

    def stream(self, name: str, at: RowAt, lanes: Lanes, offset: int = 0) -> Value:
        """Loads the vector of units at hand from an array over time, and prefetches a later row.

        The array exceeds the near caches, and the hardware does not prefetch rows pages apart.
        """
        b, g = self.b, self.layout.geometry
        row = self.at(name, at)
        later = lanes.unit + offset + self.arg[f"{name} rows"] * AHEAD
        ahead = b.gep(row.address, later, row.type)
        for i in range(g.width):
            b.prefetch(b.gep(ahead, i * g.lanes, row.type))
        return self.load(row, lanes, offset)

    def store(self, value: Value, row: Row, lanes: Lanes, offset: int = 0) -> None:
        """Writes the vector of units at hand to a row."""
        b, value = self.b, self._narrow(value, row.type)
        address = b.gep(row.address, lanes.unit + offset, row.type)
        if lanes.left is None:
            b.store(value, address)
        else:
            b.store_first(value, address, lanes.left)

    def store_one(self, value: Value, row: Row, place: int) -> None:
        """Writes a number that all lanes share."""
        number = self._narrow(self.b.extract(value, 0), row.type)
        self.b.store(number, self.b.gep(row.address, place, row.type))

    def add(self, value: Value, row: Row, lanes: Lanes, offset: int = 0) -> None:
        """Adds the vector of units at hand to a row."""
        self.store(self.load(row, lanes, offset) + value, row, lanes, offset)

    def _bits(self, type: str) -> str:
        """The type to load numbers as: integers, if the cell computes in another type."""
        return type if type == self.layout.real else integer_of(type)

    def _narrow(self, value: Value, type: str) -> Value:
        return value if type == self.layout.real else narrow(self.b, value, type)

    def biased(self, value: Value, name: str, lanes: Lanes, place: int) -> Value:
        """A value plus a bias, if the caller passes the bias."""
        total = self.b.variable(value)
        with self.b.when(self.given(name)):
            total.value = value + self.load(self.array(name), lanes, place)
        return total.value

    # ---- results of matmuls ----------------------------------------------------------------------
    def result(self, m: Matmul, output: int, task: Task, lanes: Lanes) -> Value:
        """The results of a matmul for the vector of units at hand."""
        results, name = self.layout.results, m.linear.name
        place = results.places[name] + output * results.strides[name]
        return self.b.load(self.result_at(place, task, lanes))

    def result_at(self, place: int, task: Task, lanes: Lanes) -> Value:
        """The address of the results that begin at a place in the row of results."""
        unit = (lanes.vector - self.origin(lanes.span)) * self.layout.lanes
        return self.b.gep(task.results, unit + place)

    # ---- rows that do not take the step ----------------------------------------------------------
    def hold(self, at: RowAt, span: Value | None) -> None:
        """Prints a masked forward step, which keeps the states."""
        b, repeat = self.b, self.arg["masked_output"].ne(CODES["masked_output"]["zero"])
        for i, _, units in self.states:
            with self.vectors(span, units) as lanes:
                value = self.load(self.state(i, at), lanes)
                self.store(value, self.state(i, at, after=True), lanes)
                if i == 0:
                    with b.when(self.given("out")):
                        out = self.at("out", at)
                        self.store(b.select(repeat, value, self.zero), out, lanes)

    def hold_gradients(self, task: Task) -> None:
        """Prints a masked backward step: state gradients stay, the step's own gradients are 0."""
        b, at, zero = self.b, task.at, self.zero
        repeat = self.arg["masked_output"].ne(CODES["masked_output"]["zero"])
        for i, name, units in self.states:
            with self.vectors(task.span, units) as lanes:
                self._carry(i, task, lanes)
                arriving = self.arriving(i)
                with b.when(repeat & self.given(arriving)):
                    into = self.of(f"d_state {name}", at.row)
                    arrived = self.load(self.at(arriving, at), lanes)
                    self.add(arrived, into, lanes)
        for size in dict.fromkeys(self.cell.gate_sizes.values()):
            with self.vectors(task.span, self.plan.sizes[size]) as lanes:
                for gate, place in self.plan.places.items():
                    if self.cell.gate_sizes[gate] == size:
                        self.store(zero, self.at("d_gates", at), lanes, place.start)
        for m in self.layout.matmuls:
            if not self.plan.shares_gradient(m.linear):
                units = m.inner // m.parts
                with self.vectors(task.span, units) as lanes:
                    for n in range(m.parts):
                        row = self.at(self.layout.gradient(m), at)
                        self.store(zero, row, lanes, n * units)
            with self.vectors(task.span, m.units) as lanes:
                self.keep_operand(m, task, lanes, zero)

    def keep_operand(self, m: Matmul, task: Task, lanes: Lanes, computed: Value | None) -> None:
        """Stores the operand of a matmul, for its weight's gradient, if the caller asks for it: a
        value ``computed`` inside the step, or a state as the step read it, after resets.
        """
        name = f"operand {m.linear.name}"
        with self.b.when(self.given(name)):
            if m.state is not None:
                computed = self.load(self.before(m.state, task.at, task.reset), lanes)
            assert computed is not None
            self.store(computed, self.at(name, task.at), lanes)

    def hand_on(self, task: Task) -> None:
        """Prints a backward pass's last round: adds the gradients from the first step's matmuls."""
        for i, _, units in self.states:
            with self.vectors(task.span, units) as lanes:
                self._carry(i, task, lanes)

    def _carry(self, i: int, task: Task, lanes: Lanes) -> None:
        """Adds matmul results to a state's gradient in memory, if the step's graph does not."""
        arriving = [self.result(m, 0, task, lanes) for m in self.layout.matmuls if m.state == i]
        if arriving:
            into = self.of(f"d_state {self.cell.state_names[i]}", task.at.row)
            self.store(sum(arriving, self.load(into, lanes)), into, lanes)

    def divert_reset(self, task: Task) -> None:
        """Moves the state gradients to the reset values, with which the following step began."""
        for i, name, units in self.states:
            with self.vectors(task.span, units) as lanes:
                self._carry(i, task, lanes)
                for m in self.layout.matmuls:
                    if m.state == i:
                        place = self.layout.results.places[m.linear.name]
                        self.b.store(self.zero, self.result_at(place, task, lanes))
                state, reset = (
                    self.of(f"d_{kind} {name}", task.at.row) for kind in ("state", "reset")
                )
                self.store(self.load(reset, lanes) + self.load(state, lanes), reset, lanes)
                self.store(self.zero, state, lanes)
