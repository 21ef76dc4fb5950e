"""Gradients that add up over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anycell.lang.cell import Linear
from anycell.layer.arguments import Array, Direction, Entering, Host
from anycell.layer.form import row_group
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


class Sums:
    """Gradients of one direction that add up over time.

    Args:
        shape: steps and rows.
        w: what they are gradients of.
        d_final: ``[B, size]`` each or None, what arrives at the final states.
        resets: whether there are any.
        need: whether the gradients of weights are wanted.
    """

    def __init__(
        self,
        host: Host,
        plan: Plan,
        shape: Sequence[int],
        w: Direction,
        d_final: Sequence[Array | None],
        resets: bool,
        need: bool,
    ) -> None:
        cell, h, (steps, batch) = plan.cell, plan.hidden_size, shape
        self.host, self.plan, self.fresh = host, plan, True
        self.states = [host.zeros((batch, plan.sizes[s.size])) for s in cell.states]
        for total, arriving in zip(self.states, d_final, strict=True):
            if arriving is not None:
                total[:] = arriving
        self.resets = [host.zeros(tuple(d.shape)) for d in self.states] if resets else []
        groups = -(-batch // row_group(batch))
        self.params = host.zeros((groups, len(cell.params) * h)) if cell.params else None
        self.static = host.zeros((batch, h)) if "static" in w else None
        # The first chunk overwrites, if there is one.
        new = host.empty if steps else host.zeros
        projects = need and "weight_ih" in w
        self.weight_ih = new(tuple(w["weight_ih"].shape)) if projects else None
        biased = need and "bias_ih" in w
        self.bias_ih = host.zeros((len(cell.gates) * h,)) if biased else None
        self.matmuls = {l.weight: _MatmulSum(host, plan, l, w, steps) for l in cell.linears if need}

    def accumulators(self) -> dict[str, Array]:
        """Those that the kernel itself adds to, by argument."""
        arrays = {f"dstate{i}": total for i, total in enumerate(self.states)}
        arrays |= {f"dreset{i}": total for i, total in enumerate(self.resets)}
        arrays |= {"dparam": self.params, "dstatic": self.static}
        return {name: array for name, array in arrays.items() if array is not None}

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
        h, names = self.plan.hidden_size, self.plan.cell.param_names
        named = {"weight_ih": self.weight_ih, "bias_ih": self.bias_ih, "static": self.static}
        for kind, totals in (("state", self.states), ("reset_state", self.resets)):
            pairs = zip(self.plan.cell.state_names, totals, strict=bool(totals))
            named |= {f"{kind} {name}": total for name, total in pairs}
        for name, matmul in self.matmuls.items():
            named |= {name: matmul.weight, matmul.bias_name: matmul.bias}
        if self.params is not None:
            total = self.params.sum(0)
            named |= {name: total[i * h : (i + 1) * h] for i, name in enumerate(names)}
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
