"""The printer table of the CPU engine: one row per op of `anycell/lang/ops.py`, as LLVM text.

`EMIT[name](b, *values)` appends the instructions to the builder and returns the result. The rows
work on vectors of float and double for every instruction set. They are IEEE arithmetic in a fixed
order, so the same instructions give the same bits everywhere; infinities, NaN, both zeros and
subnormal numbers come out as the mathematics says. `tools/ulp.py` measures the errors and
`tools/minimax.py` found the coefficients.

All exponential functions split x = n ln2 + r with |r| <= ln2/2:

- Adding 1.5 * 2^23 (2^52 in a double) to x log2(e) rounds it to an integer in the lowest bits of
  the sum, without an instruction for rounding. If the constant carries the exponent's bias as
  well, those bits shifted to the top *are* the float 2^n.
- n ln2 is subtracted in two parts, the first of them so short that its product with n is exact.
- 2^n can leave the range of the format where the function does not. So it is kept some powers of
  two off, which the last operation puts right, and the result is rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .ir import Builder, Operand, Value, shape, vector


@dataclass(frozen=True)
class Real:
    """What the functions below need to know about a floating point format."""

    mantissa: int  # stored bits of it
    bias: int  # of the exponent
    ln2_high: float  # the leading bits of ln 2: as many as leave room for those of n
    ln2_low: float  # and what is missing
    tiny: float  # exp(x) rounds to 0 below this x,
    huge: float  # and to infinity above this one
    small: float  # 1 + exp(x) rounds to 1 below this x
    normal: float  # the smallest normal number
    exp: tuple[float, ...]
    tanh: tuple[float, ...]
    log: tuple[float, ...]
    log1p: tuple[float, ...]


# The last four of each by tools/minimax.py.
FLOAT = Real(
    mantissa=23,
    bias=127,
    ln2_high=0.693359375,
    ln2_low=-2.12194440e-4,
    tiny=-104.0,
    huge=89.0,
    small=-18.0,
    normal=2.0**-126,
    exp=(),
    tanh=(),
    log=(),
    log1p=(),
)
DOUBLE = Real(
    mantissa=52,
    bias=1023,
    ln2_high=6.93147180369123816490e-01,
    ln2_low=1.90821492927058770002e-10,
    tiny=-746.0,
    huge=710.0,
    small=-38.0,
    normal=2.0**-1022,
    exp=(),
    tanh=(),
    log=(),
    log1p=(),
)


def _format(x: Value) -> Real:
    return {"float": FLOAT, "double": DOUBLE}[shape(x.type)[1]]


# ------------------------------------------------------------------------------ exponentials


def _horner(b: Builder, x: Value, coefficients: Sequence[float]) -> Value:
    """The polynomial with these coefficients, lowest power first."""
    result: Operand = coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        result = b.fma(result, x, coefficient)
    assert isinstance(result, Value)
    return result


def _power_of_two(b: Builder, x: Value, factor: float, offset: Operand) -> tuple[Value, Value]:
    """n, the integer next to x * factor, and 2^(n + offset) as a real."""
    real = _format(x)
    # Numbers of this size have a spacing of 1, so that the sum is rounded to an integer.
    one = 1.5 * 2.0**real.mantissa
    magic = b.fadd(offset, one + real.bias) if isinstance(offset, Value) else one + real.bias + offset
    total = b.fma(x, factor, magic)
    power = b.shl(b.bits(total), real.mantissa)
    return b.fsub(total, magic), b.bitcast(power, x.type)


def _remainder(b: Builder, x: Value, n: Value, sign: int = 1) -> Value:
    """x - sign * n * ln2, as exact as x."""
    real = _format(x)
    return b.fma(n, -sign * real.ln2_low, b.fma(n, -sign * real.ln2_high, x))


def exp(b: Builder, x: Value) -> Value:
    """e^x: at most 0.6 ulp (0.6 in a double)."""
    real = _format(x)
    x = b.fmax(real.tiny, b.fmin(real.huge, x))
    # Half of the range above the truth below 0, and half below it above: nothing overflows early.
    far = real.bias // 2 + 1
    below = b.fcmp("olt", x, 0.0)
    n, scale = _power_of_two(b, x, LOG2E, b.select(below, b.value(far, x.type), -far))
    back = b.select(below, b.value(2.0**-far, x.type), 2.0**far)
    y = _horner(b, _remainder(b, x, n), (1.0, 1.0, *real.exp))
    return b.fmul(b.fmul(y, scale), back)


def _exp_of_minus(b: Builder, x: Value) -> Value:
    """e^-x for x >= 0."""
    real = _format(x)
    x = b.fmin(-real.tiny, x)
    far = real.mantissa + 2
    n, scale = _power_of_two(b, x, -LOG2E, far)
    y = _horner(b, _remainder(b, b.fneg(x), n), (1.0, 1.0, *real.exp))
    return b.fmul(b.fmul(y, scale), 2.0**-far)


def sigmoid(b: Builder, x: Value) -> Value:
    """1 / (1 + e^-x)."""
    real = _format(x)
    # Where e^-x would overflow, the result is subnormal and not yet 0: so both sides of the
    # fraction are scaled down. Where e^-x vanishes beside the 1, it may be anything as small.
    x = b.fmax(real.tiny, b.fmin(-real.small, x))
    far = -(real.mantissa + 2)
    n, scale = _power_of_two(b, x, -LOG2E, far)
    # With -r in place of r, every second coefficient changes its sign.
    y = _horner(b, _remainder(b, x, n, -1), _alternating((1.0, 1.0, *real.exp)))
    return b.fdiv(2.0**far, b.fma(y, scale, 2.0**far))


def _alternating(coefficients: Sequence[float]) -> list[float]:
    return [-c if k % 2 else c for k, c in enumerate(coefficients)]


def tanh(b: Builder, x: Value) -> Value:
    """The hyperbolic tangent, relatively accurate near 0 without a branch for it.

    |x| = n ln2/2 + r, and with s = 2^-n and w = tanh(r) the addition theorem says
    tanh|x| = ((1 - s) + w (1 + s)) / ((1 + s) + w (1 - s)), which is w itself where n = 0.
    """
    real = _format(x)
    size = b.fmin(-real.small / 2, b.fabs(x))
    n, s = _power_of_two(b, size, -2.0 * LOG2E, 0)
    # One part of ln2 is enough: an error in r counts ever less as n grows.
    r = b.fma(n, math.log(2.0) / 2.0, size)
    w = b.fmul(r, _horner(b, b.fmul(r, r), (1.0, *real.tanh)))
    less, more = b.fsub(1.0, s), b.fadd(s, 1.0)
    y = b.fdiv(b.fma(w, more, less), b.fma(w, less, more))
    return b.copysign(y, x)


# -------------------------------------------------------------------------------- logarithms


def log(b: Builder, x: Value) -> Value:
    """The natural logarithm: -inf at 0, NaN below."""
    real = _format(x)
    # x = 2^n (1 + f) with 1 + f between the roots of 1/2 and 2; subnormals are scaled up first.
    lift = real.mantissa + 2
    subnormal = b.fcmp("olt", x, real.normal)
    lifted = b.select(subnormal, b.fmul(x, 2.0**lift), x)
    root = b.bits(b.value(math.sqrt(0.5), x.type))
    offset = b.sub(b.bits(lifted), root)
    n = b.sitofp(b.ashr(offset, real.mantissa), x.type)
    n = b.fsub(n, b.select(subnormal, b.value(lift, x.type), 0.0))
    fraction = b.and_(offset, (1 << real.mantissa) - 1)
    f = b.fsub(b.bitcast(b.add(fraction, root), x.type), 1.0)
    if real is FLOAT:  # log(1 + f) = f - f^2/2 + f^3 P(f)
        square = b.fmul(f, f)
        cubic = b.fmul(b.fmul(square, f), _horner(b, f, real.log))
        tail = b.fma(square, -0.5, b.fma(n, real.ln2_low, cubic))
    else:
        tail = b.fma(n, real.ln2_low, b.fneg(_log1p_tail(b, f, real.log)))
    y = b.fma(n, real.ln2_high, b.fadd(f, tail))
    y = b.select(b.fcmp("oeq", x, math.inf), x, y)
    y = b.select(b.fcmp("ult", x, 0.0), b.value(math.nan, x.type), y)
    return b.select(b.fcmp("oeq", x, 0.0), b.value(-math.inf, x.type), y)


def _log1p_tail(b: Builder, f: Value, coefficients: Sequence[float]) -> Value:
    """f - log(1 + f), where log(1 + f) = log((1 + s) / (1 - s)) = 2s + s^3 R(s^2), s = f/(2 + f)."""
    s = b.fdiv(f, b.fadd(f, 2.0))
    z = b.fmul(s, s)
    return b.fmul(s, b.fma(b.fneg(z), _horner(b, z, coefficients), f))


def _log1p_of_exp_of_minus(b: Builder, x: Value) -> Value:
    """log(1 + e^-x) for x >= 0."""
    real = _format(x)
    t = _exp_of_minus(b, x)
    if real is FLOAT:
        return b.fmul(t, _horner(b, t, (1.0, *real.log1p)))
    return b.fsub(t, _log1p_tail(b, t, real.log1p))


def softplus(b: Builder, x: Value) -> Value:
    """log(1 + e^x) = max(x, 0) + log(1 + e^-|x|), accurate in both tails."""
    return b.fadd(b.fmax(x, 0.0), _log1p_of_exp_of_minus(b, b.fabs(x)))


def log_sigmoid(b: Builder, x: Value) -> Value:
    """log(1 / (1 + e^-x)) = min(x, 0) - log(1 + e^-|x|)."""
    return b.fsub(b.fmin(x, 0.0), _log1p_of_exp_of_minus(b, b.fabs(x)))


# ------------------------------------------------------------------ choice (NaN stays NaN)


def hard_sigmoid(b: Builder, x: Value) -> Value:
    """x/6 + 1/2 between 0 and 1."""
    return b.fmax(0.0, b.fmin(1.0, b.fma(x, 1.0 / 6.0, 0.5)))


def minimum(b: Builder, x: Value, y: Value) -> Value:
    """The smaller one; NaN where either is."""
    return b.select(b.fcmp("uno", x, x), x, b.fmin(x, y))


def maximum(b: Builder, x: Value, y: Value) -> Value:
    """The larger one; NaN where either is."""
    return b.select(b.fcmp("uno", x, x), x, b.fmax(x, y))


def sign(b: Builder, x: Value) -> Value:
    """1, -1, or x itself where it is 0 or NaN."""
    one = b.value(1.0, x.type)
    nonzero = b.fcmp("one", x, 0.0)
    return b.select(nonzero, b.copysign(one, x), x)


def _compare(how: str) -> Callable[[Builder, Value, Value], Value]:
    return lambda b, x, y: b.fcmp(how, x, y)


EMIT: dict[str, Callable[..., Value]] = {
    # arithmetic
    "neg": Builder.fneg,
    "add": Builder.fadd,
    "sub": Builder.fsub,
    "mul": Builder.fmul,
    "div": Builder.fdiv,
    # element-wise functions
    "exp": exp,
    "log": log,
    "sqrt": Builder.sqrt,
    "abs": Builder.fabs,
    "sign": sign,
    "sigmoid": sigmoid,
    "tanh": tanh,
    "relu": lambda b, x: b.fmax(0.0, x),  # x where that is NaN
    "softplus": softplus,
    "log_sigmoid": log_sigmoid,
    "hard_sigmoid": hard_sigmoid,
    "minimum": minimum,
    "maximum": maximum,
    "stop_gradient": lambda b, x: x,
    # conditions: masks
    "lt": _compare("olt"),
    "le": _compare("ole"),
    "gt": _compare("ogt"),
    "ge": _compare("oge"),
    "eq": _compare("oeq"),
    "ne": _compare("une"),
    "logical_and": Builder.and_,
    "logical_or": Builder.or_,
    "logical_not": Builder.not_,
    "where": Builder.select,
}

# ------------------------------------------------------------------------------ random numbers

_PHILOX_ROUNDS = 10
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(
    b: Builder, c0: Value, c1: Value, c2: Value, c3: Value, key0: Value, key1: Value
) -> tuple[Value, Value, Value, Value]:
    """Philox4x32-10 (Salmon et al. 2011): four random words for each lane's counter.

    Counters and words are vectors of i32, the keys are i32 scalars. `anycell/philox.py` is the
    same in NumPy.
    """
    lanes = shape(c0.type)[0]
    key0, key1 = b.splat(key0, lanes), b.splat(key1, lanes)
    for number in range(_PHILOX_ROUNDS):
        if number:
            key0, key1 = b.add(key0, _PHILOX_WEYL[0]), b.add(key1, _PHILOX_WEYL[1])
        high0, low0 = _product(b, c0, _PHILOX_MULTIPLIERS[0])
        high1, low1 = _product(b, c2, _PHILOX_MULTIPLIERS[1])
        c0, c2 = b.xor(b.xor(high1, c1), key0), b.xor(b.xor(high0, c3), key1)
        c1, c3 = low1, low0
    return c0, c1, c2, c3


def _product(b: Builder, x: Value, factor: int) -> tuple[Value, Value]:
    """The high and the low words of x * factor.

    The hardware multiplies the even words of two registers into double words; the odd words are
    moved to even places for a second product. (Lane 0 is the low half of a double word.)
    """
    lanes = shape(x.type)[0]
    pairs = b.bitcast(x, vector(lanes // 2, "i64"))
    even = b.bitcast(b.mul(b.and_(pairs, 0xFFFFFFFF), factor), x.type)
    odd = b.bitcast(b.mul(b.lshr(pairs, 32), factor), x.type)
    high = [lane + 1 + (lanes - 1) * (lane % 2) - lane % 2 for lane in range(lanes)]
    low = [lane + (lanes - 1) * (lane % 2) for lane in range(lanes)]
    return b.shuffle(even, odd, high), b.shuffle(even, odd, low)


def keep_mask(b: Builder, words: Value, rate: Value) -> Value:
    """The lanes to keep: those where a uniform number from the word is below `rate`, a float.

    The upper 24 bits make the number, in float whatever the cell computes in: one seed keeps the
    same units in every dtype and every engine.
    """
    uniform = b.fmul(b.sitofp(b.lshr(words, 8), "float"), 2.0**-24)
    return b.fcmp("olt", uniform, b.splat(rate, shape(words.type)[0]))
