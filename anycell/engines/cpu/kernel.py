"""Prints a plan as LLVM text: one function that runs a whole sequence, forward or backward.

The two directions are one generator. A step is a matmul whose result never leaves the cache,
followed by element-wise work on it:

    forward     acc = state[t] @ W          then the cell: new states, what the backward pass needs
    backward    acc = d_gates[t+1] @ W'     then its derivative: d_gates[t], gradients of the states

Weights are packed per *tile*, a few vectors of units with all gates side by side, so that a
register block of rows times one tile is the inner loop. Where the cell has row reductions, all
tiles of a panel of rows are multiplied first and the cell's work becomes several passes over each
row (`plan.passes`).

Threads split the rows of the batch, or the units with a barrier each step. Every row is computed by
the same operations in the same order whatever the split, so the bits do not depend on it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from anycell.engines.cpu import isa, jit, ops
from anycell.engines.cpu.ir import Builder, Module, Target, Value, constant
from anycell.engines.cpu.sources import fingerprint
from anycell.lang.cell import RECURRENT, Cell
from anycell.lang.expr import Expr, is_const, topological
from anycell.lang.grad import Gradients
from anycell.lang.ops import is_reduction
from anycell.plan import FREE, Plan, gradient_roots, is_narrow, passes

REALS = {"float32": "float", "float64": "double"}
PANEL = 48  # rows whose matmul results are kept before the cell's work on them
AHEAD = 8  # rows between a load and the prefetch for a later one
SPINS = 4000  # turns at a barrier before a thread offers its core, some 100 us
L1_WEIGHTS = 32 << 10  # bytes of a block of packed weights that stays in the first-level cache


@dataclass(frozen=True)
class Geometry:
    """How a matmul with ``outputs`` results per unit is cut, and the element-wise work after it.

    A tile has ``unroll`` vectors of units, each with all its outputs: ``columns`` vectors. The
    register block takes ``groups`` of columns in turn, with as many rows as the registers hold. The
    element-wise work goes over ``width`` vectors at once, two independent chains of operations
    where one would wait for itself, and over whole ``span``s of tiles.
    """

    units: int  # H
    inner: int  # length of the sum
    outputs: int
    lanes: int
    registers: int

    @property
    def vectors(self) -> int:
        return -(-self.units // self.lanes)

    @functools.cached_property
    def unroll(self) -> int:
        if self.outputs == 0 or self.outputs >= 3:
            return 1

        def cost(unroll: int) -> float:
            rows, n = self.block_rows(unroll * self.outputs), unroll * self.outputs
            padded = -(-self.vectors // unroll) * unroll
            # Per register block and step of the sum: multiply-adds against loads, two of each a
            # cycle.
            return padded / unroll * max(n * rows, n + rows) / rows

        widest = 4 // max(self.outputs, 1) if self.registers == 32 else 2
        return min(range(max(widest, 1), 0, -1), key=cost)

    @property
    def columns(self) -> int:
        return self.unroll * self.outputs

    @property
    def tiles(self) -> int:
        return -(-self.vectors // self.unroll)

    @property
    def width(self) -> int:
        return min(2, self.vectors)

    @property
    def span(self) -> int:
        """Vectors of units whose matmul results are complete before
        the element-wise work on them.
        """
        return self.unroll * (1 if self.unroll % self.width == 0 else self.width)

    @property
    def spans(self) -> int:
        return -(-self.vectors // self.span)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Per register block the places of its columns, in vectors,
        among the results of a row of a span.

        Columns of a tile are ordered by output, then by vector of units, as equal in number as can
        be.
        """
        widest = 4 if self.registers == 32 else 3 if self.columns == 3 else 2
        count = -(-self.columns // widest) or 1
        places = [n * self.span + v for n in range(self.outputs) for v in range(self.unroll)]
        bounds = [i * self.columns // count for i in range(count + 1)]
        return tuple(tuple(places[a:b]) for a, b in itertools.pairwise(bounds))

    def block_rows(self, columns: int) -> int:
        """Rows of a register block: all registers but those of the weights
        and one for the operand.
        """
        most = 10 if columns == 1 else 7  # more would hide no more latency, and compile longer
        return max(1, min(most, (self.registers - columns - 1) // columns))

    @property
    def inner_padded(self) -> int:
        """Rows of a packed tile after the first, which holds the biases;
        packing writes whole vectors.
        """
        return -(-self.inner // self.lanes) * self.lanes

    @property
    def tile_elements(self) -> int:
        return (1 + self.inner_padded) * self.columns * self.lanes

    def inner_block(self, itemsize: int) -> int:
        rows = L1_WEIGHTS // (max(self.columns, 1) * self.lanes * itemsize)
        blocks = max(1, round(self.inner / rows))
        return -(-self.inner // blocks)


def geometry(plan: Plan, backward: bool, target: Target) -> Geometry:
    """The cut of the recurrent matmul, forward or transposed."""
    outputs = len(plan.cell.linears[0].outputs) if plan.cell.linears else 0
    real = REALS[plan.dtype]
    inner, results = (
        (plan.hidden_size * outputs, min(outputs, 1)) if backward else (plan.hidden_size, outputs)
    )
    return Geometry(
        plan.hidden_size, inner if outputs else 0, results, target.lanes(real), target.registers
    )


def arguments(plan: Plan, backward: bool) -> tuple[str, ...]:
    """Names of the entries of a kernel's argument table, in order. All are 64 bits:
    an integer or an address.

    ``*_t`` and ``*_b`` are strides in elements per step and per batch row; those per step are
    negative where time runs backwards. Optional addresses are 0 where absent.
    """
    names = [
        "steps",
        "batch",
        "row_group",
        "time",
        "time_step",
        "units_split",
        "barrier",
        "yield_to",
        "workspace",
        "workspace_stride",
    ]
    names += [
        "weights",
        "hyper",
        "training",
        "seed",
        "stream",
        "mask",
        "mask_t",
        "resets",
        "resets_t",
        "repeat",
    ]
    for i in range(len(plan.cell.states)):
        # The state before each step. `flip`: only two slots, which take turns. `next`: from there
        # to the state after.
        names += [f"state{i}", f"state{i}_t", f"state{i}_b", f"reset{i}", f"reset{i}_b"]
        names.append(f"state{i}_next" if backward else f"state{i}_flip")
    names += [f"param{i}" for i in range(len(plan.cell.params))]
    names += ["static", "bias_x", "saved", "saved_t", "saved_b"]
    if backward:
        names += [
            "dy",
            "dy_t",
            "dy_b",
            "dx",
            "dx_t",
            "dx_b",
            "dr",
            "dr_t",
            "dr_b",
            "operand",
            "operand_t",
            "operand_b",
        ]
        names += [f"dstate{i}" for i in range(len(plan.cell.states))]
        names += [f"dreset{i}" for i in range(len(plan.cell.states))]
        names += ["dparam", "dstatic"]
    else:
        names += ["x", "x_t", "x_b", "out", "out_t", "out_b"]
    return tuple(names)


def _relative(places: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(place - places[0] for place in places)


def _tag(places: tuple[int, ...]) -> str:
    return "_".join(map(str, places))


class Generator:
    """Writes the module of one plan, direction and target."""

    def __init__(self, plan: Plan, backward: bool, target: Target) -> None:
        self.plan, self.cell, self.backward, self.target = plan, plan.cell, backward, target
        self.real = REALS[plan.dtype]
        self.size = plan.itemsize
        self.module = Module(target, self.real)
        self.geometry = geometry(plan, backward, target)
        self.outputs = self.cell.linears[0].outputs if self.cell.linears else ()
        self.names = {name: i for i, name in enumerate(arguments(plan, backward))}
        self.states = {name: i for i, name in enumerate(self.cell.state_names)}
        self.params = {name: i for i, name in enumerate(self.cell.param_names)}
        self.gates = {name: i for i, name in enumerate(self.cell.gates)}
        self.saved = {node: i for i, node in enumerate((*plan.saved, *plan.saved_rows))}
        self.saved_width = len(plan.saved) * plan.hidden_size
        if (
            plan.saved_rows
        ):  # padded to whole cache lines, or every load of the next rows would touch two
            self.saved_width = -(-(self.saved_width + len(plan.saved_rows)) // 16) * 16
        elif self.saved_width * self.size % 1024 == 0:  # see layer._padded
            self.saved_width += 64 // self.size
        if backward:
            new_states = {
                n: i for i, n in enumerate(self.cell.next) if n.op not in FREE and self._kept(i)
            }
            self.new_states = new_states
            self.loaded = frozenset(self.saved) | frozenset(new_states)
            roots = gradient_roots(plan.gradients)
        else:
            self.new_states = {}
            self.loaded = frozenset()
            roots = [*self.cell.next, *plan.saved, *plan.saved_rows]
        self.passes = passes(roots, self.loaded)
        self.row_wise = len(self.passes.reductions) > 1
        grouped = [n for level in self.passes.reductions for n in level if n.attrs != (1,)]
        # Per row in the workspace: kept values, then argument and result of every grouped
        # reduction.
        self.rows_kept = {n: i for i, n in enumerate((*self.passes.spills, *grouped))}
        self.scratch_rows = len(self.rows_kept) + len(grouped)
        self.grouped_argument = {n: len(self.rows_kept) + i for i, n in enumerate(grouped)}
        g = self.geometry
        self.vectorwise = g.spans * g.span * g.lanes  # H rounded up
        self.acc_span = g.outputs * g.span * g.lanes
        self.acc_row = self.acc_span * (g.spans if self.row_wise else 1)
        self.padded = g.units % (g.width * g.lanes) != 0

    def _kept(self, i: int) -> bool:
        return self.cell.states[i].name in self.plan.states

    # ---- sizes the caller allocates --------------------------------------------------------------
    def workspace(self, batch: int) -> int:
        """Bytes per thread: row addresses, matmul results of a panel, kept values of one row."""
        reals = PANEL * self.acc_row + self.scratch_rows * self.vectorwise
        return -(-(batch * 8) // 64) * 64 + -(-(reals * self.size) // 64) * 64 + 64

    # ---- the module -----------------------------------------------------------------------------
    def text(self) -> str:
        for places in dict.fromkeys(map(_relative, self.geometry.groups)) if self.outputs else ():
            for rows in range(1, self.geometry.block_rows(len(places)) + 1):
                self._register_block(places, rows)
            self._row_blocks(places)
        self._sequence()
        self._entry()
        if self.outputs:
            self._pack()
        return str(self.module)

    def _register_block(self, places: tuple[int, ...], rows: int) -> None:
        """acc[rows, places] (+)= operand[rows, k0:k1] @ weights[k0:k1, columns]; the hot loop."""
        name, columns = f"block_{_tag(places)}_x{rows}", len(places)
        params = [
            ("ptr noalias", "weights"),
            ("ptr noalias", "rows"),
            ("ptr noalias", "acc"),
            ("i64", "k0"),
            ("i64", "k1"),
            ("i64", "fresh"),
        ]
        b = self.module.function(name, params, internal=True, inline=False)
        weights, pointers, acc, k0, k1, fresh = b.args
        width, full = self.geometry.columns * b.lanes, b.lanes * self.size
        operand = [b.load(b.gep(pointers, r, "i64"), "ptr") for r in range(rows)]
        sums = [[b.alloca(b.vec) for _ in range(columns)] for _ in range(rows)]
        with b.when(b.icmp("ne", fresh, 0)) as otherwise:
            for c in range(columns):  # the first row of a tile holds the biases
                bias = b.load(b.gep(weights, c * b.lanes), align=full)
                for r in range(rows):
                    b.store(bias, sums[r][c])
        with otherwise:
            for r in range(rows):
                for c in range(columns):
                    b.store(
                        b.load(b.gep(acc, r * self.acc_row + places[c] * b.lanes), align=full),
                        sums[r][c],
                    )

        # Not unrolled: the loop's own instructions fit beside the multiply-adds, and twice the code
        # compiles twice as long.
        with b.loop(k0, k1) as k:
            base = b.gep(weights, b.mul(b.add(k, 1), width))
            w = [b.load(b.gep(base, c * b.lanes), align=full) for c in range(columns)]
            for r in range(rows):
                value = b.splat(b.load(b.gep(operand[r], k), b.real))
                for c in range(columns):
                    b.store(b.fma(value, w[c], b.load(sums[r][c])), sums[r][c])
        for r in range(rows):
            for c in range(columns):
                b.store(
                    b.load(sums[r][c]),
                    b.gep(acc, r * self.acc_row + places[c] * b.lanes),
                    align=full,
                )

    def _row_blocks(self, places: tuple[int, ...]) -> None:
        """Cuts ``count`` rows into register blocks as equal as can be."""
        params = [
            ("ptr", "weights"),
            ("ptr", "rows"),
            ("ptr", "acc"),
            ("i64", "count"),
            ("i64", "k0"),
            ("i64", "k1"),
            ("i64", "fresh"),
        ]
        b = self.module.function(f"rows_{_tag(places)}", params, internal=True, inline=False)
        weights, pointers, acc, count, k0, k1, fresh = b.args
        most = self.geometry.block_rows(len(places))
        blocks = b.sdiv(b.add(count, most - 1), most)
        with b.loop(0, blocks) as i:
            first = b.sdiv(b.mul(i, count), blocks)
            rows = b.sub(b.sdiv(b.mul(b.add(i, 1), count), blocks), first)
            here, into = b.gep(pointers, first, "i64"), b.gep(acc, b.mul(first, self.acc_row))
            for m in range(1, most + 1):
                with b.when(b.icmp("eq", rows, m)):
                    b.call(f"block_{_tag(places)}_x{m}", weights, here, into, k0, k1, fresh)

    # ---- one sequence ----------------------------------------------------------------------------
    def _sequence(self) -> None:
        b = self.module.function(
            "sequence",
            [("ptr", "args"), ("i64", "part"), ("i64", "parts")],
            internal=True,
            inline=False,
        )
        self.b = b
        # From here on a vector is what the element-wise work takes at once.
        self._widen(b)
        table, part, parts = b.args
        self.arg: dict[str, Value] = {}
        pointers = {
            "barrier",
            "yield_to",
            "workspace",
            "weights",
            "hyper",
            "mask",
            "resets",
            "static",
            "bias_x",
            "saved",
            "x",
            "out",
        }
        pointers |= {"dy", "dx", "dr", "operand", "dparam", "dstatic"}
        for name, i in self.names.items():
            is_pointer = name in pointers or name.rstrip("0123456789") in (
                "state",
                "reset",
                "param",
                "dstate",
                "dreset",
            )
            self.arg[name] = b.load(b.gep(table, i, "i64"), "ptr" if is_pointer else "i64")
        arg, g = self.arg, self.geometry
        split = b.icmp("ne", arg["units_split"], 0)

        def share(total: Value, number: Value) -> Value:
            return b.sdiv(b.mul(total, number), parts)

        spans, zero, after = constant(g.spans, "i64"), constant(0, "i64"), b.add(part, 1)
        group = arg["row_group"]
        groups = b.sdiv(b.sub(b.add(arg["batch"], group), 1), group)
        bounds = (b.smin(b.mul(share(groups, n), group), arg["batch"]) for n in (part, after))
        row0, row1 = (
            b.select(split, whole, row)
            for whole, row in zip((zero, arg["batch"]), bounds, strict=True)
        )
        span0, span1 = (
            b.select(split, share(spans, n), whole) for whole, n in ((zero, part), (spans, after))
        )
        space = b.gep(arg["workspace"], b.mul(part, arg["workspace_stride"]), "i8")
        self.rows = space
        addresses = b.mul(b.sdiv(b.add(b.mul(arg["batch"], 8), 63), 64), 64)
        self.acc = b.gep(space, addresses, "i8")
        self.scratch = b.gep(self.acc, PANEL * self.acc_row)
        self.hyper = {
            n: b.splat(b.load(b.gep(arg["hyper"], i), b.real))
            for i, n in enumerate(self.cell.hyper)
        }
        self.has_mask = self._given("mask")
        self.has_resets = self._given("resets")

        steps = b.add(
            arg["steps"], int(self.backward)
        )  # backward: a last round hands the matmul's result on
        with b.loop(0, steps) as t:
            self.t = t
            self._row_addresses(row0, row1)
            if self.row_wise:
                with b.loop(row0, row1, PANEL) as first:
                    last = b.smin(b.add(first, PANEL), row1)
                    with b.loop(span0, span1) as span:
                        self._matmul(span, first, last)
                    with b.loop(first, last) as row:
                        self._row(row, first, None)
            else:
                with b.loop(span0, span1) as span, b.loop(row0, row1, PANEL) as first:
                    last = b.smin(b.add(first, PANEL), row1)
                    self._matmul(span, first, last)
                    with b.loop(first, last) as row:
                        self._row(row, first, span)
            with b.when(split):
                # Nobody starts step t + 1 before everybody has written step t.
                b.atomic_add(arg["barrier"], 1)
                wanted, turns = b.mul(parts, b.add(t, 1)), b.alloca("i64")
                b.store(constant(0, "i64"), turns)
                with b.repeat() as again:
                    b.pause()
                    turn = b.add(b.load(turns, "i64"), 1)
                    b.store(turn, turns)
                    # More threads than cores: let the others have this one.
                    with b.when(b.icmp("sgt", turn, SPINS)):
                        b.call(arg["yield_to"], returns="i32")
                    again(b.icmp("slt", b.atomic_load(arg["barrier"]), wanted))

    def _widen(self, b: Builder) -> None:
        b.lanes = self.geometry.lanes * self.geometry.width
        b.vec = f"<{b.lanes} x {b.real}>"
        b.ivec = f"<{b.lanes} x i{8 * self.size}>"
        b.mask = f"<{b.lanes} x i1>"

    def _given(self, name: str) -> Value:
        return (
            self.b.icmp("ne", self.arg[name], 0)
            if self.arg[name].type == "i64"
            else self._not_null(self.arg[name])
        )

    def _not_null(self, pointer: Value) -> Value:
        return self.b._emit("i1", f"icmp ne {pointer}, null")

    def _at(self, name: str, t: Value, row: Value) -> Value:
        """Address of a row at step t of an array with strides ``name_t`` and ``name_b``."""
        b = self.b
        offset = b.add(b.mul(t, self.arg[f"{name}_t"]), b.mul(row, self.arg[f"{name}_b"]))
        return b.gep(self.arg[name], offset)

    def _flag(self, name: str, t: Value, row: Value) -> Value:
        b = self.b
        return b.load(
            b.gep(self.arg[name], b.add(b.mul(t, self.arg[f"{name}_t"]), row), "i8"), "i8"
        )

    def _state(self, i: int, after: bool = False) -> Value:
        """Address of this row of state i before, or after, step t."""
        b, arg, t = self.b, self.arg, self.t
        if self.backward:
            offset = b.add(b.mul(t, arg[f"state{i}_t"]), b.mul(self.row, arg[f"state{i}_b"]))
            return b.gep(
                arg[f"state{i}"], b.add(offset, arg[f"state{i}_next"]) if after else offset
            )
        t = b.add(t, 1) if after else t
        slot = b.select(b.icmp("ne", arg[f"state{i}_flip"], 0), b.and_(t, 1), t)
        return b.gep(
            arg[f"state{i}"],
            b.add(b.mul(slot, arg[f"state{i}_t"]), b.mul(self.row, arg[f"state{i}_b"])),
        )

    def _flagged(
        self, given: Value, name: str, t: Value, row: Value, unequal: bool = True
    ) -> Value:
        """Whether the optional flags ``name`` are given and set
        (or, with ``unequal`` False, not set).
        """
        b = self.b
        slot = b.alloca("i1")
        b.store(constant(0, "i1"), slot)
        with b.when(given):
            b.store(b.icmp("ne" if unequal else "eq", self._flag(name, t, row), 0), slot)
        return b.load(slot, "i1")

    def _before(self, i: int, reset: Value) -> Value:
        """Address of state i as step t sees it: a reset puts the initial value in its place."""
        b, arg = self.b, self.arg
        initial = b.gep(arg[f"reset{i}"], b.mul(self.row, arg[f"reset{i}_b"]))
        return b.select(reset, initial, self._state(i))

    def _row_addresses(self, row0: Value, row1: Value) -> None:
        """The operand row of the matmul for each batch row."""
        b = self.b
        if not self.outputs:
            return
        with b.loop(row0, row1) as row:
            self.row = row
            if self.backward:
                name = "dr" if self.plan.split_gradient else "dx"
                address = self._at(name, b.sub(self.t, 1), row)
            else:
                address = self._before(0, self._flagged(self.has_resets, "resets", self.t, row))
            b.store(address, b.gep(self.rows, row, "i64"))

    def _matmul(self, span: Value, first: Value, last: Value) -> None:
        """acc = operand @ W for the tiles of one span and a panel of rows,
        block by block of the sum.
        """
        b, g = self.b, self.geometry
        if not self.outputs:
            return
        acc = b.gep(self.acc, b.mul(span, self.acc_span)) if self.row_wise else self.acc
        rows, count = b.gep(self.rows, first, "i64"), b.sub(last, first)
        block = g.inner_block(self.size)
        whole = constant(g.inner, "i64")
        # The first backward step has no step after it: its state gradients came with the call.
        inner = b.select(b.icmp("eq", self.t, 0), 0, whole) if self.backward else whole
        per_span = g.span // g.unroll
        tile0 = b.mul(span, per_span)
        with b.loop(tile0, b.smin(b.add(tile0, per_span), g.tiles)) as tile:
            weights = b.gep(self.arg["weights"], b.mul(tile, g.tile_elements))
            into = b.gep(acc, b.mul(b.sub(tile, tile0), g.unroll * g.lanes))
            with b.loop(0, -(-g.inner // block)) as i:
                k0 = b.smin(b.mul(i, block), inner)
                k1 = b.smin(b.add(k0, block), inner)
                fresh = b.zext(b.icmp("eq", i, 0), "i64")
                column = 0
                for places in g.groups:
                    w, at = b.gep(weights, column * g.lanes), b.gep(into, places[0] * g.lanes)
                    b.call(f"rows_{_tag(_relative(places))}", w, rows, at, count, k0, k1, fresh)
                    column += len(places)

    # ---- the work on one row ---------------------------------------------------------------------
    def _row(self, row: Value, first: Value, span: Value | None) -> None:
        """The work on one row: on the units of one span, or on all of them."""
        b, g = self.b, self.geometry
        self.row = row
        if self.backward and self.params:
            self.row_group = b.udiv(row, self.arg["row_group"])
        self.acc_at = b.gep(self.acc, b.mul(b.sub(row, first), self.acc_row))
        start = constant(0, "i64") if span is None else b.mul(span, g.span)
        end = constant(g.vectors, "i64")
        self.vector_range = (start, end if span is None else b.smin(b.add(start, g.span), end))
        if self.backward:
            with b.when(b.icmp("sgt", self.t, 0)):
                previous = b.sub(self.t, 1)
                with b.when(self._flagged(self.has_resets, "resets", previous, row)):
                    self._divert_reset()
            with b.when(b.icmp("slt", self.t, self.arg["steps"])) as otherwise:
                self._row_step()
            with otherwise:
                self._hand_on()
        else:
            self._row_step()

    def _row_step(self) -> None:
        b = self.b
        self.reset = self._flagged(self.has_resets, "resets", self.t, self.row)
        held = self._flagged(self.has_mask, "mask", self.t, self.row, unequal=False)
        with b.when(held) as otherwise:
            self._hold()
        with otherwise:
            for number in range(len(self.passes.reductions)):
                self._pass(number)

    @contextmanager
    def _vectors(self) -> Iterator[None]:
        """A loop over the vectors of units at hand; sets where they start and which lanes exist."""
        b, g = self.b, self.geometry
        with b.loop(*self.vector_range, g.width) as vector:
            self.vector, self.unit = vector, b.mul(vector, g.lanes)
            self.lane_mask = (
                b.lane_mask(b.sub(constant(g.units, "i64"), self.unit)) if self.padded else None
            )
            yield

    def _load(self, address: Value, offset: int = 0) -> Value:
        """The vector of units at hand from a row of an array in user layout (no padding)."""
        b = self.b
        at = b.gep(address, b.add(self.unit, offset))
        return b.load(at) if self.lane_mask is None else b.masked_load(at, self.lane_mask)

    def _stream(self, name: str, offset: int = 0) -> Value:
        """The vector of units at hand from an array over time,
        which is too large for the near caches.

        Rows lie pages apart, where the hardware does not look ahead by itself.
        """
        b, g = self.b, self.geometry
        address = self._at(name, self.t, self.row)
        ahead = b.gep(address, b.add(b.add(self.unit, offset), b.mul(self.arg[f"{name}_b"], AHEAD)))
        for i in range(g.width):
            b.prefetch(b.gep(ahead, i * g.lanes))
        return self._load(address, offset)

    def _store(self, value: Value, address: Value, offset: int = 0) -> None:
        b = self.b
        at = b.gep(address, b.add(self.unit, offset))
        if self.lane_mask is None:
            b.store(value, at)
        else:
            b.masked_store(value, at, self.lane_mask)

    def _acc(self, output: int) -> Value:
        b, g = self.b, self.geometry
        if not self.row_wise:
            at = b.mul(b.sub(self.vector, self.vector_range[0]), g.lanes)
            return b.gep(self.acc_at, b.add(at, output * g.span * g.lanes))
        span = b.udiv(self.vector, g.span)
        at = b.add(
            b.mul(span, self.acc_span), b.mul(b.sub(self.vector, b.mul(span, g.span)), g.lanes)
        )
        return b.gep(self.acc_at, b.add(at, output * g.span * g.lanes))

    def _row_of(self, name: str, width: int, row: Value | None = None) -> Value:
        """A row of a contiguous [B, width] array."""
        b = self.b
        return b.gep(self.arg[name], b.mul(self.row if row is None else row, width))

    # ---- forward and backward where the row does not take the step -------------------------------
    def _hold(self) -> None:
        """A masked step: the states stay, and so do their gradients."""
        b, arg, h = self.b, self.arg, self.plan.hidden_size
        repeat = b.icmp("ne", arg["repeat"], 0)
        with self._vectors():
            zero = constant(0.0, b.vec)
            if not self.backward:
                values = [
                    self._load(self._before(i, self.reset)) for i in range(len(self.cell.states))
                ]
                for i, value in enumerate(values):
                    self._store(value, self._state(i, after=True))
                with b.when(self._given("out")):
                    self._store(
                        b.select(repeat, values[0], zero), self._at("out", self.t, self.row)
                    )
                return
            self._carry_into_memory()
            with b.when(b.and_(repeat, self._given("dy"))):
                at = self._row_of("dstate0", h)
                self._store(
                    b.fadd(self._load(at), self._load(self._at("dy", self.t, self.row))), at
                )
            for gate in range(len(self.gates)):
                self._store(zero, self._at("dx", self.t, self.row), gate * h)
            if self.plan.split_gradient:
                for output in range(len(self.outputs)):
                    self._store(zero, self._at("dr", self.t, self.row), output * h)
            self._keep_operand()

    def _carry_into_memory(self) -> None:
        """dstate0 += acc: the whole gradient of the state,
        where the step's own graph does not take it.
        """
        b = self.b
        if self.outputs:
            at = self._row_of("dstate0", self.plan.hidden_size)
            self._store(b.fadd(self._load(at), b.load(self._acc(0))), at)

    def _hand_on(self) -> None:
        with self._vectors():
            self._carry_into_memory()

    def _divert_reset(self) -> None:
        """The step after this one started from the reset value: its gradient goes there,
        not further back.
        """
        b, h = self.b, self.plan.hidden_size
        with self._vectors():
            zero = constant(0.0, b.vec)
            self._carry_into_memory()
            if self.outputs:
                b.store(zero, self._acc(0))
            for i in range(len(self.cell.states)):
                at, into = self._row_of(f"dstate{i}", h), self._row_of(f"dreset{i}", h)
                self._store(b.fadd(self._load(into), self._load(at)), into)
                self._store(zero, at)

    def _keep_operand(self) -> None:
        """Where resets made them differ from the hidden states: the matmul's operand,
        for the weight gradient.
        """
        with self.b.when(self._given("operand")):
            self._store(
                self._load(self._before(0, self.reset)), self._at("operand", self.t, self.row)
            )

    # ---- the graph -------------------------------------------------------------------------------
    def _pass(self, number: int) -> None:
        """One pass over the units of a row; the last one computes the results."""
        b = self.b
        reductions, last = self.passes.reductions[number], number == len(self.passes.reductions) - 1
        if number == 0:
            self.reduced: dict[Expr, Value] = {}
            self.stored: set[Expr] = set()
        roots = self._results() if last else [node.args[0] for node in reductions]
        self.values: dict[Expr, Value] = {}
        # What all units share is computed once, before the loop.
        for node in topological(roots):
            if node in self.reduced or (is_narrow(node) and self._ready(node)):
                self._value(node)
        shared = dict(self.values)
        sums = {node: b.alloca(b.vec) for node in reductions if node.attrs == (1,)}
        for node, slot in sums.items():
            b.store(constant(float("-inf") if node.op == "max" else 0.0, b.vec), slot)
        with self._vectors():
            self.values = dict(shared)
            for node in reductions:
                value = self._value(node.args[0])
                if node in sums:
                    self._fold(node, value, sums[node])
                else:
                    b.store(value, self._scratch(self.grouped_argument[node]))
            if last:
                self._finish()
            for node in self.passes.stores[number]:
                b.store(self._value(node), self._scratch(self.rows_kept[node]))
        self.stored |= set(self.passes.stores[number])
        for node, slot in sums.items():
            total = b.load(slot)
            whole = b.reduce_max(total) if node.op == "max" else b.reduce_add(total)
            if node.op == "mean":
                whole = b.fmul(whole, 1.0 / self.plan.hidden_size)
            self.reduced[node] = b.splat(whole)
        for node in reductions:
            if node not in sums:
                self._reduce_groups(node)

    def _ready(self, node: Expr) -> bool:
        """Whether a narrow value hangs on finished reductions only."""
        if node in self.new_states:
            return False  # its memory holds every unit
        if node in self.reduced or node in self.loaded:
            return True
        return not is_reduction(node) and all(map(self._ready, node.args))

    def _fold(self, node: Expr, value: Value, slot: Value) -> None:
        b, total = self.b, self.b.load(slot)
        folded = ops.EMIT["maximum"](b, total, value) if node.op == "max" else b.fadd(total, value)
        # Lanes beyond H hold no unit.
        b.store(folded if self.lane_mask is None else b.select(self.lane_mask, folded, total), slot)

    def _reduce_groups(self, node: Expr) -> None:
        """A reduction over equal groups of units, its result written for every unit."""
        b, (groups,) = self.b, node.attrs
        size = self.plan.hidden_size // groups
        source = b.gep(self.scratch, self.grouped_argument[node] * self.vectorwise)
        target = b.gep(self.scratch, self.rows_kept[node] * self.vectorwise)
        empty = float("-inf") if node.op == "max" else 0.0
        slot = b.alloca(b.vec)
        with b.loop(0, constant(groups, "i64")) as group:
            start = b.mul(group, size)
            b.store(constant(empty, b.vec), slot)
            with b.loop(0, constant(size, "i64"), b.lanes) as i:
                lanes = b.lane_mask(b.sub(constant(size, "i64"), i))
                part = b.masked_load(b.gep(source, b.add(start, i)), lanes, empty)
                total = b.load(slot)
                b.store(
                    ops.EMIT["maximum"](b, total, part)
                    if node.op == "max"
                    else b.fadd(total, part),
                    slot,
                )
            total = b.load(slot)
            whole = b.reduce_max(total) if node.op == "max" else b.reduce_add(total)
            result = b.splat(b.fmul(whole, 1.0 / size) if node.op == "mean" else whole)
            with b.loop(0, constant(size, "i64"), b.lanes) as i:
                lanes = b.lane_mask(b.sub(constant(size, "i64"), i))
                b.masked_store(result, b.gep(target, b.add(start, i)), lanes)
        self.stored.add(node)

    def _scratch(self, slot: int) -> Value:
        b = self.b
        return b.gep(self.scratch, b.add(self.unit, slot * self.vectorwise))

    def _results(self) -> list[Expr]:
        if self.backward:
            return gradient_roots(self.plan.gradients)
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
            or node.op in ("linear", "preact")
        )

    def _leaf(self, node: Expr) -> Value:
        b, arg, h = self.b, self.arg, self.plan.hidden_size
        if is_const(node):
            return constant(node.attrs[0], b.vec)
        if node.op == "hyper":
            return self.hyper[node.attrs[0]]
        if node in self.saved and self.backward:
            slot, wide = self.saved[node], len(self.plan.saved)
            if slot < wide:
                return self._stream("saved", slot * h)
            at = self._at("saved", self.t, self.row)
            return b.splat(b.load(b.gep(at, wide * h + slot - wide), b.real))
        if node in self.new_states:
            return self._load(self._state(self.new_states[node], after=True))
        if node in self.reduced:
            return self.reduced[node]
        if node in self.stored:
            return b.load(self._scratch(self.rows_kept[node]))
        (name, *_) = node.attrs
        if node.op == "state":
            return self._load(self._before(self.states[name], self.reset))
        if node.op == "param":
            return self._load(arg[f"param{self.params[name]}"])
        if node.op == "static":
            return self._load(self._row_of("static", h))
        if node.op == "grad":
            return self._upstream(self.states[name])
        if node.op == "x":
            gate = self.gates[name]
            value = self._stream("x", gate * h)
            return self._with_bias(value, gate)
        if node.op == "linear":
            return b.load(self._acc(self.outputs.index(node.attrs[1])))
        if node.op == "preact":
            gate = self.gates[node.attrs[1]]
            projected = self._stream("x", gate * h)
            return b.fadd(projected, b.load(self._acc(self.outputs.index(node.attrs[1]))))
        raise NotImplementedError(f"{node.op} has no place in the CPU kernel")

    def _with_bias(self, value: Value, gate: int) -> Value:
        b = self.b
        slot = b.alloca(b.vec)
        b.store(value, slot)
        with b.when(self._given("bias_x")):
            b.store(
                b.fadd(value, self._load(self.arg["bias_x"], gate * self.plan.hidden_size)), slot
            )
        return b.load(slot)

    def _upstream(self, i: int) -> Value:
        """The gradient that reaches new state i: from the step after, and from the output."""
        b = self.b
        value = self._load(self._row_of(f"dstate{i}", self.plan.hidden_size))
        if i:
            return value
        if self.outputs:
            value = b.fadd(value, b.load(self._acc(0)))
        slot = b.alloca(b.vec)
        b.store(value, slot)
        with b.when(self._given("dy")):
            b.store(b.fadd(value, self._stream("dy")), slot)
        return b.load(slot)

    def _keep(self, node: Expr, rate: Value) -> Value:
        """A random mask: drawn from counters in training, its rate in evaluation.

        See ``anycell.philox``.
        """
        b, (index, per) = self.b, node.attrs
        slot = b.alloca(b.vec)
        b.store(rate, slot)
        with b.when(b.icmp("ne", self.arg["training"], 0)):
            low = {
                name: b.trunc(self.arg[name], "i32")
                for name in ("seed", "stream", "time", "time_step")
            }
            high = b.trunc(b.lshr(self.arg["seed"], 32), "i32")
            step = b.add(low["time"], b.mul(low["time_step"], b.trunc(self.t, "i32")))
            unit = b.add(b.iota(f"<{b.lanes} x i32>"), b.splat(b.trunc(self.unit, "i32")))
            stream = b.or_(b.shl(low["stream"], 8), index // 4)
            row = b.trunc(self.row, "i32")
            words = ops.philox(
                b,
                unit,
                b.splat(row),
                b.splat(step if per == "step" else constant(0, "i32")),
                b.splat(stream),
                b.splat(low["seed"]),
                b.splat(high),
            )
            # Compared in float32 whatever the dtype, so that all engines keep the same units.
            draw = b.fmul(b.uitofp(b.lshr(words[index % 4], 8), "float"), 2.0**-24)
            kept = b.fcmp("olt", draw, b.fptrunc(rate, "float") if b.real == "double" else rate)
            b.store(b.select(kept, constant(1.0, b.vec), constant(0.0, b.vec)), slot)
        return b.load(slot)

    def _finish(self) -> None:
        """Writes the results of a step for the vector of units at hand."""
        b, h, plan = self.b, self.plan.hidden_size, self.plan
        if not self.backward:
            values = [self._value(node) for node in self.cell.next]
            for i, value in enumerate(values):
                self._store(value, self._state(i, after=True))
            with b.when(self._given("out")):
                self._store(values[0], self._at("out", self.t, self.row))
            if self.saved:
                kept = [self._value(node) for node in self.saved]
                with b.when(self._given("saved")):
                    at, wide = self._at("saved", self.t, self.row), len(plan.saved)
                    for slot, value in enumerate(kept):
                        if slot < wide:
                            self._store(value, at, slot * h)
                        else:
                            b.store(b.extract(value, 0), b.gep(at, wide * h + slot - wide))
            return
        # Every value first: the gradients of the states are written over what others still read.
        gradients = plan.gradients
        dx = [self._value(g) for g in gradients.x.values()]
        dr = (
            [self._value(gradients.linear[RECURRENT][o]) for o in self.outputs]
            if self.outputs
            else []
        )
        dstate = [self._value(gradients.state[name]) for name in self.cell.state_names]
        dparam = [self._value(g) for g in gradients.param.values()]
        dstatic = None if gradients.static is None else self._value(gradients.static)
        self._keep_operand()
        for gate, value in enumerate(dx):
            self._store(value, self._at("dx", self.t, self.row), gate * h)
        if plan.split_gradient:
            for output, value in enumerate(dr):
                self._store(value, self._at("dr", self.t, self.row), output * h)
        for i, value in enumerate(dstate):
            self._store(value, self._row_of(f"dstate{i}", h))
        for i, value in enumerate(dparam):
            # One sum per group of rows, all of one thread: the order of additions does not depend
            # on threads.
            at = self._row_of("dparam", h * len(dparam), self.row_group)
            self._store(b.fadd(self._load(at, i * h), value), at, i * h)
        if dstatic is not None:
            at = self._row_of("dstatic", h)
            self._store(b.fadd(self._load(at), dstatic), at)

    # ---- entry and packing -----------------------------------------------------------------------
    def _entry(self) -> None:
        """Runs several sequences (directions): side by side where there are threads for it,
        else in turn.
        """
        b = self.module.function("run", [("ptr", "calls"), ("i64", "part"), ("i64", "parts")])
        calls, part, parts = b.args
        count = b.load(calls, "i64")
        whole = b.icmp("eq", b.srem(parts, count), 0)
        with b.when(whole) as otherwise:
            call = b.load(b.gep(calls, b.add(b.srem(part, count), 1), "i64"), "ptr")
            b.call("sequence", call, b.sdiv(part, count), b.sdiv(parts, count))
        with otherwise, b.loop(0, count) as i:
            b.call("sequence", b.load(b.gep(calls, b.add(i, 1), "i64"), "ptr"), part, parts)

    def _pack(self) -> None:
        """Weights [G*H, H] of any strides (one of them 1) into tiles; see ``Geometry``."""
        g, h = self.geometry, self.plan.hidden_size
        self._pack_block()
        b = self.module.function("pack", [("ptr", "args"), ("i64", "part"), ("i64", "parts")])
        table, part, parts = b.args
        types = ("ptr", "i64", "i64", "ptr", "ptr", "ptr")
        source, rows, columns, bias_x, bias_h, packed = (
            b.load(b.gep(table, i, "i64"), t) for i, t in enumerate(types)
        )
        tiles = constant(g.tiles, "i64")
        first, last = (b.sdiv(b.mul(tiles, n), parts) for n in (part, b.add(part, 1)))
        slot = b.alloca(b.vec)
        with b.loop(first, last) as tile:
            into = b.gep(packed, b.mul(tile, g.tile_elements))
            for v in range(g.unroll):
                unit = b.mul(b.add(b.mul(tile, g.unroll), v), g.lanes)
                left = b.sub(constant(h, "i64"), unit)
                mask = b.lane_mask(left)
                if self.backward:
                    column = b.gep(into, v * g.lanes)
                    b.store(constant(0.0, b.vec), column)
                    for n, output in enumerate(self.outputs):
                        start = b.gep(
                            source, b.add(b.mul(rows, self.gates[output] * h), b.mul(unit, columns))
                        )
                        at = b.gep(column, (1 + n * h) * g.columns * g.lanes)
                        b.call("pack_block", start, columns, rows, left, constant(h, "i64"), at)
                    continue
                for n, output in enumerate(self.outputs):
                    column = b.gep(into, (n * g.unroll + v) * g.lanes)
                    gate = self.gates[output]
                    b.store(constant(0.0, b.vec), slot)
                    for bias in (bias_x, bias_h) if output in self.cell.fused else (bias_h,):
                        with b.when(b._emit("i1", f"icmp ne {bias}, null")):
                            part_ = b.masked_load(b.gep(bias, b.add(unit, gate * h)), mask)
                            b.store(b.fadd(b.load(slot), part_), slot)
                    b.store(b.load(slot), column)
                    start = b.gep(source, b.mul(b.add(unit, gate * h), rows))
                    at = b.gep(column, g.columns * g.lanes)
                    b.call("pack_block", start, rows, columns, left, constant(h, "i64"), at)

    def _pack_block(self) -> None:
        """A column of vectors: element k of unit u is
        source[u * lane_stride + k * inner_stride].
        """
        params = [
            ("ptr", "source"),
            ("i64", "lane_stride"),
            ("i64", "inner_stride"),
            ("i64", "units"),
            ("i64", "count"),
            ("ptr", "packed"),
        ]
        b = self.module.function("pack_block", params, internal=True, inline=False)
        source, lane_stride, inner_stride, units, count, packed = b.args
        width = self.geometry.columns * b.lanes
        with b.when(b.icmp("eq", lane_stride, 1)) as otherwise:
            mask = b.lane_mask(units)
            with b.loop(0, count) as k:
                b.store(
                    b.masked_load(b.gep(source, b.mul(k, inner_stride)), mask),
                    b.gep(packed, b.mul(k, width)),
                )
        with otherwise, b.loop(0, count, b.lanes) as k:
            inside = b.lane_mask(b.sub(count, k))
            rows = []
            for lane in range(b.lanes):
                exists = b.splat(b.icmp("slt", constant(lane, "i64"), units))
                at = b.gep(source, b.add(b.mul(lane_stride, lane), k))
                rows.append(b.masked_load(at, b.and_(inside, exists)))
            for i, vector in enumerate(b.transpose(rows)):
                b.store(vector, b.gep(packed, b.mul(b.add(k, i), width)))


class Kernel:
    """A compiled plan in one direction: addresses, and the sizes and names that a call needs."""

    def __init__(self, generator: Generator, library: jit.Library) -> None:
        self.library, self.geometry = library, generator.geometry
        self.names = tuple(generator.names)
        self.index = generator.names
        self.workspace = generator.workspace
        self.saved_width = generator.saved_width
        # A row reduction needs all units of a row in one thread.
        self.units_splittable = not generator.row_wise
        self.packed_elements = (
            self.geometry.tiles * self.geometry.tile_elements if generator.outputs else 0
        )
        self.run = library.address("run")
        self.pack = library.address("pack") if generator.outputs else 0


_kernels: dict[tuple[str, Target], Kernel] = {}


def loaded(plan: Plan, backward: bool, target: Target) -> Kernel | None:
    """The kernel, if this process has it."""
    return _kernels.get((description(plan, backward), target))


def compiled(plan: Plan, backward: bool = False) -> Kernel:
    """The kernel of a plan for the instruction set in use; compiled once per process,
    kept on disk.
    """
    target = isa.current()
    key = description(plan, backward), target
    found = _kernels.get(key)
    if found is None:
        with jit.lock:
            found = _kernels.get(key)
            if found is None:
                generator = Generator(plan, backward, target)
                library = jit.compile(*request(generator))
                found = _kernels[key] = Kernel(generator, library)
    return found


def request(
    generator: Generator,
) -> tuple[Callable[[], str], tuple[str, ...], Target, str | None]:
    """What ``jit`` is asked for: how to print the text, functions, target and recipe."""
    plan, backward, target = generator.plan, generator.backward, generator.target
    symbols = ("run", "pack") if generator.outputs else ("run",)
    sources = fingerprint()
    recipe = f"{sources}\n{target}\n{description(plan, backward)}" if sources else None
    # A generator prints once, and what it has printed need not stay in memory.
    return lambda: Generator(plan, backward, target).text(), symbols, target, recipe


@functools.lru_cache(maxsize=1024)
def description(plan: Plan, backward: bool) -> str:
    """All of a plan that a kernel's text follows from, at a small part of the text's price.

    It is the plan as it came out, with its graphs and choices, so that nothing hangs on its coming
    out the same in another process. Values of hyperparameters are no part of it.
    """
    leaves = list(_leaves(plan))
    nodes = topological([leaf for leaf in leaves if isinstance(leaf, Expr)])
    number = {node: i for i, node in enumerate(nodes)}
    lines = [f"{n.op} {n.attrs!r} {[number[arg] for arg in n.args]}" for n in nodes]
    rest = [f"#{number[leaf]}" if isinstance(leaf, Expr) else repr(leaf) for leaf in leaves]
    return "\n".join((f"backward {backward}", *lines, " ".join(rest)))


def _leaves(value: object) -> Iterator[Expr | str | float | None]:
    """What a plan is made of, in order: expressions and plain values."""
    if isinstance(value, Cell):
        # The kernel reads hyperparameters by their place among all that the function declares,
        # while the graph has only those that it uses.
        yield from (value.key, *value.hyper)
    elif isinstance(value, Plan | Gradients):
        for field in dataclasses.fields(value):
            if field.name not in ("engine", "reason"):
                yield field.name
                yield from _leaves(getattr(value, field.name))
    elif isinstance(value, Mapping):
        yield from _leaves(tuple(value.items()))
    elif isinstance(value, tuple):
        yield "("
        for part in value:
            yield from _leaves(part)
        yield ")"
    elif value is None or isinstance(value, Expr | str | int | float):
        yield value
    else:
        raise TypeError(f"a kernel's name has no place for {value!r}")
