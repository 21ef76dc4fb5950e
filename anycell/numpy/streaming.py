"""Weights that are packed for ``step``, and who must pack them again."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from anycell.engines import cpu
from anycell.layer.checks import refuse
from anycell.layer.recipe import Recipe
from anycell.layer.stream import FORMS, Prepared, Stream, Writes, names_of, steps
from anycell.numpy import threads
from anycell.numpy.framework import Numpy
from anycell.recent import add_recent

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
        weights = [layer._learned(k) for k in range(layer.num_layers)]
        host, on = Numpy.of(layer.dtype.name), threads.current()
        stream = Stream(host, layer.plan, weights, on) if steps(layer.plan) else None
        super().__init__(layer, places, writes, stream)

    def learn(self, arrays: Sequence[Array]) -> None:
        """Adds steps like one with x and states like these, if they take one thread however many
        there are.
        """
        assert self.stream is not None
        step = self.stream.step_of(cpu.pool.MOST, arrays)
        single = step.recipe.options.threads == 1 and not cpu.check.ON
        again = Again(step.recipe, arrays, step.output, step.finals) if single else None
        add_recent(self.again, arrays[0].shape, again, FORMS)


class Again:
    """Calls like an earlier one, with x and states alone, in as little Python as possible.

    Args:
        recipe: of its pass.
        arrays: of the earlier call, in the order of the recipe.
        output, finals: the numbers of its results among the arrays that the pass makes.
        steps: the part of that array that is the output; None for all of it.
    """

    def __init__(
        self, recipe: Recipe, arrays: Sequence[Array], output: int, finals: Sequence[int],
        steps: slice | None = None,
    ) -> None:  # fmt: skip
        self.recipe, self.output, self.finals, self.steps = recipe, output, finals, steps
        self.like = [(array.shape, array.dtype) for array in arrays]

    def __call__(self, x: Any, state: Any, *weights: Array) -> tuple[Array, Any] | None:
        """The results, or None for arrays that are not like those of the earlier call."""
        arrays = (x, *state, *weights) if type(state) is tuple else (x, state, *weights)
        if len(arrays) != len(self.like):
            return None
        for array, (shape, dtype) in zip(arrays, self.like):  # noqa: B905  (runs at every step)
            if type(array) is not np.ndarray or array.dtype != dtype or array.shape != shape:
                return None
            flags = array.flags
            if not (flags.c_contiguous and flags.aligned):
                return None
        recipe, finals = self.recipe, self.finals
        made = recipe.run(arrays, recipe.options)
        output = made[self.output]
        if self.steps is not None:
            output = output[self.steps]
        if len(finals) == 1:
            return output, made[finals[0]]
        return output, tuple([made[final] for final in finals])


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
                array_is = "a read-only array, as object stores and memory maps return them"
                hint = "Copy the layer first: copy.deepcopy(layer)."
                refuse(name, array_is, "an array that can be written to", hint)
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
