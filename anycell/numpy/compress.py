"""The part of ``anycell.compress`` that knows the layers of ``anycell.numpy``."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from anycell.lang.cell import Cell
from anycell.layer.compression import Compression, arguments
from anycell.layer.rounding import rounded
from anycell.numpy.base import Array
from anycell.numpy.dense import Dense
from anycell.numpy.feedback import Feedback
from anycell.numpy.layers import RNN
from anycell.numpy.quantized import Quantized

Taken = Sequence[tuple[Array, tuple[Any, ...]]]


class NumpyCompression(Compression, of=[RNN, Feedback]):
    """See ``Compression``."""

    framework, kinds = "anycell.numpy", "RNN, LSTM or GRU"
    remedy = "Pass the layer whose weights are real numbers."
    layers, quantized, feedback = RNN, Quantized, Feedback
    readouts = "anycell.numpy.Dense layers with input_size={}"

    def weights(self, layer: RNN) -> list[dict[str, Array]]:
        return [layer._learned(k) for k in range(layer.num_layers)]

    def reads(self, readout: Any) -> list[Array]:
        return [readout.parameters["weight"]] if isinstance(readout, Dense) else []

    def take(
        self, layer: RNN, readouts: Any, taken: Taken, optimizer: Any, size: tuple[str, int]
    ) -> None:
        indices = {id(array): index for array, index in taken}

        def left(array: Array, of: Array) -> Array:
            """The part of an array that stays; its elements correspond to those of ``of``."""
            return np.ascontiguousarray(array[indices[id(of)]]) if id(of) in indices else array

        if optimizer is not None:
            parameters = [p for owner in optimizer.layers for p in owner.parameters.values()]
            pairs = zip(parameters, optimizer._moments, strict=True)
            optimizer._moments = [(left(m, p), left(v, p)) for p, (m, v) in pairs]
        for owner in (layer, *readouts):
            owner._saved = None  # a pass in progress has the old sizes
            old = owner._parameters
            owner._grads = {name: left(grad, old[name]) for name, grad in owner._grads.items()}
            # A new dictionary: a copy of the layer may have the old one.
            owner._parameters = {name: left(array, array) for name, array in old.items()}
        for readout in readouts:
            readout.input_size = readout.parameters["weight"].shape[1]
        layer.sizes = layer.sizes | dict([size])
        layer.hidden_size = layer.sizes["H"]

    def like(
        self, layer: RNN, cell: Cell, sizes: Mapping[str, int], learned: Mapping[str, Array]
    ) -> RNN:
        zeros: dict[str, Any] = {"initializer": "zeros", "recurrent_initializer": "zeros"}
        new = RNN(cell, **arguments(layer, sizes), **zeros, dtype=layer.dtype)
        new.set_parameters(learned)
        new._generator = copy.deepcopy(layer._generator)
        return new

    # -- weights of 8 bits -----------------------------------------------------------------------
    def within(self, model: Any) -> list[Any]:
        return [model.layer if isinstance(model, Feedback) else model]

    def copy(self, model: Feedback, small: Mapping[Any, Quantized]) -> Feedback:
        new = copy.copy(model)
        new.layer, new.readout = small[model.layer], copy.deepcopy(model.readout)
        new._generator = copy.deepcopy(model._generator)  # it forces the same random steps
        rounded(new.readout.parameters["weight"], "weight", "readout")  # raises if it cannot be
        return new

    def runs(self, model: Any, parts: Iterable[Any], small: Mapping[Any, Any]) -> list[Any]:
        run = copy.copy(model)  # the model itself keeps a pass in progress, and its random steps
        run._generator = copy.deepcopy(model._generator)
        return [(run, small.get(model) or self.copy(model, small), *small.values())]

    def output(self, results: Any) -> Array:
        return results[0].astype(np.float64)

    def measure(self, call: Any, runs: Any, data: Iterable[Any]) -> None:
        ((run, *_),) = runs
        super().measure(run, runs, data)
