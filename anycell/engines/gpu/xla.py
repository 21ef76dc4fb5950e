"""Prints the handler through which XLA plays a recipe of launches, on its own stream.

    XLA_FFI_Error *handler(XLA_FFI_CallFrame *frame)

The arguments and results of a call are the arrays of the recipe, in its order; the last result is
the memory of the call. The attribute is the address of a ``RECORD``, which lives as long as the
process; so the handler's name is another one in each process. `engines.cpu.xla` has the offsets of
the frame.

A framework may not know sizes while it traces a program. Then the attribute is a form, by which the
handler finds the record, see there. One argument comes before the others, whose first two axes are
the sizes; and the handler asks XLA for the memory, whose size no program could compute.
"""

from __future__ import annotations

import ctypes
import functools
from array import array

from anycell.engines.cpu import isa, jit
from anycell.engines.cpu.ir import Builder, Module, Operand, Target, Value, constant
from anycell.engines.cpu.table import Entries
from anycell.engines.cpu.xla import (
    API,
    ARGUMENTS,
    ATTRIBUTES,
    GIVEN,
    MADE,
    NUMBERS,
    PROCESS,
    RESULTS,
    answer,
    data,
    error,
    print_find,
    print_form,
    process,
    word,
)
from anycell.engines.gpu.player import RUN, TROUBLE, Tables, print_play

CONTEXT = 24  # in a call frame
# Among XLA's functions. The arguments of each begin with their bytes, an extension and the context
# of the frame, ``OWN`` bytes; the result is the last one.
STREAM_GET, ALLOCATE, FREE, OWN = 80, 120, 128, 24
NUMBER = 8  # in an attribute that is a scalar, the address of its number
COMMAND_BUFFER = 1  # a trait: XLA may capture the call, and replay it
# ``failed`` is the last result of ``play`` that was not 0, ``bytes`` those of the memory of a call;
# the others are addresses.
RECORD = "run failed refusal trouble bytes".split()
MOST = 256  # arrays of a call
TEXT = 512  # bytes of a message, which begins with an error of three digits
ALIGNED = 16  # bytes, the most that XLA grants
NO_RECORD = (
    "anycell has no kernels for these sizes, see the errors above; layers within "
    "anycell.keras.step_by_step() need none."
)


class Record:
    """A pass as the handler needs to know it.

    Args:
        told: describes the pass in an error.
        gave_up: the error for programs that waited in vain.
        size: bytes of the memory of a call.
    """

    def __init__(self, tables: Tables, told: str, gave_up: str, size: int) -> None:
        refusal = f"000 is the error of the CUDA driver at a launch of {told}."
        texts = [ctypes.create_string_buffer(t.encode(), TEXT) for t in (refusal, gave_up)]
        self.kept = tables, texts
        self.numbers = array("q", [tables.address, 0, *map(ctypes.addressof, texts), size])
        self.address = self.numbers.buffer_info()[0]

    @property
    def failed(self) -> int:
        """The last result of ``play`` that was not 0."""
        return self.numbers[RECORD.index("failed")]


@functools.cache
def handler(captured: bool, forms: bool = False) -> int:
    """The address of the handler, for calls that XLA may capture or may not, and for those that
    have records or forms.
    """
    target, traits = isa.current(), COMMAND_BUFFER * captured
    text = functools.partial(print_handler, target, traits, forms)
    return jit.compile(lambda: str(text()), ["handler"], target, None).address("handler")


def print_handler(target: Target, traits: int, forms: bool) -> Module:
    """Prints the module."""
    module = print_play(target)
    if forms:
        print_find(module)
    b = module.function("handler", "ptr frame", "ptr")
    (frame,), null = b.args, Value("null", "ptr")
    answer(b, frame, traits)
    stream = _asked(b, frame, STREAM_GET, 0)
    record, first = _record(b, frame, forms), int(forms)
    addresses = b.alloca("i64", MOST)
    given, made = (word(b, frame, at, "i64") for at in (GIVEN, MADE))
    arguments, results = (word(b, frame, at) for at in (ARGUMENTS, RESULTS))
    with b.loop(first, given) as i:
        b.store(data(b, arguments, i), b.gep(addresses, i - first, "i64"))
    with b.loop(0, made) as i:
        b.store(data(b, results, i), b.gep(addresses, given - first + i, "i64"))
    if forms:
        memory = b.variable(0)
        with b.when(record["bytes"].ne(0)):
            block = _asked(b, frame, ALLOCATE, record["bytes"], ALIGNED, 0)
            memory.value = b.ptrtoint(block, "i64")
        b.store(memory.value, b.gep(addresses, given - first + made, "i64"))
    status = b.call("play", record.pointer("run"), addresses, stream)
    if forms:
        with b.when(memory.value.ne(0)):  # what has been launched runs before its next use
            _asked(b, frame, FREE, record["bytes"], memory.value)
    with b.when(status.eq(0)):
        b.ret(null)
    record["failed"] = status
    with b.when(status.eq(TROUBLE)):
        b.store(constant(0, "i32"), Entries(b, record.pointer("run"), RUN).pointer("trouble"))
        b.ret(error(b, frame, record.pointer("trouble")))
    text, code = b.alloca("i8", TEXT), status & 0xFFFF
    with b.loop(0, TEXT) as i:
        b.store(b.load(b.gep(record.pointer("refusal"), i, "i8"), "i8"), b.gep(text, i, "i8"))
    for place, unit in enumerate((100, 10, 1)):
        b.store(b.trunc(code // unit % 10 + ord("0"), "i8"), b.gep(text, place, "i8"))
    b.ret(error(b, frame, text))
    return module


def _asked(b: Builder, frame: Value, function: int, *numbers: Operand) -> Value:
    """The last of the arguments of one of XLA's functions, after it has run. An error of XLA is
    that of the handler.
    """
    words = [OWN + 8 * len(numbers), 0, word(b, frame, CONTEXT, "i64"), *numbers]
    asked = b.alloca("i64", len(words))
    for n, number in enumerate(words):
        b.store(b.value(number), b.gep(asked, n, "i64"))
    refused = b.call(word(b, word(b, frame, API), function), asked, returns="ptr")
    with b.when(b.ptrtoint(refused, "i64").ne(0)):
        b.ret(refused)
    return b.load(b.gep(asked, len(words) - 1, "i64"), "ptr")


def _record(b: Builder, frame: Value, forms: bool) -> Entries:
    """The record of a call."""
    attribute = word(b, word(b, frame, ATTRIBUTES), 0)
    if not forms:
        return Entries(b, word(b, word(b, attribute, NUMBER), 0), RECORD)
    unknown = b.module.table([*NO_RECORD.encode(), 0], "i8")
    known = Entries(b, b.inttoptr(b.value(process().address), "ptr"), PROCESS)
    record = print_form(b, frame, known, word(b, attribute, NUMBERS))
    with b.when(record.eq(0)):
        b.ret(error(b, frame, unknown))
    return Entries(b, b.inttoptr(record, "ptr"), RECORD)
