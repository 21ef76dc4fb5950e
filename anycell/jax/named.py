"""One layer for each cell of ``anycell.cells``, by the cell's name: ``PeepholeLSTM(3, 8)``."""

from anycell import named
from anycell.jax.layers import RNN


class Named(named.Named, RNN):
    """The layers of one cell."""


LAYERS = named.layers(Named, "anycell.jax", ("RNN",))
globals().update(LAYERS)
__all__ = [*LAYERS]
