"""Measures Keras on TensorFlow under XLA: our layers against Keras's own, which XLA compiles too.

    python tools/keras_xla.py results.json [shape ...]

Inference is a call of ``tf.function(model, jit_compile=True)``; training is a step of ``model.fit``
of a model that was compiled with ``jit_compile=True``. LSTM is ``anycell.keras.LSTM`` against
``keras.layers.LSTM``; "user's cell" is a class that ``anycell.keras.RNN`` reads, against
``keras.layers.RNN``. All run on one thread, in turns; times are processor times, medians.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
os.environ |= {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}

import keras
import numpy as np
import tensorflow as tf

import anycell.keras
from anycell.bench.machine import describe
from anycell.bench.shapes import select

ROUNDS, STEPS = 7, 12


class Coupled(keras.layers.Layer):
    """An LSTM whose forget gate is what the input gate leaves, as a user writes it."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.units, self.state_size = units, [units, units]

    def build(self, shape: Any) -> None:
        self.w = self.add_weight(shape=(shape[-1], 3 * self.units))
        self.u = self.add_weight(shape=(self.units, 3 * self.units))
        self.b = self.add_weight(shape=(3 * self.units,))

    def call(self, x: Any, states: Any) -> Any:
        h, c = states
        i, g, o = keras.ops.split(x @ self.w + h @ self.u + self.b, 3, axis=-1)
        i = keras.ops.sigmoid(i)
        c = (1.0 - i) * c + i * keras.ops.tanh(g)
        h = keras.ops.sigmoid(o) * keras.ops.tanh(c)
        return h, [h, c]


def made(module: Any, cell: str, shape: Any) -> keras.Model:
    """A compiled model of one kind of layer, as many as the shape says."""
    model = keras.Sequential([keras.Input((shape.T, shape.I))])
    for _ in range(shape.L):
        if cell == "LSTM":
            layer = module.LSTM(shape.H, return_sequences=True)
        else:
            layer = module.RNN(Coupled(shape.H), return_sequences=True)
        model.add(layer if shape.D == 1 else keras.layers.Bidirectional(layer))
    model.compile("adam", "mse", jit_compile=True)
    assert model.jit_compile
    return model


def timed(call: Callable[[], Any]) -> float:
    """The processor time of a call, in milliseconds."""
    start = time.process_time()
    call()
    return 1e3 * (time.process_time() - start)


def compared(cell: str, shape: Any) -> dict[str, Any]:
    """The times of both for one shape."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(STEPS * shape.B, shape.T, shape.I)).astype("float32")
    y = rng.normal(size=(STEPS * shape.B, shape.T, shape.D * shape.H)).astype("float32")
    weights: list[Any] = []
    batch, calls, outputs = tf.constant(x[: shape.B]), dict[tuple[str, str], Any](), []
    for name, module in (("ours", anycell.keras), ("keras", keras.layers)):
        model = made(module, cell, shape)
        if weights:
            model.set_weights(weights)
        weights = model.get_weights()
        infer = tf.function(lambda x, model=model: model(x, training=False), jit_compile=True)
        calls["inference", name] = lambda infer=infer: infer(batch).numpy()
        outputs.append(calls["inference", name]())
        calls["fit", name] = lambda model=model: model.fit(
            x, y, batch_size=shape.B, shuffle=False, verbose=0
        )
        calls["fit", name]()  # which compiles
    np.testing.assert_allclose(*outputs, rtol=1e-3, atol=1e-4)
    times = {key: list[float]() for key in calls}
    for _ in range(ROUNDS):
        for key, call in calls.items():
            times[key].append(timed(call) / (STEPS if key[0] == "fit" else 1))
    medians = {" ".join(key): round(float(np.median(t)), 3) for key, t in times.items()}
    ratios = {
        mode: round(medians[f"{mode} keras"] / medians[f"{mode} ours"], 2)
        for mode in ("inference", "fit")
    }
    return {"cell": cell, "shape": shape.name, "ms": medians, "keras over ours": ratios}


def main(path: str, *names: str) -> None:
    rows: dict[str, Any] = {"machine": describe(), "rounds": ROUNDS, "rows": []}
    for shape in select(names or ["deepar", "rl-policy", "sb3"]):
        for cell in ("LSTM", "user's cell"):
            row = compared(cell, shape)
            print(json.dumps(row), flush=True)
            rows["rows"].append(row)
            Path(path).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
