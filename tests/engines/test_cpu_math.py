"""The LLVM text layer: the builder's code runs, and its functions keep their accuracy."""

import ctypes
import itertools
import threading

import numpy as np
import pytest
from tolerances import limit

from anycell import cells
from anycell.engines.cpu import isa, jit, ops
from anycell.engines.cpu.idioms import dot, dot_pairs, in_pairs, narrow, widen
from anycell.engines.cpu.ir import Module, Value, constant, vector
from anycell.engines.cpu.layout import Layout
from anycell.engines.cpu.sequence import print_kernel
from anycell.lang import philox
from anycell.lang.expr import REDUCTIONS
from anycell.lang.ops import TABLE
from anycell.numpy.check import numpy_dtype
from anycell.plan import DTYPES, plan
from anycell.plan.dtype import dtypes
from tools import ulp

TARGETS = isa.available()
REALS = {"float": np.float32, "double": np.float64}
on_every_machine = [
    pytest.mark.parametrize("target", TARGETS),
    pytest.mark.parametrize("real", REALS),
]


def everywhere(test):
    """Runs a test for every instruction set of this host, in both precisions."""
    for mark in on_every_machine:
        test = mark(test)
    return test


def run(target, real, body, *arguments, short=False):
    """Compiles `body(b, *args)`, a function of arrays (pointers) and i64 numbers, and calls it."""
    module = Module(isa.TARGETS[target], real, short)
    kinds = ["ptr" if isinstance(a, np.ndarray) else "i64" for a in arguments]
    b = module.function("f", ", ".join(f"{kind} a{i}" for i, kind in enumerate(kinds)))
    body(b, *b.args)
    library = jit.compile(str(module), ["f"], module.target)
    types = [ctypes.c_void_p if kind == "ptr" else ctypes.c_int64 for kind in kinds]
    values = [a.ctypes.data if isinstance(a, np.ndarray) else a for a in arguments]
    ctypes.CFUNCTYPE(None, *types)(library.address("f"))(*values)


def apply_all(target, real, table, *inputs, short=False):
    """Applies all ops of a table (by name) to the same arrays; conditions become 1 or 0."""
    lanes = isa.TARGETS[target].lanes(real)
    size = len(inputs[0])
    padded = [np.zeros(-(-size // lanes) * lanes, REALS[real]) for _ in inputs]
    for array, values in zip(padded, inputs, strict=True):
        array[:size] = values
    out = np.full((len(table), len(padded[0])), 77, REALS[real])

    def body(b, n, y, *xs):
        with b.loop(0, n, b.lanes) as i:
            values = [b.load(b.gep(x, i)) for x in xs]
            for row, op in enumerate(table.values()):
                result = op(b, *values)
                if result.type == b.mask:
                    result = b.select(result, constant(1, b.vec), constant(0, b.vec))
                b.store(result, b.gep(y, i + n * row))

    run(target, real, body, len(padded[0]), out, *padded, short=short)
    return dict(zip(table, out[:, :size], strict=True))


def apply(target, real, op, *inputs):
    """Applies one op to arrays."""
    return apply_all(target, real, {"it": op}, *inputs)["it"]


# --------------------------------------------------------------------------------- accuracy
LONG = np.finfo(np.longdouble).nmant >= 63


@pytest.mark.parametrize("op", ulp.FUNCTIONS)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ulp.REAL)
@pytest.mark.sample(every=4)  # of eleven functions: each, and all targets and dtypes
def test_error_in_ulp(op, target, dtype):
    if dtype == "float64" and not LONG:
        pytest.skip("no extended precision to compare doubles with")
    if ulp.computed_in(dtype) == "float32":
        x = np.arange(0, 1 << 32, 9973, dtype=np.uint64).astype(np.uint32).view(np.float32)
        edges = np.array([0, 0x7F800000, 0x7F7FFFFF, 1, 0x7FFFFF, 0x800000], np.uint32)
        x = np.concatenate([x, edges.view(np.float32), -edges.view(np.float32)])
    else:
        x = ulp.sample_of_doubles(seed=0, count=40_000)
    worst = ulp.measure(op, target, x, dtype)
    assert worst.error <= ulp.FUNCTIONS[op].limit(dtype), worst


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", ["exp", "tanh", "sigmoid", "log", "sin", "cos", "erf", "pow"])
def test_error_in_ulp_over_many_floats(op, target):
    limit = ulp.FUNCTIONS[op].limit("float32")
    stride = 67
    for start in range(0, 1 << 32, ulp.CHUNK * stride):
        worst = ulp.measure(op, target, ulp.chunk_of_floats(start, stride), "float32")
        assert worst.error <= limit, worst


@pytest.mark.parametrize("op", ["exp", "sigmoid", "tanh"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("registers", [1, 2, 3])
def test_short_functions_of_several_registers(op, target, registers):
    """Results agree, whether by reciprocals of one or two registers or by a division of more, up to
    the last bits, in which the two ways differ.
    """
    lanes = isa.TARGETS[target].lanes("float") * registers
    x = np.linspace(-9, 9, lanes).astype(np.float32)
    y, expected = np.empty_like(x), getattr(np, op, lambda x: 1 / (1 + np.exp(-x)))
    wide = vector(lanes, "float")

    def body(b, x, y):
        b.store(ops.EMIT[op](b, b.load(x, wide)), y)

    run(target, "float", body, x, y, short=True)
    truth = expected(x.astype(np.float64))
    assert (abs(y - truth) <= 3e-5 * abs(truth)).all()
    assert not np.array_equal(y, truth.astype(np.float32))  # long functions would be more exact


def test_cells_of_short_numbers_have_short_functions():
    names = {name for name, types in DTYPES.items() if types.short}
    assert names == {"bfloat16", "float16", "int8"}
    for name in dtypes("cpu", quantized=True):
        module = print_kernel(Layout(plan(cells.LSTM, 8, name), False, isa.current()))
        assert module.short is (name in names)


@pytest.mark.parametrize("short", [False, True])
@everywhere
def test_special_values(target, real, short):
    limits = np.finfo(REALS[real])
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, limits.smallest_subnormal, limits.max])
    x = np.concatenate([x, -x[-2:]]).astype(REALS[real])
    expected = {
        "exp": [1, 1, np.inf, 0, np.nan, 1, np.inf, 1, 0],
        "sigmoid": [0.5, 0.5, 1, 0, np.nan, 0.5, 1, 0.5, 0],
        "tanh": [0.0, -0.0, 1, -1, np.nan, x[5], 1, x[7], -1],
        "relu": [0, 0, np.inf, 0, np.nan, x[5], x[6], 0, 0],
        "hard_sigmoid": [0.5, 0.5, 1, 0, np.nan, 0.5, 1, 0.5, 0],
        "sign": [0, 0, 1, -1, np.nan, 1, 1, -1, -1],
        "softplus": [np.log(2), np.log(2), np.inf, 0, np.nan, np.log(2), x[6], np.log(2), 0],
        "sin": [0.0, -0.0, np.nan, np.nan, np.nan, x[5], np.sin(x[6]), x[7], -np.sin(x[6])],
        "cos": [1, 1, np.nan, np.nan, np.nan, 1, np.cos(x[6]), 1, np.cos(x[6])],
        "erf": [0.0, -0.0, 1, -1, np.nan, x[5], 1, x[7], -1],
    }
    results = apply_all(target, real, {n: ops.EMIT[n] for n in expected}, x, short=short)
    rough = 3e-5 if short else limit(REALS[real], "forward")
    for name, values in expected.items():
        wanted, result = np.array(values, REALS[real]), results[name]
        assert (np.isnan(result) == np.isnan(wanted)).all(), name
        with np.errstate(invalid="ignore"):
            near = abs(result - wanted) <= rough * abs(wanted)
        assert (near | (result == wanted) | np.isnan(wanted)).all(), name
    for name in ("tanh", "erf", "sin"):
        zeros = [0, 1, 5, 7]  # and the numbers next to them
        assert np.signbit(results[name])[zeros].tolist() == [False, True, False, True], name
    assert np.signbit(results["tanh"])[[2, 3, 6, 8]].tolist() == [False, True, False, True]
    # The payload of a NaN could be mistaken for a number.
    nans = {
        "float": np.array([0x7FC00001, 0xFFC12345, 0x7F800001], np.uint32),
        "double": np.array([0x7FF8000000000001, 0xFFF8123456789ABC, 0x7FF0000000000001], np.uint64),
    }[real].view(REALS[real])
    functions = {name: ops.EMIT[name] for name in ulp.FUNCTIONS if name != "pow"}
    for name, y in apply_all(target, real, functions, nans, short=short).items():
        assert np.isnan(y).all(), name


@pytest.mark.parametrize("short", [False, True])
@everywhere
def test_powers_have_the_rules_of_c(target, real, short):
    """Every pair of special values; NumPy follows the rules of C, where 1^NaN and NaN^0 are 1."""
    limits = np.finfo(REALS[real])
    sides = [0, 0.5, 1, 1.5, 2, 3, 2.0**53, 2.0**60, limits.max, limits.smallest_subnormal, np.inf]
    sides = np.array([np.nan, *sides, *(-side for side in sides)], REALS[real])
    x, y = (np.array(side) for side in zip(*itertools.product(sides, sides), strict=True))
    result = apply_all(target, real, {"pow": ops.EMIT["pow"]}, x, y, short=short)["pow"]
    with np.errstate(all="ignore"):
        wanted = np.power(x, y)
        near = abs(result - wanted) <= 2 * np.spacing(abs(wanted))
    assert (near | (result == wanted) | (np.isnan(result) & np.isnan(wanted))).all()
    assert (np.signbit(result) == np.signbit(wanted))[~np.isnan(wanted)].all()


@everywhere
def test_angles_near_the_bound_of_the_short_reduction(target, real):
    """Angles below and above 2^14 in one vector, and those next to multiples of pi / 2."""
    x = np.concatenate([np.arange(1, 40_000) * (np.pi / 2), 2.0**14 + np.arange(-8, 8)])
    x = x.astype(REALS[real])
    if real == "double" and not LONG:
        pytest.skip("no extended precision to compare doubles with")
    name = {"float": "float32", "double": "float64"}[real]
    for op in ("sin", "cos"):
        for angles in (x, np.random.default_rng(0).permutation(x), -x):
            worst = ulp.measure(op, target, angles, name)
            assert worst.error <= ulp.FUNCTIONS[op].limit(name), worst


@everywhere
def test_hard_sigmoid_is_that_of_keras(target, real):
    x = np.linspace(-5, 5, 1001, dtype=REALS[real])
    y = apply(target, real, ops.EMIT["hard_sigmoid"], x)
    eps = np.finfo(REALS[real]).eps
    assert abs(y - np.clip(x / 6 + 0.5, 0, 1)).max() <= eps


def test_wider_registers_give_the_same_bits():
    fused = [name for name in TARGETS if isa.TARGETS[name].fma]
    x = ulp.chunk_of_floats(0, 16381)
    for op in ulp.FUNCTIONS:
        xs = ulp.inputs(op, x)
        first, *others = (ulp.compiled(op, name, "float32")(*xs) for name in fused or TARGETS)
        for other in others:
            np.testing.assert_array_equal(first.view(np.uint32), other.view(np.uint32))


# ------------------------------------------------------------------------------- other rows
BINARY = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
UNARY = {
    "neg": np.negative,
    "abs": np.abs,
    "sqrt": np.sqrt,
    "sign": np.sign,
    "stop_gradient": np.positive,
}


@everywhere
def test_rows_that_numpy_has_too(target, real):
    values = np.array([0.0, -0.0, 1, -1.5, 3e-5, 1e30, np.inf, -np.inf, np.nan], REALS[real])
    x, y = (np.array(side) for side in zip(*itertools.product(values, values), strict=True))
    for table, inputs in [(BINARY, (x, y)), (UNARY, (values,))]:
        results = apply_all(target, real, {name: ops.EMIT[name] for name in table}, *inputs)
        for name, function in table.items():
            with np.errstate(all="ignore"):
                wanted = function(*inputs).astype(x.dtype)
            np.testing.assert_array_equal(results[name], wanted, name)


@everywhere
def test_conditions(target, real):
    x, y, z = np.random.default_rng(0).normal(size=(3, 100)).astype(REALS[real])

    def body(b, x, y, z):
        lt, gt = ops.EMIT["lt"](b, x, y), ops.EMIT["gt"](b, y, z)
        both, one = ops.EMIT["logical_and"](b, lt, gt), ops.EMIT["logical_or"](b, lt, gt)
        neither = ops.EMIT["logical_not"](b, one)
        return ops.EMIT["where"](b, both, x, ops.EMIT["where"](b, neither, y, z))

    both, one = (x < y) & (y > z), (x < y) | (y > z)
    expected = np.where(both, x, np.where(~one, y, z))
    np.testing.assert_array_equal(apply(target, real, body, x, y, z), expected)


def test_every_op_of_the_language_has_a_row():
    assert set(ops.EMIT) == set(TABLE) - REDUCTIONS


# ------------------------------------------------------------------------------------ philox

# From the known-answer tests of Random123: counter, key, words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def philox_words(target, real, counters, keys):
    """The four words of a counter per lane; input and output are arrays [6, lanes], [4, lanes]."""
    inputs = np.ascontiguousarray(np.concatenate([counters, keys]), np.uint32)
    out = np.zeros((4, inputs.shape[1]), np.uint32)

    def body(b, x, y):
        type = f"<{b.lanes} x i32>"
        parts = [b.load(b.gep(x, i * b.lanes, "i32"), type) for i in range(6)]
        for i, word in enumerate(ops.philox(b, *parts)):
            b.store(word, b.gep(y, i * b.lanes, "i32"))

    run(target, real, body, inputs, out)
    return out


@everywhere
def test_philox(target, real):
    lanes = isa.TARGETS[target].lanes(real)
    random = np.random.default_rng(0)
    for counter, key, words in KNOWN:
        given = np.array(counter, np.uint32), np.array(key, np.uint32)
        assert [int(word) for word in philox.philox4x32(*given)] == list(words)
        columns = [
            np.repeat(np.array(part, np.uint32)[:, None], lanes, 1) for part in (counter, key)
        ]
        out = philox_words(target, real, *columns)
        assert (out == np.array(words, np.uint32)[:, None]).all()
    counters = random.integers(0, 1 << 32, (4, lanes), np.uint32)
    key = np.array([123, 0xFEDCBA98], np.uint32)
    keys = np.repeat(key[:, None], lanes, 1)
    out = philox_words(target, real, counters, keys)
    np.testing.assert_array_equal(out, np.stack(philox.philox4x32(counters, key)))


# ----------------------------------------------------------------------------------- builder
@everywhere
def test_transpose(target, real):
    lanes = isa.TARGETS[target].lanes(real)
    x = np.arange(lanes * lanes, dtype=REALS[real]).reshape(lanes, lanes)
    y = np.zeros_like(x)

    def body(b, x, y):
        rows = [b.load(b.gep(x, i * lanes)) for i in range(lanes)]
        for i, row in enumerate(b.transpose(rows)):
            b.store(row, b.gep(y, i * lanes))

    run(target, real, body, x, y)
    np.testing.assert_array_equal(y, x.T)


@everywhere
def test_reductions_have_a_fixed_order(target, real):
    lanes = isa.TARGETS[target].lanes(real)
    x = np.random.default_rng(0).normal(size=lanes).astype(REALS[real])
    y = np.zeros(2, REALS[real])

    def body(b, x, y):
        value = b.load(x)
        for i, reduce in enumerate([b.reduce_add, b.reduce_max]):
            b.store(reduce(value), b.gep(y, i))

    run(target, real, body, x, y)
    halves = x.copy()
    while len(halves) > 1:
        halves = halves[: len(halves) // 2] + halves[len(halves) // 2 :]
    np.testing.assert_array_equal(y, [halves[0], x.max()])


@everywhere
def test_masks_touch_only_their_lanes(target, real):
    lanes = isa.TARGETS[target].lanes(real)
    module = Module(isa.TARGETS[target], real)
    b = module.function("f", "ptr x, ptr y, ptr z, i64 count")
    x, y, z, count = b.args
    mask = b.lane_mask(count)
    value = b.masked_load(x, mask, 9)
    b.masked_store(value, y, mask)
    b.store(value, z)
    address = jit.compile(str(module), ["f"], module.target).address("f")
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3, ctypes.c_int64)(address)
    for count in [-(2**40), -1, 0, 1, lanes - 1, lanes, lanes + 1, 2**40]:
        inside = max(0, min(count, lanes))
        x = np.arange(1, inside + 1, dtype=REALS[real])
        y, z = np.full((2, lanes), 5, REALS[real])
        function(x.ctypes.data, y.ctypes.data, z.ctypes.data, count)
        np.testing.assert_array_equal(y[:inside], x)
        np.testing.assert_array_equal(z[:inside], x)
        assert (y[inside:] == 5).all() and (z[inside:] == 9).all()


@everywhere
@pytest.mark.parametrize("vectors", [1, 2])
def test_first_lanes_are_stored(target, real, vectors):
    """Counts go from below 0 to more than a vector; the memory around stays unchanged."""
    lanes = vectors * isa.TARGETS[target].lanes(real)
    for integer, number in ((None, REALS[real]), ("i16", np.int16)):
        counts = np.arange(-2, lanes + 3)
        out = np.zeros((len(counts), lanes + 3), number)

        def body(b, to, counts, integer=integer, vectors=vectors, lanes=lanes):
            type = integer or b.real
            value = b.value(1, vector(lanes, type))
            with b.loop(0, lanes + 5) as i:
                count = b.load(b.gep(counts, i, "i64"), "i64")
                b.store_first(value, b.gep(to, i * (lanes + 3) + 1, type), count)

        run(target, real, body, out, counts)
        place = np.arange(-1, lanes + 2)
        assert np.array_equal(out, (place >= 0) & (place < np.minimum(counts, lanes)[:, None]))


@pytest.mark.parametrize("target", TARGETS)
def test_control_flow(target):
    for n, step in itertools.product([-3, 0, 1, 7, 10], [1, 3]):
        out = np.zeros(4, np.int64)

        def body(b, out, n, step):
            def bump(i, amount):
                place = b.gep(out, i, "i64")
                b.store(b.load(place, "i64") + amount, place)

            with b.loop(0, n, step) as i:
                with b.when((i % 2).eq(0)) as otherwise:
                    bump(0, i)
                with otherwise, b.loop(0, i) as j:
                    bump(1, j)
            left = b.alloca("i64")
            b.store(constant(3, "i64"), left)
            with b.repeat() as again:
                bump(2, 10)
                rest = b.load(left, "i64") - 1
                b.store(rest, left)
                again(rest > 0)
            with b.when(n < 5):
                b.ret()
            bump(3, 1)

        run(target, "float", body, out, n, step)
        numbers = range(0, n, step)
        even = sum(i for i in numbers if i % 2 == 0)
        odd = sum(sum(range(i)) for i in numbers if i % 2)
        assert out.tolist() == [even, odd, 30, int(n >= 5)]


@pytest.mark.parametrize("target", TARGETS)
def test_atomics_make_a_barrier(target):
    """Two threads pass a counter back and forth; they would hang on torn or unordered accesses."""
    module = Module(isa.TARGETS[target])
    b = module.function("f", "ptr shared, i64 me, i64 turns")
    shared, me, turns = b.args
    total = b.gep(shared, 8, "i64")
    with b.loop(0, turns) as turn:
        mine = turn * 2 + me
        with b.repeat() as again:
            b.pause()
            again(b.atomic_load(shared).ne(mine))
        b.store(b.load(total, "i64") + 1, total)
        b.atomic_add(shared, 1)
        b.atomic_add(b.gep(shared, 16, "i64"), me)
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)(
        jit.compile(str(module), ["f"], module.target).address("f")
    )
    out = np.zeros(17, np.int64)
    threads = [threading.Thread(target=function, args=(out.ctypes.data, i, 20)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert out[[0, 8, 16]].tolist() == [40, 40, 20]


def test_calls_and_tables():
    module = Module(isa.TARGETS["generic"], "double")
    square = module.private("square", "double x", "double")
    (x,) = square.args
    square.ret(x * x)
    b = module.function("f", "ptr y")
    table = module.table([1.5, 0.1], "double")
    for i in range(2):
        value = b.load(b.gep(table, i), "double")
        b.store(b.call("square", value), b.gep(*b.args, i))
    out = np.zeros(2)
    address = jit.compile(str(module), ["f"], module.target).address("f")
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(out.ctypes.data)
    assert out.tolist() == [1.5**2, 0.1 * 0.1]
    with pytest.raises(KeyError, match="cube"):
        b.call("cube", value)
    with pytest.raises(ValueError, match="twice"):
        module.function("f")


def test_constants_are_exact():
    assert constant(0.1, "double").text == "0x3FB999999999999A"
    assert constant(0.1, "float").text == "0x3FB99999A0000000"  # the double equal to the float
    assert constant(-np.inf, "float").text == "0xFFF0000000000000"
    assert constant(0xFFFFFFFF, "i32").text == "-1"
    assert str(constant(1, "<4 x i64>")) == "<4 x i64> splat (i64 1)"
    with pytest.raises(ValueError, match="does not fit"):
        constant(1e39, "float")
    with pytest.raises(TypeError, match=r"0\.5"):
        constant(0.5, "i32")


def test_operands_must_agree():
    b = Module(isa.TARGETS["generic"]).function("f", "float x, double y")
    x, y = b.args
    with pytest.raises(TypeError, match="float %x, double %y"):
        x + y
    with pytest.raises(TypeError, match="one type"):
        b.fma(1.0, 2.0, 3.0)
    with pytest.raises(TypeError, match="expected a value of type i64"):
        b.gep(Value("%p", "ptr"), x)


def printed(value):
    """The last instruction of the function, without the name of its result."""
    return str(value.builder).splitlines()[-3].partition(" = ")[2]


def test_operators_need_a_function():
    one = constant(1, "i64")
    with pytest.raises(TypeError, match="no operand belongs to a function"):
        one + one
    b = Module(isa.TARGETS["generic"]).function("f", "i64 n")
    assert printed(one + b.args[0]) == "add i64 1, %n"
    with pytest.raises(TypeError, match="one type"):
        b.args[0] + constant(1, "i32")


def test_python_asks_no_value_for_its_truth():
    """`a < b < c`, `a or b` and `min(a, b)` fail, because they would mean something else."""
    (n,) = Module(isa.TARGETS["generic"]).function("f", "i64 n").args
    for ask in (lambda: 0 < n < 3, lambda: n or 1, lambda: min(n, 3)):
        with pytest.raises(TypeError, match="not known before the function runs"):
            ask()
    assert n == Value("%n", "i64")  # the Python object


def test_numbers_of_a_choice_have_a_type():
    b = Module(isa.TARGETS["generic"], "double").function("f", "i64 n")
    assert printed(b.select(b.args[0] > 0, 1, 2)).endswith("i64 1, i64 2")
    few = b.lane_mask(b.args[0])
    assert b.select(few, 1.0, 0).type == b.vec
    assert b.select(few, 1, 2).type == vector(b.lanes, "i64")


# ------------------------------------------------------------------------- numbers in memory
def converted(target, number, floats, halves):
    """Converts floats to the bits of 16-bit numbers, and such bits to floats."""
    narrowed, widened = np.zeros(len(floats), np.uint16), np.zeros(len(halves), np.float32)

    def body(b, n, m, floats, narrowed, halves, widened):
        with b.loop(0, n, b.lanes) as i:
            b.store(narrow(b, b.load(b.gep(floats, i)), number), b.gep(narrowed, i, "i16"))
        with b.loop(0, m, b.lanes) as i:
            bits = b.load(b.gep(halves, i, "i16"), vector(b.lanes, "i16"))
            b.store(widen(b, bits, number), b.gep(widened, i))

    arrays = floats, narrowed, halves, widened
    run(target, "float", body, len(floats), len(halves), *arrays)
    return narrowed, widened


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("target", TARGETS)
def test_16_bits_are_widened_and_rounded(target, dtype):
    """Converts all numbers of 16 bits, floats of all sizes, and floats halfway between two numbers.
    The processor's own conversion to bfloat16 turns subnormal floats into 0.
    """
    kind, number = numpy_dtype(dtype), DTYPES[dtype].storage.llvm
    halves = np.arange(1 << 16, dtype=np.uint16)
    wide = halves.view(kind).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        middle = (wide[:-1] + wide[1:]) / 2
        near = [np.nextafter(middle, np.float32(way)) for way in (-np.inf, np.inf)]
    every = np.arange(0, 1 << 32, 9973, dtype=np.uint64).astype(np.uint32).view(np.float32)
    floats = np.concatenate([wide, middle, *near, every])
    floats = np.append(floats, np.zeros(-len(floats) % 64, np.float32))
    narrowed, widened = converted(target, number, floats, halves)
    assert np.array_equal(widened, wide, equal_nan=True)
    assert np.array_equal(np.signbit(widened), np.signbit(wide))
    with np.errstate(over="ignore", invalid="ignore"):
        right = floats.astype(kind)
    if isa.TARGETS[target].bfloat and dtype == "bfloat16":
        small = np.abs(floats) < np.finfo(np.float32).smallest_normal
        right[small] = np.copysign(np.float32(0), floats[small])
    found = narrowed.view(kind)
    nan = np.isnan(floats)
    assert np.array_equal(np.isnan(found.astype(np.float32)), nan)
    assert np.array_equal(found[~nan].view(np.uint16), right[~nan].view(np.uint16))


UNSIGNED = [None, (255, 127), (255, -128), (0, -128), (128, -127)]
SEVEN_BITS = [None, (127, 127), (127, -128), (0, -128)]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("bits", "edge"), [*((8, edge) for edge in UNSIGNED), *((7, edge) for edge in SEVEN_BITS)]
)
def test_dot(target, bits, edge, rng):
    """Sums four products of unsigned and signed bytes per lane exactly, including the largest."""
    lanes = isa.TARGETS[target].lanes("float")
    sums = rng.integers(-(1 << 20), 1 << 20, lanes, np.int32)
    left = rng.integers(0, 1 << bits, 4 * lanes, np.uint8)
    right = rng.integers(-128, 128, 4 * lanes, np.int8)
    if edge:
        left[:], right[:] = edge
    wanted = sums + (left.astype(int) * right).reshape(lanes, 4).sum(1)

    def add(b, *places):
        total, *numbers = (b.load(at, b.ivec, align=1) for at in places)
        b.store(dot(b, total, *numbers, bits), places[0], align=1)

    run(target, "float", add, sums, left, right)
    assert np.array_equal(sums, wanted)


@pytest.mark.parametrize("target", [t for t in TARGETS if in_pairs(isa.TARGETS[t], "bfloat")])
def test_dot_of_pairs(target, rng):
    """Sums two products of bfloat16 per lane."""
    lanes = isa.TARGETS[target].lanes("float")
    left, right = (rng.normal(size=2 * lanes).astype(numpy_dtype("bfloat16")) for _ in "lr")
    sums = rng.normal(size=lanes).astype("float32")
    products = left.astype("float64") * right.astype("float64")
    wanted = sums + products.reshape(lanes, 2).sum(1)

    def add(b, *places):
        total, *pairs = (
            b.load(places[0], align=1),
            *(b.load(at, b.ivec, align=1) for at in places[1:]),
        )
        b.store(dot_pairs(b, total, *pairs), places[0], align=1)

    run(target, "float", add, sums, left.view("uint16"), right.view("uint16"))
    assert np.abs(sums - wanted).max() < 1e-6
