"""A model as a program: one graph of a step, from the graphs of its cells and what lies between.

It is for one row in evaluation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from anycell.lang.cell import ONE, Cell, Linear
from anycell.lang.expr import Expr, apply, const, is_const, rewrite, topological
from anycell.lang.namespaces import namespace
from anycell.lang.ops import TABLE, is_boolean, is_reduction
from anycell.lang.transform import FREE, OUTPUT
from anycell.layer.checks import refuse
from anycell.layer.compression import numbers
from anycell.layer.parts import Affine, Pointwise, Recurrent, Simple
from anycell.layer.rounding import STEPS
from anycell.plan import scales_of

VERSION = 1  # of the functions in the header
WEIGHTS = "float32", "bfloat16"  # the numbers in memory of matrices that have no scales
Array = npt.NDArray[np.float32]


class Place(NamedTuple):
    """Numbers in memory: the array, where in it they begin, and how many there are."""

    array: str
    first: int
    size: int


class Matrix(NamedTuple):
    """Weights ``[out, in]`` and a bias ``[out]``. With scales ``[out]`` the weights are integers of
    8 bits, and what they multiply is rounded to such integers; see ``anycell.layer.rounding``.
    """

    weight: Array
    bias: Array
    scales: Array | None = None


class Memory(NamedTuple):
    """A state: its place in the caller's memory, its first value, and what replaces it."""

    at: Place
    initial: float
    new: Expr
    layer: int


class Start(NamedTuple):
    """The place of a program behind other passes: the inputs of a sample, the numbers of all states
    and of layers before it, and the width of the rows that they left; 0 if it is the first.
    """

    inputs: int
    states: int
    layer: int = 0
    width: int = 0


class Program:
    """One step of a model, or of one pass.

    Leaves of the graph are ``("input", array, place, size)``, ``("state", number)``, ``("param",
    number)``; a product is ``linear(*operands)`` with the numbers of their matrices. The array is
    ``in``, a sample, or ``x``, a row that passes before have left.

    Attributes:
        inputs, outputs: how many numbers a sample has, as far as is known, and a step gives.
        state_size: how many numbers its states have.
        output: the last layer's output.
        memories: the states of all layers.
        matrices: what the products multiply by.
        weights: one of ``WEIGHTS``.
        params: vectors.
        lanes: how many numbers a vector has, which each state begins.
        ends: the outputs of all layers.
    """

    def __init__(self, parts: Sequence[Simple], lanes: int, weights: str, start: Start) -> None:
        self.memories: list[Memory] = []
        self.matrices, self.weights = list[Matrix](), weights
        self.params: list[Array] = []
        width, self.inputs = start.width or start.inputs, start.inputs
        if not width:
            hint = "Export a model that begins with a layer of known inputs."
            refuse("model", "no layer with weights", "one at least", hint)
        rows = "x" if start.width else "in"
        node, self.ends = Expr("input", (), (rows, 0, width)), list[Expr]()
        for number, part in enumerate(parts, start.layer):
            if (width_of(part) or width) != width:
                expected = f"{width}, the outputs of the layer before it"
                refuse("model", f"a layer {number} of {width_of(part)} inputs", expected)
            if isinstance(part, Affine):
                bias = None if part.bias is None else float32(part.bias)
                node = self._product(node, float32(part.weight), bias)
                width = len(self.matrices[-1].bias)
            elif isinstance(part, Pointwise):
                node = self._pointwise(part, node, width)
            else:
                node, width = self._layers(part, node)
        self.outputs = width
        roots = [node, *self.ends, *(memory.new for memory in self.memories)]
        merged = iter(rewrite(roots, self._merge(roots)))
        self.output, self.ends = next(merged), [next(merged) for _ in self.ends]
        self.lanes, self.state_size = lanes, 0
        for k, (at, initial, _, layer) in enumerate(self.memories):
            at = at._replace(first=start.states + self.state_size)
            self.memories[k] = Memory(at, initial, next(merged), layer)
            self.state_size += padded(at.size, lanes)

    def size(self, node: Expr, known: Mapping[Expr, int]) -> int:
        """The count of numbers of a value; 1 fits any other."""
        match node.op:
            case "input":
                return int(node.attrs[2])
            case "state":
                return self.memories[node.attrs[0]].at.size
            case "param":
                return len(self.params[node.attrs[0]])
            case "linear":
                return len(self.matrices[node.attrs[0]].bias)
        if is_reduction(node):
            groups, width = node.attrs
            return 1 if groups == 1 else int(width)
        return max((known[arg] for arg in node.args), default=1)

    # -- composition -------------------------------------------------------------------------------
    def _pointwise(self, part: Pointwise, node: Expr, width: int) -> Expr:
        """Adds a function after a node."""
        params = {str(k): float32(array) for k, array in enumerate(part.arrays)}
        x, leaves = Expr("x", (), ("",)), [Expr("param", (), (name,)) for name in params]
        new = self._embed([part.function(x, *leaves)], {x: node}, params, {}, lambda _: width)
        return new[0]

    def _layers(self, part: Recurrent, node: Expr) -> tuple[Expr, int]:
        """Adds recurrent layers after a node; returns their output and its width."""
        cell, sizes = part.layer.cell, {ONE: 1, **dict(part.layer.sizes)}
        free = Expr("input", (), ("in", self.inputs, 1))
        if FREE in cell.gates:  # the series has no influence where it is free
            self.inputs += 1
            series = Expr("param", (), (len(self.params),))
            self.params.append((np.arange(width_of(part)) < sizes[OUTPUT]).astype(np.float32))
            hidden = apply("gt", apply("mul", free, series), 0.0)
            node = apply("where", hidden, 0.0, node)
        static = Expr("static", (), (cell.static,))
        once = Expr("input", (), ("in", self.inputs, sizes[cell.static_size]))
        self.inputs += (cell.static is not None) * sizes[cell.static_size]
        for learned in part.learned:
            arrays = {name: float32(weight) for name, weight in learned.items()}
            leaves = {
                Expr("x", (), (gate,)): self._gate(cell, sizes, gate, arrays, node)
                if gate != FREE else free for gate in cell.gates
            }  # fmt: skip
            leaves[static], first = once, len(self.memories)
            for k, state in enumerate(cell.states):
                leaves[Expr("state", (), (state.name,))] = Expr("state", (), (first + k,))
            new = self._embed(
                cell.next, leaves, arrays, sizes, lambda n: sizes[cell.sizes.get(n.args[0], "H")],
                cell,
            )  # fmt: skip
            for state, value in zip(cell.states, new, strict=True):
                at = Place("state", 0, sizes[state.size])
                self.memories.append(Memory(at, state.initial, value, len(self.ends)))
            # A copy if it is an old state, which the step overwrites.
            node = Expr("stop_gradient", (new[0],)) if new[0].op == "state" else new[0]
            self.ends.append(node)
        return node, sizes[cell.states[0].size]

    def _gate(
        self, cell: Cell, sizes: Mapping[str, int], gate: str, arrays: Mapping[str, Array],
        node: Expr,
    ) -> Expr:  # fmt: skip
        """The projected input of a gate."""
        rows, name = cell.places(sizes)[gate], "weight_ih"
        further = (_part(arrays.get(of), rows) for of in ("bias_ih", scales_of(name)))
        return self._product(node, arrays[name][rows], *further)

    def _embed(
        self, roots: Sequence[Expr], leaves: Mapping[Expr, Expr], arrays: Mapping[str, Array],
        sizes: Mapping[str, int], width: Callable[[Expr], int], cell: Cell | None = None,
    ) -> list[Expr]:  # fmt: skip
        """Rebuilds a graph on nodes of the program.

        Args:
            leaves: what stands for the leaves of the graph.
            arrays: what the layer learns, by name.
            width: the number of units that a reduction combines.
        """
        products: dict[tuple[Any, ...], Expr] = {}
        matmuls = {l.name: l for l in cell.linears} if cell else {}

        def product(node: Expr, operand: Expr) -> Expr:
            name, output = node.attrs
            key = name, output, operand
            if key not in products:
                products[key] = self._product(operand, *_rows(matmuls[name], output, arrays, sizes))
            return products[key]

        def rule(node: Expr, args: tuple[Expr, ...]) -> Expr | None:
            if node in leaves:
                return leaves[node]
            match node.op:
                case "hyper":
                    return const(cell.hyper[node.attrs[0]]) if cell else None
                case "units":
                    return const(sizes[node.attrs[0]])
                case "keep":  # in evaluation
                    return args[0]
                case "param":
                    self.params.append(arrays[node.attrs[0]])
                    return Expr("param", (), (len(self.params) - 1,))
                case "linear":
                    return product(node, args[0])
                case "preact":
                    x = leaves[Expr("x", (), node.attrs[1:])]
                    return Expr("add", (x, product(node, args[0])))
            if is_reduction(node):
                return Expr(node.op, args, (node.attrs[0], width(node)))
            if args and all(map(is_const, args)) and not is_boolean(node) and node.op in TABLE:
                numbers = [np.float64(arg.attrs[0]) for arg in args]
                return const(TABLE[node.op].meaning(namespace(np.zeros(1)), *numbers))
            return None

        return rewrite(roots, rule)

    def _product(
        self, operand: Expr, weight: Array, bias: Array | None, scales: Array | None = None
    ) -> Expr:
        if self.weights == "bfloat16" and scales is None:
            weight = (bfloat16(weight).astype(np.uint32) << 16).view(np.float32)
        zeros = np.zeros(len(weight), np.float32)
        self.matrices.append(Matrix(weight, zeros if bias is None else bias, scales))
        return Expr("linear", (operand,), (len(self.matrices) - 1,))

    def _merge(self, roots: Sequence[Expr]) -> Callable[[Expr, tuple[Expr, ...]], Expr | None]:
        """The rule that makes one product of a sum of two that nothing else reads."""
        users = Counter([*roots, *(arg for node in topological(roots) for arg in node.args)])

        def rule(node: Expr, args: tuple[Expr, ...]) -> Expr | None:
            if node.op != "add" or any(arg.op != "linear" for arg in args):
                return None
            a, b = args
            if any(users[arg] > 1 for arg in node.args) or self.size(a, {}) != self.size(b, {}):
                return None
            return Expr("linear", a.args + b.args, a.attrs + b.attrs)

        return rule

    # -- what the model computes -------------------------------------------------------------------
    def run(self, x: npt.NDArray[Any], rows: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Runs the graph node by node, in float64, on samples ``[T, inputs]`` and the rows that
        passes before have left; returns ``[T, outputs]``.
        """
        roots = [self.output, *(memory.new for memory in self.memories)]
        states: list[Any] = [np.full(memory.at.size, memory.initial) for memory in self.memories]
        order, outputs = topological(roots), []
        for sample, row in zip(np.asarray(x, np.float64), rows, strict=True):
            leaves = {"in": sample, "x": row}
            values: dict[Expr, Any] = {}
            for node in order:
                args = [values[arg] for arg in node.args]
                values[node] = self._value(node, args, leaves, states)
            states = [np.broadcast_to(values[m.new], m.at.size) for m in self.memories]
            outputs.append(np.broadcast_to(values[self.output], self.outputs))
        return np.array(outputs).reshape(-1, self.outputs)

    def _value(
        self, node: Expr, args: Sequence[Any], rows: Mapping[str, Any], states: Sequence[Any]
    ) -> Any:
        match node.op:
            case "const":
                return np.float64(node.attrs[0])
            case "input":
                array, place, size = node.attrs
                return rows[array][place : place + size]
            case "state":
                return states[node.attrs[0]]
            case "param":
                return self.params[node.attrs[0]].astype(np.float64)
            case "linear":
                pairs = zip(node.attrs, args, strict=True)
                return sum(_multiplied(self.matrices[k], value) for k, value in pairs)
        if not is_reduction(node):
            with np.errstate(all="ignore"):
                return TABLE[node.op].meaning(namespace(rows["in"]), *args)
        groups, width = node.attrs
        whole = np.broadcast_to(args[0], width)[None]
        reduced = TABLE[node.op].meaning(namespace(rows["in"]), whole, groups)[0]
        return reduced[:1] if groups == 1 else reduced


def _multiplied(by: Matrix, x: Any) -> Any:
    x = np.broadcast_to(x, by.weight.shape[1])
    if by.scales is None:
        return by.weight @ x + by.bias
    scale = np.abs(x).max(initial=0.0) / STEPS
    return by.scales * scale * (by.weight @ np.round(x / (scale or 1.0))) + by.bias


def bfloat16(weight: Array) -> npt.NDArray[np.uint16]:
    """The upper half of the bits of numbers, rounded to the nearest even."""
    bits = weight.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def padded(size: int, lanes: int) -> int:
    """The numbers of whole vectors that hold ``size`` numbers."""
    return -(-size // lanes) * lanes


def float32(weight: Any) -> Array:
    """A weight of any framework."""
    return np.ascontiguousarray(numbers(weight), np.float32)


def width_of(part: Simple) -> int:
    """The number of inputs of a part; 0 if it takes any."""
    if isinstance(part, Recurrent):
        return int(part.learned[0]["weight_ih"].shape[1])
    arrays = (part.weight,) if isinstance(part, Affine) else part.arrays
    return int(arrays[0].shape[-1]) if arrays else 0


def _rows(
    l: Linear, output: str, arrays: Mapping[str, Array], sizes: Mapping[str, int]
) -> tuple[Array, Array | None, Array | None]:
    """The weight of one output of a matmul, ``[out, in]``, its bias and its scales; heads become
    blocks.
    """
    k, size = l.declared.index(output), sizes[l.out_size]
    high, rows = size // l.heads, slice(k * size, (k + 1) * size)
    of_head = (slice(None),) * (l.heads > 1) + (slice(k * high, (k + 1) * high),)
    block, scales = arrays[l.weight][of_head], _part(arrays.get(scales_of(l.weight)), of_head)
    if l.heads > 1:
        parts, wide = block, block.shape[-1]
        block = np.zeros((size, wide * l.heads), np.float32)
        for head, part in enumerate(parts):
            block[head * high : (head + 1) * high, head * wide : (head + 1) * wide] = part
    return block, _part(arrays.get(l.bias_name), rows), scales if scales is None else scales.ravel()


def _part(array: Array | None, rows: Any) -> Array | None:
    return None if array is None else array[rows]
