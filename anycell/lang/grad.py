"""Reverse mode over the graph of a cell: the backward pass of one step, as another graph."""

from __future__ import annotations

from dataclasses import dataclass

from anycell.lang.cell import Cell
from anycell.lang.expr import Expr, apply, const, topological
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
    """
    zero = const(0.0)
    order = topological(cell.next)
    gradient: dict[Expr, Expr] = {}
    for state, node in zip(cell.states, cell.next, strict=True):
        _accumulate(gradient, node, upstream(state.name))

    linear: dict[str, dict[str, Expr]] = {
        l.name: dict.fromkeys(l.outputs, zero) for l in cell.linears
    }
    x = dict.fromkeys(cell.gates, zero)
    for node in reversed(order):
        # All users of the node, and so all outputs of its matmuls, have been visited.
        for l in cell.linears:
            if l.operand is node and node.op != "state":
                _accumulate(gradient, node, Expr("linear_t", linear[l.name].values(), (l.name,)))
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
            parts = TABLE[node.op].derivative(g, node, *node.args, *node.attrs)
            for arg, part in zip(node.args, parts, strict=True):
                if part is not None:
                    _accumulate(gradient, arg, part)

    def of(op: str, name: str) -> Expr:
        return gradient.get(Expr(op, (), (name,)), zero)

    return Gradients(
        x=x,
        linear=linear,
        state={s.name: of("state", s.name) for s in cell.states},
        param={p.name: of("param", p.name) for p in cell.params},
        static=None if cell.static is None else of("static", cell.static),
    )


def _accumulate(gradient: dict[Expr, Expr], node: Expr, part: Expr) -> None:
    gradient[node] = apply("add", gradient[node], part) if node in gradient else part
