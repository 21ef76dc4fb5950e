"""The memory contract: every array of every entry point, in every memory layout, on every road."""

import ast
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from guarded import Everything
from problems import LEARNED, Problem, draw, kind_of
from processes import python
from roads import ROADS
from tolerances import assert_close
from variants import variants

import anycell
from anycell import Cell, cells, layer
from anycell.engines import cpu
from anycell.engines.cpu.isa import available
from anycell.layer import products
from anycell.numpy.framework import Numpy
from anycell.plan import plan
from tests.conformance import on_numpy, on_torch
from tests.conformance.frontend import Frontend

Array = npt.NDArray[Any]
Arrays = dict[str, Array]


class Case(NamedTuple):
    """A call of a layer; ``test_both_sides_of_every_road`` checks the roads that calls take."""

    steps: int
    rows: int
    inputs: int
    hidden: int
    masked: bool = False

    def __str__(self) -> str:
        return "-".join(map(str, self[:4])) + ("-masked" if self.masked else "")


CASES = [
    Case(5, 3, 6, 8),  # the host projects all steps at once
    Case(40, 9, 6, 8),  # the kernel projects
    Case(5, 9, 6, 64, True),  # rows of a power of two are padded
    Case(40, 3, 6, 64),  # threads split the units
    Case(40, 40, 6, 33, True),  # threads split the rows; a mask with holes
    Case(1, 3, 6, 8),  # a single step, whose recurrent matmul is the host's
    Case(1, 40, 6, 8),  # for many rows, torch runs a step of its layers by another operator
    Case(1, 40, 6, 33, True),
    Case(2, 1, 100, 160),  # steps of one row, whose weights are not packed
    Case(20, 16, 300, 160),  # weights too large for the kernel to project; packed by two threads
    Case(300, 24, 6, 64),  # several chunks, on warm memory
    Case(6, 0, 6, 8),
    Case(3, 70, 6, 8),  # several panels of rows, and groups of several rows
]
SLOW = {CASES[-3], CASES[-4]}
cases = pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] * (c in SLOW)) for c in CASES], ids=str
)


# -- entry points ----------------------------------------------------------------------------------
class Entry(NamedTuple):
    """A public entry point, through the adapter of its frontend."""

    frontend: Frontend
    cell: Cell
    steps: bool = False

    def __str__(self) -> str:
        return f"{self.frontend}-{self.cell.name}" + "-steps" * self.steps

    def problem(self, case: Case) -> Problem:
        """Returns a call with resets and, for sequences, masks; or a call without them."""
        words: tuple[str, ...] = ("state",)
        if case.masked:
            words += ("resets", "reset_state", *(() if self.steps else ("mask", "lengths")))
        elif not self.steps and self.frontend is not DROP_INS:  # they go another way without
            alone = self.frontend is NUMPY and 1 in case[:2]  # as steps of one row do
            words += ("recurrent_mask per gate",) * (not alone)
        words += ("bidirectional",) * (self.cell is cells.GRU and not self.steps)
        has = tuple(word for word in words if word.split()[0] not in self.frontend.lacks)
        size = 1 if self.steps else case.steps, *case[1:4]
        problem = draw(self.cell, size, has, "float32", solvable=False)
        return problem.but({"x": np.nan_to_num(problem.arrays["x"])})

    def call(self, problem: Problem) -> Arrays:
        run = self.frontend.steps if self.steps else self.frontend.solve
        assert run is not None
        return run(problem)


BY_NAME = {str(frontend): frontend for frontend in (*on_torch.FRONTENDS, *on_numpy.FRONTENDS)}
TORCH, NUMPY, PRIMITIVE = (BY_NAME[n] for n in ("torch.RNN", "numpy.RNN", "recurrence"))
DROP_INS = BY_NAME["torch.LSTM and GRU"]
ENTRIES = [
    *(Entry(DROP_INS, cell) for cell in (cells.LSTM, cells.GRU)),
    Entry(TORCH, Everything),
    *(Entry(NUMPY, cell) for cell in (cells.LSTM, Everything)),
    *(Entry(PRIMITIVE, cell) for cell in (cells.LSTM, Everything)),
    *(Entry(DROP_INS, cell, True) for cell in (cells.LSTM, cells.GRU)),
    Entry(NUMPY, cells.LSTM, True),
]
entries = pytest.mark.parametrize("entry", ENTRIES, ids=str)


def guises(entry: Entry, problem: Problem) -> Iterator[dict[str, tuple[str, Array]]]:
    """Yields arrays in variants whose numbers differ, a learned array by itself, as cells may
    subtract what equal rows have in common; then all in variants of the same numbers. Each array
    has each of its variants.
    """
    torchs = "negative strides" in entry.frontend.lacks
    others, same = dict[str, list[tuple[str, Array]]](), dict[str, list[tuple[str, Array]]]()
    for name, array in problem.arrays.items():
        for guise, turned in variants(array, torchs):
            if np.array_equal(turned, array):
                same.setdefault(name, []).append((guise, turned))
            elif LEARNED.search(name):
                yield {name: (guise, turned)}
            else:
                others.setdefault(name, []).append((guise, turned))
    for kind in (others, same):
        for k in range(max(map(len, kind.values()), default=0)):
            yield {name: own[k % len(own)] for name, own in kind.items()}


@entries
@cases
@pytest.mark.sample(every=1 + len(ENTRIES))  # each entry point, and each case
def test_every_guise_of_every_array(entry: Entry, case: Case, two_threads: None) -> None:
    """Arrays that are permuted, sliced, in steps, expanded, misaligned, backwards or in packed
    records have the same results as contiguous copies.
    """
    if entry.steps and case.steps > 1:
        case = case._replace(steps=1)
    problem = entry.problem(case)
    same, count = entry.call(problem), 0
    for count, turned in enumerate(guises(entry, problem)):  # noqa: B007
        arrays = {name: array for name, (_, array) in turned.items()}
        copies, plain = {name: array.copy() for name, array in arrays.items()}, same
        if not all(np.array_equal(array, problem[name]) for name, array in arrays.items()):
            plain = entry.call(problem.but(copies))
        results = entry.call(problem.but(arrays))
        told = ", ".join(f"{name} {guise}" for name, (guise, _) in turned.items())
        for name, value in plain.items():
            assert_close(results[name], value, "float32", kind_of(name), f"{name} ({told})", ())
    assert count > 10


@pytest.mark.parametrize("entry", [e for e in ENTRIES if e.frontend in (DROP_INS, TORCH)], ids=str)
@pytest.mark.sample(every=2)
def test_every_guise_where_the_library_multiplies(
    entry: Entry,
    two_threads: None,
    set_layer: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """BLAS takes no rows that lie in each other, as those of an array that is expanded."""
    monkeypatch.setattr(products, "rule", lambda: products.Rule(True, "asked for"))
    set_layer()  # forgets passes, now and at the end
    test_every_guise_of_every_array(entry, CASES[0], two_threads)


# Other arguments that an error may name: another input is another call, in which all arguments per
# row or step are wrong instead; and sizes follow from both states and weights.
ANY = "x:|gates_x|state|mask|resets|lengths|static|weights|params"
CALLED = {"x": ANY, "state": "state|weight", "weights": "weights|params", "d": "grad_"}


@entries
def test_every_array_that_is_another_one(entry: Entry) -> None:
    """Arrays of another shape, number of axes or dtype are refused by an argument's name."""
    frontend, count = entry.frontend, 0
    torchs = "negative strides" in frontend.lacks
    problem = entry.problem(Case(40, 9, 6, 8, True))
    ours = {name for name in problem.arrays if not LEARNED.search(name) and name[:2] != "d "}
    if frontend is NUMPY and not entry.steps:
        ours |= {name for name in problem.arrays if name[:2] == "d "}
    if frontend is PRIMITIVE:  # its adapter projects the input
        ours |= {name for name in problem.learned if "_ih" not in name}
        ours -= {"x"}
    for name in ours:
        array, learned = problem.arrays[name], LEARNED.search(name)
        word = "weights" if learned else name.split()[0]
        others = [array[None], array.astype(np.complex64), array.astype(np.int16)]
        if not torchs:
            others += [np.full(array.shape, "a"), np.full(array.shape, None)]
        state = word in ("state", "reset_state")
        stepped = name in ("x", "resets") and entry.steps  # each step takes its own
        apart = state if frontend is PRIMITIVE else stepped  # the first axis
        for axis in range(apart, array.ndim):
            others += [array.take(range(1, array.shape[axis]), axis), array.take(0, axis)]
            others += [np.concatenate([array, array], axis), array.take([], axis)]
        for other in others:
            if other.dtype == np.int16 and (not torchs or word == "lengths"):
                continue  # NumPy's layers convert numbers, and lengths are integers
            if other.dtype == np.int16 and word == "resets":
                continue  # 0 and 1 of any dtype are flags
            if word == "reset_state" and other.ndim == array.ndim - 1 and apart:
                continue  # one value for all rows
            with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
                entry.call(problem.but({name: np.asarray(other)}))
            said = str(caught.value)
            if frontend is not DROP_INS:  # which have torch's own errors
                assert "expected" in said, (name, other.shape, said)
                own = name.split()[-1].split("_l0")[0]
                pattern = f"{CALLED.get(word, word)}|^{own}:"
                assert re.search(pattern, said), (name, other.shape, said)
            count += 1
    assert count > 10


# -- roads -----------------------------------------------------------------------------------------

# Every number of the package by which a call takes another road, and the road; None where there is
# but one to the same numbers, or none at all.
THRESHOLDS = {
    "layer/heuristics.py": {
        "CHUNK_BYTES": "several chunks",
        "WORTH_PACKING": "the kernel multiplies the input",
        "WEIGHTS_SHARE": "the kernel multiplies the input",
        "TILED_ROWS": None,  # both sides, as those of FEW_TILED_ROWS: test_tiles
        "TILED_WEIGHTS": None,
        "FILLED": "a mask with holes",
        "FEW_ROWS": "a single step of few rows",
        "FEW_ROWS_TURNED": None,  # both sides of these: test_engines
        "ROWS_A_VECTOR": "a single step of few rows",
        "FEW_ROWS_IN_PAIRS": None,
        "PAIRED_ROWS_A_VECTOR": None,
        "FEW_ROWS_UNFUSED": None,
        "UNPACKED_STEPS": None,  # both sides: test_projection
        "UNPACKED_BYTES": "steps of one row",
        "UNPACKED_BYTES_IN_PARTS": None,
        "WORTH_A_THREAD": "several threads",
    },
    "engines/cpu/door.py": {
        "WORTH_SPREADING": "threads pack the weights",
        "NEAR_CACHE": "threads split the units",
        "FEW_ROWS": "threads split the units",
        "FEW_TILED_ROWS": None,
        "HARDLY_ANY_ROWS": "threads split the units",
    },
    # Both sides of these: test_cpu_matmul.
    "engines/cpu/gemm.py": {
        "INNER": None,
        "ROWS": None,
        "PIECES": None,
        "CONFLICT": None,
        "NEAR": None,
        "FETCHING": None,
        "ROWS_AHEAD": None,
        "COLUMNS_AHEAD": None,
        "UNROLL": None,
    },
    "engines/cpu/driver.py": {"BLOCK": None, "SUMMED": None},  # both sides: test_driver
    "numpy/framework.py": {"SMALL": None},  # both sides: test_cpu_matmul
    "layer/recipe.py": {"_RECIPES": None, "_WORD": None},  # both sides: test_recipe
    "engines/cpu/memory.py": {
        "SMALL": "warm memory",
        "GRAIN": None,
        "LIMIT": None,
    },  # test_cpu_runtime
    "engines/cpu/layout.py": {"PANEL": "several panels of rows"},
    "engines/cpu/rows.py": {"AHEAD": None},
    "engines/cpu/pool.py": {
        "SPIN": None,
        "SPINS": None,
        "PATIENCE": None,
        "LOSS": None,
        "REST": None,
    },  # both sides: test_busy_cores
    "layer/stream.py": {"FORMS": None},  # both sides: test_stream
    "keras/tensorflow/framework.py": {"LINE": None},
    "layer/rounding.py": {"STEPS": None},
    "layer/feedback.py": {"LEAST": None},  # of a switch that is never 0: test_quantize
    "layer/contract.py": {"_MOST": None},  # of layouts that are known, see test_recipe
    "layer/checks.py": {"MOST": None},  # a size beyond which it is a mistake
    "keras/tensorflow/graph.py": {"ROWS": None},  # of a batch to read a step with
    "keras/reading.py": {"MOST": None},  # of readings that are known
    "keras/torch.py": {"_ROWS": None},  # of a batch to read a step with
    "torch/operators/fused.py": {"FEWEST_STEPS": None},  # both sides: torch/test_func
    # Both sides: torch/test_loop.
    "torch/loops.py": {"_MOST": None, "_RESTLESS": None, "_AROUND": None, "_STEP": None},
    "numpy/loops.py": {
        "_MOST": None,
        "_READINGS": None,
        "_RESTLESS": None,
        "_LONG": None,
    },  # of readings: both sides of the last two: numpy/test_warm
    "numpy/mirror.py": {"_MOST": None},  # both sides: numpy/test_warm
    "torch/reading/planned.py": {"_MOST": None},  # of tapes
    "torch/operators/derivatives.py": {"ELEMENTS_A_STEP": None},  # torch/test_functional
    "torch/operators/native.py": {"_ABI": None},  # a version
    "torch/operators/passes.py": {"_MOST": None},  # of forms
    "torch/reading/proven.py": {"_MOST": None},  # of things around a step that are compared
    "torch/operators/warm.py": {"_MOST": None},  # of calls that are known
}


def test_no_threshold_is_forgotten() -> None:
    """Numbers with a name at the top of a module that has a part in a call."""
    package = Path(anycell.__file__).parent
    files = [*package.glob("*.py"), *package.glob("layer/*.py"), *package.glob("torch/**/*.py")]
    files += [*package.glob("keras/**/*.py"), *package.glob("numpy/*.py")]
    parts = "__init__ door driver gemm memory layout rows panel step sequence pool".split()
    files += [package / f"engines/cpu/{name}.py" for name in parts]
    elsewhere = "gpu card launches device doctor drawing explanation philox layouts cli".split()
    numbers: dict[str, set[str]] = {}
    for file in files:
        if file.stem in elsewhere or file.name == "graphs.py":  # of a GPU, or of no call at all
            continue
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                if name.isupper() and _is_number(node.value):
                    numbers.setdefault(str(file.relative_to(package)), set()).add(name)
    assert numbers == {name: set(roads) for name, roads in THRESHOLDS.items()}


def _is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_number(node.left) and _is_number(node.right)
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float))


def test_both_sides_of_every_road(monkeypatch: pytest.MonkeyPatch, two_threads: None) -> None:
    """The cases above take every road, and every way round it."""
    taken: set[tuple[str, bool]] = set()

    def spy(module: Any, name: str, look: Callable[..., None]) -> None:
        function = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            look(result, *args)
            return result

        monkeypatch.setattr(module, name, call)

    def look_at_run(_: None, run: Any, *args: Any) -> None:
        _draft, _plan, _options, _backward, holes, *_ = args
        taken.update((road, bool(on(run))) for road, on in ROADS.items())
        taken.add(("a mask with holes", holes))
        taken.add(("several panels of rows", run.batch > 48))
        taken.add(("groups of several rows", layer.row_group(run.batch) > 1))

    monkeypatch.setattr(layer.recipe, "known", {})  # or passes that are known are not drafted
    spy(layer.pass_tables.PassTables, "__init__", look_at_run)

    def look_at_memory(view: Any, recipe: Any, _: Any, how: str = "empty", *__: Any) -> None:
        if how == "lasting":
            taken.add(("warm memory", recipe.sources[view.slot].how == how))

    spy(layer.recipe.Draft, "new", look_at_memory)
    for entry in (Entry(NUMPY, cells.LSTM), *ENTRIES[:2]):
        for case in CASES:
            entry.call(entry.problem(case))
    roads = {*ROADS, "groups of several rows"}
    roads |= {road for table in THRESHOLDS.values() for road in table.values() if road}
    assert taken == set(itertools.product(roads, (True, False)))


# -- forbidden pages -------------------------------------------------------------------------------
GUARDED = "import guarded; from guarded import *; main({cells}, {sizes}, {every}, {seed})"


def test_kernels_stay_within_their_arrays(seed: int) -> None:
    """Between forbidden pages; a part of the cases, another one for each seed."""
    some = "[cells.LSTM, cells.GRU, cells.LayerNormLSTM, Everything]"
    said = python(GUARDED.format(cells=some, sizes=(33,), every=240, seed=seed))
    assert int(said.split()[-2]) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("isa", available())
def test_kernels_stay_within_their_arrays_all(isa: str, seed: int) -> None:
    """All cells, and every instruction set."""
    some = "[*BUILT_IN, Everything]"
    said = python(GUARDED.format(cells=some, sizes="SIZES", every=3, seed=seed), ANYCELL_ISA=isa)
    assert int(said.split()[-2]) >= 2000


def test_forbidden_pages_end_the_process() -> None:
    """One number beyond an array, at its end or before its beginning."""
    for end, place in ((True, 4), (False, -1)):
        code = f"""
            import ctypes, guarded
            array = guarded.guarded((4,), "float32", {end})
            address = array.__array_interface__["data"][0] + 4 * {place}
            print(ctypes.c_float.from_address(address).value)
        """
        with pytest.raises(AssertionError, match=r"ended with -(7|11)"):
            python(code)


# -- ANYCELL_CHECK ---------------------------------------------------------------------------------
def test_native_calls_are_held_against_their_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer whose buffers are too short, or which takes what nobody has checked, is caught."""
    assert cpu.check.ON, "tests run under ANYCELL_CHECK=1"
    host, one = Numpy("float32"), plan(cells.LSTM, 8, "float32")
    x, w = np.zeros((40, 9, 6), "float32"), np.zeros((32, 8), "float32")
    named = {"weight_ih": np.zeros((32, 6), "float32"), "weight_hh": w}
    named |= {f"state {name}": np.zeros((1, 9, 8), "float32") for name in "hc"}

    def forward(x: Array = x, **others: Array) -> None:
        given = {"x": x, **named, **others}, (object(),)
        monkeypatch.setattr(layer.contract, "fit", lambda *_: given)
        layer.forward(host, one, {}, layer.Options(), keep=True)

    forward()
    with pytest.raises(AssertionError, match="input: the kernel would touch"):
        forward(np.zeros((40, 6, 9), "float32").transpose(0, 2, 1)[:, :, ::-1])
    with pytest.raises(AssertionError, match="weight_hh: the kernel would touch"):
        forward(weight_hh=w[:, :7])
    with pytest.raises(AssertionError, match="not a multiple of 4 bytes"):
        forward(dict(variants(x))["1 bytes past an element"])
