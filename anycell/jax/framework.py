"""JAX's arrays on the CPU for ``anycell.layer``, and the passes of layers in JAX's graphs."""

from __future__ import annotations

import ctypes
import functools
import secrets
from collections.abc import Sequence
from operator import add, getitem, matmul, mul, neg, truediv
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from anycell.engines.cpu import xla
from anycell.engines.cpu.sources import fingerprint
from anycell.lang.namespaces import KNOWN, Namespace
from anycell.layer import foreign
from anycell.layer.checks import describe, refuse
from anycell.layer.foreign import Seed, TracedFramework
from anycell.layer.recipe import Recipe, dense
from anycell.layer.signature import Shape
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

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.values

    @staticmethod
    def read(array: Array) -> Array:
        """The values of a buffer; other arrays are returned as they are."""
        return array.values if isinstance(array, Buffer) else array


class Part(NamedTuple):
    """A block of a matrix, or its transpose.

    Attributes:
        rows, columns: the first, and the one after the last.
    """

    rows: tuple[int, int]
    columns: tuple[int, int]
    turned: bool = True

    def of(self, matrix: Array) -> Array:
        block = matrix[slice(*self.rows), slice(*self.columns)]
        return block.T if self.turned else block

    def padded(self, block: Array, shape: Sequence[int]) -> Array:
        """The gradient of a matrix of this shape, from that of the block."""
        ends = zip((self.rows, self.columns), shape, strict=True)
        return jnp.pad(block.T if self.turned else block, [(a, n - b) for (a, b), n in ends])


class Stored:
    """A part of a matrix, which a kernel reads where it is stored; computed where it must be."""

    def __init__(self, matrix: Array, part: Part) -> None:
        self.matrix, self.part, self.dtype = matrix, part, matrix.dtype
        shape = tuple(b - a for a, b in part[:2])
        self.shape = shape[::-1] if part.turned else shape

    @property
    def T(self) -> Array:
        turned = Stored(self.matrix, self.part._replace(turned=not self.part.turned))
        return self.matrix if turned.part == whole(self.matrix, False) else turned

    def __jax_array__(self) -> Array:
        return self.part.of(self.matrix)

    # What is computed of a part is an array of its own.
    __neg__, __getitem__, __add__, __mul__, __truediv__, __matmul__ = (
        lambda self, *other, f=f: f(jnp.asarray(self), *other)
        for f in (neg, getitem, add, mul, truediv, matmul)
    )


def whole(matrix: Array, turned: bool = True) -> Part:
    """All of a matrix."""
    return Part((0, matrix.shape[0]), (0, matrix.shape[1]), turned)


class Jax(TracedFramework):
    """JAX's arrays of one dtype."""

    kind, xp, buffer = jax.Array, NAMESPACE, Buffer
    dtype_named = staticmethod(numpy_dtype)

    def as_flags(self, array: Array) -> Array | None:
        return array.astype(jnp.uint8) if array.dtype in (jnp.bool_, jnp.uint8) else None

    def narrow(self, array: Array) -> Array:
        return Buffer.read(array).astype(self.dtype)

    def strides(self, array: Array, /) -> Shape:
        if not isinstance(array, Stored):
            return dense(array.shape)
        strides = dense(array.matrix.shape)
        return strides[::-1] if array.part.turned else strides

    def offset(self, array: Array, /) -> int:
        if not isinstance(array, Stored):
            return 0
        part = array.part
        return int(part.rows[0] * array.matrix.shape[1] + part.columns[0])

    def trace(self, recipe: Recipe, given: list[Array], options: Options) -> list[Array]:
        """Puts a pass into the graph; see ``Framework``."""
        given = [array.matrix if isinstance(array, Stored) else array for array in given]
        made = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in foreign.results(recipe)]
        call = jax.ffi.ffi_call(_target(), made, input_output_aliases=recipe.aliases)
        seed = []
        if isinstance(options.seed, Seed):
            words = options.seed.words
            seed = [jnp.zeros(3, words.dtype).at[: words.size].set(words)]
        return list(call(*given, *seed, recipe=foreign.record(recipe, options.stream)))

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
