"""Cells made of cells: with the input projection in the step, a mask on the recurrent matmul, or
a readout that is fed back.

They are for engines and layers, which make them anew: they cannot be pickled.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from anycell.lang.cell import Cell, finished, learned, rewritten
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


READOUT, FEEDBACK = "readout", "feedback"  # matmuls of the cells that `with_feedback` makes
# The size of what is read out, and a gate: names that no cell can declare.
OUTPUT, FREE = "_Y", "_free"


@functools.lru_cache(maxsize=64)
def with_feedback(cell: Cell) -> Cell:
    """The cell whose input is, where it is free, a linear readout of the state before the step.

        y = W_readout s + b_readout            of size OUTPUT, with s the first state
        x_k <- x_k + x_free (W_feedback_k y)   for each gate k

    ``FREE`` is one more gate, the last: 0 where the step sees its input alone, and 1 where it also
    sees y, for all units of a row. No gradient goes back to it.

    Raises:
        ValueError: for a cell that has a matmul of one of these names.
    """
    taken = {l.name for l in cell.linears} & {READOUT, FEEDBACK}
    if taken:
        raise ValueError(
            f"cell: given {cell.name}, which has a linear(..., {min(taken)!r}); expected a cell "
            "without: that is the name of a matmul that feeds a readout back. Rename it."
        )
    first = Expr("state", (), (cell.states[0].name,))
    free = apply("stop_gradient", Expr("x", (), (FREE,)))
    y = Expr("linear", (first,), (READOUT, READOUT))

    def rule(node: Expr, args: tuple[Expr, ...]) -> Expr | None:
        if node.op not in ("x", "preact"):
            return None
        fed = Expr("linear", (y,), (FEEDBACK, node.attrs[-1]))
        return apply("add", Expr(node.op, args, node.attrs), apply("mul", free, fed))

    new = rewritten(cell, rule)
    operands = _operands(new)
    fed = {n.attrs for n in topological(new.next) if n.op == "linear"}
    outputs = tuple(gate for gate in cell.gates if (FEEDBACK, gate) in fed)
    linears = [Linear(READOUT, first, (READOUT,), 1, True, "", OUTPUT, (READOUT,))]
    for l in cell.linears:
        declared = (*l.declared, FREE) if l.recurrent else l.declared
        linears.append(replace(l, operand=operands[l.name], declared=declared))
    linears.append(Linear(FEEDBACK, y, outputs, 1, False, "", "H", cell.gates))
    new.linears, new.gates = tuple(linears), (*cell.gates, FREE)
    new.learned = learned(new)
    return finished(new)


def _operands(cell: Cell) -> dict[str, Expr]:
    matmuls = (n for n in topological(cell.next) if n.op in ("linear", "preact"))
    return {n.attrs[0]: n.args[0] for n in matmuls}
