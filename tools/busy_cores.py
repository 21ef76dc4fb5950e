"""Times layers beside busy cores: the default number of threads against one thread.

python tools/busy_cores.py [--loops 0 1 3] [--frameworks numpy torch jax] [--rounds 3]
                           [--seconds 0.5] [--shapes deepar ...] [--out FILE]

Prints, for each framework and number of busy loops beside it, the mean time of a call with the
default number of threads over that with one thread, in turns of processes; medians of the rounds.
Means, because the time that a layer loses to other processes comes in few long waits.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from anycell.bench.shapes import select

SMALL = ["T100B1I8H32", "T128B16I64H64", "T512B4I32H32"]
ONE = {"ANYCELL_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
Calls = Iterator[tuple[str, Callable[[], Any]]]


def numpy_calls(T: int, B: int, I: int, H: int, L: int, both: bool) -> Calls:
    import anycell.numpy as an

    layer = an.LSTM(I, H, num_layers=L, bidirectional=both)
    x = np.ones((T, B, I), np.float32)
    yield "inference", lambda: layer(x)
    d = np.ones((T, B, H * (1 + both)), np.float32)
    yield "training", lambda: (layer.forward(x, training=True), layer.backward(d))
    if T == 1:
        prepared = an.LSTM(I, H).prepare()
        yield "step", lambda: prepared.step(x[0])


def torch_calls(T: int, B: int, I: int, H: int, L: int, both: bool) -> Calls:
    import torch

    import anycell

    layer = anycell.torch.LSTM(I, H, num_layers=L, bidirectional=both)
    x, d = torch.ones(T, B, I), torch.ones(T, B, H * (1 + both))
    yield "inference", torch.no_grad()(lambda: layer(x))
    yield "training", lambda: (layer(x)[0].backward(d), layer.zero_grad())
    if T == 1:
        prepared = anycell.torch.LSTM(I, H).prepare()
        yield "step", torch.no_grad()(lambda: prepared.step(x[0]))


def jax_calls(T: int, B: int, I: int, H: int, L: int, both: bool) -> Calls:
    import jax
    import jax.numpy as jnp

    import anycell

    layer = anycell.jax.LSTM(I, H, num_layers=L, bidirectional=both)
    params, x = layer.init(jax.random.key(0)), jnp.ones((T, B, I))
    run = jax.jit(lambda p, x: layer(p, x)[0])
    train = jax.jit(jax.grad(lambda p, x: layer(p, x)[0].sum()))
    yield "inference", lambda: jax.block_until_ready(run(params, x))
    yield "training", lambda: jax.block_until_ready(train(params, x))


FRAMEWORKS = {"numpy": numpy_calls, "torch": torch_calls, "jax": jax_calls}


def mean(call: Callable[[], Any], seconds: float) -> float:
    """Milliseconds of a call, over some seconds."""
    for _ in range(3):
        call()
    count, begin = 0, time.perf_counter()
    while (spent := time.perf_counter() - begin) < seconds or count < 3:
        call()
        count += 1
    return 1e3 * spent / count


def measure(options: argparse.Namespace) -> None:
    """Prints the times of one framework as JSON."""
    times = {}
    for shape in select(options.shapes):
        sizes = shape.T, shape.B, shape.I, shape.H, shape.L, shape.D == 2
        for mode, call in FRAMEWORKS[options.measure](*sizes):
            times[f"{shape.name} {mode}"] = mean(call, options.seconds)
    print(json.dumps(times))


def compare(framework: str, loops: int, options: argparse.Namespace) -> dict[str, Any]:
    """Times of the default, and of one thread, beside busy loops."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    command = [sys.executable, __file__, "--measure", framework, "--seconds", str(options.seconds)]
    command += ["--shapes", *options.shapes]
    clean = {name: value for name, value in os.environ.items() if name not in ONE}
    runs: dict[str, list[dict[str, float]]] = {"default": [], "one": []}
    try:
        for _ in range(options.rounds):
            for name, threads in (("default", {}), ("one", ONE)):
                text = subprocess.check_output(command, env=clean | threads, text=True)
                runs[name].append(json.loads(text.splitlines()[-1]))
    finally:
        for process in busy:
            process.kill()
    return {
        case: {name: statistics.median(run[case] for run in runs[name]) for name in runs}
        for case in runs["one"][0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--loops", type=int, nargs="*", default=[0, 1, 3])
    parser.add_argument("--frameworks", nargs="*", default=list(FRAMEWORKS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--shapes", nargs="*", default=[*SMALL, "all"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options)
        return
    results = {}
    for framework in options.frameworks:
        for loops in options.loops:
            results[f"{framework}, {loops} loops"] = cases = compare(framework, loops, options)
            for case, ms in cases.items():
                ratio = ms["default"] / ms["one"]
                print(f"{framework:6} {loops} loops {case:24} {ms['default']:9.3f} ms", end=" ")
                print(f"/ {ms['one']:9.3f} = {ratio:.2f}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
