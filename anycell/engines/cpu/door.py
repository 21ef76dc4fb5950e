"""Prints the door of a kernel: the native function by which a layer runs a chunk of steps.

A call is a table of 64-bit numbers: sizes, switches, addresses and strides, by the names of
``anycell.layer.signature``. The door packs the weights, writes the states before the first step,
computes from the table where each direction of the chunk begins, runs the kernel on the gang of
threads, and copies the final states out. It needs neither Python nor the interpreter lock: ctypes,
an XLA handler and a C program call the same function.

    void needs(int64_t *call)    writes scratch_bytes, packed_bytes, parts and units_split
    void door(int64_t *call)     runs ``count`` steps, after ``begin`` steps that are done already

See ``table`` for the entries of a call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from anycell.engines.cpu.idioms import narrow
from anycell.engines.cpu.ir import Builder, Module, Value, constant, integer_of, vector
from anycell.engines.cpu.layout import Layout
from anycell.engines.cpu.matmul import PACKING, tile_rows_of, whole_chunks
from anycell.engines.cpu.table import PASSED_ON, Entries, align, names
from anycell.plan import LINE, scales_of

WORTH_SPREADING = 1 << 16  # numbers to pack; fewer take less time than waking a second thread
NEAR_CACHE = 5 << 18  # bytes of a core's own cache
# Threads usually divide the rows. Splitting the units needs a barrier after each step, which tends
# to cost more than it saves. It pays if a thread would have fewer rows than this and the weights do
# not fit into a core's own cache.
FEW_ROWS = 16
FEW_TILED_ROWS = 64  # the same with matrix tiles, which use weights faster than they arrive
HARDLY_ANY_ROWS = 4  # it also pays below this number of rows if the weights do fit
PACKING_BYTES = align(8 * len(PACKING))


def print_gang(module: Module) -> None:
    """Adds ``gang``, which runs the parts of a function on threads, or all of it in this thread."""
    b = module.private("gang", "ptr record, ptr function, ptr args, i64 parts")
    record, function, args, parts = b.args
    # Address 0 means that there is no gang of threads.
    present = b.ptrtoint(record, "i64").ne(0)
    with b.when(present & (parts > 1)) as otherwise:
        run, table, openmp = (b.load(b.gep(record, i, "i64"), "ptr") for i in range(3))
        b.call(run, table, function, args, parts, openmp, returns="i64")
    with otherwise:
        b.call(function, args, 0, 1, returns="void")


class Direction(NamedTuple):
    """One direction of a call: the call's shared entries, the direction's entries, its number."""

    shared: Entries
    each: Entries
    number: Value

    @property
    def reverse(self) -> Value:
        """1 if the direction runs from the last step to the first, else 0."""
        return self.shared["reverse"] >> self.number & 1


class Memory(NamedTuple):
    """Byte offsets in scratch memory, and the size of a workspace.

    Attributes:
        packing: of the tables of packing.
        zeros: of a row of zeros, which replaces the gates if the kernel multiplies the input.
        work: of the threads' workspaces, of ``workspace`` bytes each. The first cache line of each
            is that of the thread's piece of a step, see ``gang.ll``.
        end: of the end, which is the size of scratch memory.
    """

    packing: Value
    zeros: Value
    work: Value
    workspace: Value
    end: Value


class Door:
    """Adds the door to the module of a kernel."""

    def __init__(self, module: Module, layout: Layout) -> None:
        self.module, self.layout, self.plan = module, layout, layout.plan
        self.cell, self.backward, self.size = self.plan.cell, layout.backward, layout.size
        self.names = names(self.plan, self.backward)
        self.arrays, self.index = layout.arrays, layout.entries
        self.sequences, self.projecting = layout.sequences, layout.projecting
        self.gates = self.plan.gates_width
        # Scratch memory begins with the number of directions and the addresses of their tables.
        # Then come the kernel's tables, each with a count of the pieces that are done, on a cache
        # line of its own, and then the tables of packing.
        self.table_bytes = align(8 * len(self.index)) + LINE
        self.matmuls = layout.matmuls
        self.packing_bytes = PACKING_BYTES * (len(self.matmuls) + 1)

    def print(self) -> None:
        """Adds ``needs``, ``door`` and the functions that they call."""
        # The first state may have a narrower type than everything else that is copied.
        with self.module.part("common"):
            for number in dict.fromkeys((self.layout.real, self.plan.types.storage.llvm)):
                self._print_copy(number)
            print_gang(self.module)
        self._print_packing()
        self._print_needs()
        self._print_layout()
        if self.backward:
            self._print_first_gradients()
        else:
            self._print_first_states()
            self._print_final_states()
        self._print_door()

    def _print_door(self) -> None:
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
            # True for the first chunk: backward, of the pass; forward, of the arrays of states.
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
        """Loops over the directions."""
        shared = self._shared(b)
        with b.loop(0, shared["directions"]) as d:
            at = d * len(self.names.each) + len(self.names.shared)
            yield Direction(shared, Entries(b, b.gep(b.args[0], at, "i64"), self.names.each), d)

    # ---- memory ----------------------------------------------------------------------------------
    def _print_needs(self) -> None:
        """Adds ``needs``, which writes how much memory and how many threads the call takes."""
        shared = self._shared(self.module.function("needs", "ptr call"))
        shared["scratch_bytes"] = self._memory(shared).end
        shared["packed_bytes"] = shared["directions"] * self._packed_bytes(shared)
        self._threads(shared)

    def _memory(self, shared: Entries) -> Memory:
        b, directions = shared.b, shared["directions"]
        packing = directions * self.table_bytes + LINE
        zeros = packing + directions * self.packing_bytes
        work = zeros
        if not self.backward:
            work = zeros + b.select(shared["inputs"].ne(0), align(self.gates * self.size), 0)
        staged: Value | int = 0
        if self.projecting is not None and self.layout.staged_bytes:
            staged = self.layout.staged_input(b, shared["inputs"]) * self.size
        workspace = LINE + align(self.layout.workspace(shared["batch"], staged))
        end = work + directions * shared["threads"] * workspace
        return Memory(packing, zeros, work, workspace, end)

    def _packed_bytes(self, shared: Entries) -> Value:
        """The bytes of a direction's packed weights, with input weights that the kernel uses."""
        b = shared.b
        fixed = b.value(sum(align(m.packed_elements * self.size) for m in self.layout.packing))
        if self.projecting is None:
            return fixed
        g, inputs = self.projecting.geometry, shared["inputs"]
        size = tile_rows_of(inputs, g) * (g.tiles * g.columns * g.lanes * self.size)
        return fixed + b.select(inputs.ne(0), align(size), 0)

    # ---- what the door calls ---------------------------------------------------------------------
    def _print_packing(self) -> None:
        """Adds ``pack_all``: packs the weights of all directions from the tables of ``lay_out``."""
        b = self.module.private("pack_all", "ptr base, i64 part, i64 parts")
        base, part, parts = b.args
        directions = b.load(base, "i64")
        first = directions * self.table_bytes + LINE
        with b.loop(0, directions) as d:
            at = b.gep(base, first + d * self.packing_bytes, "i8")
            numbers = [m.number for m in self.layout.packing]
            if self.projecting is not None:
                numbers.append(self.projecting.number)
            for place, number in enumerate(numbers):
                table = b.gep(at, place * PACKING_BYTES, "i8")
                with b.when(Entries(b, table, PACKING)["packed"].ne(0)):
                    b.call(f"pack{number}", table, part, parts)

    def _print_copy(self, number: str) -> None:
        """Adds functions that copy rows of numbers between arrays, and fill rows with a value."""
        real = number if number == self.layout.real else integer_of(number)
        params = "ptr to, i64 to_row, ptr source, i64 row, i64 column, i64 rows, i64 width"
        b = self.module.private(f"copy_rows_{number}", params)
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
        b = self.module.private(f"fill_rows_{number}", params)
        to, to_row, value, count, width = b.args
        with b.loop(0, count) as r, b.loop(0, width, b.lanes) as i:
            at = b.gep(b.gep(to, r * to_row, real), i, real)
            b.store_first(b.splat(value), at, width - i)

    def _copy_or_fill(
        self, of: Direction, to: Value, to_row: Value | int, name: str, entry: str, value: float
    ) -> None:
        """Copies an array of the call, with any strides of rows and columns, to rows of the array
        ``name``. Fills the rows with ``value`` if the call does not have the array.
        """
        b, each, array = of.each.b, of.each, self.arrays[name]
        number, size = array.number.llvm, (of.shared["batch"], array.width)
        with b.when(each[entry].ne(0)) as otherwise:
            strides = each[f"{entry} rows"], each[f"{entry} columns"]
            b.call(f"copy_rows_{number}", to, to_row, each.pointer(entry), *strides, *size)
        with otherwise:
            filled = constant(value, b.real)
            if number != b.real:
                filled = narrow(b, filled, number)
            b.call(f"fill_rows_{number}", to, to_row, filled, *size)

    # ---- where the arrays of a direction begin ---------------------------------------------------
    def _print_layout(self) -> None:
        """Adds ``lay_out``, which fills the tables of the kernel and of packing from the call's."""
        b = self.module.private("lay_out", "ptr call")
        shared = self._shared(b)
        self._threads(shared)
        base = shared.pointer("scratch")
        b.store(shared["directions"], base)
        if not self.backward:
            memory = self._memory(shared)
            with b.loop(memory.zeros, memory.work, 8) as i:
                b.store(b.value(0), b.gep(base, i, "i8"))
        with self._directions(b) as direction:
            self._lay_out(base, direction)

    def _threads(self, shared: Entries) -> None:
        """Chooses the number of threads, and whether they split the units."""
        b, layout, h = shared.b, self.layout, self.plan.hidden_size
        directions, threads = shared["directions"], shared["threads"]
        work, rows = b.value(layout.work), shared["batch"]
        packed = b.value(layout.packed_bytes)
        if not self.backward:
            work += shared["inputs"] * self.gates
            weights = self.gates * self.plan.types.operands.bytes
            packed += shared["inputs"] * weights
        single = shared["packed"].eq(0)
        work = b.smax(b.select(single, 0, work), 64 * h)
        work = work * rows * (shared["count"] * directions)
        enough = (work >= shared["least_work"]) & (threads > 1)
        parts = b.select(enough, threads, 1)
        even = (parts % directions).eq(0)
        threads_per_direction = b.select(even, parts // directions, parts)
        split = constant(0, "i1")
        if not layout.row_wise:
            # Under a sparse mask, a typical step takes few rows, and many steps take even fewer.
            rows_per_step = b.select(shared["sparse"].ne(0), rows // 4, rows)
            beyond_cache = FEW_TILED_ROWS if layout.tiled else FEW_ROWS
            row_limit = b.select(packed <= NEAR_CACHE, HARDLY_ANY_ROWS, beyond_cache)
            split = rows_per_step < row_limit * threads_per_direction
            split = split & (threads_per_direction > 1)
            split = split & (threads_per_direction <= layout.geometry.spans)
        shared["units_split"] = b.zext(split, "i64")
        # Threads that share rows are no more than there are groups of rows.
        groups = (rows + shared["row_group"] - 1) // shared["row_group"]
        sharing = b.smax(b.smin(threads_per_direction, groups), 1)
        threads_per_direction = b.select(split, threads_per_direction, sharing)
        all_threads = threads_per_direction * directions
        shared["parts"] = b.select(even, all_threads, threads_per_direction)

    def _lay_out(self, base: Value, of: Direction) -> None:
        """Fills the tables of one direction."""
        (shared, _, d), b = of, of.each.b
        memory, start = self._memory(shared), b.ptrtoint(base, "i64")
        offset = d * self.table_bytes + LINE
        done = offset + align(8 * len(self.index))
        b.store(start + offset, b.gep(base, d + 1, "i64"))
        b.store(b.value(0), b.gep(base, done, "i8"))
        table = Entries(b, b.gep(base, offset, "i8"), self.index)
        work = memory.work + d * shared["threads"] * memory.workspace
        with b.loop(0, shared["parts"]) as part, b.loop(0, 16, 8) as word:
            b.store(b.value(0), b.gep(base, work + part * memory.workspace + word, "i8"))
        table.set(
            done=start + done, workspace=start + work, workspace_stride=memory.workspace,
            stream=(shared["stream"] << 1) + d,
        )  # fmt: skip
        for name in PASSED_ON:
            table[name] = shared[name]
        self._lay_out_arrays(of, table)
        if not self.backward:
            self._lay_out_input(shared, table, start + memory.zeros)
        self._lay_out_packing(of, table, b.gep(base, memory.packing + d * self.packing_bytes, "i8"))

    def _lay_out_arrays(self, of: Direction, table: Entries) -> None:
        """Sets the steps that the kernel takes, and where its arrays begin at the first of them."""
        (shared, each, _), b, reverse = of, of.each.b, of.reverse
        begin, count, steps = shared["begin"], shared["count"], shared["steps"]
        # The backward pass runs against each direction.
        back = reverse ^ 1 if self.backward else reverse
        backwards, sign = back.ne(0), 1 - (back << 1)
        time = b.select(backwards, steps - begin - 1, begin)
        # The time step at which the arrays of states and saved values begin.
        origin = shared["origin"]
        origin = b.select(reverse.eq(0), origin, steps - (origin + shared["span"]))
        kept = time - origin
        first = {"call": time, "chunk": b.select(backwards, count - 1, 0), "kept": kept}
        table.set(steps=count, time=time, time_step=sign)
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
                # Slot t has the state before step t; if reversed, slot t + 1 (t + 2 if beside).
                index = kept + (reverse << int(array.beside))
            else:
                index, way, table[f"{name} turns"] = self._slot(of, name, begin)
            at, step, row = self._begin(of, name, index)
            table[name], table[f"{name} steps"], table[f"{name} rows"] = at, step * way, row
            if array.begins == "states" and self.backward:
                table[f"{name} next"] = step * (0 - sign)

    def _begin(self, of: Direction, name: str, index: Value) -> tuple[Value, Value, Value]:
        """Returns the address of one direction's rows of an array at an index along time, and the
        strides between steps and between rows.
        """
        (shared, each, d), b, array = of, of.each.b, self.arrays[name]
        source, width = shared if array.whole else each, array.width
        address = source[name]
        if array.strided:
            step, row = source[f"{name} steps"], source[f"{name} rows"]
        else:
            row = shared["directions"] * width if array.beside else b.value(width)
            step = shared["batch"] * row
        at = address + index * step * array.number.bytes
        if array.beside:
            at += d * (width * array.number.bytes)
        return b.select(address.ne(0), at, 0), step, row

    def _slot(self, of: Direction, name: str, done: Value) -> tuple[Value, Value, Value]:
        """Returns the slot of a state after ``done`` steps of a forward pass, the increment to the
        next slot (1 or -1), and whether there are only two slots.
        """
        shared, b, reverse = of.shared, of.shared.b, of.reverse
        whole = (shared["whole"] >> self.sequences.index(name) & 1).ne(0)
        slot = done - shared["origin"]
        # If directions lie side by side, the initial state of a reversed direction has a slot of
        # its own.
        from_end = shared["span"] - slot + int(self.arrays[name].beside)
        turn = slot & 1
        slot = b.select(whole, b.select(reverse.ne(0), from_end, slot), turn)
        return slot, 1 - (b.select(whole, reverse, turn) << 1), b.zext(~whole, "i64")

    def _state(self, of: Direction, name: str, done: Value) -> tuple[Value, Value]:
        """The address of a state's rows after ``done`` steps, and the stride from row to row."""
        slot, *_ = self._slot(of, name, done)
        at, _, row = self._begin(of, name, slot)
        return of.each.b.inttoptr(at, "ptr"), row

    def _lay_out_input(self, shared: Entries, table: Entries, zeros: Value) -> None:
        """Replaces the gates by a row of zeros if the kernel multiplies the input."""
        b = shared.b
        inputs = table["inputs"] = shared["inputs"]
        with b.when(inputs.ne(0)):
            table["gates"], table["gates steps"], table["gates rows"] = zeros, 0, 0
        if self.projecting is None:
            return
        g, blocks = self.projecting.geometry, b.value(1)
        rows = g.near_rows(self.plan.types.operands.bytes)
        if not g.quantized:
            blocks = b.smax(((inputs << 1) + rows) // (2 * rows), 1)
        block = (inputs + blocks - 1) // blocks
        table["input_block"] = whole_chunks(block, g.chunk)

    def _lay_out_packing(self, of: Direction, table: Entries, tables: Value) -> None:
        """Fills the tables of packing, and sets the addresses of the packed weights."""
        (shared, each, d), b, inputs = of, of.each.b, of.shared["inputs"]
        input_bias: Value | int = 0
        if not self.backward:
            # Input sums that are kept apart begin with bias_ih; the recurrent sums then omit it.
            input_bias = each["bias_ih"]
            if self.layout.apart:
                input_bias = b.select(inputs.ne(0), 0, input_bias)
        # For each matmul the names of the packed weights, the weight and its bias, the length of
        # the sum, and whether the weight is packed.
        there = shared["packed"].ne(0)
        rows: list[tuple[str, str, str, Value | int, Value]] = [
            (m.linear.name, m.linear.weight, m.linear.bias_name, m.parts * m.numbers, there)
            for m in self.layout.packing
        ]
        if self.projecting is not None:
            bias = "bias_ih" if self.layout.apart else self.projecting.linear.bias_name
            rows.append(("input", "weight_ih", bias, inputs, inputs.ne(0)))
        at = shared["packed"] + d * self._packed_bytes(shared)
        sizes = [align(m.packed_elements * self.size) for m in self.layout.packing]
        for number, (entry, weight, bias, inner, is_packed) in enumerate(rows):
            packed = table[f"packed {entry}"] = b.select(is_packed, at + sum(sizes[:number]), 0)
            packing = Entries(b, b.gep(tables, number * PACKING_BYTES, "i8"), PACKING)
            packing.set(
                source=each[weight], heads=each[f"{weight} heads"], rows=each[f"{weight} rows"],
                columns=each[f"{weight} columns"], input_bias=input_bias,
                bias=0 if self.backward else each[bias], packed=packed, inner=inner,
            )  # fmt: skip
            if self.plan.types.quantized:
                packing["scales"] = each[scales_of(weight)]
        for name, m in self.layout.packed_by.items():
            if name != m.linear.name:
                table[f"packed {name}"] = table[f"packed {m.linear.name}"]

    # ---- states before the first step, and after the last ----------------------------------------
    def _print_first_states(self) -> None:
        b = self.module.private("write_first", "ptr call")
        with self._directions(b) as of:
            for state, name in zip(self.cell.states, self.sequences, strict=True):
                to, row = self._state(of, name, of.shared["begin"])
                self._copy_or_fill(of, to, row, name, f"state {state.name}", state.initial)

    def _print_final_states(self) -> None:
        """Adds ``write_final``: copies the states after the call's last step to the caller."""
        b = self.module.private("write_final", "ptr call")
        with self._directions(b) as of:
            shared, each, _ = of
            done = shared["begin"] + shared["count"]
            for state, name in zip(self.cell.states, self.sequences, strict=True):
                final, array = f"final {state.name}", self.arrays[name]
                with b.when(each[final].ne(0)):
                    source, row = self._state(of, name, done)
                    b.call(
                        f"copy_rows_{array.number.llvm}", each.pointer(final),
                        each[f"{final} rows"], source, row, 1, shared["batch"], array.width,
                    )  # fmt: skip

    def _print_first_gradients(self) -> None:
        """Adds ``write_first``: writes the initial values of gradients that add up over time."""
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
                    b.call(f"fill_rows_{b.real}", each.pointer(name), width, zero, rows, width)
