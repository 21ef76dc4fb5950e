"""The proof of a reading before it is used, against the user's own step, for a few steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

STEPS = 3
Results = Mapping[str, np.ndarray]  # by what they are: "the output", "the gradient of weight"
# The largest norm(read - step) / norm(step): far above rounding, far below a misread step's.
LIMITS = {"float64": 1e-9, "float32": 1e-3, "float16": 5e-2, "bfloat16": 1e-1}
OF_FLOAT32 = "float64 of float32 constants"
LIMITS[OF_FLOAT32] = 1e-5
# A step may magnify roundings: how far off a reading may be, in changes of the step's own results
# when the states that it starts from are moved by a rounding each.
ROUNDINGS = 100.0


def tried(
    shapes: Sequence[tuple[int, ...]],
    both: Callable[[list[np.ndarray]], tuple[Results, Results]],
    dtype: str,
) -> str | None:
    """Why a reading is not the user's step; None if they agree, wherever they start.

    Zeros meet the ties of ``maximum`` and the corners of ``abs``, which random numbers never do.

    Args:
        shapes: of the states, which start as random numbers and as zeros, in float64.
        both: states -> the results of the step, and those of the reading.
        dtype: what both are computed in.
    """
    rng = np.random.default_rng(0)
    random = [rng.normal(size=shape) for shape in shapes]
    zeros = list(map(np.zeros, shapes))
    for start, states in (("random states", random), ("states of zeros", zeros)):
        step, reading = both(states)
        reason = difference(step, reading, dtype, start)
        if reason is not None and dtype in ("float64", OF_FLOAT32):
            moved = [state * (1 + 2.0**-52 * rng.choice([-1, 1], state.shape)) for state in states]
            reason = difference(step, reading, dtype, start, both(moved)[0])
        if reason is not None:
            return reason
    return None


def difference(
    step: Results, reading: Results, dtype: str, start: str, moved: Results | None = None
) -> str | None:
    """Why a reading is not the user's step; None if results agree to rounding.

    Args:
        dtype: what both were computed in, as in ``LIMITS``.
        start: what they started from.
        moved: the results of the step from states that were moved by a rounding each.
    """
    for name, expected in step.items():
        expected = np.asarray(expected, np.float64)
        error = float(np.linalg.norm(np.asarray(reading[name], np.float64) - expected))
        size = float(np.linalg.norm(expected))
        limit = LIMITS[dtype] * max(size, 1e-3)
        if moved is not None:
            limit = max(limit, ROUNDINGS * float(np.linalg.norm(moved[name] - expected)))
        if not error <= limit:  # NaN counts as different
            return (
                f"the reading was tried against the step, from {start}: {name} differs by "
                f"{error / max(size, 1e-300):.1e} of its size"
            )
    return None
