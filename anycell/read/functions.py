"""Functions of the values of a step that are several operations of the language.

The tables of all frontends are made of them. An operand is a ``Value``, an ``Outer`` or a number.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from anycell.read.units import Graph, Outer, Value

_OUTSIDE: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv,
    "neg": operator.neg, "logical_not": operator.invert,
}  # fmt: skip
_ARITHMETIC = frozenset("add sub mul div".split())  # where a condition counts as 0 or 1


class Functions:
    """Functions of operands; their results are values of the graph."""

    graph: Graph

    def op(self, name: str, *operands: Any) -> Any:
        """An op of the language, by its name in the printer's table."""
        if name in _ARITHMETIC:
            operands = tuple(self.number(o) if _boolean(o) else o for o in operands)
        if any(isinstance(operand, Value) for operand in operands):
            return self.graph.elementwise(name, *operands)
        outers = [operand for operand in operands if isinstance(operand, Outer)]
        shape = np.broadcast_shapes(*(outer.shape for outer in outers))
        kind = max(outer.kind for outer in outers)
        ranks = {len(o.shape) for o in outers if o.shape or o.kind == "X"}  # time comes before them
        if name not in _OUTSIDE or (kind == "X" and len(ranks) > 1):
            self.graph.refuse(f"this computes {name} of values that no state enters")

        def get(run: Any) -> Any:
            return _OUTSIDE[name](*(o.get(run) if isinstance(o, Outer) else o for o in operands))

        rowed = any(outer.per_row for outer in outers)
        return Outer(kind, shape, get, name == "logical_not", rowed)

    def number(self, condition: Any) -> Any:
        """A condition as 1 where it holds, else 0."""
        if isinstance(condition, Value):
            return self.op("number", condition)
        cast = self.graph.arrays.cast
        get = lambda run: cast(condition.get(run), run.dtype)  # noqa: E731
        return replace(condition, get=get, boolean=False, units=None)

    def filled(self, shape: Sequence[int], number: float) -> Outer:
        """An operand of one number."""
        arrays = self.graph.arrays
        get = lambda run: arrays.constant(np.full(shape, number), run.dtype)  # noqa: E731
        return Outer("F", tuple(shape), get, per_row=False, number=number)

    # -- choices ---------------------------------------------------------------------------------
    def where(self, condition: Any, a: Any, b: Any) -> Any:
        """``a`` where the condition holds, else ``b``; both may be conditions too."""
        if (number := known(condition)) is not None:
            chosen = a if number else b
            shapes = [v.shape for v in (condition, a, b) if isinstance(v, (Value, Outer))]
            if isinstance(chosen, Value) and chosen.shape == np.broadcast_shapes(*shapes):
                return chosen
        if not (_boolean(a) and _boolean(b)):
            return self.op("where", condition, a, b)
        unless = self.op("logical_not", condition)
        parts = self.op("logical_and", condition, a), self.op("logical_and", unless, b)
        return self.op("logical_or", *parts)

    def larger(self, a: Any, b: Any, op: str = "maximum") -> Any:
        """The larger value; each of two equal ones has half of the gradient."""
        bound = -math.inf if op == "maximum" else math.inf
        for number, other in ((a, b), (b, a)):
            if known(number) == bound:
                return other
        half = self.op("mul", self.op("add", a, b), 0.5)
        return self.op("where", self.op("eq", a, b), half, self.op(op, a, b))

    def smaller(self, a: Any, b: Any) -> Any:
        """The smaller value; each of two equal ones has half of the gradient."""
        return self.larger(a, b, "minimum")

    def clamp(self, value: Any, low: Any = None, high: Any = None) -> Any:
        """A value between bounds, at which it has a gradient."""
        value = value if low is None else self.op("maximum", value, low)
        return value if high is None else self.op("minimum", value, high)

    def bounded(self, value: Any, low: Any, high: Any) -> Any:
        """A value between bounds, at which it has no gradient."""
        if isinstance(low, Value) or isinstance(high, Value):
            self.graph.refuse(
                "a clamp has a bound that depends on a state", "the maximum and the minimum of both"
            )
        return self.op("minimum", high, self.op("maximum", low, value))

    def relu6(self, value: Any) -> Any:
        """``min(relu(value), 6)``, without a gradient at 6."""
        return self.op("minimum", 6.0, self.op("relu", value))

    def rising_abs(self, value: Any) -> Any:
        """The absolute value, whose derivative at 0 is 1."""
        return self.op("where", self.op("ge", value, 0.0), value, self.op("neg", value))

    def is_finite(self, value: Any) -> Any:
        return self.op("lt", self.op("abs", value), math.inf)

    # -- arithmetic ------------------------------------------------------------------------------
    def add(self, a: Any, b: Any, alpha: float = 1) -> Any:
        return self.op("add", a, self.scaled(b, alpha))

    def subtract(self, a: Any, b: Any, alpha: float = 1) -> Any:
        return self.op("sub", a, self.scaled(b, alpha))

    def scaled(self, value: Any, factor: float) -> Any:
        if factor == 1:
            return value
        plain = not isinstance(value, (Value, Outer))
        return value * factor if plain else self.op("mul", value, float(factor))

    def total(self, values: Sequence[Any]) -> Any:
        return functools.reduce(functools.partial(self.op, "add"), values)

    def lerp(self, start: Any, end: Any, weight: Any) -> Any:
        part = self.op("mul", self.op("sub", end, start), weight)
        return self.op("add", start, part)

    def divide_no_nan(self, value: Any, divisor: Any) -> Any:
        """The quotient, 0 where the divisor is."""
        zero = self.op("eq", divisor, 0.0)
        quotient = self.op("div", value, self.op("where", zero, 1.0, divisor))
        return self.op("where", zero, 0.0, quotient)

    def root(self, value: Any) -> Any:
        """The square root, whose derivative at 0 is 0."""
        zero = self.op("eq", value, 0.0)
        return self.op("where", zero, 0.0, self.op("sqrt", self.op("where", zero, 1.0, value)))

    def squared_difference(self, a: Any, b: Any) -> Any:
        return self.op("square", self.op("sub", a, b))

    def power(self, base: Any, exponent: Any) -> Any:
        number, fixed = known(exponent), known(base)
        if fixed is not None and fixed > 0:
            return self.op("exp", self.op("mul", exponent, math.log(fixed)))
        if number is None:
            return self.op("pow", base, exponent)
        if number == int(number) and 1 <= number <= 16:
            return functools.reduce(functools.partial(self.op, "mul"), [base] * int(number))
        named = {0.5: "sqrt", -1.0: "reciprocal", -0.5: "rsqrt"}.get(number)
        return self.op(named, base) if named else self.op("pow", base, number)

    # -- functions of one value ------------------------------------------------------------------
    def erfc(self, value: Any) -> Any:
        return self.op("sub", 1.0, self.op("erf", value))

    def elu(self, value: Any, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Any:
        value = self.scaled(value, input_scale)
        made = self.op("elu", value) if alpha == 1 else self.op("elu_alpha", value, alpha)
        return self.scaled(made, scale)

    def selu(self, value: Any) -> Any:
        """Source: Klambauer et al., *Self-Normalizing Neural Networks*, 2017."""
        return self.elu(value, 1.6732632423543772, 1.0507009873554805)

    def softplus(self, value: Any, beta: float = 1) -> Any:
        return self.scaled(self.op("softplus", self.scaled(value, beta)), 1 / beta)

    def logaddexp(self, a: Any, b: Any) -> Any:
        """``log(exp(a) + exp(b))``, also where both are -inf."""
        for number, other in ((a, b), (b, a)):
            if known(number) == 0.0:
                return self.op("softplus", other)
        sides = [
            self.op("add", more, self.op("softplus", self.op("sub", less, more)))
            for more, less in ((a, b), (b, a))
        ]
        tie = self.op("add", self.op("mul", self.op("add", a, b), 0.5), math.log(2))
        return self.op(
            "where", self.op("eq", a, b), tie, self.op("where", self.op("ge", a, b), *sides)
        )

    # -- functions of axes -----------------------------------------------------------------------
    def _axes(self, value: Value, axes: Any) -> tuple[int, ...]:
        rank = len(value.shape)
        axes = range(rank) if axes is None else np.atleast_1d(axes).tolist()
        return tuple(axis % rank for axis in axes)

    def sum(self, value: Value, axes: Any = None, keep: bool = False) -> Value:
        return self.graph.reduce("sum", value, self._axes(value, axes), keep)

    def max(self, value: Value, axes: Any = None, keep: bool = False) -> Value:
        return self.graph.reduce("max", value, self._axes(value, axes), keep)

    def min(self, value: Value, axes: Any = None, keep: bool = False) -> Value:
        return self.op("neg", self.max(self.op("neg", value), axes, keep))

    def mean(self, value: Value, axes: Any = None, keep: bool = False, less: float = 0) -> Value:
        """The mean, or the sum over a count that is ``less`` lower."""
        axes = self._axes(value, axes)
        count = math.prod(value.shape[axis] for axis in axes) - less
        return self.op("mul", self.sum(value, axes, keep), 1.0 / count)

    def variance(
        self, value: Value, axes: Any = None, keep: bool = False, less: float = 0
    ) -> Value:
        centred = self.op("sub", value, self.mean(value, axes, True))
        return self.mean(self.op("mul", centred, centred), axes, keep, less)

    def layer_norm(
        self, value: Value, axes: Any, weight: Any = None, bias: Any = None, eps: float = 0.0
    ) -> Value:
        centred = self.op("sub", value, self.mean(value, axes, True))
        variance = self.mean(self.op("mul", centred, centred), axes, True)
        made = self.op("mul", centred, self.op("rsqrt", self.op("add", variance, eps)))
        made = made if weight is None else self.op("mul", made, weight)
        return made if bias is None else self.op("add", made, bias)

    def _raised(self, value: Value, axes: Any) -> tuple[Value, Value, Value, Value]:
        """The maximum; the value less that; the exponential of this, and its sum."""
        most = self.op("stop_gradient", self.max(value, axes, True))
        less = self.op("sub", value, most)
        raised = self.op("exp", less)
        return most, less, raised, self.sum(raised, axes, True)

    def softmax(self, value: Value, axes: Any = -1) -> Any:
        _, _, raised, total = self._raised(value, axes)
        return self.op("div", raised, total)

    def log_softmax(self, value: Value, axes: Any = -1) -> Any:
        _, less, _, total = self._raised(value, axes)
        return self.op("sub", less, self.op("log", total))

    def logsumexp(self, value: Value, axes: Any = None, keep: bool = False) -> Value:
        most, _, _, total = self._raised(value, axes)
        made: Value = self.op("add", self.op("log", total), most)
        return made if keep else Value(np.squeeze(made.ids, self._axes(value, axes)))

    def cumsum(
        self, value: Value, axis: int, reverse: bool = False, exclusive: bool = False
    ) -> Value:
        size, arrays = value.shape[axis], self.graph.arrays
        ones = np.triu(np.ones((size, size)), int(exclusive))  # [in, out]
        ones = ones.T if reverse else ones
        return self.picked(value, axis, size, lambda run: arrays.constant(ones, run.dtype))

    def picked(self, value: Value, axis: int, count: int, matrix: Callable[[Any], Any]) -> Value:
        """The product of an axis with a matrix ``[in, count]``, in the place of that axis."""
        axis %= len(value.shape)
        made = self.graph.product(value, (axis,), (count,), matrix)
        return Value(np.moveaxis(made.ids, -1, axis))

    # -- products --------------------------------------------------------------------------------
    def einsum(self, equation: str, a: Any, b: Any) -> Value:
        """The product of a value with a matrix of kind F, by ``einsum``'s letters."""
        graph, arrays = self.graph, self.graph.arrays
        left, right, out = re.split(",|->", equation.replace(" ", ""))
        pairs = [(a, left), (b, right)]
        (value, of_value), (weight, of_weight) = pairs if isinstance(a, Value) else pairs[::-1]
        if not isinstance(weight, Outer) or weight.kind != "F":
            whose = "a state" if isinstance(weight, Value) else "this step's input"
            graph.refuse(
                f"the matrix of this product depends on {whose}",
                "products with matrices of weights; for few numbers of a row, the sum of a * b",
            )
        sizes = dict(zip(of_weight, weight.shape, strict=True))
        row = graph.view(value)[0]
        rows = "" if row is None else of_value[row]
        shared = [k for k in of_value if k in of_weight]
        summed = [k for k in shared if k not in out]
        repeated = any(len({*of}) < len(of) for of in (of_value, of_weight))
        if repeated or {*of_value, *of_weight} - {*summed} != {*out}:
            graph.refuse(f"this is einsum({equation!r})", "products, without sums of one operand")
        rowed = weight.axis is not None or (rows and rows in of_weight)
        if weight.per_row and rowed and sizes.get(rows) != 1 and rows not in summed:
            graph.refuse(
                "each row of the batch has a matrix of its own",
                "products with matrices that all rows share",
            )
        # Along these axes the matrices are the same.
        same = [k for k in shared if k in out and (sizes[k] == 1 or k == rows)]
        heads = [k for k in shared if k in out and k not in same]
        new = [k for k in of_weight if k not in of_value]
        order = [of_weight.index(k) for k in [*same, *heads, *summed, *new]]
        groups = [heads, summed, new][not heads :]
        shape = [math.prod(sizes[k] for k in group) for group in groups]
        plain = not same and all(len(group) == 1 for group in groups)

        def matrix(run: Any) -> Any:
            array = arrays.ordered(weight.get(run), order)
            for number in range(len(same)):
                array = arrays.take(array, number, 0, 1)
            return array if plain else arrays.reshape(array, shape)

        whole = np.broadcast_to(value.ids, [
            max(n, sizes.get(k, 1)) if k in heads else n
            for k, n in zip(of_value, value.shape, strict=True)
        ])  # fmt: skip
        rest = [k for k in of_value if k not in heads]
        ids = whole.transpose([of_value.index(k) for k in [*heads, *rest]])
        parts = tuple(sizes[k] for k in new)
        if heads:
            lead = ids.shape[: len(heads)]
            ids = ids.reshape(math.prod(lead), *ids.shape[len(heads) :])
            axes = tuple(1 + rest.index(k) for k in summed)
            ids = graph.heads(Value(ids), 0, axes, parts, matrix).ids
            ids = ids.reshape(*lead, *ids.shape[1:])
        else:
            axes = tuple(rest.index(k) for k in summed)
            ids = graph.product(Value(ids), axes, parts, matrix).ids
        made = [*heads, *[k for k in rest if k not in summed], *new]
        return Value(ids.transpose([made.index(k) for k in out]))

    def matmul(self, a: Any, b: Any, turned: tuple[bool, bool] = (False, False)) -> Value:
        """``a @ b``, with leading axes that broadcast.

        Args:
            turned: whether the last two axes of each are swapped.
        """
        ranks = [len(operand.shape) for operand in (a, b)]
        batch = "abcdefgh"[: max(0, *(rank - 2 for rank in ranks))]
        left = batch[len(batch) + 2 - ranks[0] :] + ("yx" if turned[0] else "xy")
        right = batch[len(batch) + 2 - ranks[1] :] + ("zy" if turned[1] else "yz")
        out = batch + "x" * (ranks[0] > 1) + "z" * (ranks[1] > 1)
        left, right = left if ranks[0] > 1 else "y", right if ranks[1] > 1 else "y"
        return self.einsum(f"{left},{right}->{out}", a, b)


def known(value: Any) -> float | None:
    """The number that an operand is, if it is one known number."""
    if isinstance(value, Outer):
        return value.number
    return None if isinstance(value, Value) else float(value)


def _boolean(value: Any) -> bool:
    return isinstance(value, (Value, Outer)) and value.boolean
