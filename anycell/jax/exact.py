"""Evaluates jaxprs in NumPy, in float64: at once, where XLA would compile for a second.

JAX evaluates the operations that are not in the tables. Keys of random numbers are numbers of 64
bits, from which others follow than in JAX: two programs that draw alike still draw the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from anycell.jax.equations import CALLS, OPS, evaluated, interpreted
from anycell.jax.table import STRUCTURAL, letters
from anycell.lang.namespaces import NUMPY
from anycell.lang.ops import TABLE
from anycell.read import Refused

Array = Any

_CALLS = CALLS | {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
# Of whole numbers; others round, or work on bits.
_WHOLE = frozenset("add sub mul neg lt le gt ge eq ne".split())


def _dot(params: Any, a: Array, b: Array) -> Array:
    form = letters(params["dimension_numbers"], [a.ndim, b.ndim])
    return np.einsum(form, a, b, optimize=True)


def _iota(params: Any) -> Array:
    shape, axis = params["shape"], params["dimension"]
    places = np.arange(shape[axis]).reshape([-1 if i == axis else 1 for i in range(len(shape))])
    return converted(np.broadcast_to(places, shape), params["dtype"])


def _cumsum(params: Any, a: Array) -> Array:
    axis = params["axis"]
    return np.flip(np.cumsum(np.flip(a, axis), axis), axis) if params["reverse"] else a.cumsum(axis)


def mixed(words: Array) -> Array:
    """Words of 64 bits, mixed. Source: Steele, Lea & Flood, *Fast Splittable Pseudorandom Number
    Generators*, 2014.
    """
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _split(params: Any, keys: Array) -> Array:
    shape = params["shape"]
    places = np.arange(1, 1 + np.prod(shape, dtype=int), dtype=np.uint64).reshape(shape)
    return mixed(keys.reshape(*keys.shape, *[1] * len(shape)) ^ mixed(places))


def _bits(params: Any, keys: Array) -> Array:
    width = params["bit_width"]
    return (_split(params, keys) >> np.uint64(64 - width)).astype(f"uint{width}")


def _wrapped(params: Any, words: Array) -> Array:
    key = np.zeros(words.shape[:-1], np.uint64)
    for i in range(words.shape[-1]):
        key = mixed((key << np.uint64(1)) ^ words[..., i].astype(np.uint64))
    return key


def _unwrapped(params: Any, keys: Array) -> Array:
    count = params["result"].shape[-1]
    return (_split({"shape": (count,)}, keys) >> np.uint64(32)).astype(np.uint32)


# Of floating point numbers.
_REALS: dict[str, Callable[..., Array]] = {
    "abs": np.abs, "expm1": np.expm1, "is_finite": np.isfinite, "log1p": np.log1p,
    "max": np.maximum, "min": np.minimum, "pow": np.power, "square": np.square,
    "clamp": lambda low, a, high: np.minimum(np.maximum(a, low), high),
    "rsqrt": lambda a: 1.0 / np.sqrt(a),
}  # fmt: skip
_RULES: dict[str, Callable[..., Array]] = {
    "cumsum": _cumsum, "dot_general": _dot, "integer_pow": lambda p, a: a ** p["y"],
    "reduce_max": lambda p, a: a.max(tuple(p["axes"])),
    "reduce_min": lambda p, a: a.min(tuple(p["axes"])),
    "reduce_sum": lambda p, a: a.sum(tuple(p["axes"])),
}  # fmt: skip
# Of operands of any sort.
_ANY: dict[str, Callable[..., Array]] = {
    "bitcast_convert_type": lambda p, a: converted(a.view(p["new_dtype"]), p["new_dtype"]),
    "convert_element_type": lambda p, a: converted(a, p["new_dtype"]),
    "iota": _iota, "random_bits": _bits, "random_split": _split, "random_unwrap": _unwrapped,
    "random_wrap": _wrapped,
    "random_fold_in": lambda p, keys, a: mixed(keys ^ mixed(a.astype(np.uint64) + np.uint64(1))),
    "random_seed": lambda p, a: mixed(a.astype(np.uint64)),
    "select_n": lambda p, case, *cases: np.choose(case.astype(int), cases),
}  # fmt: skip
_BITS: dict[str, Callable[..., Array]] = {
    "and": np.bitwise_and, "not": np.bitwise_not, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "shift_left": np.left_shift, "shift_right_logical": np.right_shift,
}  # fmt: skip


def converted(array: Array, dtype: Any) -> Array:
    """An array in a dtype, or in float64 if that is a floating point dtype."""
    return np.asarray(array).astype(np.float64 if jnp.issubdtype(dtype, jnp.floating) else dtype)


def evaluate(jaxpr: Any, consts: Sequence[Array], *arguments: Array) -> list[Array]:
    """The results of a jaxpr, with all floating point numbers in float64."""
    wide = map(_wide, consts), map(_wide, arguments)
    with np.errstate(all="ignore"):
        return interpreted(jaxpr, *wide, _results, _number)


def _number(atom: Literal) -> Array:
    """A number of Python, which may have more digits than its dtype."""
    aval: Any = atom.aval
    return _wide(np.asarray(atom.val, aval.dtype))


def _wide(array: Array) -> Array:
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.extended):
        with jax.ensure_compile_time_eval():
            return _wrapped({}, np.asarray(jax.random.key_data(array)))
    return converted(array, np.asarray(array).dtype)


def _results(eqn: Any, operands: list[Array]) -> Sequence[Array]:
    name, params = eqn.primitive.name, eqn.params | {"result": eqn.outvars[0].aval}
    if name in _CALLS:
        closed = params[_CALLS[name]]
        return evaluate(getattr(closed, "jaxpr", closed), getattr(closed, "consts", ()), *operands)
    if name == "scan":
        return _scan(params, operands)
    if name == "cond":
        closed = params["branches"][int(operands[0])]
        return evaluate(closed.jaxpr, closed.consts, *operands[1:])
    op = OPS.get(name, "")
    if op == "identity":
        return operands
    if name in _ANY:
        return [_ANY[name](params, *operands)]
    if name in STRUCTURAL:
        results = STRUCTURAL[name](params, *operands)
        return results if isinstance(results, list) else [results]
    real = all(a.dtype in (np.float64, bool) for a in operands)
    if op in TABLE and (real or op in _WHOLE):
        return [TABLE[op].meaning(NUMPY, *operands)]
    if name in _REALS and real:
        return [_REALS[name](*operands)]
    if name in _RULES and real:
        return [_RULES[name](params, *operands)]
    if name in _BITS and all(a.dtype.kind == "u" for a in operands):
        return [_BITS[name](*operands)]
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
    return [*carry, *map(np.stack, zip(*steps, strict=True))]


def _by_jax(eqn: Any, operands: list[Array]) -> list[Array]:
    if any(jnp.issubdtype(v.aval.dtype, jax.dtypes.extended) for v in (*eqn.invars, *eqn.outvars)):
        raise Refused(f"{eqn.primitive.name} of random keys cannot be compared")
    arrays = [
        np.asarray(a).astype(atom.aval.dtype) for a, atom in zip(operands, eqn.invars, strict=True)
    ]
    with jax.ensure_compile_time_eval():
        return list(map(_wide, evaluated(eqn, arrays)))
