"""The table of arrays: a row for each array that a kernel reads or writes.

Kernels, the native door, its C callers and the memory check all use these rows; kernels define no
other names. Arrays that a layer learns or starts from have their names in
``anycell.layer.signature``, parameters of the cell with "param " in front.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from anycell.lang.cell import INPUT, RECURRENT
from anycell.lang.expr import topological
from anycell.plan.dtype import FLAG, Number
from anycell.plan.plan import Plan


class Array(NamedTuple):
    """An array as a kernel of one direction sees it: rows of numbers, along these axes.

    Attributes:
        axes: "T B" for one row per step and batch row, "B" for one per batch row, "R" for one per
            group of batch rows, "" for a single row.
        width: numbers in a row; 0 for the input, whose width comes with the call.
        number: their type.
        begins: the step at which T begins: the first step of the "call", of the current "chunk", or
            of the steps "kept" for the backward pass; "states" have a slot before each step and one
            after the last step.
        whole: whether it belongs to the call, not to one direction.
        beside: whether the rows of all directions lie side by side.
        strided: whether the call passes its strides, in entries named "... steps" and "... rows".
    """

    axes: str
    width: int
    number: Number
    begins: str = ""
    whole: bool = False
    beside: bool = False
    strided: bool = False


def multiplies_input(plan: Plan) -> bool:
    """Whether the cell multiplies the input in its step; ``gates`` is then the input itself."""
    return any(l.operand.op == "input" for l in plan.cell.linears)


@functools.lru_cache(maxsize=512)
def recurrent_masks(plan: Plan) -> int:
    """Counts the masks by which the cell multiplies its first state: none, one, or one per gate."""
    masks = [n.attrs[0] for n in topological(plan.cell.next) if n.op == "recurrent_mask"]
    return 1 + max(masks, default=-1)


@functools.lru_cache(maxsize=512)
def arrays(plan: Plan, backward: bool) -> dict[str, Array]:
    """The arrays of a kernel by name.

    Types narrower than the cell's arithmetic would lose small terms of what adds up over time. So
    gradients that accumulate and all states but the first keep the wider type. The first state is
    what matmuls multiply and the caller reads. Projected gates are sums, and have the type of sums.
    """
    cell, types = plan.cell, plan.types
    numbers, sums, gates = types.storage, types.accumulate, plan.gates_width
    (first, size), *others = states = [(s.name, plan.sizes[s.size]) for s in cell.states]
    table = {
        "mask": Array("T B", 1, FLAG, "call", whole=True),
        "resets": Array("T B", 1, FLAG, "call"),
        "static": Array("B", plan.static_width, numbers),
        # One mask, or one for each gate: [B, size] or [G, B, size].
        "recurrent_mask": Array("B", max(1, recurrent_masks(plan)) * size, numbers),
        "bias_ih": Array("", gates, numbers),
        "saved": Array("T B", plan.saved_stride, types.saved, "kept"),
        "hidden": Array("T B", size, numbers, "states", whole=True, beside=True),
        f"reset_state {first}": Array("B", size, numbers),
    }
    for name, width in others:
        table[f"sequence {name}"] = Array("T B", width, types.math, "states")
        table[f"reset_state {name}"] = Array("B", width, types.math)
    for l in cell.linears:
        if l.name == RECURRENT:
            rows = len(l.declared) * plan.sizes[l.out_size]
            table[l.bias_name] = Array("", rows, numbers)
    table |= {f"param {p.name}": Array("", plan.sizes[p.size], numbers) for p in cell.params}
    if not backward:
        entering = Array("T B", gates, sums, "chunk", strided=True)
        if multiplies_input(plan):
            entering = entering._replace(width=plan.sizes[INPUT], number=numbers)
        table["gates"] = entering
        table["input"] = Array("T B", 0, numbers, "call", whole=True, strided=True)
        table["out"] = Array("T B", size, numbers, "call", whole=True, beside=True)
        # Of integers, the scale of the row follows.
        table["product"] = Array("B", gates + types.quantized, sums)
        return table
    arriving = Array("T B", size, numbers, "call", whole=True, beside=True, strided=True)
    table["d_output"] = arriving
    table |= {f"d_sequence {name}": arriving._replace(width=width) for name, width in others}
    leaving = Array("T B", gates, numbers, "chunk", strided=True)
    table["d_gates"] = leaving
    for l in cell.linears:
        outputs = len(l.outputs) * plan.sizes[l.out_size]
        table[f"d_outputs {l.name}"] = leaving._replace(width=outputs)
        table[f"operand {l.name}"] = leaving._replace(width=plan.sizes[l.in_size])
    for name, width in states:
        table |= {f"d_{kind} {name}": Array("B", width, sums) for kind in ("state", "reset")}
    table["d_params"] = Array("R", sum(plan.param_sizes), sums)
    table["d_static"] = Array("B", plan.static_width, sums)
    return table
