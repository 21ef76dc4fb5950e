"""Equations of a jaxpr as one list, with the functions that it calls put in their places."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
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
_SAME = (
    "add sub mul div neg exp log log1p expm1 sqrt rsqrt tanh sign sin cos erf square stop_gradient "
    "lt le gt ge eq ne"
)
OPS = {name: name for name in _SAME.split()} | {
    "add_any": "add", "logistic": "sigmoid", "copy": "identity", "copy_p": "identity",
    "and": "logical_and", "or": "logical_or", "not": "logical_not", "xor": "logical_xor",
}  # fmt: skip
# Functions that are called, and the parameter of a call that holds their jaxpr.
CALLS = {
    "jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr",
    "checkpoint": "jaxpr", "remat": "jaxpr", "remat2": "jaxpr",
}  # fmt: skip


MOST = 128  # equations of a loop within a step that are put in its place


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

    Results are of the kind of the operands, F, X or S.
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
        kind = max((v.kind for v in operands), key="FXS".index, default="F")
        if name in CALLS or (closed := _taken(eqn, operands, kind)) is not None:
            closed = eqn.params[CALLS[name]] if name in CALLS else closed
            operands = operands[name == "cond" :]
            inner = getattr(closed, "jaxpr", closed)
            inside = dict(zip(inner.invars, operands, strict=True))
            for v, array in zip(inner.constvars, getattr(closed, "consts", ()), strict=True):
                inside[v] = variable(v.aval, constant=array)
            # JAX traces its own functions once: their lines are those of some earlier caller.
            of_jax = origin(inner)[1].startswith(PACKAGE)
            results = inlined(inner, inside, equations, caller or (eqn if of_jax else None))
        else:
            results = [variable(v.aval, kind=kind) for v in eqn.outvars]
            where = place(caller or eqn)
            equation = Equation(name, tuple(operands), eqn.params, results, where, name, eqn)
            for result in results:
                result.number = _folded(equation)
            equations.append(equation)
        variables.update(zip(eqn.outvars, results, strict=True))
    return [of(atom) for atom in jaxpr.outvars]


def _taken(eqn: Any, operands: Sequence[Variable], kind: str) -> Any:
    """The jaxpr that stands for the one branch that a step takes, or for the few turns of a loop
    that a state enters; None for others. A loop over a part of x is none of a few turns.
    """
    params = eqn.params
    if eqn.primitive.name == "cond" and operands[0].number is not None:
        return params["branches"][int(operands[0].number)]
    if eqn.primitive.name != "scan" or kind != "S":
        return None
    closed, split = params["jaxpr"], params["num_consts"]
    end, turns = split + params["num_carry"], range(params["length"])
    if any(v.kind == "X" for v in operands[end:]) or len(turns) * len(closed.eqns) > MOST:
        return None

    def unrolled(*flat: Array) -> list[Array]:
        carry, series = list(flat[split:end]), dict[int, list[Array]]()
        for t in reversed(turns) if params["reverse"] else turns:
            now = [jax.lax.index_in_dim(x, t, keepdims=False) for x in flat[end:]]
            made = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *flat[:split], *carry, *now)
            carry, series[t] = made[: end - split], made[end - split :]
        steps = zip(*[series[t] for t in turns], strict=True)
        return [*carry, *[jnp.stack(parts) for parts in steps]]

    return jax.make_jaxpr(unrolled)(*[atom.aval for atom in eqn.invars])


def _folded(equation: Equation) -> float | None:
    """The value of an equation of known numbers: sizes leave such equations behind."""
    name, operands = equation.name, equation.operands
    numbers = [v.number for v in operands]
    if not operands or len(equation.results) != 1:
        return None
    if equation.results[0].dtype.startswith("complex"):
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
    elif name == "clamp":
        value = np.clip(arrays[1], arrays[0], arrays[2])
    else:
        return None
    return float(value if result.floating else np.asarray(value).astype(result.dtype))


def interpreted(
    jaxpr: Any, consts: Iterable[Array], arguments: Iterable[Array],
    results_of: Callable[[Any, list[Array]], Iterable[Array]],
    literal: Callable[[Literal], Array] = lambda atom: atom.val,
) -> list[Array]:  # fmt: skip
    """The results of a jaxpr, equation by equation.

    Args:
        results_of: of an equation and its operands.
        literal: the array of a number in the jaxpr.
    """
    values = dict(zip(jaxpr.constvars, consts, strict=True))
    values |= zip(jaxpr.invars, arguments, strict=True)

    def of(atom: Any) -> Array:
        return literal(atom) if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
        results = results_of(eqn, list(map(of, eqn.invars)))
        values |= zip(eqn.outvars, results, strict=True)
    return list(map(of, jaxpr.outvars))


def evaluated(eqn: Any, operands: Sequence[Array]) -> list[Array]:
    """The results of an equation of a jaxpr."""
    bound = eqn.primitive.get_bind_params(eqn.params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)  # before JAX 0.9
    with eqn.ctx.manager:
        results = eqn.primitive.bind(*functions, *operands, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def execute(equation: Equation, values: Values) -> list[Array]:
    """The results of an equation of a body."""
    operands = [values[v] for v in equation.arguments]
    if equation.name in ("reduce_max", "reduce_min") and equation.results[0].floating:
        return [_extreme(equation.source, *operands)]
    return evaluated(equation.source, operands)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _extreme(eqn: Any, operand: Array) -> Array:
    """The largest or smallest elements, with a derivative that is never lost.

    JAX gives it to the elements that equal the result. XLA on the CPU (0.10.2) may compute the
    operand once more, in another way, for that comparison, and then no element does.
    """
    return evaluated(eqn, [operand])[0]


@_extreme.defjvp
def _(eqn: Any, operands: Any, tangents: Any) -> tuple[Array, Array]:
    axes = eqn.params["axes"]
    last = tuple(range(-len(axes), 0))
    flat, along = (
        (whole := jnp.moveaxis(array, axes, last)).reshape(*whole.shape[: last[0]], -1)
        for array in (*operands, *tangents)
    )
    made = _extreme(eqn, *operands)
    place = (jnp.argmax if eqn.primitive.name == "reduce_max" else jnp.argmin)(flat, -1)
    chosen = (flat == made[..., None]) | (jnp.arange(flat.shape[-1]) == place[..., None])
    return made, jnp.where(chosen, along, 0).sum(-1) / chosen.sum(-1).astype(along.dtype)
