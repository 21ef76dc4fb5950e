"""A layer in the backend's own operations: one step of the reference engine in a loop.

It is slow, and can do what the backend can: XLA, export, any device, any order of derivative. The
loop is ``tf.while_loop`` in graphs of TensorFlow, and Python's elsewhere; but on JAX,
``jax/composite.py`` runs whole sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
from keras import backend, ops

from anycell.engines.reference import Recurrence
from anycell.keras.call import INTEGERS, Arrays, Result, Tensor, dequantized, unturned
from anycell.layer import steps
from anycell.layer.rounding import quantized
from anycell.layer.signature import OF_STATES
from anycell.plan import DTYPES, Layer


def composite(layer: Layer, arrays: Arrays) -> Result:
    """Runs a layer step by step: with arrays of 16 bits in float32, narrowing the results again,
    and with the real weights that weights of 8 bits stand for.
    """
    if quantized(arrays):
        arrays = dequantized(arrays)
    narrow = backend.standardize_dtype(arrays["x"].dtype)
    if DTYPES.get(narrow, DTYPES["float32"]).mixed:
        wide = DTYPES[narrow].math.name
        arrays = {n: a if n in INTEGERS else ops.cast(a, wide) for n, a in arrays.items()}
        results = composite(layer, arrays)
        return keras.tree.map_structure(
            lambda result: None if result is None else ops.cast(result, narrow), results
        )
    plain = unturned(arrays)
    below = {n: a[None] if n.startswith(OF_STATES) else a for n, a in plain.items()}
    options = layer.options._replace(seed=below.pop("seed", None))
    runs = steps.directions(layer._replace(options=options), below, linear, _Run)
    in_graph = backend.backend() == "tensorflow" and not hasattr(arrays["x"], "numpy")
    loops = in_graph and not layer.unroll and arrays["x"].shape[0] not in (0, 1)
    outputs, final, others = steps.run(layer, runs, _scan if loops else Recurrence.sequences)
    return outputs if layer.outputs else None, (*(state[0] for state in final), *others)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias``."""
    product = ops.matmul(x, ops.transpose(weight))
    return product if bias is None else product + bias


def _scan(run: Recurrence, names: Sequence[str]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The sequences of these states, and the final states, by a loop of TensorFlow's."""
    import tensorflow as tf

    step, first, sequences = steps.one_step(run, names)
    (reverse,), every = run.layer.options.reverse, run.cell.state_names
    count = tf.shape(run.gates_x)[0]
    given = {name: tf.TensorArray(s.dtype, count).unstack(s) for name, s in sequences.items()}
    like = [first[every.index(name)] for name in names]
    made = [tf.TensorArray(s.dtype, count, element_shape=s.shape) for s in like]

    def body(k: Tensor, entering: Any, made: Any) -> tuple[Any, ...]:
        t = count - 1 - k if reverse else k
        leaving, values = step(entering, {name: array.read(t) for name, array in given.items()}, t)
        return k + 1, leaving, [a.write(t, value) for a, value in zip(made, values, strict=True)]

    _, last, made = tf.while_loop(
        lambda k, *_: k < count, body, (0, first, made), maximum_iterations=count
    )
    return [array.stack() for array in made], last[: len(every)]


def _uniform(seed: Tensor, stream: int, index: int, step: Any, rows: Any, units: int) -> Tensor:
    """The random numbers of a mask, see ``Recurrence``: others than the kernels draw."""
    return keras.random.uniform((rows, units), dtype="float32", seed=_Seed(seed, index, step))


class _Seed(keras.random.SeedGenerator):
    """The seed of one mask at one step: Keras takes a generator, but no tensor.

    Args:
        drawn: the seed of the call, two numbers of which the second counts calls.
    """

    def __init__(self, drawn: Tensor, index: int, step: Any) -> None:
        apart = index * 0x01000193, step * 0x10DCD
        self.drawn = drawn + ops.stack([ops.cast(part, drawn.dtype) for part in apart])

    def next(self, ordered: bool = True) -> Tensor:
        return self.drawn


@dataclass
class _Run(Recurrence):
    """A run for any number of rows, even if only the running graph knows the number."""

    uniform: Callable[..., Tensor] = _uniform

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rows = ops.shape(self.gates_x)[1]

    def _rows(self, value: Tensor, size: str) -> Tensor:
        """Adds zeros where the oracle broadcasts to a shape: XLA has no gradient of a broadcast to
        a shape that only the running graph knows."""
        if len(value.shape) == 2 and (value.shape[0] != 1 or self.gates_x.shape[1] == 1):
            return value
        rows = self.gates_x[0] if self.state is None else self.state[0]
        zero = self.xp.zeros_like(rows[:, :1])
        return value + (zero + ops.zeros((self.size[size],), zero.dtype))
