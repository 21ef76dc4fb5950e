"""Equations of a jaxpr as one list, with the functions that it calls put in their places."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from anycell.lang.namespaces import namespace
from anycell.lang.ops import TABLE

Array = Any
PACKAGE = str(Path(jax.__file__).parent)
BOOL = np.dtype(bool)

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
# Functions that are called, and the parameter of a call that holds their jaxpr.
CALLS = {
    "jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr",
    "checkpoint": "jaxpr", "remat": "jaxpr", "remat2": "jaxpr",
}  # fmt: skip


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
        aval: Any = atom.aval
        known = np.ndim(atom.val) == 0 and aval.dtype.kind in "fiub"
        return Variable(aval, number=float(atom.val) if known else None, constant=atom.val)

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
