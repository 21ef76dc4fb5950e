"""Measures in a fresh process: a first call, memory of a step, time of a call alone.

``python -m anycell.bench.probe '{"what": "first_call", ...}'`` prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from typing import Any

from anycell.bench import memory
from anycell.bench.contenders import make
from anycell.bench.problem import Problem, find_cell
from anycell.bench.shapes import Shape
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
    shape = replace(problem.shape, T=min(problem.shape.T, 4), B=min(problem.shape.B, 4))
    problem = replace(problem, shape=shape)
    with tempfile.TemporaryDirectory(prefix="anycell-bench-") as cache:
        os.chmod(cache, 0o700)
        asked = "first_call", contender, problem, mode, {"ANYCELL_CACHE_DIR": cache}
        return {name: 1e3 * _ask(*asked) for name in ("cold", "warm")}


def step_memory(contender: str, problem: Problem) -> int:
    """The largest growth of a process in a training step, in bytes, gradients included."""
    return int(_ask("memory", contender, problem, "training", memory.ENVIRONMENT))


def alone(contender: str, problem: Problem, mode: Mode, seconds: float) -> list[float]:
    """Samples in milliseconds per call, like interleaved ones, but without other contenders."""
    return [1e3 * sample for sample in _ask("alone", contender, problem, mode, {}, seconds)]


def _ask(
    what: str, name: str, problem: Problem, mode: Mode, extra: dict[str, str], seconds: float = 0.0
) -> Any:
    request = {"what": what, "contender": name, "mode": mode, "seconds": seconds}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "anycell.bench.probe", json.dumps(request | problem.asdict())],
            env={**os.environ, "PYTHONPATH": path, **extra},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ProbeError(f"{what} of {name}: nothing after {TIMEOUT_S} s") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ProbeError(f"{what} of {name}: {last}")
    return json.loads(done.stdout.strip().splitlines()[-1])


# -- in the fresh process --------------------------------------------------------------------------


def main(request: dict[str, Any]) -> Any:
    """The answer to a request: seconds, bytes, or samples in seconds."""
    what, name, mode = (request[key] for key in ("what", "contender", "mode"))
    settings = {key: request[key] for key in ("dtype", "threads", "seed")}
    problem = Problem(find_cell(request["cell"]), Shape(**request["shape"]), **settings)
    if what != "alone":
        _start_torch(problem.threads)
    if what == "memory":
        tiny = make(name, replace(problem, shape=replace(problem.shape, T=2, B=2)))
        with tiny.around():
            once(tiny.task(mode))
        del tiny
    contender = make(name, problem)
    task = contender.task(mode)
    if "torch" in sys.modules:  # else the contender runs without torch's threads
        sys.modules["torch"].set_num_threads(problem.threads)
    with contender.around():
        if what == "alone":
            return interleave({name: task}, request["seconds"])[name]
        task.prepare()
        return memory.growth(task.call) if what == "memory" else _longer(task)


def _start_torch(threads: int) -> None:
    """Makes torch load what its first use needs, which must not count as the layer's: threads, a
    library, and its symbolic algebra, which ``backward(gradient)`` needs.
    """
    import torch

    torch.set_num_threads(threads)
    weight = torch.ones(256, 256, requires_grad=True)
    (weight @ weight).backward(weight.detach())


def _longer(task: Task) -> float:
    """Seconds that the first call, already prepared, takes longer than later ones."""
    start = time.perf_counter()
    task.call()
    first = time.perf_counter() - start
    return first - median([once(task) for _ in range(3)])


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
