"""When: the chunks of time of a pass, and the segments that checkpoints make of them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from anycell.plan import Plan


class Chunk(NamedTuple):
    """A chunk of one direction: it has the times from ``begin`` to before ``end``, runs that of
    ``time`` first, and goes the way of ``sign``.
    """

    begin: int
    end: int
    time: int
    sign: int

    @classmethod
    def of(cls, reverse: bool, steps: int, done: int, count: int) -> Chunk:
        """The next ``count`` steps, after those that are done."""
        if reverse:
            end = steps - done
            return cls(end - count, end, end - 1, -1)
        return cls(done, done + count, done, 1)


def chunks(begin: int, end: int, chunk: int, steps: int, backward: bool) -> list[tuple[int, int]]:
    """Steps done and steps to do, chunk by chunk, between two steps of the forward
    pass. The backward pass has the same chunks, the last one first, with or without checkpoints: so
    sums have the same bits.
    """
    pairs = []
    for done in range(begin, end, chunk):
        count = min(chunk, end - done)
        pairs.append((steps - done - count if backward else done, count))
    return pairs[::-1] if backward else pairs


def before(hidden: Any, chunk: Chunk, reverse: bool, first: int = 0) -> Any:
    """The first states before each step of a chunk, ``[steps, B, ...]``; see ``Kept.hidden``, whose
    first slot is here that of time ``first``.
    """
    begin = chunk.begin - first + 2 * reverse
    return hidden[begin : begin + chunk.end - chunk.begin]


def chunk_steps(plan: Plan, steps: int, rows: int, limit: int) -> int:
    """Steps per chunk of the projection, such that its gates take about ``limit`` bytes at most."""
    width = len(plan.cell.gates) * plan.hidden_size * plan.itemsize
    count = max(1, -(-steps * rows * width // limit))
    return max(1, -(-steps // count))


def segment_steps(wished: str | int | None, steps: int, chunk: int) -> int:
    """Steps of which the backward pass needs all at once, with ``Options.checkpoint``.

    They are whole chunks of the projection. So every matmul is the one that it would be without
    checkpoints, and so are the bits; and shorter ones would save nothing beside a chunk's buffer.
    """
    if wished is None:
        return steps
    if wished == "sqrt":
        wished = math.isqrt(steps)
    assert isinstance(wished, int), wished
    return min(steps, max(1, -(-wished // chunk)) * chunk)
