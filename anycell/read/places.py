"""Places in the user's code: the file and line that a reason names."""

from __future__ import annotations

import dis
import functools
import inspect
import os
import sys
import sysconfig
import traceback
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

# Folders whose code is not the user's; frontends add their frameworks.
SKIPPED = [str(Path(__file__).parents[1])]
_LIBRARY, _PACKAGES = (sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib"))


def skip(*modules: object) -> None:
    """Counts the code of a framework as none of the user's."""
    SKIPPED.extend(str(Path(str(vars(module)["__file__"])).parent) for module in modules)
    _of_user.cache_clear()


@functools.lru_cache(maxsize=1024)
def _of_user(file: str) -> bool:
    if file.startswith("<"):
        return file == "<stdin>"
    of_python = file.startswith(_LIBRARY) and not file.startswith(_PACKAGES)
    return not of_python and not file.startswith(tuple(folder + os.sep for folder in SKIPPED))


def place(frames: Iterable[tuple[str, int | None]]) -> str:
    """The first of these files and lines that is the user's; "" if none is."""
    return next((f"{os.path.basename(file)}:{line}" for file, line in frames if _of_user(file)), "")


def here() -> str:
    """The user's line that runs."""
    frames = traceback.walk_stack(sys._getframe())
    return place((frame.f_code.co_filename, line) for frame, line in frames)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Code, and that of the functions inside it."""
    yield code
    for inside in code.co_consts:
        if isinstance(inside, types.CodeType):
            yield from _codes(inside)


@functools.lru_cache(maxsize=1024)
def operations(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The names of the instructions of code, functions inside it included, and those that it has of
    variables and attributes.
    """
    instructions = {i.opname for c in _codes(code) for i in dis.get_instructions(c)}
    return frozenset(instructions), frozenset(name for c in _codes(code) for name in c.co_names)


@functools.lru_cache(maxsize=1024)
def module_variables(code: types.CodeType) -> frozenset[str]:
    """The variables of its module that code reads or sets, functions inside it included.

    ``co_names`` has the names of attributes among them.
    """
    instructions = (i for c in _codes(code) for i in dis.get_instructions(c))
    return frozenset(i.argval for i in instructions if "GLOBAL" in i.opname)


def raised(error: BaseException) -> str:
    """The user's line that raised an error."""
    frames = traceback.extract_tb(error.__traceback__)
    return place((frame.filename, frame.lineno) for frame in reversed(frames))


def definition(function: Any) -> str:
    """The file and line where a function begins, "" for one that is not written in Python."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code else ""
