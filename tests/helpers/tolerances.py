"""The tolerances of all tests; no test has a looser one of its own."""

from typing import Any

import numpy as np
import numpy.typing as npt

# The largest norm(out - ref) / norm(ref) against float64, by dtype and kind.
LIMITS = {
    ("float64", "forward"): 1e-12,
    ("float64", "gradient"): 1e-11,
    ("float32", "forward"): 1e-6,
    ("float32", "gradient"): 5e-6,
    ("bfloat16", "forward"): 1e-2,
    ("bfloat16", "gradient"): 1e-2,
    # The framework lets matmuls round float32 to the sum of two bfloat16 numbers, or to one.
    ("float32 high", "forward"): 2e-5,
    ("float32 high", "gradient"): 3e-5,
    ("float32 medium", "forward"): 1e-2,
    ("float32 medium", "gradient"): 1e-2,
    ("float16", "forward"): 2e-3,
    ("float16", "gradient"): 2e-3,
    # Weights and rows of 8 bits: each has about 7 bits of precision, and their errors add up.
    ("int8", "forward"): 2e-2,
    # Against another runtime's float32, which has an error of its own.
    ("float32", "runtime"): 1e-5,
    # Losses of several training steps: the error grows with each step.
    ("float64", "training"): 1e-10,
    ("float32", "training"): 1e-6,
}
# The largest error of a derivative against a finite difference, which is the less exact of the two:
# for an op, for a layer whose cell is smooth, and for a random cell.
SLOPES = {"op": 1e-7, "layer": 1e-6, "random cell": 1e-5}
# The largest ratio of the error of a random call to the worst error of four runs whose saved values
# are each off by up to one rounding: four draws do not find the worst case.
RANDOM_CALL = 3.0
# The largest ratio of a frontend's error to the error of its framework's own float32 layer.
NO_WORSE_THAN = 2.0
NO_WORSE_THAN_16 = 1.5  # in bfloat16 and float16
# One unit in the last place of a float32. Two correct roundings of one number may differ by it, so
# a smaller error, for example of a layer with a single unit, says nothing about either.
ONE_ULP = 2.0**-23


def error(out: npt.ArrayLike, ref: npt.ArrayLike, axes: tuple[int, ...] | None = None) -> float:
    """The relative error of the whole array or of the worst slice along any of ``axes``.

    Infinite if the output differs from the reference in a row of zeros or at an infinite number, if
    the output is not finite elsewhere, and if either holds NaN.

    Args:
        out, ref: of one shape, in any dtype; compared in float64.
        axes: time and batch; None takes the first two of three axes, and none of fewer.
    """
    out, ref = np.asarray(out, np.float64), np.asarray(ref, np.float64)
    assert out.shape == ref.shape, f"shape {out.shape}, reference {ref.shape}"
    exact = ~np.isfinite(ref)
    exact |= (ref == 0).all(axis=-1, keepdims=True) if ref.ndim else ref == 0
    if np.isnan(ref).any() or not np.array_equal(out[exact], ref[exact]):
        return np.inf
    out, ref = (np.where(exact, 0.0, a) for a in (out, ref))
    if not np.isfinite(out).all():
        return np.inf
    worst = 0.0
    for axis in (None, *((0, 1) * (ref.ndim == 3) if axes is None else axes)):
        over = None if axis is None else tuple(k for k in range(ref.ndim) if k != axis)
        wrong, size = (np.sqrt(np.square(a).sum(axis=over)) for a in (out - ref, ref))
        ratio = np.divide(wrong, size, out=np.zeros_like(wrong), where=wrong > 0)
        worst = max(worst, np.max(ratio, initial=0.0))
    return float(worst)


def close(
    out: Any,
    ref: Any,
    dtype: npt.DTypeLike,
    kind: str,
    axes: tuple[int, ...] | None = None,
) -> bool:
    """Whether ``error(out, ref, axes)`` is within the limit of ``dtype`` and kind."""
    return error(out, ref, axes) <= limit(dtype, kind)


def assert_close(
    out: Any,
    ref: Any,
    dtype: npt.DTypeLike,
    kind: str,
    name: str = "output",
    axes: tuple[int, ...] | None = None,
) -> None:
    """Asserts that ``error(out, ref, axes)`` is within the limit of ``dtype`` and kind."""
    wrong, most = error(out, ref, axes), limit(dtype, kind)
    assert wrong <= most, f"{name}: error {wrong:.2e}, limit {most:.0e} ({kind}, {dtype})"


def limit(dtype: npt.DTypeLike, kind: str) -> float:
    """The limit of a dtype, which may be a name that NumPy does not know, and kind."""
    return LIMITS[dtype if isinstance(dtype, str) else np.dtype(dtype).name, kind]


def is_slope(derivative: float, difference: float, of: str) -> bool:
    """Whether a derivative agrees with a finite difference; slopes below 0.1 count as 0.1."""
    return abs(derivative - difference) <= SLOPES[of] * max(abs(difference), 0.1)
