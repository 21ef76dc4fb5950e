"""The passes over the units of a row, between which its reductions and matmuls are completed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from anycell.lang.expr import Expr
from anycell.lang.ops import is_boolean, is_reduction

MATMULS = frozenset({"linear", "preact", "linear_t"})
# Ops that cost more to compute than to store and load.
HEAVY = frozenset("exp log sqrt div sigmoid tanh softplus log_sigmoid sin cos erf pow keep".split())


class Pass(NamedTuple):
    """One pass over the units of a row.

    Attributes:
        matmuls: names of the matmuls that must be complete before it. They begin a new stage once
            all current rows have gone through the earlier passes, the last of which computes their
            operands.
        reductions: those it completes; a row reduction needs all units of a row.
        stores: the values it keeps for a later pass.
    """

    matmuls: tuple[str, ...]
    reductions: tuple[Expr, ...]
    stores: tuple[Expr, ...]


def passes(roots: Iterable[Expr], loaded: frozenset[Expr] = frozenset()) -> tuple[Pass, ...]:
    """Splits the computation of ``roots`` into passes; the last one computes the roots.

    ``loaded`` values come from memory, whatever they are.
    """
    roots = list(roots)
    level: dict[Expr, int] = {}
    order = _until(roots, loaded)
    for node in order:
        below = max((level[a] for a in node.args if a in level), default=0)
        waits = is_reduction(node) or _is_staged(node)
        level[node] = 0 if node in loaded else below + waits
    depth = max(level.values(), default=0)
    later = [n for n in order if n not in loaded]
    matmuls: list[dict[str, None]] = [{} for _ in range(depth + 1)]
    operands: list[dict[Expr, None]] = [{} for _ in range(depth + 1)]
    for node in filter(_is_staged, later):
        matmuls[level[node]][node.attrs[0]] = None
        operands[level[node] - 1] |= dict.fromkeys(node.args)
    reductions = [
        tuple(n for n in later if is_reduction(n) and level[n] == p + 1) for p in range(depth + 1)
    ]
    computed_in: dict[Expr, int] = {}
    stores: list[dict[Expr, None]] = [{} for _ in range(depth + 1)]
    kept: set[Expr] = set()
    for p in range(depth + 1):
        stack = [*operands[p], *(n.args[0] for n in reductions[p]), *(roots if p == depth else ())]
        seen: set[Expr] = set()
        while stack:
            node = stack.pop()
            if node in seen or node in loaded or is_reduction(node) or node.op in MATMULS:
                continue
            seen.add(node)
            first = computed_in.setdefault(node, p)
            plain = node.narrow or is_boolean(node)  # memory holds numbers, one for each unit
            if first < p and not plain and not _light(node, loaded, kept):
                stores[first][node] = None
                kept.add(node)
            if node not in kept or first == p:
                stack.extend(node.args)
    parts = zip(matmuls, reductions, stores, strict=True)
    return tuple(Pass(tuple(m), r, tuple(s)) for m, r, s in parts)


def _is_staged(node: Expr) -> bool:
    """Whether a value is the result of a matmul inside the step, not of one that begins it."""
    if node.op == "linear_t":
        return True
    return node.op in MATMULS and node.args[0].op not in ("state", "input")


def _light(node: Expr, loaded: frozenset[Expr], kept: set[Expr]) -> bool:
    """Whether the value costs little more than loads, given what is in memory."""
    stack, seen = [node], set()
    while stack:
        top = stack.pop()
        if top in seen or top in loaded or top in kept or top.narrow or top.op in MATMULS:
            continue
        if top.op in HEAVY:
            return False
        seen.add(top)
        stack.extend(top.args)
    return True


def _until(roots: Iterable[Expr], stop: frozenset[Expr]) -> list[Expr]:
    """Topological order that ends at ``stop`` and at matmuls that begin a step."""
    order: dict[Expr, None] = {}
    stack = [(root, False) for root in roots]
    while stack:
        node, done = stack.pop()
        if node in order:
            continue
        if done or node in stop or (node.op in MATMULS and not _is_staged(node)):
            order[node] = None
        else:
            stack.append((node, True))
            stack.extend((arg, False) for arg in node.args)
    return list(order)
