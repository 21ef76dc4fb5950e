"""Modules for Flax: ``RNN(cell, ...)``, and one for each built-in cell by the cell's name.

Importing ``anycell.jax.nnx`` imports Flax.
"""

from anycell.requirement import require

require("flax", "anycell.jax.nnx", "flax")

from anycell.jax.nnx import named
from anycell.jax.nnx.layers import RNN
from anycell.jax.nnx.named import *  # noqa: F403

__all__ = ["RNN"]
__all__ += named.__all__


def __dir__() -> list[str]:
    return sorted(__all__)
