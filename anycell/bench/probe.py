"""What only a fresh process can tell: a first call, memory of a step, time of a call alone.

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
from anycell.bench.machine import ROOT
from anycell.bench.problem import Problem, find_cell
from anycell.bench.shapes import Shape
from anycell.bench.stats import median
from anycell.bench.tasks import Mode
from anycell.bench.timing import interleave, once

TIMEOUT_S = 300


class ProbeError(Exception):
    """The fresh process failed; what was measured in this one still stands."""


# -- in the asking process -------------------------------------------------------------------------


def first_call(contender: str, problem: Problem, mode: Mode) -> dict[str, float]:
    """Milliseconds that a first call takes longer: with an empty kernel cache, then from it.

    Kernels depend on neither T nor B. Small ones keep the time of the work out of the difference.
    """
    shape = replace(problem.shape, T=min(problem.shape.T, 4), B=min(problem.shape.B, 4))
    problem = replace(problem, shape=shape)
    with tempfile.TemporaryDirectory(prefix="anycell-bench-") as cache:
        os.chmod(cache, 0o700)
        extra = {"ANYCELL_CACHE_DIR": cache}
        return {
            name: _ask("first_call", contender, problem, mode, extra)["extra_ms"]
            for name in ("cold", "warm")
        }


def step_memory(contender: str, problem: Problem) -> int:
    """Bytes by which a process grows at most in a training step, gradients included."""
    answer = _ask("memory", contender, problem, "training", memory.ENVIRONMENT)
    return int(answer["peak_bytes"])


def alone(contender: str, problem: Problem, mode: Mode, seconds: float) -> list[float]:
    """Samples in milliseconds per call, taken as in turns, but without other contenders."""
    answer = _ask("alone", contender, problem, mode, {}, seconds)
    return [1e3 * sample for sample in answer["samples"]]


def _ask(
    what: str,
    contender: str,
    problem: Problem,
    mode: Mode,
    environment: dict[str, str],
    seconds: float = 0.0,
) -> dict[str, Any]:
    request = {
        "what": what,
        "contender": contender,
        "cell": problem.cell.origin,
        "shape": problem.shape.asdict(),
        "dtype": problem.dtype,
        "threads": problem.threads,
        "seed": problem.seed,
        "mode": mode,
        "seconds": seconds,
    }
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "anycell.bench.probe", json.dumps(request)],
            env=os.environ | {"PYTHONPATH": path} | environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ProbeError(f"{what} of {contender}: nothing after {TIMEOUT_S} s") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ProbeError(f"{what} of {contender}: {last}")
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


# -- in the fresh process --------------------------------------------------------------------------


def _first_call(contender: str, problem: Problem, mode: Mode) -> dict[str, float]:
    ready = make(contender, problem)
    task = ready.task(mode)
    with ready.around():
        task.prepare()
        start = time.perf_counter()
        task.call()
        first = time.perf_counter() - start
        later = median([once(task) for _ in range(3)])
    return {"first_ms": first * 1e3, "later_ms": later * 1e3, "extra_ms": (first - later) * 1e3}


def _memory(contender: str, problem: Problem) -> dict[str, int]:
    tiny = replace(problem, shape=replace(problem.shape, T=2, B=2))
    warm_up = make(contender, tiny)
    with warm_up.around():
        once(warm_up.task("training"))
        del warm_up
        ready = make(contender, problem)
        task = ready.task("training")
        task.prepare()
        grown = memory.growth(task.call)
    return {"peak_bytes": grown}


def _alone(contender: str, problem: Problem, mode: Mode, seconds: float) -> dict[str, list[float]]:
    ready = make(contender, problem)
    if "torch" in sys.modules:  # who needs no torch runs without its threads and libraries
        sys.modules["torch"].set_num_threads(problem.threads)
    with ready.around():
        samples = interleave({contender: ready.task(mode)}, seconds)
    return {"samples": samples[contender]}


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Answer one request."""
    problem = Problem(
        find_cell(request["cell"]),
        Shape(**request["shape"]),
        request["dtype"],
        request["threads"],
        request["seed"],
    )
    if request["what"] == "alone":
        return _alone(request["contender"], problem, request["mode"], request["seconds"])
    import torch

    torch.set_num_threads(request["threads"])
    # What the framework starts and loads at its first use is not the layer's: threads, a library,
    # and for a gradient that is given, its symbolic algebra.
    weight = torch.ones(256, 256, requires_grad=True)
    (weight @ weight).backward(weight.detach())
    if request["what"] == "memory":
        return _memory(request["contender"], problem)
    return _first_call(request["contender"], problem, request["mode"])


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
