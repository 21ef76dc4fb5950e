"""Prints a plan as LLVM text: one function that runs a whole sequence, forward or backward.

The two directions are one generator. A step is a matmul whose result never leaves the cache,
followed by element-wise work on it:

    forward     acc = state[t] @ W          then the cell: new states, what the backward pass needs
    backward    acc = d_gates[t+1] @ W'     then its derivative: d_gates[t], gradients of the states

Weights are packed per *tile*, a few vectors of units with all gates side by side, so that a
register block of rows times one tile is the inner loop.

Most cells are that simple, and the work on a span of units follows its tiles at once. Where a cell
has row reductions or further matmuls, a panel of rows goes through the step together: its matmuls,
then several passes over the units of each row (`plan.passes`). A matmul inside the step begins a
new *stage*: all rows of the panel have gone through the passes before it.

Threads split the rows of the batch, or the units with a barrier each step. Every row is computed by
the same operations in the same order whatever the split, so the bits do not depend on it.

One file, because one class prints both directions: its methods share the state of a function that
is being printed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from anycell.engines.cpu import ops
from anycell.engines.cpu.door import Door
from anycell.engines.cpu.geometry import (
    INPUT,
    QUANTIZED,
    ROW_HEADER,
    Geometry,
    Matmul,
    matmuls,
    projecting,
    whole,
)
from anycell.engines.cpu.idioms import narrow, widen
from anycell.engines.cpu.ir import (
    Builder,
    Module,
    Target,
    Value,
    Variable,
    constant,
    integer_of,
    vector,
)
from anycell.engines.cpu.matmul import (
    Blocks,
    packed_rows_of,
    print_packing,
    print_quantizing,
    print_staging,
    whole_chunks,
)
from anycell.engines.cpu.table import ADDRESSES, align, entries
from anycell.engines.cpu.tiles import ROWS, configure, release
from anycell.lang.cell import RECURRENT
from anycell.lang.expr import Expr, is_const, topological
from anycell.lang.ops import is_boolean, is_reduction
from anycell.plan import (
    CODES,
    FREE,
    LINE,
    MATMULS,
    Plan,
    arrays,
    gradient_roots,
    passes,
    size_of,
)

PANEL = 48  # rows whose matmul results are kept before the cell's work on them
AHEAD = 8  # rows between a load and the prefetch for a later one
SPINS = 4000  # turns at a barrier before a thread offers its core, some 100 us


class Row(NamedTuple):
    """The address of a row of an array, and LLVM's type of its numbers."""

    at: Value
    type: str


class Generator:
    """Writes the module of one plan, direction and target."""

    def __init__(self, plan: Plan, backward: bool, target: Target) -> None:
        self.plan, self.cell, self.backward, self.target = plan, plan.cell, backward, target
        # Registers and workspaces hold what the cell's math works on, arrays what their rows say.
        self.real, self.size = plan.types.math.llvm, plan.types.math.bytes
        self.module = Module(target, self.real, self.plan.types.short)
        self.entries, self.arrays = entries(plan, backward), arrays(plan, backward)
        self.states = {name: i for i, name in enumerate(self.cell.state_names)}
        self.widths = [plan.sizes[state.size] for state in self.cell.states]
        self.sequences = [n for n, array in self.arrays.items() if array.begins == "states"]
        self.gates = {name: i for i, name in enumerate(self.cell.gates)}
        self.saved = plan.saved_places
        self.new_states: dict[Expr, int] = {}
        self.loaded: frozenset[Expr] = frozenset()
        if backward:
            self.new_states = {
                n: i for i, n in enumerate(self.cell.next) if n.op not in FREE and self._kept(i)
            }
            self.loaded = frozenset(self.saved) | frozenset(self.new_states)
        self.passes = passes(self._results(), self.loaded)
        self.matmuls = matmuls(plan, backward, target)
        self.by_name = {m.linear.name: m for m in self.matmuls}
        self.projecting = projecting(self.matmuls, self.cell)
        # Whether the input's part of a gate has a place of its own, beside the recurrent one.
        self.apart = self.projecting is not None and self.cell.fused != set(self.cell.gates)
        self.result_sizes = {plan.sizes[symbol] for symbol in map(self._size, self._results())}
        self.row_wise = len(self.passes) > 1 or not self._simple()
        self._measure(target)
        self.blocks = [
            Blocks(
                m, self.acc_row, self.acc_stride[m.linear.name], self.size,
                plan.types.operands.llvm,
            )
            for m in self.matmuls
        ]  # fmt: skip

    def _simple(self) -> bool:
        """Whether the work on a span of units can follow the tiles of these units at once."""
        plain = all(m.state in (0, INPUT) and m.linear.heads == 1 for m in self.matmuls)
        alike = {(m.units, m.geometry.outputs) for m in self.matmuls}
        one_size = self.result_sizes <= {self.plan.hidden_size}
        return plain and len(alike) < 2 and one_size

    def _measure(self, target: Target) -> None:
        """Layout of a thread's workspace: addresses of rows, the rows that take the step, matmul
        results of a panel of rows, operands and values kept for later passes, of a panel if there
        are stages, else of a row.
        """
        lanes = target.lanes(self.real)
        if self.row_wise:
            vectors = -(-min(self.result_sizes, default=self.plan.hidden_size) // lanes)
            self.width = min(2, vectors)
        else:
            self.width = self.geometry.width
        step = self.width * lanes

        def whole(units: int) -> int:
            return -(-units // step) * step

        self.acc_place: dict[str, int] = {}  # of each matmul's results in a row
        self.acc_stride: dict[str, int] = {}  # from one output to the next
        self.acc_row = 0
        for m in self.matmuls:
            g = m.geometry
            last = (m.linear.heads - 1) * g.units + g.tiles * g.unroll * lanes
            stride = whole(max(m.units, last)) if self.row_wise else g.span * lanes
            self.acc_place[m.linear.name], self.acc_stride[m.linear.name] = self.acc_row, stride
            self.acc_row += g.outputs * stride
            if m is self.projecting and self.apart:
                self.input_place = self.acc_row
                self.acc_row += g.outputs * stride
        reductions = [n for each in self.passes for n in each.reductions]
        grouped = [n for n in reductions if n.attrs != (1,)]
        stored = [n for each in self.passes for n in each.stores]
        inside = [] if self.backward else [m for m in self.matmuls if m.state is None]
        operands = [m.linear.operand for m in inside]
        self.place: dict[tuple[str, Expr], int] = {}  # in the scratch memory of a row
        at = 0
        for what, nodes in (
            ("kept", [*stored, *grouped]), ("argument", grouped), ("operand", operands)
        ):  # fmt: skip
            for node in dict.fromkeys(nodes):
                self.place[what, node] = at
                at += whole(self._units(node))
        self.stages = [p for p, each in enumerate(self.passes) if each.matmuls or p == 0]
        if len(self.stages) > 1:
            for node in reductions:
                self.place["narrow", node] = at
                at += 1
        self.scratch_row = whole(at)

    def _size(self, node: Expr) -> str:
        return size_of(self.cell, node) or "H"

    def _units(self, node: Expr) -> int:
        return self.plan.sizes[self._size(node)]

    @property
    def geometry(self) -> Geometry:
        """The geometry of a simple cell's matmuls: the one, or two of one shape."""
        if self.matmuls:
            return self.matmuls[0].geometry
        lanes = self.target.lanes(self.real)
        return Geometry(self.plan.hidden_size, 0, 0, lanes, self.target.registers)

    def _kept(self, i: int) -> bool:
        return self.cell.states[i].name in self.plan.states

    # ---- sizes -----------------------------------------------------------------------------------
    @property
    def workspace_lines(self) -> tuple[int, int]:
        """Counts the addresses for each row of the batch, and the other bytes."""
        rows = PANEL if len(self.stages) > 1 else 1
        reals = PANEL * self.acc_row + rows * self.scratch_row
        return len(self.matmuls) + 2, align(reals * self.size) + 64

    def workspace(self, batch: int) -> int:
        """Bytes per thread, where the caller multiplies the input."""
        addresses, fixed = self.workspace_lines
        staged = sum(m.staged_row for m in self.matmuls if m.staged) * self.size
        rows = PANEL if self.row_wise else whole(batch, self._multiple)
        return align(batch * 8) * addresses + fixed + staged * rows

    @property
    def _multiple(self) -> int:
        """Staged rows are padded to a multiple of this: matrix tiles read 16 rows at once."""
        return ROWS if any(m.geometry.tiled for m in self.matmuls) else 1

    def _tall(self, batch: Value) -> Value:
        """Rows that are staged for a batch."""
        more = self._multiple - 1
        return (batch + more) & ~more if more else batch

    def print_workspace(self, b: Builder, batch: Value, inputs: Value | None) -> Value:
        """Bytes per thread; ``inputs`` of the input that the kernel multiplies, if it can."""
        addresses, fixed = self.workspace_lines
        each = (batch * 8 + (LINE - 1)) // LINE * LINE
        total = each * addresses + fixed
        staged = [m.staged_row * self.size for m in self.matmuls if m.staged]
        if staged:
            rows = PANEL if self.row_wise else self._tall(batch)
            size = b.value(sum(staged), "i64")
            if inputs is not None:
                size += self._staged_input(b, inputs) * self.size
            total += rows * size
        return total

    def _staged_input(self, b: Builder, inputs: Value) -> Value:
        """Numbers from a row of the input, as the kernel multiplies it, to the next: whole vectors,
        and no large power of two. None where the caller multiplies.
        """
        lanes, count = self.target.lanes(self.real), inputs
        if self.plan.types.quantized:
            count = inputs // QUANTIZED + (ROW_HEADER + 1)
        vectors = (count + lanes - 1) // lanes + 1
        row = (vectors | 1) * lanes
        return b.select(inputs.ne(0), row, 0)

    @property
    def work(self) -> int:
        """Multiply-adds for a row of the batch."""
        each = (m.units * m.inner * m.geometry.outputs // m.linear.heads for m in self.matmuls)
        return sum(each)

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed weights of one direction."""
        return sum(m.packed_elements for m in self.matmuls) * self.size

    # ---- the module -----------------------------------------------------------------------------
    def text(self) -> str:
        for blocks in self.blocks:
            blocks.print(self.module)
        types = self.plan.types
        staged = {self._operand_type(m) for m in self.matmuls if m.staged}
        self.staging: dict[str, str] = {}
        if types.quantized:
            print_quantizing(self.module)
        else:
            self.staging = {
                name: print_staging(self.module, name, self.geometry, types.operands.llvm)
                for name in sorted(staged)
            }
        self._sequence()
        self._entry()
        print_packing(
            self.module, self.matmuls, self.projecting, self.cell.fused, types.weights.llvm,
            types.storage.llvm, types.operands.llvm,
        )  # fmt: skip
        Door(self).print()
        return str(self.module)

    @property
    def symbols(self) -> tuple[str, ...]:
        """The functions that a caller needs."""
        return "door", "needs"

    # ---- one sequence ----------------------------------------------------------------------------
    def _sequence(self) -> None:
        b = self.module.private("sequence", "ptr args, i64 part, i64 parts")
        self.b = b
        # From here on a vector is what the element-wise work takes at once.
        self._widen(b)
        table, part, parts = b.args
        self.arg: dict[str, Value] = {}
        for name, i in self.entries.items():
            address = name in self.arrays or name in ADDRESSES or name.startswith("packed ")
            self.arg[name] = b.load(b.gep(table, i, "i64"), "ptr" if address else "i64")
        arg, g = self.arg, self.geometry
        split = arg["units_split"].ne(0)

        def share(total: Value, number: Value) -> Value:
            return total * number // parts

        spans, zero, after = b.value(g.spans, "i64"), b.value(0, "i64"), part + 1
        groups = (arg["batch"] + arg["row_group"] - 1) // arg["row_group"]
        self.has_mask = self._given("mask")
        self.has_resets = self._given("resets")
        # Under a mask groups are dealt out in turn: often long rows come first.
        first_group, last_group = share(groups, part), share(groups, after)
        self.groups = [
            b.select(split, all_, b.select(self.has_mask, turn, block))
            for all_, turn, block in (
                (0, part, first_group), (groups, groups, last_group), (1, parts, 1)
            )
        ]  # fmt: skip
        span0, span1 = (
            b.select(split, share(spans, n), whole) for whole, n in ((zero, part), (spans, after))
        )
        space = b.gep(arg["workspace"], part * arg["workspace_stride"], "i8")
        addresses = (arg["batch"] * 8 + 63) // 64 * 64
        self.rows = [b.gep(space, addresses * m.number, "i8") for m in self.matmuls]
        self.taken_rows = b.gep(space, addresses * len(self.matmuls), "i8")
        self.input_rows = b.gep(self.taken_rows, addresses, "i8")
        self.acc = b.gep(self.input_rows, addresses, "i8")
        self.scratch = b.gep(self.acc, PANEL * self.acc_row)
        self._place_staged_rows(addresses, space)
        self.hyper = {
            n: b.splat(b.load(b.gep(arg["hyper"], i), b.real))
            for i, n in enumerate(self.cell.hyper)
        }
        steps = arg["steps"]
        if self.backward:
            # A last round hands on what arrives through the first step's matmuls and resets, if
            # the caller does not multiply himself.
            last = b.value(1, "i64")
            if self.matmuls:
                last = b.zext(self._given(f"packed {self.matmuls[0].linear.name}"), "i64")
            steps += last
        tiled = any(m.geometry.tiled for m in self.matmuls)
        if tiled:
            most = (groups + parts - 1) // parts * arg["row_group"]
            most = b.smin(b.select(split, arg["batch"], most), arg["batch"])
            configure(b, b.smax(b.smin(most, ROWS), 1), self.plan.types.pieces)
        with b.loop(0, steps) as t:
            self.t = t
            count = self._take_rows(span0, span1)
            if self.row_wise:
                with b.loop(0, count, PANEL) as first:
                    self._panel(first, b.smin(first + PANEL, count))
            else:
                for m in self.matmuls:
                    self._row_addresses(m, zero, count, zero)
                with b.loop(span0, span1) as span, b.loop(0, count, PANEL) as first:
                    last = b.smin(first + PANEL, count)
                    for m in self.matmuls:
                        self._matmul(m, span, first, last)
                    with b.loop(first, last) as place:
                        self._row(place, first, span)
            with b.when(split):
                # Nobody starts step t + 1 before everybody has written step t.
                b.atomic_add(arg["barrier"], 1)
                wanted, turns = parts * (t + 1), b.variable(0)
                with b.repeat() as again:
                    b.pause()
                    turns.value = turn = turns.value + 1
                    # More threads than cores: let the others have this one.
                    with b.when(turn > SPINS):
                        b.call(arg["yield_to"], returns="i32")
                    again(b.atomic_load(arg["barrier"]) < wanted)
        if tiled:
            release(b)

    def _widen(self, b: Builder) -> None:
        b.lanes = self.target.lanes(self.real) * self.width
        b.vec = f"<{b.lanes} x {b.real}>"
        b.ivec = f"<{b.lanes} x i{8 * self.size}>"
        b.mask = f"<{b.lanes} x i1>"

    def _given(self, name: str) -> Value:
        """Whether an optional argument is there."""
        return self.arg[name].ne(0)

    def _array(self, name: str, offset: Value | None = None) -> Row:
        """The first row of an array, or that which begins so many numbers on."""
        type, at = self.arrays[name].number.llvm, self.arg[name]
        return Row(at if offset is None else self.b.gep(at, offset, type), type)

    def _at(self, name: str, t: Value, row: Value) -> Row:
        """A row at step t of an array over time."""
        return self._array(name, t * self.arg[f"{name} steps"] + row * self.arg[f"{name} rows"])

    def _flag(self, name: str, t: Value, row: Value) -> Value:
        b = self.b
        return b.load(b.gep(self.arg[name], t * self.arg[f"{name} steps"] + row, "i8"), "i8")

    def _state(self, i: int, after: bool = False) -> Row:
        """This row of state i before, or after, step t."""
        b, arg, t, name = self.b, self.arg, self.t, self.sequences[i]
        if self.backward:
            offset = t * arg[f"{name} steps"] + self.row * arg[f"{name} rows"]
            if after:
                offset += arg[f"{name} next"]
            return self._array(name, offset)
        t = t + 1 if after else t
        slot = b.select(arg[f"{name} turns"].ne(0), t & 1, t)
        return self._at(name, slot, self.row)

    def _flagged(
        self, given: Value, name: str, t: Value, row: Value, unequal: bool = True
    ) -> Value:
        """Whether the optional flags ``name`` are given and set
        (or, with ``unequal`` False, not set).
        """
        flagged = self.b.variable(0, "i1")
        with self.b.when(given):
            flag = self._flag(name, t, row)
            flagged.value = flag.ne(0) if unequal else flag.eq(0)
        return flagged.value

    def _before(self, i: int, reset: Value) -> Row:
        """State i as step t sees it: a reset puts the initial value in its place."""
        b = self.b
        name = f"reset_state {self.cell.state_names[i]}"
        initial = self._array(name, self.row * self.arg[f"{name} rows"])
        state = self._state(i)
        return Row(b.select(reset, initial.at, state.at), state.type)

    def _take_rows(self, span0: Value, span1: Value) -> Value:
        """Lists the rows of this thread that take step t, and gives their number: forward those
        under no mask, as the states of the others hold at once; backward all.
        """
        b, group = self.b, self.arg["row_group"]
        count = b.variable(0)

        def take(row: Value) -> None:
            place = count.value
            b.store(row, b.gep(self.taken_rows, place, "i64"))
            count.value = place + 1

        def take_or_hold(row: Value) -> None:
            held = self._flagged(self.has_mask, "mask", self.t, row, unequal=False)
            with b.when(held) as otherwise:
                self.row, self.span = row, None
                if self.row_wise:
                    self._hold()
                else:
                    with b.loop(span0, span1) as self.span:
                        self._hold()
            with otherwise:
                take(row)

        with b.loop(*self.groups) as n:
            begin = n * group
            with b.loop(begin, b.smin(begin + group, self.arg["batch"])) as row:
                (take if self.backward else take_or_hold)(row)
        return count.value

    def _row_at(self, place: Value) -> Value:
        """The row at a place of that list."""
        return self.b.load(self.b.gep(self.taken_rows, place, "i64"), "i64")

    # ---- matmuls: of the rows from one place to another in that list -----------------------------
    def _panel(self, first: Value, last: Value) -> None:
        """A step of a panel of rows, stage by stage."""
        b = self.b
        for stage, begin in enumerate(self.stages):
            inside = self.t < self.arg["steps"]
            with b.when(inside if stage else constant(1, "i1")):
                for m in self.matmuls:
                    opens = m.linear.name in self.passes[begin].matmuls
                    if opens or (stage == 0 and m.state is not None):
                        self._row_addresses(m, first, last, first)
                        self._matmul(m, None, first, last)
                with b.loop(first, last) as place:
                    self._row(place, first, None, stage)

    def _row_addresses(self, m: Matmul, begin: Value, end: Value, first: Value) -> None:
        """The operand row of a matmul for each row."""
        b = self.b
        with b.loop(begin, end) as place:
            self.row = row = self._row_at(place)
            if self.backward:
                # Of the step that was before, for what its state's gradient gets.
                t = self.t if m.state is None else self.t - 1
                address = self._at(self._gradient(m), t, row).at
            elif m.state is None:
                operand = self.place["operand", m.linear.operand]
                address = b.gep(self._scratch_of(place, first), operand)
            elif m.state == INPUT:
                address = self._at("gates", self.t, row).at
            else:
                reset = self._flagged(self.has_resets, "resets", self.t, row)
                address = self._before(m.state, reset).at
            if m.staged:
                address = self._stage_operand(m, address, place - first)
            b.store(address, b.gep(self.rows[m.number], place, "i64"))
            if m is self.projecting:
                address = self._at("input", self.t, row).at
                if m.staged:
                    address = self._stage_input(address, place - first)
                b.store(address, b.gep(self.input_rows, place, "i64"))

    # ---- operands of 16 bits, widened, or rounded to 8; in the order of the packed weights ------
    def _place_staged_rows(self, addresses: Value, space: Value) -> None:
        """The places in a thread's workspace where the rows of each matmul are staged."""
        b, (count, fixed) = self.b, self.workspace_lines
        staged = any(m.staged for m in self.matmuls)
        at = b.gep(space, addresses * count + fixed, "i8") if staged else space
        rows = b.value(PANEL, "i64") if self.row_wise else self._tall(self.arg["batch"])
        self.staged: dict[int, Value] = {}
        for m in self.matmuls:
            if m.staged:
                self.staged[m.number] = at
                at = b.gep(at, rows * m.staged_row)
        self.staged_input = at

    @property
    def _staged_type(self) -> str:
        """LLVM's type of the numbers of a staged row, but for integers."""
        g, operands = self.geometry, self.plan.types.operands.llvm
        return operands if g.tiled and g.packs > 1 else self.real

    def _operand_type(self, m: Matmul) -> str:
        """LLVM's type of the numbers that a matmul's operand has in memory."""
        inside = m.state is None and not self.backward
        return self.real if inside else self.arrays[self._operand_array(m)].number.llvm

    def _operand_array(self, m: Matmul) -> str:
        if self.backward:
            return self._gradient(m)
        assert m.state is not None  # computed operands are in no array
        return "gates" if m.state == INPUT else self.sequences[m.state]

    def _stage_operand(self, m: Matmul, address: Value, place: Value) -> Value:
        """Writes a row of an operand to its place, and gives the address."""
        b, g, number = self.b, m.geometry, self._operand_type(m)
        to = b.gep(self.staged[m.number], place * m.staged_row)
        if g.quantized:
            return self._quantize(to, address, m.linear.heads, m.numbers, g.inner)
        all_heads = m.inner // m.parts
        there = constant(1, "i1")
        if self.backward:  # before the first step there are no gradients, nor after the last
            there = self.t < self.arg["steps"]
            if m.state is not None:
                there = self.t > 0
        with b.when(there), b.loop(0, m.linear.heads) as head:
            for n in range(m.parts):
                start = head * m.numbers + n * all_heads
                into = head * g.inner + n * m.stretch
                source = b.gep(address, start, number)
                b.call(self.staging[number], source, b.gep(to, into, self._staged_type), m.numbers)
        return to

    def _stage_input(self, address: Value, place: Value) -> Value:
        """Stages a row of the input, where the kernel multiplies it."""
        b, staged = self.b, self.b.variable(address)
        with b.when(self._given("input")):
            row = self._staged_input(b, self.arg["inputs"])
            to = b.gep(self.staged_input, place * row)
            if self.plan.types.quantized:
                to = self._quantize(to, address, 1, self.arg["inputs"], 0)
            else:
                name = self.staging[self.plan.types.storage.llvm]
                b.call(name, address, to, self.arg["inputs"])
            staged.value = to
        return staged.value

    def _quantize(
        self, header: Value, row: Value, heads: int, numbers: Value | int, apart: int
    ) -> Value:
        """Writes a row as integers, behind its scale, and gives their address; ``numbers`` of each
        head, ``apart`` bytes.
        """
        b = self.b
        numbers, to = b.value(numbers, "i64"), b.gep(header, ROW_HEADER)
        b.call("scale_row", row, header, numbers * heads)
        with b.loop(0, heads) as head:
            into = b.gep(to, head * apart, "i8")
            b.call("quantize", b.gep(row, head * numbers), header, into, numbers)
        return to

    def _gradient(self, m: Matmul) -> str:
        """The array that holds the gradient of a matmul's outputs."""
        shared = self.plan.shares_gradient(m.linear)
        return "d_gates" if shared else f"d_outputs {m.linear.name}"

    def _matmul(self, m: Matmul, span: Value | None, first: Value, last: Value) -> None:
        """acc = operand @ W for a panel of rows, and the tiles of one span or of all units."""
        b, g, place = self.b, m.geometry, self.acc_place[m.linear.name]
        acc = b.gep(self.acc, place)
        count = last - first
        tile0, tile1 = b.value(0, "i64"), b.value(g.tiles, "i64")
        if span is not None:
            per_span = g.span // g.unroll
            tile0 = span * per_span
            tile1 = b.smin(tile0 + per_span, tile1)

        def multiply() -> None:
            with b.loop(0, m.linear.heads) as head, b.loop(tile0, tile1) as tile:
                number = head * g.tiles + tile
                unit = (tile - tile0) * (g.unroll * g.lanes)
                into = b.gep(acc, unit + head * g.units)
                self._tile(m, number, first, into, count, head)

        # The first backward step has no step after it: its state gradients came with the call.
        if m.state is None:
            return multiply()
        if self.backward:
            without = self.t.eq(0)
        elif m.linear.name == RECURRENT:
            without = self._given("product")
        else:
            return multiply()
        with b.when(without) as otherwise:
            self._fill(m, acc, span, first, last)
        with otherwise:
            multiply()

    def _tile(
        self, m: Matmul, number: Value, first: Value, into: Value, count: Value, head: Value
    ) -> None:
        """One tile, block by block of the sum."""
        b, g, arg, blocks = self.b, m.geometry, self.arg, self.blocks[m.number]
        block = g.inner_block(self.plan.types.operands.bytes)
        begins = constant(1, "i1")  # whether the sum begins here, with the biases
        if m is self.projecting:
            projects, sums = self._given("input"), into
            if self.apart:
                sums = b.gep(into, self.input_place - self.acc_place[m.linear.name])
            else:
                begins = ~projects
            inputs = whole_chunks(arg["inputs"], g.chunk)
            with b.when(projects), b.loop(0, inputs, arg["input_block"]) as k0:
                k1 = b.smin(k0 + arg["input_block"], inputs)
                rows = b.gep(self.input_rows, first, "i64")
                elements = packed_rows_of(arg["inputs"], g) + (g.lanes + g.header - 1)
                elements *= g.columns * g.lanes
                weights = b.gep(arg["packed input"], number * elements)
                fresh = b.zext(k0.eq(0), "i64")
                blocks.call(b, weights, rows, sums, count, k0, k1, fresh, 0)
        rows = b.gep(self.rows[m.number], first, "i64")
        weights = b.gep(arg[f"packed {m.linear.name}"], number * g.tile_elements)
        for begin, end, operand, per_head in m.segments:
            shift = head * per_head + (operand - begin)
            with b.loop(begin, end, block) as k0:
                k1 = b.smin(k0 + block, end)
                fresh = b.zext(k0.eq(0) & begins, "i64")
                blocks.call(b, weights, rows, into, count, k0, k1, fresh, shift)

    def _fill(self, m: Matmul, acc: Value, span: Value | None, first: Value, last: Value) -> None:
        """Results of a matmul that is not ours: forward those the caller brings, backward none."""
        b, self.span = self.b, span
        with b.loop(first, last) as place, self._vectors(m.units):
            into = (place - first) * self.acc_row
            into += (self.vector - self._origin(span)) * m.geometry.lanes
            for n, output in enumerate(m.outputs):
                value = constant(0.0, b.vec)
                if not self.backward:
                    at = m.linear.declared.index(output) * m.units
                    row = self._row_at(place) * self.arrays["product"].width
                    brought = self._array("product", row)
                    value = self._with_bias(self._load(brought, at), m.linear.bias_name, at)
                    if output in self.cell.fused:
                        value = self._with_bias(value, "bias_ih", at)
                b.store(value, b.gep(acc, into + n * self.acc_stride[m.linear.name]))

    def _origin(self, span: Value | None) -> Value:
        """The first vector of units of a span."""
        return constant(0, "i64") if span is None else span * self.geometry.span

    def _span_range(self, span: Value | None, units: int) -> tuple[Value, Value]:
        b, begin = self.b, self._origin(span)
        end = constant(-(-units // self.target.lanes(self.real)), "i64")
        return begin, end if span is None else b.smin(begin + self.geometry.span, end)

    # ---- the work on one row ---------------------------------------------------------------------
    def _row(self, place: Value, first: Value, span: Value | None, stage: int = 0) -> None:
        """The work on one row: on the units of one span, or one stage of it on all of them."""
        b = self.b
        self.row, self.span, last = self._row_at(place), span, stage == len(self.stages) - 1
        if self.backward and self.cell.params:
            self.row_group = b.udiv(self.row, self.arg["row_group"])
        self.acc_at = b.gep(self.acc, (place - first) * self.acc_row)
        self.scratch_at = self._scratch_of(place, first)
        if not self.backward or stage:
            self._row_step(stage, last)
            return
        with b.when(self.t > 0):
            previous = self.t - 1
            with b.when(self._flagged(self.has_resets, "resets", previous, self.row)):
                self._divert_reset()
        with b.when(self.t < self.arg["steps"]) as otherwise:
            self._row_step(stage, last)
        with otherwise:
            self._hand_on()

    def _scratch_of(self, place: Value, first: Value) -> Value:
        b = self.b
        if len(self.stages) == 1:
            return self.scratch
        return b.gep(self.scratch, (place - first) * self.scratch_row)

    def _row_step(self, stage: int, last: bool) -> None:
        b = self.b
        self.reset = self._flagged(self.has_resets, "resets", self.t, self.row)
        if not self.backward:
            self._stage(stage, last)
            return
        # A masked step only hands gradients on.
        held = self._flagged(self.has_mask, "mask", self.t, self.row, unequal=False)
        with b.when(held) as otherwise:
            if last:
                self._hold()
        with otherwise:
            self._stage(stage, last)

    def _stage(self, stage: int, last: bool) -> None:
        b = self.b
        end = len(self.passes) if last else self.stages[stage + 1]
        if stage:  # what the stages before have found out about the row
            for each in self.passes[: self.stages[stage]]:
                for node in each.reductions:
                    if node.attrs == (1,):
                        at = b.gep(self.scratch_at, self.place["narrow", node])
                        self.reduced[node] = b.splat(b.load(at, b.real))
        else:
            self.reduced: dict[Expr, Value] = {}
            self.stored: set[Expr] = set()
        for number in range(self.stages[stage], end):
            self._pass(number)

    @contextmanager
    def _vectors(self, units: int) -> Iterator[None]:
        """A loop over the vectors of units at hand; sets where they start and which lanes exist."""
        b = self.b
        with b.loop(*self._span_range(self.span, units), self.width) as vector:
            self.vector, self.unit = vector, vector * self.target.lanes(self.real)
            self.lane_mask = None
            if units % b.lanes:
                self.lane_mask = b.lane_mask(units - self.unit)
            yield

    def _load(self, row: Row, offset: int = 0) -> Value:
        """The vector of units at hand from a row of an array in user layout (no padding)."""
        b, vec = self.b, vector(self.b.lanes, self._bits(row.type))
        at = b.gep(row.at, self.unit + offset, row.type)
        mask = self.lane_mask
        value = b.load(at, vec) if mask is None else b.masked_load(at, mask, 0, vec)
        return self._wide(value, row.type)

    def _bits(self, type: str) -> str:
        """The type as which numbers of an array are loaded: integers, where the cell computes with
        wider ones.
        """
        return type if type == self.real else integer_of(type)

    def _wide(self, value: Value, type: str) -> Value:
        """Numbers of an array as the cell computes with them."""
        return value if type == self.real else widen(self.b, value, type)

    def _narrow(self, value: Value, type: str) -> Value:
        """Numbers that the cell has computed as an array keeps them."""
        return value if type == self.real else narrow(self.b, value, type)

    def _stream(self, name: str, offset: int = 0) -> Value:
        """The vector of units at hand from an array over time,
        which is too large for the near caches.

        Rows lie pages apart, where the hardware does not look ahead by itself.
        """
        b, g = self.b, self.geometry
        row = self._at(name, self.t, self.row)
        later = self.unit + offset + self.arg[f"{name} rows"] * AHEAD
        ahead = b.gep(row.at, later, row.type)
        for i in range(g.width):
            b.prefetch(b.gep(ahead, i * g.lanes, row.type))
        return self._load(row, offset)

    def _store(self, value: Value, row: Row, offset: int = 0) -> None:
        b, value = self.b, self._narrow(value, row.type)
        at = b.gep(row.at, self.unit + offset, row.type)
        if self.lane_mask is None:
            b.store(value, at)
        else:
            b.masked_store(value, at, self.lane_mask)

    def _acc(self, m: Matmul, output: int) -> Value:
        """The results of a matmul for the vector of units at hand."""
        name = m.linear.name
        return self._sums(self.acc_place[name] + output * self.acc_stride[name])

    def _sums(self, place: int) -> Value:
        """The results that begin at a place in each row of them."""
        b = self.b
        unit = (self.vector - self._origin(self.span)) * self.target.lanes(self.real)
        return b.load(b.gep(self.acc_at, unit + place))

    def _clear(self, m: Matmul) -> None:
        b, name = self.b, m.linear.name
        unit = (self.vector - self._origin(self.span)) * self.target.lanes(self.real)
        b.store(constant(0.0, b.vec), b.gep(self.acc_at, unit + self.acc_place[name]))

    def _row_of(self, name: str, width: int, row: Value | None = None) -> Row:
        """A row of a contiguous [B, width] array."""
        return self._array(name, (self.row if row is None else row) * width)

    # ---- forward and backward where the row does not take the step -------------------------------
    def _hold(self) -> None:
        """A masked step: the states stay, and so do their gradients."""
        b, arg = self.b, self.arg
        repeat, zero = arg["masked_output"].ne(CODES["masked_output"]["zero"]), constant(0.0, b.vec)
        for i, units in enumerate(self.widths):
            with self._vectors(units):
                if self.backward:
                    self._carry_into_memory(i)
                    arriving = self._arriving(i)
                    with b.when(repeat & self._given(arriving)):
                        at = self._row_of(f"d_state {self.cell.state_names[i]}", units)
                        dy = self._load(self._at(arriving, self.t, self.row))
                        self._store(self._load(at) + dy, at)
                    continue
                value = self._load(self._state(i))
                self._store(value, self._state(i, after=True))
                if i == 0:
                    with b.when(self._given("out")):
                        out = self._at("out", self.t, self.row)
                        self._store(b.select(repeat, value, zero), out)
        if not self.backward:
            return
        h = self.plan.hidden_size
        with self._vectors(h):
            for gate in range(len(self.gates)):
                self._store(zero, self._at("d_gates", self.t, self.row), gate * h)
        for m in self.matmuls:
            if not self.plan.shares_gradient(m.linear):
                units = m.inner // len(m.linear.outputs)
                with self._vectors(units):
                    for n in range(len(m.linear.outputs)):
                        at = self._at(self._gradient(m), self.t, self.row)
                        self._store(zero, at, n * units)
            with self._vectors(m.units):
                self._keep_operand(m, zero)

    def _carry_into_memory(self, i: int) -> None:
        """dstate += acc: the whole gradient of a state, where the step's graph does not take it."""
        arriving = [self._acc(m, 0) for m in self.matmuls if m.state == i]
        if arriving:
            at = self._row_of(f"d_state {self.cell.state_names[i]}", self.widths[i])
            self._store(sum(arriving, self._load(at)), at)

    def _hand_on(self) -> None:
        for i, units in enumerate(self.widths):
            with self._vectors(units):
                self._carry_into_memory(i)

    def _divert_reset(self) -> None:
        """The step after this one started from the reset value: its gradient goes there,
        not further back.
        """
        b = self.b
        for i, units in enumerate(self.widths):
            with self._vectors(units):
                zero = constant(0.0, b.vec)
                self._carry_into_memory(i)
                for m in self.matmuls:
                    if m.state == i:
                        self._clear(m)
                at, into = (
                    self._row_of(f"d_{what} {self.cell.state_names[i]}", units)
                    for what in ("state", "reset")
                )
                self._store(self._load(into) + self._load(at), into)
                self._store(zero, at)

    def _keep_operand(self, m: Matmul, held: Value | None = None) -> None:
        """Keeps the operand of a matmul, for its weight's gradient, where the caller asks for it:
        one that was computed inside the step, or that a reset replaced.
        """
        name = f"operand {m.linear.name}"
        if m.state is None:  # not within the branch: other matmuls may read the same values
            value = self._value(m.linear.operand) if held is None else held
        with self.b.when(self._given(name)):
            if m.state is not None:
                value = self._load(self._before(m.state, self.reset))
            self._store(value, self._at(name, self.t, self.row))

    # ---- the graph -------------------------------------------------------------------------------
    def _pass(self, number: int) -> None:
        """One pass over the units of a row; the last one computes the results."""
        b, each, last = self.b, self.passes[number], number == len(self.passes) - 1
        operands = [] if last else self._operands(self.passes[number + 1].matmuls)
        arguments = [node.args[0] for node in each.reductions]
        roots = [*(self._results() if last else ()), *arguments, *(node for _, node, _ in operands)]
        self.values: dict[Expr, Value] = {}
        self.words: dict[tuple[int, str], list[Variable]] = {}  # of random masks
        # What all units share is computed once, before the loop.
        for node in topological(roots):
            if node in self.reduced or (node.narrow and self._ready(node)):
                self._value(node)
        shared = dict(self.values)
        row_wide = [node for node in each.reductions if node.attrs == (1,)]
        sums = {node: b.variable(self._empty(node), b.vec) for node in row_wide}
        for size in dict.fromkeys(map(self._size, roots)):
            with self._vectors(self.plan.sizes[size]):
                self.values, self.words = dict(shared), {}
                for node in each.reductions:
                    if self._size(node) == size:
                        value = self._value(node.args[0])
                        if node in sums:
                            self._fold(node, value, sums[node])
                        else:
                            b.store(value, self._scratch("argument", node))
                for m, node, column in operands:
                    if self._size(node) == size:
                        self._store_operand(m, self._value(node), column)
                if last:
                    self._finish(size)
                for node in each.stores:
                    if self._size(node) == size:
                        b.store(self._value(node), self._scratch("kept", node))
        self.stored |= set(each.stores)
        for node, total in sums.items():
            whole = self._whole(node, total.value, self._units(node))
            self.reduced[node] = b.splat(whole)
            if ("narrow", node) in self.place:
                b.store(whole, b.gep(self.scratch_at, self.place["narrow", node]))
        for node in each.reductions:
            if node not in sums:
                self._reduce_groups(node)

    def _operands(self, names: tuple[str, ...]) -> list[tuple[Matmul, Expr, int]]:
        """The operands of matmuls inside the step, and their columns in the operand's row."""
        found = []
        for m in map(self.by_name.__getitem__, names):
            if self.backward:
                parts = self.plan.gradients.linear[m.linear.name].values()
                width = m.inner // len(m.linear.outputs)
                found += [(m, node, n * width) for n, node in enumerate(parts)]
            else:
                found.append((m, m.linear.operand, 0))
        return found

    def _store_operand(self, m: Matmul, value: Value, column: int) -> None:
        if self.backward:
            self._store(value, self._at(self._gradient(m), self.t, self.row), column)
        else:
            self.b.store(value, self._scratch("operand", m.linear.operand))

    def _ready(self, node: Expr) -> bool:
        """Whether a narrow value hangs on finished reductions only."""
        if node in self.new_states:
            return False  # its memory holds every unit
        if node in self.reduced or node in self.loaded:
            return True
        return not is_reduction(node) and all(map(self._ready, node.args))

    def _empty(self, node: Expr) -> float:
        """The reduction of no numbers."""
        return float("-inf") if node.op == "max" else 0.0

    def _both(self, node: Expr, x: Value, y: Value) -> Value:
        """A reduction of two numbers, lane by lane."""
        return ops.EMIT["maximum"](self.b, x, y) if node.op == "max" else x + y

    def _whole(self, node: Expr, lanes: Value, count: int) -> Value:
        """A reduction of so many numbers, from those of all lanes."""
        whole = self.b.reduce_max(lanes) if node.op == "max" else self.b.reduce_add(lanes)
        return whole * (1.0 / count) if node.op == "mean" else whole

    def _fold(self, node: Expr, value: Value, into: Variable) -> None:
        total = into.value
        folded = self._both(node, total, value)
        # Lanes beyond H hold no unit.
        mask = self.lane_mask
        into.value = folded if mask is None else self.b.select(mask, folded, total)

    def _reduce_groups(self, node: Expr) -> None:
        """A reduction over equal groups of units, its result written for every unit."""
        b, (groups,) = self.b, node.attrs
        size = self._units(node) // groups
        source, target = (
            b.gep(self.scratch_at, self.place[what, node]) for what in ("argument", "kept")
        )
        empty, total = self._empty(node), b.unset(b.vec)
        with b.loop(0, groups) as group:
            start = group * size
            total.value = b.value(empty, b.vec)
            with b.loop(0, size, b.lanes) as i:
                lanes = b.lane_mask(size - i)
                part = b.masked_load(b.gep(source, start + i), lanes, empty)
                total.value = self._both(node, total.value, part)
            result = b.splat(self._whole(node, total.value, size))
            with b.loop(0, size, b.lanes) as i:
                lanes = b.lane_mask(size - i)
                b.masked_store(result, b.gep(target, start + i), lanes)
        self.stored.add(node)

    def _scratch(self, what: str, node: Expr) -> Value:
        b = self.b
        return b.gep(self.scratch_at, self.unit + self.place[what, node])

    def _results(self) -> list[Expr]:
        if self.backward:
            return gradient_roots(self.cell, self.plan.gradients)
        return [*self.cell.next, *self.plan.saved, *self.plan.saved_rows]

    def _value(self, node: Expr) -> Value:
        """The value of a node for the vector of units at hand."""
        stack = [node]
        while stack:
            top = stack[-1]
            if top in self.values:
                stack.pop()
                continue
            if self._is_leaf(top):
                self.values[top] = self._leaf(top)
                stack.pop()
                continue
            missing = [arg for arg in top.args if arg not in self.values]
            if missing:
                stack.extend(missing)
                continue
            args = [self.values[arg] for arg in top.args]
            self.values[top] = (
                self._keep(top, *args) if top.op == "keep" else ops.EMIT[top.op](self.b, *args)
            )
            stack.pop()
        return self.values[node]

    def _is_leaf(self, node: Expr) -> bool:
        return (
            not node.args
            or node in self.loaded
            or node in self.stored
            or is_reduction(node)
            or node.op in MATMULS
        )

    def _leaf(self, node: Expr) -> Value:
        b, arg, h = self.b, self.arg, self.plan.hidden_size
        if is_const(node):
            return b.value(node.attrs[0], b.vec)
        if node.op == "hyper":
            return self.hyper[node.attrs[0]]
        if node in self.saved and self.backward:
            value = self._saved(node)
            return value.ne(0.0) if is_boolean(node) else value
        if node in self.new_states:
            return self._load(self._state(self.new_states[node], after=True))
        if node in self.reduced:
            return self.reduced[node]
        if node in self.stored:
            return b.load(self._scratch("kept", node))
        (name, *_) = node.attrs
        if node.op == "state":
            return self._load(self._before(self.states[name], self.reset))
        if node.op == "param":
            return self._load(self._array(f"param {name}"))
        if node.op == "static":
            return self._load(self._row_of("static", h))
        if node.op == "recurrent_mask":
            row = self.row + arg["batch"] * node.attrs[0]
            return self._load(self._row_of("recurrent_mask", self._units(node), row))
        if node.op == "grad":
            return self._upstream(self.states[name])
        if node.op == "x":
            return self._entering(name, biased=True)
        if node.op in MATMULS:
            m = self.by_name[name]
            result = self._acc(m, m.outputs.index("" if self.backward else node.attrs[1]))
            if node.op != "preact":
                return result
            return self._entering(node.attrs[1], biased=False) + result
        raise NotImplementedError(f"{node.op} has no place in the CPU kernel")

    def _saved(self, node: Expr) -> Value:
        """A value that the forward pass has saved, as numbers."""
        b = self.b
        if not node.narrow:
            return self._stream("saved", self.saved[node])
        row = self._at("saved", self.t, self.row)
        at = b.gep(row.at, self.saved[node], row.type)
        return b.splat(self._wide(b.load(at, self._bits(row.type)), row.type))

    def _number(self, node: Expr) -> Value:
        """A value as memory holds it: a condition is 1 or 0."""
        value = self._value(node)
        return self.b.select(value, 1.0, 0.0) if is_boolean(node) else value

    def _entering(self, gate: str, biased: bool) -> Value:
        """The input's part of a gate; ``biased`` where no other sum begins with its bias."""
        b, n = self.b, self.gates[gate]
        place = n * self.plan.hidden_size

        def projected() -> Value:
            value = self._stream("gates", place)
            return self._with_bias(value, "bias_ih", place) if biased else value

        if self.projecting is None or not self.apart:
            return projected()
        stride = self.acc_stride[self.projecting.linear.name]
        entering = b.unset(b.vec)
        with b.when(self._given("input")) as otherwise:
            entering.value = self._sums(self.input_place + n * stride)
        with otherwise:
            entering.value = projected()
        return entering.value

    def _with_bias(self, value: Value, name: str, at: int) -> Value:
        total = self.b.variable(value)
        with self.b.when(self._given(name)):
            total.value = value + self._load(self._array(name), at)
        return total.value

    def _upstream(self, i: int) -> Value:
        """The gradient that reaches new state i: from the step after, and from its sequence."""
        value = self._load(self._row_of(f"d_state {self.cell.state_names[i]}", self.widths[i]))
        for m in self.matmuls:
            if m.state == i:
                value += self._acc(m, 0)
        total, arriving = self.b.variable(value), self._arriving(i)
        with self.b.when(self._given(arriving)):
            total.value = value + self._stream(arriving)
        return total.value

    def _arriving(self, i: int) -> str:
        """The array of the gradients that reach the sequence of state i."""
        return f"d_sequence {self.cell.state_names[i]}" if i else "d_output"

    def _keep(self, node: Expr, rate: Value) -> Value:
        """A random mask: drawn from counters in training, its rate in evaluation.

        See ``anycell.lang.philox``.
        """
        b, (index, per) = self.b, node.attrs
        training = self.arg["training"].ne(0)
        # Four masks share the words of one draw.
        words = self.words.get((index // 4, per))
        if words is None:
            words = self.words[index // 4, per] = self._draw(training, index // 4, per)
        mask = b.variable(rate)
        with b.when(training):
            word = words[index % 4].value
            # Compared in float32 whatever the dtype, so that all engines keep the same units.
            draw = b.uitofp(word >> 8, "float") * 2.0**-24
            kept = draw < b.fptrunc(rate, "float")
            mask.value = b.select(kept, 1.0, 0.0)
        return mask.value

    def _draw(self, training: Value, block: int, per: str) -> list[Variable]:
        """The slots of the four random words of a block of masks, in training."""
        b, lanes = self.b, f"<{self.b.lanes} x i32>"
        slots = [b.unset(lanes) for _ in range(4)]
        with b.when(training):
            low = {
                name: b.trunc(self.arg[name], "i32")
                for name in ("seed", "stream", "time", "time_step")
            }
            high = b.trunc(self.arg["seed"] >> 32, "i32")
            step = low["time"] + low["time_step"] * b.trunc(self.t, "i32")
            unit = b.iota(lanes) + b.splat(b.trunc(self.unit, "i32"))
            stream = low["stream"] << 8 | block
            step = step if per == "step" else constant(0, "i32")
            scalars = b.trunc(self.row, "i32"), step, stream, low["seed"], high
            words = ops.philox(b, unit, *map(b.splat, scalars))
            for word, slot in zip(words, slots, strict=True):
                slot.value = word
        return slots

    def _finish(self, size: str) -> None:
        """Writes those results of a step that have a size, for the vector of units at hand."""
        b, h, plan = self.b, self.plan.hidden_size, self.plan
        states = [i for i, state in enumerate(self.cell.states) if state.size == size]
        if not self.backward:
            values = {i: self._value(self.cell.next[i]) for i in states}
            for i, value in values.items():
                self._store(value, self._state(i, after=True))
            if 0 in values:
                with b.when(self._given("out")):
                    self._store(values[0], self._at("out", self.t, self.row))
            kept = {node: self._number(node) for node in self.saved if self._size(node) == size}
            if kept:
                with b.when(self._given("saved")):
                    row = self._at("saved", self.t, self.row)
                    for node, value in kept.items():
                        if not node.narrow:
                            self._store(value, row, self.saved[node])
                            continue
                        one = self._narrow(b.extract(value, 0), row.type)
                        b.store(one, b.gep(row.at, self.saved[node], row.type))
            return
        # Every value first: the gradients of the states are written over what others still read.
        gradients, own = plan.gradients, size == "H"
        d_gates = [self._value(g) for g in gradients.x.values()] if own else []
        dr = {
            m: [self._value(g) for g in gradients.linear[m.linear.name].values()]
            for m in self.matmuls
            if m.linear.out_size == size and m.linear.name not in plan.carried_back
        }
        dstate = {i: self._value(gradients.state[self.cell.state_names[i]]) for i in states}
        dparam = [self._value(g) for g in gradients.param.values()] if own else []
        dstatic = self._value(gradients.static) if own and gradients.static is not None else None
        for m in self.matmuls:
            if m.linear.in_size == size:
                self._keep_operand(m)
        for gate, value in enumerate(d_gates):
            self._store(value, self._at("d_gates", self.t, self.row), gate * h)
        for m, values_ in dr.items():
            if not plan.shares_gradient(m.linear):
                for n, value in enumerate(values_):
                    at = self._at(self._gradient(m), self.t, self.row)
                    self._store(value, at, n * plan.sizes[size])
        for i, value in dstate.items():
            at = self._row_of(f"d_state {self.cell.state_names[i]}", self.widths[i])
            self._store(value, at)
        for i, value in enumerate(dparam):
            # One sum per group of rows, all of one thread: the order of additions does not depend
            # on threads.
            at = self._row_of("d_params", h * len(dparam), self.row_group)
            self._store(self._load(at, i * h) + value, at, i * h)
        if dstatic is not None:
            at = self._row_of("d_static", h)
            self._store(self._load(at) + dstatic, at)

    def _entry(self) -> None:
        """Runs several sequences (directions): side by side where there are threads for it,
        else in turn.
        """
        b = self.module.private("run_all", "ptr calls, i64 part, i64 parts")
        calls, part, parts = b.args
        count = b.load(calls, "i64")
        whole = (parts % count).eq(0)
        with b.when(whole) as otherwise:
            call = b.load(b.gep(calls, part % count + 1, "i64"), "ptr")
            b.call("sequence", call, part // count, parts // count)
        with otherwise, b.loop(0, count) as i:
            b.call("sequence", b.load(b.gep(calls, i + 1, "i64"), "ptr"), part, parts)
