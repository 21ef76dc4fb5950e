"""Measures in a fresh process: a first call, memory of a step, time of a call alone."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from anycell.bench import memory
from anycell.bench.contenders import make
from anycell.bench.problem import Problem
from anycell.bench.stats import median
from anycell.bench.tasks import Mode, Task
from anycell.bench.timing import interleave, once

TIMEOUT_S = 300


class ProbeError(Exception):
    """The fresh process failed; what was measured in this one still stands."""


# -- in the asking process -------------------------------------------------------------------------


def first_call(contender: str, problem: Problem, mode: Mode) -> dict[str, float]:
    """Milliseconds that a first call takes longer than a later one: with an empty kernel cache
    ("cold"), then with the cache that it filled ("warm").

    Kernels depend on neither T nor B, so small ones keep the work itself out of the difference.
    """
    problem = problem.shrunk(4)
    with tempfile.TemporaryDirectory(prefix="anycell-bench-") as cache:
        os.chmod(cache, 0o700)
        variables = {"ANYCELL_CACHE_DIR": cache}
        return {
            name: 1e3 * _ask(variables, longer, contender, problem, mode)
            for name in ("cold", "warm")
        }


def step_memory(contender: str, problem: Problem) -> int:
    """The largest growth of a process in a training step, in bytes, gradients included."""
    return int(_ask(memory.ENVIRONMENT, growth, contender, problem))


def alone(contender: str, problem: Problem, mode: Mode, seconds: float) -> list[float]:
    """Samples in milliseconds per call, like interleaved ones, but without other contenders."""
    return [1e3 * sample for sample in _ask({}, samples, contender, problem, mode, seconds)]


def _ask(
    variables: Mapping[str, str], function: Callable[..., Any], name: str, *arguments: Any
) -> Any:
    """The result of a function in a fresh process, with environment variables."""
    before, context = dict(os.environ), get_context("spawn")
    answers, sender = context.Pipe(duplex=False)
    fresh = context.Process(target=_answer, args=(sender, function, name, *arguments), daemon=True)
    os.environ.update(variables)
    try:
        fresh.start()
    finally:
        os.environ.clear()
        os.environ.update(before)
    sender.close()
    try:
        answered = answers.poll(TIMEOUT_S)
        result, said = answers.recv() if answered else (None, f"nothing after {TIMEOUT_S} s")
    except EOFError:
        fresh.join()
        said = f"the process ended with status {fresh.exitcode}"
    fresh.kill()
    if said is not None:
        raise ProbeError(f"{function.__name__} of {name}: {said}")
    return result


# -- in the fresh process --------------------------------------------------------------------------


def _answer(sender: Connection, function: Callable[..., Any], *arguments: Any) -> None:
    """Sends the result of a function, or what its error says."""
    try:
        sender.send((function(*arguments), None))
    except Exception as error:
        sender.send((None, str(error)))


@contextmanager
def _ready(name: str, problem: Problem, mode: Mode) -> Iterator[Task]:
    contender = make(name, problem)
    task = contender.task(mode)
    if "torch" in sys.modules:  # else the contender runs without torch's threads
        sys.modules["torch"].set_num_threads(problem.threads)
    with contender.around():
        yield task


def samples(name: str, problem: Problem, mode: Mode, seconds: float) -> list[float]:
    """Seconds per call of each round."""
    with _ready(name, problem, mode) as task:
        return interleave({name: task}, seconds)[name]


def longer(name: str, problem: Problem, mode: Mode) -> float:
    """Seconds that the first call, already prepared, takes longer than later ones."""
    _start_torch(problem.threads)
    with _ready(name, problem, mode) as task:
        task.prepare()
        start = time.perf_counter()
        task.call()
        first = time.perf_counter() - start
        return first - median([once(task) for _ in range(3)])


def growth(name: str, problem: Problem) -> int:
    """Bytes that a training step takes, after a small one has loaded what it needs."""
    _start_torch(problem.threads)
    with _ready(name, problem.shrunk(2), "training") as task:
        once(task)
    with _ready(name, problem, "training") as task:
        task.prepare()
        return memory.growth(task.call)


def _start_torch(threads: int) -> None:
    """Makes torch load what its first use needs, which must not count as the layer's: threads, a
    library, and its symbolic algebra, which ``backward(gradient)`` needs.
    """
    import torch

    torch.set_num_threads(threads)
    weight = torch.ones(256, 256, requires_grad=True)
    (weight @ weight).backward(weight.detach())
