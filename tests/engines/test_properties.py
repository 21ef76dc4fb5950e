"""Random cells: the fused engine against the reference in float64 against finite differences.

How many, and from which seed: ``--random-cells N --seed S``.
"""

import ctypes
from typing import Any

import numpy as np
import oracle
import pytest
from problems import (
    Problem,
    Unsolvable,
    assert_right,
    by_cpu,
    by_recurrence,
    by_reference,
    random_problem,
)
from random_cells import random_cell, source
from tolerances import NO_WORSE_THAN, ONE_ULP, error, is_slope

from anycell.engines import cpu
from anycell.engines.cpu import isa
from anycell.lang.cell import RECURRENT
from anycell.lang.expr import topological
from anycell.lang.ops import TABLE, is_reduction
from anycell.layer.recipe import Recipe


def situation(rng: np.random.Generator) -> dict[str, Any]:
    options: dict[str, Any] = {name: True for name in ("masked", "resets") if rng.random() < 0.4}
    options["reverse"] = bool(rng.random() < 0.3)
    options["training"] = bool(rng.random() < 0.6)
    options["masked_output"] = "repeat" if rng.random() < 0.3 else "zero"
    return options | {"seed": int(rng.integers(1 << 63))}


def loss(problem: Problem) -> float:
    """Outputs and final states, weighted by the gradients that arrive there."""
    outputs, final = oracle.run(problem.cell, **problem.arguments())
    arriving = problem["d output"]
    if "mask" in problem.arrays and not problem.repeat:
        arriving = np.where(problem["mask"][..., None], arriving, 0.0)
    weighted = zip(final, problem.group("d final"), strict=True)
    return float((outputs * arriving).sum()) + sum(float((s * d).sum()) for s, d in weighted)


def slope(problem: Problem, step: float, rng: np.random.Generator) -> tuple[float, float]:
    """The derivative of the loss in a random direction: by gradients, by differences."""
    leaves = {n: a for n, a in problem.arrays.items() if f"d {n}" in problem.right}
    direction = {name: rng.standard_normal(a.shape) for name, a in leaves.items()}
    by_gradients = sum(float((problem.right[f"d {n}"] * d).sum()) for n, d in direction.items())
    ahead, behind = (
        loss(problem.but({n: a + sign * step * direction[n] for n, a in leaves.items()}))
        for sign in (1, -1)
    )
    return by_gradients, (ahead - behind) / (2 * step)


@pytest.mark.grid
def test_random_cell(cell_seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(cell_seed)
    steps, rows, hidden = (int(rng.choice(n)) for n in ([1, 2, 5], [1, 3, 7], [6, 9, 18, 33]))
    cell = random_cell(cell_seed, hidden)
    options = situation(rng)
    if any(l.name == RECURRENT for l in cell.linears):
        options["dropped"] = rng.choice(np.array([None, None, "all", "each"], object))
    ran: list[Any] = []
    run = Recipe.run
    monkeypatch.setattr(Recipe, "run", lambda *call: ran.append(call) or run(*call))
    for dtype in ("float64", "float32"):
        try:
            problem = random_problem(cell, (steps, rows, hidden), rng, dtype, nearby=3, **options)
        except Unsolvable:
            assert dtype == "float32"
            continue
        with isa.force(str(rng.choice(isa.available()))) as target:
            told = f"{options}, {target.name}, {source(cell)}"
            ran.clear()
            solution = by_cpu(problem)
            assert len(ran) == 2, "forward and backward, on the CPU engine"
            assert_right(solution, problem, told)
            results = by_recurrence(problem)
            assert len(ran) == 3
            assert_right(results, problem, told)
        if dtype == "float64":
            # A step may cross the edge of a where(): then another direction, and a smaller one.
            tries = [slope(problem, step, rng) for step in (1e-5, 1e-6, 1e-7)]
            assert any(is_slope(*pair, "random cell") for pair in tries), f"{tries}, {told}"


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.sample(2)
def test_random_cells_with_values_of_size_1(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any leaf may have size 1; against the reference engine, and that against differences. Scratch
    memory is full of NaN: vectors of one unit lie next to numbers that nothing has written.
    """
    take = cpu.scratch.take

    def unwritten(count: int) -> Any:
        block = take(count)
        numbers = (ctypes.c_double * (block.size // 8)).from_address(block.address)
        np.ctypeslib.as_array(numbers)[:] = np.nan
        return block

    monkeypatch.setattr(cpu.scratch, "take", unwritten)
    rng = np.random.default_rng(seed)
    cell, options = random_cell(seed, 6, ones=True), {**situation(rng), "training": True}
    try:
        problem = random_problem(cell, (2, 3, 6), rng, nearby=3, **options)
    except Unsolvable:
        return
    told = f"{options}, {source(cell)}"
    assert_right(by_cpu(problem), problem, told)
    tries = [slope(problem, step, rng) for step in (1e-5, 1e-6, 1e-7)]
    assert any(is_slope(*pair, "random cell") for pair in tries), f"{tries}, {told}"


SLOW = pytest.mark.slow


@pytest.mark.parametrize("draw", [pytest.param(n, marks=SLOW) for n in (90, 221, 285)])
def test_lucky_roundings_do_not_make_a_problem(draw: int) -> None:
    """Cell 880080 feels each rounding of its forward pass some 60 times over in its gradients.

    Of these draws the reference engine happens to find gradients four times better than the limit;
    our kernels, whose roundings differ, as any others would, find them beyond it.
    """
    rng = np.random.default_rng(draw)
    options = situation(rng)
    try:
        problem = random_problem(
            random_cell(880080, 6), (11, 5, 6), rng, "float32", nearby=3, **options
        )
    except Unsolvable:
        return
    assert_right(by_cpu(problem), problem)


@pytest.mark.parametrize("number", [880080, 880171, 880221, 880245, 880261])
@pytest.mark.sample(1)
def test_kernels_round_as_well_as_the_reference(number: int) -> None:
    """Whatever the problem: float32 gradients of cells that feel each rounding.

    One draw of them says nothing, for the one or other engine is lucky; so many together do.
    """
    cell, ratios = random_cell(number, 6), []
    for draw in range(8):
        rng = np.random.default_rng(draw)
        problem = random_problem(cell, (11, 5, 6), rng, "float64").astype("float32")
        ours, theirs = (
            {name: error(value, problem.right[name], ()) for name, value in solution.items()}
            for solution in (by_cpu(problem), by_reference(problem, "float32"))
        )
        ratios += [
            max(wrong, ONE_ULP) / max(theirs[name], ONE_ULP)
            for name, wrong in ours.items()
            if name.startswith("d ")
        ]
    assert np.exp(np.mean(np.log(ratios))) <= NO_WORSE_THAN


def test_random_cells_are_varied(seed: int) -> None:
    """A hundred of them use every row of the op table, in cells of every shape."""
    cells = [random_cell(k, 18) for k in range(seed, seed + 100)]
    nodes = [node for cell in cells for node in topological(cell.next)]
    assert {node.op for node in nodes} >= set(TABLE) - {"stop_gradient"}
    assert {node.attrs for node in nodes if is_reduction(node)} == {(1,), (2,), (3,)}
    assert {len(cell.gates) for cell in cells} == {1, 2, 3, 4}
    assert {len(cell.states) for cell in cells} == {1, 2, 3}
    assert {len(cell.params) for cell in cells} == {0, 1, 2, 3}
    assert {cell.static for cell in cells} == {None, "e"}
    more = [[l for l in cell.linears if l.name != RECURRENT] for cell in cells]
    assert {len(linears) for linears in more} >= {0, 1, 2}
    assert {l.heads for linears in more for l in linears} == {1, 2, 3}
    assert any(cell.fused for cell in cells)
    assert any(set(cell.gates) - cell.fused for cell in cells)


def test_random_cells_are_found_again() -> None:
    assert random_cell(7, 18).key == random_cell(7, 18).key != random_cell(8, 18).key
