"""Compiled plans: from the cache on disk where they are there, else printed and compiled."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping

from anycell.engines.cpu import door, isa, jit
from anycell.engines.cpu.arguments import extents, number_of
from anycell.engines.cpu.generator import Generator
from anycell.engines.cpu.ir import Target
from anycell.engines.cpu.sources import fingerprint
from anycell.lang.cell import Cell
from anycell.lang.expr import Expr, topological
from anycell.lang.grad import Gradients
from anycell.plan import Plan


class Kernel:
    """A compiled plan in one direction: its door, and the sizes and names that a call needs.

    Attributes:
        door, needs: native functions of the address of a call's table, see ``door``.
        shared, each: places of the entries of such a table: of those of the whole call, and of
            those of a direction among the ``stride`` entries that each direction has.
        axes: how many strides follow the address of an array, of its last axes, where some do.
        index: places of the entries of a kernel's own table, which the door fills.
        units_splittable: whether threads may split the units: a row reduction, or a matmul inside
            the step, needs all units of a row in one thread.
        projecting: the matmul to whose sums it can add the input projection, if there is one.
    """

    def __init__(self, generator: Generator, library: jit.Library) -> None:
        self.library, self.plan = library, generator.plan
        plan = self.plan
        self.door, self.needs = (_CALL(library.address(name)) for name in ("door", "needs"))
        names = door.names(plan, generator.backward)
        self.shared = {name: i for i, name in enumerate(names.shared)}
        self.each = {name: i for i, name in enumerate(names.each)}
        self.stride = len(names.each)
        self.axes = {name: count for name in names.each if (count := door.axes(name))}
        self.index = generator.names
        self.saved_width = generator.saved_width
        self.itemsize = plan.itemsize
        self.extents = extents(plan, generator.backward, generator.saved_width)
        self.units_splittable = not generator.row_wise
        self.matmuls = generator.matmuls
        self.projecting = generator.projecting
        self.packed_bytes = generator.packed_bytes
        # For ``check``: names and sizes of states; heads, rows and columns of the weights that are
        # packed; and which entry of a call each array of the kernel's own table comes from.
        self.states = generator.states_and_widths
        sizes = plan.sizes
        self.weights = {m.linear.weight: (1, *m.linear.shape(sizes))[-3:] for m in self.matmuls}
        self._entries = door.sources(plan, generator.backward)

    def bytes(self, argument: str) -> int:
        """Of a number of an array of the kernel's own table."""
        return number_of(self.plan, argument).bytes

    def entry(self, argument: str) -> str:
        """Which entry of a call an argument of the kernel comes from."""
        return self._entries.get(argument, argument)

    def first(self, direction: int) -> int:
        """Where the entries of a direction begin."""
        return len(self.shared) + direction * self.stride


_CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_kernels: dict[tuple[str, Target], Kernel] = {}


def loaded(plan: Plan, backward: bool, target: Target) -> Kernel | None:
    """The kernel, if this process has it."""
    return _kernels.get((description(plan, backward), target))


def compiled(plan: Plan, backward: bool = False) -> Kernel:
    """The kernel of a plan for the instruction set in use; compiled once per process,
    kept on disk.
    """
    target = isa.current()
    key = description(plan, backward), target
    found = _kernels.get(key)
    if found is None:
        with jit.lock:
            found = _kernels.get(key)
            if found is None:
                generator = Generator(plan, backward, target)
                library = jit.compile(*request(generator))
                found = _kernels[key] = Kernel(generator, library)
    return found


def request(
    generator: Generator,
) -> tuple[Callable[[], str], tuple[str, ...], Target, str | None]:
    """What ``jit`` is asked for: how to print the text, functions, target and recipe."""
    plan, backward, target = generator.plan, generator.backward, generator.target
    symbols = generator.symbols
    sources = fingerprint()
    recipe = f"{sources}\n{target}\n{description(plan, backward)}" if sources else None
    # A generator prints once, and what it has printed need not stay in memory.
    return lambda: Generator(plan, backward, target).text(), symbols, target, recipe


@functools.lru_cache(maxsize=1024)
def description(plan: Plan, backward: bool) -> str:
    """All of a plan that a kernel's text follows from, at a small part of the text's price.

    It is the plan as it came out, with its graphs and choices, so that nothing hangs on its coming
    out the same in another process. Values of hyperparameters are no part of it.
    """
    leaves = list(_leaves(plan))
    nodes = topological([leaf for leaf in leaves if isinstance(leaf, Expr)])
    number = {node: i for i, node in enumerate(nodes)}
    lines = [f"{n.op} {n.attrs!r} {[number[arg] for arg in n.args]}" for n in nodes]
    rest = [f"#{number[leaf]}" if isinstance(leaf, Expr) else repr(leaf) for leaf in leaves]
    kind = f"backward {backward} short {plan.types.short}"
    return "\n".join((kind, *lines, " ".join(rest)))


def _leaves(value: object) -> Iterator[Expr | str | float | None]:
    """What a plan is made of, in order: expressions and plain values."""
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
        raise TypeError(f"a kernel's name has no place for {value!r}")
