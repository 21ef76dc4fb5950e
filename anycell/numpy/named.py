"""Layers for the cells of ``anycell.cells`` without a layer in ``anycell.numpy.layers``."""

from anycell import named
from anycell.numpy.layers import RNN


class Named(named.Named, RNN):
    """``RNN`` of one cell."""


LAYERS = named.layers(Named, "anycell.numpy", ("LSTM", "RNN"))
globals().update(LAYERS)
__all__ = [*LAYERS]
