"""Estimates roughly how long a benchmark takes, from the parts of each row."""

from __future__ import annotations

import itertools

from anycell.bench.machine import Matmul
from anycell.bench.problem import Problem
from anycell.bench.runner import ALONE_S, Settings
from anycell.bench.tasks import Mode
from anycell.bench.timing import BLOCK_S, MIN_ROUNDS, WINDOW_S
from anycell.plan.dtype import DTYPES

SLOWER = 4.0  # a call's time over the time of its matmuls at the rate of a large matmul
STEP_S = 20e-6  # for each step of a layer, besides its matmuls
PROCESS_S = 5.0  # until a fresh process has imported torch and made its first call
COMPILE_S = 30.0  # torch.compile


def seconds(settings: Settings) -> list[float]:
    """Estimates the seconds of each row, in the order of the rows."""
    rate = 1e9 * Matmul(DTYPES[settings.dtype].storage.name).gflops
    return [
        _row(settings, Problem(cell, shape, settings.dtype, settings.threads), mode, rate)
        for cell, shape, mode in itertools.product(settings.cells, settings.shapes, settings.modes)
    ]


def _row(settings: Settings, problem: Problem, mode: Mode, rate: float) -> float:
    count, shape = len(settings.contenders), problem.shape
    call = SLOWER * problem.flops(mode) / rate + STEP_S * shape.T * shape.L * shape.D
    checked = (4 + 2 * count) * call  # the reference in float64, and two calls of each contender
    rounds = max(settings.seconds, MIN_ROUNDS * count * (max(call, BLOCK_S) + WINDOW_S))
    matmuls = 6 * 2 * Matmul.SIZE**3 / rate
    fresh = 2 * PROCESS_S * settings.first_call
    if settings.alone:
        alone = max(min(settings.seconds, ALONE_S), MIN_ROUNDS * max(call, BLOCK_S))
        fresh += count * (PROCESS_S + alone)
    if settings.memory and mode == "training":
        fresh += count * PROCESS_S
    if "torch-compile" in settings.contenders:
        fresh += COMPILE_S
    return checked + rounds + matmuls + fresh


def duration(seconds: float) -> str:
    """Rounds seconds to a time as people say it.

    >>> [duration(seconds) for seconds in (2, 44, 100, 3000, 9000)]
    ['10 s', '50 s', '2 min', '50 min', '2.5 h']
    """
    if seconds <= 55:
        return f"{max(10, 10 * -(-seconds // 10)):.0f} s"
    return f"{max(1, seconds / 60):.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
