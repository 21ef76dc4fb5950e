"""Every behaviour of a layer, on every frontend, against the reference engine in float64."""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any
from unittest import mock

import numpy as np
import pytest
from guarded import Everything
from problems import (
    LEARNED,
    Adding,
    Array,
    Arrays,
    Odd,
    Problem,
    Rows,
    Sized,
    Tied,
    assert_solved,
    by_reference,
    draw,
    forget_passes,
    is_float,
)
from tolerances import is_slope

import anycell
from anycell import Cell, cells
from anycell.layer.recipe import Recipe
from anycell.layer.stream import Stream
from tests.conformance.frontend import Frontend

NEEDS = {
    "on_numpy": "numpy",
    "on_torch": "torch",
    "on_keras": "keras",
    "on_tf1": "tensorflow",
    "on_jax": "jax",
}


def all_frontends() -> Iterator[Frontend]:
    """Yields the frontends of the installed frameworks; Keras has one backend in a process."""
    for adapter, framework in NEEDS.items():
        if find_spec(framework) is None or (adapter == "on_tf1" and not on_tensorflow()):
            continue
        yield from importlib.import_module(f"tests.conformance.{adapter}").FRONTENDS


def on_tensorflow() -> bool:
    import keras

    return keras.backend.backend() == "tensorflow"


FRONTENDS = list(all_frontends())
BUILT_IN = [getattr(cells, name) for name in cells.__all__]
EVERY = [
    *BUILT_IN,
    cells.GRU(reset_after=False),
    cells.PeepholeLSTM(coupled=True, forget_bias=1.0, cell_clip=0.6),
    cells.sLSTM(heads=2),
    Odd,
    Tied,
    Sized,
    Rows,
    Everything,
]
STANDARD = (5, 4, 3, 6)  # T, B, I, H
FULL = ("state", "mask", "lengths", "resets", "reset_state", "bidirectional", "return_states")


def ask(
    *cases: Any,
    cells: Callable[[Frontend], tuple[Cell, ...]],
    has: Callable[[Any], tuple[str, ...]] = lambda case: (),
    more: Callable[[Frontend, Cell, Any], bool] = lambda frontend, *_: frontend.variant,
) -> Any:
    """Parametrizes a test by each frontend, cell and case that the frontend supports.

    Args:
        more: whether only the longer suite runs a case.
    """
    found = []
    for frontend in FRONTENDS:
        for cell in cells(frontend):
            for case in cases:
                if frontend.runs(cell, *has(case)):
                    marks = [pytest.mark.more] * more(frontend, cell, case)
                    name = f"{frontend}-{cell}" + f"-{case}" * (len(cases) > 1)
                    found.append(pytest.param(frontend, cell, case, marks=marks, id=name))
    return pytest.mark.parametrize(("frontend", "cell", "case"), found)


def some(frontend: Frontend) -> tuple[Cell, ...]:
    """Cells that represent all others, or the cells of a frontend that has only a few."""
    found = frontend.cells or (cells.LSTM, Everything)
    return found[-1:] if frontend.variant else found


def dtype(frontend: Frontend) -> str:
    return "float32" if "float64" in frontend.lacks else "float64"


def check(frontend: Frontend, problem: Problem) -> Arrays:
    """Asserts that a frontend solves a problem on the expected engine and writes to no argument."""
    before = {name: array.copy() for name, array in problem.arrays.items()}
    native = "torch" in frontend.name  # runs passes as earlier ones
    if native:
        forget_passes()
    with mock.patch.object(Recipe, "run", autospec=True, side_effect=Recipe.run) as kernels:
        solution = frontend.solve(problem)
    steps, rows, _ = problem.shape
    if steps > 1 and rows:  # some frameworks run a single step themselves
        assert kernels.called is frontend.fused
    assert_solved(solution, problem, "gradients" not in frontend.lacks)
    if native:
        again = frontend.solve(problem)
        assert all(np.array_equal(again[n], a, equal_nan=True) for n, a in solution.items())
    for name, array in problem.arrays.items():
        assert np.array_equal(array, before[name], equal_nan=is_float(array)), name
    return solution


# -- what a call has -------------------------------------------------------------------------------
CALLS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "state": ("state",),
    "mask": ("mask", "state"),
    "lengths": ("lengths", "state"),
    "mask and lengths": ("mask", "lengths"),
    "resets": ("resets", "state"),
    "resets under a mask": ("resets", "mask"),
    "reset state": ("resets", "reset_state", "mask"),
    "held output": ("repeat", "mask"),
    "held state": ("repeat", "mask", "state", "held start"),
    "reverse": ("reverse", "state"),
    "reverse under a mask": ("reverse", "mask", "state"),
    "reverse with lengths": ("reverse", "lengths"),
    "reverse with resets": ("reverse", "resets"),
    "both directions": ("bidirectional", "state"),
    "both directions with lengths": ("bidirectional", "lengths"),
    "both directions with resets": ("bidirectional", "resets", "mask"),
    "layers": ("layers", "state"),
    "layers of both directions": ("layers", "bidirectional", "state", "lengths"),
    "held output of both directions": ("repeat", "mask", "bidirectional", "resets"),
    "no bias": ("no bias",),
    "states of every step": ("return_states", "state"),
    "states of both directions": ("return_states", "bidirectional", "mask", "resets"),
    "states of the last layer": ("return_states", "layers", "lengths", "repeat"),
    "states in reverse": ("return_states", "reverse", "mask"),
    "held states": ("return_states", "repeat", "mask", "resets"),
    "held states of both directions": ("return_states", "repeat", "mask", "bidirectional"),
}
STATES = [case for case in CALLS if "states" in case]


def said_by_others(frontend: Frontend, cell: Cell, case: str) -> bool:
    """Whether a few calls with many features cover this one together."""
    seen, chosen = set[str](), ["plain"]
    for name in sorted(CALLS, key=lambda name: -len(CALLS[name])):
        if frontend.runs(cell, *CALLS[name]) and not seen.issuperset(CALLS[name]):
            seen.update(CALLS[name])
            chosen.append(name)
    return frontend.alike and case not in chosen


@ask(*CALLS, cells=some, has=CALLS.__getitem__, more=said_by_others)
@pytest.mark.sample(every=3)
def test_calls(frontend: Frontend, cell: Cell, case: str) -> None:
    check(frontend, draw(cell, STANDARD, CALLS[case], dtype(frontend)))


@ask(*STATES, cells=lambda _: (Adding,), has=CALLS.__getitem__, more=said_by_others)
def test_states_that_no_plan_keeps(frontend: Frontend, cell: Cell, case: str) -> None:
    check(frontend, draw(cell, STANDARD, CALLS[case], dtype(frontend)))


RECURRENT = [
    cells.LSTM, cells.GRU, cells.GRU(reset_after=False), cells.PeepholeLSTM, cells.LSTMP, Everything
]  # fmt: skip


def in_turns(frontend: Frontend, cell: Cell, case: str) -> bool:
    """Whether ``make test`` leaves a case out: ``some`` cells have both masks, others one each."""
    other = RECURRENT.index(cell) % 2 == (case == "recurrent_mask")
    return frontend.variant or (other and cell not in some(frontend))


@ask(
    *("recurrent_mask", "recurrent_mask per gate"),
    cells=lambda frontend: tuple(RECURRENT),
    has=lambda _: ("recurrent_mask",),
    more=in_turns,
)
@pytest.mark.sample(every=3)
def test_recurrent_masks(frontend: Frontend, cell: Cell, case: str) -> None:
    words = ("mask", "resets", "bidirectional", "return_states")
    has = [word for word in words if word not in frontend.lacks]
    check(frontend, draw(cell, STANDARD, (case, *has), dtype(frontend)))


GAPS = "mask lengths resets reset_state repeat recurrent_mask static return_states".split()


@pytest.mark.parametrize("frontend", FRONTENDS, ids=str)
def test_gaps_are_refused(frontend: Frontend) -> None:
    """A frontend refuses each feature that it lacks by its name; each gap has a reason."""
    assert all(frontend.lacks.values())
    for gap in frontend.lacks.keys() & set(GAPS):
        cell = frontend.cells[-1] if frontend.cells else cells.LSTM
        problem = draw(cell, STANDARD, (gap,))
        if gap == "static":
            problem = problem.but({"static": np.ones((4, 6))})
        with pytest.raises(
            (TypeError, ValueError), match="masked_output" if gap == "repeat" else gap
        ):
            frontend.solve(problem)


# -- cells, sizes, dtypes --------------------------------------------------------------------------
def every(frontend: Frontend) -> tuple[Cell, ...]:
    return tuple(EVERY) if frontend.cells is None else ()


def shown_by_others(frontend: Frontend, cell: Cell, _: str) -> bool:
    """Whether other frontends suffice: layers run each cell, ``alike`` ones a few cells."""
    return frontend.variant or (frontend.alike and cell not in (*some(frontend), Odd))


@ask("", cells=every, more=shown_by_others)
@pytest.mark.sample(every=4)
def test_every_cell(frontend: Frontend, cell: Cell, case: str) -> None:
    """One call with every feature that the frontend has."""
    has = [word for word in FULL if word not in frontend.lacks]
    check(frontend, draw(cell, STANDARD, tuple(has), dtype(frontend)))


def every_fused(frontend: Frontend) -> tuple[Cell, ...]:
    """The cells of a fused frontend: step by step, each operation rounds, and errors are larger. A
    gradient of one number may cancel, and has no bound in 16 bits.
    """
    return tuple(cell for cell in every(frontend) if frontend.fused and cell != Rows)


def seldom(frontend: Frontend, cell: Cell, dtype: str) -> bool:
    """Whether ``torch.RNN`` suffices: it runs each cell in both dtypes, others ``some`` cells."""
    return frontend.name != "torch.RNN" and cell not in some(frontend)


@ask("bfloat16", "float16", cells=every_fused, has=lambda _: ("16 bits",), more=seldom)
@pytest.mark.sample(32)
def test_16_bits(frontend: Frontend, cell: Cell, case: str) -> None:
    """One call with every feature that the frontend has."""
    has = [word for word in FULL if word not in frontend.lacks]
    # Norms of few units amplify rounding errors.
    check(frontend, draw(cell, (5, 4, 3, 22), tuple(has), case))


SIZES = {
    "one unit": (5, 3, 6, 1),
    "a single step": (1, 4, 6, 7),
    "one row": (9, 1, 6, 33),
    "many units": (4, 5, 6, 100),
    "one of all": (1, 1, 1, 1),
    "several blocks": (7, 19, 3, 33),
    "no rows": (6, 0, 3, 7),
    "no steps": (0, 3, 3, 7),
}


def two(frontend: Frontend) -> tuple[Cell, ...]:
    return frontend.cells[:2] if frontend.cells else (cells.LSTM, cells.GRU)


def needs_kernels(frontend: Frontend, cell: Cell, size: str) -> bool:
    """Whether only the longer suite runs a case, such as one that needs kernels of its own."""
    own = cell not in BUILT_IN or frontend.cells is not None
    return frontend.variant or frontend.alike or (own and SIZES[size][3] > 7)


@ask(*SIZES, cells=two, has=lambda size: (size,), more=needs_kernels)
@pytest.mark.sample(every=3)
def test_sizes(frontend: Frontend, cell: Cell, case: str) -> None:
    """One cell in float32, the other in float64."""
    words = ("state", "lengths", "return_states")
    has = tuple(word for word in words if word not in frontend.lacks)
    exact = cell is two(frontend)[-1] and "float64" not in frontend.lacks
    check(frontend, draw(cell, SIZES[case], has, "float64" if exact else "float32"))


def two_fused(frontend: Frontend) -> tuple[Cell, ...]:
    return two(frontend) if frontend.fused else ()


@ask(
    *SIZES,
    cells=two_fused,
    has=lambda size: (size, "16 bits"),
    # Sizes at which widening loads end within a vector, or behind one.
    more=lambda *case: needs_kernels(*case) or SIZES[case[2]][3] not in (7, 33),
)
@pytest.mark.sample(every=3)
def test_sizes_in_16_bits(frontend: Frontend, cell: Cell, case: str) -> None:
    """One cell in bfloat16, the other in float16."""
    has = tuple(word for word in ("state", "lengths") if word not in frontend.lacks)
    first = cell is two(frontend)[0]
    check(frontend, draw(cell, SIZES[case], has, "bfloat16" if first else "float16"))


@ask("", cells=two)
def test_rows_without_a_step(frontend: Frontend, cell: Cell, case: str) -> None:
    """The states are returned unchanged, and all gradients but theirs are zero."""
    problem = draw(cell, STANDARD, ("state",), dtype(frontend))
    rows, none = STANDARD[1], np.zeros(STANDARD[:2], bool)
    given = {"mask": none} if "mask" not in frontend.lacks else {"lengths": np.zeros(rows, int)}
    x = np.full_like(problem.arrays["x"], np.nan)
    solution = check(frontend, problem.but({"x": x, **given}))
    for name, value in solution.items():
        state = problem.arrays.get(name.replace("final", "state").removeprefix("d "))
        if "state" in name:
            assert np.array_equal(value, problem.arrays[name.replace("state", "final")])
        elif "final" in name:
            assert np.array_equal(value, state)
        else:
            assert not value.any(), name


# -- several calls ---------------------------------------------------------------------------------
def part(problem: Problem, begin: int, end: int) -> Problem:
    """The steps of a problem from ``begin`` to ``end``."""
    cut = {
        n: a[begin:end]
        for n, a in problem.arrays.items()
        if n in ("x", "mask", "resets", "d output")
    }
    if "lengths" in problem.arrays:
        cut["lengths"] = np.clip(problem.arrays["lengths"] - begin, 0, end - begin)
    return problem.but(cut)


@ask("", cells=some, has=lambda _: ("state",))
def test_chunks_are_one_call(frontend: Frontend, cell: Cell, case: str) -> None:
    """Two calls process a long sequence: states are passed on, and their gradients back."""
    words = ("state", "mask", "lengths", "resets")
    has = [word for word in words if word not in frontend.lacks]
    problem = draw(cell, (7, 3, 3, 6), tuple(has), dtype(frontend))
    first, second = part(problem, 0, 4), part(problem, 4, 7)
    handed = frontend.solve(first)
    names = cell.state_names
    second = second.but({f"state {name}": handed[f"final {name}"] for name in names})
    behind = frontend.solve(second)
    solution = {f"final {name}": behind[f"final {name}"] for name in names}
    outputs = [handed, behind]
    if "gradients" not in frontend.lacks:
        arriving = {f"d final {name}": behind[f"d state {name}"] for name in names}
        ahead = frontend.solve(first.but(arriving))
        outputs = [ahead, behind]
        for name, value in ahead.items():
            if LEARNED.search(name) or name == "d static":
                solution[name] = value + behind[name]
            elif name.startswith("d state"):
                solution[name] = value
        solution["d x"] = np.concatenate([ahead["d x"], behind["d x"]])
    solution["output"] = np.concatenate([one["output"] for one in outputs])
    assert_solved(solution, problem, "gradients" not in frontend.lacks)


EPISODES: dict[str, tuple[str, ...]] = {
    "reverse": ("reverse",),
    "reverse with holes": ("reverse", "mask"),
    "both directions": ("bidirectional",),
    "both directions with lengths": ("bidirectional", "lengths"),
    "both directions with holes": ("bidirectional", "mask"),
    "layers of both directions": ("bidirectional", "layers", "mask"),
}


def needs_no_variant(frontend: Frontend, cell: Cell, case: str) -> bool:
    """Whether only the longer suite runs a case: other ways through a layer run holes alone, those
    step by step none.
    """
    several = "holes" in case and frontend.fused
    return (frontend.variant or frontend.alike) and not several


@ask(
    *EPISODES,
    cells=some,
    has=lambda case: ("resets", "state", *EPISODES[case]),
    more=needs_no_variant,
)
def test_resets_are_episodes_apart(frontend: Frontend, cell: Cell, case: str) -> None:
    """A call with two episodes is two calls, in each direction: an episode that does not begin with
    the state of the call begins with what resets restore.
    """
    words = ("resets", "state", *EPISODES[case], *{"reset_state"}.difference(frontend.lacks))
    problem = draw(cell, (7, 4, 3, 6), words, dtype(frontend))
    cut, starts = 3, np.zeros((7, 4), bool)
    starts[cut], starts[0] = True, all(problem.reverse)  # in reverse, nothing runs before step 0
    given: dict[str, Any] = {"resets": starts}
    if "mask" in problem.arrays:
        mask = np.ones((7, 4), bool)
        mask[2:4, 1] = mask[0, 2] = mask[2, 2] = mask[6, 2] = mask[3:6, 3] = False
        starts[4, 1] = starts[6, 3] = True  # behind the hole; resets under a mask do nothing
        x = np.where(mask[..., None], np.nan_to_num(problem["x"]), np.nan)
        given |= {"mask": mask, "x": x}
    if "lengths" in problem.arrays:
        lengths = np.array([7, 4, 5, 6])
        there = (np.arange(7)[:, None] < lengths)[..., None]
        given |= {"lengths": lengths, "x": np.where(there, np.nan_to_num(problem["x"]), np.nan)}
    problem = problem.but(given)
    check(frontend, problem)

    ways = np.array(problem.reverse * problem.layers)[:, None, None]
    declared = {s.name: s.initial for s in cell.states}

    def alone(begin: int, end: int, last: Array) -> Arrays:
        """The solution of one episode; ``last`` says which directions end with it."""
        one = part(problem, begin, end)
        for name in cell.state_names:
            state, d_final = problem[f"state {name}"], problem[f"d final {name}"]
            restored = problem.arrays.get(f"reset_state {name}", declared[name])
            states = np.where(last, restored, state).astype(state.dtype)
            arriving = np.where(last, d_final, 0).astype(state.dtype)
            one = one.but({f"state {name}": states, f"d final {name}": arriving})
        whole = {n: a for n, a in one.arrays.items() if not n.startswith("reset")}
        return frontend.solve(replace(one, arrays=whole))

    first, second = alone(0, cut, ways), alone(cut, 7, ~ways)
    solution = {}
    for name, value in first.items():
        if name in ("output", "d x"):
            solution[name] = np.concatenate([value, second[name]])
        elif LEARNED.search(name) or name == "d static":
            solution[name] = value + second[name]
        elif name.startswith("final"):
            solution[name] = np.where(ways, value, second[name])
        elif name.startswith("d state"):
            solution[name] = np.where(ways, second[name], value)
            restored = name.replace("state", "reset_state")
            if restored in problem.right:
                solution[restored] = np.where(ways, value, second[name])
    assert_solved(solution, problem, "gradients" not in frontend.lacks)


def stepped(frontend: Frontend) -> tuple[Cell, ...]:
    found = frontend.cells or tuple(EVERY)
    without = "static steps" in frontend.lacks
    return tuple(c for c in found if frontend.steps and not (c.static and without))


def rarely(frontend: Frontend, cell: Cell, dtype: str) -> bool:
    """Whether another case suffices: each cell runs once, ``some`` cells on every frontend."""
    once = frontend.name == "numpy.RNN" and dtype == "float64"
    return not once and cell not in (*some(frontend), Odd)


@ask("float64", "float32", cells=stepped, has=lambda dtype: (dtype,), more=rarely)
@pytest.mark.sample(every=14)
def test_steps_are_one_call(frontend: Frontend, cell: Cell, case: str) -> None:
    """Steps run on weights packed in advance, if the frontend can pack them."""
    check_steps(frontend, cell, case, "state", "layers")


def resettable(frontend: Frontend) -> tuple[Cell, ...]:
    return () if "stepped resets" in frontend.lacks else stepped(frontend)


@ask("float64", "float32", cells=resettable, has=lambda dtype: (dtype,), more=rarely)
@pytest.mark.sample(every=6)
def test_steps_with_resets_are_one_call(frontend: Frontend, cell: Cell, case: str) -> None:
    check_steps(frontend, cell, case, "state", "layers", "resets", "reset_state")


def check_steps(frontend: Frontend, cell: Cell, dtype: str, *words: str) -> None:
    assert frontend.steps is not None
    has = tuple(word for word in words if word not in frontend.lacks)
    # Norms of few units amplify rounding errors.
    problem = draw(cell, STANDARD if dtype == "float64" else (5, 4, 3, 22), has, dtype)
    before = [state.copy() for state in problem.group("state")]
    with mock.patch.object(Stream, "step", autospec=True, side_effect=Stream.step) as packed:
        assert_solved(frontend.steps(problem), problem, gradients=False)
    assert packed.call_count == (0 if "prepare" in frontend.lacks else problem.shape[0])
    assert all(map(np.array_equal, before, problem.group("state")))


# -- threads ---------------------------------------------------------------------------------------
@ask("", cells=lambda frontend: some(frontend)[-1:])
def test_threads(frontend: Frontend, cell: Cell, case: str, runs: list[Any]) -> None:
    """``anycell.threads`` overrides all other settings, in both passes, and leaves no trace."""
    if not frontend.fused:
        pytest.skip("no kernel runs it")
    problem = draw(cell, STANDARD, dtype=dtype(frontend))

    def taken() -> set[int]:
        runs.clear()
        frontend.solve(problem)
        return {run.options.threads for run in runs}

    with anycell.threads(5):
        with anycell.threads(7):
            assert taken() == {7}
        assert taken() == {5}
    assert len(taken()) == 1 and not taken() & {5, 7}


# -- second derivatives ----------------------------------------------------------------------------
@ask("", cells=some, has=lambda _: ("gradients", "second derivatives", "float64"))
@pytest.mark.sample(every=2)
def test_second_derivatives(frontend: Frontend, cell: Cell, case: str) -> None:
    """All second derivatives agree with finite differences of the derived backward pass."""
    words = ("state", "mask", "resets", "recurrent_mask", "return_states")
    has = [word for word in words if word not in frontend.lacks]
    problem = draw(cell, (3, 3, 2, STANDARD[3]), tuple(has))  # by kernels of other tests
    rng, step = np.random.default_rng(0), 1e-5
    names = [name.removeprefix("d ") for name in problem.right if name[:2] == "d "]

    def directions() -> Arrays:
        return {name: rng.standard_normal(problem.arrays[name].shape) for name in names}

    along, across = directions(), directions()

    def slope(size: float) -> float:
        """The gradient along one direction, after a step along the other."""
        moved = {name: problem.arrays[name] + size * across[name] for name in names}
        gradients = by_reference(problem.but(moved))
        return sum(float((gradients[f"d {n}"] * along[n]).sum()) for n in names)

    second = frontend.solve(problem, along)
    assert second.keys() == {f"d {name}" for name in names}
    found = sum(float((second[f"d {name}"] * across[name]).sum()) for name in names)
    assert is_slope(found, (slope(step) - slope(-step)) / (2 * step), "layer")
