"""Prints the handler through which XLA plays a recipe of launches, on its own stream.

    XLA_FFI_Error *handler(XLA_FFI_CallFrame *frame)

The arguments and results of a call are the arrays of the recipe, in its order. The attribute is the
address of a ``RECORD``, which lives as long as the process; so the handler's name is another one in
each process. `engines.cpu.xla` has the offsets of the frame.
"""

from __future__ import annotations

import ctypes
import functools
from array import array

from anycell.engines.cpu import isa, jit
from anycell.engines.cpu.ir import Module, Target, Value, constant
from anycell.engines.cpu.table import Entries
from anycell.engines.cpu.xla import (
    API,
    ARGUMENTS,
    ATTRIBUTES,
    GIVEN,
    MADE,
    RESULTS,
    answer,
    data,
    error,
    word,
)
from anycell.engines.gpu.player import RUN, TROUBLE, Tables, print_play

CONTEXT = 24  # in a call frame
STREAM_GET = 80  # among XLA's functions
# Its arguments: their bytes, an extension, the context of the frame; and the result.
STREAM_BYTES, ASKED, STREAM = 32, 16, 24
NUMBERS = 8  # in an attribute that is a scalar, the address of its number
COMMAND_BUFFER = 1  # a trait: XLA may capture the call, and replay it
# ``failed`` is the last result of ``play`` that was not 0; the others are addresses.
RECORD = "run failed refusal trouble".split()
MOST = 256  # arrays of a call
TEXT = 512  # bytes of a message, which begins with an error of three digits


class Record:
    """A pass as the handler needs to know it.

    Args:
        told: describes the pass in an error.
        gave_up: the error for programs that waited in vain.
    """

    def __init__(self, tables: Tables, told: str, gave_up: str) -> None:
        refusal = f"000 is the error of the CUDA driver at a launch of {told}."
        texts = [ctypes.create_string_buffer(t.encode(), TEXT) for t in (refusal, gave_up)]
        self.kept = tables, texts
        self.numbers = array("q", [tables.address, 0, *map(ctypes.addressof, texts)])
        self.address = self.numbers.buffer_info()[0]

    @property
    def failed(self) -> int:
        """The last result of ``play`` that was not 0."""
        return self.numbers[RECORD.index("failed")]


@functools.cache
def handler(captured: bool) -> int:
    """The address of the handler, for calls that XLA may capture or may not."""
    target, traits = isa.current(), COMMAND_BUFFER * captured
    library = jit.compile(lambda: str(print_handler(target, traits)), ["handler"], target, None)
    return library.address("handler")


def print_handler(target: Target, traits: int) -> Module:
    """Prints the module."""
    module = print_play(target)
    b = module.function("handler", "ptr frame", "ptr")
    (frame,), null = b.args, Value("null", "ptr")
    answer(b, frame, traits)
    asked = b.alloca("i64", STREAM_BYTES // 8)
    context = word(b, frame, CONTEXT, "i64")
    for offset, number in ((0, STREAM_BYTES), (8, 0), (ASKED, context), (STREAM, 0)):
        b.store(b.value(number), b.gep(asked, offset, "i8"))
    refused = b.call(word(b, word(b, frame, API), STREAM_GET), asked, returns="ptr")
    with b.when(b.ptrtoint(refused, "i64").ne(0)):
        b.ret(refused)  # it is XLA's own
    attribute = word(b, word(b, frame, ATTRIBUTES), 0)
    record = Entries(b, word(b, word(b, attribute, NUMBERS), 0), RECORD)
    addresses = b.alloca("i64", MOST)
    given, made = (word(b, frame, at, "i64") for at in (GIVEN, MADE))
    arguments, results = (word(b, frame, at) for at in (ARGUMENTS, RESULTS))
    with b.loop(0, given) as i:
        b.store(data(b, arguments, i), b.gep(addresses, i, "i64"))
    with b.loop(0, made) as i:
        b.store(data(b, results, i), b.gep(addresses, given + i, "i64"))
    status = b.call("play", record.pointer("run"), addresses, word(b, asked, STREAM))
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
