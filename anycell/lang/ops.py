"""The op table: one row per op of the cell language, and the functions that users write.

A row is ``Op(meaning, derivative, domain)``:

- ``meaning(xp, *args)`` computes the op with an array namespace (``anycell.lang.namespaces``);
- ``derivative(g, y, *args)`` returns, for the upstream gradient ``g`` and the result ``y``, one
  expression per argument, or None where the derivative is zero everywhere;
- ``domain`` bounds the arguments on which the op is smooth and finite, for generated tests.

Engines add their own printer table with one row per op, nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from anycell.lang.expr import (
    CONDITIONS,
    REDUCTIONS,
    Expr,
    Number,
    apply,
    as_expr,
    brief,
    fail,
    is_const,
    positive,
)

Value = Expr | Number
Interval = tuple[float, float]


@dataclass(frozen=True)
class Op:
    """A row of the table; the top of this module describes the fields."""

    meaning: Callable[..., Any]
    derivative: Callable[..., tuple[Expr | None, ...]]
    domain: tuple[Interval, ...]


# If the derivative jumps, the meaning uses where(), so that a framework's autograd takes the same
# side as the table's derivative. The comparisons are chosen so that NaN passes through.


def _relu(xp: Any, a: Any) -> Any:
    return xp.where(a <= 0.0, xp.zeros_like(a), a)


def _hard_sigmoid(xp: Any, a: Any) -> Any:
    y = a / 6.0 + 0.5
    return xp.where(y <= 0.0, xp.zeros_like(y), xp.where(y >= 1.0, xp.ones_like(y), y))


def _softplus(xp: Any, a: Any) -> Any:
    return xp.softplus(a) if xp.softplus else xp.logaddexp(a, xp.zeros_like(a))


def _row(reduction: str) -> Callable[..., Any]:
    """A reduction over each group of units, returned to every unit of the group."""

    def meaning(xp: Any, a: Any, groups: int) -> Any:
        # -1 stands for the rows, because a TensorFlow graph may not know their number.
        rows = (-1,) if len(a.shape) == 2 else a.shape[:-1]
        split = xp.reshape(a, (*rows, groups, a.shape[-1] // groups))
        reduced = getattr(xp, reduction)(split, axis=-1, keepdims=True)
        return xp.reshape(reduced + xp.zeros_like(split), (*rows, a.shape[-1]))

    return meaning


def _select(g: Expr, condition: Expr) -> Expr:
    if g.op == "where" and is_const(g.args[2], 0.0):  # merges both conditions
        return apply("where", condition & g.args[0], g.args[1], 0.0)
    return apply("where", condition, g, 0.0)


def _quotient_derivative(g: Expr, y: Expr, a: Expr, b: Expr) -> tuple[Expr, Expr]:
    # One division; none per unit in a norm, because there b belongs to the whole row.
    inverse = 1.0 / b
    return g * inverse, -(g * (y * inverse))


def _power_derivative(g: Expr, y: Expr, a: Expr, b: Expr) -> tuple[Expr, Expr]:
    # As in torch: a power of 0 has no slope, and the exponent of a zero base none either, where
    # the formulas would say 0 times infinity.
    slope = g * (b * apply("pow", a, b - 1.0))
    growth = g * (y * apply("log", a))
    of_base = slope if is_const(b) and not is_const(b, 0.0) else _select(slope, b != 0.0)
    return of_base, _select(growth, (a != 0.0) | (b < 0.0))


def _max_derivative(g: Expr, y: Expr, a: Expr, groups: int) -> tuple[Expr]:
    hit = apply("where", apply("eq", a, y), 1.0, 0.0)
    return (hit * (sum(g, groups) / sum(hit, groups)),)


_ANY: Interval = (-3.0, 3.0)
_POSITIVE: Interval = (0.3, 3.0)
_none: Callable[..., tuple[None, ...]] = lambda g, y, *args: (None,) * len(args)  # noqa: E731

TABLE: dict[str, Op] = {
    # arithmetic
    "neg": Op(lambda xp, a: -a, lambda g, y, a: (-g,), (_ANY,)),
    "add": Op(lambda xp, a, b: a + b, lambda g, y, a, b: (g, g), (_ANY, _ANY)),
    "sub": Op(lambda xp, a, b: a - b, lambda g, y, a, b: (g, -g), (_ANY, _ANY)),
    "mul": Op(lambda xp, a, b: a * b, lambda g, y, a, b: (g * b, g * a), (_ANY, _ANY)),
    "div": Op(lambda xp, a, b: a / b, _quotient_derivative, (_ANY, _POSITIVE)),
    # element-wise functions
    "exp": Op(lambda xp, a: xp.exp(a), lambda g, y, a: (g * y,), (_ANY,)),
    "log": Op(lambda xp, a: xp.log(a), lambda g, y, a: (g / a,), (_POSITIVE,)),
    "sqrt": Op(lambda xp, a: xp.sqrt(a), lambda g, y, a: (g * (0.5 / y),), (_POSITIVE,)),
    "abs": Op(lambda xp, a: xp.abs(a), lambda g, y, a: (g * apply("sign", a),), (_POSITIVE,)),
    "sign": Op(lambda xp, a: xp.sign(a), _none, (_POSITIVE,)),
    "sigmoid": Op(lambda xp, a: xp.sigmoid(a), lambda g, y, a: (g * (y * (1.0 - y)),), (_ANY,)),
    "tanh": Op(lambda xp, a: xp.tanh(a), lambda g, y, a: (g * (1.0 - y * y),), (_ANY,)),
    "relu": Op(_relu, lambda g, y, a: (_select(g, a > 0.0),), (_POSITIVE,)),
    "softplus": Op(_softplus, lambda g, y, a: (g * apply("sigmoid", a),), (_ANY,)),
    "log_sigmoid": Op(
        lambda xp, a: -_softplus(xp, -a), lambda g, y, a: (g * apply("sigmoid", -a),), (_ANY,)
    ),
    "hard_sigmoid": Op(
        _hard_sigmoid, lambda g, y, a: (_select(g / 6.0, (y > 0.0) & (y < 1.0)),), ((-2.5, 2.5),)
    ),
    "sin": Op(lambda xp, a: xp.sin(a), lambda g, y, a: (g * apply("cos", a),), (_ANY,)),
    "cos": Op(lambda xp, a: xp.cos(a), lambda g, y, a: (-(g * apply("sin", a)),), (_ANY,)),
    "erf": Op(
        lambda xp, a: xp.erf(a),
        lambda g, y, a: (g * (2.0 / math.sqrt(math.pi) * apply("exp", -(a * a))),),
        (_ANY,),
    ),
    "pow": Op(lambda xp, a, b: a**b, _power_derivative, (_POSITIVE, _ANY)),
    "minimum": Op(
        lambda xp, a, b: xp.where((a <= b) | (a != a), a, b),
        lambda g, y, a, b: (_select(g, a <= b), _select(g, b < a)),
        ((-3.0, -0.5), (0.5, 3.0)),
    ),
    "maximum": Op(
        lambda xp, a, b: xp.where((a >= b) | (a != a), a, b),
        lambda g, y, a, b: (_select(g, a >= b), _select(g, b > a)),
        ((-3.0, -0.5), (0.5, 3.0)),
    ),
    "stop_gradient": Op(lambda xp, a: xp.stop_gradient(a), _none, (_ANY,)),
    # conditions
    "lt": Op(lambda xp, a, b: a < b, _none, (_ANY, _ANY)),
    "le": Op(lambda xp, a, b: a <= b, _none, (_ANY, _ANY)),
    "gt": Op(lambda xp, a, b: a > b, _none, (_ANY, _ANY)),
    "ge": Op(lambda xp, a, b: a >= b, _none, (_ANY, _ANY)),
    "eq": Op(lambda xp, a, b: a == b, _none, (_ANY, _ANY)),
    "ne": Op(lambda xp, a, b: a != b, _none, (_ANY, _ANY)),
    "logical_and": Op(lambda xp, a, b: xp.logical_and(a, b), _none, ()),
    "logical_or": Op(lambda xp, a, b: xp.logical_or(a, b), _none, ()),
    "logical_not": Op(lambda xp, a: xp.logical_not(a), _none, ()),
    "where": Op(
        lambda xp, c, a, b: xp.where(c, a, b),
        lambda g, y, c, a, b: (None, _select(g, c), apply("where", c, 0.0, g)),
        (_ANY, _ANY, _ANY),
    ),
    # reductions over the units of a row
    "sum": Op(_row("sum"), lambda g, y, a, groups: (sum(g, groups),), (_ANY,)),
    "mean": Op(_row("mean"), lambda g, y, a, groups: (mean(g, groups),), (_ANY,)),
    "max": Op(_row("amax"), _max_derivative, (_ANY,)),
}


def is_boolean(node: Expr) -> bool:
    """Whether the node is a condition rather than a number."""
    return node.op in CONDITIONS


def is_reduction(node: Expr) -> bool:
    """Whether the node combines the units of a row."""
    return node.op in REDUCTIONS


# ---- what users write ----------------------------------------------------------------------------


def exp(value: Value) -> Expr:
    """e to the power of ``value``."""
    return apply("exp", value)


def log(value: Value) -> Expr:
    """Natural logarithm."""
    return apply("log", value)


def sqrt(value: Value) -> Expr:
    """Square root."""
    return apply("sqrt", value)


def abs(value: Value) -> Expr:
    """Absolute value; the derivative at 0 is 0."""
    return apply("abs", value)


def sigmoid(value: Value) -> Expr:
    """``1 / (1 + exp(-value))``."""
    return apply("sigmoid", value)


def tanh(value: Value) -> Expr:
    """Hyperbolic tangent."""
    return apply("tanh", value)


def relu(value: Value) -> Expr:
    """``maximum(value, 0)``; the derivative at 0 is 0."""
    return apply("relu", value)


def softplus(value: Value) -> Expr:
    """``log(1 + exp(value))``, without overflow."""
    return apply("softplus", value)


def log_sigmoid(value: Value) -> Expr:
    """``log(sigmoid(value))``, without underflow."""
    return apply("log_sigmoid", value)


def hard_sigmoid(value: Value) -> Expr:
    """``clip(value / 6 + 1/2, 0, 1)``, as in Keras 3 and torch."""
    return apply("hard_sigmoid", value)


def sin(value: Value) -> Expr:
    """Sine of an angle of any size, in radians."""
    return apply("sin", value)


def cos(value: Value) -> Expr:
    """Cosine of an angle of any size, in radians."""
    return apply("cos", value)


def erf(value: Value) -> Expr:
    """Error function: ``2 / sqrt(pi)`` times the integral of ``exp(-t * t)`` from 0 on."""
    return apply("erf", value)


def pow(base: Value, exponent: Value) -> Expr:
    """``base ** exponent``, with the rules of C for zeros, negative bases and infinities.

    Whole exponents from -16 to 16, except 0, and 0.5 are cheaper as ``base ** 2``: then products or
    a root compute the power. At a base of 0 the derivative with respect to the exponent is 0, and
    at a negative base NaN.
    """
    return apply("pow", base, exponent)


def silu(value: Value) -> Expr:
    """``value * sigmoid(value)``, also known as swish."""
    return apply("mul", value, sigmoid(value))


def gelu(value: Value, approximate: str | bool = "none") -> Expr:
    """``value * (1 + erf(value / sqrt(2))) / 2``.

    ``approximate="tanh"`` (as in torch) or True (as in JAX and Keras) takes
    ``tanh(sqrt(2 / pi) * (value + 0.044715 * value ** 3))`` in place of the error function.
    Source: Hendrycks & Gimpel, *Gaussian Error Linear Units*, 2016.
    """
    if approximate not in ("none", "tanh", True, False):
        problem = f"gelu(value, approximate={brief(approximate)})."
        fail(problem, 'approximate="none" or "tanh"; False and True mean the same.')
    value = as_expr(value)
    if approximate in ("tanh", True):
        inner = math.sqrt(2.0 / math.pi) * (value + 0.044715 * (value * value * value))
        return 0.5 * value * (1.0 + tanh(inner))
    return 0.5 * value * (1.0 + erf(value * math.sqrt(0.5)))


def elu(value: Value, alpha: Value = 1.0) -> Expr:
    """``value`` above 0, else ``alpha * (exp(value) - 1)``; the derivative at 0 is ``alpha``.

    Source: Clevert, Unterthiner & Hochreiter, *Fast and Accurate Deep Network Learning by
    Exponential Linear Units*, 2016.
    """
    # exp(v) - 1 = 2 t / (1 - t) with t = tanh(v / 2), which keeps all digits near 0. The branch not
    # taken is differentiated too: it must not divide by 0.
    t = tanh(0.5 * minimum(value, 0.0))
    return where(as_expr(value) > 0.0, value, alpha * (2.0 * t / (1.0 - t)))


def leaky_relu(value: Value, negative_slope: Value = 0.01) -> Expr:
    """``value`` above 0, else ``negative_slope * value``; that slope is the derivative at 0."""
    return where(as_expr(value) > 0.0, value, apply("mul", negative_slope, value))


def softsign(value: Value) -> Expr:
    """``value / (1 + abs(value))``."""
    return apply("div", value, 1.0 + abs(value))


def where(condition: Expr, a: Value, b: Value) -> Expr:
    """``a`` where the condition holds, else ``b``; the gradient goes to the value chosen."""
    return apply("where", condition, a, b)


def minimum(a: Value, b: Value) -> Expr:
    """The smaller value; on a tie the gradient goes to ``a``."""
    return apply("minimum", a, b)


def maximum(a: Value, b: Value) -> Expr:
    """The larger value; on a tie the gradient goes to ``a``."""
    return apply("maximum", a, b)


def clip(value: Value, low: Value, high: Value) -> Expr:
    """``minimum(maximum(value, low), high)``: the gradient is 0 beyond the bounds."""
    return apply("minimum", apply("maximum", value, low), high)


def stop_gradient(value: Value) -> Expr:
    """``value`` in the forward pass, a constant in the backward pass."""
    return apply("stop_gradient", value)


_OF_TWO = {"sum": "a + b", "mean": "(a + b) / 2", "max": "maximum(a, b)"}


def _reduced(op: str, value: Value, groups: int) -> Expr:
    problem = f"{op}(value, groups={groups!r}): {op} combines the units of the row of one value."
    instead = (
        f"{_OF_TWO[op]} of two values; groups is a positive integer that divides the hidden size."
    )
    return apply(op, value, attrs=(positive(groups, problem, instead),))


def sum(value: Value, groups: int = 1) -> Expr:
    """Sum over the units of the row (of each of ``groups`` equal groups), given to every unit."""
    return _reduced("sum", value, groups)


def mean(value: Value, groups: int = 1) -> Expr:
    """Mean over the units of the row (of each of ``groups`` equal groups), given to every unit."""
    return _reduced("mean", value, groups)


def max(value: Value, groups: int = 1) -> Expr:
    """Largest value among the units of the row (of each group); ties share the gradient."""
    return _reduced("max", value, groups)


def layer_norm(value: Value, eps: Value = 1e-5, groups: int = 1) -> Expr:
    """``(v - mean(v)) / sqrt(mean((v - mean(v))**2) + eps)`` over the units of the row.

    Gain and shift are per-unit parameters: ``p.gain * layer_norm(v) + p.shift``.
    Source: Ba, Kiros & Hinton, *Layer Normalization*, 2016; ``groups`` as in Wu & He, *Group
    Normalization*, 2018.
    """
    centred = apply("sub", value, mean(value, groups))
    return centred * apply("div", 1.0, sqrt(mean(centred * centred, groups) + eps))


def softmax(value: Value, groups: int = 1) -> Expr:
    """``exp(v) / sum(exp(v))`` over the units of the row (of each of ``groups`` equal groups).

    The largest value is subtracted first, so that nothing overflows.
    """
    raised = exp(apply("sub", value, stop_gradient(max(value, groups))))
    return raised * apply("div", 1.0, sum(raised, groups))
