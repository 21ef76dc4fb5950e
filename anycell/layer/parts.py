"""The parts of models, as ``anycell.export`` sees them.

Weights are arrays of the framework in the layout of ``anycell.layer.signature``, or objects whose
``value`` is one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from anycell.lang.expr import Expr
from anycell.lang.namespaces import namespace
from anycell.lang.transform import OUTPUT, with_feedback
from anycell.layer.compression import compression, numbers
from anycell.layer.feedback import fed
from anycell.layer.rounding import SCALES, with_integers
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


Simple = Recurrent | Affine | Pointwise
Part = Simple | FedBack


def opened(part: Part, dtype: str) -> list[Simple]:
    """The part, or of a layer with feedback the layer of its fed cell, and the readout.

    That layer has no weights for the gate that marks free steps: what it says needs no matmul.
    """
    if not isinstance(part, FedBack):
        return [part]
    (name, layer, (weights,), _), xp = part.layers, namespace(np.zeros(1))
    learned = {name: numbers(array).astype(dtype) for name, array in weights.items()}
    readout: Any = [None if a is None else numbers(a).astype(dtype) for a in part.readout]
    both = fed(xp, learned, layer.size("H"), *readout)
    both |= {name: learned[name] for name in ("weight_ih", "bias_ih") if name in learned}
    both = with_integers(xp, both) if SCALES in both else both
    sizes = (*layer.sizes, (OUTPUT, len(readout[0])))
    layer = layer._replace(cell=with_feedback(layer.cell), sizes=sizes)
    return [Recurrent(name, layer, [both]), Affine(*readout)]
