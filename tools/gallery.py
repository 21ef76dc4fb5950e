"""Trains every built-in cell on the adding problem, for the gallery of the site: ``make gallery``.

    python tools/gallery.py [LSTM GRU ...] [--steps 1000]

Each step of a sequence has a value and a mark. Two steps are marked, and the answer after the last
one is the sum of their values (Hochreiter & Schmidhuber, 1997). To guess the mean gives a mean
squared error of 1/6. All cells have the same size, batches, optimizer and rate, and nothing is
tuned for any of them: the curves say that a cell learns, not which one is best.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from anycell import Cell, cells
from anycell.numpy import RNN, Adam, Dense, clip_by_global_norm, mse

RESULTS = Path(__file__).parents[1] / "docs" / "gallery" / "results.json"
LENGTH, ROWS, UNITS, RATE, EVERY, SEEDS = 50, 64, 32, 5e-3, 25, (0, 1, 2)
SIZES = {"LSTMP": {"P": 16}}  # of the cells whose states have another size than H
Array = npt.NDArray[np.float32]


def batch(rng: np.random.Generator, rows: int, elapsed: bool) -> tuple[Array, Array]:
    """Values and marks ``[T, B, 2]``, and the sums ``[B, 1]``.

    With ``elapsed`` there is a third input, the time since the last mark, as ``GRUD`` expects it.
    """
    values, marks = rng.uniform(size=(LENGTH, rows)), np.zeros((LENGTH, rows))
    for row in range(rows):
        marks[rng.choice(LENGTH, 2, replace=False), row] = 1.0
    inputs = [values, marks]
    if elapsed:
        steps = np.arange(LENGTH)[:, None]
        last = np.maximum.accumulate(np.where(marks > 0, steps, 0))
        inputs.append((steps - last) / LENGTH)
    return np.stack(inputs, -1).astype("float32"), (values * marks).sum(0)[:, None].astype(
        "float32"
    )


def train(cell: Cell, steps: int, seed: int) -> tuple[int, list[float]]:
    """How many parameters the layer has, and its error on rows of its own every so many steps."""
    rng, elapsed = np.random.default_rng(seed), cell.name == "GRUD"
    layer = RNN(cell, 2 + elapsed, UNITS, seed=seed, **SIZES.get(cell.name, {}))
    further: dict[str, Any] = {}
    x, y = batch(np.random.default_rng(1000 + seed), 256, elapsed)

    def forward(x: Array, training: bool) -> Array:
        if cell.static:  # nothing is known of a sequence here
            further["static"] = np.zeros((x.shape[1], UNITS), "float32")
        return layer.forward(x, training=training, **further)[0]

    readout = Dense(forward(x[:1, :1], False).shape[-1], 1, seed=seed)
    optimizer, errors = Adam([layer, readout], lr=RATE), []
    for step in range(steps + 1):
        if step % EVERY == 0:
            errors.append(float(mse(readout.forward(forward(x, False)[-1]), y)[0]))
        given, sums = batch(rng, ROWS, elapsed)
        output = forward(given, True)
        _, grad = mse(readout.forward(output[-1], training=True), sums)
        grad_output = np.zeros_like(output)
        grad_output[-1] = readout.backward(grad)
        layer.backward(grad_output)
        clip_by_global_norm([layer, readout], 1.0)
        optimizer.step()
    return sum(array.size for array in layer.parameters.values()), errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="CELL", help="those to train anew; all")
    parser.add_argument("--steps", type=int, default=1000)
    arguments = parser.parse_args()
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() and arguments.names else {}
    for name in arguments.names or cells.__all__:
        began, runs = time.perf_counter(), []
        for seed in SEEDS:
            parameters, errors = train(getattr(cells, name), arguments.steps, seed)
            runs.append([float(f"{error:.3g}") for error in errors])
        found[name] = {"parameters": parameters, "errors": runs}
        last = ", ".join(f"{run[-1]:.4f}" for run in runs)
        print(f"{name:22} {last}   {time.perf_counter() - began:.0f} s", file=sys.stderr)
    rows = [f"{json.dumps(name)}: {json.dumps(found[name])}" for name in sorted(found)]
    RESULTS.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    main()
