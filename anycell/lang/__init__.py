"""The cell language: expressions, the op table, tracing and reverse mode.

Knows no device and no framework. What it exports is what users write, ``anycell.<name>``.
"""

from anycell.lang.cell import Cell, cell, keep, linear
from anycell.lang.expr import CellError
from anycell.lang.ops import (
    abs,
    clip,
    exp,
    hard_sigmoid,
    layer_norm,
    log,
    log_sigmoid,
    max,
    maximum,
    mean,
    minimum,
    relu,
    sigmoid,
    softplus,
    sqrt,
    stop_gradient,
    sum,
    tanh,
    where,
)

__all__ = [
    "Cell", "CellError", "abs", "cell", "clip", "exp", "hard_sigmoid", "keep", "layer_norm",
    "linear", "log", "log_sigmoid", "max", "maximum", "mean", "minimum", "relu", "sigmoid",
    "softplus", "sqrt", "stop_gradient", "sum", "tanh", "where",
]  # fmt: skip

# The functions that have a meaning in a cell.
VOCABULARY = [name for name in __all__ if name not in ("Cell", "CellError", "cell")]
