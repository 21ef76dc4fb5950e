"""Prints the matmuls of a step for some of the rows that take the step: finds the operands, widens
or rounds the operands if necessary, and multiplies tile by tile.
"""

from __future__ import annotations

from anycell.engines.cpu.geometry import INPUT, ROW_HEADER, Matmul
from anycell.engines.cpu.ir import Value, constant
from anycell.engines.cpu.layout import PANEL
from anycell.engines.cpu.matmul import Blocks, tile_rows_of, whole_chunks
from anycell.engines.cpu.rows import RowAt, Rows
from anycell.engines.cpu.table import align
from anycell.lang.cell import RECURRENT


class Panel:
    """A thread's workspace, and the matmuls that fill it.

    Attributes:
        taken: the address of the list of rows that take the step.
    """

    def __init__(self, rows: Rows, blocks: list[Blocks], space: Value) -> None:
        self.rows, self.b, self.layout, self.arg = rows, rows.b, rows.layout, rows.arg
        self.blocks = blocks
        b, layout, matmuls = self.b, self.layout, self.layout.matmuls
        addresses = align(self.arg["batch"] * 8)
        self.operands = [b.gep(space, addresses * m.number, "i8") for m in matmuls]
        self.taken = b.gep(space, addresses * len(matmuls), "i8")
        self.inputs = b.gep(self.taken, addresses, "i8")
        self.results = b.gep(self.inputs, addresses, "i8")
        self.scratch = b.gep(self.results, PANEL * layout.results.row)
        count, fixed = layout.workspace_lines
        at = b.gep(space, addresses * count + fixed, "i8") if layout.staged_bytes else space
        staged_rows = b.value(layout.staged_rows(self.arg["batch"]))
        self.staged: dict[int, Value] = {}
        for m in matmuls:
            if m.staged:
                self.staged[m.number] = at
                at = b.gep(at, staged_rows * m.staged_row)
        self.staged_input = at

    def row(self, place: Value) -> Value:
        """The row at a place of the list."""
        return self.b.load(self.b.gep(self.taken, place, "i64"), "i64")

    def results_of(self, place: Value, first: Value) -> Value:
        """The address of the matmul results of a row."""
        return self.b.gep(self.results, (place - first) * self.layout.results.row)

    def scratch_of(self, place: Value, first: Value) -> Value:
        """The address of the scratch memory of a row."""
        if len(self.layout.stages) == 1:
            return self.scratch
        return self.b.gep(self.scratch, (place - first) * self.layout.scratch_row)

    # ---- operands --------------------------------------------------------------------------------
    def find(self, m: Matmul, t: Value, begin: Value, end: Value, first: Value) -> None:
        """Lists the addresses of the operand's rows at step t; stages the rows if necessary."""
        b, rows, layout = self.b, self.rows, self.layout
        with b.loop(begin, end) as place:
            at = RowAt(t, self.row(place))
            if layout.backward:
                # The gradient of a state comes from the previous step of the backward pass.
                before = at if m.state is None else RowAt(t - 1, at.row)
                address = rows.at(layout.gradient(m), before).address
            elif m.state is None:
                operand = layout.scratch["operand", m.linear.operand]
                address = b.gep(self.scratch_of(place, first), operand)
            elif m.state == INPUT:
                address = rows.at("gates", at).address
            else:
                address = rows.before(m.state, at, rows.flagged("resets", at)).address
            if m.staged:
                address = self._stage(m, t, address, place - first)
            b.store(address, b.gep(self.operands[m.number], place, "i64"))
            if m is layout.projecting:
                address = rows.at("input", at).address
                if m.staged:
                    address = self._stage_input(address, place - first)
                b.store(address, b.gep(self.inputs, place, "i64"))

    def _stage(self, m: Matmul, t: Value, address: Value, place: Value) -> Value:
        """Stages a row of an operand, and returns the address of the staged row."""
        b, g, layout = self.b, m.geometry, self.layout
        number, to = layout.operand_type(m), b.gep(self.staged[m.number], place * m.staged_row)
        if g.quantized:
            return self._quantize(to, address, m.linear.heads, m.numbers, g.inner)
        operands = layout.plan.types.operands.llvm
        staged = operands if g.rounded and g.packs > 1 else layout.real
        loads = constant(1, "i1")
        if layout.backward:  # there are no gradients before the first or after the last step
            loads = t < self.arg["steps"] if m.state is None else t > 0
        with b.when(loads), b.loop(0, m.linear.heads) as head:
            for n in range(m.parts):
                start = head * m.numbers + n * (m.inner // m.parts)
                into = head * g.inner + n * m.stretch
                source = b.gep(address, start, number)
                b.call(f"stage_{number}", source, b.gep(to, into, staged), m.numbers)
        return to

    def _stage_input(self, address: Value, place: Value) -> Value:
        """Stages a row of the input if the kernel multiplies it; returns the row's address."""
        b, inputs, types = self.b, self.arg["inputs"], self.layout.plan.types
        staged = b.variable(address)
        with b.when(self.rows.given("input")):
            row = self.layout.staged_input(b, inputs)
            to = b.gep(self.staged_input, place * row)
            if types.quantized:
                to = self._quantize(to, address, 1, inputs, 0)
            else:
                b.call(f"stage_{types.storage.llvm}", address, to, inputs)
            staged.value = to
        return staged.value

    def _quantize(
        self, header: Value, row: Value, heads: int, numbers: Value | int, apart: int
    ) -> Value:
        """Writes a row as integers after its scale, and returns the address of the integers. Each
        head has ``numbers`` of them; heads begin ``apart`` bytes apart.
        """
        b = self.b
        numbers, to = b.value(numbers), b.gep(header, ROW_HEADER)
        b.call("scale_row", row, header, numbers * heads)
        with b.loop(0, heads) as head:
            into = b.gep(to, head * apart, "i8")
            b.call("quantize", b.gep(row, head * numbers), header, into, numbers)
        return to

    # ---- products --------------------------------------------------------------------------------
    def multiply(self, m: Matmul, t: Value, span: Value | None, first: Value, last: Value) -> None:
        """results = operand @ W for the tiles of one span or of all units."""
        b, g, layout = self.b, m.geometry, self.layout
        results = b.gep(self.results, layout.results.places[m.linear.name])
        count = last - first
        tile0, tile1 = b.value(0), b.value(g.tiles)
        if span is not None:
            per_span = g.span // g.unroll
            tile0 = span * per_span
            tile1 = b.smin(tile0 + per_span, tile1)

        def multiply() -> None:
            with b.loop(0, m.linear.heads) as head, b.loop(tile0, tile1) as tile:
                number = head * g.tiles + tile
                unit = (tile - tile0) * (g.unroll * g.lanes)
                into = b.gep(results, unit + head * g.units)
                self._tile(m, number, first, into, count, head)

        # The first backward step has no step after it: its state gradients came with the call.
        if m.state is None or not (layout.backward or m.linear.name == RECURRENT):
            return multiply()
        without = t.eq(0) if layout.backward else self.rows.given("product")
        with b.when(without) as otherwise:
            self._fill(m, results, span, first, last)
        with otherwise:
            multiply()

    def _tile(
        self, m: Matmul, number: Value, first: Value, into: Value, count: Value, head: Value
    ) -> None:
        """Multiplies by one tile, one block of the sum after the other."""
        b, g, arg, blocks = self.b, m.geometry, self.arg, self.blocks[m.number]
        results, block = self.layout.results, g.inner_block(self.layout.plan.types.operands.bytes)
        begins = constant(1, "i1")  # whether the sum begins here, with the biases
        if m is self.layout.projecting:
            projects, sums = self.rows.given("input"), into
            if self.layout.apart:
                sums = b.gep(into, results.input - results.places[m.linear.name])
            else:
                begins = ~projects
            inputs = whole_chunks(arg["inputs"], g.chunk)
            with b.when(projects), b.loop(0, inputs, arg["input_block"]) as k0:
                k1 = b.smin(k0 + arg["input_block"], inputs)
                rows = b.gep(self.inputs, first, "i64")
                tile_rows = tile_rows_of(arg["inputs"], g)
                elements = tile_rows * (g.columns * g.lanes)
                weights = b.gep(arg["packed input"], number * elements)
                fresh = b.zext(k0.eq(0), "i64")
                blocks.call(b, weights, tile_rows, rows, sums, count, k0, k1, fresh, 0)
        rows = b.gep(self.operands[m.number], first, "i64")
        weights = b.gep(arg[f"packed {m.linear.name}"], number * g.tile_elements)
        for begin, end, operand, per_head in m.segments:
            shift = head * per_head + (operand - begin)
            with b.loop(begin, end, block) as k0:
                k1 = b.smin(k0 + block, end)
                fresh = b.zext(k0.eq(0) & begins, "i64")
                blocks.call(b, weights, g.tile_rows, rows, into, count, k0, k1, fresh, shift)

    def _fill(
        self, m: Matmul, results: Value, span: Value | None, first: Value, last: Value
    ) -> None:
        """Writes results that the kernel does not compute: forward the caller's, backward zeros."""
        b, layout, rows = self.b, self.layout, self.rows
        with b.loop(first, last) as place, rows.vectors(span, m.units) as lanes:
            into = (place - first) * layout.results.row
            into += (lanes.vector - rows.origin(span)) * m.geometry.lanes
            for n, output in enumerate(m.outputs):
                value = rows.zero
                if not layout.backward:
                    at = m.linear.declared.index(output) * m.units
                    brought = rows.of("product", self.row(place))
                    product = rows.load(brought, lanes, at)
                    # Sums of integers begin with the biases, as those that the kernel computes.
                    value = rows.zero if m.geometry.quantized else product
                    value = rows.biased(value, m.linear.bias_name, lanes, at)
                    if output in layout.cell.fused:
                        at = layout.plan.places[output].start
                        value = rows.biased(value, "bias_ih", lanes, at)
                    if m.geometry.quantized:
                        scale = rows.load_one(brought, layout.plan.gates_width)
                        value = b.fma(product, scale, value)
                b.store(value, b.gep(results, into + n * layout.results.strides[m.linear.name]))
