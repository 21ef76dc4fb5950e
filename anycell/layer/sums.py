"""Gradients that add up over time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anycell.layer.arguments import Array, Direction, Entering, Factors
from anycell.layer.form import row_group
from anycell.layer.run import Run
from anycell.layer.schedule import Chunk
from anycell.layer.signature import ENDS
from anycell.plan import Plan


def leaving(
    empty: Callable[[tuple[int, ...]], Array],
    given: Entering,
    dx: Array | None,
    directions: Sequence[Direction],
    whole: Mapping[str, Array] | None = None,
) -> dict[str, Array]:
    """The gradients of a call by the names of its arrays; of all that were given.

    Args:
        empty: makes an array for the sums of both directions.
        directions: the sums of each direction.
        whole: those with an axis of directions, ``[D, B, size]``.
    """
    named: dict[str, Array] = {} if dx is None else {"x": dx}
    count = len(directions)
    for name, gradient in (whole or {}).items():
        if name in given.directions[0]:
            named[name] = gradient
    for d, (gradients, w) in enumerate(zip(directions, given.directions, strict=True)):
        for name, gradient in gradients.items():
            if name not in w:
                continue
            if name.startswith(("state ", "reset_state ")):
                if len(w[name].shape) == 1:  # one value for all rows
                    gradient = gradient.sum(0)
                if count == 1:
                    named[name] = gradient.reshape(1, *gradient.shape)
                    continue
                both: Any = named.setdefault(name, empty((count, *gradient.shape)))
                both[d] = gradient
            elif name == "static":  # which all directions share
                named[name] = named[name] + gradient if d else gradient
            else:
                named[name + ENDS[d]] = gradient
    return named


class Totals:
    """Gradients that the kernel itself adds up: of states, of what resets restore, of parameters
    and of the static input. The door sets them to 0, or to what arrives at the final states, with
    its first call.

    Args:
        d_final: ``[D, B, size]`` each or None, what arrives at the final states.
    """

    def __init__(self, run: Run, d_final: Sequence[Array | None]) -> None:
        self.run, plan, host, batch = run, run.plan, run.host, run.batch
        cell, directions = plan.cell, range(len(run.directions))
        shapes = [(len(directions), batch, plan.sizes[s.size]) for s in cell.states]
        self.states = [host.wide.empty(shape) for shape in shapes]
        resets = run.given.resets is not None
        self.resets = [host.wide.empty(shape) for shape in shapes] if resets else []
        groups, width = -(-batch // row_group(batch)), len(cell.params) * plan.hidden_size
        self.params = [host.wide.empty((groups, width)) for _ in directions] if cell.params else []
        static = "static" in run.directions[0]
        shape = batch, plan.hidden_size
        self.static = [host.wide.empty(shape) for _ in directions] if static else []
        whole = {}
        for name, total, arriving in zip(cell.state_names, self.states, d_final, strict=True):
            whole[f"d_state {name}"] = total
            if arriving is not None:
                whole[f"d_final {name}"] = arriving
        for name, total in zip(cell.state_names, self.resets, strict=resets):
            whole[f"d_reset {name}"] = total
        run.place_parts(whole)
        for d in directions:
            if self.params:
                run.place_of(d, {"d_params": self.params[d]})
            if self.static:
                run.place_of(d, {"d_static": self.static[d]})

    def of_states(self) -> dict[str, Array]:
        """The gradients of states, ``[D, B, size]``, after the last call."""
        names = self.run.plan.cell.state_names
        return {f"state {name}": total for name, total in zip(names, self.states, strict=True)}

    def result(self, d: int) -> Direction:
        """All others of one direction, by the names of the arrays, after the last call."""
        cell, h = self.run.plan.cell, self.run.plan.hidden_size
        named = {f"reset_state {n}": t[d] for n, t in zip(cell.state_names, self.resets)}  # noqa: B905
        if self.params:
            total = self.params[d].sum(0).reshape(len(cell.params), h)
            named.update(zip(cell.param_names, self.run.host.rows(total), strict=True))
        if self.static:
            named["static"] = self.static[d]
        return named


class Sums:
    """Gradients of weights and biases of one direction. Those of a weight and a bias have rows for
    every declared output of their matmuls; one that the cell does not use has gradient 0.

    Args:
        given: what the pass was given.
        d: the direction.
        need: whether they are wanted.
        overwrite: the first chunk may overwrite, as there is one.

    Attributes:
        totals: by the names of the arrays.
    """

    def __init__(
        self, host: Any, plan: Plan, given: Entering, d: int, need: bool, overwrite: bool
    ) -> None:
        self.host, self.plan, self.given, self.fresh = host, plan, given, overwrite
        self.totals: Direction = {}
        w = given.directions[d]
        self.whole = _whole(plan)
        for name, whole in self.whole.items() if need else ():
            if name in w:
                new = self.empty if overwrite and whole else self.zeros
                self.totals[name] = new(tuple(w[name].shape))

    def empty(self, shape: tuple[int, ...]) -> Array:
        return self.host.wide.empty(shape)

    def zeros(self, shape: tuple[int, ...]) -> Array:
        return self.host.wide.zeros(shape)

    def rows(self, matrix: Array) -> Array:
        """The sum of its rows."""
        return matrix.sum(0, dtype=self.host.wide.dtype)

    def add_blocks(self, d: Array, operand: Array, blocks: Array) -> None:
        """``blocks[i] += d[:, i].T @ operand[:, i]`` for the columns of each head."""
        heads, out, into = blocks.shape
        for i in range(heads):
            columns = operand[:, i * into : (i + 1) * into]
            self.host.matmul_add(d[:, i * out : (i + 1) * out].T, columns, blocks[i])

    def add(self, chunk: Chunk, dg: Array, hidden: Array, factors: Sequence[Factors]) -> None:
        """Adds a chunk.

        Args:
            dg: gradients of its projected gates, ``[rows, G*H]``.
            hidden: the first states before its steps, ``[steps, B, size]``.
            factors: of each matmul inside the steps.
        """
        host, totals, given, plan = self.host, self.totals, self.given, self.plan
        multiply = host.matmul if self.fresh else host.matmul_add
        self.fresh = False
        if "weight_ih" in totals:
            x = given.x[chunk.begin : chunk.end]
            if given.mask is not None:
                # What lies under a mask may be NaN, and NaN times a zero gradient is NaN.
                x = host.masked(x, given.mask[chunk.begin : chunk.end])
            multiply(dg.T, x.reshape(dg.shape[0], x.shape[2]), totals["weight_ih"])
        of_gates = None
        if "bias_ih" in totals:
            of_gates = self.rows(dg)
            totals["bias_ih"] += of_gates
        for l, (outputs, operand) in zip(plan.cell.linears, factors, strict=True):
            d = dg if outputs is None else outputs
            if operand is None:
                operand = hidden.reshape(dg.shape[0], hidden.shape[2])
            weight, bias, total = totals[l.weight], totals.get(l.bias_name), of_gates
            if bias is not None and (outputs is not None or total is None):
                total = self.rows(d)
            if self.whole[l.weight]:
                multiply(d.T, operand, weight)
                if bias is not None:
                    bias += total
                continue
            size = plan.sizes[l.out_size]
            blocks = weight.reshape(l.heads, -1, operand.shape[1] // l.heads)
            for n, output in enumerate(l.outputs):
                k, out = l.declared.index(output), size // l.heads
                columns = slice(n * size, (n + 1) * size)
                if bias is not None:
                    bias[k * size : (k + 1) * size] += total[columns]  # type: ignore[index]
                self.add_blocks(d[:, columns], operand, blocks[:, k * out : (k + 1) * out])


@functools.lru_cache(maxsize=256)
def _whole(plan: Plan) -> dict[str, bool]:
    """Weights and biases, and whether the gradient is one product."""
    linears = plan.cell.linears
    named = {l.weight: l.heads == 1 and l.outputs == l.declared for l in linears}
    return {"weight_ih": True, **named, "bias_ih": False} | {l.bias_name: False for l in linears}
