"""A layer for every cell of ``anycell.cells`` whose name no layer of ``torch.nn`` has."""

from anycell import named
from anycell.torch.rnn import RNN


class Named(named.Named, RNN):
    """``RNN`` of one cell."""


LAYERS = named.layers(Named, "anycell.torch", ("LSTM", "GRU", "RNN"))
globals().update(LAYERS)
__all__ = [*LAYERS]
