"""The yardstick itself: it must let nothing pass that is wrong."""

from __future__ import annotations

import numpy as np
import pytest
from tolerances import LIMITS, assert_close, error

REF = np.arange(1.0, 25.0).reshape(2, 3, 4)


def test_equal_is_right() -> None:
    for dtype, kind in LIMITS:
        assert_close(REF, REF, dtype, kind)
    assert error(np.zeros((2, 0, 4)), np.zeros((2, 0, 4))) == 0


def test_worst_slice_counts() -> None:
    ref = np.ones((10, 3, 4))
    ref[7] = 1e-6
    out = ref.copy()
    out[7] *= 1 + 1e-3
    assert error(out[None], ref[None], axes=()) < 1e-8
    assert error(out, ref) == pytest.approx(1e-3)
    with pytest.raises(AssertionError, match=r"error 1\.00e-03"):
        assert_close(out, ref, "float32", "gradient")


@pytest.mark.parametrize("wrong", [np.nan, np.inf, 1e-30])
def test_zero_must_be_zero(wrong: float) -> None:
    ref = np.ones((2, 3, 4))
    ref[1, 2] = 0
    out = ref.copy()
    out[1, 2, 3] = wrong
    assert error(out, ref) == np.inf


@pytest.mark.parametrize("where", ["out", "ref", "both"])
def test_nan_never_passes(where: str) -> None:
    out, ref = REF.copy(), REF.copy()
    if where != "ref":
        out[0, 0, 0] = np.nan
    if where != "out":
        ref[0, 0, 0] = np.nan
    assert error(out, ref) == np.inf


def test_infinity_must_be_the_same() -> None:
    out, ref = REF.copy(), REF.copy()
    out[0, 0, 0] = ref[0, 0, 0] = -np.inf
    assert error(out, ref) == 0
    out[0, 0, 0] = np.inf
    assert error(out, ref) == np.inf


def test_shapes_must_be_the_same() -> None:
    with pytest.raises(AssertionError, match="shape"):
        error(REF[0], REF)
