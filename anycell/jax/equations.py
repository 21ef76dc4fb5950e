"""Equations of a jaxpr as one list, with the functions that it calls put in their places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from anycell.lang.namespaces import NUMPY
from anycell.lang.ops import TABLE as MEANINGS
from anycell.read import Equation, Values, Variable

Array = Any
PACKAGE = str(Path(jax.__file__).parent)
# Operations that are ops of the language.
OPS = {
    "add": "add", "add_any": "add", "sub": "sub", "mul": "mul", "div": "div", "neg": "neg",
    "exp": "exp", "log": "log", "log1p": "log1p", "expm1": "expm1", "sqrt": "sqrt",
    "rsqrt": "rsqrt", "logistic": "sigmoid", "tanh": "tanh", "sign": "sign",
    "sin": "sin", "cos": "cos", "erf": "erf", "square": "square",
    "stop_gradient": "stop_gradient", "copy": "identity", "copy_p": "identity",
    "lt": "lt", "le": "le", "gt": "gt", "ge": "ge", "eq": "eq", "ne": "ne", "and": "logical_and",
    "or": "logical_or", "not": "logical_not", "xor": "logical_xor",
}  # fmt: skip
# Functions that are called, and the parameter of a call that holds their jaxpr.
CALLS = {
    "jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr",
    "checkpoint": "jaxpr", "remat": "jaxpr", "remat2": "jaxpr",
}  # fmt: skip


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


def defined(jaxpr: Any) -> str:
    """The file and line of the function of a jaxpr."""
    return Path(origin(jaxpr)[1]).name


def variable(aval: Any, **more: Any) -> Variable:
    """A variable of the shape and dtype of JAX's."""
    return Variable(tuple(aval.shape), str(aval.dtype), **more)


def inlined(
    jaxpr: Any, variables: dict[Any, Variable], equations: list[Equation], caller: Any = None
) -> list[Variable]:
    """Appends the equations of a jaxpr, and of the functions that it calls; returns its results.

    Args:
        caller: the equation that calls the function of JAX that the jaxpr is in, if one does.
    """

    def of(atom: Any) -> Variable:
        if not isinstance(atom, Literal):
            return variables[atom]
        aval: Any = atom.aval
        known = np.ndim(atom.val) == 0 and aval.dtype.kind in "fiub"
        return variable(aval, number=float(atom.val) if known else None, constant=atom.val)

    for eqn in jaxpr.eqns:
        operands = [of(atom) for atom in eqn.invars]
        name = eqn.primitive.name
        if name in CALLS:
            closed = eqn.params[CALLS[name]]
            inner = getattr(closed, "jaxpr", closed)
            inside = dict(zip(inner.invars, operands, strict=True))
            for v, array in zip(inner.constvars, getattr(closed, "consts", ()), strict=True):
                inside[v] = variable(v.aval, constant=array)
            # JAX traces its own functions once: their lines are those of some earlier caller.
            own = origin(inner)[1].startswith(PACKAGE)
            results = inlined(inner, inside, equations, caller or (eqn if own else None))
        else:
            results = [variable(v.aval) for v in eqn.outvars]
            where = place(caller or eqn)
            equation = Equation(name, tuple(operands), eqn.params, results, where, name, eqn)
            for result in results:
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
    arrays = [np.asarray(v.number, None if v.floating else v.dtype) for v in operands]
    (result,) = equation.results
    if (op := OPS.get(name)) in MEANINGS and (result.floating or result.boolean):
        with np.errstate(all="ignore"):
            value = MEANINGS[op].meaning(NUMPY, *arrays)
    elif name in ("convert_element_type", "broadcast_in_dim", "reshape", "squeeze"):
        value = arrays[0]
    else:
        return None
    return float(value if result.floating else np.asarray(value).astype(result.dtype))


def evaluated(eqn: Any, operands: Sequence[Array]) -> list[Array]:
    """The results of an equation of a jaxpr."""
    bound = eqn.primitive.get_bind_params(eqn.params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)  # before JAX 0.9
    with eqn.ctx.manager:
        results = eqn.primitive.bind(*functions, *operands, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def execute(equation: Equation, values: Values) -> list[Array]:
    """The results of an equation of a body."""
    return evaluated(equation.source, [values[v] for v in equation.arguments])


def at_all_steps(
    wanted: Sequence[Variable], moving: Values, fixed: Values, steps: int
) -> list[Array]:
    """The values of variables at all steps, from values that move and others that do not."""

    def one(*parts: Array) -> list[Array]:
        values = Values(dict(zip(moving, parts, strict=True)), execute, found(fixed))
        return [jnp.asarray(values[v]) for v in wanted]

    if not wanted:
        return []
    if _of_extremes(wanted, moving):
        return list(jax.lax.scan(lambda _, xs: ((), one(*xs)), (), [*moving.values()], steps)[1])
    return jax.vmap(one, axis_size=steps)(*moving.values())


def _of_extremes(wanted: Sequence[Variable], known: Values) -> bool:
    """Whether a derivative may pass through ``reduce_max`` or ``reduce_min``.

    JAX gives it to those elements that equal the result. For all steps at once XLA on the CPU
    (0.10.2) can compute the two differently, and the derivative is lost; in a loop it is not.
    """
    todo, seen = list(wanted), set(known)
    while todo:
        v = todo.pop()
        name = "" if v in seen or v.equation is None else v.equation.name
        if name in ("reduce_max", "reduce_min"):
            return True
        if name not in ("", "stop_gradient"):
            todo += v.equation.operands  # type: ignore[union-attr]
        seen.add(v)
    return False


def found(fixed: Values) -> Callable[[Variable], Array]:
    """Finds what is the same at all steps."""
    return lambda v: fixed.get(v, v.constant)
