"""A graph of units, printed as the text of an ``@cell``, and the arrays of its call.

Users can keep the text: it is the cell that runs.
"""

from __future__ import annotations

import functools
import keyword
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from anycell import lang
from anycell.lang.cell import ARRAYS
from anycell.lang.declare import MOST, RECURRENT
from anycell.lang.expr import Expr, apply, const, listing, topological
from anycell.lang.text import from_text
from anycell.read.affine import Affine, Constant, Matrix, affine, joined
from anycell.read.arrays import merged, neighbours
from anycell.read.reading import Flags, Piece, Reading
from anycell.read.units import Graph, Refused, Source, Units, Value, occurrences

# Operations that are several of the language's; all others have the name that they have there.
OPS: dict[str, Callable[..., Expr]] = {
    "identity": lambda v: v, "square": lambda v: v * v, "reciprocal": lambda v: 1.0 / v,
    "rsqrt": lambda v: 1.0 / lang.sqrt(v), "log1p": lambda v: lang.log(1.0 + v),
    "expm1": lambda v: lang.exp(v) - 1.0, "number": lambda v: lang.where(v, 1.0, 0.0),
    "truth": lambda v: v != 0.0, "logical_xor": lambda a, b: (a & ~b) | (~a & b),
    "sign": lambda v: lang.where(v > 0.0, 1.0, lang.where(v < 0.0, -1.0, 0.0)),
    "elu_alpha": lang.elu, "gelu_tanh": lambda v: lang.gelu(v, approximate="tanh"),
}  # fmt: skip
JOINED = (
    "this step joins parts of several values in one operand, or in one state, of sizes that do not "
    "match. Instead: give states and gates one size"
)
SYMBOLS = "PQRSUVWXYZKLMNJGEFDCA"  # of sizes other than the hidden size


@dataclass(eq=False)
class Product:
    """A call of ``linear``: its operand, and by output the rows and columns of its matrix."""

    name: str
    operand: Expr
    size: int
    heads: int
    outputs: dict[Expr, Matrix] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The outputs' names."""
        several = len(self.outputs) > 1
        return [f"{self.name}_{k}" * several or self.name for k in range(len(self.outputs))]

    def options(self, symbol: str) -> str:
        """The arguments of the call besides the operand and the name."""
        text = f', gates="{" ".join(self.names)}"' if len(self.outputs) > 1 else ""
        text += f", heads={self.heads}" if self.heads > 1 else ""
        return text + (f', size="{symbol[1:]}"' if symbol else "")


def read(graph: Graph, states: Sequence[tuple[Value, Any]], name: str) -> Reading:
    """Prints the step as a cell.

    Args:
        states: for each state its value before the step, as ``graph.state`` returned it, and after.
        name: the name of the cell.

    Raises:
        Refused: if no cell of the language does the same.
    """
    try:
        return _Printer(graph, states, name).reading()
    except (lang.CellError, ValueError) as error:
        raise Refused(f"the language has no such cell: {error}") from error


class _Printer:
    def __init__(self, graph: Graph, states: Sequence[tuple[Value, Any]], name: str) -> None:
        self.graph, self.name = graph, _identifier(name) or "Step"
        views = [graph.view(before) for before, _ in states]
        self.axis = views[0][0]
        self.shapes = tuple(before.shape for before, _ in states)
        self.sources = [graph.owner(int(units[0])) for _, _, units in views]
        self.nodes: dict[bytes, Expr] = {}
        self.sizes: dict[Expr, int] = {}  # the numbers of units; 1 for those that are not there
        self.products: dict[tuple[Expr, int, int, int], Product] = {}
        self.gates: dict[Expr, Affine] = {}
        self.params: dict[str, Affine] = {}
        self.static: Affine | None = None
        self.reduces = False
        after = [self._after(value, before.shape) for before, value in states]
        after, condition, restored = self._conditions(after)
        live = graph.live([*after, *(source.units for source in self.sources)])
        graph.settle(list(zip(self.sources, after, strict=True)), live)
        self.pieces = self._pieces()
        self.index = {(p.state, p.at.tobytes()): p.name for p in self.pieces}
        self.flags = condition and self._flags(condition, restored)
        self.results = []
        for piece in self.pieces:
            node = self._wide(self.of(after[piece.state][piece.at]), piece.size)
            boolean = self.sources[piece.state].boolean
            self.results.append(self._node("number", node) if boolean else node)

    def _after(self, value: Any, shape: tuple[int, ...]) -> Units:
        """The units of a new state."""
        graph = self.graph
        if not isinstance(value, Value):
            value = graph.elementwise("identity", graph.outside(value, shape, self.axis))
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
        masks = list(map(self._where, after, self.sources))
        held = [mask for mask in masks if mask is not None and isinstance(mask[1], np.ndarray)]
        if len(held) == len(masks) and len({condition for condition, _ in held}) == 1:
            return [value for _, value in held], held[0][0], None
        live = self.graph.live(after)
        read = list(after)  # the units that are used as they are, not where the condition is off
        starts: list[dict[Any, Any]] = [{} for _ in self.sources]
        renamed: list[tuple[Source, Source]] = []
        for user in live:
            restored = False
            for start, source in zip(starts, self.sources, strict=True):
                if user.sort == "op" and (where := self._where(user.units, source)):
                    condition, value = where
                    text = repr(value) if isinstance(value, float) else value.tobytes()
                    start[condition, text] = value
                    renamed.append((user, source))
                    restored = isinstance(value, float) or self.graph.kind(value) == "F"
            read += [] if restored else user.operand_units
        conditions = {condition for start in starts for condition, _ in start}
        used = {source for units in read for source, _ in self.graph.owners(units)}
        if not used.isdisjoint(self.sources) or {len(conditions), *map(len, starts)} != {1}:
            return after, None, None
        for user in live:
            user.operands = [_renamed(operand, renamed) for operand in user.operands]
        values = [next(iter(start.values())) for start in starts]
        return [_renamed(units, renamed) for units in after], conditions.pop(), values

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

    def _flags(self, condition: tuple[int, bool], restored: list[Any] | None) -> Flags:
        (unit, inverted), graph = condition, self.graph
        source = graph.owner(unit)
        at = unit - source.start
        if restored is None:
            return Flags(source, at, inverted)
        parts = []
        for piece in self.pieces:
            value = restored[piece.state]
            number = isinstance(value, float)
            part = Affine(piece.size, (), (value,)) if number else affine(graph, value[piece.at])
            if part is None:
                raise Refused("this step resets states to a value that is computed in the step")
            parts.append(part)
        return Flags(source, at, inverted, tuple(parts))

    def _pieces(self) -> tuple[Piece, ...]:
        taken: set[str] = set()
        pieces = []
        for state, source in enumerate(self.sources):
            for number, at in enumerate(source.pieces):
                label = source.name or f"s{state}"
                label = _identifier(label if len(source.pieces) == 1 else f"{label}_{number}")
                if not label or label in taken or label in ARRAYS:
                    label = f"s{state}_{number}"
                taken.add(label)
                pieces.append(Piece(state, at, label))
        if len(pieces) > MOST:
            raise Refused(
                f"parts of the states move apart, into {len(pieces)} states of a cell, which may "
                f"have {MOST}",
                "fewer parts, such as a shorter delay",
            )
        return tuple(pieces)

    # -- expressions -----------------------------------------------------------------------------
    def _node(self, op: str, *operands: Expr) -> Expr:
        function = OPS.get(op) or getattr(lang, op, None) or functools.partial(apply, op)
        try:
            node = function(*operands)
        except lang.CellError as error:
            raise Refused(f"the language has no such cell: {error}") from error
        return self._sized(node, max(self.sizes.get(o, 1) for o in operands))

    def _sized(self, node: Expr, size: int) -> Expr:
        self.sizes.setdefault(node, size)
        return node

    def _leaf(self, kind: str, name: str, size: int) -> Expr:
        """A state, a gate, a parameter or the static input."""
        return self._sized(Expr(kind, (), (name,)), size)

    def of(self, units: Units) -> Expr:
        """The expression of these units."""
        if len(units) > 1 and (units == units[0]).all():
            units = units[:1]
        key = units.tobytes()
        if key not in self.nodes:
            try:
                self.nodes[key] = self._of(units)
            except Refused as refusal:
                raise refusal.at(self.graph.owner(int(units[0])).where) from None
        return self.nodes[key]

    def _of(self, units: Units) -> Expr:
        graph, size = self.graph, len(units)
        spread = graph.spread(units) if size > 1 else None
        if spread is not None and spread.sort == "reduction":
            operand = self.of(spread.operands[0].reshape(-1))
            return self._sized(getattr(lang, spread.op)(operand, groups=spread.size), size)
        known = graph.whole(units)
        if known is None:
            raise Refused(JOINED)
        source, at = known
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
        if source.op == "add" and (summed := self._summed(*operands)) is not None:
            return summed
        return self._node(source.op, *operands)

    def _summed(self, total: Any, gate: Any) -> Expr | None:
        """A sum with a gate added to a product in it, which a kernel accumulates onto the gate;
        None if there is no product.
        """
        if getattr(gate, "op", "") != "x" or total.op not in ("linear", "add", "sub"):
            return None
        if total.op == "linear":
            return self._node("add", total, gate)
        a, b = total.args
        if (inner := self._summed(a, gate)) is not None:
            return self._node(total.op, inner, b)
        inner = self._summed(b, gate) if total.op == "add" else None
        return None if inner is None else self._node("add", a, inner)

    def _wide(self, node: Expr, size: int) -> Expr:
        """A value of one unit as ``size`` equal ones, where their number matters."""
        if self.sizes.get(node, 1) == size:
            return node
        constant = self.graph.arrays.constant
        ones = self._param(size, lambda run: constant(np.ones((1, size)), run.dtype))
        return self._node("mul", node, ones)

    def _param(self, size: int, fetch: Callable[[Any], Any]) -> Expr:
        """The parameter of the numbers ``fetch(run) -> [1, size]``."""
        constant = Constant(fetch, np.arange(size))
        return self._outside(Affine(size, (), (constant,)), False)

    def _outside(self, part: Affine, boolean: bool) -> Expr:
        """A gate, a parameter or the static input."""
        moving = bool(part.terms)
        if not moving and all(isinstance(c, float) for c in part.constants):
            return _number(sum(c for c in part.constants if isinstance(c, float)))
        if not moving and part.per_row and self.static is None:
            node, self.static = self._leaf("static", "e", part.size), part
        elif not moving and not part.per_row:
            name = f"b{len(self.params)}"
            node, self.params[name] = self._leaf("param", name, part.size), part
        else:
            node = self._leaf("x", f"g{len(self.gates)}", part.size)
            self.gates[node] = part
        return self._node("truth", node) if boolean else node

    def _state(self, source: Source, at: Units) -> Expr:
        number, order = self.sources.index(source), np.sort(at)
        place = number, order.tobytes()
        if place not in self.index:
            raise Refused(
                "this step takes several units of a state together that it also takes apart",
                "give the state's parts names of their own, as states",
            )
        if (at == order).all():
            node = self._leaf("state", self.index[place], len(at))
            return self._node("truth", node) if source.boolean else node
        if source.boolean:
            raise Refused("this step takes the units of a boolean state in another order")
        # Another order, as by a roll, is a product with a matrix of zeros and ones.
        picks = Matrix(None, np.arange(len(at)), np.searchsorted(order, at))
        return self._output(self.of(source.start + order), picks, len(at))

    def _reduction(self, source: Source, at: Units) -> Expr:
        if len(at) != 1:
            raise Refused(
                f"this step uses the {source.op} of groups of units for other units than those of "
                "its group",
                "multiply by a matrix of zeros and ones",
            )
        self.reduces = True
        units = source.operands[0][at[0]]
        pieces = list(self._split(units))
        op = "sum" if source.op == "mean" and len(pieces) > 1 else source.op
        parts = [
            getattr(lang, op)(operand) if len(places) > 1 else operand for operand, places in pieces
        ]
        joins = "maximum" if op == "max" else "add"
        total = functools.reduce(lambda a, b: self._node(joins, a, b), parts)
        whole = op == source.op
        return total if whole else self._node("mul", total, _number(1.0 / len(units)))

    def _split(self, units: Units) -> Iterator[tuple[Expr, np.ndarray]]:
        """The pieces that units consist of, in any order, and the places of their units."""
        turns = occurrences(units)
        for turn in range(int(turns.max()) + 1):
            chosen = np.flatnonzero(turns == turn)
            for source, inside in self.graph.owners(units[chosen]):
                places = chosen[inside]
                at = units[places] - source.start
                for piece in source.pieces:
                    if (here := np.isin(at, piece)).any():
                        if here.sum() != len(piece):
                            raise Refused(JOINED)
                        order = np.argsort(at[here])
                        node = self._wide(self.of(source.start + piece), len(piece))
                        yield node, places[here][order]

    def _matmul(self, source: Source, at: Units) -> Expr:
        if source.heads > 1:
            return self._heads(source, at)
        terms = [
            self._linear(operand, Matrix(source.fetch, row + places, at))
            for units, row in source.operands
            for operand, places in self._split(units)
        ]
        return functools.reduce(lambda a, b: self._node("add", a, b), terms)

    def _heads(self, source: Source, at: Units) -> Expr:
        """A block-diagonal product of all heads, which are used alike."""
        heads, width = source.heads, source.size // source.heads
        columns = at[: len(at) // heads]
        alike = np.arange(heads)[:, None] * width + columns
        (units, _), *_ = source.operands
        (operand, places), *others = self._split(units)
        if others or not neighbours(places) or not np.array_equal(at, alike.reshape(-1)):
            raise Refused(
                "this step multiplies parts of a state by matrices of their own, and uses the "
                "products of the parts differently",
                "write one product for each part",
            )
        rows = np.arange(len(units) // heads)
        return self._output(operand, Matrix(source.fetch, rows, columns), len(at), heads)

    def _output(self, operand: Expr, matrix: Matrix, size: int, heads: int = 1) -> Expr:
        """An output of the ``linear`` of this operand and size."""
        key = operand, len(matrix.rows), size, heads
        if key not in self.products:
            self.products[key] = Product(f"w{len(self.products)}", operand, size, heads)
        product = self.products[key]
        name = f"{product.name}_{len(product.outputs)}"
        output = self._sized(_linear(operand, product.name, name), size)
        product.outputs[output] = matrix
        return output

    def _linear(self, operand: Expr, matrix: Matrix) -> Expr:
        rows, size = len(matrix.rows), len(matrix.columns)
        if rows > 1 and size > 1:
            return self._output(operand, matrix, size)
        # One row or one column is no matmul: its numbers are parameters.
        arrays = self.graph.arrays
        if rows == 1:
            row = self._param(size, lambda run: matrix.array(run, arrays))
            return self._node("mul", operand, row)
        return lang.sum(operand * self._param(rows, lambda run: matrix.transposed(run, arrays)))

    # -- text ------------------------------------------------------------------------------------
    def reading(self) -> Reading:
        size, symbols = self._symbols()
        self._sort()
        self._recur(size)
        if not self.gates:  # a cell has at least one
            self.gates[Expr("x", (), ("g0",))] = Affine(1, (), (0.0,))
        gates = {f"g{k}": part for k, part in enumerate(self.gates.values())}
        leaves = [part.size for part in (*gates.values(), *self.params.values())]
        if self.reduces and len(symbols) > 2 and 1 not in {*leaves, *(p.size for p in self.pieces)}:
            # A cell that declares a size 1 takes a reduction as one number, which fits any size.
            self.params["one"] = Affine(1, (), (1.0,))
        parts: dict[str, Mapping[str, Any]] = {
            "gates": gates,
            "state": {piece.name: piece for piece in self.pieces},
        }
        parts |= {"params": self.params} if self.params else {}
        parts |= {"static": {"e": self.static}} if self.static else {}
        declared = "".join(
            f'{kind}="{" ".join(f"{n}{symbols[part.size]}" for n, part in named.items())}", '
            for kind, named in parts.items()
        )
        arguments = "x, r, s" + ", p" * bool(self.params) + ", e" * bool(self.static)
        body = self._body(symbols)
        lines = [f"@cell({declared}bias=False)", f"def {self.name}({arguments}):"]
        if self.flags is not None:
            option = "mask" if self.flags.restored is None else "resets"
            lines.append(f"    # the step's condition on all states is {option}= of the call")
        lines += [f"    {line}" for line in body]
        used = {"cell", *re.findall(r"\b[a-z_]+(?=\()", "\n".join(body))}
        names = ", ".join(sorted(used & set(lang.__all__)))
        text = f"from anycell import {names}\n\n\n" + "\n".join(lines) + "\n"
        cell = from_text(text)
        weights = {
            product.name: (product.heads, tuple(merged(product.outputs.values(), joined)))
            for product in self.products.values()
        }
        return Reading(
            text, cell, self.graph.arrays, size,
            {symbol[1:]: n for n, symbol in symbols.items() if symbol[1:].isalpha()},
            tuple(gates.values()), self.params, self.static, weights, self.pieces, self.flags,
            self.axis, self.shapes, tuple(source.boolean for source in self.sources),
        )  # fmt: skip

    def _sort(self) -> None:
        """Puts gates and outputs in the order of the user's matrices, so that no weight is cut."""
        seen: dict[Any, int] = {}

        def place(matrix: Matrix) -> tuple[int, int]:
            return seen.setdefault(matrix.fetch, len(seen)), int(matrix.columns[0])

        def gate(entry: tuple[Expr, Affine]) -> tuple[int, ...]:
            terms = entry[1].terms
            return (terms[0][0].start, *place(terms[0][1])) if terms else (-1,)

        self.gates = dict(sorted(self.gates.items(), key=gate))
        for product in self.products.values():
            outputs = product.outputs.items()
            product.outputs = dict(sorted(outputs, key=lambda pair: place(pair[1])))

    def _recur(self, size: int) -> None:
        """Makes a product of a state the recurrent projection ``r``, which kernels run fastest.

        ``r`` has an output for each gate of the hidden size, and is of the first state.
        """
        gates = [gate for gate, part in self.gates.items() if part.size == size]
        sums = {node.args for node in topological(self.results) if node.op == "add"}
        for product in self.products.values():
            blocks = product.outputs
            of_state = product.operand.op == "state" and product.heads == 1
            if not of_state or product.size != size or len(blocks) != len(gates):
                continue
            chosen: dict[Expr, Expr] = {}  # by outputs, the gates that they are added to
            for gate in gates:
                added = [o for o in blocks if (o, gate) in sums and o not in chosen]
                chosen |= dict.fromkeys(added[:1], gate)
            places = {gate: output for output, gate in chosen.items()}
            left = (output for output in blocks if output not in chosen)
            outputs = [places[g] if g in places else next(left) for g in gates]
            product.outputs = {output: blocks[output] for output in outputs}
            product.name = RECURRENT
            self._put_first(product.operand.attrs[0])
            return

    def _put_first(self, name: str) -> None:
        """Makes this state the first."""
        order = sorted(range(len(self.pieces)), key=lambda k: self.pieces[k].name != name)
        self.pieces = tuple(self.pieces[k] for k in order)
        self.results = [self.results[k] for k in order]
        if self.flags and self.flags.restored:
            restored = tuple(self.flags.restored[k] for k in order)
            self.flags = replace(self.flags, restored=restored)

    def _symbols(self) -> tuple[int, dict[int, str]]:
        """The hidden size, and what a declaration says of each size."""
        leaves = [part.size for part in (*self.gates.values(), *self.params.values())]
        pieces = [piece.size for piece in self.pieces]
        products = [product.size for product in self.products.values()]
        counts = Counter(size for size in [*leaves, *pieces] if size > 1)
        size = max(counts, key=lambda n: (counts[n], n)) if counts else 1
        symbols = {1: ":1", size: ""}
        static = [] if self.static is None else [self.static.size]
        for other in [*leaves, *pieces, *products, *static]:
            if other not in symbols:
                if len(symbols) - 2 == len(SYMBOLS):
                    raise Refused("this step has values of more sizes than cells can have")
                symbols[other] = f":{SYMBOLS[len(symbols) - 2]}"
        return size, symbols

    def _body(self, symbols: Mapping[int, str]) -> list[str]:
        """The lines of the function."""
        names = {node: f"x.g{k}" for k, node in enumerate(self.gates)}
        names |= {const(math.inf): "1e999", const(-math.inf): "-1e999"}
        named, calls = list[tuple[str, Expr]](), dict[str, str]()
        for product in self.products.values():  # in the order in which they are computed
            name, outputs = product.name, list(product.outputs)
            if name == RECURRENT:
                of_size = [
                    k for k, part in enumerate(self.gates.values()) if symbols[part.size] == ""
                ]
                names |= {output: f"r.g{k}" for k, output in zip(of_size, outputs, strict=True)}
                continue
            if several := len(outputs) > 1:
                named.append((", ".join(product.names), _linear(product.operand, name, name)))
                names |= zip(outputs, product.names, strict=True)
            shown = f"{name!r})" + ("" if several else f".{outputs[0].attrs[1]}")
            calls[shown] = f'"{name}"{product.options(symbols[product.size])})'
        named += [
            (f"new_{p.name}", node) for p, node in zip(self.pieces, self.results, strict=True)
        ]
        text = "\n".join(listing(named, names))
        for shown, call in calls.items():
            text = text.replace(shown, call)
        *lines, last = text.splitlines()
        if len(self.results) == 1:
            return [*lines, f"return {last.partition(' = ')[2]}"]
        return [*lines, last, f"return {', '.join(f'new_{piece.name}' for piece in self.pieces)}"]


def _linear(operand: Expr, name: str, output: str) -> Expr:
    return Expr("linear", (operand,), (name, output))


def _renamed(operand: Any, renamed: Sequence[tuple[Source, Source]]) -> Any:
    """The operand with the units of a source replaced by those of another."""
    if isinstance(operand, tuple):
        return (_renamed(operand[0], renamed), operand[1])
    if isinstance(operand, np.ndarray):
        for old, new in renamed:
            inside = (operand >= old.start) & (operand < old.start + old.size)
            operand = np.where(inside, operand - old.start + new.start, operand)
    return operand


def _number(value: float) -> Expr:
    if math.isnan(value):
        raise Refused("this step computes with NaN")
    return const(value)


def _identifier(text: str) -> str:
    """The text as a name in Python, "" if it cannot be one."""
    name = re.sub(r"\W+", "_", text).strip("_")
    return name if name.isidentifier() and not keyword.iskeyword(name) else ""
