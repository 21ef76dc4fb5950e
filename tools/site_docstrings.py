"""Gives mkdocstrings the public names and their docstrings as they are at run time."""

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

# Public names, and the paths of the objects that the site documents under these names.
NAMESAKES = {
    "cell": "lang.cell.cell",
    "explain": "explanation.explain",
    "Explanation": "explanation.Explanation",
    "recurrence": "numpy.recurrence.recurrence",
    "keras.accelerate": "keras.accelerate.accelerate",
    "torch.accelerate": "torch.accelerate.accelerate",
}


class Docstrings(griffe.Extension):
    """Adds names that exist only at run time, and turns docstrings into Markdown."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Changes the package after griffe has read its source."""
        os.environ.setdefault("KERAS_BACKEND", "torch")
        for item in _all(pkg):
            if item.docstring is not None:
                if "arguments}" in item.docstring.value:
                    item.docstring.value = _running(item).__doc__
                    if isinstance(item, griffe.Function):
                        item.parameters = _parameters(_running(item))
                item.docstring.value = markdown(inspect.cleandoc(item.docstring.value))
        found = {name: pkg[path] for name, path in NAMESAKES.items()}
        for name, item in found.items():
            *where, last = name.split(".")
            item.parent = pkg[where[0]] if where else pkg
            item.parent.set_member(last, item)
        for frontend in ("jax", "keras", "numpy", "torch"):
            running, here = importlib.import_module(f"anycell.{frontend}"), pkg[frontend]
            for name in running.__all__:
                public = getattr(running, name)
                if name not in here.members:  # a layer generated for a cell
                    about = griffe.Docstring(markdown(inspect.getdoc(public) or ""))
                    here.set_member(name, griffe.Class(name, docstring=about))
                item = _behind(here[name])
                if isinstance(public, type) and "__init__" not in item.members:
                    item.set_member("__init__", _constructor(public))
        for name in anycell.cells.__all__:
            _as_called(_behind(pkg["cells"][name]))


def _all(item: Any) -> Iterator[Any]:
    yield item
    for member in list(item.members.values()):
        if not member.is_alias:
            yield from _all(member)


def _behind(item: Any) -> Any:
    """The object that an imported name refers to."""
    return item.final_target if item.is_alias else item


def _running(item: Any) -> Any:
    """The object at run time."""
    found: Any = importlib.import_module(item.module.path)
    for name in item.path.removeprefix(f"{item.module.path}.").split("."):
        found = getattr(found, name)
    return found


def _as_called(function: Any) -> None:
    """Reduces a cell's function to the arguments with which users call the cell."""
    kept = [p for p in function.parameters if p.kind is griffe.ParameterKind.keyword_only]
    function.parameters = griffe.Parameters(*kept)
    function.returns = "Cell"


def _constructor(layer: Any) -> griffe.Function:
    """The constructor of a layer at run time."""
    own = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
    return griffe.Function("__init__", parameters=griffe.Parameters(own, *_parameters(layer)))


def _parameters(function: Any) -> griffe.Parameters:
    """The parameters of a function at run time."""
    found = []
    for name, parameter in inspect.signature(function).parameters.items():
        default = None if parameter.default is parameter.empty else repr(parameter.default)
        kind = griffe.ParameterKind(parameter.kind.description)
        annotation = parameter.annotation if isinstance(parameter.annotation, str) else None
        found.append(griffe.Parameter(name, kind=kind, default=default, annotation=annotation))
    return griffe.Parameters(*found)
