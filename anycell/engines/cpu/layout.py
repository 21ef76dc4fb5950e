"""The layout of a kernel: everything that a plan, a direction and an instruction set determine
before a line is printed.

A thread's workspace has, one after the other:

    lists        addresses of each matmul's operand rows; rows that take the step; addresses of the
                 input's rows
    results      of matmuls, for a panel of rows
    scratch      operands and values kept for later passes: of a panel if stages > 1, else a row
    staged       rows that are rounded or widened before they are multiplied, see ``matmul``
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from anycell.engines.cpu import tiles
from anycell.engines.cpu.geometry import (
    INPUT,
    QUANTIZED,
    ROW_HEADER,
    Geometry,
    Matmul,
    matmuls,
    projecting,
    whole,
)  # fmt: skip
from anycell.engines.cpu.ir import Builder, Target, Value
from anycell.engines.cpu.table import Count, align, entries
from anycell.lang.declare import ONE
from anycell.lang.expr import Expr
from anycell.plan import Plan, arrays, gradient_roots, in_sequence, passes, root_sizes

PANEL = 48  # rows whose matmul results are computed before the cell's work on them


class Results(NamedTuple):
    """The places of matmul results in a row of results.

    Attributes:
        places, strides: by matmul, where its results begin, and the stride between its outputs.
        input: where the input's results begin, if they have a place of their own.
        row: the stride between rows.
    """

    places: dict[str, int]
    strides: dict[str, int]
    input: int
    row: int


class Layout:
    """The layout of the kernel of a plan, in one direction and for one target.

    Attributes:
        entries, arrays: see ``table`` and ``anycell.plan.arrays``.
        sequences: the array of each state.
        loaded: values of the graph that are in memory: ``saved``, and ``new_states`` by number.
        roots: the expressions that a step computes, in ``passes``.
        symbols: the size symbol of each root's destination, since a plain number has no size.
        stages: the first pass, and passes that begin with matmuls inside the step.
        row_wise: whether a panel of rows takes the step together; otherwise the work on a span of
            units follows its tiles at once.
        projecting: the matmul to whose sums the kernel can add the input projection; ``apart``
            if the input's part of a gate has a place of its own.
        width: vectors that the element-wise work takes at once.
        results, scratch: places in the rows of matmul results and of scratch memory.
    """

    def __init__(self, plan: Plan, backward: bool, target: Target) -> None:
        self.plan, self.cell, self.backward, self.target = plan, plan.cell, backward, target
        # Registers and workspaces hold numbers of the cell's math; each array has its own type.
        self.real, self.size = plan.types.math.llvm, plan.types.math.bytes
        self.lanes = target.lanes(self.real)
        self.entries, self.arrays = entries(plan, backward), arrays(plan, backward)
        self.sequences = [n for n, array in self.arrays.items() if array.begins == "states"]
        self.saved = plan.saved_places
        self.new_states: dict[Expr, int] = {}
        self.loaded: frozenset[Expr] = frozenset()
        kept_values = [*plan.saved, *plan.saved_rows]
        self.roots = [*self.cell.next, *kept_values]
        self.symbols = [*(s.size for s in self.cell.states), *map(plan.symbol, kept_values)]
        if backward:
            self.roots = gradient_roots(self.cell, plan.gradients)
            self.symbols = root_sizes(self.cell)
            kept = [state.name in plan.states for state in self.cell.states]
            self.new_states = {
                n: i for i, n in enumerate(self.cell.next) if in_sequence(self.cell, n) and kept[i]
            }
            self.loaded = frozenset(self.saved) | frozenset(self.new_states)
        self.passes = passes(self.roots, self.loaded)
        self.stages = [p for p, part in enumerate(self.passes) if part.matmuls or p == 0]
        self.matmuls = matmuls(plan, backward, target)
        self.by_name = {m.linear.name: m for m in self.matmuls}
        # Matmuls by one weight read one packed copy, that of the first of them.
        self.packed_by = {m.linear.name: self._packs(m) for m in self.matmuls}
        self.packing = [m for m in self.matmuls if self.packed_by[m.linear.name] is m]
        self.tiled = any(m.geometry.tiled for m in self.matmuls)
        self.projecting = projecting(self.matmuls, self.cell)
        self.apart = self.projecting is not None and self.cell.fused != set(self.cell.gates)
        # A simple cell has one matmul, or two of one shape.
        self.geometry = Geometry(plan.hidden_size, 0, 0, self.lanes, target.registers)
        if self.matmuls:
            self.geometry = self.matmuls[0].geometry
        sizes = {plan.sizes[symbol] for symbol in self.symbols}
        plain = all(m.state in (0, INPUT) and m.linear.heads == 1 for m in self.matmuls)
        alike = {(m.units, m.geometry.outputs) for m in self.matmuls}
        simple = plain and len(alike) < 2 and sizes <= {plan.hidden_size}
        self.row_wise = len(self.passes) > 1 or not simple
        self.width = self.geometry.width
        if self.row_wise:
            # Vectors of size 1 have one unit in any case.
            several = {plan.sizes[symbol] for symbol in self.symbols if symbol != ONE}
            self.width = min(2, -(-min(several, default=plan.hidden_size) // self.lanes))
        self.results = self._results()
        self.scratch, self.scratch_row = self._scratch()
        # Multiply-adds and staged bytes of a row, and packed bytes of a direction.
        self.work = sum(
            m.units * m.inner * m.geometry.outputs // m.linear.heads for m in self.matmuls
        )
        self.packed_bytes = sum(m.packed_elements for m in self.packing) * self.size
        self.staged_bytes = sum(m.staged_row for m in self.matmuls if m.staged) * self.size

    def _packs(self, m: Matmul) -> Matmul:
        """The first matmul whose packed weights are those of m."""

        def packed(m: Matmul) -> tuple[object, ...]:
            linear = m.linear
            return linear.weight, linear.bias, linear.outputs, m.units, m.inner, m.geometry

        return next(other for other in self.matmuls if packed(other) == packed(m))

    def _results(self) -> Results:
        places, strides, at, of_input = {}, {}, 0, 0
        for m in self.matmuls:
            g, name = m.geometry, m.linear.name
            last = (m.linear.heads - 1) * g.units + g.tiles * g.unroll * self.lanes
            stride = g.span * self.lanes
            if self.row_wise:
                stride = whole(max(m.units, last), self.width * self.lanes)
            places[name], strides[name] = at, stride
            at += g.outputs * stride
            if m is self.projecting and self.apart:
                of_input = at
                at += g.outputs * stride
        return Results(places, strides, of_input, at)

    def _scratch(self) -> tuple[dict[tuple[str, Expr], int], int]:
        """Returns places in a row's scratch memory, by use and value; and the row's length."""
        reductions = [n for part in self.passes for n in part.reductions]
        grouped = [n for n in reductions if n.attrs != (1,)]
        stored = [n for part in self.passes for n in part.stores]
        inside = [] if self.backward else [m for m in self.matmuls if m.state is None]
        operands = [m.linear.operand for m in inside]
        inner = {m.linear.operand: 0 for m in inside}  # a number may be the operand of several
        for m in inside:
            inner[m.linear.operand] = max(inner[m.linear.operand], m.inner)
        uses: Sequence[tuple[str, list[Expr]]] = (
            ("kept", [*stored, *grouped]), ("argument", grouped), ("operand", operands)
        )  # fmt: skip
        places, at, step = {}, 0, self.width * self.lanes
        for use, nodes in uses:
            for node in dict.fromkeys(nodes):
                places[use, node] = at
                width = inner[node] if use == "operand" else self.plan.width(node)
                at += whole(width, step)
        if len(self.stages) > 1:
            places |= {("narrow", node): at + i for i, node in enumerate(reductions)}
            at += len(reductions)
        return places, whole(at, step)

    def operand_symbol(self, m: Matmul) -> str:
        """The size symbol of a matmul's operand: backward, the gradients of its outputs."""
        return m.linear.out_size if self.backward else m.linear.in_size

    def gradient(self, m: Matmul) -> str:
        """The array that holds the gradient of a matmul's outputs."""
        shared = self.plan.shares_gradient(m.linear)
        return "d_gates" if shared else f"d_outputs {m.linear.name}"

    def operand_type(self, m: Matmul) -> str:
        """The LLVM type of the numbers of a matmul's operand in memory."""
        if self.backward:
            name = self.gradient(m)
        elif m.state is None:
            return self.real  # computed within the step
        else:
            name = "gates" if m.state == INPUT else self.sequences[m.state]
        return self.arrays[name].number.llvm

    # ---- sizes -----------------------------------------------------------------------------------
    @property
    def workspace_lines(self) -> tuple[int, int]:
        """Counts the lists with an entry per batch row, and the bytes of results and scratch."""
        rows = PANEL if len(self.stages) > 1 else 1
        reals = PANEL * self.results.row + rows * self.scratch_row
        return len(self.matmuls) + 2, align(reals * self.size) + 64

    def workspace(self, batch: Count, staged_input: Count | int = 0) -> Count:
        """Bytes per thread, with ``staged_input`` bytes for a staged row of the input."""
        addresses, fixed = self.workspace_lines
        total = align(batch * 8) * addresses + fixed
        if self.staged_bytes:
            total += (staged_input + self.staged_bytes) * self.staged_rows(batch)
        return total

    def staged_rows(self, batch: Count) -> Count | int:
        """Rows that are staged for a batch; matrix tiles read 16 rows at once."""
        if self.row_wise:
            return PANEL
        return (batch + (tiles.ROWS - 1)) & -tiles.ROWS if self.tiled else batch

    def staged_input(self, b: Builder, inputs: Value) -> Value:
        """The stride between staged rows of the input, in numbers: whole vectors, and no large
        power of two. 0 if the caller multiplies the input.
        """
        count = inputs
        if self.plan.types.quantized:
            count = inputs // QUANTIZED + (ROW_HEADER + 1)
        vectors = (count + self.lanes - 1) // self.lanes + 1
        row = (vectors | 1) * self.lanes
        return b.select(inputs.ne(0), row, 0)
