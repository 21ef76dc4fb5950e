"""One step of a cell as numbered units: where each number of each value comes from.

A step that a framework has traced has values of three kinds. ``F`` depends on weights and constants
alone, ``X`` also on the step's input, ``S`` on a state. F and X are left to the framework: they are
``Outer`` values, computed outside of the loop, once a call or for all steps at once. Only S is
read, and it knows few sorts of operations:

- structural: slices, reshapes, transposes, concatenations, broadcasts;
- element-wise, by name;
- products of an S value with an F matrix;
- reductions over units.

An S value is an array of integers, ``row << 32 | unit``. A structural operation is the framework's
or NumPy's, run on these integers: the result says where its numbers come from, which axis is the
batch, and whether the operation mixes rows. Units belong to sources, which are states, the results
of operations, and what comes from outside.

X values that are affine in others, such as ``x @ W + b``, have units too, so that the layer can
project x itself, however the projection is written.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from anycell.read.arrays import neighbours

ROW = 32  # the bit from which on an index has the row
UNIT = (1 << ROW) - 1
KINDS = "FXS"  # a result is of the last of the kinds of its operands

CONDITIONS = frozenset(
    "lt le gt ge eq ne logical_and logical_or logical_not logical_xor truth".split()
)
Units = np.ndarray  # numbers of units, [n]
Run = Any  # a call: the arrays that its Outer values are computed from


class Refused(Exception):
    """A step that cannot be read.

    Args:
        problem: what was met.
        instead: what to write instead.
        where: the user's file and line.
    """

    def __init__(self, problem: str, instead: str = "", where: str = "") -> None:
        super().__init__(problem, instead, where)
        self.problem, self.instead, self.where = problem, instead, where

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.problem}." + (f" Instead: {self.instead}." if self.instead else "")

    def at(self, where: str) -> Refused:
        """The same, at this place if its own is not known."""
        return self if self.where else Refused(self.problem, self.instead, where)


CHANGES_STATE = (
    "the step changes the dictionary or list that holds its state",
    "return the new state in a new one, such as {**state, 'h': h}",
)


@dataclass(eq=False)
class Value:
    """A value whose numbers are known: ``ids`` says where each of them comes from."""

    ids: np.ndarray
    boolean: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.ids.shape


@dataclass(eq=False)
class Outer:
    """A value that the framework computes outside of the loop.

    Attributes:
        kind: "F", the same at all steps, or "X".
        shape: the shape in one step.
        get: ``get(run)`` returns the array, which of kind X has a leading axis of time.
        per_row: False if it is known not to vary along the axis of the batch.
        number: its value, if that is one known number.
        units: the units of an X value that is affine in other X values.
        axis: its axis of the batch, if that is known.
    """

    kind: str
    shape: tuple[int, ...]
    get: Callable[[Run], Any]
    boolean: bool = False
    per_row: bool = True
    number: float | None = None
    units: Value | None = None
    axis: int | None = None


Operand = Value | Outer | float | int


@dataclass(eq=False)
class Source:
    """Neighbouring units of one origin.

    Attributes:
        sort: "state", "outer" (from outside of the loop), "op", "product" or "reduction".
        start, size: the numbers of its first unit and of its units.
        kind: F, X or S.
        operands: of an op, the units [size] or a number; of a product, pairs of units and the row
            of the matrix where they begin; of a reduction, the units of each result.
        fetch: of an outer value, run -> [time or 1, rows or 1, size]; of a product, run -> the
            matrix [in, size], or [heads, in, size / heads].
        heads: of a product, its number of blocks.
        pieces: groups of units that are always used together, as arrays of positions.
        where: the user's file and line.
    """

    sort: str
    start: int
    size: int
    kind: str
    op: str = ""
    operands: list[Any] = field(default_factory=list)
    fetch: Any = None
    per_row: bool = False
    boolean: bool = False
    name: str = ""
    heads: int = 1
    pieces: list[np.ndarray] = field(default_factory=list)
    where: str = ""
    kept: dict[str, Any] = field(default_factory=dict)  # functions of a call, made once

    @property
    def units(self) -> Units:
        return np.arange(self.start, self.start + self.size, dtype=np.int64)

    @property
    def operand_units(self) -> list[Units]:
        """All units that it is computed from, flat."""
        units = [o[0] if isinstance(o, tuple) else o for o in self.operands]
        return [u.reshape(-1) for u in units if isinstance(u, np.ndarray)]


def once(fetch: Callable[[Run], Any]) -> Callable[[Run], Any]:
    """A function of a call that computes its array once in that call."""

    def known(run: Run) -> Any:
        if fetch not in run.memo:
            run.memo[fetch] = fetch(run)
        return run.memo[fetch]

    return known


class Graph:
    """The S values of a step, and the affine X values that meet them.

    Args:
        arrays: the functions for arrays of the framework, as ``reshape``.
        rows: the size of the batch, None if the states have no axis of a batch.

    Attributes:
        where: the user's file and line of the operation that is being read.
    """

    def __init__(self, arrays: Any, rows: int | None) -> None:
        self.arrays, self.rows = arrays, rows
        self.sources: list[Source] = []
        self.where = ""
        self._starts: list[int] = []
        self._count = 0
        self._leaves: dict[tuple[Outer, int | None], Source] = {}
        self._apart: set[Source] = set()

    def refuse(self, problem: str, instead: str = "") -> NoReturn:
        raise Refused(problem, instead, self.where)

    # -- sources and values ----------------------------------------------------------------------
    def source(self, sort: str, size: int, kind: str = "", **more: Any) -> Source:
        made = Source(sort, self._count, size, kind, where=self.where, **more)
        self.sources.append(made)
        self._starts.append(made.start)
        self._count += size
        if not kind:
            made.kind = self.kind(*made.operand_units)
        return made

    def owner(self, unit: int) -> Source:
        return self.sources[int(np.searchsorted(self._starts, unit, "right")) - 1]

    def whole(self, units: Units) -> tuple[Source, np.ndarray] | None:
        """The source that all units belong to, and their places in it; None for several."""
        source = self.owner(int(units[0]))
        at = units - source.start
        return None if at.min() < 0 or at.max() >= source.size else (source, at)

    def kind(self, *units: Units) -> str:
        """F, X or S: what values of these units depend on."""
        joined = np.concatenate([u.reshape(-1) for u in units]) if units else np.empty(0, np.int64)
        owners = np.unique(np.searchsorted(self._starts, joined, "right") - 1)
        return max((self.sources[k].kind for k in owners), key=KINDS.index, default="F")

    def value(self, source: Source, axis: int | None, shape: tuple[int, ...]) -> Value:
        """All units of a source in a shape, with the batch as ``axis`` of the result."""
        return self._with_rows(source.units.reshape(shape), axis, source.boolean)

    def _with_rows(self, units: np.ndarray, axis: int | None, boolean: bool = False) -> Value:
        if axis is None:
            return Value(units, boolean)
        rows = np.arange(self.rows, dtype=np.int64) << ROW
        ids = rows.reshape(-1, *[1] * units.ndim) + units
        return Value(np.moveaxis(ids, 0, axis), boolean)

    def view(self, value: Value) -> tuple[int | None, tuple[int, ...], Units]:
        """The axis of the batch, the shape of the units, and their numbers, flat."""
        if self.rows is None:
            return None, value.shape, (value.ids & UNIT).reshape(-1)
        rows = value.ids >> ROW
        for axis, size in enumerate(value.shape):
            if size == self.rows:
                first = np.moveaxis(rows, axis, 0)
                if (first == np.arange(size).reshape(-1, *[1] * (first.ndim - 1))).all():
                    units = np.moveaxis(value.ids & UNIT, axis, 0)
                    if not (units == units[:1]).all():
                        self.refuse("this treats the rows of the batch differently")
                    return axis, units.shape[1:], units[0].reshape(-1)
        self.refuse(
            "this mixes the rows of the batch",
            "compute each row from itself alone, without statistics over the batch",
        )

    # -- what comes from outside -----------------------------------------------------------------
    def state(
        self, shape: tuple[int, ...], axis: int | None, boolean: bool = False, name: str = ""
    ) -> Value:
        units = tuple(size for i, size in enumerate(shape) if i != axis)
        source = self.source("state", math.prod(units), "S", boolean=boolean, name=name)
        return self.value(source, axis, units)

    def base(self, outer: Outer, axis: int | None) -> Value:
        """The units of an X value that others are affine in."""
        if outer.units is not None:
            return outer.units
        if self.rows is not None and (axis is None or outer.shape[axis:][:1] != (self.rows,)):
            self.refuse("this value has no axis of the batch")
        units = tuple(size for i, size in enumerate(outer.shape) if i != axis)
        source = self._leaf(outer, axis, math.prod(units), outer.per_row)
        return self.value(source, axis, units)

    def _leaf(self, outer: Outer, axis: int | None, size: int, per_row: bool) -> Source:
        """An outer value as a source, whose batch is ``axis`` of its shape."""
        if (outer, axis) in self._leaves:
            return self._leaves[outer, axis]
        arrays, moving = self.arrays, outer.kind == "X"

        @once
        def fetch(run: Run) -> Any:
            array = outer.get(run)
            if outer.boolean:
                array = arrays.cast(array, run.dtype)
            time = array.shape[:1] if moving else (1,)
            if axis is None:
                return arrays.reshape(array, (*time, 1, size))
            if not moving:
                array = arrays.reshape(array, (1, *array.shape))
            if not per_row:
                array = arrays.take(array, 1 + axis, 0, 1)
            array = arrays.move(array, 1 + axis, 1)
            return arrays.reshape(array, (*time, array.shape[1], size))

        options = {"per_row": per_row, "boolean": outer.boolean}
        source = self.source("outer", size, outer.kind, fetch=fetch, **options)
        self._leaves[outer, axis] = source
        return source

    def outside(self, outer: Outer, shape: tuple[int, ...], axis: int | None) -> Value:
        """An outer value as an operand of a result of ``shape``, whose batch is ``axis``."""
        if outer.units is not None:
            return Value(np.broadcast_to(outer.units.ids, shape), outer.boolean)
        if axis is not None and shape[axis] != self.rows:
            self.refuse("this joins a state with a value of another number of rows")
        at = -1 if axis is None else axis - (len(shape) - len(outer.shape))
        batch = at if at >= 0 and outer.shape[at] == self.rows else None
        units = tuple(size for i, size in enumerate(outer.shape) if i != batch)
        per_row = batch is not None and outer.per_row
        source = self._leaf(outer, batch, math.prod(units), per_row)
        ids = source.units.reshape(units)
        ids = np.broadcast_to(ids if batch is None else np.expand_dims(ids, batch), shape)
        return self._with_rows(ids if axis is None else ids.take(0, axis), axis, outer.boolean)

    # -- operations ------------------------------------------------------------------------------
    def structural(self, run: Callable[..., Any], *operands: Any) -> Any:
        """Runs an operation that only moves numbers, on arrays of ids."""
        first = next(o for o in operands if isinstance(o, Value))
        axis = self.view(first)[0]
        # What is outer has the same axes, as in a concatenation of x and h.
        values = [self.outside(o, o.shape, axis) if isinstance(o, Outer) else o for o in operands]
        made = run(*(value.ids for value in values))
        several = isinstance(made, (list, tuple))
        results = [Value(np.asarray(ids), first.boolean) for ids in (made if several else [made])]
        return results if several else results[0]

    def elementwise(self, op: str, *operands: Operand) -> Value:
        """Applies an op of the printer's table."""
        kept = op == "identity" and isinstance(operands[0], (Value, Outer)) and operands[0].boolean
        boolean = kept or op in CONDITIONS
        shapes = [o.shape for o in operands if isinstance(o, (Value, Outer))]
        shape = np.broadcast_shapes(*shapes)
        values = [Value(np.broadcast_to(o.ids, shape)) for o in operands if isinstance(o, Value)]
        layouts = {self.view(value)[:2] for value in values}
        if len(layouts) != 1:
            self.refuse("this combines values whose batches are different axes")
        ((axis, units),) = layouts
        maps: list[Units | float] = []
        for operand in operands:
            if isinstance(operand, Outer) and operand.number is not None:
                operand = operand.number
            if isinstance(operand, Outer):
                operand = self.outside(operand, shape, axis)
            if isinstance(operand, Value):
                maps.append(self.view(Value(np.broadcast_to(operand.ids, shape)))[2])
            else:
                maps.append(float(operand))
        size = math.prod(units)
        if op in ("add", "sub"):
            op, maps = self._gather(op, *maps)
        if op in ("div", "reciprocal"):
            op, maps = self._logistic(op, maps)
        if op in ("mul", "div") and (mean := self._mean(op, *maps)) is not None:
            return self.value(mean, axis, units)
        return self.value(self._op(op, size, maps, boolean), axis, units)

    def _op(self, op: str, size: int, maps: Sequence[Any], boolean: bool = False) -> Source:
        return self.source("op", size, op=op, operands=list(maps), boolean=boolean)

    def _gather(self, op: str, a: Any, b: Any) -> tuple[str, list[Any]]:
        """Moves terms that need no state to the outside: ``(S + X) + F`` is ``S + (X + F)``.

        A sum with a term of kind S has the terms of other kinds, already summed, on its right.
        """
        inner_a, outer_a = self._terms(a)
        inner_b, outer_b = self._terms(b)
        if op == "sub":
            if inner_a is None or inner_b is not None:
                return op, [a, b]
            outer_b = -b if isinstance(b, float) else self._op("neg", len(b), [b]).units
        if (outer_a is None and outer_b is None) or (inner_a is None and inner_b is None):
            return op, [a, b]
        return "add", [self._sum(inner_a, inner_b), self._sum(outer_a, outer_b)]

    def _logistic(self, op: str, maps: list[Any]) -> tuple[str, list[Any]]:
        """Finds the sigmoid in ``v / (1 + exp(-u))``."""
        total = self.operands("add", maps[-1])  # has the number on its right
        one = bool(total) and isinstance(total[1], float) and total[1] == 1.0
        raised = one and self.operands("exp", total[0])
        if not raised:
            return op, maps
        negative = self._negated(raised[0])
        if op == "reciprocal" or (isinstance(maps[0], float) and maps[0] == 1.0):
            return "sigmoid", [negative]
        return "mul", [maps[0], self._op("sigmoid", len(negative), [negative]).units]

    def _negated(self, units: Units) -> Units:
        if negative := self.operands("neg", units):
            return np.asarray(negative[0])
        total = self.operands("add", units)
        if total and isinstance(total[1], float):
            op, maps = self._gather("add", self._negated(total[0]), -total[1])
            return self._op(op, len(units), maps).units
        return self._op("neg", len(units), [units]).units

    def _mean(self, op: str, a: Any, b: Any) -> Source | None:
        """A sum over units that is divided by their number, as one reduction."""
        total, factor = (a, b) if isinstance(b, float) else (b, a)
        rows = self.operands("sum", total)
        if not rows or not isinstance(factor, float) or (op == "div" and total is b):
            return None
        share = 1.0 / factor if op == "div" and factor else factor
        if abs(share * rows[0].shape[1] - 1.0) > 1e-6:
            return None
        return self.source("reduction", len(rows[0]), op="mean", operands=rows)

    def operands(self, op: str, units: Any) -> list[Any]:
        """The operands of the op that computes these units; none if another computes them."""
        if isinstance(units, float) or not len(units):
            return []
        known = self.whole(units)
        if known is None or known[0].op != op:
            return []
        return [o if isinstance(o, float) else o[known[1]] for o in known[0].operands]

    def _sum(self, a: Any, b: Any) -> Any:
        if a is None or b is None:
            return b if a is None else a
        if isinstance(a, float) and isinstance(b, float):
            return a + b
        size = len(b if isinstance(a, float) else a)
        return self._op("add", size, [a, b]).units

    def _terms(self, term: Units | float) -> tuple[Any, Any]:
        """The part of a sum that is of kind S, and the part that is not; None for none."""
        if isinstance(term, float) or self.kind(term) != "S":
            return None, term
        operands = self.operands("add", term)
        if operands and (isinstance(operands[1], float) or self.kind(operands[1]) != "S"):
            return operands[0], operands[1]
        return term, None

    def product(
        self, value: Value, axes: tuple[int, ...], out: tuple[int, ...], weight: Any
    ) -> Value:
        """Contracts ``axes`` of a value with a matrix ``weight(run) -> [in, out]``.

        Returns:
            the product, ``[axes of the value that are left, *out]``.
        """
        axis, shape, operands = self._rows(
            value, axes, "this multiplies the batch by a matrix", "multiply the units of each row"
        )
        fetch, size = once(weight), math.prod(out)
        parts = [self._product(units, size, fetch) for units in operands]
        return self._with_rows(np.stack(parts).reshape((*shape, *out)), axis)

    def heads(
        self, value: Value, head: int, axes: tuple[int, ...], out: tuple[int, ...], weight: Any
    ) -> Value:
        """Contracts ``axes`` of each part of a value along ``head`` with a matrix of its own.

        Args:
            weight: run -> [heads, in, out].

        Returns:
            the products, ``[heads, axes of the value that are left, *out]``.
        """
        count = value.shape[head]
        free = [i for i in range(len(value.shape)) if i not in (head, *axes)]
        moved = np.transpose(value.ids, (head, *free, *axes))
        moved = moved.reshape(*moved.shape[: 1 + len(free)], -1)
        axis, shape, units = self.view(Value(moved))
        if axis == 0:
            self.refuse("this multiplies each row of the batch by a matrix of its own")
        fetch = once(weight)
        if len(shape) == 2 and self.kind(units) == "S" and count > 1:
            one = self.source(
                "product", count * math.prod(out), fetch=fetch, operands=[(units, 0)], heads=count
            )
            return self._with_rows(one.units.reshape(count, *out), axis)
        arrays, parts = self.arrays, []
        for number in range(count):

            def matrix(run: Run, number: int = number) -> Any:
                every = fetch(run)
                return arrays.reshape(arrays.take(every, 0, number, 1), every.shape[1:])

            part = Value(moved[number])
            parts.append(self.product(part, (moved.ndim - 2,), out, matrix).ids)
        return Value(np.stack(parts))

    def _product(self, units: Units, size: int, weight: Any) -> Units:
        """One row times the matrix; what needs no state is a product, and a term, of its own."""
        parts: dict[bool, list[tuple[Units, int]]] = {True: [], False: []}
        at = 0
        for run in self.runs(units):
            parts[self.kind(run) == "S"].append((run, at))
            at += len(run)
        terms = [
            self.source("product", size, fetch=weight, operands=part).units
            for part in filter(None, parts.values())
        ]
        return terms[0] if len(terms) == 1 else self._op("add", size, terms).units

    def reduce(self, op: str, value: Value, axes: Sequence[int], keep: bool) -> Value:
        """The sum or the maximum over axes of units."""
        axes = tuple(axis % len(value.shape) for axis in axes)
        problem = f"this takes the {op} over the rows of the batch"
        axis, shape, rows = self._rows(value, axes, problem, "compute each row from itself alone")
        source = self.source("reduction", len(rows), op=op, operands=[rows])
        made = self.value(source, axis, shape)
        return Value(np.expand_dims(made.ids, axes)) if keep else made

    def _rows(
        self, value: Value, axes: tuple[int, ...], problem: str, instead: str
    ) -> tuple[int | None, tuple[int, ...], np.ndarray]:
        """The axis of the batch among those that are left beside ``axes``, the shape of the other
        ones, and the units that each result combines, ``[results, n]``.
        """
        free = [i for i in range(len(value.shape)) if i not in axes]
        lead = [value.shape[i] for i in free]
        if 0 in value.shape:
            self.refuse("this combines no numbers")
        moved = np.transpose(value.ids, (*free, *axes)).reshape(*lead, -1)
        axis, _, units = self.view(Value(moved))
        if axis == len(lead):
            self.refuse(problem, instead)
        shape = tuple(size for i, size in enumerate(lead) if i != axis)
        return axis, shape, units.reshape(-1, moved.shape[-1])

    # -- pieces ----------------------------------------------------------------------------------
    def runs(self, units: Units) -> Iterator[Units]:
        """Splits units where they stop to be neighbours, or the same unit, of one source."""
        steps, owners = np.diff(units), np.searchsorted(self._starts, units, "right")
        steps[(np.diff(owners) != 0) | ((steps != 0) & (steps != 1))] = -1
        changes = (np.flatnonzero(np.diff(steps)) + 1).tolist()
        start, count = 0, len(units)
        while start < count:
            end = start + 1
            if end < count and steps[start] >= 0:
                after = bisect.bisect_right(changes, start)
                end = 1 + (changes[after] if after < len(changes) else count - 1)
            yield units[start:end]
            start = end

    def spread(self, units: Units) -> Source | None:
        """The source of one number for each of several groups, which ``units`` repeats for all
        units of its group: a reduction, or what an op makes of reductions.
        """
        source = self.owner(int(units[0]))
        if source.size == 1 or len(units) % source.size or len(units) == source.size:
            return None
        if not (units == np.repeat(source.units, len(units) // source.size)).all():
            return None
        if source.sort == "reduction":
            fits = source.operands[0].size == len(units) and self._by_group(source)
            return source if fits else None
        if source.sort != "op":
            return None
        operands = [o[units - source.start] for o in source.operands if isinstance(o, np.ndarray)]
        parts = [self.spread(o) for o in operands if self.kind(o) == "S"]
        return source if parts and all(parts) else None

    def settle(self, states: Sequence[tuple[Source, Units]], live: Sequence[Source]) -> None:
        """Groups the units of sources into pieces, each of which is used as a whole.

        Args:
            states: the sources of the states, and the units of the new states.
            live: the sources that the new states follow from.
        """
        labels = {source: np.zeros(source.size, np.int64) for source in live}
        links: list[tuple[Source, np.ndarray, Source, np.ndarray]] = []
        self._apart = self._part(states, live)

        def split(source: Source, at: np.ndarray, keys: Any = 1) -> None:
            labels[source] = _refined(labels[source], at, keys)

        def whole(units: Units) -> None:
            for source, places in self.owners(units):
                split(source, units[places] - source.start)

        def link(user: Source, units: Units) -> None:
            if self.spread(units) is not None:
                return
            for source, places in self.owners(units):
                at = units[places] - source.start
                split(user, places)
                split(source, at)
                unit, count = np.unique(at, return_counts=True)
                if len(unit) == len(at):
                    links.append((user, places, source, at))
                    continue
                alike = bool((np.diff(at) == 0).any())
                if len(unit) < count.max() or (len(unit) == count.max() and alike):
                    split(user, places, at)  # each unit is broadcast to many
                    split(source, unit, unit)
                    continue
                turn = occurrences(at)  # units are taken several times, as by ``tile``
                split(user, places, turn)
                for time in range(int(turn.max()) + 1):
                    links.append((user, places[turn == time], source, at[turn == time]))

        for source in live:
            if source.sort == "op":
                for units in source.operands:
                    if isinstance(units, np.ndarray):
                        link(source, units)
            elif source.sort == "reduction":
                rows = source.operands[0]
                together = source.size > 1 and self._by_group(source)
                for units in [rows.reshape(-1)] if together else rows:
                    whole(units)
                every = np.arange(source.size)  # each is of one unit
                split(source, every, every)
            elif source.sort == "product":
                for units, _ in source.operands:
                    whole(units)
        for state, units in states:
            link(state, units)
        counts: list[int] = []
        while counts != (counts := [int(parts.max()) for parts in labels.values()]):
            for user, places, source, at in links:
                split(user, places, labels[source][at])
                split(source, at, labels[user][places])
        for source, parts in labels.items():
            order = np.argsort(parts, kind="stable")
            pieces = np.split(order, np.flatnonzero(np.diff(parts[order])) + 1)
            source.pieces = sorted(pieces, key=lambda at: int(at[0]))

    def _part(self, states: Sequence[tuple[Source, Units]], live: Sequence[Source]) -> set[Source]:
        """Reductions over groups of units whose results are not only given back to their group.

        Each of these results is a value of its own.
        """
        roots: dict[Source, list[Source]] = {}  # of sources of one number for each group
        uses = [(s, units) for s in live for units in s.operand_units]
        for source in sorted(live, key=lambda source: source.start):
            if source.sort == "reduction" and source.size > 1:
                roots[source] = [source]
            elif source.sort == "op":
                whole = [units for units in source.operand_units if self.kind(units) == "S"]
                owners = [self.owner(int(units[0])) for units in whole]
                if whole and all(
                    owner in roots and np.array_equal(units, owner.units)
                    for units, owner in zip(whole, owners, strict=True)
                ):
                    roots[source] = [r for owner in owners for r in roots[owner]]
        apart: set[Source] = set()
        for user, units in [*uses, *states]:
            if user not in roots and not (user.sort == "op" and self.spread(units)):
                apart.update(*(roots.get(source, ()) for source, _ in self.owners(units)))
        return apart

    def _by_group(self, reduction: Source) -> bool:
        """Whether a reduction is one of neighbouring groups of units, given back to these."""
        rows = reduction.operands[0].reshape(-1)
        return reduction not in self._apart and neighbours(rows)

    def owners(self, units: Units) -> Iterator[tuple[Source, np.ndarray]]:
        """The sources that units belong to, and their places in the array."""
        numbers = np.searchsorted(self._starts, units, "right") - 1
        for number in np.unique(numbers):
            yield self.sources[number], np.flatnonzero(numbers == number)

    def live(self, units: Sequence[Units]) -> list[Source]:
        """The sources that units are computed from."""
        live, todo = dict[Source, None](), list(units)
        while todo:
            for source, _ in self.owners(todo.pop()):
                if source not in live:
                    live[source] = None
                    todo += source.operand_units
        return list(live)


def _refined(labels: np.ndarray, at: np.ndarray, keys: Any) -> np.ndarray:
    """Labels from 0 on that also tell apart the units ``at`` by their keys, and from all others."""
    keys = np.broadcast_to(np.asarray(keys, np.int64), at.shape)
    whole = labels * (int(keys.max()) + 2)
    whole[at] += keys + 1
    return np.unique(whole, return_inverse=True)[1].reshape(-1)


def occurrences(at: np.ndarray) -> np.ndarray:
    """Counts how often each number has come before."""
    order = np.argsort(at, kind="stable")
    new = np.flatnonzero(np.diff(at[order], prepend=-1))
    turn = np.empty(len(at), np.int64)
    turn[order] = np.arange(len(at)) - np.repeat(new, np.diff(new, append=len(at)))
    return turn
