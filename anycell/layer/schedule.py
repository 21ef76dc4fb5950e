"""The lengths of chunks of time, and of the segments that checkpoints make of them."""

from __future__ import annotations

import math

from anycell.plan import Plan


def chunk_steps(plan: Plan, steps: int, rows: int, limit: int) -> int:
    """Steps per chunk of the projection, whose gates take about ``limit`` bytes at most."""
    width = plan.gates_width * plan.itemsize
    count = max(1, -(-steps * rows * width // limit))
    return max(1, -(-steps // count))


def segment_steps(wished: str | int | None, steps: int, chunk: int) -> int:
    """The number of steps whose values the backward pass needs at once, by ``Options.checkpoint``.

    A segment is whole chunks of the projection. So every matmul, and every bit, is as it would be
    without checkpoints; and shorter segments would save little compared with a chunk's buffer.
    """
    if wished is None:
        return steps
    if wished == "sqrt":
        wished = math.isqrt(steps)
    assert isinstance(wished, int), wished
    return min(steps, max(1, -(-wished // chunk)) * chunk)
