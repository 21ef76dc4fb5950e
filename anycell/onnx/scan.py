"""Any cell as a ``Scan`` of ONNX, whose body is printed from the cell's graph and its frame."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import NodeProto, TensorProto, helper, numpy_helper

from anycell.lang import ops
from anycell.lang.cell import ONE, Cell, Linear, rewritten
from anycell.lang.expr import Expr, as_expr, topological
from anycell.lang.ops import is_reduction
from anycell.lang.transform import FREE
from anycell.plan import Layer

Array = npt.NDArray[Any]

# The operator of each op that has one.
OPERATORS = {
    "neg": "Neg", "add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div", "exp": "Exp",
    "log": "Log", "sqrt": "Sqrt", "abs": "Abs", "sign": "Sign", "sigmoid": "Sigmoid",
    "tanh": "Tanh", "relu": "Relu", "softplus": "Softplus", "sin": "Sin", "cos": "Cos",
    "erf": "Erf", "pow": "Pow", "minimum": "Min", "maximum": "Max", "lt": "Less",
    "le": "LessOrEqual", "gt": "Greater", "ge": "GreaterOrEqual", "eq": "Equal",
    "logical_and": "And", "logical_or": "Or", "logical_not": "Not", "where": "Where",
    "sum": "ReduceSum", "mean": "ReduceMean", "max": "ReduceMax",
}  # fmt: skip
# What other ops are made of. In evaluation a random mask is its mean.
MADE: dict[str, Callable[..., Expr]] = {
    "hard_sigmoid": lambda a: ops.clip(a / 6.0 + 0.5, 0.0, 1.0),
    "keep": lambda rate: rate,
    "ne": lambda a, b: ~(a == b),
    "stop_gradient": lambda a: a,
}


class Graph:
    """A graph in the making. Names of values are unique in a model; constants are the model's.

    Attributes:
        kind: the type of real numbers, as ONNX has it.
    """

    def __init__(self, dtype: Any, outer: Graph | None = None) -> None:
        self.dtype, self.kind = np.dtype(dtype), helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        self.nodes: list[NodeProto] = []
        self.constants: list[TensorProto] = [] if outer is None else outer.constants
        self.numbers: Iterator[int] = itertools.count() if outer is None else outer.numbers

    def name(self, of: str) -> str:
        """A new name."""
        return f"{of}_{next(self.numbers)}"

    def constant(self, value: Any, dtype: Any = None) -> str:
        """The name of a constant, of real numbers by default."""
        array, name = np.asarray(value, dtype or self.dtype), self.name("constant")
        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def integers(self, *values: int) -> str:
        """A constant vector, of axes or sizes."""
        return self.constant(values, np.int64)

    def __call__(self, op: str, *inputs: str, count: int = 0, **attributes: Any) -> Any:
        """Adds a node; returns its output, or a list of ``count``."""
        outputs = [self.name(op.lower()) for _ in range(count or 1)]
        self.nodes.append(helper.make_node(op, inputs, outputs, **attributes))
        return outputs if count else outputs[0]

    def linear(self, x: str, weight: Array, bias: Array | None) -> str:
        """``x @ weight.T + bias``."""
        product = str(self("MatMul", x, self.constant(weight.T)))
        return product if bias is None else str(self("Add", product, self.constant(bias)))

    def split(self, value: str, sizes: Sequence[int], axis: int) -> list[str]:
        """The parts of a value along an axis."""
        parts = self("Split", value, self.integers(*sizes), count=len(sizes), axis=axis)
        return list(parts)


def scan(
    graph: Graph,
    layer: Layer,
    d: int,
    weights: Mapping[str, Array],
    x: str,
    call: Mapping[str, str],
) -> tuple[str, list[str]]:
    """Adds direction number d of a layer.

    Args:
        weights: by the names of ``layer.signature``.
        x: ``[T, B, input]``.
        call: the arrays of the call: "valid", "starts", "free", flags ``[T, B, 1]``, "static", and
            for each state that enters or is restored "state h" or "reset_state h", ``[B, size]``.

    Returns:
        the outputs ``[T, B, size]`` and the final states ``[B, size]``.
    """
    cell, body = layer.cell, Graph(graph.dtype, graph)
    sizes, reverse = {ONE: 1, **dict(layer.sizes)}, int(layer.options.reverse[d])
    rows = graph("Shape", x, start=1, end=2)

    def full(value: Any, size: int, dtype: Any = None) -> str:
        shape = graph("Concat", rows, graph.integers(size), axis=0)
        return str(graph("Expand", graph.constant(value, dtype), shape))

    def first(kind: str) -> list[str]:
        names = [(call.get(f"{kind} {s.name}"), s) for s in cell.states]
        return [name or full(s.initial, sizes[s.size]) for name, s in names]

    def choose(rows: str, yes: Sequence[str], no: Sequence[str]) -> list[str]:
        return [body("Where", rows, a, b) for a, b in zip(yes, no, strict=True)]

    gates = graph.linear(x, weights["weight_ih"], weights.get("bias_ih"))
    if FREE in cell.gates:
        free = graph("Cast", call["free"], to=graph.kind)
        gates = graph("Concat", gates, free, axis=2)
    sequences = [gates, *(call[name] for name in ("valid", "starts") if name in call)]
    inner, *flags = [body.name(name) for name in ("gates", *("flag" for _ in sequences[1:]))]
    before, carried, extra = first("state"), [body.name(n) for n in cell.state_names], list[str]()
    valid, starts = flags[0] if "valid" in call else "", flags[-1] if "starts" in call else ""
    entering, after = carried, list[str]()
    if starts:
        starts = body("And", valid, starts) if valid else starts
        if reverse:  # restores before the step that precedes a start; masked ones are no steps
            before, extra = [*before, full(False, 1, bool)], [body.name("last")]
            after = [starts]
            if valid:
                after = [body("Or", starts, body("And", body("Not", valid), extra[0]))]
            starts = body("And", valid, extra[0]) if valid else extra[0]
        entering = choose(starts, first("reset_state"), carried)
    new = held = _step(body, cell, sizes, weights, inner, entering, call.get("static", ""))
    if valid:
        held = choose(valid, new, entering)
    shown = held[0]
    if layer.options.apart(bool(valid)):
        shown = body("Where", valid, new[0], body.constant(0.0))
    # An output of a graph is a value of its own: a state may be another, or stay as it is.
    results = [body("Identity", value) for value in (*held, *after, shown)]
    states, count = len(held), len(sequences)
    kinds = dict.fromkeys((*flags, *extra, *results[states:-1]), TensorProto.BOOL)
    inputs, outputs = (
        [helper.make_tensor_value_info(n, kinds.get(n, graph.kind), None) for n in names]
        for names in ([*carried, *extra, inner, *flags], results)
    )
    *finals, output = graph(
        "Scan", *before, *sequences, count=len(results), num_scan_inputs=count,
        body=helper.make_graph(body.nodes, "step", inputs, outputs),
        scan_input_directions=[reverse] * count, scan_output_directions=[reverse],
    )  # fmt: skip
    return output, finals[:states]


def _step(
    graph: Graph, cell: Cell, sizes: Mapping[str, int], weights: Mapping[str, Array], gates: str,
    states: Sequence[str], static: str,
) -> list[str]:  # fmt: skip
    """Adds a step of a cell without its frame; returns the new states, ``[B, size]``."""

    def softplus(a: Expr) -> Expr:
        if graph.dtype == np.float32:
            return ops.softplus(a)
        return ops.maximum(a, 0.0) + ops.log(
            1.0 + ops.exp(-ops.abs(a))
        )  # ONNX Runtime has no other

    made = {**MADE, "softplus": softplus, "log_sigmoid": lambda a: -softplus(-a)}
    numbers: dict[str, Mapping[str, float]] = {"hyper": cell.hyper, "units": sizes}

    def simpler(node: Expr, args: tuple[Expr, ...]) -> Expr | None:
        if node.op in numbers:
            return as_expr(numbers[node.op][node.attrs[0]])
        return made[node.op](*args) if node.op in made else None

    plain: Cell = rewritten(cell, simpler, cell.declared)
    widths = {**cell.gate_sizes, FREE: ONE} if FREE in cell.gates else cell.gate_sizes
    parts = graph.split(gates, [sizes[size] for size in widths.values()], -1)
    values = {Expr("x", (), (gate,)): x for gate, x in zip(cell.gates, parts, strict=True)}
    values |= {Expr("state", (), (n,)): s for n, s in zip(cell.state_names, states, strict=True)}
    values |= {Expr("static", (), (cell.static,)): static}
    full = {*values}  # nodes with a number for each row and unit; others broadcast
    values |= {Expr("param", (), (n,)): graph.constant(weights[n]) for n in cell.param_names}
    products: dict[tuple[Any, ...], str] = {}

    def row(node: Expr, size: int) -> str:
        """A value with all its units."""
        value = values[node]
        return value if node in full else graph("Expand", value, graph.integers(1, size))

    def reduced(node: Expr, groups: int) -> str:
        """A reduction; of one group, it is one number for each row."""
        narrow, (arg,) = plain.broadcasts and node.narrow, node.args
        size = sizes[plain.sizes.get(arg, "H" if narrow else plain.sizes[node])]
        shape, last = (groups, size // groups), graph.integers(-1)
        if groups == 1:
            return str(graph(OPERATORS[node.op], row(arg, size), last))
        split = graph("Reshape", row(arg, size), graph.integers(-1, *shape))
        spread = graph("Expand", graph(OPERATORS[node.op], split, last), graph.integers(1, *shape))
        return str(graph("Reshape", spread, graph.integers(-1, size)))

    def value(node: Expr) -> str:
        if node.op == "const":
            return graph.constant(*node.attrs)
        if is_reduction(node):
            return reduced(node, *node.attrs)
        if node.op not in ("linear", "preact"):
            return str(graph(OPERATORS[node.op], *(values[arg] for arg in node.args)))
        if node.attrs not in products:
            l = next(l for l in plain.linears if l.name == node.attrs[0])
            operand = row(l.operand, sizes[l.in_size])
            products.update(_products(graph, l, sizes, weights, operand))
        product, gate = products[node.attrs], Expr("x", (), node.attrs[1:])
        return product if node.op == "linear" else str(graph("Add", values[gate], product))

    for node in topological(plain.next):
        if node not in values:
            values[node] = value(node)
            if not full.isdisjoint(node.args) and not (is_reduction(node) and node.attrs == (1,)):
                full.add(node)
    return [
        values[node] if node in full else graph("Expand", values[node], graph("Shape", state))
        for node, state in zip(plain.next, states, strict=True)
    ]


def _products(
    graph: Graph, l: Linear, sizes: Mapping[str, int], weights: Mapping[str, Array], operand: str
) -> dict[tuple[str, str], str]:
    """Adds a matmul; returns the outputs that a step uses, by the attributes of their nodes."""
    out, places = sizes[l.out_size], [l.declared.index(output) for output in l.outputs]
    blocks = weights[l.weight].reshape(l.heads, len(l.declared), out // l.heads, -1)[:, places]
    bias = weights[l.bias_name].reshape(-1, out)[places].ravel() if l.bias_name in weights else None
    if l.heads == 1:
        product = graph.linear(operand, blocks.reshape(len(places) * out, -1), bias)
    else:
        split = graph("Reshape", operand, graph.integers(-1, l.heads, blocks.shape[-1]))
        product = graph("Einsum", split, graph.constant(blocks), equation="bhi,huoi->buho")
        product = graph("Reshape", product, graph.integers(-1, len(places) * out))
        product = product if bias is None else graph("Add", product, graph.constant(bias))
    parts = graph.split(product, [out] * len(places), -1)
    return {(l.name, output): part for output, part in zip(l.outputs, parts, strict=True)}
