"""The plan: how one cell runs. What is saved for the backward pass, what is computed again,
which engine and why.

Framework-free and engine-free: an engine reads a plan, it does not change one.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from anycell.lang.cell import RECURRENT, Cell, Linear
from anycell.lang.expr import Expr, topological
from anycell.lang.grad import Gradients, backward, upstream
from anycell.lang.ops import is_boolean, is_reduction

# Known without saving: constants, learned values, counter-based masks, and the state sequences,
# which the layer keeps anyway (the hidden states are its output).
FREE = frozenset({"const", "hyper", "param", "static", "keep", "state", "input", "recurrent_mask"})
MATMULS = frozenset({"linear", "preact", "linear_t"})
DTYPES = ("float32", "float64")
# What each fused engine computes in.
ENGINE_DTYPES = {"cpu": DTYPES, "gpu": ("float32", "bfloat16", "float16")}


@dataclass(frozen=True, eq=False)
class Plan:
    """How a cell of one hidden size and dtype runs.

    Attributes:
        sizes: what the size symbols of the cell stand for.
        saved: forward values that the backward pass reads from memory, a number per unit, step and
            row each.
        saved_rows: those of one number per step and row (results of row reductions).
        states: states whose whole sequence is kept in training.
        recomputed: forward values that the backward pass computes again.
        engine, reason: "cpu", "gpu" or "reference", and why.
    """

    cell: Cell
    hidden_size: int
    sizes: Mapping[str, int]
    dtype: str
    gradients: Gradients
    saved: tuple[Expr, ...]
    saved_rows: tuple[Expr, ...]
    states: tuple[str, ...]
    recomputed: tuple[Expr, ...]
    engine: str
    reason: str

    @functools.cached_property
    def itemsize(self) -> int:
        return {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}[self.dtype]

    @property
    def saved_bytes(self) -> int:
        """Bytes kept per step and batch row in training,
        the hidden states (the output) included.
        """
        states = sum(self.sizes[s.size] for s in self.cell.states if s.name in self.states)
        saved = sum(map(self.width, self.saved))
        return (saved + states + len(self.saved_rows)) * self.itemsize

    def width(self, node: Expr) -> int:
        """Units of a forward value."""
        return self.sizes[self.cell.sizes.get(node, "H")]

    def shares_gradient(self, linear: Linear) -> bool:
        """Whether a matmul's gradient is the input projection's, and needs no memory of its own."""
        return linear.name == RECURRENT and self._all_fused

    @functools.cached_property
    def _all_fused(self) -> bool:
        return all(g in self.cell.fused for g in self.cell.gates)

    @functools.cached_property
    def carried_back(self) -> frozenset[str]:
        """Matmuls by whose weight a step of the backward pass multiplies before it is done: those
        of an operand computed in the step, unless nothing behind that wants a gradient.
        """
        nodes = topological(gradient_roots(self.cell, self.gradients))
        return frozenset(n.attrs[0] for n in nodes if n.op == "linear_t")


def plan(
    cell: Cell,
    hidden_size: int,
    dtype: str = "float32",
    engine: str | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Plan:
    """The plan for ``cell``.

    Args:
        cell: the cell.
        hidden_size: H.
        dtype: "float32" or "float64"; on the GPU "float32", "bfloat16" or "float16".
        engine: force "cpu" or "reference"; None chooses between them. "gpu" for arrays on a GPU.
        sizes: what the other size symbols of the cell stand for.

    Raises:
        ValueError: for an unknown dtype or engine, a forced engine that cannot run the cell, or
            sizes that its heads or groups do not divide.
    """
    if engine not in (None, "cpu", "gpu", "reference"):
        raise ValueError(f"engine={engine!r}; expected 'cpu', 'gpu', 'reference' or None.")
    dtypes = ENGINE_DTYPES.get(engine or "", DTYPES)
    if dtype not in dtypes:
        raise ValueError(f"dtype={dtype!r}; expected one of {', '.join(dtypes)}.")
    known = {**(sizes or {}), "H": hidden_size}
    return _plan(cell, cell.key, hidden_size, dtype, engine, tuple(sorted(known.items())))


# Cells compare by their graph, hyperparameters included; plans outlive no cell that is still in
# use.
@functools.lru_cache(maxsize=512)
def _plan(
    cell: Cell,
    key: str,
    hidden_size: int,
    dtype: str,
    engine: str | None,
    known: tuple[tuple[str, int], ...],
) -> Plan:
    gradients, sizes = backward(cell), dict(known)
    cell.check_sizes(sizes)
    cut, recomputed = _least_memory(cell, gradients)
    needed = set(cut) | set(recomputed)
    kept = [
        state.name
        for i, (state, new) in enumerate(zip(cell.states, cell.next, strict=True))
        if i == 0 or _reads(cell, gradients, state.name, new, needed)
    ]
    refusal = _refusal(cell, sizes)
    if engine in ENGINE_DTYPES and refusal:
        raise ValueError(f"engine={engine!r} cannot run cell {cell.name}: {refusal}.")
    chosen = engine or ("reference" if refusal else "cpu")
    reason = (
        "asked for"
        if engine == "reference"
        else refusal or f"fused kernel, {_count(len(cell.linears), 'matmul')} a step"
    )
    return Plan(
        cell=cell,
        hidden_size=hidden_size,
        sizes=sizes,
        dtype=dtype,
        gradients=gradients,
        saved=tuple(node for node in cut if not is_narrow(node)),
        saved_rows=tuple(node for node in cut if is_narrow(node)),
        states=tuple(kept),
        recomputed=tuple(recomputed),
        engine=chosen,
        reason=reason,
    )


def is_narrow(node: Expr) -> bool:
    """Whether all units of a row share the value; see ``Expr``."""
    return node.narrow


def gradient_roots(cell: Cell, gradients: Gradients) -> list[Expr]:
    """Every expression that the backward pass computes."""
    roots = [*gradients.x.values(), *gradients.state.values(), *gradients.param.values()]
    roots += [g for outputs in gradients.linear.values() for g in outputs.values()]
    roots += [] if gradients.static is None else [gradients.static]
    # The gradient of a weight needs what the weight was multiplied with.
    return roots + [l.operand for l in cell.linears if l.operand.op != "state"]


def size_of(cell: Cell, node: Expr) -> str | None:
    """The size symbol of a node of a cell or of its gradients; None for a number."""
    stack = [node]
    while stack:  # element by element, and so of the size of any argument
        top = stack.pop()
        if top in cell.sizes:
            return cell.sizes[top]
        if top.op == "grad":
            return next(s.size for s in cell.states if s.name == top.attrs[0])
        if top.op == "linear_t":
            return next(l.in_size for l in cell.linears if l.name == top.attrs[0])
        stack += top.args
    return None


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"


def _reads(
    cell: Cell, gradients: Gradients, state: str, new: Expr, forward_needed: set[Expr]
) -> bool:
    """Whether the backward pass reads the old or the new value of a state."""
    old = Expr("state", (), (state,))
    if any(l.operand is old for l in cell.linears):
        return True
    reached = set(topological(gradient_roots(cell, gradients)))
    return old in reached or (new in reached and new.op not in FREE)


def _refusal(cell: Cell, sizes: Mapping[str, int]) -> str | None:
    """Why no fused kernel carries this cell, or None if one does."""
    unknown = {symbol for symbol in cell.sizes.values() if symbol not in sizes}
    if unknown:
        return f"nothing tells the size {min(unknown)} of this cell"
    return None


# ---- saved against recomputed --------------------------------------------------------------------


def _least_memory(cell: Cell, gradients: Gradients) -> tuple[list[Expr], list[Expr]]:
    """The forward values to save so that the backward pass needs least memory,
    and those it computes again.

    A minimum cut between what cannot be computed again (projections and matmul results) and what
    the backward pass reads. Saving a value cuts its node, at the price of its size. Among cuts of
    one price the one nearest to the readers is taken: it leaves the least to compute again.
    """
    forward = topological(cell.next)
    inside = set(forward)
    sequences = {node for node in cell.next if node.op not in FREE}
    free = {node for node in forward if node.op in FREE} | sequences
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
        # Memory holds numbers: a condition is compared again.
        price = _Flow.ENDLESS if is_boolean(node) else 1 if is_narrow(node) else 64
        flow.edge((node, 0), (node, 1), price)
        if node.op in ("x", "linear", "preact"):
            flow.edge("source", (node, 0), _Flow.ENDLESS)
        for arg in node.args:
            if arg not in free and node.op not in ("linear", "preact"):
                flow.edge((arg, 1), (node, 0), _Flow.ENDLESS)
        if node in read:
            flow.edge((node, 1), "sink", _Flow.ENDLESS)
    beyond = flow.sink_side()
    # A dictionary, not a list: `in` must not compare expressions.
    saved = dict.fromkeys(
        n for n in forward if n not in free and (n, 1) in beyond and (n, 0) not in beyond
    )

    # Values of one number per row, not per unit: narrow ones that depend on a reduction.
    rows: set[Expr] = set()
    for node in forward:
        if is_narrow(node) and (is_reduction(node) or any(arg in rows for arg in node.args)):
            rows.add(node)
    again: dict[Expr, None] = {}
    stack = [node for node in read if node not in saved]
    while stack:
        node = stack.pop()
        if node in again or node in free or node in saved:
            continue
        if node in rows and not is_boolean(node):
            # One number per row against another pass over its units.
            saved[node] = None
            continue
        again[node] = None
        stack.extend(node.args)
    # In the order of the graph: sets of nodes iterate in another order in every process.
    return [n for n in forward if n in saved], [n for n in forward if n in again]


class _Flow:
    """Maximum flow by shortest augmenting paths (Edmonds & Karp, 1972);
    a cell has tens of nodes.
    """

    ENDLESS = 1 << 40

    def __init__(self) -> None:
        self.room: dict[object, dict[object, int]] = {"source": {}, "sink": {}}

    def edge(self, a: object, b: object, capacity: int) -> None:
        self.room.setdefault(a, {})[b] = self.room.get(a, {}).get(b, 0) + capacity
        self.room.setdefault(b, {}).setdefault(a, 0)

    def _path(self) -> list[object] | None:
        before: dict[object, object] = {"source": None}
        queue = deque(["source"])
        while queue:
            a = queue.popleft()
            for b, capacity in self.room[a].items():
                if capacity > 0 and b not in before:
                    before[b] = a
                    queue.append(b)  # type: ignore[arg-type]
        if "sink" not in before:
            return None
        path: list[object] = ["sink"]
        while path[-1] != "source":
            path.append(before[path[-1]])
        return path[::-1]

    def sink_side(self) -> set[object]:
        """After the maximum flow: every node from which the sink can still be reached."""
        while path := self._path():
            steps = list(itertools.pairwise(path))
            amount = min(self.room[a][b] for a, b in steps)
            for a, b in steps:
                self.room[a][b] -= amount
                self.room[b][a] += amount
        into: dict[object, list[object]] = {}
        for a, edges in self.room.items():
            for b, capacity in edges.items():
                if capacity > 0:
                    into.setdefault(b, []).append(a)
        side, stack = {"sink"}, ["sink"]
        while stack:
            for a in into.get(stack.pop(), ()):
                if a not in side:
                    side.add(a)  # type: ignore[arg-type]
                    stack.append(a)  # type: ignore[arg-type]
        return side  # type: ignore[return-value]


# ---- passes over a row ---------------------------------------------------------------------------

# What costs more to compute than to store and load.
HEAVY = frozenset(
    {"exp", "log", "sqrt", "div", "sigmoid", "tanh", "softplus", "log_sigmoid", "keep"}
)


class Pass(NamedTuple):
    """One pass over the units of a row.

    Attributes:
        matmuls: those that must be complete before it, by name: a new stage, which begins when all
            rows at hand have gone through the passes before; the last of these computes operands.
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
            plain = is_narrow(node) or is_boolean(node)  # memory holds units, and numbers
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
        if top in seen or top in loaded or top in kept or is_narrow(top) or top.op in MATMULS:
            continue
        if top.op in HEAVY:
            return False
        seen.add(top)
        stack.extend(top.args)
    return True


def _until(roots: Iterable[Expr], stop: frozenset[Expr]) -> list[Expr]:
    """Topological order that looks beneath neither ``stop`` nor what a step begins with."""
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


__all__ = [
    "DTYPES",
    "FREE",
    "Pass",
    "Plan",
    "gradient_roots",
    "is_narrow",
    "passes",
    "plan",
    "size_of",
    "upstream",
]
