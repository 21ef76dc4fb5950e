"""Cells made from text, which they keep: a program that prints a cell runs and pickles it so."""

from __future__ import annotations

import functools
import hashlib
import linecache
from typing import Any

from anycell import lang
from anycell.lang.cell import Cell
from anycell.lang.expr import fail


@functools.lru_cache(maxsize=256)
def from_text(text: str) -> Cell:
    """Returns the cell that ``text`` defines: an ``@cell`` and its function.

    The text sees the names that ``anycell`` exports for cells: ``cell``, ``linear``, ``tanh`` and
    so on. It runs as a program, so pass no text that you would not run. Equal texts give the same
    cell, whose pickle is the text (``Cell.text``); errors show the text's lines.

    Raises:
        CellError: if the text does not define one cell, or one that cannot be expressed.
        SyntaxError: if the text is not Python.
    """
    file = f"<cell {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    lines = text.splitlines(keepends=True)
    linecache.cache[file] = len(text), None, lines, file  # no time: it is never read again
    namespace = {name: getattr(lang, name) for name in lang.__all__}
    namespace |= {"__name__": file, "__text__": text, "__restore__": _restore}
    exec(compile(text, file, "exec"), namespace)
    made = {
        value
        for value in namespace.values()
        if isinstance(value, Cell) and value.function.__code__.co_filename == file
    }
    if len(made) != 1:
        fail(
            f"from_text: given a text that defines {len(made)} cells; expected one.",
            'give an "@cell(...)" and its function.',
        )
    return made.pop()


def _restore(text: str, given: dict[str, Any]) -> Cell:
    """Makes a cell from its pickle."""
    return from_text(text)(**given)
