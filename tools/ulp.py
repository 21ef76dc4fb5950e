"""Measures the error of the CPU engine's functions in units in the last place (ulp).

    python tools/ulp.py                          # all 2^32 floats and a large sample of doubles
    python tools/ulp.py --ops tanh --isa avx2    # one of them
    python tools/ulp.py --stride 997             # every 997th float: seconds
    python tools/ulp.py --dtype float16 bfloat16 # the shorter functions of cells of these

The error is |result - truth| / ulp. The truth is the exact real value of the function at this
input; the ulp is the distance between the two numbers of the format around it, also of subnormal
ones. A correctly rounded function has errors up to 0.5. If the truth is a zero, an infinity or NaN,
the result must be the same, with the right sign of zero; a truth beyond the largest number may
round to infinity.

For a dtype of 16 bits, it is the error of the float with which a cell computes, before rounding, in
the last place of that dtype.

The truth comes from NumPy, in double for float and in 80-bit extended precision for double; mpmath
recomputes the worst input.
"""

import argparse
import ctypes
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import mpmath as mp
import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).parents[1]))
from anycell.engines.cpu import isa, jit, ops
from anycell.engines.cpu.ir import Module

Array = npt.NDArray[Any]
REAL = {"float32": "float", "float64": "double", "bfloat16": "float", "float16": "float"}


class Limits(NamedTuple):
    """A format's stored bits of the mantissa, and its exponents and largest number, as in NumPy's
    ``finfo``.
    """

    nmant: int
    minexp: int
    maxexp: int
    max: float


SHORT = {
    "bfloat16": Limits(7, -126, 128, (2 - 2.0**-7) * 2.0**127),
    "float16": Limits(10, -14, 16, (2 - 2.0**-10) * 2.0**15),
}


def limits_of(dtype: str) -> Any:
    """The limits of the format in which errors are counted."""
    return SHORT.get(dtype) or np.finfo(dtype)


def computed_in(dtype: str) -> str:
    """The dtype of arguments and results."""
    return "float32" if dtype in SHORT else dtype


class Function(NamedTuple):
    """An op in any precision, and its largest allowed error in ulp; for 16 bits, a small part of
    the rounding error.
    """

    numpy: Callable[..., Array]
    mpmath: Callable[..., mp.mpf]
    errors: dict[str, float]

    def limit(self, dtype: str) -> float:
        """The largest allowed error for a dtype."""
        return 0.05 if dtype in SHORT else self.errors[dtype]


FUNCTIONS = {
    "exp": Function(np.exp, mp.exp, {"float32": 2, "float64": 4}),
    "log": Function(np.log, mp.log, {"float32": 2, "float64": 4}),
    "sqrt": Function(np.sqrt, mp.sqrt, {"float32": 0.5001, "float64": 0.5001}),
    "sigmoid": Function(
        lambda x: 1 / (1 + np.exp(-x)),
        lambda x: 1 / (1 + mp.exp(-x)),
        {"float32": 2, "float64": 4},
    ),
    "tanh": Function(np.tanh, mp.tanh, {"float32": 2, "float64": 4}),
    "softplus": Function(
        lambda x: np.maximum(x, 0) + np.log1p(np.exp(-abs(x))),
        lambda x: mp.log1p(mp.exp(x)),
        {"float32": 3, "float64": 4},
    ),
    "log_sigmoid": Function(
        lambda x: -(np.log1p(np.exp(-abs(x))) - np.minimum(x, 0)),
        lambda x: -mp.log1p(mp.exp(-x)),
        {"float32": 3, "float64": 4},
    ),
}


def _erf(x: Array) -> Array:
    """The error function; in extended precision a series without differences: every term has the
    sign of x.
    """
    if x.dtype == np.float64:
        return np.fromiter(map(math.erf, x.tolist()), np.float64, len(x))
    y, inside = np.where(np.isnan(x), x, np.copysign(1, x)), abs(x) < 6.7  # beyond, it rounds to 1
    x = x[inside]
    term = total = x * 2 / np.sqrt(np.arccos(x.dtype.type(-1)))
    for k in range(1, 160):
        term = term * (2 * x * x / (2 * k + 1))
        total = total + term
    y[inside] = total * np.exp(-x * x)
    return y


def _with_exponents(x: Array) -> tuple[Array, ...]:
    """Bases of a power, from the bits of ``x``, and an exponent for each: for most of them one
    whose power is neither 0 nor infinite, else any number.
    """
    integers = {4: np.uint32, 8: np.uint64}[x.dtype.itemsize]
    bits = (x.view(integers) * integers(2654435761)) ^ integers(0x5BD1E995)
    share = (bits >> 8).astype(np.float64) / 2.0 ** (8 * x.dtype.itemsize - 9) - 1.0
    with np.errstate(all="ignore"):
        largest = np.log(np.finfo(x.dtype).max).astype(np.float64)
        y = (share * 1.03 * largest / np.log(abs(x.astype(np.longdouble)))).astype(x.dtype)
        bases = np.where(bits % 8 < 7, abs(x), x)
    return bases, np.where(bits % 16 < 14, y, bits.view(x.dtype))


FUNCTIONS |= {
    "sin": Function(np.sin, mp.sin, {"float32": 1, "float64": 2}),
    "cos": Function(np.cos, mp.cos, {"float32": 1, "float64": 2}),
    "erf": Function(_erf, mp.erf, {"float32": 1, "float64": 4}),
    "pow": Function(np.power, mp.power, {"float32": 1, "float64": 2}),
}


def inputs(op: str, x: Array) -> tuple[Array, ...]:
    """The arguments of an op that are made of ``x``."""
    return _with_exponents(x) if op == "pow" else (x,)


# ------------------------------------------------------------------------------- the function
@cache
def compiled(op: str, target: str, dtype: str) -> Callable[..., Array]:
    """The op as a function of arrays of any length, as `target` runs it."""
    count = len(inputs(op, np.zeros(1, computed_in(dtype))))
    module = Module(isa.TARGETS[target], REAL[dtype], dtype in SHORT)
    b = module.function("apply", "i64 n, ptr y, " + ", ".join(f"ptr x{k}" for k in range(count)))
    n, y, *xs = b.args
    with b.loop(0, n, b.lanes) as i:
        b.store(ops.EMIT[op](b, *(b.load(b.gep(x, i)) for x in xs)), b.gep(y, i))
    library = jit.compile(str(module), ["apply"], module.target)
    signature = ctypes.CFUNCTYPE(None, ctypes.c_int64, *[ctypes.c_void_p] * (1 + count))
    function = signature(library.address("apply"))

    def call(*values: Array) -> Array:
        size = len(values[0])
        padded = np.zeros((count, -(-size // b.lanes) * b.lanes), computed_in(dtype))
        padded[:, :size] = values
        result = np.full_like(padded[0], np.nan)
        function(len(result), result.ctypes.data, *(row.ctypes.data for row in padded))
        return result[:size]

    return call


# ---------------------------------------------------------------------------------- the error
def errors(op: str, xs: Sequence[Array], y: Array, dtype: str) -> Array:
    """The error of each result y = op(*xs) in ulp; infinite where a special value is wrong."""
    wide = np.float64 if y.dtype == np.float32 else np.longdouble
    limits = limits_of(dtype)
    with np.errstate(all="ignore"):
        truth = FUNCTIONS[op].numpy(*(x.astype(wide) for x in xs))
        result = y.astype(wide)
        # A truth beyond the largest number is infinite in the format, or may round to infinity:
        # then infinity represents the next number.
        beyond = np.ldexp(wide(1), limits.maxexp)
        truth[abs(truth) >= beyond] *= np.inf
        rounded = np.isinf(result) & np.isfinite(truth) & (abs(truth) > limits.max)
        result[rounded] = np.copysign(beyond, truth[rounded])
        if dtype in SHORT:  # results are not rounded yet
            result[np.isinf(truth) & (abs(result) > limits.max)] *= np.inf
        error = abs(result - truth) / _ulp(truth, limits)
        special = ~np.isfinite(error)
        right = (result == truth) | (np.isnan(result) & np.isnan(truth))
        error[special] = np.where(right[special], 0, np.inf)
        error[(result == 0) & (np.signbit(result) != np.signbit(truth))] = np.inf
        return error.astype(np.float64)


def _ulp(truth: Array, limits: Any) -> Array:
    """The distance between the numbers of the format around each truth."""
    if truth.dtype == np.float64:  # by bits: ten times as fast as frexp and ldexp
        exponent = truth.view(np.int64) >> 52 & 0x7FF
        exponent = np.maximum(exponent, 1023 + limits.minexp) - limits.nmant
        return (exponent << 52).view(np.float64)
    _, exponent = np.frexp(truth)
    exponent = np.clip(exponent - 1, limits.minexp, limits.maxexp) - limits.nmant
    return np.ldexp(truth.dtype.type(1), exponent)


def exact_error(op: str, xs: Sequence[Any], y: Any, dtype: str) -> float:
    """The error of one result, by mpmath."""
    limits = limits_of(dtype)
    with mp.workprec(20000 if op == "log_sigmoid" or op == "softplus" else 200):
        truth = FUNCTIONS[op].mpmath(*(mp.mpf(float(x)) for x in xs))
        _, exponent = mp.frexp(truth)
        ulp = mp.mpf(2) ** (max(int(exponent), int(limits.minexp) + 1) - limits.nmant - 1)
        return float(abs(mp.mpf(float(y)) - truth) / ulp)


# ---------------------------------------------------------------------------------- the inputs
CHUNK = 1 << 18  # small enough for the caches


def chunk_of_floats(start: int, stride: int) -> Array:
    """The floats of `CHUNK` bit patterns, every `stride`-th one from `start` on."""
    stop = min(start + CHUNK * stride, 1 << 32)
    return np.arange(start, stop, stride, dtype=np.uint64).astype(np.uint32).view(np.float32)


def corners() -> Array:
    """Doubles at which such functions often fail, with neighbours and both signs."""
    limits = np.finfo(np.float64)
    ln2 = np.log(2)
    seeds = np.concatenate(
        [
            [0, 1, np.pi, np.inf, np.nan],
            [limits.max, limits.smallest_normal, limits.smallest_subnormal],
            2.0 ** np.arange(-1074, 1024),
            np.arange(0, 1100, 0.5) * ln2,  # n changes, and r vanishes
            np.arange(0, 200, 0.25) * ln2,
            [
                708.3964185322641, 709.782712893384, 744.4400719213812, 745.1332191019411, 36.7,
                37.43, 19.06,
            ],
            np.linspace(0.5, 2, 999),
        ]
    )  # fmt: skip
    steps = [seeds]
    for direction in (np.inf, -np.inf):
        near = seeds
        for _ in range(4):
            with np.errstate(over="ignore"):
                near = np.nextafter(near, direction)
            steps.append(near)
    values = np.concatenate(steps)
    return np.concatenate([values, -values])


def sample_of_doubles(seed: int, count: int) -> Array:
    """Random doubles, half of them where the functions bend, half of all sizes; and corners."""
    random = np.random.default_rng(seed)
    parts = [
        random.uniform(-40, 40, count // 4),
        random.uniform(-750, 750, count // 8),
        random.uniform(0.5, 2, count // 8),
        random.integers(0, 1 << 64, count // 4, dtype=np.uint64).view(np.float64),
        random.uniform(-1, 1, count // 4) * 2.0 ** random.integers(-60, 10, count // 4),
    ]
    return np.concatenate([corners(), *parts])


# -------------------------------------------------------------------------------- the measuring
class Worst(NamedTuple):
    """The largest error found, and where."""

    error: float
    xs: tuple[Any, ...]
    y: Any
    count: int


def measure(op: str, target: str, x: Array, dtype: str) -> Worst:
    """The worst error over these inputs."""
    xs = inputs(op, x)
    y = compiled(op, target, dtype)(*xs)
    found = errors(op, xs, y, dtype)
    at = int(found.argmax())
    return Worst(float(found[at]), tuple(x[at] for x in xs), y[at], len(x))


def _measure_part(op: str, target: str, dtype: str, start: int, step: int) -> Worst:
    floats = computed_in(dtype) == "float32"
    x = chunk_of_floats(start, step) if floats else sample_of_doubles(start, step)
    return measure(op, target, x, dtype)


def _parts(dtype: str, stride: int, samples: int) -> Iterator[tuple[int, int]]:
    if computed_in(dtype) == "float32":
        return ((start, stride) for start in range(0, 1 << 32, CHUNK * stride))
    return ((seed, min(samples, 500_000)) for seed in range(-(-samples // 500_000)))


def main() -> int:
    """Prints the worst errors; returns 1 if one exceeds its limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ops", nargs="*", default=list(FUNCTIONS), choices=FUNCTIONS)
    parser.add_argument("--isa", nargs="*", default=[isa.current().name], choices=isa.available())
    parser.add_argument("--dtype", nargs="*", default=["float32", "float64"], choices=REAL)
    parser.add_argument("--stride", type=int, default=1, help="take every n-th float")
    parser.add_argument("--samples", type=int, default=10_000_000, help="how many doubles")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    failed = False
    print(f"{'op':12} {'isa':8} {'dtype':8} {'inputs':>11}  {'ulp':>7} {'mpmath':>7}  worst input")
    with ProcessPoolExecutor(options.jobs) as pool:
        for op, target, dtype in itertools.product(options.ops, options.isa, options.dtype):
            began = time.perf_counter()
            parts = list(_parts(dtype, options.stride, options.samples))
            fixed = (itertools.repeat(value) for value in (op, target, dtype))
            found = list(pool.map(_measure_part, *fixed, *zip(*parts, strict=True), chunksize=8))
            worst = max(found, key=lambda one: one.error)
            limit = FUNCTIONS[op].limit(dtype)
            good = worst.error <= limit
            failed |= not good
            exact = (
                exact_error(op, worst.xs, worst.y, dtype) if np.isfinite(worst.error) else np.nan
            )
            print(
                f"{op:12} {target:8} {dtype:8} {sum(one.count for one in found):11}  "
                f"{worst.error:7.4f} {exact:7.4f}  {' '.join(float(x).hex() for x in worst.xs)} -> "
                f"{float(worst.y).hex()}"
                f"  ({time.perf_counter() - began:.0f} s){'' if good else f'  OVER {limit}'}",
                flush=True,
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
