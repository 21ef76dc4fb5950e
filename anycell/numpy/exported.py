"""The parts that ``anycell.export`` takes from layers of ``anycell.numpy``."""

from __future__ import annotations

from collections.abc import Iterator

from anycell.layer.checks import refuse
from anycell.layer.parts import Affine, FedBack, Part, Pointwise, Recurrent
from anycell.numpy.base import Layer
from anycell.numpy.dense import Dense
from anycell.numpy.feedback import Feedback
from anycell.numpy.layers import RNN
from anycell.numpy.normalise import Standardise

KINDS = Layer


def parts(model: Layer) -> Iterator[Part]:
    """The parts of a layer."""
    if isinstance(model, Feedback):
        yield FedBack(Recurrent.of(model.layer), _affine(model.readout))
    elif isinstance(model, RNN):
        yield Recurrent.of(model)
    elif isinstance(model, Dense):
        yield _affine(model)
    elif isinstance(model, Standardise):
        arrays = model.arrays["mean"], model.arrays["std"]
        yield Pointwise(lambda v, mean, std: (v - mean) / std, arrays)
    else:
        expected = "RNN and the layers of cells, Feedback, Dense or Standardise"
        hint = "Export the layers around it, and write it in the program."
        refuse("model", repr(model), expected, hint, TypeError)


def _affine(layer: Dense) -> Affine:
    return Affine(layer.parameters["weight"], layer.parameters.get("bias"))
