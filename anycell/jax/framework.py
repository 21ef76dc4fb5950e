"""JAX's arrays on the CPU for ``anycell.layer``, and the passes of layers in JAX's graphs.

In a traced program arrays have shapes, but no memory yet. So a pass is drafted from the shapes, and
XLA runs it by a foreign function, see ``anycell/engines/cpu/xla.py``.
"""

from __future__ import annotations

import ctypes
import functools
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from anycell.engines import cpu
from anycell.engines.cpu import driver, isa, jit, xla
from anycell.engines.cpu.kernel import Kernel
from anycell.engines.cpu.sources import fingerprint
from anycell.lang.namespaces import KNOWN, Namespace
from anycell.layer.checks import describe, refuse
from anycell.layer.framework import Framework
from anycell.layer.recipe import Recipe, dense
from anycell.layer.signature import FLAGS, Shape
from anycell.numpy.check import numpy_dtype
from anycell.plan import Options

Array = Any
NAMESPACE = KNOWN["jax"] = KNOWN["jaxlib"] = Namespace(
    jnp,
    array=lambda value, like: jnp.asarray(value, like.dtype),
    sigmoid=jax.nn.sigmoid,
    erf=jax.lax.erf,
    stop_gradient=jax.lax.stop_gradient,
    round=jnp.rint,
)


def known(array: Array) -> bool:
    """Whether NumPy can read the values of an array now; JAX, while it traces, reads none."""
    return not isinstance(array, jax.core.Tracer)


def as_arrays(values: Any) -> Any:
    """NumPy's arrays in a tree as JAX's."""
    return jax.tree.map(lambda a: jnp.asarray(a) if isinstance(a, np.ndarray) else a, values)


def refuse_kind(name: str, value: Any, expected: str) -> NoReturn:
    """Refuses a value that is no array."""
    hint = f"Pass jnp.asarray({name})."
    if isinstance(value, jax.ShapeDtypeStruct):
        hint = "Pass an array; jax.eval_shape calls functions with shapes."
    refuse(name, describe(value), f"an array, {expected}", hint, TypeError)


def check_key(name: str, value: Any, expected: str) -> Array:
    """Returns a key of ``jax.random`` of either kind; refuses several, and what is none."""
    key = as_arrays(value)
    if not isinstance(key, jax.Array):
        refuse(name, describe(value), expected, "Pass jax.random.key(0), for instance.", TypeError)
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not typed and (key.dtype != jnp.uint32 or not key.ndim or key.shape[-1] < 2):
        refuse(name, describe(value), expected, "Pass jax.random.key(0), for instance.", TypeError)
    if key.ndim > (not typed):
        count = f"{describe(value)}, which is several keys"
        refuse(name, count, expected, "Pass a single key, or use jax.vmap.", TypeError)
    return key


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
        value = Buffer.read(value)
        if isinstance(value, jax.Array):
            self.values = jnp.asarray(self.values).at[index].set(value)
        else:
            self.values[index] = value

    @staticmethod
    def read(array: Array) -> Array:
        """The values of a buffer; other arrays are returned as they are."""
        return array.values if isinstance(array, Buffer) else array


class Jax(Framework):
    """JAX's arrays of one dtype."""

    kind, xp = jax.Array, NAMESPACE
    dtype: np.dtype[Any]
    dtype_named = staticmethod(numpy_dtype)

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

    def strides(self, array: Array, /) -> Shape:
        return dense(array.shape)

    def zeros(self, shape: Shape) -> Buffer:
        return Buffer(np.zeros(shape, self.dtype))

    def template(self, shape: Shape) -> Shape:
        return shape

    lasting = zeros  # ``trace`` looks at its dtype and shape alone
    empty = zeros  # what is still unset when a traced value is written is a constant of the program

    def like(self, array: Shape, /) -> Buffer:
        return self.zeros(array)

    def pointer(self, array: Buffer, /) -> int:
        return int(array.values.__array_interface__["data"][0])

    def trace(self, recipe: Recipe, given: list[Array], options: Options) -> list[Array]:
        """Puts a pass into the graph; see ``Framework``."""
        made = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in _results(recipe)]
        call = jax.ffi.ffi_call(_target(), made, input_output_aliases=recipe.aliases)
        seed = []
        if isinstance(options.seed, Seed):
            words = options.seed.words
            seed = [jnp.zeros(3, words.dtype).at[: words.size].set(words)]
        return list(call(*given, *seed, recipe=_record(recipe, options.stream)))

    @classmethod
    def check_array(
        cls, name: str, value: Any, shape: Sequence[Any], axes: str, like: Array
    ) -> Array:
        """Returns ``value``; refuses all but arrays of this shape and of ``like``'s dtype."""
        value, expected = as_arrays(value), f"{like.dtype} [{', '.join(map(str, shape))}], {axes}"
        if not isinstance(value, jax.Array):
            refuse_kind(name, value, expected)
        if value.shape != tuple(shape):
            hint = "Reshape it, or broadcast it."
            if name in ("state", "reset_state") and (value.ndim, len(shape)) == (3, 2):
                hint = "The input has no batch; if it is one step of a batch, pass x[None]."
            refuse(name, describe(value), expected, hint)
        if value.dtype != like.dtype:
            refuse(name, describe(value), expected, f"Convert it: {name}.astype({like.dtype}).")
        return value

    @classmethod
    def check_flags(
        cls, name: str, value: Any, shape: Sequence[Any], axes: str, like: Array
    ) -> Array:
        """Converts flags of this shape to bool: from bool, or where they are not a mask, from any
        real dtype. Values that can be read must be 0 or 1; in a traced program every value but 0 is
        True.
        """
        value, expected = as_arrays(value), f"bool {list(shape)}, {axes}"
        if not isinstance(value, jax.Array):
            refuse_kind(name, value, expected)
        if value.shape != tuple(shape):
            turned = len(shape) == 2 and value.shape == tuple(shape)[::-1]
            hint = f"Transpose it: {name}.T." if turned else "Pass one flag per step and row."
            refuse(name, describe(value), expected, hint)
        if value.dtype == jnp.bool_:
            return value
        if (name == "mask" and value.dtype != jnp.uint8) or jnp.issubdtype(
            value.dtype, jnp.complexfloating
        ):
            refuse(name, describe(value), expected, f"Cast it: {name}.astype(bool).", TypeError)
        if known(value) and not np.isin(np.asarray(value), (0, 1)).all():
            hint = f"Say which values are meant, as in {name} > 0.5."
            refuse(name, describe(value), f"{expected}, or 0 and 1", hint)
        return value != 0

    @classmethod
    def check_counts(cls, name: str, value: Any, expected: str) -> tuple[Array, bool]:
        """Lengths as an array of integers, and whether their values can be read."""
        try:
            counts = np.asarray(value) if known(value) else value
        except (TypeError, ValueError):
            refuse(name, describe(value), expected, "Pass a list of int, or an array.", TypeError)
        if counts.size and not jnp.issubdtype(counts.dtype, jnp.integer):
            refuse(name, describe(counts), expected, f"Cast them: {name}.astype(int).", TypeError)
        if not counts.size:  # NumPy makes reals of an empty list
            counts = counts.astype(np.int32)
        return counts, known(value)

    @classmethod
    def below(cls, steps: int, counts: Array, like: Array) -> Array:
        # Lengths of a traced program may be anything, and must not wrap to 32 bits.
        most = min(jnp.iinfo(counts.dtype).max, jnp.iinfo(jnp.int32).max)
        return jnp.arange(steps, dtype=jnp.int32)[:, None] < counts.clip(0, most).astype(jnp.int32)


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
