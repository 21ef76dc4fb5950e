"""Prints the kernel of the operator by which PyTorch runs a pass, by PyTorch's stable C interface.

    void play(uint64_t *stack, uint64_t arguments, uint64_t results)

One operator serves every pass, forward and backward: ``play(Tensor[] arrays, int form, int seed) ->
Tensor[]``. A form is a number for all that decides a pass but the layout of its arrays. For each
layout that a call of a form has had there is a record: how its arrays are laid out, the arrays that
the pass makes, and its recipe. The kernel looks for the record that fits the call, asks PyTorch for
the results, and runs the recipe. If no record fits, or there is no memory, it returns no tensors,
and the caller runs the pass in another way. So it raises no errors, and it runs only what has been
checked before.

Calls need no lock: a record is complete before the table refers to it, and stays as long as a call
may read it. The functions of PyTorch are those of ``torch/csrc/stable/c/shim.h`` and
``torch/csrc/inductor/aoti_torch/c/shim.h``, since PyTorch 2.10.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from anycell.engines.cpu import isa, jit
from anycell.engines.cpu.driver import CALL, OF_CALL
from anycell.engines.cpu.ir import Builder, Module, Operand, Target, Value, constant
from anycell.engines.cpu.sources import fingerprint
from anycell.engines.cpu.table import Entries
from anycell.plan import LINE
from anycell.plan.dtype import DTYPES

# What the kernel calls: PyTorch's functions, and C's.
TORCH = (
    "torch_list_size torch_list_get_item torch_list_push_back torch_new_list_reserve_size "
    "torch_delete_list aoti_torch_get_data_ptr aoti_torch_get_dim aoti_torch_get_dtype "
    "aoti_torch_get_sizes aoti_torch_get_strides aoti_torch_empty_strided "
    "aoti_torch__reinterpret_tensor aoti_torch_delete_tensor_object"
).split()
C = "malloc free memset memcpy".split()
# ``forms`` is the address of ``count`` addresses, of the last record of each form; ``users`` counts
# the calls that run. Rows of ``ROOM`` follow: memory that stays warm, for so many calls at once.
STATE = ["forms", "count", "users", *TORCH, *C]
ROOM, ROOMS = "busy address bytes".split(), 16
# ``next`` is the address of the record before. Rows follow, of arrays that are given, made and
# copied; then numbers: the results among the arrays that are made, and addresses that calls share.
# The pass writes the first ``placed`` of the arrays that are made. The others are its recipe's.
RECORD = "next given made copied results shared placed bytes table head execute gang stream".split()
AXES = 3  # at most
ARRAY = ["dtype", "axes", *(f"{what} {n}" for what in ("size", "stride") for n in range(AXES))]
# Address ``place`` of a pass, or -1 if the pass does not read it; bits of ``mask`` are 0 in it. The
# pass reads it from byte ``offset`` on; or, unless ``into`` is -1, from byte ``into`` of its memory
# on, where before ``size`` numbers from there are copied, or added if ``added`` is 1.
GIVEN = [*ARRAY, "place", "mask", "offset", "into", "size", "added"]
# ``base`` is the number of the array that it is a part of, from element ``offset`` on, or -1; its
# first ``zeros`` bytes are cleared; ``result`` is 1 if the caller gets it.
MADE = [*ARRAY, "base", "offset", "zeros", "result"]
# After the pass: numbers of arrays that are made, and from and to which byte of them.
COPIED = "source offset target at bytes".split()
FACT = "handle data axes dtype sizes strides".split()  # about an array of a call
MOST = 64  # arrays that a call has, and that it makes
RECORDS = 1024  # after so many all are forgotten

Shape = tuple[int, ...]


class Given(NamedTuple):
    """An array that a call has: of elements of ``bytes``; see ``GIVEN``."""

    dtype: int
    shape: Shape
    strides: Shape
    place: int
    bytes: int
    offset: int = 0
    into: int = -1
    size: int = 0
    added: int = 0


class Made(NamedTuple):
    """An array that a call makes, see ``MADE``."""

    dtype: int
    shape: Shape
    strides: Shape
    base: int = -1
    offset: int = 0
    zeros: int = 0


class Table:
    """The records of all forms, and the kernel that reads them.

    Args:
        functions: addresses, by the names of ``TORCH`` and ``C``.

    Attributes:
        lock: of those who change the table.
        tried: what its users have tried to add since it last forgot all.
    """

    def __init__(self, functions: Mapping[str, int]) -> None:
        self.lock = threading.Lock()
        self.state = array("q", [functions.get(name, 0) for name in STATE])
        self.state.extend([0] * (ROOMS * len(ROOM)))
        self._heads = [array("q", bytes(8 * 64))]  # the last is in use; calls may read the others
        self._records, self._old, self.tried = list[object](), list[object](), set[object]()
        self._publish(count=0, forms=self._heads[0].buffer_info()[0])
        target, sources = isa.current(), fingerprint()
        recipe = f"{sources}\n{target}\naten" if sources else None
        names = ["play", "begin"]
        library = jit.compile(lambda: str(print_play(target)), names, target, recipe)
        library.function("begin")(self.state.buffer_info()[0])
        self.kernel = library.address("play")

    def _publish(self, **values: int) -> None:
        for name, value in values.items():
            self.state[STATE.index(name)] = value

    def enter_process(self) -> None:
        """Begins anew in a forked child, where no thread is left that uses records or memory.
        ``lock`` was taken before the fork.
        """
        self._publish(users=0)
        self.state[len(STATE) :] = array("q", [0] * (ROOMS * len(ROOM)))
        self._forget()
        self.lock.release()

    def form(self) -> int:
        """A new form."""
        with self.lock:
            heads, count = self._heads[-1], self.state[STATE.index("count")]
            if count == len(heads):
                heads = heads + array("q", bytes(8 * count))
                self._heads.append(heads)
                self._publish(forms=heads.buffer_info()[0])
            self._publish(count=count + 1)
            return count

    def forget(self) -> None:
        """Forgets all records. A call that runs may still read them until the next time."""
        with self.lock:
            self._forget()

    def _forget(self) -> None:
        heads = self._heads[-1]
        heads[:] = array("q", bytes(8 * len(heads)))
        if not self.state[STATE.index("users")]:
            self._old.clear()
        self._old.extend(self._records)
        self._records.clear()
        self.tried.clear()

    def add(
        self,
        form: int,
        given: Sequence[Given],
        made: Sequence[Made],
        results: Sequence[int],
        copied: Sequence[Sequence[int]],
        shared: Sequence[int],
        numbers: Mapping[str, int],
        alive: object,
    ) -> None:
        """Adds a record.

        Args:
            results: of the arrays that are made, in order.
            copied: rows of ``COPIED``.
            shared: addresses that follow those of given and made arrays.
            numbers: those of ``RECORD`` that do not follow from the others.
            alive: what its addresses point to.
        """
        rows = [[*_array(*a[:3]), a.place, a.bytes - 1, *a[5:]] for a in given]
        rows += [[*_array(*a[:3]), *a[3:], int(i in results)] for i, a in enumerate(made)]
        counts = {
            "given": len(given), "made": len(made), "copied": len(copied),
            "results": len(results), "shared": len(shared),
        }  # fmt: skip
        with self.lock:
            if len(self._records) == RECORDS:
                self._forget()
            heads = self._heads[-1]
            values = {**numbers, **counts, "next": heads[form]}
            record = array("q", [values[name] for name in RECORD])
            for row in (*rows, *copied, results, shared):
                record.extend(row)
            self._records.append((record, alive))
            heads[form] = record.buffer_info()[0]  # last: a call may read it now


def _array(dtype: int, shape: Shape, strides: Shape) -> list[int]:
    """The numbers of ``ARRAY``."""
    more = [0] * (AXES - len(shape))
    return [dtype, len(shape), *shape, *more, *strides, *more]


def fits(given: Sequence[Given], made: Sequence[Made], shared: Sequence[int]) -> bool:
    """Whether a record can have these arrays and addresses."""
    shapes = [*(row.shape for row in given), *(row.shape for row in made)]
    few = max(len(given), len(made), len(shared)) <= MOST
    return few and max(map(len, shapes)) <= AXES


def print_play(target: Target) -> Module:
    """Prints the module of the kernel, and of ``begin``, which tells it the state."""
    module = Module(target)
    place = module.word()
    b = module.function("begin", "ptr state")
    b.store(b.ptrtoint(b.args[0], "i64"), place)
    _print_fits(module)
    b = module.function("play", "ptr stack, i64 arguments, i64 results")
    call = _Call(b, Entries(b, b.load(place, "ptr"), STATE))
    b.atomic_add(call.state.at("users"), 1)
    call.read()
    record = call.find()
    with b.when(record.ne(0)):
        call.make(b.inttoptr(record, "ptr"))
    call.leave()
    b.atomic_add(call.state.at("users"), -1)
    return module


def _print_fits(module: Module) -> None:
    """Prints the function that says whether arrays are laid out as in a record."""
    b = module.private("fits", "ptr record, ptr facts, i64 count", "i64")
    address, facts, count = b.args
    no = b.value(0)
    with b.when(Entries(b, address, RECORD)["given"].ne(count)):
        b.ret(no)
    with b.loop(0, count) as i:
        fact, row = _row(b, facts, i, FACT), _row(b, b.gep(address, len(RECORD), "i64"), i, GIVEN)
        other = (fact["dtype"] ^ row["dtype"]) | (fact["axes"] ^ row["axes"])
        with b.when((other | (fact["data"] & row["mask"])).ne(0)):
            b.ret(no)
        with b.loop(0, row["axes"]) as axis:
            for what, name in (("size", "sizes"), ("stride", "strides")):
                is_ = b.load(b.gep(fact.pointer(name), axis, "i64"), "i64")
                with b.when(is_.ne(b.load(b.gep(row.at(f"{what} 0"), axis, "i64"), "i64"))):
                    b.ret(no)
    b.ret(b.value(1))


class _Call:
    """The body of the kernel."""

    def __init__(self, b: Builder, state: Entries) -> None:
        self.b, self.state = b, state
        self.stack = b.args[0]
        self.facts = b.alloca("i64", MOST * len(FACT))
        self.made = b.alloca("i64", MOST)
        self.slot = b.alloca("i64")
        self.results = b.variable(0)  # the list that the call returns; 0 for an empty one
        self.list = b.load(self.stack, "ptr")
        self.count = self._get("torch_list_size", self.list)

    def _torch(self, name: str, *arguments: Value | int) -> Value:
        """Calls a function of PyTorch; its result is 0 unless it failed."""
        return self.b.call(self.state.pointer(name), *arguments, returns="i32")

    def _get(self, name: str, *arguments: Value | int, type: str = "i64") -> Value:
        """The number that a function of PyTorch writes to its last argument."""
        self._torch(name, *arguments, self.slot)
        return self.b.load(self.slot, type)

    def read(self) -> None:
        """Reads what there is to know about the arrays of the call."""
        b = self.b
        with b.loop(0, b.smin(self.count, MOST)) as i:
            fact = _row(b, self.facts, i, FACT)
            handle = self._get("torch_list_get_item", self.list, i, type="ptr")
            fact["dtype"] = 0  # of which the function writes the lower half
            for name, what in zip(
                FACT[1:], "data_ptr dim dtype sizes strides".split(), strict=True
            ):
                self._torch(f"aoti_torch_get_{what}", handle, fact.at(name))

    def find(self) -> Value:
        """The address of the record that fits; 0 if none does."""
        b, state = self.b, self.state
        form, record = b.load(b.gep(self.stack, 1, "i64"), "i64"), b.variable(0)
        known = (form >= 0) & (form < state["count"]) & (self.count <= MOST)
        with b.when(known):
            record.value = b.atomic_load(b.gep(state.pointer("forms"), form, "i64"))
            with b.repeat() as again:
                there, differs = record.value, b.variable(0)
                with b.when(there.ne(0)):
                    address = b.inttoptr(there, "ptr")
                    differs.value = b.call("fits", address, self.facts, self.count) ^ 1
                with b.when(differs.value.ne(0)):
                    record.value = Entries(b, b.inttoptr(there, "ptr"), RECORD)["next"]
                again(differs.value.ne(0))
        return record.value

    def make(self, address: Value) -> None:
        """Makes the arrays of a record, and runs its pass."""
        b, record = self.b, Entries(self.b, address, RECORD)
        rows = b.gep(address, len(RECORD), "i64")
        made_rows = b.gep(rows, record["given"] * len(GIVEN), "i64")
        copied_rows = b.gep(made_rows, record["made"] * len(MADE), "i64")
        numbers = b.gep(copied_rows, record["copied"] * len(COPIED), "i64")
        failed = b.variable(0)
        with b.loop(0, record["made"]) as i:
            row, into = _row(b, made_rows, i, MADE), b.gep(self.made, i, "i64")
            layout = row["axes"], row.at("size 0"), row.at("stride 0")
            b.store(b.value(0), into)
            with b.when(row["base"] < 0) as otherwise:
                zero, dtype = constant(0, "i32"), b.load(row.at("dtype"), "i32")
                code = self._torch("aoti_torch_empty_strided", *layout, dtype, zero, zero, into)
                failed.value = failed.value | b.zext(code, "i64")
            with otherwise, b.when(failed.value.eq(0)):
                base = self._handle(row["base"])
                name = "aoti_torch__reinterpret_tensor"
                code = self._torch(name, base, *layout, row["offset"], into)
                failed.value = failed.value | b.zext(code, "i64")
        room, memory = self._take_room(record["bytes"])
        with b.when(memory.ne(0) & failed.value.eq(0)):
            self._run(record, rows, made_rows, numbers, (memory + (LINE - 1)) & -LINE)
            with b.loop(0, record["copied"]) as i:
                row = _row(b, copied_rows, i, COPIED)
                target, source = (self._data(row[name]) for name in ("target", "source"))
                source = b.gep(source, row["offset"], "i8")
                target = b.gep(target, row["at"], "i8")
                b.call(self.state.pointer("memcpy"), target, source, row["bytes"], returns="ptr")
            results = self._get("torch_new_list_reserve_size", record["results"], type="ptr")
            with b.loop(0, record["results"]) as i:
                number = b.load(b.gep(numbers, i, "i64"), "i64")
                one = b.load(b.gep(self.made, number, "i64"), "i64")
                self._torch("torch_list_push_back", results, one)
            returned = self.results
            returned.value = b.ptrtoint(results, "i64")
        with b.when(room.ne(0)) as otherwise:
            b.atomic_add(Entries(b, b.inttoptr(room, "ptr"), ROOM).at("busy"), -1)
        with otherwise:
            self._free(memory)
        none = self.results.value.eq(0)
        with b.loop(0, record["made"]) as i:
            handle = b.load(b.gep(self.made, i, "i64"), "i64")
            with b.when(handle.ne(0) & (none | _row(b, made_rows, i, MADE)["result"].eq(0))):
                self._torch("aoti_torch_delete_tensor_object", b.inttoptr(handle, "ptr"))

    def leave(self) -> None:
        """Gives the arrays of the call back, and returns the results."""
        b = self.b
        with b.loop(0, self.count) as i:
            handle = self._get("torch_list_get_item", self.list, i, type="ptr")
            self._torch("aoti_torch_delete_tensor_object", handle)
        self._torch("torch_delete_list", self.list)
        results = self.results
        with b.when(results.value.eq(0)):
            results.value = self._get("torch_new_list_reserve_size", 0)
        b.store(results.value, self.stack)

    def _handle(self, number: Operand) -> Value:
        """An array that the call makes."""
        return self.b.load(self.b.gep(self.made, number, "i64"), "ptr")

    def _data(self, number: Operand) -> Value:
        """The address of its numbers."""
        return self._get("aoti_torch_get_data_ptr", self._handle(number), type="ptr")

    def _take_room(self, size: Value) -> tuple[Value, Value]:
        """The address of a room, or 0 if all are busy, and of memory; 0 if there is none."""
        b, state = self.b, self.state
        rooms = b.gep(state.address, len(STATE), "i64")
        room, memory = b.variable(0), b.variable(0)
        with b.loop(0, ROOMS) as i:
            row = _row(b, rooms, i, ROOM)
            with (
                b.when(room.value.eq(0)),
                b.when(b.atomic_turn(row.at("busy"), b.value(0), b.value(1))),
            ):
                room.value = b.ptrtoint(row.address, "i64")
        with b.when(room.value.ne(0)) as otherwise:
            row = Entries(b, b.inttoptr(room.value, "ptr"), ROOM)
            with b.when(row["bytes"] < size):
                self._free(row["address"])
                row["address"] = address = self._allocate(size)
                row["bytes"] = b.select(address.eq(0), 0, size)
            memory.value = row["address"]
        with otherwise:
            memory.value = self._allocate(size)
        return room.value, memory.value

    def _allocate(self, size: Value) -> Value:
        return self.b.call(self.state.pointer("malloc"), size + LINE, returns="i64")

    def _free(self, address: Value) -> None:
        self.b.call(self.state.pointer("free"), address, returns="void")

    def _gather(self, row: Entries, source: Value, target: Value) -> None:
        """Copies an array that a call has, or adds it to what is there."""
        b, size = self.b, row["size"]
        into, of = b.inttoptr(target, "ptr"), b.inttoptr(source, "ptr")
        with b.when(row["added"].eq(0)) as otherwise:
            bytes = size * (row["mask"] + 1)
            b.call(self.state.pointer("memcpy"), into, of, bytes, returns="ptr")
        with otherwise:
            for number in dict.fromkeys(t.storage for t in DTYPES.values() if t.plain):
                type = number.llvm
                with b.when(row["mask"].eq(number.bytes - 1)), b.loop(0, size) as i:
                    place = b.gep(into, i, type)
                    b.store(b.load(place, type) + b.load(b.gep(of, i, type), type), place)

    def _run(
        self, record: Entries, rows: Value, made_rows: Value, numbers: Value, block: Value
    ) -> None:
        """Lists the addresses of a pass, and runs it."""
        b, given, placed = self.b, record["given"], record["placed"]
        call = b.alloca("i64", len(CALL) + 3 * MOST + len(OF_CALL))
        addresses = b.gep(call, len(CALL), "i64")
        table, read = block + record["table"], b.variable(0)
        Entries(b, call, CALL).set(head=record["head"], table=table)
        with b.loop(0, given) as i:
            row, of = _row(b, rows, i, GIVEN), _row(b, self.facts, i, FACT)["data"]
            place, into = row["place"], row["into"]
            begin = b.variable(of + row["offset"])
            with b.when(into >= 0):
                self._gather(row, begin.value, block + into)
                begin.value = block + into
            with b.when(place >= 0):
                b.store(begin.value, b.gep(addresses, place, "i64"))
                read.value = read.value + 1
        after = b.gep(addresses, read.value, "i64")
        with b.loop(0, placed) as i:
            data, zeros = self._data(i), _row(b, made_rows, i, MADE)["zeros"]
            with b.when(zeros > 0):
                memset, zero = self.state.pointer("memset"), constant(0, "i32")
                b.call(memset, data, zero, zeros, returns="ptr")
            b.store(b.ptrtoint(data, "i64"), b.gep(after, i, "i64"))
        after = b.gep(after, placed, "i64")
        with b.loop(0, record["shared"]) as i:
            address = b.load(b.gep(numbers, record["results"] + i, "i64"), "i64")
            b.store(address, b.gep(after, i, "i64"))
        after = b.gep(after, record["shared"], "i64")
        of_call: dict[str, Value | int] = {
            "block": block, "table": table, "gang": record["gang"], "first_row": 0,
            "seed": b.load(b.gep(self.stack, 2, "i64"), "i64"), "stream": record["stream"],
        }  # fmt: skip
        Entries(b, after, OF_CALL).set(**of_call)
        b.call(b.inttoptr(record["execute"], "ptr"), call, returns="void")


def _row(b: Builder, rows: Value, number: Operand, names: Sequence[str]) -> Entries:
    """A row of a table."""
    return Entries(b, b.gep(rows, b.value(number) * len(names), "i64"), names)
