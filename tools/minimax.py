"""Best polynomial coefficients for the functions of `anycell/engines/cpu/ops.py`.

    python tools/minimax.py            # prints every table of that file
    python tools/minimax.py --check    # says whether the file holds just these numbers

A Remez exchange finds the polynomial whose largest weighted error is smallest. Rounding its
coefficients to the format would then cost more than the fit gained; so the coefficients are rounded
one at a time, lowest power first, and those that are left are fitted again around the rounded ones.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mpmath as mp
import numpy as np

mp.mp.prec = 160
Function = Callable[[mp.mpf], mp.mpf]
OPS = Path(__file__).parents[1] / "anycell/engines/cpu/ops.py"


@dataclass(frozen=True)
class Problem:
    """Approximate `target(x)` by the sum of `c[k] * x**powers[k]` over [low, high].

    The error counts relative to `scale(x)`.
    """

    target: Function
    scale: Function
    low: mp.mpf
    high: mp.mpf
    powers: Sequence[int]


def solve(problem: Problem, fixed: Sequence[mp.mpf], points: int = 1500) -> list[mp.mpf]:
    """The best coefficients after the first few `fixed` ones, by exchange on a dense grid."""
    low, high, powers = problem.low, problem.high, problem.powers[len(fixed) :]
    # Chebyshev spacing: the errors of polynomials move fastest near the ends.
    grid = [
        (low + high) / 2 - (high - low) / 2 * mp.cos(mp.pi * k / (points - 1))
        for k in range(points)
    ]
    # Where the lowest power is odd, the error changes sign at 0 by itself: alternation is blind to it.
    weights = [mp.sign(x) ** powers[0] / abs(problem.scale(x)) for x in grid]
    rows = mp.matrix([[w * x**p for p in powers] for x, w in zip(grid, weights, strict=True)])
    wanted = [
        w * (problem.target(x) - sum((c * x**p for c, p in zip(fixed, problem.powers)), mp.mpf(0)))
        for x, w in zip(grid, weights, strict=True)
    ]
    count = len(powers) + 1
    chosen = [round((points - 1) * (1 - np.cos(np.pi * (k + 0.5) / count)) / 2) for k in range(count)]
    best, lowest = mp.matrix(count - 1, 1), mp.inf
    for _ in range(30):
        system = mp.matrix(count, count)
        for i, k in enumerate(chosen):
            for j in range(count - 1):
                system[i, j] = rows[k, j]
            system[i, count - 1] = (-1) ** i
        solution = list(mp.lu_solve(system, mp.matrix([wanted[k] for k in chosen])))
        coefficients, level = mp.matrix(solution[:-1]), abs(solution[-1])
        fitted = rows * coefficients
        errors = [wanted[k] - fitted[k] for k in range(points)]
        height = max(abs(error) for error in errors)
        if height < lowest:
            best, lowest = coefficients, height
        if height < level * mp.mpf("1.0001"):
            break
        # From here on a double will do: only where the peaks are matters.
        chosen = _alternating_peaks(np.array([float(error / height) for error in errors]), count)
    return list(best)


def _alternating_peaks(error: np.ndarray, count: int) -> list[int]:
    """The `count` consecutive places where the error peaks with alternating signs."""
    signs = np.sign(error)
    edges = [0, *(np.flatnonzero(signs[1:] * signs[:-1] < 0) + 1), len(error)]
    peaks = [a + int(np.abs(error[a:b]).argmax()) for a, b in zip(edges[:-1], edges[1:], strict=True)]
    while len(peaks) > count:  # drop the weaker end: what stays still alternates
        peaks.pop(0 if abs(error[peaks[0]]) < abs(error[peaks[-1]]) else -1)
    if len(peaks) < count:
        raise ArithmeticError("the error does not alternate: too few points, or too little precision")
    return peaks


def rounded(problem: Problem, real: type[np.floating], fixed: Sequence[float] = ()) -> list[float]:
    """Coefficients that the format `real` holds exactly, the leading `fixed` ones given."""
    known = [mp.mpf(c) for c in fixed]
    while len(known) < len(problem.powers):
        value = solve(problem, known)[0]
        known.append(mp.mpf(float(_nearest(value, real))))
    return [float(c) for c in known]


def _nearest(value: mp.mpf, real: type[np.floating]) -> float:
    bits = 24 if real is np.float32 else 53
    with mp.workprec(bits):
        return float(+value)


def worst(problem: Problem, coefficients: Sequence[float], points: int = 4001) -> float:
    """The largest error relative to the scale."""
    span = problem.high - problem.low
    errors = []
    for k in range(points):
        x = problem.low + span * k / (points - 1)
        if problem.scale(x):
            fit = sum((c * x**p for c, p in zip(coefficients, problem.powers, strict=True)), mp.mpf(0))
            errors.append(abs((problem.target(x) - fit) / problem.scale(x)))
    return float(max(errors))


# ------------------------------------------------------------------------ the tables of ops.py


def _two_atanh(s: mp.mpf) -> mp.mpf:
    return mp.log((1 + s) / (1 - s))


HALF_LN2 = mp.log(2) / 2 * (1 + mp.mpf(2) ** -12)  # with room for the error of the rounding
ROOT = mp.sqrt(2)


def _reals(name: str) -> type[np.floating]:
    return np.float32 if name == "float" else np.float64


def tables(real: str) -> dict[str, tuple[Problem, int]]:
    """For each table of ops.py: its problem, and how many of its leading coefficients are 1."""
    small = real == "float"
    log_span = (1 / ROOT - 1, ROOT - 1)
    problems = {
        # exp(r) = 1 + r (1 + r (...))
        "EXP": (Problem(mp.exp, mp.exp, -HALF_LN2, HALF_LN2, range(7 if small else 12)), 2),
        # tanh(r) = r (1 + r^2 (...)), |r| <= ln2/4
        "TANH": (
            Problem(mp.tanh, mp.tanh, mp.mpf("1e-9"), HALF_LN2 / 2, range(1, 7 if small else 17, 2)),
            1,
        ),
    }
    return problems


def table(name: str, real: str) -> list[float]:
    """The coefficients of a table without those that are 1."""
    problem, ones = tables(real)[name]
    return rounded(problem, _reals(real), [1.0] * ones)[ones:]
