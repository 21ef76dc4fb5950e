"""Measures in a fresh process: a first call, memory of a step, time of a call alone.

``python -m anycell.bench.probe`` reads the name of one of this module's functions and its arguments
as a pickle, and prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from anycell.bench import memory
from anycell.bench.contenders import make
from anycell.bench.problem import Problem
from anycell.bench.stats import median
from anycell.bench.tasks import Mode, Task
from anycell.bench.timing import interleave, once
from anycell.machine import ROOT

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
    variables: Mapping[str, str],
    function: Callable[..., Any],
    name: str,
    problem: Problem,
    *more: Any,
) -> Any:
    """The result of a function below in a fresh process, with environment variables."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # A new problem, because arrays that this one has made would be pickled too.
    request = pickle.dumps((function.__name__, name, replace(problem), *more))
    what = f"{function.__name__} of {name}"
    try:
        done = subprocess.run(
            [sys.executable, "-m", "anycell.bench.probe"],
            input=request,
            env={**os.environ, "PYTHONPATH": path, **variables},
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ProbeError(f"{what}: nothing after {TIMEOUT_S} s") from None
    if done.returncode != 0:
        last = (done.stderr.decode().strip().splitlines() or ["no message"])[-1]
        raise ProbeError(f"{what}: {last}")
    return json.loads(done.stdout.splitlines()[-1])  # a framework may print too


# -- in the fresh process --------------------------------------------------------------------------


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


def answer(request: bytes) -> str:
    """The result of the function that a request names, as JSON."""
    function, *arguments = pickle.loads(request)
    return json.dumps(globals()[function](*arguments))


if __name__ == "__main__":
    print(answer(sys.stdin.buffer.read()))
