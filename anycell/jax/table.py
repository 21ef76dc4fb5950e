"""The table of jaxprs: what each operation of JAX is in the graph of a step."""

from __future__ import annotations

import functools
import math
import string
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode

from anycell import read
from anycell.jax.equations import OPS, PACKAGE, evaluated, execute, origin
from anycell.jax.framework import Part, Stored, whole
from anycell.read import Equation, Values, Variable, row

# What to write in place of operations that people use in cells.
INSTEAD = {
    "while": "operations without a loop within the step",
    "scan": "a loop of few turns, or its steps one after the other",
    "cond": "jnp.where(condition, a, b)",
    "sort": "a cell without sorting",
    "top_k": "a cell without sorting",
    "conv_general_dilated": "a product with the matrix of the convolution",
    "fft": "a product with the matrix of the transform, in real numbers",
    "rem": "a counter of whole numbers, which no state of floats enters",
    "custom_vjp_call": "the function without custom_vjp, with jax.lax.stop_gradient where needed",
}


class Arrays(read.Arrays):
    """The functions of arrays that a reading needs."""

    zeros, constant, cast = jnp.zeros, jnp.asarray, jnp.asarray
    reshape, broadcast = (
        staticmethod(lambda array, shape, f=f: f(jnp.asarray(array), shape))
        for f in (jnp.reshape, jnp.broadcast_to)
    )

    @staticmethod
    def transpose(array: Any, order: Sequence[int]) -> Any:
        if len(order) != 2:
            return jnp.transpose(array, order)
        return array.T if isinstance(array, Stored) else Stored(array, whole(array))

    @classmethod
    def block(cls, matrix: Any, rows: tuple[int, int], columns: tuple[int, int]) -> Any:
        if isinstance(matrix, Stored) and matrix.part == whole(matrix.matrix):
            return Stored(matrix.matrix, Part(columns, rows, False))
        return Stored(jnp.asarray(matrix), Part(rows, columns))

    @classmethod
    def cat(cls, arrays: Sequence[Any], axis: int) -> Any:
        if all(isinstance(array, Stored) and array.part.turned for array in arrays):
            joined = jnp.concatenate([jnp.asarray(array.T) for array in arrays], 1 - axis)
            return Stored(joined, whole(joined))
        return jnp.concatenate(list(map(jnp.asarray, arrays)), axis)


# -- rules -----------------------------------------------------------------------------------------


def _select_n(reader: Reader, condition: Any, *cases: Any, **_: Any) -> Any:
    if isinstance(condition, tuple):  # the first that holds, or the first case
        chosen = cases[0]
        for flag, case in zip(reversed(condition), reversed(cases), strict=True):
            chosen = reader.where(flag, case, chosen)
        return chosen
    if len(cases) != 2 or not condition.boolean:
        reader.graph.refuse("this selects among more than two values", "jnp.where, once or nested")
    return reader.where(condition, cases[1], cases[0])


def _argmax(reader: Reader, _: Any, **__: Any) -> Any:
    """The number of the first of several conditions, as ``jnp.select`` computes it."""
    (stacked,), (place,) = reader.equation.operands, reader.equation.results
    made, uses = stacked.equation, {e.name for e in reader.body.equations if place in e.operands}
    stack = made is not None and made.name == "stack" and made.options["axis"] == 0
    if made is None or not stack or not stacked.boolean or uses != {"select_n"}:
        reader.graph.refuse("this takes the place of a largest number", "jnp.where or jnp.select")
    return tuple(map(reader.operand, made.operands))


def _placed(reader: Reader, *operands: Any, function: Any = None, **_: Any) -> Any:
    """Units that JAX's own function moves, on their positions, to places that are known."""
    function = function or (lambda *arrays: evaluated(reader.equation.source, arrays)[0])
    numbers = Values({}, execute)
    pairs = list(zip(reader.equation.arguments, operands, strict=True))
    values = [o for v, o in pairs if v.floating or v.boolean]
    sizes = [math.prod(value.shape) for value in values]
    positions = iter(np.split(np.arange(sum(sizes), dtype=np.int32), np.cumsum(sizes)[:-1]))
    with jax.ensure_compile_time_eval():
        try:
            at = function(*[
                next(positions).reshape(v.shape) if v.floating or v.boolean else numbers[v]
                for v, _ in pairs
            ])  # fmt: skip
        except KeyError:
            reader.graph.refuse(
                "this takes or changes units of a state at positions that are not known when the "
                "step is read", "positions that are plain numbers, or jnp.where",
            )  # fmt: skip
        places = np.asarray(at)
    return reader.structural(
        lambda *ids: np.concatenate([part.reshape(-1) for part in ids])[places], *values
    )


def _combined(op: str) -> read.Rule:
    """``at[].add`` and its like, as an operation on all units."""

    def rule(reader: Reader, value: Any, index: Any, more: Any, **params: Any) -> Any:
        if not params["unique_indices"] or not isinstance(value, read.Value):
            reader.graph.refuse(f"this is an {op} at several positions", "jnp.where")
        plain = reader.filled(value.shape, float(op == "mul"))
        into = reader.graph.outside(plain, value.shape, reader.graph.view(value)[0])
        options = {name: params[name] for name in ("dimension_numbers", "mode")}
        function = functools.partial(jax.lax.scatter, **options)
        return reader.op(op, value, _placed(reader, into, index, more, function=function))

    return rule


def _custom_jvp(reader: Reader, *operands: Any, call_jaxpr: Any, **_: Any) -> Any:
    """Functions with a derivative of their own: JAX's, which are known."""
    name, file = origin(call_jaxpr.jaxpr)
    if file.startswith(PACKAGE):
        if name == "relu":
            return reader.op("relu", operands[0])
        if name == "relu6":
            return reader.relu6(operands[0])
        if name == "logaddexp":
            return reader.logaddexp(*operands)
    problem = f"{name or 'a function'} has a derivative of its own"
    return reader.graph.refuse(problem, "it without custom_jvp")


def letters(dimension_numbers: Any, ranks: Sequence[int]) -> str:
    """The equation of ``einsum`` that ``dot_general`` computes."""
    (ca, cb), (ba, bb) = dimension_numbers
    every = iter(string.ascii_letters)
    left, right = ([next(every) for _ in range(rank)] for rank in ranks)
    for i, j in zip((*ca, *ba), (*cb, *bb), strict=True):
        right[j] = left[i]
    out = [left[i] for i in ba]
    out += [k for i, k in enumerate(left) if i not in (*ca, *ba)]
    out += [k for j, k in enumerate(right) if j not in (*cb, *bb)]
    return f"{''.join(left)},{''.join(right)}->{''.join(out)}"


def _dot_general(reader: Reader, a: Any, b: Any, dimension_numbers: Any, **_: Any) -> Any:
    return reader.einsum(letters(dimension_numbers, [len(a.shape), len(b.shape)]), a, b)


def _gather(
    reader: Reader, value: Any, _: Any, dimension_numbers: Any, slice_sizes: Any, mode: Any,
    **__: Any,
) -> Any:  # fmt: skip
    """Units along one axis, at positions that are the same at all steps, by zeros and ones."""
    names, index = dimension_numbers, reader.equation.arguments[1]
    axes = tuple(names.start_index_map)
    whole = tuple(1 if i in axes else n for i, n in enumerate(value.shape))
    along = len(axes) == 1 and axes == tuple(names.collapsed_slice_dims) and not value.boolean
    if index.kind != "F" or not along or tuple(slice_sizes) != whole:
        reader.graph.refuse(
            "this picks units of a state at positions that change, or along several axes",
            "positions along one axis that are the same at all steps, or jnp.where",
        )
    (axis,), lead = axes, index.shape[:-1]
    size = value.shape[axis]

    def matrix(run: Any) -> Any:
        places = jnp.reshape(run.fixed(index), -1)
        inside = jnp.clip(places, 0, size - 1)
        picks = jnp.asarray(jnp.arange(size)[:, None] == inside, run.dtype)
        fills = mode == GatherScatterMode.FILL_OR_DROP
        return jnp.where(places == inside, picks, jnp.nan) if fills else picks

    ids = np.moveaxis(reader.picked(value, axis, math.prod(lead), matrix).ids, axis, 0)
    ids = ids.reshape(*lead, *ids.shape[1:])
    new = [i for i in range(ids.ndim) if i not in names.offset_dims]
    return read.Value(ids.transpose(np.argsort([*new, *names.offset_dims])))


def _broadcast(params: Any, array: Any) -> Any:
    shape, old = params["shape"], params["broadcast_dimensions"]
    new = [axis for axis in range(len(shape)) if axis not in old]
    return np.broadcast_to(np.expand_dims(array, new), shape)


def _structural(name: str) -> read.Rule:
    def rule(reader: Reader, *operands: Any, **params: Any) -> Any:
        return reader.structural(functools.partial(STRUCTURAL[name], params), *operands)

    return rule


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
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda p, *a: np.concatenate(a, p["dimension"]),
    "stack": lambda p, *a: np.stack(a, p["axis"]),
}
POINTWISE = frozenset({*OPS, "select_n", "convert_element_type", "integer_pow", "pow"})
TABLE: dict[str, read.Rule] = {
    **OPS, **{name: _structural(name) for name in STRUCTURAL},
    "abs": row("rising_abs"), "argmax": _argmax, "convert_element_type": row("convert"),
    "custom_jvp_call": _custom_jvp, "dot_general": _dot_general, "dynamic_slice": _placed,
    "dynamic_update_slice": _placed, "erfc": row("erfc"), "gather": _gather,
    "is_finite": row("is_finite"), "max": row("larger"), "min": row("smaller"),
    "pow": row("power"), "scatter": _placed, "scatter-add": _combined("add"),
    "scatter-mul": _combined("mul"), "select_n": _select_n,
}  # fmt: skip
TABLE |= {
    "clamp": lambda reader, low, v, high, **_: reader.bounded(v, low, high),
    "cumsum": lambda reader, v, axis, reverse, **_: reader.cumsum(v, axis, reverse),
    "exp2": lambda reader, v, **_: reader.power(2.0, v),
    "integer_pow": lambda reader, v, y, **_: reader.power(v, y),
    "optimization_barrier": lambda reader, *values, **_: list(values),
    "reduce_max": lambda reader, v, axes, **_: reader.max(v, axes),
    "reduce_min": lambda reader, v, axes, **_: reader.min(v, axes),
    "reduce_sum": lambda reader, v, axes, **_: reader.sum(v, axes),
}


class Reader(read.Reader):
    """Reads the equations of a body from states to states."""

    table, instead = TABLE, INSTEAD

    def __init__(self, body: Any, axis: int | None) -> None:
        super().__init__(body, Arrays, axis, body.dtype)

    def _check(self, v: Variable) -> None:
        if v.equation is None or v.equation.name != "argmax":  # a choice among conditions
            super()._check(v)

    def differs(self, v: Variable) -> bool:
        axis, equation = self.axis, v.equation
        if equation is not None and equation.name == "broadcast_in_dim":
            dimensions, (inner,) = equation.options["broadcast_dimensions"], equation.operands
            return axis in dimensions and inner.shape[dimensions.index(axis)] > 1
        return super().differs(v)

    def pointwise(self, equation: Equation) -> bool:
        return equation.name in POINTWISE
