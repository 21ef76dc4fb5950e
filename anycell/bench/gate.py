"""The correctness gate: a contender that differs from float64 beyond tolerance is not timed.

A fast wrong answer is the easiest benchmark to win, so outputs, and in training every gradient, are
compared before the clock starts.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Arrays = Mapping[str, npt.NDArray[np.floating]]

# Norm-wise relative error over the whole array: forward, gradients. The test suite asserts that
# these equal its own table. In 16 and 8 bits they include the rounding of inputs and weights.
LIMITS = {
    ("float64", "forward"): 1e-12,
    ("float64", "gradient"): 1e-11,
    ("float32", "forward"): 1e-6,
    ("float32", "gradient"): 5e-6,
    ("bfloat16", "forward"): 1e-2,
    ("bfloat16", "gradient"): 1e-2,
    ("float16", "forward"): 2e-3,
    ("float16", "gradient"): 2e-3,
    ("int8", "forward"): 2e-2,
}

# Other contenders may be off by this multiple of a limit. torch.nn itself reaches 1.1 limits where
# it sums 93 000 gradients of a bias one by one, and we do not refuse its rounding.
PEERS = 4.0


class Wrong(Exception):
    """An array that is off by more than its limit."""


def relative_error(got: npt.ArrayLike, want: npt.ArrayLike) -> float:
    """``norm(got - want) / norm(want)`` in float64; infinite for another shape or any NaN.

    >>> relative_error([3.0, 4.5], [3.0, 4.0])
    0.1
    """
    a, b = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if a.shape != b.shape or not np.isfinite(a).all():
        return float("inf")
    difference, size = float(np.linalg.norm(a - b)), float(np.linalg.norm(b))
    if size == 0:
        return 0.0 if difference == 0 else float("inf")
    return difference / size


def errors(got: Arrays, want: Arrays) -> dict[str, float]:
    """The relative error of each array of the reference; infinite for one that is missing."""
    return {name: relative_error(got.get(name, np.nan), array) for name, array in want.items()}


def check(errors: Mapping[str, float], dtype: str, slack: float = 1.0) -> None:
    """Compares errors with `slack` times the limits.

    The array named ``output`` is the forward pass, all others are gradients.

    Raises:
        Wrong: naming the array that is furthest beyond its limit.
    """
    limits = {
        name: slack * LIMITS[dtype, "forward" if name == "output" else "gradient"]
        for name in errors
    }
    worst = max(errors, key=lambda name: errors[name] / limits[name])
    if errors[worst] > limits[worst]:
        if errors[worst] == np.inf:
            raise Wrong(f"{worst} is missing, has another shape or is not finite")
        raise Wrong(f"{worst} is off by {errors[worst]:.1e}, limit {limits[worst]:.0e}")
