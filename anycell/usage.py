"""The arguments of the command line: cells by name or file, and errors that say what is wrong."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Collection, Iterable
from functools import cache
from pathlib import Path
from types import ModuleType

from anycell import cells
from anycell.lang import CellError
from anycell.lang.cell import Cell
from anycell.requirement import install


class UsageError(Exception):
    """A request for something that does not exist; the message is all that the user needs."""


def did_you_mean(word: str, known: Collection[str]) -> str:
    """The tail of an error message: the nearest known words, then all of them.

    >>> did_you_mean("depar", ["deepar", "ocr"])
    ' (did you mean deepar?); choose from: deepar, ocr'
    """
    lowered = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), lowered, n=2)
    hint = f" (did you mean {' or '.join(lowered[name] for name in near)}?)" if near else ""
    return f"{hint}; choose from: {', '.join(known)}"


def need(module: str, purpose: str, command: str = "") -> ModuleType:
    """Imports an optional package, or says how to install it, by default with the extra bench."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A missing package *inside* an installed one is a different problem; do not hide it.
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise UsageError(
            f"{purpose} needs {package}, which is not installed: {command or install('bench')}"
        ) from None


def check_installed(who: str, packages: Iterable[str], remedy: str) -> None:
    """Says how to install what is missing, and imports nothing."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise UsageError(f"{who} needs {package}, which is not installed: {remedy}")


def find_cell(origin: str) -> Cell:
    """A built-in cell by its name, or a user's by ``path/to/file.py:Name``."""
    if ":" in origin or origin.endswith(".py"):
        path, _, name = origin.rpartition(":") if not origin.endswith(".py") else (origin, "", "")
        defined = vars(_module(Path(path)))
        value, known = defined.get(name), find_cells(path)
        if not isinstance(value, Cell):
            if not name:
                problem = f"{path}: expected the name of one of its cells, {path}:NAME"
            elif name in defined:
                problem = f"{origin}: given a value of type {type(value).__name__}; expected a cell"
            else:
                problem = f"{path} defines no {name!r}"
            choose = did_you_mean(name, sorted(known)) if known else "; it has no @cell function"
            raise UsageError(problem + choose)
        return value
    known = find_cells()
    if origin not in known:
        raise UsageError(
            f"unknown cell {origin!r}{did_you_mean(origin, sorted(known))}; "
            "a cell of your own is path/to/file.py:Name, for bench with --cell"
        )
    return known[origin]


def find_model(origin: str) -> object:
    """A model by ``path/to/file.py:NAME``, or from a ``.keras`` file."""
    path, _, name = origin.rpartition(":")
    if origin.endswith(".keras"):
        if not Path(origin).is_file():
            raise UsageError(f"there is no file {origin}")
        loaded: object = need("anycell.keras.exported", "a .keras file").load(origin)
        return loaded
    if not path.endswith(".py"):
        raise UsageError(f"{origin}: expected path/to/file.py:NAME of a model, or a .keras file")
    defined = vars(_module(Path(path)))
    if name not in defined:
        names = sorted(known for known in defined if not known.startswith("_"))
        raise UsageError(f"{path} defines no {name!r}{did_you_mean(name, names)}")
    return defined[name]


def find_cells(path: str = "") -> dict[str, Cell]:
    """The cells that a file has, by their names; without a file those of ``anycell.cells``."""
    defined = vars(_module(Path(path)) if path else cells)
    return {n: v for n, v in defined.items() if not n.startswith("_") and isinstance(v, Cell)}


@cache
def _module(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"_anycell_cell_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # so that inspect and linecache find the cell's source
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)  # the file may import its neighbours, as a script may
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's error, without a traceback through our code
        raise UsageError(_one_line(path, error)) from error
    finally:
        sys.path.remove(folder)
    return module


def _one_line(path: Path, error: Exception) -> str:
    """The error in one line, with the last line of the file that it came through."""
    if isinstance(error, CellError):  # its message names its place
        return str(error)
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f":{frame.lineno}" for frame in frames if Path(frame.filename) == path]
    return f"{path}{''.join(lines[-1:])}: {type(error).__name__}: {error}"
