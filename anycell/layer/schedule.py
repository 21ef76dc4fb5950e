"""When: the lengths of chunks of time, and of the segments that checkpoints make of them."""

from __future__ import annotations

import math

from anycell.plan import Plan


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
