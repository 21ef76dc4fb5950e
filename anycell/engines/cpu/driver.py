"""Prints the driver: the native function that runs a whole pass of a layer.

    for each segment of time steps (without checkpoints, a single one)
        backward, with checkpoints: its states again, by chunks of the forward pass
        for each chunk of the segment
            products: the input projection
            the door of the kernel: the steps
            products: gradients of weights and of the input

The backward pass takes segments and chunks from the last to the first. A pass is a table of 64-bit
numbers: ``PASS``, then rows of ``MOVE`` and of ``PRODUCT``. Passes of one recipe differ only in
their addresses. So a call has a template of the tables, and the addresses to fill in.

    void execute(const int64_t *call)    fills in the addresses and runs the pass
    void execute_objects(int64_t *call)    the same for arrays of NumPy, see ``OBJECTS``
    void run(int64_t *pass)           runs a pass whose table has its addresses
    void room(int64_t *pass)          writes scratch_bytes

Our matmuls are modules of their own, for passes that have such products, as most in inference with
few inputs have not: they take nine tenths of the time to compile.

    void gemm(int64_t *call)                                       see ``gemm``
    void columns(int64_t *call)                                    see ``gemm``
    void few(int64_t *call, int64_t part, int64_t parts)           a part of it, for few rows

``next`` chains passes: a stack of layers is a single call.

A product reads and writes arrays along time. In a chunk, an operand begins at its address plus
``time`` bytes for each step of the sequence before the chunk, plus ``window`` bytes for each step
of the current segment before the chunk: arrays of states begin with the segment. Steps are counted
in the order of the arrays, even if a direction is reversed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from anycell.engines.cpu import gemm, jit
from anycell.engines.cpu.door import print_gang
from anycell.engines.cpu.gemm import Gemm
from anycell.engines.cpu.geometry import ROW_HEADER
from anycell.engines.cpu.idioms import dot, widen
from anycell.engines.cpu.ir import Builder, Module, Target, Value, element_bits, integer_of, vector
from anycell.engines.cpu.matmul import masked_numbers, print_quantizing, whole_chunks
from anycell.engines.cpu.sources import fingerprint
from anycell.engines.cpu.table import Entries, align
from anycell.plan import DTYPES, LINE, Dtype

# ``call`` is the door's table; ``begin`` to ``span`` are places in that table. ``first`` and
# ``last`` bound the steps to run, in the order of the forward pass. ``again`` is the pass that
# computes the states of a segment again, or 0. ``next`` is the pass to run after this pass, or 0.
# ``gemm``, ``columns`` and ``few`` are the addresses of our matmuls, or 0 where no product needs
# them; ``blas`` is the address of a Fortran sgemm or dgemm.
PASS = (
    "door call begin count pack origin span backward steps batch first last chunk segment again "
    "next moves before after gang threads least_work gemm columns few blas scratch "
    "scratch_bytes"
).split()
# A call: the head of its recipe, memory for the tables, and then its addresses, of which the last
# are no arrays: its memory, the tables in it, the gang of threads, and three numbers for random
# masks.
CALL = "head table".split()
OF_CALL = "block table gang first_row seed stream".split()
# Before a call for arrays of NumPy, whose first ``objects`` addresses are those of the objects:
# the address of their numbers lies ``after`` bytes from their begin. The call is overwritten.
OBJECTS = "objects after".split()
# A head: the template, and its length in numbers; the rows of ``PLACE``, and their count; the place
# in the template where the first pass begins.
HEAD = "template length places count first".split()
# Number ``at`` of the tables becomes the call's address number ``address``, plus ``offset``.
PLACE = "at address offset".split()
# Before segment n, ``base + n * step`` is stored at the address ``place``. In a forward pass, the
# door then writes the states before the segment to that memory, as if they were final states, and
# ``rest`` is stored at ``place``.
MOVE = "place base step rest".split()
# The entries of a matmul; ``along``, the size that counts the rows of the chunk (0 rows, 2 inner);
# ``reverse``, if the direction is reversed; ``sums``, the ``add`` of all chunks but the first;
# ``once``, if it is for the first chunk alone.
PRODUCT = [
    *gemm.OPERANDS, "scales", "kind", "along", "reverse", "sums", "once",
    *(f"{operand}_{axis}" for operand in "abc" for axis in ("time", "window")),
]  # fmt: skip
# The kinds of products: our matmul; the same for an ``a`` with dense columns; the matmul of
# ``blas``; our matmul without packing, for few rows; the sum of the rows of ``a``; a dense copy of
# the rows of ``a``, which may have any stride between steps, with zeros in place of rows whose flag
# in ``b`` is 0, or, if ``scales`` has rows, ``b_columns`` apart, with these in place of rows whose
# flag is not 0; and FEW for a ``b`` of integers without the scales of the rows of ``a``, which are
# written after the rows of ``c``.
KINDS = OURS, COLUMNS, BLAS, FEW, SUM, GATHER, UNSCALED = range(7)
DONE = len(KINDS)  # in place of a kind

# The table of a product: the matmul's; whether the kind is UNSCALED; and whether to take columns
# from the last to the first, as every other chunk does: of a large B the last ones are still near.
_PRODUCT = [*gemm.ENTRIES, "unscaled", "turned"]
_TABLE = align(8 * len(_PRODUCT))
BLOCK = 4  # vectors or columns that are added up side by side
SUMMED = 64  # rows that are added up before their sum is added to a total: this loses fewer digits


class Driver:
    """Adds the driver, or the matmul for few rows, to the module of a matmul."""

    def __init__(self, matmul: Gemm) -> None:
        self.matmul, self.module = matmul, matmul.module
        self.left, self.right = matmul.left.llvm, matmul.right.llvm
        self.bytes = matmul.left.bytes
        self.blas = not (matmul.narrow or matmul.quantized)

    def print(self) -> None:
        """Adds ``execute``, ``run``, ``room`` and the functions that they call."""
        print_gang(self.module)
        if self.matmul.quantized:
            print_quantizing(self.module)
        self.matmul.print_needs()
        self._sum()
        self._gather()
        if self.blas:
            self._blas()
        self._product()
        self._chunks()
        self._run()
        self._execute()
        self._execute_objects()
        self._room()

    def print_few(self) -> None:
        """Adds ``few`` and the functions that it calls."""
        self._few("one_row", single=True)
        self._few("few_rows", single=False)
        b = self.module.function("few", "ptr call, i64 part, i64 parts")
        with b.when(Entries(b, b.args[0], _PRODUCT)["rows"].eq(1)) as otherwise:
            b.call("one_row", *b.args)
        with otherwise:
            b.call("few_rows", *b.args)

    # ---- the loops -------------------------------------------------------------------------------
    def _execute(self) -> None:
        b = self.module.function("execute", "ptr call")
        call = Entries(b, b.args[0], CALL)
        table, head = call.pointer("table"), Entries(b, call.pointer("head"), HEAD)
        template, places = head.pointer("template"), head.pointer("places")
        addresses = b.gep(b.args[0], len(CALL), "i64")
        with b.loop(0, head["length"]) as i:
            b.store(b.load(b.gep(template, i, "i64"), "i64"), b.gep(table, i, "i64"))
        with b.loop(0, head["count"]) as i:
            place = _row(b, places, i, PLACE)
            address = b.load(b.gep(addresses, place["address"], "i64"), "i64")
            b.store(address + place["offset"], b.gep(table, place["at"], "i64"))
        b.call("run", b.gep(table, head["first"], "i64"))

    def _execute_objects(self) -> None:
        b = self.module.function("execute_objects", "ptr objects")
        head, call = Entries(b, b.args[0], OBJECTS), b.gep(b.args[0], len(OBJECTS), "i64")
        with b.loop(len(CALL), head["objects"] + len(CALL)) as i:
            place = b.gep(call, i, "i64")
            b.store(b.load(b.inttoptr(b.load(place, "i64") + head["after"], "ptr"), "i64"), place)
        b.call("execute", call)

    def _run(self) -> None:
        b = self.module.function("run", "ptr pass")
        table = Entries(b, b.args[0], PASS)
        backward = table["backward"].ne(0)
        first, last, segment = table["first"], table["last"], table["segment"]
        count = b.smax((last - first + segment - 1) // b.smax(segment, 1), 1)
        with b.loop(0, count) as n:
            slot = b.select(backward, count - 1 - n, n)
            begin = first + slot * segment
            end = b.smin(begin + segment, last)
            with b.when(table["moves"] > 0):
                with self._moves(table) as move:
                    b.store(move["base"] + slot * move["step"], move.pointer("place"))
                with b.when(~backward):
                    self._door(table, begin, 0)
                    with self._moves(table) as move:
                        b.store(move["rest"], move.pointer("place"))
            with b.when(table["again"].ne(0)):
                again = Entries(b, table.pointer("again"), PASS)
                for of_pass in (table, again):
                    b.store(begin, _of_door(of_pass, "origin"))
                    b.store(end - begin, _of_door(of_pass, "span"))
                b.call("chunks", again.address, begin, end)
            b.call("chunks", b.args[0], begin, end)
        with b.when(table["next"].ne(0)):
            b.call("run", table.pointer("next"))

    @contextmanager
    def _moves(self, table: Entries) -> Iterator[Entries]:
        b = table.b
        with b.loop(0, table["moves"]) as i:
            yield _row(b, b.gep(table.address, len(PASS), "i64"), i, MOVE)

    def _door(self, table: Entries, begin: Value, count: Value | int) -> None:
        b = table.b
        b.store(begin, _of_door(table, "begin"))
        b.store(b.value(count), _of_door(table, "count"))
        b.call(table.pointer("door"), table.pointer("call"), returns="void")
        b.store(b.value(0), _of_door(table, "pack"))

    def _chunks(self) -> None:
        b = self.module.private("chunks", "ptr pass, i64 begin, i64 end")
        address, begin, end = b.args
        table = Entries(b, address, PASS)
        backward, chunk = table["backward"].ne(0), table["chunk"]
        total = b.smax((end - begin + chunk - 1) // chunk, 1)
        before, after = table["before"], table["after"]
        with b.loop(0, total) as n:
            done = begin + b.select(backward, total - 1 - n, n) * chunk
            count = b.smin(chunk, end - done)
            self._multiply(table, 0, before, done, count)
            self._door(table, b.select(backward, table["steps"] - done - count, done), count)
            self._multiply(table, before, before + after, done, count)

    def _multiply(
        self, table: Entries, first: Value | int, last: Value, done: Value, count: Value
    ) -> None:
        b = table.b
        with b.when(count > 0), b.loop(first, last) as i:
            b.call("product", table.address, _product(table, i).address, done, count)

    # ---- one product -----------------------------------------------------------------------------
    def _product(self) -> None:
        b = self.module.private("product", "ptr pass, ptr row, i64 done, i64 count")
        address, row_address, done, count = b.args
        table, row = Entries(b, address, PASS), Entries(b, row_address, PRODUCT)
        steps, reverse = table["steps"], row["reverse"].ne(0)
        origin, span = (b.load(_of_door(table, n), "i64") for n in ("origin", "span"))
        time = b.select(reverse, steps - done - count, done)
        window = time - b.select(reverse, steps - origin - span, origin)
        scratch, along = table.pointer("scratch"), row["along"]
        call = Entries(b, scratch, _PRODUCT)
        for name in (*gemm.OPERANDS, "scales"):
            call[name] = row[name]
        for name in "abc":
            call[name] = row[name] + time * row[f"{name}_time"] + window * row[f"{name}_window"]
        chunk_rows = count * table["batch"]
        call["rows"] = rows = b.select(along.eq(0), chunk_rows, row["rows"])
        call["inner"] = inner = b.select(along.eq(2), chunk_rows, row["inner"])
        few = rows * row["columns"] * inner < table["least_work"]
        call["threads"] = threads = b.select(few, 1, table["threads"])
        call["gang"], call["turned"] = table["gang"], done & 1
        call["scratch"] = table["scratch"] + _TABLE
        kind, gang = row["kind"], table.pointer("gang")
        for ours, name in ((OURS, "gemm"), (COLUMNS, "columns")):
            with b.when(kind.eq(ours)):
                b.call(table.pointer(name), scratch, returns="void")
        with b.when(kind.eq(SUM)):
            b.call("gang", gang, Value("@sum_rows", "ptr"), scratch, threads)
        with b.when(kind.eq(GATHER)):
            # A gather has no sum: ``inner`` tells it how many rows a step has.
            call["inner"], call["c_rows"] = table["batch"], row["c_rows"]
            b.call("gang", gang, Value("@gather", "ptr"), scratch, threads)
        with b.when(kind.eq(FEW) | kind.eq(UNSCALED)):
            if self.matmul.quantized:
                self._round_rows(b, call, kind.eq(UNSCALED))
            b.call("gang", gang, table.pointer("few"), scratch, threads)
        if self.blas:
            with b.when(kind.eq(BLAS)):
                b.call("blas", table.pointer("blas"), scratch)
        row["add"] = row["add"] | row["sums"]
        row["kind"] = b.select(row["once"].ne(0), DONE, kind)

    def _sum(self) -> None:
        """Writes the sum of the rows of A to C, or adds it to C; threads share the columns."""
        b, call, first, last = self._part("sum_rows", "columns", self.matmul.lanes)
        add, end = call["add"].ne(0), b.smin(call["columns"], last * b.lanes)
        with b.loop(first, last, BLOCK) as block:
            columns = [(block + n) * b.lanes for n in range(BLOCK)]
            counts = [end - column for column in columns]
            masks = list(map(b.lane_mask, counts))
            totals = [b.variable(0.0, b.vec) for _ in columns]
            places = [b.gep(call.pointer("c"), column) for column in columns]
            with b.when(add):
                for total, place, mask in zip(totals, places, masks, strict=True):
                    total.value = b.masked_load(place, mask)
            with b.loop(0, call["rows"], SUMMED) as begin:
                sums = [b.variable(0.0, b.vec) for _ in columns]
                with b.loop(begin, b.smin(begin + SUMMED, call["rows"])) as row:
                    start = b.gep(call.pointer("a"), row * call["a_rows"], self.left)
                    for sum_, column, mask in zip(sums, columns, masks, strict=True):
                        at = b.gep(start, column, self.left)
                        sum_.value += masked_numbers(b, at, mask, self.left)
                for total, sum_ in zip(totals, sums, strict=True):
                    total.value += sum_.value
            for total, place, count in zip(totals, places, counts, strict=True):
                b.store_first(total.value, place, count)

    def _gather(self) -> None:
        """Copies rows, with zeros or others in place of some of them; threads share the rows."""
        b, call, first, last = self._part("gather", "rows")
        batch, columns = call["inner"], call["columns"]
        flags, others = call["b"], call["scales"]
        element = f"i{8 * self.bytes}"
        kind = vector(b.lanes, element)
        with b.loop(first, last) as row:
            at = row // batch * call["a_inner"] + row % batch * call["a_rows"]
            source = b.gep(call.pointer("a"), at, element)
            to = b.gep(call.pointer("c"), row * call["c_rows"], element)
            flag = b.variable(1, "i8")
            with b.when(flags.ne(0)):
                flag.value = b.load(b.gep(call.pointer("b"), row, "i8"), "i8")
            present, instead = flag.value.ne(0), others.ne(0)
            other = b.gep(call.pointer("scales"), row * call["b_columns"], element)
            source = b.select(present & instead, other, source)
            present = present | instead
            with b.loop(0, columns, b.lanes) as i:
                inside = b.lane_mask(columns - i)
                read = inside & b.splat(present)
                numbers = b.masked_load(b.gep(source, i, element), read, 0, kind)
                b.store_first(numbers, b.gep(to, i, element), columns - i)

    def _round_rows(self, b: Builder, call: Entries, unscaled: Value) -> None:
        """Puts rows of magnitudes and signs of integers, after their scales, in place of A's.

        A sign is -1 or 0, so number q times w is |q| (w ^ sign), plus |q| if q is negative: these
        are added up for each block of the sum, and written after the signs of the row.
        """
        space, row, inner = call.pointer("scratch"), _integer_row(call["inner"]), call["inner"]
        width, signs, most = 4 * b.lanes, whole_chunks(inner, LINE), b.smax(inner, 1)
        length = b.select(unscaled, most, gemm.INNER)
        with b.loop(0, call["rows"]) as r:
            source = b.gep(call.pointer("a"), r * call["a_rows"], self.left)
            header = b.gep(space, r * row, "i8")
            numbers = b.gep(header, ROW_HEADER)
            b.call("scale_row", source, header, inner)
            b.call("quantize", source, header, numbers, inner)
            with b.loop(0, most, length) as begin:
                end, total = b.smin(begin + length, inner), b.variable(0, b.ivec)
                with b.loop(begin, end, width) as k:
                    at = b.gep(numbers, k, "i8")
                    mask = b.lane_mask(end - k, width, "i8")
                    number = b.select(mask, b.load(at, vector(width, "i8")) ^ -128, 0)
                    sign = b.ashr(number, 7)
                    size = (number ^ sign) - sign
                    b.store(size, at, align=1)
                    b.store(sign, b.gep(at, signs, "i8"), align=1)
                    size, sign = (b.bitcast(x, b.ivec) for x in (size, sign))
                    total.value = dot(b, total.value, size, sign)
                b.store(-b.reduce_add(total.value), _of_negative(b, numbers, signs, begin))
            with b.when(unscaled):
                last = b.gep(call.pointer("c"), r * call["c_rows"] + call["columns"])
                b.store(b.load(header, b.real), last)
        call["a"], call["a_rows"], call["unscaled"] = call["scratch"], row, b.zext(unscaled, "i64")

    def _few(self, name: str, single: bool) -> None:
        """Multiplies few dense rows of A by B, which is not packed: a block of rows reads it once.
        A ``single`` row has a function of its own, whose addresses stay in registers.
        Threads share the columns. The bits of an element depend only on its row and its column. If
        the rows of B are dense, or B has integers, whose columns are dense, they are the matmul's;
        else each lane adds up a part of the sum.
        """
        b, call, first, last = self._part(name, "columns")
        a, into, integers = call.pointer("a"), call.pointer("c"), self.matmul.quantized
        # Read once: a block of columns is short.
        table = {name: call[name] for name in "rows inner b_columns add turned unscaled".split()}
        table |= {name: call.pointer(name) for name in ("b", "scales")}
        number, dots = ("i8", self._integer_dots) if integers else (self.left, self._dots)

        def blocks(
            most: int, column: Value, print_block: Callable[[list[Value], list[Value]], None]
        ) -> None:
            """Cuts the rows into blocks of up to ``most``: prints each size from the addresses of
            its rows of A and of its results, which begin in ``column``.
            """
            if single:
                return print_block([a], [b.gep(into, column)])
            with b.loop(0, table["rows"], most) as begin:
                count = b.smin(table["rows"] - begin, most)
                for n in range(1, most + 1):
                    with b.when(count.eq(n)):
                        rows = [begin + r for r in range(n)]
                        starts = [b.gep(a, r * call["a_rows"], number) for r in rows]
                        print_block(
                            starts, [b.gep(into, r * call["c_rows"] + column) for r in rows]
                        )

        with b.when(call["b_inner"].eq(1)) as otherwise:
            # The sums of a block, a number of each row and a number of B fill 16 registers. Of
            # integers a row has magnitudes and signs, which more columns share.
            block, most = BLOCK, 4 if b.target.registers == 32 else 3 if b.target.fma else 2
            if integers:
                block, most = 2 * BLOCK, 2 if b.target.registers == 32 else 1
            whole = first + (last - first) // block * block
            for begin, end, count in ((first, whole, block), (whole, last, 1)):
                with b.loop(begin, end, count) as column:
                    column = b.select(table["turned"].ne(0), begin + end - count - column, column)
                    blocks(most, column, functools.partial(dots, b, table, column, count))
        if integers:
            return
        with otherwise:
            width, rest = BLOCK * b.lanes, b.variable(first)

            def across(most: int, column: Value, vectors: int, left: Value | None = None) -> None:
                each = functools.partial(self._rows_of_b, b, call, column, vectors, left)
                blocks(most, column, each)

            if single:  # for which registers hold more columns
                rest.value = first + (last - first) // (2 * width) * (2 * width)
                with b.loop(first, rest.value, 2 * width) as column:
                    across(1, column, 2 * BLOCK)
            with b.loop(rest.value, last, width) as column:
                left, most = last - column, 4 if b.target.registers == 32 else 2
                with b.when(left >= width) as last_columns:
                    across(most, column, BLOCK)
                with last_columns:
                    with b.when(left > width // 2) as half:
                        across(most, column, BLOCK, left)
                    with half:
                        across(most, column, BLOCK // 2, left)

    def _dots(
        self, b: Builder, table: Mapping[str, Value], column: Value, count: int, rows: list[Value],
        results: list[Value],
    ) -> None:  # fmt: skip
        """Multiplies rows by ``count`` dense columns of B; lanes are added up last."""
        inner = table["inner"]
        columns, fetch = _columns(b, table, column, count, self.right)
        sums = [[b.variable(0.0, b.vec) for _ in columns] for _ in rows]

        def add(k: Value, mask: Value | None) -> None:
            lefts = [self._numbers(b, b.gep(row, k, self.left), mask, self.left) for row in rows]
            for n, at in enumerate(columns):
                right = self._numbers(b, b.gep(at, k, self.right), mask, self.right)
                for left, of_row in zip(lefts, sums, strict=True):
                    of_row[n].value = b.fma(left, right, of_row[n].value)

        whole = inner // b.lanes * b.lanes
        with b.loop(0, whole, b.lanes) as k:
            fetch(k, b.lanes)
            add(k, None)
        with b.when(whole < inner):
            add(whole, b.lane_mask(inner - whole))
        for of_row, to in zip(sums, results, strict=True):
            totals = b.reduce_each([sum_.value for sum_ in of_row])
            total = b.variable(totals, totals.type)
            with b.when(table["add"].ne(0)):
                total.value += b.load(to, total.type)
            b.store(total.value, to)

    def _integer_dots(
        self, b: Builder, table: Mapping[str, Value], column: Value, count: int, rows: list[Value],
        results: list[Value],
    ) -> None:  # fmt: skip
        """Multiplies rows of integers by ``count`` dense columns of B. Sums are exact, and cut as
        the matmul's, or, unscaled, not at all, as a kernel's.
        """
        inner, apart, width = table["inner"], table["b_columns"], 4 * b.lanes
        kind, signs = vector(width, "i8"), whole_chunks(inner, LINE)
        columns, fetch = _columns(b, table, column, count, "i8")
        scales = b.load(b.gep(table["scales"], column), vector(count, b.real))
        numbers = [b.gep(row, ROW_HEADER) for row in rows]
        unscaled, length = table["unscaled"].ne(0), b.smax(inner, 1)
        with b.loop(0, length, b.select(unscaled, length, gemm.INNER)) as begin:
            end = b.smin(begin + b.select(unscaled, length, gemm.INNER), inner)
            sums = [[b.variable(0, b.ivec) for _ in columns] for _ in rows]

            def add(k: Value, of_row: Value | None = None, of_b: Value | None = None) -> None:
                lefts = []
                for row in numbers:
                    at = b.gep(row, k, "i8")
                    size, sign = b.load(at, kind), b.load(b.gep(at, signs, "i8"), kind)
                    size = size if of_row is None else b.select(of_row, size, 0)
                    lefts.append((b.bitcast(size, b.ivec), sign))
                for n, at in enumerate(columns):
                    at = b.gep(at, k, "i8")
                    right = b.load(at, kind) if of_b is None else b.masked_load(at, of_b, 0, kind)
                    for (size, sign), totals in zip(lefts, sums, strict=True):
                        flipped = b.bitcast(right ^ sign, b.ivec)
                        totals[n].value = dot(b, totals[n].value, size, flipped, bits=7)

            whole = begin + (end - begin) // width * width
            with b.loop(begin, whole, width) as k:
                fetch(k, width)
                add(k)
            # The last vector begins early: masks of bytes are slow. Nothing lies before the first.
            left = end - whole
            with b.when(left > 0):
                with b.when(column * apart + end >= width) as otherwise:
                    add(end - width, of_row=~b.lane_mask(width - left, width, "i8"))
                with otherwise:
                    add(whole, of_b=b.lane_mask(left, width, "i8"))
            for row, number, of_row, to in zip(rows, numbers, sums, results, strict=True):
                totals = b.reduce_each([sum_.value for sum_ in of_row])
                negative = b.load(_of_negative(b, number, signs, begin), "i32")
                totals += b.splat(negative, count)
                total = b.variable(b.sitofp(totals, b.real) * scales)
                with b.when(~unscaled):
                    scale = b.splat(b.load(row, b.real), count)
                    total.value = b.fma(total.value, scale, b.value(0.0, scale.type))
                with b.when((begin > 0) | table["add"].ne(0)):
                    total.value = b.load(to, total.type) + total.value
                b.store(total.value, to)

    def _rows_of_b(
        self, b: Builder, call: Entries, column: Value, vectors: int, left: Value | None,
        rows: list[Value], results: list[Value],
    ) -> None:  # fmt: skip
        """Multiplies each number of rows by vectors of a dense row of B, of which only ``left``
        columns are there if it is not None; adds as the matmul does.
        """
        counts = [None if left is None else left - n * b.lanes for n in range(vectors)]
        masks = [None if count is None else b.lane_mask(count) for count in counts]
        inner, of_b = call["inner"], b.gep(call.pointer("b"), column, self.right)
        with b.loop(0, b.smax(inner, 1), gemm.INNER) as begin:
            sums = [[b.variable(0.0, b.vec) for _ in masks] for _ in rows]
            with b.loop(begin, b.smin(begin + gemm.INNER, inner)) as k:
                at = b.gep(of_b, k * call["b_inner"], self.right)
                rights = [
                    self._numbers(b, b.gep(at, n * b.lanes, self.right), mask, self.right)
                    for n, mask in enumerate(masks)
                ]
                for row, of_row in zip(rows, sums, strict=True):
                    number = b.load(b.gep(row, k, self.left), integer_of(self.left))
                    value = widen(b, b.splat(number), self.left)
                    for sum_, right in zip(of_row, rights, strict=True):
                        sum_.value = b.fma(value, right, sum_.value)
            adds = call["add"].ne(0) | (begin > 0)
            for of_row, to in zip(sums, results, strict=True):
                places = [b.gep(to, n * b.lanes) for n in range(vectors)]
                with b.when(adds):
                    for sum_, place, mask in zip(of_row, places, masks, strict=True):
                        sum_.value = self._numbers(b, place, mask, b.real) + sum_.value
                for sum_, place, count in zip(of_row, places, counts, strict=True):
                    if count is None:
                        b.store(sum_.value, place)
                    else:
                        b.store_first(sum_.value, place, count)

    def _numbers(self, b: Builder, at: Value, mask: Value | None, number: str) -> Value:
        """Loads a vector of numbers, of all lanes or under a mask, and widens them."""
        if mask is not None:
            return masked_numbers(b, at, mask, number)
        return widen(b, b.load(at, vector(b.lanes, integer_of(number))), number)

    def _part(
        self, name: str, shared: str, width: int = 1
    ) -> tuple[Builder, Entries, Value, Value]:
        """Begins a function of the gang. Returns its builder, its matmul, and the bounds of a part
        of the ``shared`` rows or columns, counted in pieces of ``width``.
        """
        b = self.module.private(name, "ptr table, i64 part, i64 parts")
        address, part, parts = b.args
        call = Entries(b, address, _PRODUCT)
        pieces = (call[shared] + (width - 1)) // width
        return b, call, pieces * part // parts, pieces * (part + 1) // parts

    def _blas(self) -> None:
        """Calls a Fortran gemm, whose matrices are column-major: C.T = B.T @ A.T."""
        b = self.module.private("blas", "ptr blas, ptr table")
        blas, address = b.args
        call = Entries(b, address, gemm.ENTRIES)
        letters = b.module.table([ord("N"), ord("T")], "i8")
        rows, columns, inner = call["rows"], call["columns"], call["inner"]
        of_b, of_a = call["b_columns"].eq(1), call["a_inner"].eq(1)

        def stride(dense: Value, ways: tuple[str, str], lengths: tuple[Value, Value]) -> Value:
            # The stride of a single column or row is never used, but BLAS checks it.
            steps = b.select(dense, *(call[way] for way in ways))
            return b.smax(b.smax(steps, b.select(dense, *lengths)), 1)

        ldb = stride(of_b, ("b_inner", "b_columns"), (columns, inner))
        lda = stride(of_a, ("a_rows", "a_inner"), (inner, rows))
        ldc = b.smax(b.smax(call["c_rows"], columns), 1)
        # Fortran takes addresses.
        numbers = (columns, rows, inner, ldb, lda, ldc)
        m, n, k, ldb, lda, ldc = (b.variable(b.trunc(x, "i32")).address for x in numbers)
        alpha = b.variable(1.0, b.real).address
        beta = b.variable(b.select(call["add"].ne(0), 1.0, 0.0)).address
        turned = [b.gep(letters, b.zext(~dense, "i64"), "i8") for dense in (of_b, of_a)]
        b.call(
            blas, *turned, m, n, k, alpha,
            call.pointer("b"), ldb, call.pointer("a"), lda, beta,
            call.pointer("c"), ldc, returns="void",
        )  # fmt: skip

    def _room(self) -> None:
        b = self.module.function("room", "ptr pass")
        table, space = Entries(b, b.args[0], PASS), b.alloca("i64", len(gemm.ENTRIES))
        call = Entries(b, space, gemm.ENTRIES)
        most = b.variable(0)
        chunk = table["chunk"] * table["batch"]
        with b.loop(0, table["before"] + table["after"]) as i:
            row = _product(table, i)
            with b.when(row["kind"].eq(OURS) | row["kind"].eq(COLUMNS)):
                call["columns"], call["threads"] = row["columns"], table["threads"]
                call["inner"] = b.select(row["along"].eq(2), chunk, row["inner"])
                b.call("needs", space)
                most.value = b.smax(most.value, call["scratch_bytes"])
            if self.matmul.quantized:
                with b.when(row["kind"].eq(FEW) | row["kind"].eq(UNSCALED)):
                    rows = b.select(row["along"].eq(0), chunk, row["rows"])
                    most.value = b.smax(most.value, rows * _integer_row(row["inner"]))
        table["scratch_bytes"] = most.value + _TABLE


def _integer_row(inner: Value) -> Value:
    """Bytes of a row of so many integers after its header, see ``_round_rows``."""
    signs = whole_chunks(inner, LINE)  # vectors are read whole
    return signs + signs + whole_chunks(signs // LINE, LINE) + LINE


def _columns(
    b: Builder, table: Mapping[str, Value], column: Value, count: int, number: str
) -> tuple[list[Value], Callable[[Value, int], None]]:
    """The addresses of ``count`` dense columns of B; and a function that prefetches as much of the
    columns after them as a vector of each holds, in the order of addresses, which the hardware
    follows.
    """
    apart = table["b_columns"]
    columns = [b.gep(table["b"], column * apart, number)]
    for _ in range(count - 1):  # an addition each, not a product
        columns.append(b.gep(columns[-1], apart, number))
    after = b.gep(columns[0], b.select(table["turned"].ne(0), -count, count) * apart, number)

    def fetch(k: Value, lanes: int) -> None:
        for n in range(0, count * lanes, LINE * 8 // element_bits(number)):
            b.prefetch(b.gep(after, k * count + n, number))

    return columns, fetch


def _of_negative(b: Builder, numbers: Value, signs: Value, begin: Value) -> Value:
    """The address of the sum of the magnitudes of negative integers in a block of a row."""
    return b.gep(b.gep(numbers, signs + signs, "i8"), begin // gemm.INNER, "i32")


def _of_door(table: Entries, name: str) -> Value:
    """Returns the address of an entry of the door's table, whose place the pass's table holds."""
    return table.b.gep(table.pointer("call"), table[name], "i64")


def _row(b: Builder, rows: Value, number: Value, names: list[str]) -> Entries:
    """Returns one of the rows that begin at the address ``rows``."""
    return Entries(b, b.gep(rows, number * len(names), "i64"), names)


def _product(table: Entries, number: Value) -> Entries:
    """Returns a ``PRODUCT`` row of a pass."""
    places = table["moves"] * len(MOVE) + len(PASS)
    return _row(table.b, table.b.gep(table.address, places, "i64"), number, PRODUCT)


class Functions(NamedTuple):
    """The compiled functions of one dtype and instruction set; each takes a table's address."""

    needs: Callable[[int], None]
    room: Callable[[int], None]
    run: Callable[[int], None]
    execute: Callable[[bytes], None]
    execute_objects: Callable[[bytes], None]


class Matmul(NamedTuple):
    """One of our matmuls, compiled: "gemm", "columns" or "few". ``needs`` is the driver's."""

    library: jit.Library
    address: int
    run: Callable[[int], None]
    needs: Callable[[int], None]


@functools.lru_cache(maxsize=32)
def compiled(dtype: str, target: Target) -> Functions:
    """Returns the driver's functions; compiled once per process, kept on disk."""
    library = jit.compile(*request(DTYPES[dtype], target))
    return Functions(*map(library.function, Functions._fields))


@functools.lru_cache(maxsize=64)
def matmul(name: str, dtype: str, target: Target) -> Matmul:
    """Returns the matmul of this name; compiled once per process, kept on disk."""
    library = jit.compile(*request(DTYPES[dtype], target, name))
    needs = compiled(dtype, target).needs
    return Matmul(library, library.address(name), library.function(name), needs)


def request(types: Dtype, target: Target, matmul: str = "") -> jit.Request:
    """The request to ``jit`` for a module, see ``module``."""
    sources = fingerprint()
    recipe = f"{sources}\n{target}\ndriver {types} {matmul}" if sources else None
    symbols = (matmul,) if matmul else Functions._fields
    return lambda: module(target, types, matmul), symbols, target, recipe


def module(target: Target, types: Dtype, matmul: str = "") -> Module:
    """The module of the driver or, by its name, of one of our matmuls."""
    ours = Gemm(target, types, matmul == "columns")
    {"": Driver(ours).print, "few": Driver(ours).print_few}.get(matmul, ours.print)()
    return ours.module
