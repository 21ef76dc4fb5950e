"""Compiled plans: from the cache on disk where they are there, else printed and compiled."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping

from anycell.engines.cpu import isa, jit
from anycell.engines.cpu.generator import Generator, extents
from anycell.engines.cpu.geometry import Matmul
from anycell.engines.cpu.ir import Target
from anycell.engines.cpu.sources import fingerprint
from anycell.lang.cell import Cell
from anycell.lang.expr import Expr, topological
from anycell.lang.grad import Gradients
from anycell.plan import Plan


class Kernel:
    """A compiled plan in one direction: addresses, and the sizes and names that a call needs."""

    def __init__(self, generator: Generator, library: jit.Library) -> None:
        self.library = library
        self.names = tuple(generator.names)
        self.index = generator.names
        self.workspace = generator.workspace
        self.saved_width = generator.saved_width
        self.itemsize = generator.plan.itemsize
        self.extents = extents(generator.plan, generator.backward, generator.saved_width)
        # A row reduction, or a matmul inside the step, needs all units of a row in one thread.
        self.units_splittable = not generator.row_wise
        self.tiles = generator.geometry.tiles
        # Multiply-adds for a row of the batch.
        self.work = sum(
            m.units * m.inner * m.geometry.outputs // m.linear.heads for m in generator.matmuls
        )
        self.packed_elements = [m.packed_elements for m in generator.matmuls]
        self.inner = [m.geometry.inner for m in generator.matmuls]
        # Heads, rows and columns of the weights that are packed.
        sizes = generator.plan.sizes
        self.sources = [(1, *m.linear.shape(sizes))[-3:] for m in generator.matmuls]
        self.projecting = generator.projecting
        self.packed_bytes = sum(self.packed_elements) * generator.plan.itemsize
        self.run = library.address("run")
        self.pack = [library.address(f"pack{m.number}") for m in generator.matmuls]

    def projection(self, inputs: int) -> Matmul:
        """The input projection of a kernel that can do it."""
        assert self.projecting is not None
        return self.projecting.projection(inputs)


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
    return "\n".join((f"backward {backward}", *lines, " ".join(rest)))


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
