"""Prints the handler through which XLA runs a pass, by the C interface of its foreign functions.

    XLA_FFI_Error *handler(XLA_FFI_CallFrame *frame)

One handler serves every pass. A call has one attribute, the record of its pass: the whole recipe,
with names in place of what only a process knows, such as the addresses of kernels. So a program
owns its recipes, and is the same program in every process. The names are looked up in each call, in
the ``Process`` whose address the handler knows. The arguments of a call are the arrays that the
pass reads, and maybe the seed of its random masks; its results are the arrays that the pass makes.

A framework may not know sizes while it traces a program. Then the attribute is a *form*, a number
that stands for a pass of any sizes, and the first two axes of the first argument are these sizes.
The handler finds the record under a name made of all three; for new sizes Python drafts it. The
handler for cards (``engines.gpu.xla``) finds its records in the same way.

The memory of a call is not XLA's, which would be fresh pages at every run of a program. One call at
a time has the ``Room`` that stays warm; others, at the same time, allocate theirs.

The offsets below are those of version 0.1 of the interface, in ``xla/ffi/api/c_api.h``; XLA runs
handlers of older versions.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import secrets
import threading
import traceback
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from anycell.engines.cpu import isa, jit
from anycell.engines.cpu.driver import CALL, HEAD, OF_CALL, PLACE
from anycell.engines.cpu.ir import Builder, Module, Operand, Target, Value, constant
from anycell.engines.cpu.sources import fingerprint
from anycell.engines.cpu.table import Entries, align
from anycell.plan import LINE

# In a call frame: the first extension; XLA's functions; the counts and addresses of arguments and
# of results; the address of attributes.
EXTENSION, API, GIVEN, ARGUMENTS, MADE, RESULTS, ATTRIBUTES = 8, 16, 56, 72, 96, 112, 160
CREATE_ERROR = 48  # among XLA's functions
# Its arguments: their bytes, an extension, the message, and a code, which says "failed
# precondition".
ERROR_BYTES, MESSAGE, CODE, PRECONDITION = 32, 16, 24, 9
DATA, RANK, SHAPE = 24, 32, 40  # in a buffer: the address of its numbers; its axes; their sizes
NUMBERS = 16  # in an attribute that is an array, the address of its numbers
# An extension that asks for the version has the address of the answer.
ANSWER, MAJOR, MINOR, TRAITS = 24, 24, 28, 32
# A record begins with these numbers. ``execute`` and ``gang`` are names; ``read`` counts the arrays
# that the pass reads, ``words`` the numbers of its call; the tables begin at ``table`` in its
# memory, of ``bytes``. Tables follow, as long as the numbers say: the template, of ``length``; rows
# of ``driver.PLACE``; rows of ``CONSTANT``, of which the last ``kept`` come after the numbers
# ``OF_CALL`` in the list of addresses; rows of number and bytes of the results that begin as zeros;
# and the contents of constants.
RECORD = (
    "execute gang read shared kept zeroed words table bytes stream length places first"
).split()
# An array that all calls share: its place in the record, or if this is 0, a name.
CONSTANT = "place name".split()
ROOM = "users address bytes".split()
# In place of a record: 0, where a record has the name of a function, and the number of the form.
FORM = "none form".split()
# The name of a record is its form, plus these multiples of the sizes.
OF_SIZES = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F
# ``names`` is the address of a table of names and addresses: its rows, a power of two, and then
# these rows, of which one with the name 0 is free. A name has the first free row from row
# ``name % rows`` on. ``draft`` is the address of a function: from a call frame whose call has a
# form, to the address of the record, or 0.
PROCESS = "names room draft malloc free".split()
NAME = "name address".split()
UNKNOWN = (
    "This program was compiled in another process, and has a layer of anycell that this process "
    "has not compiled. Compile the program here: call its function, or lower it."
)
Buffers = Sequence[tuple[int, ...]]  # the shapes of arguments, or of results


class Room:
    """Memory that calls share: the only call at a time has it."""

    def __init__(self, size: int) -> None:
        self.block, self.size = np.empty(size + LINE, np.uint8), size
        address = self.block.__array_interface__["data"][0]
        self.numbers = array("q", [0, address + -address % LINE, size])


class Process:
    """The names that records use, in this process."""

    def __init__(self) -> None:
        self.rooms = [Room(0)]  # calls may still have those before the last, which is the largest
        self.addresses: dict[int, int] = {}  # by names
        self._tables: list[array[int]] = []  # the last is in use; calls may still read the others
        self._lock = threading.Lock()
        self.numbers = array("q", bytes(8 * len(PROCESS)))
        self.address, _ = self.numbers.buffer_info()
        for name in ("malloc", "free"):
            address = ctypes.cast(ctypes.CDLL(None)[name], ctypes.c_void_p).value or 0
            self.numbers[PROCESS.index(name)] = address
        self._forms: dict[int, Callable[[Buffers, Buffers], npt.NDArray[np.int64]]] = {}
        self._next_form = itertools.count(secrets.randbits(62))  # no other process has its forms
        self._records: list[npt.NDArray[np.int64]] = []
        self._draft = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(self._drafted)
        address = ctypes.cast(self._draft, ctypes.c_void_p).value or 0
        self.numbers[PROCESS.index("draft")] = address
        self.make_room(0)
        self._publish(64)

    def make_room(self, size: int) -> None:
        """Makes the room that stays warm as large as this."""
        with self._lock:
            if size > self.rooms[-1].size:
                self.rooms.append(Room(max(size, 2 * self.rooms[-1].size)))
            self.numbers[PROCESS.index("room")] = self.rooms[-1].numbers.buffer_info()[0]

    def name(self, text: str, address: int) -> int:
        """Gives what ``text`` describes its name, by which calls find its address."""
        name = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1 or 1
        self._give(name, address)
        return name

    def _give(self, name: int, address: int) -> None:
        with self._lock:
            self.addresses[name] = address
            table = self._tables[-1]
            if 2 * len(self.addresses) > table[0]:
                self._publish(2 * table[0])
            else:
                self._enter(table, name, address)

    def form(self, record: Callable[[Buffers, Buffers], npt.NDArray[np.int64]]) -> npt.NDArray[Any]:
        """Makes a form, the attribute of calls, of what describes the pass for the shapes of a
        call's arguments and results.
        """
        number = next(self._next_form)
        self._forms[number] = record
        return np.array([0, number])

    def _drafted(self, frame: int) -> int:
        """Drafts the record of a call; see ``PROCESS``."""
        try:
            return self._draft_of(frame)
        except BaseException:  # which cannot pass through XLA, whose error follows
            traceback.print_exc()
            return 0

    def _draft_of(self, frame: int) -> int:
        attribute = _at(_at(frame + ATTRIBUTES))
        number = _at(_at(attribute + NUMBERS) + 8 * FORM.index("form"))
        given, made = (
            [_shape(_at(_at(frame + buffers) + 8 * i)) for i in range(_at(frame + count))]
            for count, buffers in ((GIVEN, ARGUMENTS), (MADE, RESULTS))
        )
        record = self._forms[number](given, made)
        self._records.append(record)
        address = record.__array_interface__["data"][0]
        sizes = sum(size * k for size, k in zip(given[0][:2], OF_SIZES, strict=True))
        self._give(ctypes.c_int64(number + sizes).value, address)
        return int(address)

    def _publish(self, rows: int) -> None:
        """Writes a larger table of names."""
        table = array("q", [rows, *[0] * (len(NAME) * rows)])
        for name, address in self.addresses.items():
            self._enter(table, name, address)
        self._tables.append(table)
        self.numbers[PROCESS.index("names")] = table.buffer_info()[0]

    @staticmethod
    def _enter(table: array[int], name: int, address: int) -> None:
        row = name % table[0]
        while table[1 + len(NAME) * row] not in (0, name):
            row = (row + 1) % table[0]
        at = 1 + len(NAME) * row
        table[at + 1] = address  # before its name: a call may read the table now
        table[at] = name


def _at(address: int) -> int:
    """The word at an address."""
    return ctypes.c_int64.from_address(address).value


def _shape(buffer: int) -> tuple[int, ...]:
    return tuple((ctypes.c_int64 * _at(buffer + RANK)).from_address(_at(buffer + SHAPE)))


@functools.lru_cache(maxsize=1)
def process() -> Process:
    """The names that records use, in this process; it stays, as XLA knows the handler."""
    return Process()


def record(
    numbers: dict[str, int],
    template: Sequence[int],
    places: Iterable[Sequence[int]],
    constants: Sequence[npt.NDArray[Any] | int],
    zeroed: Iterable[Sequence[int]],
) -> npt.NDArray[np.int64]:
    """Describes a pass.

    Args:
        numbers: those of ``RECORD`` that do not follow from the other arguments.
        constants: the arrays that calls share, or names of what only the process has.
        zeroed: numbers and bytes of the arrays that the pass makes which must begin as zeros.
    """
    placed, zeros = (np.array([*rows], np.int64).ravel() for rows in (places, zeroed))
    made = numbers.pop("made")
    words = len(CALL) + numbers["read"] + made + len(constants) + len(OF_CALL)
    size = align(8 * (len(HEAD) + words)) + numbers["bytes"]
    process().make_room(size)
    values = {
        **numbers, "shared": len(constants) - numbers["kept"], "zeroed": len(zeros) // 2,
        "words": words, "bytes": size, "length": len(template),
        "places": len(placed) // len(PLACE),
    }  # fmt: skip
    parts = [np.array([*map(values.__getitem__, RECORD)]), np.array(template, np.int64), placed]
    rows, contents = list[list[int]](), list[npt.NDArray[np.int64]]()
    at = sum(map(len, parts)) + len(CONSTANT) * len(constants) + len(zeros)
    for one in constants:
        if isinstance(one, int):
            rows.append([0, one])
            continue
        raw = np.ascontiguousarray(one).tobytes()
        contents.append(np.frombuffer(raw + bytes(-len(raw) % 8), np.int64))
        rows.append([at, 0])
        at += len(contents[-1])
    parts += [np.array(rows, np.int64).ravel(), zeros, *contents]
    return np.concatenate(parts, dtype=np.int64)


@functools.lru_cache(maxsize=8)
def handler() -> int:
    """The address of the handler, for the instruction set in use."""
    target = isa.current()
    sources = fingerprint()
    recipe = f"{sources}\n{target}\nxla" if sources else None
    library = jit.compile(lambda: str(print_handler(target)), ["handler", "begin"], target, recipe)
    library.function("begin")(process().address)
    return library.address("handler")


def print_handler(target: Target) -> Module:
    """Prints the module of the handler, and of ``begin``, which tells it the process."""
    module = Module(target)
    place = module.word()
    b = module.function("begin", "ptr process")
    b.store(b.ptrtoint(b.args[0], "i64"), place)
    b.ret()
    print_find(module)
    b = module.function("handler", "ptr frame", "ptr")
    (frame,), null = b.args, Value("null", "ptr")
    answer(b, frame)
    unknown = module.table([*UNKNOWN.encode(), 0], "i8")
    process = Entries(b, b.load(place, "ptr"), PROCESS)
    attribute = word(b, word(b, frame, ATTRIBUTES), 0)
    record = b.variable(word(b, attribute, NUMBERS, "i64"))
    with b.when(b.load(b.inttoptr(record.value, "ptr"), "i64").eq(0)):
        record.value = print_form(b, frame, process, b.inttoptr(record.value, "ptr"))
    with b.when(record.value.eq(0)):
        b.ret(error(b, frame, unknown))
    # What was drafted now may have made the table of names anew.
    of_pass = _Record(b, b.inttoptr(record.value, "ptr"), process.pointer("names"))
    missing = b.variable(0)
    for named in (of_pass.find(of_pass["execute"]), of_pass.gang()):
        missing.value = missing.value + b.zext(named.eq(0), "i64")
    with b.loop(0, of_pass["shared"] + of_pass["kept"]) as i:
        missing.value = missing.value + b.zext(of_pass.constant(i).eq(0), "i64")
    with b.when(missing.value.ne(0)):
        b.ret(error(b, frame, unknown))
    room = Entries(b, process.pointer("room"), ROOM)
    alone = b.atomic_add(room.at("users"), 1).eq(0) & (of_pass["bytes"] <= room["bytes"])
    memory = b.variable(room["address"])
    with b.when(~alone):
        memory.value = b.call(process.pointer("malloc"), of_pass["bytes"] + LINE, returns="i64")
    _print_call(b, frame, of_pass, b.inttoptr((memory.value + (LINE - 1)) & -LINE, "ptr"))
    with b.when(~alone):
        b.call(process.pointer("free"), memory.value, returns="void")
    b.atomic_add(room.at("users"), -1)
    b.ret(null)
    return module


def print_find(module: Module) -> None:
    """Prints the function that looks a name up; it returns 0 for an unknown one."""
    b = module.private("find", "ptr names, i64 name", "i64")
    table, name = b.args
    rows = b.load(table, "i64")
    with b.loop(0, rows) as i:
        row = b.gep(table, ((name + i) & (rows - 1)) * len(NAME) + 1, "i64")
        at = Entries(b, row, NAME)
        with b.when(at["name"].eq(name)):
            b.ret(at["address"])
        with b.when(at["name"].eq(0)):
            b.ret(b.value(0))
    b.ret(b.value(0))


def print_form(b: Builder, frame: Value, process: Entries, form: Value) -> Value:
    """The address of the record of a call that has a form; 0 if it cannot be drafted."""
    first = b.load(word(b, frame, ARGUMENTS), "ptr")
    name = Entries(b, form, FORM)["form"]
    for i, factor in enumerate(OF_SIZES):
        name = name + word(b, word(b, first, SHAPE), 8 * i, "i64") * ctypes.c_int64(factor).value
    record = b.variable(b.call("find", process.pointer("names"), name))
    with b.when(record.value.eq(0)):
        record.value = b.call(process.pointer("draft"), frame, returns="i64")
    return record.value


def error(b: Builder, frame: Value, message: Value) -> Value:
    """Makes an error that says what the text at this address says."""
    arguments = b.alloca("i64", ERROR_BYTES // 8)
    for offset, number in ((0, ERROR_BYTES), (8, 0), (MESSAGE, b.ptrtoint(message, "i64"))):
        b.store(b.value(number), b.gep(arguments, offset, "i8"))
    b.store(b.value(PRECONDITION), b.gep(arguments, CODE, "i8"))
    create = word(b, word(b, frame, API), CREATE_ERROR)
    return b.call(create, arguments, returns="ptr")


def answer(b: Builder, frame: Value, traits: int = 0) -> None:
    """Answers a frame that asks for the version of the interface."""
    extension = word(b, frame, EXTENSION)
    with b.when(word(b, frame, EXTENSION, "i64").ne(0)):
        told = word(b, extension, ANSWER)
        for offset, number in ((MAJOR, 0), (MINOR, 1), (TRAITS, traits)):
            b.store(constant(number, "i32"), b.gep(told, offset, "i8"))
        b.ret(Value("null", "ptr"))


class _Record(Entries):
    """The record of a call, in the code of the handler."""

    def __init__(self, b: Builder, address: Value, names: Value) -> None:
        super().__init__(b, address, RECORD)
        self.names = names
        self.template = b.gep(self.address, len(RECORD), "i64")
        self.places = b.gep(self.template, self["length"], "i64")
        self.constants = b.gep(self.places, self["places"] * len(PLACE), "i64")
        count = self["shared"] + self["kept"]
        self.zeroed = b.gep(self.constants, count * len(CONSTANT), "i64")

    def find(self, name: Value) -> Value:
        return self.b.call("find", self.names, name)

    def gang(self) -> Value:
        """The address of the gang; 1 for one thread, which needs none."""
        name, gang = self["gang"], self.b.variable(1)
        with self.b.when(name.ne(0)):
            gang.value = self.find(name)
        return gang.value

    def constant(self, i: Value) -> Value:
        """The address of what calls share."""
        row = Entries(self.b, self.b.gep(self.constants, i * len(CONSTANT), "i64"), CONSTANT)
        address = self.b.variable(self.b.ptrtoint(self.address, "i64") + row["place"] * 8)
        with self.b.when(row["place"].eq(0)):
            address.value = self.find(row["name"])
        return address.value


def _print_call(b: Builder, frame: Value, of_pass: _Record, memory: Value) -> None:
    """Makes the head and the call of a pass at the beginning of its memory, and runs it."""
    given, made = (word(b, frame, at, "i64") for at in (GIVEN, MADE))
    arguments, results = (word(b, frame, at) for at in (ARGUMENTS, RESULTS))
    read, shared, kept = of_pass["read"], of_pass["shared"], of_pass["kept"]
    head = Entries(b, memory, HEAD)
    head.set(
        template=b.ptrtoint(of_pass.template, "i64"), length=of_pass["length"],
        places=b.ptrtoint(of_pass.places, "i64"), count=of_pass["places"], first=of_pass["first"],
    )  # fmt: skip
    call = b.gep(memory, len(HEAD), "i64")
    block = b.ptrtoint(call, "i64") + of_pass["words"] * 8
    block = (block + (LINE - 1)) & -LINE
    table = block + of_pass["table"]
    next_place = b.variable(0)

    def add(number: Value) -> None:
        place = next_place.value
        b.store(number, b.gep(call, place, "i64"))
        next_place.value = place + 1

    for number in (b.ptrtoint(memory, "i64"), table):
        add(number)
    for buffers, length in ((arguments, read), (results, made)):
        with b.loop(0, length) as i:
            add(data(b, buffers, i))
    with b.loop(0, shared) as i:
        add(of_pass.constant(i))
    first_row, seed = b.variable(0), b.variable(0)
    with b.when(given > read):
        words = b.inttoptr(data(b, arguments, read), "ptr")
        seed.value = b.load(words, "i64", align=4)
        first_row.value = b.zext(b.load(b.gep(words, 8, "i8"), "i32"), "i64")
    numbers = {
        "block": block, "table": table, "gang": of_pass.gang(), "first_row": first_row.value,
        "seed": seed.value, "stream": of_pass["stream"],
    }  # fmt: skip
    for name in OF_CALL:
        add(numbers[name])
    with b.loop(shared, shared + kept) as i:
        add(of_pass.constant(i))
    with b.loop(0, of_pass["zeroed"]) as i:
        row = b.gep(of_pass.zeroed, i * 2, "i64")
        begin = b.inttoptr(data(b, results, b.load(row, "i64")), "ptr")
        count = b.load(b.gep(row, 1, "i64"), "i64") // 4  # sums have 32 bits or more
        with b.loop(0, count, b.lanes) as first:
            b.store_first(constant(0.0, b.vec), b.gep(begin, first), count - first)
    b.call(b.inttoptr(of_pass.find(of_pass["execute"]), "ptr"), call, returns="void")


def word(b: Builder, base: Value, offset: Operand, type: str = "ptr") -> Value:
    """A word of a structure."""
    return b.load(b.gep(base, offset, "i8"), type)


def data(b: Builder, buffers: Value, number: Operand) -> Value:
    """The address of the numbers of a buffer, as a number."""
    return word(b, b.load(b.gep(buffers, number, "i64"), "ptr"), DATA, "i64")
