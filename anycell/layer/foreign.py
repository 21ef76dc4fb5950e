"""Passes in the programs of frameworks that compile with XLA: a recipe as a record.

In a program that is traced, arrays have shapes, but no memory yet. So a pass is drafted from the
shapes, and XLA runs it by a foreign function, see ``anycell/engines/cpu/xla.py``.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from anycell.engines import cpu
from anycell.engines.cpu import driver, isa, jit, xla
from anycell.engines.cpu.driver import Matmul
from anycell.engines.cpu.kernel import Kernel
from anycell.layer.framework import Framework
from anycell.layer.recipe import Recipe, dense
from anycell.layer.signature import FLAGS, Shape

Array = Any


class Seed(int):
    """The seed of a call's random masks, as an array: two numbers of 32 bits, the low one first.
    For a part of a batch, a third one says which of its rows is the first.
    """

    words: Array

    @classmethod
    def of(cls, words: Array) -> Seed:
        seed = cls(1)  # as a number it only says that there is a seed
        seed.words = words
        return seed


class TracedFramework(Framework):
    """The arrays of one dtype of a program that is traced, which are dense.

    Attributes:
        buffer: makes an array to write to from NumPy's: it is NumPy's until an array of the program
            is written.
    """

    buffer: ClassVar[Any]
    dtype: np.dtype[Any]

    def fit(self, array: Array, layout: int, wide: bool = False) -> Array | None:
        return array if array.dtype == (self.wide if wide else self).dtype else None

    def layout(self, arrays: Mapping[Any, Array]) -> tuple[Any, ...]:
        return tuple(
            (name, array.shape, self.strides(array), self.offset(array), str(array.dtype))
            for name, array in arrays.items()
            if name not in FLAGS
        )

    def widen(self, array: Array) -> Array:
        return array.astype(self.wide.dtype)

    def strides(self, array: Array, /) -> Shape:
        return dense(array.shape)

    def zeros(self, shape: Shape) -> Array:
        return self.buffer(np.zeros(shape, self.dtype))

    def template(self, shape: Shape) -> Shape:
        return shape

    lasting = zeros  # ``trace`` looks at its dtype and shape alone
    empty = zeros  # what is still unset when a traced value is written is a constant of the program

    def like(self, array: Shape, /) -> Array:
        return self.zeros(array)

    def pointer(self, array: Array, /) -> int:
        return int(np.asarray(array).__array_interface__["data"][0])


def results(recipe: Recipe) -> list[tuple[Shape, Any]]:
    """The shapes and dtypes of the arrays that a pass makes."""
    return [(shape, dtype) for (_, shape), dtype in zip(recipe.made, recipe.dtypes, strict=True)]


def record(recipe: Recipe, stream: int) -> npt.NDArray[np.int64]:
    """Describes a pass for the foreign function; see ``xla.RECORD``."""
    zeroed = [
        (i, math.prod(shape) * dtype.itemsize)
        for i, (shape, dtype) in enumerate(results(recipe))
        if recipe.hows[i] == "zeros"
    ]
    name, target = xla.process().name, isa.current()
    native: Any = recipe.native
    execute = ctypes.cast(native, ctypes.c_void_p).value or 0
    dtype = recipe.passes[0].plan.types
    *_, threads = (one.threads for one in recipe.passes)
    gang = cpu.pool.own_gang(threads)
    kept: list[Any] = [
        name(f"code {one.library.name}", one.address) if isinstance(one, Kernel | Matmul) else one
        for one, _ in recipe.kept
    ]
    numbers = {
        "execute": name(f"execute {jit.name(*driver.request(dtype, target))}", execute),
        "gang": name(f"gang {threads}", gang) if gang else 0,
        "read": len(recipe.names), "made": len(recipe.made), "kept": len(kept),
        "table": recipe.table, "bytes": recipe.bytes, "stream": stream,
        "first": recipe.head[-1],
    }  # fmt: skip
    constants = [np.asarray(values) for values in recipe.constants]
    places = [*recipe.places, *recipe.fastened]
    return xla.record(numbers, _relative(recipe), places, [*constants, *kept], zeroed)


def _relative(recipe: Recipe) -> list[int]:
    """The tables of a recipe, without addresses."""
    template = list(recipe.template)
    for at, *_ in recipe.fastened:
        template[at] = 0
    return template
