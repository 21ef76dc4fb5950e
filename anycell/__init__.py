"""anycell: any recurrent cell, at fused-kernel speed, in the framework you already use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from anycell import cells, lang
from anycell.lang import *  # noqa: F403
from anycell.lang.expr import RENAMED
from anycell.refusal import close_to

__version__: str

# Frontends and engines load when first used: importing anycell imports no framework and no
# compiler.
_LAZY = {n: f"anycell.{n}" for n in "compress jax keras layouts numpy onnx tf1 torch".split()}
_LAZY |= {"explain": "anycell.explanation", "recurrence": "anycell.numpy.recurrence"}
_LAZY |= {"threads": "anycell.engines.cpu.threads", "export": "anycell.exporter"}

if TYPE_CHECKING:
    from anycell import compress as compress
    from anycell import jax as jax
    from anycell import keras as keras
    from anycell import layouts as layouts
    from anycell import numpy as numpy
    from anycell import onnx as onnx
    from anycell import tf1 as tf1
    from anycell import torch as torch
    from anycell.engines.cpu.threads import threads as threads
    from anycell.explanation import explain as explain
    from anycell.exporter import export as export
    from anycell.numpy.recurrence import recurrence as recurrence

# Frontends are left out: a star import would import every framework.
__all__ = ["cells", "explain", "export", "layouts", "recurrence", "threads"]
__all__ += lang.__all__


def _load(name: str) -> Any:
    if name == "__version__":
        from anycell.requirement import installed

        return installed()
    if name not in _LAZY:
        raise AttributeError(_unknown(name), name=name)
    module = importlib.import_module(_LAZY[name])
    # `explain` and two more are functions in their modules; other names are the module itself.
    value = getattr(module, name, module)
    globals()[name] = value
    return value


if not TYPE_CHECKING:  # with it, type checkers would accept any name
    __getattr__ = _load


def _unknown(name: str) -> str:
    problem = f"module 'anycell' has no attribute {name!r}"
    if name.startswith("_"):  # asked for by Python's own machinery
        return problem
    if name in cells.__all__:
        return (
            f"{problem}. It is a cell: anycell.cells.{name}. The frontends make its layers, for "
            f"example anycell.torch.RNN(cells.{name}, ...)."
        )
    if name in RENAMED:
        return f"{problem}. In a cell write {RENAMED[name]}, with the functions of anycell."
    close = close_to(name, __dir__()) or "."
    return (
        f"{problem}{close} Cells may use {', '.join(lang.VOCABULARY)}; anycell also has "
        f"{', '.join(sorted({*__dir__()} - {*lang.VOCABULARY}))}."
    )


def __dir__() -> list[str]:
    return sorted({*__all__, *_LAZY})
