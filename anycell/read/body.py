"""A step as one list of equations, and its reading by a table: what all frontends have in common.

A frontend records the user's step as a ``Body``, and has a table: a row for each operation of its
framework says what that is in the graph. The name of an op of the language is a row; so is a
function of the reader, the operands and the options, mostly one of ``functions.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from anycell.read.affine import AFFINE
from anycell.read.functions import Functions
from anycell.read.printer import read
from anycell.read.reading import Reading
from anycell.read.trees import filled, leaves, mapped
from anycell.read.units import KINDS, Graph, Outer, Refused, Value

Array = Any
Rule = str | Callable[..., Any]


@dataclass(eq=False)
class Variable:
    """A value of a step.

    Attributes:
        dtype: its name, as "float32" or "bool".
        kind: F, X or S; see ``anycell.read.units``.
        axis: the axis of the batch, where the recording tells.
        equation: what computes it; None for inputs and constants.
        number: its value, if all of its elements are one known number.
        constant: its value, if that is a known array.
    """

    shape: tuple[int, ...]
    dtype: str
    kind: str = "F"
    axis: int | None = None
    equation: Equation | None = field(default=None, repr=False)
    number: float | None = None
    constant: Array = None

    @property
    def floating(self) -> bool:
        return self.dtype.startswith(("float", "bfloat"))

    @property
    def boolean(self) -> bool:
        return self.dtype == "bool"


@dataclass(eq=False)
class Equation:
    """An operation of a step.

    Attributes:
        op: its row in the table.
        arguments, options: what it was called with: variables, numbers, and trees of them.
        where: the user's file and line.
        name: what errors call it.
        source: the operation itself, as the framework computes it.
        random: whether it draws random numbers, others at each step.
    """

    op: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    results: list[Variable]
    where: str = ""
    name: str = ""
    source: Any = None
    random: bool = False

    def __post_init__(self) -> None:
        for v in self.results:
            v.equation = self

    @functools.cached_property
    def operands(self) -> list[Variable]:
        return list(leaves((self.arguments, self.options), Variable))


@dataclass(eq=False)
class Body:
    """A step: equations from weights, the input of the step and states to outputs and new states.

    Attributes:
        fixed: what is the same at all steps.
        after: the states after the step.
        ahead: the numbers of the states that are computed before the loop, as counters are.
        moving: the numbers of the states of kind S; the others stay as they are.
    """

    fixed: list[Variable]
    x: list[Variable]
    states: list[Variable]
    outputs: list[Variable]
    after: list[Variable]
    equations: list[Equation]
    ahead: list[int] = field(default_factory=list)
    moving: list[int] = field(default_factory=list)

    @property
    def inputs(self) -> list[Variable]:
        return [*self.fixed, *self.x, *self.states]

    def lines(self) -> list[str]:
        """The inputs, each equation and the results as text, which is the same for the same step,
        whatever the numbers in its arrays.
        """
        names = {v: f"v{number}" for number, v in enumerate(self.inputs)}

        def text(leaf: Any) -> Any:
            if isinstance(leaf, Variable):
                return names.get(leaf) or names.setdefault(leaf, f"v{len(names)}")
            return leaf.tobytes() if isinstance(leaf, np.ndarray) else leaf

        calls = [[e.name, e.arguments, e.options, e.results] for e in self.equations]
        lines = [str(mapped(text, part)) for part in (*calls, [self.outputs, self.after])]
        return [str([(v.dtype, v.shape) for v in self.inputs]), *lines]

    def sort(self, early: Iterable[int] = ()) -> None:
        """Says of what kind each value is.

        Args:
            early: the states that are computed before the loop, unless another state enters them.
        """
        depends: dict[Variable, set[int]] = {v: {k} for k, v in enumerate(self.states)}
        for equation in self.equations:
            into = set().union(*(depends.get(v, ()) for v in equation.operands))
            depends |= dict.fromkeys(equation.results, into)
        changing = {k for k, v in enumerate(self.states) if self.after[k] is not v}
        ahead = changing & {*early}
        while late := {k for k in ahead if depends.get(self.after[k], set()) & changing - ahead}:
            ahead -= late
        self.ahead, self.moving = sorted(ahead), sorted(changing - ahead)
        for v in self.x:
            v.kind = "X"
        for k, v in enumerate(self.states):
            v.kind = "X" if k in ahead else "S" if k in changing else "F"
        for equation in self.equations:
            kind = max((v.kind for v in equation.operands), key=KINDS.index, default="F")
            for v in equation.results:
                v.kind = "X" if equation.random and kind == "F" else kind

    def needed(
        self, wanted: Iterable[Variable], known: Collection[Variable] = ()
    ) -> list[Equation]:
        """The equations that compute values from those that are known."""
        missing, chosen = set(wanted).difference(known), []
        for equation in reversed(self.equations):
            if not missing.isdisjoint(equation.results):
                chosen.append(equation)
                missing.update(v for v in equation.operands if v not in known)
        return chosen[::-1]

    def sources(self, wanted: Iterable[Variable], known: Collection[Variable]) -> set[Variable]:
        """Returns the known values that others are computed from."""
        used = {v for equation in self.needed(wanted, known) for v in equation.operands}
        return {v for v in (*used, *wanted) if v in known}

    def seen(self) -> list[int]:
        """The places in ``moving`` of the states that outputs are computed from."""
        ends = {v for v in (*self.states, *self.after) if v.kind == "S"}
        used = self.sources(self.outputs, ends)
        return [
            place for place, k in enumerate(self.moving)
            if self.states[k] in used or self.after[k] in used
        ]  # fmt: skip

    def unpacked(
        self, reading: Reading, first: Sequence[Array], final: Mapping[str, Array],
        sequences: Mapping[str, Array], places: Collection[int], reverse: bool = False,
    ) -> tuple[list[Array], dict[Variable, Array]]:  # fmt: skip
        """The user's states, out of those of the cell.

        Args:
            first: before the first step.
            final, sequences: the cell's states after the last step and after each, by name.
            places: in ``moving``, of the states that are wanted at all steps.

        Returns:
            the last states; the variables of states before and after a step, at all steps.
        """
        arrays, last, known = reading.arrays, list(first), dict[Variable, Array]()
        for place, k in enumerate(self.moving):
            last[k] = reading.joined(place, final)
            if place in places:
                after = reading.joined(place, sequences)
                start = arrays.cast(first[k], after.dtype)[None]
                parts = [after[1:], start] if reverse else [start, after[:-1]]
                known |= {self.states[k]: arrays.cat(parts, 0), self.after[k]: after}
        return last, known


class Values(dict[Variable, Array]):
    """The values of variables; those that are missing are computed when they are asked for.

    Args:
        known: to begin with.
        execute: (equation, values) -> its results, as the framework computes them.
        elsewhere: finds values that need not be computed here; None for others.
    """

    def __init__(
        self,
        known: Mapping[Variable, Array],
        execute: Callable[[Equation, Values], Sequence[Array]],
        elsewhere: Callable[[Variable], Array] = lambda v: v.constant,
    ) -> None:
        super().__init__(known)
        self.execute, self.elsewhere = execute, elsewhere

    def _missing(self, v: Variable) -> bool:
        if v in self:
            return False
        value = self.elsewhere(v)
        if value is not None:
            self[v] = value
        return value is None

    def __missing__(self, v: Variable) -> Array:
        todo = [v] if self._missing(v) else []
        while todo:
            equation = todo[-1].equation
            if equation is None:
                raise KeyError(todo[-1])
            missing = [o for o in equation.operands if self._missing(o)]
            todo += missing
            if not missing and todo.pop() not in self:  # of several results some may be known
                values = self.execute(equation, self)
                for result, value in zip(equation.results, values, strict=True):
                    self.setdefault(result, value)
        return self[v]


class Reader(Functions):
    """Reads the equations of a step that lie between its states.

    Args:
        axis: the axis of the batch in states, or None.
        dtype: that of the states of floating point numbers.

    Attributes:
        table: a rule for each operation.
        instead: what to write instead of operations that people use in cells.
        equation: the one that is being read.
        per_row: ``differs``, asked once for each value.
        values: the operands by variables.
    """

    table: Mapping[Any, Rule]
    instead: Mapping[Any, str] = {}

    def __init__(self, body: Body, arrays: Any, axis: int | None, dtype: str) -> None:
        if not body.moving:
            raise Refused("the step returns its state as it was, and so needs no loop")
        self.body, self.axis, self.dtype = body, axis, dtype
        rows = None if axis is None else body.states[body.moving[0]].shape[axis]
        if rows == 0:  # on which no reading can be tried
            raise Refused("the batch has no rows")
        self.graph = Graph(arrays, rows)
        self.values: dict[Variable, Any] = {}
        self.per_row = functools.cache(self.differs)
        self.equation = Equation(None, (), {}, [])

    def read(self, names: Sequence[str], title: str) -> Reading:
        """Reads the step.

        Args:
            names: of all states, "" where there is none.
            title: the name of the cell.
        """
        body, graph = self.body, self.graph
        before = [body.states[k] for k in body.moving]
        after = [body.after[k] for k in body.moving]
        for k, v in zip(body.moving, before, strict=True):
            made = body.after[k].equation
            graph.where = made.where if made else ""
            self._check(v)
            self.values[v] = graph.state(v.shape, self.axis, v.boolean, names[k])
        for equation in body.needed(after, before):
            if equation.results[0].kind != "S":
                continue
            results = self.apply(equation, self.operand)
            for v, value in zip(equation.results, results, strict=False):
                if value is not None:
                    self._check(v)
                    self.values[v] = value
        graph.where = ""
        pairs = [(self.values[v], self.operand(new)) for v, new in zip(before, after, strict=True)]
        return read(graph, pairs, title)

    def apply(self, equation: Equation, operand: Callable[[Variable], Any]) -> list[Any]:
        """The results of an equation, by its row of the table."""
        graph, rule = self.graph, self.table.get(equation.op)
        graph.where, self.equation = equation.where, equation
        if rule is None:
            others = "operations that cells have, as docs/cells.md lists them"
            problem = f"no cell has {equation.name} of a value that depends on a state"
            graph.refuse(problem, self.instead.get(equation.op, others))

        def placed(leaf: Any) -> Any:
            return operand(leaf) if isinstance(leaf, Variable) else self.argument(leaf)

        arguments, options = mapped(placed, (equation.arguments, equation.options))
        if isinstance(rule, str):
            return [self.op(rule, *arguments)]
        made = rule(self, *arguments, **options)
        return made if isinstance(made, list) else [made]

    def _check(self, v: Variable) -> None:
        if v.dtype in (self.dtype, "bool"):
            return
        if v.equation is None:
            self.graph.refuse(
                f"the states are {self.dtype} and {v.dtype}",
                "compute the whole step in one dtype, counters too",
            )
        if v.floating and any(o.dtype == self.dtype for o in v.equation.operands):
            self.graph.refuse(
                f"a value that depends on a state is converted from {self.dtype} to {v.dtype} "
                "within the step", f"compute all of the step in {self.dtype}",
            )  # fmt: skip
        self.graph.refuse(
            f"{v.equation.name} makes numbers of {v.dtype} from a state",
            f"compute in {self.dtype}, and convert outputs after the loop",
        )

    # -- values ----------------------------------------------------------------------------------
    def operand(self, v: Variable) -> Any:
        """A value as an operand."""
        if v not in self.values:
            self.values[v] = self.outer(v)
        return self.values[v]

    def outer(self, v: Variable) -> Outer:
        """A value of kind F or X, which the framework computes."""
        arrays, cast = self.graph.arrays, v.dtype not in ("bool", self.dtype)

        def get(run: Any) -> Array:
            array = run.fixed(v) if v.kind == "F" else run.moving(v)
            return arrays.cast(array, run.dtype) if cast else array

        outer = Outer(v.kind, v.shape, get, v.boolean, self.per_row(v), v.number, axis=v.axis)
        if v.kind == "X" and v.equation is not None:
            outer.units = self._units(v, v.equation)
        return outer

    def differs(self, v: Variable) -> bool:
        """Whether a value may differ from row to row of the batch; see ``per_row``."""
        axis, equation = self.axis_of(v), v.equation
        if axis is None or axis >= len(v.shape) or v.shape[axis] == 1 or v.number is not None:
            return False
        if equation is None or equation.random or not self.pointwise(equation):
            return True
        return any(map(self.per_row, equation.operands))

    def pointwise(self, equation: Equation) -> bool:
        """Whether results are alike in all rows where the operands are."""
        return isinstance(self.table.get(equation.op), str)

    def axis_of(self, v: Variable) -> int | None:
        """The axis of the batch of a value of kind F or X."""
        return self.axis

    def argument(self, leaf: Any) -> Any:
        """An argument that is no variable."""
        return leaf

    def _units(self, v: Variable, equation: Equation) -> Value | None:
        """The units of an X value that is affine in others; None for any other."""
        graph, rule = self.graph, self.table.get(equation.op)
        dtypes = {o.dtype for o in (*equation.operands, v) if o.kind == "X"}
        if dtypes - {self.dtype} and dtypes != {"bool"}:
            return None
        if rule is None or (isinstance(rule, str) and rule not in AFFINE):
            return None

        def based(o: Variable) -> Any:
            outer = self.operand(o)
            return graph.base(outer, self.axis_of(o)) if o.kind == "X" else outer

        where, outside = graph.where, self.equation
        for o in equation.operands:
            self.operand(o)
        start = len(graph.sources)
        try:
            made = self.apply(equation, based)[equation.results.index(v)]
        except Refused:
            return None
        finally:
            graph.where, self.equation = where, outside
        affine = all(_affine(graph, source) for source in graph.sources[start:])
        return made if affine and isinstance(made, Value) else None

    # -- rules -----------------------------------------------------------------------------------
    def structural(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """The result of a function that only moves numbers."""
        operands = list(leaves((arguments, options), (Value, Outer)))

        def run(*ids: Array) -> Any:
            args, more = filled((arguments, options), map(self.packed, ids), (Value, Outer))
            return function(*args, **more)

        return self.graph.structural(run, *operands)

    def moved(self, *arguments: Any, **options: Any) -> Any:
        """The result of the equation, if its own function only moves numbers."""
        return self.structural(self.equation.source, *arguments, **options)

    def packed(self, ids: Array) -> Array:
        """Units as the framework's functions take them."""
        return ids

    def convert(self, value: Any, *_: Any, **__: Any) -> Any:
        """A value in another dtype."""
        old, new = self.equation.operands[0], self.equation.results[0]
        if old.dtype == new.dtype:
            return value
        if new.boolean:
            return self.op("truth", value)
        self._check(new)
        return self.op("number", value)


def _affine(graph: Graph, source: Any) -> bool:
    """Whether a source computes what is affine in inputs."""
    if source.sort in ("outer", "product") or source.kind == "F":
        return True
    moving = [i for i, o in enumerate(source.operands)
              if not isinstance(o, float) and graph.kind(o) == "X"]  # fmt: skip
    if source.sort != "op" or source.op not in AFFINE:
        return False
    return not (len(moving) > 1 if source.op == "mul" else source.op == "div" and 1 in moving)


def row(name: str) -> Rule:
    """A row that calls a function of the reader with operands alone, whatever the options."""
    return lambda reader, *operands, **_: getattr(reader, name)(*operands)
