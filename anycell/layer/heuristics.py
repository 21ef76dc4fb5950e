"""Choices of a pass by its sizes: how long chunks are, and what the kernel itself multiplies."""

from __future__ import annotations

from enum import Enum

from anycell.engines import cpu
from anycell.engines.cpu.door import NEAR_CACHE
from anycell.engines.cpu.geometry import Matmul
from anycell.engines.cpu.idioms import in_pairs
from anycell.lang.cell import RECURRENT
from anycell.layer.arguments import Array
from anycell.layer.recipe import View
from anycell.layer.schedule import chunk_steps
from anycell.plan import Plan

# Bytes of the projected gates of a chunk, for all directions: they should stay in the cache.
CHUNK_BYTES = 8 << 20
WORTH_PACKING = 256  # rows of all steps from which packing the input weight may pay off
# Rows of a single step up to which packing a weight for its products does not pay off either. If
# the columns of the weight are dense, packing takes longer, but lanes must be added up: there is
# also a limit for each vector of a sum.
FEW_ROWS = 16
FEW_ROWS_TURNED = 64
ROWS_A_VECTOR = 2.0
# The same where an instruction adds two products of packed bfloat16.
FEW_ROWS_IN_PAIRS = 4
PAIRED_ROWS_A_VECTOR = 0.125
FEW_ROWS_UNFUSED = 3  # without fused multiply-adds packing takes a smaller part of the time
# Steps of a call of one row up to which packing does not pay off, and bytes of both weights for
# each of these steps: packed, small weights stay in a near cache. Packing integers pays off late
# where no instruction adds up four of their products.
UNPACKED_STEPS = 64
UNPACKED_BYTES = 1 << 15
UNPACKED_BYTES_IN_PARTS = 1 << 11
WORTH_A_THREAD = 1 << 17  # multiply-adds of a call below which a second thread does not pay off
WEIGHTS_SHARE = (
    0.7  # of a core's own cache for both weights of a step: the rows need room there too
)
# With matrix tiles, which 16 rows fill, the kernel multiplies the input of at least this many rows
# of a step, by weights of at most this many bytes: a core that has tiles has a cache of 2 MiB.
TILED_ROWS = 12
TILED_WEIGHTS = 2 << 20
FILLED = 0.7  # valid part of a mask below which skipping the other rows outweighs smaller matmuls


def chunk_of(plan: Plan, steps: int, rows: int) -> int:
    """Steps of a chunk of a layer that projects its input.

    Args:
        rows: of a step, of all directions together.
    """
    limit = CHUNK_BYTES * plan.itemsize // plan.types.accumulate.bytes
    return chunk_steps(plan, steps, rows, limit)


def recurrent_alone(plan: Plan) -> bool:
    """Whether the cell's only matmul maps its first state to all gates."""
    linears = [(l.name, l.outputs, l.operand.op) for l in plan.cell.linears]
    return linears == [(RECURRENT, plan.cell.gates, "state")]


class Projection(Enum):
    """The place where the matmul of the input is computed."""

    NONE = "x is projected already, or the kernel multiplies it as one of its matmuls"
    OUTSIDE = "before the steps of a chunk"
    INSIDE = "by the kernel, in the sums of the recurrent matmul"
    SINGLE = "before each step, and so is the recurrent matmul: packing would not pay off"


def projection(
    plan: Plan,
    matmul: Matmul | None,
    x: tuple[int, ...],
    *,
    holes: bool,
    restored: bool,
    lone: bool,
    weight: View | None,
    state: View | None,
) -> Projection:
    """Chooses where the matmul of the input of a layer that projects is computed.

    Args:
        matmul: the matmul to whose sums the kernel can add the projection, if it can.
        x: the shape ``[T, B, I]``.
        holes: whether the mask is sparse.
        restored: whether a backward pass hands gradients to what resets restored.
        lone: whether it is a forward pass of one direction, forwards, without flags, segments and
            packed weights.
        weight: of the recurrent matmul.
        state: the first state before the first step.
    """
    steps, batch, inputs = x
    is_dense_state = state is None or state.strides[-1] == 1
    several = lone and batch == 1 and unpacked(plan, steps, inputs)
    alone = (steps == 1 or several) and is_dense_state and not restored and recurrent_alone(plan)
    # Of integers, only the product without packing leaves the scales of rows to the kernel.
    if alone and (not plan.types.quantized or (weight and few(plan, batch, weight.T))):
        return Projection.SINGLE
    if matmul is not None and projects(plan, matmul, steps * batch, inputs, holes, batch):
        return Projection.INSIDE
    return Projection.OUTSIDE


def unpacked(plan: Plan, steps: int, inputs: int) -> bool:
    """Whether several steps of one row take weights as they are."""
    types = plan.types
    size = plan.gates_width * (inputs + plan.hidden_size) * types.weights.bytes
    in_parts = types.quantized and not cpu.isa.current().dot
    most = min(UNPACKED_STEPS, size // (UNPACKED_BYTES_IN_PARTS if in_parts else UNPACKED_BYTES))
    return _unchanged(plan) and 1 < steps <= most


def _unchanged(plan: Plan) -> bool:
    """Whether products without packing multiply weights as they are stored."""
    return plan.types.plain or plan.types.quantized


def projects(
    plan: Plan,
    recurrent: Matmul,
    rows: int,
    inputs: int,
    holes: bool = False,
    batch: int = TILED_ROWS,
) -> bool:
    """Whether the kernel should compute the input projection, if it can.

    The projection of all steps at once reads its weight once, but writes the gates to memory, where
    the kernel reads them again. The kernel is faster if both weights fit a core's own cache and
    there is enough work to make up for packing one more weight. It is also faster under sparse
    masks, because it skips masked rows.

    Args:
        recurrent: the matmul to whose sums the kernel would add the input projection.
        rows: of all steps together.
        inputs: the width of x.
        holes: whether the mask is sparse.
        batch: rows of a step.
    """
    if rows < WORTH_PACKING:
        return False
    both = plan.gates_width * (inputs + recurrent.inner)
    size = both * plan.types.operands.bytes
    if recurrent.geometry.tiled:
        return holes or (batch >= TILED_ROWS and size <= TILED_WEIGHTS)
    return holes or size <= WEIGHTS_SHARE * NEAR_CACHE


def few(plan: Plan, rows: int, weight: View) -> bool:
    """Whether a single step multiplies by a weight without packing it.

    Args:
        rows: of the step.
        weight: ``[length of the sums, columns]``, with dense rows or columns.
    """
    target, types = cpu.isa.current(), plan.types
    dense_columns = weight.strides[0] == 1
    if types.quantized and not dense_columns:
        return False
    most = FEW_ROWS_TURNED if dense_columns and _unchanged(plan) else FEW_ROWS
    of_vector = ROWS_A_VECTOR
    if in_pairs(target, types.operands.llvm):
        most, of_vector = FEW_ROWS_IN_PAIRS, PAIRED_ROWS_A_VECTOR
    elif not target.fma and not types.quantized:
        most = FEW_ROWS_UNFUSED
    if dense_columns:
        vectors = weight.shape[0] / target.lanes(types.accumulate.llvm)
        most = min(most, max(1, int(of_vector * vectors)))
    return rows <= most


def sparse(mask: Array | None) -> bool:
    """Whether a mask has so few valid rows of steps that skipping the others pays off."""
    return mask is not None and int(mask.sum()) < FILLED * mask.shape[0] * mask.shape[1]


def row_group(batch: int) -> int:
    """Rows that share sums of parameter gradients: few enough groups for the near cache,
    enough for all threads.

    It depends on the batch alone, so that the order of additions is the same for any number of
    threads.
    """
    return max(1, batch // 32)
