"""Refusals that name the argument, what was given and what was expected."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from anycell.layer.checks import boolean as boolean
from anycell.layer.checks import check_cell as check_cell
from anycell.layer.checks import check_sizes as check_sizes
from anycell.layer.checks import integer as integer
from anycell.layer.checks import number as number
from anycell.numpy.host import numpy_dtype
from anycell.plan.dtype import dtypes

Array = npt.NDArray[np.floating]


def mapping(name: str, value: Any, expected: str) -> Mapping[Any, Any]:
    """``value``, if it is a mapping, of ``expected``."""
    if not isinstance(value, Mapping):
        given = f"{name}: given {type(value).__name__}"
        raise TypeError(f"{given}, expected a dict, or another mapping, of {expected}.")
    return value


def path(value: Any) -> str:
    """``value`` as the path of a file."""
    try:
        text = os.fsdecode(value)
    except TypeError:  # a number would be taken for an open file
        raise TypeError(f"path: given {value!r}, expected a str or a pathlib.Path.") from None
    if "\0" in text:
        raise ValueError(f"path: given {value!r}, expected one without a NUL character.")
    return text


def generator(name: str, seed: Any) -> np.random.Generator:
    """What draws from ``seed``."""
    try:
        return np.random.default_rng(seed)
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"{name}: given {seed!r} ({error}), expected an integer from 0 on, or None to draw one."
        ) from None


def probability(name: str, value: Any) -> float:
    """The value as a float in ``[0, 1]``."""
    return number(name, value, 0.0, 1.0, closed=True)


def real_dtype(name: str, value: Any) -> np.dtype[Any]:
    """A dtype that the kernels compute in, in this machine's order of bytes."""
    try:
        named = isinstance(value, str) and value in dtypes("cpu")
        known = isinstance(value, (str, type, np.dtype))
        dtype = value if named else np.dtype(value).name if known else ""
    except Exception:  # NumPy raises what its parser of such texts does
        dtype = ""
    if dtype not in dtypes("cpu"):
        *others, last = map(repr, dtypes("cpu"))
        expected = f"{', '.join(others)} or {last}"
        raise ValueError(f"{name}: given {value!r}, expected {expected}.")
    return numpy_dtype(dtype)


def numbers(name: str, value: Any) -> npt.NDArray[Any]:
    """``value`` as an array of real numbers or booleans, not copied where it is one."""
    try:
        array = np.asarray(value)
    except MemoryError:
        raise
    except Exception as error:  # rows of unequal lengths; another library's array says no
        raise TypeError(
            f"{name}: given {type(value).__name__}, which is no array ({error}); "
            "expected an array of real numbers."
        ) from error
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):  # of which nothing is left
        raise ValueError(f"{name}: given a masked array, expected one without: see `filled`.")
    if array.dtype.kind not in "fiub" and array.dtype.name not in dtypes("cpu"):
        raise TypeError(
            f"{name}: given {type(value).__name__} of dtype {array.dtype}, "
            f"expected an array of real numbers."
        )
    return array


def array(name: str, value: Any, shape: Sequence[int | str], dtype: npt.DTypeLike) -> Array:
    """``value`` as an array of ``dtype`` and ``shape``, whose words stand for any size.

    Real numbers of any dtype are converted; the user's own array is never written to, so it is not
    copied where it already fits.
    """
    given = numbers(name, value)
    fits = given.ndim == len(shape)
    for have, want in zip(given.shape, shape, strict=False):
        fits = fits and (isinstance(want, str) or have == want)
    if not fits:
        expected = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
        raise ValueError(f"{name}: given shape {given.shape}, expected ({expected}).")
    return np.ascontiguousarray(given, dtype=dtype)


def flags(name: str, value: Any, shape: Sequence[int | str]) -> npt.NDArray[np.bool_]:
    """``value`` as booleans; numbers count if each is 0 or 1."""
    given = array(name, value, shape, numbers(name, value).dtype)
    flags = given.astype(bool)
    if not np.array_equal(flags, given):
        raise ValueError(f"{name}: given numbers other than 0 and 1, expected booleans.")
    return flags


def lengths(name: str, value: Any, rows: int, steps: int) -> npt.NDArray[np.int64]:
    """One length in 0 .. ``steps`` per row."""
    given = numbers(name, value)
    if given.dtype.kind not in "iu" and given.size:
        raise TypeError(f"{name}: given dtype {given.dtype}, expected integers.")
    if given.shape != (rows,):
        raise ValueError(f"{name}: given shape {given.shape}, expected ({rows},).")
    for row, length in enumerate(given.tolist()):
        if not 0 <= length <= steps:
            raise ValueError(f"{name}: given {length} at row {row}, expected 0 to {steps}.")
    return given.astype(np.int64)
