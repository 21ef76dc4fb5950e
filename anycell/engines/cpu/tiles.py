"""Matrix tiles: registers of 16 rows of 64 bytes, of which AMX multiplies two at once.

    sums[r, c] += left[r, k] * right[k, c]        16 rows r, 16 columns c, 32 or 64 numbers k

Sums have 32 bits. The left tile has rows of bfloat16, or of unsigned bytes. The right tile has the
weights of 16 columns as ``matmul`` packs them, two bfloat16 numbers or four signed bytes per lane.

Between ``configure`` and ``release`` a thread owns its tiles. Linux must permit the process to use
tiles; ``isa`` asks for the permission. "Emulated" tiles compute the same with vectors, for tests on
machines without tiles; they take sums of bfloat16 in another order.
"""

from __future__ import annotations

from collections.abc import Sequence

from anycell.engines.cpu.idioms import dot, narrow, widen
from anycell.engines.cpu.ir import Builder, Operand, Target, Value, constant, vector

ROWS, BYTES = 16, 64
COUNT = 8  # tiles
SUMS, LEFT, RIGHT = 4, (4, 5), (5, 6, 7)  # tile 5 is on the left if a number has two pieces
# The instruction, and how many numbers share a lane, by the LLVM type of the numbers.
DOTS = {"i8": ("llvm.x86.tdpbusd", 4), "bfloat": ("llvm.x86.tdpbf16ps", 2)}
MOST_BFLOAT16 = 2.0**128 - 2.0**120  # the largest finite number


def multiplies(target: Target, number: str) -> bool:
    """Whether tiles multiply numbers of this type."""
    return bool(target.tiles) and number in DOTS


def chunk(number: str) -> int:
    """Numbers of a sum that two tiles multiply at once."""
    return ROWS * DOTS[number][1]


def split(b: Builder, value: Value, pieces: int) -> list[Value]:
    """Splits reals into ``pieces`` bfloat16 numbers, as bits, whose sum is nearly the real.

    With several pieces, infinities (and reals above the largest number) become the largest number:
    an infinity times the second piece of a weight, which may be 0, would be NaN.
    """
    numbers: list[Value] = []
    for _ in range(pieces):
        if pieces > 1:
            for how, most in (("ogt", MOST_BFLOAT16), ("olt", -MOST_BFLOAT16)):
                value = b.select(b.compare(how, value, most), most, value)
        numbers.append(narrow(b, value, "bfloat"))
        value -= widen(b, numbers[-1], "bfloat")
    return numbers


def configure(b: Builder, rows: Operand = ROWS, pieces: int = 1) -> None:
    """Zeroes all tiles. Sums and left tiles have ``rows`` rows: fewer are multiplied faster."""
    if b.target.tiles != "amx":
        return
    palette, columns = [1] + [0] * 15, [BYTES, 0] * COUNT + [0] * (32 - 2 * COUNT)
    of_rows = [ROWS] * COUNT + [0] * (16 - COUNT)
    whole, size = vector(64, "i8"), len(palette) + len(columns)
    table = b.alloca(whole)
    b.store(b.load(b.module.table([*palette, *columns, *of_rows], "i8"), whole), table)
    for tile in range(SUMS + pieces):
        b.store(b.trunc(b.value(rows), "i8"), b.gep(table, size + tile, "i8"))
    b.intrinsic("llvm.x86.ldtilecfg", table, returns="void", overload=())


def release(b: Builder) -> None:
    """Releases all tiles, so that Linux need not save them when it switches threads."""
    if b.target.tiles == "amx":
        b.intrinsic("llvm.x86.tilerelease", returns="void", overload=())


class Tiles:
    """The tiles of a function, for products of one type."""

    def __init__(self, b: Builder, number: str) -> None:
        self.b, self.number = b, number
        self.line = vector(16, "i32")
        self.real = b.target.tiles == "amx"
        self.memory = [] if self.real else [b.alloca(self.line, ROWS) for _ in range(COUNT)]

    def load(self, tile: int, address: Value, stride: Value) -> None:
        """Loads rows of 64 bytes, which begin ``stride`` bytes apart."""
        if self.real:
            self._instruction("llvm.x86.tileloadd64", tile, address, stride)
            return
        b = self.b
        with b.loop(0, ROWS) as row:
            at = b.gep(address, row * stride, "i8")
            b.store(b.load(at, self.line, align=1), self._row(tile, row))

    def store(self, tile: int, address: Value, stride: Value) -> None:
        """Stores rows, the inverse of ``load``."""
        if self.real:
            self._instruction("llvm.x86.tilestored64", tile, address, stride)
            return
        b = self.b
        with b.loop(0, ROWS) as row:
            at = b.gep(address, row * stride, "i8")
            b.store(b.load(self._row(tile, row), self.line), at, align=1)

    def dot(self, sums: int, left: int, right: int) -> None:
        """``sums += left @ right``."""
        if self.real:
            self._instruction(DOTS[self.number][0], sums, left, right)
            return
        b = self.b
        with b.loop(0, ROWS) as row, b.loop(0, ROWS) as k:
            lane = b.load(b.gep(self._row(left, row), k, "i32"), "i32")
            total = self._row(sums, row)
            add_lane(b, self.number, total, lane, b.load(self._row(right, k), self.line))

    def _row(self, tile: int, row: Value) -> Value:
        return self.b.gep(self.memory[tile], row * BYTES, "i8")

    def _instruction(self, name: str, *operands: int | Value) -> None:
        values = [constant(o, "i8") if isinstance(o, int) else o for o in operands]
        self.b.intrinsic(name, *values, returns="void", overload=())


def add_lane(b: Builder, number: str, total: Value, lane: Value, weights: Value) -> None:
    """Adds to the vector at ``total`` the products of the numbers in a lane of the left
    matrix with those in every lane of a row of the right one.
    """
    splat = b.splat(lane, 16)
    if number == "i8":
        b.store(dot(b, b.load(total, weights.type), splat, weights), total)
        return
    sums = b.load(total, vector(16, "float"))
    for half in (0, 1):
        left, right = (
            b.bitcast(v << 16 if half == 0 else v & -(1 << 16), sums.type) for v in (splat, weights)
        )
        sums = b.fma(left, right, sums)
    b.store(sums, total)


def multiply(
    b: Builder,
    number: str,
    left: tuple[Value, Value],
    right: tuple[Value, Value],
    bounds: tuple[Value, Value],
    begin: Sequence[tuple[Value, Value]],
    end: Sequence[tuple[Value, Value]],
    pieces: int = 1,
) -> None:
    """Multiplies 16 rows (or as many as are configured) by some vectors of columns of weights.

    Args:
        left: address of the first row's number 0, and bytes to the next; 16 rows can be read.
        right: address of the first packed row, and bytes to the next row.
        bounds: of the numbers of the sum, in whole chunks (see ``chunk``).
        begin, end: for each vector of columns, where its sums are read and where they are written
            (integers for products of bytes), and bytes to the next row.
        pieces: how many numbers add up to a number. Their tiles lie side by side on the left, below
            each other on the right. The product of two second pieces is left out.
    """
    (first, stride), (weights, width), (k0, k1) = left, right, bounds
    packs, numbers = DOTS[number][1], chunk(number)
    size = BYTES // numbers * pieces  # bytes of a number
    tiles = Tiles(b, number)
    for c, place in enumerate(begin):
        tiles.load(c, *place)
    lefts, rights = LEFT[:pieces], RIGHT[pieces - 1 :]
    with b.loop(k0, k1, numbers) as k:
        row = k // packs * pieces
        for piece, left_tile in enumerate(lefts):
            tiles.load(left_tile, b.gep(first, k * size + piece * BYTES, "i8"), stride)
        for c in range(len(begin)):
            for piece in range(pieces):
                tile = rights[(c * pieces + piece) % len(rights)]
                lines = b.gep(weights, (row + piece * ROWS) * width, "i8")
                tiles.load(tile, b.gep(lines, c * BYTES, "i8"), width)
                for left_tile in lefts[: pieces - piece]:
                    tiles.dot(c, left_tile, tile)
    for c, place in enumerate(end):
        tiles.store(c, *place)


def room(b: Builder, columns: int) -> list[tuple[Value, Value]]:
    """Allocates tiles side by side on the stack; returns their addresses and bytes per row."""
    memory, apart = b.alloca(vector(16, "i32"), ROWS * columns), b.value(columns * BYTES)
    return [(b.gep(memory, c * BYTES, "i8"), apart) for c in range(columns)]
