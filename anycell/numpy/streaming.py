"""Weights that are packed for ``step``, and who must pack them again."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from anycell.lang.cell import Cell
from anycell.layer.checks import refuse
from anycell.layer.stream import Stream

Array = npt.NDArray[Any]


class _Count:
    """Counts the writes of our own functions to an array."""

    writes = 0


# By the ``id`` of an array from which weights are packed. What was packed keeps both alive.
_COUNTS: weakref.WeakValueDictionary[int, _Count] = weakref.WeakValueDictionary()
_LOCK = threading.Lock()


class Packed:
    """The packed weights of a cell, and the very arrays that they were packed from.

    They serve any layer as long as it has this cell and these arrays, so they may be carried along
    when a layer is copied.

    Attributes:
        stream: runs the steps; None where no kernel does.
    """

    def __init__(self, cell: Cell, arrays: Mapping[str, Array]) -> None:
        self.stream: Stream | None = None
        self.cell, self.arrays = cell, dict(arrays)
        with _LOCK:
            ids = [id(_memory(array)) for array in self.arrays.values()]
            counts = [_COUNTS.setdefault(key, _Count()) for key in ids]
        self.counts = [(count, count.writes) for count in counts]

    def stale(self, cell: Cell, arrays: Mapping[str, Array]) -> bool:
        """Whether a layer has another cell or other arrays, or ours have been written to."""
        if cell is not self.cell or len(arrays) != len(self.arrays):
            return True
        for name, array in self.arrays.items():
            if arrays.get(name) is not array:
                return True
        for count, writes in self.counts:  # noqa: SIM110  (runs at every step)
            if count.writes != writes:
                return True
        return False


@contextlib.contextmanager
def writing(*layers: Mapping[str, Array]) -> Iterator[None]:
    """The context in which each of our functions writes to arrays of layers. After it, all layers
    that have packed these arrays pack them again.

    Raises:
        ValueError: naming an array that is read-only, before anything is written.
    """
    for arrays in layers:
        for name, array in arrays.items():
            if not array.flags.writeable:
                given = "a read-only array, as object stores and memory maps return them"
                hint = "Copy the layer first: copy.deepcopy(layer)."
                refuse(name, given, "an array that can be written to", hint)
    try:
        yield
    finally:
        for arrays in layers:
            for array in arrays.values():
                count = _COUNTS.get(id(_memory(array)))
                if count is not None:
                    count.writes += 1


def _memory(array: Array) -> Array:
    """The array whose memory a view shows."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
