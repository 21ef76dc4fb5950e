"""The cut of a step's matmuls into tiles and register blocks."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

from anycell.engines.cpu import tiles
from anycell.engines.cpu.idioms import in_pairs
from anycell.engines.cpu.ir import Target
from anycell.lang.cell import RECURRENT, Cell, Linear
from anycell.plan import Dtype, Plan

INPUT = -1  # in place of the number of a state
QUANTIZED = 4  # weights of 8 bits that share a lane of 32
# Rows before the weights of a packed tile: biases; for integers also the scales of the columns, and
# the initial values of their sums.
BIASES, SCALES, OFFSETS = range(3)
ROW_HEADER = 16  # numbers before the integers of a row: the first two are the scale and its inverse
L1_WEIGHTS = 32 << 10  # bytes of a block of packed weights that stays in the first-level cache


@dataclass(frozen=True)
class Geometry:
    """The cut of a matmul with ``outputs`` results per unit, and of the element-wise work after it.

    A tile has ``unroll`` vectors of units, each with all its outputs: ``columns`` vectors. Register
    blocks take ``groups`` of columns in turn, with as many rows as the registers hold. The
    element-wise work takes ``width`` vectors at once, since two independent chains of operations
    hide each other's latency, and whole ``span``s of tiles.
    """

    units: int
    inner: int  # length of the sum
    outputs: int
    lanes: int
    registers: int
    packs: int = 1  # numbers of the sum whose weights share a lane: two of 16 bits, four of 8
    header: int = 1  # rows of a packed tile before the weights: biases, of integers more
    chunk: int = 1  # a sum is padded with zeros to a multiple of this many numbers
    tiled: bool = False  # whether matrix tiles multiply
    paired: bool = False  # whether one instruction adds two products of bfloat16, see ``isa``
    pieces: int = 1  # numbers of bfloat16 whose sum stands for a number of float32

    @property
    def quantized(self) -> bool:
        """Whether the matmul multiplies integers of 8 bits."""
        return self.packs == QUANTIZED

    @property
    def rounded(self) -> bool:
        """Whether rows and weights are multiplied as bfloat16, not widened; unused for integers."""
        return self.tiled or self.paired

    @property
    def vectors(self) -> int:
        return -(-self.units // self.lanes)

    @functools.cached_property
    def unroll(self) -> int:
        if self.outputs == 0 or self.outputs >= 3:
            return 1

        def cost(unroll: int) -> float:
            rows, n = self.block_rows(unroll * self.outputs), unroll * self.outputs
            padded = -(-self.vectors // unroll) * unroll
            # A cycle has two multiply-adds and two loads: whichever a register block needs more of.
            return padded / unroll * max(n * rows, n + rows) / rows

        widest = 4 // max(self.outputs, 1) if self.registers == 32 else 2
        return min(range(max(widest, 1), 0, -1), key=cost)

    @property
    def columns(self) -> int:
        return self.unroll * self.outputs

    @property
    def tiles(self) -> int:
        return -(-self.vectors // self.unroll)

    @property
    def width(self) -> int:
        return min(2, self.vectors)

    @property
    def span(self) -> int:
        """Vectors of units whose matmul results are complete before the element-wise work."""
        return self.unroll * (1 if self.unroll % self.width == 0 else self.width)

    @property
    def spans(self) -> int:
        return -(-self.vectors // self.span)

    def groups(self, stride: int) -> tuple[tuple[int, ...], ...]:
        """Returns the places of each register block's columns, in vectors, in a row of results.

        Columns of a tile are ordered by output, then by vector of units; register blocks have
        nearly equal numbers of columns. Results of successive outputs lie ``stride`` vectors apart.
        """
        places = [n * stride + v for n in range(self.outputs) for v in range(self.unroll)]
        return tuple(tuple(places[begin:end]) for begin, end in self.cuts)

    @functools.cached_property
    def cuts(self) -> tuple[tuple[int, int], ...]:
        """The first column of each register block, and the column after its last. A packed tile has
        the header and weights of one block after the other, so each block is read sequentially.
        """
        widest = 4 if self.registers == 32 else 3 if self.columns == 3 else 2
        count = -(-self.columns // widest) or 1
        return tuple(itertools.pairwise(i * self.columns // count for i in range(count + 1)))

    def block_rows(self, columns: int) -> int:
        """Rows of a register block: sums fill the registers that weights and an operand leave."""
        most = 10 if columns == 1 else 7  # more rows hide no more latency, but compile longer
        return max(1, min(most, (self.registers - columns - 1) // columns))

    @property
    def inner_padded(self) -> int:
        """Rows of a packed tile after its header. Packing writes whole vectors of rows; backward,
        the vectors of the last output may begin at any row.
        """
        return -(-self.inner // self.packs) + self.lanes - 1

    @property
    def tile_rows(self) -> int:
        """Rows of a packed tile: the header and the weights."""
        return self.header + self.inner_padded

    @property
    def tile_elements(self) -> int:
        """Numbers of a packed tile."""
        return self.tile_rows * self.columns * self.lanes

    def near_rows(self, itemsize: int) -> int:
        """Rows of weights of this size that stay in the first-level cache."""
        return L1_WEIGHTS // (max(self.columns, 1) * self.lanes * itemsize)

    def inner_block(self, itemsize: int) -> int:
        """The length of a part of the sum, for weights of this size; integers have one part."""
        if self.quantized:
            return self.inner
        blocks = max(1, round(self.inner / self.near_rows(itemsize)))
        return whole(-(-self.inner // blocks), self.chunk)


@dataclass(frozen=True)
class Matmul:
    """One matmul of a step, or in the backward pass its transpose.

    Attributes:
        linear, number: the matmul of the cell, and its number.
        geometry: of one head.
        state: forward the state that is the operand, backward the state to whose gradient the
            result adds; INPUT for the input's matmul, None for a matmul inside the step.
        units, inner: of all heads together.
    """

    linear: Linear
    number: int
    geometry: Geometry
    state: int | None
    units: int
    inner: int
    backward: bool

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("",) if self.backward else self.linear.outputs

    @property
    def parts(self) -> int:
        """Counts the arrays side by side in a row of the operand: backward one per output."""
        return len(self.linear.outputs) if self.backward else 1

    @property
    def numbers(self) -> int:
        """Numbers of a head in one part of a row of the operand."""
        return self.inner // (self.parts * self.linear.heads)

    @property
    def stretch(self) -> int:
        """Distance between parts in the packed weights of a head, in numbers of the sum."""
        return whole(self.numbers, self.geometry.chunk)

    @property
    def staged(self) -> bool:
        """Whether rows of the operand are widened, or made integers, and put in the order of the
        packed weights, before they are multiplied.
        """
        return self.geometry.packs > 1 or self.geometry.tiled

    @property
    def staged_row(self) -> int:
        """Stride between staged rows, in numbers: whole vectors, and no multiple of 256."""
        g, count = self.geometry, self.linear.heads * self.geometry.inner
        if g.quantized:
            count = ROW_HEADER + count // g.packs
        row = whole(count + g.lanes, g.lanes)
        return row + g.lanes if row % 256 == 0 else row

    @property
    def segments(self) -> tuple[tuple[int, int, int, int], ...]:
        """Parts of the sum: their begin and end in the packed weights, their begin in the operand,
        and the operand's stride between heads.
        """
        g = self.geometry
        if not self.backward or self.linear.heads == 1 or self.staged:
            return ((0, g.inner, 0, g.inner),)
        head, all_heads = self.numbers, self.inner // self.parts
        return tuple((n * head, (n + 1) * head, n * all_heads, head) for n in range(self.parts))

    @property
    def tiles(self) -> int:
        return self.geometry.tiles * self.linear.heads

    @property
    def packed_elements(self) -> int:
        return self.tiles * self.geometry.tile_elements


def whole(count: int, size: int) -> int:
    """Rounds ``count`` up to a multiple of ``size``."""
    return -(-count // size) * size


def matmuls(plan: Plan, backward: bool, target: Target) -> tuple[Matmul, ...]:
    """The matmuls of a step, in the order of the cell."""
    lanes, of_step = target.lanes(plan.types.math.llvm), []
    operands = plan.types.operands
    packs, tiled = plan.types.math.bytes // operands.bytes, tiles.multiplies(target, operands.llvm)
    if packs == QUANTIZED:  # vectors take short sums as fast as tiles, with the same bits
        sums = (plan.sizes[l.in_size] // l.heads for l in plan.cell.linears)
        tiled = tiled and max(sums, default=0) >= tiles.chunk(operands.llvm)
    chunk = tiles.chunk(operands.llvm) if tiled else packs
    for number, l in enumerate(plan.cell.linears):
        units, inner, outputs = plan.sizes[l.out_size], plan.sizes[l.in_size], len(l.outputs)
        if backward:
            units, inner, outputs = inner, units * outputs, 1
        parts = len(l.outputs) if backward else 1
        length = parts * whole(inner // (l.heads * parts), chunk)
        header = 1 + (OFFSETS if packs == QUANTIZED else BIASES)
        g = Geometry(
            units // l.heads, length, outputs, lanes, target.registers, packs, header, chunk, tiled,
            paired(target, plan.types), plan.types.pieces,
        )  # fmt: skip
        state = None
        if l.operand.op == "state":
            state = plan.cell.state_names.index(l.operand.attrs[0])
        elif l.operand.op == "input":
            state = INPUT
        of_step.append(Matmul(l, number, g, state, units, inner, backward))
    return tuple(of_step)


def paired(target: Target, types: Dtype) -> bool:
    """Whether one instruction of the target adds two products of the matmuls' operands."""
    return in_pairs(target, types.operands.llvm) and types.pieces == 1


def projecting(matmuls: tuple[Matmul, ...], cell: Cell) -> Matmul | None:
    """Returns the matmul to whose results a forward kernel can add the input projection, or None.
    It has all gates, every gate is the sum of both, and nothing else needs either. Matrix tiles may
    also keep both apart: projecting the gates of all steps would cost more than separate sums.
    """
    for m in matmuls:
        plain = m.state is not None and m.state != INPUT and m.linear.heads == 1
        if plain and not m.backward and m.linear.name == RECURRENT and m.outputs == cell.gates:
            return m if set(cell.gates) == cell.fused or m.geometry.tiled else None
    return None
