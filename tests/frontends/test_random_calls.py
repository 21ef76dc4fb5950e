"""Random calls of built-in and random cells, in every dtype, against the reference in float64.

How many, and from which seed: ``--random-calls N --seed S``. The calls come in groups that share a
cell and a dtype, and so a compiled kernel.

In 16 bits the reference rounds what an engine rounds from one step to the next: the hidden state;
and what a matmul inside the step multiplies, where the instruction set multiplies bfloat16. An
engine's backward pass works on rounded values. So where a gradient is off by more than the
tolerances allow, as of 16 bits and of a ``tanh`` that is nearly 1, its limit comes from the
reference whose saved values are off by a rounding each, while its branches are those of the forward
pass: an engine must take the same branches.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import oracle
import pytest
from problems import Arrays, Problem, Unsolvable, by_cpu, by_reference, kind_of, random_problem
from random_cells import random_cell, source
from tolerances import RANDOM_CALL, error, limit

import anycell.cells
from anycell.engines import reference
from anycell.engines.cpu import isa
from anycell.lang.cell import RECURRENT
from anycell.numpy.check import numpy_dtype
from tests.conformance.on_numpy import FRONTENDS
from tools import random_layers

HALVES = ("bfloat16", "float16")


class RoundedRecurrence(reference.Recurrence):
    """The reference with a hidden state of 16 bits, in wider arithmetic."""

    hidden_dtype: np.dtype[Any]
    noise: np.random.Generator | None = None  # moves what the backward pass finds saved
    unit_roundoff = 0.0

    def _step(self, t: int, states: Any) -> Any:
        values = super()._step(t, states)
        new = self.cell.next[0]
        values[new] = np.asarray(values[new]).astype(self.hidden_dtype).astype(np.float64)
        return values

    def _operand(self, l: Any, output: str, t: int, values: Any) -> Any:
        operand = super()._operand(l, output, t, values)
        target = isa.current()
        if self.hidden_dtype.name != "bfloat16" or not (target.tiles or target.pairs):
            return operand
        return np.asarray(operand).astype(self.hidden_dtype).astype(np.float64)

    def _evaluate(self, order: Any, t: int, values: Any) -> None:
        given, inner = _arrays(values), frozenset(self.order)
        super()._evaluate(order, t, values)
        if self.noise is None or order is self.order:
            return
        # The backward pass again. Conditions stay. Any other value of the forward pass may be one
        # that was saved, or computed from such: it follows what it is computed from, and moves.
        moved = {node: value for node, value in _arrays(values).items() if value.dtype == bool}
        moved |= {node: value for node, value in given.items() if node not in inner}
        for node in self.order:
            if node not in moved:
                known = given[node] if node.op == "state" else self._value(node, t, moved)
                moved[node] = self._moved(known)
        super()._evaluate(order, t, moved)
        # Gradients of gates are of 16 bits where the next matmul takes them.
        for node, value in _arrays(moved).items():
            derived = node not in inner and node not in given
            values[node] = self._moved(value) if derived and value.dtype != bool else value

    def _moved(self, value: Any) -> Any:
        """Each number off by up to one rounding; what is one number for all units is exact."""
        assert self.noise is not None
        if not value.shape:
            return value
        return value * (1.0 + self.unit_roundoff * self.noise.uniform(-1.0, 1.0, value.shape))


def _arrays(values: Any) -> Any:
    """Without lists, whose arrays are nodes too: of all gates, of all outputs of a matmul."""
    return {node: value for node, value in values.items() if not isinstance(value, list)}


def rounded(
    problem: Problem, dtype: str, patch: pytest.MonkeyPatch, noise: np.random.Generator | None
) -> Arrays:
    """The solution of a problem of that dtype, its saved values moved by ``noise``."""
    # Bits of the significand; of the largest error of a rounding.
    unit_roundoff = 2.0 ** -{"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}[dtype]
    hidden_dtype = numpy_dtype(dtype if dtype in HALVES else "float64")
    with patch.context() as change:
        change.setattr(RoundedRecurrence, "hidden_dtype", hidden_dtype, raising=False)
        change.setattr(RoundedRecurrence, "unit_roundoff", unit_roundoff)
        change.setattr(RoundedRecurrence, "noise", noise)
        change.setattr(oracle, "Recurrence", RoundedRecurrence)
        return by_reference(problem)


def limits_of(
    problem: Problem, dtype: str, right: Arrays, patch: pytest.MonkeyPatch
) -> dict[str, float]:
    """How far each array may be from what is right where its saved values are rounded."""
    limits, noise = dict.fromkeys(right, 0.0), np.random.default_rng(0)
    for _ in range(4):
        for name, value in rounded(problem, dtype, patch, noise).items():
            # Never infinite: whatever the limit, what is not finite is wrong.
            wide = min(RANDOM_CALL * error(value, right[name], ()), 1e6)
            limits[name] = max(limits[name], wide)
    assert any(limits.values()), "no array moved: the reference that rounds was not called"
    return limits


def situation(rng: np.random.Generator, recurrent: bool) -> dict[str, Any]:
    options: dict[str, Any] = {name: True for name in ("masked", "resets") if rng.random() < 0.3}
    options["reverse"] = bool(rng.random() < 0.3)
    options["training"] = bool(rng.random() < 0.5)
    options["masked_output"] = "repeat" if rng.random() < 0.3 else "zero"
    options["dropped"] = "all" if recurrent and rng.random() < 0.2 else None
    return options | {"seed": int(rng.integers(1 << 63))}


def underflows(dtype: str, value: Any, right: Any) -> bool:
    """Whether float16 is off by no more than its smallest number, in the mean."""
    off = np.asarray(value, np.float64) - right
    return dtype == "float16" and bool(np.linalg.norm(off) <= 2.0**-24 * np.sqrt(off.size))


def batch_major(name: str, array: Any) -> Any:
    """The same numbers, in the order of a batch whose sequences lie one behind the other."""
    if name not in ("x", "d output"):
        return array
    return np.ascontiguousarray(array.swapaxes(0, 1)).swapaxes(0, 1)


def test_random_calls(calls_seed: int, calls_of_cell: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng([calls_seed, 5])
    hidden = int(rng.choice([1, 7, 33, 100]))
    names = anycell.cells.__all__
    if built_in := rng.random() < 0.4:
        cell = getattr(anycell.cells, names[rng.integers(len(names))])
        hidden = max(hidden, 7)  # the norm of a single unit is 0, and its derivative rounding
    else:
        cell = random_cell(calls_seed, hidden)
    dtype = str(rng.choice(["float32", "float64", *HALVES]))
    recurrent = any(l.name == RECURRENT for l in cell.linears)
    wrong: list[str] = []
    for call in range(calls_of_cell):
        steps, rows = int(rng.choice([0, 1, 2, 5, 9])), int(rng.choice([0, 1, 3, 8]))
        options = situation(rng, recurrent)
        threads, checkpoint = int(rng.integers(1, 4)), rng.choice(np.array([None, 2, "sqrt"], "O"))
        shape = (steps, rows, hidden)
        try:
            if dtype in HALVES:
                problem = random_problem(cell, shape, rng, **options).astype(dtype)
            else:
                problem = random_problem(cell, shape, rng, dtype, nearby=1, **options)
        except Unsolvable:
            continue
        right = problem.right if dtype not in HALVES else rounded(problem, dtype, monkeypatch, None)
        if not all(np.isfinite(value).all() for value in right.values()):
            continue  # a square root of less than 0, say: no answer is right
        given = problem.map(batch_major) if rng.random() < 0.3 else problem
        called = f"call {call}, {shape}, {threads} threads, checkpoint {checkpoint}, {options}"
        errors = {
            name: error(value, right[name], ())
            for name, value in by_cpu(given, threads, checkpoint=checkpoint).items()
            if not underflows(dtype, value, right[name])
        }
        far = {n: off for n, off in errors.items() if off > limit(dtype, kind_of(n))}
        limits = limits_of(problem, dtype, right, monkeypatch) if far else {}
        wrong += [
            f"{name}: error {off:.2e}, limit {limits[name]:.1e}, {called}"
            for name, off in far.items()
            if off > limits[name]
        ]
    told = cell.name if built_in else source(cell)
    assert not wrong, "\n".join([*wrong, f"{dtype}, {told}"])


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_limits_are_about_a_rounding(
    dtype: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few calls need them. They follow from values that all move, those of matmuls too."""
    problem = random_problem(anycell.cells.LSTM, (5, 3, 7), rng).astype(dtype)
    right = rounded(problem, dtype, monkeypatch, None)
    limits = limits_of(problem, dtype, right, monkeypatch)
    unit = 2.0**-53 if dtype == "float64" else 2.0**-8
    moved = {name for name, most in limits.items() if most}
    assert moved == {name for name in right if kind_of(name) == "gradient"}
    assert all(unit < limits[name] < 100 * RANDOM_CALL * unit for name in moved), limits


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(0, 40, 10))
def test_random_layers(seed: int) -> None:
    """The calls that ``tools/random_layers.py`` makes, one of each cell."""
    assert random_layers.check(FRONTENDS, seed)[1] == ""


def test_wrong_layers_are_reported() -> None:
    def wrong(problem: Problem) -> Arrays:
        return {name: array + 1.0 for name, array in problem.right.items()}

    frontend = replace(FRONTENDS[0], solve=wrong)
    told = [random_layers.check([frontend], seed)[1] for seed in range(3)]
    assert all(text.startswith(f"seed {n}, numpy.RNN, ") for n, text in enumerate(told))
