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

                                            sin      cos      erf      pow
    44 million floats, with fma or not      0.5000   0.5000   0.5000   0.5000
    1.2 million doubles, with fused fma     0.857    0.851    2.173    1.320
    1.2 million doubles, without            0.857    0.896    2.173    1.320

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
from functools import reduce, wraps

from anycell.lang.philox import MULTIPLIERS, ROUNDS, WEYL

from .idioms import near_reciprocal
from .ir import Builder, Module, Operand, Value, shape, vector

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
    sin: tuple[float, ...] = ()  # these only in double: functions of floats are computed in it
    cos: tuple[float, ...] = ()
    erf_near: tuple[float, ...] = ()
    erf_far: tuple[float, ...] = ()
    log_of_power: tuple[float, ...] = ()


# tools/minimax.py found the polynomials of each format.
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
    sin=(
        -0.1666666666666663, 0.00833333333332184, -0.00019841269829358522, 2.755731353851032e-06,
        -2.505073438836183e-08, 1.5895433223242666e-10,
    ),
    cos=(
        0.041666666666666595, -0.0013888888888873342, 2.480158728900208e-05,
        -2.755731421703866e-07, 2.087570539594362e-09, -1.1358749231153162e-11,
    ),
    erf_near=(
        1.1283791670955126, -0.3761263890318332, 0.11283791670934933, -0.026866170641419256,
        0.005223977590090408, -0.0008548325031904536, 0.00012055261675710622,
        -1.492396485592891e-05, 1.643543671805519e-06, -1.6085345295139462e-07,
        1.2916864951165885e-08, -4.782753388172728e-10, -4.950415636133204e-11,
    ),
    erf_far=(
        1.8496055099332482, 2.638967514234796, 0.8431072563581494, 0.04156109805542535,
        -0.010033825555789248, 0.001977904009909112, -0.0002373299448178784,
        -2.6251261525184975e-05, 2.709114205174061e-05, -9.481150925495135e-06,
        1.8797242320733128e-06, 4.977107832711921e-08, -2.5510714488051206e-07,
        1.5070043878212396e-07, -6.203142562490189e-08, 1.9849114518876734e-08,
        -4.900653181055313e-09, 8.949783896294689e-10, -1.1292923279215481e-10,
        8.7369754492214e-12, -3.1095462435691074e-13,
    ),
    log_of_power=(
        0.4, 0.28571428571426183, 0.22222222223230245, 0.1818181795503004, 0.15384646153305467,
        0.1333066287857287, 0.11916561995259183, 0.04891154291666942, 1.4101095064761537,
        -17.42839481313194, 101.68511931308421,
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


def exp(b: Builder, x: Value, low: Value | None = None) -> Value:
    """e^x, or e^(x + low) for a low of some last places of x."""
    real = _format(b, x)
    x = b.fmax(real.tiny, b.fmin(real.huge, x))
    # The scale is 2^far too large for a negative x, else 2^far too small: it stays in range.
    far = float(real.bias // 2 + 1)
    negative = x < 0.0
    p, s = _exp_parts(b, x, b.select(negative, b.value(far, x.type), -far))
    if low is not None:
        p = p + b.fma(low, p, low)
    return b.fma(s, p, s) * b.select(negative, b.value(2.0**-far, x.type), 2.0**far)


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
    almost_one = 2.0 ** -(real.mantissa + 2)
    p, s = _exp_parts(b, x, math.log2(almost_one), sign=-1)
    return _over(b, almost_one, s + b.fma(s, p, almost_one))


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
    n, f = _scaled(b, x)
    if real is not DOUBLE:  # log(1 + f) = f - f^2/2 + f^3 P(f)
        square = f * f
        cubic = square * f * _polynomial(b, f, square, real.log)
        tail = b.fma(square, -0.5, b.fma(n, real.ln2_low, cubic))
    else:
        tail = b.fma(n, real.ln2_low, -_log1p_tail(b, f, real.log))
    return _log_at_the_ends(b, x, b.fma(n, real.ln2_high, f + tail))


def _log_at_the_ends(b: Builder, x: Value, y: Value) -> Value:
    """The logarithm y of x; also where x is infinite, NaN, 0 or negative."""
    y = b.select(x.eq(math.inf), x, y)
    y = b.select(b.compare("ult", x, 0.0), math.nan, y)
    return b.select(x.eq(0.0), -math.inf, y)


def _scaled(b: Builder, x: Value) -> tuple[Value, Value]:
    """(n, f) with x = 2^n (1 + f) and 1 + f between the roots of 1/2 and 2, for a positive x."""
    real = _format(b, x)
    # Subnormals are scaled up first.
    lift = real.mantissa + 2
    subnormal = x < real.normal
    lifted = b.select(subnormal, x * 2.0**lift, x)
    root = b.bits(b.value(math.sqrt(0.5), x.type))
    # The offset is counted from the root's bits and includes the bias: for x >= 0 it is positive.
    offset = b.bits(lifted) - (root - (real.bias << real.mantissa))
    magic = 1.5 * 2.0**real.mantissa
    n = offset >> real.mantissa | b.bits(b.value(magic, x.type))
    bias = b.value(magic + real.bias, x.type)
    shift = b.select(subnormal, magic + real.bias + lift, bias)
    n = b.bitcast(n, x.type) - shift
    fraction = offset & ((1 << real.mantissa) - 1)
    return n, b.bitcast(fraction + root, x.type) - 1.0


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


# ------------------------------------------------------- functions that are computed in double


def _in_double(function: Callable[..., Value]) -> Callable[..., Value]:
    """The function of doubles for floats too. A float has twice its digits in a double, so no
    sum or range reduction needs any care, and the result is rounded once.
    """

    @wraps(function)
    def of_any(b: Builder, *values: Value) -> Value:
        wide = [b.fpext(value, "double") for value in values]
        return b.fptrunc(function(b, *wide), shape(values[0].type)[1])

    return of_any


def _exact_sum(x: Value, y: Value | float) -> tuple[Value, Value]:
    """x + y, and what rounding took from it (Knuth, 1969)."""
    total = x + y
    part = total - x
    return total, (x - (total - part)) + (y - part)


def _exact_product(b: Builder, x: Value, y: Value) -> tuple[Value, Value]:
    """x y, and what rounding took from it, of doubles."""
    product = x * y
    if b.target.fma:
        return product, b.intrinsic("llvm.fma", x, y, -product)
    (x, x_low), (y, y_low) = _halves(b, x), _halves(b, y)
    return product, ((x * y - product) + (x * y_low + x_low * y)) + x_low * y_low


def _halves(b: Builder, x: Value) -> tuple[Value, Value]:
    """A double as a sum of two numbers of 26 and 27 bits, whose products are exact."""
    upper = b.bitcast(b.bits(x) & -(1 << 27), x.type)
    return upper, x - upper


# pi/2 in parts whose products with a whole number below 2^14 are exact, but for the last.
_NEAR = 2.0**14
_PI_2 = (1.5707963267923333, 2.5633441515905732e-12, 3.9455541665632055e-24)
_QUARTER = "reduced_by_quarter_turns"
# 1280 bits of 2/pi.
_TWO_OVER_PI = (
    "A2F9836E4E441529FC2757D1F534DDC0DB6295993C439041FE5163ABDEBBC561B7246E3A424DD2E0"
    "06492EEA09D1921CFE1DEB1CB129A73EE88235F52EBB4484E99C7026B45F7E413991D639835339F4"
    "9C845F8BBDF9283B1FF897FFDE05980FEF2F118B5A0A6D1F6D367ECF27CB09B74F463F669E5FEA2D"
    "7527BAC7EBE5F17B3D0739F78A5292EA6BFB5FB11F8D5D0856033046FC7B6BABF0CFBC209AF4361D"
)


def _quarter_turns(b: Builder, x: Value) -> tuple[Value, Value, Value]:
    """(n, r, low) with x = n pi/2 + r + low and |r| <= pi/4, for x >= 0; n as integers modulo 4.

    Cody and Waite's way below 2^14. Lanes beyond, which are rare, take Payne and Hanek's one by
    one, in a function of the module.
    """
    lanes, magic = shape(x.type)[0], 1.5 * 2.0**DOUBLE.mantissa
    total = b.fma(x, 2.0 / math.pi, magic)
    n = total - magic
    high = b.fma(n, -_PI_2[0], x)
    part = n * _PI_2[1]
    r = high - part
    low = b.fma(n, -_PI_2[2], (high - r) - part)
    far = (x > _NEAR) & (x < math.inf)
    parts = [b.variable(value) for value in (total, r, low)]
    with b.when(b.bitcast(far, f"i{lanes}").ne(0)):
        places = [b.variable(x), *parts]
        if not b.module.defines(_QUARTER):
            _print_reduction(b.module)
        with b.loop(0, lanes) as lane:
            here = [b.gep(place.address, lane, "double") for place in places]
            value = b.load(here[0], "double")
            with b.when((value > _NEAR) & (value < math.inf)):
                b.call(_QUARTER, *here)
    return b.bits(parts[0].value), parts[1].value, parts[2].value


def _print_reduction(module: Module) -> None:
    """Prints ``_quarter_turns`` of one finite number above 1.

    Source: Payne & Hanek, *Radian Reduction for Trigonometric Functions*, 1983. x = m 2^e with an
    integer m. The bits of 2/pi whose product with x is a multiple of 4 are left out, so 192 bits
    after them suffice for any x; the first two bits of their product with m are n.
    """
    b = module.private(_QUARTER, "ptr x, ptr n, ptr r, ptr low")
    x, to_n, to_r, to_low = b.args
    # 2/pi, after a word of zeros: an exponent below 1 begins before its first bit.
    digits = "0" * 16 + _TWO_OVER_PI
    words = [int(digits[k : k + 16], 16) for k in range(0, len(digits), 16)]
    table = module.table(words, "i64")
    bits = b.load(x, "i64", 8)
    mantissa = bits & (1 << DOUBLE.mantissa) - 1 | 1 << DOUBLE.mantissa
    first = (bits >> DOUBLE.mantissa) - (DOUBLE.bias + DOUBLE.mantissa + 2 - 64)
    word, shift = first >> 6, first & 63
    window = []
    for k in range(3):
        upper, lower = (b.load(b.gep(table, word + j, "i64"), "i64") for j in (k, k + 1))
        window.append(upper << shift | lower >> 1 >> 63 - shift)
    wide = b.zext(mantissa, "i128")
    middle = wide * b.zext(window[1], "i128") + (wide * b.zext(window[2], "i128") >> 64)
    turns = mantissa * window[0] + b.trunc(middle >> 64, "i64")
    # Rounded to the nearest whole number, whose distance is a signed fraction of 126 bits.
    n = (turns >> 62) + (turns >> 61 & 1)
    lower = b.trunc(middle, "i64")
    fraction = [b.ashr(turns << 2 | lower >> 62, 32), (turns << 2 | lower >> 62) & 0xFFFFFFFF]
    a, c = (
        b.sitofp(value, "double") * 2.0**-k for value, k in zip(fraction, (32, 64), strict=True)
    )
    rest = b.sitofp(lower << 2 >> 11, "double") * 2.0**-117
    high = a + c
    low = c - (high - a) + rest
    # Times pi/2, whose first part has 26 bits.
    half = b.value(math.pi / 2, "double")
    upper, bottom = _halves(b, high)
    short, more = 1.5707963109016418, 1.5893254773528196e-08
    product = upper * short
    tail = b.fma(upper, more, (bottom + low) * half)
    r = product + tail
    b.store(n, to_n)
    b.store(r, to_r)
    b.store(tail - (r - product), to_low)


def _sine(b: Builder, x: Value, ahead: int) -> Value:
    """sin(x + ahead pi/2) for x >= 0."""
    n, r, low = _quarter_turns(b, x)
    n = n + ahead
    z = r * r
    square = z * z
    sine = r + b.fma(r * z, _polynomial(b, z, square, DOUBLE.sin), low)
    half = z * 0.5
    near = 1.0 - half
    rest = b.fma(square, _polynomial(b, z, square, DOUBLE.cos), -(r * low))
    cosine = near + (((1.0 - near) - half) + rest)
    y = b.select((n & 1).ne(0), cosine, sine)
    return b.bitcast(b.bits(y) ^ ((n & 2) << 62), x.type)


@_in_double
def sin(b: Builder, x: Value) -> Value:
    """The sine of any number; NaN of an infinity."""
    sign = b.bits(x) & -(1 << 63)
    return b.bitcast(b.bits(_sine(b, b.fabs(x), 0)) ^ sign, x.type)


@_in_double
def cos(b: Builder, x: Value) -> Value:
    """The cosine of any number; NaN of an infinity."""
    return _sine(b, b.fabs(x), 1)


@_in_double
def erf(b: Builder, x: Value) -> Value:
    """The error function: a polynomial below 1, and 1 - e^-q with a polynomial q above."""
    size = b.fmin(6.0, b.fabs(x))  # beyond, the result rounds to 1
    z, t = size * size, size - 1.0
    near = size * _polynomial(b, z, z * z, DOUBLE.erf_near)
    far = 1.0 - exp(b, -_polynomial(b, t, t * t, DOUBLE.erf_far))
    return b.copysign(b.select(size < 1.0, near, far), x)


def _log_in_two(b: Builder, x: Value) -> tuple[Value, Value]:
    """log x of a double as the sum of two, with some 65 good bits: what `log` does, but the first
    two terms of 2 s + 2/3 s^3 + s^5 R(s^2) and their sum with n ln 2 are exact to 2^-65.
    """
    n, f = _scaled(b, x)
    d = f + 2.0
    s = f / d
    product, lost = _exact_product(b, s, d)
    s_low = (((f - product) - lost) - s * (f - (d - 2.0))) / d
    z, z_low = _exact_product(b, s, s)
    z_low = b.fma(s * s_low, 2.0, z_low)
    factor, factor_low = _exact_sum(
        b.value(2.0 / 3.0, x.type), z * _polynomial(b, z, z * z, DOUBLE.log_of_power)
    )
    factor_low = factor_low + 3.700743415417188e-17  # 2/3 has more digits than a double
    cube, cube_low = _exact_product(b, s, z)
    cube_low = cube_low + b.fma(s, z_low, s_low * z)
    third, third_low = _exact_product(b, cube, factor)
    third_low = third_low + b.fma(cube, factor_low, cube_low * factor)
    first, first_low = _exact_sum(n * DOUBLE.ln2_high, s * 2.0)
    first, more = _exact_sum(first, third)
    low = (first_low + more) + b.fma(s_low, 2.0, b.fma(n, DOUBLE.ln2_low, third_low))
    high = first + low
    return _log_at_the_ends(b, x, high), low - (high - first)


def pow(b: Builder, x: Value, y: Value) -> Value:
    """x^y = e^(y log x), with the rules of C for zeros, negative numbers, infinities and NaN."""
    floats, (x, y) = shape(x.type)[1], (b.fpext(value, "double") for value in (x, y))
    size = b.fabs(x)
    if floats == "float":
        power = exp(b, y * log(b, size))
    else:
        high, low = _log_in_two(b, size)
        product, lost = _exact_product(b, y, high)
        lost = b.fma(y, low, lost)
        power = exp(b, product, b.select(b.fabs(product) < -DOUBLE.tiny, lost, 0.0))
    power = b.select(size.eq(1.0), 1.0, power)
    whole = _is_whole(b, y)
    odd = whole & ~_is_whole(b, y * 0.5)
    power = b.select(odd, b.copysign(power, x), power)
    no_power = (x < 0.0) & (x > -math.inf) & ~whole | b.compare("uno", x, y)
    power = b.select(no_power, math.nan, power)
    power = b.select(x.eq(1.0) | y.eq(0.0), 1.0, power)
    return b.fptrunc(power, floats)


def _is_whole(b: Builder, x: Value) -> Value:
    """Whether a double is a whole number, or infinite."""
    size, magic = b.fabs(x), 2.0**DOUBLE.mantissa  # adding it rounds to a whole number
    return (size >= magic) | ((size + magic) - magic).eq(size)


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
    "sin": sin,
    "cos": cos,
    "erf": erf,
    "pow": pow,
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
