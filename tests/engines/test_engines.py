"""The fused engines against the reference: every cell, under every available instruction set.

One file, because all of it solves the same random problems by engines, dtypes and instruction sets.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from doors import packed
from numpy.testing import assert_array_equal
from problems import (
    AWKWARD,
    Arrays,
    Problem,
    Rows,
    Sized,
    assert_right,
    assert_same,
    assert_solved,
    by_cpu,
    by_recurrence,
    random_problem,
    rows_of,
)
from roads import ROADS
from tolerances import assert_close

import anycell
from anycell import (
    Cell,
    cell,
    cells,
    clip,
    keep,
    layer,
    layer_norm,
    linear,
    log,
    maximum,
    relu,
    sigmoid,
    softplus,
    stop_gradient,
    tanh,
    where,
)
from anycell.engines import cpu, reference
from anycell.engines.cpu import isa
from anycell.engines.cpu.ir import Module
from anycell.engines.cpu.layout import Layout
from anycell.engines.cpu.matmul import Blocks
from anycell.lang.expr import Expr
from anycell.layer import heuristics
from anycell.layer.recipe import Recipe, View
from anycell.numpy import RNN
from anycell.numpy.framework import Numpy
from anycell.plan import plan


@cell(gates="i f g", state="h c n=1", params="p=1 q", static="e")
def Sampler(x, r, s, p, e, *, rate: float = 0.25, floor: float = -0.5):
    """All that a cell with one matmul can have: masks, reductions, a static input, a branch."""
    i, f, g = x.i, x.f + r.f, x.g + r.g
    kept, dropped = keep(1 - rate), keep(0.8, per="sequence")
    n = 0.5 * s.n + 0.5 * softplus(f) / (1 + s.n * s.n)
    c = kept * (sigmoid(f + p.p * s.c) * s.c + tanh(i * r.i + p.q * e)) + (1 - kept) * s.c
    c = maximum(0.9 * c, floor)
    h = dropped * where(g > 0.1, tanh(c), log(n * n + 0.3)) * anycell.max(sigmoid(g))
    return tanh(h + layer_norm(c + n)), c, n


@cell(gates="a", state="h", params="p=1")
def Detached(x, r, s, p, *, half: float = 0.5):
    """Matmuls of values that need no gradient, next to a matmul of a value that needs one."""
    still = linear(stop_gradient(tanh(s.h)), "still", bias=True)
    drawn, branch = linear(keep(0.7), "drawn"), linear(where(s.h > 0, 1.0, 0.0), "branch")
    even, alive = linear(half, "even"), linear(p.p * s.h, "alive")
    return tanh(x.a + still + drawn * branch + even + alive)


@cell(gates="rows state0 dx", state="h rows", params="steps lanes", static="batch")
def Namesakes(x, r, s, p, batch, *, reset: float = 0.5):
    """A cell with names that the text of a kernel may use itself."""
    rows, state0 = sigmoid(x.rows + r.rows), sigmoid(x.state0 + r.state0)
    h = tanh(x.dx + linear(state0 * s.h, "rows"))
    later_h = linear(tanh(s.rows), "later_h", bias=True) * p.lanes
    return rows * s.h + (1 - rows) * h, reset * s.rows + h * later_h + batch * p.steps


@cell(gates="i f g", state="h c")
def LowRank(x, r, s):
    """A recurrent weight of low rank, and a bottleneck: some values have a size of no state."""
    u = linear(linear(s.h, "down", size="P"), "up", gates="i f g", bias=True)
    c = sigmoid(x.f + u.f) * s.c + sigmoid(x.i + u.i) * tanh(x.g + u.g)
    return tanh(c + linear(tanh(linear(c, "narrow", size="P")), "wide")), c


@cell(gates="a", state="h:P")
def Small(x, r, s):
    """The only state is smaller than the gates: saved values have a size of no state."""
    return linear(tanh(x.a + r.a), "out")


@cell(gates="a", state="h:P c n:R")
def Numbers(x, r, s):
    """All its values of sizes other than H are numbers: new states, and gradients of matmuls."""
    return 0.25, tanh(x.a + r.a + linear(stop_gradient(linear(tanh(s.c), "u", size="R")), "v")), 0.5


@cell(gates="a", state="h", static="e")
def Choosing(x, r, s, e):
    """Some outputs of its matmuls only select a branch: their gradients are numbers."""
    (k, l), (m, n) = linear(e, "u", gates="k l", size="P"), linear(s.h, "v", gates="m n", size="R")
    return tanh(x.a + r.a + linear(where(l > 0, k, 0.5), "w") + linear(where(m > 0, n, 0.5), "z"))


CELLS = [
    cells.LSTM,
    cells.GRU,
    cells.RNN,
    cells.RNN(nonlinearity="relu"),
    cells.PeepholeLSTM,
    cells.PeepholeLSTM(coupled=True, forget_bias=1.0, cell_clip=0.8),
    cells.LayerNormLSTM,
    Sampler,
    Detached,
    Namesakes,
]
FEW = [cells.LSTM, Sampler]  # for tests to which other cells would add nothing
KINDS = [cells.LSTM, cells.GRU, Sampler, Detached, Namesakes]  # a cell of each kind of kernel
SITUATIONS: list[dict[str, Any]] = [
    {},
    {"masked": True},
    {"resets": True, "training": True, "seed": 5},
    {"masked": True, "resets": True, "reverse": True},
    {"reverse": True, "training": True, "seed": 1 << 63},
    {"masked": True, "resets": True, "masked_output": "repeat"},
]
SUMS = ("d weight_", "d bias_")  # sums over steps, by a matmul of NumPy
each_cell = pytest.mark.parametrize("cell", CELLS, ids=repr)
some_cells = pytest.mark.parametrize("cell", FEW, ids=repr)
each_dtype = pytest.mark.parametrize("dtype", ["float32", "float64"])
# The fast tests run each cell in one of the dtypes.
each_cell_and_dtype = pytest.mark.parametrize(
    ("cell", "dtype"),
    [
        pytest.param(cell, dtype, marks=[pytest.mark.slow] * ((n + k) % 2), id=f"{cell}-{dtype}")
        for n, cell in enumerate(CELLS)
        for k, dtype in enumerate(("float64", "float32"))
    ],
)


def each_instruction_set() -> Any:
    """Fast tests run a cell of each kind on the widest set, others a sample; slow tests run all."""

    def case(name: str, cell: Cell, dtype: str) -> Any:
        kind = cell in FEW or (dtype == "float64" and cell in KINDS)
        fast = (cell is cells.LSTM and dtype == "float32") or (name == isa.available()[-1] and kind)
        marks = [] if fast else [pytest.mark.slow]
        return pytest.param(name, cell, dtype, id=f"{name}-{cell}-{dtype}", marks=marks)

    cases = itertools.product(isa.available(), CELLS, ("float32", "float64"))
    return pytest.mark.parametrize(("name", "cell", "dtype"), [*itertools.starmap(case, cases)])


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills all new memory with NaN, which shows reads of memory not yet written."""
    take = cpu.Scratch.take

    def poisoned_take(scratch: cpu.Scratch, size: int) -> cpu.Block:
        block = take(scratch, size)
        block.memory.fill(0xFF)
        return block

    def empty(host: Numpy, shape: tuple[int, ...]) -> np.ndarray:
        return np.full(shape, np.nan, host.dtype)

    monkeypatch.setattr(cpu.Scratch, "take", poisoned_take)
    monkeypatch.setattr(Numpy, "empty", empty)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A list of the engines that ran, one entry per call."""
    calls: list[str] = []

    def recorded(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            calls.append(name)
            return function(*args)

        return call

    monkeypatch.setattr(Recipe, "run", recorded("cpu", Recipe.run))
    loop = reference.Recurrence._loop
    monkeypatch.setattr(reference.Recurrence, "_loop", recorded("reference", loop))
    return calls


def reduces(cell: Cell) -> bool:
    return cell in (cells.LayerNormLSTM, Sampler)


# -- right ---------------------------------------------------------------------------------------
@pytest.mark.fixed_isa
@pytest.mark.parametrize("k", range(6))
@each_instruction_set()
@pytest.mark.sample(every=10)
def test_forward_and_every_gradient(
    name: str, cell: Cell, dtype: str, k: int, rng: np.random.Generator, ran: list[str]
) -> None:
    """Cases have few units or many, because each size needs a kernel to compile."""
    with isa.force(name):
        for i, shape in enumerate(AWKWARD):
            if (shape[2] > 7) != k % 2:
                continue
            if dtype == "float32" and shape[2] == 1 and reduces(cell):
                continue  # the norm of one unit is 0, and its float32 gradient nothing but rounding
            situation = SITUATIONS[(i + k // 2 * 2) % len(SITUATIONS)]
            near = 3 * (shape[2] == 1)  # one number is a whole slice, and may cancel
            problem = random_problem(cell, shape, rng, dtype, nearby=near, **situation)
            ran.clear()
            solution = by_cpu(problem)
            assert ran == ["cpu", "cpu"]
            assert_solved(solution, problem)
            ran.clear()
            assert_same(solution, by_recurrence(problem))
            assert ran == ["cpu"]


@pytest.mark.parametrize("target", isa.available()[::-1])
@pytest.mark.parametrize("hidden", [7, 70], ids=["weights near", "weights fetched ahead"])
@pytest.mark.sample(len(isa.available()) + 1)  # each instruction set, and both on the widest
def test_any_number_of_rows(target: str, hidden: int, rng: np.random.Generator) -> None:
    """Each row has the same bits, however the rows are divided into register blocks."""
    x = rng.standard_normal((3, 23, 5)).astype("float32")
    with isa.force(target):
        rnn = anycell.numpy.RNN(cells.LSTM, 5, hidden)
        whole, _ = rnn(x)
        for rows in range(23):
            assert np.array_equal(rnn(x[:, :rows])[0], whole[:, :rows]), rows


@pytest.mark.slow
@each_dtype
@each_cell
def test_every_situation_at_every_size(cell: Cell, dtype: str, rng: np.random.Generator) -> None:
    for shape in [*AWKWARD, (40, 3, 16), (3, 40, 65), (2, 2, 257)]:
        if dtype == "float32" and reduces(cell) and shape in ((5, 3, 1), (1, 1, 1), (40, 3, 16)):
            continue
        near = 3 * (shape[2] == 1)
        for situation in SITUATIONS:
            problem = random_problem(cell, shape, rng, dtype, nearby=near, **situation)
            assert_right(by_cpu(problem), problem)


# -- the same bits -------------------------------------------------------------------------------
SPLIT_ROWS = [(4, 61, 33), (5, 70, 70)]
SPLIT_UNITS = [(3, 2, 100), (1, 1, 100), (2, 9, 420)]


@pytest.mark.parametrize("shape", SPLIT_ROWS + SPLIT_UNITS)
@each_dtype
@some_cells
@pytest.mark.sample(every=6)
def test_threads(
    cell: Cell,
    dtype: str,
    shape: tuple[int, int, int],
    rng: np.random.Generator,
    set_layer: Callable[..., None],
    runs: list[layer.pass_tables.PassTables],
) -> None:
    """Threads divide the rows or, if there are few rows, the units."""
    set_layer(WORTH_A_THREAD=0)
    for situation in SITUATIONS:
        problem = random_problem(cell, shape, rng, **situation).astype(dtype)
        one = by_cpu(problem, threads=1)
        for threads in (2, 3):
            runs.clear()
            assert_same(by_cpu(problem, threads=threads), one)
            if cell == cells.LSTM or shape[1] > 1:  # no more threads than rows, or spans of units
                assert all(map(ROADS["several threads"], runs))
            if cell == cells.LSTM:
                (split,) = set(map(ROADS["threads split the units"], runs))
                assert split == (shape in SPLIT_UNITS)


@each_cell_and_dtype
@pytest.mark.sample(every=4)
def test_batch_slices(cell: Cell, dtype: str, rng: np.random.Generator) -> None:
    """A row's numbers do not depend on other rows."""
    for situation in ({}, {"masked": True, "resets": True}):
        problem = random_problem(cell, (4, 19, 33), rng, **situation).astype(dtype)
        whole = by_cpu(problem)
        for part in (slice(0, 1), slice(3, 10), slice(5, 19), slice(7, 9), slice(16, 19)):
            for name, value in by_cpu(problem.rows(part)).items():
                sliced = rows_of(name, whole[name], part)
                if sliced is not whole[name]:  # else it is a sum of all rows
                    assert_array_equal(value, sliced, err_msg=name)


@pytest.mark.parametrize(
    ("dtype", "change", "inner", "dense_rows", "most"),
    [
        ("float32", {}, 64, True, heuristics.FEW_ROWS),
        ("float32", {}, 64, False, 8),  # of four vectors
        ("float32", {}, 1024, False, heuristics.FEW_ROWS_TURNED),
        ("float64", {}, 64, False, 16),
        ("float32", {"fma": False}, 64, True, heuristics.FEW_ROWS_UNFUSED),
        ("bfloat16", {}, 64, True, heuristics.FEW_ROWS),
        ("bfloat16", {}, 1024, False, heuristics.FEW_ROWS),
        ("bfloat16", {"pairs": "yes"}, 64, True, heuristics.FEW_ROWS_IN_PAIRS),
        ("bfloat16", {"pairs": "yes"}, 64, False, 1),
    ],
)
def test_how_many_rows_read_weights_that_are_not_packed(
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    change: Any,
    inner: int,
    dense_rows: bool,
    most: int,
) -> None:
    target = replace(isa.current(), bits=512, fma=True, pairs="")
    target = replace(target, **change)
    one = plan(cells.LSTM, 64, dtype)
    monkeypatch.setattr(isa, "current", lambda: target)
    weight = View(0, (inner, 256), (256, 1) if dense_rows else (1, inner), 4)
    few = [rows for rows in range(1, 80) if heuristics.few(one, rows, weight)]
    assert few == [*range(1, most + 1)]


def test_few_rows_take_all_columns_at_once() -> None:
    """This holds if a tile has several equal register blocks; test_batch_slices compares bits."""

    def few(cell: Cell, registers: int) -> int:
        target = replace(isa.current(), registers=registers, tiles="")
        layout = Layout(plan(cell, 64), False, target)
        return Blocks(layout, layout.matmuls[0]).few

    assert few(cells.LSTM, 16) == 2
    assert few(cells.LSTM, 32) == few(cells.GRU, 16) == 0


@pytest.mark.parametrize(
    ("registers", "units", "ahead"), [(16, 96, True), (16, 8, False), (32, 96, False)]
)
def test_packed_weights_are_fetched(registers: int, units: int, ahead: bool) -> None:
    """Ahead, where a register block reads every other line of weights beyond the near cache."""
    target = replace(isa.current(), registers=registers, tiles="")
    layout = Layout(plan(cells.LSTM, units), False, target)
    module = Module(target, "float")
    Blocks(layout, layout.matmuls[0]).print(module)
    assert ("@llvm.prefetch" in str(module)) == ahead


@cell(gates="g", state="h c", params="gain=1 shift=0")
def Normed(x, r, s, p, *, stays: bool = False):
    """The norm is of a state that the layer keeps, or of a value that is computed again."""
    c = 0.5 * s.c + tanh(x.g + r.g)
    normed = p.gain * layer_norm(c) + p.shift
    return tanh(normed), normed if stays else c


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("normed", [Normed, Normed(stays=True)], ids=repr)
@pytest.mark.sample(every=3)
def test_the_norm_of_one_unit_in_16_bits(
    normed: Cell, dtype: str, rng: np.random.Generator
) -> None:
    """It is 0, and so is the gradient of its gain."""
    problem = random_problem(normed, (6, 4, 1), rng, dtype)
    solution = by_cpu(problem)
    assert_right({name: solution[name] for name in ("output", "d shift_l0")}, problem)
    assert solution["d shift_l0"].any() and not solution["d gain_l0"].any()


@each_cell_and_dtype
@pytest.mark.sample(every=4)
def test_appended_padding(cell: Cell, dtype: str, rng: np.random.Generator) -> None:
    """Masked steps after the last change no bit, whatever they contain."""
    problem = random_problem(cell, (6, 9, 33), rng, masked=True, resets=True).astype(dtype)
    garbage = [np.nan, np.inf, 1e30]

    def pad(name: str, a: np.ndarray) -> np.ndarray:
        if name not in ("x", "d output", "mask", "resets"):
            return a
        value = False if name == "mask" else True if name == "resets" else garbage
        more = np.empty((3, *a.shape[1:]), a.dtype)
        more.reshape(3, -1)[:] = np.broadcast_to(np.reshape(value, (-1, 1)), (3, more[0].size))
        return np.concatenate([a, more])

    solution, padded = by_cpu(problem), by_cpu(problem.map(pad))
    for name, value in solution.items():
        longer = padded[name]
        if name in ("output", "d x"):
            assert not longer[6:].any()
            longer = longer[:6]
        if not name.startswith(SUMS):
            assert_array_equal(longer, value, err_msg=name)
    assert_right({k: v for k, v in padded.items() if k.startswith(SUMS)}, problem)


@each_dtype
@some_cells
def test_chunks_of_time(
    cell: Cell, dtype: str, rng: np.random.Generator, set_layer: Callable[..., None]
) -> None:
    """A layer that projects by the unit matrix equals its recurrence, for chunks of any length."""
    for situation in ({}, {"reverse": True, "masked": True, "resets": True}):
        problem = random_problem(cell, (7, 3, 33), rng, **situation).astype(dtype)
        problem["x"][:] = np.nan_to_num(problem["x"])
        right = by_cpu(problem)
        for steps in (1, 2, 3, 7):
            set_layer(chunk_steps=lambda *_, steps=steps: steps)
            solution = by_cpu(problem, projected=True)
            d_ih = solution.pop("d weight_ih_l0")
            same = [name for name in solution if not name.startswith(SUMS)]
            assert_same(solution, right, *same)
            assert_right(solution, problem)
            rows = problem["x"].reshape(-1, problem["x"].shape[2])
            d_gates = problem.right["d x"].reshape(rows.shape)
            assert_close(d_ih, d_gates.T @ rows.astype("float64"), dtype, "gradient")


SEVERAL = [
    cells.LSTMP,
    cells.GRU(reset_after=False),
    cells.sLSTM(heads=3),
    LowRank,
    Small,
    Numbers,
    Choosing,
    cells.MultiplicativeLSTM,
    cells.GRUD,
    cells.VariationalLSTM,
]


@pytest.mark.parametrize("cell", SEVERAL, ids=repr)
@pytest.mark.sample(2)
def test_several_matmuls_in_a_step(cell: Cell, rng: np.random.Generator) -> None:
    """Cells have matmuls in the step, states of another size, heads; some calls exceed a panel."""
    draws = {"training": True, "seed": 3} if cell.keeps else {}
    for shape in ((1, 2, 33), (5, 3, 33), (4, 53, 33)):
        for situation in ({}, {"masked": True, "resets": True, "reverse": True}):
            problem = random_problem(cell, shape, rng, **situation, **draws)
            alone = by_cpu(problem)
            assert_right(alone, problem)
            assert_same(by_cpu(problem, threads=2), alone)


@pytest.mark.parametrize("cell", [Sized, Rows, Rows(bias=False)], ids=repr)
@pytest.mark.sample(1)
def test_gates_of_several_sizes(
    cell: Cell, rng: np.random.Generator, set_layer: Callable[..., None]
) -> None:
    """Gates, parameters and the static input have sizes of their own; 1, 2 and 3 threads."""
    set_layer(WORTH_A_THREAD=0)
    for rows in (3, 53):  # also more rows than a panel has
        for situation in ({}, {"masked": True, "resets": True, "reverse": True}):
            problem = random_problem(cell, (4, rows, 6), rng, **situation)
            alone = by_cpu(problem)
            assert_solved(alone, problem)
            assert_same(alone, by_recurrence(problem))
            for threads in (2, 3):
                assert_same(by_cpu(problem, threads=threads), alone)
            some = by_cpu(problem.rows(slice(1, 3)))
            assert_array_equal(some["output"], alone["output"][:, 1:3])
            assert_array_equal(some["d x"], alone["d x"][:, 1:3])


@cell(gates="keep:1 i g:P", state="h n:1=0.5 c:P")
def Paced(x: Any, r: Any, s: Any) -> Any:
    """A gate and a state of one number per row decide how fast the other states move."""
    keep = sigmoid(x.keep + s.n)
    h = keep * s.h + (1 - keep) * tanh(x.i + r.i + linear(s.c, "back"))
    return h, keep * s.n + anycell.mean(h), s.n * tanh(x.g + s.c)


@pytest.mark.parametrize("cell", [Paced, Sized], ids=repr)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.sample(1)
def test_gates_of_several_sizes_in_16_bits(
    cell: Cell, dtype: str, rng: np.random.Generator, ran: list[str]
) -> None:
    """Also states and gates of one number per row, of which no two fill a word of 32 bits."""
    for rows in (7, 53):  # gradients of one number per row are sums that cancel in some rows
        for situation in ({}, {"masked": True, "reverse": True}):
            problem = random_problem(cell, (4, rows, 33), rng, dtype, **situation)
            ran.clear()
            alone = by_cpu(problem)
            assert ran == ["cpu", "cpu"]
            assert_solved(alone, problem)
            assert_same(by_cpu(problem, threads=2), alone)


def test_a_number_may_be_the_operand_of_a_wide_matmul(rng: np.random.Generator) -> None:
    """A row of scratch memory holds as many numbers as the weight has columns."""

    @cell(gates="a k:1", state="h")
    def Wide(x: Any, r: Any, s: Any, *, half: float = 0.5) -> Any:
        even = linear(half, "even", size="H")
        return tanh(x.a * x.k + even + linear(tanh(s.h), "w"))

    problem = random_problem(Wide, (3, 3, 33), rng)
    assert_right(by_cpu(problem), problem)


MASKED = [
    (cells.LSTM, "float32"),
    (cells.LSTM, "float64"),
    (cells.GRU, "float64"),
    (cells.RNN, "float64"),
    (cells.LayerNormLSTM, "float64"),
    (Sampler, "float64"),
    (cells.LSTMP, "float32"),
    (cells.GRU(reset_after=False), "float64"),
    (Sized, "float64"),
    (Rows, "float64"),
]


@pytest.mark.parametrize("dropped", ["all", "each"])
@pytest.mark.parametrize(("cell", "dtype"), MASKED, ids=repr)
@pytest.mark.sample(every=7)
def test_recurrent_masks(
    cell: Cell, dropped: str, dtype: str, rng: np.random.Generator, ran: list[str]
) -> None:
    """The input of the recurrent matmul has a mask for all gates or one for each gate."""
    for i, shape in enumerate([(5, 3, 33), (1, 4, 33), (4, 53, 33)]):
        problem = random_problem(
            cell, shape, rng, dtype, dropped=dropped, **SITUATIONS[(i + 2) % len(SITUATIONS)]
        )
        ran.clear()
        alone = by_cpu(problem)
        assert ran == ["cpu", "cpu"]
        assert_solved(alone, problem)
        assert_same(by_cpu(problem, threads=2), alone)
        assert_same(alone, by_recurrence(problem))
        if not (cell.keeps and problem.drawing.get("training")):  # other rows draw other masks
            some = by_cpu(problem.rows(slice(1, 3)))
            assert_array_equal(some["output"], alone["output"][:, 1:3])
            assert_array_equal(some["d x"], alone["d x"][:, 1:3])


@pytest.mark.parametrize("dropped", ["all", "each"])
def test_ones_for_a_recurrent_mask(dropped: str, rng: np.random.Generator) -> None:
    """Ones change nothing; layers of one step apply a mask in the same way as layers of many."""
    for shape in ((1, 2, 6), (4, 3, 6)):
        problem = random_problem(cells.LSTM, shape, rng, dropped=dropped)
        projected = by_cpu(problem, projected=True)
        projected.pop("d weight_ih_l0")
        assert_right(projected, problem)
        ones = problem.but({"recurrent_mask": np.ones_like(problem["recurrent_mask"])})
        left = {name: a for name, a in ones.arrays.items() if name != "recurrent_mask"}
        assert_right(by_cpu(ones), replace(ones, arrays=left))


# -- what belongs to the caller ------------------------------------------------------------------
@some_cells
def test_a_second_backward_gives_the_same(cell: Cell, rng: np.random.Generator) -> None:
    problem = random_problem(cell, (5, 4, 7), rng, masked=True, resets=True)
    assert_same(by_cpu(problem, backwards=2), by_cpu(problem))


@some_cells
def test_results_share_no_memory(cell: Cell, rng: np.random.Generator) -> None:
    for situation in SITUATIONS[:2]:
        problem = random_problem(cell, (5, 4, 7), rng, **situation)
        outputs, final = anycell.recurrence(cell, **problem.arguments(), engine="cpu")
        everything = [outputs, *final, *problem.arrays.values()]
        for i, a in enumerate(everything[: 1 + len(final)]):
            assert a.flags.writeable
            assert not any(np.shares_memory(a, b) for b in everything[i + 1 :])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("backward", [False, True])
@each_dtype
def test_packing_writes_only_its_block(dtype: str, backward: bool, transposed: bool) -> None:
    """Each tile is written within its bounds: another thread may have written the next one before.
    The forward kernels include kernels that multiply inputs.
    """
    for units, inputs in ((1, 0), (4, 0), (7, 0), (33, 0), (1, 1), (7, 5), (33, 40)):
        if backward and inputs:
            continue
        kernel = cpu.compiled(plan(cells.LSTM, units, dtype), backward)
        widths = {"weight_hh": units, "weight_ih": inputs}
        weights = {name: np.ones((4 * units, n), dtype) for name, n in widths.items() if n}
        if transposed:
            weights = {name: np.asfortranarray(weight) for name, weight in weights.items()}
        memory, size = packed(kernel, weights, inputs)
        assert not (memory[:size] == 0xAB).all()
        assert (memory[size:] == 0xAB).all()


def test_offsets_beyond_31_bits(rng: np.random.Generator) -> None:
    """Steps lie 2**31 elements apart; no page of the memory between them is touched."""
    far = 2**31 + 64
    problem = random_problem(cells.LSTM, (3, 2, 7), rng).astype("float32")
    try:
        memory = np.empty(2 * far + 1024, np.float32)
    except MemoryError:
        pytest.skip("no address space of 16 GB")

    def apart(name: str, a: np.ndarray) -> np.ndarray:
        if name not in ("x", "d output"):
            return a
        start = 0 if name == "x" else 512
        strides = (4 * far, 4 * a.shape[2], 4)
        view = np.lib.stride_tricks.as_strided(memory[start:], a.shape, strides)
        view[:] = a
        return view

    assert_same(by_cpu(problem.map(apart)), by_cpu(problem))


# -- which engine --------------------------------------------------------------------------------
def test_the_plan_chooses(rng: np.random.Generator, ran: list[str]) -> None:
    for kind in (cells.LSTM, cells.GRU(reset_after=False)):
        arguments = random_problem(kind, (3, 2, 6), rng).arguments()
        masked = {**arguments, "recurrent_mask": np.ones((2, 6))}
        assert plan(kind, 6, "float64").engine == "cpu"
        for given in (arguments, masked):
            ran.clear()
            anycell.recurrence(kind, **given)
            assert ran == ["cpu"]
    assert plan(cells.LSTMP, 5, "float64").engine == "reference"  # P is unknown


@cell(gates="a", state="h")
def Masks(x, r, s):
    """More masks than fit one draw of four words."""
    return sum(2.0**k * keep(0.5, per) for k, per in enumerate(["step", "sequence"] * 3)) + 0 * x.a


def test_every_mask_has_a_word_of_its_own(rng: np.random.Generator) -> None:
    for dtype in ("float32", "float64"):
        problem = random_problem(Masks, (9, 7, 33), rng, training=True, seed=3).astype(dtype)
        outputs = by_recurrence(problem)["output"]
        assert_array_equal(outputs, by_recurrence(problem, "reference")["output"])
        bits = outputs.astype(int)[..., None] >> np.arange(6) & 1
        assert np.abs(np.corrcoef(bits.reshape(-1, 6).T) - np.eye(6)).max() < 0.15


def test_engines_draw_the_same_masks(rng: np.random.Generator, ran: list[str]) -> None:
    problem = random_problem(Sampler, (5, 4, 7), rng, training=True, seed=3)
    solutions: list[Arrays] = [by_recurrence(problem, engine) for engine in ("cpu", "reference")]
    assert ran == ["cpu", "reference"]
    assert_right(solutions[0], problem)
    assert_same(problem.right, solutions[1])


@cell(gates="z n", state="h")
def Learned(x, r, s):
    """Zoneout whose rate is learned."""
    z, n = sigmoid(x.z + r.z), tanh(x.n + r.n)
    return keep(1 - z) * n + (1 - keep(1 - z)) * s.h


def test_a_rate_may_be_computed_from_what_is_learned(rng: np.random.Generator) -> None:
    problem = random_problem(Learned, (5, 4, 7), rng, training=True, seed=3)
    assert_right(by_cpu(problem), problem)


# An output is above 1 exactly where its gradient by ``v`` is above 0.
DECISIONS: dict[str, Callable[[Expr], Expr]] = {
    "where": lambda v: where(v > 0.3, 2.0 + v, 0.0),
    "clip": lambda v: where((v >= -0.25) & (v <= 0.25), 2.0 + clip(v, -0.25, 0.25), 0.0),
    "relu": lambda v: where(v > 0.3, 2.0, 0.0) + relu(v - 0.3) * 0.5,
    "abs": lambda v: where(v > 0.3, 2.0, 0.0) + anycell.abs(v - 0.3) * 0.1,
    "max": lambda v: where(v == anycell.max(v), 2.0, 0.0) + anycell.max(v) * 0.1,
    "mean": lambda v: where(anycell.mean(v) > 0.0, 2.0 + 0.1 * v, 0.0),
    "keep": lambda v: keep(sigmoid(v)) * (2.0 + sigmoid(v)),
}


def decision(decide: str) -> Problem:
    """A problem whose cell branches on a computed value; the gradients of all outputs are 1."""

    @cell(gates="a b")
    def Deciding(x, r, s):
        return DECISIONS[decide](x.a * sigmoid(x.b))

    rng = np.random.default_rng(0)
    problem = random_problem(Deciding, (64, 4, 100), rng, training=True, seed=3)
    ones, zeros = np.ones_like(problem["d output"]), np.zeros_like(problem["d final h"])
    return problem.but({"d output": ones, "d final h": zeros})


def assert_same_branches(solution: Arrays) -> None:
    taken = solution["output"].astype("float64") > 1.0
    assert 0 < taken.sum() < taken.size
    assert_array_equal(solution["d x"][..., :100].astype("float64") > 0.0, taken)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("decide", DECISIONS)
@pytest.mark.sample(every=4)
def test_the_backward_pass_takes_the_branch_of_the_forward_pass(decide: str, dtype: str) -> None:
    """This holds even if a saved value was rounded to the other side of the threshold."""
    assert_same_branches(by_cpu(decision(decide).astype(dtype), 1))


@cell(gates="a b")
def Largest(x, r, s):
    """Maxima of computed values over all units and over half of them, and of the state."""
    u = tanh(x.a + r.a) * sigmoid(x.b + r.b) + 0.1 * anycell.max(sigmoid(s.h))
    return u - anycell.max(u) * anycell.max(tanh(x.b), groups=2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.sample(1)
def test_a_maximum_is_of_what_is_compared_with_it(dtype: str) -> None:
    """Even if saved values are rounded, one equals the maximum, so no gradient is NaN."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        layer = RNN(Largest, 5, 18, dtype=dtype, seed=seed)
        right = RNN(Largest, 5, 18, dtype="float64", seed=seed)
        right.set_parameters({n: p.astype("float64") for n, p in layer.parameters.items()})
        x = rng.standard_normal((6, 3, 5)).astype(layer.dtype)
        errors = []
        for one in (layer, right):
            output, _ = one.forward(x, training=True)
            d, _ = one.backward(np.ones_like(output))
            errors.append([d, *one.grads.values()])
        for mine, true in zip(*errors, strict=True):
            assert np.isfinite(mine.astype("float64")).all()
            # If two units are almost equally large, either may receive the gradient.
            assert np.linalg.norm(mine.astype("float64") - true) < np.linalg.norm(true)
