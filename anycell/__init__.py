"""anycell: any recurrent cell, at fused-kernel speed, in the framework you already use."""

from __future__ import annotations

import importlib
from typing import Any

from anycell import cells
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

__version__ = "0.1.0"

# Frontends and engines load when first used: importing anycell imports no framework and no
# compiler.
_LAZY = {
    "explain": "anycell.explain",
    "recurrence": "anycell.recurrence",
    "torch": "anycell.torch",
    "keras": "anycell.keras",
    "tf1": "anycell.tf1",
    "layouts": "anycell.layouts",
    "numpy": "anycell.numpy",
}

# Frontends are not among them: a star would import every framework.
__all__ = [
    "Cell",
    "CellError",
    "abs",
    "cell",
    "cells",
    "clip",
    "exp",
    "explain",
    "hard_sigmoid",
    "keep",
    "layer_norm",
    "layouts",
    "linear",
    "log",
    "log_sigmoid",
    "max",
    "maximum",
    "mean",
    "minimum",
    "recurrence",
    "relu",
    "sigmoid",
    "softplus",
    "sqrt",
    "stop_gradient",
    "sum",
    "tanh",
    "where",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'anycell' has no attribute {name!r}")
    module = importlib.import_module(_LAZY[name])
    # A module that is named after the one function it holds stands for that function.
    value = getattr(module, name, module)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_LAZY})
