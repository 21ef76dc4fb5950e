"""Gives ``anycell.compress`` access to the layers of ``anycell.numpy``."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from anycell.lang.cell import Cell
from anycell.layer import view as views
from anycell.layer.view import View
from anycell.numpy.base import Array
from anycell.numpy.dense import Dense
from anycell.numpy.layers import RNN
from anycell.numpy.optim import Adam

KINDS = RNN
READOUTS = "anycell.numpy.Dense layers with input_size={}"


def view_of(layer: Any) -> View:
    """Returns the view of a layer, which holds the layer's own arrays."""
    weights = [layer._learned(k) for k in range(layer.num_layers)]
    return View((layer,), layer._layer(), weights, weights)


def reads(readout: Any) -> list[Array]:
    """Returns the weights ``[out, in]`` by which a readout multiplies its input."""
    return [readout.parameters["weight"]] if isinstance(readout, Dense) else []


def take(
    view: View,
    readouts: Sequence[Dense],
    taken: Sequence[tuple[Array, tuple[Any, ...]]],
    optimizer: Adam | None,
    size: str,
    count: int,
) -> None:
    """Replaces arrays, gradients and an optimizer's moments by the parts of them that stay."""
    (layer,), indices = view.parts, {id(array): index for array, index in taken}

    def left(array: Array, of: Array) -> Array:
        """The part of ``array`` that stays; its elements correspond to the elements of ``of``."""
        return np.ascontiguousarray(array[indices[id(of)]]) if id(of) in indices else array

    if optimizer is not None:
        parameters = [p for owner in optimizer.layers for p in owner.parameters.values()]
        pairs = zip(parameters, optimizer._moments, strict=True)
        optimizer._moments = [(left(m, p), left(v, p)) for p, (m, v) in pairs]
    for owner in (layer, *readouts):
        owner._prepared = owner._saved = None  # a pass in progress has the old sizes
        old = owner._parameters
        owner._grads = {name: left(grad, old[name]) for name, grad in owner._grads.items()}
        # A new dictionary: a copy of the layer may have the old one.
        owner._parameters = {name: left(array, array) for name, array in old.items()}
    for readout in readouts:
        readout.input_size = readout.parameters["weight"].shape[1]
    layer.sizes = {**layer.sizes, size: count}
    layer.hidden_size = layer.sizes["H"]


def like(view: View, cell: Cell, sizes: Mapping[str, int], learned: Mapping[str, Array]) -> RNN:
    """Makes a layer of another cell, with these sizes and parameters, and the same options."""
    (layer,) = view.parts
    options = views.told(layer, sizes) | {"initializer": "zeros", "recurrent_initializer": "zeros"}
    new = RNN(cell, **options, dtype=layer.dtype)
    new.set_parameters(learned)
    new._generator = copy.deepcopy(layer._generator)
    return new
