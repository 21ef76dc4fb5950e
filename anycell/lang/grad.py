"""Reverse mode over the graph of a cell: the backward pass of one step, as another graph."""

from __future__ import annotations

from dataclasses import dataclass

from anycell.lang.cell import ONE, Cell
from anycell.lang.expr import REDUCTIONS, Expr, apply, const, topological
from anycell.lang.ops import TABLE


@dataclass(frozen=True)
class Gradients:
    """The derived backward of one step, as expressions over forward values and ``grad`` leaves.

    Attributes:
        x: gradient of each gate's input projection.
        linear: for each matmul the gradient of each of its outputs.
        state: gradient of each previous state, *without* the part through a matmul on it.
        param, static: per row and unit; the caller sums over time, and for param over rows.
    """

    x: dict[str, Expr]
    linear: dict[str, dict[str, Expr]]
    state: dict[str, Expr]
    param: dict[str, Expr]
    static: Expr | None


def upstream(state: str) -> Expr:
    """The leaf for the gradient that arrives at a new state."""
    return Expr("grad", (), (state,))


def backward(cell: Cell) -> Gradients:
    """Derives the backward pass of ``cell``.

    The gradient of a matmul's operand is ``linear_t`` of its outputs' gradients, unless the operand
    is a plain state: then the engine adds this transposed matmul while it computes the step before.

    In a cell that ``broadcasts``, the gradient of a narrow value is that of the row's one number: a
    sum over the units that the value was combined with.
    """
    zero = const(0.0)
    order = topological(cell.next)
    gradient: dict[Expr, Expr] = {}

    def accumulate(node: Expr, part: Expr, size: str | None) -> None:
        """Adds what units of a ``size`` contribute; None for the row's one number."""
        if cell.broadcasts and node.narrow and size is not None and node in cell.sizes:
            if not part.narrow:
                part = apply("sum", part, attrs=(1,))
            elif size != ONE:
                part = part * Expr("units", (), (size,))
        gradient[node] = apply("add", gradient[node], part) if node in gradient else part

    for state, node in zip(cell.states, cell.next, strict=True):
        accumulate(node, upstream(state.name), state.size)

    linear: dict[str, dict[str, Expr]] = {
        l.name: dict.fromkeys(l.outputs, zero) for l in cell.linears
    }
    x = dict.fromkeys(cell.gates, zero)
    for node in reversed(order):
        # All users of the node, and so all outputs of its matmuls, have been visited.
        for l in cell.linears:
            if l.operand is node and node.op != "state":
                of_operand = Expr("linear_t", linear[l.name].values(), (l.name,))
                accumulate(node, of_operand, l.in_size)
        g = gradient.get(node)
        if g is None or (node.op not in TABLE and node.op not in ("x", "linear", "preact")):
            continue
        if node.op in ("linear", "preact"):
            name, output = node.attrs
            linear[name][output] = g
            if node.op == "preact":
                x[output] = g
        elif node.op == "x":
            x[node.attrs[0]] = g
        else:
            narrow = cell.broadcasts and node.narrow
            parts = TABLE[node.op].derivative(g, node, *node.args, *node.attrs)
            if cell.broadcasts and g.narrow and node.op in REDUCTIONS:
                parts = (of_each(cell, node, g),)
            for arg, part in zip(node.args, parts, strict=True):
                if part is not None:
                    accumulate(arg, part, None if narrow else cell.sizes.get(node, "H"))

    def of(op: str, name: str) -> Expr:
        return gradient.get(Expr(op, (), (name,)), zero)

    return Gradients(
        x=x,
        linear=linear,
        state={s.name: of("state", s.name) for s in cell.states},
        param={p.name: of("param", p.name) for p in cell.params},
        static=None if cell.static is None else of("static", cell.static),
    )


def of_each(cell: Cell, reduction: Expr, g: Expr) -> Expr:
    """The gradient of each unit that a reduction combines, from a narrow ``g``: the gradient of the
    row's one number, or that of each unit to which groups return their results.
    """
    (arg,), (groups,) = reduction.args, reduction.attrs
    size = cell.sizes.get(arg, "H")
    units = const(1.0) if size == ONE else Expr("units", (), (size,))
    if reduction.op == "mean":
        return g / units if reduction.narrow else g
    total = g if reduction.narrow else g * (units / groups)  # of a group
    if reduction.op == "sum":
        return total
    hit = apply("where", apply("eq", arg, reduction), 1.0, 0.0)  # ties share the gradient
    return hit * (total / apply("sum", hit, attrs=(groups,)))
