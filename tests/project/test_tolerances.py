"""The yardstick itself: it must let nothing pass that is wrong."""

import re
from pathlib import Path

import numpy as np
import pytest
from tolerances import LIMITS, SLOPES, assert_close, close, error, is_slope

from anycell.plan import DTYPES

REF = np.arange(1.0, 25.0).reshape(2, 3, 4)


def test_equal_is_right() -> None:
    for dtype, kind in LIMITS:
        assert_close(REF, REF, dtype, kind)
        assert close(REF * (1 + 0.9 * LIMITS[dtype, kind]), REF, dtype, kind)
        assert not close(REF * (1 + 1.1 * LIMITS[dtype, kind]), REF, dtype, kind)
    assert error(np.zeros((2, 0, 4)), np.zeros((2, 0, 4))) == 0


def test_every_dtype_has_limits() -> None:
    for name, row in DTYPES.items():
        kinds = ("forward",) if row.quantized else ("forward", "gradient")
        assert {(name, kind) for kind in kinds} <= LIMITS.keys()


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


def test_slopes() -> None:
    for of, most in SLOPES.items():
        for slope in (3.0, -0.01):
            off = most * max(abs(slope), 0.1)
            assert is_slope(slope + 0.9 * off, slope, of)
            assert not is_slope(slope + 1.1 * off, slope, of)
            assert not is_slope(np.nan, slope, of)


# -- and nothing looser anywhere else --------------------------------------------------------------

# A bound of one's own, or that of a library which is told none.
LITERALS = re.compile(
    r"\b[ar]tol\b|(?<!not )\b(np|torch)\.allclose\(|assert_allclose|testing\.assert_close"
    r"|approx\((\([^()]*\)|[^()])*,\s*(rel|abs|nan_ok|[\d.])"
)
ELSEWHERE = {
    "test_tolerances.py": "names what it looks for",
    "test_export.py": "numbers of all sizes, each by itself",
    "test_machines.py": "numbers that a program prints",
    "test_gallery.py": "the variance of numbers that are drawn",
    "test_guides.py": "layers of other libraries, in float32 on both sides",
}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("np.testing.assert_allclose(a, b)", True),
        ("assert torch.allclose(a, b)", True),
        ("assert not np.allclose(a, b)", False),
        ("gradcheck(f, x, atol=1e-3)", True),
        ("assert a == pytest.approx(f(b), rel=1e-2)", True),
        ("assert a == pytest.approx(f(b, c), 0.02)", True),
        ("assert a == pytest.approx(f(b, c))", False),
        ('assert_close(a, b, "float32", "forward")', False),
    ],
)
def test_what_a_tolerance_looks_like(line: str, found: bool) -> None:
    assert bool(LITERALS.search(line)) is found


def test_no_other_file_has_tolerances() -> None:
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        found = LITERALS.search(path.read_text(encoding="utf-8"))
        assert not found or path.name in ELSEWHERE, f"{path.name}: {found[0]}"
