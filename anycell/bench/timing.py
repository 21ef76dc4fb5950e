"""Interleaved timing: every contender once per round, in rotating order, until the time is spent.

Shared machines slow down and speed up by tens of percent within seconds. Timing A to its end and
then B compares two different machines; a round compares A and B on the same one.
"""

from __future__ import annotations

import gc
import math
import time
import warnings
from collections.abc import Callable, Mapping

from anycell.bench.tasks import Task

MIN_ROUNDS = 5
MAX_ROUNDS = 300
BLOCK_S = 20e-3  # a sample lasts at least this long: as long as the usual pause before it
WINDOW_S = 10e-3  # systems count a running thread's time by ticks, of 4 or of 10 ms
PATIENCE_S = 0.5  # five times the longest spin that was seen in any pool


def settle() -> None:
    """Waits until no thread of this process is at work any more.

    Pools spin on after a call, to be quick at the next: libgomp for 5 to 10 ms, ONNX Runtime for
    30, OpenBLAS for 100. Settings that forbid spinning make a pool slower, so they are left alone,
    and the next contender waits until the cores are free.
    """
    for _ in range(round(PATIENCE_S / WINDOW_S)):
        start, busy = time.perf_counter(), time.process_time()
        time.sleep(WINDOW_S)
        if time.process_time() - busy < 0.1 * (time.perf_counter() - start):
            return
    warnings.warn(
        f"some thread was still at work {PATIENCE_S} s after the last call, and took a core from "
        "the contender measured next. Unset OMP_WAIT_POLICY, GOMP_SPINCOUNT and KMP_BLOCKTIME.",
        RuntimeWarning,
        stacklevel=2,
    )


def once(task: Task) -> float:
    """Seconds of one call."""
    task.prepare()
    start = time.perf_counter()
    task.call()
    return time.perf_counter() - start


def block(task: Task, inner: int) -> float:
    """Seconds per call over `inner` calls, after the previous contender's threads went to sleep."""
    settle()
    if inner > 1:  # a short call would otherwise pay for waking threads and for cold caches
        once(task)
    return math.fsum(once(task) for _ in range(inner)) / inner


def interleave(
    contenders: Mapping[str, Task],
    seconds: float,
    on_round: Callable[[int], object] = lambda _: None,
) -> dict[str, list[float]]:
    """Samples in seconds per call; sample `i` of every contender comes from the same round `i`.

    Runs at least `MIN_ROUNDS` rounds, then as many as fit into `seconds`.
    """
    names = list(contenders)
    samples: dict[str, list[float]] = {name: [] for name in names}
    # Two warm-ups: the first may still allocate, the second tells how long a call takes.
    pilot = {name: min(once(contenders[name]) for _ in range(2)) for name in names}
    inner = {name: max(1, math.ceil(BLOCK_S / max(t, 1e-7))) for name, t in pilot.items()}
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()  # it would be charged to whichever contender is running
    try:
        start = time.perf_counter()
        for number in range(MAX_ROUNDS):
            if number >= MIN_ROUNDS and time.perf_counter() - start > seconds:
                break
            turn = number % max(1, len(names))
            for name in names[turn:] + names[:turn]:
                samples[name].append(block(contenders[name], inner[name]))
            on_round(number + 1)
    finally:
        if collecting:
            gc.enable()
    return samples
