"""Processes an endless stream in chunks: a stateful layer continues where the last chunk ended.

    python examples/keras_stream.py              (--quick: a second)

Two streams run side by side, as the rows of a batch. All chunks together return the same as one
long call, and `reset_state()` starts over.
"""

from __future__ import annotations

import argparse
import time

import keras
import numpy as np
from keras import ops

import anycell.keras
from anycell import cells


def main(arguments: list[str] | None = None) -> float:
    """Streams; prints and returns the largest difference from one long call."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a short run")
    quick = parser.parse_args(arguments).quick
    keras.utils.set_random_seed(1)
    streams, chunk, count, width, units = 2, 50, 8 if quick else 200, 16, 32
    signal = np.random.default_rng(0).normal(size=(streams, chunk * count, width)).astype("float32")

    layer = anycell.keras.RNN(cells.LayerNormLSTM, units, return_sequences=True, stateful=True)
    whole = ops.convert_to_numpy(layer(signal))
    layer.reset_state()

    began, parts = time.perf_counter(), []
    for k in range(count):
        part = layer(signal[:, k * chunk : (k + 1) * chunk])
        parts.append(ops.convert_to_numpy(part))
    each = (time.perf_counter() - began) / count
    wrong = float(np.abs(np.concatenate(parts, axis=1) - whole).max())
    print(f"{count} chunks of {chunk} steps, {1e3 * each:.2f} ms each; differs by {wrong:.1e}")
    return wrong


if __name__ == "__main__":
    main()
