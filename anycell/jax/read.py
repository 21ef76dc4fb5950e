"""The table of jaxprs: reads the body of a ``lax.scan`` as a cell, and runs it as one.

Values of the body that no state enters are JAX's own, with its derivatives: those of weights alone
are computed once a call, those of this step's input for all steps at once, by ``vmap``. Carries
that no state enters, such as counters and keys, are computed in a loop of their own beforehand, and
count as input. Outputs are computed after the loop, for all steps at once. Only what is left, from
states to states, needs the table.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from anycell.jax.primitive import planned, recurrence
from anycell.lang.namespaces import namespace
from anycell.lang.ops import TABLE
from anycell.plan import Plan
from anycell.read import Graph, Outer, Reading, Refused, Value, read

Array = Any
PACKAGE = str(Path(jax.__file__).parent)


class Arrays:
    """What a reading does with arrays."""

    reshape, broadcast, move = jnp.reshape, jnp.broadcast_to, jnp.moveaxis
    zeros, constant = jnp.zeros, jnp.asarray

    @staticmethod
    def cat(parts: Sequence[Array], axis: int) -> Array:
        return jnp.concatenate(parts, axis)

    @staticmethod
    def cast(array: Array, dtype: Any) -> Array:
        return jnp.asarray(array, dtype)

    @staticmethod
    def take(array: Array, axis: int, start: int, size: int) -> Array:
        return jax.lax.slice_in_dim(array, start, start + size, axis=axis)

    @staticmethod
    def index(array: Array, at: np.ndarray) -> Array:
        neighbours = len(at) == 1 or (np.diff(at) == 1).all()
        return array[..., int(at[0]) : int(at[-1]) + 1] if neighbours else array[..., at]


# ---- tables --------------------------------------------------------------------------------------
ELEMENTWISE = {
    "add": "add", "add_any": "add", "sub": "sub", "mul": "mul", "div": "div", "neg": "neg",
    "exp": "exp", "log": "log", "log1p": "log1p", "expm1": "expm1", "sqrt": "sqrt",
    "rsqrt": "rsqrt", "logistic": "sigmoid", "tanh": "tanh", "sign": "sign",
    "sin": "sin", "cos": "cos", "erf": "erf", "pow": "pow", "square": "square",
    "stop_gradient": "stop_gradient", "copy": "identity", "copy_p": "identity",
    "lt": "lt", "le": "le", "gt": "gt", "ge": "ge", "eq": "eq", "ne": "ne", "and": "logical_and",
    "or": "logical_or", "not": "logical_not", "xor": "logical_xor",
}  # fmt: skip
CONDITIONS = frozenset("lt le gt ge eq ne logical_and logical_or logical_not logical_xor".split())
STRUCTURAL: dict[str, Any] = {
    "reshape": lambda p, a: a.reshape(p["new_sizes"]),
    "transpose": lambda p, a: a.transpose(p["permutation"]),
    "squeeze": lambda p, a: np.squeeze(a, tuple(p["dimensions"])),
    "rev": lambda p, a: np.flip(a, p["dimensions"]),
    "tile": lambda p, a: np.tile(a, p["reps"]),
    "slice": lambda p, a: a[
        tuple(map(slice, p["start_indices"], p["limit_indices"], p["strides"] or [1] * a.ndim))
    ],
    "split": lambda p, a: np.split(a, np.cumsum(p["sizes"])[:-1], p["axis"]),
    "broadcast_in_dim": lambda p, a: np.broadcast_to(
        np.expand_dims(a, _others(len(p["shape"]), p["broadcast_dimensions"])), p["shape"]
    ),
    "concatenate": lambda p, *a: np.concatenate(a, p["dimension"]),
    "stack": lambda p, *a: np.stack(a, p["axis"]),
}
REDUCED = {"reduce_sum": "sum", "reduce_max": "max"}
# Functions that are called, and the parameter of a call that holds their jaxpr.
CALLS = {
    "jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr",
    "checkpoint": "jaxpr", "remat": "jaxpr", "remat2": "jaxpr",
}  # fmt: skip
MANY, UNITS = 32, 1024  # parts and units of cells whose states have two axes, but no batch
# What to write in place of operations that people use in cells.
INSTEAD = {
    "while": "operations without a loop within the step",
    "scan": "the steps of the inner loop one after the other, if they are few",
    "cond": "jnp.where(condition, a, b)",
    "sort": "a cell without sorting",
    "gather": "slices, or a product with a fixed matrix",
    "custom_vjp_call": "the function without custom_vjp, with jax.lax.stop_gradient where needed",
}


def _others(rank: int, dimensions: Sequence[int]) -> tuple[int, ...]:
    return tuple(i for i in range(rank) if i not in dimensions)


def place(eqn: Any) -> str:
    """The user's file and line of an equation, "" where JAX does not tell."""
    try:  # no public name
        from jax._src import source_info_util

        frame = source_info_util.user_frame(eqn.source_info.traceback)
    except (ImportError, AttributeError, TypeError):
        frame = None
    return f"{Path(frame.file_name).name}:{frame.start_line}" if frame else ""


def origin(jaxpr: Any) -> tuple[str, str]:
    """The name of the function of a jaxpr, and its file."""
    text = getattr(getattr(jaxpr, "debug_info", None), "func_src_info", None) or ""
    name, _, file = text.partition(" at ")
    return name, file


# ---- the body as a list of equations -------------------------------------------------------------
@dataclass(eq=False)
class Variable:
    """A value of the body.

    Attributes:
        kind: F, X or S; see ``anycell.read.units``.
        equation: what computes it.
        number: its value, if all of its elements are one known number.
        constant: its value, if that is a known array.
    """

    aval: Any
    kind: str = "F"
    equation: Equation | None = None
    number: float | None = None
    constant: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.aval.shape)

    @property
    def floating(self) -> bool:
        return bool(jnp.issubdtype(self.aval.dtype, jnp.floating))


@dataclass(eq=False)
class Equation:
    """An equation of a jaxpr, with variables of one list for all functions that are called.

    Attributes:
        caller: the equation that calls the function of JAX that this equation is in, if one does.
    """

    eqn: Any
    operands: list[Variable]
    results: list[Variable]
    caller: Any = None
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.eqn.primitive.name


Values = dict[Variable, Array]


def inlined(
    jaxpr: Any, variables: dict[Any, Variable], equations: list[Equation], caller: Any = None
) -> list[Variable]:
    """Appends the equations of a jaxpr, and of the functions that it calls; returns its results."""

    def of(atom: Any) -> Variable:
        if not isinstance(atom, Literal):
            return variables[atom]
        known = np.ndim(atom.val) == 0 and atom.aval.dtype.kind in "fiub"
        return Variable(atom.aval, number=float(atom.val) if known else None, constant=atom.val)

    for eqn in jaxpr.eqns:
        operands = [of(atom) for atom in eqn.invars]
        if eqn.primitive.name in CALLS:
            closed = eqn.params[CALLS[eqn.primitive.name]]
            inner = getattr(closed, "jaxpr", closed)
            inside = dict(zip(inner.invars, operands, strict=True))
            for v, array in zip(inner.constvars, getattr(closed, "consts", ()), strict=True):
                inside[v] = Variable(v.aval, constant=array)
            # JAX traces its own functions once: their lines are those of some earlier caller.
            own = origin(inner)[1].startswith(PACKAGE)
            results = inlined(inner, inside, equations, caller or (eqn if own else None))
        else:
            results = [Variable(v.aval) for v in eqn.outvars]
            equation = Equation(eqn, operands, results, caller)
            for result in results:
                result.equation = equation
                result.number = _folded(equation)
            equations.append(equation)
        variables.update(zip(eqn.outvars, results, strict=True))
    return [of(atom) for atom in jaxpr.outvars]


def _folded(equation: Equation) -> float | None:
    """The value of an equation of known numbers: sizes leave such equations behind."""
    name, operands = equation.name, equation.operands
    numbers = [v.number for v in operands]
    if not operands or len(equation.results) != 1:
        return None
    if name == "select_n" and len(numbers) == 3 and numbers[0] is not None:
        return numbers[1 + int(numbers[0])]
    if any(number is None for number in numbers):
        return None
    arrays = [np.asarray(v.number) if v.floating else np.asarray(v.number, v.aval.dtype)
              for v in operands]  # fmt: skip
    op = ELEMENTWISE.get(name)
    if op in TABLE and equation.results[0].aval.dtype.kind in "fb":
        with np.errstate(all="ignore"):
            value = TABLE[op].meaning(namespace(np.zeros(1)), *arrays)
    elif name in ("convert_element_type", "broadcast_in_dim", "reshape", "squeeze"):
        value = arrays[0]
    else:
        return None
    result = equation.results[0]
    return float(value if result.floating else np.asarray(value).astype(result.aval.dtype))


def needed(
    equations: Sequence[Equation], wanted: Iterable[Variable], known: Iterable[Variable] = ()
) -> list[Equation]:
    """The equations that compute what is wanted from what is known."""
    known = set(known)
    missing, chosen = set(wanted) - known, []
    for equation in reversed(equations):
        if not missing.isdisjoint(equation.results):
            chosen.append(equation)
            missing |= set(equation.operands) - known
    return chosen[::-1]


def evaluated(eqn: Any, operands: Sequence[Array]) -> list[Array]:
    """The results of an equation of a jaxpr."""
    bound = eqn.primitive.get_bind_params(eqn.params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)  # before JAX 0.9
    with eqn.ctx.manager:
        results = eqn.primitive.bind(*functions, *operands, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def evaluate(equations: Iterable[Equation], values: Values) -> None:
    """Adds what equations compute to ``values``."""
    for equation in equations:
        operands = [value(v, values) for v in equation.operands]
        values.update(zip(equation.results, evaluated(equation.eqn, operands), strict=True))


def value(v: Variable, values: Values) -> Array:
    """The value of a variable."""
    return values[v] if v in values or v.constant is None else v.constant


def at_all_steps(
    equations: Sequence[Equation], wanted: Sequence[Variable], moving: Values, fixed: Values,
    steps: int,
) -> list[Array]:  # fmt: skip
    """What equations compute from values that move, and others that do not."""

    def one(*parts: Array) -> list[Array]:
        values = fixed | dict(zip(moving, parts, strict=True))
        evaluate(equations, values)
        return [jnp.asarray(value(v, values)) for v in wanted]

    return jax.vmap(one, axis_size=steps)(*moving.values()) if wanted else []


# ---- the body as a cell --------------------------------------------------------------------------
class Body:
    """The body of a ``lax.scan`` that was read.

    Args:
        closed: its jaxpr, whose arguments are what it closes over, the carry, and this step's x.
        consts, carries: the numbers of the first two.

    Raises:
        Refused: if it cannot be read.
    """

    def __init__(self, closed: Any, consts: int, carries: int) -> None:
        jaxpr = closed.jaxpr
        if jaxpr.effects:
            raise Refused(
                f"the body has side effects: {', '.join(map(str, jaxpr.effects))}. Instead: return "
                "what is to be printed as an output, and print it after the loop."
            )
        arguments = [Variable(v.aval) for v in jaxpr.invars]
        self.consts, self.carry = arguments[:consts], arguments[consts:][:carries]
        self.x = arguments[consts + carries :]
        self.equations: list[Equation] = []
        variables = dict(zip(jaxpr.invars, arguments, strict=True))
        for v, array in zip(jaxpr.constvars, closed.consts, strict=True):
            variables[v] = Variable(v.aval, constant=array)
        results = inlined(jaxpr, variables, self.equations)
        self.after, self.y = results[:carries], results[carries:]
        self.ahead = self._ahead()
        self.states = [k for k in range(carries) if k not in self.ahead]
        self._classify()
        self._check()
        self.dtype = self.carry[self.states[0]].aval.dtype
        self.reading = self._read(*origin(jaxpr)[:1], _names(jaxpr, consts, carries))
        self.jitted = jax.jit(self.run, static_argnames=("steps", "reverse", "engine"))

    # -- kinds of values -------------------------------------------------------------------------
    def _ahead(self) -> list[int]:
        """The carries that are computed beforehand: counters, keys, and all else that no state
        enters; of floating point numbers only single ones, unless all carries are.
        """
        depends: dict[Variable, set[int]] = {v: {k} for k, v in enumerate(self.carry)}
        for equation in self.equations:
            into = set().union(*(depends.get(v, ()) for v in equation.operands))
            depends |= dict.fromkeys(equation.results, into)
        ranks = [len(v.shape) for v in self.carry]
        ahead = {
            k for k, v in enumerate(self.carry)
            if not v.floating or (not v.shape and max(ranks) > 0)
        }  # fmt: skip
        while late := {k for k in ahead if depends.get(self.after[k], set()) - ahead}:
            ahead -= late
        return sorted(ahead)

    def _classify(self) -> None:
        for k, v in enumerate(self.carry):
            v.kind = "X" if k in self.ahead else "S"
        for v in self.x:
            v.kind = "X"
        for equation in self.equations:
            kinds = {v.kind for v in equation.operands}
            for v in equation.results:
                v.kind = "S" if "S" in kinds else "X" if "X" in kinds else "F"

    def _check(self) -> None:
        carries = [self.carry[k] for k in self.states]
        reals = {v.aval.dtype for v in carries if v.floating}
        if not reals:
            raise Refused("no floating point numbers are carried from step to step")
        others = {v.aval.dtype for v in carries} - reals - {np.dtype(bool)}
        if others or len(reals) > 1:
            names = ", ".join(sorted(map(str, reals | others)))
            raise Refused(
                f"carries that depend on states have the dtypes {names}. Instead: carry floating "
                "point numbers of one dtype, and booleans."
            )
        if any(getattr(v.aval, "weak_type", False) for v in carries):
            raise Refused(
                "a carry is weakly typed, as Python's numbers are. Instead: start from an array "
                "with a dtype, such as jnp.zeros(shape, jnp.float32)."
            )
        if any(0 in v.shape for v in (*self.carry, *self.x)):
            raise Refused("an array of the loop is empty")

    def _axes(self) -> list[int | None]:
        """The axes that may be the batch's, the likeliest first; None for states without one."""
        shapes = [self.carry[k].shape for k in self.states]
        rank = min(map(len, shapes))
        axes: list[int | None] = [
            axis for axis in range(rank) if len({shape[axis] for shape in shapes}) == 1
        ]
        if max(map(len, shapes)) < 2:
            return [None]
        few = sum(map(math.prod, shapes)) <= UNITS
        return [*axes, None] if few else axes or [None]

    @functools.cached_property
    def plan(self) -> Plan:
        """The plan of the cell, which says what runs it."""
        reading = self.reading
        return planned(reading.cell, reading.size, self.dtype, None, reading.sizes)

    def _read(self, name: str, names: Sequence[str]) -> Reading:
        refusals: list[Refused] = []
        for axis in self._axes():
            try:
                reader = _Reader(self, axis)
                self.rows = reader.graph.rows or 1
                reading = reader.read(name, names)
            except Refused as refusal:
                refusals.append(refusal)
                continue
            # Rows that are read as units may have states, weights and products of their own.
            parts = len(reading.pieces) + len(reading.params) + len(reading.weights)
            if axis is not None or parts <= MANY:
                return reading
        raise refusals[0]

    # -- a call ----------------------------------------------------------------------------------
    def run(
        self, consts: Sequence[Array], first: Sequence[Array], xs: Sequence[Array], *,
        steps: int, reverse: bool, engine: str | None = None,
    ) -> list[Array]:  # fmt: skip
        """The final carry and the stacked outputs."""
        reading, carries = self.reading, len(first)
        if reverse and reading.flags is not None:  # resets of a reverse direction mean another step
            flipped = [jnp.flip(x, 0) for x in xs]
            results = self.run(consts, first, flipped, steps=steps, reverse=False, engine=engine)
            return [*results[:carries], *(jnp.flip(y, 0) for y in results[carries:])]
        run = Run(self, consts, first, xs, steps, reverse)
        states = [first[k] for k in self.states]
        every = reading.cell.state_names
        seen = [k for k in range(len(states)) if self._seen(k)]
        wanted = [n for n in every[1:] if any(n in reading.names_of(k) for k in seen)]
        output, final, *more = recurrence(
            reading.cell, **reading.call(run, states), return_states=wanted or None,
            reverse=reverse, engine=engine,
        )  # fmt: skip
        sequences = {every[0]: output} | (dict(more[0]) if more else {})
        last = list(first)
        for k, values in zip(self.ahead, run.final, strict=True):
            last[k] = values
        moving = dict(run.moving)
        for k, number in enumerate(self.states):
            before, after = self.carry[number], self.after[number]
            last[number] = self._user(k, dict(zip(every, final, strict=True)))
            if k in seen:
                sequence = self._user(k, sequences)
                start = jnp.asarray(first[number])[None]
                parts = [sequence[1:], start] if reverse else [start, sequence[:-1]]
                moving[before] = jnp.concatenate(parts)
                moving[after] = sequence
        equations = needed(self.equations, self.y, {*moving, *run.fixed})
        return [*last, *at_all_steps(equations, self.y, moving, run.fixed, steps)]

    def _user(self, k: int, values: dict[str, Array]) -> Array:
        state = self.reading.joined(k, values)
        dtype = self.carry[self.states[k]].aval.dtype
        return state > 0.5 if dtype == bool else state

    @functools.cached_property
    def _late(self) -> list[Equation]:
        """The equations of outputs, from the states after the steps and before."""
        known = [v for v in (*self.carry, *self.after) if v.kind == "S"]
        known += [v for e in self.equations for v in e.results if v.kind != "S"]
        return needed(self.equations, self.y, known)

    def _seen(self, k: int) -> bool:
        """Whether outputs need a sequence of the state."""
        used = {*self.y, *(v for equation in self._late for v in equation.operands)}
        number = self.states[k]
        return self.carry[number] in used or (
            self.after[number] in used and self.after[number].kind == "S"
        )


class Run:
    """The values of one call that no state enters."""

    def __init__(
        self, body: Body, consts: Sequence[Array], first: Sequence[Array], xs: Sequence[Array],
        steps: int, reverse: bool,
    ) -> None:  # fmt: skip
        self.memo: dict[Any, Any] = {}
        self.dtype, self.steps, self.rows = body.dtype, steps, body.rows
        self.fixed: Values = dict(zip(body.consts, consts, strict=True))
        evaluate([e for e in body.equations if e.results[0].kind == "F"], self.fixed)
        carried = [body.carry[k] for k in body.ahead]
        results = [body.after[k] for k in body.ahead]
        equations = needed(body.equations, results, {*carried, *body.x, *self.fixed})

        def step(carry: list[Array], x: list[Array]) -> tuple[list[Array], list[Array]]:
            values = self.fixed | dict(zip((*carried, *body.x), (*carry, *x), strict=True))
            evaluate(equations, values)
            return [value(v, values) for v in results], carry

        self.final: list[Array] = []
        self.moving: Values = dict(zip(body.x, xs, strict=True))
        if carried:
            start = [first[k] for k in body.ahead]
            self.final, ahead = jax.lax.scan(step, start, list(xs), steps, reverse)
            self.moving |= dict(zip(carried, ahead, strict=True))
        late = [e for e in body.equations if e.results[0].kind == "X"]
        wanted = [v for e in late for v in e.results]
        values = at_all_steps(late, wanted, self.moving, self.fixed, steps)
        self.moving |= dict(zip(wanted, values, strict=True))


def _names(jaxpr: Any, consts: int, carries: int) -> list[str]:
    """What the user calls the carries, "" where JAX does not tell."""
    names = getattr(getattr(jaxpr, "debug_info", None), "arg_names", None) or ()
    if len(names) != len(jaxpr.invars):
        return [""] * carries
    return [str(name or "") for name in names[consts:][:carries]]


class _Reader:
    """Reads the equations from states to states."""

    def __init__(self, body: Body, axis: int | None) -> None:
        self.body, self.axis = body, axis
        rows = None if axis is None else body.carry[body.states[0]].shape[axis]
        self.graph = Graph(Arrays, rows)
        self.values: dict[Variable, Value | Outer] = {}
        self.outers: dict[Variable, Outer] = {}

    def read(self, name: str, names: Sequence[str]) -> Reading:
        body, graph = self.body, self.graph
        before = []
        for k in body.states:
            v = body.carry[k]
            state = graph.state(v.shape, self.axis, v.aval.dtype == bool, names[k])
            self.values[v] = state
            before.append(state)
        after = [body.after[k] for k in body.states]
        inner = [e for e in body.equations if e.results[0].kind == "S"]
        for equation in needed(inner, after, [body.carry[k] for k in body.states]):
            self._at(equation, [self.operand(v) for v in equation.operands])
        pairs = [(old, self.operand(v)) for old, v in zip(before, after, strict=True)]
        return read(graph, pairs, name)

    def _at(self, equation: Equation, operands: list[Any]) -> None:
        graph = self.graph
        graph.where = place(equation.caller or equation.eqn)
        if equation.name not in TABLES:
            graph.refuse(
                f"the table has no {equation.name} of a value that depends on a state",
                INSTEAD.get(equation.name, "operations that cells have, as docs/cells.md lists them"),
            )
        for v in equation.results:
            if v.aval.dtype not in (self.body.dtype, np.dtype(bool)):
                self._refuse_dtype(equation, v)
        results = self.apply(equation, operands)
        results = results if isinstance(results, list) else [results]
        self.values.update(zip(equation.results, results, strict=True))
        graph.where = ""

    def _refuse_dtype(self, equation: Equation, v: Variable) -> None:
        old, new = equation.operands[0].aval.dtype, v.aval.dtype
        if v.floating and jnp.issubdtype(old, jnp.floating):
            self.graph.refuse(
                f"a value that depends on a state is converted from {old} to {new} within the step",
                f"compute all of the step in {self.body.dtype}",
            )
        self.graph.refuse(
            f"{equation.name} makes numbers of {new} from a state",
            f"compute in {self.body.dtype}, and convert outputs after the loop",
        )

    # -- values ----------------------------------------------------------------------------------
    def operand(self, v: Variable) -> Value | Outer:
        """The value of a variable as an operand."""
        if v.kind == "S":
            return self.values[v]
        if v not in self.outers:
            self.outers[v] = self._outer(v)
        return self.outers[v]

    def _outer(self, v: Variable) -> Outer:
        if v.kind == "X":
            get = lambda run: run.moving[v]  # noqa: E731
        else:
            get = lambda run: jnp.asarray(value(v, run.fixed))  # noqa: E731
        outer = Outer(
            v.kind, v.shape, get, v.aval.dtype == bool, self._per_row(v), v.number
        )  # fmt: skip
        if v.kind == "X" and v.equation is not None:
            outer.units = self._affine(v.equation)[v.equation.results.index(v)]
        return outer

    def _per_row(self, v: Variable) -> bool:
        """Whether a value may differ from row to row of the batch."""
        axis, equation = self.axis, v.equation
        if axis is None or axis >= len(v.shape) or v.number is not None:
            return False
        if equation is None or v.shape[axis] == 1:
            return v.shape[axis] > 1
        if equation.name == "broadcast_in_dim":
            dimensions, inner = equation.eqn.params["broadcast_dimensions"], equation.operands[0]
            return axis in dimensions and inner.shape[dimensions.index(axis)] > 1
        if equation.name in {*ELEMENTWISE, "select_n", "convert_element_type", "integer_pow"}:
            return any(self._per_row(operand) for operand in equation.operands)
        return True

    def _affine(self, equation: Equation) -> list[Value | None]:
        """The units of X values, if they are affine in others."""
        none: list[Value | None] = [None] * len(equation.results)
        name, operands = equation.name, equation.operands
        linear = name in {*STRUCTURAL, "add", "sub", "neg", "dot_general", "convert_element_type"}
        scaled = name == "mul" and any(v.kind == "F" for v in operands)
        scaled |= name == "div" and operands[1].kind == "F"
        dtypes = {v.aval.dtype for v in (*operands, *equation.results)}
        flags = name in STRUCTURAL and dtypes == {np.dtype(bool)}
        if not (linear or scaled) or not (flags or dtypes == {self.body.dtype}):
            return none
        try:
            units = [
                self.graph.base(outer, self.axis) if outer.kind == "X" else outer
                for outer in map(self.operand, operands)
                if isinstance(outer, Outer)
            ]
            results = self.apply(equation, units)
        except Refused:
            return none
        results = results if isinstance(results, list) else [results]
        return [units if isinstance(units, Value) else None for units in results]

    # -- the table -------------------------------------------------------------------------------
    def apply(self, equation: Equation, operands: list[Any]) -> Any:
        """The results of an equation."""
        graph, name, params = self.graph, equation.name, equation.eqn.params
        if name in ELEMENTWISE:
            op = ELEMENTWISE[name]
            return graph.elementwise(op, *operands, boolean=op in CONDITIONS)
        if name in STRUCTURAL:
            return graph.structural(functools.partial(STRUCTURAL[name], params), *operands)
        if name in REDUCED:
            return graph.reduce(REDUCED[name], operands[0], params["axes"], False)
        return getattr(self, f"_{name}")(equation, operands)

    def _max(self, equation: Equation, operands: list[Any], op: str = "maximum") -> Any:
        graph = self.graph
        bound = -math.inf if op == "maximum" else math.inf
        for number, other in (operands, operands[::-1]):
            if isinstance(number, Outer) and number.number == bound:
                return other
        # JAX gives half of the gradient to each of two equal numbers.
        a, b = operands
        half = graph.elementwise("mul", graph.elementwise("add", a, b), 0.5)
        tie = graph.elementwise("eq", a, b, boolean=True)
        return graph.elementwise("where", tie, half, graph.elementwise(op, a, b))

    def _abs(self, equation: Equation, operands: list[Any]) -> Any:
        (v,) = operands  # whose derivative at 0 is 1 in JAX, and 0 in a cell
        positive = self.graph.elementwise("ge", v, 0.0, boolean=True)
        return self.graph.elementwise("where", positive, v, self.graph.elementwise("neg", v))

    def _is_finite(self, equation: Equation, operands: list[Any]) -> Any:
        size = self.graph.elementwise("abs", *operands)
        return self.graph.elementwise("lt", size, math.inf, boolean=True)

    def _erfc(self, equation: Equation, operands: list[Any]) -> Any:
        return self.graph.elementwise("sub", 1.0, self.graph.elementwise("erf", *operands))

    def _min(self, equation: Equation, operands: list[Any]) -> Any:
        return self._max(equation, operands, "minimum")

    def _clamp(self, equation: Equation, operands: list[Any]) -> Any:
        low, v, high = operands  # no gradient at the bounds: to equal numbers the first has it
        if any(isinstance(bound, Value) for bound in (low, high)):
            self.graph.refuse("a clamp has a bound that depends on a state", "jnp.clip")
        above = self.graph.elementwise("maximum", low, v)
        return self.graph.elementwise("minimum", high, above)

    def _select_n(self, equation: Equation, operands: list[Any]) -> Any:
        graph = self.graph
        condition, *cases = operands
        if isinstance(condition, Outer) and condition.number is not None:
            chosen = cases[int(condition.number)]
            if isinstance(chosen, Value):
                return chosen
            return graph.elementwise("where", condition, *cases[::-1])
        if len(cases) != 2 or equation.operands[0].aval.dtype != bool:
            graph.refuse("this selects among more than two values", "jnp.where, once or nested")
        if equation.results[0].aval.dtype != bool:
            return graph.elementwise("where", condition, cases[1], cases[0])
        logic = functools.partial(graph.elementwise, boolean=True)
        negated = self._not(condition)
        parts = logic("logical_and", condition, cases[1]), logic("logical_and", negated, cases[0])
        return logic("logical_or", *parts)

    def _not(self, condition: Any) -> Any:
        if isinstance(condition, Value):
            return self.graph.elementwise("logical_not", condition, boolean=True)
        get = lambda run: ~condition.get(run)  # noqa: E731
        return Outer(condition.kind, condition.shape, get, True, condition.per_row)

    def _integer_pow(self, equation: Equation, operands: list[Any]) -> Any:
        return self.graph.elementwise("pow", operands[0], float(equation.eqn.params["y"]))

    def _convert_element_type(self, equation: Equation, operands: list[Any]) -> Any:
        old, new = equation.operands[0].aval.dtype, equation.results[0].aval.dtype
        if old == new:
            return operands[0]
        if new == bool:
            return self.graph.elementwise("truth", operands[0], boolean=True)
        if old == bool:
            return self.graph.elementwise("number", operands[0])
        return self._refuse_dtype(equation, equation.results[0])

    def _optimization_barrier(self, equation: Equation, operands: list[Any]) -> Any:
        return operands

    def _custom_jvp_call(self, equation: Equation, operands: list[Any]) -> Any:
        """Functions with a derivative of their own: JAX's, which are known."""
        params = equation.eqn.params
        closed = params["call_jaxpr"]
        name, file = origin(closed.jaxpr)
        graph = self.graph
        if file.startswith(PACKAGE):
            if name == "relu":
                return graph.elementwise("relu", operands[0])
            if name == "relu6":  # no gradient at 6
                return graph.elementwise("minimum", 6.0, graph.elementwise("relu", operands[0]))
            if name == "logaddexp":
                for number, other in (operands, operands[::-1]):
                    if isinstance(number, Outer) and number.number == 0.0:
                        return graph.elementwise("softplus", other)
        instead = "b + jax.nn.softplus(a - b)" if name == "logaddexp" else "it without custom_jvp"
        return graph.refuse(f"{name or 'a function'} has a derivative of its own", instead)

    def _cumsum(self, equation: Equation, operands: list[Any]) -> Any:
        axis, size = equation.eqn.params["axis"], operands[0].shape[equation.eqn.params["axis"]]
        ones = np.triu(np.ones((size, size)))
        ones = ones.T if equation.eqn.params["reverse"] else ones
        made = self.graph.product(
            operands[0], (axis,), (size,), lambda run: jnp.asarray(ones, run.dtype)
        )
        return Value(np.moveaxis(made.ids, -1, axis))

    def _dot_general(self, equation: Equation, operands: list[Any]) -> Any:
        graph = self.graph
        (lc, rc), (lb, rb) = equation.eqn.params["dimension_numbers"]
        left, right = operands
        swapped = not isinstance(left, Value)
        value, weight = (right, left) if swapped else (left, right)
        vc, wc, vb, wb = (rc, lc, rb, lb) if swapped else (lc, rc, lb, rb)
        if isinstance(weight, Value) or weight.kind != "F":
            whose = "a state" if isinstance(weight, Value) else "this step's input"
            graph.refuse(
                f"the matrix of this product depends on {whose}",
                "products with matrices of weights; for two vectors, jnp.sum(a * b, axis)",
            )
        if graph.view(value)[0] in vb:
            graph.refuse("each row of the batch has a matrix of its own")
        free = [i for i in range(len(weight.shape)) if i not in (*wc, *wb)]
        out = tuple(weight.shape[i] for i in free)
        heads = tuple(weight.shape[i] for i in wb)
        size = math.prod(weight.shape[i] for i in wc)

        def matrix(run: Run) -> Array:
            array = jnp.transpose(weight.get(run), (*wb, *wc, *free))
            return array.reshape(*([math.prod(heads)] if wb else []), size, math.prod(out))

        if not wb:
            ids = graph.product(value, tuple(vc), out, matrix).ids
        else:
            rest = [i for i in range(len(value.shape)) if i not in vb]
            moved = value.ids.transpose(*vb, *rest)
            moved = moved.reshape(math.prod(heads), *moved.shape[len(vb) :])
            axes = tuple(1 + rest.index(i) for i in vc)
            ids = graph.heads(Value(moved), 0, axes, out, matrix).ids
            ids = ids.reshape(*heads, *ids.shape[1:])
        if swapped:  # the free axes of the left operand come first
            count, last = len(heads), ids.ndim - len(free)
            ids = ids.transpose(*range(count), *range(last, ids.ndim), *range(count, last))
        return Value(ids)


RULES = frozenset(
    "abs max min clamp select_n integer_pow is_finite erfc convert_element_type optimization_barrier "
    "custom_jvp_call cumsum dot_general".split()
)
TABLES = frozenset({*ELEMENTWISE, *STRUCTURAL, *REDUCED, *RULES})
