"""JAX's arrays on the CPU for ``anycell.layer``, and the passes of layers in JAX's graphs.

In a traced program arrays have shapes, but no memory yet. So a pass is drafted from the shapes, and
XLA runs it by a foreign function, see ``anycell/engines/cpu/xla.py``.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anycell.engines import cpu
from anycell.engines.cpu import driver, isa, jit, xla
from anycell.engines.cpu.kernel import Kernel
from anycell.engines.cpu.sources import fingerprint
from anycell.layer.recipe import Recipe, dense
from anycell.layer.signature import FLAGS
from anycell.numpy.host import numpy_dtype
from anycell.plan import DTYPES, Options

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


class Buffer:
    """An array to write to: NumPy's until a traced value is written."""

    def __init__(self, values: Array) -> None:
        self.values, self.shape, self.dtype = values, values.shape, values.dtype

    def __getitem__(self, index: Any) -> Array:
        return self.values[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(value, jax.Array):
            self.values = jnp.asarray(self.values).at[index].set(value)
        else:
            self.values[index] = value

    @staticmethod
    def read(array: Array) -> Array:
        """The values of a buffer; other arrays are returned as they are."""
        return array.values if isinstance(array, Buffer) else array


class JaxHost:
    """A ``layer.Host`` for arrays of one dtype. For 16 bits, ``wide`` is the host of the dtype that
    cells compute in.
    """

    wide_states, blas = True, 0

    def __init__(self, dtype: np.dtype[Any], wide: JaxHost | None = None) -> None:
        self.dtype = dtype
        self.wide: JaxHost = self if wide is None else wide

    # ---- the arrays of a call --------------------------------------------------------------------
    def fit(self, array: Array, layout: int, wide: bool = False) -> Array | None:
        return array if array.dtype == (self.wide if wide else self).dtype else None

    def layout(self, arrays: Mapping[Any, Array]) -> tuple[Any, ...]:
        return tuple((n, a.shape, str(a.dtype)) for n, a in arrays.items() if n not in FLAGS)

    def as_flags(self, array: Array) -> Array | None:
        return array.astype(jnp.uint8) if array.dtype in (jnp.bool_, jnp.uint8) else None

    def widen(self, array: Array) -> Array:
        return array.astype(self.wide.dtype)

    def narrow(self, array: Array) -> Array:
        return Buffer.read(array).astype(self.dtype)

    def strides(self, array: Array) -> tuple[int, ...]:
        return dense(array.shape)

    def split(self, array: Array, sizes: Sequence[int]) -> list[Array]:
        ends = itertools.accumulate(sizes)
        return [array[end - size : end] for end, size in zip(ends, sizes, strict=True)]

    # ---- the arrays that a pass makes ------------------------------------------------------------
    def zeros(self, shape: tuple[int, ...]) -> Buffer:
        return Buffer(np.zeros(shape, self.dtype))

    def template(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    lasting = like = zeros  # ``trace`` looks at their dtype and shape alone
    empty = zeros  # what is still unset when a traced value is written is a constant of the program

    def pointer(self, array: Buffer) -> int:
        return int(array.values.__array_interface__["data"][0])

    def trace(self, recipe: Recipe, given: list[Array], options: Options) -> list[Array]:
        """Puts a pass into the graph; see ``layer.Host``."""
        made = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in _results(recipe)]
        call = jax.ffi.ffi_call(_target(), made, input_output_aliases=recipe.aliases)
        seed = []
        if isinstance(options.seed, Seed):
            words = options.seed.words
            seed = [jnp.zeros(3, words.dtype).at[: words.size].set(words)]
        return list(call(*given, *seed, recipe=_record(recipe, options.stream)))


@functools.cache
def host_of(dtype: str) -> Any:
    """The host for arrays of a dtype that has a row in ``DTYPES``."""
    types = DTYPES[dtype]
    wide = host_of(types.math.name) if types.mixed else None
    return JaxHost(numpy_dtype(types.storage.name), wide)


@functools.cache
def _target() -> str:
    """The name of the foreign function, which is another where records are others."""
    name = f"anycell_{(fingerprint() or secrets.token_hex())[:16]}"
    handler = jax.ffi.pycapsule(ctypes.c_void_p(xla.handler()))
    jax.ffi.register_ffi_target(name, handler, platform="cpu")
    return name


def _results(recipe: Recipe) -> list[tuple[tuple[int, ...], Any]]:
    """The shapes and dtypes of the arrays that a pass makes."""
    return [(shape, dtype) for (_, shape), dtype in zip(recipe.made, recipe.dtypes, strict=True)]


def _record(recipe: Recipe, stream: int) -> Any:
    """Describes a pass for the foreign function; see ``xla.RECORD``."""
    zeroed = [
        (i, math.prod(shape) * dtype.itemsize)
        for i, (shape, dtype) in enumerate(_results(recipe))
        if recipe.hows[i] == "zeros"
    ]
    name, target = xla.process().name, isa.current()
    native: Any = recipe.native
    execute = ctypes.cast(native, ctypes.c_void_p).value or 0
    dtype = recipe.passes[0].plan.types
    *_, threads = (one.threads for one in recipe.passes)
    gang = cpu.pool.own_gang(threads)
    kept: list[Any] = [
        name(f"door {one.library.name}", one.address) if isinstance(one, Kernel) else one
        for one, _ in recipe.kept
    ]
    numbers = {
        "execute": name(f"execute {jit.name(*driver.request(dtype, target))}", execute),
        "gang": name(f"gang {threads}", gang) if gang else 0,
        "read": len(recipe.names), "made": len(recipe.made), "kept": len(kept),
        "table": recipe.table, "bytes": recipe.bytes, "stream": stream,
        "first": recipe.head[-1],
    }  # fmt: skip
    constants = [Buffer.read(values) for values in recipe.constants]
    places = [*recipe.places, *recipe.fastened]
    return xla.record(numbers, _relative(recipe), places, [*constants, *kept], zeroed)


def _relative(recipe: Recipe) -> list[int]:
    """The tables of a recipe, without addresses."""
    template = list(recipe.template)
    for at, *_ in recipe.fastened:
        template[at] = 0
    return template
