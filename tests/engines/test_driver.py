"""The driver of a pass: each kind of product in each layout, along time, in every dtype; and the
order of segments, chunks and moves. The door is a function of Python's that writes down its calls.
"""

import ctypes
import itertools
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from guarded import guarded
from tolerances import assert_close

from anycell.engines import cpu
from anycell.engines.cpu import driver, gemm, isa
from anycell.layer.recipe import CHUNK
from anycell.numpy.check import numpy_dtype
from anycell.plan import DTYPES
from anycell.plan.dtype import dtypes

Array = npt.NDArray[Any]
CALL = "begin count pack origin span".split()  # a door's table, of these entries alone
MATMULS = {
    "gemm": {driver.OURS},
    "columns": {driver.COLUMNS},
    "few": {driver.FEW, driver.UNSCALED},
}
_DOOR = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Pass:
    """A pass of so many steps, in chunks, and what its door was called with."""

    def __init__(self, dtype: str = "float32", **values: int) -> None:
        self.dtype, self.calls = dtype, list[tuple[int, ...]]()
        self.call = array("q", [0, 0, 1, 0, values.get("steps", 1)])
        self.values = {"steps": 1, "batch": 1, "chunk": 1, "threads": 1, **values}
        self.values.setdefault("segment", self.values["steps"])
        self.values.setdefault("last", self.values["steps"])
        self.before: list[dict[str, int]] = []
        self.after: list[dict[str, int]] = []
        self.moves: list[list[int]] = []
        self.look: Callable[[], object] = lambda: None
        self.door = _DOOR(self._look)

    def _look(self, _: int) -> None:
        self.calls.append(tuple(self.call))
        self.look()

    def table(self) -> "array[int]":
        places = {name: i for i, name in enumerate(CALL)}
        threads = self.values["threads"]
        values = {
            "door": ctypes.cast(self.door, ctypes.c_void_p).value or 0,
            "call": self.call.buffer_info()[0], **places, "moves": len(self.moves),
            "before": len(self.before), "after": len(self.after), **self.values,
            "gang": cpu.pool.gang(threads),
        }  # fmt: skip
        kinds = {row.get("kind", driver.OURS) for row in (*self.before, *self.after)}
        for name, of_name in MATMULS.items():
            if kinds & of_name:
                values[name] = driver.matmul(name, self.dtype, isa.current()).address
        table = [values.get(name, 0) for name in driver.PASS]
        for move in self.moves:
            table += move
        for row in (*self.before, *self.after):
            table += [row.get(name, 0) for name in driver.PRODUCT]
        return array("q", table)

    def run(self) -> None:
        functions, table = driver.compiled(self.dtype, isa.current()), self.table()
        address, at = table.buffer_info()[0], driver.PASS.index
        functions.room(address)
        block = cpu.Block(table[at("scratch_bytes")])
        table[at("scratch")] = block.address
        functions.run(address)


def matrix(name: str, a: Array, time: int = 0) -> dict[str, int]:
    """The entries of an operand of two axes."""
    rows, columns = (s // a.itemsize for s in a.strides)
    axes = {"a": ("a_rows", "a_inner"), "b": ("b_inner", "b_columns"), "c": ("c_rows",)}[name]
    return {
        name: a.__array_interface__["data"][0], f"{name}_time": time,
        **dict(zip(axes, (rows, columns), strict=False)),
    }  # fmt: skip


def blas(dtype: str) -> int:
    torch = pytest.importorskip("torch")
    from anycell.torch.framework import Torch

    address = Torch.of(dtype).blas
    if not address:
        pytest.skip(f"PyTorch {torch.__version__} has no MKL here")
    return address


def numbers(shape: tuple[int, ...], dtype: str, end: bool, rng: np.random.Generator) -> Array:
    """Random ones between forbidden pages."""
    memory = guarded(shape, numpy_dtype(dtype), end)
    memory[...] = rng.standard_normal(shape).astype(memory.dtype)
    return memory


def turned(a: Array, end: bool) -> Array:
    """The same numbers, columns first."""
    memory = guarded(a.shape[::-1], a.dtype, end)
    memory[...] = a.T
    return memory.T


SIZES = [
    (1, 1, 1),
    (1, 150, 40),
    (3, 5, 7),
    (11, 67, 33),
    (2, 130, 40),
    (30, 64, 600),
    (5, 0, 3),
    (0, 4, 4),
]
KINDS = {"blas": driver.BLAS, "few": driver.FEW}


@pytest.mark.parametrize("kind", ["ours", *KINDS])
@pytest.mark.parametrize("dtype", dtypes("cpu"))
def test_products(dtype: str, kind: str, rng: np.random.Generator) -> None:
    """Of any layout and sizes, over the rows of chunks, or summed up over chunks."""
    types = DTYPES[dtype]
    if kind == "blas" and not types.plain:
        return
    address, wide = blas(dtype) if kind == "blas" else 0, types.accumulate.name
    for n, ((rows, columns, inner), a_turned, b_turned, added) in enumerate(
        itertools.product(SIZES, (False, True), (False, True), (False, True))
    ):
        if kind == "few" and a_turned:
            continue  # the rows of A are dense
        end, threads = bool(n % 2), 1 + n % 3
        a, b = numbers((rows, inner), dtype, end, rng), numbers((inner, columns), dtype, end, rng)
        c = numbers((rows, columns), wide, end, rng)
        exact = a.astype("float64") @ b.astype("float64") + added * c
        a, b = turned(a, end) if a_turned else a, turned(b, end) if b_turned else b
        one = Pass(dtype, threads=threads, blas=address)
        ours = driver.COLUMNS if a_turned else driver.OURS
        one.before.append({
            "rows": rows, "columns": columns, "inner": inner, "add": added, "along": 1,
            "kind": KINDS.get(kind, ours), **matrix("a", a), **matrix("b", b), **matrix("c", c),
        })  # fmt: skip
        one.run()
        assert_close(c, exact, wide, "forward", f"{rows, columns, inner, n}", ())


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_products_along_time(
    batch: int, reverse: bool, backward: bool, rng: np.random.Generator
) -> None:
    """The rows of A and C are those of a chunk, or the inner axis is: sums over chunks add up."""
    steps, width, chunk = 7, 5, 3
    x, w = rng.standard_normal((steps, batch, width)), rng.standard_normal((width, 4))
    out, total = np.full((steps, batch, 4), np.nan), np.full((width, 4), np.nan)
    rows, between = x.reshape(-1, width), batch * width * 8
    values = {"steps": steps, "batch": batch, "chunk": chunk, "backward": int(backward)}
    one = Pass("float64", **values)
    first = matrix("c", out.reshape(-1, 4), batch * 4 * 8)
    one.before.append({
        "rows": CHUNK, "columns": 4, "inner": width, "along": 0, "reverse": reverse,
        **matrix("a", rows, between), **matrix("b", w), **first,
    })  # fmt: skip
    one.after.append({
        "rows": width, "columns": 4, "inner": CHUNK, "along": 2, "sums": 1, "reverse": reverse,
        **matrix("a", rows.T, between), **matrix("b", out.reshape(-1, 4), batch * 4 * 8),
        "kind": driver.COLUMNS, **matrix("c", total),
    })  # fmt: skip
    one.after.append({
        "rows": CHUNK, "columns": width, "along": 0, "sums": 1, "reverse": reverse,
        "kind": driver.SUM, **matrix("a", rows, between),
        **matrix("c", (vector := np.full((1, width), np.nan))),
    })  # fmt: skip
    one.run()
    assert_close(out, x @ w, "float64", "forward")
    assert_close(total, rows.T @ (rows @ w), "float64", "gradient")
    assert_close(vector[0], rows.sum(0), "float64", "gradient")
    done = [(6, 1), (3, 3), (0, 3)] if backward else [(0, 3), (3, 3), (6, 1)]
    expected = [(steps - d - n if backward else d, n) for d, n in done]
    assert [call[:3] for call in one.calls] == [(d, n, not i) for i, (d, n) in enumerate(expected)]


@pytest.mark.parametrize("once", [False, True])
def test_a_product_before_the_first_chunk(once: bool, rng: np.random.Generator) -> None:
    """It is for one chunk alone, in every call; others are for each of three."""
    a, b, total = rng.standard_normal((2, 5)), rng.standard_normal((5, 4)), np.zeros((2, 4))
    one = Pass("float64", steps=7, batch=1, chunk=3)
    one.before.append({
        "rows": 2, "columns": 4, "inner": 5, "along": 1, "add": 1, "once": int(once),
        **matrix("a", a), **matrix("b", b), **matrix("c", total),
    })  # fmt: skip
    one.run()
    assert_close(total, (1 if once else 3) * (a @ b), "float64", "forward")


@pytest.mark.parametrize("dtype", dtypes("cpu"))
@pytest.mark.parametrize("threads", [1, 3])
def test_sums_of_rows(dtype: str, threads: int, rng: np.random.Generator) -> None:
    """On both sides of a block of rows and of vectors; the same bits on any threads."""
    lanes, wide = isa.current().lanes(DTYPES[dtype].math.llvm), DTYPES[dtype].accumulate.name
    edges = {n * lanes + more for n in (1, driver.BLOCK, 2 * driver.BLOCK) for more in (-1, 0, 1)}
    for rows, columns in itertools.product((0, 1, 63, 64, 65, 200), sorted({1, *edges})):
        a = numbers((rows, columns), dtype, rows % 2 > 0, rng)
        results = []
        for count in (1, threads):
            c = numbers((1, columns), wide, columns % 2 > 0, rng)
            before, added = c.copy(), bool(rows % 2)
            one = Pass(dtype, threads=count)
            one.before.append({
                "rows": rows, "columns": columns, "along": 1, "add": added, "kind": driver.SUM,
                **matrix("a", a), **matrix("c", c),
            })  # fmt: skip
            one.run()
            assert_close(c, a.astype("float64").sum(0) + added * before, wide, "gradient", axes=())
            results.append(c if not added else a)
        assert np.array_equal(*results)


@pytest.mark.parametrize("dtype", dtypes("cpu"))
@pytest.mark.parametrize("instead", [None, "zeros", "rows"])
@pytest.mark.parametrize("reverse", [False, True])
def test_gathered_rows(
    dtype: str, instead: str | None, reverse: bool, rng: np.random.Generator
) -> None:
    """Of any stride from step to step; zeros for those under a mask, whatever lies there, or other
    rows for those with a flag.
    """
    masked = instead == "zeros"
    for steps, batch, width, threads in ((5, 3, 7, 1), (4, 2, 33, 2), (1, 1, 1, 1), (3, 5, 64, 3)):
        whole = numbers((batch, steps, width), dtype, threads > 1, rng)
        x = whole.transpose(1, 0, 2)
        mask = guarded((steps, batch), "uint8", threads > 1)
        mask[...] = rng.integers(0, 2, mask.shape)
        if masked:
            x[mask == 0] = np.nan
        rows, seen = guarded((2 * batch, width), numpy_dtype(dtype), threads > 1), list[Array]()
        others = numbers((2 * batch, width), dtype, threads > 1, rng)
        one = Pass(dtype, steps=steps, batch=batch, chunk=2, threads=threads)
        step, row, _ = (s // x.itemsize for s in x.strides)
        one.before.append({
            "rows": CHUNK, "columns": width, "kind": driver.GATHER, "reverse": reverse,
            "a": x.__array_interface__["data"][0], "a_rows": row, "a_inner": step,
            "a_time": x.strides[0], "b": mask.ctypes.data if instead else 0,
            "b_time": batch if instead else 0, **matrix("c", rows), "b_columns": width,
            "scales": others.__array_interface__["data"][0] if instead == "rows" else 0,
        })  # fmt: skip
        one.look = lambda rows=rows, seen=seen: seen.append(rows.copy())
        one.run()
        for (done, count, *_), gathered in zip(one.calls, seen, strict=True):
            begin = steps - done - count if reverse else done
            wanted = x[begin : begin + count].reshape(-1, width)
            flagged = mask[begin : begin + count].reshape(-1, 1) > 0
            if masked:
                wanted = np.where(flagged, wanted, np.zeros((), x.dtype))
            elif instead:
                wanted = np.where(flagged, others[: count * batch], wanted)
            assert np.array_equal(gathered[: count * batch], wanted)


def test_segments_move_what_they_begin_with() -> None:
    """Forward the door writes the states before a segment where the move points, then goes on as
    it was; backward the other pass computes the segment once more, with arrays of the segment.
    """
    place, places = array("q", [-1]), list[int]()
    one = Pass(steps=7, chunk=2, segment=4)
    one.look = lambda: places.append(place[0])
    one.moves.append([place.buffer_info()[0], 100, 10, 5])
    one.run()
    calls = [(*call[:2], at) for call, at in zip(one.calls, places, strict=True)]
    assert calls == [
        (0, 0, 100), (0, 2, 5), (2, 2, 5), (4, 0, 110), (4, 2, 5), (6, 1, 5),
    ]  # fmt: skip
    order: list[tuple[str, int, int, int, int]] = []
    again, last = Pass(steps=7, chunk=2), Pass(steps=7, chunk=2, segment=4, backward=1)
    for name, each in (("again", again), ("last", last)):
        each.look = lambda name=name, each=each: order.append(
            (name, *each.call[:2], *each.call[3:])
        )
    last.moves.append([place.buffer_info()[0], 100, 10, 0])
    table = again.table()
    table[driver.PASS.index("scratch")] = (block := cpu.Block(1 << 12)).address
    last.values["again"] = table.buffer_info()[0]
    last.run()
    assert order == [
        ("again", 4, 2, 4, 3), ("again", 6, 1, 4, 3), ("last", 0, 1, 4, 3), ("last", 1, 2, 4, 3),
        ("again", 0, 2, 0, 4), ("again", 2, 2, 0, 4), ("last", 3, 2, 0, 4), ("last", 5, 2, 0, 4),
    ]  # fmt: skip
    assert place[0] == 100 and block.size


@pytest.mark.parametrize("backward", [0, 1])
def test_no_steps(backward: int) -> None:
    """The door is called once, to write states or gradients; nothing is multiplied."""
    one = Pass(steps=0, backward=backward)
    one.before.append({"rows": CHUNK, "columns": 1 << 40, "inner": 1 << 40, "a": 8, "b": 8, "c": 8})
    one.run()
    assert [call[:2] for call in one.calls] == [(0, 0)]


@pytest.mark.parametrize("dtype", [name for name in dtypes("cpu") if DTYPES[name].plain])
def test_bits_of_few_rows(dtype: str, rng: np.random.Generator) -> None:
    """They do not depend on other rows or columns; if the rows of B are dense, they are those of
    the matmul. Sums have several of its blocks.
    """
    a, b = numbers((9, 600), dtype, False, rng), numbers((600, 150), dtype, False, rng)

    def product(a: Array, b: Array, kind: int) -> Array:
        c = np.full((len(a), b.shape[1]), np.nan, dtype)
        one = Pass(dtype)
        one.before.append({
            "rows": len(a), "columns": b.shape[1], "inner": 600, "along": 1, "kind": kind,
            **matrix("a", a), **matrix("b", b), **matrix("c", c),
        })  # fmt: skip
        one.run()
        return c

    assert np.array_equal(product(a, b, driver.FEW), product(a, b, driver.OURS))
    for weights in (b, turned(b, False)):
        whole = product(a, weights, driver.FEW)
        for rows, columns in ((slice(2, 3), slice(5, 140)), (slice(4, 9), slice(1, 2))):
            part = product(a[rows], weights[:, columns], driver.FEW)
            assert np.array_equal(part, whole[rows, columns])


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", isa.available())
@pytest.mark.parametrize("apart", [0, 3])
@pytest.mark.sample(every=2)
def test_few_rows_of_integers(name: str, apart: int, every: int, rng: np.random.Generator) -> None:
    """They have the bits of the matmul, whose sums have blocks. Unscaled, a sum is exact: it is
    multiplied by the scale of its column alone, and that of its row follows the row.
    """
    lanes = 4 * isa.TARGETS[name].lanes("float")
    lengths = 0, 1, lanes - 1, lanes, lanes + 1, gemm.INNER - 1, gemm.INNER + 2, 600
    shapes = itertools.product((0, 1, 2, 3, 5, 9), (1, 3, 8, 27), lengths)
    for n, (rows, columns, inner) in enumerate(itertools.islice(shapes, 0, None, every)):
        end = bool(n % 2)
        a, c = (numbers((rows, k), "float32", end, rng) for k in (inner, columns))
        integers = guarded((columns, inner + apart), "int8", end)[:, :inner]
        integers[...] = rng.integers(-128, 128, integers.shape)
        scales = numbers((1, columns), "float32", end, rng)

        def product(kind: int, out: Array, **how: int) -> Array:
            one = Pass("int8", threads=1 + n % 3)  # noqa: B023
            one.before.append({
                "rows": rows, "columns": columns, "inner": inner, "kind": kind,  # noqa: B023
                **matrix("a", a), **matrix("b", integers.T), **matrix("c", out),  # noqa: B023
                "scales": scales.__array_interface__["data"][0], "along": 1, **how,  # noqa: B023
            })  # fmt: skip
            with isa.force(name):
                one.run()
            return out

        for add in (0, 1):
            results = [product(kind, c.copy(), add=add) for kind in (driver.OURS, driver.FEW)]
            assert np.array_equal(*results), (rows, columns, inner, add)
        unscaled = guarded((rows, columns + 1), "float32", end)
        product(driver.UNSCALED, unscaled)
        of_rows = np.abs(a).max(-1, initial=0) * np.float32(1 / 127)
        rounded = np.rint(a * (127 / np.maximum(of_rows * 127, 1e-30))[:, None])
        sums = (rounded @ integers.T.astype("float32")).astype("float32")
        assert np.array_equal(unscaled[:, -1], of_rows)
        wrong = np.abs(unscaled[:, :-1] - sums * scales)  # up to 3 numbers of a row may be ties
        assert wrong.max(initial=0) <= 3 * 128 * scales.max(initial=0)
