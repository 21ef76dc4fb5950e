"""The array namespace of an array: numpy, torch, jax.numpy or tensorflow.experimental.numpy.

Looked up by the array's type among the modules that are already imported, so nothing is imported
for a framework that the caller does not use. The namespaces agree on nearly all names; a
``Namespace`` adds the few things that each spells in its own way.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any  # of any framework


@dataclass(frozen=True)
class Namespace:
    """A framework's array functions, with NumPy's names.

    Attributes:
        module: has every function that is not listed below.
        array: ``array(value, like)`` turns a number or NumPy array into an array like ``like``.
        cast: ``cast(array, "float32")``.
        sigmoid, erf, stop_gradient, round: functions of one array; ``round`` rounds halves to even.
        numbers: converts an array to a NumPy array of float64.
        softplus: a function that all exporters know; if None, ``logaddexp`` with 0 replaces it.
        steps: the parts of an array along the first axis.
        unchecked: a context in which infinity and NaN raise no warnings, as in compiled code.
    """

    module: Any
    array: Callable[[Any, Array], Array]
    sigmoid: Callable[[Array], Array]
    erf: Callable[[Array], Array]
    round: Callable[[Array], Array]
    cast: Callable[[Array, str], Array] = lambda array, dtype: array.astype(dtype)
    stop_gradient: Callable[[Array], Array] = lambda array: array
    numbers: Callable[[Array], Array] = lambda array: np.asarray(array).astype(np.float64)
    softplus: Callable[[Array], Array] | None = None
    steps: Callable[[Array], Sequence[Array]] = lambda array: array
    unchecked: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def namespace(array: Array) -> Namespace:
    """The namespace of ``array``, which may be a tracer or an instance of a subclass.

    Raises:
        TypeError: if ``array`` belongs to none of the frameworks known here.
    """
    for kind in type(array).__mro__:
        make = _MAKERS.get(kind.__module__.partition(".")[0])
        if make is not None:
            return make()
    known = "NumPy, PyTorch, JAX, TensorFlow"
    raise TypeError(f"expected an array of {known}; given {type(array).__name__}.")


def _numpy() -> Namespace:
    return Namespace(
        np,
        array=lambda value, like: np.asarray(value, like.dtype),
        sigmoid=_sigmoid,
        erf=_erf,
        round=np.rint,
        unchecked=lambda: np.errstate(all="ignore"),
    )


def _sigmoid(a: Array) -> Array:
    small = np.exp(-np.abs(a))  # never overflows
    return np.where(a < 0, small, np.ones_like(small)) / (1 + small)


def _erf(a: Array) -> Array:  # NumPy has none
    return np.vectorize(math.erf, otypes=[np.float64])(a).astype(np.asarray(a).dtype)


def _torch() -> Namespace:
    torch = sys.modules["torch"]

    def array(value: Any, like: Array) -> Array:
        if like.is_cuda and isinstance(value, (int, float)):  # a copy from the host would wait
            return torch.full((), value, dtype=like.dtype, device=like.device)
        return torch.asarray(value, dtype=like.dtype, device=like.device)

    return Namespace(
        torch,
        array=array,
        cast=lambda array, dtype: array.to(getattr(torch, dtype)),
        sigmoid=torch.sigmoid,
        erf=torch.erf,
        stop_gradient=lambda array: array.detach(),
        round=torch.round,
        numbers=lambda array: array.detach().to("cpu", torch.float64).numpy(),
        # Above the threshold softplus returns its argument; at 40 that is exact even in float64.
        softplus=lambda array: torch.nn.functional.softplus(array, threshold=40.0),
        # Not by indexing: the gradient of each index would be an array of all steps.
        steps=torch.unbind,
    )


def _jax() -> Namespace:
    jax = sys.modules["jax"]
    return Namespace(
        jax.numpy,
        array=lambda value, like: jax.numpy.asarray(value, like.dtype),
        sigmoid=jax.nn.sigmoid,
        erf=jax.lax.erf,
        stop_gradient=jax.lax.stop_gradient,
        round=jax.numpy.rint,
    )


def _tensorflow() -> Namespace:
    tf = sys.modules["tensorflow"]
    return Namespace(
        tf.experimental.numpy,
        array=lambda value, like: tf.convert_to_tensor(value, like.dtype),
        cast=tf.cast,
        sigmoid=tf.sigmoid,
        erf=tf.math.erf,
        stop_gradient=tf.stop_gradient,
        round=tf.round,
        numbers=lambda array: array.numpy().astype(np.float64),
    )


_MAKERS: dict[str, Callable[[], Namespace]] = {
    "numpy": _numpy,
    "torch": _torch,
    "jax": _jax,
    "jaxlib": _jax,
    "tensorflow": _tensorflow,
}
