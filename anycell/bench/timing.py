"""Interleaved timing: every contender once per round, in rotating order, until the time is spent.

Shared machines slow down and speed up by tens of percent within seconds. Timing A to its end and
then B compares two different machines; a round compares A and B on the same one.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

MIN_ROUNDS = 5
MAX_ROUNDS = 300
BLOCK_S = 2e-3  # a sample lasts at least this long, so that clock and scheduler ticks vanish in it
SETTLE_S = 2e-3  # idle workers of OpenMP and ONNX Runtime spin for about a millisecond


class Timed(Protocol):
    """Something to time: `prepare` runs before every `call` and is not timed."""

    def prepare(self) -> object: ...
    def call(self) -> object: ...


@contextmanager
def no_gc() -> Iterator[None]:
    """No garbage collection inside: a collection is charged to whoever happens to run."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def once(timed: Timed) -> float:
    """Seconds of one call."""
    timed.prepare()
    start = time.perf_counter()
    timed.call()
    return time.perf_counter() - start


def block(timed: Timed, inner: int) -> float:
    """Seconds per call over `inner` calls, after the previous contender's threads went to sleep."""
    time.sleep(SETTLE_S)
    if inner > 1:  # a short call would otherwise pay for waking threads and for cold caches
        once(timed)
    return math.fsum(once(timed) for _ in range(inner)) / inner


def interleave(
    contenders: Mapping[str, Timed],
    seconds: float,
    *,
    min_rounds: int = MIN_ROUNDS,
    on_round: Callable[[int], object] = lambda _: None,
) -> dict[str, list[float]]:
    """Samples in seconds per call; sample `i` of every contender comes from the same round `i`.

    Runs at least `min_rounds` rounds, then as many as fit into `seconds`.
    """
    names = list(contenders)
    samples: dict[str, list[float]] = {name: [] for name in names}
    with no_gc():
        # Two warm-ups: the first may still allocate, the second tells how long a call takes.
        pilot = {name: min(once(contenders[name]) for _ in range(2)) for name in names}
        inner = {name: max(1, math.ceil(BLOCK_S / max(t, 1e-7))) for name, t in pilot.items()}
        start = time.perf_counter()
        for number in range(MAX_ROUNDS):
            if number >= min_rounds and time.perf_counter() - start > seconds:
                break
            turn = number % len(names) if names else 0
            for name in names[turn:] + names[:turn]:
                samples[name].append(block(contenders[name], inner[name]))
            on_round(number + 1)
    return samples
