"""The argument table of a kernel: its entries, and what the arrays behind its addresses have."""

from __future__ import annotations

from anycell.lang.cell import INPUT
from anycell.lang.expr import topological
from anycell.plan import Number, Plan

# Entries of the argument table that are numbers, as are all strides; the others are addresses.
INTEGERS = frozenset(
    "steps batch row_group time time_step units_split workspace_stride training seed stream "
    "repeat inputs input_block".split()
)


def is_integer(name: str) -> bool:
    """Whether an entry is a number, not an address."""
    return name in INTEGERS or name.endswith(("_t", "_b", "_flip", "_next"))


def number_of(plan: Plan, name: str) -> Number:
    """What an array of the table consists of.

    Numbers narrower than those that a cell computes with would lose what it adds up over time: so
    all states but the first, which matmuls multiply and the caller reads, are kept as computed.
    Projected gates come from sums, and have their type.
    """
    types, cell = plan.types, plan.cell
    if name.startswith(("dstate", "dreset", "dparam", "dstatic", "product")):
        return types.accumulate
    if name in {f"{what}{i}" for what in ("state", "reset") for i in range(1, len(cell.states))}:
        return types.math
    if name == "x" and not multiplies_input(plan):
        return types.accumulate
    return types.saved if name == "saved" else types.storage


def multiplies_input(plan: Plan) -> bool:
    """Whether x is the input itself, which the cell multiplies in its step."""
    return any(l.operand.op == "input" for l in plan.cell.linears)


def arguments(plan: Plan, backward: bool) -> tuple[str, ...]:
    """Names of the entries of a kernel's argument table, in order. All are 64 bits:
    an integer or an address.

    ``*_t`` and ``*_b`` are strides in elements per step and per batch row; those per step are
    negative where time runs backwards. Optional addresses are 0 where absent.
    """
    names = (
        "steps batch row_group time time_step units_split barrier yield_to workspace "
        "workspace_stride hyper training seed stream mask mask_t resets resets_t repeat"
    ).split()
    cell = plan.cell
    names += [f"weights{k}" for k in range(len(cell.linears))]
    for i in range(len(cell.states)):
        # The state before each step. `flip`: only two slots, which take turns. `next`: from there
        # to the state after.
        names += [f"state{i}", f"state{i}_t", f"state{i}_b", f"reset{i}", f"reset{i}_b"]
        names.append(f"state{i}_next" if backward else f"state{i}_flip")
    names += [f"param{i}" for i in range(len(cell.params))]
    arrays = ["saved"]
    if backward:
        arrays += [*(f"dy{i}" for i in range(len(cell.states))), "dx"]
        for k in range(len(cell.linears)):
            arrays += [f"dr{k}", f"operand{k}"]
        names += [f"{what}{i}" for what in ("dstate", "dreset") for i in range(len(cell.states))]
        names += ["dparam", "dstatic"]
    else:
        arrays += ["x", "out"]
        # Of the kernel that multiplies the input itself; `x` is then a row of zeros.
        names += ["product", "product_b", "inputs", "input_block", "weights_x"]
        arrays += ["input"]
    names += [f"{array}{suffix}" for array in arrays for suffix in ("", "_t", "_b")]
    return (*names, "static", "recurrent_mask", "bias_x", "bias_h")


def extents(plan: Plan, backward: bool, saved_width: int) -> dict[str, tuple[str, int]]:
    """What the arrays of that table have: along which axes, and how many numbers in a row.

    Axes are "steps" (of rows, by strides), "rows" (by a stride or one after the other), "groups" of
    rows, and "once". The input of a kernel that multiplies it itself has ``inputs`` numbers.
    """
    cell, h, widths = plan.cell, plan.hidden_size, [plan.sizes[s.size] for s in plan.cell.states]
    gates = len(cell.gates) * h
    masks = [n.attrs[0] for n in topological(cell.next) if n.op == "recurrent_mask"]
    arrays = {"saved": ("steps", saved_width), "static": ("rows", h)}
    for i, width in enumerate(widths):
        arrays |= {f"state{i}": ("steps", width), f"reset{i}": ("rows", width)}
        if backward:
            arrays |= {f"dstate{i}": ("rows", width), f"dreset{i}": ("rows", width)}
    arrays |= {f"param{i}": ("once", h) for i in range(len(cell.params))}
    arrays |= {"bias_x": ("once", gates), "bias_h": ("once", gates)}
    # One mask, or one for each gate: [B, width] or [G, B, width].
    arrays["recurrent_mask"] = "rows", (1 + max(masks, default=0)) * widths[0]
    if not backward:
        # Of a cell that multiplies the input in its step, x is that input.
        entering = plan.sizes[INPUT] if multiplies_input(plan) else gates
        arrays |= {"x": ("steps", entering), "input": ("steps", 0), "out": ("steps", widths[0])}
        arrays["product"] = "rows", gates
        return arrays
    arrays |= {f"dy{i}": ("steps", width) for i, width in enumerate(widths)}
    arrays |= {"dx": ("steps", gates), "dstatic": ("rows", h)}
    arrays["dparam"] = ("groups", len(cell.params) * h)
    for k, l in enumerate(cell.linears):
        arrays[f"dr{k}"] = ("steps", len(l.outputs) * plan.sizes[l.out_size])
        arrays[f"operand{k}"] = ("steps", plan.sizes[l.in_size])
    return arrays
