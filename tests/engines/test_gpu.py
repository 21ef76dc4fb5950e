"""The GPU engine against the reference.

Kernels run on a card if there is one. Otherwise Triton's interpreter runs the same texts, and they
are compiled ahead of time for cards that the machine lacks.

One file, because results, texts and the capacity model are checked on the same plans.
"""

import ast
import gc
import inspect
import itertools
import json
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

# Before anything else that may import Triton.
from gpu import (
    CARD,
    CARDS,
    COMPILES,
    DEVICE,
    SLOW,
    Poisoned,
    by_gpu,
    reports,
    torch,
    without_a_card,
)
from numpy.testing import assert_array_equal
from problems import (
    AWKWARD,
    LEARNED,
    Problem,
    Unsolvable,
    assert_right,
    assert_same,
    is_float,
    kind_of,
    random_problem,
)
from processes import run
from random_cells import random_cell
from tolerances import assert_close, error, limit
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import anycell
from anycell import Cell, cells
from anycell import layer as layers
from anycell.engines import gpu
from anycell.engines.gpu import build, capacity, cooperative, launch
from anycell.engines.gpu.cooperative import Slice
from anycell.engines.gpu.launch import Launch
from anycell.engines.gpu.step import print_fill, print_step
from anycell.engines.gpu.text import FUNCTIONS, Variant
from anycell.lang.expr import topological
from anycell.lang.ops import TABLE
from anycell.layer import gpu as device
from anycell.layer.arguments import Factors
from anycell.layer.launches import DeviceDraft
from anycell.layer.weight_gradients import bias_gradients
from anycell.plan import Options, Plan, plan
from anycell.torch.framework import TorchDevice
from anycell.torch.graphs import Replays, captured
from tests.engines.test_engines import (
    DECISIONS,
    Choosing,
    Detached,
    LowRank,
    Masks,
    Namesakes,
    Numbers,
    Sampler,
    Small,
    assert_same_branches,
    decision,
)

EVERY = [
    cells.LSTM,
    cells.LSTM(coupled=True, forget_bias=1.0, cell_clip=0.8),
    cells.PeepholeLSTM,
    cells.LSTMP,
    cells.GRU,
    cells.GRU(reset_after=False),
    cells.RNN,
    cells.RNN(nonlinearity="relu"),
    cells.LayerNormLSTM,
    cells.LayerNormLSTM(form="ba"),
    cells.LayerNormGRU,
    cells.ZoneoutLSTM,
    cells.ZoneoutGRU,
    cells.RecurrentDropoutLSTM,
    cells.VariationalLSTM,
    cells.MGU,
    cells.JANET,
    cells.IndRNN,
    cells.MultiplicativeLSTM,
    cells.NAS,
    cells.EALSTM,
    cells.GRUD,
    cells.sLSTM(heads=3),
    Sampler,
    Detached,
    Namesakes,
    LowRank,
    Small,
    Numbers,
    Choosing,
]
BUILT_IN = {c.name for c in vars(cells).values() if isinstance(c, Cell)}
FEW = [cells.LSTM, cells.GRU(reset_after=False), Sampler]
SITUATIONS: list[dict[str, Any]] = [
    {},
    {"masked": True, "resets": True, "reverse": True, "training": True, "seed": 1 << 63},
    {"masked": True, "resets": True, "masked_output": "repeat"},
    {"masked": True},
    {"resets": True, "training": True, "seed": 5},
]
# Tier 2 divides the units of ``SHARED`` among programs.
SIZES = {"P": 9, "R": 5}
KINKS = {"relu", "where", "max", "min", "abs"}  # ops with several branches
SHARED = [c for c in EVERY if cooperative.refusal(plan(c, 18, "float32", "gpu", SIZES)) is None]
some_cells = pytest.mark.parametrize("cell", FEW, ids=repr)


def situation(cell: Cell, number: int) -> dict[str, Any]:
    """The arguments of a situation, without the options of random masks for cells without them."""
    drop = () if cell.keeps else ("training", "seed")
    return {name: v for name, v in SITUATIONS[number].items() if name not in drop}


def problem_of(cell: Cell, shape: tuple[int, int, int], rng: Any, number: int = 0) -> Problem:
    return random_problem(cell, shape, rng, "float32", **situation(cell, number))


def test_every_cell_is_here() -> None:
    assert {c.name for c in EVERY} >= BUILT_IN


# -- results ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("cell", "tier"),
    [
        pytest.param(cell, tier, marks=[] if tier == (3, 1)[k % 2] else SLOW)
        for k, cell in enumerate(EVERY)
        for tier in (3, 1)
    ],
    ids=str,
)
@pytest.mark.sample(10)
def test_every_cell(cell: Cell, tier: int, rng: np.random.Generator) -> None:
    """The call has masks, resets and random masks, and runs in reverse."""
    problem = problem_of(cell, (2, 3, 9), rng, 1)
    assert_right(by_gpu(problem, tier=tier), problem)


@pytest.mark.parametrize("cell", [cells.LSTM, cells.ZoneoutGRU, cells.sLSTM(heads=3)], ids=repr)
@pytest.mark.sample(1)
def test_shared(cell: Cell, rng: np.random.Generator) -> None:
    """Tier 2: programs of two groups, each with a part of the units."""
    problem = problem_of(cell, (3, 17, 18), rng, 1)
    assert_right(by_gpu(problem, tier=2), problem)


@pytest.mark.more
@without_a_card
def test_programs_wait_for_one_another() -> None:
    """Tier 2 runs as on a card, with all programs at once; a missing program raises an error."""
    (found,) = map(json.loads, run("tests/helpers/exchange.py", **COMPILES).splitlines())
    for way in ("forward", "backward", "inner"):
        error = "waited for one another for 0.04 s. The results of that call are NaN."
        assert error in found[way]["error"]
    # Steps that need no other program are complete: the first, and the backward pass's last.
    assert found["forward"]["h"] == [True] * 2 + [False] * 4
    assert found["inner"]["h"] == [True] + [False] * 5  # each step needs all units of its vector
    assert found["backward"]["h"] == [True] * 6
    assert found["backward"]["d_gates"] == [False] * 4 + [True]


@pytest.mark.parametrize("tier", [pytest.param(3, marks=pytest.mark.more), 2, 1])
def test_plainly(tier: int, rng: np.random.Generator) -> None:
    for cell in (cells.LSTM, cells.GRU, cells.LSTMP):
        problem = problem_of(cell, (3, 3, 9), rng)
        assert_right(by_gpu(problem, tier=tier), problem)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cell", "tier"),
    [(cell, tier) for cell in EVERY for tier in (3, 1)] + [(cell, 2) for cell in SHARED],
    ids=str,
)
@pytest.mark.parametrize("number", range(len(SITUATIONS)))
def test_every_situation(cell: Cell, number: int, tier: int, rng: np.random.Generator) -> None:
    for shape in ((4, 5, 33), (1, 19, 21))[: 1 + (number < 2)]:
        problem = problem_of(cell, shape, rng, number)
        assert_right(by_gpu(problem, tier=tier), problem)


@pytest.mark.parametrize(
    ("shape", "tier"),
    [
        pytest.param(s, tier, marks=[] if tier == 3 or s[2] < 9 else pytest.mark.slow)
        for s in AWKWARD
        for tier in (3, 1)
    ],
    ids=str,
)
def test_awkward_shapes(shape: tuple[int, int, int], tier: int, rng: np.random.Generator) -> None:
    cell = cells.LayerNormGRU if shape[:2] == (4, 5) else cells.GRU
    problem = problem_of(cell, shape, rng)
    assert_right(by_gpu(problem, tier=tier), problem)


@pytest.mark.parametrize(
    ("cell", "tier"),
    [
        pytest.param(cell, tier, marks=[] if cell in FEW else pytest.mark.slow)
        for tier, every in ((3, EVERY), (1, EVERY), (2, SHARED))
        for cell in every
    ],
    ids=str,
)
@pytest.mark.sample(2)
def test_sixteen_bits(cell: Cell, tier: int, rng: np.random.Generator) -> None:
    """float16 alone: the interpreter multiplies bfloat16 wrongly, so tests on a card cover that."""
    # With kinks, such as relu's, the last bit decides some problems.
    problem = random_problem(cell, (4, 3, 33), rng, "float16", nearby=6, **situation(cell, 2))
    assert_sixteen(problem.astype("float32"), "float16", tier)


@pytest.mark.parametrize("tier", [3, pytest.param(1, marks=pytest.mark.more)])
def test_the_norm_of_one_unit_in_16_bits(tier: int, rng: np.random.Generator) -> None:
    """It is 0, and so is the gradient of its gain."""
    problem = random_problem(cells.LayerNormLSTM, (4, 3, 1), rng, "float16")
    solution = by_gpu(problem.astype("float32"), "float16", tier)
    assert solution["d c_shift_l0"].any() and not solution["d c_gain_l0"].any()


@pytest.mark.parametrize("tier", [3, 1])
@pytest.mark.parametrize("decide", DECISIONS)
@pytest.mark.sample(every=9)
def test_the_backward_pass_takes_the_branch_of_the_forward_pass(decide: str, tier: int) -> None:
    assert_same_branches(by_gpu(decision(decide), "float16", tier))


@pytest.mark.gpu
@pytest.mark.grid
@pytest.mark.parametrize("number", range(len(SITUATIONS)))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("cell", "tier", "hidden"),
    [(cell, tier, 33) for cell in EVERY for tier in (3, 1)]
    + [(cell, 2, hidden) for cell in SHARED for hidden in (33, 36)],
    ids=str,
)
def test_sixteen_bits_on_a_card(
    cell: Cell,
    tier: int,
    hidden: int,
    dtype: str,
    number: int,
    rng: np.random.Generator,
) -> None:
    assert_sixteen(problem_of(cell, (5, 19, hidden), rng, number), dtype, tier)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [200, 768])
def test_many_programs_on_a_card(hidden: int, rng: np.random.Generator) -> None:
    """Tier 2 agrees with tier 3 over many steps: programs read what others wrote."""
    for cell in (cells.LSTM, cells.GRU):
        problem = random_problem(cell, (100, 40, hidden), rng, **situation(cell, 1))
        right = by_gpu(problem, "bfloat16", 3)
        for name, value in by_gpu(problem, "bfloat16", 2).items():
            # Each of the two may be off by the limit.
            assert error(value, right[name], ()) <= 2 * limit("bfloat16", kind_of(name)), name


def assert_sixteen(problem: Problem, dtype: str, tier: int) -> None:
    """Asserts errors over whole arrays against float64 results for the same rounded numbers."""
    import torch

    def rounded(_: str, a: np.ndarray) -> np.ndarray:
        if not is_float(a):
            return a
        return torch.tensor(a).to(getattr(torch, dtype)).float().numpy()

    problem = problem.map(rounded)
    try:
        solution = by_gpu(problem, dtype, tier)
    except RuntimeError as error:
        if "registers do not suffice" not in str(error):
            raise
        pytest.skip(str(error))  # this tier does not fit; the next would run
    # On a card, rounding may move a number to the other side of a kink.
    kinks = CARD and not KINKS.isdisjoint(node.op for node in topological(problem.cell.next))
    for name, value in solution.items():
        if kinks and kind_of(name) == "gradient":
            continue
        said = f"{name} of {problem.cell}"
        assert_close(value, problem.right[name], dtype, kind_of(name), said, ())


@pytest.mark.parametrize("seed", range(1997, 2001))
@pytest.mark.sample(2)
def test_random_cells(seed: int, rng: np.random.Generator) -> None:
    cell = random_cell(seed, 12)
    situation = {"masked": True, "resets": True, "training": True, "seed": 3}
    try:
        problem = random_problem(cell, (2, 3, 12), rng, "float32", nearby=3, **situation)
    except Unsolvable:
        pytest.skip("no problem that float32 solves")
    for tier in (3, 1):
        assert_right(by_gpu(problem, tier=tier), problem, f"tier {tier}")


def test_engines_draw_the_same_masks(rng: np.random.Generator) -> None:
    """All words of a draw equal the reference's, for any seed."""
    for seed in (3, (1 << 64) - 1):
        problem = random_problem(Masks, (5, 3, 9), rng, "float32", training=True, seed=seed)
        right = problem.right["output"]
        for tier in (3, 1):
            assert_array_equal(by_gpu(problem, tier=tier)["output"], right)


@some_cells
@pytest.mark.sample(1)
def test_chunks_of_time(
    cell: Cell, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that projects by the unit matrix equals its recurrence, for chunks of any length."""
    for number, tier in ((0, 1), (1, 3)):
        problem = problem_of(cell, (3, 3, 9), rng, number)
        problem["x"][:] = np.nan_to_num(problem["x"])
        right = by_gpu(problem, tier=tier)
        for steps in (1, 2) if cell is cells.LSTM else (2,):
            width = problem["x"][0].nbytes
            monkeypatch.setattr(device, "CHUNK_BYTES", steps * width)
            monkeypatch.setattr(device, "BLOCKS", (1,))
            solution = by_gpu(problem, tier=tier, projected=True)
            d_ih = solution.pop("d weight_ih_l0")
            same = [name for name in solution if not LEARNED.search(name)]  # sums of chunks
            assert_same(solution, right, *same)
            assert_right(solution, problem)
            rows = problem["x"].reshape(-1, problem["x"].shape[2])
            d_gates = problem.right["d x"].reshape(rows.shape)
            assert_close(d_ih, d_gates.T @ rows.astype("float64"), "float32", "gradient")


# -- graphs of launches ----------------------------------------------------------------------------
class Graphs(Replays):
    """Graphs without a card, which run their launches again; counts the captures."""

    def __init__(self, blocks: tuple[int, ...] = (2,), plain: int = 0) -> None:
        super().__init__(self.capture_nothing, blocks, plain)
        self.captures = 0

    def capture_nothing(self, run: Any) -> Any:
        self.captures += 1
        return run


@pytest.mark.parametrize(
    "cell",
    [pytest.param(c, marks=[] if k % 4 == 0 or c in FEW else SLOW) for k, c in enumerate(EVERY)],
    ids=repr,
)
@pytest.mark.sample(1)
def test_graphs(cell: Cell, rng: np.random.Generator) -> None:
    """Seven steps take graphs of four steps and of two, and one step without a graph: plainly, and
    in reverse with masks, resets and random masks.
    """
    graphs = Graphs((4, 2))
    for number in (0, 1):
        problem = problem_of(cell, (7, 2, 9), rng, number)
        assert_right(by_gpu(problem, replays=graphs), problem)
    assert graphs.captures == 8  # two lengths, two passes, two situations


def test_a_graph_serves_all_calls_of_a_form(rng: np.random.Generator) -> None:
    """The calls have other weights, memory and sequence lengths."""
    graphs, elsewhere = Graphs(), []
    for steps in (4, 5, 2):
        problem = random_problem(cells.PeepholeLSTM, (steps, 2, 4), rng, "float32")
        assert_right(by_gpu(problem, replays=graphs), problem)
        elsewhere.append(torch.empty(1 + 100 * steps, device=DEVICE))
    assert graphs.captures == 2


def test_chunks_of_graphs(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """States and their gradients alternate between buffers; random masks keep counting steps."""
    monkeypatch.setattr(device, "BLOCKS", (1,))
    for number, steps in ((1, 3), (4, 2)):
        problem = problem_of(cells.ZoneoutLSTM, (5, 2, 5), rng, number)
        problem["x"][:] = np.nan_to_num(problem["x"])
        monkeypatch.setattr(device, "CHUNK_BYTES", steps * problem["x"][0].nbytes)
        solution = by_gpu(problem, replays=Graphs(), projected=True)
        del solution["d weight_ih_l0"]  # not in the problem
        assert_right(solution, problem)


class Copies(TorchDispatchMode):
    """Counts operations that would copy on a device: everything that torch does between launches,
    except for matmuls, views and allocations.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.count, self.launches, start = 0, 0, Launch.__call__

        def launched(launch: Launch, t: int) -> None:
            self.launches += 1
            with _disable_current_modes():  # the interpreter's own
                start(launch, t)

        monkeypatch.setattr(Launch, "__call__", launched)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        view = any(
            a.alias_info is not None and not a.alias_info.is_write
            for a in function._schema.arguments
        )
        self.count += not view and function.overloadpacket.__name__ not in ("mm", "bmm", "empty")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("cell", [cells.GRU(reset_after=False), cells.sLSTM(heads=3)], ids=repr)
@pytest.mark.sample(1)
def test_steps_copy_nothing(
    cell: Cell, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    for replays in (Graphs((2,)), None):
        counts = []
        for steps in (2, 5):
            problem = random_problem(cell, (steps, 2, 6), rng, "float32", reverse=True)
            with monkeypatch.context() as patch, Copies(patch) as copies:
                by_gpu(problem, replays=replays, host_class=TorchDevice)
            counts.append((copies.count, copies.launches))
        assert counts[0][0] == counts[1][0] > 0
        assert counts[0][1] < counts[1][1]


def test_a_new_form_gets_no_graph_at_once(rng: np.random.Generator) -> None:
    """Ragged batches, each of a new form, get no graphs; nor do sequences that are too short."""

    def run(rows: int, steps: int = 4) -> int:
        problem = random_problem(cells.RNN, (steps, rows, 3), rng, "float32")
        assert_right(by_gpu(problem, replays=graphs), problem)
        return graphs.captures

    graphs = Graphs(plain=2)
    assert not any(map(run, (1, 2, 3, 4, 5)))
    assert run(2) == 0
    assert run(2) == run(2) == 2  # both passes, the third time
    assert [run(3, steps=1) for _ in range(3)] == [2] * 3
    assert run(3, steps=3) == 2


def test_graphs_that_are_not_used_go(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their memory goes too; graphs share memory of the same shape."""
    monkeypatch.setattr("anycell.torch.graphs.KEPT", 2)
    monkeypatch.setattr("anycell.torch.graphs.COUNTED", 3)
    graphs, plain = Graphs(), Graphs(plain=1)
    for rows in (1, 2, 3):
        problem = random_problem(cells.LSTM, (2, rows, 3), rng, "float32")
        for replays in (graphs, plain):
            assert_right(by_gpu(problem, replays=replays), problem)
        assert len(graphs.graphs) == 2  # the passes of one form
        gc.collect()  # captured launches refer to their graphs
        rows_held = {shape[0] for _, name, (shape, *_) in graphs.memory if name == "product0"}
        assert rows_held == {rows}
    assert len([name for _, name, _ in graphs.memory if name == "weight0"]) == 1
    assert len(plain.calls) == 3 and not plain.graphs


@pytest.mark.parametrize("first", ["inference", "training"])
@pytest.mark.sample(1)
def test_graphs_under_inference_mode(first: str, rng: np.random.Generator) -> None:
    """The memory of graphs serves calls in any mode, whichever mode comes first."""
    graphs = Graphs()
    problem = random_problem(cells.LSTM, (5, 3, 7), rng, "float32")
    modes = [torch.inference_mode, torch.no_grad, torch.enable_grad]
    for mode in modes if first == "inference" else reversed(modes):
        with mode():
            assert_right(by_gpu(problem, replays=graphs), problem)
    assert graphs.captures == 2


def test_threads_take_turns(rng: np.random.Generator) -> None:
    """Two threads with calls of one form on one stream share a table: neither thread may fill the
    table before the last launch of the other.
    """
    problems = [random_problem(cells.LSTM, (4, 3, 7), rng, "float32") for _ in range(2)]
    inside, most, lock = 0, 0, threading.Lock()

    def capture(run: Any) -> Any:
        def replay() -> None:
            nonlocal inside, most
            with lock:
                inside += 1
                most = max(most, inside)
            time.sleep(0.05)  # time for the other thread to interfere
            run()
            with lock:
                inside -= 1

        return replay

    replays = Replays(capture, (2,), 0)
    with ThreadPoolExecutor(2) as pool:
        solutions = pool.map(lambda problem: by_gpu(problem, replays=replays), problems)
        for problem, solution in zip(problems, solutions, strict=True):
            assert_right(solution, problem)
    assert most == 1


def test_what_the_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler knows whether 16 divides strides and addresses, but not for the values that fill
    a table: it would need a kernel for each pattern.
    """
    told = []

    def loaded(printed: Any, aligned: frozenset[str], *_: int) -> Any:
        told.append(aligned)
        return launch.Loaded(build.Binary("", b"", "", 0, 1, 0, 0), 1)

    monkeypatch.setattr(launch, "loaded", loaded)
    host = SimpleNamespace(pointer=int, stream=lambda: 0, ordinal=0)
    for unit in (1, 16):
        numbers = {f"value{n}": unit * n - 16 for n in range(32)}
        made = Launch(print_fill(), {"table": 512, "first": 16, **numbers}, (1, 1), host)
        cells_ = dict(zip((name for name, _ in print_fill().arguments), made.cells, strict=True))
        assert cells_["value0"] == 2**64 - 16 and cells_["value31"] == unit * 31 - 16
        (step,) = print_step(plan(cells.RNN, 8, "float32", "gpu"), Variant(biases=(True,))).all
        numbers = {name: 3 * unit for name, kind in step.arguments}
        Launch(step, {**numbers, "odd": 0}, (1, 1), host)
    fill, few, again, every = told
    assert fill == again == {"table"}
    assert few == {"odd"} and {"odd", "table", "gates__t", "gates__b", "batch"} <= every


def test_odd_addresses(rng: np.random.Generator) -> None:
    """Kernels assume aligned addresses only if all addresses are multiples of 16."""

    class Odd(Poisoned):
        """A host that copies the user's arrays to an element after an aligned address."""

        def fit(self, array: Any, layout: int, wide: bool = False) -> Any:
            count = 1 + math.prod(array.shape)
            odd = torch.empty(count, dtype=array.dtype, device=DEVICE)[1:].view(array.shape)
            return odd.copy_(array)

    for host_class, odd in ((Poisoned, 0), (Odd, 1)):
        graphs = Graphs()
        problem = random_problem(cells.PeepholeLSTM, (3, 2, 16), rng, "float32")
        assert_right(by_gpu(problem, replays=graphs, host_class=host_class), problem)
        every = [form.steps.launches[0] for form in graphs.graphs.values()]
        for kernel in every:
            names = [name for name, _ in kernel.printed.arguments]
            assert kernel.cells[names.index("odd")] == odd
        for tier in (1, 2):
            found = by_gpu(problem, tier=tier, host_class=host_class)
            assert_right(found, problem)


def test_streams_have_graphs_of_their_own(rng: np.random.Generator) -> None:
    """Streams share no table and no buffer: one could read what another is writing."""

    class Elsewhere(Poisoned):
        def stream(self) -> int:
            return number

    graphs = Graphs()
    problem = random_problem(cells.LSTM, (4, 3, 7), rng, "float32")
    for number in (1, 2, 1):  # noqa: B007 (a stream's)
        assert_right(by_gpu(problem, replays=graphs, host_class=Elsewhere), problem)
    assert graphs.captures == 4
    memory: dict[int, set[int]] = {}
    for (stream, *_), tensor in graphs.memory.items():
        memory.setdefault(stream, set()).add(tensor.data_ptr())
    assert len(memory) == 2 and not memory[1] & memory[2]


def test_a_capture_of_the_user_s_takes_launches(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    graphs = Graphs()
    problem = random_problem(cells.LSTM, (4, 3, 7), rng, "float32")
    assert_right(by_gpu(problem, replays=graphs), problem)
    assert not graphs.graphs and not graphs.captures


def test_chunks_are_whole_graphs() -> None:
    """Chunks are as long as memory allows, but no shorter than the shortest graph."""

    def chunk(hidden: int, rows: int, steps: int) -> int:
        return device._chunk(plan(cells.LSTM, hidden, "bfloat16", "gpu"), steps, rows)

    assert chunk(1024, 1024, 512) == 16  # 8 would be 64 MB
    assert chunk(1024, 128, 512) == 64
    assert chunk(768, 16, 1000) == 512  # two chunks of 500 would not be whole graphs
    assert chunk(768, 16, 300) == 300  # the whole sequence
    assert chunk(1024, 1024, 5) == 5
    assert chunk(1024, 300, 1000) == 32
    assert chunk(8, 1, 0) == 1


def test_sums_of_chunks_are_not_rounded(rng: np.random.Generator) -> None:
    """In 16 bits, a bias's gradient is not a sum of rounded sums, which may not even be finite."""
    host = TorchDevice(torch.float16, DEVICE)
    both = cells.LSTM, cells.GRU(reset_after=False)
    for cell, fresh in itertools.product(both, (False, True)):
        one = plan(cell, 4, "float16", "gpu")
        width = 4 * len(cell.gates)
        chunks = rng.uniform(0.0, 1.0, (25, 64, width)).astype("float16")
        chunks[:2] = [[[2000.0]], [[-2000.0]]]  # their sums exceed the range of float16
        given = {str(n): torch.tensor(chunk, device=DEVICE) for n, chunk in enumerate(chunks)}
        draft = DeviceDraft(host, one, given)
        shapes = layers.shapes(cell, {"H": 4}, 3, True)
        weights = {name: draft.zeros(shape) for name, shape in shapes.items()}
        sums = device._DeviceGradients(draft, one, weights, True, fresh)
        widths = [4 * len(l.outputs) for l in cell.linears]
        for chunk, dg in enumerate(draft.views.values()):
            factors = [Factors(dg[:, :n], None) for n in widths]
            x, hidden = draft.zeros((64, 3)), draft.zeros((64, 4))
            sums.add(dg, x, hidden, factors, first=chunk == 0)
        right = chunks.astype("float64").sum((0, 1))
        totals = bias_gradients(one, sums.biases, sums.totals, sums.vectors, sums.empty, sums.zeros)
        biases = [totals[name] for name in ("bias_ih", "bias_hh")]
        bias_ih, bias = draft.finish(biases).run(given, Options())
        assert_close(bias_ih.cpu(), right, "float32", "gradient")
        assert_close(bias.cpu()[: widths[0]], right[: widths[0]], "float32", "gradient")


def test_the_default_device_moves_nothing() -> None:
    """Neither the kernels' error report, which the host reads, nor a list of lengths moves."""
    torch.set_default_device("meta")
    try:
        host = TorchDevice(torch.float32, DEVICE)
        assert host.trouble.device.type == "cpu" and int(host.trouble[0]) == 0
        layer = anycell.torch.RNN(cells.LSTM, 2, 3, device=DEVICE)
        x = torch.ones(4, 2, 2, device=DEVICE)
        output, _ = layer(x, lengths=[4, 2])
        assert output.device.type == DEVICE.type and not output[2:, 1].any()
    finally:
        torch.set_default_device(None)


def test_what_kernels_report_outlives_inference_mode() -> None:
    host = TorchDevice(torch.float32, DEVICE)
    with torch.inference_mode():
        assert not host.trouble.is_inference()
    host.trouble[0] = 1


@pytest.mark.gpu
def test_the_default_device_on_a_card() -> None:
    """Tier 2 keeps memory that host and device share."""
    torch.set_default_device("cuda")
    try:
        host = TorchDevice(torch.bfloat16, DEVICE)
        assert host.trouble.is_pinned() and host.trouble.device.type == "cpu"
        layer = anycell.torch.RNN(cells.PeepholeLSTM, 32, 512, dtype=torch.bfloat16)
        output, _ = layer(torch.ones(4, 2, 32, dtype=torch.bfloat16), lengths=[4, 2])
        assert output.is_cuda and not output[2:, 1].any() and output.isfinite().all()
    finally:
        torch.set_default_device(None)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "cell", [cells.LSTM, cells.GRU(reset_after=False), cells.LayerNormLSTM], ids=repr
)
def test_captured_graphs_on_a_card(cell: Cell, dtype: str, rng: np.random.Generator) -> None:
    """Two graphs and eight more steps have the bits of single launches, also with new weights."""
    replays = Replays(captured)
    for _ in range(2):
        problem = random_problem(cell, (40, 19, 64), rng, "float32")
        right = by_gpu(problem, dtype)
        for _ in range(4):  # the third call captures
            assert_same(by_gpu(problem, dtype, replays=replays), right)
    assert [sorted(graphs.captured) for graphs in replays.graphs.values()] == [[16], [16]]


@pytest.mark.parametrize("cell", [FEW[0], pytest.param(FEW[1], marks=pytest.mark.more)], ids=repr)
def test_a_second_backward_gives_the_same(cell: Cell, rng: np.random.Generator) -> None:
    problem = problem_of(cell, (2, 4, 7), rng, 1)
    for tier in (3, 1):
        assert_same(by_gpu(problem, tier=tier, backwards=2), by_gpu(problem, tier=tier))


# -- the text --------------------------------------------------------------------------------------
def test_every_op_has_a_row() -> None:
    """Each op is a function of the library or an operator."""
    tree = ast.parse(Path(inspect.getfile(gpu)).with_name("library.py").read_text())
    operators = next(
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "OPERATORS"
    )
    names = next(n.value for n in ast.walk(operators) if isinstance(n, ast.Constant)).split()
    assert TABLE.keys() <= set(FUNCTIONS) | set(names)


def test_a_text_shows_the_cell() -> None:
    step = print_step(plan(cells.PeepholeLSTM, 32, "float32", "gpu"), Variant(biases=(True,)))
    (kernel,) = step.stages[0].kernels
    assert "h' = sigmoid(a.o + p.p_o * c') * tanh(c')" in kernel.source
    function = build.function(kernel)
    path = Path(function.fn.__code__.co_filename)
    assert path.read_text() == kernel.source


def test_stages_follow_the_matmuls() -> None:
    def kernels(cell: Cell, **form: Any) -> list[tuple[int, ...]]:
        sizes = {"P": 20}
        form["biases"] = (False,) * 3
        made = print_step(plan(cell, 32, "float32", "gpu", sizes), Variant(**form))
        return [stage.matmuls for stage in made.stages]

    assert kernels(cells.LSTM) == [(0,)]
    assert kernels(cells.LSTM, resets=True) == [(), (0,)]
    assert kernels(cells.LSTM, backward=True) == [()]
    assert kernels(cells.GRU(reset_after=False)) == [(0,), (1,)]
    assert kernels(cells.GRU(reset_after=False), backward=True) == [(), (1,)]
    assert kernels(cells.GRUD) == [(), (0,), (1,)]


def test_the_plan_of_a_gpu() -> None:
    assert plan(cells.LSTM, 8, "bfloat16", "gpu").itemsize == 2
    with pytest.raises(ValueError, match="expected one of float32, bfloat16, float16"):
        plan(cells.LSTM, 8, "float64", "gpu")
    with pytest.raises(ValueError, match="LSTMP: the size P of this cell is unknown"):
        plan(cells.LSTMP, 8, "float32", "gpu")
    with pytest.raises(
        ValueError, match="expected one of float32, float64, bfloat16, float16, int8"
    ):
        plan(cells.LSTM, 8, "int4")


# -- which tier ------------------------------------------------------------------------------------
def tier(
    cell: Cell, hidden: int, dtype: str, card: str, backward: bool = False, batch: int = 16
) -> int:
    one = plan(cell, hidden, dtype, "gpu")
    return capacity.choose(one, CARDS[card], backward, batch=batch).tier


def test_the_tier_follows_the_cell() -> None:
    assert tier(cells.RNN, 256, "bfloat16", "H100") == 1  # one gate's weights
    assert tier(cells.NAS, 128, "bfloat16", "H100") == 2  # eight gates' weights
    assert tier(cells.LayerNormLSTM, 256, "bfloat16", "H100") == 2  # programs exchange sums
    assert tier(cells.GRU(reset_after=False), 256, "bfloat16", "H100") == 2  # two stages
    assert tier(cells.IndRNN, 64, "float32", "H100") == 1  # no weights at all
    assert tier(cells.IndRNN, 1 << 16, "float32", "H100") == 3  # more than registers hold


def test_slices_for_an_older_compiler() -> None:
    """Before Triton 3.5, sums take twice the memory, and larger tiles make threads spill."""
    one, new = plan(cells.LSTM, 512, "bfloat16", "gpu"), CARDS["H100"]
    old = new._replace(compiler=(3, 4))
    for backward in (False, True):
        (_, *_), parts = [
            [choice.part for choice in capacity.choices(one, card, backward, batch=128)]
            for card in (new, old)
        ]
        slices = [part for part in parts if part is not None]
        assert slices
        for part in slices:
            assert part.rows * part.units <= 64 * part.warps
            newer = capacity.slice_bytes(one, part, backward)
            older = capacity.slice_bytes(one, part, backward, compiler=(3, 4))
            assert newer < older <= old.shared
    tiles = [choice.part for choice in capacity.choices(one, new, True, batch=128)]
    assert any(part and part.rows * part.units > 64 * part.warps for part in tiles)


def test_tiles_of_cells_that_reduce_whole_rows_are_small() -> None:
    """With larger ones kernels spill, however few weights a thread holds."""

    def tiles(cell: Cell, batch: int) -> set[int]:
        one = plan(cell, 768, "bfloat16", "gpu")
        parts = [choice.part for choice in capacity.choices(one, CARDS["H100"], batch=batch)]
        return {part.rows * part.units for part in parts if part}

    assert tiles(cells.GRU, 128) == {1024}  # the only one of which 132 programs are enough
    assert tiles(cells.LayerNormGRU, 128) == set()
    assert tiles(cells.LayerNormGRU, 64) == {capacity.REDUCED}


def test_a_slice_waits_once() -> None:
    """A program loads everything it needs from the others at the same time, if registers hold it:
    one chunk after the other, each would take a trip to the second-level cache.
    """
    for hidden, batch in ((768, 16), (1024, 16), (1024, 64)):
        one = plan(cells.LSTM, hidden, "bfloat16", "gpu")
        part = capacity.choose(one, CARDS["H100"], batch=batch).part
        assert part is not None and part.ahead * part.chunk >= hidden
    # Fewer chunks, if registers do not hold all.
    part = capacity.choose(one, CARDS["H100"], True, batch=64).part
    assert part is not None and part.ahead * part.chunk < 4 * hidden
    # As many weights as possible stay in registers, the others in shared memory.
    for hidden, whole in ((768, True), (2048, False)):
        one = plan(cells.LSTM, hidden, "bfloat16", "gpu")
        part = capacity.choose(one, CARDS["H100"]).part
        assert part is not None and (part.held * part.chunk >= hidden) is whole


@pytest.mark.parametrize(
    "cell",
    [cells.LSTM, *(pytest.param(c, marks=pytest.mark.more) for c in (cells.GRU, cells.RNN))],
    ids=repr,
)
def test_programs_of_tier_2_run_at_once(cell: Cell) -> None:
    """Programs do not outnumber multiprocessors, fit in shared memory, and cover all units."""
    for hidden in (130, 700, 1500):
        one = plan(cell, hidden, "bfloat16", "gpu")
        for card, batch, backward in itertools.product(CARDS.values(), (1, 40, 256), (False, True)):
            part = capacity.choose(one, card, backward, batch=batch).part
            if part is not None:
                programs = -(-batch // part.rows) * -(-hidden // part.units)
                assert programs <= card.processors
                assert capacity.slice_bytes(one, part, backward) <= card.shared
    kernel = cooperative.print_cooperative(
        one, Variant(biases=(False,)), Slice(32, 16, 128, 1, 4, 1)
    )
    assert kernel.cooperative and gpu.grid(kernel, one, 40) == (2, 94)


def largest(dtype: str, card: str, number: int, batch: int = 16, tf32: bool = False) -> str:
    """The largest multiple of 32 units with which both passes of the LSTM run in a tier."""

    def highest(units: int) -> int:
        one = plan(cells.LSTM, units, dtype, "gpu")
        passes = (False, True)
        return max(capacity.choose(one, CARDS[card], b, None, batch, tf32).tier for b in passes)

    fits, beyond = 0, 4096 // 32
    while beyond - fits > 1:
        middle = (fits + beyond) // 2
        fits, beyond = (middle, beyond) if highest(32 * middle) <= number else (fits, middle)
    return str(32 * fits) if fits and highest(32 * fits) == number else "-"


def test_the_table_of_the_docs() -> None:
    """The table of docs/internals.md lists the largest LSTM of each tier."""
    rows = {
        "tier 1, bfloat16, float16": ("float16", 1),
        "tier 1, float32": ("float32", 1),
        "tier 2, bfloat16, float16, up to 16 rows": ("float16", 2),
        "the same, 64 rows": ("float16", 2, 64),
        "tier 2, float32, up to 16 rows": ("float32", 2),
        "the same, where TF32 is allowed": ("float32", 2, 16, True),
    }
    cards = ("T4", "RTX 5090", "A100", "H100", "B200")
    text = (Path(__file__).parents[2] / "docs" / "internals.md").read_text(encoding="utf-8")
    for name, (dtype, *rest) in rows.items():
        line = f"| {name} | {' | '.join(largest(dtype, card, *rest) for card in cards)} |"
        assert line in text.splitlines(), line


def test_a_choice_says_why() -> None:
    wide, middle, narrow = (plan(cells.LSTM, h, "bfloat16", "gpu") for h in (4096, 768, 64))
    assert {name for name, _, _ in capacity.table(wide)} == {d.name for d in capacity.DEVICES}
    for card, _, why in capacity.table(wide):
        if card == "T4":
            assert "tier 3: Triton has no matrix instructions of 16 bits before sm_80" in why
            continue
        assert "tier 3: the weights of a step take 134," in why
        assert why.endswith("of a few units fit") or "programs, of which" in why

    def on_h100(one: Plan, batch: int = 16) -> str:
        return {row[:2]: row[2] for row in capacity.table(one, batch)}["H100", "forward"]

    assert "tier 2: 1 x 48 programs, of 16 rows and 16 units each" in on_h100(middle)
    assert "tier 2: 4 x 24 programs" in on_h100(middle, batch=64)
    assert "512 rows take" in on_h100(middle, batch=512)
    assert "tier 1: all weights on chip" in on_h100(narrow)
    assert capacity.choose(narrow, None).tier == 3
    for forced in (1, 2):
        assert capacity.choose(narrow, None, tier=forced).reason == "asked for"
    with pytest.raises(ValueError, match="tier=4; expected 1, 2, 3 or None"):
        capacity.choose(narrow, None, tier=4)
    alone = plan(cells.IndRNN, 64, "bfloat16", "gpu")
    with pytest.raises(ValueError, match="tier=2 cannot run cell IndRNN: no matmul"):
        capacity.choose(alone, None, tier=2)


def test_explain_shows_the_choice_and_the_text() -> None:
    page = anycell.explain(cells.PeepholeLSTM, 64, "bfloat16", engine="gpu", triton=True)
    text = str(page)
    assert "H100      forward   tier 1: all weights on chip" in text
    assert "by a model of what fits, not of what is fast" in text
    for name in ("forward_step_0_H", "backward_step_0_H", "forward_resident", "backward_resident"):
        assert f"def {name}(" in text
    assert page.llvm is None and anycell.explain(cells.LSTM, 64).triton is None


# -- compiled ahead of time ------------------------------------------------------------------------
def assert_fits(found: list[dict[str, Any]]) -> None:
    """Asserts that one of the forms of each kernel fits."""
    assert found
    names = "cell tier batch dtype capability kernel".split()
    fitting = {tuple(report[name] for name in names) for report in found if report["fits"]}
    assert fitting == {tuple(report[name] for name in names) for report in found}
    for report in found:
        assert not report["error"], report
        if report["fits"]:
            assert report["shared"] <= report["limit"], report
            assert report["spilled"] <= build.MOST_SPILLED, report


@without_a_card
@pytest.mark.slow
def test_kernels_compile_without_a_card() -> None:
    one = ("--cells", "LSTM", "--dtypes", "bfloat16", "--capabilities", "90", "--largest", "256")
    found = reports(*one)
    assert_fits(found)
    assert {report["tier"] for report in found} == {1, 2, 3}
    assert all(report["matrices"] != "-" for report in found if report["tier"] < 3)
    resident = [report["hidden"] for report in found if report["tier"] == 1]
    assert resident == [128, 128]
    # Row reductions and random masks, on which the compiler is stricter than the interpreter.
    names = ["LayerNormGRU", "ZoneoutGRU"]
    assert_fits(
        reports("--tiers", "3", "--dtypes", "float32", "--capabilities", "80", "--cells", *names)
    )


@pytest.mark.slow
@pytest.mark.grid(4)  # a minute or two each
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("cell", sorted(BUILT_IN))
def test_every_cell_compiles(cell: str, capability: int, dtype: str) -> None:
    """Each cell compiles in all tiers that the model allows, with matrix instructions."""
    found = reports("--cells", cell, "--capabilities", str(capability), "--dtypes", dtype)
    assert_fits(found)
    assert {(report["capability"], report["dtype"]) for report in found} == {(capability, dtype)}
    assert 3 in {report["tier"] for report in found}
    for report in found:
        if report["tier"] < 3 and dtype == "bfloat16" and getattr(cells, cell).linears:
            assert report["matrices"] == "mma.sync", report


# -- the text of a step ---------------------------------------------------------------------------
def test_what_a_text_loads_before_it_waits() -> None:
    """Nothing: the step before has loaded everything except for other programs' results."""
    for cell in SHARED:
        one = plan(cell, 264, "bfloat16", "gpu", {"P": 132, "R": 66})
        for backward in (False, True):
            biases = tuple(l.bias and not backward for l in cell.linears)
            form = Variant(backward, keep=not backward, input_bias=not backward, biases=biases)
            part = Slice(16, 16, 128, 2, 4, 1)
            text = cooperative.print_cooperative(one, form, part).source
            step = text.partition("    for t in range(")[2]
            before, _, after = step.partition("alive = wait(")
            assert "tl.load(" not in before, cell
            assert "tl.load(" in after and "bias" not in "".join(
                line for line in after.splitlines() if "tl.load(" in line
            )


def test_functions_of_16_bits(rng: np.random.Generator) -> None:
    """With exact exponentials and divisions, they lose almost nothing compared to rounding to 16
    bits. A card's exponential and division each add 2 units in the last place of a float32.
    """
    import torch
    import triton
    from gpu import DEVICE, functions_of_16_bits

    x = torch.cat(
        [
            torch.linspace(-86.0, 86.0, 50_001),
            torch.linspace(-1.0, 1.0, 50_001),
            torch.logspace(-30, 0, 1000),
            torch.tensor([0.0, -0.0, 1e30, -1e30, float("inf"), -float("inf"), float("nan")]),
        ]
    ).to(DEVICE)
    found = torch.empty((4, len(x)), device=DEVICE)
    with np.errstate(all="ignore"):
        functions_of_16_bits[(triton.cdiv(len(x), 1024),)](x, found, len(x))
    exact = x.double().cpu()
    rights = [torch.sigmoid(exact), torch.tanh(exact)] * 2
    for n, (y, right) in enumerate(zip(found.double().cpu(), rights, strict=True)):
        assert torch.equal(y.isnan(), right.isnan())
        real = ~right.isnan() & (right.abs() > 2.0**-126)
        wrong = ((y - right).abs() / right.abs())[real].max()
        assert wrong < (2.0**-17 if n < 2 else 2.0**-21)
