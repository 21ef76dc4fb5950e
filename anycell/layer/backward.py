"""The backward pass of a layer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from anycell.layer import contract
from anycell.layer.arguments import Array, Factors, Host, Kept
from anycell.layer.forward import advance, project, remember
from anycell.layer.run import Rows, Run, keeps_state
from anycell.layer.schedule import Chunk, before
from anycell.layer.signature import of_a_matmul
from anycell.layer.sums import Sums, Totals, leaving
from anycell.plan import Options, Plan


def backward(
    host: Host,
    plan: Plan,
    arrays: Mapping[str, Array],
    options: Options,
    kept: Kept,
    d_output: Array | None,
    d_final: Sequence[Array | None],
    *,
    d_states: Mapping[str, Array] | None = None,
    wanted: Collection[str] | None = None,
    factors: list[list[Factors]] | None = None,
) -> dict[str, Array]:
    """The gradients of a layer.

    Args:
        host, plan, arrays, options: as given to ``forward``.
        kept: from ``forward``; may be used again.
        d_output: gradient of the outputs ``[T, B, D*size]``, or None.
        d_final: gradients of the final states ``[D, B, size]``, None where there is none.
        d_states: gradients of the sequences ``[T, B, D*size]`` of states besides the first, by
            name.
        wanted: names of the arrays whose gradients are wanted; None for all. There may be more.
        factors: gets per direction, for each matmul inside a step, what its weight's gradient is
            the product of, for hosts that multiply themselves. Without checkpoints, and where the
            input comes projected: then they are of all steps.

    Returns:
        the gradients, by the names of the arrays: of all that were given but masks. That of x is
        of the projected gates where there is no ``weight_ih``.

    Raises:
        ValueError, TypeError: for an array that breaks the ``contract``.
    """
    again = options.checkpoint is not None  # the forward pass, which may read x
    given = contract.entering(host, plan, arrays, options, read=again)
    run = Run(host, plan, given, options, backward=True)
    kept, d_output, d_final, d_states = contract.arriving(
        host, plan, given.x.shape, options.reverse, kept, d_output, d_final, d_states or {},
        segment=run.segment, keeps=keeps_state,
    )  # fmt: skip
    dx = None
    if wanted is None or "x" in wanted or not given.projects:
        dx = host.empty(tuple(given.x.shape))
    need = factors is None and (wanted is None or any(map(of_a_matmul, wanted)))
    if d_output is not None:
        run.place("d_output", d_output, axes=2)
    for name, arriving in d_states.items():
        run.place(f"d_sequence {name}", arriving, axes=2)
    totals = Totals(run, [None if d is None else host.widen(d) for d in d_final])
    directions = [
        _Direction(run, d, dx, need, dense=factors is not None) for d in range(len(run.directions))
    ]
    if factors is not None:
        factors += [direction.factors() for direction in directions]
    unreached, of_first = _Unreached(run.steps), f"state {plan.cell.state_names[0]}"
    for done, count, part in _parts(run, kept):
        run.run(done, count)
        for d, direction in enumerate(directions):
            chunk = run.span(d, done, count)
            dgates = direction.dgates(chunk)
            if need:
                direction.add(chunk, part, dgates)
            if run.form.single and (wanted is None or of_first in wanted):
                direction.add_product(dgates, totals.states[0][d])
            if given.projects and dx is not None:
                unreached.project(host, dgates, direction.w["weight_ih"], dx, chunk)
    run.close()
    learned = [one.sums.totals | totals.result(d) for d, one in enumerate(directions)]
    gradients = leaving(host.wide.empty, given, dx, learned, totals.of_states())
    return {name: host.narrow(gradient) for name, gradient in gradients.items()}


class _Direction:
    """One direction: its gradients, and buffers of a chunk for what they are products of.

    Attributes:
        gates: the gradients of the projected gates, where x is not projected already.
        pairs: for each matmul the gradients of its outputs and what it multiplied, where they are
            not at hand.
    """

    def __init__(self, run: Run, d: int, dx: Array | None, need: bool, dense: bool) -> None:
        host, plan, self.w = run.host, run.plan, run.directions[d]
        cell, rows = plan.cell, run.form.chunk * run.batch
        self.run, self.d, self.first, self.dx = run, d, plan.sizes[cell.states[0].size], dx
        self.backwards = run.options.reverse[d]
        self.width = len(cell.gates) * plan.hidden_size
        resets = run.given.resets is not None
        self.sums = Sums(host, plan, run.given, d, need, run.steps > 0)
        self.gates: Rows | None = None
        if run.given.projects:
            self.gates = Rows(host, rows, self.width)
            run.place_rows(d, "d_gates", self.gates)
        else:
            run.place_steps(d, "d_gates", dx, *host.strides(dx)[:2])
        self.pairs: list[tuple[Rows | None, Rows | None]] = []
        for l in cell.linears:
            outputs = operand = None
            if not plan.shares_gradient(l):
                outputs = Rows(host, rows, len(l.outputs) * plan.sizes[l.out_size], dense)
                run.place_rows(d, f"d_outputs {l.name}", outputs)
            state = l.operand.op == "state" and l.operand.attrs[0] == cell.state_names[0]
            if resets or not state:
                operand = Rows(host, rows, plan.sizes[l.in_size], dense)
                run.place_rows(d, f"operand {l.name}", operand)
            self.pairs.append((outputs, operand))

    def factors(self) -> list[Factors]:
        """The factors of the weights' gradients, for hosts that multiply themselves."""
        return self.of_rows(self.run.steps * self.run.batch)

    def of_rows(self, count: int) -> list[Factors]:
        """The factors in the first ``count`` rows of the buffers."""
        factors = []
        for outputs, operand in self.pairs:
            d = None if outputs is None else outputs[count]
            factors.append(Factors(d, None if operand is None else operand[count]))
        return factors

    def dgates(self, chunk: Chunk) -> Array:
        """Gradients of the projected gates, ``[rows, G*H]``."""
        rows = (chunk.end - chunk.begin) * self.run.batch
        if self.gates is not None:
            return self.gates[rows]
        return self.dx[chunk.begin : chunk.end].reshape(rows, self.width)  # type: ignore[index]

    def add(self, chunk: Chunk, part: _Part, dgates: Array) -> None:
        """A chunk's part of the gradients of weights."""
        hidden = before(part.hidden, chunk, self.backwards, part.times[self.d])
        if len(self.run.directions) > 1:
            hidden = hidden[:, :, self.d * self.first : (self.d + 1) * self.first]
        self.sums.add(chunk, dgates, hidden, self.of_rows(dgates.shape[0]))

    def add_product(self, dgates: Array, d_state: Array) -> None:
        """Adds the part of the host's recurrent matmul, of a single step, to the first state's
        gradient.
        """
        outputs, _ = self.pairs[0]
        d = dgates if outputs is None else outputs[dgates.shape[0]]
        self.run.host.matmul_add(d, self.w["weight_hh"], d_state)


class _Unreached:
    """Times of ``dx`` that no direction has reached yet: all, then less from the ends."""

    def __init__(self, steps: int) -> None:
        self.begin, self.end, self.steps = 0, steps, steps

    def project(self, host: Host, dgates: Array, ih: Array, dx: Array, chunk: Chunk) -> None:
        """``dx = dgates @ ih`` for the times of a chunk, or ``+=`` where the other direction was
        first.
        """
        begin, end, batch = chunk.begin, chunk.end, dx.shape[1]
        for start, stop, multiply in (
            (begin, min(end, self.begin), host.matmul_add),
            (max(begin, self.begin), min(end, self.end), host.matmul),
            (max(begin, self.end), end, host.matmul_add),
        ):
            if start < stop:
                part = dgates[(start - begin) * batch : (stop - begin) * batch]
                multiply(part, ih, dx[start:stop].reshape((stop - start) * batch, dx.shape[2]))
        if begin <= self.begin:
            self.begin = max(self.begin, end)
        else:
            self.end = min(self.end, begin)
        if self.begin >= self.end:
            self.begin = self.end = self.steps


class _Part(NamedTuple):
    """The first states of a part of the sequence, see ``Kept``, and the first time that they are
    of, per direction.
    """

    hidden: Array
    times: list[int]


def _parts(run: Run, kept: Kept) -> Iterator[tuple[int, int, _Part]]:
    """Chunk by chunk as ``run.chunks``, with what is needed there: kept, or computed again."""
    host, plan, steps, count = run.host, run.plan, run.steps, len(run.directions)
    segment = run.segment
    if segment == steps:
        run.place_kept(kept)
        whole = _Part(kept.hidden, [0] * count)
        if not steps:
            run.run(0, 0)  # for the gradients of the states
        for done, todo in run.chunks(0, steps):
            yield done, todo, whole
        return
    again = Run(host, plan, run.given, run.options, backward=False)
    memory = remember(again, segment, True, True)
    run.place_kept(memory)
    gates, names = project(again), [f"state {name}" for name in plan.cell.state_names]
    first = plan.sizes[plan.cell.states[0].size]
    for slot in reversed(range(kept.hidden.shape[0])):
        begin, end = slot * segment, min(slot * segment + segment, steps)
        for one in (again, run):
            at = one.kernel.shared
            one.entries[at["origin"]], one.entries[at["span"]] = begin, end - begin
        for d in range(count):
            again.place_of(d, dict(zip(names, kept.border(d, slot, first), strict=True)))
        advance(again, gates, begin, end)
        times = [steps - end if reverse else begin for reverse in run.options.reverse]
        part = _Part(memory.hidden, times)
        for done, todo in run.chunks(begin, end):
            yield done, todo, part
    again.close()
