"""The functions of arrays that the language needs, as each framework has them.

``namespace`` finds those of an array by its type. NumPy's are here; a frontend adds those of its
framework when it is imported. Frameworks agree on nearly all names; a ``Namespace`` adds the few
things that each spells in its own way.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any  # of any framework


def _split(array: Array, sizes: Sequence[int]) -> Sequence[Array]:
    ends = itertools.accumulate(sizes)
    return [array[:, end - size : end] for size, end in zip(sizes, ends, strict=True)]


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
        split: the parts of these sizes of a matrix along its last axis.
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
    split: Callable[[Array, Sequence[int]], Sequence[Array]] = _split
    unchecked: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def namespace(array: Array) -> Namespace:
    """The namespace of ``array``, which may be a tracer or an instance of a subclass.

    Raises:
        TypeError: if ``array`` belongs to none of the known frameworks.
    """
    for kind in type(array).__mro__:
        known = KNOWN.get(kind.__module__.partition(".")[0])
        if known is not None:
            return known
    expected = f"an array of {', '.join(KNOWN)}"
    raise TypeError(f"expected {expected}; given {type(array).__name__}. Import its frontend.")


def _sigmoid(a: Array) -> Array:
    small = np.exp(-np.abs(a))  # never overflows
    return np.where(a < 0, small, np.ones_like(small)) / (1 + small)


def _erf(a: Array) -> Array:  # NumPy has none
    return np.vectorize(math.erf, otypes=[np.float64])(a).astype(np.asarray(a).dtype)


NUMPY = Namespace(
    np,
    array=lambda value, like: np.asarray(value, like.dtype),
    sigmoid=_sigmoid,
    erf=_erf,
    round=np.rint,
    unchecked=lambda: np.errstate(all="ignore"),
)
# By the name of the package that defines a framework's arrays. Frontends add their own.
KNOWN = {"numpy": NUMPY}
