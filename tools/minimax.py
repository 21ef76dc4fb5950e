"""Best polynomial coefficients for the functions of `anycell/engines/cpu/ops.py`.

    python tools/minimax.py            # prints every table of that file
    python tools/minimax.py --check    # compares them with the numbers in the file

A Remez exchange finds the polynomial whose largest weighted error is smallest. Rounding all of its
coefficients to the format at once would lose more than the fit gained. So coefficients are rounded
one at a time, lowest power first, and the others are fitted again with the rounded ones fixed.
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mpmath as mp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from anycell.engines.cpu import ops

mp.mp.prec = 160
Function = Callable[[mp.mpf], mp.mpf]


@dataclass(frozen=True)
class Problem:
    """An approximation of `target(x)` by the sum of `c[k] * x**powers[k]` over [low, high].

    Errors are relative to `scale(x)`.
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
    # If the lowest power is odd, the error changes its sign at 0, which is no alternation.
    weights = [mp.sign(x) ** powers[0] / abs(problem.scale(x)) for x in grid]
    rows = mp.matrix([[w * x**p for p in powers] for x, w in zip(grid, weights, strict=True)])
    wanted = [
        w
        * (
            problem.target(x)
            - sum((c * x**p for c, p in zip(fixed, problem.powers, strict=False)), mp.mpf(0))
        )
        for x, w in zip(grid, weights, strict=True)
    ]
    count = len(powers) + 1
    chosen = [
        round((points - 1) * (1 - np.cos(np.pi * (k + 0.5) / count)) / 2) for k in range(count)
    ]
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
        # Doubles suffice from here on: only the places of the peaks matter.
        chosen = _alternating_peaks(np.array([float(error / height) for error in errors]), count)
    return list(best)


def _alternating_peaks(error: np.ndarray, count: int) -> list[int]:
    """The `count` consecutive places where the error peaks with alternating signs."""
    signs = np.sign(error)
    edges = [0, *(np.flatnonzero(signs[1:] * signs[:-1] < 0) + 1), len(error)]
    peaks = [a + int(np.abs(error[a:b]).argmax()) for a, b in itertools.pairwise(edges)]
    while len(peaks) > count:  # drop the weaker end: the others still alternate
        peaks.pop(0 if abs(error[peaks[0]]) < abs(error[peaks[-1]]) else -1)
    if len(peaks) < count:
        raise ArithmeticError(
            "the error does not alternate: too few points, or too little precision"
        )
    return peaks


def rounded(problem: Problem, real: type[np.floating], fixed: Sequence[float] = ()) -> list[float]:
    """Coefficients that the format `real` holds exactly; `fixed` gives the leading ones."""
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
            fit = sum(
                (c * x**p for c, p in zip(coefficients, problem.powers, strict=True)), mp.mpf(0)
            )
            errors.append(abs((problem.target(x) - fit) / problem.scale(x)))
    return float(max(errors))


# ------------------------------------------------------------------------ the tables of ops.py
_NEAR_0 = mp.mpf("1e-9")
_HALF_LN2 = mp.log(2) / 2 * (1 + mp.mpf(2) ** -12)  # with room for rounding errors


def _two_atanh(s: mp.mpf) -> mp.mpf:
    return mp.log((1 + s) / (1 - s))


def _series(low: mp.mpf, high: mp.mpf, terms: int) -> Problem:
    """R in log((1 + s) / (1 - s)) = 2 s + s^3 R(s^2)."""
    powers = range(3, 2 * terms + 3, 2)
    return Problem(lambda s: _two_atanh(s) - 2 * s, _two_atanh, low, high, powers)


def _exp(degree: int) -> Problem:
    return Problem(mp.exp, mp.exp, -_HALF_LN2, _HALF_LN2, range(degree + 1))


def _sin(terms: int) -> Problem:
    """The terms of sin x after x."""
    powers = range(3, 2 * terms + 3, 2)
    return Problem(lambda x: mp.sin(x) - x, mp.sin, _NEAR_0, mp.pi / 4, powers)


def _cos(terms: int) -> Problem:
    """The terms of cos x after 1 - x^2/2."""
    powers = range(4, 2 * terms + 4, 2)
    return Problem(
        lambda x: mp.cos(x) - 1 + x * x / 2, mp.cos, mp.mpf(0), mp.pi / 4 * (1 + _NEAR_0), powers
    )


def _erf_near(terms: int) -> Problem:
    return Problem(mp.erf, mp.erf, _NEAR_0, mp.mpf(1), range(1, 2 * terms + 1, 2))


def _erf_far(degree: int) -> Problem:
    """q in erf(1 + t) = 1 - e^-q(t). The smaller erfc is, the less an error of q counts."""
    return Problem(
        lambda t: -mp.log(mp.erfc(1 + t)),
        lambda t: mp.erf(1 + t) / mp.erfc(1 + t),
        mp.mpf(0),
        mp.mpf(5),
        range(degree + 1),
    )


def _log_of_power(terms: int) -> Problem:
    """R in log((1 + s) / (1 - s)) = 2 s + 2/3 s^3 + s^5 R(s^2)."""
    return Problem(
        lambda s: _two_atanh(s) - 2 * s - 2 * s**3 / 3,
        _two_atanh,
        _NEAR_0,
        3 - 2 * mp.sqrt(2),
        range(5, 2 * terms + 5, 2),
    )


# Field of `Real` in ops.py -> its problem, and the leading coefficients that the code assumes.
TABLES: dict[str, dict[str, tuple[Problem, list[float]]]] = {
    "FLOAT": {
        "exp": (_exp(6), [1.0, 1.0]),
        "log": (
            Problem(
                lambda f: mp.log1p(f) - f + f * f / 2,
                mp.log1p,
                mp.sqrt(0.5) - 1,
                mp.sqrt(2) - 1,
                range(3, 11),
            ),
            [],
        ),
        "log1p": (Problem(mp.log1p, mp.log1p, _NEAR_0, mp.mpf(1), range(1, 11)), [1.0]),
    },
    "SHORT": {"exp": (_exp(4), [1.0, 1.0])},
    "DOUBLE": {
        "exp": (_exp(11), [1.0, 1.0]),
        # s = f / (2 + f) for f up to sqrt(2) - 1, and up to 1
        "log": (_series(_NEAR_0, 3 - 2 * mp.sqrt(2), 7), []),
        "log1p": (_series(_NEAR_0, mp.mpf(1) / 3, 10), []),
        "sin": (_sin(6), []),
        "cos": (_cos(6), []),
        "erf_near": (_erf_near(13), []),
        "erf_far": (_erf_far(20), []),
        "log_of_power": (_log_of_power(11), []),
    },
}


def main() -> int:
    """Prints the tables; with `--check`, compares them with the tables of the package."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="compare with ops.py; 1 if they differ"
    )
    parser.add_argument(
        "--only", default="", help="tables whose name contains this, as in FLOAT.exp"
    )
    options = parser.parse_args()
    differ = False
    for format_name, tables in TABLES.items():
        real = np.float64 if format_name == "DOUBLE" else np.float32
        for field, (problem, ones) in tables.items():
            if options.only not in f"{format_name}.{field}":
                continue
            found = rounded(problem, real, ones)
            error = worst(problem, found) * 2.0 ** np.finfo(real).nmant
            print(f"# {format_name}.{field}: {error:.3f} ulp before rounding errors")
            print(f"{field}=({', '.join(str(real(c)) for c in found[len(ones) :])}),", flush=True)
            if options.check:
                held = getattr(getattr(ops, format_name), field)
                same = [real(c) for c in held] == [real(c) for c in found[len(ones) :]]
                print("# as in ops.py" if same else f"# NOT as in ops.py: {held}")
                differ |= not same
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
