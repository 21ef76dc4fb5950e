"""Layers with numbers: what every frontend is asked, and what is right."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from problems import MARGIN, NORMALISERS, width
from tolerances import LIMITS, assert_close, error

from anycell import Cell, cell, linear, sigmoid, tanh
from anycell.engines import reference
from anycell.layer import ENDS, shapes
from anycell.numpy.host import numpy_dtype
from anycell.plan import DTYPES

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
LEARNED = re.compile(r"_l\d+(_reverse)?$")
NEARBY = 3  # problems of almost the same numbers that float32 must solve as well


@cell(gates="i g", state="h:P c=0.5", params="w b=0.25")
def Odd(x, r, s, p):
    """Gates used apart and together, sizes, heads, biases, declared values."""
    c = sigmoid(x.i + r.i + p.w * s.c) * s.c
    c = c + tanh(x.g + p.b * r.g + linear(s.c, "mix", heads=2, bias=True))
    return linear(tanh(c), "out"), c


class Unsolvable(AssertionError):
    """Rounding numbers to a dtype changes every result by more than a test allows."""


@dataclass(frozen=True)
class Problem:
    """The call of a layer, and the gradients that arrive at its results.

    Attributes:
        sizes: what the size symbols of the cell stand for.
        arrays: by the names of ``anycell.layer.signature``, learned ones with ``_l0``, ``_l1``
            behind as in PyTorch; and besides ``lengths``, ``d output``, ``d final <state>`` and, of
            a call with ``return_states``, ``d sequence <state>``.
        reverse: of each direction.
        repeat: masked outputs repeat the held state.
    """

    cell: Cell
    sizes: dict[str, int]
    arrays: Arrays
    reverse: tuple[bool, ...] = (False,)
    layers: int = 1
    repeat: bool = False

    def but(self, arrays: Arrays) -> Problem:
        """The problem with other arrays."""
        return replace(self, arrays={**self.arrays, **arrays})

    @property
    def shape(self) -> tuple[int, int, int]:
        """T, B, I."""
        return self.arrays["x"].shape  # type: ignore[return-value]

    @property
    def inputs(self) -> int:
        """The width of x that the weights are for."""
        return self.arrays["weight_ih_l0"].shape[1]

    @property
    def dtype(self) -> str:
        """Of what is learned."""
        return self.arrays["weight_ih_l0"].dtype.name

    @property
    def bias(self) -> bool:
        """Whether the layer has biases, of a cell that leaves that open."""
        return "bias_ih_l0" in self.arrays or not self.cell.bias

    @property
    def learned(self) -> Arrays:
        """What the layer learns."""
        return {name: array for name, array in self.arrays.items() if LEARNED.search(name)}

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the call, by the names that they have in every frontend."""
        names = ("mask", "lengths", "resets", "static", "recurrent_mask")
        options: dict[str, Any] = {n: self.arrays[n] for n in names if n in self.arrays}
        options |= {"masked_output": "repeat"} if self.repeat else {}
        options |= {"return_states": True} if self.group("d sequence") else {}
        return options | ({"reset_state": r} if (r := self.group("reset_state")) else {})

    def group(self, kind: str) -> list[Array]:
        """The arrays per state, of kind "state", "reset_state", "d final" or "d sequence"; none if
        not given.
        """
        names = (f"{kind} {name}" for name in self.cell.state_names)
        return [self.arrays[name] for name in names if name in self.arrays]

    @property
    def valid(self) -> Array | None:
        """Mask and lengths together."""
        mask, lengths = self.arrays.get("mask"), self.arrays.get("lengths")
        if lengths is None:
            return mask
        within = np.arange(self.shape[0])[:, None] < lengths
        return within if mask is None else within & mask

    def astype(self, dtype: str) -> Problem:
        """The same numbers in another dtype."""
        wanted = numpy_dtype(dtype)
        return self.but({n: a.astype(wanted) for n, a in self.arrays.items() if is_float(a)})

    @cached_property
    def right(self) -> Arrays:
        """Results and gradients, by the reference engine in float64."""
        return by_reference(self.astype("float64"))


def by_reference(problem: Problem) -> Arrays:
    """The solution in the dtype of the problem.

    By name: "output", "final <state>", "sequence <state>" if the call is for them, and "d <name>"
    of all that has a gradient.
    """
    cell, x, valid = problem.cell, problem.arrays["x"], problem.valid
    tape, finals, count = [], [], len(problem.reverse)
    for k in range(problem.layers):
        x = x if valid is None else np.where(valid[..., None], x, x.dtype.type(0))
        runs = [reference.recurrence(cell, **_direction(problem, x, k, d)) for d in range(count)]
        tape.append((x, runs))
        found, final = zip(*(run.sequences(cell.state_names) for run in runs), strict=True)
        sequences = [np.concatenate(parts, axis=-1) for parts in zip(*found, strict=True)]
        x = sequences[0]
        finals += final
    states = zip(cell.state_names, zip(*finals, strict=True), strict=True)
    solution = {"output": x, **{f"final {name}": np.stack(parts) for name, parts in states}}
    named = zip(cell.state_names, sequences, strict=True)
    solution |= {f"sequence {n}": a for n, a in named if f"d sequence {n}" in problem.arrays}

    arriving = [problem.arrays["d output"], *problem.group("d sequence")[1:]]
    gradients: list[reference.Gradients] = []
    arriving[0] = arriving[0] + problem.arrays.get(f"d sequence {cell.state_names[0]}", 0.0)
    for k in reversed(range(problem.layers)):
        x, runs = tape[k]
        parts, d_x = [np.split(a, count, axis=-1) for a in arriving], np.zeros_like(x)
        for d in reversed(range(count)):
            d_final = [a[k * count + d] for a in problem.group("d final")]
            d_outputs, *others = [a[d] for a in parts]
            further = dict(zip(cell.state_names[1:], others, strict=bool(others)))
            grads = runs[d].backward(d_outputs, d_final, further)
            behind, gates = f"_l{k}{ENDS[d]}", grads.gates_x
            d_x = d_x + gates @ problem.arrays[f"weight_ih{behind}"]
            learned = {"weight_ih": np.einsum("tbg,tbi->gi", gates, x)}
            learned |= {"bias_ih": gates.sum((0, 1)), **grads.weights, **grads.params}
            solution |= {f"d {name}{behind}": g for name, g in learned.items()}
            gradients.insert(0, grads)
        arriving = [d_x]
    solution["d x"] = d_x
    for kind in ("state", "reset_state"):
        per_state = zip(*(getattr(g, kind) for g in gradients), strict=True)
        for name, parts in zip(cell.state_names, per_state, strict=True):
            if f"{kind} {name}" in problem.arrays:
                solution[f"d {kind} {name}"] = np.stack(parts)
    if cell.static is not None:
        solution["d static"] = sum(g.static for g in gradients)
    known = {f"d {name}" for name in problem.arrays}
    return {n: a for n, a in solution.items() if n[:2] != "d " or n in known}


def _direction(problem: Problem, x: Array, k: int, d: int) -> dict[str, Any]:
    """What ``reference.recurrence`` takes besides the cell."""
    cell, get, behind = problem.cell, problem.arrays.get, f"_l{k}{ENDS[d]}"
    bias, place = get(f"bias_ih{behind}"), k * len(problem.reverse) + d
    gates = x @ problem.arrays[f"weight_ih{behind}"].T
    names = [name for l in cell.linears for name in (l.weight, l.bias_name)]
    return {
        "gates_x": gates if bias is None else gates + bias,
        "weights": {name: get(name + behind) for name in names},
        "state": [a[place] for a in problem.group("state")] or None,
        "params": {name: problem.arrays[name + behind] for name in cell.param_names},
        "static": get("static"),
        "mask": problem.valid,
        "resets": get("resets"),
        "reset_state": [a[place] for a in problem.group("reset_state")] or None,
        "recurrent_mask": get("recurrent_mask"),
        "masked_output": "repeat" if problem.repeat else "zero",
        "reverse": problem.reverse[d],
    }


@cache
def draw(
    cell: Cell,
    size: tuple[int, int, int, int],
    has: tuple[str, ...] = (),
    dtype: str = "float64",
    solvable: bool = True,
) -> Problem:
    """A problem of random numbers, always the same ones.

    Args:
        size: (T, B, I, H).
        has: what the call has besides x: of "state", "mask", "lengths", "resets", "reset_state",
            "repeat", "recurrent_mask", "recurrent_mask per gate", "reverse", "bidirectional",
            "layers", "no bias", "return_states". NaN lies under a mask.
        solvable: float32 solves it well, if that is its dtype.

    Raises:
        Unsolvable: where none of many is.
    """
    rng = np.random.default_rng(1997)
    for _ in range(50):
        problem = _draw(cell, size, set(has), rng).astype(dtype)
        if dtype == "float64" or not solvable:
            return problem
        if DTYPES[dtype].mixed:
            good = all(_settled(problem, near) for near in _nearby(problem, ROUNDING[dtype], rng))
        else:
            near = _nearby(problem, np.finfo(dtype).eps, rng)
            good = all(map(_solves, [problem, *(p.astype(dtype) for p in near)]))
        if good:
            return problem
    raise Unsolvable(f"no problem of {cell} and size {size} that {dtype} solves well")


def is_float(array: Array) -> bool:
    """Whether an array is of real numbers, of ml_dtypes too."""
    return array.dtype.kind == "f" or array.dtype.name in DTYPES


def _nearby(problem: Problem, by: float, rng: np.random.Generator) -> list[Problem]:
    """Some with every number moved by such a part of it: one lucky rounding is no proof."""
    floats = problem.astype("float64")
    moved = []
    for _ in range(NEARBY):
        arrays = {n: a for n, a in floats.arrays.items() if is_float(a)}
        arrays = {n: a * (1 + by * rng.choice([-1, 1], a.shape)) for n, a in arrays.items()}
        moved.append(floats.but(arrays))
    return moved


ROUNDING = {"bfloat16": 2.0**-9, "float16": 2.0**-12}  # of a number, at most


def _solves(problem: Problem) -> bool:
    """Whether the reference engine, in the problem's dtype, stays well within the limits."""
    return all(
        error(value, problem.right[name], axes(name)) <= MARGIN * LIMITS[problem.dtype, kind(name)]
        for name, value in by_reference(problem).items()
    )


def _settled(problem: Problem, near: Problem) -> bool:
    """Whether an almost equal problem has almost the same solution. Of 16 bits the reference engine
    says little: it would round within a step, which kernels do not.
    """
    return all(
        error(value, problem.right[name], ()) <= LIMITS[problem.dtype, kind(name)]
        for name, value in by_reference(near).items()
    )


def _draw(
    cell: Cell, size: tuple[int, int, int, int], has: set[str], rng: np.random.Generator
) -> Problem:
    steps, rows, inputs, hidden = size
    layers = 2 if "layers" in has else 1
    reverse = (False, True) if "bidirectional" in has else ("reverse" in has,)
    sizes = {s: width(s, hidden) for s in ("H", *sorted(set(cell.sizes.values()) - {"H"}))}
    first = sizes[cell.states[0].size]

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape)

    def per_state(kind: str) -> Arrays:
        lead = (layers * len(reverse), rows)
        drawn = {s.name: normal(*lead, sizes[s.size]) for s in cell.states}
        positive = NORMALISERS if kind != "d final" else set()
        return {f"{kind} {n}": 0.5 + abs(a) if n in positive else a for n, a in drawn.items()}

    arrays: Arrays = {"x": normal(steps, rows, inputs)}
    for kind in ("state", "reset_state"):
        if kind in has:
            arrays |= per_state(kind)
    if "mask" in has:
        arrays["mask"] = rng.random((steps, rows)) < 0.7
        arrays["mask"][:, :1] = False
    if "lengths" in has:
        arrays["lengths"] = rng.integers(min(1, steps), steps + 1, rows)
        arrays["lengths"][:2] = [steps, 0][:rows]
    if "resets" in has:
        arrays["resets"] = rng.random((steps, rows)) < 0.3
    if cell.static is not None:
        arrays["static"] = normal(rows, hidden)
    for name, lead in (("recurrent_mask", ()), ("recurrent_mask per gate", (len(cell.gates),))):
        if name in has:
            factor = rng.random((*lead, rows, first))
            arrays["recurrent_mask"] = np.where(factor < 0.4, 0.0, 2.0 * factor)
    declared = {p.name: p.initial or 0.0 for p in cell.params}
    bias = cell.bias and "no bias" not in has
    for k in range(layers):
        entering = len(reverse) * first if k else inputs
        for end in ENDS[: len(reverse)]:
            for name, shape in shapes(cell, sizes, entering, bias).items():
                scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.3
                arrays[f"{name}_l{k}{end}"] = declared.get(name, 0.0) + scale * normal(*shape)
    arrays["d output"] = normal(steps, rows, len(reverse) * first)
    arrays |= per_state("d final")
    if "return_states" in has:
        for s in cell.states:
            arrays[f"d sequence {s.name}"] = normal(steps, rows, len(reverse) * sizes[s.size])
    problem = Problem(cell, sizes, arrays, reverse, layers, "repeat" in has)
    if problem.valid is not None:
        arrays["x"][~problem.valid] = np.nan
    return problem


def assert_right(solution: Arrays, problem: Problem, gradients: bool = True) -> None:
    """That it is all that a problem asks for, right, and in its dtype."""
    right, dtype = problem.right, problem.dtype
    assert solution.keys() == {name for name in right if gradients or name[:2] != "d "}
    for name, value in solution.items():
        assert value.dtype.name == dtype, name
        # What 16 bits round is noise, which of few numbers has hardly a bound.
        along = () if DTYPES[dtype].mixed else axes(name)
        assert_close(value, right[name], dtype, kind(name), name, along)


def kind(name: str) -> str:
    """Of a solution's array, as tolerances know it."""
    return "gradient" if name.startswith("d ") else "forward"


def axes(name: str) -> tuple[int, ...] | None:
    """The axes of time and batch of a solution's array; None for the first two of three."""
    name = name.removeprefix("d ")
    return (0,) if name == "static" else () if LEARNED.search(name) else None
