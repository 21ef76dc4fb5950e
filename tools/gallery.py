"""Trains every built-in cell on a problem that suits it, and times it: ``make gallery``.

    python tools/gallery.py [LSTM GRU ...] [--steps 1000] [--seconds 1]

All cells have the same size, batches, optimizer and learning rate, and nothing is tuned for a cell:
the curves show that a cell learns, not which one is best. LSTM, GRU and RNN train on each problem.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from anycell import Cell, cells
from anycell.numpy import RNN, Adam, Dense, clip_by_global_norm, mse

RESULTS = Path(__file__).parents[1] / "docs" / "gallery" / "results.json"
ROWS, UNITS, RATE, EVERY, SEEDS = 64, 32, 5e-3, 25, (0, 1, 2)
SIZES = {"LSTMP": {"P": 16}}  # further sizes, by cell
EVERYWHERE = ("LSTM", "GRU", "RNN")
TIMED = "T32B16I64H64"  # the layer whose training is timed
Array = npt.NDArray[np.float32]


class Batch(NamedTuple):
    """Input ``[T, B, I]``; targets ``[t, B, 1]`` of the last ``t`` steps; attributes ``[B]``."""

    x: Array
    y: Array
    attribute: Array


def adding(rng: np.random.Generator, rows: int) -> Batch:
    values, marks = rng.uniform(size=(50, rows)), np.zeros((50, rows))
    for row in range(rows):
        marks[rng.choice(50, 2, replace=False), row] = 1.0
    return _batch([values, marks], (values * marks).sum(0)[None])


def copying(rng: np.random.Generator, rows: int) -> Batch:
    bits, shown, asked = rng.choice([-1.0, 1.0], (5, rows)), np.zeros((30, rows)), np.zeros((30, 1))
    shown[:5], asked[-5:] = bits, 1.0
    return _batch([shown, asked + 0 * shown], bits)


def parity(rng: np.random.Generator, rows: int) -> Batch:
    signs = rng.choice([-1.0, 1.0], (30, rows))
    return _batch([signs], signs.cumprod(0))


def irregular(rng: np.random.Generator, rows: int) -> Batch:
    rate, phase = rng.uniform(0.2, 0.6, rows), rng.uniform(0, 2 * np.pi, rows)
    steps = np.arange(41)[:, None]
    series = np.sin(rate * steps + phase)
    seen = rng.uniform(size=(40, rows)) < 0.4
    seen[0] = True
    last = np.maximum.accumulate(np.where(seen, steps[:-1], 0))
    values = np.take_along_axis(series, last, 0)
    return _batch([values, seen, (steps[:-1] - last) / 5], series[-30:], rate)


def _batch(inputs: list[Any], y: Any, attribute: Any = ()) -> Batch:
    return Batch(
        *(np.asarray(a, "float32") for a in (np.stack(inputs, -1), y[..., None], attribute))
    )


class Problem(NamedTuple):
    """A problem: how to draw a batch, a description, and the error of the best constant answer."""

    draw: Callable[[np.random.Generator, int], Batch]
    about: str
    guess: float


PROBLEMS = {
    "adding": Problem(
        adding,
        "Two of 50 steps are marked; the answer after the last one is the sum of their values "
        "(Hochreiter & Schmidhuber, 1997).",
        1 / 6,
    ),
    "copying": Problem(
        copying, "Five signs are shown, and after 20 empty steps they are to be repeated.", 1.0
    ),
    "parity": Problem(
        parity, "At each of 30 steps the answer is the product of all signs so far.", 1.0
    ),
    "irregular": Problem(
        irregular,
        "A sine of unknown rate and phase is measured at four of ten steps. The input is the last "
        "value, whether it is new, and its age; the answer is the next value, at the last 30 of 40 "
        "steps.",
        0.5,
    ),
}
SUITS = {
    **dict.fromkeys(("RNN", "LayerNormLSTM", "LayerNormGRU"), "copying"),
    **dict.fromkeys(("sLSTM", "MultiplicativeLSTM", "NAS"), "parity"),
    **dict.fromkeys(("GRUD", "EALSTM", "PeepholeLSTM"), "irregular"),
}  # the adding problem suits all others


def problems(name: str) -> list[str]:
    """The problems on which a cell is trained; the first suits it."""
    first = SUITS.get(name, "adding")
    return [first, *(p for p in PROBLEMS if p != first and name in EVERYWHERE)]


def train(cell: Cell, problem: str, steps: int, seed: int) -> tuple[int, list[float]]:
    """Trains a layer; returns its parameter count, and held-out errors every ``EVERY`` steps."""
    rng, draw = np.random.default_rng(seed), PROBLEMS[problem].draw
    held = draw(np.random.default_rng(1000 + seed), 256)
    layer = RNN(cell, held.x.shape[-1], UNITS, seed=seed, **SIZES.get(cell.name, {}))

    def forward(batch: Batch, training: bool) -> Array:
        further = {"static": features(batch.attribute)} if cell.static else {}
        return layer.forward(batch.x, training=training, **further)[0]

    readout = Dense(forward(held, False).shape[-1], 1, seed=seed)
    optimizer, errors = Adam([layer, readout], lr=RATE), []
    for step in range(steps + 1):
        if step % EVERY == 0:
            output = forward(held, False)[-len(held.y) :]
            errors.append(float(mse(readout.forward(output), held.y)[0]))
        batch = draw(rng, ROWS)
        output = forward(batch, True)
        _, grad = mse(readout.forward(output[-len(batch.y) :], training=True), batch.y)
        grad_output = np.zeros_like(output)
        grad_output[-len(batch.y) :] = readout.backward(grad)
        layer.backward(grad_output)
        clip_by_global_norm([layer, readout], 1.0)
        optimizer.step()
    return sum(array.size for array in layer.parameters.values()), errors


def features(attribute: Array) -> Array:
    """The static input ``[B, H]`` of a cell that takes one: waves of the attribute."""
    rng = np.random.default_rng(0)
    waves = 2 * np.cos(np.outer(attribute, rng.uniform(0, 15, UNITS)) + rng.uniform(0, 6, UNITS))
    return waves.astype("float32")


def speed(name: str, seconds: float) -> dict[str, Any]:
    """Times training steps in PyTorch, of our layer and a Python loop in turns; returns both in
    milliseconds, and the processor.
    """
    import torch

    from anycell.bench import contenders, machine
    from anycell.bench.problem import Problem, find_cell
    from anycell.bench.shapes import select
    from anycell.bench.stats import median
    from anycell.bench.timing import interleave

    torch.set_num_threads(1)
    problem = Problem(find_cell(name), select([TIMED])[0])
    tasks = {
        who: contenders.make(who, problem).task("training") for who in ("anycell", "torch-loop")
    }
    ours, loop = (1e3 * median(s) for s in interleave(tasks, seconds).values())
    times = {"ours": float(f"{ours:.3g}"), "loop": float(f"{loop:.3g}")}
    return {**times, "on": machine.describe()["cpu"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="CELL", help="those to train anew; all")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=1.0, help="of timing for each cell")
    arguments = parser.parse_args()
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if arguments.names else {}
    for name in arguments.names or cells.__all__:
        began, result = time.perf_counter(), found.setdefault(name, {})
        result["speed"] = speed(name, arguments.seconds)
        for problem in problems(name):
            runs = [train(getattr(cells, name), problem, arguments.steps, s) for s in SEEDS]
            errors = [[float(f"{error:.3g}") for error in run] for _, run in runs]
            result[problem] = {"parameters": runs[0][0], "errors": errors}
            last = ", ".join(f"{run[-1]:.4f}" for run in errors)
            print(
                f"{name:22} {problem:10} {last}   {time.perf_counter() - began:.0f} s",
                file=sys.stderr,
            )
    rows = [f"{json.dumps(name)}: {json.dumps(found[name])}" for name in sorted(found)]
    RESULTS.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    main()
