"""A pass on a GPU as a recipe: launches whose arguments have no addresses yet.

``layer/gpu.py`` runs a pass once on a ``DeviceDraft``, whose arrays are parts of slots. What it
assigns, multiplies and launches becomes rows. A ``DeviceRecipe`` has these rows as tables, which a
native function plays (``engines.gpu.player``), with operations of the framework between them.
Shapes and strides determine a recipe, so calls of one form share it: they make arrays and pass
addresses.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from anycell.engines import gpu
from anycell.engines.gpu import Refused, Work, launch, player
from anycell.engines.gpu.moves import AXES, ELEMENTS, print_draws, print_move, print_sum
from anycell.engines.gpu.player import NUMBER, Argument, Launched, Tables
from anycell.engines.gpu.step import FILLED, Step, print_fill
from anycell.engines.gpu.text import Printed
from anycell.layer.arguments import Array
from anycell.layer.framework import DeviceFramework
from anycell.layer.recipe import dense
from anycell.layer.signature import FLAGS
from anycell.layer.twins import beside
from anycell.plan import Options, Plan
from anycell.plan.dtype import COUNT, FLAG, WORD, Number

_LINE = 256  # bytes to which arrays of a call's memory are aligned, as those of frameworks
_WORD = (1 << 64) - 1
SEED = "seed"  # the name of the words that random masks are drawn from, where they are an array
Shape = tuple[int, ...]


class Again(Exception):
    """The device has refused a kernel: the next choice takes its place."""


class Slot(NamedTuple):
    """An array of a pass, before it has an address.

    Attributes:
        kind: "given" by a call; "made" in each call; a "constant" of all calls; or a "number" of
            the call in the place of an address.
        name: of an array that is given.
        aligned: whether 16 divides its address.
        values: of a constant.
    """

    kind: str
    name: str = ""
    shape: Shape = ()
    strides: Shape = ()
    dtype: Number = FLAG
    aligned: bool = True
    values: Array = None

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.bytes


class OfCall(NamedTuple):
    """A number of a call, plus ``add``."""

    slot: int
    add: int = 0


class View:
    """A part of a slot, which slices, reshapes, adds and assigns as NumPy's arrays do.

    Attributes:
        strides, offset: in elements.
    """

    def __init__(
        self,
        draft: DeviceDraft,
        slot: int,
        shape: Shape,
        strides: Shape,
        dtype: Number,
        offset: int = 0,
    ) -> None:
        self.draft, self.slot, self.dtype, self.offset = draft, slot, dtype, offset
        self.shape, self.strides = tuple(shape), tuple(strides)

    def _part(self, shape: Iterable[int], strides: Iterable[int], offset: int = 0) -> View:
        where = tuple(shape), tuple(strides), self.dtype, self.offset + offset
        return View(self.draft, self.slot, *where)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def dense(self) -> bool:
        """Whether it is contiguous."""
        axes = zip(self.shape, self.strides, dense(self.shape), strict=True)
        return not self.size or all(n == 1 or a == b for n, a, b in axes)

    def same(self, other: View) -> bool:
        """Whether both are the same part of the same slot."""
        mine, others = ((v.slot, v.offset, v.shape, v.strides) for v in (self, other))
        return mine == others

    def __getitem__(self, index: Any) -> View:
        index = index if isinstance(index, tuple) else (index,)
        if Ellipsis in index:
            at = index.index(Ellipsis)
            missing = len(self.shape) + 1 - len(index)
            index = (*index[:at], *[slice(None)] * missing, *index[at + 1 :])
        shape, strides, offset = list[int](), list[int](), 0
        rest = [slice(None)] * (len(self.shape) - len(index) + index.count(None))
        axes = zip(self.shape, self.strides, strict=True)
        for i in (*index, *rest):
            n, stride = (1, self.size) if i is None else next(axes)  # None is a new axis
            i = slice(None) if i is None else i
            begin, end, _ = i.indices(n) if isinstance(i, slice) else (range(n)[i], 0, 1)
            offset += begin * stride
            if isinstance(i, slice):
                shape.append(max(0, end - begin))
                strides.append(stride)
        return self._part(shape, strides, offset)

    def __setitem__(self, index: Any, value: View | float) -> None:
        part = self[index]
        if isinstance(value, View) and value.same(part):
            return  # as after ``a[i] += b``, which has changed it
        self.draft.move(part, value)

    def __iadd__(self, other: View) -> View:
        self.draft.move(self, other, adds=True)
        return self

    def __add__(self, other: View) -> View:
        total = self.draft.new(self.shape, self.dtype)
        total[:] = self
        total += other
        return total

    def reshape(self, *shape: int) -> View:
        """The array in another shape; a copy where its strides allow no view."""
        if -1 in shape:
            rest = self.size // -math.prod(shape)
            shape = tuple(rest if n == -1 else n for n in shape)
        strides = _reshaped(self.shape, self.strides, shape)
        if strides is not None:
            return self._part(shape, strides)
        copy = self.draft.new(self.shape, self.dtype)
        copy[:] = self
        return copy.reshape(*shape)

    @property
    def mT(self) -> View:
        *shape, rows, columns = self.shape
        *strides, row, column = self.strides
        return self._part((*shape, columns, rows), (*strides, column, row))

    def sum(self, axis: int) -> View:
        """The sum of the rows of a matrix."""
        assert axis == 0
        return self.draft.rounded(self.draft.summed(self))


def _reshaped(old: Shape, strides: Shape, new: Shape) -> Shape | None:
    """The strides of an array in another shape, or None if that takes a copy."""
    if not math.prod(new):
        return dense(new)
    axes = [(n, stride) for n, stride in zip(old, strides, strict=True) if n > 1]
    # Runs of axes that are evenly spaced, the last one first: the elements and the last stride.
    runs: list[list[int]] = []
    for n, stride in reversed(axes):
        if runs and stride == runs[-1][0] * runs[-1][1]:
            runs[-1][0] *= n
        else:
            runs.append([n, stride])
    found, done = list[int](), 1  # of a run
    for n in reversed(new):
        if runs and done == runs[0][0]:
            del runs[0]
            done = 1
        found.append(done * runs[0][1] if runs else 1)
        done *= n
        if runs and runs[0][0] % done:
            return None
    return tuple(reversed(found))


class Placed(NamedTuple):
    """A view in a call: the number of its array, and shape, strides and offset of the part; None
    for the whole array.
    """

    entry: int
    part: tuple[Shape, Shape, int] | None


class Operation(NamedTuple):
    """A method of the host with arrays, which it runs between launches."""

    name: str
    arguments: Sequence[Any]  # views; placed ones in a recipe

    def each(self, of: Callable[[Any], Any]) -> Operation:
        """The operation on ``of`` each argument."""
        return self._replace(arguments=list(map(of, self.arguments)))

    def run(self, call: Call) -> None:
        getattr(call.host, self.name)(*map(call.array, self.arguments))


class Steps(NamedTuple):
    """A run of tier 3, whose launches depend on the host's graphs."""

    kernels: Step
    work: Work

    def each(self, of: Callable[[Any], Any]) -> Steps:
        """The run on ``of`` each array."""
        work = self.work
        there = [item for item in work.values.items() if item[1] is not None]
        values = {name: v if isinstance(v, int) else of(v) for name, v in there}
        spans = {n: span._replace(array=of(span.array)) for n, span in work.spans.items()}
        weights = list(map(of, work.weights))
        return self._replace(work=work._replace(values=values, spans=spans, weights=weights))

    def run(self, call: Call) -> None:
        work = self.each(call.array).work
        if work.draws is not None:
            draws = call.seed, call.stream + work.draws[1], *work.draws[2:]
            work = work._replace(draws=draws)
        (call.host.replay or gpu.run_plainly)(self.kernels, work._replace(host=call.host))


Row = Launched | Operation | Steps


class DeviceDraft:
    """A recipe that is being made: it has the operations of a framework that ``layer/gpu.py`` uses,
    on arrays without addresses.

    Args:
        host: makes arrays and multiplies when the recipe is run.
        arrays: that calls will give, laid out like these.

    Attributes:
        views: of these arrays.
        told: the name of the cell.
        cleared: the bytes of each array of zeros.
    """

    def __init__(self, host: DeviceFramework, plan: Plan, arrays: Mapping[str, Array]) -> None:
        self.host, self.told = host, plan.cell.name
        self.dtype, self.wide = plan.types.storage, plan.types.math
        self.slots = [Slot("number"), Slot("number"), Slot("made")]  # seed, stream, zeros
        self.seed, self.stream, self.zeroed = range(3)
        self.cleared = list[int]()
        self.rows: list[Row] = []
        self.views = {name: self._given(name, array) for name, array in arrays.items()}

    def _slot(self, slot: Slot) -> View:
        self.slots.append(slot)
        return View(self, len(self.slots) - 1, slot.shape, slot.strides, slot.dtype)

    def _given(self, name: str, array: Array) -> View:
        plain, strides = name not in FLAGS, self.host.strides(array)
        dtype = self.dtype if array.dtype == self.host.dtype else self.wide
        dtype = dtype if plain else FLAG
        # The recipe's key has the addresses of arrays but not those of flags, modulo 16.
        aligned = plain and self.host.pointer(array) % 16 == 0
        shape = tuple(array.shape)
        return self._slot(Slot("given", name, shape, tuple(strides), dtype, aligned))

    # -- arrays ------------------------------------------------------------------------------------

    def new(self, shape: Sequence[int], dtype: Number) -> View:
        return self._slot(Slot("made", "", tuple(shape), dense(tuple(shape)), dtype))

    def empty(self, shape: Sequence[int], wide: bool = False) -> View:
        return self.new(shape, self.wide if wide else self.dtype)

    def zeros(self, shape: Sequence[int], wide: bool = False) -> View:
        """An array of zeros. One launch at the beginning clears all of these."""
        return self._cleared(tuple(shape), self.wide if wide else self.dtype)

    def flags(self, count: int) -> View:
        return self._cleared((count,), COUNT)

    def _cleared(self, shape: Shape, dtype: Number) -> View:
        size, begin = dtype.bytes, self.zeros_end
        self.cleared.append(_lines(math.prod(shape) * size))
        return View(self, self.zeroed, shape, dense(shape), dtype, begin // size)

    @property
    def zeros_end(self) -> int:
        """The bytes of all arrays of zeros."""
        return sum(self.cleared)

    def numbers(self, values: Sequence[float]) -> View:
        made = self.host.numbers(values)
        return self._slot(Slot("constant", "", (len(values),), (1,), self.wide, values=made))

    def integers(self, draws: tuple[int, int, int, int]) -> View:
        """The words that random masks are drawn from: seed and stream are those of the call."""
        table = self.new((FILLED,), WORD)
        seed, stream, *rest = draws
        if not self.host.multiplies:  # seed and stream are in memory, as an array of the call
            if SEED not in self.views:
                self.views[SEED] = self._slot(Slot("given", SEED, (3,), (1,), COUNT))
            words = {"words": self.views[SEED], "stream": stream, "time": rest[0], "step": rest[1]}
            self.launch(print_draws(), {"table": table, **words}, (1, 1))
            return table
        numbers = [OfCall(self.seed, seed), OfCall(self.stream, stream), *rest]
        values = {f"value{n}": number for n, number in enumerate(numbers)}
        self.launch(print_fill(), {"table": table, **values}, (1, 1))
        return table

    def strides(self, array: View) -> Shape:
        return array.strides

    def rounded(self, array: View) -> View:
        if array.dtype == self.dtype and array.dense:
            return array
        made = self.empty(array.shape)
        made[:] = array
        return made

    def masked(self, x: View, mask: View) -> View:
        made = self.empty(x.shape)
        self.move(made, x, mask)
        return made

    def by_head(self, array: View, heads: int) -> View:
        """``[B, 1, heads * size]`` as ``[heads, B, size]``."""
        rows, _, width = array.shape
        row, _, column = array.strides
        size = width // heads
        return array._part((heads, rows, size), (size * column, row, column))

    # -- rows --------------------------------------------------------------------------------------

    def move(
        self, to: View, value: View | float, mask: View | None = None, adds: bool = False
    ) -> None:
        """Assigns to an array, see ``print_move``."""
        if not to.size:
            return
        view = value if isinstance(value, View) else None
        kind = None if view is None else view.dtype.triton
        printed = print_move(to.dtype.triton, kind, mask is not None, adds)
        extra = (1,) * (AXES - len(to.shape))
        _, n1, n2 = (*extra, *to.shape)
        values: dict[str, Any] = {"y": to, "count": to.size, "n1": n1, "n2": n2, "m": mask}
        values |= {f"y{i}": n for i, n in enumerate((*extra, *to.strides))}
        if view is None:
            (values["bits"],) = struct.unpack("i", struct.pack("f", value))
        else:
            values |= {"x": view} | {f"x{i}": n for i, n in enumerate(_spread(view, to.shape))}
        self.launch(printed, values, (-(-to.size // ELEMENTS), 1))

    def matmul(self, a: View, b: View, out: View) -> None:
        self.rows.append(Operation("matmul", (a, b, out)))

    def matmul_add(self, a: View, b: View, out: View) -> None:
        self.rows.append(Operation("matmul_add", (a, b, out)))

    def summed(self, array: View, total: View | None = None) -> View:
        """The sum of the rows of a matrix, in float32."""
        total = self.empty(array.shape[1:], wide=True) if total is None else total
        if not self.host.multiplies:  # few rows
            wide = self.empty(array.shape, wide=True)
            wide[:] = array
            (rows, columns), grid = array.shape, (-(-total.size // ELEMENTS), 1)
            values = {"y": total, "x": wide, "rows": rows, "columns": columns}
            self.launch(print_sum(), values, grid)
            return total
        self.rows.append(Operation("summed", (array, total)))
        return total

    def run(self, kernels: Step | Printed, work: Work, owner: Callable[[Refused], None]) -> int:
        """Adds a call; returns by how many turns the buffers that take turns will have moved on.

        Args:
            owner: remembers a refusal, or raises it.
        """
        if isinstance(kernels, Step):
            now = dict(work.values)  # which further calls will change
            self.rows.append(Steps(kernels, work._replace(values=now)))
            return work.steps + work.variant.backward
        self.launch(kernels, work.all_values(), gpu.grid(kernels, work.plan, work.batch), owner)
        return 1

    def launch(
        self,
        printed: Printed,
        values: Mapping[str, Any],
        grid: tuple[int, int],
        owner: Callable[[Refused], None] | None = None,
    ) -> None:
        """Adds a launch, whose kernel must fit on the device."""
        arguments = list[Argument]()
        for name, kind in printed.arguments[: len(printed.arguments) - len(printed.apart)]:
            value = values[name] if kind[0] == "*" else values.get(name, 0)
            if isinstance(value, View):
                offset = value.offset * value.dtype.bytes
                known = offset if self.slots[value.slot].aligned else 1
                arguments.append(Argument(value.slot, offset, known))
            else:
                slot, number = value if isinstance(value, OfCall) else (NUMBER, int(value))
                signed = (number + (1 << 63)) % (1 << 64) - (1 << 63)
                arguments.append(Argument(slot, signed, number))
        self.rows.append(Launched(printed, grid, tuple(arguments), owner))

    def beside(self, runs: Iterable[Callable[[], None]]) -> None:
        """Adds the rows of passes, see ``twins``."""
        begin, columns = len(self.rows), list[list[Row]]()
        for run in runs:
            run()
            columns.append(self.rows[begin:])
            del self.rows[begin:]
        self.rows.extend(beside(columns))

    def finish(self, results: Iterable[View]) -> DeviceRecipe:
        """The recipe of all rows so far, whose calls return these results.

        Raises:
            Refused, Again: if the device refuses a kernel.
        """
        apart = [self._apart(view) for view in results]
        if self.zeros_end:
            words = self.zeros_end // 4
            region = View(self, self.zeroed, (words,), (1,), self.wide)
            self.move(region, 0.0)
            self.rows.insert(0, self.rows.pop())
        for row in self.rows:
            if isinstance(row, Launched):
                try:
                    row.loaded(self.host.ordinal)
                except Refused as refused:
                    _refuse(row, refused)
        return DeviceRecipe(self, apart)

    def _apart(self, view: View) -> View:
        """A result, copied out of memory that it would keep alive."""
        if view.slot != self.zeroed:
            return view
        copy = self.new(view.shape, view.dtype)
        copy[:] = view
        return copy


def _refuse(one: Launched, refused: Refused) -> None:
    if one.owner is None:
        raise refused
    one.owner(refused)
    raise Again from refused


def _spread(value: View, shape: Shape) -> list[int]:
    """The strides of a value along three axes to which it is assigned, 0 where it repeats."""
    sizes = [*[1] * (AXES - len(value.shape)), *value.shape]
    strides = [*[0] * (AXES - len(value.shape)), *value.strides]
    wanted = [*[1] * (AXES - len(shape)), *shape]
    assert all(n in (1, m) for n, m in zip(sizes, wanted, strict=True)), (sizes, wanted)
    return [0 if n == 1 else stride for n, stride in zip(sizes, strides, strict=True)]


def _lines(size: int) -> int:
    return -(-size // _LINE) * _LINE


class Call:
    """A run of a recipe: its arrays, and the numbers that differ from call to call."""

    def __init__(self, recipe: DeviceRecipe, given: Mapping[str, Array], options: Options) -> None:
        self.host = host = recipe.host
        made = map(host.like, recipe.templates)
        bases = [*map(given.__getitem__, recipe.names), *recipe.constants, *made]
        bases.append(host.block(recipe.bytes))
        self.seed, self.stream = options.seed & _WORD, 2 * options.stream & _WORD
        self.addresses = recipe.pack(*host.pointers(bases), self.seed, self.stream)
        self.bases = bases + [host.typed(bases[-1], dtype) for dtype in recipe.dtypes]

    def array(self, placed: Placed) -> Array:
        """The framework's array that a view stands for."""
        entry, part = placed
        base = self.bases[entry]
        return base if part is None else self.host.part(base, *part)


class Launches:
    """Consecutive launches, played by one native call."""

    def __init__(self, tables: Tables, launches: Sequence[Launched]) -> None:
        self.tables, self.launches, self.play = tables, launches, player.compiled()

    def run(self, call: Call) -> None:
        given = self.tables.address, call.addresses, call.host.stream()
        result = self.play(*given)
        if result == player.NO_CONTEXT:  # a new thread
            launch.use_context(call.host.ordinal)
            result = self.play(*given)
        if result:
            self._raise(result, call.host)

    def _raise(self, result: int, host: DeviceFramework) -> None:
        """Raises what a result of ``play`` means."""
        if result == player.TROUBLE:
            host.trouble[0] = 0
            raise RuntimeError(gave_up(host))
        number, error = player.failed(result)
        one = self.launches[number]
        try:
            launch.check_launch(error, one.printed, one.grid)
        except Refused as refused:
            _refuse(one, refused)


def gave_up(host: DeviceFramework) -> str:
    """The error for programs of an earlier call that waited in vain."""
    return (
        "GPU kernels of an earlier call (tier 2) gave up: their programs, which must all run at "
        f"once, waited for one another for {host.patience / 1e9:g} s. The results of that call are "
        "NaN. Is the device shared, or a debugger attached? "
        f"Set {type(host).__module__}.{type(host).__qualname__}.tier = 3 to avoid such kernels."
    )


class DeviceRecipe:
    """A pass that calls run.

    Attributes:
        names: of the arrays that calls give.
        waits: whether programs of a kernel wait for others.
        templates: of the arrays that calls make and that outlive them; see ``Framework.like``.
        bytes: of all other memory of a call, and ``dtypes``, as what else operations see it.
        places: by slot, the number of its array in a call, and the bytes before it.
        results: where they are.
        again: drafts the pass for other arrays, by name.
    """

    again: Callable[[Mapping[str, Array]], Any]

    def __init__(self, draft: DeviceDraft, results: Sequence[View]) -> None:
        self.host, slots, self.told = draft.host, draft.slots, draft.told
        launched = [row.printed for row in draft.rows if isinstance(row, Launched)]
        self.waits = any(printed.cooperative for printed in launched)
        seen = {view.slot for view in results}
        lives = _lives(draft)
        used = {*lives, *seen}
        given = [s for s, slot in enumerate(slots) if slot.kind == "given" and s in used]
        made = [s for s, slot in enumerate(slots) if slot.kind == "made" and s in seen]
        constants = [s for s, slot in enumerate(slots) if slot.kind == "constant"]
        self.names = [slots[s].name for s in given]
        self.templates = [
            self.host.template(slots[s].shape, slots[s].dtype is draft.wide) for s in made
        ]
        self.constants = [slots[s].values for s in constants]
        sizes = {s: slot.bytes for s, slot in enumerate(slots) if slot.kind == "made"}
        sizes[draft.zeroed] = draft.zeros_end
        inside = {s: sizes[s] for s in lives if s in sizes and s not in seen}
        begins, self.bytes = _packed(inside, lives)
        order = [*given, *constants, *made]
        entries = {s: (i, 0) for i, s in enumerate(order)}
        entries |= {s: (len(order), begin) for s, begin in begins.items()}
        entries |= {draft.seed: (len(order) + 1, 0), draft.stream: (len(order) + 2, 0)}
        self.places = [entries.get(s, (NUMBER, 0)) for s in range(len(slots))]
        self.pack = struct.Struct(f"{len(order) + 1}q2Q").pack
        self.parts: list[Launches | Operation | Steps] = []
        self.slots, self.dtypes = slots, list[str]()  # of a block
        address = self.host.pointer(self.host.trouble) if self.waits else 0
        for launches, group in itertools.groupby(draft.rows, lambda r: isinstance(r, Launched)):
            rows: list[Any] = list(group)
            if launches:
                tables = Tables(rows, self.places, self.host.ordinal, address)
                self.parts.append(Launches(tables, rows))
                address = 0  # a call reads it once
            else:
                self.parts += [row.each(self._placed) for row in rows]
        self.results = list(map(self._placed, results))

    def _placed(self, view: View) -> Placed:
        """The place of a view in a call."""
        (entry, before), slot = self.places[view.slot], self.slots[view.slot]
        offset, name = before // view.dtype.bytes + view.offset, view.dtype.name
        block = len(self.names) + len(self.templates) + len(self.constants)
        if entry == block:
            if name not in self.dtypes:
                self.dtypes.append(name)
            entry += 1 + self.dtypes.index(name)
        elif (view.shape, view.strides, view.offset) == (slot.shape, slot.strides, 0):
            return Placed(entry, None)
        return Placed(entry, (view.shape, view.strides, offset))

    def run(self, given: Mapping[str, Array], options: Options) -> list[Array]:
        """Runs the pass; returns its results."""
        part = self.host.part
        if self.host.trace is not None:
            bases = self.host.trace(self, given, options)
        else:
            call = Call(self, given, options)
            for row in self.parts:
                row.run(call)
            bases = call.bases
        return [bases[n] if of is None else part(bases[n], *of) for n, of in self.results]


def _lives(draft: DeviceDraft) -> dict[int, tuple[int, int]]:
    """The numbers of the first and the last row that use a slot."""
    lives: dict[int, tuple[int, int]] = {}
    for n, row in enumerate(draft.rows):
        for slot in _slots(row):
            lives[slot] = lives.get(slot, (n, n))[0], n
    if draft.zeroed in lives:
        lives[draft.zeroed] = 0, len(draft.rows)
    return lives


def _slots(row: Row) -> list[int]:
    """The slots that a row uses."""
    if isinstance(row, Launched):
        return [slot for one in row.arguments for slot in (one.slot, one.less)]
    slots = list[int]()
    row.each(lambda view: slots.append(view.slot))
    return slots


def _packed(
    sizes: Mapping[int, int], lives: Mapping[int, tuple[int, int]]
) -> tuple[dict[int, int], int]:
    """The places of slots in the memory of a call, and its bytes: slots that are never used at the
    same time share memory.
    """
    begins, end = dict[int, int](), 0
    for slot in sorted(sizes, key=lambda s: -sizes[s]):
        first, last = lives[slot]
        others = [s for s in begins if lives[s][0] <= last and first <= lives[s][1]]
        begin = 0
        for other in sorted(others, key=lambda s: begins[s]):
            if begin + sizes[slot] <= begins[other]:
                break
            begin = max(begin, _lines(begins[other] + sizes[other]))
        begins[slot] = begin
        end = max(end, _lines(begin + sizes[slot]))
    return begins, end
