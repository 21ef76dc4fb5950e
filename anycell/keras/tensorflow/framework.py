"""TensorFlow's tensors for ``anycell.layer``, by way of NumPy's arrays on memory of both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from anycell.engines import cpu
from anycell.keras.call import Tensor, flags
from anycell.lang.namespaces import KNOWN, Namespace
from anycell.layer.checks import describe, dtype_of, refuse
from anycell.layer.signature import Shape
from anycell.numpy.framework import Array, Numpy

NAMESPACE = KNOWN["tensorflow"] = Namespace(
    tf.experimental.numpy,
    array=lambda value, like: tf.convert_to_tensor(value, like.dtype),
    cast=tf.cast,
    sigmoid=tf.sigmoid,
    erf=tf.math.erf,
    stop_gradient=tf.stop_gradient,
    round=tf.round,
    numbers=lambda array: array.numpy().astype(np.float64),
    steps=tf.unstack,
    split=lambda array, sizes: tf.split(array, sizes, -1),
)
LINE = 64  # bytes: TensorFlow copies memory unless it begins at a multiple of this


class TensorFlow(Numpy):
    """TensorFlow's tensors of one dtype, which passes read and write as NumPy's arrays. Those that
    a pass makes begin on a cache line.
    """

    kind, xp = tf.Tensor, NAMESPACE

    def empty(self, shape: Shape) -> Array:
        """Returns uninitialized memory, from warm blocks if it is large."""
        size = math.prod(shape) * self.dtype.itemsize
        block = cpu.memory.empty((size + LINE,), "uint8")
        start = -block.__array_interface__["data"][0] % LINE  # saves the call of ``pointer``
        return block[start : start + size].view(self.dtype).reshape(shape)

    def zeros(self, shape: Shape) -> Array:
        array = self.empty(shape)
        array[...] = 0
        return array

    lasting = empty  # which uses warm blocks already

    def like(self, array: Array, /) -> Array:
        return self.empty(array.shape)

    def narrow(self, array: Array) -> Array:
        if self.wide is self or array.dtype == self.dtype:
            return array
        narrow = self.empty(array.shape)
        with np.errstate(over="ignore"):  # a scaled loss may overflow to infinity
            narrow[...] = array
        return narrow

    @classmethod
    def check_array(
        cls, name: str, value: Any, shape: Sequence[Any], axes: str, like: Tensor
    ) -> Tensor:
        """Returns ``value``; refuses all but tensors of this shape, as far as it is known, and of
        ``like``'s dtype.
        """
        expected = f"{dtype_of(like)} {list(shape)}, {axes}"
        if not isinstance(value, tf.Tensor):
            hint = f"Pass tf.convert_to_tensor({name})."
            refuse(name, describe(value), f"a tensor, {expected}", hint, TypeError)
        if not value.shape.is_compatible_with(shape):
            refuse(name, describe(value), expected, "Reshape it, or broadcast it.")
        if value.dtype != like.dtype:
            hint = f"Convert it: tf.cast({name}, tf.{dtype_of(like)})."
            refuse(name, describe(value), expected, hint)
        return value

    @classmethod
    def check_flags(
        cls, name: str, value: Any, shape: Sequence[Any], axes: str, like: Tensor
    ) -> Tensor:
        """Converts flags of this shape to bool; outside of graphs, their values must be 0 or 1."""
        tensor = tf.convert_to_tensor(value)
        if not tensor.shape.is_compatible_with(shape):
            turned = tensor.shape.rank == 2 and tensor.shape[::-1].is_compatible_with(shape)
            hint = (
                f"Transpose it: tf.transpose({name})." if turned else "Pass one per step and row."
            )
            refuse(name, describe(tensor), f"bool {list(shape)}, {axes}", hint)
        return flags(name, tensor)

    @classmethod
    def check_counts(cls, name: str, value: Any, expected: str) -> tuple[Any, bool]:
        try:
            counts = np.asarray(value)
        except (TypeError, ValueError):
            refuse(name, describe(value), expected, "Pass a list of int, or a tensor.", TypeError)
        if counts.size and counts.dtype.kind not in "iu":
            refuse(name, describe(counts), expected, "Cast them to tf.int32.", TypeError)
        return counts.astype(np.int64), True

    @classmethod
    def copy_flags(cls, flags: Tensor) -> Tensor:
        return flags  # tensors never change

    @classmethod
    def below(cls, steps: int, counts: Any, like: Tensor) -> Tensor:
        return cls.within(tf.shape(like)[0], tf.constant(counts[0]))

    @classmethod
    def within(cls, steps: Any, lengths: Tensor) -> Tensor:
        """Marks the steps within lengths that only the graph knows, ``[T, B]``."""
        if not lengths.dtype.is_integer or not lengths.shape.is_compatible_with((None,)):
            expected = "integers [B], the number of steps of each row"
            refuse("lengths", describe(lengths), expected, "Pass one length per row of the input.")
        return tf.range(tf.cast(steps, lengths.dtype))[:, None] < lengths[None]


def sizes_of(x: Tensor, axes: int) -> list[Any]:
    """The sizes of the first axes: numbers, or tensors where the graph does not know them."""
    return [tf.shape(x)[k] if n is None else n for k, n in enumerate(x.shape.as_list()[:axes])]


def as_tensor(array: Array) -> Tensor:
    """Returns an eager tensor, on the array's own memory if possible."""
    if array.nbytes < 1 << 14 or array.ctypes.data % LINE or not array.flags.c_contiguous:
        return tf.constant(array)
    if array.dtype.kind == "V":  # bfloat16, which NumPy does not export as such
        return tf.bitcast(_shared(array.view(np.uint16)), tf.bfloat16)
    return _shared(array)


def _shared(array: Array) -> Tensor:
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
