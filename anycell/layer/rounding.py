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

STEPS = 127  # of 8 bits, on each side of 0


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
