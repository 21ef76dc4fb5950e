"""The table of jaxprs: what each operation of JAX is in the graph of a step."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anycell.jax.equations import (
    BOOL,
    CONDITIONS,
    ELEMENTWISE,
    PACKAGE,
    STRUCTURAL,
    Equation,
    Variable,
    needed,
    origin,
    place,
    value,
)  # fmt: skip
from anycell.read import Graph, Outer, Reading, Refused, Value, read

Array = Any
Run = Any  # ``read.Run``

REDUCED = {"reduce_sum": "sum", "reduce_max": "max"}
# What to write in place of operations that people use in cells.
INSTEAD = {
    "while": "operations without a loop within the step",
    "scan": "the steps of the inner loop one after the other, if they are few",
    "cond": "jnp.where(condition, a, b)",
    "sort": "a cell without sorting",
    "gather": "slices, or a product with a fixed matrix",
    "custom_vjp_call": "the function without custom_vjp, with jax.lax.stop_gradient where needed",
}


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


class Reader:
    """Reads the equations of a body from states to states.

    Args:
        body: ``read.Body``, whose values are sorted by kind.
        axis: the axis of the batch in states.
    """

    def __init__(self, body: Any, axis: int | None) -> None:
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
            state = graph.state(v.shape, self.axis, v.aval.dtype == BOOL, names[k])
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
                INSTEAD.get(
                    equation.name, "operations that cells have, as docs/cells.md lists them"
                ),
            )
        for v in equation.results:
            if v.aval.dtype not in (self.body.dtype, BOOL):
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
            v.kind, v.shape, get, v.aval.dtype == BOOL, self._per_row(v), v.number
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
        flags = name in STRUCTURAL and dtypes == {BOOL}
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
        if len(cases) != 2 or equation.operands[0].aval.dtype != BOOL:
            graph.refuse("this selects among more than two values", "jnp.where, once or nested")
        if equation.results[0].aval.dtype != BOOL:
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
        if new == BOOL:
            return self.graph.elementwise("truth", operands[0], boolean=True)
        if old == BOOL:
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
    "abs max min clamp select_n integer_pow is_finite erfc convert_element_type cumsum dot_general "
    "optimization_barrier custom_jvp_call".split()
)
TABLES = frozenset({*ELEMENTWISE, *STRUCTURAL, *REDUCED, *RULES})
