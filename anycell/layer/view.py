"""Layers of every frontend, as ``anycell.compress`` and ``anycell.export`` see them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from anycell.lang.cell import ONE
from anycell.lang.expr import Expr
from anycell.lang.namespaces import Array, namespace
from anycell.layer.checks import refuse
from anycell.plan import Layer

TOLD = "input_size num_layers bias batch_first dropout bidirectional checkpoint".split()


class Affine(NamedTuple):
    """``weight @ x + bias``, with the weight ``[out, in]``."""

    weight: Any
    bias: Any = None


class Pointwise(NamedTuple):
    """A function of the numbers of one step, in the cell language: ``function(x, *arrays)``."""

    function: Callable[..., Expr]
    arrays: tuple[Any, ...] = ()


class FedBack(NamedTuple):
    """A layer whose readout is its next input."""

    view: View
    readout: Affine


class View(NamedTuple):
    """A layer of any framework.

    Attributes:
        parts: the layer itself, or in Keras the layer of each direction.
        layer: its cell, sizes and directions.
        weights: per layer what its directions learn, by name, shaped as in
            ``anycell.layer.signature``: arrays, or objects whose ``value`` is an array.
        learned: as ``weights``, with those that are parts of another weight.
    """

    parts: tuple[Any, ...]
    layer: Layer
    weights: list[dict[str, Any]]
    learned: list[dict[str, Any]]


def told(layer: Any, sizes: Mapping[str, int]) -> dict[str, Any]:
    """The arguments of such a layer besides its cell, for a layer of other sizes."""
    named = {name: size for name, size in sizes.items() if name != ONE}
    counts = {"hidden_size" if name == "H" else name: size for name, size in named.items()}
    return {name: getattr(layer, name) for name in TOLD} | counts


def value(weight: Any) -> Array:
    """An array of the framework, with its gradient."""
    return getattr(weight, "value", weight)


def sharded(array: Any) -> bool:
    """Whether an array is a ``DTensor`` of torch, of which each process may hold a part."""
    return hasattr(array, "device_mesh")


def numbers(weight: Any) -> npt.NDArray[np.float64]:
    """A NumPy array with the values of a weight."""
    if sharded(value(weight)):
        hint = "Compress the layer first, then shard it."
        refuse("layer", "one whose weights are sharded (DTensor)", "whole weights", hint)
    array: npt.NDArray[np.float64] = namespace(value(weight)).numbers(value(weight))
    return array


def check_optimizer(optimizer: Any, trains: bool, follows: bool, remedy: str) -> None:
    """Refuses an optimizer that does not train the layer, or cannot follow its compression."""
    kind = type(optimizer).__name__
    if not trains:
        given, hint = f"{kind} without parameters of the layer", "Leave it out if there is none."
        refuse("optimizer", given, "the optimizer that trains the layer", hint)
    if not follows:
        given = f"{kind}, whose state does not have a number for each number of a parameter"
        refuse("optimizer", given, "one like Adam or SGD", f"Leave it out, and {remedy}.")
