"""Prints the handler through which XLA runs a pass, by the C interface of its foreign functions.

    XLA_FFI_Error *handler(XLA_FFI_CallFrame *frame)

One handler serves every pass: a call's only attribute is the address of a record that describes the
pass. The arguments of a call are the arrays that the pass reads, and maybe the seed of its random
masks; its results are the arrays that the pass makes.

The memory of a call is not XLA's, which would be fresh pages at every run of a program. One call at
a time has the ``Room`` that stays warm; others, at the same time, allocate theirs.

The offsets below are those of version 0.1 of the interface, in ``xla/ffi/api/c_api.h``; XLA runs
handlers of older versions.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from anycell.engines.cpu import isa, jit
from anycell.engines.cpu.driver import CALL, OF_CALL
from anycell.engines.cpu.ir import Builder, Module, Operand, Target, Value, constant
from anycell.engines.cpu.sources import fingerprint
from anycell.engines.cpu.table import Entries, align
from anycell.plan import LINE

# In a call frame: the first extension; the counts and addresses of arguments and of results; the
# address of attributes.
EXTENSION, GIVEN, ARGUMENTS, MADE, RESULTS, ATTRIBUTES = 8, 56, 72, 96, 112, 160
DATA = 24  # in a buffer, the address of its numbers
SCALAR = 8  # in a scalar attribute, the address of its value
# An extension that asks for the version has the address of the answer.
ANSWER, MAJOR, MINOR, TRAITS = 24, 24, 28, 32
# A record, which is followed by the addresses of arrays that all calls share, and by the zeroed
# results: number and bytes of each. ``play`` and ``form`` are those of a recipe, ``read`` counts
# the arrays that the pass reads, ``words`` the numbers of its call; the tables begin at ``table``
# in its memory, of ``bytes``; ``room`` is the address of a ``Room``'s numbers.
RECORD = (
    "play form read shared zeroed words table bytes room malloc free gang seed stream"
).split()
ROOM = "users address".split()


class Room:
    """Memory that calls share: the only call at a time has it."""

    def __init__(self, size: int) -> None:
        self.block, self.size = np.empty(size + LINE, np.uint8), size
        address = self.block.__array_interface__["data"][0]
        self.numbers = array("q", [0, address + -address % LINE])


_rooms = [Room(0)]  # the last is the largest; records have the addresses of the others


def record(
    play: int, form: int, read: int, made: int, shared: Sequence[int],
    zeroed: Iterable[tuple[int, int]], table: int, memory: int, gang: int, stream: int,
) -> array[int]:  # fmt: skip
    """Describes a pass.

    Args:
        play, form: addresses of the driver's function and of the recipe's form.
        read, made: how many arrays the pass reads and makes.
        shared: addresses of arrays that all calls read.
        zeroed: numbers and bytes of the arrays that the pass makes which must begin as zeros.
        table, memory: where the tables begin in the memory of a call, and the bytes of the memory.
        gang: see ``pool.gang``.
        stream: of the random masks.
    """
    zeros = [number for row in zeroed for number in row]
    words = len(CALL) + read + made + len(shared) + len(OF_CALL)
    size = align(8 * words) + memory
    if size > _rooms[-1].size:
        _rooms.append(Room(size))
    room, _ = _rooms[-1].numbers.buffer_info()
    values = {
        "play": play, "form": form, "read": read, "shared": len(shared),
        "zeroed": len(zeros) // 2, "words": words, "table": table, "bytes": size + LINE,
        "room": room, "malloc": _address("malloc"), "free": _address("free"), "gang": gang,
        "seed": 0, "stream": stream,
    }  # fmt: skip
    return array("q", [*map(values.__getitem__, RECORD), *shared, *zeros])


def _address(name: str) -> int:
    """The address of a function of C's library."""
    return ctypes.cast(ctypes.CDLL(None)[name], ctypes.c_void_p).value or 0


@functools.lru_cache(maxsize=8)
def handler() -> int:
    """The address of the handler, for the instruction set in use."""
    target = isa.current()
    sources = fingerprint()
    recipe = f"{sources}\n{target}\nxla" if sources else None
    library = jit.compile(lambda: str(print_handler(target)), ["handler"], target, recipe)
    _libraries.append(library)
    return library.address("handler")


_libraries: list[jit.Library] = []  # XLA keeps the address


def print_handler(target: Target) -> Module:
    """Prints the module of the handler."""
    module = Module(target)
    b = module.function("handler", "ptr frame", "ptr")
    (frame,), null = b.args, Value("null", "ptr")
    extension = _word(b, frame, EXTENSION)
    with b.when(_word(b, frame, EXTENSION, "i64").ne(0)):
        answer = _word(b, extension, ANSWER)
        for offset, number in ((MAJOR, 0), (MINOR, 1), (TRAITS, 0)):
            b.store(constant(number, "i32"), b.gep(answer, offset, "i8"))
        b.ret(null)
    attribute = _word(b, _word(b, frame, ATTRIBUTES), 0)
    place = _word(b, _word(b, attribute, SCALAR), 0)
    of_pass = Entries(b, place, RECORD)
    room = Entries(b, of_pass.pointer("room"), ROOM)
    alone = b.atomic_add(room.at("users"), 1).eq(0)
    memory = b.variable(room["address"])
    with b.when(~alone):
        memory.value = b.call(of_pass.pointer("malloc"), of_pass["bytes"], returns="i64")
    _print_call(b, frame, of_pass, b.inttoptr((memory.value + (LINE - 1)) & -LINE, "ptr"))
    with b.when(~alone):
        b.call(of_pass.pointer("free"), memory.value, returns="void")
    b.atomic_add(room.at("users"), -1)
    b.ret(null)
    return module


def _print_call(b: Builder, frame: Value, of_pass: Entries, call: Value) -> None:
    """Makes the call of a pass at the beginning of its memory, and plays it."""
    given, made = (_word(b, frame, at, "i64") for at in (GIVEN, MADE))
    arguments, results = (_word(b, frame, at) for at in (ARGUMENTS, RESULTS))
    read, shared = of_pass["read"], of_pass["shared"]
    block = b.ptrtoint(call, "i64") + ((of_pass["words"] * 8 + (LINE - 1)) & -LINE)
    table, after = block + of_pass["table"], b.gep(of_pass.address, len(RECORD), "i64")
    next_place = b.variable(0)

    def add(number: Value) -> None:
        place = next_place.value
        b.store(number, b.gep(call, place, "i64"))
        next_place.value = place + 1

    for number in (of_pass["form"], table):
        add(number)
    for buffers, length in ((arguments, read), (results, made)):
        with b.loop(0, length) as i:
            add(_data(b, buffers, i))
    with b.loop(0, shared) as i:
        add(b.load(b.gep(after, i, "i64"), "i64"))
    seed = b.variable(of_pass["seed"])
    with b.when(given > read):
        seed.value = b.load(b.inttoptr(_data(b, arguments, read), "ptr"), "i64", align=4)
    last = {"block": block, "table": table, "seed": seed.value}
    for name in OF_CALL:
        add(last[name] if name in last else of_pass[name])
    with b.loop(0, of_pass["zeroed"]) as i:
        row = b.gep(after, shared + i * 2, "i64")
        begin = b.inttoptr(_data(b, results, b.load(row, "i64")), "ptr")
        numbers = b.load(b.gep(row, 1, "i64"), "i64") // 4  # sums have 32 bits or more
        with b.loop(0, numbers, b.lanes) as first:
            b.store_first(constant(0.0, b.vec), b.gep(begin, first), numbers - first)
    b.call(of_pass.pointer("play"), call, returns="void")


def _word(b: Builder, base: Value, offset: Operand, type: str = "ptr") -> Value:
    """A word of a structure."""
    return b.load(b.gep(base, offset, "i8"), type)


def _data(b: Builder, buffers: Value, number: Operand) -> Value:
    """The address of the numbers of a buffer, as a number."""
    return _word(b, b.load(b.gep(buffers, number, "i64"), "ptr"), DATA, "i64")
