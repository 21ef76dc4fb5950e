"""A single step of a cell whose only matmul is its first state's: the host multiplies.

Packing the weights for one step costs more than it saves, so a kernel is left with the cell alone.
That takes microseconds at a few rows, so the code around it is minimal: no axes of time or
directions, no chunks, no masks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from anycell.engines import cpu
from anycell.layer.arguments import Array, Direction, Host, Kept
from anycell.layer.form import Form, form_of, recurrent_alone, row_group
from anycell.layer.run import extent, place, switch
from anycell.layer.signature import of_a_matmul, states
from anycell.plan import Options, Plan


def suits(plan: Plan) -> bool:
    """Whether steps of a plan may be run so."""
    return plan.engine == "cpu" and not plan.types.mixed and recurrent_alone(plan)


def forward(
    host: Host, plan: Plan, x: Array, w: Direction, options: Options, *, keep: bool
) -> tuple[list[Array], Kept]:
    """Runs a step. All arrays must be contiguous and aligned, of the dtype of the plan.

    Args:
        x: ``[B, I]``.
        w: what the direction learns, its states before the step ``[B, size]``, and static.
        keep: whether to keep what ``backward`` needs.

    Returns:
        the new states ``[B, size]``, and what is kept; without ``keep`` that is no use.
    """
    batch, inputs = x.shape
    form = _form(plan, False, batch, inputs, options)
    (first, size), *others = states(plan)
    gates, initial = host.project(x, w["weight_ih"]), plan.cell.states[0].initial
    state = w.get(f"state {first}")
    if state is None and initial:
        state = host.empty((batch, size))
        state[:] = initial
    if state is None:
        product = host.zeros((batch, gates.shape[1]))
    else:
        product = host.project(state, w["weight_hh"])
    hidden, new = host.empty((2, batch, size)), [host.empty((batch, size))]
    arrays = {**w, "gates": gates, "product": product, f"final {first}": new[0]}
    sequences: list[Array | None] = [None]
    for name, width in others:
        arrays[f"final {name}"] = final = host.empty((batch, width))
        arrays[f"sequence {name}"] = sequence = host.empty((2, batch, width))
        new.append(final)
        sequences.append(sequence if name in plan.states else None)
    kept = Kept(hidden, [sequences], [])
    if keep:
        arrays["saved"] = saved = host.empty((1, batch, plan.saved_stride))
        kept = Kept(hidden, [sequences], [saved])
    _run(host, form, hidden, arrays, {"gates rows": gates.shape[1]}, options)
    return new, kept


def backward(
    host: Host,
    plan: Plan,
    x: Array,
    w: Direction,
    options: Options,
    kept: Kept,
    arriving: Sequence[Array | None],
    wanted: Collection[str],
) -> dict[str, Array]:
    """The gradients of a step.

    Args:
        x, w, options: as given to ``forward``.
        kept: from ``forward``.
        arriving: gradients of the new states, ``[B, size]`` of any strides; None where there is
            none.
        wanted: "x" and names of ``w``. There may be more.
    """
    cell, h, (batch, inputs) = plan.cell, plan.hidden_size, x.shape
    form = _form(plan, True, batch, inputs, options)
    width, (linear,) = len(cell.gates) * h, cell.linears
    dgates = outputs = host.empty((batch, width))
    arrays = {**w, "d_gates": dgates, "saved": kept.values[0]}
    strides = {"d_gates rows": width}
    if not plan.shares_gradient(linear):
        arrays[f"d_outputs {linear.name}"] = outputs = host.empty((batch, width))
        strides[f"d_outputs {linear.name} rows"] = width
    gradients: dict[str, Array] = {}
    named = zip(states(plan), arriving, kept.states[0], strict=True)
    for (name, size), arrives, sequence in named:
        gradients[f"state {name}"] = arrays[f"d_state {name}"] = host.empty((batch, size))
        if arrives is not None:
            arrays[f"d_final {name}"] = arrives
        if sequence is not None:
            arrays[f"sequence {name}"] = sequence
    if cell.params:
        groups = -(-batch // row_group(batch))
        arrays["d_params"] = host.empty((groups, len(cell.params) * h))
    if "static" in w:
        gradients["static"] = arrays["d_static"] = host.empty((batch, h))
    _run(host, form, kept.hidden, arrays, strides, options)
    if cell.params:
        total = arrays["d_params"].sum(0).reshape(len(cell.params), h)
        gradients.update(zip(cell.param_names, host.rows(total), strict=True))
    first = f"state {cell.state_names[0]}"
    if first in wanted:
        host.matmul_add(outputs, w["weight_hh"], gradients[first])
    if "x" in wanted:
        gradients["x"] = host.empty((batch, inputs))
        host.matmul(dgates, w["weight_ih"], gradients["x"])
    if any(map(of_a_matmul, wanted)):
        before = kept.hidden[0]
        for name, d, operand in (("weight_ih", dgates, x), ("weight_hh", outputs, before)):
            gradients[name] = host.project(d.T, operand.T)
        for name, d in (("bias_ih", dgates), ("bias_hh", outputs)):
            if name in w:
                gradients[name] = d.sum(0)
    return gradients


def _form(plan: Plan, backward: bool, batch: int, inputs: int, options: Options) -> Form:
    return form_of(
        plan, backward, cpu.isa.current(), 1, batch, (False,), inputs, False, False,
        options.threads,
    )  # fmt: skip


def _run(
    host: Host,
    form: Form,
    hidden: Array,
    arrays: Direction,
    strides: Mapping[str, int],
    options: Options,
) -> None:
    """Calls the door with the arrays of one direction, by the names of its entries."""
    kernel, entries, (first,) = form.kernel, form.entries[:], form.firsts
    at, block = kernel.shared, cpu.scratch.take(form.scratch)
    entries[at["scratch"]], entries[at["hidden"]] = block.address, host.pointer(hidden)
    entries[at["whole"]] = -1
    switch(entries, at, options)
    place(host, kernel, entries, first, arrays)
    for name, stride in strides.items():
        entries[first + kernel.each[name]] = stride
    bounds: cpu.check.CallBounds | None = None
    if cpu.check.ON:
        known = {name: extent(host, array) for name, array in arrays.items()}
        scratch = block.address, block.address + form.scratch
        bounds = {"hidden": extent(host, hidden), "scratch": scratch}, [known]
    cpu.run(kernel, entries, bounds)
    cpu.scratch.give_back(block)
