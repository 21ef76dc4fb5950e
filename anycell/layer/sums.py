"""Gradients that add up over time."""

from __future__ import annotations

from collections.abc import Sequence

from anycell.lang.cell import RECURRENT, Linear
from anycell.layer.arguments import Array, Host, Weights
from anycell.layer.form import row_group
from anycell.plan import Plan


class Sums:
    """Gradients of one direction that add up over time."""

    def __init__(
        self,
        host: Host,
        plan: Plan,
        shape: Sequence[int],
        w: Weights,
        need: bool,
        dfinal: Sequence[Array | None],
        resets: bool,
    ) -> None:
        cell, h, (steps, batch) = plan.cell, plan.hidden_size, shape
        self.host, self.plan, self.fresh = host, plan, True
        self.states = [host.zeros((batch, plan.sizes[s.size])) for s in cell.states]
        for total, given in zip(self.states, dfinal, strict=True):
            if given is not None:
                total[:] = given
        self.resets = [host.zeros(tuple(d.shape)) for d in self.states] if resets else None
        groups = -(-batch // row_group(batch))
        self.params = host.zeros((groups, len(cell.params) * h)) if cell.params else None
        self.static = host.zeros((batch, h)) if w.static is not None else None
        # The first chunk overwrites, if there is one.
        new = host.empty if steps else host.zeros
        self.ih = new(tuple(w.ih.shape)) if need and w.ih is not None else None
        self.bias_ih = (
            host.zeros((len(cell.gates) * h,)) if need and w.bias_ih is not None else None
        )
        self.matmuls = {
            l.weight: _MatmulSum(host, plan, l, *w.matmul(l), steps) for l in cell.linears if need
        }

    def accumulators(self) -> dict[str, Array]:
        """Those that the kernel itself adds to, by argument."""
        arrays = {f"dstate{i}": total for i, total in enumerate(self.states)}
        arrays |= {f"dreset{i}": total for i, total in enumerate(self.resets or ())}
        arrays |= {"dparam": self.params, "dstatic": self.static}
        return {name: array for name, array in arrays.items() if array is not None}

    def add(self, dg: Array, x: Array | None, pairs: Sequence[tuple[Array, Array]]) -> None:
        """Adds a chunk: gradients of the projected gates, what was projected, and for each matmul
        the gradients of its outputs and its operand.
        """
        fresh, self.fresh = self.fresh, False
        if self.ih is not None:
            (self.host.matmul if fresh else self.host.matmul_add)(dg.T, x, self.ih)
        total = None
        if self.bias_ih is not None:
            total = dg.sum(0)
            self.bias_ih += total
        for l, (d, operand) in zip(self.plan.cell.linears, pairs, strict=True):
            self.matmuls[l.weight].add(l, d, operand, total if d is dg else None, fresh)

    def result(self) -> Weights:
        """All of them, after the last chunk."""
        h, params = self.plan.hidden_size, self.plan.cell.params
        total = None if self.params is None else self.params.sum(0)
        found: dict[str, Array | None] = {}
        for name, matmul in self.matmuls.items():
            found[name], found[f"{name}_bias"] = matmul.weight, matmul.bias
        return Weights(
            ih=self.ih,
            hh=found.pop(RECURRENT, None),
            bias_ih=self.bias_ih,
            bias_hh=found.pop(f"{RECURRENT}_bias", None),
            params=[total[i * h : (i + 1) * h] for i in range(len(params))],  # type: ignore[index]
            initial=self.states,
            reset=self.resets,
            static=self.static,
            linears=found,
        )


class _MatmulSum:
    """The gradients of a weight and a bias, of one matmul or of several that share them.

    Both have rows for every declared output; one that the cell does not use has gradient 0.
    """

    def __init__(
        self, host: Host, plan: Plan, linear: Linear, weight: Array, bias: Array | None, steps: int
    ) -> None:
        self.host = host
        self.whole = linear.heads == 1 and linear.outputs == linear.declared
        self.weight = (host.empty if self.whole and steps else host.zeros)(tuple(weight.shape))
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
