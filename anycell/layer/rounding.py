"""Weights of 8 bits: what layers that have them share.

    w ~ scale * q        q = round(w / scale), from -127 to 127; scale = max |w| / 127

with a scale for each output of a matmul. In a call each row of x, of the first state and of what
else a matmul multiplies is rounded likewise, by a scale of its own. Products are added up in
integers, and all else is float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

STEPS = 127  # of 8 bits, on each side of 0


def rounded(
    weight: npt.NDArray[Any], name: str = "model"
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """A weight ``[..., out, in]`` as integers, and their scales ``[..., out]``.

    Raises:
        ValueError: for a weight of ``name`` that has infinities or NaN.
    """
    if not np.isfinite(weight).all():
        raise ValueError(f"{name}: given a weight with infinities or NaN; expected numbers.")
    scales = np.abs(weight).max(-1, initial=0.0) / np.float32(STEPS)
    steps = np.where(scales > 0, scales, np.float32(1.0))[..., None]
    integers = np.rint(np.clip(weight / steps, -STEPS, STEPS)).astype(np.int8)
    return integers, scales.astype(np.float32)


def arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a model is called with a batch of ``quantize(data=)``."""
    given = batch if isinstance(batch, tuple) else (batch,)
    if isinstance(batch, tuple) and batch and isinstance(batch[-1], dict):
        return given[:-1], given[-1]
    return given, {}


class Error:
    """A relative error over several outputs."""

    def __init__(self) -> None:
        self.outputs, self.wrong, self.size = 0, 0.0, 0.0

    def add(self, output: Any, expected: Any) -> None:
        """One more output: arrays of float64."""
        self.outputs += 1
        self.wrong += float(((output - expected) ** 2).sum())
        self.size += float((expected**2).sum())

    @property
    def relative(self) -> float | None:
        """Over all that was added, if anything was."""
        if not self.outputs:
            return None
        return math.sqrt(self.wrong / self.size) if self.size else math.inf if self.wrong else 0.0


def described(arrays: Mapping[str, Any], error: float | None) -> str:
    """What a quantized layer shows of itself, from its arrays by name."""
    numbers = {name: math.prod(array.shape) for name, array in arrays.items()}
    sizes = {name: count * arrays[name].dtype.itemsize for name, count in numbers.items()}
    before = 4 * sum(count for name, count in numbers.items() if not name.endswith("_scales"))
    text = f"weights of 8 bits, {sum(sizes.values()):,} bytes of {before:,}"
    return text if error is None else f"{text}, error {error:.1e}"
