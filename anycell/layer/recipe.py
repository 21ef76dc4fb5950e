"""A pass as a recipe: everything in its one native call except addresses, seeds and gangs.

Shapes and strides determine the tables with which the driver and the doors are called. So a recipe
is drafted once, with a ``View`` in place of each address, and kept; a call makes the arrays of its
results and passes addresses. The time of a layer of a few units is mostly spent here.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from anycell.engines import cpu
from anycell.engines.cpu.driver import CALL, OBJECTS, OF_CALL
from anycell.layer.arguments import Array
from anycell.layer.framework import Framework
from anycell.plan import LINE, Options, Plan
from anycell.recent import add_recent

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

    def rows(self, begin: int, end: int) -> View:
        """A part along the first axis, from ``begin`` to ``end``."""
        offset = self.offset + begin * self.strides[0] * self.size
        return self._replace(shape=(end - begin, *self.shape[1:]), offset=offset)

    def columns(self, begin: int, end: int) -> View:
        """The columns from ``begin`` to ``end``, along the last axis."""
        offset = self.offset + begin * self.strides[-1] * self.size
        return self._replace(shape=(*self.shape[:-1], end - begin), offset=offset)


Row = dict[str, View | int]  # of a table, by names: numbers, and views that will be addresses


class Given(NamedTuple):
    """An array that the call brings, by this name."""

    name: str


class Made(NamedTuple):
    """An array that each call makes, by a function of the host."""

    how: str
    wide: bool
    what: Any  # the function's argument


class Constant(NamedTuple):
    """An array that all calls share and only read."""

    values: Array


class OfCall(NamedTuple):
    """A number of the call in the place of an address, see ``driver.OF_CALL``."""

    kind: str


class Fixed(NamedTuple):
    """Memory that the recipe keeps alive, at this address."""

    address: int


Source = Given | Made | Constant | OfCall | Fixed


class Placed(NamedTuple):
    """The places in a recipe where the tables of a pass begin.

    Attributes:
        kernel, plan: of the pass, whose kernel stays loaded.
        threads: the most that the pass takes.
        base: of the table of the door.
        firsts: of the entries of each direction, from ``base``.
        table: of the driver's table.
        again: the pass that computes the states of a segment again.
    """

    kernel: cpu.Kernel
    plan: Plan
    threads: int
    base: int
    firsts: list[int]
    table: int
    again: Placed | None


class Draft:
    """A recipe that is being made.

    Attributes:
        views: of the arrays that calls give, by name.
        cells: the tables, one after the other.
        places: rows of ``driver.PLACE``, with slots for addresses.
        buffers: the bytes of each buffer, which is memory that is given back after a call.
    """

    def __init__(self, host: Framework, arrays: Mapping[str, Array], options: Options) -> None:
        self.host, self.options, self.cells = host, options, list[int]()
        self.sources: list[Source] = [OfCall(kind) for kind in OF_CALL]
        self.kept: list[tuple[object, cpu.check.Bounds]] = []
        self.places = list[tuple[int, int, int]]()
        self.buffers = list[int]()
        self.views = {}
        for name, values in arrays.items():
            strides, size = host.strides(values), values.dtype.itemsize
            view = self._slot(Given(name), values.shape, strides, size)
            self.views[name] = view._replace(offset=size * host.offset(values))

    def _slot(
        self, source: Source, shape: tuple[int, ...], strides: tuple[int, ...], size: int
    ) -> View:
        self.sources.append(source)
        return View(len(self.sources) - 1, tuple(shape), tuple(strides), size)

    def new(self, shape: tuple[int, ...], how: str = "empty", wide: bool = False) -> View:
        """An array that each call makes: "empty", "zeros" or "lasting"."""
        host = self.host.wide if wide else self.host
        if how == "lasting" and math.prod(shape) * host.dtype.itemsize < cpu.memory.SMALL:
            how = "empty"
        source = Made("like", wide, host.template(shape)) if how == "empty" else None
        return self._slot(
            source or Made(how, wide, shape), shape, dense(shape), host.dtype.itemsize
        )

    def constant(self, values: Array) -> View:
        """An array that all calls share and only read."""
        dtype = values.dtype.itemsize
        return self._slot(Constant(values), values.shape, self.host.strides(values), dtype)

    def keep(self, values: object, first: int, last: int) -> View:
        """Memory that the recipe keeps alive, with its address, ``first``, fixed in the tables."""
        self.kept.append((values, (first, last)))
        return self._slot(Fixed(first), (last - first,), (1,), 1)

    def buffer(self, shape: tuple[int, ...], size: int) -> View:
        """Memory, aligned to a cache line, that is given back after the call."""
        view = View(0, shape, dense(shape), size, self.bytes)
        self.buffers.append(-(-math.prod(shape) * size // LINE) * LINE)
        return view

    @property
    def bytes(self) -> int:
        """The size of all buffers."""
        return sum(self.buffers)

    def append(self, cells: list[int]) -> int:
        """Adds a table; returns its place."""
        self.cells.extend(cells)
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


class Recipe:
    """A pass whose draft is finished, to be run by ``run``.

    Args:
        dtype: of the plan.
        driver: place of the driver's table.
        passes: where their tables lie.
        check: see ``bounds.check_pass``.
        again: drafts the pass for other arrays, by name; for the passes of layers.
        overwrites: by the names of given arrays which the pass has read by then, the arrays that a
            call makes whose memory may be theirs.

    Attributes:
        names: of the arrays that calls give, in order.
        made: the functions that make the arrays of a call, with their arguments; ``hows`` has the
            functions' names, ``dtypes`` the dtypes of the arrays.
        arrays: for each place of an address in the tables, the number of the array: its index among
            the addresses of a call, or beyond them for memory that is kept.
        aliases: ``overwrites``, from the index of the given array to the number of the other.
        places: rows of ``driver.PLACE`` for the addresses of a call; ``flat`` joins them.
        fastened: the same for memory that is kept, whose addresses the tables have already.
    """

    def __init__(
        self,
        draft: Draft,
        dtype: str,
        driver: int,
        passes: Sequence[Placed],
        check: Check,
        again: Callable[[Mapping[str, Array]], Any] | None = None,
        overwrites: Mapping[str, View] | None = None,
    ) -> None:
        self.host, self.options, self.kept = draft.host, draft.options, draft.kept
        self.passes, self.check, self.again = passes, check, again
        # Addresses are sorted by where their arrays come from.
        order = [Given, Made, Constant, OfCall, Fixed]
        slots = sorted(enumerate(draft.sources), key=lambda item: order.index(type(item[1])))
        sources = dict(slots)
        self.place = {slot: i for i, slot in enumerate(sources)}
        self.arrays = {at: self.place[slot] for at, slot, _ in draft.places}
        self.fastened, self.places = list[Address](), list[Address]()
        cells = list(draft.cells)
        for at, slot, offset in draft.places:
            source = sources[slot]
            if isinstance(source, Fixed):
                cells[at] = source.address + offset
            rows_of = self.fastened if isinstance(source, Fixed) else self.places
            rows_of.append((at, self.place[slot], offset))
        self.names = [s.name for s in sources.values() if isinstance(s, Given)]
        pairs = (overwrites or {}).items()
        self.aliases = {self.names.index(name): self.number(view) for name, view in pairs}
        made = [s for s in sources.values() if isinstance(s, Made)]
        self.hows = [s.how for s in made]
        hosts = [self.host.wide if s.wide else self.host for s in made]
        self.made = [(getattr(h, s.how), s.what) for h, s in zip(hosts, made, strict=True)]
        self.dtypes = [h.dtype for h in hosts]
        self.constants = [s.values for s in sources.values() if isinstance(s, Constant)]
        self.fixed = [self.host.pointer(values) for values in self.constants]
        self.template = array("q", cells)
        self.flat = array("q", [number for row in self.places for number in row])
        (template, length), (rows, _) = self.template.buffer_info(), self.flat.buffer_info()
        self.head = array("q", [template, length, rows, len(self.places), driver])
        self.address, _ = self.head.buffer_info()
        # Seed and stream are unsigned, all other words of a call are not.
        arrays = len(self.names) + len(self.made) + len(self.constants)
        numbers = len((*OBJECTS, *CALL, *OF_CALL)) + arrays
        self.pack = struct.Struct(f"{numbers - 2}q2Q").pack
        self.table = draft.buffer((length,), 8).offset
        self.bytes = draft.bytes
        functions = cpu.driver.compiled(dtype, cpu.isa.current())
        self.native, self.native_of_objects = functions.execute, functions.execute_objects

    def run(self, arrays: Sequence[Array], options: Options) -> list[Array]:
        """Runs the pass.

        Args:
            arrays: the arrays of ``names``.

        Returns:
            the arrays that it made, by ``number``.
        """
        if self.host.trace is not None:
            return self.host.trace(self, arrays, options)
        made = [make(what) for make, what in self.made]
        block = cpu.scratch.take(self.bytes)
        gang = cpu.pool.gang(options.threads) if options.threads > 1 else 0
        address, table = block.address, block.address + self.table
        # The fields of OF_CALL; a named tuple would take a hundredth of a small call to make.
        of_call = address, table, gang, 0, options.seed & _WORD, options.stream
        after = 0 if cpu.check.ON else self.host.objects
        if after:  # native code reads the addresses, in a tenth of the time
            pointers: Iterable[int] = (*map(id, arrays), *map(id, made))
        else:
            pointers = self.host.pointers([*arrays, *made])
        objects = len(arrays) + len(made) if after else 0
        call = self.pack(objects, after, self.address, table, *pointers, *self.fixed, *of_call)
        if cpu.check.ON:
            self.check(self, call, [*arrays, *made, *self.constants], block)
        self.native_of_objects(call)
        cpu.scratch.give_back(block)
        return made

    def number(self, view: View) -> int:
        """The number, among the arrays that a call makes, of a view that ``new`` returned."""
        return self.place[view.slot] - len(self.names)


Address = tuple[int, int, int]  # a row of ``driver.PLACE``
Check = Callable[[Recipe, bytes, Sequence[Array], cpu.Block], None]


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
        return add_recent(known, key, draft(), _RECIPES)


def forget(key: tuple[Any, ...]) -> None:
    """Drops a draft."""
    known.pop((key, cpu.isa.current(), cpu.pool.FORKED), None)
