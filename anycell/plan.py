"""The plan: how one cell runs. What is saved for the backward pass, what is computed again,
which engine and why.

Framework-free and engine-free: an engine reads a plan, it does not change one.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from anycell.lang.cell import RECURRENT, Cell
from anycell.lang.expr import Expr, topological
from anycell.lang.grad import Gradients, backward, upstream
from anycell.lang.ops import is_boolean, is_reduction

# Known without saving: constants, learned values, counter-based masks, and the state sequences,
# which the layer keeps anyway (the hidden states are its output).
FREE = frozenset({"const", "hyper", "param", "static", "keep", "state"})
DTYPES = ("float32", "float64")


@dataclass(frozen=True, eq=False)
class Plan:
    """How a cell of one hidden size and dtype runs.

    Attributes:
        saved: forward values that the backward pass reads from memory, ``H`` numbers per step and
            row each.
        saved_rows: those of one number per step and row (results of row reductions).
        states: states whose whole sequence is kept in training.
        recomputed: forward values that the backward pass computes again.
        engine, reason: "cpu" or "reference", and why.
    """

    cell: Cell
    hidden_size: int
    dtype: str
    gradients: Gradients
    saved: tuple[Expr, ...]
    saved_rows: tuple[Expr, ...]
    states: tuple[str, ...]
    recomputed: tuple[Expr, ...]
    engine: str
    reason: str

    @property
    def itemsize(self) -> int:
        return {"float32": 4, "float64": 8}[self.dtype]

    @property
    def saved_bytes(self) -> int:
        """Bytes kept per step and batch row in training,
        the hidden states (the output) included.
        """
        wide = len(self.saved) + len(self.states)
        return (wide * self.hidden_size + len(self.saved_rows)) * self.itemsize

    @property
    def split_gradient(self) -> bool:
        """Whether the matmul's gradient differs from the input projection's,
        and so needs memory of its own.
        """
        return any(g not in self.cell.fused for g in self.cell.gates)


def plan(cell: Cell, hidden_size: int, dtype: str = "float32", engine: str | None = None) -> Plan:
    """The plan for ``cell``.

    Args:
        cell: the cell.
        hidden_size: H.
        dtype: "float32" or "float64".
        engine: force "cpu" or "reference"; None chooses.

    Raises:
        ValueError: for an unknown dtype or engine, or a forced engine that cannot run the cell.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}; expected one of {', '.join(DTYPES)}.")
    if engine not in (None, "cpu", "reference"):
        raise ValueError(f"engine={engine!r}; expected 'cpu', 'reference' or None.")
    return _plan(cell, cell.key, hidden_size, dtype, engine)


# Cells compare by their graph, hyperparameters included; plans outlive no cell that is still in
# use.
@functools.lru_cache(maxsize=512)
def _plan(cell: Cell, key: str, hidden_size: int, dtype: str, engine: str | None) -> Plan:
    gradients = backward(cell)
    cut, recomputed = _least_memory(cell, gradients)
    needed = set(cut) | set(recomputed)
    kept = [
        state.name
        for i, (state, new) in enumerate(zip(cell.states, cell.next, strict=True))
        if i == 0 or _reads(gradients, state.name, new, needed)
    ]
    refusal = _refusal(cell, hidden_size)
    if engine == "cpu" and refusal:
        raise ValueError(f"engine='cpu' cannot run cell {cell.name}: {refusal}.")
    chosen = engine or ("reference" if refusal else "cpu")
    reason = (
        "asked for"
        if engine
        else refusal
        or f"one matmul a step on state {cell.state_names[0]!r}, all sizes H: fused kernel"
    )
    return Plan(
        cell=cell,
        hidden_size=hidden_size,
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
    """Whether all units of a row share the value: a reduction over one group,
    or a function of such.
    """
    if is_reduction(node):
        return node.attrs == (1,)
    if node.op in ("const", "hyper"):
        return True
    return (
        node.op not in FREE
        and bool(node.args)
        and node.op != "linear"
        and all(map(is_narrow, node.args))
    )


def gradient_roots(gradients: Gradients) -> list[Expr]:
    """Every expression that the backward pass computes."""
    roots = [*gradients.x.values(), *gradients.state.values(), *gradients.param.values()]
    roots += [g for outputs in gradients.linear.values() for g in outputs.values()]
    return roots + ([gradients.static] if gradients.static is not None else [])


def _reads(gradients: Gradients, state: str, new: Expr, forward_needed: set[Expr]) -> bool:
    """Whether the backward pass reads the old or the new value of a state."""
    old = Expr("state", (), (state,))
    reached = set(topological(gradient_roots(gradients)))
    return old in reached or (new in reached and new.op not in FREE)


def _refusal(cell: Cell, hidden_size: int) -> str | None:
    """Why the fused CPU kernel does not carry this cell, or None if it does."""
    others = [l.name for l in cell.linears if l.name != RECURRENT]
    if others:
        named = ", ".join(others)
        return f"further matmuls inside a step ({named}) run on the reference engine as yet"
    sized = [f"{s.name}:{s.size}" for s in cell.states if s.size != "H"]
    if sized:
        return (
            f"states of another size than H ({', '.join(sized)}) run on the reference engine as yet"
        )
    for node in topological(cell.next):
        if is_reduction(node) and hidden_size % node.attrs[0]:
            return f"groups={node.attrs[0]} does not divide the hidden size {hidden_size}"
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
    everything = topological(gradient_roots(gradients))
    read = {arg for node in everything if node not in inside for arg in node.args if arg in inside}
    read |= {root for root in gradient_roots(gradients) if root in inside}
    read -= free

    # A value is worth considering only if it hangs on something that must be saved.
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

    again: dict[Expr, None] = {}
    stack = [node for node in read if node not in saved]
    while stack:
        node = stack.pop()
        if node in again or node in free or node in saved:
            continue
        reduced = is_narrow(node) and any(map(is_reduction, topological([node])))
        if reduced and not is_boolean(node):
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

# What is dearer to compute than to store and load.
HEAVY = frozenset(
    {"exp", "log", "sqrt", "div", "sigmoid", "tanh", "softplus", "log_sigmoid", "keep"}
)


@dataclass(frozen=True, eq=False)
class Passes:
    """A row reduction needs all units of a row,
    so a step is one pass over the units per level of reductions.

    Attributes:
        reductions: per pass the reductions that it completes; the last pass has none and computes
            the results.
        stores: per pass the values that it keeps for a later pass.
    """

    reductions: tuple[tuple[Expr, ...], ...]
    stores: tuple[tuple[Expr, ...], ...]

    @property
    def spills(self) -> tuple[Expr, ...]:
        return tuple(node for stored in self.stores for node in stored)


def passes(roots: Iterable[Expr], loaded: frozenset[Expr] = frozenset()) -> Passes:
    """Splits the computation of ``roots`` into passes.

    ``loaded`` values come from memory, whatever they are.
    """
    roots = list(roots)
    level: dict[Expr, int] = {}
    order = _until(roots, loaded)
    for node in order:
        below = 0 if node in loaded else max((level[a] for a in node.args if a in level), default=0)
        level[node] = below + (is_reduction(node) and node not in loaded)
    depth = max(level.values(), default=0)
    reductions = tuple(
        tuple(n for n in order if is_reduction(n) and n not in loaded and level[n] == p + 1)
        for p in range(depth)
    )
    computed_in: dict[Expr, int] = {}
    stores: list[dict[Expr, None]] = [{} for _ in range(depth + 1)]
    kept: set[Expr] = set()
    for number in range(depth + 1):
        stack = list(roots) if number == depth else [n.args[0] for n in reductions[number]]
        seen: set[Expr] = set()
        while stack:
            node = stack.pop()
            if (
                node in seen
                or node in loaded
                or is_reduction(node)
                or node.op in ("linear", "preact")
            ):
                continue
            seen.add(node)
            first = computed_in.setdefault(node, number)
            plain = is_narrow(node) or is_boolean(node)  # memory holds units, and numbers
            if first < number and not plain and not _light(node, loaded, kept):
                stores[first][node] = None
                kept.add(node)
            if node not in kept or first == number:
                stack.extend(node.args)
    return Passes((*reductions, ()), tuple(tuple(s) for s in stores))


def _light(node: Expr, loaded: frozenset[Expr], kept: set[Expr]) -> bool:
    """Whether the value costs little more than loads, given what is in memory."""
    if node in loaded or node in kept or is_narrow(node) or node.op in ("linear", "preact"):
        return True
    return node.op not in HEAVY and all(_light(arg, loaded, kept) for arg in node.args)


def _until(roots: Iterable[Expr], stop: frozenset[Expr]) -> list[Expr]:
    """Topological order that does not look beneath ``stop``,
    nor beneath the operands of matmuls.
    """
    order: dict[Expr, None] = {}
    stack = [(root, False) for root in roots]
    while stack:
        node, done = stack.pop()
        if node in order:
            continue
        if done or node in stop or node.op in ("linear", "preact"):
            order[node] = None
        else:
            stack.append((node, True))
            stack.extend((arg, False) for arg in node.args)
    return list(order)


__all__ = [
    "DTYPES",
    "FREE",
    "Passes",
    "Plan",
    "gradient_roots",
    "is_narrow",
    "passes",
    "plan",
    "upstream",
]
