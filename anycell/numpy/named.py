"""A layer for every cell of ``anycell.cells`` that ``anycell.numpy.layers`` has none for."""

from anycell import named
from anycell.numpy.layers import RNN


class Named(named.Named, RNN):
    """``RNN`` of one cell."""


LAYERS = named.layers(Named, "anycell.numpy", ("LSTM", "RNN"))
globals().update(LAYERS)
__all__ = [*LAYERS]
