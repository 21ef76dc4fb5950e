"""The backward pass of a layer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from anycell.layer import contract
from anycell.layer.arguments import Array, Chunk, Factors, Host, Kept, Options
from anycell.layer.forward import Memory, advance
from anycell.layer.run import Rows, Run, keeps_state
from anycell.layer.signature import of_a_matmul
from anycell.layer.sums import Sums, leaving
from anycell.plan import Plan


def backward(
    host: Host,
    plan: Plan,
    arrays: Mapping[str, Array],
    options: Options,
    kept: Kept,
    d_output: Array | None,
    d_final: Sequence[Array | None],
    *,
    wanted: Collection[str] | None = None,
    factors: list[list[Factors]] | None = None,
) -> dict[str, Array]:
    """The gradients of a layer.

    Args:
        host, plan, arrays, options: as given to ``forward``.
        kept: from ``forward``; may be used again.
        d_output: gradient of the outputs ``[T, B, D*size]``, or None.
        d_final: gradients of the final states ``[D, B, size]``, None where there is none.
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
    kept, d_output, d_final = contract.arriving(
        host, plan, given.x.shape, options.reverse, kept, d_output, d_final,
        segment=run.segment, width=run.form.kernel.saved_width, keeps=keeps_state,
    )  # fmt: skip
    dx = None
    if wanted is None or "x" in wanted or not given.projects:
        dx = host.empty(tuple(given.x.shape))
    need = factors is None and (wanted is None or any(map(of_a_matmul, wanted)))
    dense = factors is not None
    directions = [
        _Direction(run, d, [None if a is None else a[d] for a in d_final], need, dense)
        for d in range(len(given.directions))
    ]
    if factors is not None:
        factors += [direction.factors() for direction in directions]
    unreached = _Unreached(run.steps)
    with run:
        if given.resets is not None:
            run.point_resets()
        for d, direction in enumerate(directions):
            for name, array in direction.sums.accumulators().items():
                run.place(d, name, array)
        for done, count, part in _parts(run, kept):
            chunks = [run.span(d, done, count) for d in range(len(directions))]
            for direction, chunk in zip(directions, chunks, strict=True):
                direction.point(chunk, part, d_output, dx)
            run.run(count)
            for direction, chunk in zip(directions, chunks, strict=True):
                dgates = direction.dgates(chunk, dx)
                if need:
                    direction.add(chunk, part, dgates)
                if run.form.single:
                    direction.add_product(dgates)
                if given.projects and dx is not None:
                    unreached.project(host, dgates, direction.w["weight_ih"], dx, chunk)
    return leaving(host, given, dx, [direction.sums.result() for direction in directions])


class _Direction:
    """One direction: its gradients, and buffers of a chunk for what they are products of.

    Attributes:
        buffers: by argument of the kernel: the gradients of the projected gates, where they are not
            those of ``x``; for each matmul those of its outputs, and what it multiplied, where they
            are not at hand.
        pairs: those two for each matmul.
    """

    def __init__(
        self, run: Run, d: int, d_final: Sequence[Array | None], need: bool, dense: bool
    ) -> None:
        host, plan, self.w = run.host, run.plan, run.directions[d]
        cell, rows = plan.cell, run.form.chunk * run.batch
        self.run, self.d, self.first = run, d, plan.sizes[cell.states[0].size]
        self.backwards = run.options.reverse[d]
        self.width = len(cell.gates) * plan.hidden_size
        resets = run.given.resets is not None
        self.sums = Sums(host, plan, (run.steps, run.batch), self.w, d_final, resets, need)
        self.buffers: dict[str, Rows] = {}
        if self.run.given.projects:
            self.buffers["dx"] = Rows(host, plan, rows, self.width)
        self.pairs: list[tuple[Rows | None, Rows | None]] = []
        for k, l in enumerate(cell.linears):
            outputs = operand = None
            if not plan.shares_gradient(l):
                outputs = Rows(host, plan, rows, len(l.outputs) * plan.sizes[l.out_size], dense)
                self.buffers[f"dr{k}"] = outputs
            state = l.operand.op == "state" and l.operand.attrs[0] == cell.state_names[0]
            if resets or not state:
                operand = Rows(host, plan, rows, plan.sizes[l.in_size], dense)
                self.buffers[f"operand{k}"] = operand
            self.pairs.append((outputs, operand))

    def factors(self) -> list[Factors]:
        """What the weights' gradients are products of, for hosts that multiply themselves."""
        return [
            Factors(*[None if rows is None else rows.whole for rows in pair]) for pair in self.pairs
        ]

    def point(self, chunk: Chunk, part: _Part, dy: Array | None, dx: Array | None) -> None:
        """Lets the kernel run over a chunk."""
        run, d, call, strides = self.run, self.d, self.run.calls[self.d], self.run.host.strides
        if not self.run.given.projects:
            run.point(d, "dx", dx, chunk.time, chunk.sign)
        for name, rows in self.buffers.items():
            run.point_rows(d, name, rows, chunk)
        time = chunk.time - part.times[d]
        run.point(d, "saved", part.values[d], time, chunk.sign)
        if dy is not None:
            run.point(d, "dy", dy, chunk.time, chunk.sign, d * self.first)
        # state[t] is read before step t and, one step of the direction on, after it.
        on, reverse = -chunk.sign, self.backwards
        run.point(d, "state0", part.hidden, time + 2 * reverse, chunk.sign, d * self.first)
        call.set(state0_next=on * strides(part.hidden)[0])
        for i, sequence in enumerate(part.states[d]):
            if sequence is not None and keeps_state(run.plan, i):
                run.point(d, f"state{i}", sequence, time + reverse, chunk.sign)
                call.set(**{f"state{i}_next": on * strides(sequence)[0]})
        run.point_flags(d, chunk)
        call.set(time=chunk.time)

    def dgates(self, chunk: Chunk, dx: Array | None) -> Array:
        """Gradients of the projected gates, ``[rows, G*H]``."""
        rows = (chunk.end - chunk.begin) * self.run.batch
        if self.run.given.projects:
            return self.buffers["dx"][rows]
        return dx[chunk.begin : chunk.end].reshape(rows, self.width)  # type: ignore[index]

    def add(self, chunk: Chunk, part: _Part, dgates: Array) -> None:
        """A chunk's part of the gradients of weights."""
        run, d, first, (begin, end, _, _) = self.run, self.d, self.first, chunk
        rows = dgates.shape[0]
        inputs = None
        if self.run.given.projects:
            inputs = run.x[begin:end]
            if run.given.mask is not None:
                # What lies under a mask may be NaN, and NaN times a zero gradient is NaN.
                inputs = run.host.masked(inputs, run.given.mask[begin:end])
            inputs = inputs.reshape(rows, inputs.shape[2])
        # The first state before each step.
        shift = 2 * self.backwards - part.times[d]
        hidden = part.hidden[begin + shift : end + shift, :, d * first : (d + 1) * first]
        pairs = [
            (
                dgates if outputs is None else outputs[rows],
                hidden.reshape(rows, first) if operand is None else operand[rows],
            )
            for outputs, operand in self.pairs
        ]
        self.sums.add(dgates, inputs, pairs)

    def add_product(self, dgates: Array) -> None:
        """What the recurrent matmul of a single step, the host's, adds to the gradient of the first
        state.
        """
        outputs, _ = self.pairs[0]
        d = dgates if outputs is None else outputs[dgates.shape[0]]
        self.run.host.matmul_add(d, self.w["weight_hh"], self.sums.states[0])


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
    """What the backward pass reads of a part of the sequence; see ``Kept``.

    ``times``: the first that it is of, per direction.
    """

    hidden: Array
    states: Sequence[Sequence[Array | None]]
    values: Sequence[Array]
    times: list[int]


def _parts(run: Run, kept: Kept) -> Iterator[tuple[int, int, _Part]]:
    """Chunk by chunk as ``run.chunks``, with what is needed there: kept, or computed again."""
    host, plan, steps, count = run.host, run.plan, run.steps, len(run.directions)
    segment = run.segment
    if segment == steps:
        whole = _Part(*kept, [0] * count)
        for done, todo in run.chunks(0, steps):
            yield done, todo, whole
        return
    again = Run(host, plan, run.given, run.options, backward=False)
    memory = Memory(again, segment, True, True)
    first = memory.widths[0]
    with again:
        if run.given.resets is not None:
            again.point_resets()
        for slot in reversed(range(kept.hidden.shape[0])):
            begin, end = slot * segment, min(slot * segment + segment, steps)
            memory.origin, memory.steps = begin, end - begin
            states = []
            for d, (_, *others) in enumerate(kept.states):
                hidden = kept.hidden[slot, :, d * first : (d + 1) * first]
                states.append([hidden, *[s[slot] for s in others if s is not None]])
            memory.begin(states)
            advance(again, memory, begin, end, None)
            times = [memory.time(d) for d in range(count)]
            part = _Part(memory.hidden, memory.states, memory.values, times)
            for done, todo in run.chunks(begin, end):
                yield done, todo, part
