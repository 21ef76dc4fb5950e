"""The plan: how one cell runs. It says what is saved for the backward pass, what is computed again,
which engine runs, and why.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from anycell.lang.cell import ONE, RECURRENT, Cell, Linear
from anycell.lang.expr import Expr, topological
from anycell.lang.grad import Gradients, backward
from anycell.plan.cut import gradient_roots, in_sequence, least_memory
from anycell.plan.dtype import DTYPES, Dtype, dtypes
from anycell.refusal import refuse

LINE = 64  # bytes of a cache line


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """The way in which a cell of one hidden size and dtype runs.

    Attributes:
        sizes: what the size symbols of the cell stand for.
        saved: forward values that the backward pass reads from memory, each with one number per
            unit, step and row.
        saved_rows: saved values of one number per step and row (results of row reductions).
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

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        return f"Plan({self.cell!r}, {sizes}, {self.dtype}: {self.engine}, {self.reason})"

    @functools.cached_property
    def types(self) -> Dtype:
        """The types of numbers in memory and in arithmetic."""
        return DTYPES[self.dtype]

    @functools.cached_property
    def itemsize(self) -> int:
        """Bytes of a number of the arrays of a call."""
        return self.types.storage.bytes

    @functools.cached_property
    def saved_places(self) -> dict[Expr, int]:
        """The offsets of saved values in a row, in numbers: first the values per unit, then the
        values of one number per row.
        """
        places, at = dict[Expr, int](), 0
        for node in (*self.saved, *self.saved_rows):
            places[node] = at
            at += 1 if node.narrow else self.width(node)
        return places

    @functools.cached_property
    def saved_width(self) -> int:
        """Numbers in a row of saved values."""
        return sum(map(self.width, self.saved)) + len(self.saved_rows)

    @functools.cached_property
    def saved_stride(self) -> int:
        """The distance from one row of saved values to the next, in numbers."""
        if not self.saved_width:
            return 0
        if self.saved_rows:
            # Padded to whole cache lines; otherwise every load in later rows would touch two.
            return -(-self.saved_width // 16) * 16
        return padded(self.types.saved.bytes, self.saved_width)

    @property
    def saved_bytes(self) -> int:
        """Bytes kept per step and batch row in training,
        the hidden states (the output) included.
        """
        states = sum(self.sizes[s.size] for s in self.cell.states if s.name in self.states)
        return states * self.itemsize + self.saved_width * self.types.saved.bytes

    @functools.cached_property
    def places(self) -> dict[str, slice]:
        """The columns of each gate in the projected input."""
        return self.cell.places(self.sizes)

    @functools.cached_property
    def gates_width(self) -> int:
        """The columns of the projected input."""
        return self.cell.width(self.sizes)

    @functools.cached_property
    def param_places(self) -> dict[str, slice]:
        """The places of the parameters, side by side in a row."""
        ends = itertools.accumulate(self.param_sizes)
        pairs = zip(ends, self.cell.params, strict=True)
        return {p.name: slice(end - self.sizes[p.size], end) for end, p in pairs}

    @functools.cached_property
    def param_sizes(self) -> list[int]:
        """The size of each parameter."""
        return [self.sizes[param.size] for param in self.cell.params]

    @property
    def static_width(self) -> int:
        """Numbers of the static input in a row."""
        return self.sizes[self.cell.static_size]

    def symbol(self, node: Expr) -> str:
        """The size symbol of a node of the cell or of its gradients; "H" for a number."""
        fits = self.cell.broadcasts
        if fits and node.narrow:
            return ONE
        stack = [node]
        while stack:  # an elementwise node has the size of its arguments
            top = stack.pop()
            if top in self.cell.sizes:
                return self.cell.sizes[top]
            if top.op == "grad":
                return next(s.size for s in self.cell.states if s.name == top.attrs[0])
            if top.op == "linear_t":
                return next(l.in_size for l in self.cell.linears if l.name == top.attrs[0])
            stack += [arg for arg in top.args if not (fits and arg.narrow)]
        return "H"

    def reduced(self, reduction: Expr) -> str:
        """The size symbol of the units that a reduction combines."""
        if self.cell.broadcasts and reduction.narrow:
            (arg,) = reduction.args
            sized = self.cell.sizes.__contains__
            ends = [n for n in topological([arg], sized) if sized(n) or not n.args]
            number = arg.narrow and all(end.op in ("const", "hyper") for end in ends)
            return "H" if number else self.symbol(arg)
        return self.symbol(reduction)

    def width(self, node: Expr) -> int:
        """The number of units of a node."""
        return self.sizes[self.symbol(node)]

    def shares_gradient(self, linear: Linear) -> bool:
        """Whether a matmul's gradient is the input projection's, and needs no memory of its own."""
        return linear.name == RECURRENT and self.cell.fused.issuperset(self.cell.gates)

    @functools.cached_property
    def carried_back(self) -> frozenset[str]:
        """Matmuls whose weights a step of the backward pass multiplies by before it is done: the
        matmuls whose operand the step computes, unless nothing before that needs a gradient.
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
        dtype: "float32", "float64", "bfloat16", "float16" or "int8" (weights only; other arrays are
            float32). The GPU has neither "float64" nor "int8".
        engine: force "cpu" or "reference"; None chooses between them. "gpu" for arrays on a GPU.
        sizes: what the other size symbols of the cell stand for.

    Raises:
        ValueError: for an unknown dtype or engine, a forced engine that cannot run the cell, or
            sizes that are not divisible by its heads or groups.
    """
    if engine not in (None, "cpu", "gpu", "reference"):
        refuse("engine", repr(engine), "'cpu', 'gpu', 'reference' or None")
    known_dtypes = dtypes("gpu" if engine == "gpu" else "cpu", quantized=True)
    if dtype not in known_dtypes:
        refuse("dtype", repr(dtype), f"one of {', '.join(known_dtypes)}")
    known = {**(sizes or {}), "H": hidden_size, **({ONE: 1} if cell.broadcasts else {})}
    return _plan(cell, cell.key, hidden_size, dtype, engine, tuple(sorted(known.items())))


# Keyed by graph and hyperparameters: equal cells share one plan.
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
    cut, recomputed = least_memory(cell, gradients, rounded=DTYPES[dtype].mixed)
    # The first state, and the states whose old or new value the backward pass reads.
    read = {*topological(gradient_roots(cell, gradients)), *(l.operand for l in cell.linears)}
    kept = [
        state.name
        for i, (state, new) in enumerate(zip(cell.states, cell.next, strict=True))
        if i == 0
        or Expr("state", (), (state.name,)) in read
        or (new in read and in_sequence(cell, new))
    ]
    unknown = {symbol for symbol in cell.sizes.values() if symbol not in sizes}
    refusal = f"the size {min(unknown)} of this cell is unknown" if unknown else None
    refusal = refusal or (no_kernel_on_gpu(cell) if engine == "gpu" else None)
    if engine in ("cpu", "gpu") and refusal:
        raise ValueError(f"engine={engine!r} cannot run cell {cell.name}: {refusal}.")
    matmuls = len(cell.linears)
    fused = f"fused kernel, {matmuls or 'no'} matmul{'s' * (matmuls != 1)} a step"
    return Plan(
        cell=cell,
        hidden_size=hidden_size,
        sizes=sizes,
        dtype=dtype,
        gradients=gradients,
        saved=tuple(node for node in cut if not node.narrow),
        saved_rows=tuple(node for node in cut if node.narrow),
        states=tuple(kept),
        recomputed=tuple(recomputed),
        engine=engine or ("reference" if refusal else "cpu"),
        reason="asked for" if engine == "reference" else refusal or fused,
    )


def no_kernel_on_gpu(cell: Cell) -> str | None:
    """Says why the GPU engine has no kernel for a cell; None if it has."""
    if not cell.gates:
        return "no kernel on the GPU for a cell without gates"
    sizes = {*cell.gate_sizes.values(), cell.static_size, *(param.size for param in cell.params)}
    others = (sizes | ({ONE} if cell.broadcasts else set())) - {"H"}
    if others:
        reason = "gates, parameters or static inputs of other sizes than H, or values of size 1"
        return f"no kernel on the GPU for {reason}: {', '.join(sorted(others))}"
    return None


@functools.lru_cache(maxsize=256)
def padded(itemsize: int, width: int) -> int:
    """The length of rows in a buffer of numbers of ``itemsize`` bytes: never a multiple of 1 KiB,
    because such rows would compete for a few lines of the cache.
    """
    return width + LINE // itemsize if width * itemsize % 1024 == 0 else width
