"""Calls of layers with random numbers, their right results and gradients, and the ways to compute
them.

A problem of one layer without ``weight_ih`` is a recurrence: its x is already projected.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import oracle
from tolerances import LIMITS, assert_close, error

import anycell
from anycell import Cell, cell, layer, linear, sigmoid, tanh
from anycell.engines import cpu, reference
from anycell.layer import ENDS, shapes
from anycell.layer.checks import declared_sizes
from anycell.numpy.check import numpy_dtype
from anycell.numpy.framework import Numpy
from anycell.plan import DTYPES, plan

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
LEARNED = re.compile(r"_l\d+(_reverse)?$")

# (T, B, H): H of 1, 7, 33 and 100, one step, one row, no rows.
AWKWARD = [(5, 3, 1), (1, 4, 7), (9, 1, 33), (4, 5, 100), (6, 0, 7), (1, 1, 1), (7, 19, 33)]


@cell(gates="i g", state="h:P c=0.5", params="w b=0.25")
def Odd(x, r, s, p):
    """Gates used apart and together, sizes, heads, biases, declared values."""
    c = sigmoid(x.i + r.i + p.w * s.c) * s.c
    c = c + tanh(x.g + p.b * r.g + linear(s.c, "mix", heads=2, bias=True))
    return linear(tanh(c), "out"), c


@cell(gates="g o", state="h c")
def Adding(x, r, s):
    """The backward pass reads no value of c, so the plan does not keep c."""
    c = s.c + x.g + r.g
    return tanh(x.o + r.o) + c, c


@cell(gates="h t", state="h")
def Tied(x: Any, r: Any, s: Any, *, power: float = 1.0) -> Any:
    """A recurrent highway of two layers, which multiply by one weight and add one bias; with
    functions that frameworks spell in their own ways, and the mean of a number."""
    y = s.h
    for k in range(2):
        h, t = linear(y, "r", gates="h t", bias=True)
        h, t = (h + x.h, t + x.t) if k == 0 else (h, t)
        new = anycell.sin(h) if k == 0 else anycell.erf(h) * anycell.cos(t)
        t = sigmoid(t)
        y = t * new + (1 - t) ** (anycell.mean(power) + t) * y
    return y


@cell(gates="g:P i o:P k", state="h:P c", params="w:P u", static="e:E")
def Sized(x: Any, r: Any, s: Any, p: Any, e: Any) -> Any:
    """Gates, parameters, states and a static input of sizes of their own."""
    c = sigmoid(x.i + r.i) * s.c + p.u * tanh(linear(e, "e") + x.k + r.k)
    h = sigmoid(x.o + linear(s.h, "o", bias=True)) * tanh(x.g + linear(c, "down"))
    return h + p.w * s.h, c


@cell(gates="done:1 i g:P", state="h:P n:1=0.5 c", params="k:1 w:P u=0.5", static="e:1")
def Rows(x: Any, r: Any, s: Any, p: Any, e: Any, *, bias: bool = True) -> Any:
    """Values of one number per row meet values of every size, alone and in reductions."""
    keep = sigmoid(x.done + p.k * e)
    n = keep * s.n + (1 - keep) * anycell.mean(anycell.max(tanh(s.c)) * tanh(x.i)) + e
    c = keep * s.c + sigmoid(n) * tanh(x.i + r.i + p.u * n)
    gate = sigmoid(linear(c, "gate", size="1", bias=bias) + anycell.sum(s.h) / 9)
    new = tanh(x.g + linear(c, "down")) * p.w + linear(n, "up")
    return gate * s.h + (1 - gate) * new, n, c + n


def forget_passes() -> None:
    """Makes layers on the CPU draft their passes again."""
    layer.recipe.known.clear()
    for forget in cpu.pool.CHANGED:  # a frontend keeps calls of passes
        forget()


@dataclass(frozen=True)
class Problem:
    """The call of a layer, and the gradients that arrive at its results.

    Attributes:
        sizes: the values of the cell's size symbols.
        arrays: named as in ``anycell.layer.signature``; learned arrays end in ``_l0``, ``_l1`` as
            in PyTorch. Also ``lengths``, ``d output``, ``d final <state>`` and, for a call with
            ``return_states``, ``d sequence <state>``.
        reverse: for each direction, whether it runs from the last step to the first.
        repeat: whether masked outputs repeat the held state.
        drawing: ``training``, ``seed`` and ``stream`` of random masks.
    """

    cell: Cell
    sizes: dict[str, int]
    arrays: Arrays
    reverse: tuple[bool, ...] = (False,)
    layers: int = 1
    repeat: bool = False
    drawing: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]

    def but(self, arrays: Arrays) -> Problem:
        """Returns the problem with these arrays added or replaced."""
        return replace(self, arrays={**self.arrays, **arrays})

    def map(self, change: Callable[[str, Array], Array]) -> Problem:
        """Returns the problem with ``change(name, array)`` in place of every array."""
        return self.but({name: change(name, array) for name, array in self.arrays.items()})

    def astype(self, dtype: str) -> Problem:
        """Returns the problem with the same numbers in another dtype."""
        wanted = numpy_dtype(dtype)
        return self.map(lambda _, array: array.astype(wanted) if is_float(array) else array)

    def rows(self, part: slice) -> Problem:
        """Returns the problem for a part of the batch rows."""
        return self.map(lambda name, array: rows_of(name, array, part))

    @property
    def shape(self) -> tuple[int, int, int]:
        """T, B, I."""
        return self.arrays["x"].shape  # type: ignore[return-value]

    @property
    def inputs(self) -> int:
        """The width of x that the weights expect."""
        return self.arrays["weight_ih_l0"].shape[1]

    @property
    def dtype(self) -> str:
        """The dtype of the learned arrays; of x, if there are none."""
        return next(iter(self.learned.values()), self.arrays["x"]).dtype.name

    @property
    def bias(self) -> bool:
        """Whether the layer has biases; True for a cell that never has them."""
        return "bias_ih_l0" in self.arrays or not self.cell.bias

    @property
    def learned(self) -> Arrays:
        """The arrays that the layer learns."""
        return {name: array for name, array in self.arrays.items() if LEARNED.search(name)}

    @property
    def masked_output(self) -> str:
        """The argument of that name."""
        return "repeat" if self.repeat else "zero"

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of the call, by their names, which all frontends share."""
        names = ("mask", "lengths", "resets", "static", "recurrent_mask")
        options: dict[str, Any] = {n: self.arrays[n] for n in names if n in self.arrays}
        options |= {"masked_output": "repeat"} if self.repeat else {}
        options |= {"return_states": True} if self.group("d sequence") else {}
        return options | ({"reset_state": r} if (r := self.group("reset_state")) else {})

    def group(self, kind: str) -> list[Array]:
        """The arrays of all states that have one of this kind: "state", "reset_state", "d final" or
        "d sequence".
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

    def arguments(self, x: Any = None, k: int = 0, d: int = 0) -> dict[str, Any]:
        """The arguments of ``recurrence`` besides the cell, for direction d of the k-th layer.

        Args:
            x: the layer's input; None takes the problem's.
        """
        get, behind, place = self.arrays.get, f"_l{k}{ENDS[d]}", k * len(self.reverse) + d
        weight, bias = get(f"weight_ih{behind}"), get(f"bias_ih{behind}")
        gates = self.arrays["x"] if x is None else x
        gates = gates if weight is None else gates @ weight.T
        names = [name for l in self.cell.linears for name in (l.weight, l.bias_name)]
        return {
            "gates_x": gates if bias is None else gates + bias,
            "weights": {n: self.arrays[n + behind] for n in names if n + behind in self.arrays},
            "state": [a[place] for a in self.group("state")] or None,
            "params": {name: self.arrays[name + behind] for name in self.cell.param_names},
            "static": get("static"),
            "mask": self.valid,
            "resets": get("resets"),
            "reset_state": [a[place] for a in self.group("reset_state")] or None,
            "recurrent_mask": get("recurrent_mask"),
            "masked_output": self.masked_output,
            "reverse": self.reverse[d],
            **self.drawing,
        }

    @cached_property
    def right(self) -> Arrays:
        """The results and gradients that the reference engine computes in float64."""
        return by_reference(self)


def is_float(array: Array) -> bool:
    """Whether an array holds real numbers, including those of ml_dtypes."""
    return array.dtype.kind == "f" or array.dtype.name in DTYPES


def rows_of(name: str, array: Array, part: slice) -> Array:
    """Returns some batch rows of an array of a problem or of its solution."""
    name = name.removeprefix("d ")
    if LEARNED.search(name) or (name.startswith("reset_state") and array.ndim == 2):
        return array
    axis = {"static": 0, "lengths": 0, "recurrent_mask": array.ndim - 2}.get(name, 1)
    return np.ascontiguousarray(array[(slice(None),) * axis + (part,)])


# -- random numbers ------------------------------------------------------------------------------
class Unsolvable(AssertionError):
    """Raised if rounding to a dtype changes all drawn problems by more than a test allows."""


MARGIN = 0.25  # the part of a limit that the reference engine may use up
NEARBY = 3  # perturbed copies of a problem that must be solvable too
NORMALISERS = {"n"}  # states that the cells divide by
# Upper bounds of the relative rounding error of one number.
ROUNDING = {"bfloat16": 2.0**-9, "float16": 2.0**-12, "float32": 2.0**-23, "float64": 2.0**-52}


def width(size: str, hidden: int) -> int:
    """The value of a cell's size symbol in a random problem."""
    return {"H": hidden, "1": 1}.get(size, hidden - hidden // 3)


@cache
def draw(
    cell: Cell,
    size: tuple[int, int, int, int],
    has: tuple[str, ...] = (),
    dtype: str = "float64",
    solvable: bool = True,
) -> Problem:
    """Returns a problem of random numbers, the same ones for the same arguments.

    Args:
        size: (T, B, I, H).
        has: features of the call, from "state", "mask", "lengths", "resets", "reset_state",
            "repeat", "recurrent_mask", "recurrent_mask per gate", "reverse", "bidirectional",
            "layers", "no bias", "return_states". x is NaN at masked steps.
        solvable: whether to draw until the dtype is exact enough for the problem.
    """
    rng = np.random.default_rng(1997)
    drawn = (random_layer(cell, size, set(has), rng).astype(dtype) for _ in itertools.count())
    nearby = 0 if dtype == "float64" else NEARBY
    return first_solvable(drawn, nearby, rng) if solvable else next(drawn)


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
    reverse: bool = False,
    masked_output: str = "zero",
    **drawing: Any,
) -> Problem:
    """Returns a random recurrence with initial states that can be solved in its dtype.

    Args:
        shape: (T, B, H).
        nearby: how many perturbed copies must be solvable too. Random cells need them: where the
            rounding errors of one engine happen to cancel, those of another engine do not.
        masked: rows have random lengths, 0 among them, and holes; x is NaN at masked steps.
        resets: with random resets: of the first state to a value per row, of others to one for all.
        dropped: with a recurrent mask, one for "all" gates or one for "each".
        drawing: ``training``, ``seed`` and ``stream`` of random masks.
    """
    words = {"mask": masked, "resets": resets, "reset_state": resets, "reverse": reverse}
    words |= {"repeat": masked_output == "repeat", "recurrent_mask": dropped == "all"}
    words |= {"recurrent_mask per gate": dropped == "each", "state": True}
    size, has = (*shape[:2], None, shape[2]), {word for word, there in words.items() if there}

    def drawn() -> Problem:
        problem = replace(random_layer(cell, size, has, rng), drawing=drawing)
        if masked and not problem.repeat:
            problem["d output"][~problem["mask"]] = np.nan
        once = {f"reset_state {s}" for s in cell.state_names[1:] if resets and shape[1]}
        return problem.but({name: problem[name][:, 0] for name in once}).astype(dtype)

    return first_solvable((drawn() for _ in itertools.count()), nearby)


def first_solvable(
    drawn: Iterator[Problem], nearby: int, rng: np.random.Generator | None = None
) -> Problem:
    """Returns the first problem for which its dtype is exact enough: when a slice of one number
    cancels to almost nothing, no engine is to blame for the error.
    """
    rng = rng or np.random.default_rng(0)
    for problem in itertools.islice(drawn, 50):
        if solvable(problem, nearby, rng):
            return problem
    raise Unsolvable(f"no {problem.dtype} problem of {problem.cell}, {problem.shape}, is solvable")


def solvable(problem: Problem, nearby: int, rng: np.random.Generator) -> bool:
    """Whether its dtype is exact enough for a problem, and for as many perturbed copies of it."""
    near = _near(problem, ROUNDING[problem.dtype], nearby, rng)
    if problem.dtype == "float32":
        return all(map(_solves, itertools.chain([problem], near)))
    return all(_settled(problem, other) for other in near)


def _near(problem: Problem, by: float, count: int, rng: np.random.Generator) -> Iterator[Problem]:
    """Yields copies with each number moved by ``by`` times itself: one lucky pass proves little."""
    for _ in range(count):
        yield problem.astype("float64").map(
            lambda _, a: a * (1 + by * rng.choice([-1, 1], a.shape)) if is_float(a) else a
        )


def _solves(problem: Problem) -> bool:
    """Whether the reference engine in float32 stays well within the limits."""
    problem = problem.astype("float32")
    return all(
        error(value, problem.right[name], axes(name)) <= MARGIN * LIMITS["float32", kind_of(name)]
        for name, value in by_reference(problem, "float32").items()
    )


def _settled(problem: Problem, near: Problem) -> bool:
    """Whether an almost equal problem has almost the same solution. The reference engine does not
    judge 16 bits: it would round within a step, and kernels do not. float64 is its own oracle.
    """
    part = MARGIN if problem.dtype == "float64" else 1.0
    return all(
        error(value, problem.right[name], _along(problem, name))
        <= part * LIMITS[problem.dtype, kind_of(name)]
        for name, value in near.right.items()
    )


def _along(problem: Problem, name: str) -> tuple[int, ...] | None:
    """The axes whose slices are compared one by one; None for time and batch."""
    # Rounding to 16 bits is noise, which has hardly any bound over the few numbers of a slice.
    return () if DTYPES[problem.dtype].mixed else axes(name)


def random_layer(
    cell: Cell, size: tuple[int, int, int | None, int], has: set[str], rng: np.random.Generator
) -> Problem:
    """Draws a problem as ``draw`` describes; without a number of inputs, a recurrence."""
    steps, rows, inputs, hidden = size
    layers = 2 if "layers" in has else 1
    reverse = (False, True) if "bidirectional" in has else ("reverse" in has,)
    symbols = {*declared_sizes(cell), *cell.sizes.values(), "1"} - {"H"}
    sizes = {s: width(s, hidden) for s in ("H", *sorted(symbols))}
    first = sizes[cell.states[0].size]

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape)

    def per_state(kind: str) -> Arrays:
        lead = (layers * len(reverse), rows)
        drawn = {s.name: normal(*lead, sizes[s.size]) for s in cell.states}
        positive = NORMALISERS if kind != "d final" else set()
        return {f"{kind} {n}": 0.5 + abs(a) if n in positive else a for n, a in drawn.items()}

    arrays: Arrays = {"x": normal(steps, rows, inputs or cell.width(sizes))}
    for kind in ("state", "reset_state"):
        if kind in has:
            arrays |= per_state(kind)
    if "mask" in has:
        within = np.arange(steps)[:, None] < rng.integers(0, steps + 1, rows)
        arrays["mask"] = within & (rng.random((steps, rows)) < 0.8)
        arrays["mask"][:, :1] &= rows <= 3  # of more than 3 rows, one has no step
    if "lengths" in has:
        arrays["lengths"] = rng.integers(min(1, steps), steps + 1, rows)
        arrays["lengths"][:2] = [steps, 0][:rows]
    if "resets" in has:
        arrays["resets"] = rng.random((steps, rows)) < 0.3
    if cell.static is not None:
        arrays["static"] = normal(rows, sizes[cell.static_size])
    for name, lead in (("recurrent_mask", ()), ("recurrent_mask per gate", (len(cell.gates),))):
        if name in has:
            factor = rng.random((*lead, rows, first))
            arrays["recurrent_mask"] = np.where(factor < 0.4, 0.0, 2.0 * factor)
    declared = {p.name: p.initial or 0.0 for p in cell.params}
    bias, strength = cell.bias and "no bias" not in has, 1.0 if inputs else 0.5
    for k in range(layers):
        entering = len(reverse) * first if k else inputs or 0
        for end in ENDS[: len(reverse)]:
            for name, shape in shapes(cell, sizes, entering, bias).items():
                if name not in ("weight_ih", "bias_ih") or inputs:
                    scale = strength * shape[-1] ** -0.5 if len(shape) > 1 else 0.3
                    arrays[f"{name}_l{k}{end}"] = declared.get(name, 0.0) + scale * normal(*shape)
    arrays["d output"] = normal(steps, rows, len(reverse) * first)
    arrays |= per_state("d final")
    if "return_states" in has:
        for s in cell.states:
            arrays[f"d sequence {s.name}"] = normal(steps, rows, len(reverse) * sizes[s.size])
    named = {symbol: size for symbol, size in sizes.items() if symbol != "1"}
    problem = Problem(cell, named, arrays, reverse, layers, "repeat" in has)
    if problem.valid is not None:
        arrays["x"][~problem.valid] = np.nan
    return problem


# -- solutions -----------------------------------------------------------------------------------
# A solution's arrays are named "output", "final <state>", "sequence <state>" if the call asks for
# them, and "d <name>" for everything that has a gradient.


def by_reference(problem: Problem, dtype: str = "float64") -> Arrays:
    """Solves a problem by the reference engine; the float64 solution is the right one."""
    problem = problem.astype(dtype)
    cell, x, valid = problem.cell, problem["x"], problem.valid
    tape, finals, count = [], [], len(problem.reverse)
    for k in range(problem.layers):
        runs = [oracle.recurrence(cell, **problem.arguments(x, k, d)) for d in range(count)]
        tape.append((x if valid is None else np.where(valid[..., None], x, x.dtype.type(0)), runs))
        found, final = zip(*(run.sequences(cell.state_names) for run in runs), strict=True)
        sequences = [np.concatenate(parts, axis=-1) for parts in zip(*found, strict=True)]
        x = sequences[0]
        finals += final
    solution = results(problem, x, map(np.stack, zip(*finals, strict=True)))
    named = zip(cell.state_names, sequences, strict=True)
    solution |= {f"sequence {n}": a for n, a in named if f"d sequence {n}" in problem.arrays}

    first = problem.arrays.get(f"d sequence {cell.state_names[0]}", 0.0)
    arriving = [problem["d output"] + first, *problem.group("d sequence")[1:]]
    gradients: list[reference.Gradients] = []
    for k in reversed(range(problem.layers)):
        x, runs = tape[k]
        parts, d_x = [np.split(a, count, axis=-1) for a in arriving], 0.0
        for d in reversed(range(count)):
            d_final = [a[k * count + d] for a in problem.group("d final")]
            d_outputs, *others = [a[d] for a in parts]
            further = dict(zip(cell.state_names[1:], others, strict=bool(others)))
            grads = runs[d].backward(d_outputs, d_final, further)
            behind, gates = f"_l{k}{ENDS[d]}", grads.gates_x
            weight = problem.arrays.get(f"weight_ih{behind}")
            d_x = d_x + (gates if weight is None else gates @ weight)
            learned = {"bias_ih": gates.sum((0, 1)), **grads.weights, **grads.params}
            if weight is not None:
                learned["weight_ih"] = np.einsum("tbg,tbi->gi", gates, x)
            solution |= {f"d {name}{behind}": g for name, g in learned.items()}
            gradients.insert(0, grads)
        arriving = [d_x]
    solution["d x"] = d_x
    for kind in ("state", "reset_state"):
        per_state = zip(*(getattr(g, kind) for g in gradients), strict=True)
        for name, parts in zip(cell.state_names, per_state, strict=True):
            solution[f"d {kind} {name}"] = np.stack(parts)
    if cell.static is not None:
        solution["d static"] = sum(g.static for g in gradients)
    known = {f"d {name}" for name in problem.arrays}
    return {n: a for n, a in solution.items() if n[:2] != "d " or n in known}


def results(problem: Problem, output: Any, finals: Any) -> Arrays:
    names = [f"final {name}" for name in problem.cell.state_names]
    return {"output": output, **dict(zip(names, finals, strict=True))}


def by_recurrence(problem: Problem, engine: str = "cpu") -> Arrays:
    """Returns the results alone, by the public function."""
    output, final = anycell.recurrence(problem.cell, **problem.arguments(), engine=engine)
    return results(problem, output, [value[None] for value in final])


def by_cpu(
    problem: Problem,
    threads: int = 1,
    projected: bool = False,
    backwards: int = 1,
    host: Numpy | None = None,
    precision: str = "highest",
    checkpoint: str | int | None = None,
) -> Arrays:
    """Solves a problem by the fused kernels of the CPU engine.

    Args:
        threads: the largest number of threads.
        projected: adds an input projection whose weight is the unit matrix.
        backwards: how many times the backward pass runs.
        host: allocates the arrays.
        precision: of float32 matmuls, which it allows to be rounded.
        checkpoint: as in ``layer.Options``.
    """
    arrays = to_layer(problem, projected)
    runs = layer.stepped(problem.cell, arrays.get("recurrent_mask"))
    hidden = problem.sizes["H"]
    chosen = cpu.rounded(plan(runs, hidden, problem.dtype, "cpu", problem.sizes), precision)
    host = host or Numpy.of(chosen.dtype)
    how = layer_options(problem, threads)._replace(checkpoint=checkpoint)
    output, finals, kept = layer.forward(host, chosen, arrays, how, keep=True)
    for _ in range(backwards):
        d_final = problem.group("d final")
        d = layer.backward(host, chosen, arrays, how, kept, problem["d output"], d_final)
    return results(problem, output, finals) | from_layer(problem, d)


def to_layer(problem: Problem, projected: bool = False) -> dict[str, Any]:
    """The arrays of a recurrence by their names in ``anycell.layer``."""
    arrays = {n.removesuffix("_l0"): a for n, a in problem.arrays.items() if n[:2] != "d "}
    if projected:
        arrays["weight_ih"] = np.eye(problem.shape[2], dtype=problem["x"].dtype)
    return arrays


def layer_options(problem: Problem, threads: int = 1) -> layer.Options:
    """The options of a recurrence for ``anycell.layer``."""
    drawing = {**problem.drawing, "threads": threads}
    return layer.Options(problem.reverse, problem.masked_output, **drawing)


def from_layer(problem: Problem, d: Mapping[str, Array]) -> Arrays:
    """The gradients that ``anycell.layer`` returns, by their names in a solution."""
    learned = {name.removesuffix("_l0") for name in problem.learned} | {"weight_ih"}
    named = {f"d {name}_l0" if name in learned else f"d {name}": array for name, array in d.items()}
    known = {f"d {name}" for name in (*problem.arrays, "weight_ih_l0")}
    return {name: array for name, array in named.items() if name in known}


# -- comparison ----------------------------------------------------------------------------------
def assert_right(
    solution: Arrays, problem: Problem, told: str = "", dtype: str | None = None
) -> None:
    """Asserts that results and gradients are within the tolerance of ``dtype`` (by default, the
    problem's). A failure's message contains ``told``.
    """
    for name, value in solution.items():
        assert value.dtype.name == problem.dtype, name
        said, along = f"{name} {told}".strip(), _along(problem, name)
        assert_close(value, problem.right[name], dtype or problem.dtype, kind_of(name), said, along)


def assert_solved(solution: Arrays, problem: Problem, gradients: bool = True) -> None:
    """Asserts that a solution is complete and right."""
    assert solution.keys() == {n for n in problem.right if gradients or n[:2] != "d "}
    assert_right(solution, problem)


def kind_of(name: str) -> str:
    """The kind of a solution's array in ``LIMITS``."""
    return "gradient" if name.startswith("d ") else "forward"


def axes(name: str) -> tuple[int, ...] | None:
    """The time and batch axes of a solution's array; None for the first two of three."""
    name = name.removeprefix("d ")
    return (0,) if name == "static" else () if LEARNED.search(name) else None


def assert_same(solution: Arrays, other: Arrays, *names: str) -> None:
    """Asserts that two solutions, or the named arrays of them, have the same bits."""
    for name in names or other:
        assert np.array_equal(solution[name], other[name], equal_nan=True), name
