"""One module for each cell of ``anycell.cells``, by the cell's name."""

from anycell import named
from anycell.jax.nnx.layers import RNN


class Named(named.Named, RNN):
    """The modules of one cell."""


LAYERS = named.layers(Named, "anycell.jax.nnx", ("RNN",))
globals().update(LAYERS)
__all__ = [*LAYERS]
