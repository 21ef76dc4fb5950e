"""Weights that are packed for ``step``, and who must pack them again."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from anycell.engines import cpu
from anycell.engines.cpu.driver import CALL, OBJECTS, OF_CALL
from anycell.layer.checks import refuse
from anycell.layer.stream import Prepared, Step, Stream, Writes, names_of, steps
from anycell.numpy import threads
from anycell.numpy.framework import Numpy

Array = npt.NDArray[Any]


# By the ``id`` of an array from which weights are packed. What was packed keeps both alive.
_WRITES: weakref.WeakValueDictionary[int, Writes] = weakref.WeakValueDictionary()
_LOCK = Lock()


class Packed(Prepared):
    """The packed weights of a layer, and the very arrays that they were packed from.

    Attributes:
        again: by the shape of x, what runs steps like an earlier one; None where nothing does.
    """

    def __init__(self, layer: Any) -> None:
        arrays, self.again = layer._parameters, dict[tuple[int, ...], Again | None]()
        places = [(vars(layer), "_parameters"), *((arrays, n) for n in {*arrays, *names_of(layer)})]
        with _LOCK:
            ids = [id(_memory(array)) for array in arrays.values()]
            writes = [_WRITES.setdefault(key, Writes()) for key in ids]
        stream = None
        if steps(layer.plan):
            weights = [layer._learned(k) for k in range(layer.num_layers)]
            stream = Stream(Numpy.of(layer.dtype.name), layer.plan, weights, threads.current())
        super().__init__(layer, places, writes, stream)


class Again:
    """Steps like an earlier one, from a state and without other arrays, in one thread: as little
    Python as possible. Native code reads the addresses of arrays from their objects.
    """

    def __init__(self, stream: Stream, arrays: Sequence[Array], step: Step) -> None:
        recipe, self.dtype = step.recipe, arrays[0].dtype
        self.shapes = [array.shape for array in arrays]
        self.output, self.finals, self.fixed = step.output, step.finals, recipe.fixed
        self.templates = [np.empty(what.shape, what.dtype) for _, what in recipe.made]
        functions = cpu.driver.compiled(stream.plan.dtype, cpu.isa.current())
        self.native, self.size, self.table = functions.execute_objects, recipe.bytes, recipe.table
        count = len(arrays) + len(self.templates)
        numbers = count + len(self.fixed) + len(CALL) + len(OF_CALL)
        self.pack, self.recipe = struct.Struct(f"{len(OBJECTS) + numbers}q").pack, recipe
        self.idle, self.head = list[cpu.Block](), (count, after(), recipe.address)

    @classmethod
    def of(cls, stream: Stream, arrays: Sequence[Array]) -> Again | None:
        """Steps like one with these arrays, if they take one thread however many there are."""
        if cpu.check.ON or not after():
            return None
        step = stream.step_of(cpu.pool.MOST, arrays)
        single = step.recipe.options.threads == 1 and {*step.recipe.hows} == {"like"}
        return cls(stream, arrays, step) if single else None

    def __call__(self, x: Any, state: Any) -> tuple[Array, Any] | None:
        """The results, or None for arrays that are not like those of the earlier step."""
        arrays = (x, *state) if type(state) is tuple else (x, state)
        if len(arrays) != len(self.shapes):
            return None
        dtype = self.dtype
        for array, shape in zip(arrays, self.shapes):  # noqa: B905  (runs at every step)
            if type(array) is not np.ndarray or array.dtype is not dtype or array.shape != shape:
                return None
            if not array.flags.carray:
                return None
        made = list(map(np.empty_like, self.templates))
        try:
            block = self.idle.pop()
        except IndexError:
            block = cpu.Block(self.size)
        table = block.address + self.table
        objects = *map(id, arrays), *map(id, made), *self.fixed
        self.native(self.pack(*self.head, table, *objects, block.address, table, 0, 0, 0, 0))
        self.idle.append(block)
        output, finals = made[self.output], self.finals
        if len(finals) == 1:
            return output, made[finals[0]]
        return output, tuple([made[final] for final in finals])


@functools.cache
def after() -> int:
    """The bytes from the begin of an array's object to the address of its numbers; 0 if unknown."""
    array, place = np.empty(1), object.__basicsize__
    if sys.implementation.name != "cpython":
        return 0
    known = ctypes.c_void_p.from_address(id(array) + place).value == array.ctypes.data
    return place if known else 0


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
