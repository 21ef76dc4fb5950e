"""The forward pass of a layer."""

from __future__ import annotations

from collections.abc import Mapping

from anycell.engines.cpu.driver import FEW
from anycell.layer import contract
from anycell.layer.arguments import Array, Direction, Host, Kept, initial
from anycell.layer.matrix import Matrix
from anycell.layer.run import Rows, Run
from anycell.layer.signature import DENSE, states
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
    project(run)
    if keep and not everything:
        kept = _borders(run, -(-steps // segment), finals)
        run.segment_length = segment
    run.call()
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


def project(run: Run) -> None:
    """Has the gates of each chunk projected, where the kernel does not multiply the input."""
    host, plan, x, form = run.host, run.plan, run.x, run.form
    if form.inputs:
        run.place("input", x, axes=2)
        return
    width = len(plan.cell.gates) * plan.hidden_size
    for d, w in enumerate(run.directions):
        if not run.given.projects:
            size = run.kernel.arrays["gates"].number.bytes
            rows = x if size == x.dtype.itemsize else host.widen(x)
            run.place_steps(d, "gates", rows, *host.strides(rows)[:2])
            continue
        gates = Rows(host.wide, form.chunk * run.batch, width)
        run.place_rows(d, "gates", gates)
        weight = Matrix.of(host, w["weight_ih"])
        scales = host.pointer(w[scales_of("weight_ih")]) if plan.types.quantized else 0
        entering = run.entering(run.before, d)
        kind = FEW if form.few else None
        run.multiply(run.before, d, entering, weight.T, run.rows(gates), scales=scales, kind=kind)
        if form.few:
            product, state = host.wide.empty((run.batch, width)), _first(run, w)
            run.place_of(d, {"product": product})
            left, right = Matrix.of(host, state), Matrix.of(host, w["weight_hh"])
            run.multiply(run.before, d, left, right.T, Matrix.of(host.wide, product), kind=FEW)


def _first(run: Run, w: Direction) -> Array:
    """The first state of a single step, whose rows are dense."""
    state, host = initial(run.plan, w)[0], run.host
    if isinstance(state, float):
        value, (_, size) = state, states(run.plan)[0]
        state = host.empty((run.batch, size))
        state[:] = value
    state = host.fit(state, DENSE)
    run.alive.append(state)
    return state


def _borders(run: Run, count: int, finals: list[Array]) -> Kept:
    """Memory for the states before each segment, which the door writes as if they were final."""
    host, plan, batch, directions = run.host, run.plan, run.batch, len(run.directions)
    (_, first), *others = states(plan)
    hidden = host.empty((count, batch, directions * first))
    sequences = [
        [None, *[host.wide.empty((count, batch, size)) for _, size in others]]
        for _ in run.directions
    ]
    for d, sequence in enumerate(sequences):
        columns = hidden[:, :, d * first : (d + 1) * first]
        borders = zip(plan.cell.state_names, [columns, *sequence[1:]], finals, strict=True)
        for name, border, final in borders:
            run.moves += run.moving(d, f"final {name}", border, final[d])
    return Kept(hidden, sequences, [host.empty((0, batch, plan.saved_stride)) for _ in sequences])
