"""Modules for Flax: ``RNN(cell, ...)``, one for each built-in cell by the cell's name, and
``Loop(cell)`` for a cell of Flax.

Importing ``anycell.jax.nnx`` imports Flax.
"""

from anycell.requirement import require

require("flax", "anycell.jax.nnx", "flax")

from anycell.jax.nnx import named
from anycell.jax.nnx.layers import RNN
from anycell.jax.nnx.loop import Loop
from anycell.jax.nnx.named import *  # noqa: F403

__all__ = ["Loop", "RNN"]
__all__ += named.__all__


def __dir__() -> list[str]:
    return sorted(__all__)
