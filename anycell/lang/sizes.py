"""The sizes of all values of a cell: element-wise ops keep sizes, matmuls change them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from anycell.lang.declare import INPUT, ONE, RECURRENT, Linear, State, is_recurrent
from anycell.lang.expr import REDUCTIONS, Expr, fail, shared_name, topological
from anycell.lang.ops import TABLE


def sizes_of(
    name: str,
    states: tuple[State, ...],
    leaves: Mapping[str, Mapping[Any, str]],
    graph: tuple[Expr, ...],
    linears: tuple[Linear, ...],
    broadcasts: bool,
) -> tuple[dict[Expr, str], tuple[Linear, ...]]:
    """Finds the size of every value of a cell's graph that is not a number, and of its matmuls.

    Args:
        name: of the cell, for errors.
        leaves: the sizes of gates, states, parameters and the static input, by op, then by name.
        graph: the new states.
        linears: the matmuls in the graph.
        broadcasts: see ``Cell``.
    """
    parent: dict[Any, Any] = {}

    def find(item: Any) -> Any:
        parent.setdefault(item, item)
        while parent[item] is not item:
            item = parent[item]
        return item

    def tie(a: Any, b: Any, where: Expr | str) -> None:
        a, b = find(a), find(b)
        if a is b:
            return
        if isinstance(a, str) and isinstance(b, str):
            place = where if isinstance(where, str) else f"`{where}`"
            fail(
                f"Cell {name}: the sizes do not match: {place} joins a value of size {a} "
                f"with one of size {b}.",
                'change the size with linear(value, "name"), '
                "or declare the state with the size it has.",
            )
        if isinstance(a, str):
            a, b = b, a
        parent[a] = b

    named = {l.shared: l.out_size for l in linears if l.out_size}
    order = topological(graph)
    fixed = {"preact": "H", "input": INPUT, "recurrent_mask": states[0].size}
    numbers: set[Expr] = set()  # numbers, and results of numbers alone, which fit any size
    ones: set[Expr] = set()  # values of one number per row
    for node in order:
        by_unit = node.op in TABLE and node.op not in REDUCTIONS
        if node.op in ("const", "hyper") or (by_unit and numbers.issuperset(node.args)):
            numbers.add(node)
        elif broadcasts and node.narrow:
            ones.add(node)
            tie(node, ONE, node)
        elif node.op in leaves:
            tie(node, leaves[node.op][node.attrs[0]], node)
        elif node.op in fixed:
            tie(node, fixed[node.op], node)
            for operand in node.args:  # of the recurrent matmul
                tie(operand, ("operand", RECURRENT), node)
        elif node.op == "linear":
            # All products by a weight are of one size, and so are their operands.
            weight = shared_name(node.attrs[0])
            tie(node, "H" if is_recurrent(node) else ("linear", weight), node)
            if weight in named:
                tie(node, named[weight], node)
            if node.args[0] not in numbers:
                tie(node.args[0], ("operand", weight), node)
        else:
            if node.op in REDUCTIONS and broadcasts and node.args[0] in ones:
                fail(
                    f"Cell {name}: `{node}` splits a value of size 1 into {node.attrs[0]} groups.",
                    "leave out groups=, or reduce a value of several units.",
                )
            for arg in node.args:
                if arg not in numbers and not (broadcasts and arg.narrow):
                    tie(node, arg, node)
    for state, node in zip(states, graph, strict=True):
        if node not in numbers and not (broadcasts and node.narrow):
            tie(node, state.size, f"the new state {state.name!r}")

    def size(node: Any) -> str:
        root = find(node)
        return root if isinstance(root, str) else "H"

    of_nodes = {node: size(node) for node in order if node not in numbers}
    outputs = {n.attrs[0]: n for n in order if n.op in ("linear", "preact")}
    return of_nodes, tuple(
        replace(l, in_size=size(("operand", l.shared)), out_size=size(outputs[l.name]))
        for l in linears
    )
