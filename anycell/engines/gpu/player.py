"""Plays launches from a table: one native function, printed as LLVM text, walks a run of launches.

    i64 play(run, addresses, stream)

``run`` is the address of a ``RUN`` row; ``addresses`` are those of the arrays of a call, and its
numbers, by slot. The arguments of a launch are made on the stack, so threads share nothing. The
driver is a table of addresses, which may be those of another driver's functions.
"""

from __future__ import annotations

import ctypes
import functools
import math
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from anycell.engines.cpu import isa, jit
from anycell.engines.cpu.ir import Module, Target, Value, constant
from anycell.engines.cpu.table import Entries
from anycell.engines.gpu import launch
from anycell.engines.gpu.refusals import Refused
from anycell.engines.gpu.text import Printed

RUN = "launches count places driver trouble".split()
LAUNCH = "cooperative handle grid_x grid_y grid_z threads shared".split()
LAUNCH += "first count".split()  # of PLACE
# The slot's entry plus ``offset``, minus the entry of the slot ``less``; the slot NUMBER is 0.
PLACE = "slot offset less".split()
DRIVER = {
    "launch": "cuLaunchKernel",
    "cooperative": "cuLaunchCooperativeKernel",
    "current": "cuCtxGetCurrent",
}
NUMBER = -1
MOST = 256  # arguments of a launch
# Results that are no errors of the driver: nothing has been launched.
NO_CONTEXT, TROUBLE = -1, -2
_CODE = 32  # bits of a result for the driver's error; above them is the number of the launch


class Argument(NamedTuple):
    """An argument of a launch, see ``PLACE``; ``known`` is a number that 16 divides if it is known
    to divide the argument.
    """

    slot: int
    offset: int
    known: int
    less: int = NUMBER


class Launched(NamedTuple):
    """A launch of a recipe.

    Attributes:
        grid: programs along each axis; along a third one the passes of twins.
        arguments: for each of the kernel's.
        owner: what to do if the device refuses it.
    """

    printed: Printed
    grid: tuple[int, ...]
    arguments: tuple[Argument, ...]
    owner: Callable[[Refused], None] | None = None

    @property
    def programs(self) -> int:
        """The programs that must run at once; 0 if they need not."""
        return math.prod(self.grid) if self.printed.cooperative else 0

    @property
    def unplaced(self) -> tuple[Any, ...]:
        """All but the addresses."""
        kinds = [kind for _, kind in self.printed.arguments]
        pairs = zip(self.arguments, kinds, strict=False)
        return self.printed, self.grid, *(None if kind[0] == "*" else one for one, kind in pairs)

    @property
    def aligned(self) -> frozenset[str]:
        """The names of the arguments that 16 divides."""
        return launch.aligned(self.printed, [one.known for one in self.arguments])

    def loaded(self, device: int) -> launch.Loaded:
        """The kernel on a device.

        Raises:
            Refused: if it does not fit, or its programs do not run at once.
        """
        kernel = launch.loaded(self.printed, self.aligned, device)
        if self.programs > kernel.together:
            why = f"{self.programs} programs do not run at once, {kernel.together} do"
            raise Refused(self.printed, why, self.programs)
        return kernel


_NOTHING = Argument(NUMBER, 0, 0)


class Tables:
    """Consecutive launches as numbers, for one device; they must outlive what plays them.

    Args:
        places: where each slot of an argument lies in a call: its entry, and what to add.
        trouble: the address of an int32 that must be 0; 0 if no kernel waits for others.
    """

    def __init__(
        self,
        launches: Sequence[Launched],
        places: Sequence[tuple[int, int]],
        device: int,
        trouble: int,
    ) -> None:
        rows, numbers = array("q"), array("q")
        for one in launches:
            binary, handle, _ = one.loaded(device)
            count = len(one.arguments) + binary.hidden
            assert count <= MOST, one.printed.name
            threads, first = 32 * binary.warps, len(numbers) // len(PLACE)
            grid = *one.grid, *[1] * (3 - len(one.grid))
            rows.extend(
                (one.printed.cooperative, handle, *grid, threads, binary.shared, first, count)
            )
            for slot, number, _, less in (*one.arguments, *[_NOTHING] * binary.hidden):
                pairs = [(NUMBER, 0) if s == NUMBER else places[s] for s in (slot, less)]
                (entry, offset), (other, before) = pairs
                numbers.extend((entry, offset + number - before, other))
        driver = launch.driver()
        functions = [getattr(driver, name) for name in DRIVER.values()]
        addresses = [ctypes.cast(f, ctypes.c_void_p).value or 0 for f in functions]
        table = array("q", addresses)
        self.kept, self.trouble = (rows, numbers, table, driver), trouble
        where = [part.buffer_info()[0] for part in (rows, numbers, table)]
        self.run = array("q", [where[0], len(launches), *where[1:], trouble])
        self.address = self.run.buffer_info()[0]


def failed(result: int) -> tuple[int, int]:
    """The number of the launch that failed, and the driver's error."""
    return result >> _CODE, result & ((1 << _CODE) - 1)


@functools.cache
def compiled() -> Callable[[int, bytes, int], int]:
    """``play`` as a callable: the addresses are packed 64-bit numbers."""
    target = isa.current()
    library = jit.compile(lambda: str(print_play(target)), ["play"], target, None)
    i64: Any = ctypes.c_int64
    return ctypes.CFUNCTYPE(i64, i64, ctypes.c_char_p, i64)(library.address("play"))


def print_play(target: Target) -> Module:
    """Prints the module."""
    module = Module(target)
    b = module.function("play", "ptr run, ptr addresses, ptr stream", "i64")
    run, addresses, stream = b.args
    table = Entries(b, run, RUN)
    driver = Entries(b, table.pointer("driver"), list(DRIVER))
    cells, parameters = b.alloca("i64", MOST), b.alloca("i64", MOST)
    one, null, status = constant(1, "i32"), Value("null", "ptr"), b.variable(0)
    with b.when(table["trouble"].ne(0)):
        trouble = b.load(table.pointer("trouble"), "i32")
        with b.when(trouble.ne(0)):
            b.ret(b.value(TROUBLE))
    b.store(b.value(0), cells)
    b.call(driver.pointer("current"), cells, returns="i32")
    with b.when(b.load(cells, "i64").eq(0)):
        b.ret(b.value(NO_CONTEXT))
    with b.loop(0, table["count"]) as n:
        row = Entries(b, b.gep(table.pointer("launches"), n * len(LAUNCH), "i64"), LAUNCH)
        with b.loop(0, row["count"]) as i:
            place = b.gep(table.pointer("places"), (row["first"] + i) * len(PLACE), "i64")
            entry = Entries(b, place, PLACE)
            number, cell = b.variable(entry["offset"]), b.gep(cells, i, "i64")
            with b.when(entry["slot"] >= 0):
                number.value += b.load(b.gep(addresses, entry["slot"], "i64"), "i64")
            with b.when(entry["less"] >= 0):
                number.value -= b.load(b.gep(addresses, entry["less"], "i64"), "i64")
            b.store(number.value, cell)
            b.store(b.ptrtoint(cell, "i64"), b.gep(parameters, i, "i64"))
        x, y, z, threads, shared = (
            b.trunc(row[name], "i32") for name in "grid_x grid_y grid_z threads shared".split()
        )
        given = row.pointer("handle"), x, y, z, threads, one, one, shared, stream, parameters
        with b.when(row["cooperative"].eq(0)) as otherwise:
            error = b.call(driver.pointer("launch"), *given, null, returns="i32")
            status.value = b.zext(error, "i64")
        with otherwise:  # refused, unless all programs can run at once
            error = b.call(driver.pointer("cooperative"), *given, returns="i32")
            status.value = b.zext(error, "i64")
        with b.when(status.value.ne(0)):
            b.ret((n << _CODE) | status.value)
    b.ret(b.value(0))
    return module
