"""Prints the door of a kernel: the one native function by which a layer runs a pass, or a chunk of
its steps.

A call is a table of 64-bit numbers: sizes, switches, addresses and strides, by the names of
``anycell.layer.signature``. The door packs the weights, writes the states before the first step,
computes from the table where each direction of the chunk begins, runs the kernel on the gang of
threads, and copies the final states out. It needs no Python and no lock of Python's: ctypes, an XLA
handler and a C program call the same function.

    void needs(int64_t *call)    writes scratch_bytes, packed_bytes, parts and units_split
    void door(int64_t *call)     runs so many steps, after the ``begin`` that are done

A table has the entries ``shared``, then for each direction the entries ``each`` (see ``names``). An
address that is 0 stands for an array that is not there. Strides count elements.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from anycell.engines.cpu.arguments import number_of
from anycell.engines.cpu.geometry import L1_WEIGHTS, Matmul
from anycell.engines.cpu.ir import Builder, Module, Value, constant, integer_of, vector
from anycell.engines.cpu.matmul import packed_rows_of, whole_chunks
from anycell.lang.cell import RECURRENT
from anycell.plan import Plan, scales_of

if TYPE_CHECKING:
    from anycell.engines.cpu.generator import Generator

LINE = 64  # bytes of a cache line: weights, tables and workspaces begin on one
WORTH_SPREADING = 1 << 16  # numbers to pack below which another thread takes longer to wake
NEAR_CACHE = 5 << 18  # bytes of a core's own cache
# Threads share the rows and split the units where each would have fewer rows than that, and a
# core's own cache holds a part of the weights but not all; with hardly any rows always. Else the
# barrier of each step costs more than it saves.
FEW_ROWS = 16
FEW_TILED_ROWS = 64  # tiles are through with a weight sooner than it comes from afar
HARDLY_ANY_ROWS = 4
# What a packing function reads: the weight, its strides, two biases, where it packs to, the length
# of the sum, and the scales of integers.
PACKING = "source heads rows columns bias_x bias_h packed inner scales".split()


class Names(NamedTuple):
    """The entries of a call's table.

    Attributes:
        shared: of the whole call:

            lay_out                 1 to fill the kernel's tables and do nothing else
            directions, reverse     how many; a bit for each that runs from the last step
            steps, batch            of the input
            begin, count            steps done, in the order of the pass, and steps to do
            origin, span            of which steps, in the forward pass's order, the arrays of
                                    states and saved values are; 0 and ``steps`` without checkpoints
            whole                   forward: a bit for each state whose array has all steps; the
                                    others have two slots, which take turns
            pack                    1 to pack the weights, 0 where ``packed`` holds them
            threads, least_work     at most so many; multiply-adds of a call worth a second one
            sparse                  1 where a mask lets few steps pass
            row_group               rows that share sums of parameter gradients
            gang                    address of: gang function, its table, its OpenMP, a function
                                    that yields the core; 0 for one thread
            scratch, packed         memory of as many bytes as ``needs`` says, on a cache line
            parts, units_split      written: the threads of the call, and whether they split units
            hyper                   values of the cell's hyperparameters
            training, seed, stream, repeat    see ``Options``
            mask, resets            uint8 [steps, batch]
            hidden                  the first state [slots, batch, directions * size]
            inputs                  forward: of the input that the kernel multiplies, else 0
            input, out              forward: that input; outputs, where they are not ``hidden``
            d_output, d_sequence    backward: gradients at the sequences of the first state and the
                                    others, [steps, batch, directions * size] by strides

        each: of one direction: what it learns, starts from and resets to, by name; where sequences
            of its other states lie (``sequence``), saved values, final states (``final``). Arrays
            of a chunk begin at its first time: ``gates`` (projected) or, backward, ``d_gates``,
            ``outputs`` and ``operand`` of each matmul; ``product`` replaces the recurrent matmul of
            a single step. Backward: ``d_final``, and ``d_state``, ``d_reset``, ``d_params`` and
            ``d_static``, which start from it, or from 0, with the first step.
    """

    shared: tuple[str, ...]
    each: tuple[str, ...]


@functools.lru_cache(maxsize=256)
def names(plan: Plan, backward: bool) -> Names:
    """The entries of a call, in order."""
    cell = plan.cell
    shared = (
        "lay_out directions reverse steps batch begin count origin span whole pack threads "
        "least_work sparse row_group gang scratch packed scratch_bytes packed_bytes parts "
        "units_split hyper training seed stream repeat mask resets hidden"
    ).split()
    each = ["saved", "static", "recurrent_mask", "bias_ih"]
    weights = dict.fromkeys(l.weight for l in cell.linears)
    if backward:
        for name in ("d_output", *(f"d_sequence {name}" for name in cell.state_names[1:])):
            shared += [name, f"{name} steps", f"{name} rows"]
        each += ["d_gates", "d_gates steps", "d_gates rows", "d_params", "d_static"]
        for k in range(len(cell.linears)):
            for name in (f"outputs{k}", f"operand{k}"):
                each += [name, f"{name} steps", f"{name} rows"]
    else:
        shared += ["inputs", "input", "input steps", "input rows", "out"]
        each += ["gates", "gates steps", "gates rows", "product"]
        weights = {"weight_ih": None, **weights}
    for name in weights:
        each += [name, f"{name} heads", f"{name} rows", f"{name} columns"]
        if plan.types.quantized:
            each.append(scales_of(name))
    each += dict.fromkeys(l.bias_name for l in cell.linears)
    each += [*cell.param_names]
    for name in cell.state_names:
        each += [f"sequence {name}"]
        for what in ("reset_state", *(("d_final",) if backward else ("state", "final"))):
            each += [f"{what} {name}", f"{what} {name} rows", f"{what} {name} columns"]
        if backward:
            each += [f"d_state {name}", f"d_reset {name}"]
    return Names(tuple(shared), tuple(dict.fromkeys(each)))


def axes(name: str) -> int:
    """How many strides follow the address of what a direction learns, starts from or ends with:
    those of a weight's last three axes, or of rows and columns.
    """
    if name.endswith((" heads", " rows", " columns")):
        return 0
    return 3 * name.startswith("weight_") or 2 * (
        name.startswith(("state ", "reset_state ", "d_final ", "final "))
    )


def sources(plan: Plan, backward: bool) -> dict[str, str]:
    """Of the kernel's arrays that go by another name than the call's entry, that name."""
    cell = plan.cell
    arrays = {"x": "gates", "bias_x": "bias_ih", "bias_h": "bias_hh", "dy0": "d_output"}
    arrays |= {"dx": "d_gates", "dparam": "d_params", "dstatic": "d_static", "state0": "hidden"}
    arrays |= {f"param{i}": name for i, name in enumerate(cell.param_names)}
    arrays |= {f"dr{k}": f"outputs{k}" for k in range(len(cell.linears))}
    for i, name in enumerate(cell.state_names):
        arrays |= {f"reset{i}": f"reset_state {name}", f"dstate{i}": f"d_state {name}"}
        arrays |= {f"dreset{i}": f"d_reset {name}"}
        if i:
            arrays |= {f"state{i}": f"sequence {name}", f"dy{i}": f"d_sequence {name}"}
    return arrays


def align(size: int) -> int:
    """Bytes up to the next cache line."""
    return -(-size // LINE) * LINE


# Writes the address of an array over time, at an index, and its strides: of the kernel's argument,
# the address, index, stride from step to step, from row to row, and which way time goes.
Place = Callable[[str, Value, Value, Value, Value, Value], None]


PACKING_BYTES = align(8 * len(PACKING))


class Entries:
    """A table of 64-bit numbers in memory, by name."""

    def __init__(self, b: Builder, address: Value, index: dict[str, int]) -> None:
        self.b, self.address, self.index = b, address, index

    def at(self, name: str) -> Value:
        """Where an entry lies."""
        return self.b.gep(self.address, self.index[name], "i64")

    def __getitem__(self, name: str) -> Value:
        return self.b.load(self.at(name), "i64")

    def pointer(self, name: str) -> Value:
        return self.b.load(self.at(name), "ptr")

    def __setitem__(self, name: str, value: Value | int) -> None:
        self.b.store(self.b.value(value, "i64"), self.at(name))

    def set(self, **values: Value | int) -> None:
        """Writes several entries."""
        for name, value in values.items():
            self[name] = value


def print_gang(module: Module) -> None:
    """Adds ``gang``, which runs parts of a function on threads, or all in this one."""
    params = [("ptr", "record"), ("ptr", "function"), ("ptr", "args"), ("i64", "parts")]
    b = module.function("gang", params, internal=True, inline=False)
    record, function, args, parts = b.args
    # An address of 0 is no record.
    there = b.icmp("ne", b.ptrtoint(record, "i64"), 0)
    with b.when(b.and_(there, b.icmp("sgt", parts, 1))) as otherwise:
        run, table, openmp = (b.load(b.gep(record, i, "i64"), "ptr") for i in range(3))
        b.call(run, table, function, args, parts, openmp, returns="i64")
    with otherwise:
        b.call(function, args, constant(0, "i64"), constant(1, "i64"), returns="void")


class Door:
    """Adds the door to the module of a generator."""

    def __init__(self, generator: Generator) -> None:
        self.generator, self.module, self.plan = generator, generator.module, generator.plan
        self.cell, self.backward, self.size = self.plan.cell, generator.backward, generator.size
        self.names = names(self.plan, self.backward)
        self.shared_index = {name: i for i, name in enumerate(self.names.shared)}
        self.each_index = {name: i for i, name in enumerate(self.names.each)}
        self.states = generator.states_and_widths
        self.gates = len(self.cell.gates) * self.plan.hidden_size
        # Of scratch memory: how many directions and where their tables are, the kernel's tables,
        # each with the counter of its barrier on a line of its own, and those of packing.
        self.table_bytes = align(8 * len(generator.names)) + LINE
        self.matmuls = [*generator.matmuls]
        self.packing_bytes = PACKING_BYTES * (len(self.matmuls) + 1)

    def print(self) -> None:
        """Adds ``needs``, ``door`` and what they call."""
        self._print_copy()
        print_gang(self.module)
        self._print_packing()
        self._print_needs()
        self._print_layout()
        b = self.module.function("door", [("ptr", "call")])
        (call,) = b.args
        shared = self._shared(b, call)
        b.call("lay_out", call)
        with b.when(b.icmp("eq", shared["lay_out"], 0)):
            gang, base = shared.pointer("gang"), self._base(b, shared)
            with b.when(b.icmp("ne", shared["pack"], 0)):
                numbers = b.sdiv(shared["packed_bytes"], self.size)
                many = b.icmp("sgt", numbers, WORTH_SPREADING)
                threads = b.select(many, shared["threads"], constant(1, "i64"))
                b.call("gang", gang, Value("@pack_all", "ptr"), base, threads)
            with b.when(b.icmp("eq", shared["begin"], self._first(b, shared))):
                b.call("write_first", call)
            with b.when(b.icmp("sgt", shared["count"], 0)):
                b.call("gang", gang, Value("@run_all", "ptr"), base, shared["parts"])
            if not self.backward:
                b.call("write_final", call)

    def _first(self, b: Builder, shared: Entries) -> Value:
        """The steps that are done, in the order of the pass, before the first that the arrays of
        states have.
        """
        if not self.backward:
            return shared["origin"]
        return constant(0, "i64")

    def _shared(self, b: Builder, call: Value) -> Entries:
        return Entries(b, call, self.shared_index)

    @contextmanager
    def _directions(self, b: Builder, call: Value) -> Iterator[tuple[Entries, Entries, Value]]:
        """A loop over directions: the shared entries, those of the direction, and its number."""
        shared = self._shared(b, call)
        with b.loop(0, shared["directions"]) as d:
            at = b.add(b.mul(d, len(self.names.each)), len(self.names.shared))
            yield shared, Entries(b, b.gep(call, at, "i64"), self.each_index), d

    # ---- memory ----------------------------------------------------------------------------------
    def _base(self, b: Builder, shared: Entries) -> Value:
        return shared.pointer("scratch")

    def _print_needs(self) -> None:
        """How many bytes the call's memory has."""
        b = self.module.function("needs", [("ptr", "call")])
        shared = self._shared(b, b.args[0])
        *_, end = self._places(b, shared)
        shared["scratch_bytes"] = end
        shared["packed_bytes"] = b.mul(shared["directions"], self._packed_bytes(b, shared))
        self._threads(b, shared)

    def _places(self, b: Builder, shared: Entries) -> tuple[Value, Value, Value, Value, Value]:
        """Where in scratch memory lie: the kernel's tables, those of packing, a row of zeros, the
        threads' workspaces, of so many bytes each; and the end.
        """
        directions = shared["directions"]
        packing = b.add(b.mul(directions, self.table_bytes), LINE)
        zeros = b.add(packing, b.mul(directions, self.packing_bytes))
        work = zeros
        if not self.backward:
            row = b.select(
                b.icmp("ne", shared["inputs"], 0),
                constant(align(self.gates * self.size), "i64"),
                constant(0, "i64"),
            )
            work = b.add(zeros, row)
        inputs = None if self.projecting is None else shared["inputs"]
        each = self.generator.print_workspace(b, shared["batch"], inputs)
        end = b.add(work, b.mul(b.mul(directions, shared["threads"]), each))
        return packing, zeros, work, each, end

    def _bytes(self, name: str) -> int:
        """Of a number of an array of the kernel's."""
        return number_of(self.plan, name).bytes

    def _packed_bytes(self, b: Builder, shared: Entries) -> Value:
        """Of one direction."""
        fixed = constant(sum(align(m.packed_elements * self.size) for m in self.matmuls), "i64")
        return fixed if self.projecting is None else b.add(fixed, self._input_bytes(b, shared))

    @property
    def projecting(self) -> Matmul | None:
        """The matmul to whose sums the input's are added."""
        return self.generator.projecting

    def _input_bytes(self, b: Builder, shared: Entries) -> Value:
        """Of the packed weight of an input that the kernel multiplies."""
        assert self.projecting is not None
        g, inputs = self.projecting.geometry, shared["inputs"]
        each = g.tiles * g.columns * g.lanes * self.size
        size = b.mul(b.add(packed_rows_of(b, inputs, g), g.lanes + g.header - 1), each)
        size = b.mul(b.sdiv(b.add(size, LINE - 1), LINE), LINE)
        return b.select(b.icmp("ne", inputs, 0), size, constant(0, "i64"))

    # ---- what the door calls ---------------------------------------------------------------------
    def _print_packing(self) -> None:
        """Packs all weights of all directions, by the tables that ``lay_out`` filled."""
        params = [("ptr", "base"), ("i64", "part"), ("i64", "parts")]
        b = self.module.function("pack_all", params, internal=True, inline=False)
        base, part, parts = b.args
        directions = b.load(base, "i64")
        first = b.add(b.mul(directions, self.table_bytes), LINE)
        with b.loop(0, directions) as d:
            at = b.gep(base, b.add(first, b.mul(d, self.packing_bytes)), "i8")
            numbers = [m.number for m in self.matmuls]
            if self.projecting is not None:
                numbers.append(self.projecting.number)
            for place, number in enumerate(numbers):
                table = b.gep(at, place * PACKING_BYTES, "i8")
                packed = b.load(b.gep(table, PACKING.index("packed"), "i64"), "i64")
                with b.when(b.icmp("ne", packed, 0)):
                    b.call(f"pack{number}", table, part, parts)

    def _print_copy(self) -> None:
        """Rows of numbers from one array to another, and of one value, per type of number."""
        rows = [("i64", "rows"), ("i64", "width")]
        for suffix, real in self._copied_types():
            params = [("ptr", "to"), ("i64", "to_row"), ("ptr", "source"), ("i64", "row")]
            params += [("i64", "column"), *rows]
            b = self.module.function(f"copy_rows{suffix}", params, internal=True, inline=False)
            vec = vector(b.lanes, real)
            to, to_row, source, row, column, count, width = b.args
            with b.loop(0, count) as r:
                into, start = b.gep(to, b.mul(r, to_row), real), b.gep(source, b.mul(r, row), real)
                with b.when(b.icmp("eq", column, 1)) as otherwise, b.loop(0, width, b.lanes) as i:
                    mask = b.lane_mask(b.sub(width, i))
                    numbers = b.masked_load(b.gep(start, i, real), mask, 0, vec)
                    b.masked_store(numbers, b.gep(into, i, real), mask)
                with otherwise, b.loop(0, width) as i:
                    value = b.load(b.gep(start, b.mul(i, column), real), real)
                    b.store(value, b.gep(into, i, real))
            params = [("ptr", "to"), ("i64", "to_row"), (real, "value"), *rows]
            b = self.module.function(f"fill_rows{suffix}", params, internal=True, inline=False)
            to, to_row, value, count, width = b.args
            with b.loop(0, count) as r, b.loop(0, width, b.lanes) as i:
                mask = b.lane_mask(b.sub(width, i))
                at = b.gep(b.gep(to, b.mul(r, to_row), real), i, real)
                b.masked_store(b.splat(value), at, mask)

    def _copied_types(self) -> list[tuple[str, str]]:
        """What rows that are copied consist of, and a suffix for the functions that do it: the
        first state may be narrower than all else.
        """
        narrow, real = self.plan.types.storage.llvm, self.module.real
        return [("", real)] if narrow == real else [("", real), ("_narrow", integer_of(narrow))]

    def _copy_or_fill(
        self, b: Builder, to: Value, to_row: Value, each: Entries, name: str, value: float,
        rows: Value, width: int, array: str,
    ) -> None:  # fmt: skip
        """An array of rows and columns of any strides, or a value where it is not there; into one
        that consists of what the kernel's ``array`` does.
        """
        number = number_of(self.plan, array)
        narrow = number is not self.plan.types.math
        suffix = "_narrow" if narrow else ""
        wide = constant(width, "i64")
        with b.when(b.icmp("ne", each[name], 0)) as otherwise:
            strides = each[f"{name} rows"], each[f"{name} columns"]
            b.call(f"copy_rows{suffix}", to, to_row, each.pointer(name), *strides, rows, wide)
        with otherwise:
            filled = constant(value, b.real)
            if narrow:
                filled = b.narrow(filled, number.llvm)
            b.call(f"fill_rows{suffix}", to, to_row, filled, rows, wide)

    # ---- where the arrays of a direction begin ---------------------------------------------------
    def _print_layout(self) -> None:
        """Fills the tables of the kernel and of packing, from the table of the call."""
        b = self.module.function("lay_out", [("ptr", "call")], internal=True, inline=False)
        (call,) = b.args
        shared = self._shared(b, call)
        self._threads(b, shared)
        base = self._base(b, shared)
        b.store(shared["directions"], base)
        if not self.backward:
            _, zeros, work, *_ = self._places(b, shared)
            span = b.sub(work, zeros)
            with b.loop(0, span, 8) as i:
                b.store(constant(0, "i64"), b.gep(b.gep(base, zeros, "i8"), i, "i8"))
        with self._directions(b, call) as (shared, each, d):
            self._lay_out(b, base, shared, each, d)
        if self.backward:
            self._print_first_gradients()
        else:
            self._print_first_states()
            self._print_final_states()

    def _threads(self, b: Builder, shared: Entries) -> None:
        """How many threads the call is worth, and whether they split the units."""
        kernel, h = self.generator, self.plan.hidden_size
        directions, threads, one = shared["directions"], shared["threads"], constant(1, "i64")
        work, rows = constant(kernel.work, "i64"), shared["batch"]
        packed = constant(kernel.packed_bytes, "i64")
        if not self.backward:
            work = b.add(work, b.mul(shared["inputs"], self.gates))
            weights = self.gates * self.plan.types.operands.bytes
            packed = b.add(packed, b.mul(shared["inputs"], weights))
        single = b.icmp("eq", shared["packed"], 0)
        work = b.smax(b.select(single, constant(0, "i64"), work), 64 * h)
        work = b.mul(b.mul(work, rows), b.mul(shared["count"], directions))
        enough = b.and_(b.icmp("sge", work, shared["least_work"]), b.icmp("sgt", threads, 1))
        parts = b.select(enough, threads, one)
        shared["parts"] = parts
        even = b.icmp("eq", b.srem(parts, directions), 0)
        side = b.select(even, b.sdiv(parts, directions), parts)
        if kernel.row_wise:
            shared["units_split"] = 0
            return
        # Of a mask with many holes the typical step has few rows, and many steps fewer still.
        rows = b.select(b.icmp("ne", shared["sparse"], 0), b.sdiv(rows, 4), rows)
        near = b.icmp("sle", packed, NEAR_CACHE)
        tiled = any(m.geometry.tiled for m in kernel.matmuls)
        far = constant(FEW_TILED_ROWS if tiled else FEW_ROWS, "i64")
        few = b.select(near, constant(HARDLY_ANY_ROWS, "i64"), far)
        split = b.and_(b.icmp("slt", rows, b.mul(few, side)), b.icmp("sgt", side, 1))
        split = b.and_(split, b.icmp("sle", side, kernel.geometry.tiles))
        shared["units_split"] = b.zext(split, "i64")

    def _lay_out(self, b: Builder, base: Value, shared: Entries, each: Entries, d: Value) -> None:
        """The tables of one direction."""
        g, batch = self.generator, shared["batch"]
        packing, zeros, work, workspace, _ = self._places(b, shared)
        start = b.ptrtoint(base, "i64")
        offset = b.add(b.mul(d, self.table_bytes), LINE)
        table = Entries(b, b.gep(base, offset, "i8"), g.names)
        b.store(b.add(start, offset), b.gep(base, b.add(d, 1), "i64"))
        barrier = b.add(offset, align(8 * len(g.names)))
        b.store(constant(0, "i64"), b.gep(base, barrier, "i8"))
        # The backward pass runs against each direction.
        bit = b.and_(b.lshr(shared["reverse"], d), 1)
        flag = b.xor(bit, 1) if self.backward else bit
        backwards, forwards = b.icmp("ne", flag, 0), b.icmp("eq", bit, 0)
        sign = b.sub(1, b.shl(flag, 1))
        begin, count, steps = shared["begin"], shared["count"], shared["steps"]
        time = b.select(backwards, b.sub(b.sub(steps, begin), 1), begin)
        local = b.select(backwards, b.sub(count, 1), constant(0, "i64"))
        # The time that arrays of states and saved values begin at.
        origin, span = shared["origin"], shared["span"]
        from_end = b.sub(steps, b.add(origin, span))
        there = b.sub(time, b.select(forwards, origin, from_end))
        threads = b.mul(b.mul(d, shared["threads"]), workspace)
        table.set(
            steps=count, batch=batch, row_group=shared["row_group"], time=time, time_step=sign,
            units_split=shared["units_split"], barrier=b.add(start, barrier),
            workspace=b.add(b.add(start, work), threads), workspace_stride=workspace,
            hyper=shared["hyper"], training=shared["training"], seed=shared["seed"],
            stream=b.add(b.shl(shared["stream"], 1), d), repeat=shared["repeat"],
            static=each["static"], recurrent_mask=each["recurrent_mask"], bias_x=each["bias_ih"],
        )  # fmt: skip
        gang = shared.pointer("gang")
        slot = b.alloca("i64")
        b.store(constant(0, "i64"), slot)
        with b.when(b.icmp("ne", shared["gang"], 0)):
            b.store(b.load(b.gep(gang, 3, "i64"), "i64"), slot)
        table["yield_to"] = b.load(slot, "i64")
        recurrent = [l.bias_name for l in self.cell.linears if l.name == RECURRENT]
        table["bias_h"] = each[recurrent[0]] if recurrent else 0

        def place(
            name: str, address: Value, index: Value, step: Value, row: Value, sign: Value
        ) -> None:
            at = b.add(address, b.mul(b.mul(index, step), self._bytes(name)))
            table[name] = b.select(b.icmp("ne", address, 0), at, constant(0, "i64"))
            table[f"{name}_t"], table[f"{name}_b"] = b.mul(step, sign), row

        for name in ("mask", "resets"):
            address = shared[name]
            at = b.add(address, b.mul(time, batch))
            table[name] = b.select(b.icmp("ne", address, 0), at, constant(0, "i64"))
            table[f"{name}_t"] = b.mul(sign, batch)
        for i, name in enumerate(self.cell.param_names):
            table[f"param{i}"] = each[name]
        width = constant(g.saved_width, "i64")
        place("saved", each["saved"], there, b.mul(batch, width), width, sign)
        for i, (name, _) in enumerate(self.states):
            table[f"reset{i}"] = each[f"reset_state {name}"]
            table[f"reset{i}_b"] = each[f"reset_state {name} rows"]
        if self.backward:
            self._backward_arrays(b, shared, each, table, d, place, sign, time, there, local, bit)
        else:
            self._forward_arrays(b, shared, each, table, d, place, sign, time, local)
            with b.when(b.icmp("ne", shared["inputs"], 0)):
                table.set(x=b.add(start, zeros), x_t=0, x_b=0)
        self._lay_out_packing(
            b, Entries(b, b.gep(base, b.add(packing, b.mul(d, self.packing_bytes)), "i8"), {}),
            shared, each, table, d,
        )  # fmt: skip

    def _hidden(self, b: Builder, shared: Entries, d: Value) -> tuple[Value, Value, Value]:
        """Of the first state: the address of a direction's columns, and strides."""
        width = self.states[0][1]
        row = b.mul(shared["directions"], width)
        address = b.add(shared["hidden"], b.mul(d, width * self._bytes("state0")))
        return address, b.mul(shared["batch"], row), row

    def _slot(
        self, b: Builder, shared: Entries, each: Entries, d: Value, i: int, done: Value
    ) -> tuple[Value, Value, Value, Value, Value]:
        """Where a forward pass has state i after so many steps: address, stride to the next step
        and from row to row, whether it has two slots only, and the sign.
        """
        name, width = self.states[i]
        bit = b.and_(b.lshr(shared["reverse"], d), 1)
        whole = b.icmp("ne", b.and_(b.lshr(shared["whole"], i), 1), 0)
        slot = b.sub(done, shared["origin"])
        from_end = b.add(b.sub(shared["span"], slot), int(i == 0))
        turn = b.and_(slot, 1)
        slot = b.select(whole, b.select(b.icmp("ne", bit, 0), from_end, slot), turn)
        sign = b.sub(1, b.shl(b.select(whole, bit, turn), 1))
        if i:
            address, row = each[f"sequence {name}"], constant(width, "i64")
            step = b.mul(shared["batch"], width)
        else:
            address, step, row = self._hidden(b, shared, d)
        flip = b.zext(b.not_(whole), "i64")
        offset = b.mul(b.mul(slot, step), self._bytes(f"state{i}"))
        return b.add(address, offset), step, row, flip, sign

    def _forward_arrays(
        self, b: Builder, shared: Entries, each: Entries, table: Entries, d: Value,
        place: Place, sign: Value, time: Value, local: Value,
    ) -> None:  # fmt: skip
        width, zero = self.states[0][1], constant(0, "i64")
        row = b.mul(shared["directions"], width)
        out = shared["out"]
        column = b.select(b.icmp("ne", out, 0), b.mul(d, width * self._bytes("out")), zero)
        place("out", b.add(out, column), time, b.mul(shared["batch"], row), row, sign)
        place("x", each["gates"], local, each["gates steps"], each["gates rows"], sign)
        place("input", shared["input"], time, shared["input steps"], shared["input rows"], sign)
        table.set(product=each["product"], product_b=self.gates, inputs=shared["inputs"])
        if self.projecting is not None:
            g, inputs = self.projecting.geometry, shared["inputs"]
            itemsize = self.plan.types.operands.bytes
            rows = L1_WEIGHTS // (max(g.columns, 1) * g.lanes * itemsize)
            blocks = constant(1, "i64")
            if not g.quantized:
                blocks = b.smax(b.sdiv(b.add(b.shl(inputs, 1), rows), 2 * rows), 1)
            block = b.sdiv(b.sub(b.add(inputs, blocks), 1), blocks)
            table["input_block"] = whole_chunks(b, block, g.chunk)
        for i in range(len(self.states)):
            at, step, row, flip, way = self._slot(b, shared, each, d, i, shared["begin"])
            table[f"state{i}"], table[f"state{i}_flip"] = at, flip
            table[f"state{i}_t"], table[f"state{i}_b"] = b.mul(step, way), row

    def _backward_arrays(
        self, b: Builder, shared: Entries, each: Entries, table: Entries, d: Value,
        place: Place, sign: Value, time: Value, there: Value, local: Value, bit: Value,
    ) -> None:  # fmt: skip
        batch, zero = shared["batch"], constant(0, "i64")
        for i, (name, width) in enumerate(self.states):
            entry = f"d_sequence {name}" if i else "d_output"
            column = b.mul(d, width * self._bytes(f"dy{i}"))
            column = b.select(b.icmp("ne", shared[entry], 0), column, zero)
            strides = shared[f"{entry} steps"], shared[f"{entry} rows"]
            place(f"dy{i}", b.add(shared[entry], column), time, *strides, sign)
        place("dx", each["d_gates"], local, each["d_gates steps"], each["d_gates rows"], sign)
        for k in range(len(self.matmuls)):
            for name, entry in ((f"dr{k}", f"outputs{k}"), (f"operand{k}", f"operand{k}")):
                strides = each[f"{entry} steps"], each[f"{entry} rows"]
                place(name, each[entry], local, *strides, sign)
        # state[t] is read before step t and, one step of the direction on, after it.
        on = b.sub(0, sign)
        for i, (name, wide) in enumerate(self.states):
            if i:
                address, row = each[f"sequence {name}"], constant(wide, "i64")
                step, index = b.mul(batch, wide), b.add(there, bit)
            else:
                address, step, row = self._hidden(b, shared, d)
                index = b.add(there, b.shl(bit, 1))
            place(f"state{i}", address, index, step, row, sign)
            table[f"state{i}_next"] = b.mul(step, on)
            table[f"dstate{i}"] = each[f"d_state {name}"]
            table[f"dreset{i}"] = each[f"d_reset {name}"]
        table.set(dparam=each["d_params"], dstatic=each["d_static"])

    def _lay_out_packing(
        self, b: Builder, tables: Entries, shared: Entries, each: Entries, table: Entries,
        d: Value,
    ) -> None:  # fmt: skip
        """Where packed weights lie, and what is packed there."""
        zero, at = constant(0, "i64"), 0
        base = shared["packed"]
        base = b.add(base, b.mul(d, self._packed_bytes(b, shared)))
        there = b.icmp("ne", shared["packed"], 0)
        index = {name: i for i, name in enumerate(PACKING)}

        def bias_x() -> Value | int:
            if self.backward:
                return 0
            bias = each["bias_ih"]
            if not self.generator.apart:
                return bias
            # Sums of the input that have a place of their own begin with its biases.
            return b.select(b.icmp("ne", shared["inputs"], 0), zero, bias)

        def packing(place: int, name: str, bias_h: Value, packed: Value, inner: Value) -> None:
            address = b.gep(tables.address, place * PACKING_BYTES, "i8")
            entries = Entries(b, address, index)
            entries.set(
                source=each[name], heads=each[f"{name} heads"], rows=each[f"{name} rows"],
                columns=each[f"{name} columns"], packed=packed, inner=inner,
                bias_x=bias_x(), bias_h=bias_h,
            )  # fmt: skip
            if self.plan.types.quantized:
                entries["scales"] = each[scales_of(name)]

        for k, m in enumerate(self.matmuls):
            packed = b.select(there, b.add(base, at), zero)
            bias = zero if self.backward else each[m.linear.bias_name]
            packing(k, m.linear.weight, bias, packed, constant(m.parts * m.numbers, "i64"))
            table[f"weights{k}"] = packed
            at += align(m.packed_elements * self.size)
        if self.projecting is not None:
            inputs = shared["inputs"]
            packed = b.select(b.icmp("ne", inputs, 0), b.add(base, at), zero)
            name = "bias_ih" if self.generator.apart else self.projecting.linear.bias_name
            bias = each[name]
            packing(len(self.matmuls), "weight_ih", bias, packed, inputs)
            table["weights_x"] = packed

    # ---- states before the first step, and after the last ----------------------------------------
    def _print_first_states(self) -> None:
        b = self.module.function("write_first", [("ptr", "call")], internal=True, inline=False)
        with self._directions(b, b.args[0]) as (shared, each, d):
            for i, (name, width) in enumerate(self.states):
                at, _, row, *_ = self._slot(b, shared, each, d, i, shared["begin"])
                to, value = b.inttoptr(at, "ptr"), self.cell.states[i].initial
                rows, array = shared["batch"], f"state{i}"
                self._copy_or_fill(b, to, row, each, f"state {name}", value, rows, width, array)

    def _print_final_states(self) -> None:
        """Copies the states after the last step of the call to where they are asked for."""
        b = self.module.function("write_final", [("ptr", "call")], internal=True, inline=False)
        with self._directions(b, b.args[0]) as (shared, each, d):
            done = b.add(shared["begin"], shared["count"])
            for i, (name, width) in enumerate(self.states):
                with b.when(b.icmp("ne", each[f"final {name}"], 0)):
                    at, _, row, *_ = self._slot(b, shared, each, d, i, done)
                    to, to_row = each.pointer(f"final {name}"), each[f"final {name} rows"]
                    source, one = b.inttoptr(at, "ptr"), constant(1, "i64")
                    wide = constant(width, "i64")
                    narrow = number_of(self.plan, f"state{i}") is not self.plan.types.math
                    copy = "copy_rows_narrow" if narrow else "copy_rows"
                    b.call(copy, to, to_row, source, row, one, shared["batch"], wide)

    def _print_first_gradients(self) -> None:
        """What gradients that add up over time start from."""
        b = self.module.function("write_first", [("ptr", "call")], internal=True, inline=False)
        zero = constant(0.0, b.real)
        with self._directions(b, b.args[0]) as (shared, each, _):
            batch = shared["batch"]
            for i, (name, width) in enumerate(self.states):
                wide = constant(width, "i64")
                to, reset = each.pointer(f"d_state {name}"), f"d_reset {name}"
                final, array = f"d_final {name}", f"dstate{i}"
                self._copy_or_fill(b, to, wide, each, final, 0.0, batch, width, array)
                with b.when(b.icmp("ne", each[reset], 0)):
                    b.call("fill_rows", each.pointer(reset), wide, zero, batch, wide)
            group = shared["row_group"]
            groups = b.sdiv(b.sub(b.add(batch, group), 1), group)
            h = self.plan.hidden_size
            for name, rows, width in (
                ("d_params", groups, len(self.cell.params) * h), ("d_static", batch, h)
            ):  # fmt: skip
                wide = constant(width, "i64")
                with b.when(b.icmp("ne", each[name], 0)):
                    b.call("fill_rows", each.pointer(name), wide, zero, rows, wide)
