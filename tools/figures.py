"""Measures what ``anycell bench`` does not print of docs/performance.md and benchmarks/figures.md.

    python tools/figures.py packed [SHAPE...]      packed batches against torch.nn.LSTM's
    python tools/figures.py checkpoint [T]         memory and time of checkpoint="sqrt"
    python tools/figures.py step [H...]            one step from Python, against torch.nn.LSTMCell
    python tools/figures.py rollout [B I H]        steps with resets, against LSTMCell and a mask
    python tools/figures.py cells [T B I H]        every cell against our LSTM, by multiply-adds
    python tools/figures.py precision [SHAPE...]   float32 that torch allows to be rounded

Contenders take turns, in one process and on the same threads; ratios are medians over the turns.
"""

import functools
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import anycell.torch
from anycell import cells
from anycell.bench import contenders, memory
from anycell.bench.problem import Problem, find_cell
from anycell.bench.shapes import Shape, select
from anycell.bench.stats import median, paired_ratio
from anycell.bench.tasks import Task
from anycell.bench.timing import interleave
from anycell.engines import cpu
from anycell.layer.recipe import known

Call = Callable[[], object]
THREADS = 2


def compare(calls: Mapping[str, Call | Task], seconds: float) -> dict[str, list[float]]:
    """Times calls in turns; returns their samples by name, in seconds."""
    tasks = {name: Task(call, dict) if callable(call) else call for name, call in calls.items()}
    return interleave(tasks, seconds)


def line(what: str, samples: dict[str, list[float]], ours: str = "anycell") -> None:
    """Prints the medians, and the ratio of each peer's time to ours."""
    text = [f"{name} {median(s) * 1e3:.4g} ms" for name, s in samples.items()]
    peers = {name: s for name, s in samples.items() if name != ours}
    text += [f"/{name} {paired_ratio(s, samples[ours]):.2f}" for name, s in peers.items()]
    print(f"{what}: {', '.join(text)}", flush=True)


# -- packed batches --------------------------------------------------------------------------------
def packed(names: list[str]) -> None:
    """Compares packed batches whose lengths are uniform in [1, T]."""
    torch.set_num_threads(THREADS)
    for shape in select(names or ["deepar", "forecast", "sb3"]):
        torch.manual_seed(0)
        lengths = torch.randint(1, shape.T + 1, (shape.B,))
        sizes = {"num_layers": shape.L, "bidirectional": shape.D == 2}
        theirs = nn.LSTM(shape.I, shape.H, **sizes)
        ours = anycell.torch.LSTM(shape.I, shape.H, **sizes)
        ours.load_state_dict(theirs.state_dict())
        x = torch.randn(int(lengths.max()), shape.B, shape.I)
        given = pack_padded_sequence(x, lengths, enforce_sorted=False)
        dy = torch.randn(len(given.data), shape.D * shape.H)
        leaf = given.data.clone().requires_grad_()

        def infer(layer: Any, given: Any = given) -> Call:
            def call() -> Any:
                with torch.inference_mode():
                    return layer(given)[0].data

            return call

        def train(layer: Any, given: Any = given, leaf: Any = leaf, dy: Any = dy) -> Call:
            def call() -> None:
                layer.zero_grad()
                leaf.grad = None
                layer(given._replace(data=leaf))[0].data.backward(dy)

            return call

        torch.testing.assert_close(infer(ours)(), infer(theirs)(), rtol=1e-4, atol=1e-5)
        for mode, how in (("inference", infer), ("training", train)):
            samples = compare({"anycell": how(ours), "torch.nn": how(theirs)}, 3)
            line(f"packed {shape.name} {shape} {mode}", samples)


# -- checkpoints -----------------------------------------------------------------------------------
def checkpoint(arguments: list[str]) -> None:
    """Compares training steps on one long sequence, each in a fresh process."""
    steps = int(arguments[0]) if arguments else 8192
    runs: dict[str, list[dict[str, Any]]] = {"None": [], "sqrt": []}
    for _ in range(3):
        for kind, found in runs.items():
            command = [sys.executable, __file__, "_checkpoint", kind, str(steps)]
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found.append(json.loads(out))
    plain, sqrt = runs.values()
    assert {run["hash"] for run in plain} == {run["hash"] for run in sqrt}
    for kind, found in runs.items():
        best = min(run["seconds"] for run in found)
        print(f"checkpoint={kind}: {max(r['growth'] for r in found) >> 20} MiB, {best:.2f} s")
    growth = median([a["growth"] / b["growth"] for a, b in zip(sqrt, plain, strict=True)])
    times = median([a["seconds"] / b["seconds"] for a, b in zip(sqrt, plain, strict=True)])
    print(f"T{steps} B8 I512 H512: memory {growth:.2f}, time {times:.2f}, the same bits")


def one_checkpoint(kind: str, steps: int) -> None:
    """Prints memory growth, time and a hash of all gradients of a training step, as JSON."""
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    layer = anycell.torch.LSTM(512, 512, checkpoint=None if kind == "None" else kind)
    x = torch.randn(steps, 8, 512)
    dy = torch.randn(steps, 8, 512)

    def step(x: Any = x, dy: Any = dy) -> None:
        layer.zero_grad()
        layer(x)[0].backward(dy)

    step(x[:64].clone(), dy[:64].clone())  # libraries, threads, kernels
    growth = memory.growth(step)
    start = time.perf_counter()
    step()
    seconds = time.perf_counter() - start
    grads = b"".join([p.grad.numpy().tobytes() for p in layer.parameters()])
    digest = hashlib.sha256(grads).hexdigest()
    print(json.dumps({"growth": growth, "seconds": seconds, "hash": digest}))


# -- a step ----------------------------------------------------------------------------------------
def step(arguments: list[str]) -> None:
    """Compares steps (B = 1, one thread), the native call alone, and a sum of as many numbers."""
    torch.set_num_threads(1)
    with torch.inference_mode():
        for h in map(int, arguments or ["64", "256"]):
            line(f"step H={h}", compare(_steps(h), 3))


def _steps(h: int) -> dict[str, Call | Task]:
    torch.manual_seed(0)
    layer, cell = anycell.torch.LSTM(h, h), nn.LSTMCell(h, h)
    x, state = torch.randn(1, h), (torch.zeros(1, 1, h), torch.zeros(1, 1, h))
    theirs, weights = (state[0][0], state[1][0]), torch.ones(8 * h * h)
    layer.step(x, state)
    pass_: Any = next(reversed(known.values()))  # the last one that was drafted
    recipe, calls = pass_.recipe, list[bytes]()
    arrays = {"x": x, "state h": state[0], "state c": state[1], **dict(layer.named_parameters())}
    native, recipe.native_of_objects = recipe.native_of_objects, calls.append
    made = recipe.run([arrays[name] for name in recipe.names], recipe.options)
    alive = made, cpu.scratch.idle[:]  # the call holds their addresses
    recipe.native_of_objects = native

    def run(alive: Any = alive) -> None:
        native(calls[0])

    return {
        "anycell": lambda: layer.step(x, state),
        "torch.nn.LSTMCell": lambda: cell(x, theirs),
        "native": run,
        "sum of the weights": weights.sum,
    }


def rollout(arguments: list[str]) -> None:
    """Compares rollouts of 128 steps on one thread, with episodes of 16 steps on average."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows, inputs, h = map(int, arguments or ("32", "8", "64"))
    layer, cell = anycell.torch.LSTM(inputs, h), nn.LSTMCell(inputs, h)
    cell.load_state_dict({n.removesuffix("_l0"): p for n, p in layer.state_dict().items()})
    x, resets = torch.randn(128, rows, inputs), torch.rand(128, rows) < 1 / 16
    keep = (~resets).float()[..., None]  # computed in advance, in the peer's favour

    @torch.no_grad()
    def ours() -> torch.Tensor:
        state = None
        for given, first in zip(x, resets, strict=True):
            output, state = layer.step(given, state, resets=first)
        return output

    @torch.no_grad()
    def theirs() -> torch.Tensor:
        state = torch.zeros(rows, h), torch.zeros(rows, h)
        for given, kept in zip(x, keep, strict=True):
            state = cell(given, (state[0] * kept, state[1] * kept))
        return state[0]

    torch.testing.assert_close(ours(), theirs())
    samples = compare({"anycell": ours, "torch.nn.LSTMCell": theirs}, 5)
    line(f"rollout B={rows} I={inputs} H={h}", samples)


# -- cells -----------------------------------------------------------------------------------------
def every_cell(arguments: list[str]) -> None:
    """Prints each cell's time relative to our LSTM's, per multiply-add."""
    torch.set_num_threads(THREADS)
    t, b, i, h = map(int, arguments or ("40", "64", "256", "256"))
    shape = Shape("", "", t, b, i, h, 1, 1)
    lstm = Problem(find_cell("LSTM"), shape, threads=THREADS)
    tasks = {"LSTM": contenders.make("anycell", lstm)}
    for name in (name for name in cells.__all__ if name != "LSTM"):
        problem = Problem(find_cell(name), shape, threads=THREADS)
        tasks[name] = contenders.make("anycell", problem)
        found = []
        for mode in ("inference", "training"):
            pair = {who: tasks[who].task(mode) for who in ("LSTM", name)}
            samples = compare(pair, 0.5)
            part = problem.flops(mode) / lstm.flops(mode)
            found.append(f"{paired_ratio(samples[name], samples['LSTM']) / part:.2f}")
        print(f"{name} {shape}: {' / '.join(found)}", flush=True)


# -- precision -------------------------------------------------------------------------------------
def precision(names: list[str]) -> None:
    """Prints the error and the time of a float32 LSTM at each of torch's precisions."""
    for shape in select(names or ["sb3", "denoise", "T40B32I512H512"]):
        layer = anycell.torch.LSTM(shape.I, shape.H, shape.L, bidirectional=shape.D == 2)
        exact = nn.LSTM(shape.I, shape.H, shape.L, bidirectional=shape.D == 2).double()
        exact.load_state_dict(layer.state_dict())
        x = torch.randn(shape.T, shape.B, shape.I)
        with torch.no_grad():
            right = exact(x.double())[0]

        def run(allowed: str, layer: nn.Module = layer, x: torch.Tensor = x) -> torch.Tensor:
            torch.set_float32_matmul_precision(allowed)
            output: torch.Tensor = layer(x)[0]
            return output

        def train(allowed: str, run: Callable[[str], torch.Tensor] = run) -> None:
            run(allowed).sum().backward()

        with torch.no_grad():
            for allowed in PRECISIONS:
                wrong = (run(allowed).double() - right).norm() / right.norm()
                print(f"{shape.name} {allowed}: error {wrong:.1e}")
            calls: dict[str, Call | Task] = {p: functools.partial(run, p) for p in PRECISIONS}
            line(f"{shape.name} inference", compare(calls, 2), "high")
        calls = {p: functools.partial(train, p) for p in PRECISIONS}
        line(f"{shape.name} training", compare(calls, 4), "high")


PRECISIONS = ("highest", "high", "medium")
COMMANDS = {
    "packed": packed,
    "checkpoint": checkpoint,
    "step": step,
    "rollout": rollout,
    "cells": every_cell,
    "precision": precision,
}


def main(arguments: list[str]) -> int:
    """The command line."""
    if arguments[:1] == ["_checkpoint"]:
        one_checkpoint(arguments[1], int(arguments[2]))
    elif arguments and arguments[0] in COMMANDS:
        COMMANDS[arguments[0]](arguments[1:])
    else:
        print(__doc__)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
