"""Prints the door of a kernel: the one native function by which a layer runs a pass, or a chunk of
its steps.

A call is a table of 64-bit numbers: sizes, switches, addresses and strides, by the names of
``anycell.layer.signature``. The door packs the weights, writes the states before the first step,
computes from the table where each direction of the chunk begins, runs the kernel on the gang of
threads, and copies the final states out. It needs no Python and no lock of Python's: ctypes, an XLA
handler and a C program call the same function.

    void needs(int64_t *call)    writes scratch_bytes, packed_bytes, parts and units_split
    void door(int64_t *call)     runs so many steps, after the ``begin`` that are done

See ``table`` for the entries of a call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from anycell.engines.cpu.idioms import narrow
from anycell.engines.cpu.ir import Builder, Module, Value, constant, integer_of, vector
from anycell.engines.cpu.layout import Layout
from anycell.engines.cpu.matmul import packed_rows_of, whole_chunks
from anycell.engines.cpu.table import PASSED_ON, Entries, align, names
from anycell.plan import LINE, Array, scales_of

WORTH_SPREADING = 1 << 16  # numbers to pack below which another thread takes longer to wake
NEAR_CACHE = 5 << 18  # bytes of a core's own cache
# Threads do not divide the rows but split the units where each thread would have fewer rows than
# that, and a core's own cache holds a part of the weights but not all; with hardly any rows they
# always do. Elsewhere the barrier of each step costs more than it saves.
FEW_ROWS = 16
FEW_TILED_ROWS = 64  # tiles are through with a weight sooner than it comes from afar
HARDLY_ANY_ROWS = 4
# What a packing function reads: the weight, its strides, two biases, where it packs to, the length
# of the sum, and the scales of integers.
PACKING = "source heads rows columns input_bias bias packed inner scales".split()
PACKING_BYTES = align(8 * len(PACKING))


def print_gang(module: Module) -> None:
    """Adds ``gang``, which runs parts of a function on threads, or all in this one."""
    b = module.private("gang", "ptr record, ptr function, ptr args, i64 parts")
    record, function, args, parts = b.args
    # An address of 0 is no record.
    there = b.ptrtoint(record, "i64").ne(0)
    with b.when(there & (parts > 1)) as otherwise:
        run, table, openmp = (b.load(b.gep(record, i, "i64"), "ptr") for i in range(3))
        b.call(run, table, function, args, parts, openmp, returns="i64")
    with otherwise:
        b.call(function, args, 0, 1, returns="void")


class Direction(NamedTuple):
    """One direction of a call: entries of the whole call, of the direction, and its number."""

    shared: Entries
    each: Entries
    d: Value


class Door:
    """Adds the door to the module of a kernel."""

    def __init__(self, module: Module, layout: Layout) -> None:
        self.module, self.layout, self.plan = module, layout, layout.plan
        self.cell, self.backward, self.size = self.plan.cell, layout.backward, layout.size
        self.names = names(self.plan, self.backward)
        self.arrays, self.index = layout.arrays, layout.entries
        self.sequences, self.projecting = layout.sequences, layout.projecting
        self.gates = len(self.cell.gates) * self.plan.hidden_size
        # Scratch memory has the number of directions and the addresses of their tables, then the
        # kernel's tables, each with the counter of its barrier on a line of its own, and then the
        # tables of packing.
        self.table_bytes = align(8 * len(self.index)) + LINE
        self.matmuls = layout.matmuls
        self.packing_bytes = PACKING_BYTES * (len(self.matmuls) + 1)
        # The types of numbers in rows that are copied, by the suffix of the functions that do it:
        # the first state may be narrower than all else.
        storage = self.plan.types.storage.llvm
        self.copied = {"": layout.real}
        if storage != layout.real:
            self.copied["_narrow"] = integer_of(storage)

    def print(self) -> None:
        """Adds ``needs``, ``door`` and what they call."""
        for suffix, real in self.copied.items():
            self._print_copy(suffix, real)
        print_gang(self.module)
        self._print_packing()
        self._print_needs()
        self._print_layout()
        if self.backward:
            self._print_first_gradients()
        else:
            self._print_first_states()
            self._print_final_states()
        b = self.module.function("door", "ptr call")
        (call,) = b.args
        shared = self._shared(b)
        b.call("lay_out", call)
        with b.when(shared["lay_out"].eq(0)):
            gang, base = shared.pointer("gang"), shared.pointer("scratch")
            with b.when(shared["pack"].ne(0)):
                many = shared["packed_bytes"] // self.size > WORTH_SPREADING
                threads = b.select(many, shared["threads"], 1)
                b.call("gang", gang, Value("@pack_all", "ptr"), base, threads)
            # The steps that are done before the first that the arrays of states have.
            with b.when(shared["begin"].eq(0 if self.backward else shared["origin"])):
                b.call("write_first", call)
            with b.when(shared["count"] > 0):
                b.call("gang", gang, Value("@run_all", "ptr"), base, shared["parts"])
            if not self.backward:
                b.call("write_final", call)

    def _shared(self, b: Builder) -> Entries:
        return Entries(b, b.args[0], self.names.shared)

    @contextmanager
    def _directions(self, b: Builder) -> Iterator[Direction]:
        """A loop over directions."""
        shared = self._shared(b)
        with b.loop(0, shared["directions"]) as d:
            at = d * len(self.names.each) + len(self.names.shared)
            yield Direction(shared, Entries(b, b.gep(b.args[0], at, "i64"), self.names.each), d)

    # ---- memory ----------------------------------------------------------------------------------
    def _print_needs(self) -> None:
        """Prints ``needs``: the bytes of the call's memory."""
        shared = self._shared(self.module.function("needs", "ptr call"))
        *_, end = self._places(shared)
        shared["scratch_bytes"] = end
        shared["packed_bytes"] = shared["directions"] * self._packed_bytes(shared)
        self._threads(shared)

    def _places(self, shared: Entries) -> tuple[Value, Value, Value, Value, Value]:
        """The places in scratch memory of the kernel's tables, tables of packing, a row of zeros,
        and of the threads' workspaces; the bytes of a workspace; and the end.
        """
        b, directions = shared.b, shared["directions"]
        packing = directions * self.table_bytes + LINE
        zeros = packing + directions * self.packing_bytes
        work = zeros
        if not self.backward:
            work = zeros + b.select(shared["inputs"].ne(0), align(self.gates * self.size), 0)
        staged: Value | int = 0
        if self.projecting is not None and self.layout.staged_bytes:
            staged = self.layout.staged_input(b, shared["inputs"]) * self.size
        bytes_of_one = self.layout.workspace(shared["batch"], staged)
        end = work + directions * shared["threads"] * bytes_of_one
        return packing, zeros, work, bytes_of_one, end

    def _packed_bytes(self, shared: Entries) -> Value:
        """Bytes of a direction's packed weights, with the input that the kernel multiplies."""
        b = shared.b
        fixed = b.value(sum(align(m.packed_elements * self.size) for m in self.matmuls), "i64")
        if self.projecting is None:
            return fixed
        g, inputs = self.projecting.geometry, shared["inputs"]
        each = g.tiles * g.columns * g.lanes * self.size
        size = (packed_rows_of(inputs, g) + (g.lanes + g.header - 1)) * each
        size = (size + (LINE - 1)) // LINE * LINE
        return fixed + b.select(inputs.ne(0), size, 0)

    # ---- what the door calls ---------------------------------------------------------------------
    def _print_packing(self) -> None:
        """Packs all weights of all directions, by the tables that ``lay_out`` filled."""
        b = self.module.private("pack_all", "ptr base, i64 part, i64 parts")
        base, part, parts = b.args
        directions = b.load(base, "i64")
        first = directions * self.table_bytes + LINE
        with b.loop(0, directions) as d:
            at = b.gep(base, first + d * self.packing_bytes, "i8")
            numbers = [m.number for m in self.matmuls]
            if self.projecting is not None:
                numbers.append(self.projecting.number)
            for place, number in enumerate(numbers):
                table = b.gep(at, place * PACKING_BYTES, "i8")
                packed = b.load(b.gep(table, PACKING.index("packed"), "i64"), "i64")
                with b.when(packed.ne(0)):
                    b.call(f"pack{number}", table, part, parts)

    def _print_copy(self, suffix: str, real: str) -> None:
        """Rows of numbers from one array to another, and of one value."""
        params = "ptr to, i64 to_row, ptr source, i64 row, i64 column, i64 rows, i64 width"
        b = self.module.private(f"copy_rows{suffix}", params)
        vec = vector(b.lanes, real)
        to, to_row, source, row, column, count, width = b.args
        with b.loop(0, count) as r:
            into, start = b.gep(to, r * to_row, real), b.gep(source, r * row, real)
            with b.when(column.eq(1)) as otherwise, b.loop(0, width, b.lanes) as i:
                mask = b.lane_mask(width - i)
                numbers = b.masked_load(b.gep(start, i, real), mask, 0, vec)
                b.store_first(numbers, b.gep(into, i, real), width - i)
            with otherwise, b.loop(0, width) as i:
                value = b.load(b.gep(start, i * column, real), real)
                b.store(value, b.gep(into, i, real))
        params = f"ptr to, i64 to_row, {real} value, i64 rows, i64 width"
        b = self.module.private(f"fill_rows{suffix}", params)
        to, to_row, value, count, width = b.args
        with b.loop(0, count) as r, b.loop(0, width, b.lanes) as i:
            at = b.gep(b.gep(to, r * to_row, real), i, real)
            b.store_first(b.splat(value), at, width - i)

    def _suffix(self, array: Array) -> str:
        """The suffix of the functions that copy and fill rows of an array."""
        return "" if array.number is self.plan.types.math else "_narrow"

    def _copy_or_fill(
        self, of: Direction, to: Value, to_row: Value | int, name: str, entry: str, value: float
    ) -> None:
        """Copies an entry of the call, rows and columns of any strides, to rows of the array
        ``name``; fills these with a value where the entry is not there.
        """
        b, each, array = of.each.b, of.each, self.arrays[name]
        suffix, size = self._suffix(array), (of.shared["batch"], array.width)
        with b.when(each[entry].ne(0)) as otherwise:
            strides = each[f"{entry} rows"], each[f"{entry} columns"]
            b.call(f"copy_rows{suffix}", to, to_row, each.pointer(entry), *strides, *size)
        with otherwise:
            filled = constant(value, b.real)
            if suffix:
                filled = narrow(b, filled, array.number.llvm)
            b.call(f"fill_rows{suffix}", to, to_row, filled, *size)

    # ---- where the arrays of a direction begin ---------------------------------------------------
    def _print_layout(self) -> None:
        """Fills the tables of the kernel and of packing, from the table of the call."""
        b = self.module.private("lay_out", "ptr call")
        shared = self._shared(b)
        self._threads(shared)
        base = shared.pointer("scratch")
        b.store(shared["directions"], base)
        if not self.backward:
            _, zeros, work, *_ = self._places(shared)
            span = work - zeros
            with b.loop(0, span, 8) as i:
                b.store(constant(0, "i64"), b.gep(b.gep(base, zeros, "i8"), i, "i8"))
        with self._directions(b) as direction:
            self._lay_out(base, direction)

    def _threads(self, shared: Entries) -> None:
        """Chooses the number of threads, and whether they split the units."""
        b, kernel, h = shared.b, self.layout, self.plan.hidden_size
        directions, threads = shared["directions"], shared["threads"]
        work, rows = b.value(kernel.work, "i64"), shared["batch"]
        packed = b.value(kernel.packed_bytes, "i64")
        if not self.backward:
            work += shared["inputs"] * self.gates
            weights = self.gates * self.plan.types.operands.bytes
            packed += shared["inputs"] * weights
        single = shared["packed"].eq(0)
        work = b.smax(b.select(single, 0, work), 64 * h)
        work = work * rows * (shared["count"] * directions)
        enough = (work >= shared["least_work"]) & (threads > 1)
        parts = b.select(enough, threads, 1)
        shared["parts"] = parts
        even = (parts % directions).eq(0)
        side = b.select(even, parts // directions, parts)
        if kernel.row_wise:
            shared["units_split"] = 0
            return
        # Of a mask with many holes the typical step has few rows, and many steps fewer still.
        rows = b.select(shared["sparse"].ne(0), rows // 4, rows)
        far = FEW_TILED_ROWS if kernel.tiled else FEW_ROWS
        few = b.select(packed <= NEAR_CACHE, HARDLY_ANY_ROWS, far)
        split = (rows < few * side) & (side > 1) & (side <= kernel.geometry.tiles)
        shared["units_split"] = b.zext(split, "i64")

    def _lay_out(self, base: Value, of: Direction) -> None:
        """The tables of one direction."""
        (shared, each, d), b = of, of.each.b
        packing, zeros, work, workspace, _ = self._places(shared)
        start = b.ptrtoint(base, "i64")
        offset = d * self.table_bytes + LINE
        table = Entries(b, b.gep(base, offset, "i8"), self.index)
        b.store(start + offset, b.gep(base, d + 1, "i64"))
        barrier = offset + align(8 * len(self.index))
        b.store(constant(0, "i64"), b.gep(base, barrier, "i8"))
        # The backward pass runs against each direction.
        bit = shared["reverse"] >> d & 1
        flag = bit ^ 1 if self.backward else bit
        backwards, forwards = flag.ne(0), bit.eq(0)
        sign = 1 - (flag << 1)
        begin, count, steps = shared["begin"], shared["count"], shared["steps"]
        time = b.select(backwards, steps - begin - 1, begin)
        local = b.select(backwards, count - 1, 0)
        # The time that arrays of states and saved values begin at.
        origin, span = shared["origin"], shared["span"]
        from_end = steps - (origin + span)
        there = time - b.select(forwards, origin, from_end)
        threads = d * shared["threads"] * workspace
        table.set(
            steps=count, time=time, time_step=sign, barrier=start + barrier,
            workspace=start + work + threads, workspace_stride=workspace,
            stream=(shared["stream"] << 1) + d, yield_to=_yields(shared),
        )  # fmt: skip
        for name in PASSED_ON:
            table[name] = shared[name]
        first = {"call": time, "chunk": local, "kept": there}
        for name, array in self.arrays.items():
            if "T" not in array.axes:
                table[name] = each[name]
                if name.startswith("reset_state "):
                    table[f"{name} rows"] = each[f"{name} rows"]
                continue
            way = sign
            if array.begins != "states":
                index = first[array.begins]
            elif self.backward:
                # Slot t is read before step t and, one step of the direction on, after it.
                index = there + (bit << int(array.beside))
            else:
                index, way, table[f"{name} turns"] = self._slot(of, name, begin)
            at, step, row = self._begin(of, name, index)
            table[name], table[f"{name} steps"], table[f"{name} rows"] = at, step * way, row
            if array.begins == "states" and self.backward:
                table[f"{name} next"] = step * (0 - sign)
        if not self.backward:
            self._lay_out_input(shared, table, start + zeros)
        self._lay_out_packing(of, table, b.gep(base, packing + d * self.packing_bytes, "i8"))

    def _begin(self, of: Direction, name: str, index: Value) -> tuple[Value, Value, Value]:
        """The address of a direction's rows of an array at an index along time, and the strides
        from step to step and from row to row.
        """
        (shared, each, d), b, array = of, of.each.b, self.arrays[name]
        source, width = shared if array.whole else each, array.width
        address = source[name]
        if array.strided:
            step, row = source[f"{name} steps"], source[f"{name} rows"]
        else:
            row = shared["directions"] * width if array.beside else b.value(width, "i64")
            step = shared["batch"] * row
        at = address + index * step * array.number.bytes
        if array.beside:
            at += d * (width * array.number.bytes)
        return b.select(address.ne(0), at, 0), step, row

    def _slot(self, of: Direction, name: str, done: Value) -> tuple[Value, Value, Value]:
        """The slot in which a forward pass has a state after ``done`` steps, which way the slots
        go, and whether there are but two.
        """
        shared, b = of.shared, of.shared.b
        bit = shared["reverse"] >> of.d & 1
        whole = (shared["whole"] >> self.sequences.index(name) & 1).ne(0)
        slot = done - shared["origin"]
        # What a reversed direction begins with has a slot of its own where directions lie beside
        # one another.
        from_end = shared["span"] - slot + int(self.arrays[name].beside)
        turn = slot & 1
        slot = b.select(whole, b.select(bit.ne(0), from_end, slot), turn)
        return slot, 1 - (b.select(whole, bit, turn) << 1), b.zext(~whole, "i64")

    def _lay_out_input(self, shared: Entries, table: Entries, zeros: Value) -> None:
        """Gives a kernel that multiplies the input a row of zeros in place of gates."""
        b = shared.b
        inputs = table["inputs"] = shared["inputs"]
        with b.when(inputs.ne(0)):
            table["gates"], table["gates steps"], table["gates rows"] = zeros, 0, 0
        if self.projecting is None:
            return
        g, blocks = self.projecting.geometry, b.value(1, "i64")
        rows = g.near_rows(self.plan.types.operands.bytes)
        if not g.quantized:
            blocks = b.smax(((inputs << 1) + rows) // (2 * rows), 1)
        block = (inputs + blocks - 1) // blocks
        table["input_block"] = whole_chunks(block, g.chunk)

    def _lay_out_packing(self, of: Direction, table: Entries, tables: Value) -> None:
        """Lays out the tables of packing, and the addresses of packed weights."""
        (shared, each, d), b = of, of.each.b
        at, base = 0, shared["packed"]
        base += d * self._packed_bytes(shared)
        there = shared["packed"].ne(0)

        def input_bias() -> Value | int:
            if self.backward:
                return 0
            bias = each["bias_ih"]
            if not self.layout.apart:
                return bias
            # Sums of the input that have a place of their own begin with its biases.
            return b.select(shared["inputs"].ne(0), 0, bias)

        def packing(
            place: int, name: str, bias: Value | int, packed: Value, inner: Value | int
        ) -> None:
            entries = Entries(b, b.gep(tables, place * PACKING_BYTES, "i8"), PACKING)
            entries.set(
                source=each[name], heads=each[f"{name} heads"], rows=each[f"{name} rows"],
                columns=each[f"{name} columns"], packed=packed, inner=inner,
                input_bias=input_bias(), bias=bias,
            )  # fmt: skip
            if self.plan.types.quantized:
                entries["scales"] = each[scales_of(name)]

        for k, m in enumerate(self.matmuls):
            packed = b.select(there, base + at, 0)
            bias = 0 if self.backward else each[m.linear.bias_name]
            packing(k, m.linear.weight, bias, packed, m.parts * m.numbers)
            table[f"packed {m.linear.name}"] = packed
            at += align(m.packed_elements * self.size)
        if self.projecting is not None:
            inputs = shared["inputs"]
            packed = b.select(inputs.ne(0), base + at, 0)
            name = "bias_ih" if self.layout.apart else self.projecting.linear.bias_name
            packing(len(self.matmuls), "weight_ih", each[name], packed, inputs)
            table["packed input"] = packed

    # ---- states before the first step, and after the last ----------------------------------------
    def _print_first_states(self) -> None:
        b = self.module.private("write_first", "ptr call")
        with self._directions(b) as of:
            for state, name in zip(self.cell.states, self.sequences, strict=True):
                slot, *_ = self._slot(of, name, of.shared["begin"])
                at, _, row = self._begin(of, name, slot)
                to, entry = b.inttoptr(at, "ptr"), f"state {state.name}"
                self._copy_or_fill(of, to, row, name, entry, state.initial)

    def _print_final_states(self) -> None:
        """Copies the states after the last step of the call to where they are asked for."""
        b = self.module.private("write_final", "ptr call")
        with self._directions(b) as of:
            shared, each, _ = of
            done = shared["begin"] + shared["count"]
            for state, name in zip(self.cell.states, self.sequences, strict=True):
                final, array = f"final {state.name}", self.arrays[name]
                with b.when(each[final].ne(0)):
                    slot, *_ = self._slot(of, name, done)
                    at, _, row = self._begin(of, name, slot)
                    b.call(
                        f"copy_rows{self._suffix(array)}", each.pointer(final),
                        each[f"{final} rows"], b.inttoptr(at, "ptr"), row, 1,
                        shared["batch"], array.width,
                    )  # fmt: skip

    def _print_first_gradients(self) -> None:
        """Writes the first values of gradients that add up over time."""
        b = self.module.private("write_first", "ptr call")
        with self._directions(b) as of:
            shared, each, _ = of
            batch, group = shared["batch"], shared["row_group"]
            groups = (batch + group - 1) // group
            for state in self.cell.state_names:
                name, final = f"d_state {state}", f"d_final {state}"
                row = self.arrays[name].width
                self._copy_or_fill(of, each.pointer(name), row, name, final, 0.0)
            for name in (*(f"d_reset {s}" for s in self.cell.state_names), "d_params", "d_static"):
                width = self.arrays[name].width
                rows = groups if self.arrays[name].axes == "R" else batch
                with b.when(each[name].ne(0)):
                    zero = constant(0.0, b.real)
                    b.call("fill_rows", each.pointer(name), width, zero, rows, width)


def _yields(shared: Entries) -> Value:
    """The address of the function that offers the core to others; 0 without a gang."""
    b = shared.b
    address = b.variable(b.value(0, "i64"))
    with b.when(shared["gang"].ne(0)):
        address.value = b.load(b.gep(shared.pointer("gang"), 3, "i64"), "i64")
    return address.value
