"""A pass as a recipe: everything in its one native call except addresses, seeds and gangs.

Shapes and strides determine the tables with which the driver and the doors are called. So a recipe
is drafted once, with a ``View`` in place of each address, and kept; a call makes the arrays of its
results and passes addresses. The time of a layer of a few units is mostly spent here.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from anycell.engines import cpu
from anycell.engines.cpu.driver import OF_CALL
from anycell.layer import bounds
from anycell.layer.arguments import Array, Host
from anycell.plan import LINE, Options

if TYPE_CHECKING:
    from anycell.layer.run import Run

CHUNK = -1  # a size that is the rows of a chunk
_RECIPES = 512  # the largest number of passes that are kept
_WORD = (1 << 64) - 1  # a seed is 64 bits, signed or not


class View(NamedTuple):
    """An array of a pass, or a part of one, before it has an address.

    Attributes:
        slot: which array.
        shape, strides: of the part, in elements.
        size: bytes of an element.
        offset: bytes from the array's first element to the part's.
        time, window: for an operand of a product, the bytes from step to step, in the sequence or
            in the current segment.
    """

    slot: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    size: int
    offset: int = 0
    time: int = 0
    window: int = 0

    @property
    def T(self) -> View:
        """The transpose of a matrix."""
        return self._replace(shape=self.shape[::-1], strides=self.strides[::-1])

    def at(self, i: int) -> View:
        """A part along the first axis, without that axis."""
        offset = self.offset + i * self.strides[0] * self.size
        return self._replace(shape=self.shape[1:], strides=self.strides[1:], offset=offset)

    def columns(self, begin: int, end: int) -> View:
        """The columns from ``begin`` to ``end``, along the last axis."""
        offset = self.offset + begin * self.strides[-1] * self.size
        return self._replace(shape=(*self.shape[:-1], end - begin), offset=offset)


Row = dict[str, View | int]  # of a table, by names: numbers, and views that will be addresses


class Recipe:
    """A pass that is drafted once, and then run by ``run``.

    Attributes:
        views: of the arrays that calls give, by name.
        cells: the tables, one after the other.
        arrays: for each place of an address there, the number of the array: its index among the
            addresses of a call, or beyond them for memory that is kept.
        aliases: arrays that a call makes whose memory may be that of a given one, which the pass
            has read by then: from the index of the given array to the number of the other.
        places: rows of ``driver.PLACE`` for the addresses of a call.
        fastened: the same for memory that is kept, whose addresses the tables have already.
    """

    def __init__(self, host: Host, arrays: Mapping[str, Array], options: Options) -> None:
        self.host, self.options, self.cells = host, options, list[int]()
        self.sources: list[tuple[Any, ...]] = [(kind,) for kind in OF_CALL]
        self.kept: list[tuple[object, cpu.check.Bounds]] = []
        self.places = list[tuple[int, int, int]]()  # rows of ``driver.PLACE``
        self.bytes = 0  # of memory that is given back
        self.aliases = dict[int, int]()
        self.views = {}
        for name, given in arrays.items():
            self.views[name] = self._slot(
                ("given", name), given.shape, host.strides(given), given.dtype.itemsize
            )

    # ---- the draft -------------------------------------------------------------------------------
    def _slot(
        self, source: tuple[Any, ...], shape: tuple[int, ...], strides: tuple[int, ...], size: int
    ) -> View:
        self.sources.append(source)
        return View(len(self.sources) - 1, tuple(shape), tuple(strides), size)

    def new(self, shape: tuple[int, ...], how: str = "empty", wide: bool = False) -> View:
        """An array that each call makes: "empty", "zeros" or "lasting"."""
        host = self.host.wide if wide else self.host
        if how == "lasting" and math.prod(shape) * host.dtype.itemsize < cpu.memory.SMALL:
            how = "empty"
        what: Any = shape
        if how == "empty":
            how, what = "like", host.template(shape)
        return self._slot(("new", how, wide, what), shape, dense(shape), host.dtype.itemsize)

    def constant(self, values: Array) -> View:
        """An array that all calls share and only read."""
        dtype = values.dtype.itemsize
        return self._slot(("constant", values), values.shape, self.host.strides(values), dtype)

    def keep(self, values: object, first: int, last: int) -> View:
        """Memory that the recipe keeps alive, with its address, ``first``, fixed in the tables."""
        self.kept.append((values, (first, last)))
        return self._slot(("kept", first), (last - first,), (1,), 1)

    def buffer(self, shape: tuple[int, ...], size: int) -> View:
        """Memory, aligned to a cache line, that is given back after the call."""
        view = View(0, shape, dense(shape), size, self.bytes)
        self.bytes += -(-math.prod(shape) * size // LINE) * LINE
        return view

    def append(self, cells: list[int]) -> int:
        """Adds a table; returns its place."""
        self.cells += cells
        return len(self.cells) - len(cells)

    def append_row(self, names: Sequence[str], row: Row) -> int:
        """Adds a row whose entries have these names, in order; returns its place."""
        place = self.append([0] * len(names))
        self.put_all(place, [row[name] for name in names])
        return place

    def put(self, place: int, value: View | int) -> None:
        """Sets an entry of a table to a number, or to the address that a view will have."""
        if isinstance(value, View):
            self.places.append((place, value.slot, value.offset))
        else:
            self.cells[place] = value

    def put_all(self, place: int, values: Sequence[View | int]) -> None:
        """Sets consecutive entries."""
        for i, value in enumerate(values):
            self.put(place + i, value)

    def entry(self, place: int) -> View:
        """The address of a number in the tables."""
        return self.of_call("table")._replace(offset=8 * place)

    def of_call(self, kind: str) -> View:
        """A number of each call: the address of its "table" (the memory for the tables) or of its
        "gang" of threads, see ``pool.gang``; or, of its random masks, the "first_row" among those
        of the batch, the "seed" or the "stream".
        """
        return View(OF_CALL.index(kind), (), (), 8)

    def finish(self, dtype: str, driver: int, runs: Sequence[Run]) -> Recipe:
        """Ends the draft.

        Args:
            dtype: of the plan.
            driver: place of the driver's table.
            runs: the passes, which keep their kernels loaded.
        """
        # Slots are sorted by where their arrays come from.
        order = ["given", "new", "constant", *OF_CALL, "kept"]
        kinds = [source[0] for source in self.sources]
        slots = sorted(range(len(kinds)), key=lambda slot: order.index(kinds[slot]))
        self.place = {slot: i for i, slot in enumerate(slots)}
        self.arrays = {at: self.place[slot] for at, slot, _ in self.places}
        places, self.fastened = list[tuple[int, int, int]](), list[tuple[int, int, int]]()
        for at, slot, offset in self.places:
            if kinds[slot] == "kept":
                self.cells[at] = self.sources[slot][1] + offset
            (self.fastened if kinds[slot] == "kept" else places).append(
                (at, self.place[slot], offset)
            )
        self.places = places
        of = {kind: [self.sources[s] for s in slots if kinds[s] == kind] for kind in order}
        self.names = [name for _, name in of["given"]]
        self.hows = [how for _, how, _, _ in of["new"]]
        self.made = [
            (getattr(self.host.wide if wide else self.host, how), what)
            for _, how, wide, what in of["new"]
        ]
        self.first = len(self.names)
        self.constants = [values for _, values in of["constant"]]
        self.fixed = [self.host.pointer(values) for values in self.constants]
        self.template = array("q", self.cells)
        self.flat = array("q", [number for row in places for number in row])
        (template, length), (rows, _) = self.template.buffer_info(), self.flat.buffer_info()
        self.form = array("q", [template, length, rows, len(places), driver])
        self.address, _ = self.form.buffer_info()
        self.pack = struct.Struct(f"{2 + len(slots) - len(of['kept']) - 2}q2Q").pack
        self.table = self.buffer((length,), 8).offset
        self.native = cpu.driver.compiled(dtype, cpu.isa.current()).play
        self.runs = runs
        return self

    # ---- a call ----------------------------------------------------------------------------------
    def run(self, given: list[Array], options: Options) -> list[Array]:
        """Runs the pass.

        Args:
            given: the arrays of ``names``.

        Returns:
            the arrays that it made, by ``number``.
        """
        if self.host.play is not None:
            return self.host.play(self, given, options)
        made = [make(what) for make, what in self.made]
        block = cpu.scratch.take(self.bytes)
        gang = cpu.pool.gang(options.threads) if options.threads > 1 else 0
        address, pointers = block.address, self.host.pointers(given + made)
        table = address + self.table
        of_call = address, table, gang, 0, options.seed & _WORD, options.stream
        call = self.pack(self.address, table, *pointers, *self.fixed, *of_call)
        if cpu.check.ON:
            bounds.check_pass(self, call, [*given, *made, *self.constants], block)
        self.native(call)
        cpu.scratch.give_back(block)
        return made

    def number(self, view: View) -> int:
        """The number, among the arrays that a call makes, of a view that ``new`` returned."""
        return self.place[view.slot] - self.first


def dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous array."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


known: dict[tuple[Any, ...], Any] = {}


def recipe_of(key: tuple[Any, ...], draft: Callable[[], Any]) -> Any:
    """Looks up a draft, or makes it and keeps it."""
    key = key, cpu.isa.current(), cpu.pool.FORKED
    try:
        return known[key]
    except KeyError:
        if len(known) >= _RECIPES:
            known.clear()
        return known.setdefault(key, draft())
