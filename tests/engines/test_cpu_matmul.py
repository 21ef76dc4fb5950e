"""The matmul outside the time loop: layouts, sizes, threads, bits, and the choice of a matmul."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
from guarded import guarded, scratch
from processes import python
from tolerances import assert_close

from anycell import cells
from anycell.engines import cpu
from anycell.engines.cpu import driver, gemm, isa
from anycell.engines.cpu.ir import X86
from anycell.layer import products
from anycell.layer.framework import extent
from anycell.layer.recipe import View
from anycell.numpy import Dense
from anycell.numpy.check import numpy_dtype
from anycell.numpy.framework import Numpy
from anycell.plan import DTYPES as ROWS
from anycell.plan import plan
from anycell.plan.dtype import dtypes

Array = npt.NDArray[Any]
Sizes = tuple[int, int, int]  # rows, columns, inner
DTYPES = dtypes("cpu")
LAYOUTS = [*itertools.product((False, True), repeat=3)]  # A transposed, B transposed, added to C


def sizes(dtype: str) -> Iterator[Sizes]:
    """Sizes around all borders: of register blocks, pieces, vectors, panels, blocks and spans."""
    one = gemm.Gemm(isa.current(), ROWS[dtype])
    lanes, width = one.lanes, one.width
    yield from itertools.product((0, 1, 2), repeat=3)
    rows = {one.rows * n + more for n in (1, 2) for more in (-1, 0, 1)}
    for count in sorted(rows | {gemm.ROWS - 1, gemm.ROWS, gemm.ROWS + 1, 2 * gemm.ROWS + 1}):
        yield count, width + 3, 9
    columns = {n * lanes + more for n in range(1, one.vectors + 2) for more in (-1, 0, 1)}
    for count in sorted(columns | {gemm.SPAN_COLUMNS + more for more in (-1, 0, 1)}):
        yield 7, count, 9
    spans = gemm.INNER, 2 * gemm.INNER, gemm.SPAN_INNER
    inner = {n + more for n in (lanes, *spans) for more in (-1, 0, 1)}
    for count in sorted(inner | {*range(2 * gemm.UNROLL), 2 * gemm.INNER + 1}):
        yield one.rows + 1, lanes + 3, count  # a whole register block, which is unrolled, and one
    yield 131, 2 * width + 5, gemm.INNER + 70
    for rows in (gemm.ROWS, gemm.ROWS + 1):
        yield rows, gemm.SPAN_COLUMNS + 1, gemm.SPAN_INNER + 1


def draw(shape: tuple[int, int], rng: np.random.Generator, dtype: str) -> Array:
    return rng.standard_normal(shape).astype(numpy_dtype(ROWS[dtype].storage.name))


class Padded:
    """Makes arrays whose rows are apart, with NaN between them, and not aligned to vectors."""

    def __init__(self, padding: int, offset: int) -> None:
        self.padding, self.offset = padding, offset

    def __call__(self, shape: tuple[int, int], dtype: str) -> Array:
        rows, columns = shape
        whole = np.full(rows * (columns + self.padding) + self.offset, np.nan, numpy_dtype(dtype))
        array = whole[self.offset :].reshape(rows, columns + self.padding)
        return array[:, :columns]


Make = Callable[[tuple[int, int], str], Array]
DENSE = Padded(0, 0)


# Instruction sets, and the dtypes that they multiply; matrix tiles (or their emulation) and pairs
# of bfloat16 add ways of their own.
*NARROWER, LAST = isa.available()
RUN = {*isa.available(), *filter(isa.runs, isa.ASKED_FOR)}
OWN = [("amx", "float32 high"), ("amx-emulated", "float32 high"), ("amx-emulated", "bfloat16")]
OWN += [("avx512bf16", "float32 medium"), ("avx512bf16", "bfloat16")]
WAYS = dict.fromkeys([way for way in OWN if way[0] in RUN])
WAYS |= dict.fromkeys(itertools.product(isa.available()[::-1], DTYPES))
each_way = pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(*way, marks=[pytest.mark.slow] * (way[0] in NARROWER and way not in OWN))
        for way in WAYS
    ],
)


def product(
    a: Array,
    b: Array,
    c: Array | None = None,
    threads: int = 1,
    make: Make = DENSE,
    row: str | None = None,
) -> Array:
    """Computes ``a @ b``, or ``c + a @ b``, by the kernel, on arrays that ``make`` allocates;
    ``row`` names a row of ``DTYPES``, by default that of a's dtype.
    """
    dtype, copies = str(a.dtype), list[Array]()
    for array in (a, b):
        turned = array.flags.f_contiguous and not array.flags.c_contiguous
        copy = make(array.T.shape if turned else array.shape, dtype)
        copy = copy.T if turned else copy
        copy[...] = array
        copies.append(copy)
    out = make((a.shape[0], b.shape[1]), ROWS[dtype].accumulate.name)
    out[...] = np.nan if c is None else c
    products.multiply(Numpy.of(dtype), row or dtype, *copies, out, c is not None, threads)
    for array, copy in zip((a, b), copies, strict=True):
        assert np.array_equal(array, copy)
    return out


def operands(
    size: Sizes, layout: tuple[bool, bool, bool], dtype: str, rng: np.random.Generator
) -> tuple[Array, Array, Array | None]:
    (rows, columns, inner), (a_turned, b_turned, added) = size, layout
    a = draw((inner, rows), rng, dtype).T if a_turned else draw((rows, inner), rng, dtype)
    b = draw((columns, inner), rng, dtype).T if b_turned else draw((inner, columns), rng, dtype)
    return a, b, draw((rows, columns), rng, ROWS[dtype].accumulate.name) if added else None


def check(size: Sizes, layout: tuple[bool, bool, bool], dtype: str, seed: int, **how: Any) -> None:
    a, b, c = operands(size, layout, dtype, np.random.default_rng(seed))
    if size[2] < 2 * gemm.UNROLL:
        a, b = abs(a), abs(b)  # so that sums of few terms do not cancel
    wide = a.astype("float64") @ b.astype("float64")
    if c is not None:
        c = np.copysign(c, wide).astype(c.dtype)  # so that sums do not cancel
        wide += c
    out = product(a, b, c, **how, row=dtype)
    assert not np.isnan(out).any()
    # Products of 16-bit numbers are exact in the dtype of their sums.
    within = ROWS[dtype].accumulate.name if dtype in DTYPES else dtype
    assert_close(out, wide, within, "forward", f"{size} {layout}", axes=())
    # The bits of an element do not depend on other rows and columns.
    rows, columns = slice(size[0] // 3, None), slice(size[1] - size[1] // 4)
    left, right = np.copy(a[rows], order="K"), np.copy(b[:, columns], order="K")
    few = product(left, right, None if c is None else c[rows, columns], **how, row=dtype)
    assert np.array_equal(few, out[rows, columns]), f"{size} {layout}"


@each_way
def test_sizes_and_layouts(name: str, dtype: str, seed: int) -> None:
    """Each size has one layout in turn, the largest has all; arrays are not aligned to vectors."""
    with isa.force(name):
        *some, last = sizes(dtype)
        cases = [*zip(some, itertools.cycle(LAYOUTS)), *((last, layout) for layout in LAYOUTS)]
        for n, (size, layout) in enumerate(cases):
            make = Padded(n % 3 * 5, n % 4)
            check(size, layout, dtype, seed + n, threads=1 + n % 3, make=make)


@pytest.mark.slow
@each_way
def test_all_sizes_in_all_layouts(name: str, dtype: str, seed: int) -> None:
    with isa.force(name):
        cases = itertools.product(sizes(dtype), LAYOUTS, (1, 2, 3))
        for n, (size, layout, threads) in enumerate(cases):
            check(size, layout, dtype, seed + n, threads=threads, make=Padded(n % 5, n % 7))


def between_pages(name: str, seed: int, every: int) -> None:
    """Checks some cases in memory next to forbidden pages; needs a process of its own."""
    cases = (
        (dtype, *case)
        for way, dtype in WAYS
        if way == name
        for case in itertools.product(sizes(dtype), LAYOUTS)
    )
    count = 0
    for n, (dtype, size, layout) in enumerate(cases):
        if (n + seed) % every:
            continue
        for end in (True, False):
            print(dtype, size, layout, end, flush=True)

            def make(shape: tuple[int, int], dtype: str, end: bool = end) -> Array:
                return guarded(shape, dtype, end)

            with (
                mock.patch.object(cpu.Scratch, "take", scratch(end)),
                mock.patch.object(cpu.scratch, "give_back", lambda _: None),
            ):
                check(size, layout, dtype, n, threads=1 + n % 3, make=make)
            count += 1
    print(count)


@pytest.mark.parametrize("name", dict.fromkeys(name for name, _ in WAYS))
@pytest.mark.sample(1)
def test_it_stays_within_its_arrays(name: str, seed: int) -> None:
    code = f"from tests.engines.test_cpu_matmul import *; between_pages({name!r}, {seed}, 14)"
    assert int(python(code, ANYCELL_ISA=name).split()[-1]) > 100


# -- bits ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.sample(every=5)  # each dtype
def test_bits(layout: tuple[bool, bool, bool], dtype: str, rng: np.random.Generator) -> None:
    """An element follows from its row and its column: not from threads, nor from other rows and
    columns, nor from where the arrays lie."""
    a, b, c = operands((2 * gemm.ROWS + 5, 333, gemm.SPAN_INNER + 300), layout, dtype, rng)
    whole = product(a, b, c)
    for threads in (2, 3, 7):
        for _ in range(5):  # who takes which piece differs from time to time
            assert np.array_equal(product(a, b, c, threads=threads), whole)
    assert np.array_equal(product(a, b, c, make=Padded(3, 1)), whole)
    for rows, columns in ((slice(0, 1), slice(0, 9)), (slice(90, 131), slice(70, 333))):
        part = None if c is None else c[rows, columns]
        left, right = np.copy(a[rows], order="K"), np.copy(b[:, columns], order="K")
        assert np.array_equal(product(left, right, part), whole[rows, columns])


@each_way
def test_pieces_of_every_height(name: str, dtype: str, rng: np.random.Generator) -> None:
    """Rows around all borders: who packs a panel, whether pieces are high or low, and how many."""
    with isa.force(name):
        width = gemm.Gemm(isa.current(), ROWS[dtype]).width
        for threads, panels in itertools.product((1, 2, 3), (1, 3)):  # for few threads, and for all
            wide = threads * gemm.PIECES * gemm.ROWS  # rows from which pieces are high
            borders = {gemm.ROWS // 2, gemm.ROWS, threads * gemm.ROWS // 2, threads * gemm.ROWS}
            borders |= {wide, wide + gemm.ROWS}
            size = max(borders) + 1, panels * width - 1, 20
            a, b, _ = operands(size, (False, False, False), dtype, rng)
            whole = product(a, b, row=dtype)
            for rows in sorted({border + more for border in borders for more in (-1, 0, 1)}):
                part = product(a[:rows], b, threads=threads, row=dtype)
                assert np.array_equal(part, whole[:rows]), (threads, panels, rows)


@each_way
def test_spans_of_every_length(name: str, dtype: str, rng: np.random.Generator) -> None:
    """One thread takes dense columns of A in shorter spans, if there are up to two panels."""
    with isa.force(name):
        width = gemm.Gemm(isa.current(), ROWS[dtype]).width
        for columns, inner in itertools.product(
            (2 * width, 2 * width + 1), (2 * gemm.INNER, 2 * gemm.INNER + 1, gemm.SPAN_INNER + 70)
        ):
            for turned in (False, True):
                a, b, c = operands((50, columns, inner), (turned, False, True), dtype, rng)
                alone = product(a, b, c, row=dtype)
                wide = a.astype("float64") @ b.astype("float64") + np.asarray(c, "float64")
                if "float32 " not in dtype:
                    assert_close(alone, wide, str(alone.dtype), "gradient")
                assert np.array_equal(product(a, b, c, threads=2, row=dtype), alone)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("dense", ["rows", "columns"])
@pytest.mark.parametrize("name", isa.available()[::-1])
@pytest.mark.sample(every=3)  # both ways to lie on the widest, and each instruction set
def test_bits_do_not_depend_on_distances(
    name: str, dense: str, dtype: str, rng: np.random.Generator
) -> None:
    """Rows of A that share few sets of the near cache are copied, and columns that are far from
    each other; others are read where they lie."""
    turned = dense == "columns"
    step = (gemm.NEAR // 2 if turned else gemm.CONFLICT // 4) // np.dtype(dtype).itemsize
    length = 50 if turned else 100  # of what is dense
    rows, inner = (length, 300) if turned else (gemm.ROWS + 1, length)
    a, b, _ = operands((rows, 70, inner), (turned, False, False), dtype, rng)
    with isa.force(name):
        right = product(a, b)
        for distance in (n * step + more for n in (1, 2, 3, 4, 6, 8) for more in (-1, 0, 1)):
            padded = Padded(distance - length, 0)
            for threads in (1, 2):
                result = product(a, b, threads=threads, make=padded)
                assert np.array_equal(result, right), distance


def test_sums_go_on(rng: np.random.Generator) -> None:
    """C += of one part of the sum after the other is the whole sum, where parts are whole blocks;
    and what numbers of 0 add changes nothing."""
    a, b, _ = operands((70, 90, 5 * gemm.INNER + 3), (True, False, False), "float32", rng)
    whole, cut = product(a, b), 2 * gemm.INNER
    first = product(np.copy(a[:, :cut], order="K"), b[:cut])
    assert np.array_equal(product(np.copy(a[:, cut:], order="K"), b[cut:], first), whole)
    zeros = np.zeros((500, 90), "float32")
    longer = np.asfortranarray(np.concatenate([a, np.zeros((70, 500), "float32")], 1))
    assert np.array_equal(product(longer, np.concatenate([b, zeros])), whole)


def test_error_of_long_sums(rng: np.random.Generator) -> None:
    """No worse than twice NumPy's."""
    a, b, _ = operands((64, 64, 20000), (True, False, False), "float32", rng)
    wide = a.astype("float64") @ b.astype("float64")
    ours, numpys = (np.linalg.norm(out - wide) for out in (product(a, b), a @ b))
    assert ours <= 2 * numpys


def kernel_calls(work: Callable[[], object]) -> int:
    """How many matmuls of some work are the kernel's."""
    with mock.patch.object(cpu, "multiply", wraps=cpu.multiply) as multiply:
        work()
    return multiply.call_count


def test_layouts_that_the_kernel_does_not_read(rng: np.random.Generator) -> None:
    """Neither axis dense, or no whole elements apart: a copy is multiplied."""
    a, b = draw((99, 88), rng, "float64"), draw((88, 77), rng, "float64")
    apart = np.repeat(np.repeat(a, 2, 0), 2, 1)[::2, ::2]
    bytes_ = np.zeros(a.nbytes + 1, np.uint8)
    odd = bytes_[1:].view("float64").reshape(a.shape)
    odd[...] = a
    same = np.broadcast_to(a[:1], a.shape)  # rows that lie at one place
    for left, right in (
        (a, b), (np.asfortranarray(a), np.asfortranarray(b)), (a[::-1], b), (apart, b), (odd, b),
        (np.repeat(a, 2, 0)[::2], b), (a, np.repeat(b, 2, 1)[:, ::2]), (a, b[:, ::-1]), (same, b),
    ):  # fmt: skip
        out = np.full((99, 77), np.nan)
        products.multiply(Numpy("float64"), "float64", left, right, out, False, 1)
        assert_close(out, left @ right, "float64", "forward")


def far_apart(array: Array) -> Array:
    """The array, with other strides along axes of one element."""
    sizes = zip(array.shape, array.strides, strict=True)
    strides = [4096 if count == 1 else stride for count, stride in sizes]
    return np.lib.stride_tricks.as_strided(array, array.shape, strides)


@pytest.mark.parametrize("size", [(1, 999, 999), (999, 1, 999), (999, 999, 1)])
def test_axes_of_one(size: Sizes, rng: np.random.Generator) -> None:
    """Their strides say nothing."""
    host = Numpy("float32")
    for layout in LAYOUTS:
        a, b, _ = operands(size, layout, "float32", rng)
        if layout[2]:
            a, b = far_apart(a), far_apart(b)
        out = np.empty((size[0], size[1]), "float32")
        products.multiply(host, "float32", a, b, out, False, 1)
        assert_close(out, a.astype("float64") @ b, "float32", "forward", axes=())


def test_dense(rng: np.random.Generator) -> None:
    """The readout multiplies as layers do."""
    dense, x = Dense(64, 48, seed=0), draw((200, 64), rng, "float32").reshape(2, 100, 64)
    d = draw((200, 48), rng, "float32").reshape(2, 100, 48)
    y: list[Array] = []
    assert kernel_calls(lambda: y.append(dense.forward(x, training=True))) == 1
    assert kernel_calls(lambda: y.append(dense.backward(d))) == 2
    weight = dense.parameters["weight"].astype("float64")
    assert_close(y[0], x @ weight.T, "float32", "forward")
    assert_close(y[1], d @ weight, "float32", "gradient")
    flat = d.reshape(-1, 48).astype("float64")
    assert_close(dense.grads["weight"], flat.T @ x.reshape(-1, 64), "float32", "gradient")


@pytest.mark.parametrize("rows", (64, 65))
def test_small_matmuls_of_the_readout_are_numpys(rows: int, rng: np.random.Generator) -> None:
    dense, x = Dense(64, 64, bias=False, seed=0), draw((rows, 64), rng, "float32")
    y: list[Array] = []
    assert kernel_calls(lambda: y.append(dense.forward(x))) == (rows == 65)
    exact = x.astype("float64") @ dense.parameters["weight"].T
    assert_close(y[0], exact, "float32", "forward")


def test_what_it_will_touch_is_checked() -> None:
    """With ``ANYCELL_CHECK``, against the bounds of the arrays."""
    a = np.zeros((8, 8), "float32")
    place, bounds = (a.ctypes.data, 8, 1), extent(Numpy("float32"), a)
    with pytest.raises(AssertionError, match="b: the kernel would touch bytes"):
        cpu.multiply("float32", (8, 9, 8), place, place, place[:2], False, 1, (bounds,) * 3)
    apart = place[0], 2, 2
    with pytest.raises(AssertionError, match="a: strides 2 and 2, neither is 1"):
        cpu.multiply("float32", (2, 8, 2), apart, place, place[:2], False, 1, (bounds,) * 3)


# ---- whose matmul --------------------------------------------------------------------------------
@pytest.fixture
def anew() -> Iterator[None]:
    """The rule is asked for anew, in the test and after it."""
    products.rule.cache_clear()
    yield
    products.rule.cache_clear()


@pytest.mark.parametrize("maker", [True, False], ids=["AMD", "others"])
def test_the_rule(maker: bool, monkeypatch: pytest.MonkeyPatch, anew: None) -> None:
    """It depends on the maker; the variable overrides it. It says who multiplies in a pass."""
    monkeypatch.delenv(products.ENV, raising=False)
    monkeypatch.setattr(isa, "amd", lambda: maker)
    whole, host = plan(cells.LSTM, 8), Numpy("float32")
    narrow = plan(cells.LSTM, 8, "bfloat16", "cpu")
    rows, columns = (View(0, (4, 4), strides, 4) for strides in ((4, 1), (1, 4)))
    assert products.rule().host == (X86 and not (isa.current().fma and maker))
    for said, one in (("ours", False), ("host", True)):
        monkeypatch.setenv(products.ENV, said)
        products.rule.cache_clear()
        assert products.rule().host == one and products.ENV in products.rule().why
        for there in (0, 1):
            monkeypatch.setattr(Numpy, "blas", there)
            other = one and bool(there)
            for a, ours in ((rows, driver.OURS), (columns, driver.COLUMNS)):
                assert products.kind_of(host, whole, a, rows) == (driver.BLAS if other else ours)
                assert products.kind_of(host, narrow, a, rows) == ours
    monkeypatch.setenv(products.ENV, "mine")
    products.rule.cache_clear()
    with pytest.raises(ValueError, match="ANYCELL_MATMUL='mine': expected ours or host"):
        products.rule()
