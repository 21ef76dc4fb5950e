"""The form of a call: the chunk length, and what the kernel itself multiplies."""

from __future__ import annotations

import functools
from array import array
from typing import NamedTuple

from anycell.engines import cpu
from anycell.engines.cpu.door import NEAR_CACHE
from anycell.engines.cpu.ir import Target
from anycell.lang.cell import RECURRENT
from anycell.layer.arguments import Array
from anycell.layer.schedule import chunk_steps
from anycell.plan import Plan

# Of projected gates, for all directions together: they should stay in the cache.
CHUNK_BYTES = 8 << 20
WORTH_PACKING = 256  # rows of all steps from which packing the weight of the input may pay
# Rows of a single step, below which it does not pay to pack the weights for its products either.
FEW_ROWS = 12
WORTH_A_THREAD = 1 << 17  # multiply-adds of a call below which a second thread does not pay
WEIGHTS_SHARE = (
    0.7  # of a core's own cache for both weights of a step: the rows need room there too
)
# With matrix tiles, which 16 rows fill, the kernel multiplies the input of at least this many rows
# of a step, by weights of at most this many bytes: a core that has tiles has a cache of 2 MiB.
TILED_ROWS = 12
TILED_WEIGHTS = 2 << 20
FILLED = 0.7  # part of a mask below which to leave out the rest makes up for smaller matmuls


class Form(NamedTuple):
    """Values that calls of one form share; calls differ in addresses and ``Options``.

    Attributes:
        steps, chunk: all of them, and those per chunk of the projection.
        inputs: how many of them the kernel multiplies itself; 0 where they are projected before.
        single: one step, whose recurrent matmul is a product too: packing the weights for the
            kernel would cost more than it saves.
        few: one of so few rows, that products read the weights where they lie.
        scratch, packed: bytes of memory that the door asks for.
        parts: threads that it takes.
        entries: the table of a call, with all that does not change.
        firsts: where in it the entries of each direction begin.
        hyper: what it points at.
    """

    kernel: cpu.Kernel
    steps: int
    chunk: int
    inputs: int
    single: bool
    few: bool
    scratch: int
    packed: int
    parts: int
    entries: array[int]
    firsts: list[int]
    hyper: Array


@functools.lru_cache(maxsize=256)
def form_of(
    plan: Plan,
    backward: bool,
    target: Target,
    steps: int,
    batch: int,
    reverse: tuple[bool, ...],
    entering: int | None,
    resets: bool,
    holes: bool,
    threads: int,
    dense: bool,
) -> Form:
    """Returns the values that calls of the same steps and rows share.

    Args:
        plan, backward: of the pass.
        target: the instruction set in use.
        steps, batch: of the input.
        reverse: which directions run from the last step to the first.
        entering: the width of an input to project; None for one that is projected.
        resets: whether there are any.
        holes: whether a mask has many, see ``sparse``.
        threads: at most this many.
        dense: whether the rows of the first state before the first step are.
    """
    directions, project = len(reverse), entering is not None
    kernel = cpu.compiled(plan, backward)
    chunk = chunk_of(plan, steps, batch * directions) if project else max(1, steps)
    single = project and steps == 1 and dense and recurrent_alone(plan) and not resets
    able = kernel.projecting is not None  # of the forward pass
    inputs = 0
    if entering and able and not single and projects(plan, steps * batch, entering, holes, batch):
        inputs = entering
    hyper = cpu.hyperparameters(plan)
    at, entries = kernel.shared, array("q", bytes(8 * kernel.first(directions)))
    values = {
        "directions": directions, "reverse": sum(way << d for d, way in enumerate(reverse)),
        "steps": steps, "batch": batch, "count": chunk, "span": steps, "pack": not single,
        "packed": not single, "threads": min(threads, cpu.pool.MOST), "sparse": holes,
        "least_work": WORTH_A_THREAD, "row_group": row_group(batch),
        "hyper": hyper.__array_interface__["data"][0], "inputs": inputs,
    }  # fmt: skip
    for name, value in values.items():
        if name in at:
            entries[at[name]] = value
    kernel.needs(entries.buffer_info()[0])
    scratch, packed = entries[at["scratch_bytes"]], entries[at["packed_bytes"]]
    entries[at["packed"]] = 0
    firsts = [kernel.first(d) for d in range(directions)]
    few, packed = single and batch < FEW_ROWS, 0 if single else packed
    return Form(
        kernel, steps, chunk, inputs, single, few, scratch, packed, entries[at["parts"]], entries,
        firsts, hyper,
    )  # fmt: skip


def chunk_of(plan: Plan, steps: int, rows: int) -> int:
    """Steps of a chunk of a layer that projects its input.

    Args:
        rows: of a step, of all directions together.
    """
    limit = CHUNK_BYTES * plan.itemsize // plan.types.accumulate.bytes
    return chunk_steps(plan, steps, rows, limit)


def recurrent_alone(plan: Plan) -> bool:
    """Whether the cell's only matmul is its first state's, onto all gates, by real weights."""
    linears = [(l.name, l.outputs, l.operand.op) for l in plan.cell.linears]
    return linears == [(RECURRENT, plan.cell.gates, "state")] and not plan.types.quantized


def projects(
    plan: Plan, rows: int | None, inputs: int, holes: bool = False, batch: int = TILED_ROWS
) -> bool:
    """Whether the kernel should compute the input projection.

    The projection of all steps at once reads its weight once, but writes the gates to memory, where
    the kernel reads them again. If both weights fit a core's own cache, the kernel is faster; if
    there is enough work to make up for packing one more weight. It is also faster under sparse
    masks, because it skips masked rows.

    Args:
        rows: of all steps together; None if they are not known yet.
        inputs: the width of x.
        holes: whether the mask is sparse.
        batch: rows of a step.
    """
    recurrent = cpu.compiled(plan).projecting
    if recurrent is None or (rows is not None and rows < WORTH_PACKING):
        return False
    both = len(plan.cell.gates) * plan.hidden_size * (inputs + recurrent.inner)
    size = both * plan.types.operands.bytes
    if recurrent.geometry.tiled:
        return holes or (batch >= TILED_ROWS and size <= TILED_WEIGHTS)
    return holes or size <= WEIGHTS_SHARE * NEAR_CACHE


def sparse(mask: Array | None) -> bool:
    """Whether a mask lets so few rows of steps pass that it pays to go without the others."""
    return mask is not None and int(mask.sum()) < FILLED * mask.shape[0] * mask.shape[1]


def row_group(batch: int) -> int:
    """Rows that share sums of parameter gradients: few enough groups for the near cache,
    enough for all threads.

    It depends on the batch alone, so that the order of additions is the same for any number of
    threads.
    """
    return max(1, batch // 32)
