"""Runs layers of Keras on TensorFlow on a card: in eager mode, in graphs, and under XLA.

    python tools/gpu_keras.py

Prints a line of JSON for each tier, with why its kernels are not trusted, if there is a reason;
then one for each layer and way: the engine, the largest difference of results and gradients from
the layer step by step, and the microseconds of a step with both passes, of both.
"""

import itertools
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"

import numpy as np
import tensorflow as tf
from gpu_lines import Line, arguments, say, tried

import anycell.keras as ak
from anycell import cells
from anycell.keras.tensorflow import fused

CASES = [(cells.PeepholeLSTM, 64), (cells.PeepholeLSTM, 512), (cells.GRU, 256)]  # and units
STEPS, ROWS, CALLS = 256, 16, 20
WAYS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda run: run,
    "graph": tf.function,
    "XLA": partial(tf.function, jit_compile=True),
}


def main() -> None:
    """Runs all layers in all ways."""
    arguments(__doc__).parse_args()
    if not fused.gpu_visible():
        print("gpu_keras: TensorFlow sees no card here.", file=sys.stderr, flush=True)
        sys.exit(1)
    right = True
    for tier in (1, 2):
        why = fused.doubt(tier)
        say({"tier": tier, "doubt": why})
        right &= why is None
    for (cell, units), way in itertools.product(CASES, WAYS):
        line = tried(measured, cell, units, way)
        right &= line.get("engine") == "gpu" and line["apart"] < 0.05
        say({"frontend": "Keras on TensorFlow", "cell": cell.name, "H": units, "way": way} | line)
    sys.exit(not right)


def measured(cell: Any, units: int, way: str) -> Line:
    """The figures of a layer in one way."""
    layer = ak.RNN(cell, units, return_sequences=True)
    x = tf.random.stateless_normal((ROWS, STEPS, units), (1, 2))
    layer.build(x.shape)

    def run(x: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
        return [y, *tape.gradient(y, [x, *(v.value for v in layer.trainable_variables)])]

    ours, theirs = WAYS[way](run), tf.function(run)
    results = ours(x)
    with ak.step_by_step():
        right = theirs(x)
    apart = max(
        float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(results, right, strict=True)
    )
    times = {"us_per_step": microseconds(ours, x), "step_by_step": microseconds(theirs, x)}
    return {"engine": layer.engine.name, "apart": apart, "T": STEPS, "B": ROWS, **times}


def microseconds(run: Callable[[Any], list[Any]], x: Any) -> float:
    """The time of a step, from calls that wait for their results at the end only."""
    begin = time.perf_counter()
    for _ in range(CALLS):
        results = run(x)
    [result.numpy() for result in results]
    return round(1e6 * (time.perf_counter() - begin) / CALLS / STEPS, 3)


if __name__ == "__main__":
    main()
