"""The forward pass of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anycell.layer import contract
from anycell.layer.arguments import Array, Direction, Host, Kept, initial
from anycell.layer.products import multiply
from anycell.layer.run import Rows, Run
from anycell.layer.signature import states
from anycell.plan import Options, Plan, scales_of


def forward(
    host: Host, plan: Plan, arrays: Mapping[str, Array], options: Options, *, keep: bool
) -> tuple[Array, list[Array], Kept | None]:
    """Runs a layer.

    Args:
        host: array operations of the framework.
        plan: of the cell, for the CPU engine.
        arrays: by the names of ``signature``; None stands for one that is not given.
        options: directions, seeds, threads.
        keep: whether to keep what ``backward`` needs.

    Returns:
        outputs ``[T, B, D * size]``, the final states ``[D, B, size]`` in declared order, and
        ``Kept`` or None.

    Raises:
        ValueError, TypeError: for an array that breaks the ``contract``.
    """
    given = contract.entering(host, plan, arrays, options)
    run = Run(host, plan, given, options, backward=False)
    steps = segment = run.steps
    if keep and options.checkpoint is not None:
        segment = run.segment
    everything = keep and segment == steps
    # Outputs zeroed under a mask are not the hidden states: these then need memory of their own,
    # all or two steps.
    zeroed = options.apart(given.mask is not None)
    kept = remember(run, steps, everything, everything or not zeroed)
    directions, (_, batch, width) = len(run.directions), kept.hidden.shape
    out = kept.hidden[1 : steps + 1]
    if zeroed:
        out = host.empty((steps, batch, width))
        run.place("out", out)
    finals, places, kind = [], {}, host
    for name, size in states(plan):
        places[f"final {name}"] = final = kind.empty((directions, batch, size))
        finals.append(final)
        kind = host.wide
    run.place_parts(places)
    gates = project(run)
    if keep and not everything:
        kept = _borders(run, -(-steps // segment))
    for begin in range(0, max(1, steps), max(1, segment)):
        if keep and not everything:
            run.run(begin, 0)  # the final states of no step are those before the segment
            _copy(finals, kept, begin // segment)
        advance(run, gates, begin, min(begin + segment, steps))
    run.close()
    if plan.types.mixed:
        finals = [host.narrow(state) for state in finals]
    return out, finals, kept if keep else None


def remember(run: Run, steps: int, everything: bool, whole: bool) -> Kept:
    """Memory for what ``steps`` steps of a pass hand on, and leave for the backward pass.

    Args:
        everything: the backward pass will need all of it.
        whole: the first state has all steps.
    """
    host, plan, batch, directions = run.host, run.plan, run.batch, len(run.directions)
    (_, first), *others = states(plan)
    slots, new = (steps + 1 + any(run.options.reverse), host.lasting) if whole else (2, host.empty)
    hidden, bits = new((slots, batch, directions * first)), int(whole)
    sequences: list[list[Array | None]] = [[None] for _ in run.directions]
    for i, (name, size) in enumerate(others, 1):
        all_of_it = everything and name in plan.states
        bits |= all_of_it << i
        for d, sequence in enumerate(sequences):
            sequence.append(host.wide.lasting((steps + 1, batch, size)) if all_of_it else None)
            if not all_of_it:
                run.place_slots(d, name, size)
    saved = steps, batch, plan.saved_stride
    values = [host.lasting(saved) for _ in run.directions] if everything else []
    kept = Kept(hidden, sequences, values)
    run.place_kept(kept)
    run.entries[run.kernel.shared["whole"]] = bits
    return kept


def project(run: Run) -> list[Any]:
    """The projected gates of all steps, or room for a chunk of them, per direction; none where the
    kernel multiplies the input.
    """
    host, plan, x, form = run.host, run.plan, run.x, run.form
    if form.inputs:
        run.place("input", x, axes=2)
        return []
    gates: list[Any] = []
    width = len(plan.cell.gates) * plan.hidden_size
    for d, w in enumerate(run.directions):
        if form.at_once:
            if run.given.projects:
                rows = x.reshape(run.steps * run.batch, x.shape[2])
                if plan.types.quantized:
                    into = host.empty((run.steps * run.batch, width))
                    rows = _multiply_integers(run, rows, w, into)
                else:
                    rows = host.project(rows, w["weight_ih"])
                between = run.batch * width  # steps
            else:
                size = run.kernel.arrays["gates"].number.bytes
                rows = x if size == x.dtype.itemsize else host.widen(x)
                between = host.strides(rows)[0]
            run.place_steps(d, "gates", rows, between, host.strides(rows)[-2])
            gates.append(rows)
        else:
            gates.append(Rows(host.wide, form.chunk * run.batch, width))
            run.place_rows(d, "gates", gates[-1])
        if form.single:
            first = initial(plan, w)[0]
            product = _product(host, first, w["weight_hh"], (run.batch, width))
            run.place_of(d, {"product": product})
    return gates


def advance(run: Run, gates: list[Any], begin: int, end: int) -> None:
    """Runs all directions from after ``begin`` steps to after ``end`` steps."""
    host, x, batch = run.host, run.x, run.batch
    if begin == end:
        run.run(begin, 0)
    for done, count in run.chunks(begin, end):
        if gates and not run.form.at_once:
            for d, w in enumerate(run.directions):
                part = x
                if count < run.steps:
                    span = run.span(d, done, count)
                    part = x[span.begin : span.end]
                part = part.reshape(count * batch, x.shape[2])
                if run.plan.types.quantized:
                    _multiply_integers(run, part, w, gates[d][count * batch])
                else:
                    host.matmul(part, w["weight_ih"].T, gates[d][count * batch])
        run.run(done, count)


def _multiply_integers(run: Run, x: Array, w: Direction, out: Array) -> Array:
    """``out = x @ weight.T`` by a weight of integers, which no framework multiplies by."""
    host, scales = run.host, w[scales_of("weight_ih")]
    multiply(
        host, run.plan.dtype, x, w["weight_ih"].T, out, False, run.options.threads,
        host.pointer(scales),
    )  # fmt: skip
    return out


def _borders(run: Run, count: int) -> Kept:
    """Memory for the states before each segment."""
    host, plan, batch, directions = run.host, run.plan, run.batch, len(run.directions)
    first, *others = [plan.sizes[state.size] for state in plan.cell.states]
    states = [
        [None, *[host.wide.empty((count, batch, size)) for size in others]] for _ in run.directions
    ]
    values = [host.empty((0, batch, plan.saved_stride)) for _ in run.directions]
    return Kept(host.empty((count, batch, directions * first)), states, values)


def _copy(states: list[Array], borders: Kept, slot: int) -> None:
    """Copies the states before a segment to its slot."""
    width = states[0].shape[2]
    for d, sequences in enumerate(borders.states):
        borders.hidden[slot, :, d * width : (d + 1) * width] = states[0][d]
        for state, sequence in zip(states, sequences, strict=True):
            if sequence is not None:
                sequence[slot] = state[d]


def _product(host: Host, operand: Array | float, weight: Array, shape: tuple[int, int]) -> Array:
    """The recurrent matmul of a single step."""
    if isinstance(operand, float) and operand == 0.0:
        return host.wide.zeros(shape)
    if isinstance(operand, float):
        value, operand = operand, host.empty((shape[0], weight.shape[1]))
        operand[:] = value
    return host.project(operand, weight)
