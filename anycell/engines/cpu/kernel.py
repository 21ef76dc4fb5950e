"""Compiled plans: loaded from the cache on disk if possible, else printed and compiled."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping

from anycell.engines.cpu import isa, jit, table
from anycell.engines.cpu.ir import Target
from anycell.engines.cpu.layout import Layout
from anycell.engines.cpu.sequence import print_kernel
from anycell.engines.cpu.sources import fingerprint
from anycell.lang.cell import Cell
from anycell.lang.expr import Expr, topological
from anycell.lang.grad import Gradients
from anycell.plan import Plan
from anycell.refusal import refuse


class Kernel:
    """A compiled plan in one direction: its door, and the sizes and names that a call needs.

    Attributes:
        door, needs: native functions that take the address of a call's table, see ``door``;
            ``address`` is the door's address.
        shared, each: places of entries in a call's table: of the whole call's entries, and of one
            direction's entries among its ``stride`` entries.
        axes: how many strides, of its last axes, follow an array's address, if any do.
        arrays: see ``anycell.plan.arrays``.
        index: places of the entries of a kernel's own table, which the door fills.
        projecting: the matmul to whose sums the kernel can add the input projection, or None.
    """

    def __init__(self, layout: Layout, library: jit.Library) -> None:
        self.library, self.plan = library, layout.plan
        plan = self.plan
        self.address = library.address("door")
        self.door, self.needs = library.function("door"), library.function("needs")
        names = table.names(plan, layout.backward)
        self.shared = {name: i for i, name in enumerate(names.shared)}
        # A direction's parameters are found by their plain names.
        self.each = {name.removeprefix("param "): i for i, name in enumerate(names.each)}
        self.stride = len(names.each)
        self.axes = {name: count for name in names.each if (count := table.axes(name))}
        self.arrays, self.index = layout.arrays, layout.entries
        self.itemsize: int = plan.itemsize
        self.projecting = layout.projecting
        # For ``check``: the entries that the door copies, with the arrays that it copies to or
        # from; and the heads, rows and columns of the packed weights.
        self.copied = {}
        for state, name in zip(plan.cell.state_names, layout.sequences, strict=True):
            if layout.backward:
                self.copied[f"d_final {state}"] = self.arrays[f"d_state {state}"]
            else:
                self.copied |= {f"{kind} {state}": self.arrays[name] for kind in ("state", "final")}
        sizes = plan.sizes
        self.weights = {m.linear.weight: (1, *m.linear.shape(sizes))[-3:] for m in layout.matmuls}

    def first(self, direction: int) -> int:
        """The place where the entries of a direction begin."""
        return len(self.shared) + direction * self.stride


_kernels: dict[tuple[str, Target], Kernel] = {}


def loaded(plan: Plan, backward: bool, target: Target) -> Kernel | None:
    """Returns the kernel if this process has loaded it."""
    return _kernels.get((description(plan, backward), target))


def compiled(plan: Plan, backward: bool = False) -> Kernel:
    """The kernel of a plan for the instruction set in use; compiled once, kept on disk.

    Raises:
        ValueError: if ``backward`` is true for integer weights, which have no backward pass.
    """
    if backward and plan.types.quantized:
        refuse("backward", f"a plan of {plan.dtype}", "a plan of a dtype with gradients")
    target = isa.current()
    key = description(plan, backward), target
    if key not in _kernels:
        with jit.lock:
            if key not in _kernels:
                layout = Layout(plan, backward, target)
                _kernels[key] = Kernel(layout, jit.compile(*request(layout)))
    return _kernels[key]


def request(layout: Layout) -> jit.Request:
    """The arguments of ``jit.compile`` for a layout."""
    sources, target = fingerprint(), layout.target
    described = description(layout.plan, layout.backward)
    recipe = f"{sources}\n{target}\n{described}" if sources else None
    return lambda: print_kernel(layout), ("door", "needs"), target, recipe


@functools.lru_cache(maxsize=1024)
def description(plan: Plan, backward: bool) -> str:
    """Describes everything in a plan that determines its kernel's text; printing costs far more.

    It has the graphs and choices of the plan, so a kernel's name does not rely on planning being
    reproducible. It omits the values of hyperparameters.
    """
    leaves = list(_leaves(plan))
    nodes = topological([leaf for leaf in leaves if isinstance(leaf, Expr)])
    number = {node: i for i, node in enumerate(nodes)}
    lines = [f"{n.op} {n.attrs!r} {[number[arg] for arg in n.args]}" for n in nodes]
    values = [f"#{number[leaf]}" if isinstance(leaf, Expr) else repr(leaf) for leaf in leaves]
    kind = f"backward {backward} short {plan.types.short}"
    return "\n".join((kind, *lines, " ".join(values)))


def _leaves(value: object) -> Iterator[Expr | str | float | None]:
    """Yields the parts of a plan, in order: expressions and plain values."""
    if isinstance(value, Cell):
        # The kernel reads hyperparameters by their place among all that the function declares,
        # while the graph has only those that it uses.
        yield from (value.key, *value.hyper)
    elif isinstance(value, Plan | Gradients):
        for field in dataclasses.fields(value):
            if field.name not in ("engine", "reason"):
                yield field.name
                yield from _leaves(getattr(value, field.name))
    elif isinstance(value, Mapping):
        yield from _leaves(tuple(value.items()))
    elif isinstance(value, tuple):
        yield "("
        for part in value:
            yield from _leaves(part)
        yield ")"
    elif value is None or isinstance(value, Expr | str | int | float):
        yield value
    else:
        raise TypeError(f"plan: given {value!r} in it; expected expressions and plain values")
