"""What calls of one form share: their chunks, threads and memory, and who does which matmul."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from anycell.engines import cpu
from anycell.lang.cell import RECURRENT
from anycell.layer.arguments import Array, chunk_steps
from anycell.plan import Plan

# Of projected gates, for all directions together: they should stay in the cache.
CHUNK_BYTES = 8 << 20
WORTH_PACKING = 256  # rows of all steps from which packing the weight of the input may pay
WORTH_A_THREAD = 1 << 17  # multiply-adds of a call below which a second thread does not pay
NEAR_CACHE = 5 << 18  # bytes of a core's own cache
WEIGHTS_SHARE = 0.7  # of it for both weights of a step: the rows need room there too
FILLED = 0.7  # part of a mask below which to leave out the rest makes up for smaller matmuls
# Threads share the rows and split the units where each would have fewer rows than that, and a
# core's own cache holds a part of the weights but not all; with hardly any rows always. Else the
# barrier of each step costs more than it saves.
FEW_ROWS = 16
HARDLY_ANY_ROWS = 4


class Form(NamedTuple):
    """What calls of one form share: they differ in addresses, and in what ``Options`` says.

    Attributes:
        steps, chunk: all of them, and those per chunk of the projection.
        inputs: how many of them the kernel multiplies itself; 0 where the host does.
        at_once: the projection is one matmul, or the caller's, and rows as they come will do.
        single: one step, whose recurrent matmul is the host's too: packing the weights would cost
            more than it saves.
        threads, units_split: for a kernel call, and whether they split the units, not the rows.
        sizes: bytes of scratch memory, workspace and packed weights of each direction.
        constants: what tables point at: hyperparameters, and projected gates that are all 0.
        tables: an argument table per direction, with all that does not change.
    """

    kernel: cpu.Kernel
    steps: int
    chunk: int
    inputs: int
    at_once: bool
    single: bool
    threads: int
    units_split: bool
    sizes: list[int]
    constants: tuple[Array, ...]
    tables: list[cpu.Table]


@functools.lru_cache(maxsize=256)
def form_of(
    kernel: cpu.Kernel,
    plan: Plan,
    steps: int,
    batch: int,
    reverse: tuple[bool, ...],
    entering: int | None,
    resets: bool,
    holes: bool,
    threads: int,
) -> Form:
    """What calls of so many steps and rows share.

    Args:
        kernel, plan: of the pass.
        steps, batch: of the input.
        reverse: which way the pass goes, per direction.
        entering: the width of an input to project; None for one that is projected.
        resets: whether there are any.
        holes: whether a mask has many, see ``sparse``.
        threads: at most so many.
    """
    cell, directions, project = plan.cell, len(reverse), entering is not None
    chunk = max(1, steps)
    if project:
        chunk = chunk_steps(plan, steps, batch * directions, CHUNK_BYTES)
    # The primitive multiplies by its own kernel always: its bits do not depend on the host.
    alone = [(l.name, l.outputs) for l in cell.linears] == [(RECURRENT, cell.gates)]
    alone = alone and cell.linears[0].operand.op == "state"
    single = project and steps == 1 and alone and not resets
    width = len(cell.gates) * plan.hidden_size
    at_once = not project or (chunk >= steps and (single or padded(plan, width) == width))
    able = kernel.projecting is not None  # of the forward pass
    inputs = 0
    if entering and able and not single and projects(plan, steps * batch, entering, holes):
        inputs = entering
    work = chunk * batch * max(0 if single else kernel.work + width * inputs, 64 * plan.hidden_size)
    # Of a mask with many holes the typical step has few rows, and many steps fewer still.
    rows = batch // 4 if holes else batch
    input_bytes = width * inputs * plan.itemsize
    threads, units_split = share(kernel, work, rows, directions, threads, input_bytes)
    workspace = kernel.workspace(batch)
    hyper, zeros = cpu.hyperparameters(plan), np.zeros(width if inputs else 0, plan.dtype)
    common = cpu.Table(kernel.index)
    common.set(
        batch=batch, row_group=row_group(batch), workspace_stride=workspace,
        units_split=units_split, yield_to=cpu.pool.yield_address(),
        hyper=hyper.__array_interface__["data"][0],
    )  # fmt: skip
    tables = []
    for backwards in reverse:
        tables.append(common.copy())
        tables[-1].set(time_step=-1 if backwards else 1)
    packed = [0 if single else n * plan.itemsize for n in kernel.packed_elements]
    if inputs:
        entry = kernel.projection(inputs)
        packed.append(entry.packed_elements * plan.itemsize)
        block, at = entry.geometry.inner_block(plan.itemsize), zeros.__array_interface__["data"][0]
        for table in tables:
            table.set(inputs=inputs, input_block=block, x=at)
            table.bounds["x"] = at, at + zeros.nbytes
    sizes = [workspace * threads, *packed] * directions
    constants = hyper, zeros
    return Form(
        kernel, steps, chunk, inputs, at_once, single, threads, units_split, sizes, constants,
        tables,
    )  # fmt: skip


# Where the roads of calls divide that lead to the same numbers: tests take both sides of each.
ROADS: dict[str, Callable[[Form], bool]] = {
    "the kernel multiplies the input": lambda form: form.inputs > 0,
    "all steps are projected at once": lambda form: form.at_once,
    "a single step": lambda form: form.single,
    "several chunks": lambda form: form.chunk < form.steps,
    "several threads": lambda form: form.threads > 1,
    "threads split the units": lambda form: form.units_split,
}


def projects(plan: Plan, rows: int | None, inputs: int, holes: bool = False) -> bool:
    """Whether the forward kernel had better multiply so many inputs itself, for so many rows of all
    steps (None: not known yet).

    The projection of all steps at once reads its weight once, but writes the gates to memory and
    has the kernel read them there. Where both weights stay in a core's own cache, the kernel had
    better multiply the input too; if there is the work to make up for packing one more weight.
    And so it had where a mask has many holes, which the projection of all steps cannot leave out.
    """
    recurrent = cpu.compiled(plan).projecting
    if recurrent is None or (rows is not None and rows < WORTH_PACKING):
        return False
    both = len(plan.cell.gates) * plan.hidden_size * (inputs + recurrent.inner)
    return holes or both * plan.itemsize <= WEIGHTS_SHARE * NEAR_CACHE


def sparse(mask: Array | None) -> bool:
    """Whether a mask lets so few rows of steps pass that it pays to go without the others."""
    return mask is not None and int(mask.sum()) < FILLED * mask.shape[0] * mask.shape[1]


def share(
    kernel: cpu.Kernel, work: int, rows: int, directions: int, threads: int, input_bytes: int = 0
) -> tuple[int, bool]:
    """How many threads a call of so much work is worth, and whether they split the units;
    ``input_bytes`` are those of the input's weight, where the kernel multiplies it.
    """
    if threads == 1 or work * directions < WORTH_A_THREAD:
        return 1, False
    each = threads // directions if threads % directions == 0 else threads
    near = kernel.packed_bytes + input_bytes <= NEAR_CACHE
    few = rows < (HARDLY_ANY_ROWS if near else FEW_ROWS) * each
    return threads, kernel.units_splittable and few and 1 < each <= kernel.tiles


def padded(plan: Plan, width: int) -> int:
    """The length of rows in a buffer: not a large power of two,
    or all rows would share a few lines of the cache.
    """
    return width + cpu.LINE // plan.itemsize if width * plan.itemsize % 1024 == 0 else width


def row_group(batch: int) -> int:
    """Rows that share sums of parameter gradients: few enough groups for the near cache,
    enough for all threads.

    It depends on the batch alone, so that the order of additions is the same for any number of
    threads.
    """
    return max(1, batch // 32)
