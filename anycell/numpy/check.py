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
from anycell.layer.checks import describe, refuse, remedy
from anycell.layer.checks import integer as integer
from anycell.layer.checks import number as number
from anycell.plan.dtype import dtypes
from anycell.requirement import require

Array = npt.NDArray[np.floating]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Returns NumPy's dtype of a name; bfloat16 needs ml_dtypes, which frameworks install.

    Raises:
        ModuleNotFoundError: for bfloat16 without ml_dtypes.
    """
    if name == "bfloat16":
        require("ml_dtypes", "bfloat16 in NumPy", "bfloat16")
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def mapping(name: str, value: Any, expected: str) -> Mapping[Any, Any]:
    """Returns ``value`` if it is a mapping; ``expected`` describes its contents in errors."""
    if not isinstance(value, Mapping):
        expected = f"a dict, or another mapping, of {expected}"
        refuse(name, describe(value), expected, "Pass a dict.", TypeError)
    return value


def path(value: Any) -> str:
    """Returns ``value`` as the path of a file."""
    try:
        text = os.fsdecode(value)
    except TypeError:  # a number would be taken for an open file
        refuse("path", repr(value), "a str or a pathlib.Path", "Pass a name.", TypeError)
    if "\0" in text:
        refuse("path", repr(value), "one without a NUL character", "Pass another name.")
    return text


def generator(name: str, seed: Any) -> np.random.Generator:
    """Returns a generator with this seed."""
    try:
        return np.random.default_rng(seed)
    except (TypeError, ValueError) as error:
        expected = "an integer from 0 on, or None to draw one"
        refuse(name, f"{seed!r} ({error})", expected, "Pass None.", type(error))


def real_dtype(name: str, value: Any) -> np.dtype[Any]:
    """Returns a dtype that the kernels compute in, in this machine's byte order."""
    try:
        named = isinstance(value, str) and value in dtypes("cpu")
        known = isinstance(value, (str, type, np.dtype))
        dtype = value if named else np.dtype(value).name if known else ""
    except Exception:  # NumPy's parser of such texts raises errors of many kinds
        dtype = ""
    if dtype not in dtypes("cpu"):
        *others, last = map(repr, dtypes("cpu"))
        refuse(name, repr(value), f"{', '.join(others)} or {last}", "Pass one of them.")
    return numpy_dtype(dtype)


def numbers(name: str, value: Any, expected: str = "an array of real numbers") -> npt.NDArray[Any]:
    """Returns ``value`` as an array of real numbers or booleans; does not copy arrays."""
    try:
        array = np.asarray(value)
    except MemoryError:
        raise
    except Exception as error:  # rows of unequal lengths, or another library's array
        given = f"{type(value).__name__}, which is no array ({error})"
        refuse(name, given, expected, "Pass np.asarray of it.", TypeError)
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):  # asarray drops the mask
        refuse(name, "a masked array", f"{expected}, without a mask", "Call its `filled`.")
    if array.dtype.kind not in "fiub" and array.dtype.name not in dtypes("cpu"):
        given = f"{type(value).__name__} of dtype {array.dtype}"
        refuse(name, given, expected, "Convert it: np.asarray(..., float).", TypeError)
    return array


def array(
    name: str, value: Any, shape: Sequence[int | str], dtype: npt.DTypeLike, axes: str = ""
) -> Array:
    """Returns ``value`` as an array of ``dtype`` and ``shape``, in which words stand for any size.

    Real numbers of any dtype are converted; the user's own array is never written to, so it is not
    copied if it already fits.

    Args:
        axes: describes the array in errors.
    """
    values = numbers(name, value)
    fits = values.ndim == len(shape)
    for have, want in zip(values.shape, shape, strict=False):
        fits = fits and (isinstance(want, str) or have == want)
    if not fits:
        expected = f"shape [{', '.join(map(str, shape))}]{axes and ', '}{axes}"
        hint = remedy(values, len(shape), "Reshape it.") if name == "x" else "Reshape it."
        refuse(name, f"shape {list(values.shape)}", expected, hint)
    return np.asarray(values, dtype=dtype, order="C")  # ascontiguousarray makes [] into [1]


def features(name: str, value: Any, size: int, dtype: npt.DTypeLike) -> Array:
    """Returns ``value`` as an array ``[..., size]`` of ``dtype``."""
    values = numbers(name, value)
    axes = [f"axis {i}" for i in range(values.ndim - 1)]
    return array(name, values, [*axes, size], dtype)


def flags(
    name: str, value: Any, shape: Sequence[int | str], axes: str = ""
) -> npt.NDArray[np.bool_]:
    """Returns ``value`` as a copy of booleans; all numbers must be 0 or 1."""
    values = array(name, value, shape, numbers(name, value).dtype, axes)
    flags = values.astype(bool)
    if not np.array_equal(flags, values):
        refuse(name, "numbers other than 0 and 1", "booleans", f"Compare them, as in {name} > 0.5.")
    return flags
