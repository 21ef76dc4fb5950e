"""Estimates roughly how long a benchmark takes, from the parts of each row."""

from __future__ import annotations

import itertools

from anycell.bench.machine import Matmul, load
from anycell.bench.problem import Problem
from anycell.bench.results import Settings
from anycell.bench.runner import ALONE_S
from anycell.bench.timing import BLOCK_S, MIN_ROUNDS, WINDOW_S
from anycell.machine import usable_cores
from anycell.plan.dtype import DTYPES

SLOWER = 4.0  # a call's time over the time of its matmuls at the rate of a large matmul
STEP_S = 20e-6  # for each step of a layer, besides its matmuls
LOOP_STEP_S = 2e-4  # for each step of a layer in a loop of Python's
PROCESS_S = 5.0  # until a fresh process has imported torch and made its first call
ROW_S = 1.0  # for kernels that are not cached, and the large matmul


def seconds(settings: Settings) -> list[float]:
    """Estimates the seconds of each row, in the order of the rows, at the load of this minute."""
    rate = 1e9 * Matmul(DTYPES[settings.dtype].storage.name).gflops
    shared = max(1.0, (load() + settings.threads) / usable_cores())  # by how many, on each core
    costs = []
    for cell, shape, mode in itertools.product(settings.cells, settings.shapes, settings.modes):
        steps = shape.T * shape.L * shape.D
        once = SLOWER * Problem(cell, shape).flops(mode) / rate + STEP_S * steps
        looped = [LOOP_STEP_S * steps * name.endswith("-loop") for name in settings.contenders]
        costs.append(shared * _row(settings, [once + more for more in looped], mode == "training"))
    return costs


def _row(settings: Settings, calls: list[float], training: bool) -> float:
    """The seconds of a row, from those of a call of each contender."""
    checked = 4 * sum(calls) + 4 * calls[0]  # with the reference, in float64
    # A sample warms up for as long as it may last, and waits until all threads are at rest.
    round_s = sum(2 * max(call, BLOCK_S) + 3 * WINDOW_S for call in calls)
    timed = max(settings.seconds, MIN_ROUNDS * round_s)
    processes = 2 * settings.first_call + len(calls) * (
        settings.alone + (settings.memory and training)
    )
    alone = len(calls) * min(settings.seconds, ALONE_S) * settings.alone
    return checked + timed + PROCESS_S * processes + alone + ROW_S


def duration(seconds: float) -> str:
    """Rounds seconds to a time as people say it.

    >>> [duration(seconds) for seconds in (2, 44, 100, 3000, 9000)]
    ['10 s', '50 s', '2 min', '50 min', '2.5 h']
    """
    if seconds <= 55:
        return f"{max(10, 10 * -(-seconds // 10)):.0f} s"
    return f"{max(1, seconds / 60):.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
