"""Shows mkdocstrings the public names and their docstrings as they are at run time."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))
from site_markdown import markdown

import anycell

ALONE = {"explain": ["explain", "Explanation"], "numpy.recurrence": ["recurrence"]}


class Docstrings(griffe.Extension):
    """Fills in what only the running package has, and turns docstrings into Markdown."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Changes the package once its text has been read."""
        os.environ.setdefault("KERAS_BACKEND", "torch")
        for name, layer in importlib.import_module("anycell.keras.named").LAYERS.items():
            made = griffe.Class(name, docstring=griffe.Docstring(inspect.getdoc(layer) or ""))
            made.set_member("__init__", _constructor(layer.of))
            pkg["keras"].set_member(name, made)
        for item in _all(pkg):
            if item.docstring is not None:
                if "{options}" in item.docstring.value:
                    item.docstring.value = _running(item).__doc__
                item.docstring.value = markdown(inspect.cleandoc(item.docstring.value))
        for module, names in ALONE.items():  # named after their one function, which is anycell's
            found = [pkg[module].members[name] for name in names]
            for name, item in zip(names, found, strict=True):
                pkg.set_member(name, item)
                item.parent = pkg
        for name in anycell.cells.__all__:
            _as_called(pkg["cells"][name].final_target)


def _all(item: Any) -> Iterator[Any]:
    yield item
    for member in list(item.members.values()):
        if not member.is_alias:
            yield from _all(member)


def _running(item: Any) -> Any:
    """The object at run time."""
    found: Any = importlib.import_module(item.module.path)
    for name in item.path.removeprefix(f"{item.module.path}.").split("."):
        found = getattr(found, name)
    return found


def _as_called(function: Any) -> None:
    """Leaves a cell's function the arguments with which users call the cell."""
    kept = [p for p in function.parameters if p.kind is griffe.ParameterKind.keyword_only]
    function.parameters = griffe.Parameters(*kept)
    function.returns = "Cell"


def _constructor(cell: anycell.Cell) -> griffe.Function:
    """The constructor of a Keras layer of a cell: its units and the cell's hyperparameters."""
    kinds = griffe.ParameterKind
    given = [
        griffe.Parameter(name, kind=kinds.keyword_only, default=repr(value))
        for name, value in cell.given.items()
    ]
    return griffe.Function(
        "__init__",
        parameters=griffe.Parameters(
            griffe.Parameter("self", kind=kinds.positional_or_keyword),
            griffe.Parameter("units", annotation="int", kind=kinds.positional_or_keyword),
            *given,
            griffe.Parameter("kwargs", kind=kinds.var_keyword),
        ),
    )
