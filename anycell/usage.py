"""The arguments of the command line: cells by name or file, and errors that tell what is wrong."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from anycell import cells
from anycell.lang.cell import Cell


class UsageError(Exception):
    """Something was asked for that does not exist; the message is all that the user needs."""


def did_you_mean(word: str, known: Collection[str]) -> str:
    """The tail of an error message: the nearest known words, then all of them.

    >>> did_you_mean("depar", ["deepar", "ocr"])
    ' (did you mean deepar?); choose from: deepar, ocr'
    """
    lowered = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), lowered, n=2)
    hint = f" (did you mean {' or '.join(lowered[name] for name in near)}?)" if near else ""
    return f"{hint}; choose from: {', '.join(known)}"


def need(module: str, purpose: str, install: str = "'.[bench]'") -> ModuleType:
    """Import an optional package, or say which command installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A missing package *inside* an installed one is a different problem; do not hide it.
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        package = module.split(".")[0]
        raise UsageError(
            f"{purpose} needs {package}, which is not installed: pip install {install}"
        ) from None


def find_cell(origin: str) -> Cell:
    """A built-in cell by its name, or a user's by ``path/to/file.py:Name``."""
    if ":" in origin:
        path, _, name = origin.rpartition(":")
        value = _from_file(Path(path), name)
        if not isinstance(value, Cell):
            raise UsageError(
                f"{origin} is a {type(value).__name__}; expected a function under @cell"
            )
        return value
    known = {name: value for name, value in vars(cells).items() if isinstance(value, Cell)}
    if origin not in known:
        raise UsageError(
            f"unknown cell {origin!r}{did_you_mean(origin, sorted(known))}; "
            "a cell of your own is path/to/file.py:Name, for bench with --cell"
        )
    return known[origin]


def _from_file(path: Path, name: str) -> Any:
    if not path.is_file():
        raise UsageError(f"{path}:{name}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"_anycell_cell_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path}:{name}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # so that inspect and linecache find the cell's source
    with _importable(path.resolve().parent):
        spec.loader.exec_module(module)
    if not hasattr(module, name):
        known = [key for key in vars(module) if not key.startswith("_")]
        raise UsageError(f"{path} defines no {name!r}{did_you_mean(name, known)}")
    return getattr(module, name)


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Lets a script import its neighbours, as when it is run."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
