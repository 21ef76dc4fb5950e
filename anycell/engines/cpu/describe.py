"""Describes a plan's CPU kernels, for ``anycell.explain``."""

from __future__ import annotations

from collections.abc import Iterator

from anycell.engines.cpu import isa, jit, kernel, threads, tiles
from anycell.engines.cpu.layout import Layout
from anycell.engines.cpu.sequence import print_kernel
from anycell.plan import Plan


def describe(plan: Plan, backward: bool, batch: int | None) -> Iterator[str]:
    """Describes the tiles and passes of a kernel, the memory of a batch, and where the code is."""
    layout = Layout(plan, backward, isa.current())
    if not backward:
        most = threads.current()
        yield (
            f"a call takes at most {most} {_plural('thread', most)}, and one for little work; "
            "PyTorch layers take torch's number"
        )
    yield from _geometry(layout, batch)
    yield from _passes(layout)
    yield _code(layout)


def llvm(plan: Plan, backward: bool) -> str:
    """Returns the LLVM text of a kernel."""
    return str(print_kernel(Layout(plan, backward, isa.current())))


def assembly(plan: Plan, backward: bool) -> str:
    """Returns the machine instructions of a kernel, which is compiled first if necessary."""
    return kernel.compiled(plan, backward).library.assembly()


def _geometry(layout: Layout, batch: int | None) -> Iterator[str]:
    target, plan = layout.target, layout.plan
    yield (
        f"{target.name}: {target.bits} bits, {layout.geometry.lanes} "
        f"{plan.types.math.llvm}s a vector, {target.registers} vector registers"
    )
    if not layout.matmuls:
        yield "no recurrent matmul"
        return
    for m in layout.matmuls:
        g, heads, inner = m.geometry, m.linear.heads, m.parts * m.numbers
        packed, tiles_of = m.packed_elements * layout.size, _plural("tile", m.tiles)
        weights = f"weights packed in {m.tiles} {tiles_of}, {packed:,} bytes"
        if layout.packed_by[m.linear.name] is not m:
            weights = "the same packed weights"
        of = f" for each of {heads} heads" if heads > 1 else ""
        yield (f"matmul [rows, {inner}] @ [{inner}, {g.units * g.outputs}]{of}; {weights}")
        columns = [len(group) for group in g.groups(g.span)]
        blocks = [f"{g.block_rows(n)} rows x {n} {_plural('column', n)}" for n in columns]
        blocking = f"register blocks of at most {' and '.join(dict.fromkeys(blocks))}"
        if g.paired:
            blocking += " of pairs of bfloat16"
        if g.tiled:
            emulated = ", emulated" * (target.tiles == "emulated")
            blocking = f"matrix tiles of {tiles.ROWS} rows{emulated}"
        yield (
            f"tile: {g.unroll * g.lanes} units x {g.outputs}, "
            f"{g.columns} {_plural('vector', g.columns)} wide; {blocking}"
        )
    if batch is not None:
        space = layout.workspace(batch)
        yield f"working memory of a thread for {batch} rows: {space:,} bytes"


def _passes(layout: Layout) -> Iterator[str]:
    """Describes the passes over a row: several if reductions or matmuls need all units."""
    passes = layout.passes
    if len(passes) == 1:
        return
    reductions = sum(len(part.reductions) for part in passes)
    matmuls = len({name for part in passes for name in part.matmuls})
    waiting = {"reduction": reductions, "matmul": matmuls}
    why = " and ".join(f"{n} {_plural(word, n)}" for word, n in waiting.items() if n)
    yield (
        f"a step makes {len(passes)} passes over the units of a row: {why} "
        f"{'needs' if reductions + matmuls == 1 else 'need'} all of them"
    )
    spills = sum(len(part.stores) for part in passes)
    yield (
        f"{spills} {_plural('value', spills)} per unit kept from one pass for another; "
        "threads split rows only"
    )


def _code(layout: Layout) -> str:
    code = jit.stored(*kernel.request(layout))
    loaded = kernel.loaded(layout.plan, layout.backward, layout.target)
    size = f"{jit.code_size(code):,} bytes of instructions, " if code else ""
    if loaded is not None:
        return f"{size}loaded, {'from the cache' if loaded.library.cached else 'compiled here'}"
    if code:
        return f"{size}in the cache on disk"
    return f"not compiled yet; LLVM text of {len(str(print_kernel(layout)).splitlines()):,} lines"


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"
