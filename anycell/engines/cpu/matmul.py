"""Prints the matmuls of a step: their register blocks, and the packing of their weights.

Weights are packed per tile (see ``Geometry``), so that a register block of rows times one tile is
the inner loop of the whole kernel.

Weights of 16 bits are packed in pairs: the weights of two numbers of the sum take the place of one
vector of wider weights. They are widened in registers; the rows that they multiply are widened
beforehand, once for all tiles (``print_staging``). Pairs of bfloat16 are multiplied without being
widened if the machine can do so. Sums have the type in which the cell computes.

Integers of 8 bits are packed in fours. The rows that they multiply are divided by the row's scale,
rounded to integers q from -127 to 127, and stored with 128 added:

    sum over k of row[k] weights[k] = row's scale * column's scale * (sum of (q[k] + 128) w[k]
                                                                      - 128 * sum of w[k])

The sum of a column begins with the last term. A row with an infinity or a NaN has a scale of NaN.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

from anycell.engines.cpu import tiles
from anycell.engines.cpu.geometry import (
    BIASES,
    L1_WEIGHTS,
    OFFSETS,
    QUANTIZED,
    ROW_HEADER,
    SCALES,
    Geometry,
    Matmul,
)  # fmt: skip
from anycell.engines.cpu.idioms import dot, dot_pairs, in_pairs, widen
from anycell.engines.cpu.ir import (
    Builder,
    Module,
    Operand,
    Value,
    Variable,
    constant,
    element_bits,
    vector,
    with_element,
)  # fmt: skip
from anycell.engines.cpu.layout import Layout
from anycell.engines.cpu.table import Entries
from anycell.plan import LINE

Places = tuple[int, ...]
# How many bytes of packed weights prefetching runs ahead of multiplying, with 16 registers. With 32
# a block reads every line, which the hardware follows by itself, and one or two rows faster.
AHEAD = 2 << 10
ROUNDING = 1.5 * 2**23  # a float32 plus this number is rounded to an integer
# Arguments of a packing function: the weight, its strides, two biases, the destination, the length
# of the sum, and the scales of integers.
PACKING = "source heads rows columns input_bias bias packed inner scales".split()
# Parameters of a block of rows: k0 and k1 bound the sum, a fresh sum begins with the biases, and
# number k of the sum is number k + shift of the operand.
SUM_PARAMS = "i64 k0, i64 k1, i64 fresh, i64 shift"
ROWS_PARAMS = f"ptr weights, ptr rows, ptr acc, i64 count, {SUM_PARAMS}"


class Blocks:
    """results[rows, columns] (+)= operand[rows, k0:k1] @ weights[k0:k1, columns], as functions.

    Attributes:
        groups: groups of columns that register blocks take in turn, see ``Geometry``; ``all`` has
            the columns of all groups.
        few: up to this many rows take all columns at once: a group has too few independent sums.
    """

    def __init__(self, layout: Layout, matmul: Matmul) -> None:
        self.matmul, self.g, self.itemsize = matmul, matmul.geometry, layout.size
        g, self.row, self.number = self.g, layout.results.row, layout.plan.types.operands.llvm
        self.groups = g.groups(layout.results.strides[matmul.linear.name] // g.lanes)
        self.all = tuple(itertools.chain(*self.groups))
        self.full = g.lanes * self.itemsize
        self.few, most = 0, g.block_rows(len(self.groups[0]))
        if len(self.groups) > 1 and len(set(map(len, self.groups))) == 1 and not g.tiled:
            # More rows are cut into blocks of at least half of the maximum.
            self.few = min(g.block_rows(len(self.all)), (most - 1) // 2)
        # Results of a head may begin at any element.
        even = matmul.linear.heads == 1 or g.units % g.lanes == 0
        self.align = self.full if even else self.itemsize

    def print(self, module: Module) -> None:
        """Adds the functions that ``call`` calls."""
        for rows in range(1, self.few + 1):
            self._register_block(module, self.all, rows)
        for places in dict.fromkeys(map(_relative, self.groups)):
            sizes = range(self.few + 1, self.g.block_rows(len(places)) + 1)
            if self.g.tiled:
                self._tiles(module, places)
            else:
                for rows in sizes:
                    self._register_block(module, places, rows)
            self._rows(module, places, sizes)

    def call(
        self, b: Builder, weights: Value, packed_rows: Value | int, rows: Value, acc: Value,
        count: Value, *bounds: Value | int,
    ) -> None:  # fmt: skip
        """Multiplies ``count`` rows by a tile of ``packed_rows``; ``bounds`` are SUM_PARAMS."""
        lanes, whole = self.g.lanes, (weights, rows, acc, *bounds, packed_rows)
        for n in range(1, self.few + 1):
            with b.when(count.eq(n)):
                b.call(f"{self._name('block', self.all)}_x{n}", *whole)
        with b.when(count > self.few):
            for places, (column, _) in zip(self.groups, self.g.cuts, strict=True):
                w = b.gep(weights, packed_rows * (column * lanes))
                at = b.gep(acc, places[0] * lanes)
                b.call(self._name("rows", _relative(places)), w, rows, at, count, *bounds)

    def _name(self, stem: str, places: Places) -> str:
        return f"{stem}{self.matmul.number}_{'_'.join(map(str, places))}"

    def _register_block(self, module: Module, places: Places, rows: int) -> None:
        """Prints the hot loop for ``rows`` rows and the columns at ``places``."""
        g, columns = self.g, range(len(places))
        params = f"ptr noalias weights, ptr noalias rows, ptr noalias acc, {SUM_PARAMS}"
        beside = len(places)  # columns that lie side by side in memory
        if places is self.all and self.few:
            params, beside = f"{params}, i64 packed_rows", len(self.groups[0])
        width = beside * g.lanes
        b = module.private(f"{self._name('block', places)}_x{rows}", params)
        weights, pointers, acc, k0, k1, fresh, shift, *packed_rows = b.args
        further = (b.gep(weights, packed_rows[0] * (c * g.lanes)) for c in columns[beside::beside])
        groups = weights, *further
        packed = [b.gep(group, c * g.lanes) for group in groups for c in range(beside)]
        addresses = [b.load(b.gep(pointers, r, "i64"), "ptr") for r in range(rows)]
        number = self.number if g.quantized or g.paired else b.real
        operand = [b.gep(address, shift, number) for address in addresses]
        sums = [[b.unset(b.vec) for _ in columns] for _ in range(rows)]
        places_of_sums = [(r, c) for r in range(rows) for c in columns]

        def result(r: int, c: int) -> Variable:
            return Variable(b, b.gep(acc, r * self.row + places[c] * b.lanes), b.vec, self.align)

        def header(what: int, c: int, type: str | None = None) -> Value:
            return b.load(b.gep(packed[c], what * width), type, self.full)

        with b.when(fresh.ne(0)) as otherwise:
            for c in columns:
                bias = header(BIASES, c)
                for row in sums:
                    row[c].value = bias
        with otherwise:
            for r, c in places_of_sums:
                sums[r][c].value = result(r, c).value
        tile = [b.gep(column, g.header * width) for column in packed]
        totals = sums
        if g.quantized:
            offsets = [header(OFFSETS, c, b.ivec) for c in columns]
            totals = [[b.variable(offset) for offset in offsets] for _ in operand]
        step, ahead = width * self.itemsize, list[Prefetch]()
        if g.registers == 16 and self.matmul.packed_elements * self.itemsize > L1_WEIGHTS:
            lines = range(AHEAD, AHEAD + step, LINE)
            ahead = [Prefetch(b.gep(at, n, "i8"), step, 3) for at in tile[::beside] for n in lines]
        add_products(b, totals, operand, tile, width, (k0, k1), self.number, ahead)
        if g.quantized:
            add_scaled(b, sums, totals, addresses, [header(SCALES, c) for c in columns])
        for r, c in places_of_sums:
            total = sums[r][c].value
            result(r, c).value = total

    def _tiles(self, module: Module, places: Places) -> None:
        """Prints the product of up to 16 staged (so evenly spaced) rows, by matrix tiles."""
        g, columns, width = self.g, len(places), len(places) * self.g.lanes
        b = module.private(self._name("tiles", places), ROWS_PARAMS)
        weights, pointers, acc, count, k0, k1, fresh, shift = b.args
        first, second = (
            b.load(b.gep(pointers, n, "i64"), "i64") for n in (0, b.smin(count - 1, 1))
        )
        start = b.gep(b.load(pointers, "ptr"), shift * (4 // g.packs), "i8")
        rows = start, second - first
        line = b.value(width * self.itemsize)
        packed = b.gep(weights, g.header * width), line
        results = [b.gep(acc, place * b.lanes) for place in places]
        stride, begins = self.row * self.itemsize, fresh.ne(0)

        def header(what: int, c: int) -> Value:
            return b.gep(weights, what * width + c * b.lanes)

        if not g.quantized:  # sums begin with the biases, or continue
            apart = b.select(begins, 0, stride)
            firsts = (b.select(begins, header(BIASES, c), at) for c, at in enumerate(results))
            begin = [(first, apart) for first in firsts]
            end = [(result, b.value(stride)) for result in results]
            tiles.multiply(b, self.number, rows, packed, (k0, k1), begin, end, g.pieces)
            return
        begin = [(header(OFFSETS, c), b.value(0)) for c in range(columns)]
        end = tiles.room(b, columns)
        tiles.multiply(b, self.number, rows, packed, (k0, k1), begin, end)
        with b.loop(0, count) as row:
            into = [b.gep(result, row * self.row) for result in results]
            begin_at = [b.select(begins, header(BIASES, c), at) for c, at in enumerate(into)]
            sums = [b.variable(b.load(at, align=self.align)) for at in begin_at]
            totals = [Variable(b, b.gep(at, row * apart, "i8"), b.ivec) for at, apart in end]
            address = b.load(b.gep(pointers, row, "i64"), "ptr")
            scales = [b.load(header(SCALES, c), align=self.full) for c in range(columns)]
            add_scaled(b, [sums], [totals], [address], scales)
            for result, total in zip(into, sums, strict=True):
                b.store(total.value, result, align=self.align)

    def _rows(self, module: Module, places: Places, sizes: range) -> None:
        """Cuts ``count`` rows into tiles, or into register blocks of nearly equal size."""
        b = module.private(self._name("rows", places), ROWS_PARAMS)
        weights, pointers, acc, count, *bounds = b.args
        most = sizes[-1]

        def at(first: Value) -> tuple[Value, Value, Value]:
            return weights, b.gep(pointers, first, "i64"), b.gep(acc, first * self.row)

        if self.g.tiled:
            with b.loop(0, count, tiles.ROWS) as first:
                here, rows = at(first), b.smin(count - first, tiles.ROWS)
                b.call(self._name("tiles", places), *here, rows, *bounds)
            return
        blocks = (count + (most - 1)) // most
        least = count // b.smax(blocks, 1)
        larger = count - least * blocks  # the number of blocks with one more row
        with b.loop(0, blocks) as i:
            here = at(i * least + b.smin(i, larger))
            rows = b.select(i < larger, least + 1, least)
            for n in sizes:
                with b.when(rows.eq(n)):
                    b.call(f"{self._name('block', places)}_x{n}", *here, *bounds)


class Prefetch(NamedTuple):
    """Lines of memory that a loop over k prefetches, one for each row of weights.

    Attributes:
        first, step: the address of the first line, and bytes to the next line.
        locality: as in ``Builder.prefetch``.
    """

    first: Value
    step: Operand
    locality: int


def add_products(
    b: Builder, sums: Sequence[Sequence[Variable]], operand: Sequence[Value],
    weights: Sequence[Value], width: int, bounds: tuple[Operand, Operand], number: str,
    ahead: Sequence[Prefetch] = (), apart: Operand = 1, unroll: int = 1,
) -> None:  # fmt: skip
    """The hot loop: ``sums[r][c] += operand[r][k * apart] * weights[c][k * width]``, k in bounds.

    ``sums`` are vectors on the stack, ``c`` counts vectors, weights are aligned to whole vectors.
    Weights of a narrower ``number`` have a row for two or four k; bounds are multiples of this.
    An iteration takes ``unroll`` rows of weights. Unrolling saves loop instructions, which delay
    the multiply-adds only if another thread shares the core, but takes longer to compile.
    """
    full = b.lanes * element_bits(b.real) // 8
    packs = element_bits(b.real) // element_bits(number)
    shift, integers = packs.bit_length() - 1, packs == QUANTIZED
    pairs = in_pairs(b.target, number)
    together = integers or pairs
    first, last = (b.ashr(b.value(k), shift) if shift else b.value(k) for k in bounds)

    def add(line: Value) -> None:
        row_of_weights = line * width
        k = line << shift if shift else line
        for later in ahead:
            b.prefetch(b.gep(later.first, line * later.step, "i8"), later.locality)
        for part in range(1 if together else packs):
            w = []
            for column in weights:
                at = b.gep(column, row_of_weights)
                if packs == 2 and not pairs:
                    at = b.gep(at, part * b.lanes, "i16")
                    bits = b.load(at, vector(b.lanes, "i16"), align=full // 2)
                    w.append(widen(b, bits, number))
                else:
                    type = b.ivec if together else b.vec
                    w.append(b.load(at, type, align=full))
            for row, address in zip(sums, operand, strict=True):
                if together:
                    value = b.splat(b.load(b.gep(address, k, number), "i32", align=1))
                else:
                    at = b.gep(address, (k + part if packs == 2 else k) * apart)
                    value = b.splat(b.load(at, b.real))
                for total, weight in zip(row, w, strict=True):
                    if integers:
                        total.value = dot(b, total.value, value, weight)
                    elif pairs:
                        total.value = dot_pairs(b, total.value, value, weight)
                    else:
                        total.value = b.fma(value, weight, total.value)

    if unroll > 1:
        whole = first + (last - first) // unroll * unroll
        with b.loop(first, whole, unroll) as line:
            for n in range(unroll):
                add(line + n)
        first = whole
    with b.loop(first, last) as line:
        add(line)


def add_scaled(
    b: Builder, sums: Sequence[Sequence[Variable]], totals: Sequence[Sequence[Variable]],
    rows: Sequence[Value], scales: Sequence[Value],
) -> None:  # fmt: skip
    """Adds ``totals`` to ``sums``, times scales of rows (which precede the rows) and columns."""
    for r, (sums_, totals_) in enumerate(zip(sums, totals, strict=True)):
        of_row = b.splat(b.load(b.gep(rows[r], -ROW_HEADER), b.real))
        for sum_, total, scale in zip(sums_, totals_, scales, strict=True):
            real = b.sitofp(total.value, b.real) * scale
            sum_.value = b.fma(real, of_row, sum_.value)


def _relative(places: Places) -> Places:
    return tuple(place - places[0] for place in places)


def print_packing(module: Module, layout: Layout) -> None:
    """Adds ``pack0``, ``pack1`` ..., which pack the weights of the matmuls."""
    types = layout.plan.types
    if layout.matmuls:
        with module.part("packing"):
            print_pack_block(module, layout.geometry, types.weights.llvm, types.operands.llvm)
    for m in layout.matmuls:
        _print_pack(module, layout, m)


def _print_pack(module: Module, layout: Layout, m: Matmul) -> None:
    """Packs a weight [out, in] or [heads, out/heads, in/heads] into tiles. One of its last two
    strides is 1, other strides are arbitrary. Its scales are [out] or [heads, out/heads].
    """
    types = layout.plan.types
    number, of_biases = types.weights.llvm, types.storage.llvm
    g, l = m.geometry, m.linear
    b = module.private(f"pack{m.number}", "ptr args, i64 part, i64 parts")
    table, part, parts = b.args
    entries = Entries(b, table, PACKING)
    weight, input_bias, bias, packed, scales = map(
        entries.pointer, ("source", "input_bias", "bias", "packed", "scales")
    )
    heads, rows, columns, inner = map(entries.__getitem__, ("heads", "rows", "columns", "inner"))
    # The same function packs the weight of the input, whose sum has another length.
    tile_rows = tile_rows_of(inner, g) if m is layout.projecting else g.tile_rows
    # Rows of the weight that belong to one head and output; backward, the sum is over them.
    rows_of_one = m.numbers if m.backward else g.units
    first, last = (m.tiles * n // parts for n in (part, part + 1))
    bias_sum = b.unset(b.vec)
    with b.loop(first, last) as tile_number:
        head, tile = tile_number // g.tiles, tile_number % g.tiles
        source = b.gep(weight, head * heads, number)
        into = b.gep(packed, tile_number * (tile_rows * (g.columns * g.lanes)))

        def place(column: int) -> tuple[Value, int]:
            """Returns the address of a column, and the stride between its rows, in numbers."""
            first, last = next(cut for cut in g.cuts if column < cut[1])
            at = b.gep(into, tile_rows * (first * g.lanes) + (column - first) * g.lanes)
            return at, (last - first) * g.lanes

        for v in range(g.unroll):
            unit = (tile * g.unroll + v) * g.lanes
            left = g.units - unit
            if m.backward:
                column, width = place(v)
                b.store(constant(0.0, b.vec), column)
                for n, output in enumerate(l.outputs):
                    above = rows * (l.declared.index(output) * rows_of_one)
                    start = b.gep(source, above + unit * columns, number)
                    at = b.gep(column, (1 + n * m.stretch // g.packs) * width)
                    b.call("pack_block", start, columns, rows, left, rows_of_one, at, width)
                continue
            mask = b.lane_mask(left)
            for n, output in enumerate(l.outputs):
                column, width = place(n * g.unroll + v)
                row = l.declared.index(output)
                bias_sum.value = constant(0.0, b.vec)
                at_bias = [(bias, head * g.units + unit + row * m.units)]
                if l.recurrent and output in layout.cell.fused:
                    at_bias.insert(0, (input_bias, unit + layout.plan.places[output].start))
                for added, at_unit in at_bias:
                    with b.when(added.ne(0)):
                        at_number = b.gep(added, at_unit, of_biases)
                        numbers = masked_numbers(b, at_number, mask, of_biases)
                        bias_sum.value += numbers
                b.store(bias_sum.value, column)
                start = b.gep(source, (unit + row * rows_of_one) * rows, number)
                at = b.gep(column, g.header * width)
                if g.quantized:
                    at_scale = head * (len(l.declared) * rows_of_one) + (unit + row * rows_of_one)
                    scale = b.masked_load(b.gep(scales, at_scale), mask)
                    b.store(scale, b.gep(column, SCALES * width))
                b.call("pack_block", start, rows, columns, left, inner, at, width)
                if g.quantized:
                    offsets = negative_sums(b, at, packed_rows_of(inner, g), width)
                    b.store(offsets, b.gep(column, OFFSETS * width))


def negative_sums(b: Builder, packed: Value, rows: Value, width: Operand) -> Value:
    """Returns the initial sums of a packed vector of columns of integers: -128 * sum of w[k]."""
    total, all_128 = b.variable(0, b.ivec), b.value(0x80808080, b.ivec)
    with b.loop(0, rows) as row:
        weights = b.load(b.gep(packed, row * width), b.ivec)
        total.value = dot(b, total.value, all_128, weights)
    return -total.value


def packed_rows_of(inner: Value, g: Geometry) -> Value:
    """Counts the rows of packed weights for a sum of ``inner`` numbers, in whole chunks."""
    return inner if g.chunk == 1 else whole_chunks(inner, g.chunk) // g.packs


def tile_rows_of(inner: Value, g: Geometry) -> Value:
    """Counts the rows of a packed tile for ``inner`` numbers, see ``Geometry.tile_rows``."""
    return packed_rows_of(inner, g) + (g.lanes + g.header - 1)


def whole_chunks(inner: Value, chunk: int) -> Value:
    """Rounds the length of a sum up to a multiple of ``chunk`` numbers, multiplied at once."""
    return inner if chunk == 1 else (inner + (chunk - 1)) & -chunk


def masked_numbers(b: Builder, address: Value, mask: Value, number: str) -> Value:
    """Loads a vector of numbers and widens them; lanes that the mask leaves out are 0."""
    if number == b.real:
        return b.masked_load(address, mask)
    bits = b.masked_load(address, mask, 0, vector(b.lanes, "i16"))
    return widen(b, bits, number)


def print_pack_block(
    module: Module, g: Geometry, number: str, operands: str, name: str = "pack_block"
) -> None:
    """Adds the packing of a vector of columns: element k of unit u is source[u * lane_stride + k *
    inner_stride]. One of the strides is 1.

    Numbers of the operands' type are packed unchanged if several share a lane. Other numbers are
    widened, or rounded to sums of bfloat16 numbers, two of which share a lane.
    """
    strides = "i64 lane_stride, i64 inner_stride"
    b = module.private(name, f"ptr source, {strides}, i64 units, i64 count, ptr packed, i64 width")
    source, lane_stride, inner_stride, units, count, packed, width = b.args
    rounded = g.rounded and number != operands
    share = 2 if rounded else g.packs  # numbers of the sum that share a lane
    as_they_are, integer = share > 1 and not rounded, f"i{32 // share}"

    def load(offset: Value, mask: Value) -> Value:
        at = b.gep(source, offset, number)
        if as_they_are:
            return b.masked_load(at, mask, 0, with_element(mask.type, integer))
        return masked_numbers(b, at, mask, number)

    def side_by_side(numbers: Sequence[Value]) -> list[Value]:
        """Combines numbers that share lanes into vectors: one for each of their pieces."""
        if share == 1:
            return [*numbers]
        pieces = [numbers]
        if rounded:
            pieces = list(zip(*(tiles.split(b, x, g.pieces) for x in numbers), strict=True))
        bits = ([b.zext(x, "i32") << 32 // share * n for n, x in enumerate(p)] for p in pieces)
        return [functools.reduce(operator.or_, shifted) for shifted in bits]

    def store(k: Value, pieces: Sequence[Value]) -> None:
        """Writes the lanes whose first number is the k-th number of the sum."""
        row = k // share
        if rounded and g.pieces > 1:  # a chunk's second pieces lie below its first pieces
            row = k // g.chunk * (tiles.ROWS * g.pieces) + k % g.chunk // share
        for n, lanes in enumerate(pieces):
            at = b.gep(packed, (row + n * tiles.ROWS) * width)
            if share == 2 and not g.rounded:  # each is widened by itself: one follows the other
                b.store(b.trunc(lanes, "i16"), at)
                lanes, at = b.trunc(lanes >> 16, "i16"), b.gep(at, b.lanes, "i16")
            b.store(lanes, at)

    whole = whole_chunks(count, g.chunk)
    with b.when(lane_stride.eq(1)) as otherwise:
        mask = b.lane_mask(units)
        with b.loop(0, whole, share) as k:
            numbers = []
            for n in range(share):
                exists = mask & b.splat(k + n < count) if share > 1 else mask
                numbers.append(load((k + n) * inner_stride, exists))
            store(k, side_by_side(numbers))
    loaded = share if as_they_are else 1  # numbers that a lane gets from memory
    with otherwise, b.loop(0, whole, loaded * b.lanes) as k:
        inside = b.lane_mask(count - k, loaded * b.lanes, integer if as_they_are else None)
        rows = []
        for lane in range(b.lanes):
            exists = inside & b.splat(units > lane, loaded * b.lanes)
            row = load(lane_stride * lane + k, exists)
            rows.append(b.bitcast(row, b.ivec) if as_they_are else row)
        columns = b.transpose(rows)
        for n in range(0, b.lanes, share // loaded):
            group = columns[n : n + share // loaded]
            store(k + n * loaded, group if as_they_are else side_by_side(group))


def print_staging(module: Module, number: str, g: Geometry, operands: str) -> None:
    """Adds ``stage_<number>``, which writes numbers of a row as matmuls read them, widened or
    rounded, and followed by zeros up to whole chunks.
    """
    b = module.private(f"stage_{number}", "ptr source, ptr to, i64 count")
    source, to, count = b.args
    with b.loop(0, whole_chunks(count, g.chunk), b.lanes) as i:
        mask, at = b.lane_mask(count - i), b.gep(source, i, number)
        if not g.rounded:
            b.store(masked_numbers(b, at, mask, number), b.gep(to, i))
        elif number == operands:
            b.store(b.masked_load(at, mask, 0, vector(b.lanes, "i16")), b.gep(to, i, "i16"))
        else:
            of_chunk = i % g.chunk
            into = (i - of_chunk) * g.pieces + of_chunk
            pieces = tiles.split(b, masked_numbers(b, at, mask, number), g.pieces)
            for n, bits in enumerate(pieces):
                b.store(bits, b.gep(to, into + n * g.chunk, "i16"))


def print_quantizing(module: Module) -> None:
    """Adds ``scale_row``, which writes the scale of a row and its inverse to a header; and
    ``quantize``, which writes numbers of the row as integers, and zeros up to whole vectors.
    """
    b = module.private("scale_row", "ptr source, ptr header, i64 count")
    source, header, count = b.args
    largest = b.variable(0, b.ivec)
    with b.loop(0, count, b.lanes) as i:
        mask = b.lane_mask(count - i)
        # Bits of magnitudes, read as integers, keep their order, and NaN is above all numbers.
        size = b.bits(b.masked_load(b.gep(source, i), mask)) & 0x7FFFFFFF
        largest.value = b.smax(largest.value, size)
    bits = b.reduce_max(largest.value)
    most, finite = b.bitcast(bits, b.real), bits < 0x7F800000
    b.store(b.select(finite, most * (1 / 127), math.nan), header)
    b.store(127.0 / most, b.gep(header, 1))

    b = module.private("quantize", "ptr source, ptr header, ptr to, i64 count")
    source, header, to, count = b.args
    inverse = b.splat(b.load(b.gep(header, 1), b.real))
    with b.loop(0, count, b.lanes) as i:
        mask = b.lane_mask(count - i)
        product = b.masked_load(b.gep(source, i), mask) * inverse
        # The lowest bits of the sum are the rounded number; flipping the highest of 8 adds 128.
        rounded = b.trunc(b.bits(product + ROUNDING), "i8")
        b.store(rounded ^ -128, b.gep(to, i, "i8"))
