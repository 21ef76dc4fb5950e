"""The layers of ``anycell.numpy`` as ``anycell.compress`` sees them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from anycell.lang.cell import Cell
from anycell.numpy.base import Array
from anycell.numpy.dense import Dense
from anycell.numpy.layers import RNN
from anycell.numpy.optim import Adam

KINDS = RNN


def opened(layer: Any) -> Any:
    """What has its cell, and says how many layers and directions there are."""
    return layer


def sizes(layer: Any) -> dict[str, int]:
    """By size symbol."""
    return dict(layer.sizes)


def check(layer: Any, readouts: Sequence[Any], width: int) -> None:
    """That the readouts read outputs of that width."""
    if isinstance(readouts, Dense):
        raise TypeError("readouts: given a layer; expected a list of them.")
    for readout in readouts:
        if not isinstance(readout, Dense) or readout.input_size != width:
            raise TypeError(
                f"readouts: given {readout!r}; expected anycell.numpy.Dense layers with "
                f"input_size={width}, the width of the layer's output."
            )


def weights(layer: Any) -> list[dict[str, Array]]:
    """What each layer learns."""
    return [layer._learned(k) for k in range(layer.num_layers)]


learned = weights


def readers(readouts: Sequence[Dense]) -> list[Array]:
    """Their weights ``[out, in]``."""
    return [readout.parameters["weight"] for readout in readouts]


def square(weight: Array) -> Array:
    """Of every number."""
    squares: Array = weight * weight
    return squares


def norms(squares: Sequence[Array]) -> Array:
    """The roots."""
    roots: Array = np.sqrt(np.stack(list(squares)))
    return roots


def numbers(values: Array) -> Array:
    """As an array of NumPy."""
    return values


def take(
    layer: Any,
    readouts: Sequence[Dense],
    taken: Sequence[tuple[Array, tuple[Any, ...]]],
    optimizer: Adam | None,
) -> None:
    """New arrays by the same names, their gradients, and an optimizer's moments of them."""
    indices = {id(array): index for array, index in taken}
    if optimizer is not None:
        parameters = [p for owner in optimizer.layers for p in owner.parameters.values()]
        optimizer._moments = [
            tuple(m[indices[id(p)]] for m in moments) if id(p) in indices else moments
            for p, moments in zip(parameters, optimizer._moments, strict=True)
        ]
    for owner in (layer, *readouts):
        owner._writes += 1
        owner._prepared = owner._saved = None  # a pass that is under way is of the old sizes
        owner._grads = {
            name: grad[indices[id(owner._parameters[name])]]
            if id(owner._parameters[name]) in indices
            else grad
            for name, grad in owner._grads.items()
        }
        for name, array in owner._parameters.items():
            if id(array) in indices:
                owner._parameters[name] = np.ascontiguousarray(array[indices[id(array)]])
    for readout in readouts:
        readout.input_size = readout.parameters["weight"].shape[1]


def resize(layer: Any, size: str, count: int) -> None:
    """The layer's own idea of its sizes."""
    layer.sizes[size] = count
    layer.hidden_size = layer.sizes["H"]


def like(layer: Any, cell: Cell, sizes: Mapping[str, int], learned: Mapping[str, Array]) -> RNN:
    """A layer of another cell with those sizes and parameters; all else is the layer's."""
    others: dict[str, Any] = {name: size for name, size in sizes.items() if name != "H"}
    new = RNN(
        cell,
        layer.input_size,
        sizes["H"],
        layer.num_layers,
        batch_first=layer.batch_first,
        dropout=layer.dropout,
        bidirectional=layer.bidirectional,
        dtype=layer.dtype,
        initializer="zeros",
        recurrent_initializer="zeros",
        checkpoint=layer.checkpoint,
        **others,
    )
    new.set_parameters(learned)
    new._generator = copy.deepcopy(layer._generator)
    return new
