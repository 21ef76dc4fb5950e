"""Writes stubs of the layers that are generated for cells: ``make format`` runs it.

It writes ``named.pyi`` of each frontend, with one class for each cell, from their signatures.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEAD = """# Written by tools/stubs.py, which `make format` runs: the types of what named.py makes.
# fmt: off
# ruff: noqa
from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt

from anycell.numpy import initializers
from anycell.{frontend}.{module} import RNN

class Named(RNN): ...

__all__ = {names}
"""
MODULES = {"jax": "layers", "keras": "layers", "numpy": "layers", "torch": "rnn"}


def stub(frontend: str) -> str:
    """The text of a frontend's ``named.pyi``."""
    layers = importlib.import_module(f"anycell.{frontend}.named").LAYERS
    lines = [HEAD.format(frontend=frontend, module=MODULES[frontend], names=[*layers])]
    for name, layer in layers.items():
        given = re.sub(r": '([^']*)'", r": \1", str(_spelled(inspect.signature(layer))))
        given = given.replace("Ellipsis", "...")
        lines += [f"class {name}(Named):", f"    def __init__(self, {given[1:]} -> None: ..."]
    return "\n".join(lines) + "\n"


def _spelled(signature: inspect.Signature) -> inspect.Signature:
    """The signature with the arguments of Keras's ``**kwargs`` spelled out."""
    *given, last = signature.parameters.values()
    if last.kind is not last.VAR_KEYWORD:
        return signature
    typed = importlib.import_module("anycell.keras.typed")
    sizes = importlib.import_module("anycell.lang.declare").SizeArguments.__annotations__
    for name, hint in typed.RNNArguments.__annotations__.items():
        if name not in {*signature.parameters, *sizes}:
            given.append(last.replace(
                name=name, kind=last.KEYWORD_ONLY, default=..., annotation=hint.__forward_arg__
            ))  # fmt: skip
    return signature.replace(parameters=given)


if __name__ == "__main__":
    os.environ.setdefault("KERAS_BACKEND", "torch")
    for frontend in MODULES:
        path = ROOT / "anycell" / frontend / "named.pyi"
        path.write_text(stub(frontend), encoding="utf-8")
