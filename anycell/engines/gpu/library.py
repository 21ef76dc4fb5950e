"""The printer table of the GPU engine: one Triton function per op of ``anycell/lang/ops.py``.

A printed kernel says ``sigmoid(a_f) * s_c`` and imports these names. (Arithmetic and comparisons
are Triton's own operators, see ``OPERATORS``.) Values are float32 whatever the kernel's dtype.

NVIDIA's fast exponential, 2^x, is good to 2 units in the last place; the error of multiplying x by
log2(e) is corrected here, since it grows with x. tanh has its own branch near 0, where a difference
of exponentials loses all digits. Infinities and NaN give the mathematically correct results.

Only printed kernels import this module: it needs Triton.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from anycell.engines.gpu.build import interpreted

# Rows of the op table that need no function.
OPERATORS = frozenset(
    "neg add sub mul div lt le gt ge eq ne logical_and logical_or logical_not".split()
)

_LOG2E = tl.constexpr(math.log2(math.e))
_LOG2E_LOW = tl.constexpr(1.925963033500011e-08)  # what _LOG2E loses in float32
_LN2 = tl.constexpr(math.log(2.0))
_INFINITY = tl.constexpr(math.inf)


_INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def _reciprocal(x):
    """1 / x for 1 <= x <= 2, to a unit in the last place: one instruction, while a division would
    handle numbers of all sizes. NaN stays NaN.
    """
    if _INTERPRETED:
        y = 1.0 / x
    else:
        y = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return y


@triton.jit
def exp(x):
    """e^x."""
    high = x * _LOG2E
    low = tl.fma(x, _LOG2E, -high) + x * _LOG2E_LOW
    y = tl.exp2(high)
    return tl.where((y > 0.0) & (y < _INFINITY), y + y * (low * _LN2), y)


@triton.jit
def log(x):
    """The natural logarithm."""
    return tl.log(x)


@triton.jit
def sqrt(x):
    """The square root, correctly rounded."""
    return tl.sqrt_rn(x)


@triton.jit
def abs(x):
    """The absolute value."""
    return tl.abs(x)


@triton.jit
def sign(x):
    """1, -1, or x itself where it is 0 or NaN."""
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, x))


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x), from e^-|x|, which never overflows."""
    small = exp(-tl.abs(x))
    return tl.where(x < 0.0, small, 1.0) * _reciprocal(1.0 + small)


@triton.jit
def tanh(x):
    """The hyperbolic tangent; near 0 a polynomial with a relative error of 1e-9."""
    size = tl.abs(x)
    z = x * x
    near = -0.0062824669 * z + 0.021077754
    near = near * z - 0.053853858
    near = near * z + 0.13332602
    near = near * z - 0.33333319
    small = exp(-2.0 * size)
    far = (1.0 - small) * _reciprocal(1.0 + small)
    return tl.where(size < 0.55, x + x * (z * near), tl.where(x < 0.0, -far, far))


# For kernels of 16-bit dtypes, which round what they save and exchange to 11 bits or fewer. These
# functions take 2^x of a rounded product, whose relative error grows to 2^-18 while e^-x falls to
# the smallest float32, and fewer terms near 0.


@triton.jit
def sigmoid_16(x):
    """1 / (1 + e^-x), to some 2^-18."""
    small = _exp2(tl.abs(x) * -_LOG2E)
    return tl.where(x < 0.0, small, 1.0) * _reciprocal(1.0 + small)


@triton.jit
def tanh_16(x):
    """The hyperbolic tangent, to some 2^-18."""
    size = tl.abs(x)
    z = x * x
    near = 0.12877158 * z - 0.33324609
    small = _exp2(size * (-2.0 * _LOG2E))
    far = (1.0 - small) * _reciprocal(1.0 + small)
    return tl.where(size < 0.25, x + x * (z * near), tl.where(x < 0.0, -far, far))


@triton.jit
def _exp2(x):
    """2^x; results below the normal numbers are 0."""
    if _INTERPRETED:
        y = tl.exp2(x)
    else:
        y = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return y


@triton.jit
def relu(x):
    """max(x, 0); NaN stays NaN."""
    return tl.where(x <= 0.0, 0.0, x)


@triton.jit
def _log1p(x):
    """log(1 + x) for 0 <= x <= 1: the logarithm of the rounded sum, and what rounding took."""
    total = 1.0 + x
    return tl.log(total) - ((total - 1.0) - x) / total


@triton.jit
def softplus(x):
    """log(1 + e^x) = max(x, 0) + log(1 + e^-|x|)."""
    return relu(x) + _log1p(exp(-tl.abs(x)))


@triton.jit
def log_sigmoid(x):
    """log(1 / (1 + e^-x)) = -softplus(-x)."""
    return -softplus(-x)


@triton.jit
def hard_sigmoid(x):
    """x/6 + 1/2 between 0 and 1; NaN stays NaN."""
    y = x / 6.0 + 0.5
    return tl.where(y <= 0.0, 0.0, tl.where(y >= 1.0, 1.0, y))


@triton.jit
def sin(x):
    """The sine."""
    return tl.sin(x)


@triton.jit
def cos(x):
    """The cosine."""
    return tl.cos(x)


@triton.jit
def erf(x):
    """The error function."""
    return tl.erf(x)


@triton.jit
def _whole(x):
    """Whether x is a whole number, or infinite: adding 2^23 rounds it to one."""
    size = tl.abs(x)
    return (size >= 8388608.0) | ((size + 8388608.0) - 8388608.0 == size)


@triton.jit
def pow(x, y):
    """x^y = e^(y log x), computed in float64, with the rules of C for zeros, negative numbers,
    infinities and NaN.
    """
    size = tl.abs(x)
    power = tl.exp(y.to(tl.float64) * tl.log(size.to(tl.float64))).to(tl.float32)
    power = tl.where(size == 1.0, 1.0, power)
    whole = _whole(y)
    odd = whole & (_whole(y * 0.5) == 0)
    below = x.to(tl.int32, bitcast=True) < 0  # also -0
    power = tl.where(odd & below, -power, power)
    power = tl.where((x < 0.0) & (size < _INFINITY) & (whole == 0), float("nan"), power)
    return tl.where((x == 1.0) | (y == 0.0), 1.0, power)


@triton.jit
def minimum(a, b):
    """The smaller one; NaN where either is."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def maximum(a, b):
    """The larger one; NaN where either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def where(condition, a, b):
    """a where the condition holds, else b."""
    return tl.where(condition, a, b)


@triton.jit
def stop_gradient(x):
    """x."""
    return x


# ---- row reductions: the result is given back to every unit of its group -------------------------


@triton.jit
def _reduce(x, largest: tl.constexpr):
    return tl.max(x, axis=1, keep_dims=True) if largest else tl.sum(x, axis=1, keep_dims=True)


@triton.jit
def _over_groups(x, units, inside, groups: tl.constexpr, each: tl.constexpr, largest: tl.constexpr):
    nothing: tl.constexpr = -_INFINITY if largest else 0.0
    result = tl.where(inside, x, nothing)
    if groups == 1:
        result = _reduce(result, largest)
    else:
        for group in tl.static_range(groups):
            mine = units // each == group
            whole = _reduce(tl.where(inside & mine, x, nothing), largest)
            result = tl.where(mine, whole, result)
    return result


@triton.jit
def sum(x, units, inside, groups: tl.constexpr, each: tl.constexpr):
    """The sum over each group of ``each`` units; ``inside`` says which lanes hold a unit."""
    return _over_groups(x, units, inside, groups, each, False)


@triton.jit
def mean(x, units, inside, groups: tl.constexpr, each: tl.constexpr):
    """The mean, likewise."""
    return _over_groups(x, units, inside, groups, each, False) * (1.0 / each)


@triton.jit
def max(x, units, inside, groups: tl.constexpr, each: tl.constexpr):
    """The largest, likewise."""
    return _over_groups(x, units, inside, groups, each, True)


# Of a row whose units several programs share, see ``rounds``: the numbers of a program's part, and
# those of the whole row from all parts ``[rows, programs]``; ``count`` is the units of a part.


@triton.jit
def spread(x, inside, total, count):
    """The squares of distances from the part's mean, summed."""
    distance = tl.where(inside, x - total / count, 0.0)
    return tl.sum(distance * distance, axis=1, keep_dims=True)


@triton.jit
def settled(x):
    """x, in one layout: without this the compiler computes x again in the layout of each user."""
    if _INTERPRETED:
        y = x
    else:
        y = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=False, pack=1
        )
    return y


@triton.jit
def merged_spread(spreads, totals, total, count, each: tl.constexpr):
    """The squares of the parts' distances from the mean of the row of ``each`` units."""
    apart = totals / tl.maximum(count, 1.0) - total * (1.0 / each)
    return spreads + count * (apart * apart)


@triton.jit
def raised(x, inside, largest):
    """e to the distances from the part's maximum, summed."""
    powers = tl.where(x == largest, 1.0, exp(x - largest))  # also where both are infinite
    return tl.sum(tl.where(inside, powers, 0.0), axis=1, keep_dims=True)


@triton.jit
def merged_raised(sums, largests, largest):
    """e to the parts' distances from the row's maximum."""
    return sums * exp(largests - largest)


# ---- matmuls whose k is shared out over warps ----------------------------------------------------


@triton.jit
def left(values, warps: tl.constexpr, pair: tl.constexpr):
    """The left operand ``[warps, rows, k]`` of a batch of matmuls, one for each warp, from values
    ``[rows / 8 * warps * 8, k]`` as threads load them: a warp's share of eight rows at a time.

    A matrix instruction takes ``pair`` neighbours from each of a row's four threads, and then the
    next ``pair`` of each; but a thread loads 16 contiguous bytes. The order of k does not matter if
    it is the same in both operands. So k is taken in the order in which the instruction reads what
    the threads have loaded, and no value has to go to another thread.
    """
    rows: tl.constexpr = values.shape[0] // warps
    k: tl.constexpr = values.shape[1]
    apart = tl.reshape(values, [rows // 8, warps, 8, 4, k // (4 * pair), pair])
    return tl.reshape(tl.permute(apart, (1, 0, 2, 4, 3, 5)), [warps, rows, k])


@triton.jit
def left_shared(values, warps: tl.constexpr, pair: tl.constexpr):
    """The left operand from values ``[warps * rows, k]`` whose rows other threads load: they go
    through shared memory, and stay there.
    """
    rows: tl.constexpr = values.shape[0] // warps
    k: tl.constexpr = values.shape[1]
    apart = tl.reshape(values, [warps, rows, 4, k // (4 * pair), pair])
    return tl.reshape(tl.permute(apart, (0, 1, 3, 2, 4)), [warps, rows, k])


@triton.jit
def right(values, warps: tl.constexpr, pair: tl.constexpr):
    """The right operand ``[warps, k, columns]``, from values laid out as for ``left``."""
    return tl.permute(left(values, warps, pair), (0, 2, 1))


@triton.jit
def total(parts, outputs: tl.constexpr):
    """The sum over the warps of ``[warps, units * outputs, rows]``, as ``[rows, units * outputs]``.
    A thread that has all outputs of its units adds the warps in pairs, until one sum is left.
    """
    warps: tl.constexpr = parts.shape[0]
    rows: tl.constexpr = parts.shape[2]
    columns: tl.constexpr = parts.shape[1]
    units: tl.constexpr = columns // outputs
    sums = tl.permute(tl.reshape(parts, [warps, units, outputs, rows]), (3, 1, 2, 0))
    if warps >= 16:
        even, odd = tl.split(tl.reshape(sums, [rows, units, outputs, 8, 2]))
        sums = even + odd
    if warps >= 8:
        even, odd = tl.split(tl.reshape(sums, [rows, units, outputs, 4, 2]))
        sums = even + odd
    if warps >= 4:
        even, odd = tl.split(tl.reshape(sums, [rows, units, outputs, 2, 2]))
        sums = even + odd
    if warps >= 2:
        even, odd = tl.split(tl.reshape(sums, [rows, units, outputs, 1, 2]))
        sums = even + odd
    return tl.reshape(sums, [rows, columns])


# ---- arrays whose addresses are in memory --------------------------------------------------------


@triton.jit
def address(table, place: tl.constexpr, odd, kind: tl.constexpr):
    """The address of numbers of this kind that a table holds.

    ``odd`` is 0 if 16 divides all such addresses, else 1. Kernels for an ``odd`` of 0 are compiled
    for a multiple of 16, so that they take several numbers in one access.
    """
    number = tl.load(table + place)
    rest = number % 16
    start = tl.multiple_of((number - rest).to(tl.pointer_type(kind)), 16)
    # From a number of that type: Triton 3.3 does not read attributes of arguments.
    bits: tl.constexpr = tl.full([], 0, kind).dtype.primitive_bitwidth
    return start + rest // (bits // 8) * odd


@triton.jit
def of_pass(pointer, distance, number):
    """The address for a pass of a twin, see ``twins``."""
    first = pointer.to(tl.pointer_type(tl.int8))
    return (first + number * distance).to(pointer.dtype)


# ---- programs that wait for one another ----------------------------------------------------------


@triton.jit
def call(run):
    """Calls a function of the host's, in the interpreter."""
    run()


# Each thread polls a flag until it holds the value or more, or until time is up. Time begins with
# the first reading of the clock, which is read at every 64th poll. The load is an acquire: all
# loads that follow see what the other program had written before it set the flag.
_SPIN = tl.constexpr("""{
    .reg .pred there, again, first;
    .reg .b32 seen, looks, rest;
    .reg .b64 begin, now;
    mov.b32 looks, 0;
    mov.b64 begin, 0;
look:
    ld.acquire.gpu.global.b32 seen, [$1];
    setp.ge.s32 there, seen, $2;
    @there bra done;
    add.u32 looks, looks, 1;
    and.b32 rest, looks, 63;
    setp.ne.u32 again, rest, 0;
    @again bra look;
    mov.u64 now, %globaltimer;
    setp.eq.u64 first, begin, 0;
    @first mov.b64 begin, now;
    sub.u64 now, now, begin;
    setp.lt.u64 again, now, $3;
    @again bra look;
done:
    selp.b32 $0, 1, 0, there;
}""")


@triton.jit
def _spin(flags, value, patience):
    """Polls in the interpreter, which takes more than 10 microseconds for a poll."""
    unseen = (tl.load(flags, volatile=True) < value).to(tl.int32)  # Triton 3.3 interprets no ~
    looks = 0
    while (tl.sum(unseen, axis=0) > 0) & (looks * 10_000 < patience):
        tl.debug_barrier()  # the turn of other programs
        unseen = (tl.load(flags, volatile=True) < value).to(tl.int32)
        looks += 1
    return 1 - unseen


@triton.jit
def wait(flags, value, patience):
    """Returns 1 once all flags hold the value or more, or 0 if ``patience`` nanoseconds were not
    enough.

    There is at least one flag for each thread. So the threads add up their results across all
    warps, and all get the same answer. The barrier puts all polls before all later loads of any
    thread. So the loads of all threads see what one thread has acquired.
    """
    if _INTERPRETED:
        seen = _spin(flags, value, patience)
    else:
        seen = tl.inline_asm_elementwise(
            _SPIN,
            "=r,l,r,l",
            [flags.to(tl.int64), value, patience],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    arrived = (tl.sum(1 - seen, axis=0) == 0).to(tl.int32)
    tl.debug_barrier()
    return arrived


@triton.jit
def publish(flag, value):
    """Sets a flag, after everything that this program has written until now.

    The barrier puts the writes of all threads before the one thread that sets the flag, and its
    store, a release, puts them before the flag for any program that acquires it.
    """
    tl.debug_barrier()
    tl.atomic_xchg(flag, value, sem="release", scope="gpu")


# ---- random numbers ------------------------------------------------------------------------------


@triton.jit
def keep(rate, draws, step, rows, units, index: tl.constexpr, per_step: tl.constexpr):
    """The random mask of ``anycell.lang.philox``: 1 with probability ``rate``, else 0.

    ``draws`` is the address of four 64-bit numbers: seed, stream, time of step 0, time per step.
    """
    seed, stream = tl.load(draws), tl.load(draws + 1)
    time = (tl.load(draws + 2) + step * tl.load(draws + 3)).to(tl.uint32)
    if not per_step:
        time = time * 0
    zero = (rows * 0 + units * 0).to(tl.uint32)
    word = ((stream << 8) | (index // 4)).to(tl.uint32)
    words = tl.philox(
        seed, zero + units.to(tl.uint32), zero + rows.to(tl.uint32), zero + time, zero + word
    )
    if index % 4 == 0:
        mine = words[0]
    elif index % 4 == 1:
        mine = words[1]
    elif index % 4 == 2:
        mine = words[2]
    else:
        mine = words[3]
    draw = (mine >> 8).to(tl.float32) * (2.0**-24)
    return tl.where(draw < rate, 1.0, 0.0)
