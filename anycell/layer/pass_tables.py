"""A pass in a recipe: the table of its kernel's door, and the driver's."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from anycell.engines import cpu
from anycell.engines.cpu import driver
from anycell.layer import heuristics
from anycell.layer.arguments import Kept
from anycell.layer.bounds import check_pass
from anycell.layer.framework import Framework
from anycell.layer.heuristics import Projection
from anycell.layer.products import kind_of
from anycell.layer.recipe import CHUNK, Draft, Placed, Recipe, Row, View
from anycell.layer.schedule import segment_steps
from anycell.layer.signature import direction
from anycell.plan import CODES, Options, Plan, multiplies_input, padded

Views = Mapping[str, View]


class PassTables:
    """The table of a pass of a layer for the door, its products, and what both follow from.

    Args:
        views: the arrays of the call, by the names of ``signature``; None for ``draft.views``.
        packed: returns the memory of packed weights from its size; None for memory of the call.

    Attributes:
        directions: what each direction learns and starts from, see ``signature.direction``.
        base: where the table of the door begins in the recipe.
        chunk: the steps of a chunk of the projection.
        segment: the number of steps whose values the backward pass needs at the same time.
        projection: where the matmul of the input is computed; ``single`` says whether it is
            ``SINGLE``, and ``inputs`` is the number of columns that the kernel multiplies.
        parts, bytes_packed: the threads, and the bytes of packed weights, that the door needs.
        firsts: where in the table of the door the entries of each direction begin.
        before, after: the products before and after the steps of a chunk, as rows by the names of
            ``driver.PRODUCT``.
    """

    def __init__(
        self,
        draft: Draft,
        plan: Plan,
        options: Options,
        backward: bool,
        holes: bool,
        views: Views | None = None,
        packed: Callable[[int], View] | None = None,
    ) -> None:
        self.draft, self.plan, self.options, self.backward = draft, plan, options, backward
        self.host: Framework = draft.host
        self.views = views = draft.views if views is None else views
        self.x, self.mask, self.resets = views["x"], views.get("mask"), views.get("resets")
        self.directions = [direction(plan, views, d, View.at) for d in range(len(options.reverse))]
        self.projects = "weight_ih" in self.directions[0] and not multiplies_input(plan)
        self.steps, self.batch, width = self.x.shape
        self.kernel = cpu.compiled(plan, backward)
        self.chunk, self.projection = max(1, self.steps), Projection.NONE
        if self.projects:
            self.chunk = heuristics.chunk_of(plan, self.steps, self.batch * len(self.directions))
            self.projection = heuristics.projection(
                plan, self.kernel.projecting, self.x.shape, holes=holes,
                restored=backward and self.resets is not None,
                lone=not backward and packed is None and options.reverse == (False,)
                and options.checkpoint is None and self.mask is None and self.resets is None,
                weight=self.directions[0].get("weight_hh"),
                state=self.directions[0].get(f"state {plan.cell.state_names[0]}"),
            )  # fmt: skip
        self.single = self.projection is Projection.SINGLE
        self.chunk = 1 if self.single else self.chunk
        self.inputs = width if self.projection is Projection.INSIDE else 0
        self.segment = segment_steps(options.checkpoint, self.steps, self.chunk)
        self.before: list[Row] = []
        self.after: list[Row] = []
        self.firsts = [self.kernel.first(d) for d in range(len(self.directions))]
        entries, needs = _door(self.kernel, len(self.directions), self._facts(holes))
        self.base, self.parts = draft.append(entries), needs["parts"]
        self.bytes_packed = 0 if self.single else needs["packed_bytes"]
        self._place_memory(needs["scratch_bytes"], packed)
        self._switch()
        if self.mask is not None:
            self.place("mask", self.mask)
        for d, arrays in enumerate(self.directions):
            self.place_of(d, arrays)
        self._restore()

    def _facts(self, holes: bool) -> dict[str, int]:
        """The entries of the door's table that describe no array of a call."""
        return {
            "directions": len(self.directions), "steps": self.steps, "batch": self.batch,
            "reverse": sum(way << d for d, way in enumerate(self.options.reverse)),
            "count": self.chunk, "span": self.steps, "inputs": self.inputs, "sparse": holes,
            "pack": not self.single, "packed": not self.single,
            "threads": min(self.options.threads, cpu.pool.MOST),
            "least_work": heuristics.WORTH_A_THREAD, "row_group": heuristics.row_group(self.batch),
        }  # fmt: skip

    def _place_memory(self, scratch: int, packed: Callable[[int], View] | None) -> None:
        """Sets the entries of hyperparameters, of scratch memory and of packed weights."""
        values = cpu.hyperparameters(self.plan)
        address = values.__array_interface__["data"][0]
        self.place("hyper", self.draft.keep(values, address, address + values.nbytes))
        self.place("scratch", self.draft.buffer((scratch,), 1))
        if packed is not None:
            self.place("packed", packed(self.bytes_packed))
        elif self.bytes_packed:
            self.place("packed", self.draft.buffer((self.bytes_packed,), 1))

    def _restore(self) -> None:
        """Makes resets restore the declared value of each state for which the call gives none."""
        for i, name in enumerate(self.plan.cell.state_names):
            restored = f"reset_state {name}"
            if self.resets is not None and restored not in self.views:
                self.place_parts({restored: self.declared(i, len(self.directions))})

    def declared(self, i: int, rows: int) -> View:
        """Rows ``[rows, size]`` of the initial value that the cell declares for state i."""
        host, state = self.host.wide if i else self.host, self.plan.cell.states[i]
        values = host.empty((rows, self.plan.sizes[state.size]))
        values[:] = state.initial
        return self.draft.constant(values)

    def _switch(self) -> None:
        """Sets the entries for the options and the threads of a call."""
        draft, at, options = self.draft, self.kernel.shared, self.options
        if options.threads > 1:
            draft.put(self.base + at["gang"], draft.of_call("gang"))
        for name, codes in CODES.items():
            draft.put(self.base + at[name], codes[getattr(options, name)])
        for name in ("first_row", "seed", "stream") if self.plan.cell.keeps else ():
            draft.put(self.base + at[name], draft.of_call(name))

    def _entries(self, name: str, view: View) -> list[View | int]:
        """The entries of an array: its address, and the strides that its name has entries for."""
        array, axes = self.kernel.arrays.get(name), self.kernel.axes.get(name, 0)
        if array is not None and array.strided:  # from step to step, and from row to row
            return [view, *view.strides[:2]]
        strides = view.strides[-axes:] if axes else ()
        return [view, *[0] * (axes - len(strides)), *strides]

    def place(self, name: str, view: View) -> None:
        """Sets the entries of an array of the whole call."""
        self.draft.put_all(self.base + self.kernel.shared[name], self._entries(name, view))

    def place_of(self, d: int, views: Views) -> None:
        """Sets the entries of arrays of one direction; skips names without entries."""
        each, first = self.kernel.each, self.base + self.firsts[d]
        for name, view in views.items():
            if name in each:
                self.draft.put_all(first + each[name], self._entries(name, view))

    def place_parts(self, views: Views) -> None:
        """Sets the entries of arrays whose first axis is directions, ``[D, B, size]``."""
        for d in range(len(self.directions)):
            self.place_of(d, {name: view.at(d) for name, view in views.items()})

    def place_rows(self, d: int, name: str, rows: View) -> None:
        """Sets the entries of a buffer for the rows of a chunk."""
        row, _ = rows.strides
        self.place_of(d, {name: rows._replace(strides=(self.batch * row, row))})

    def place_kept(self, kept: Kept) -> None:
        """Sets the entries of the sequences of states, and of the saved values."""
        self.place("hidden", kept.hidden)
        names = self.plan.cell.state_names
        for d, sequences in enumerate(kept.states):
            if kept.values:
                self.place_of(d, {"saved": kept.values[d]})
            for name, sequence in zip(names, sequences, strict=True):
                if sequence is not None:
                    self.place_of(d, {f"sequence {name}": sequence})

    # ---- what is multiplied ----------------------------------------------------------------------
    def rows(self, width: int, wide: bool = False) -> View:
        """A buffer of the rows of a chunk, ``[rows, width]``."""
        host = self.host.wide if wide else self.host
        size, rows = host.dtype.itemsize, self.chunk * self.batch
        view = self.draft.buffer((rows, padded(size, width)), size)
        return view._replace(shape=(CHUNK, width))

    def over_steps(self, view: View, window: bool = False, first: int = 0) -> View:
        """The rows of a chunk of an array ``[T, B, n]`` whose rows are equally spaced.

        Args:
            window: whether the array has the steps of a segment only.
            first: the index of the first step, a time or a slot.
        """
        (steps, row, column), width = view.strides, view.shape[2]
        between = steps * view.size
        return view._replace(
            shape=(CHUNK, width),
            strides=(steps if self.batch == 1 else row, column if width > 1 else 1),
            offset=view.offset + first * between,
            **{"window" if window else "time": between},
        )

    def lay_out_x(self, when: list[Row], d: int, masked: bool = False) -> View:
        """The rows of the input of a chunk, in place or gathered first.

        Args:
            when, d: see ``multiply``.
            masked: whether to put zeros under the mask.
        """
        x, mask = self.x, self.mask if masked else None
        steps, row, _ = x.strides
        if mask is None and (steps == row * self.batch or self.batch == 1 or self.steps < 2):
            return self.over_steps(x)
        rows = self.rows(x.shape[2])
        source = x._replace(shape=(CHUNK, x.shape[2]), strides=(row, steps), time=steps * x.size)
        flags = mask
        if mask is not None:
            flags = mask._replace(shape=(1, 1), strides=(1, 1), time=self.batch)
        self.multiply(when, d, source, flags, rows, kind=driver.GATHER)
        return rows

    def multiply(
        self,
        when: list[Row],
        d: int,
        a: View,
        b: View | None,
        out: View,
        add: bool = False,
        sums: bool = False,
        scales: View | int = 0,
        kind: int | None = None,
        once: bool = False,
    ) -> None:
        """Adds a product to the products of each chunk: ``out = a @ b``.

        Args:
            when: ``before`` or ``after``.
            d: the direction of the chunk.
            add: ``out += a @ b``; with ``sums`` from the second chunk on.
            scales: of the columns of ``b``, if these are integers.
            b: None for a gather without a mask.
            kind: of ``driver.KINDS``; None lets ``products`` choose.
            once: whether it is for the first chunk alone.
        """
        along = 0 if a.shape[0] == CHUNK else 2 if a.shape[1] == CHUNK else 1
        rows, inner = a.shape
        if kind is None:
            assert b is not None
            kind = kind_of(self.host, self.plan, a, b)
        b_inner, b_columns = (1, 1) if b is None else b.strides
        row: Row = {
            "rows": rows, "columns": out.shape[1], "inner": inner,
            "a": a, "a_rows": a.strides[0], "a_inner": a.strides[1],
            "b": 0 if b is None else b, "b_inner": b_inner, "b_columns": b_columns,
            "c": out, "c_rows": out.strides[0],
            "add": int(add), "scales": scales, "kind": kind, "along": along,
            "reverse": int(self.options.reverse[d]), "sums": int(sums),
            "once": int(once),
        }  # fmt: skip
        for name, view in zip("abc", (a, b, out), strict=True):
            time, window = (0, 0) if view is None else (view.time, view.window)
            row |= {f"{name}_time": time, f"{name}_window": window}
        when.append(row)

    def by_weight(self, weight: View, rows: int = 0) -> int | None:
        """The kind of a product of rows, by default of a step's, or None, see ``multiply``."""
        few = self.single and heuristics.few(self.plan, rows or self.batch, weight)
        return driver.FEW if few else None

    def moving(self, d: int, name: str, moving: View, rest: View | None = None) -> list[Row]:
        """Rows of ``DriverPass.moves``: an entry's address and strides before each segment.

        Args:
            moving: ``[segments, B, n]``.
            rest: ``[B, n]``, the array of the entry after the call that writes the border.
        """
        at = self.base + self.firsts[d] + self.kernel.each[name]
        segments, *strides = moving.strides
        bases: list[View | int] = [moving, *strides]
        rests: list[View | int] = [0, 0, 0] if rest is None else [rest, *rest.strides]
        rows: list[Row] = [
            {"place": self.draft.entry(at + i), "base": base, "step": 0, "rest": there}
            for i, (base, there) in enumerate(zip(bases, rests, strict=True))
        ]
        rows[0]["step"] = segments * moving.size  # the address moves, the strides do not
        return rows


class DriverPass(NamedTuple):
    """A pass as the driver runs it.

    Attributes:
        begin: the first step; the number of steps for a pass that only packs the weights.
        segment: the steps of a segment; None for all.
        moves: rows by the names of ``driver.MOVE``.
        recompute: the tables of the pass that computes the states of a segment again.
    """

    tables: PassTables
    begin: int = 0
    segment: int | None = None
    moves: Sequence[Row] = ()
    recompute: PassTables | None = None

    def append(self, then: Placed | None = None) -> Placed:
        """Adds the driver's table to the recipe; the pass ``then`` runs next."""
        again = None if self.recompute is None else DriverPass(self.recompute).append()
        tables, draft, options = self.tables, self.tables.draft, self.tables.options
        at, threads = tables.kernel.shared, min(options.threads, cpu.pool.MOST)
        row: Row = {
            "door": draft.keep(tables.kernel, tables.kernel.address, tables.kernel.address),
            "call": draft.entry(tables.base),
            **{name: at[name] for name in ("begin", "count", "pack", "origin", "span")},
            "backward": int(tables.backward), "steps": tables.steps, "batch": tables.batch,
            "first": self.begin, "last": tables.steps, "chunk": tables.chunk,
            "segment": tables.steps if self.segment is None else self.segment,
            "again": 0 if again is None else draft.entry(again.table),
            "next": 0 if then is None else draft.entry(then.table),
            "moves": len(self.moves), "before": len(tables.before), "after": len(tables.after),
            "gang": draft.of_call("gang") if threads > 1 else 0, "threads": threads,
            "least_work": heuristics.WORTH_A_THREAD, "blas": tables.host.blas,
            "gemm": self._matmul("gemm", driver.OURS),
            "columns": self._matmul("columns", driver.COLUMNS),
            "few": self._matmul("few", driver.FEW, driver.UNSCALED),
            "scratch": 0, "scratch_bytes": 0,  # set by ``finish`` and by ``cpu.room``
        }  # fmt: skip
        table = draft.append_row(driver.PASS, row)
        for move in self.moves:
            draft.append_row(driver.MOVE, move)
        for product in (*tables.before, *tables.after):
            draft.append_row(driver.PRODUCT, product)
        return Placed(
            tables.kernel, tables.plan, options.threads, tables.base, tables.firsts, table, again
        )

    def _matmul(self, name: str, *kinds: int) -> View | int:
        """The address of our matmul of this name, if products are of these kinds."""
        tables = self.tables
        if not any(product["kind"] in kinds for product in (*tables.before, *tables.after)):
            return 0
        matmul = driver.matmul(name, tables.plan.dtype, cpu.isa.current())
        return tables.draft.keep(matmul, matmul.address, matmul.address)


def finish(draft: Draft, passes: Sequence[DriverPass], **facts: Any) -> Recipe:
    """Ends a draft, whose passes run one after the other.

    Args:
        facts: further arguments of ``Recipe``.
    """
    dtype, placed = passes[0].tables.plan.dtype, list[Placed]()
    for of_layer in reversed(passes):
        placed.insert(0, of_layer.append(placed[0] if placed else None))
    tables = [p.table for run in placed for p in (run, run.again) if p is not None]
    room = max(cpu.room(dtype, draft.cells[first:]) for first in tables)
    memory = draft.buffer((room,), 1)
    for first in tables:
        draft.put(first + driver.PASS.index("scratch"), memory)
    return Recipe(draft, dtype, placed[0].table, placed, check_pass, **facts)


def _door(
    kernel: cpu.Kernel, directions: int, facts: Mapping[str, int]
) -> tuple[list[int], dict[str, int]]:
    """The table of the door with these entries, as far as the kernel has them, and what it needs:
    "scratch_bytes", "packed_bytes", and "parts", the threads.
    """
    at, entries = kernel.shared, array("q", bytes(8 * kernel.first(directions)))
    for name, value in facts.items():
        if name in at:
            entries[at[name]] = value
    kernel.needs(entries.buffer_info()[0])
    needs = {name: entries[at[name]] for name in ("scratch_bytes", "packed_bytes", "parts")}
    entries[at["packed"]] = 0
    return entries.tolist(), needs
