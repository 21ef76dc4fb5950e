"""Estimates roughly how long a benchmark takes, from the parts of each row."""

from __future__ import annotations

import itertools

from anycell.bench.machine import Matmul, load
from anycell.bench.problem import Problem
from anycell.bench.runner import ALONE_S, Settings
from anycell.bench.tasks import Mode
from anycell.bench.timing import BLOCK_S, MIN_ROUNDS, WINDOW_S
from anycell.machine import usable_cores
from anycell.plan.dtype import DTYPES

SLOWER = 4.0  # a call's time over the time of its matmuls at the rate of a large matmul
STEP_S = 20e-6  # for each step of a layer, besides its matmuls
PROCESS_S = 5.0  # until a fresh process has imported torch and made its first call
COMPILE_S = 30.0  # torch.compile
KERNELS_S = 0.5  # our kernels of one cell, size and mode, if none are cached
LOOP_STEP_S = 1e-4  # for each step of a layer in a loop of Python's, three times that in training


def seconds(settings: Settings) -> list[float]:
    """Estimates the seconds of each row, in the order of the rows, at the load of this minute."""
    rate = 1e9 * Matmul(DTYPES[settings.dtype].storage.name).gflops
    shared = max(1.0, (load() + settings.threads) / usable_cores())  # by how many, on each core
    return [
        shared * _row(settings, Problem(cell, shape, settings.dtype, settings.threads), mode, rate)
        for cell, shape, mode in itertools.product(settings.cells, settings.shapes, settings.modes)
    ]


def _row(settings: Settings, problem: Problem, mode: Mode, rate: float) -> float:
    names, shape = settings.contenders, problem.shape
    count, steps = len(names), shape.T * shape.L * shape.D
    call = SLOWER * problem.flops(mode) / rate + STEP_S * steps
    in_loop = call + LOOP_STEP_S * steps * (3 if mode == "training" else 1)
    calls = [in_loop if name.endswith("-loop") else call for name in names]
    checked = 4 * call + 4 * sum(calls)  # the reference in float64, two calls to check, two to warm
    # A sample warms up for as long as it may last, and waits until all threads are at rest.
    round_s = sum(2 * max(seconds, BLOCK_S) + 3 * WINDOW_S for seconds in calls)
    rounds = max(settings.seconds, MIN_ROUNDS * round_s)
    matmuls = 6 * 2 * Matmul.SIZE**3 / rate
    fresh = 2 * PROCESS_S * settings.first_call
    if settings.alone:
        alone = sum(
            max(min(settings.seconds, ALONE_S), MIN_ROUNDS * max(c, BLOCK_S)) for c in calls
        )
        fresh += count * PROCESS_S + alone
    if settings.memory and mode == "training":
        fresh += count * PROCESS_S
    if "torch-compile" in names:
        fresh += COMPILE_S
    return checked + rounds + matmuls + fresh + KERNELS_S


def duration(seconds: float) -> str:
    """Rounds seconds to a time as people say it.

    >>> [duration(seconds) for seconds in (2, 44, 100, 3000, 9000)]
    ['10 s', '50 s', '2 min', '50 min', '2.5 h']
    """
    if seconds <= 55:
        return f"{max(10, 10 * -(-seconds // 10)):.0f} s"
    return f"{max(1, seconds / 60):.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
