"""Cells made of cells: with the input projection in the step, a mask on the recurrent matmul, a
readout that is fed back, or weights of low rank.

Cells of low rank are cells like any other. The others are for engines and layers, which make them
again when needed: a pickle of them restores the cell that they were made of.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from anycell.lang.cell import Cell, rewritten
from anycell.lang.declare import PROJECTION, RECURRENT, is_recurrent
from anycell.lang.expr import Expr, apply, shared_name
from anycell.lang.trace import Declared
from anycell.refusal import refuse


def with_projection(cell: Cell) -> Cell:
    """Returns the cell with the input projection inside its step, as one more matmul, the last.

    The operand of this matmul is a leaf ``input`` of the size ``INPUT``.
    """
    raw = Expr("input")

    def rule(node: Expr, args: tuple[Expr, ...]) -> Expr | None:
        if node.op == "x":
            return Expr("linear", (raw,), (PROJECTION, *node.attrs))
        if node.op == "preact":
            enters = Expr("linear", (raw,), (PROJECTION, node.attrs[1]))
            return apply("add", enters, Expr("linear", args, node.attrs))
        return None

    entering = Declared(cell.gates, 1, True, "H")
    return rewritten(cell, rule, {**cell.declared, PROJECTION: entering})


@functools.lru_cache(maxsize=64)
def with_recurrent_mask(cell: Cell, per_gate: bool) -> Cell:
    """Returns the cell whose recurrent matmul takes the first state times a mask per sequence.

    The mask is a leaf ``recurrent_mask`` of the first state's size. With ``per_gate`` each gate has
    a mask and a matmul of its own, which uses the gate's rows of the shared weight.
    """

    def rule(node: Expr, args: tuple[Expr, ...]) -> Expr | None:
        if not is_recurrent(node):
            return None
        (state,), (name, gate) = args, node.attrs
        index = cell.gates.index(gate) if per_gate else 0
        masked = apply("mul", state, Expr("recurrent_mask", (), (index,)))
        return Expr(node.op, (masked,), (f"{name}.{gate}" if per_gate else name, gate))

    declared: dict[str, Declared] = {}
    for name, d in cell.declared.items():
        apart = per_gate and name == RECURRENT
        declared |= dict.fromkeys([f"{name}.{g}" for g in d.outputs] if apart else [name], d)
    return rewritten(cell, rule, declared)


READOUT, FEEDBACK = "readout", "feedback"  # matmuls of the cells that `with_feedback` makes
# The size of the readout, and a gate: names that no cell can declare.
OUTPUT, FREE = "_Y", "_free"


@functools.lru_cache(maxsize=64)
def with_feedback(cell: Cell) -> Cell:
    """Returns the cell that, at free steps, adds a readout of its previous state to its input.

        y = W_readout s + b_readout            of size OUTPUT, with s the first state
        x_k <- x_k + W_feedback_k y            for each gate k, where x_free > 0

    ``FREE`` is one more gate, the last, with one value for all units of a row: at 0 the step sees
    only its input, at any value above 0 it also sees y. No gradient goes back to it.

    Raises:
        ValueError: if the cell has a matmul named ``READOUT`` or ``FEEDBACK``.
    """
    if set(cell.gate_sizes.values()) != {"H"}:
        given = f"{cell.name}, with gates of {cell.shown_width} units together"
        hint = "Call the layer's step in a loop, with the readout of its output as the next x."
        refuse("cell", given, "a cell whose gates all have the hidden size H", hint)
    taken = {l.name for l in cell.linears} & {READOUT, FEEDBACK}
    if taken:
        given = f"{cell.name}, which has a linear(..., {min(taken)!r})"
        expected = "a cell without one: a matmul that feeds a readout back has that name"
        refuse("cell", given, expected, "Rename it.")
    first = Expr("state", (), (cell.states[0].name,))
    free = apply("gt", Expr("x", (), (FREE,)), 0.0)
    y = Expr("linear", (first,), (READOUT, READOUT))

    def rule(node: Expr, args: tuple[Expr, ...]) -> Expr | None:
        if node.op not in ("x", "preact"):
            return None
        fed = Expr("linear", (y,), (FEEDBACK, node.attrs[-1]))
        return apply("add", Expr(node.op, args, node.attrs), apply("where", free, fed, 0.0))

    declared = {READOUT: Declared((READOUT,), 1, True, OUTPUT), **cell.declared}
    if RECURRENT in declared:
        recurrent = declared[RECURRENT]
        declared[RECURRENT] = recurrent._replace(outputs=(*recurrent.outputs, FREE))
    declared[FEEDBACK] = Declared(cell.gates, 1, False, "H")
    gates, sizes = (*cell.gates, FREE), {**cell.gate_sizes, FREE: "H"}
    return rewritten(cell, rule, declared, gates=gates, gate_sizes=sizes)


RANK = "rank"  # the size symbol between the two factors of a weight


class LowRank(Cell):
    """A cell that ``low_rank`` made; it can be called and pickled, like the cell ``full``."""

    full: Cell
    matmuls: tuple[str, ...]

    def __call__(self, *args: Any, **hyper: Any) -> Cell:
        return low_rank(self.full(*args, **hyper), self.matmuls, bias=self.bias)

    def __repr__(self) -> str:
        bias = "" if self.bias == self.full.bias else f", bias={self.bias}"
        return f"low_rank({self.full!r}, {self.matmuls!r}{bias})"

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(low_rank, bias=self.bias), (self.full, self.matmuls)


def low_rank(cell: Cell, matmuls: Sequence[str] | None = None, *, bias: bool = True) -> LowRank:
    """Returns the cell whose weights inside the step are products of two factors, W = U V.

        W v  becomes  U (V v)     with W [out, in], U [out, rank], V [rank, in]

    A weight has ``rank * (out + in)`` numbers in place of ``out * in``, and each step takes that
    many multiplications per row. Layers take the rank by keyword:
    ``RNN(low_rank(GRU), 12, 256, rank=32)``. U and V are named like W, with ``_u`` and ``_v``
    appended: ``weight_hh_u`` and ``weight_hh_v``; U's bias is ``bias_hh_u``. Outputs of one
    matmul share its V. If the matmul has heads, both factors have them.

    Args:
        matmuls: names of the matmuls that change, "hh" for the recurrent one; None means all.
        bias: False for layers without biases; it replaces the layers' own argument ``bias``, which
            U of the recurrent matmul ignores.

    Raises:
        ValueError: if the cell has no such matmul, or a new name is already in use.
    """
    names = tuple(dict.fromkeys(l.shared for l in cell.linears))
    chosen = names if matmuls is None else tuple(name for name in names if name in set(matmuls))
    unknown = [] if matmuls is None else [name for name in matmuls if name not in names]
    if isinstance(matmuls, str) or unknown or not chosen:
        listed = ", ".join(names) or "it has none"
        expected = f"names of matmuls in the step of {cell.name}: {listed}"
        refuse("matmuls", repr(matmuls), expected)
    if RANK in cell.sizes.values():
        given = f"{cell!r}, which has the size {RANK!r}"
        expected = "a cell without it: the new weights have a size of that name"
        refuse("cell", given, expected, "Rename it, or name all matmuls in one call.")
    taken = {f"{name}_{end}" for name in chosen for end in "uv"} & {*names} - {*chosen}
    if taken:
        given = f"{cell!r}, which has a matmul {min(taken)!r}"
        expected = "a cell without it: a new matmul takes that name"
        refuse("cell", given, expected, "Rename it, or name all matmuls in one call.")
    return _low_rank(cell, chosen, bias and cell.bias)


@functools.lru_cache(maxsize=64)
def _low_rank(cell: Cell, matmuls: tuple[str, ...], bias: bool) -> LowRank:
    def rule(node: Expr, args: tuple[Expr, ...]) -> Expr | None:
        if node.op not in ("linear", "preact") or shared_name(node.attrs[0]) not in matmuls:
            return None
        name, output = node.attrs
        inner = Expr("linear", args, (_factor(name, "v"), f"{shared_name(name)}_v"))
        product = Expr("linear", (inner,), (_factor(name, "u"), output))
        return product if node.op == "linear" else apply("add", Expr("x", (), (output,)), product)

    declared: dict[str, Declared] = {}
    for name, d in cell.declared.items():
        if shared_name(name) not in matmuls:
            declared[name] = d
            continue
        declared[_factor(name, "v")] = Declared((f"{shared_name(name)}_v",), d.heads, False, RANK)
        of_u = bias if name == RECURRENT else d.bias
        declared[_factor(name, "u")] = d._replace(bias=of_u)
    options = {"full": cell, "matmuls": matmuls, "bias": bias}
    new = rewritten(cell, rule, declared, LowRank, **options)
    new._check_names()
    return new


def _factor(matmul: str, end: str) -> str:
    """The matmul by a factor of a weight, in place of one by the weight: "w_u.1" for "w.1"."""
    weight, dot, use = matmul.partition(".")
    return f"{weight}_{end}{dot}{use}"
