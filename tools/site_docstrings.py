"""Shows mkdocstrings the docstrings as they are at run time, as Markdown: for ``make docs``."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

import griffe

import anycell


class Docstrings(griffe.Extension):
    """Fills in what a docstring has at run time alone, and turns its sections into lists."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Changes the docstrings of the package once it has been read."""
        os.environ.setdefault("KERAS_BACKEND", "torch")
        layers = importlib.import_module("anycell.keras.named").LAYERS
        for name, layer in layers.items():
            made = griffe.Class(name, docstring=griffe.Docstring(inspect.getdoc(layer) or ""))
            pkg["keras"].set_member(name, made)
            made.set_member("__init__", _constructor(layer.of))
        for item in _all(pkg):
            if item.docstring is None:
                continue
            if "{options}" in item.docstring.value:
                item.docstring.value = inspect.getdoc(_running(item)) or ""
            item.docstring.value = markdown(inspect.cleandoc(item.docstring.value))
        for module in ("explain", "numpy.recurrence"):  # named after their one function
            names = "explain Explanation".split() if module == "explain" else ["recurrence"]
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
    found: Any = sys.modules.get(item.module.path) or importlib.import_module(item.module.path)
    for name in item.path.removeprefix(item.module.path).strip(".").split("."):
        found = getattr(found, name)
    return found


def _as_called(function: Any) -> None:
    """Leaves a cell's function the arguments with which users call the cell."""
    kept = [p for p in function.parameters if p.kind is griffe.ParameterKind.keyword_only]
    function.parameters = griffe.Parameters(*kept)
    function.returns = "Cell"


def _constructor(cell: anycell.Cell) -> griffe.Function:
    """The constructor of a Keras layer of a cell: its units and the cell's hyperparameters."""
    named = griffe.ParameterKind.keyword_only
    given = [
        griffe.Parameter(name, kind=named, default=repr(value))
        for name, value in cell.given.items()
    ]
    return griffe.Function(
        "__init__",
        parameters=griffe.Parameters(
            griffe.Parameter("self"),
            griffe.Parameter("units", annotation="int"),
            *given,
            griffe.Parameter("kwargs", kind=griffe.ParameterKind.var_keyword),
        ),
    )


def markdown(text: str) -> str:
    """A docstring with its sections (``Args:`` and others like it) as lists."""
    lines, out, at = text.split("\n"), [], 0
    while at < len(lines):
        line, at = lines[at], at + 1
        following = lines[at] if at < len(lines) else ""
        if (
            line.startswith((" ", ">>>"))
            or not line.endswith(":")
            or not following.startswith("    ")
        ):
            out.append(line)
            continue
        section = []
        while at < len(lines) and (lines[at].startswith("    ") or not lines[at]):
            section.append(lines[at])
            at += 1
        title = line if " " in line else f"**{line}**"
        out += ["", title, "", *_section(section), ""]
    return "\n".join(out)


def _section(lines: list[str]) -> list[str]:
    if lines[0].lstrip().startswith(">>>"):
        return ["```pycon", *(line[4:] for line in lines if line), "```"]
    rows: list[str] = []
    for line in lines:
        if line.startswith("     ") and rows:
            rows[-1] += " " + line.strip()
        elif line.strip():
            rows.append(line.strip())
    return [_row(row) for row in rows]


def _row(text: str) -> str:
    """A line of a list from ``name, name: what it is``; names are set as code."""
    names, colon, rest = text.partition(": ")
    if not colon or names.count("`") % 2:
        return f"- {text}"
    coded = (f"`{n}`" if re.fullmatch(r"[\w*.]+", n) else n for n in names.split(", "))
    return f"- {', '.join(coded)}: {rest}"
