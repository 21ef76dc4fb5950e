"""Values outside of the loop as affine maps of the step's input: ``x @ W + b``, however written.

A layer that is given x itself projects it in its own matmul, with ``weight_ih`` and ``bias_ih``;
an array of projections ``[T, B, gates]`` costs half as much again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from anycell.read.arrays import neighbours
from anycell.read.units import Graph, Run, Source, Units, once

# Ops that are affine, if not several factors of a product depend on x, nor a divisor.
AFFINE = frozenset("add sub neg mul div identity".split())


@dataclass(frozen=True, eq=False)
class Matrix:
    """Rows and columns of a matrix ``[in, out]`` that the framework computes, times a sign.

    Attributes:
        fetch: run -> the matrix. None stands for the identity.
        rows: its rows.
        columns: its columns, or for the identity the rows that the columns pick.
    """

    fetch: Any
    rows: np.ndarray
    columns: np.ndarray
    sign: int = 1

    def transposed(self, run: Run, arrays: Any) -> Any:
        """The matrix as an array ``[out, in]``."""
        if self.fetch is None:
            picks = np.zeros((len(self.columns), len(self.rows)))
            picks[np.arange(len(self.columns)), self.columns] = self.sign
            return arrays.constant(picks, run.dtype)
        at = self.rows, self.columns
        if all(map(neighbours, at)):
            matrix = arrays.block(self.fetch(run), *((int(i[0]), int(i[-1]) + 1) for i in at))
        else:
            matrix = arrays.index(self.fetch(run), self.columns)
            matrix = arrays.index(arrays.move(matrix, 0, 1), self.rows)
        return -matrix if self.sign < 0 else matrix

    def array(self, run: Run, arrays: Any) -> Any:
        """The matrix as an array ``[in, out]``."""
        return arrays.move(self.transposed(run, arrays), 0, 1)


@dataclass(frozen=True, eq=False)
class Constant:
    """Numbers ``[n]`` that no input enters: ``fetch(run) -> [rows or 1, all of them]``."""

    fetch: Callable[[Run], Any]
    columns: np.ndarray
    sign: int = 1
    per_row: bool = False

    def array(self, run: Run, arrays: Any) -> Any:
        """``[rows or 1, n]``."""
        array = arrays.index(self.fetch(run), self.columns)
        return -array if self.sign < 0 else array


def joined(a: Any, b: Any) -> Any:
    """Two matrices, constants or numbers as one, if the columns of the second follow those of the
    first in one array; else None.
    """
    if isinstance(a, float) or isinstance(b, float):
        return a if a == b else None
    if (a.fetch, a.sign) != (b.fetch, b.sign) or a.columns[-1] + 1 != b.columns[0]:
        return None
    if isinstance(a, Matrix) and not np.array_equal(a.rows, b.rows):
        return None
    return replace(a, columns=np.concatenate([a.columns, b.columns]))


@dataclass(frozen=True)
class Affine:
    """``sum(inputs @ matrix) + sum(constants)`` for some units.

    Attributes:
        terms: pairs of a source of kind X and the matrix that multiplies all of its units.
        constants: numbers among them are Python floats.
    """

    size: int
    terms: tuple[tuple[Source, Matrix], ...] = ()
    constants: tuple[Constant | float, ...] = ()

    @property
    def direct(self) -> bool:
        """Whether units of the input are passed on as they are, so that a matmul would waste."""
        return self.size > 1 and any(matrix.fetch is None for _, matrix in self.terms)

    @property
    def per_row(self) -> bool:
        """Whether a constant differs from row to row, as no bias can."""
        return any(isinstance(c, Constant) and c.per_row for c in self.constants)

    def followed(self, after: Affine) -> Affine | None:
        """Both maps as one of more columns of the same matrices; None if they have others."""
        (sources, matrices), (others, further) = (
            ([source for source, _ in part.terms], [matrix for _, matrix in part.terms])
            for part in (self, after)
        )
        if sources != others or len(self.constants) != len(after.constants):
            return None
        matrices = list(map(joined, matrices, further))
        constants = tuple(map(joined, self.constants, after.constants))
        if None in (*matrices, *constants):
            return None
        terms = tuple(zip(sources, matrices, strict=True))
        return Affine(self.size + after.size, terms, constants)

    def value(self, run: Run, arrays: Any) -> Any:
        """``[time or 1, rows or 1, size]``."""
        total = self.constant(run, arrays)
        for source, matrix in self.terms:
            inputs = source.fetch(run)
            if matrix.fetch is None:
                part = arrays.index(inputs, matrix.columns)
                part = -part if matrix.sign < 0 else part
            else:
                part = inputs @ matrix.array(run, arrays)
            total = part if total is None else total + part
        return total

    def constant(self, run: Run, arrays: Any) -> Any:
        """The constants' sum, ``[rows or 1, size]``; None without any."""
        total: Any = None
        flat = len(self.constants) > 1 and not self.per_row  # sums of biases as they are
        for constant in self.constants:
            if isinstance(constant, float):
                part = arrays.constant(np.full((1, self.size), constant), run.dtype)
            else:
                part = constant.array(run, arrays)
            part = arrays.reshape(part, (self.size,)) if flat else part
            total = part if total is None else total + part
        return arrays.reshape(total, (1, self.size)) if flat else total


def affine(graph: Graph, units: Units) -> Affine | None:
    """The affine map that computes units of kind F or X; None if none does.

    Args:
        units: of one source, or one unit that is repeated.
    """
    if len(units) > 1 and (units == units[0]).all():
        units = units[:1]
    known, size = graph.whole(units), len(units)
    if known is None or known[0].kind == "S":
        return None
    source, at = known
    if source.sort == "outer":
        return _outer(graph.arrays, source, at)
    if source.sort == "product":
        return _product(graph, source, at)
    if source.sort != "op" or source.op not in AFFINE:
        return None
    parts: list[Affine] = []
    for operand in source.operands:
        number = isinstance(operand, float)
        part = Affine(size, (), (operand,)) if number else affine(graph, operand[at])
        if part is None or part.size != size:
            return None
        parts.append(part)
    return _operation(graph.arrays, source.op, size, parts)


def _outer(arrays: Any, source: Source, at: Units) -> Affine:
    if source.kind == "X":
        return Affine(len(at), ((source, Matrix(None, np.arange(source.size), at)),))

    def only(run: Run) -> Any:
        array = source.fetch(run)
        return arrays.reshape(array, array.shape[1:])  # `[0]` has a gradient of its own

    first = _kept(source, "first", only)
    return Affine(len(at), (), (Constant(first, at, 1, source.per_row),))


def _kept(source: Source, name: str, fetch: Callable[[Run], Any]) -> Callable[[Run], Any]:
    """``fetch``, computed once a call, and the same function for all columns of a source."""
    return source.kept.setdefault(name, once(fetch))


def _product(graph: Graph, source: Source, at: Units) -> Affine | None:
    if source.heads > 1:
        return None
    weight, arrays = source.fetch, graph.arrays
    terms: list[tuple[Source, Matrix]] = []
    constants: list[Constant | float] = []
    for number, (units, row) in enumerate(source.operands):
        part = affine(graph, units)
        if part is None or part.size != len(units):
            return None
        end = row + len(units)
        for term, (inputs, matrix) in enumerate(part.terms):
            if matrix.fetch is None and matrix.sign == 1 and _whole(matrix, inputs):
                terms.append((inputs, Matrix(weight, np.arange(row, end), at)))
                continue

            def composed(run: Run, first: Matrix = matrix, row: int = row, end: int = end) -> Any:
                return first.array(run, arrays) @ arrays.take(weight(run), 0, row, end - row)

            fetch = _kept(source, f"{number} {term}", composed)
            terms.append((inputs, Matrix(fetch, np.arange(inputs.size), at)))
        if part.constants:

            def fixed(run: Run, part: Affine = part, row: int = row, end: int = end) -> Any:
                return part.constant(run, arrays) @ arrays.take(weight(run), 0, row, end - row)

            constants.append(Constant(_kept(source, f"{number}", fixed), at, 1, part.per_row))
    return Affine(len(at), tuple(terms), tuple(constants))


def _whole(identity: Matrix, inputs: Source) -> bool:
    """Whether an identity passes all units of its input on, in their order."""
    return np.array_equal(identity.columns, np.arange(inputs.size))


def _operation(arrays: Any, op: str, size: int, parts: list[Affine]) -> Affine | None:
    if op == "identity":
        return parts[0]
    if op == "neg":
        return _negative(parts[0])
    if op in ("add", "sub"):
        a, b = parts[0], parts[1] if op == "add" else _negative(parts[1])
        return Affine(size, a.terms + b.terms, a.constants + b.constants)
    value, factor = parts[::-1] if op == "mul" and not parts[0].terms else parts
    if factor.terms or factor.per_row:
        return None

    def scale(array: Any, run: Run) -> Any:
        numbers = factor.constant(run, arrays)
        return array * numbers if op == "mul" else array / numbers

    def scaled(matrix: Matrix) -> Callable[[Run], Any]:
        return lambda run: scale(matrix.array(run, arrays), run)

    every = np.arange(size)
    terms = tuple(
        (source, Matrix(scaled(matrix), np.arange(source.size), every))
        for source, matrix in value.terms
    )
    if not value.constants:
        return Affine(size, terms)
    constant = Constant(
        lambda run: scale(value.constant(run, arrays), run), every, 1, value.per_row
    )
    return Affine(size, terms, (constant,))


def _negative(part: Affine) -> Affine:
    return Affine(
        part.size,
        tuple((source, replace(matrix, sign=-matrix.sign)) for source, matrix in part.terms),
        tuple(-c if isinstance(c, float) else replace(c, sign=-c.sign) for c in part.constants),
    )
