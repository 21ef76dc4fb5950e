"""Matrix tiles (AMX): by their emulation everywhere, and on machines that have them. Pairs of
bfloat16, on those that multiply them. The matmuls alone are in `test_cpu_matmul.py`.
"""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import problems
import pytest
import torch
from guarded import BUILT_IN, Everything
from integers import by_integers
from problems import Unsolvable, assert_right, assert_solved, by_cpu, random_problem
from roads import ROADS
from tolerances import assert_close, close

from anycell import Cell, cells, layer
from anycell.engines import cpu
from anycell.engines.cpu import door, driver, isa, jit
from anycell.engines.cpu.layout import Layout
from anycell.engines.cpu.sequence import print_kernel
from anycell.engines.cpu.tiles import MOST_BFLOAT16
from anycell.layer.products import multiply
from anycell.numpy.framework import Numpy
from anycell.plan import DTYPES, plan
from anycell.torch import RNN
from tests.conformance.on_torch import by_rnn
from tests.frontends.test_quantize import assert_rounded

pytestmark = pytest.mark.skipif(
    "avx512vnni" not in isa.available(), reason="the emulation needs AVX512-VNNI"
)
Array = npt.NDArray[Any]
CELLS = [cells.LSTM, cells.GRU, cells.sLSTM(heads=2), cells.LSTMP, cells.LayerNormGRU, Everything]
# T, B, H on both sides of 16 rows, of panels of 48, and of 32 and 64 numbers of a sum.
KINDS = ["amx-emulated", *(["amx"] if "amx" in isa.available() else [])]
PAIRS = ["avx512bf16"] if isa.runs("avx512bf16") else []  # on Intel's processors for who asks
SHAPES = [(3, 1, 6), (3, 15, 32), (3, 16, 64), (2, 17, 66), (2, 49, 34), (2, 33, 130), (2, 4, 260)]
tiled = pytest.mark.parametrize(
    ("cell", "shape"),
    [
        pytest.param(cell, shape, marks=[pytest.mark.slow] if j != i else [])
        for i, cell in enumerate(CELLS)
        for j, shape in enumerate(SHAPES)
    ],
    ids=str,
)


def drawn(cell: Cell, shape: tuple[int, int, int], seed: int, dtype: str) -> Any:
    rng = np.random.default_rng(seed)
    nearby = 3 * (dtype == "bfloat16")
    settled = dtype if nearby else "float64"
    problem = random_problem(cell, shape, rng, settled, nearby=nearby, masked=True, resets=True)
    return problem.astype(dtype)


@tiled
@pytest.mark.sample(every=2)
def test_integers_have_the_bits_that_they_have_without(cell: Cell, shape: Any, seed: int) -> None:
    problem = drawn(cell, shape, seed, "float32")
    for projected in (False, True):
        results = []
        for name in ("avx512vnni", *KINDS):
            with isa.force(name):
                results.append(by_integers(problem, 2, projected))
        for result in results[1:]:
            for key, value in results[0].items():
                assert np.array_equal(result[key], value, equal_nan=True), key


@tiled
@pytest.mark.sample(every=2)
def test_bfloat16(cell: Cell, shape: Any, seed: int) -> None:
    """Right, and of the same bits for any threads and rows beside."""
    problem = drawn(cell, shape, seed, "bfloat16")
    for name in KINDS + PAIRS:
        with isa.force(name):
            solution = by_cpu(problem, 1)
            assert_right(solution, problem)
            again = by_cpu(problem, 3)
        for key, value in solution.items():
            assert np.array_equal(again[key], value), key


@tiled
@pytest.mark.parametrize("precision", ["high", pytest.param("medium", marks=pytest.mark.more)])
@pytest.mark.sample(every=4)
def test_float32(precision: str, cell: Cell, shape: Any, seed: int) -> None:
    """As sums of two numbers of bfloat16, or as one: right to as many digits, and no more; of the
    same bits for any threads. Pairs of bfloat16 are for the latter alone, and without either
    nothing is rounded.
    """
    if precision == "medium" and cell.name == "sLSTM":
        pytest.skip("its exponentials enlarge what rounding its weights does, up to 7e-2")
    problem = drawn(cell, shape, seed, "float32")
    exact = by_cpu(problem, 1)
    for name in KINDS + PAIRS * (precision == "medium"):
        with isa.force(name):
            solution = by_cpu(problem, 1, precision=precision)
            assert_right(solution, problem, name, f"float32 {precision}")
            again = by_cpu(problem, 3, precision=precision)
            rounded = not np.array_equal(solution["output"], exact["output"])
            assert rounded or not exact["output"].any()  # all are under the mask
        for key, value in solution.items():
            assert np.array_equal(again[key], value), key
    for name in ("avx512", *PAIRS * (precision == "high")):
        with isa.force(name):
            exact, same = by_cpu(problem, 1), by_cpu(problem, 1, precision=precision)
        assert all(np.array_equal(value, exact[key]) for key, value in same.items())


@pytest.mark.parametrize("batch", [19, 100, 140])
def test_threads_split_the_units_of_more_rows(
    batch: int, seed: int, set_layer: Any, runs: list[layer.pass_tables.PassTables]
) -> None:
    """By far weights, of which tiles soon have read one; each thread's part has the same bits."""
    set_layer(WORTH_A_THREAD=0)
    rng = np.random.default_rng(seed)
    problem = random_problem(cells.LSTM, (2, batch, 420), rng).astype("bfloat16")
    for name in ("avx512vnni", *KINDS):
        with isa.force(name):
            one = by_cpu(problem, 1)
            runs.clear()
            two = by_cpu(problem, 2)
        few = door.FEW_TILED_ROWS if name in KINDS else door.FEW_ROWS
        split = set(map(ROADS["threads split the units"], runs))
        assert split == {batch < 2 * few}, name
        assert all(np.array_equal(two[key], value) for key, value in one.items())


@pytest.mark.parametrize("cell", [cells.LSTM, cells.GRU, cells.LayerNormLSTM], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(every=2)
def test_who_multiplies_the_input(
    kind: str, cell: Cell, seed: int, runs: list[layer.pass_tables.PassTables]
) -> None:
    """The kernel, if there are rows for a tile and both weights stay in a core's own cache."""
    rng = np.random.default_rng(seed)
    rows = layer.heuristics.TILED_ROWS
    for batch, units, inputs in ((rows, 64, 64), (rows - 1, 64, 64), (rows, 64, 1 << 13)):
        x = rng.standard_normal((30, batch, inputs)).astype("float32")
        ours = RNN(cell, inputs, units, dtype=torch.bfloat16)
        exact = copy.deepcopy(ours).double()
        x = torch.from_numpy(x).bfloat16()
        with isa.force(kind), torch.no_grad():
            runs.clear()
            output, _ = ours(x)
        assert {run.inputs for run in runs} == {inputs if batch == rows and inputs == units else 0}
        assert_close(output.float(), exact(x.double())[0].detach(), "bfloat16", "forward")


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, marks=[pytest.mark.slow] * (cell is not cells.GRU))
        for cell in (*BUILT_IN, Everything)
    ],
    ids=str,
)
def test_the_kernel_multiplies_the_input(
    cell: Cell, seed: int, set_layer: Any, runs: list[layer.pass_tables.PassTables]
) -> None:
    """Where a cell needs the input's part of a gate by itself, that part has sums of its own."""
    set_layer(projects=lambda *_: True)
    for kind in KINDS:
        with isa.force(kind):
            solved = 0
            for size in ((3, 5, 7, 20), (2, 17, 40, 34)):
                for has in ((), ("mask", "resets"), ("no bias",)):
                    try:
                        problem = problems.draw(cell, size, (*has, "bidirectional"), "bfloat16")
                    except Unsolvable:
                        continue
                    assert_solved(by_rnn(problem), problem)
                    solved += 1
            assert solved >= 2
            problem = drawn(cell, (3, 17, 66), seed, "float32")
            solution = by_cpu(problem, 1, projected=True, precision="high")
            solution.pop("d weight_ih_l0", None)
            assert_right(solution, problem, kind, "float32 high")
            again = by_cpu(problem, 3, projected=True, precision="high")
            assert all(np.array_equal(again[key], value) for key, value in solution.items())
            assert_rounded(problem, threads=2, projected=True)
            sizes = dict.fromkeys(cell.sizes.values(), 20)
            able = cpu.compiled(plan(cell, 66, "bfloat16", "cpu", sizes)).projecting
            assert any(run.inputs for run in runs) == (able is not None)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_that_are_no_sum_of_two(kind: str) -> None:
    """NaN, and numbers too small for bfloat16's normal range: as in float32, but for what is
    rounded. Infinities, and what is above bfloat16's largest number, are that number.
    """
    numbers = [np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, 1e-40, 1.0, 0.0, 1e30, 1.00001]
    a = np.array(numbers, "float32").reshape(-1, 1) * np.ones((1, 40), "float32")
    b = np.ones((40, 70), "float32")
    a[:, 1:] = 0
    with isa.force(kind):
        out = np.empty((len(a), 70), "float32")
        multiply(Numpy.of("float32"), "float32 high", a, b, out, False, 1)
    expected = np.array(numbers, "float32")
    most = np.float32(MOST_BFLOAT16)
    expected = np.clip(expected, -most, most)
    for number, wanted in zip(out[:, 0], expected, strict=True):
        if abs(wanted) < np.finfo("float32").tiny:
            assert abs(number) <= abs(wanted)
        else:
            assert np.isnan(wanted) == np.isnan(number)
            assert np.isnan(wanted) or close(number, wanted, "float32 high", "forward")
    assert np.array_equal(out, np.broadcast_to(out[:, :1], out.shape), equal_nan=True)


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_instructions(dtype: str) -> None:
    """Those of AMX, of which each thread has its tiles for as long as it computes."""
    target = isa.TARGETS["amx"]
    dot = {"int8": "tdpbusd", "bfloat16": "tdpbf16ps"}[dtype]
    chosen = plan(cells.LSTM, 64, dtype, "cpu")
    texts = [
        str(driver.module(target, DTYPES[dtype], "gemm")),
        str(print_kernel(Layout(chosen, False, target))),
    ]
    if dtype == "bfloat16":
        texts.append(str(print_kernel(Layout(chosen, True, target))))
    for text in texts:
        code = jit.Library(text, target, {}, False, "").assembly()
        assert dot in code
        for instruction in ("ldtilecfg", "tileloadd", "tilestored", "tilerelease"):
            assert instruction in code
        assert code.count("ldtilecfg") == code.count("tilerelease") == 1
    narrow = str(print_kernel(Layout(plan(cells.LSTM, 64, "float16", "cpu"), False, target)))
    assert "ldtilecfg" not in narrow


@pytest.mark.parametrize("dtype", ["bfloat16", "float32 medium", "float32", "float16"])
@pytest.mark.sample(3)
def test_pairs_are_multiplied_in_one_instruction(dtype: str) -> None:
    """Of bfloat16, in both directions and in products that are parallel in time."""
    target, types = isa.TARGETS["avx512bf16"], DTYPES[dtype]
    chosen = replace(plan(cells.LSTM, 64, types.storage.name, "cpu"), dtype=dtype)
    layouts = (Layout(chosen, backward, target) for backward in (False, True))
    matmuls = (driver.module(target, types, name) for name in ("gemm", "columns"))
    for module in (*matmuls, *map(print_kernel, layouts)):
        code = jit.Library(str(module), target, {}, False, "").assembly()
        assert ("vdpbf16ps" in code) is (types.operands.name == "bfloat16")


def test_where_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "available", isa.available.__wrapped__)
    monkeypatch.setattr(isa, "_features", lambda: isa.machine(isa.TARGETS["amx"]).needs)
    monkeypatch.setattr(isa, "permitted", lambda: False)
    for amd, widest in ((True, "avx512bf16"), (False, "avx512vnni")):
        monkeypatch.setattr(isa, "amd", lambda amd=amd: amd)
        assert isa.available()[-1] == widest
    refusal = pytest.raises(ValueError, match="'amx': Linux does not let this process use tiles")
    with refusal, isa.force("amx"):
        pass
    monkeypatch.setattr(isa, "permitted", lambda: True)
    assert isa.available()[-1] == "amx"
    with isa.force("amx") as target:
        assert target.tiles == "amx"
    monkeypatch.setattr(isa, "_features", lambda: isa.machine(isa.TARGETS["avx512vnni"]).needs)
    assert isa.available()[-1] == "avx512vnni"
    with pytest.raises(ValueError, match="'amx': this host cannot run it"), isa.force("amx"):
        pass
