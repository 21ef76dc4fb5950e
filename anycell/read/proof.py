"""The proof of a reading before it is used, against the user's own step, for a few steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

STEPS = 3
# The largest norm(read - step) / norm(step): far above rounding, far below a misread step's.
LIMITS = {"float64": 1e-9, "float32": 1e-3, "float16": 5e-2, "bfloat16": 1e-1}
LIMITS["float64 of float32 constants"] = 1e-5


def starts(
    shapes: Sequence[tuple[int, ...]], seed: int = 0
) -> Iterator[tuple[str, list[np.ndarray]]]:
    """States to start the comparison from, float64, and what to call them.

    Zeros meet the ties of ``maximum`` and the corners of ``abs``, which random numbers never do.
    """
    rng = np.random.default_rng(seed)
    yield "random states", [rng.normal(size=shape) for shape in shapes]
    yield "states of zeros", [np.zeros(shape) for shape in shapes]


def difference(
    step: Mapping[str, np.ndarray], reading: Mapping[str, np.ndarray], dtype: str, start: str
) -> str | None:
    """Why a reading is not the user's step; None if results agree to rounding.

    Args:
        step, reading: results by what they are: "the output", "the gradient of weight".
        dtype: what both were computed in.
        start: what they started from.
    """
    for name, expected in step.items():
        expected = np.asarray(expected, np.float64)
        error = float(np.linalg.norm(np.asarray(reading[name], np.float64) - expected))
        size = float(np.linalg.norm(expected))
        if not error <= LIMITS[dtype] * max(size, 1e-3):  # NaN counts as different
            return (
                f"the reading was tried against the step, from {start}: {name} differs by "
                f"{error / max(size, 1e-300):.1e} of its size"
            )
    return None
