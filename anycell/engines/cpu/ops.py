"""The printer table of the CPU engine: one row per op of `anycell/lang/ops.py`, as LLVM text.

`EMIT[name](b, *values)` appends the instructions to the builder and returns the result. The
functions take vectors of float and double and work for every instruction set. They use IEEE
arithmetic in a fixed order, so the same instructions return the same bits everywhere. Infinities,
NaN, both zeros and subnormal numbers have the results that mathematics defines.
`tools/minimax.py` found the coefficients; `tools/ulp.py` measured the worst errors, in ulps:

                                            exp      log    sigmoid    tanh
    all 2^32 floats, with fused fma         1.032    0.974    1.9992   1.855
    all 2^32 floats, without                1.001    0.974    1.9992   1.987
    12 million doubles, with fused fma      1.065    0.947    1.9972   1.977
    12 million doubles, without             1.026    0.947    1.9972   2.205

All exponential functions split x = n ln2 + r with |r| <= ln2/2:

- Adding 1.5 * 2^23 (2^52 in a double) to x log2(e) rounds it to an integer in the lowest bits of
  the sum, without an instruction for rounding. If the constant also includes the exponent's bias,
  those bits, shifted to the top, *are* the float 2^n.
- n ln2 is subtracted in two parts. The first is so short that its product with n is exact.
- 2^n can leave the range of the format although the function's value does not. So 2^n is scaled
  by a power of two, which the last operation removes, and the result is rounded once.

A cell of 16 or 8 bits also computes in float, but its functions may be shorter (`SHORT`): the
polynomial of exp has a lower degree, and ln2 has one part. In 512-bit vectors, a reciprocal
replaces the division, which occupies its unit for as long as all other work takes. The worst errors
over 44 million floats, in ulps of the 16-bit number that the result is rounded to:

                       exp      log    sigmoid    tanh     softplus   log_sigmoid
    float16          0.0088   0.0001   0.0090    0.0445    0.0089      0.0090
    bfloat16         0.0011   0.0001   0.0011    0.0056    0.0011      0.0011
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from anycell.lang.philox import MULTIPLIERS, ROUNDS, WEYL

from .idioms import near_reciprocal
from .ir import Builder, Operand, Value, shape, vector

LOG2E = 1.0 / math.log(2.0)


@dataclass(frozen=True)
class Real:
    """The properties of a floating point format that the functions below need."""

    mantissa: int  # its stored bits
    bias: int  # of the exponent
    ln2_high: float  # the leading bits of ln 2, so few that their product with n is exact
    ln2_low: float  # the remainder of ln 2
    tiny: float  # exp(x) rounds to 0 below this x
    huge: float  # exp(x) rounds to infinity above this x
    small: float  # 1 + exp(x) rounds to 1 below this x
    normal: float  # the smallest normal number
    exp: tuple[float, ...]
    log: tuple[float, ...]
    log1p: tuple[float, ...]


# tools/minimax.py found exp, log and log1p of each format.
FLOAT = Real(
    mantissa=23, bias=127,
    ln2_high=0.693359375, ln2_low=-2.12194440e-4,
    tiny=-104.0, huge=89.0, small=-19.0, normal=2.0**-126,
    exp=(0.49999994, 0.16666523, 0.041668206, 0.00836871, 0.0013829652),
    log=(
        0.3333333, -0.2500105, 0.20001522, -0.16613095, 0.14176095, -0.13235982, 0.13034806,
        -0.07819206,
    ),
    log1p=(
        -0.4999993, 0.33330464, -0.24958019, 0.19692102, -0.1534488, 0.10661128, -0.05745723,
        0.020086242, -0.0032904686,
    ),
)  # fmt: skip
DOUBLE = Real(
    mantissa=52, bias=1023,
    ln2_high=6.93147180369123816490e-01, ln2_low=1.90821492927058770002e-10,
    tiny=-746.0, huge=710.0, small=-39.0, normal=2.0**-1022,
    exp=(
        0.5000000000000011, 0.16666666666666466, 0.04166666666652612, 0.00833333333345772,
        0.0013888888945152995, 0.0001984126965818274, 2.4801491062436393e-05,
        2.7557387306461085e-06, 2.763107932495818e-07, 2.5078846707375816e-08,
    ),
    log=(
        0.6666666666666734, 0.3999999999941705, 0.28571428741890503, 0.2222219862190793,
        0.1818356188856455, 0.15314110885216695, 0.14795363631595138,
    ),
    log1p=(
        0.6666666666666631, 0.40000000000155905, 0.2857142854801184, 0.2222222396060771,
        0.18181744222182106, 0.15386554092544036, 0.13301043779741614, 0.12105579202007194,
        0.083421157201988, 0.17015198066740747,
    ),
)  # fmt: skip


SHORT = replace(FLOAT, ln2_high=0.6931472, ln2_low=0.0, exp=(0.5000512, 0.16754767, 0.041294266))


def _format(b: Builder, x: Value) -> Real:
    if shape(x.type)[1] == "double":
        return DOUBLE
    return SHORT if b.module.short else FLOAT


def _over(b: Builder, x: Operand, y: Value) -> Value:
    """x / y, for a finite y that is not 0."""
    near = near_reciprocal(b, y) if b.module.short else None
    if near is None:
        return x / y
    # One step of Newton's method.
    residual = b.fma(-y, near, 1.0)
    quotient = x * near
    return b.fma(quotient, residual, quotient)


# ------------------------------------------------------------------------------ exponentials


def _polynomial(b: Builder, x: Value, square: Value, coefficients: Sequence[float]) -> Value:
    """The polynomial in x with these coefficients, lowest power first; square is x * x.

    Takes the same number of operations as Horner's rule, where each operation waits for the one
    before. Here the pairs c + d x are independent; only adding them in powers of square is a chain.
    """
    constants = [b.value(c, x.type) for c in coefficients]
    pairs = [
        b.fma(x, constants[k + 1], constants[k]) if k + 1 < len(constants) else constants[k]
        for k in range(0, len(constants), 2)
    ]
    return reduce(lambda upper, pair: b.fma(upper, square, pair), reversed(pairs))


def _power_of_two(b: Builder, x: Value, factor: float, offset: Operand) -> tuple[Value, Value]:
    """n, the integer next to x * factor, and 2^(n + offset) as a real."""
    real = _format(b, x)
    # Numbers of this size have a spacing of 1, so the sum is rounded to an integer.
    zero = 1.5 * 2.0**real.mantissa + real.bias
    magic = offset + zero
    total = b.fma(x, factor, magic)
    return total - magic, b.bitcast(b.bits(total) << real.mantissa, x.type)


def _exp_parts(b: Builder, x: Value, offset: Operand, sign: int = 1) -> tuple[Value, Value]:
    """(p, s) with e^(sign x) = s (1 + p) / 2^offset, where s is a power of 2 and |p| < 0.42."""
    real = _format(b, x)
    n, s = _power_of_two(b, x, sign * LOG2E, offset)
    r = b.fma(n, -sign * real.ln2_high, x)
    if real.ln2_low:
        r = b.fma(n, -sign * real.ln2_low, r)
    square = r * r
    p = _polynomial(b, r, square, [c * sign**k for k, c in enumerate(real.exp)])
    return b.fma(square, p, r if sign > 0 else -r), s


def exp(b: Builder, x: Value) -> Value:
    """e^x."""
    real = _format(b, x)
    x = b.fmax(real.tiny, b.fmin(real.huge, x))
    # The scale is 2^far too large for a negative x, else 2^far too small: it stays in range.
    far = float(real.bias // 2 + 1)
    negative = x < 0.0
    p, s = _exp_parts(b, x, b.select(negative, far, -far))
    return b.fma(s, p, s) * b.select(negative, 2.0**-far, 2.0**far)


def _exp_of_minus(b: Builder, x: Value) -> Value:
    """e^-x for x >= 0."""
    real = _format(b, x)
    far = real.mantissa + 2
    p, s = _exp_parts(b, b.fmin(-real.tiny, x), far, sign=-1)
    return b.fma(s, p, s) * 2.0**-far


def sigmoid(b: Builder, x: Value) -> Value:
    """1 / (1 + e^-x)."""
    real = _format(b, x)
    # e^-x overflows where the result is subnormal, not yet 0, so numerator and denominator are
    # scaled down. x is limited to where 1 + e^-x rounds to 1.
    x = b.fmax(real.tiny, b.fmin(-real.small, x))
    one = 2.0 ** -(real.mantissa + 2)
    p, s = _exp_parts(b, x, math.log2(one), sign=-1)
    return _over(b, one, s + b.fma(s, p, one))


def tanh(b: Builder, x: Value) -> Value:
    """The hyperbolic tangent, accurate near 0 without a branch for it.

    With t = (e^2|x| - 1) / 2, tanh |x| is t / (1 + t) = t - t^2 / (1 + t) = 1 - 1 / (1 + t). The
    second form subtracts little if t is small, the third if t is large, so errors of the fraction
    hardly count. With m = min(t, 1), m - m^2 / (1 + t) is the form that suits t.
    """
    real = _format(b, x)
    size = b.fmin(-real.small / 2, b.fabs(x))
    n, s = _power_of_two(b, size, 2.0 * LOG2E, 0)
    # Half of r, so that 2|x| need not be computed. One part of ln2 is enough here, because an error
    # in r counts less the larger n is.
    half = b.fma(n, -math.log(2.0) / 2.0, size)
    scaled = [c * 2.0 ** (k + 1) for k, c in enumerate(real.exp)]
    square = half * half
    p = b.fma(square, _polynomial(b, half, square, scaled), half)  # (e^r - 1) / 2
    t = b.fma(s, p, b.fma(s, 0.5, -0.5))
    m = b.fmin(1.0, t)
    y = b.fma(-m, _over(b, m, t + 1.0), m)
    return b.copysign(y, x)


# -------------------------------------------------------------------------------- logarithms


def log(b: Builder, x: Value) -> Value:
    """The natural logarithm: -inf at 0, NaN below 0."""
    real = _format(b, x)
    # x = 2^n (1 + f) with 1 + f between the roots of 1/2 and 2; subnormals are scaled up first.
    lift = real.mantissa + 2
    subnormal = x < real.normal
    lifted = b.select(subnormal, x * 2.0**lift, x)
    root = b.bits(b.value(math.sqrt(0.5), x.type))
    # The offset is counted from the root's bits and includes the bias: for x >= 0 it is positive.
    offset = b.bits(lifted) - (root - (real.bias << real.mantissa))
    magic = 1.5 * 2.0**real.mantissa
    n = offset >> real.mantissa | b.bits(b.value(magic, x.type))
    shift = b.select(subnormal, magic + real.bias + lift, magic + real.bias)
    n = b.bitcast(n, x.type) - shift
    fraction = offset & ((1 << real.mantissa) - 1)
    f = b.bitcast(fraction + root, x.type) - 1.0
    if real is not DOUBLE:  # log(1 + f) = f - f^2/2 + f^3 P(f)
        square = f * f
        cubic = square * f * _polynomial(b, f, square, real.log)
        tail = b.fma(square, -0.5, b.fma(n, real.ln2_low, cubic))
    else:
        tail = b.fma(n, real.ln2_low, -_log1p_tail(b, f, real.log))
    y = b.fma(n, real.ln2_high, f + tail)
    y = b.select(x.eq(math.inf), x, y)
    y = b.select(b.compare("ult", x, 0.0), math.nan, y)
    return b.select(x.eq(0.0), -math.inf, y)


def _log1p_tail(b: Builder, f: Value, coefficients: Sequence[float]) -> Value:
    """f - log(1 + f), from log(1 + f) = log((1 + s) / (1 - s)) = 2s + s^3 R(s^2), s = f/(2 + f)."""
    s = f / (f + 2.0)
    z = s * s
    series = _polynomial(b, z, z * z, coefficients)
    return s * b.fma(-z, series, f)


def _log1p_of_exp_of_minus(b: Builder, x: Value) -> Value:
    """log(1 + e^-x) for x >= 0."""
    real = _format(b, x)
    t = _exp_of_minus(b, x)
    if real is not DOUBLE:
        square = t * t
        return b.fma(square, _polynomial(b, t, square, real.log1p), t)
    return t - _log1p_tail(b, t, real.log1p)


def softplus(b: Builder, x: Value) -> Value:
    """log(1 + e^x) = max(x, 0) + log(1 + e^-|x|), accurate in both tails."""
    return b.fmax(x, 0.0) + _log1p_of_exp_of_minus(b, b.fabs(x))


def log_sigmoid(b: Builder, x: Value) -> Value:
    """log(1 / (1 + e^-x)) = -softplus(-x)."""
    return -softplus(b, -x)


# ------------------------------------------------------------------ choice (NaN stays NaN)


def hard_sigmoid(b: Builder, x: Value) -> Value:
    """x/6 + 1/2 between 0 and 1."""
    return b.fmax(0.0, b.fmin(1.0, b.fma(x, 1.0 / 6.0, 0.5)))


def minimum(b: Builder, x: Value, y: Value) -> Value:
    """The smaller of x and y; NaN if either is NaN."""
    return b.select(b.compare("uno", x, x), x, b.fmin(x, y))


def maximum(b: Builder, x: Value, y: Value) -> Value:
    """The larger of x and y; NaN if either is NaN."""
    return b.select(b.compare("uno", x, x), x, b.fmax(x, y))


def sign(b: Builder, x: Value) -> Value:
    """1, -1, or x itself where it is 0 or NaN."""
    return b.select(b.compare("one", x, 0.0), b.copysign(1.0, x), x)


EMIT: dict[str, Callable[..., Value]] = {
    # arithmetic
    "neg": lambda b, x: -x,
    "add": lambda b, x, y: x + y,
    "sub": lambda b, x, y: x - y,
    "mul": lambda b, x, y: x * y,
    "div": lambda b, x, y: x / y,
    # element-wise functions
    "exp": exp,
    "log": log,
    "sqrt": Builder.sqrt,
    "abs": Builder.fabs,
    "sign": sign,
    "sigmoid": sigmoid,
    "tanh": tanh,
    "relu": lambda b, x: b.fmax(0.0, x),  # NaN stays NaN
    "softplus": softplus,
    "log_sigmoid": log_sigmoid,
    "hard_sigmoid": hard_sigmoid,
    "minimum": minimum,
    "maximum": maximum,
    "stop_gradient": lambda b, x: x,
    # conditions: masks
    "lt": lambda b, x, y: x < y,
    "le": lambda b, x, y: x <= y,
    "gt": lambda b, x, y: x > y,
    "ge": lambda b, x, y: x >= y,
    "eq": lambda b, x, y: x.eq(y),
    "ne": lambda b, x, y: x.ne(y),
    "logical_and": lambda b, x, y: x & y,
    "logical_or": lambda b, x, y: x | y,
    "logical_not": lambda b, x: ~x,
    "where": Builder.select,
}

# ------------------------------------------------------------------------------ random numbers


def philox(
    b: Builder, c0: Value, c1: Value, c2: Value, c3: Value, key0: Value, key1: Value
) -> tuple[Value, Value, Value, Value]:
    """Philox4x32-10 (Salmon et al. 2011): four random words for each lane's counter.

    All values are vectors of i32. `anycell/lang/philox.py` does the same in NumPy.
    """
    for number in range(ROUNDS):
        if number:
            key0, key1 = key0 + WEYL[0], key1 + WEYL[1]
        high0, low0 = _product(b, c0, MULTIPLIERS[0])
        high1, low1 = _product(b, c2, MULTIPLIERS[1])
        c0, c2 = high1 ^ c1 ^ key0, high0 ^ c3 ^ key1
        c1, c3 = low1, low0
    return c0, c1, c2, c3


def _product(b: Builder, x: Value, factor: int) -> tuple[Value, Value]:
    """The high and the low words of x * factor.

    The hardware multiplies the even words of two registers into double words; the odd words are
    moved to even places for a second product. (Lane 0 is the low half of a double word.)
    """
    lanes = shape(x.type)[0]
    pairs = b.bitcast(x, vector(lanes // 2, "i64"))
    even = b.bitcast((pairs & 0xFFFFFFFF) * factor, x.type)
    odd = b.bitcast((pairs >> 32) * factor, x.type)
    low = [lane - lane % 2 + lanes * (lane % 2) for lane in range(lanes)]
    high = [lane + 1 for lane in low]
    return b.shuffle(even, odd, high), b.shuffle(even, odd, low)
