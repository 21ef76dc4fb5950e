"""A graph of units, printed as the text of an ``@cell``, and the arrays of its call.

Users can keep the text: it is the cell that runs.
"""

from __future__ import annotations

import functools
import keyword
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from anycell import lang
from anycell.lang.cell import ARRAYS
from anycell.lang.text import from_text
from anycell.read.affine import Affine, Constant, Matrix, affine
from anycell.read.units import Graph, Refused, Run, Source, Units, Value

# How tightly the operators of Python bind; a call binds as a name does.
COMPARISON, OR, AND, SUM, PRODUCT, SIGN, NAME = range(7)

# What each op is in the language: how tightly it binds, and its text. "{0:4}" is the first operand,
# in parentheses unless it binds as tightly as that.
FORMS: dict[str, tuple[int, str]] = {
    "add": (SUM, "{0:3} + {1:4}"),
    "sub": (SUM, "{0:3} - {1:4}"),
    "mul": (PRODUCT, "{0:4} * {1:5}"),
    "div": (PRODUCT, "{0:4} / {1:5}"),
    "neg": (SIGN, "-{0:5}"),
    "identity": (NAME, "{0:6}"),
    "square": (PRODUCT, "{0!s} * {0!s}"),
    "reciprocal": (PRODUCT, "1 / {0:5}"),
    "rsqrt": (PRODUCT, "1 / sqrt({0})"),
    "log1p": (NAME, "log(1 + {0:4})"),
    "expm1": (SUM, "exp({0}) - 1"),
    "number": (NAME, "where({0}, 1.0, 0.0)"),
    "truth": (COMPARISON, "{0:3} != 0"),
    "sign": (NAME, "where({0:3} > 0, 1.0, where({0:3} < 0, -1.0, 0.0))"),
    "logical_and": (AND, "{0:3} & {1:3}"),
    "logical_or": (OR, "{0:3} | {1:3}"),
    "logical_not": (SIGN, "~{0:6}"),
    "logical_xor": (OR, "{0:6} & ~{1:6} | ~{0:6} & {1:6}"),
}
FORMS |= {
    op: (COMPARISON, f"{{0:3}} {sign} {{1:3}}")
    for op, sign in {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}.items()
}
FORMS |= {
    op: (NAME, f"{op}({{0}})")
    for op in (
        "exp log sqrt abs sigmoid tanh relu softplus log_sigmoid hard_sigmoid stop_gradient sin "
        "cos erf silu elu softsign gelu"
    ).split()
}
FORMS |= {op: (NAME, f"{op}({{0}}, {{1}})") for op in "minimum maximum pow leaky_relu".split()}
FORMS |= {
    "where": (NAME, "where({0}, {1}, {2})"),
    "elu_alpha": (NAME, "elu({0}, {1})"),
    "gelu_tanh": (NAME, 'gelu({0}, approximate="tanh")'),
}
SYMBOLS = "PQRSUVWXYZKLMNJGEFDCA"  # of sizes other than the hidden size


@dataclass(eq=False)
class Node:
    """An expression of the printed cell.

    Attributes:
        form: its text, with a place for each operand.
        size: the number of its units.
        name: the variable that holds it.
    """

    form: str
    operands: tuple[Node, ...] = ()
    level: int = NAME
    size: int = 1
    uses: int = 0
    name: str = ""

    def __format__(self, least: str) -> str:
        if self.name:
            return self.name
        text = self.form.format(*self.operands) if self.operands else self.form
        return f"({text})" if self.level < int(least or 0) else text

    def __str__(self) -> str:  # where an operand stands twice
        return format(self, str(NAME))


@dataclass(eq=False)
class Product:
    """A call of ``linear``: its operand, and the rows and columns of the matrix of each output."""

    name: str
    operand: Node
    size: int
    blocks: list[Matrix] = field(default_factory=list)
    outputs: list[Node] = field(default_factory=list)


@dataclass(frozen=True)
class Piece:
    """Units ``start`` to ``end`` of the user's state ``state``: a state of the cell."""

    state: int
    start: int
    end: int
    name: str

    @property
    def size(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, eq=False)
class Flags:
    """A condition on x, for each row, that says at which steps states are held or start anew.

    Attributes:
        source, unit: where it comes from; it holds where the number is 1.
        inverted: whether the flags are where it does not hold.
        restored: for each state of the cell, what resets restore; None for a mask.
    """

    source: Source
    unit: int
    inverted: bool
    restored: tuple[Affine, ...] | None = None

    def array(self, run: Run, arrays: Any) -> Any:
        """``[time, rows]``, boolean."""
        assert self.source.fetch is not None
        values = arrays.take(self.source.fetch(run), 2, self.unit, 1)
        values = arrays.broadcast(values, (run.steps, run.rows, 1))
        values = arrays.reshape(values, (run.steps, run.rows))
        return values < 0.5 if self.inverted else values > 0.5


@dataclass(frozen=True, eq=False)
class Reading:
    """A step that was read: a cell, and how the arrays of its call follow from the user's.

    Attributes:
        text: the cell, as users would write it.
        cell: the cell.
        size: the hidden size.
        gates, params, static: what the cell sees of x and of the weights, by the cell's names.
        weights: the matrices of each output of each ``linear``.
        pieces: the states of the cell.
        flags: resets or a mask, if the step has such a condition on all of its states.
        axis, shapes: of the user's states: the axis of the batch, and the shapes.
    """

    text: str
    cell: lang.Cell
    arrays: Any
    size: int
    gates: tuple[Affine, ...]
    params: Mapping[str, Affine]
    static: Affine | None
    weights: Mapping[str, tuple[Matrix, ...]]
    pieces: tuple[Piece, ...]
    flags: Flags | None
    axis: int | None
    shapes: tuple[tuple[int, ...], ...]

    # -- the arrays of a call --------------------------------------------------------------------
    def call(self, run: Run, first: Sequence[Any]) -> dict[str, Any]:
        """The arguments of ``recurrence`` besides the cell.

        Args:
            run: with ``dtype``, ``steps``, ``rows`` and ``memo``.
            first: the user's states before the first step.
        """
        arrays = self.arrays
        weights = {
            f"weight_{name}": _joined(arrays, 0, [m.transposed(run, arrays) for m in matrices])
            for name, matrices in self.weights.items()
        }
        for name, part in self.params.items():
            weights[name] = arrays.reshape(part.constant(run, arrays), (part.size,))
        call: dict[str, Any] = {"weights": weights, "state": tuple(self._start(run, first))}
        if self.flags is not None:
            call |= self._flags(self.flags, run)
        if self.static is not None:
            value = self.static.constant(run, arrays)
            call["static"] = arrays.broadcast(value, (run.rows, self.static.size))
        if self.projected:
            return call | {"x": self._input(run, weights)}
        return call | {"x": None, "gates": self._gates(run)}

    def _flags(self, flags: Flags, run: Run) -> dict[str, Any]:
        arrays, values = self.arrays, flags.array(run, self.arrays)
        if flags.restored is None:  # a state that is held is also what the step returns
            return {"mask": values, "masked_output": "repeat"}
        restored = []
        for part, piece in zip(flags.restored, self.pieces, strict=True):
            state = part.constant(run, arrays)
            size = self.size if piece.size == 1 else piece.size
            restored.append(arrays.broadcast(state, (run.rows, size)))
        return {"resets": values, "reset_state": tuple(restored)}

    @functools.cached_property
    def projected(self) -> bool:
        """Whether the layer projects x: each gate is a matrix times what comes from outside."""
        whole = not any(part.direct or part.per_row for part in self.gates)
        return whole and bool(self._sources)

    @functools.cached_property
    def _sources(self) -> tuple[Source, ...]:
        """What gates are affine in, in the order of its use."""
        return tuple(dict.fromkeys(source for part in self.gates for source, _ in part.terms))

    @functools.cached_property
    def _merged(self) -> list[Affine]:
        """The gates, with neighbours that are columns of the same matrices as one."""
        merged: list[Affine] = []
        for part in self.gates:
            last = merged[-1] if merged else None
            joined = last and _merge(last, part)
            merged[len(merged) - bool(joined) :] = [joined or part]
        return merged

    def _input(self, run: Run, weights: dict[str, Any]) -> Any:
        """The input of the layer; adds the weights of its projection to ``weights``."""
        arrays, inputs, rows = self.arrays, [], []
        for source in self._sources:
            assert source.fetch is not None
            array = source.fetch(run)
            inputs.append(arrays.broadcast(array, (run.steps, run.rows, source.size)))
        for part in self._merged:
            blocks = []
            for source in self._sources:
                matrices = [m.transposed(run, arrays) for s, m in part.terms if s is source]
                empty = arrays.zeros((part.size, source.size), run.dtype)
                blocks.append(sum(matrices[1:], matrices[0]) if matrices else empty)
            rows.append(_joined(arrays, 1, blocks))
        weights["weight_ih"] = _joined(arrays, 0, rows)
        if any(part.constants for part in self._merged):
            biases = []
            for part in self._merged:
                bias = part.constant(run, arrays)
                empty = arrays.zeros((part.size,), run.dtype)
                biases.append(empty if bias is None else arrays.reshape(bias, (part.size,)))
            weights["bias_ih"] = _joined(arrays, 0, biases)
        return _joined(arrays, 2, inputs)

    def _gates(self, run: Run) -> Any:
        """All gates of all steps: ``[time, rows, sum of their sizes]``."""
        arrays, shape = self.arrays, (run.steps, run.rows)
        if not self.gates:
            return arrays.zeros((*shape, 1), run.dtype)
        parts = [part.value(run, arrays) for part in self._merged]
        return _joined(
            arrays, 2, [arrays.broadcast(part, (*shape, part.shape[-1])) for part in parts]
        )

    # -- states ----------------------------------------------------------------------------------
    def _start(self, run: Run, first: Sequence[Any]) -> list[Any]:
        arrays, start = self.arrays, []
        for piece in self.pieces:
            state = arrays.cast(first[piece.state], run.dtype)
            if self.axis:
                state = arrays.move(state, self.axis, 0)
            state = arrays.reshape(state, (run.rows, -1))
            if piece.size != state.shape[1]:
                state = arrays.take(state, 1, piece.start, piece.size)
            if piece.size == 1:  # a state of one unit is declared as H equal ones
                state = arrays.broadcast(state, (run.rows, self.size))
            start.append(state)
        return start

    def joined(self, state: int, values: Mapping[str, Any]) -> Any:
        """The user's state, from the values of the cell's states by name, ``[..., rows, size]``."""
        arrays, parts = self.arrays, []
        for piece in self.pieces:
            if piece.state == state:
                value = values[piece.name]
                narrow = piece.size == 1 and self.size > 1
                parts.append(arrays.take(value, len(value.shape) - 1, 0, 1) if narrow else value)
        whole = _joined(arrays, len(parts[0].shape) - 1, parts)
        lead, rows = tuple(whole.shape[:-2]), whole.shape[-2]
        units = tuple(n for i, n in enumerate(self.shapes[state]) if i != self.axis)
        if self.axis is None:
            return arrays.reshape(whole, (*lead, *units))
        whole = arrays.reshape(whole, (*lead, rows, *units))
        return arrays.move(whole, len(lead), len(lead) + self.axis) if self.axis else whole

    def names_of(self, state: int) -> tuple[str, ...]:
        """The names of the cell's states that the user's state consists of."""
        return tuple(piece.name for piece in self.pieces if piece.state == state)


def _joined(arrays: Any, axis: int, parts: Sequence[Any]) -> Any:
    return parts[0] if len(parts) == 1 else arrays.cat(list(parts), axis)


def _merge(a: Affine, b: Affine) -> Affine | None:
    """Two neighbours as columns of the same matrices; None if they are not."""
    if (len(a.terms), len(a.constants)) != (len(b.terms), len(b.constants)):
        return None
    terms, constants = [], []
    for (source, matrix), (other, after) in zip(a.terms, b.terms, strict=True):
        if source is not other or not matrix.joins(after):
            return None
        columns = np.concatenate([matrix.columns, after.columns])
        terms.append((source, Matrix(matrix.fetch, matrix.rows, columns, matrix.sign)))
    for constant, next_one in zip(a.constants, b.constants, strict=True):
        if isinstance(constant, Constant) and isinstance(next_one, Constant):
            if not constant.joins(next_one):
                return None
            columns = np.concatenate([constant.columns, next_one.columns])
            constants.append(Constant(constant.fetch, columns, constant.sign, constant.per_row))
        elif constant == next_one:
            constants.append(constant)
        else:
            return None
    return Affine(a.size + b.size, tuple(terms), tuple(constants))


def read(graph: Graph, states: Sequence[tuple[Value, Any]], name: str) -> Reading:
    """Prints the step as a cell.

    Args:
        states: for each state its value before the step, as ``graph.state`` returned it, and after.
        name: the name of the cell.

    Raises:
        Refused: if no cell of the language does the same.
    """
    return _Printer(graph, states, name).reading()


class _Printer:
    def __init__(self, graph: Graph, states: Sequence[tuple[Value, Any]], name: str) -> None:
        self.graph, self.name = graph, _identifier(name) or "Step"
        views = [graph.view(before) for before, _ in states]
        self.axis = views[0][0]
        self.shapes = tuple(before.shape for before, _ in states)
        self.sources = [graph.owner(int(units[0])) for _, _, units in views]
        self.nodes: dict[bytes, Node] = {}
        self.products: dict[tuple[Node, int, int], Product] = {}
        self.gates: dict[str, tuple[Node, Affine]] = {}
        self.params: dict[str, tuple[Node, Affine]] = {}
        self.static: tuple[Node, Affine] | None = None
        after = [
            self._after(value, source, shape)
            for (_, value), source, shape in zip(states, self.sources, self.shapes, strict=True)
        ]
        after, condition, restored = self._conditions(after)
        graph.settle(list(zip(self.sources, after, strict=True)))
        self.pieces = self._pieces()
        self.flags = condition and self._flags(*condition, restored)
        self.index = {(p.state, p.start, p.end): p.name for p in self.pieces}
        self.results = []
        for piece in self.pieces:
            source = self.sources[piece.state]
            node = self.of(after[piece.state][piece.start : piece.end])
            if source.boolean:
                node = self._node("number", node)
            self.results.append(node)

    def _after(self, value: Any, source: Source, shape: tuple[int, ...]) -> Units:
        """The units of a new state."""
        graph = self.graph
        if not isinstance(value, Value):
            value = graph.elementwise(
                "identity", graph.outside(value, shape, self.axis), boolean=source.boolean
            )
        axis, _, units = graph.view(value)
        if axis != self.axis or value.shape != shape:
            graph.refuse("a new state has another layout than the state")
        return units

    # -- masks and resets ------------------------------------------------------------------------
    def _conditions(self, after: list[Units]) -> tuple[list[Units], Any, list[Any] | None]:
        """Takes one ``where`` on all states, by a condition on x, out of the step.

        Returns:
            the new states without it; the unit of the condition and whether it is inverted, or
            None; for resets what is restored for each state.
        """
        masks = [
            self._where(units, source) for units, source in zip(after, self.sources, strict=True)
        ]
        conditions = {mask and mask[0] for mask in masks}
        if len(conditions) == 1 and masks[0] and all(isinstance(m[1], np.ndarray) for m in masks):
            return [mask[1] for mask in masks], conditions.pop(), None
        live = self._live(after)
        starts: list[dict[Any, Any]] = [{} for _ in self.sources]
        renamed: list[tuple[Source, Source]] = []
        for user in live:
            for number, source in enumerate(self.sources):
                if user.sort == "op" and (start := self._where(user.units, source)):
                    condition, value = start
                    if not isinstance(value, float) and self.graph.kind(value) != "F":
                        return after, None, None
                    text = repr(value) if isinstance(value, float) else value.tobytes()
                    starts[number][condition, text] = value
                    renamed.append((user, source))
                elif any(_touches(units, source) for units in _units(user)):
                    return after, None, None
        if any(_touches(units, source) for units in after for source in self.sources):
            return after, None, None
        if any(len(start) != 1 for start in starts):
            return after, None, None
        found = {condition for start in starts for condition, _ in start}
        if len(found) != 1:
            return after, None, None
        for user in live:
            user.operands = [_renamed(operand, renamed) for operand in user.operands]
        values = [next(iter(start.values())) for start in starts]
        return [_renamed(units, renamed) for units in after], found.pop(), values

    def _where(self, units: Units, state: Source) -> tuple[tuple[int, bool], Any] | None:
        """If units are ``where(condition on x, value, state)``: the condition's unit and whether it
        holds where the value is not taken, and the value.
        """
        operands = self.graph.operands("where", units)
        if not operands or isinstance(operands[0], float) or (operands[0] != operands[0][0]).any():
            return None
        unit = int(operands[0][0])
        condition = self.graph.owner(unit)
        if condition.sort != "outer" or condition.kind != "X" or not condition.boolean:
            return None
        for inverted, (value, other) in enumerate((operands[1:], operands[:0:-1])):
            if isinstance(other, np.ndarray) and np.array_equal(other, state.units):
                return (unit, bool(inverted)), value
        return None

    def _live(self, after: Sequence[Units]) -> list[Source]:
        """The sources that new states follow from."""
        graph, live, todo = self.graph, {}, list(after)
        while todo:
            units = todo.pop()
            for run in graph.runs(units):
                source = graph.owner(int(run[0]))
                if id(source) not in live:
                    live[id(source)] = source
                    todo += _units(source)
        return list(live.values())

    def _flags(self, unit: int, inverted: bool, restored: list[Any] | None) -> Flags | None:
        source = self.graph.owner(unit)
        at = unit - source.start
        if restored is None:
            return Flags(source, at, inverted)
        parts = []
        for piece in self.pieces:
            value = restored[piece.state]
            if isinstance(value, float):
                parts.append(Affine(piece.size, (), (value,)))
                continue
            part = affine(self.graph, value[piece.start : piece.end])
            if part is None:
                raise Refused("this step resets states to a value that is computed in the step")
            parts.append(part)
        return Flags(source, at, inverted, tuple(parts))

    def _pieces(self) -> tuple[Piece, ...]:
        taken: set[str] = set()
        pieces = []
        for state, source in enumerate(self.sources):
            parts = self.graph.pieces(source)
            for number, (start, end) in enumerate(parts):
                label = source.name or f"s{state}"
                label = _identifier(label if len(parts) == 1 else f"{label}_{number}")
                if not label or label in taken or label in ARRAYS:
                    label = f"s{state}_{number}"
                taken.add(label)
                pieces.append(Piece(state, start, end, label))
        return tuple(pieces)

    # -- expressions -----------------------------------------------------------------------------
    def _node(self, op: str, *operands: Node, size: int = 0) -> Node:
        level, form = FORMS[op]
        return Node(form, operands, level, size or max(o.size for o in operands))

    def of(self, units: Units) -> Node:
        """The expression of these units."""
        if len(units) > 1 and (units == units[0]).all():
            units = units[:1]
        key = units.tobytes()
        if key not in self.nodes:
            self.nodes[key] = self._of(units)
        return self.nodes[key]

    def _of(self, units: Units) -> Node:
        graph, size = self.graph, len(units)
        spread = graph.spread(units) if size > 1 else None
        if spread is not None:
            operand = self.of(spread.operands[0].reshape(-1))
            return Node(f"{spread.op}({{0}}, groups={spread.size})", (operand,), NAME, size)
        source = graph.owner(int(units[0]))
        at = units - source.start
        if at.min() < 0 or at.max() >= source.size:
            raise Refused(
                "this step joins parts of several values in one operand, or in one state, of sizes "
                "that do not match. Instead: give states and gates one size."
            )
        if source.kind != "S":
            part = affine(graph, units)
            if part is not None:
                return self._outside(part, source.boolean)
        if source.sort == "state":
            return self._state(source, at)
        if source.sort == "product":
            return self._matmul(source, at)
        if source.sort == "reduction":
            return self._reduction(source, at)
        operands = [
            self.of(o[at]) if isinstance(o, np.ndarray) else _number(o) for o in source.operands
        ]
        return self._node(source.op, *operands, size=size)

    def _outside(self, part: Affine, boolean: bool) -> Node:
        """A gate, a parameter or the static input."""
        moving = bool(part.terms)
        if not moving and all(isinstance(c, float) for c in part.constants):
            return _number(sum(c for c in part.constants if isinstance(c, float)))
        if not moving and part.per_row and self.static is None:
            node = Node("e", size=part.size)
            self.static = node, part
        elif not moving and not part.per_row:
            name = f"b{len(self.params)}"
            node = Node(f"p.{name}", size=part.size)
            self.params[name] = node, part
        else:
            name = f"g{len(self.gates)}"
            node = Node(f"x.{name}", size=part.size)
            self.gates[name] = node, part
        return self._node("truth", node) if boolean else node

    def _state(self, source: Source, at: Units) -> Node:
        place = self.sources.index(source), int(at[0]), int(at[-1]) + 1
        if place not in self.index or (at != np.arange(place[1], place[2])).any():
            raise Refused(
                "this step takes units of a state that are not neighbours, by a stride, a roll or "
                "a permutation. Instead: multiply the state by a fixed matrix that picks them."
            )
        node = Node(f"s.{self.index[place]}", size=len(at))
        return self._node("truth", node) if source.boolean else node

    def _reduction(self, source: Source, at: Units) -> Node:
        if len(at) != 1:
            raise Refused(
                f"this step uses the {source.op} of groups of units for other units than those of "
                "its group. Instead: multiply by a matrix of zeros and ones."
            )
        parts = []
        for operand in self._split(source.operands[0][at[0]]):
            whole = Node(f"{source.op}({{0}})", (operand[0],)) if operand[1] > 1 else operand[0]
            parts.append(whole)
        joins = "maximum" if source.op == "max" else "add"
        return functools.reduce(lambda a, b: self._node(joins, a, b), parts)

    def _split(self, units: Units) -> list[tuple[Node, int, int]]:
        """The pieces of units: the expression, its size, and where it begins."""
        pieces, begin = [], 0
        for run in self.graph.runs(units):
            if len(run) > 1 and run[0] == run[1]:  # one unit, repeated
                pieces += [(self.of(run[:1]), 1, begin + i) for i in range(len(run))]
                begin += len(run)
                continue
            source = self.graph.owner(int(run[0]))
            start = int(run[0]) - source.start
            for a, b in self.graph.pieces(source, start, start + len(run)):
                pieces.append((self.of(source.start + np.arange(a, b)), b - a, begin + a - start))
            begin += len(run)
        return pieces

    def _matmul(self, source: Source, at: Units) -> Node:
        terms = []
        assert source.fetch is not None
        for units, row in source.operands:
            for operand, size, begin in self._split(units):
                rows = row + begin, row + begin + size
                terms.append(self._linear(operand, Matrix(source.fetch, rows, at)))
        return functools.reduce(lambda a, b: self._node("add", a, b), terms)

    def _linear(self, operand: Node, matrix: Matrix) -> Node:
        rows, size = matrix.rows[1] - matrix.rows[0], len(matrix.columns)
        if rows > 1 and size > 1:
            key = operand, rows, size
            if key not in self.products:
                self.products[key] = Product(f"w{len(self.products)}", operand, size)
            product = self.products[key]
            output = Node(f"{product.name}_{len(product.outputs)}", (), NAME, size)
            product.blocks.append(matrix)
            product.outputs.append(output)
            return output
        # One row or one column is no matmul: its numbers are parameters.
        arrays = self.graph.arrays
        if rows == 1:
            row = lambda run: arrays.move(matrix.transposed(run, arrays), 0, 1)  # noqa: E731
            constant = Constant(row, np.arange(size))
            return self._node("mul", operand, self._outside(Affine(size, (), (constant,)), False))
        constant = Constant(lambda run: matrix.transposed(run, arrays), np.arange(rows))
        weights = self._outside(Affine(rows, (), (constant,)), False)
        return Node("sum({0:4} * {1:5})", (operand, weights), NAME, 1)

    # -- text ------------------------------------------------------------------------------------
    def reading(self) -> Reading:
        size, symbols = self._symbols()
        for leaves in (self.gates, self.params):
            for leaf, (node, part) in leaves.items():
                if part.size == 1:
                    leaves[leaf] = Node(node.form, size=size), _widened(part, size)
                elif part.size != size:
                    raise Refused("sizes of gates come later")
        if not self.gates:  # a cell has at least one
            self.gates["g0"] = Node("x.g0"), Affine(1, (), (0.0,))
        gates = " ".join(f"{n}{symbols[node.size]}" for n, (node, _) in self.gates.items())
        state = " ".join(p.name + (symbols[p.size] if p.size > 1 else "") for p in self.pieces)
        declared = f'gates="{gates}", state="{state}"'
        arguments = "x, r, s"
        if self.params:
            params = " ".join(f"{n}{symbols[node.size]}" for n, (node, _) in self.params.items())
            declared += f', params="{params}"'
            arguments += ", p"
        if self.static is not None:
            declared += f', static="e{symbols[self.static[0].size]}"'
            arguments += ", e"
        body = self._body(symbols)
        lines = [f"@cell({declared}, bias=False)", f"def {self.name}({arguments}):"]
        lines += [f"    {line}" for line in body]
        used = {"cell", *re.findall(r"\b[a-z_]+(?=\()", "\n".join(body))}
        names = ", ".join(sorted(used & set(lang.__all__)))
        text = f"from anycell import {names}\n\n\n" + "\n".join(lines) + "\n"
        try:
            cell = from_text(text)
        except (lang.CellError, ValueError) as error:
            raise Refused(f"the language has no such cell: {error}") from error
        weights = {product.name: tuple(_blocks(product)) for product in self.products.values()}
        return Reading(
            text, cell, self.graph.arrays, size,
            tuple(part for _, part in self.gates.values()),
            {name: part for name, (_, part) in self.params.items()},
            None if self.static is None else self.static[1],
            weights, self.pieces, self.flags, self.axis, self.shapes,
        )  # fmt: skip

    def _symbols(self) -> tuple[int, dict[int, str]]:
        """The hidden size, and what a declaration says of each size."""
        leaves = [node.size for node, _ in [*self.gates.values(), *self.params.values()]]
        pieces = [piece.size for piece in self.pieces]
        products = [product.size for product in self.products.values()]
        counts = Counter(size for size in [*leaves, *pieces] if size > 1)
        size = max(counts, key=lambda n: (counts[n], n)) if counts else 1
        symbols = {1: ":1", size: ""}
        static = [] if self.static is None else [self.static[0].size]
        for other in [*leaves, *pieces, *products, *static]:
            if other not in symbols:
                if len(symbols) - 2 == len(SYMBOLS):
                    raise Refused("this step has values of more sizes than cells can have")
                symbols[other] = f":{SYMBOLS[len(symbols) - 2]}"
        return size, symbols

    def _body(self, symbols: Mapping[int, str]) -> list[str]:
        """The lines of the function: values that are used twice have names."""
        makers = {id(o): product for product in self.products.values() for o in product.outputs}
        seen: set[int] = set()
        order: list[Node] = []

        def visit(node: Node) -> None:
            node.uses += 1
            if id(node) in seen:
                return
            seen.add(id(node))
            product = makers.get(id(node))
            operands = node.operands if product is None else (product.operand,)
            for operand in operands:
                visit(operand)
            order.append(node)

        for node in self.results:
            visit(node)
        lines: list[str] = []
        written: set[str] = set()
        for node in order:
            product = makers.get(id(node))
            if product is not None:
                if product.name not in written:
                    written.add(product.name)
                    lines.append(_call(product, symbols[product.size]))
            elif node.operands and (node.uses > 1 or _long(node)):
                text = format(node)
                node.name = f"t{sum(line.startswith('t') for line in lines)}"
                lines.append(f"{node.name} = {text}")
        return [*lines, f"return {', '.join(map(format, self.results))}"]


def _widened(part: Affine, size: int) -> Affine:
    def wide(leaf: Any) -> Any:
        if isinstance(leaf, float):
            return leaf
        return replace(leaf, columns=np.repeat(leaf.columns, size))

    terms = tuple((source, wide(matrix)) for source, matrix in part.terms)
    return Affine(size, terms, tuple(map(wide, part.constants)))


def _units(source: Source) -> list[Units]:
    """The units that a source is computed from."""
    units = [o[0] if isinstance(o, tuple) else o for o in source.operands]
    return [u.reshape(-1) for u in units if isinstance(u, np.ndarray)]


def _touches(units: Units, source: Source) -> bool:
    return bool(((units >= source.start) & (units < source.start + source.size)).any())


def _renamed(operand: Any, renamed: Sequence[tuple[Source, Source]]) -> Any:
    """The operand with the units of a source replaced by those of another."""
    if isinstance(operand, tuple):
        return (_renamed(operand[0], renamed), operand[1])
    if isinstance(operand, np.ndarray):
        for old, new in renamed:
            inside = (operand >= old.start) & (operand < old.start + old.size)
            operand = np.where(inside, operand - old.start + new.start, operand)
    return operand


def _long(node: Node) -> bool:
    return len(format(node)) > 60


def _call(product: Product, symbol: str) -> str:
    names = [output.form for output in product.outputs]
    size = f', size="{symbol[1:]}"' if symbol else ""
    gates = f', gates="{" ".join(names)}"'
    made = f'linear({product.operand:0}, "{product.name}"{gates}{size})'
    return f"{', '.join(names)}{',' * (len(names) == 1)} = {made}"


def _blocks(product: Product) -> list[Matrix]:
    """The matrices of the outputs, with neighbouring columns of one matrix as one."""
    blocks: list[Matrix] = []
    for matrix in product.blocks:
        if blocks and blocks[-1].joins(matrix):
            last = blocks.pop()
            columns = np.concatenate([last.columns, matrix.columns])
            matrix = Matrix(last.fetch, last.rows, columns, last.sign)
        blocks.append(matrix)
    return blocks


def _number(value: float) -> Node:
    if not math.isfinite(value):
        if math.isnan(value):
            raise Refused("this step computes with NaN")
        return Node(f"{'-' * (value < 0)}1e999", level=SIGN if value < 0 else NAME)
    return Node(repr(float(value)), level=SIGN if value < 0 else NAME)


def _identifier(text: str) -> str:
    """The text as a name in Python, "" if it cannot be one."""
    name = re.sub(r"\W+", "_", text).strip("_")
    return name if name.isidentifier() and not keyword.iskeyword(name) else ""
