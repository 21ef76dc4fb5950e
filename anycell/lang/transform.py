"""Cells made of cells: with the input projection in the step, or a mask on the recurrent matmul.

They are for engines alone: nothing is derived from them, and they cannot be pickled.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from anycell.lang.cell import Cell, finished, rewritten
from anycell.lang.declare import INPUT, PROJECTION, RECURRENT, Linear, is_recurrent
from anycell.lang.expr import Expr, apply, topological


def with_projection(cell: Cell) -> Cell:
    """The cell whose step begins with the input projection, as one more matmul, the last.

    Its operand is a leaf ``input`` of the size ``INPUT``.
    """
    raw = Expr("input")

    def rule(node: Expr, args: tuple[Expr, ...]) -> Expr | None:
        if node.op == "x":
            return Expr("linear", (raw,), (PROJECTION, *node.attrs))
        if node.op == "preact":
            enters = Expr("linear", (raw,), (PROJECTION, node.attrs[1]))
            return apply("add", enters, Expr("linear", args, node.attrs))
        return None

    new = rewritten(cell, rule)
    operands = _operands(new)
    linears = [replace(l, operand=operands[l.name]) for l in cell.linears]
    used = {n.attrs for n in topological(new.next) if n.op == "linear"}
    entering = tuple(gate for gate in cell.gates if (PROJECTION, gate) in used)
    if entering:
        last = Linear(PROJECTION, raw, entering, 1, True, INPUT, "H", cell.gates)
        linears.append(last)
    new.linears, new.fused = tuple(linears), frozenset()
    return finished(new)


@functools.lru_cache(maxsize=64)
def with_recurrent_mask(cell: Cell, per_gate: bool) -> Cell:
    """The cell whose recurrent matmul multiplies the first state times a mask, given per sequence.

    The mask is a leaf ``recurrent_mask`` of the first state's size. One ``per_gate`` makes a matmul
    per gate, each on its own rows of the one weight.
    """

    def rule(node: Expr, args: tuple[Expr, ...]) -> Expr | None:
        if not is_recurrent(node):
            return None
        (state,), (name, gate) = args, node.attrs
        index = cell.gates.index(gate) if per_gate else 0
        masked = apply("mul", state, Expr("recurrent_mask", (), (index,)))
        return Expr(node.op, (masked,), (f"{name}.{gate}" if per_gate else name, gate))

    new = rewritten(cell, rule)
    operands = _operands(new)
    linears: list[Linear] = []
    for l in cell.linears:
        parts = [l]
        if per_gate and l.name == RECURRENT:
            parts = [replace(l, name=f"{l.name}.{gate}", outputs=(gate,)) for gate in l.outputs]
        linears += [replace(part, operand=operands[part.name]) for part in parts]
    new.linears = tuple(linears)
    return finished(new)


def _operands(cell: Cell) -> dict[str, Expr]:
    matmuls = (n for n in topological(cell.next) if n.op in ("linear", "preact"))
    return {n.attrs[0]: n.args[0] for n in matmuls}
