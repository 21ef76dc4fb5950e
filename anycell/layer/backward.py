"""The backward pass of a layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from anycell.layer import contract
from anycell.layer.arguments import Array, Chunk, Factors, Host, Saved, Weights
from anycell.layer.forward import Memory, advance
from anycell.layer.run import Rows, Run, keeps_state
from anycell.layer.sums import Sums
from anycell.plan import Plan


def backward(
    host: Host,
    plan: Plan,
    saved: Saved,
    dy: Array | None,
    dfinal: Sequence[Sequence[Array | None]],
    *,
    need_x: bool = True,
    need_weights: bool = True,
    factors: list[list[Factors]] | None = None,
) -> tuple[Array | None, list[Weights]]:
    """The gradients of a layer.

    Args:
        host, plan: as given to ``forward``.
        saved: from ``forward``; may be used again.
        dy: gradient of the outputs ``[T, B, D*size]``, or None.
        dfinal: per direction the gradients of the final states ``[B, size]``, None where there is
            none.
        need_x, need_weights: whether those gradients are wanted.
        factors: gets per direction, for each matmul inside a step, what its weight's gradient is
            the product of, for hosts that multiply themselves. Without checkpoints, and where the
            input comes projected: then they are of all steps.

    Returns:
        the gradient of ``x`` (of the projected gates where ``Weights.ih`` is None) or None, and per
        direction a ``Weights`` of gradients; ``static`` is ``[B, H]``,
        ``initial`` and, with resets, ``reset`` are ``[B, size]``.

    Raises:
        ValueError, TypeError: for an array that breaks the ``contract``.
    """
    again = saved.options.checkpoint is not None  # the forward pass, which may read x
    x, weights, options = contract.entering(
        host, plan, saved.x, saved.weights, saved.options, read=again
    )
    run = Run(host, plan, weights, options, x, backward=True)
    rest = saved.hidden, saved.states, saved.values, saved.reset
    saved, dy, dfinal = contract.arriving(
        host, plan, Saved(x, weights, options, *rest), dy, dfinal,
        segment=run.segment, width=run.form.kernel.saved_width, keeps=keeps_state,
    )  # fmt: skip
    project = run.weights[0].ih is not None
    dx = host.empty(tuple(saved.x.shape)) if need_x or not project else None
    need_weights = need_weights and factors is None
    directions = [
        _Direction(run, saved, d, own, need_weights, factors is not None)
        for d, own in enumerate(dfinal)
    ]
    if factors is not None:
        factors += [own.factors() for own in directions]
    unreached = _Unreached(run.steps)
    with run:
        if saved.reset:
            run.point_resets(saved.reset)
        for d, own in enumerate(directions):
            for name, array in own.sums.accumulators().items():
                run.place(d, name, array)
        for done, count, part in _parts(run, saved):
            chunks = [run.span(d, done, count) for d in range(len(directions))]
            for own, chunk in zip(directions, chunks, strict=True):
                own.point(chunk, part, dy, dx)
            run.run(count)
            for own, chunk in zip(directions, chunks, strict=True):
                dgates = own.dgates(chunk, dx)
                if need_weights:
                    own.add(chunk, part, dgates)
                if run.form.single:
                    own.add_product(dgates)
                if project and dx is not None:
                    unreached.project(host, dgates, own.w.ih, dx, chunk)
    return dx, [own.sums.result() for own in directions]


class _Direction:
    """One direction: its gradients, and buffers of a chunk for what they are products of.

    Attributes:
        buffers: by argument of the kernel: the gradients of the projected gates, where they are not
            those of ``x``; for each matmul those of its outputs, and what it multiplied, where they
            are not at hand.
        pairs: those two for each matmul.
    """

    def __init__(
        self,
        run: Run,
        saved: Saved,
        d: int,
        dfinal: Sequence[Array | None],
        need_weights: bool,
        dense: bool,
    ) -> None:
        host, plan, self.w = run.host, run.plan, saved.weights[d]
        cell, rows = plan.cell, run.form.chunk * run.batch
        self.run, self.d, self.first = run, d, plan.sizes[cell.states[0].size]
        self.width = len(cell.gates) * plan.hidden_size
        resets = bool(saved.reset)
        self.sums = Sums(host, plan, (run.steps, run.batch), self.w, need_weights, dfinal, resets)
        self.buffers: dict[str, Rows] = {}
        if self.w.ih is not None:
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
        if self.w.ih is None:
            run.point(d, "dx", dx, chunk.time, chunk.sign)
        for name, rows in self.buffers.items():
            run.point_rows(d, name, rows, chunk)
        time = chunk.time - part.times[d]
        run.point(d, "saved", part.values[d], time, chunk.sign)
        if dy is not None:
            run.point(d, "dy", dy, chunk.time, chunk.sign, d * self.first)
        # state[t] is read before step t and, one step of the direction on, after it.
        on, reverse = -chunk.sign, self.w.reverse
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
        if self.w.ih is not None:
            return self.buffers["dx"][rows]
        return dx[chunk.begin : chunk.end].reshape(rows, self.width)  # type: ignore[index]

    def add(self, chunk: Chunk, part: _Part, dgates: Array) -> None:
        """A chunk's part of the gradients of weights."""
        run, d, first, (begin, end, _, _) = self.run, self.d, self.first, chunk
        rows = dgates.shape[0]
        inputs = None
        if self.w.ih is not None:
            inputs = run.x[begin:end]
            if run.options.mask is not None:
                # What lies under a mask may be NaN, and NaN times a zero gradient is NaN.
                inputs = run.host.masked(inputs, run.options.mask[begin:end])
            inputs = inputs.reshape(rows, inputs.shape[2])
        # The first state before each step.
        shift = 2 * self.w.reverse - part.times[d]
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
        self.run.host.matmul_add(d, self.w.hh, self.sums.states[0])


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
    """What the backward pass reads of a part of the sequence; see ``Saved``.

    ``times``: the first that it is of, per direction.
    """

    hidden: Array
    states: list[list[Array | None]]
    values: list[Array]
    times: list[int]


def _parts(run: Run, saved: Saved) -> Iterator[tuple[int, int, _Part]]:
    """Chunk by chunk as ``run.chunks``, with what is needed there: kept, or computed again."""
    host, plan, weights, steps = run.host, run.plan, saved.weights, run.steps
    segment = run.segment
    if segment == steps:
        whole = _Part(saved.hidden, saved.states, saved.values, [0] * len(weights))
        for done, count in run.chunks(0, steps):
            yield done, count, whole
        return
    again = Run(host, plan, weights, saved.options, saved.x, backward=False)
    memory = Memory(again, segment, True, True)
    first = memory.widths[0]
    with again:
        if saved.reset:
            again.point_resets(saved.reset)
        for slot in reversed(range(saved.hidden.shape[0])):
            begin, end = slot * segment, min(slot * segment + segment, steps)
            memory.origin, memory.steps = begin, end - begin
            initial = []
            for d, (_, *others) in enumerate(saved.states):
                hidden = saved.hidden[slot, :, d * first : (d + 1) * first]
                initial.append([hidden, *[s[slot] for s in others if s is not None]])
            memory.begin(initial)
            advance(again, memory, begin, end, None)
            times = [memory.time(d) for d in range(len(weights))]
            part = _Part(memory.hidden, memory.states, memory.values, times)
            for done, count in run.chunks(begin, end):
                yield done, count, part
