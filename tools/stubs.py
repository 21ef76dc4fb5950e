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
from anycell.{frontend}.{module} import RNN{more}

class Named(RNN): ...

__all__ = {names}
"""
MODULES = {
    "jax": "layers", "jax.equinox": "layers", "jax.nnx": "layers", "keras": "layers",
    "numpy": "layers", "torch": "rnn",
}  # fmt: skip
# What a stub imports besides, and the types of the arguments that a signature takes as ``**``.
MORE = {"jax.nnx": "\nfrom flax import nnx"}
KEYWORDS = {
    "jax.equinox": "anycell.jax.modules.Arguments",
    "jax.nnx": "anycell.jax.modules.Arguments",
    "keras": "anycell.keras.typed.RNNArguments",
}


def stub(frontend: str) -> str:
    """The text of a frontend's ``named.pyi``."""
    layers = importlib.import_module(f"anycell.{frontend}.named").LAYERS
    module, more = MODULES[frontend], MORE.get(frontend, "")
    lines = [HEAD.format(frontend=frontend, module=module, more=more, names=[*layers])]
    for name, layer in layers.items():
        signature = _spelled(vars(layer)["__signature__"], KEYWORDS.get(frontend, ""))
        given = re.sub(r": '([^']*)'", r": \1", str(signature))
        given = given.replace("Ellipsis", "...")
        lines += [f"class {name}(Named):", f"    def __init__(self, {given[1:]} -> None: ..."]
    return "\n".join(lines) + "\n"


def _spelled(signature: inspect.Signature, keywords: str) -> inspect.Signature:
    """The signature with the arguments of its ``**``, whose types ``keywords`` names, spelled
    out.
    """
    *given, last = signature.parameters.values()
    if last.kind is not last.VAR_KEYWORD:
        return signature
    module, _, typed = keywords.rpartition(".")
    hints = getattr(importlib.import_module(module), typed).__annotations__
    sizes = importlib.import_module("anycell.lang.declare").SizeArguments.__annotations__
    for name, hint in hints.items():
        if name not in {*signature.parameters, *sizes}:
            given.append(last.replace(
                name=name, kind=last.KEYWORD_ONLY, default=..., annotation=hint.__forward_arg__
            ))  # fmt: skip
    return signature.replace(parameters=given)


if __name__ == "__main__":
    os.environ.setdefault("KERAS_BACKEND", "torch")
    for frontend in MODULES:
        path = ROOT / "anycell" / frontend.replace(".", "/") / "named.pyi"
        path.write_text(stub(frontend), encoding="utf-8")
