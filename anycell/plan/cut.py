"""Chooses by a minimum cut which values to save for the backward pass and which to recompute."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque

from anycell.lang.cell import Cell
from anycell.lang.expr import Expr, topological
from anycell.lang.grad import Gradients
from anycell.lang.ops import is_boolean, is_reduction

# Known without saving: constants, learned values, counter-based masks whose rate is known, and the
# state sequences, which the layer keeps anyway (the hidden states are its output).
FREE = frozenset("const hyper units param static keep state input recurrent_mask".split())
# The values that a step begins with, which are never computed again.
_GIVEN = frozenset({"x", "linear", "preact"})
# Ops whose results jump when their arguments barely change.
_DECIDING = frozenset({"lt", "le", "gt", "ge", "eq", "ne", "sign", "keep"})


def gradient_roots(cell: Cell, gradients: Gradients) -> list[Expr]:
    """Every expression that the backward pass computes."""
    roots = [*gradients.x.values(), *gradients.state.values(), *gradients.param.values()]
    roots += [g for outputs in gradients.linear.values() for g in outputs.values()]
    roots += [] if gradients.static is None else [gradients.static]
    # The gradient of a weight needs what the weight was multiplied with.
    return roots + [l.operand for l in cell.linears if l.operand.op != "state"]


def in_sequence(cell: Cell, new: Expr) -> bool:
    """Whether the backward pass reads the value of a new state from the state's sequence, if the
    layer keeps it. It does not read one number per row, which other units may need as well.
    """
    return new.op not in FREE and not (cell.broadcasts and new.narrow)


def root_sizes(cell: Cell) -> list[str]:
    """The size symbol of each of ``gradient_roots``."""
    symbols = [*cell.gate_sizes.values(), *(s.size for s in cell.states)]
    symbols += [p.size for p in cell.params]
    symbols += [l.out_size for l in cell.linears for _ in l.outputs]
    symbols += [] if cell.static is None else [cell.static_size]
    return symbols + [l.in_size for l in cell.linears if l.operand.op != "state"]


def least_memory(
    cell: Cell, gradients: Gradients, rounded: bool = False
) -> tuple[list[Expr], list[Expr]]:
    """Returns the forward values to save so that the backward pass needs the least memory, and the
    values that it computes again.

    A minimum cut between values that cannot be computed again (projections and matmul results) and
    values that the backward pass reads. Saving a value cuts its node, at the cost of its size.
    Among cuts of equal cost, the one nearest to the readers leaves the least to compute again.

    If saving rounds (``rounded``), decisions of the forward pass are saved, not computed again: a
    rounded value may lie on the other side of a bound, or no longer equal the maximum. Reductions
    are computed again from the values that the backward pass has: a norm subtracts the mean from
    almost equal numbers, and if only the mean was rounded, the difference would be an error.
    """
    decided = _decisions(cell, gradients) if rounded else {}
    forward = topological([*cell.next, *decided])
    inside = set(forward)
    sequences = {node for node in cell.next if in_sequence(cell, node)}
    free, hanging = set(sequences), set[Expr]()  # hanging: depends on what a step begins with
    for node in forward:
        if node.op in FREE and node not in decided and hanging.isdisjoint(node.args):
            free.add(node)
        elif node not in free and (node.op in _GIVEN or not hanging.isdisjoint(node.args)):
            hanging.add(node)
    roots = gradient_roots(cell, gradients)
    everything = topological(roots)
    read = {arg for node in everything if node not in inside for arg in node.args if arg in inside}
    read |= {root for root in roots if root in inside}
    read -= free

    # A value is worth considering only if it depends on something that must be saved.
    flow = _Flow()
    for node in forward:
        if node in free:
            continue
        # Comparing again costs less than memory if the result cannot differ.
        again = is_boolean(node) and not rounded
        flow.edge((node, 0), (node, 1), _Flow.ENDLESS if again else 1 if node.narrow else 64)
        if node.op in _GIVEN or (node in decided and node.op in _DECIDING):
            flow.edge("source", (node, 0), _Flow.ENDLESS)
            continue
        for arg in node.args:
            if arg not in free:
                flow.edge((arg, 1), (node, 0), _Flow.ENDLESS)
    for node in read:
        flow.edge((node, 1), "sink", _Flow.ENDLESS)
    beyond = flow.sink_side()
    # A dictionary, not a list: `in` must not compare expressions.
    saved = dict.fromkeys(
        n for n in forward if n not in free and (n, 1) in beyond and (n, 0) not in beyond
    )

    # Values of one number per row, not per unit: narrow ones that depend on a reduction.
    rows: set[Expr] = set()
    for node in forward:
        if node.narrow and (is_reduction(node) or any(arg in rows for arg in node.args)):
            rows.add(node)
    computed: dict[Expr, None] = {}
    stack = [node for node in read if node not in saved]
    while stack:
        node = stack.pop()
        if node in computed or node in free or node in saved:
            continue
        again = is_boolean(node) or (rounded and is_reduction(node))
        if node in rows and not again:
            # Saving one number per row costs less than another pass over its units.
            saved[node] = None
            continue
        computed[node] = None
        stack.extend(node.args)
    # In graph order, because sets of nodes iterate in a different order in every process.
    return [n for n in forward if n in saved], [n for n in forward if n in computed]


def _decisions(cell: Cell, gradients: Gradients) -> dict[Expr, None]:
    """The decisions on forward values that both passes may make, except decisions on values that
    both passes compute alike from numbers that memory holds exactly.
    """
    derived: set[Expr] = set()
    exact: set[Expr] = set()
    decided: dict[Expr, None] = {}
    first = Expr("state", (), (cell.states[0].name,))
    for node in topological([*cell.next, *gradient_roots(cell, gradients)]):
        known = exact.issuperset(node.args) if node.args else node.op in FREE - {"state"}
        if node.op in ("grad", "linear_t") or not derived.isdisjoint(node.args):
            derived.add(node)
        elif node is first or (known and node.op not in _GIVEN and not is_reduction(node)):
            exact.add(node)
        elif node.op in _DECIDING or is_boolean(node):
            decided[node] = None
    return decided


class _Flow:
    """Maximum flow by shortest augmenting paths (Edmonds & Karp, 1972);
    a cell has tens of nodes.
    """

    ENDLESS = 1 << 40

    def __init__(self) -> None:
        self.room: defaultdict[object, Counter[object]] = defaultdict(Counter)

    def edge(self, a: object, b: object, capacity: int) -> None:
        self.room[a][b] += capacity
        self.room[b][a] += 0

    def sink_side(self) -> set[object]:
        """Finds the maximum flow; returns all nodes from which the sink can still be reached."""
        while True:
            after: dict[object, object] = {"sink": None}  # the next node on the way to the sink
            queue: deque[object] = deque(["sink"])
            while queue:
                b = queue.popleft()
                for a in self.room[b]:
                    if self.room[a][b] > 0 and a not in after:
                        after[a] = b
                        queue.append(a)
            if "source" not in after:
                return set(after)
            path: list[object] = ["source"]
            while path[-1] != "sink":
                path.append(after[path[-1]])
            steps = list(itertools.pairwise(path))
            amount = min(self.room[a][b] for a, b in steps)
            for a, b in steps:
                self.room[a][b] -= amount
                self.room[b][a] += amount
