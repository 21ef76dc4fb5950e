"""The parts of models, as ``anycell.export`` sees them.

Weights are arrays of the framework in the layout of ``anycell.layer.signature``, or objects whose
``value`` is one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from anycell.lang.expr import Expr
from anycell.layer.compression import compression
from anycell.plan import Layer


class Affine(NamedTuple):
    """``weight @ x + bias``, with the weight ``[out, in]``."""

    weight: Any
    bias: Any = None


class Pointwise(NamedTuple):
    """A function of the numbers of one step, in the cell language: ``function(x, *arrays)``."""

    function: Callable[..., Expr]
    arrays: tuple[Any, ...] = ()


class Recurrent(NamedTuple):
    """Recurrent layers on top of each other.

    Attributes:
        name: what errors call them.
        layer: the cell, sizes and directions.
        learned: per layer what its directions learn, by name.
        flipped: of each direction whether it leaves its outputs from the last row on; by default
            those in reverse do, so that a row is of the step of its input.
    """

    name: str
    layer: Layer
    learned: Sequence[Mapping[str, Any]]
    flipped: Sequence[bool] | None = None

    @classmethod
    def of(cls, model: Any) -> Recurrent:
        """The layers of a model of any framework."""
        known = compression(model)
        return cls(repr(model), known.describe(model), known.learned(model))


class FedBack(NamedTuple):
    """Layers whose readout is their next input."""

    layers: Recurrent
    readout: Affine


Part = Recurrent | Affine | Pointwise | FedBack
