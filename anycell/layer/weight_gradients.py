"""Gradients that add up over time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anycell.lang.cell import Linear
from anycell.layer.arguments import Array, Direction, Factors
from anycell.layer.signature import ENDS
from anycell.plan import Plan


def gradients_by_name(
    empty: Callable[[tuple[int, ...]], Array],
    given: Sequence[Mapping[str, Any]],
    dx: Array | None,
    directions: Sequence[Direction],
) -> dict[str, Array]:
    """The gradients of a call by the names of its arrays, of all arrays that were given.

    Args:
        empty: makes an array for the sums of both directions.
        given: the arrays that each direction was given, or their views.
        directions: the sums of each direction.
    """
    named: dict[str, Array] = {} if dx is None else {"x": dx}
    count = len(directions)
    for d, (gradients, w) in enumerate(zip(directions, given, strict=True)):
        for name, gradient in gradients.items():
            if name not in w:
                continue
            if name.startswith(("state ", "reset_state ")):
                if len(w[name].shape) == 1:  # one value for all rows
                    gradient = gradient.sum(0)
                if count == 1:
                    named[name] = gradient[None]
                    continue
                both: Any = named.setdefault(name, empty((count, *gradient.shape)))
                both[d] = gradient
            elif name == "static":  # which all directions share
                named[name] = named[name] + gradient if d else gradient
            else:
                named[name + ENDS[d]] = gradient
    return named


class WeightGradients:
    """Gradients of weights and biases of one direction: products over the rows of chunks of time.
    They have rows for every declared output of their matmul; an output that the cell does not use
    has gradient 0. Engines say how to ``multiply`` and to ``add_rows``.

    Args:
        w: what the direction learns.
        need: whether the gradients are wanted.
        fresh: whether a first chunk will overwrite the totals; false if there is no chunk.

    Attributes:
        totals: by the names of the arrays.
        vectors: gradients summed over rows: those of the projected gates, and those of the outputs
            of matmuls by the matmuls' names, if a bias needs them.
        biases: the names of the biases that the direction has.
    """

    def __init__(self, plan: Plan, w: Direction, need: bool, fresh: bool) -> None:
        self.plan, self.whole, biases = plan, _whole(plan), _biases(plan)
        self.totals: Direction = {}
        self.vectors: Direction = {}
        for name, whole in self.whole.items() if need else ():
            if name in w:
                self.totals[name] = self.like(w[name], whole and fresh)
        self.biases = [name for name in biases if name in w] if need else []
        for name in self.biases:
            for gradient, width in biases[name].items():
                self.vectors[gradient] = self.new((width,), fresh)

    def new(self, shape: tuple[int, ...], overwritten: bool) -> Array:
        """Memory for a total, zeros where it is not overwritten."""
        raise NotImplementedError

    def like(self, weight: Any, overwritten: bool) -> Array:
        """Memory for the gradient of a weight, zeros where it is not overwritten."""
        return self.new(tuple(weight.shape), overwritten)

    def multiply(self, d: Any, operand: Any, weight: Array, first: bool) -> None:
        """``weight += d.T @ operand``, or ``weight = d.T @ operand`` for the first product."""
        raise NotImplementedError

    def add_blocks(self, d: Any, operand: Any, weight: Any, heads: int, first: int) -> None:
        """``weight[i, first:] += d[:, i].T @ operand[:, i]`` for the columns of each head i, of a
        weight ``[heads, rows, columns]``; with one head the weight does not have that axis.
        """
        raise NotImplementedError

    def add_rows(self, d: Any, vector: Array, first: bool) -> None:
        """``vector += d.sum(0)``, or ``vector = d.sum(0)`` for the first sum."""
        raise NotImplementedError

    def columns(self, d: Any, begin: int, end: int) -> Any:
        """The columns of a matrix from ``begin`` to ``end``."""
        return d[:, begin:end]

    def add(self, dg: Any, x: Any, hidden: Any, factors: Sequence[Factors], *, first: bool) -> None:
        """Adds what the rows of a chunk contribute.

        Args:
            dg: gradients of its projected gates, ``[rows, G*H]``.
            x: its input ``[rows, I]``, zeros under masks.
            hidden: the first states before its steps, ``[rows, size]``.
            factors: of each matmul inside the steps.
            first: whether it is the first chunk.
        """
        totals, plan = self.totals, self.plan
        if "weight_ih" in totals:
            self.multiply(dg, x, totals["weight_ih"], first)
        if GATES in self.vectors:
            self.add_rows(dg, self.vectors[GATES], first)
        for l, (outputs, operand) in zip(plan.cell.linears, factors, strict=True):
            d = dg if outputs is None else outputs
            operand, weight = hidden if operand is None else operand, totals[l.weight]
            if outputs is not None and l.name in self.vectors:
                self.add_rows(d, self.vectors[l.name], first)
            if self.whole[l.weight]:
                self.multiply(d, operand, weight, first)
                continue
            size = plan.sizes[l.out_size]
            for n, output in enumerate(l.outputs):
                row = l.declared.index(output) * (size // l.heads)
                columns = self.columns(d, n * size, (n + 1) * size)
                self.add_blocks(columns, operand, weight, l.heads, row)


def bias_gradients(
    plan: Plan, biases: Sequence[str], totals: Direction, vectors: Direction, empty: Any, zeros: Any
) -> Direction:
    """The gradients of weights and biases of one direction, after the last chunk.

    Args:
        biases, totals, vectors: of its ``WeightGradients``.
        empty, zeros: make arrays of a shape.
    """
    for name in biases:
        width, moves = _moves(plan, name)
        if not moves:
            totals[name] = vectors[GATES]
            continue
        whole = moves[0][1] == slice(None)
        totals[name] = bias = (empty if whole else zeros)((width,))
        for gradient, into, of in moves:
            if whole:
                bias[:] = vectors[gradient]
            else:
                bias[into] += vectors[gradient][of]
    return totals


def vector_of(plan: Plan, bias: str) -> str | None:
    """The sum that is the gradient of a bias, by its name among ``WeightGradients.vectors``; None
    if it is made of parts.
    """
    _, moves = _moves(plan, bias)
    if not moves:
        return GATES
    return moves[0][0] if moves[0][1] == slice(None) else None


@functools.lru_cache(maxsize=512)
def _moves(plan: Plan, bias: str) -> tuple[int, list[tuple[str, slice, slice]]]:
    """The width of a bias, and the parts of its gradient: the name of a sum, the rows of the bias,
    and the rows of the sum. There are no parts for the input's bias, whose gradient is one sum.
    """
    linears = [l for l in plan.cell.linears if l.bias_name == bias]
    if not linears:
        return 0, []
    size = plan.sizes[linears[0].out_size]
    rows = [slice(k * size, (k + 1) * size) for k in range(len(linears[0].declared))]
    if len(linears) == 1 and linears[0].outputs == linears[0].declared:
        return len(rows) * size, [(_gradient(plan, linears[0]), slice(None), slice(None))]
    return len(rows) * size, [
        (_gradient(plan, l), rows[l.declared.index(output)], rows[n])
        for l in linears
        for n, output in enumerate(l.outputs)
    ]


# Names the gradients of the projected gates among those of matmuls; no matmul has this name.
GATES = "d gates"


def _gradient(plan: Plan, l: Linear) -> str:
    """The name of the gradients of a matmul's outputs."""
    return GATES if plan.shares_gradient(l) else l.name


@functools.lru_cache(maxsize=256)
def _whole(plan: Plan) -> dict[str, bool]:
    """Says for each weight whether its gradient is one product."""
    weights = [l.weight for l in plan.cell.linears]
    return {"weight_ih": True} | {
        l.weight: l.heads == 1 and l.outputs == l.declared and weights.count(l.weight) == 1
        for l in plan.cell.linears
    }


@functools.lru_cache(maxsize=256)
def _biases(plan: Plan) -> dict[str, dict[str, int]]:
    """The gradients whose rows each bias's gradient sums, with their widths."""
    cell, gates = plan.cell, plan.gates_width
    biases: dict[str, dict[str, int]] = {"bias_ih": {GATES: gates}}
    for l in cell.linears:
        gradient = _gradient(plan, l)
        width = gates if gradient == GATES else len(l.outputs) * plan.sizes[l.out_size]
        biases.setdefault(l.bias_name, {})[gradient] = width
    return biases
