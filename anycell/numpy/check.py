"""Refusals that name the argument, what was given and what was expected."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.floating]


def integer(name: str, value: Any, low: int = 1) -> int:
    """``value`` as an int of at least ``low``."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < low:
        raise ValueError(f"{name}: given {value!r}, expected an integer of at least {low}.")
    return int(value)


def number(name: str, value: Any, low: float = -math.inf, below: float = math.inf) -> float:
    """``value`` as a float in ``[low, below)``; NaN never is."""
    real = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not real or not low <= value < below:
        raise ValueError(f"{name}: given {value!r}, expected a number in [{low}, {below}).")
    return float(value)


def real_dtype(name: str, value: Any) -> np.dtype[Any]:
    """float32 or float64."""
    try:
        dtype = np.dtype(value)
    except TypeError:
        dtype = np.dtype(object)
    if value is None or dtype.name not in ("float32", "float64"):
        raise ValueError(f"{name}: given {value!r}, expected 'float32' or 'float64'.")
    return dtype


def array(name: str, value: Any, shape: Sequence[int | str], dtype: npt.DTypeLike) -> Array:
    """``value`` as an array of ``dtype`` and ``shape``, whose words stand for any size.

    Real numbers of any dtype are converted; the user's own array is never written to, so it is not
    copied where it already fits.
    """
    given = np.asarray(value)
    if given.dtype.kind not in "fiub":
        raise TypeError(
            f"{name}: given {type(value).__name__} of dtype {given.dtype}, "
            f"expected an array of real numbers."
        )
    fits = given.ndim == len(shape) and all(
        isinstance(want, str) or have == want for have, want in zip(given.shape, shape, strict=True)
    )
    if not fits:
        expected = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
        raise ValueError(f"{name}: given shape {given.shape}, expected ({expected}).")
    return np.ascontiguousarray(given, dtype=dtype)


def flags(name: str, value: Any, shape: Sequence[int | str]) -> npt.NDArray[np.bool_]:
    """``value`` as booleans; numbers count if each is 0 or 1."""
    given = array(name, value, shape, np.asarray(value).dtype)
    flags = given.astype(bool)
    if not np.array_equal(flags, given):
        raise ValueError(f"{name}: given numbers other than 0 and 1, expected booleans.")
    return flags


def lengths(name: str, value: Any, rows: int, steps: int) -> npt.NDArray[np.int64]:
    """One length in 0 .. ``steps`` per row."""
    given = np.asarray(value)
    if given.dtype.kind not in "iu" and given.size:
        raise TypeError(f"{name}: given dtype {given.dtype}, expected integers.")
    if given.shape != (rows,):
        raise ValueError(f"{name}: given shape {given.shape}, expected ({rows},).")
    for row, length in enumerate(given.tolist()):
        if not 0 <= length <= steps:
            raise ValueError(f"{name}: given {length} at row {row}, expected 0 to {steps}.")
    return given.astype(np.int64)
