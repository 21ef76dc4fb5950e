"""Random problems for the recurrence, and the ways to solve them, forward and backward."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from tolerances import LIMITS, assert_close, error

import anycell
from anycell import Cell, layer
from anycell.engines import cpu, reference
from anycell.lang.cell import State
from anycell.numpy.host import NumpyHost, host_of, numpy_dtype
from anycell.plan import plan

Array = npt.NDArray[Any]
Arrays = dict[str, Array]

# (T, B, H): H of 1, 7, 33 and 100, one step, one row, no rows.
AWKWARD = [(5, 3, 1), (1, 4, 7), (9, 1, 33), (4, 5, 100), (6, 0, 7), (1, 1, 1), (7, 19, 33)]

# Where the rows of the batch are, by the first word of an array's name.
ROWS = {"gates_x": 1, "mask": 1, "resets": 1, "d_outputs": 1, "outputs": 1}
ROWS |= {"state": 0, "static": 0, "reset_state": 0, "d_final": 0, "final": 0}
ROWS |= {"recurrent_mask": 0}  # or 1, if there is one per gate


def forget_passes() -> None:
    """Layers on the CPU choose their form, and draft their passes, anew."""
    layer.form.form_of.cache_clear()
    layer.recipe.known.clear()


# States that the cells divide by.
NORMALISERS = {"n"}


def width(size: str, hidden: int) -> int:
    """What a size symbol of a cell stands for in a random problem."""
    return hidden if size == "H" else hidden - hidden // 3


@dataclass(frozen=True)
class Problem:
    """A recurrence and the gradients that arrive at its results.

    ``arrays`` go by their place, as in "gates_x", "weights weight_hh", "state h", "params p_i",
    "static", "mask", "reset_state c", "d_outputs", "d_final h"; ``options`` are those of
    ``recurrence``.
    """

    cell: Cell
    arrays: Arrays
    options: dict[str, Any]

    @cached_property
    def right(self) -> Arrays:
        """Its solution by the reference engine in float64."""
        return by_reference(self)

    def __getitem__(self, name: str) -> Array | None:
        return self.arrays.get(name)

    def group(self, argument: str) -> Arrays:
        """The arrays of an argument that takes many, by their own name."""
        words = (name.partition(" ") for name in self.arrays)
        return {own: self[f"{first} {own}"] for first, _, own in words if first == argument}

    def but(self, arrays: Arrays | None = None, **options: Any) -> Problem:
        """The problem with other arrays and options."""
        return replace(
            self, arrays={**self.arrays, **(arrays or {})}, options={**self.options, **options}
        )

    def map(self, change: Callable[[str, Array], Array]) -> Problem:
        """``change(name, array)`` of every array."""
        return self.but({name: change(name, array) for name, array in self.arrays.items()})

    def astype(self, dtype: npt.DTypeLike) -> Problem:
        """The same numbers in another dtype."""
        kind = numpy_dtype(dtype) if isinstance(dtype, str) else dtype
        return self.map(lambda _, a: a if a.dtype == bool else a.astype(kind))

    def rows(self, part: slice) -> Problem:
        """A part of the batch."""
        return self.map(lambda name, a: np.ascontiguousarray(a[_rows(name, a, part)]))

    def arguments(self) -> dict[str, Any]:
        """What ``reference.run`` takes."""
        reset_state = list(self.group("reset_state").values())
        return {
            "gates_x": self["gates_x"],
            "weights": self.group("weights"),
            "state": list(self.group("state").values()) or None,
            "params": self.group("params"),
            "static": self["static"],
            "mask": self["mask"],
            "resets": self["resets"],
            "reset_state": reset_state or None,
            "recurrent_mask": self["recurrent_mask"],
            **self.options,
        }


def _rows(name: str, array: Array, part: slice) -> tuple[slice, ...]:
    axis = ROWS.get(name.split()[0])
    if name == "recurrent_mask":
        axis = array.ndim - 2
    if axis is None or (name.startswith("reset_state") and array.ndim == 1):
        return ()
    return (slice(None),) * axis + (part,)


class Unsolvable(Exception):
    """No problem was found that the reference engine solves well within the tolerances."""


MARGIN = 0.25  # the part of a limit that the reference engine may use up


def random_problem(
    cell: Cell,
    shape: tuple[int, int, int],
    rng: np.random.Generator,
    dtype: str = "float64",
    *,
    nearby: int = 0,
    masked: bool = False,
    resets: bool = False,
    dropped: str | None = None,
    **options: Any,
) -> Problem:
    """A problem that can be solved in its dtype.

    That is, one that the reference engine solves well within the tolerances, in float32 too:
    when a slice of one number cancels to almost nothing, no engine is to blame.

    Args:
        shape: (T, B, H).
        nearby: the reference engine must solve so many problems next to it as well. Random cells
            need that: where roundings happen to cancel, those of another engine do not.
        masked: with rows of random lengths, 0 among them, and holes; NaN lies beneath.
        resets: with random resets, to values of every row or the same for all.
        dropped: with a recurrent mask, for "all" gates or for "each".
        options: of ``recurrence``.
    """
    for _ in range(30):
        problem = _random_problem(cell, shape, rng, masked, resets, dropped, options).astype(dtype)
        if dtype == "float64":
            return problem
        if solvable(problem, dtype, nearby):
            return problem
    raise Unsolvable(f"{cell} of shape {shape} in {dtype}")


def solvable(problem: Problem, dtype: str, nearby: int) -> bool:
    """Whether the dtype suffices for a problem, and for so many of almost the same numbers."""
    rng = np.random.default_rng(0)
    ulp = np.finfo(dtype).eps

    def nudged(_: str, a: Array) -> Array:
        """Every number moved by about its last bit; zeros stay."""
        return a if a.dtype == bool else a * (1 + ulp * rng.choice([-1, 1], a.shape)).astype(dtype)

    near = itertools.chain([problem], (problem.map(nudged) for _ in range(nearby)))
    return all(worst(by_reference(p, dtype), p.right, dtype) <= MARGIN for p in near)


def _random_problem(
    cell: Cell,
    shape: tuple[int, int, int],
    rng: np.random.Generator,
    masked: bool,
    resets: bool,
    dropped: str | None,
    options: dict[str, Any],
) -> Problem:
    steps, rows, hidden = shape
    gates = len(cell.gates)

    def normal(*size: int) -> Array:
        return rng.standard_normal(size)

    def state(s: State, *lead: int) -> Array:
        drawn = normal(*lead, width(s.size, hidden))
        return 0.5 + abs(drawn) if s.name in NORMALISERS else drawn

    arrays = {"gates_x": normal(steps, rows, gates * hidden)}
    for l in cell.linears:
        shape = l.shape({s: width(s, hidden) for s in (l.in_size, l.out_size)})
        arrays[f"weights {l.weight}"] = normal(*shape) * 0.5 * shape[-1] ** -0.5
        if l.bias and (cell.bias or not l.recurrent):
            size = len(l.declared) * width(l.out_size, hidden)
            arrays[f"weights {l.bias_name}"] = 0.3 * normal(size)
    for s in cell.states:
        arrays[f"state {s.name}"] = state(s, rows)
        arrays[f"d_final {s.name}"] = normal(rows, width(s.size, hidden))
    for p in cell.params:
        arrays[f"params {p.name}"] = (p.initial or 0.0) + 0.3 * normal(hidden)
    if cell.static is not None:
        arrays["static"] = normal(rows, hidden)
    arrays["d_outputs"] = normal(steps, rows, width(cell.states[0].size, hidden))
    if masked:
        within = np.arange(steps)[:, None] < rng.integers(0, steps + 1, rows)
        arrays["mask"] = within & (rng.random((steps, rows)) < 0.8)
        arrays["gates_x"][~arrays["mask"]] = np.nan
        if options.get("masked_output") != "repeat":
            arrays["d_outputs"][~arrays["mask"]] = np.nan
    if resets:
        arrays["resets"] = rng.random((steps, rows)) < 0.3
        for i, s in enumerate(cell.states):
            arrays[f"reset_state {s.name}"] = state(s) if i else state(s, rows)
    if dropped:
        lead = (gates,) if dropped == "each" else ()
        factor = rng.random((*lead, rows, width(cell.states[0].size, hidden)))
        arrays["recurrent_mask"] = np.where(factor < 0.5, 0.0, 2.0 * factor)
    return Problem(cell, arrays, options)


# -- solutions -----------------------------------------------------------------------------------
# By name: "outputs", "final h", and for each array that has a gradient "d gates_x", "d state h".


def by_reference(problem: Problem, dtype: npt.DTypeLike = "float64") -> Arrays:
    """By the reference engine; in float64 it is what is right."""
    problem = problem.astype(dtype)
    cell, arguments = problem.cell, problem.arguments()
    outputs, final = reference.run(cell, **arguments)
    grads = reference.backward(
        cell,
        **arguments,
        d_outputs=problem["d_outputs"],
        d_final=list(problem.group("d_final").values()),
    )
    solution = _results(cell, outputs, final)
    solution |= _gradients(problem, "weights", grads.weights)
    solution |= _gradients(problem, "params", grads.params)
    solution |= _gradients(problem, "state", dict(zip(cell.state_names, grads.state, strict=True)))
    reset = dict(zip(cell.state_names, grads.reset_state, strict=True))
    solution |= _gradients(problem, "reset_state", reset)
    solution["d gates_x"] = grads.gates_x
    if grads.static is not None:
        solution["d static"] = grads.static
    return solution


def by_cpu(
    problem: Problem,
    threads: int = 1,
    projected: bool = False,
    backwards: int = 1,
    host: NumpyHost | None = None,
    precision: str = "highest",
    checkpoint: str | int | None = None,
) -> Arrays:
    """By the fused kernels of the CPU engine.

    Args:
        threads: at most so many.
        projected: through an input projection whose weight is the unit matrix.
        backwards: the backward pass runs so many times.
        host: of the arrays.
        precision: to which matmuls of float32 may be rounded.
        checkpoint: of the steps, as in ``layer.Options``.
    """
    cell, group, x = problem.cell, problem.group, problem.arrays["gates_x"]
    hidden = x.shape[2] // len(cell.gates)
    sizes = {s: width(s, hidden) for s in cell.sizes.values()}
    runs = layer.stepped(cell, problem["recurrent_mask"])
    chosen = cpu.rounded(plan(runs, hidden, x.dtype.name, "cpu", sizes), precision)
    arrays = to_layer(problem, projected)
    host = host or host_of(chosen.dtype)
    how = layer_options(problem, threads)._replace(checkpoint=checkpoint)
    outputs, finals, kept = layer.forward(host, chosen, arrays, how, keep=True)
    final = [value[0] for value in finals]
    d_final = [d[None] for d in group("d_final").values()]
    for _ in range(backwards):
        d = layer.backward(host, chosen, arrays, how, kept, problem["d_outputs"], d_final)
    return _results(cell, outputs, final) | from_layer(problem, d)


def to_layer(problem: Problem, projected: bool = False) -> dict[str, Any]:
    """The arrays of a problem, as ``anycell.layer`` names them."""
    x, group = problem.arrays["gates_x"], problem.group
    arrays = {"x": x, **group("weights"), **group("params")}
    arrays |= {n: problem[n] for n in ("static", "mask", "resets", "recurrent_mask")}
    for kind in ("state", "reset_state"):
        arrays |= {f"{kind} {name}": value[None] for name, value in group(kind).items()}
    if projected:
        arrays["weight_ih"] = np.eye(x.shape[2], dtype=x.dtype)
    return {name: array for name, array in arrays.items() if array is not None}


def layer_options(problem: Problem, threads: int = 1) -> layer.Options:
    """The options of a problem, likewise."""
    options = problem.options
    return layer.Options(
        reverse=(options.get("reverse", False),),
        masked_output=options.get("masked_output", "zero"),
        training=options.get("training", False),
        seed=options.get("seed", 0),
        threads=threads,
    )


def from_layer(problem: Problem, d: Mapping[str, Array]) -> Arrays:
    """The gradients that ``anycell.layer`` returns, by the names of a problem."""
    solution = _gradients(problem, "weights", d) | _gradients(problem, "params", d)
    for kind in ("state", "reset_state"):
        for name in problem.group(kind):
            if f"{kind} {name}" in d:
                solution[f"d {kind} {name}"] = d[f"{kind} {name}"][0]
    if "weight_ih" in d:
        solution["d weights ih"] = d["weight_ih"]
    if "static" in d:
        solution["d static"] = d["static"]
    return solution | {"d gates_x": d["x"]}


def by_recurrence(problem: Problem, engine: str = "cpu") -> Arrays:
    """Results alone, by the public function."""
    outputs, final = anycell.recurrence(problem.cell, **problem.arguments(), engine=engine)
    return _results(problem.cell, outputs, final)


def _results(cell: Cell, outputs: Array, final: Any) -> Arrays:
    return {"outputs": outputs} | {
        f"final {name}": value for name, value in zip(cell.state_names, final, strict=True)
    }


def _gradients(problem: Problem, argument: str, found: Mapping[str, Array]) -> Arrays:
    return {f"d {argument} {name}": found[name] for name in problem.group(argument)}


# -- comparison ----------------------------------------------------------------------------------
def assert_right(
    solution: Arrays, problem: Problem, told: str = "", dtype: str | None = None
) -> None:
    """That results and gradients are within tolerance, that of their dtype or another, of what is
    right; else ``told`` is said.
    """
    for name, value in solution.items():
        assert value.dtype == problem.arrays["gates_x"].dtype, name
        said, within = f"{name} {told}".strip(), dtype or value.dtype
        assert_close(value, problem.right[name], within, kind_of(name), said, _axes(name, value))


def worst(solution: Arrays, right: Arrays, dtype: str) -> float:
    """The largest error, as a part of its limit."""
    return max(
        error(value, right[name], _axes(name, value)) / LIMITS[dtype, kind_of(name)]
        for name, value in solution.items()
    )


def kind_of(name: str) -> str:
    return "gradient" if name.startswith("d ") else "forward"


def _axes(name: str, value: Array) -> tuple[int, ...] | None:
    """The axes of time and batch; None where there are both."""
    rows = ROWS.get(name.removeprefix("d ").split()[0])
    return None if rows == 1 else (0,) if rows == 0 and value.ndim == 2 else ()


def assert_same(solution: Arrays, other: Arrays, *names: str) -> None:
    """That two solutions, or some of their arrays, have the same bits."""
    for name in names or other:
        assert np.array_equal(solution[name], other[name], equal_nan=True), name
