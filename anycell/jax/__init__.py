"""JAX frontend: any cell as a differentiable function of JAX arrays.

- ``recurrence(cell, x, weights, ...)`` is one direction of one layer, on arrays of your own.
- ``scan(f, init, xs)`` is ``jax.lax.scan``, fused where f is a cell.
- ``RNN(cell, ...)`` is layers as a function of their parameters; the cells of ``anycell.cells``
  have layers of their own names: ``PeepholeLSTM(3, 8, cell_clip=3.0)``.
- ``anycell.jax.nnx.RNN`` and ``anycell.jax.equinox.RNN`` are modules of Flax and Equinox.

On the CPU, layers run on a fused kernel, forward and backward, inside the program that XLA compiles
and without Python; on other devices step by step, by ``lax.scan``. They work under ``jit``,
``grad`` of any order, ``vmap``, ``scan`` and ``checkpoint``.
"""

from typing import TYPE_CHECKING

from anycell.requirement import require

require("jax", "anycell.jax", "jax")

from anycell.jax import named
from anycell.jax.layers import RNN
from anycell.jax.named import *  # noqa: F403
from anycell.jax.primitive import recurrence
from anycell.jax.scanning import explain_scan, scan
from anycell.refusal import missing

__all__ = ["RNN", "explain_scan", "recurrence", "scan"]
__all__ += named.__all__


def __dir__() -> list[str]:
    return sorted(__all__)


if not TYPE_CHECKING:  # with it, type checkers would accept any name
    __getattr__ = missing(__name__, __all__)
