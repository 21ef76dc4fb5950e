"""The correctness gate: a contender that differs from float64 beyond tolerance is not timed.

A fast wrong answer is the easiest benchmark to win, so outputs, and in training every gradient, are
compared before the clock starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Verdict:
    """Relative error of every array, and what is wrong with it, if anything."""

    errors: dict[str, float]
    problem: str | None

    @property
    def ok(self) -> bool:
        return self.problem is None


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


def judge(got: Arrays, want: Arrays, dtype: str, slack: float = 1.0) -> Verdict:
    """Compares a contender's arrays with the float64 reference's, with `slack` times the limits.

    The array named ``output`` is the forward pass, all others are gradients.
    """
    errors: dict[str, float] = {}
    problems: list[tuple[float, str]] = []
    for name, reference in want.items():
        if name not in got:
            problems.append((float("inf"), f"{name} is missing"))
            continue
        limit = slack * LIMITS[dtype, "forward" if name == "output" else "gradient"]
        error = errors[name] = relative_error(got[name], reference)
        if not error <= limit:
            problems.append((error / limit, f"{name} is off by {error:.1e}, limit {limit:.0e}"))
    return Verdict(errors, max(problems)[1] if problems else None)
