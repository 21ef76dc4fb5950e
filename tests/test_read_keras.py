"""Recurrent cells written in Keras on TensorFlow, against ``keras.layers.RNN``.

Outputs, last states and the gradients of weights, initial states and inputs are compared in
float64. The cells are in ``cells_keras.py``, written by another hand than the reader.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from corpus import Entry, Numbers, check_results, check_verdict

keras = pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")
if keras.backend.backend() != "tensorflow":
    pytest.skip("the cells are written for TensorFlow", allow_module_level=True)

from cells_keras import corpus  # noqa: E402

import anycell.keras as ak  # noqa: E402
from tools import random_steps  # noqa: E402


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    """float64 is what new layers compute in."""
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(policy)


def results(made: Any, rnn: Any, graph: bool = False) -> dict[str, np.ndarray]:
    """The sequences and last states of a layer, and the gradients of all that enters it."""
    cell, x, state = made
    layer = rnn(cell, return_sequences=True, return_state=True)
    x, state = tf.constant(x), tf.nest.map_structure(tf.constant, state)
    layer(x, initial_state=state)
    random = Numbers("weights")
    for weight in layer.weights:
        weight.assign(random(*weight.shape))
    watched = [x, *tf.nest.flatten(state)]

    def both() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(watched)
            out = tf.nest.flatten(layer(x, initial_state=state))
            cotangents = Numbers("cotangents")
            total = tf.add_n([tf.reduce_sum(leaf * cotangents(*leaf.shape)) for leaf in out])
        weights = [weight.value for weight in layer.trainable_weights]
        return out, tape.gradient(
            total, [*watched, *weights], unconnected_gradients=tf.UnconnectedGradients.ZERO
        )

    out, slopes = (tf.function(both) if graph else both)()
    names = [f"argument {k}" for k in range(len(watched))]
    names += [f"{k}, {weight.name}" for k, weight in enumerate(layer.trainable_weights)]
    got = {f"output {k}": leaf.numpy() for k, leaf in enumerate(out)}
    for name, slope in zip(names, slopes, strict=True):
        got[f"gradient of {name}"] = tf.convert_to_tensor(slope).numpy()
    return got


@pytest.mark.sample(every=3)
@pytest.mark.filterwarnings("ignore:`build")  # of cells that make their layers' weights in a call
@pytest.mark.parametrize("entry", corpus.entries, ids=corpus.names)
def test_cell(entry: Entry) -> None:
    layers = []

    def door(cell: Any, **options: Any) -> Any:
        layers.append(ak.RNN(cell, **options))
        return layers[-1]

    expected = results(entry(), keras.layers.RNN)
    check_results(results(entry(), door), expected)
    (engine,) = (layer.engine for layer in layers)
    check_verdict(entry, engine.reason if engine.name == "keras" else None)


@pytest.mark.sample(10)
@pytest.mark.parametrize("number", range(60))
def test_random_step(number: int, seed: int) -> None:
    outcome = random_steps.check("tensorflow", seed + number)
    assert not outcome.error and not outcome.wrong, (
        f"{outcome.error}{outcome.wrong}\n{outcome.source}"
    )
