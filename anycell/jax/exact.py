"""Evaluates jaxprs in NumPy, in float64: at once, where XLA would compile for a second.

JAX evaluates the operations that are not in the tables, such as those of random numbers.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from anycell.jax.read import CALLS, ELEMENTWISE, STRUCTURAL, evaluated
from anycell.lang.namespaces import namespace
from anycell.lang.ops import TABLE

Array = Any

_NUMPY = namespace(np.zeros(1))
_CALLS = CALLS | {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
# Of whole numbers; others round, or work on bits.
_WHOLE = frozenset("add sub mul neg lt le gt ge eq ne".split())


def _dot(params: Any, a: Array, b: Array) -> Array:
    (ca, cb), (ba, bb) = params["dimension_numbers"]
    letters = iter(string.ascii_letters)
    left = [next(letters) for _ in a.shape]
    right = [next(letters) for _ in b.shape]
    for i, j in zip((*ca, *ba), (*cb, *bb), strict=True):
        right[j] = left[i]
    batch = [left[i] for i in ba]
    rest = [left[i] for i in range(a.ndim) if i not in (*ca, *ba)]
    rest += [right[j] for j in range(b.ndim) if j not in (*cb, *bb)]
    form = f"{''.join(left)},{''.join(right)}->{''.join(batch + rest)}"
    return np.einsum(form, a, b, optimize=True)


def _iota(params: Any) -> Array:
    shape, axis = params["shape"], params["dimension"]
    places = np.arange(shape[axis]).reshape([-1 if i == axis else 1 for i in range(len(shape))])
    return converted(np.broadcast_to(places, shape), params["dtype"])


def _cumsum(params: Any, a: Array) -> Array:
    axis = params["axis"]
    return np.flip(np.cumsum(np.flip(a, axis), axis), axis) if params["reverse"] else a.cumsum(axis)


_RULES: dict[str, Callable[..., Array]] = {
    "clamp": lambda p, low, a, high: np.minimum(np.maximum(a, low), high),
    "convert_element_type": lambda p, a: converted(a, p["new_dtype"]),
    "cumsum": _cumsum,
    "dot_general": _dot,
    "expm1": lambda p, a: np.expm1(a),
    "integer_pow": lambda p, a: a ** p["y"],
    "iota": _iota,
    "is_finite": lambda p, a: np.isfinite(a),
    "log1p": lambda p, a: np.log1p(a),
    "max": lambda p, a, b: np.maximum(a, b),
    "min": lambda p, a, b: np.minimum(a, b),
    "reduce_max": lambda p, a: a.max(tuple(p["axes"])),
    "reduce_sum": lambda p, a: a.sum(tuple(p["axes"])),
    "rsqrt": lambda p, a: 1.0 / np.sqrt(a),
    "square": lambda p, a: a * a,
    "select_n": lambda p, case, *cases: np.choose(case.astype(int), cases),
}


def converted(array: Array, dtype: Any) -> Array:
    """An array in a dtype, or in float64 if that is a floating point dtype."""
    return np.asarray(array).astype(np.float64 if jnp.issubdtype(dtype, jnp.floating) else dtype)


def evaluate(jaxpr: Any, consts: Sequence[Array], *arguments: Array) -> list[Array]:
    """The results of a jaxpr, with all floating point numbers in float64."""
    values = dict(zip(jaxpr.constvars, map(_wide, consts), strict=True))
    values |= dict(zip(jaxpr.invars, map(_wide, arguments), strict=True))

    def of(atom: Any) -> Array:
        return _wide(atom.val) if isinstance(atom, Literal) else values[atom]

    with np.errstate(all="ignore"):
        for eqn in jaxpr.eqns:
            results = _results(eqn, list(map(of, eqn.invars)))
            values.update(zip(eqn.outvars, results, strict=True))
    return list(map(of, jaxpr.outvars))


def _wide(array: Array) -> Array:
    return array if _key(array) else converted(array, np.asarray(array).dtype)


def _key(array: Array) -> bool:
    """Whether an array holds keys of random numbers, which only JAX handles."""
    return isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.extended)


def _results(eqn: Any, operands: list[Array]) -> Sequence[Array]:
    name, params = eqn.primitive.name, eqn.params
    if name in _CALLS:
        closed = params[_CALLS[name]]
        return evaluate(getattr(closed, "jaxpr", closed), getattr(closed, "consts", ()), *operands)
    if name == "scan":
        return _scan(params, operands)
    if not any(map(_key, operands)):
        op = ELEMENTWISE.get(name, "")
        real = all(a.dtype in (np.float64, bool) for a in operands)
        if op == "identity":
            return operands
        if op in TABLE and (real or op in _WHOLE):
            return [TABLE[op].meaning(_NUMPY, *operands)]
        if name in _RULES and (real or name in ("convert_element_type", "iota", "select_n")):
            return [_RULES[name](params, *operands)]
        if name in STRUCTURAL:
            results = STRUCTURAL[name](params, *operands)
            return results if isinstance(results, list) else [results]
    return _by_jax(eqn, operands)


def _scan(params: Any, operands: list[Array]) -> list[Array]:
    closed, count, carries = params["jaxpr"], params["num_consts"], params["num_carry"]
    consts, carry = operands[:count], operands[count : count + carries]
    xs, length = operands[count + carries :], params["length"]
    steps: list[Any] = [None] * length
    for t in range(length)[:: -1 if params["reverse"] else 1]:
        now = [x[t] for x in xs]
        results = evaluate(closed.jaxpr, closed.consts, *consts, *carry, *now)
        carry, steps[t] = results[:carries], results[carries:]
    return [*carry, *map(_stacked, zip(*steps, strict=True))]


def _stacked(arrays: Sequence[Array]) -> Array:
    return jnp.stack(arrays) if _key(arrays[0]) else np.stack(arrays)


def _by_jax(eqn: Any, operands: list[Array]) -> list[Array]:
    arrays = [
        a if _key(a) else np.asarray(a).astype(atom.aval.dtype)
        for a, atom in zip(operands, eqn.invars, strict=True)
    ]
    with jax.ensure_compile_time_eval():
        return list(map(_wide, evaluated(eqn, arrays)))
