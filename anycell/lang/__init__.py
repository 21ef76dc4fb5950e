"""The cell language: expressions, the op table, tracing and reverse mode.

Knows no device and no framework. What it exports is what users write, ``anycell.<name>``.
"""

from anycell.lang.cell import Cell, Gates, cell, keep, linear
from anycell.lang.expr import VOCABULARY as VOCABULARY
from anycell.lang.expr import CellError, Expr
from anycell.lang.ops import (
    abs,
    clip,
    cos,
    elu,
    erf,
    exp,
    gelu,
    hard_sigmoid,
    layer_norm,
    leaky_relu,
    log,
    log_sigmoid,
    max,
    maximum,
    mean,
    minimum,
    pow,
    relu,
    sigmoid,
    silu,
    sin,
    softmax,
    softplus,
    softsign,
    sqrt,
    stop_gradient,
    sum,
    tanh,
    where,
)

__all__ = [
    "Cell", "CellError", "Expr", "Gates", "abs", "cell", "clip", "cos", "elu", "erf", "exp",
    "gelu", "hard_sigmoid", "keep", "layer_norm", "leaky_relu", "linear", "log", "log_sigmoid",
    "max", "maximum", "mean", "minimum", "pow", "relu", "sigmoid", "silu", "sin", "softmax",
    "softplus", "softsign", "sqrt", "stop_gradient", "sum", "tanh", "where",
]  # fmt: skip

VOCABULARY[:] = [name for name in __all__ if name[0].islower() and name != "cell"]
