"""Gradients that add up over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anycell.lang.cell import Linear
from anycell.layer.arguments import Array, Direction, Entering, Host
from anycell.layer.form import row_group
from anycell.layer.run import Run
from anycell.layer.signature import ENDS
from anycell.plan import Plan


def leaving(
    host: Any, given: Entering, dx: Array | None, directions: Sequence[Direction]
) -> dict[str, Array]:
    """The gradients of a call by the names of its arrays, from those of each direction; of all that
    were given.
    """
    named: dict[str, Array] = {} if dx is None else {"x": dx}
    count = len(directions)
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
                whole = named.setdefault(name, host.empty((count, *gradient.shape)))
                whole[d] = gradient
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
        self.states = [host.empty(shape) for shape in shapes]
        resets = run.given.resets is not None
        self.resets = [host.empty(shape) for shape in shapes] if resets else []
        groups, width = -(-batch // row_group(batch)), len(cell.params) * plan.hidden_size
        self.params = [host.empty((groups, width)) for _ in directions] if cell.params else []
        static = "static" in run.directions[0]
        shape = batch, plan.hidden_size
        self.static = [host.empty(shape) for _ in directions] if static else []
        for d in directions:
            arrays = {f"d_state {n}": t[d] for n, t in zip(cell.state_names, self.states)}  # noqa: B905
            for name, arriving in zip(cell.state_names, d_final, strict=True):
                if arriving is not None:
                    arrays[f"d_final {name}"] = arriving[d]
            for name, total in zip(cell.state_names, self.resets, strict=resets):
                arrays[f"d_reset {name}"] = total[d]
            if self.params:
                arrays["d_params"] = self.params[d]
            if self.static:
                arrays["d_static"] = self.static[d]
            run.place_of(d, arrays)

    def result(self) -> dict[str, Array]:
        """All of them that are of arrays that were given, by their names, after the last call."""
        run, plan, h = self.run, self.run.plan, self.run.plan.hidden_size
        directions, named = run.directions, dict[str, Array]()
        for kind, totals in (("state", self.states), ("reset_state", self.resets)):
            for state, total in zip(plan.cell.state_names, totals, strict=bool(totals)):
                name = f"{kind} {state}"
                array = directions[0].get(name)
                if array is None:
                    continue
                if len(array.shape) == 1:  # one value for all rows
                    rows, total = total, run.host.empty((len(directions), *array.shape))
                    for d in range(len(directions)):
                        total[d] = rows[d].sum(0)
                named[name] = total
        for d, groups in enumerate(self.params):
            total = groups.sum(0)
            for i, name in enumerate(plan.cell.param_names):
                named[name + ENDS[d]] = total[i * h : (i + 1) * h]
        for d, total in enumerate(self.static):  # which all directions share
            named["static"] = named["static"] + total if d else total
        return named


class Sums:
    """Gradients of weights and biases of one direction.

    Args:
        steps: of the input.
        w: what they are gradients of.
        need: whether they are wanted.
    """

    def __init__(self, host: Host, plan: Plan, steps: int, w: Direction, need: bool) -> None:
        cell, h = plan.cell, plan.hidden_size
        self.host, self.plan, self.fresh = host, plan, True
        # The first chunk overwrites, if there is one.
        new = host.empty if steps else host.zeros
        projects = need and "weight_ih" in w
        self.weight_ih = new(tuple(w["weight_ih"].shape)) if projects else None
        biased = need and "bias_ih" in w
        self.bias_ih = host.zeros((len(cell.gates) * h,)) if biased else None
        self.matmuls = {l.weight: _MatmulSum(host, plan, l, w, steps) for l in cell.linears if need}

    def add(self, dg: Array, x: Array | None, pairs: Sequence[tuple[Array, Array]]) -> None:
        """Adds a chunk: gradients of the projected gates, what was projected, and for each matmul
        the gradients of its outputs and its operand.
        """
        fresh, self.fresh = self.fresh, False
        if self.weight_ih is not None:
            (self.host.matmul if fresh else self.host.matmul_add)(dg.T, x, self.weight_ih)
        total = None
        if self.bias_ih is not None:
            total = dg.sum(0)
            self.bias_ih += total
        for l, (d, operand) in zip(self.plan.cell.linears, pairs, strict=True):
            self.matmuls[l.weight].add(l, d, operand, total if d is dg else None, fresh)

    def result(self) -> Direction:
        """All of them, after the last chunk."""
        named = {"weight_ih": self.weight_ih, "bias_ih": self.bias_ih}
        for name, matmul in self.matmuls.items():
            named |= {name: matmul.weight, matmul.bias_name: matmul.bias}
        return {name: array for name, array in named.items() if array is not None}


class _MatmulSum:
    """The gradients of a weight and a bias, of one matmul or of several that share them.

    Both have rows for every declared output; one that the cell does not use has gradient 0.
    """

    def __init__(self, host: Host, plan: Plan, linear: Linear, w: Direction, steps: int) -> None:
        self.host, self.bias_name = host, linear.bias_name
        bias = w.get(linear.bias_name)
        self.whole = linear.heads == 1 and linear.outputs == linear.declared
        new = host.empty if self.whole and steps else host.zeros
        self.weight = new(tuple(w[linear.weight].shape))
        self.bias = None if bias is None else host.zeros(tuple(bias.shape))
        self.size = plan.sizes[linear.out_size]

    def add(self, l: Linear, d: Array, operand: Array, total: Array | None, fresh: bool) -> None:
        """Adds a chunk of one matmul; ``total`` is the sum of the rows of ``d``, where known."""
        size = self.size
        if self.bias is not None and total is None:
            total = d.sum(0)
        if self.whole:
            (self.host.matmul if fresh else self.host.matmul_add)(d.T, operand, self.weight)
            if self.bias is not None:
                self.bias += total
            return
        out, into = size // l.heads, operand.shape[1] // l.heads
        blocks = self.weight.reshape(l.heads, len(l.declared) * out, into)
        for n, output in enumerate(l.outputs):
            k = l.declared.index(output)
            if self.bias is not None:
                self.bias[k * size : (k + 1) * size] += total[n * size : (n + 1) * size]  # type: ignore[index]
            for head in range(l.heads):
                column = n * size + head * out
                block = blocks[head, k * out : (k + 1) * out]
                part = operand[:, head * into : (head + 1) * into]
                self.host.matmul_add(d[:, column : column + out].T, part, block)
