"""Objects that a cell's function sees while it is traced: gates by name, ``linear``, ``keep``."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, overload

from anycell.lang.declare import ONE, PROJECTION, RECURRENT, SIZE, check_symbol
from anycell.lang.expr import (
    ALL_AT_ONCE,
    Expr,
    Number,
    Traced,
    apply,
    boolean,
    brief,
    fail,
    is_const,
    operand,
    positive,
    refused,
)


def _operators(op: str) -> tuple[Callable[[Gates, Any], Gates], ...]:
    """The methods of a binary operator, for gates on its left and on its right."""
    return (
        lambda self, other: self._combine(op, self, other),
        lambda self, other: self._combine(op, other, self),
    )


class Gates(Traced):
    """The values of all gates: they unpack in the declared order, are attributes by name, and add,
    subtract and multiply gate by gate.

    Args:
        missing: why values of these names do not exist, and what to write instead.
    """

    _what: str
    _values: dict[str, Expr]
    _missing: Mapping[str, tuple[str, str]]

    def __init__(
        self,
        what: str,
        values: dict[str, Expr],
        missing: Mapping[str, tuple[str, str]] = MappingProxyType({}),
    ) -> None:
        self.__dict__.update(_what=what, _values=values, _missing=missing)

    def __iter__(self) -> Iterator[Expr]:
        return iter(self._values.values())

    def __len__(self) -> int:
        return len(self._values)

    def __getattr__(self, name: str) -> Expr:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self._values[name]
        except KeyError:
            if name in self._missing:
                fail(*self._missing[name])
            given = " ".join(self._values) or "none"
            problem = f"No {self._what} is named {name!r}; this cell declares: {given}."
            fail(problem, f"declare it, or use one of: {given}.")

    def __setattr__(self, name: str, value: object) -> NoReturn:
        problem = f"In-place edit of the {self._what} {name!r}."
        fail(problem, f"compute a new value with a name of its own: {name} = ...")

    def _combine(self, op: str, left: Any, right: Any) -> Gates:
        def pick(side: Any, name: str) -> Any:
            return getattr(side, name) if isinstance(side, Gates) else side

        return Gates(
            self._what, {n: apply(op, pick(left, n), pick(right, n)) for n in self._values}
        )

    __add__, __radd__ = _operators("add")
    __sub__ = _operators("sub")[0]
    __mul__, __rmul__ = _operators("mul")


for _operator in (
    "neg pos abs invert bool int float index round trunc floor ceil getitem setitem lt le gt ge "
    "rsub truediv rtruediv floordiv rfloordiv mod rmod divmod rdivmod pow rpow matmul rmatmul "
    "and rand or ror xor rxor lshift rlshift rshift rrshift complex delitem contains"
).split():
    setattr(Gates, f"__{_operator}__", refused(*ALL_AT_ONCE))


@dataclass
class Trace:
    """One trace: the arguments of the function, and the matmuls and masks that it asked for."""

    given: set[Expr]  # the leaves, matmuls and masks that the function was handed
    keeps: int = 0
    linears: dict[str, Declared] = field(default_factory=dict)
    # By the name of a weight, the values that it multiplies, and the matmul of each.
    operands: dict[str, dict[Expr, str]] = field(default_factory=dict)


class Declared(NamedTuple):
    """The arguments of one call of ``linear``."""

    outputs: tuple[str, ...]
    heads: int
    bias: bool
    size: str | None  # the size symbol of each output, if one was given


current: contextvars.ContextVar[Trace | None] = contextvars.ContextVar(
    "anycell_trace", default=None
)


def _inside(function: str) -> Trace:
    trace = current.get()
    if trace is None:
        problem = f"{function}() was called outside a cell."
        fail(problem, "call it in a function under @cell, where it has a meaning.")
    return trace


@overload
def linear(
    value: Expr | Number,
    name: str,
    *,
    gates: None = None,
    heads: int = 1,
    bias: bool = False,
    size: str | None = None,
) -> Expr: ...
@overload
def linear(
    value: Expr | Number,
    name: str,
    *,
    gates: str | Sequence[str],
    heads: int = 1,
    bias: bool = False,
    size: str | None = None,
) -> Gates: ...
def linear(
    value: Expr | Number,
    name: str | None = None,
    *,
    gates: str | Sequence[str] | None = None,
    heads: int = 1,
    bias: bool = False,
    size: str | None = None,
) -> Expr | Gates:
    """A further matmul inside the step: ``value @ W_name.T`` with a learned weight.

    Args:
        value: the operand, ``[B, in]``.
        name: the name of the weight. Matmuls of one name share one weight, whose gradient is the
            sum over them; they must agree in all other arguments, and in their operands' sizes.
        gates: the names of the outputs of a matmul that has several, all of one size; the matmul
            returns them together, like ``r``: ``r, z = linear(v, "rz", gates="r z")``.
        heads: makes the weight block-diagonal, with that many equal blocks.
        bias: whether the matmul has a learned bias.
        size: a symbol for the size of the result (of each output), which layers then take by
            keyword. ``linear(tanh(linear(s.h, "down", size="R")), "up")`` is a bottleneck of R
            units: ``RNN(cell, 12, 100, R=8)``. The size "1" makes one number of each row, which
            combines with values of any size.

    Without ``size`` the result is as wide as the values it is combined with: H units, the hidden
    size, or a state's declared size. So ``linear(tanh(linear(s.h, "down")), "up")`` has two weights
    ``[H, H]``. ``explain`` shows the shape of every weight.

    Raises:
        CellError: if the name is taken, if an argument is invalid, or if it differs from that of
            an earlier matmul by the same weight.
    """
    trace = _inside("linear")
    if not isinstance(name, str) or not name.isidentifier():
        shown = "" if name is None else f", {brief(name)}"
        instead = 'linear(value, "name"): a layer learns its weight as weight_name.'
        fail(f"linear(...{shown}): the weight needs a name.", instead)
    node = operand("linear", value)
    if name in (RECURRENT, PROJECTION) or name.endswith("_bias"):
        fail(
            f"linear(..., {name!r}): this name is taken, by the layer's own matmuls "
            f"({PROJECTION}, {RECURRENT}) or a bias (..._bias).",
            "choose another name.",
        )
    remedy = "give a positive integer that divides the sizes."
    heads = positive(heads, f"linear(..., heads={brief(heads)}).", remedy)
    bias = boolean(bias, f"linear(..., {name!r}, bias={brief(bias)})")
    if isinstance(gates, (list, tuple)):
        gates = " ".join(map(str, gates))
    if gates is not None and not isinstance(gates, str):
        fail(f"linear(..., gates={gates!r}).", 'name the outputs in one string: gates="r z".')
    outputs = (name,) if gates is None else tuple(gates.split())
    named = all(output.isidentifier() for output in outputs)
    if not outputs or len(set(outputs)) < len(outputs) or not named:
        problem = f"linear(..., {name!r}, gates={gates!r})."
        fail(problem, 'name each output once, with blanks between: gates="r z".')
    if size is not None:
        if not isinstance(size, str) or not SIZE.fullmatch(size):
            fail(
                f"linear(..., {name!r}, size={brief(size)}): expected a symbol, or 1.",
                'size="R", and the number where a layer is made: RNN(cell, 12, 100, R=8).',
            )
        check_symbol(size, f"linear(..., {name!r}, size={size!r})")
    declared = Declared(outputs, heads, bias, size)
    operands = trace.operands.setdefault(name, {})
    if operands and declared != trace.linears[name]:
        given, before = _arguments(name, declared), _arguments(name, trace.linears[name])
        fail(
            f"{given}: matmuls of one name share a weight, and this cell has {before}.",
            "give both the same arguments; another name is another weight, learned separately.",
        )
    # One weight times one value is one product, however often it is written.
    matmul = operands.setdefault(node, f"{name}.{len(operands)}" if operands else name)
    trace.linears[matmul] = declared
    nodes = {output: Expr("linear", (node,), (matmul, output)) for output in outputs}
    trace.given.update(nodes.values())
    nodes = {output: of_row(node, size) for output, node in nodes.items()}
    return nodes[name] if gates is None else Gates("output", nodes)


def of_row(value: Expr, size: str | None) -> Expr:
    """A value as the cell's function sees it: of size 1, the row's one number, for units of any
    size.
    """
    return apply("sum", value, attrs=(1,)) if size == ONE else value


def _arguments(name: str, declared: Declared) -> str:
    """A call of ``linear``, with all arguments but the value."""
    outputs = " ".join(declared.outputs)
    return (
        f"linear(..., {name!r}, gates={None if outputs == name else outputs!r}, "
        f"heads={declared.heads}, bias={declared.bias}, size={declared.size!r})"
    )


def keep(rate: Expr | Number, per: str = "step") -> Expr:
    """A random mask that keeps with probability ``rate``.

    In training it is 1 with probability ``rate``, else 0, drawn for each unit and row once ``per``
    "step" or "sequence"; in evaluation it is its mean, ``rate``. So
    ``keep(1 - z) * new + (1 - keep(1 - z)) * old`` is zoneout, and ``keep(k) / k * value`` is
    inverted dropout. Draws are counter-based (Philox4x32-10, Salmon et al., 2011): the same on
    every engine for the same seed, and drawn again in the backward pass.
    """
    trace = _inside("keep")
    if per not in ("step", "sequence"):
        fail(f"keep(..., per={per!r}).", 'per="step" or per="sequence".')
    probability = operand("keep", rate)
    if is_const(probability) and not 0.0 <= probability.attrs[0] <= 1.0:
        problem = f"keep({rate!r}): the probability of keeping is outside [0, 1]."
        fail(problem, "give a rate in [0, 1].")
    node = Expr("keep", (probability,), (trace.keeps, per))
    trace.given.add(node)
    trace.keeps += 1
    return node
