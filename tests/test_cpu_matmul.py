"""The matmul of what is parallel in time: layouts, sizes, threads, bits, and whose matmul it is."""

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

from anycell.engines import cpu
from anycell.engines.cpu import gemm, isa
from anycell.layer import products
from anycell.layer.run import extent
from anycell.numpy import Dense
from anycell.numpy.host import NumpyHost, host_of, numpy_dtype
from anycell.plan import DTYPES as ROWS
from anycell.plan.dtype import dtypes

Array = npt.NDArray[Any]
Sizes = tuple[int, int, int]  # rows, columns, inner
DTYPES = dtypes("cpu")
LAYOUTS = [*itertools.product((False, True), repeat=3)]  # A and B transposed, C added to


def sizes(dtype: str) -> Iterator[Sizes]:
    """On both sides of every border: of register blocks, pieces, vectors, panels, blocks, spans."""
    one = gemm.Gemm(isa.current(), ROWS[dtype])
    lanes, width = one.lanes, one.width
    yield from itertools.product((0, 1, 2), repeat=3)
    rows = {one.rows * n + more for n in (1, 2) for more in (-1, 0, 1)}
    for count in sorted(rows | {gemm.ROWS - 1, gemm.ROWS, gemm.ROWS + 1, 2 * gemm.ROWS + 1}):
        yield count, width + 3, 9
    columns = {n * lanes + more for n in range(1, one.vectors + 2) for more in (-1, 0, 1)}
    for count in sorted(columns | {gemm.SPAN_COLUMNS + more for more in (-1, 0, 1)}):
        yield 7, count, 9
    inner = {n + more for n in (lanes, gemm.INNER, gemm.SPAN_INNER) for more in (-1, 0, 1)}
    for count in sorted(inner | {2 * gemm.INNER + 1}):
        yield 7, lanes + 3, count
    yield 131, 2 * width + 5, gemm.INNER + 70
    yield gemm.ROWS + 1, gemm.SPAN_COLUMNS + 1, gemm.SPAN_INNER + 1


def draw(shape: tuple[int, int], rng: np.random.Generator, dtype: str) -> Array:
    return rng.standard_normal(shape).astype(numpy_dtype(dtype))


class Padded:
    """Makes arrays whose rows are apart, and begin off the borders of vectors; NaN between."""

    def __init__(self, padding: int, offset: int) -> None:
        self.padding, self.offset = padding, offset

    def __call__(self, shape: tuple[int, int], dtype: str) -> Array:
        rows, columns = shape
        whole = np.full(rows * (columns + self.padding) + self.offset, np.nan, numpy_dtype(dtype))
        array = whole[self.offset :].reshape(rows, columns + self.padding)
        return array[:, :columns]


Make = Callable[[tuple[int, int], str], Array]
DENSE = Padded(0, 0)


*NARROWER, LAST = isa.available()
NAMES = [*[pytest.param(name, marks=pytest.mark.slow) for name in NARROWER], LAST]


def product(
    a: Array, b: Array, c: Array | None = None, threads: int = 1, make: Make = DENSE
) -> Array:
    """``a @ b``, or ``c + a @ b``, by the kernel, on arrays that ``make`` makes."""
    dtype, copies = str(a.dtype), list[Array]()
    for array in (a, b):
        turned = array.flags.f_contiguous and not array.flags.c_contiguous
        copy = make(array.T.shape if turned else array.shape, dtype)
        copy = copy.T if turned else copy
        copy[...] = array
        copies.append(copy)
    out = make((a.shape[0], b.shape[1]), ROWS[dtype].accumulate.name)
    out[...] = np.nan if c is None else c
    products.multiply(host_of(dtype), dtype, *copies, out, c is not None, threads)
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
    wide = a.astype("float64") @ b.astype("float64") + (0 if c is None else c)
    out = product(a, b, c, **how)
    assert not np.isnan(out).any()
    # Products of 16 bits are exact in what they are added up in.
    summed = ROWS[dtype].accumulate.name
    assert_close(out, wide, summed, "forward", f"{size} {layout}", axes=())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_sizes_and_layouts(name: str, dtype: str, seed: int) -> None:
    """Every size in one layout, in turns, and the largest in all; off the borders of vectors."""
    with isa.force(name):
        *some, last = sizes(dtype)
        cases = [*zip(some, itertools.cycle(LAYOUTS)), *((last, layout) for layout in LAYOUTS)]
        for n, (size, layout) in enumerate(cases):
            make = Padded(n % 3 * 5, n % 4)
            check(size, layout, dtype, seed + n, threads=1 + n % 3, make=make)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", isa.available())
def test_all_sizes_in_all_layouts(name: str, dtype: str, seed: int) -> None:
    with isa.force(name):
        cases = itertools.product(sizes(dtype), LAYOUTS, (1, 2, 3))
        for n, (size, layout, threads) in enumerate(cases):
            check(size, layout, dtype, seed + n, threads=threads, make=Padded(n % 5, n % 7))


def between_pages(dtype: str, seed: int, every: int) -> None:
    """Some cases on arrays and scratch memory beside forbidden pages; for a process of its own."""
    count = 0
    for n, (size, layout) in enumerate(itertools.product(sizes(dtype), LAYOUTS)):
        if (n + seed) % every:
            continue
        for end in (True, False):
            print(size, layout, end, flush=True)

            def make(shape: tuple[int, int], dtype: str, end: bool = end) -> Array:
                return guarded(shape, dtype, end)

            with (
                mock.patch.object(cpu.Scratch, "take", scratch(end)),
                mock.patch.object(cpu.scratch, "give_back", lambda _: None),
            ):
                check(size, layout, dtype, n, threads=1 + n % 3, make=make)
            count += 1
    print(count)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_it_stays_within_its_arrays(name: str, dtype: str, seed: int) -> None:
    code = f"from test_cpu_matmul import *; between_pages({dtype!r}, {seed}, 7)"
    assert int(python(code, ANYCELL_ISA=name).split()[-1]) > 100


# -- bits ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
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


# -- whose matmul ----------------------------------------------------------------------------------
def kernel_calls(work: Callable[[], object]) -> int:
    """How many matmuls of some work are the kernel's."""
    with mock.patch.object(cpu, "multiply", wraps=cpu.multiply) as multiply:
        work()
    return multiply.call_count


needs_fma = pytest.mark.skipif(not isa.current().fma, reason="no fused multiply-adds")


@needs_fma
@pytest.mark.parametrize("rows", (64, 65))
def test_small_matmuls_are_numpys(rows: int, rng: np.random.Generator) -> None:
    host, a, b = (
        NumpyHost("float32"),
        draw((rows, 64), rng, "float32"),
        draw((64, 64), rng, "float32"),
    )
    out = np.full((rows, 64), np.nan, "float32")
    large = products.rule("numpy").ours(rows, 64, 64)
    assert kernel_calls(lambda: host.matmul(a, b, out)) == large == (rows == 65)
    assert_close(out, a.astype("float64") @ b, "float32", "forward")
    assert kernel_calls(lambda: host.matmul_add(a, b, out)) == large
    assert_close(out, 2 * (a.astype("float64") @ b), "float32", "forward")
    projected: list[Array] = []
    assert kernel_calls(lambda: projected.append(host.project(a, b))) == large
    assert_close(projected[0], a.astype("float64") @ b.T, "float32", "forward")


@needs_fma
@pytest.mark.parametrize("few", (3, 4))
def test_hardly_any_rows_or_columns_are_numpys(few: int, rng: np.random.Generator) -> None:
    host = NumpyHost("float32")
    for rows, columns in ((few, 600), (600, few)):
        a, b, _ = operands((rows, columns, 600), (True, True, False), "float32", rng)
        out = np.empty((rows, columns), "float32")
        assert kernel_calls(lambda: host.matmul(a, b, out)) == (few == 4)  # noqa: B023
        assert_close(out, a.astype("float64") @ b, "float32", "forward")


@needs_fma
def test_layouts_that_the_kernel_does_not_read(rng: np.random.Generator) -> None:
    """Neither axis dense: a copy is multiplied. A result whose columns are not dense is NumPy's."""
    host, a, b = (
        NumpyHost("float64"),
        draw((99, 88), rng, "float64"),
        draw((88, 77), rng, "float64"),
    )
    apart = np.repeat(np.repeat(a, 2, 0), 2, 1)[::2, ::2]
    bytes_ = np.zeros(a.nbytes + 1, np.uint8)
    odd = bytes_[1:].view("float64").reshape(a.shape)
    odd[...] = a
    spread = np.repeat(b, 2, 1)[:, ::2]
    out, turned = np.empty((99, 77)), np.empty((77, 99)).T
    for left, right, into, ours in (
        (a, b, out, 1), (np.asfortranarray(a), np.asfortranarray(b), out, 1),
        (a[::-1][::-1], b, out, 1), (np.repeat(a, 2, 0)[::2], b, out, 1),
        (apart, b, out, 1), (a, spread, out, 1), (a, b, turned, 0), (odd, b, out, 1),
    ):  # fmt: skip
        into[...] = np.nan
        assert kernel_calls(lambda: host.matmul(left, right, into)) == ours  # noqa: B023
        assert_close(into, a @ b, "float64", "forward")
    for rows, columns in ((a[::-1], b), (a, b[:, ::-1][:, ::-1]), (a[:1].repeat(99, 0), b)):
        assert kernel_calls(lambda: host.matmul(rows, columns, out)) == 1  # noqa: B023
        assert_close(out, rows @ columns, "float64", "forward")
    same = np.broadcast_to(a[:1], a.shape)  # rows that lie at one place
    assert kernel_calls(lambda: host.matmul(same, b, out)) == 1
    assert_close(out, same @ b, "float64", "forward")


def far_apart(array: Array) -> Array:
    """The array, with other strides along axes of one element."""
    sizes = zip(array.shape, array.strides, strict=True)
    strides = [4096 if count == 1 else stride for count, stride in sizes]
    return np.lib.stride_tricks.as_strided(array, array.shape, strides)


@pytest.mark.parametrize("size", [(1, 999, 999), (999, 1, 999), (999, 999, 1)])
def test_axes_of_one(
    size: Sizes, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, anew: None
) -> None:
    """Their strides say nothing."""
    monkeypatch.setenv(products.ENV, "ours")
    products.CHOSEN.clear()
    host = NumpyHost("float32")
    for layout in LAYOUTS:
        a, b, _ = operands(size, layout, "float32", rng)
        if layout[2]:  # strides as long as can be
            a = np.lib.stride_tricks.as_strided(
                a, a.shape, [s * (n > 1) or 4096 for n, s in zip(a.shape, a.strides, strict=True)]
            )
            b = np.lib.stride_tricks.as_strided(
                b, b.shape, [s * (n > 1) or 4096 for n, s in zip(b.shape, b.strides, strict=True)]
            )
        out = np.empty((size[0], size[1]), "float32")
        host.matmul(a, b, out)
        assert_close(out, a.astype("float64") @ b, "float32", "forward", axes=())


@pytest.mark.skipif("avx2" not in isa.available(), reason="of x86-64")
def test_without_fused_multiply_adds_numpy_multiplies(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, anew: None
) -> None:
    monkeypatch.delenv(products.ENV, raising=False)
    host, a = NumpyHost("float32"), draw((99, 99), rng, "float32")
    with isa.force("generic"):
        assert kernel_calls(lambda: host.matmul(a, a, np.empty_like(a))) == 0


@needs_fma
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


def test_what_it_will_touch_is_checked() -> None:
    """With ``ANYCELL_CHECK``, against the bounds of the arrays."""
    a = np.zeros((8, 8), "float32")
    place, bounds = (a.ctypes.data, 8, 1), extent(NumpyHost("float32"), a)
    with pytest.raises(AssertionError, match="b: the kernel would touch bytes"):
        cpu.multiply("float32", (8, 9, 8), place, place, place[:2], False, 1, (bounds,) * 3)
    apart = place[0], 2, 2
    with pytest.raises(AssertionError, match="a: strides 2 and 2, neither is 1"):
        cpu.multiply("float32", (2, 8, 2), apart, place, place[:2], False, 1, (bounds,) * 3)


# ---- whose matmul --------------------------------------------------------------------------------
@pytest.fixture
def anew() -> Iterator[None]:
    """The rule is asked for anew, in the test and after it."""
    products.CHOSEN.clear()
    yield
    products.CHOSEN.clear()


@pytest.mark.parametrize("maker", [True, False], ids=["AMD", "others"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_the_rule(library: str, maker: bool, monkeypatch: pytest.MonkeyPatch, anew: None) -> None:
    """By library, maker and size, on both sides of each; the variable overrides it."""
    monkeypatch.delenv(products.ENV, raising=False)
    monkeypatch.setattr(isa, "amd", lambda: maker)
    rule, large = products.rule(library), 1 << 12
    ours = isa.current().fma and (library == "numpy" or maker)
    assert rule.ours(large, large, large) == ours
    if ours:
        edge, few = int(rule.least), rule.few
        assert rule.ours(few, edge // few + 1, 1) and not rule.ours(few - 1, edge, large)
        assert rule.ours(large, few, edge) and not rule.ours(large, few - 1, edge)
        assert not rule.ours(few, (edge - 1) // few, 1)
    for said, one in (("ours", True), ("host", False)):
        monkeypatch.setenv(products.ENV, said)
        products.CHOSEN.clear()
        rule = products.rule(library)
        assert rule.ours(1, 1, 1) == rule.ours(large, large, large) == one
        assert products.ENV in rule.why
    monkeypatch.setenv(products.ENV, "mine")
    products.CHOSEN.clear()
    with pytest.raises(ValueError, match="ANYCELL_MATMUL='mine': expected ours or host"):
        products.rule(library)


@pytest.mark.parametrize("said", ["ours", "host"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_products_of_torch(
    dtype: str, said: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, anew: None
) -> None:
    """All layouts, by either matmul."""
    torch = pytest.importorskip("torch")
    from anycell.torch.host import HOSTS

    monkeypatch.setenv(products.ENV, said)
    host = HOSTS[dtype]
    for size, layout in itertools.product([(1, 1, 1), (7, 33, 5), (30, 600, 900)], LAYOUTS):
        a, b, _ = operands(size, layout, dtype, rng)
        right, out = a.astype("float64") @ b, np.full(size[:2], np.nan, dtype)
        left, weight, into = (torch.from_numpy(array) for array in (a, b, out))
        calls = kernel_calls(lambda: host.matmul(left, weight, into))  # noqa: B023
        assert calls == (said == "ours")
        assert_close(out, right, dtype, "forward", axes=())
        host.matmul_add(left, weight, into)
        assert_close(out, 2 * right, dtype, "forward", axes=())
        assert_close(host.project(left, weight.T).numpy(), right, dtype, "forward", axes=())
        spread = torch.empty(size[0], 2 * size[1], dtype=left.dtype)[:, ::2]
        host.matmul(left, weight, spread)
        assert_close(spread.numpy(), right, dtype, "forward", axes=())
