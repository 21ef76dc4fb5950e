"""The matmuls that are parallel in time: ``C = A @ B`` and ``C += A @ B``, large and of any sizes.

There are two functions per instruction set and dtype, in modules of their own. The ``driver`` calls
them. A call is a table of 64-bit numbers, like a call of a door.

    void needs(int64_t *call)    writes scratch_bytes
    void gemm(int64_t *call)     multiplies
    void columns(int64_t *call)    the same for an A whose columns are dense, and whose rows are not

B is packed one *span* of its rows and columns at a time: panels of a few vectors of columns, cut
into blocks of ``INNER`` rows. Then C is cut into pieces of rows and, if these pieces are too few,
also of columns. Threads take pieces one by one, so a thread that shares its core takes fewer. The
last pieces have fewer rows, so that threads end at nearly the same time.
If C has up to ``ROWS`` rows and panels for all threads, or up to half as many rows, a piece is some
panels, and its thread packs them: fetching them from another core would cost more than multiplying
them.
A thread reads the rows of its piece in place. It copies them, block by block, if they would evict
each other or a panel from the near cache. If the columns of A are dense, copies have the order in
which a register block reads them: the first number of each of its rows, then the second number of
each row.
If A and B have 16 bits, C has 32 bits. Rows of A are widened as they are copied, unless bfloat16 is
multiplied as it is; B is packed in pairs, see ``matmul``. If B has integers, its columns have
scales, and A is float32: the rows of A are rounded as they are copied.
While a thread multiplies by a panel without matrix tiles, it fetches the next panel.

An element of C is a sum of blocks of ``INNER`` numbers in their order; each block is summed from
its first number to its last. So the bits of an element depend only on its row of A and its column
of B, not on threads or on other rows and columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from anycell.engines.cpu import tiles
from anycell.engines.cpu.door import print_gang
from anycell.engines.cpu.geometry import L1_WEIGHTS, ROW_HEADER, Geometry, paired
from anycell.engines.cpu.idioms import widen
from anycell.engines.cpu.ir import (
    Builder,
    Module,
    Target,
    Value,
    Variable,
    constant,
    element_bits,
    integer_of,
    vector,
)  # fmt: skip
from anycell.engines.cpu.matmul import (
    Prefetch,
    add_products,
    add_scaled,
    masked_numbers,
    negative_sums,
    print_pack_block,
    print_quantizing,
    print_staging,
    whole_chunks,
)  # fmt: skip
from anycell.engines.cpu.table import Entries, align
from anycell.plan import LINE, Dtype

INNER = 256  # numbers of a block's sum; whole vectors
ROWS = 96  # of a piece: enough to be worth reading a panel, few enough to divide the work evenly
# Rows of A that are a multiple of this many bytes apart compete for sets of the near cache. Half as
# many bytes suffice if a panel stays in this cache while rows come and go.
CONFLICT = 4 << 10
# If dense columns of A are at least this many bytes apart, a panel does not stay in the near cache
# beside them.
NEAR = 1 << 10
SPAN_INNER, SPAN_COLUMNS = 8 * INNER, 1024  # rows and columns of B packed at a time
FETCHING = 4  # register blocks of a piece that together fetch the next panel
# How many rows or columns of A prefetching runs ahead of copying.
ROWS_AHEAD = 4
COLUMNS_AHEAD = 16
PIECES = 8  # per thread, if there is enough work
UNROLL = 4  # rows of weights that a full register block takes per iteration of its loop

# Strides count elements. A and B each have one stride of 1 (A between columns, if B has integers).
# C is [rows, columns] with a stride of 1 between columns. ``add`` is 1 for C += A @ B; ``gang`` is
# as in a door's table. ``scratch`` is memory of ``scratch_bytes`` bytes, on a cache line.
OPERANDS = "rows columns inner a a_rows a_inner b b_inner b_columns c c_rows add".split()
ENTRIES = [*OPERANDS, *"threads gang scales scratch scratch_bytes".split()]
# Scratch memory begins with the address of the call's table and the current span; ``alone`` is 1 if
# each thread packs the panels of its piece. The number of pieces of the span that are taken follows
# on a cache line of its own.
SPAN = ["call", "column", "columns", "k", "inner", "add", "alone"]
COUNTER = align(8 * len(SPAN))
HEADER = COUNTER + LINE


class Cut(NamedTuple):
    """The pieces of C: rows of pieces, the tall ones first, and columns of pieces."""

    tall: Value  # rows of C in a tall piece
    low: Value  # and in a low one
    count_of_tall: Value
    columns: Value

    def piece(self, b: Builder, number: Value, rows: Value) -> tuple[Value, Value, Value]:
        """The first row, the height and the column of a piece of a matrix of so many rows."""
        column, place = number % self.columns, number // self.columns
        row = place * self.low + b.smin(place, self.count_of_tall) * (self.tall - self.low)
        height = b.select(place < self.count_of_tall, self.tall, self.low)
        return row, b.smin(rows - row, height), column


class Gemm:
    """Prints the module of one dtype and instruction set.

    Args:
        target: the instruction set.
        types: the dtype: A has its storage type, B its type of weights, and C the type in which it
            adds up products.
        columns: whether to print ``columns``, not ``gemm``.
    """

    def __init__(self, target: Target, types: Dtype, columns: bool = False) -> None:
        self.columns, self.real = columns, (real := types.accumulate.llvm)
        self.operands = types.operands
        self.module = Module(target, real)
        self.size, self.lanes = element_bits(real) // 8, target.lanes(real)
        self.narrow, self.quantized = self.operands.llvm != real, types.quantized
        self.left, self.right = types.storage, types.weights  # of A, of B
        self.packs = self.size // self.operands.bytes
        # Packed rows of a block of a panel; integers come after a row of scales and one of offsets.
        self.header = 2 * self.quantized
        self.packed_rows = self.header + INNER // self.packs
        # The geometry of a wide matmul with one result per unit.
        self.tiled = tiles.multiplies(target, self.operands.llvm)
        self.geometry = geometry = Geometry(
            1 << 16, INNER, 1, self.lanes, target.registers, self.packs, tiled=self.tiled,
            chunk=tiles.chunk(self.operands.llvm) if self.tiled else self.packs,
            paired=paired(target, types), pieces=types.pieces,
        )  # fmt: skip
        self.vectors, self.rows = geometry.columns, geometry.block_rows(geometry.columns)
        # A low piece has this part of a piece's rows, which are whole register blocks.
        self.low = 4
        if self.tiled:
            self.rows, self.low = tiles.ROWS, 3
        self.width = self.vectors * self.lanes
        # Memory of a thread: a block of a panel; a block of copied rows (copying writes whole
        # vectors of rows); another block if rows are transposed before they are staged; and the
        # results of a register block of which C has only a part.
        copied = ROW_HEADER + INNER // self.packs if self.quantized else INNER
        self.row = copied + LINE // self.size  # or all rows would share a few sets of the cache
        self.copied_block = INNER * self.rows + LINE // self.size  # of the rows of a register block
        blocks = -(-ROWS // self.rows) * self.copied_block
        self.copied = align(max((ROWS + self.lanes) * self.row, blocks) * self.size)
        self.staged = geometry.rounded and not self.quantized
        # Whether register blocks have dense rows of A; otherwise its columns are dense.
        self.dense = not columns or self.staged
        if self.staged:
            self.copied *= 2
        self.panel = self.packed_rows * self.width * self.size  # bytes of a block of a panel
        self.thread_bytes = self.panel + self.copied + align(self.rows * self.width * self.size)

    def print(self) -> None:
        """Adds the functions to the module."""
        print_gang(self.module)
        with self.module.part("packing"):
            print_pack_block(self.module, self.geometry, self.right.llvm, self.operands.llvm)
        if self.quantized:
            print_quantizing(self.module)
        elif not self.columns:
            print_staging(self.module, self.left.llvm, self.geometry, self.operands.llvm)
        elif self.staged:  # rows are transposed, then staged
            plain = Geometry(0, 0, 0, self.lanes, self.module.target.registers)
            print_pack_block(self.module, plain, self.left.llvm, self.real, name="widen_block")
            print_staging(self.module, self.real, self.geometry, self.operands.llvm)
        else:
            self._interleave()
        for vectors in range(1, self.vectors + 1):
            if self.tiled:
                self._tiles(vectors)
                continue
            for rows in range(1, self.rows + 1):
                self._register_block(rows, vectors)
        with self.module.part("common"):
            self._copy_partial("fetch")
            self._copy_partial("put")
            self._pack()
        self._panel()
        self._multiply()
        self._gemm()

    # ---- register blocks -------------------------------------------------------------------------
    def _register_block(self, rows: int, vectors: int) -> None:
        """c[rows, vectors] (+)= a[rows, :count] @ panel[:count, vectors]."""
        dense = self.dense
        b = self.module.private(
            f"block{vectors}_x{rows}",
            "ptr noalias panel, ptr noalias a, i64 a_apart, ptr noalias c, i64 c_rows, "
            "i64 count, i64 add, ptr ahead, i64 apart",
        )
        panel, a, a_apart, c, c_rows, count, add, first, apart = b.args
        sums = [[b.variable(0.0, b.vec) for _ in range(vectors)] for _ in range(rows)]
        results: list[Variable] = []
        for r in range(rows):
            row = b.gep(c, c_rows * r)
            results += [Variable(b, b.gep(row, n * b.lanes), b.vec) for n in range(vectors)]
        for result in results:
            b.prefetch(result.address)
        operand = [b.gep(a, a_apart * r if dense else r) for r in range(rows)]
        bounds, totals, weights = (b.value(0), count), sums, panel
        if self.quantized:
            scales = [b.load(b.gep(panel, n * b.lanes)) for n in range(vectors)]
            at = b.gep(panel, self.width)
            offsets = [b.load(b.gep(at, n * b.lanes), b.ivec) for n in range(vectors)]
            weights = b.gep(panel, self.header * self.width)
            totals = [[b.variable(offset) for offset in offsets] for _ in operand]
        number = self.operands.llvm
        ahead, inner = [Prefetch(first, apart, 2)], b.value(1) if dense else a_apart
        columns = [b.gep(weights, n * b.lanes) for n in range(vectors)]
        turn = UNROLL if rows == self.rows else 1
        add_products(b, totals, operand, columns, self.width, bounds, number, ahead, inner, turn)
        if self.quantized:
            add_scaled(b, sums, totals, operand, scales)
        _write(b, add.ne(0), results, itertools.chain(*sums))

    def _tiles(self, vectors: int) -> None:
        """Prints the register block of 16 rows (of integers up to 16) by matrix tiles."""
        b = self.module.private(
            f"tiles{vectors}",
            "ptr noalias panel, ptr noalias a, i64 a_rows, ptr noalias c, i64 c_rows, i64 rows, "
            "i64 count, i64 add",
        )
        panel, a, a_rows, c, c_rows, rows, count, add = b.args
        number, pieces, adds = self.operands.llvm, self.geometry.pieces, add.ne(0)
        left, bounds = (a, a_rows * self.size), (b.value(0), count)
        weights = b.gep(panel, self.header * self.width), b.value(self.width * self.size)
        places = [b.gep(c, n * b.lanes) for n in range(vectors)]
        if not self.quantized:  # sums begin with the numbers of C, or with zeros
            zeros, stride = b.module.table([0] * b.lanes, "i32"), c_rows * self.size
            apart = b.select(adds, stride, 0)
            begin = [(b.select(adds, at, zeros), apart) for at in places]
            end = [(at, stride) for at in places]
            tiles.multiply(b, number, left, weights, bounds, begin, end, pieces)
            return
        begin = [(b.gep(panel, self.width + n * b.lanes), b.value(0)) for n in range(vectors)]
        room = tiles.room(b, vectors)
        tiles.multiply(b, number, left, weights, bounds, begin, room)
        with b.loop(0, rows) as row:
            sums = [b.variable(0.0, b.vec) for _ in room]
            integers = [Variable(b, b.gep(at, row * apart, "i8"), b.ivec) for at, apart in room]
            results = [Variable(b, b.gep(at, row * c_rows), b.vec) for at in places]
            scales = [b.load(b.gep(panel, n * b.lanes)) for n in range(vectors)]
            add_scaled(b, [sums], [integers], [b.gep(a, row * a_rows)], scales)
            _write(b, adds, results, sums)

    def _copy_partial(self, way: str) -> None:
        """Copies rows of C to a register block of their own (``fetch``), or back (``put``)."""
        b = self.module.private(way, "ptr partial, ptr c, i64 c_rows, i64 rows, i64 columns")
        partial, c, c_rows, rows, columns = b.args
        with b.loop(0, rows) as r, b.loop(0, columns, b.lanes) as n:
            left, corner = columns - n, b.gep(c, r * c_rows + n)
            here = b.gep(partial, r * self.width + n)
            if way == "fetch":
                b.store(b.masked_load(corner, b.lane_mask(left)), here)
            else:
                b.store_first(b.load(here), corner, left)

    def _panel(self) -> None:
        """Multiplies all rows of a piece by one block of a panel."""
        b = self.module.private(
            "panel",
            "ptr panel, ptr a, i64 a_blocks, i64 a_rows, i64 a_inner, ptr c, i64 c_rows, i64 rows, "
            "i64 columns, i64 count, i64 add, ptr partial",
        )
        panel, a, a_blocks, a_rows, a_inner, c, c_rows, rows, columns, count, add, partial = b.args
        vectors = _parts(columns, b.lanes)
        with b.loop(0, rows, self.rows) as first:
            left = b.smin(rows - first, self.rows)
            # Each of the first register blocks fetches a part of the next panel.
            block, part = first // self.rows, self.width * self.size // FETCHING
            at, into = b.gep(a, block * a_blocks), b.gep(c, first * c_rows)
            early = block < FETCHING
            following = b.gep(panel, self.packed_rows * self.width)
            of_panel = b.gep(following, block * (self.packed_rows * part), "i8")
            ahead, step = b.select(early, of_panel, panel), b.select(early, part, 0)

            def multiply(vectors: int, to: Value, to_row: Value | int) -> None:
                if self.tiled:
                    b.call(f"tiles{vectors}", panel, at, a_rows, to, to_row, left, count, add)
                    return
                apart = a_rows if self.dense else a_inner
                operands = panel, at, apart, to, to_row, count, add, ahead, step
                for n in range(1, self.rows + 1):
                    with b.when(left.eq(n)):
                        b.call(f"block{vectors}_x{n}", *operands)

            # A register block writes whole vectors; matrix tiles of reals also write 16 rows.
            whole = columns.eq(self.width)
            if self.tiled and not self.quantized:
                whole &= left.eq(tiles.ROWS)
            with b.when(whole) as otherwise:
                multiply(self.vectors, into, c_rows)
            with otherwise:
                with b.when(add.ne(0)):
                    b.call("fetch", partial, into, c_rows, left, columns)
                for n in range(1, self.vectors + 1):
                    with b.when(vectors.eq(n)):
                        multiply(n, partial, self.width)
                b.call("put", partial, into, c_rows, left, columns)

    # ---- what threads take -----------------------------------------------------------------------
    def _part(self, name: str) -> tuple[Builder, Value, Entries, Entries, Value]:
        """Begins a function of the gang. Returns its builder, scratch memory, call, span, part."""
        b = self.module.private(name, "ptr scratch, i64 part, i64 parts")
        scratch, part, _ = b.args
        span = Entries(b, scratch, SPAN)
        return b, scratch, Entries(b, span.pointer("call"), ENTRIES), span, part

    @contextmanager
    def _pieces(self, b: Builder, scratch: Value, count: Value) -> Iterator[Value]:
        """Loops over those pieces of the span that no other thread has taken."""
        with b.repeat() as again:
            piece = b.atomic_add(b.gep(scratch, COUNTER, "i8"), 1)
            more = piece < count
            with b.when(more):
                yield piece
            again(more)

    def _cut(self, b: Builder, columns: Value, inner: Value) -> tuple[Value, Value]:
        """Counts the panels of a span, and the blocks of a panel."""
        # Scales and offsets are read even if the sum has no numbers.
        blocks = b.smax(_parts(inner, INNER), 1)
        return _parts(columns, self.width), blocks

    def _block(self, b: Builder, scratch: Value, number: Value) -> Value:
        """Returns where a block of a panel is packed: the first blocks of all panels come first."""
        numbers = number * (self.packed_rows * self.width)
        return b.gep(b.gep(scratch, HEADER, "i8"), numbers)

    def _pack(self) -> None:
        """Packs the span of B; a piece is a block of a panel."""
        self._pack_panel()
        b, scratch, _, span, _ = self._part("pack")
        panels, blocks = self._cut(b, span["columns"], span["inner"])
        with self._pieces(b, scratch, panels * blocks) as number:
            k, into = number // panels * INNER, self._block(b, scratch, number)
            b.call("pack_panel", scratch, number % panels, k, into)

    def _pack_panel(self) -> None:
        """Packs a block of a panel, which begins at row ``k`` of the span."""
        b = self.module.private("pack_panel", "ptr scratch, i64 panel, i64 k, ptr into")
        scratch, panel, k, into = b.args
        span = Entries(b, scratch, SPAN)
        call = Entries(b, span.pointer("call"), ENTRIES)
        count = b.smin(span["inner"] - k, INNER)
        row = (span["k"] + k) * call["b_inner"]
        for v in range(self.vectors):
            first = panel * self.width + v * self.lanes
            left = span["columns"] - first
            with b.when(left > 0):
                at = row + (span["column"] + first) * call["b_columns"]
                source = b.gep(call.pointer("b"), at, self.right.llvm)
                at = b.gep(into, self.header * self.width + v * self.lanes)
                strides = call["b_columns"], call["b_inner"]
                b.call("pack_block", source, *strides, left, count, at, self.width)
                if self.quantized:
                    scales = b.gep(call.pointer("scales"), span["column"] + first)
                    scales = b.masked_load(scales, b.lane_mask(left))
                    b.store(scales, b.gep(into, v * self.lanes))
                    offsets = negative_sums(b, at, _parts(count, self.packs), self.width)
                    b.store(offsets, b.gep(into, self.width + v * self.lanes))

    def _multiply(self) -> None:
        """Multiplies rows of A by the span of B; a piece is some rows of C and some panels."""
        b, scratch, call, span, part = self._part("multiply")
        panels, blocks = self._cut(b, span["columns"], span["inner"])
        # If pieces would be too few, they get fewer rows, and then also fewer columns. A thread
        # that packs panels alone gets one piece: its part of B may still be in its near cache.
        alone = span["alone"].ne(0)
        wanted = call["threads"] * b.select(alone, 1, PIECES)
        few = (call["rows"] < wanted * ROWS) & ~alone
        tall = b.select(few, ROWS // 2, ROWS)
        # The last pieces are low, so that no thread waits long for another's last piece.
        low = b.select(alone, tall, tall // self.low)
        last = (call["threads"] - 1) * tall
        count_of_tall = b.smax(call["rows"] - last, 0) // tall
        count_of_rows = count_of_tall + _parts(call["rows"] - count_of_tall * tall, low)
        cut = Cut(tall, low, count_of_tall, b.smin(_parts(wanted, count_of_rows), panels))
        packed = panels * blocks * self.panel
        own_panel = b.gep(b.gep(scratch, HEADER, "i8"), packed + part * self.thread_bytes, "i8")
        space = b.gep(own_panel, self.panel, "i8")
        partial = b.gep(space, self.copied, "i8")
        if self.tiled:
            tiles.configure(b, pieces=self.geometry.pieces)
        a_rows, a_inner, c_rows = call["a_rows"], call["a_inner"], call["c_rows"]
        with self._pieces(b, scratch, count_of_rows * cut.columns) as number:
            row, height, column = cut.piece(b, number, call["rows"])
            begin, end = (panels * n // cut.columns for n in (column, column + 1))
            if self.quantized:
                with b.loop(0, height) as r:
                    start = b.gep(call.pointer("a"), (row + r) * a_rows)
                    b.call("scale_row", start, b.gep(space, r * self.row), call["inner"])
            with b.loop(0, blocks) as block:
                k = block * INNER
                count = b.smin(span["inner"] - k, INNER)
                at = row * a_rows + (span["k"] + k) * a_inner
                source = b.gep(call.pointer("a"), at, self.left.llvm)
                left = self._left(b, call, source, space, height, count, call["rows"] - row)
                numbers = whole_chunks(count, self.geometry.chunk)
                add = span["add"] | b.zext(block > 0, "i64")
                with b.loop(begin, end) as n:
                    shared = self._block(b, scratch, block * panels + n)
                    panel = b.select(alone, own_panel, shared)
                    with b.when(alone):
                        b.call("pack_panel", scratch, n, k, panel)
                    column = n * self.width
                    at = row * c_rows + (span["column"] + column)
                    into, width = b.gep(call.pointer("c"), at), span["columns"] - column
                    of_c = into, c_rows, height, b.smin(width, self.width)
                    b.call("panel", panel, *left, *of_c, numbers, add, partial)
        if self.tiled:
            tiles.release(b)

    def _left(
        self, b: Builder, call: Entries, source: Value, space: Value, height: Value, count: Value,
        rest: Value,
    ) -> tuple[Value, ...]:  # fmt: skip
        """Returns the address of a block of rows of A, copied or in place, and the strides to the
        next register block, row and number of a row. A has ``rest`` rows from the block on.
        """
        a_rows, a_inner, number = call["a_rows"], call["a_inner"], self.left.llvm
        row, one = b.value(self.row), b.value(1)
        copied = space, row * self.rows, row, one
        if self.quantized:
            with b.loop(0, height) as r:
                header = b.gep(space, r * row)
                start = b.gep(source, r * a_rows, number)
                b.call("quantize", start, header, b.gep(header, ROW_HEADER), count)
            return b.gep(space, ROW_HEADER), *copied[1:]

        def stage(rows: Value, apart: Value, number: str) -> None:
            with b.loop(0, height) as r:
                start, to = b.gep(rows, r * apart, number), b.gep(space, r * row)
                with b.loop(0, count, LINE * 8 // element_bits(number)) as k:
                    b.prefetch(b.gep(start, apart * ROWS_AHEAD + k, number))
                b.call(f"stage_{number}", start, to, count)

        left = [b.variable(value) for value in (source, a_rows * self.rows, a_rows, one)]

        def lies(*where: Value) -> None:
            for variable, value in zip(left, where, strict=True):
                variable.value = value

        always = constant(1, "i1")
        if not self.columns:
            conflict = CONFLICT // 2 if self.panel < L1_WEIGHTS else CONFLICT
            conflicts = (a_rows * self.left.bytes % conflict).eq(0)
            with b.when(always if self.narrow else conflicts):
                stage(source, a_rows, number)
                lies(*copied)
        elif self.staged:
            transposed = b.gep(space, self.copied // 2, "i8")
            # Lanes are numbers of the sum, so the numbers of a row become contiguous.
            with b.loop(0, count, self.lanes) as n:
                start, to = b.gep(source, n * a_inner, number), b.gep(transposed, n)
                strides = a_inner, a_rows
                b.call("widen_block", start, *strides, count - n, height, to, row)
            stage(transposed, row, self.real)
            lies(*copied)
        else:
            rows = b.value(self.rows)
            lies(source, rows, one, a_inner)
            far = constant(int(self.panel < L1_WEIGHTS), "i1") & (a_inner * self.size >= NEAR)
            with b.when(always if self.narrow else far):
                b.call("interleave", source, a_inner, space, height, count, rest)
                lies(space, b.value(self.copied_block), one, rows)
        return tuple(variable.value for variable in left)

    def _interleave(self) -> None:
        """Copies a block of A with dense columns: for each register block the first number of each
        row, then the second number of each row. A has ``rest`` rows from the block on.
        """
        params = "ptr source, i64 a_inner, ptr to, i64 rows, i64 count, i64 rest"
        b = self.module.private("interleave", params)
        source, a_inner, to, rows, count, rest = b.args
        number = self.left.llvm
        with b.loop(0, whole_chunks(count, self.geometry.chunk)) as k:
            start, into = b.gep(source, k * a_inner, number), b.gep(to, k * self.rows)
            present = b.select(k < count, rest, 0)  # zeros after the last numbers
            with b.loop(0, _parts(rows, self.rows)) as block:
                for n in range(0, self.rows, self.lanes):
                    first = block * self.rows + n
                    at, left = b.gep(start, first, number), present - first
                    b.prefetch(b.gep(at, a_inner * COLUMNS_AHEAD, number))
                    numbers = b.unset(b.vec)
                    with b.when(left >= self.lanes) as otherwise:
                        whole = b.load(at, vector(self.lanes, integer_of(number)))
                        numbers.value = widen(b, whole, number)
                    with otherwise:
                        numbers.value = masked_numbers(b, at, b.lane_mask(left), number)
                    # Lanes beyond the rows are overwritten by the next numbers, or never read.
                    b.store(numbers.value, b.gep(into, block * self.copied_block + n))

    # ---- the call --------------------------------------------------------------------------------
    def print_needs(self) -> None:
        """Adds ``needs``, which the driver has."""
        b = self.module.function("needs", "ptr call")
        call = Entries(b, b.args[0], ENTRIES)
        columns, inner = b.smin(call["columns"], SPAN_COLUMNS), b.smin(call["inner"], SPAN_INNER)
        panels, blocks = self._cut(b, columns, inner)
        threads = b.smax(call["threads"], 1) * self.thread_bytes
        call["scratch_bytes"] = panels * blocks * self.panel + threads + HEADER

    def _gemm(self) -> None:
        b = self.module.function("columns" if self.columns else "gemm", "ptr call")
        call = Entries(b, b.args[0], ENTRIES)
        scratch, gang, threads = call.pointer("scratch"), call.pointer("gang"), call["threads"]
        span, counter = Entries(b, scratch, SPAN), b.gep(scratch, COUNTER, "i8")
        span["call"] = b.ptrtoint(b.args[0], "i64")
        columns, inner = call["columns"], call["inner"]

        def run(function: str) -> None:
            b.store(b.value(0), counter)
            b.call("gang", gang, Value(f"@{function}", "ptr"), scratch, threads)

        # For few panels a single thread reads dense columns of A in shorter spans, whose pieces lie
        # close together: it copies them for little work.
        short = threads.eq(1) & call["a_inner"].ne(1) & (columns <= 2 * self.width)
        most = b.select(short, 2 * INNER, SPAN_INNER)
        with b.when(call["rows"] > 0), b.loop(0, columns, SPAN_COLUMNS) as column:
            span["column"] = column
            span["columns"] = b.smin(columns - column, SPAN_COLUMNS)
            # A sum of no numbers is 0.
            with b.loop(0, b.smax(inner, 1), most) as k:
                span["k"], span["inner"] = k, b.smin(inner - k, most)
                span["add"] = call["add"] | b.zext(k > 0, "i64")
                panels, _ = self._cut(b, span["columns"], span["inner"])
                rows = call["rows"]
                alone = (rows <= ROWS) & ((panels >= threads) | (rows <= ROWS // 2))
                span["alone"] = b.zext(alone, "i64")
                with b.when(~alone):
                    run("pack")
                run("multiply")


def _write(b: Builder, adds: Value, results: Iterable[Variable], sums: Iterable[Variable]) -> None:
    """Writes sums to results, or adds them."""
    pairs = list(zip(results, sums, strict=True))
    with b.when(adds):
        for result, total in pairs:
            total.value = result.value + total.value
    for result, total in pairs:
        result.value = total.value


def _parts(count: Value, size: Value | int) -> Value:
    """Counts the parts of ``size`` elements in ``count``; the last part may be smaller."""
    return (count + size - 1) // size
