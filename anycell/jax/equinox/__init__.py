"""Modules for Equinox: ``RNN(cell, ...)``, and one for each built-in cell by the cell's name.

Importing ``anycell.jax.equinox`` imports Equinox.
"""

from anycell.requirement import require

require("equinox", "anycell.jax.equinox", "equinox")

from anycell.jax.equinox import named
from anycell.jax.equinox.layers import RNN
from anycell.jax.equinox.named import *  # noqa: F403

__all__ = ["RNN"]
__all__ += named.__all__


def __dir__() -> list[str]:
    return sorted(__all__)
