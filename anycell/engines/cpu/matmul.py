"""Prints the matmuls of a step: the register blocks of one, and the packing of its weights.

Weights are packed per tile (see ``Geometry``), so that a register block of rows times one tile is
the inner loop of all that a kernel does.

Weights of 16 bits are packed in pairs: where a vector of wider ones would be, there are those of
two numbers of the sum. They are widened in registers, and the rows that they multiply before, once
for all tiles (``print_staging``). Sums are of the type that the cell computes in.

Integers of 8 bits are packed in fours. Rows that they multiply are rounded to integers from -127 to
127, times the scale of the row, and stored with 128 added:

    sum over k of row[k] weights[k] = row's scale * column's scale * (sum of (q[k] + 128) w[k]
                                                                      - 128 * sum of w[k])

The last term is that with which the sum of a column begins. A row that has an infinity or a NaN has
a scale of NaN.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from anycell.engines.cpu import tiles
from anycell.engines.cpu.geometry import (
    BIASES,
    OFFSETS,
    QUANTIZED,
    ROW_HEADER,
    SCALES,
    Geometry,
    Matmul,
)  # fmt: skip
from anycell.engines.cpu.idioms import dot, widen
from anycell.engines.cpu.ir import (
    Builder,
    Module,
    Operand,
    Value,
    Variable,
    constant,
    element_bits,
    vector,
)  # fmt: skip
from anycell.plan import Dtype

Places = tuple[int, ...]
ROUNDING = 1.5 * 2**23  # a float32 plus this has no digits behind the point
# Arguments of a block of rows, however many: k0 and k1 bound the sum, a fresh one begins with the
# biases, and shift is that of the operand against k.
BOUNDS = "i64 k0, i64 k1, i64 fresh, i64 shift"
ROWS = f"ptr weights, ptr rows, ptr acc, i64 count, {BOUNDS}"


@dataclass(frozen=True)
class Blocks:
    """acc[rows, columns] (+)= operand[rows, k0:k1] @ weights[k0:k1, columns], as functions.

    Attributes:
        matmul: which.
        row: elements from the results of a row to those of the next.
        output: from those of one output to those of the next.
        itemsize: bytes of an element.
        number: of the weights, as LLVM calls it.
    """

    matmul: Matmul
    row: int
    output: int
    itemsize: int
    number: str

    @functools.cached_property
    def groups(self) -> tuple[Places, ...]:
        """Places of the columns of each register block of a tile."""
        g = self.matmul.geometry
        return g.groups(self.output // g.lanes)

    def print(self, module: Module) -> None:
        """Adds the functions that ``call`` calls."""
        for places in dict.fromkeys(map(_relative, self.groups)):
            if self.matmul.geometry.tiled:
                self._tiles(module, places)
                self._row_tiles(module, places)
                continue
            for rows in range(1, self.matmul.geometry.block_rows(len(places)) + 1):
                self._register_block(module, places, rows)
            self._row_blocks(module, places)

    def call(self, b: Builder, weights: Value, rows: Value, acc: Value, *rest: Value | int) -> None:
        """All columns of a tile; ``rest``: how many rows, and ``BOUNDS``."""
        lanes, column = self.matmul.geometry.lanes, 0
        for places in self.groups:
            w, at = b.gep(weights, column * lanes), b.gep(acc, places[0] * lanes)
            b.call(self._name("rows", _relative(places)), w, rows, at, *rest)
            column += len(places)

    def _name(self, what: str, places: Places) -> str:
        return f"{what}{self.matmul.number}_{'_'.join(map(str, places))}"

    def _register_block(self, module: Module, places: Places, rows: int) -> None:
        """So many rows, and the columns at these places; the hot loop."""
        m, columns = self.matmul, len(places)
        params = f"ptr noalias weights, ptr noalias rows, ptr noalias acc, {BOUNDS}"
        b = module.private(f"{self._name('block', places)}_x{rows}", params)
        weights, pointers, acc, k0, k1, fresh, shift = b.args
        g = m.geometry
        width, full = g.columns * b.lanes, b.lanes * self.itemsize
        # Results of a head may begin anywhere.
        whole = full if m.linear.heads == 1 or m.geometry.units % b.lanes == 0 else self.itemsize
        addresses = [b.load(b.gep(pointers, r, "i64"), "ptr") for r in range(rows)]
        number = self.number if g.quantized else b.real
        operand = [b.gep(address, shift, number) for address in addresses]
        sums = [[b.unset(b.vec) for _ in range(columns)] for _ in range(rows)]

        def result(r: int, c: int) -> Variable:
            return Variable(b, b.gep(acc, r * self.row + places[c] * b.lanes), b.vec, whole)

        def header(what: int, c: int, type: str | None = None) -> Value:
            return b.load(b.gep(weights, what * width + c * b.lanes), type, align=full)

        with b.when(fresh.ne(0)) as otherwise:
            for c in range(columns):
                bias = header(BIASES, c)
                for r in range(rows):
                    sums[r][c].value = bias
        with otherwise:
            for r in range(rows):
                for c in range(columns):
                    sums[r][c].value = result(r, c).value

        tile = b.gep(weights, g.header * width)
        if g.quantized:
            offsets = [header(OFFSETS, c, b.ivec) for c in range(columns)]
            totals = [[b.variable(offset) for offset in offsets] for _ in operand]
            add_products(b, totals, operand, tile, width, (k0, k1), self.number)
            scales = [header(SCALES, c) for c in range(columns)]
            add_scaled(b, sums, totals, addresses, scales)
        else:
            add_products(b, sums, operand, tile, width, (k0, k1), self.number)
        for r in range(rows):
            for c in range(columns):
                total = sums[r][c].value
                result(r, c).value = total

    def _tiles(self, module: Module, places: Places) -> None:
        """Up to 16 rows, which are staged and so lie evenly, by matrix tiles."""
        m, g, columns = self.matmul, self.matmul.geometry, len(places)
        b = module.private(self._name("tiles", places), ROWS)
        weights, pointers, acc, count, k0, k1, fresh, shift = b.args
        width, full = g.columns * b.lanes, b.lanes * self.itemsize
        whole = full if m.linear.heads == 1 or g.units % b.lanes == 0 else self.itemsize
        first, second = (
            b.load(b.gep(pointers, n, "i64"), "i64") for n in (0, b.smin(count - 1, 1))
        )
        start = b.gep(b.load(pointers, "ptr"), shift * (4 // g.packs), "i8")
        rows = start, second - first
        packed = b.gep(weights, g.header * width), constant(width * self.itemsize, "i64")
        results = [b.gep(acc, place * b.lanes) for place in places]
        stride, begins = self.row * self.itemsize, fresh.ne(0)

        def header(what: int, c: int) -> Value:
            return b.gep(weights, what * width + c * b.lanes)

        if not g.quantized:  # sums begin with the biases, or go on
            apart = b.select(begins, 0, stride)
            firsts = (b.select(begins, header(BIASES, c), at) for c, at in enumerate(results))
            begin = [(first, apart) for first in firsts]
            end = [(result, constant(stride, "i64")) for result in results]
            tiles.multiply(b, self.number, rows, packed, (k0, k1), begin, end, g.pieces)
            return
        begin = [(header(OFFSETS, c), constant(0, "i64")) for c in range(columns)]
        end = tiles.room(b, columns)
        tiles.multiply(b, self.number, rows, packed, (k0, k1), begin, end)
        with b.loop(0, count) as row:
            into = [b.gep(result, row * self.row) for result in results]
            begin_at = [b.select(begins, header(BIASES, c), at) for c, at in enumerate(into)]
            sums = [b.variable(b.load(at, align=whole)) for at in begin_at]
            totals = [Variable(b, b.gep(at, row * apart, "i8"), b.ivec) for at, apart in end]
            address = b.load(b.gep(pointers, row, "i64"), "ptr")
            scales = [b.load(header(SCALES, c), align=full) for c in range(columns)]
            add_scaled(b, [sums], [totals], [address], scales)
            for result, total in zip(into, sums, strict=True):
                b.store(total.value, result, align=whole)

    def _row_tiles(self, module: Module, places: Places) -> None:
        """Cuts ``count`` rows into tiles."""
        b = module.private(self._name("rows", places), ROWS)
        weights, pointers, acc, count, *bounds = b.args
        with b.loop(0, count, tiles.ROWS) as first:
            here, into = b.gep(pointers, first, "i64"), b.gep(acc, first * self.row)
            rows = b.smin(count - first, tiles.ROWS)
            b.call(self._name("tiles", places), weights, here, into, rows, *bounds)

    def _row_blocks(self, module: Module, places: Places) -> None:
        """Cuts ``count`` rows into register blocks as equal as can be."""
        b = module.private(self._name("rows", places), ROWS)
        weights, pointers, acc, count, *bounds = b.args
        most = self.matmul.geometry.block_rows(len(places))
        blocks = (count + (most - 1)) // most
        with b.loop(0, blocks) as i:
            first = i * count // blocks
            rows = (i + 1) * count // blocks - first
            here, into = b.gep(pointers, first, "i64"), b.gep(acc, first * self.row)
            for n in range(1, most + 1):
                with b.when(rows.eq(n)):
                    b.call(f"{self._name('block', places)}_x{n}", weights, here, into, *bounds)


def add_products(
    b: Builder, sums: Sequence[Sequence[Variable]], operand: Sequence[Value], weights: Value,
    width: int, bounds: tuple[Operand, Operand], number: str, ahead: Sequence[Value] = (),
) -> None:  # fmt: skip
    """The hot loop: ``sums[r][c] += operand[r][k] * weights[k * width + c]`` for k within bounds.

    ``sums`` are vectors on the stack, ``c`` counts vectors, weights lie on a vector's alignment.
    Weights of a narrower ``number`` have a row for two or four k, of which bounds are whole
    multiples. Meanwhile memory is fetched for later, a line for each row: ``ahead`` is the first
    one's address, and bytes to the next.
    """
    full = b.lanes * element_bits(b.real) // 8
    packs = element_bits(b.real) // element_bits(number)
    shift, integers = packs.bit_length() - 1, packs == QUANTIZED
    first, last = (b.ashr(b.value(k, "i64"), shift) if shift else k for k in bounds)
    # Not unrolled: the loop's own instructions fit beside the multiply-adds, and twice the code
    # compiles twice as long.
    with b.loop(first, last) as line:
        base = b.gep(weights, line * width)
        k = line << shift if shift else line
        if ahead:
            b.prefetch(b.gep(ahead[0], line * ahead[1], "i8"), locality=2)
        for part in range(1 if integers else packs):
            w = []
            for c in range(len(sums[0])):
                if packs == 2:
                    at = b.gep(base, (2 * c + part) * b.lanes, "i16")
                    bits = b.load(at, vector(b.lanes, "i16"), align=full // 2)
                    w.append(widen(b, bits, number))
                else:
                    type = b.ivec if integers else b.vec
                    w.append(b.load(b.gep(base, c * b.lanes), type, align=full))
            for row, address in zip(sums, operand, strict=True):
                if integers:
                    value = b.splat(b.load(b.gep(address, k, "i8"), "i32", align=1))
                else:
                    at = b.gep(address, k + part if packs == 2 else k)
                    value = b.splat(b.load(at, b.real))
                for total, weight in zip(row, w, strict=True):
                    if integers:
                        total.value = dot(b, total.value, value, weight)
                    else:
                        total.value = b.fma(value, weight, total.value)


def add_scaled(
    b: Builder, sums: Sequence[Sequence[Variable]], totals: Sequence[Sequence[Variable]],
    rows: Sequence[Value], scales: Sequence[Value],
) -> None:  # fmt: skip
    """``sums`` plus integers times the scales of their rows, which lie before these, and of their
    columns.
    """
    for r, (sums_, totals_) in enumerate(zip(sums, totals, strict=True)):
        of_row = b.splat(b.load(b.gep(rows[r], -ROW_HEADER), b.real))
        for sum_, total, scale in zip(sums_, totals_, scales, strict=True):
            real = b.sitofp(total.value, b.real) * scale
            sum_.value = b.fma(real, of_row, sum_.value)


def _relative(places: Places) -> Places:
    return tuple(place - places[0] for place in places)


def print_packing(
    module: Module, matmuls: Sequence[Matmul], projecting: Matmul | None, biased: frozenset[str],
    types: Dtype,
) -> None:  # fmt: skip
    """Adds ``pack0``, ``pack1`` ..., which pack the weights of these matmuls.

    ``biased`` are the outputs that take the bias of the input's projection too.
    """
    if matmuls:
        print_packing_of(module, matmuls[0].geometry, types.weights.llvm, types.operands.llvm)
    for m in matmuls:
        _print_pack(module, m, m is projecting, biased, types)


def _print_pack(
    module: Module, m: Matmul, projecting: bool, biased: frozenset[str], types: Dtype
) -> None:
    """A weight [out, in] or [heads, out/heads, in/heads], of any strides but for one of 1 among the
    last two, into tiles; its scales are [out], or [heads, out/heads].
    """
    number, of_biases = types.weights.llvm, types.storage.llvm
    g, l = m.geometry, m.linear
    b = module.private(f"pack{m.number}", "ptr args, i64 part, i64 parts")
    table, part, parts = b.args
    kinds = "ptr i64 i64 i64 ptr ptr ptr i64 ptr".split()
    weight, heads, rows, columns, input_bias, bias, packed, inner, scales = (
        b.load(b.gep(table, i, "i64"), t) for i, t in enumerate(kinds)
    )
    elements: Value | int = g.tile_elements
    packed_rows = packed_rows_of(inner, g)
    if projecting:  # the weight of the input is packed the same way
        elements = (packed_rows + (g.lanes + g.header - 1)) * (g.columns * g.lanes)
    width = g.columns * g.lanes
    # Of one head and output: rows of the weight, and numbers that a row has.
    each = m.numbers if m.backward else g.units
    first, last = (m.tiles * n // parts for n in (part, part + 1))
    bias_sum = b.unset(b.vec)
    with b.loop(first, last) as tile_number:
        head, tile = tile_number // g.tiles, tile_number % g.tiles
        source = b.gep(weight, head * heads, number)
        into = b.gep(packed, tile_number * elements)
        for v in range(g.unroll):
            unit = (tile * g.unroll + v) * g.lanes
            left = g.units - unit
            if m.backward:
                column = b.gep(into, v * g.lanes)
                b.store(constant(0.0, b.vec), column)
                for n, output in enumerate(l.outputs):
                    above = rows * (l.declared.index(output) * each)
                    start = b.gep(source, above + unit * columns, number)
                    at = b.gep(column, (1 + n * m.stretch // g.packs) * width)
                    b.call("pack_block", start, columns, rows, left, each, at, width)
                continue
            mask = b.lane_mask(left)
            for n, output in enumerate(l.outputs):
                column = b.gep(into, (n * g.unroll + v) * g.lanes)
                row = l.declared.index(output)
                bias_sum.value = constant(0.0, b.vec)
                at_bias = head * g.units + unit + row * m.units
                both = l.recurrent and output in biased
                for added in (input_bias, bias) if both else (bias,):
                    with b.when(added.ne(0)):
                        at_number = b.gep(added, at_bias, of_biases)
                        numbers = masked_numbers(b, at_number, mask, of_biases)
                        bias_sum.value += numbers
                b.store(bias_sum.value, column)
                start = b.gep(source, (unit + row * each) * rows, number)
                at = b.gep(column, g.header * width)
                if g.quantized:
                    at_scale = head * (len(l.declared) * each) + (unit + row * each)
                    scale = b.masked_load(b.gep(scales, at_scale), mask)
                    b.store(scale, b.gep(column, SCALES * width))
                b.call("pack_block", start, rows, columns, left, inner, at, width)
                if g.quantized:
                    offsets = negative_sums(b, at, packed_rows, width)
                    b.store(offsets, b.gep(column, OFFSETS * width))


def negative_sums(b: Builder, packed: Value, rows: Value, width: Operand) -> Value:
    """The first values of the sums of a packed column of integers, see above."""
    total, all_128 = b.variable(0, b.ivec), b.value(0x80808080, b.ivec)
    with b.loop(0, rows) as row:
        weights = b.load(b.gep(packed, row * width), b.ivec)
        total.value = dot(b, total.value, all_128, weights)
    return -total.value


def packed_rows_of(inner: Value, g: Geometry) -> Value:
    """Rows of packed weights for a sum of so many numbers, whole chunks."""
    return inner if g.chunk == 1 else whole_chunks(inner, g.chunk) // g.packs


def whole_chunks(inner: Value, chunk: int) -> Value:
    """So many numbers of a sum, up to a whole multiple of those that are multiplied at once."""
    return inner if chunk == 1 else (inner + (chunk - 1)) & -chunk


def masked_numbers(b: Builder, address: Value, mask: Value, number: str) -> Value:
    """A vector of numbers of memory, widened, and 0 in the lanes that the mask leaves out."""
    if number == b.real:
        return b.masked_load(address, mask)
    bits = b.masked_load(address, mask, 0, vector(b.lanes, "i16"))
    return widen(b, bits, number)


PACK_BLOCK = (
    "ptr source, i64 lane_stride, i64 inner_stride, i64 units, i64 count, ptr packed, i64 width"
)


def print_pack_block(
    module: Module, number: str, *, packs: int = 1, name: str = "pack_block"
) -> None:
    """A column of vectors: element k of unit u is source[u * lane_stride + k * inner_stride],
    widened; or as it is, so many k's in a row.
    """
    b = module.private(name, PACK_BLOCK)
    source, lane_stride, inner_stride, units, count, packed, width = b.args
    if packs > 1:
        _pack_together(b, number, packs)
        return
    with b.when(lane_stride.eq(1)) as otherwise:
        mask = b.lane_mask(units)
        with b.loop(0, count) as k:
            at = b.gep(source, k * inner_stride, number)
            b.store(masked_numbers(b, at, mask, number), b.gep(packed, k * width))
    with otherwise, b.loop(0, count, b.lanes) as k:
        inside = b.lane_mask(count - k)
        rows = []
        for lane in range(b.lanes):
            exists = b.splat(units > lane)
            at = b.gep(source, lane_stride * lane + k, number)
            rows.append(masked_numbers(b, at, inside & exists, number))
        for i, vector_ in enumerate(b.transpose(rows)):
            b.store(vector_, b.gep(packed, (k + i) * width))


def _pack_together(b: Builder, number: str, packs: int) -> None:
    """The body of ``pack_block`` where several k's share a row."""
    source, lane_stride, inner_stride, units, count, packed, width = b.args
    bits = 32 // packs
    few, mask = vector(b.lanes, f"i{bits}"), b.lane_mask(units)

    def store(group: Value, row: Value) -> None:
        at = b.gep(packed, row * width)
        if packs == QUANTIZED or tiled:
            b.store(group, at)
            return
        b.store(b.trunc(group, "i16"), at)
        b.store(b.trunc(group >> 16, "i16"), b.gep(at, b.lanes, "i16"))

    tiled = tiles.multiplies(b.target, number)
    whole = whole_chunks(count, tiles.chunk(number) if tiled else packs)
    with b.when(lane_stride.eq(1)) as otherwise, b.loop(0, whole, packs) as k:
        group = b.value(0, b.ivec)
        for n in range(packs):
            place = k + n
            exists = mask & b.splat(place < count)
            at = b.gep(source, place * inner_stride, number)
            part = b.zext(b.masked_load(at, exists, 0, few), "i32")
            group |= part << (n * bits)
        store(group, k // packs)
    with otherwise, b.loop(0, count, packs * b.lanes) as k:
        numbers = vector(packs * b.lanes, f"i{bits}")
        left = b.trunc(b.smin(count - k, packs * b.lanes), f"i{bits}")
        inside = b.iota(numbers) < b.splat(left, packs * b.lanes)
        rows = []
        for lane in range(b.lanes):
            exists = b.splat(units > lane, packs * b.lanes)
            at = b.gep(source, lane_stride * lane + k, number)
            rows.append(b.bitcast(b.masked_load(at, inside & exists, 0, numbers), b.ivec))
        for i, group in enumerate(b.transpose(rows)):
            store(group, k // packs + i)


def print_packing_of(module: Module, g: Geometry, number: str, operands: str) -> None:
    """Adds ``pack_block`` for weights of a type that are multiplied as operands of another."""
    if g.tiled and number != operands:
        _print_pack_rounded(module, g)
    else:
        print_pack_block(module, number, packs=g.packs)


def _print_pack_rounded(module: Module, g: Geometry) -> None:
    """``pack_block`` for tiles, of reals that become sums of numbers of bfloat16."""
    b = module.private("pack_block", PACK_BLOCK)
    source, lane_stride, inner_stride, units, count, packed, width = b.args
    mask, whole = b.lane_mask(units), whole_chunks(count, g.chunk)

    def store(k: Value, pair: Sequence[Value]) -> None:
        """The numbers k and k + 1 of each column."""
        of_chunk = k % g.chunk
        row = (k - of_chunk) // 2 * g.pieces + of_chunk // 2
        pieces = zip(*[tiles.split(b, value, g.pieces) for value in pair], strict=True)
        for n, (low, high) in enumerate(pieces):
            both = b.zext(low, b.ivec) | (b.zext(high, b.ivec) << 16)
            b.store(both, b.gep(packed, (row + n * tiles.ROWS) * width))

    with b.when(lane_stride.eq(1)) as otherwise, b.loop(0, whole, 2) as k:
        pair = []
        for n in (0, 1):
            place = k + n
            exists = mask & b.splat(place < count)
            pair.append(b.masked_load(b.gep(source, place * inner_stride), exists))
        store(k, pair)
    with otherwise, b.loop(0, whole, b.lanes) as k:
        inside = b.lane_mask(count - k)
        rows = []
        for lane in range(b.lanes):
            exists = b.splat(units > lane)
            at = b.gep(source, lane_stride * lane + k)
            rows.append(b.masked_load(at, inside & exists))
        columns = b.transpose(rows)
        for n in range(0, b.lanes, 2):
            store(k + n, columns[n : n + 2])


def print_staging(module: Module, number: str, g: Geometry, operands: str) -> None:
    """Adds ``stage_<number>``, which writes numbers of a row as matmuls read them, widened (or for
    tiles rounded) and followed by zeros up to whole chunks.
    """
    b = module.private(f"stage_{number}", "ptr source, ptr to, i64 count")
    source, to, count = b.args
    with b.loop(0, whole_chunks(count, g.chunk), b.lanes) as i:
        mask, at = b.lane_mask(count - i), b.gep(source, i, number)
        if not g.tiled:
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
    """Adds ``scale_row``, which writes the scale of a row of so many numbers, and its inverse, from
    where they are told; and ``quantize``, which writes numbers of the row as integers from there
    on, followed by zeros up to whole vectors.
    """
    b = module.private("scale_row", "ptr source, ptr header, i64 count")
    source, header, count = b.args
    largest = b.variable(0, b.ivec)
    with b.loop(0, count, b.lanes) as i:
        mask = b.lane_mask(count - i)
        # As integers magnitudes have the order of the numbers, and NaN is above all.
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
        # The sum has the rounded number in its lowest bits; 128 more is the highest of eight.
        rounded = b.trunc(b.bits(product + ROUNDING), "i8")
        b.store(rounded ^ -128, b.gep(to, i, "i8"))
