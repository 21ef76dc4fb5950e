"""Weights that are packed for ``step``, and who must pack them again."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from anycell.layer.checks import refuse
from anycell.layer.stream import Prepared, Stream, Writes, names_of, steps
from anycell.numpy import threads
from anycell.numpy.framework import Numpy

Array = npt.NDArray[Any]


# By the ``id`` of an array from which weights are packed. What was packed keeps both alive.
_WRITES: weakref.WeakValueDictionary[int, Writes] = weakref.WeakValueDictionary()
_LOCK = Lock()


class Packed(Prepared):
    """The packed weights of a layer, and the very arrays that they were packed from."""

    def __init__(self, layer: Any) -> None:
        arrays = layer._parameters
        places = [(vars(layer), "_parameters"), *((arrays, n) for n in {*arrays, *names_of(layer)})]
        with _LOCK:
            ids = [id(_memory(array)) for array in arrays.values()]
            writes = [_WRITES.setdefault(key, Writes()) for key in ids]
        weights = [layer._learned(k) for k in range(layer.num_layers)]
        host, on = Numpy.of(layer.dtype.name), threads.current()
        stream = Stream(host, layer.plan, weights, on) if steps(layer.plan) else None
        super().__init__(layer, places, writes, stream)


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
                writes = _WRITES.get(id(_memory(array)))
                if writes is not None:
                    writes.count += 1


def _memory(array: Array) -> Array:
    """The array whose memory a view shows."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
