"""Forward mode over the graph of a cell: the cell and its tangent, as one cell.

The states of a tangent cell are the tangents, then those of the cell. So what runs a cell also runs
its derivative along a direction, and the backward pass of a tangent cell holds the second
derivatives of the cell (Pearlmutter, "Fast exact multiplication by the Hessian", 1994).
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

from anycell.lang.cell import Cell, remade
from anycell.lang.declare import MOST, Param, State
from anycell.lang.expr import Expr, apply, const, fail, is_const, shared_name, topological
from anycell.lang.grad import of_each
from anycell.lang.ops import TABLE
from anycell.lang.trace import Declared


class Tangent(Cell):
    """A cell that ``tangent`` made; it can be called and pickled, like the cell ``full``."""

    full: Cell
    varied: frozenset[str]
    dot: str  # the end of the names of tangents

    def __call__(self, *args: Any, **hyper: Any) -> Cell:
        return tangent(self.full(*args, **hyper), self.varied)

    def __reduce__(self) -> tuple[Any, ...]:
        return tangent, (self.full, self.varied)


@functools.lru_cache(maxsize=256)
def tangent(cell: Cell, varied: frozenset[str]) -> Tangent:
    """Returns the cell that computes ``cell`` and its derivative along a direction.

        s' = f(x, s, W),    s'_dot = df/dx x_dot + df/ds s_dot + df/dW W_dot

    Its states are ``s_dot`` and ``s``, its gates ``x`` and ``x_dot``, followed by the tangent of
    the static input, if that varies, as a gate of its size. The tangents of weights, biases and
    parameters have their names too, with an end that none of the cell's names has: ``_dot``, or for
    the tangent of a tangent ``_dot2``.

    Args:
        varied: which of the cell's learned arrays, and "static", have tangents other than 0; for
            states and gates, any may have.

    Raises:
        CellError: if its states or matmuls would be too many.
    """
    if len(cell.states) > MOST // 2:
        problem = f"The tangent of {cell.name} has {2 * len(cell.states)} states; at most {MOST}."
        fail(problem, "give one of them a size of its own.")
    named = *cell.state_names, *cell.gates, *cell.learned, cell.static or ""
    ends = itertools.chain(["_dot"], (f"_dot{n}" for n in itertools.count(2)))
    dot = next(end for end in ends if not any(name.endswith(end) for name in named))
    dots: dict[Expr, Expr] = {}

    def linear(node: Expr) -> Expr:
        """The tangent of an output of a matmul, W v_dot + W_dot v."""
        (matmul, output), (v,) = node.attrs, node.args
        weight = f"weight_{shared_name(matmul)}"
        parts = [Expr("linear", (dots[v],), (_along(matmul, dot), output))] if v in dots else []
        if weight in varied or f"bias_{shared_name(matmul)}" in varied:
            parts.append(Expr("linear", (v,), (_dotted(matmul, dot), output)))
        if node.op == "preact":
            parts.append(Expr("x", (), (output + dot,)))
        return functools.reduce(functools.partial(apply, "add"), parts) if parts else const(0.0)

    def of(node: Expr) -> Expr | None:
        """The tangent of a node whose arguments' tangents are known."""
        if node.op in ("x", "state"):
            return Expr(node.op, (), (node.attrs[0] + dot,))
        if node.op in ("linear", "preact"):
            return linear(node)
        if node.op == "param":
            (name,) = node.attrs
            return Expr("param", (), (name + dot,)) if name in varied else None
        if node.op == "static":
            return Expr("x", (), (node.attrs[0] + dot,)) if "static" in varied else None
        if node.op not in TABLE or not any(arg in dots for arg in node.args):
            return None
        if node.op in ("sum", "mean", "max"):
            return _reduced(cell, node, dots[node.args[0]])
        # Of an op on each unit, the derivative from an argument is a number, forwards as backwards.
        parts = []
        for position, arg in enumerate(node.args):
            if arg in dots:
                part = TABLE[node.op].derivative(dots[arg], node, *node.args)[position]
                parts += [] if part is None else [part]
        return functools.reduce(functools.partial(apply, "add"), parts) if parts else None

    for node in topological(cell.next):
        derived = of(node)
        if derived is not None and not is_const(derived, 0.0):
            dots[node] = derived
    graph = *(dots.get(node, const(0.0)) for node in cell.next), *cell.next
    declared: dict[str, Declared] = {}
    for l in cell.linears:
        first = cell.declared[l.name]._replace(size=l.out_size)
        declared[l.name] = first
        declared[_along(l.name, dot)] = first._replace(bias=False)
        declared[_dotted(l.name, dot)] = first._replace(bias=first.bias and l.bias_name in varied)
    sizes = {name + dot: size for name, size in cell.gate_sizes.items()}
    if cell.static and "static" in varied:
        sizes[cell.static + dot] = cell.static_size
    states = tuple(State(s.name + dot, s.size) for s in cell.states)
    params = tuple(Param(p.name + dot, 0.0, p.size) for p in cell.params if p.name in varied)
    return remade(
        cell, graph, declared, Tangent, full=cell, varied=varied, dot=dot, text=None,
        name=f"{cell.name}{dot}", gates=(*cell.gates, *sizes),
        gate_sizes={**cell.gate_sizes, **sizes}, states=(*states, *cell.states),
        params=(*cell.params, *params),
    )  # fmt: skip


def _reduced(cell: Cell, node: Expr, dot: Expr) -> Expr:
    """The tangent of a reduction, from that of what it reduces."""
    (value,), (groups,) = node.args, node.attrs
    if node.op == "max":  # ties share it, as they share a gradient
        hit = apply("where", apply("eq", value, node), 1.0, 0.0)
        shares = apply("sum", hit * dot, attrs=(groups,))
        return shares / apply("sum", hit, attrs=(groups,))
    if cell.broadcasts and dot.narrow and not value.narrow:  # the same for each unit of the value
        return of_each(cell, node, dot)
    return apply(node.op, dot, attrs=(groups,))


def _along(matmul: str, end: str) -> str:
    """The matmul of a tangent by the weight of ``matmul``."""
    return f"{matmul}.{end}"


def _dotted(matmul: str, end: str) -> str:
    """The matmul by a weight's tangent: "w_dot.1" for "w.1"."""
    weight, point, use = matmul.partition(".")
    return f"{weight}{end}{point}{use}"
