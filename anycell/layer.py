"""One layer of any cell, for every framework: input projection, recurrence, weight gradients.

Arrays belong to the framework and come through a small ``Host``; kernels see their addresses. The
input projection and the weight gradients are large matmuls and go to the framework's own library,
in chunks of time, so that the buffer between them and the recurrence stays in the cache and never
becomes as long as the sequence.

Time-major throughout: ``x [T, B, I]``, outputs ``[T, B, D*H]`` with D directions side by side.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from anycell.engines import cpu
from anycell.plan import Plan

Array = Any
# Of projected gates, for all directions together: they should stay in the cache.
CHUNK_BYTES = 8 << 20
WORTH_A_THREAD = 1 << 17  # multiply-adds of a call below which a second thread does not pay
FEW_ROWS = 16  # rows per thread below which threads share the rows and split the units


class Host(Protocol):
    """What this module asks of a framework's arrays.
    They live on the CPU and have the dtype of the plan.

    Besides these, arrays must slice, assign (``a[i:j] = b``), ``reshape``, transpose (``.T``) and
    ``sum(0)`` as NumPy's do.
    """

    def empty(self, shape: tuple[int, ...]) -> Array: ...

    def zeros(self, shape: tuple[int, ...]) -> Array: ...

    def lasting(self, shape: tuple[int, ...]) -> Array:
        """As ``empty``, for what is kept until the backward pass; see ``engines.cpu.memory``."""
        ...

    def pointer(self, array: Array) -> int: ...

    def strides(self, array: Array) -> tuple[int, ...]:
        """In elements."""
        ...

    def matmul(self, a: Array, b: Array, out: Array) -> None:
        """``out = a @ b`` for matrices of any strides."""
        ...

    def matmul_add(self, a: Array, b: Array, out: Array) -> None:
        """``out += a @ b``."""
        ...

    def masked(self, x: Array, mask: Array) -> Array:
        """A copy of ``x [T, B, I]`` with 0 where ``mask [T, B]`` is 0, NaN or not."""
        ...


@dataclass
class Weights:
    """One direction of one layer; None where absent. Also what ``backward`` returns.

    Attributes:
        ih: ``[G*H, I]``; None where the input comes projected.
        hh: ``[G*H, H]``, of any strides if one of them is 1; None for a cell without a recurrent
            matmul.
        bias_ih, bias_hh: ``[G*H]``.
        params: one ``[H]`` per parameter of the cell, in declared order.
        initial: one ``[B, H]`` per state, in declared order, or the number that fills it.
        reset: the values that resets restore, one ``[H]`` or ``[B, H]`` per state.
        static: ``[B, H]``, the input given once per sequence.
        reverse: whether the direction runs from the last step to the first.
    """

    ih: Array | None
    hh: Array | None
    bias_ih: Array | None = None
    bias_hh: Array | None = None
    params: Sequence[Array] = ()
    initial: Sequence[Array] = ()
    reset: Sequence[Array] | None = None
    static: Array | None = None
    reverse: bool = False


@dataclass
class Options:
    """What a call says beside its arrays.

    Attributes:
        mask: ``uint8 [T, B]``, 0 where the states hold; contiguous.
        resets: ``uint8 [T, B]``, 1 where the states start anew before the step; contiguous. Ignored
            under a mask.
        repeat: outputs of masked steps repeat the held state; otherwise they are 0.
        training: random masks are drawn (from ``seed`` and ``stream``), instead of their mean
            taken.
        threads: at most so many.
    """

    mask: Array | None = None
    resets: Array | None = None
    repeat: bool = False
    training: bool = False
    seed: int = 0
    stream: int = 0
    threads: int = 1


@dataclass
class Saved:
    """What the forward pass keeps for the backward pass; read, never written, by it.

    Attributes:
        hidden: ``[T+1 or T+2, B, D*H]``: the hidden states; initial values in the first slot, or
            the last where a direction is reversed.
        states: per direction, the sequences ``[T+1, B, H]`` of the other states that the plan
            keeps.
        values: per direction ``[T, B, n]``, the values that the plan saves.
        reset: per direction the values that resets restore, ``[H]`` or ``[B, H]`` each; empty
            without resets.
    """

    x: Array
    weights: Sequence[Weights]
    options: Options
    hidden: Array
    states: list[list[Array | None]]
    values: list[Array]
    reset: list[list[Array]]


class _Span(NamedTuple):
    """Where a chunk lies for one direction: times [begin,
    end), its first step to run, and which way it goes.
    """

    begin: int
    end: int
    time: int
    sign: int


class _Run:
    """A kernel that runs over chunks of time, with one argument table per direction."""

    def __init__(
        self,
        host: Host,
        plan: Plan,
        weights: Sequence[Weights],
        options: Options,
        x: Array,
        backward: bool,
    ) -> None:
        self.host, self.plan, self.options, self.weights = host, plan, options, weights
        self.steps, self.batch, self.directions = x.shape[0], x.shape[1], len(weights)
        self.kernel = cpu.compiled(plan, backward)
        # The backward pass runs against each direction.
        self.reverse = [w.reverse is not backward for w in weights]
        self.calls = [cpu.Arguments(self.kernel) for _ in weights]
        self.chunk = self._chunk() if weights[0].ih is not None else max(1, self.steps)
        self.threads, self.units_split = self._split()
        self.workspace = self.kernel.workspace(self.batch)
        self.backward = backward

    def _chunk(self) -> int:
        """Steps per chunk of the projection."""
        plan = self.plan
        step = (
            self.directions * self.batch * len(plan.cell.gates) * plan.hidden_size * plan.itemsize
        )
        count = max(1, -(-self.steps * step // CHUNK_BYTES))
        return max(1, -(-self.steps // count))

    def _split(self) -> tuple[int, bool]:
        """Threads for a call, and whether they split the units instead of the rows."""
        g, threads = self.kernel.geometry, self.options.threads
        work = self.chunk * self.batch * g.units * max(g.inner * g.outputs, 64)
        if threads <= 1 or work * self.directions < WORTH_A_THREAD:
            return 1, False
        each = threads // self.directions if threads % self.directions == 0 else threads
        units = (
            self.kernel.units_splittable and 1 < each <= g.tiles and self.batch < FEW_ROWS * each
        )
        return threads, units

    def __enter__(self) -> _Run:
        """Takes memory, sets what stays the same for all chunks, and packs the weights."""
        host, options, kernel = self.host, self.options, self.kernel
        packed, space = kernel.packed_elements * self.plan.itemsize, self.workspace * self.threads
        self.buffer, places = cpu.scratch.take([packed, space] * self.directions)
        self.hyper = cpu.hyperparameters(self.plan)
        hyper, yield_to = self.hyper.__array_interface__["data"][0], cpu.pool.yield_address()
        for d, (w, call) in enumerate(zip(self.weights, self.calls, strict=True)):
            bias_x, static = self._address(w.bias_ih), self._address(w.static)
            call.set(
                batch=self.batch, row_group=_row_group(self.batch),
                time_step=-1 if self.reverse[d] else 1, weights=places[2 * d], hyper=hyper,
                workspace=places[2 * d + 1], workspace_stride=self.workspace,
                units_split=self.units_split, barrier=call.barrier, yield_to=yield_to,
                training=options.training, seed=_signed(options.seed),
                stream=2 * options.stream + d, repeat=options.repeat, static=static, bias_x=bias_x,
            )  # fmt: skip
            for i, param in enumerate(w.params):
                call.set(**{f"param{i}": host.pointer(param)})
            if w.hh is not None:
                biases = (0, 0) if self.backward else (bias_x, self._address(w.bias_hh))
                cpu.pack(
                    kernel,
                    places[2 * d],
                    host.pointer(w.hh),
                    host.strides(w.hh),
                    *biases,
                    options.threads,
                )
        return self

    def __exit__(self, *_: object) -> None:
        cpu.scratch.give_back(self.buffer)

    def point_resets(self, values: Sequence[Sequence[Array]]) -> None:
        """Where resets find what they restore: ``[H]`` for all rows, or ``[B, H]``."""
        for call, own in zip(self.calls, values, strict=True):
            for i, value in enumerate(own):
                row = self.plan.hidden_size if len(value.shape) == 2 else 0
                call.set(**{f"reset{i}": self.host.pointer(value), f"reset{i}_b": row})

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Steps done and steps to do, chunk by chunk."""
        for done in range(0, self.steps, self.chunk):
            yield done, min(self.chunk, self.steps - done)

    def span(self, d: int, done: int, count: int) -> _Span:
        if self.reverse[d]:
            end = self.steps - done
            return _Span(end - count, end, end - 1, -1)
        return _Span(done, done + count, done, 1)

    def point(
        self, d: int, name: str, array: Array, index: int, sign: int, column: int = 0
    ) -> None:
        """Lets ``name`` start at ``array[index, :,
        column:]`` and step ``sign`` through its first axis.
        """
        time, row = self.host.strides(array)[:2]
        address = self.host.pointer(array) + (index * time + column) * self.plan.itemsize
        self.calls[d].set(**{name: address, f"{name}_t": sign * time, f"{name}_b": row})

    def point_rows(self, d: int, name: str, array: Array, width: int, time: int, sign: int) -> None:
        """The same for a matrix ``[time * batch, width]``."""
        row = self.batch * width
        address = self.host.pointer(array) + time * row * self.plan.itemsize
        self.calls[d].set(**{name: address, f"{name}_t": sign * row, f"{name}_b": width})

    def write(self, array: Array, slot: int, column: int, value: Array | float) -> None:
        """``array[slot, :, column : column + H] = value``, which is ``[B, H]`` or a number."""
        h = self.plan.hidden_size
        size = self.batch * h * self.plan.itemsize
        whole, number = array.shape[2] == h, isinstance(value, float)
        # One move of memory where it can be: a framework's assignment takes several microseconds.
        if whole and number and value == 0.0:
            ctypes.memset(self.host.pointer(array) + slot * size, 0, size)
        elif whole and not number and self.host.strides(value) == (h, 1):
            ctypes.memmove(self.host.pointer(array) + slot * size, self.host.pointer(value), size)
        else:
            array[slot, :, column : column + h] = value

    def read(self, array: Array, slot: int, column: int) -> Array:
        """A copy of ``array[slot, :, column : column + H]``."""
        h = self.plan.hidden_size
        out = self.host.empty((self.batch, h))
        if array.shape[2] == h:
            size = self.batch * h * self.plan.itemsize
            ctypes.memmove(self.host.pointer(out), self.host.pointer(array) + slot * size, size)
        else:
            out[:] = array[slot, :, column : column + h]
        return out

    def point_flags(self, d: int, span: _Span) -> None:
        for name, array in (("mask", self.options.mask), ("resets", self.options.resets)):
            if array is not None:
                address = self.host.pointer(array) + span.time * self.batch
                self.calls[d].set(**{name: address, f"{name}_t": span.sign * self.batch})

    def run(self, count: int) -> None:
        for call in self.calls:
            call.start(count)
        cpu.run(self.kernel, self.calls, self.threads)

    def _address(self, array: Array | None) -> int:
        return 0 if array is None else self.host.pointer(array)


def forward(
    host: Host, plan: Plan, x: Array, weights: Sequence[Weights], options: Options, *, keep: bool
) -> tuple[Array, list[list[Array]], Saved | None]:
    """Runs a layer.

    Args:
        host: array operations of the framework.
        plan: of the cell, for the CPU engine.
        x: ``[T, B, I]``, or gates ``[T, B, G*H]`` where ``Weights.ih`` is None. Last axis
            contiguous.
        weights: one per direction.
        options: masks, resets, seeds, threads.
        keep: whether to keep what ``backward`` needs.

    Returns:
        outputs ``[T, B, D*H]``, per direction the final states ``[B, H]`` in declared order, and
        ``Saved`` or None.
    """
    if options.mask is not None and options.resets is not None:
        # What lies under a mask never matters, a reset no more than an input.
        options = replace(options, resets=options.resets & options.mask)
    run = _Run(host, plan, weights, options, x, backward=False)
    cell, h, steps, batch, directions = (
        plan.cell,
        plan.hidden_size,
        run.steps,
        run.batch,
        run.directions,
    )
    # Outputs zeroed under a mask are not the hidden states: these then need memory of their own,
    # all or two steps.
    apart = options.mask is not None and not options.repeat
    whole = keep or not apart
    hidden = host.empty(((steps + 1 + any(run.reverse)) if whole else 2, batch, directions * h))
    out = host.empty((steps, batch, directions * h)) if apart else hidden[1 : steps + 1]
    kept = [keep and state.name in plan.states for state in cell.states]
    states: list[list[Array | None]] = []
    for d, w in enumerate(weights):
        run.write(hidden, steps + 1 if whole and w.reverse else 0, d * h, w.initial[0])
        states.append([None])
        for i in range(1, len(cell.states)):
            sequence = host.lasting((steps + 1, batch, h)) if kept[i] else host.empty((2, batch, h))
            run.write(sequence, steps if kept[i] and w.reverse else 0, 0, w.initial[i])
            states[d].append(sequence)
    resets = [] if options.resets is None else [_reset_values(host, plan, w) for w in weights]
    values = [host.lasting((steps, batch, run.kernel.saved_width)) for _ in weights] if keep else []
    width = len(cell.gates) * h
    padded = _padded(plan, width)
    projected = [
        None if w.ih is None else host.empty((run.chunk * batch, padded))[:, :width]
        for w in weights
    ]
    rows = None if run.steps > run.chunk else x.reshape(steps * batch, x.shape[2])

    with run:
        if resets:
            run.point_resets(resets)
        for done, count in run.chunks():
            for d, w in enumerate(weights):
                span = run.span(d, done, count)
                if w.ih is None:
                    run.point(d, "x", x, span.time, span.sign)
                else:
                    part = (
                        x[span.begin : span.end].reshape(count * batch, x.shape[2])
                        if rows is None
                        else rows
                    )
                    gates = projected[d] if count == run.chunk else projected[d][: count * batch]  # type: ignore[index]
                    host.matmul(part, w.ih.T, gates)
                    run.point_rows(d, "x", gates, padded, span.time - span.begin, span.sign)
                _point_state(run, d, 0, hidden, whole, done, steps + 1, d * h)
                for i in range(1, len(cell.states)):
                    _point_state(run, d, i, states[d][i], kept[i], done, steps, 0)
                if apart:
                    run.point(d, "out", out, span.time, span.sign, d * h)
                if keep:
                    run.point(d, "saved", values[d], span.time, span.sign)
                run.point_flags(d, span)
                run.calls[d].set(time=span.time)
            run.run(count)

    finals = []
    for d, w in enumerate(weights):
        final = [run.read(hidden, (1 if w.reverse else steps) if whole else steps & 1, d * h)]
        for i in range(1, len(cell.states)):
            final.append(
                run.read(states[d][i], (0 if w.reverse else steps) if kept[i] else steps & 1, 0)
            )
        finals.append(final)
    saved = Saved(x, weights, options, hidden, states, values, resets) if keep else None
    return out, finals, saved


def _point_state(
    run: _Run, d: int, i: int, array: Array, whole: bool, done: int, last: int, column: int
) -> None:
    """The slot of state i before the next step: in its whole sequence,
    or one of two that take turns.
    """
    if whole:
        reverse = run.reverse[d]
        run.point(
            d, f"state{i}", array, last - done if reverse else done, -1 if reverse else 1, column
        )
    else:
        run.point(d, f"state{i}", array, done & 1, -1 if done & 1 else 1, column)
        run.calls[d].set(**{f"state{i}_flip": 1})


def backward(
    host: Host,
    plan: Plan,
    saved: Saved,
    dy: Array | None,
    dfinal: Sequence[Sequence[Array | None]],
    *,
    need_x: bool = True,
    need_weights: bool = True,
) -> tuple[Array | None, list[Weights]]:
    """The gradients of a layer.

    Args:
        host, plan: as given to ``forward``.
        saved: from ``forward``; may be used again.
        dy: gradient of the outputs ``[T, B, D*H]``, last axis contiguous, or None.
        dfinal: per direction the gradients of the final states ``[B, H]``, None where there is
            none.
        need_x, need_weights: whether those gradients are wanted.

    Returns:
        the gradient of ``x`` (of the projected gates where ``Weights.ih`` is None) or None, and per
        direction a ``Weights`` of gradients; ``initial``, ``static`` and, with resets, ``reset``
        are ``[B, H]``.
    """
    x, weights, options = saved.x, saved.weights, saved.options
    run = _Run(host, plan, weights, options, x, backward=True)
    cell, h, steps, batch, directions = (
        plan.cell,
        plan.hidden_size,
        run.steps,
        run.batch,
        run.directions,
    )
    width, outputs = len(cell.gates) * h, len(cell.linears[0].outputs) * h if cell.linears else 0
    project = weights[0].ih is not None
    dx = host.empty(tuple(x.shape)) if need_x or not project else None
    sums = [
        _Sums(host, plan, batch, w, need_weights, dfinal[d], bool(saved.reset))
        for d, w in enumerate(weights)
    ]
    split = plan.split_gradient and outputs > 0
    padded, padded_r = _padded(plan, width), _padded(plan, outputs)
    dgates = [
        host.empty((run.chunk * batch, padded))[:, :width] if project else None for _ in weights
    ]
    dr = [
        host.empty((run.chunk * batch, padded_r))[:, :outputs] if split else None for _ in weights
    ]
    operand = [
        host.empty((run.chunk * batch, h)) if saved.reset and outputs else None for _ in weights
    ]
    written: set[int] = set()

    with run:
        if saved.reset:
            run.point_resets(saved.reset)
        for d in range(directions):
            sums[d].point(run.calls[d])
        for done, count in run.chunks():
            spans = [run.span(d, done, count) for d in range(directions)]
            for d, span in enumerate(spans):
                local = span.time - span.begin
                for name, array, row in (
                    ("dx", dgates[d], padded),
                    ("dr", dr[d], padded_r),
                    ("operand", operand[d], h),
                ):
                    if array is not None:
                        run.point_rows(d, name, array, row, local, span.sign)
                if not project:
                    run.point(d, "dx", dx, span.time, span.sign)
                run.point(d, "saved", saved.values[d], span.time, span.sign)
                if dy is not None:
                    run.point(d, "dy", dy, span.time, span.sign, d * h)
                # state[t] is read before step t and, one step of the direction on, after it.
                on = -span.sign
                run.point(
                    d,
                    "state0",
                    saved.hidden,
                    span.time + (2 if weights[d].reverse else 0),
                    span.sign,
                    d * h,
                )
                run.calls[d].set(state0_next=on * host.strides(saved.hidden)[0])
                for i, sequence in enumerate(saved.states[d]):
                    if sequence is not None and sequence.shape[0] == steps + 1:
                        run.point(
                            d, f"state{i}", sequence, span.time + weights[d].reverse, span.sign
                        )
                        run.calls[d].set(**{f"state{i}_next": on * host.strides(sequence)[0]})
                run.point_flags(d, span)
                run.calls[d].set(time=span.time)
            run.run(count)

            for d, (begin, end, _, _) in enumerate(spans):
                rows = count * batch
                dg = dgates[d][:rows] if project else dx[begin:end].reshape(rows, width)  # type: ignore[index]
                dh = dg if dr[d] is None else dr[d][:rows]  # type: ignore[index]
                if operand[d] is not None:
                    before = operand[d][:rows]  # type: ignore[index]
                else:
                    shift = 2 if weights[d].reverse else 0
                    before = saved.hidden[
                        begin + shift : end + shift, :, d * h : (d + 1) * h
                    ].reshape(rows, h)
                part = x[begin:end] if project and need_weights else None
                if part is not None:
                    if options.mask is not None:
                        # What lies under a mask may be NaN, and NaN times a zero gradient is NaN.
                        part = host.masked(part, options.mask[begin:end])
                    part = part.reshape(rows, x.shape[2])
                if need_weights:
                    sums[d].add(dg, dh, before, part)
                if project and dx is not None:
                    _project_back(host, dg, weights[d].ih, dx, begin, end, written)
    return dx, [total.result() for total in sums]


def _project_back(
    host: Host, dg: Array, ih: Array, dx: Array, begin: int, end: int, written: set[int]
) -> None:
    """dx[begin:end] = dg @ W, or += for times that the other direction has reached before."""
    batch = dx.shape[1]
    fresh = [time not in written for time in range(begin, end)]
    start = begin
    while start < end:
        stop = start
        while stop < end and fresh[stop - begin] == fresh[start - begin]:
            stop += 1
        part = dg[(start - begin) * batch : (stop - begin) * batch]
        out = dx[start:stop].reshape((stop - start) * batch, dx.shape[2])
        (host.matmul if fresh[start - begin] else host.matmul_add)(part, ih, out)
        start = stop
    written.update(range(begin, end))


class _Sums:
    """Gradients of one direction that add up over time."""

    def __init__(
        self,
        host: Host,
        plan: Plan,
        batch: int,
        w: Weights,
        need: bool,
        dfinal: Sequence[Array | None],
        resets: bool,
    ) -> None:
        cell, h = plan.cell, plan.hidden_size
        self.host, self.plan = host, plan
        self.states = [host.zeros((batch, h)) for _ in cell.states]
        for total, given in zip(self.states, dfinal, strict=True):
            if given is not None:
                total[:] = given
        self.resets = [host.zeros((batch, h)) for _ in cell.states] if resets else None
        groups = -(-batch // _row_group(batch))
        self.params = host.zeros((groups, len(cell.params) * h)) if cell.params else None
        self.static = host.zeros((batch, h)) if w.static is not None else None
        self.ih = host.empty(tuple(w.ih.shape)) if need and w.ih is not None else None
        outputs = cell.linears[0].outputs if cell.linears else ()
        self.hh = host.empty((len(outputs) * h, h)) if need and outputs else None
        self.bias_ih = (
            host.zeros((len(cell.gates) * h,)) if need and w.bias_ih is not None else None
        )
        self.bias_hh = (
            host.zeros((len(outputs) * h,)) if need and w.bias_hh is not None and outputs else None
        )
        self.fresh = True  # nothing added yet
        self.missing = [(i, gate) for i, gate in enumerate(cell.gates) if gate not in outputs]

    def point(self, call: cpu.Arguments) -> None:
        for i, total in enumerate(self.states):
            call.set(**{f"dstate{i}": self.host.pointer(total)})
        for i, total in enumerate(self.resets or ()):
            call.set(**{f"dreset{i}": self.host.pointer(total)})
        for name, array in (("dparam", self.params), ("dstatic", self.static)):
            if array is not None:
                call.set(**{name: self.host.pointer(array)})

    def add(self, dg: Array, dh: Array, before: Array, x: Array | None) -> None:
        """Adds a chunk: gradients of projected gates and of the matmul, its operand,
        the layer's input.
        """
        add = self.host.matmul if self.fresh else self.host.matmul_add
        self.fresh = False
        if self.hh is not None:
            add(dh.T, before, self.hh)
        if self.ih is not None:
            add(dg.T, x, self.ih)
        total = dg.sum(0) if self.bias_ih is not None else None
        if self.bias_ih is not None:
            self.bias_ih += total
        if self.bias_hh is not None:
            self.bias_hh += total if dh is dg and total is not None else dh.sum(0)

    def result(self) -> Weights:
        h, params = self.plan.hidden_size, self.plan.cell.params
        for matrix in (self.ih, self.hh) if self.fresh else ():
            if matrix is not None:  # a sequence of no steps
                matrix[:] = 0
        total = None if self.params is None else self.params.sum(0)
        return Weights(
            ih=self.ih,
            hh=self._all_gates(self.hh),
            bias_ih=self.bias_ih,
            bias_hh=self._all_gates(self.bias_hh),
            params=[total[i * h : (i + 1) * h] for i in range(len(params))],  # type: ignore[index]
            initial=self.states,
            reset=self.resets,
            static=self.static,
        )

    def _all_gates(self, used: Array | None) -> Array | None:
        """Weights have rows for every declared gate;
        a gate that the cell does not use has gradient 0.
        """
        if used is None or not self.missing:
            return used
        h, gates = self.plan.hidden_size, self.plan.cell.gates
        full = self.host.zeros((len(gates) * h, *used.shape[1:]))
        present = [i for i, gate in enumerate(gates) if (i, gate) not in self.missing]
        for source, target in enumerate(present):
            full[target * h : (target + 1) * h] = used[source * h : (source + 1) * h]
        return full


def _reset_values(host: Host, plan: Plan, w: Weights) -> list[Array]:
    """What resets restore: as given, else the declared initial values."""
    if w.reset is not None:
        return list(w.reset)
    values = []
    for state in plan.cell.states:
        value = host.empty((plan.hidden_size,))
        value[:] = state.initial
        values.append(value)
    return values


def _padded(plan: Plan, width: int) -> int:
    """The length of rows in a buffer: not a large power of two,
    or all rows would share a few lines of the cache.
    """
    return width + cpu.LINE // plan.itemsize if width * plan.itemsize % 1024 == 0 else width


def _row_group(batch: int) -> int:
    """Rows that share sums of parameter gradients: few enough groups for the near cache,
    enough for all threads.

    It depends on the batch alone, so that the order of additions is the same for any number of
    threads.
    """
    return max(1, batch // 32)


def _signed(seed: int) -> int:
    """A seed of 64 bits as the signed number that the argument table holds."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed
