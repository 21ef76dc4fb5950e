"""One layer of any cell, for every framework: input projection, recurrence, weight gradients.

Arrays belong to the framework and come through a small ``Host``; kernels see their addresses. The
input projection and the weight gradients are large matmuls and go to the framework's own library,
in chunks of time, so that the buffer between them and the recurrence stays in the cache and never
becomes as long as the sequence. An input projection that is small the kernel does (``projects``).

Time-major throughout: ``x [T, B, I]``, outputs ``[T, B, D*H]`` with D directions side by side.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from anycell.engines import cpu
from anycell.lang.cell import RECURRENT, Cell, Linear
from anycell.plan import Plan

Array = Any
# Of projected gates, for all directions together: they should stay in the cache.
CHUNK_BYTES = 8 << 20
WORTH_PACKING = 256  # rows of all steps from which packing the weight of the input may pay
WORTH_A_THREAD = 1 << 17  # multiply-adds of a call below which a second thread does not pay
NEAR_CACHE = 5 << 18  # bytes of a core's own cache
FILLED = 0.7  # part of a mask below which to leave out the rest makes up for smaller matmuls
# Threads share the rows and split the units where each would have fewer rows than that, and a
# core's own cache holds a part of the weights but not all; with hardly any rows always. Else the
# barrier of each step costs more than it saves.
FEW_ROWS = 16
HARDLY_ANY_ROWS = 4


class Host(Protocol):
    """What this module asks of a framework's arrays.
    They live on the CPU and have the dtype of the plan.

    Besides these, arrays must slice, assign (``a[i:j] = b``), ``reshape``, transpose (``.T``) and
    ``sum(0)`` as NumPy's do.
    """

    def empty(self, shape: tuple[int, ...]) -> Array: ...

    def zeros(self, shape: tuple[int, ...]) -> Array: ...

    def lasting(self, shape: tuple[int, ...]) -> Array:
        """As ``empty``, for what is of every step; see ``engines.cpu.memory``."""
        ...

    def like(self, array: Array) -> Array:
        """As ``empty``, of the shape of a contiguous array."""
        ...

    def pointer(self, array: Array) -> int: ...

    def strides(self, array: Array) -> tuple[int, ...]:
        """In elements."""
        ...

    def project(self, x: Array, weight: Array) -> Array:
        """``x @ weight.T`` as a new array, for ``x [..., I]`` and ``weight [N, I]``."""
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
        ih: ``[G*H, I]``; None where the input comes projected, in one direction.
        hh: ``[G*H, size of the first state]``, of any strides if one of them is 1; None for a cell
            without a recurrent matmul.
        bias_ih, bias_hh: ``[G*H]``.
        params: one ``[H]`` per parameter of the cell, in declared order.
        initial: one ``[B, size]`` per state, in declared order, or the number that fills it.
        reset: the values that resets restore, one ``[size]`` or ``[B, size]`` per state.
        static: ``[B, H]``, the input given once per sequence.
        recurrent_mask: ``[B, size]`` or ``[G, B, size]``, for a cell ``with_recurrent_mask``.
        linears: of further matmuls inside a step, by name; the biases as ``<name>_bias``. Strides
            as of ``hh``.
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
    recurrent_mask: Array | None = None
    linears: Mapping[str, Array | None] = field(default_factory=dict)
    reverse: bool = False

    def matmul(self, linear: Linear) -> tuple[Array, Array | None]:
        """Weight and bias of one matmul inside a step."""
        name = linear.weight
        if name == RECURRENT:
            return self.hh, self.bias_hh
        return self.linears[name], self.linears.get(f"{name}_bias")


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
        checkpoint: of what the backward pass needs keep the states of every so many steps, or with
            "sqrt" of about as many as there are between two of them, and compute the rest again;
            None keeps all of it.
    """

    mask: Array | None = None
    resets: Array | None = None
    repeat: bool = False
    training: bool = False
    seed: int = 0
    stream: int = 0
    threads: int = 1
    checkpoint: str | int | None = None


@dataclass
class Saved:
    """What the forward pass keeps for the backward pass; read, never written, by it.

    Attributes:
        hidden: ``[T+1 or T+2, B, D*size]``: the first state; initial values in the first slot, or
            the last where a direction is reversed.
        states: per direction, the sequences ``[T+1, B, size]`` of the other states that the plan
            keeps.
        values: per direction ``[T, B, n]``, the values that the plan saves.
        reset: per direction the values that resets restore, ``[H]`` or ``[B, H]`` each; empty
            without resets.

    Of S segments, with ``Options.checkpoint``, only the states before the first step of each are
    kept: ``hidden [S, B, D*size]`` and all other states, ``[S, B, size]``, in the order in which a
    direction runs; ``values`` are of no steps.
    """

    x: Array
    weights: Sequence[Weights]
    options: Options
    hidden: Array
    states: list[list[Array | None]]
    values: list[Array]
    reset: list[list[Array]]


class Chunk(NamedTuple):
    """Where a chunk lies for one direction: from which time to before which, its first step to run,
    and which way it goes.
    """

    begin: int
    end: int
    time: int
    sign: int

    @classmethod
    def of(cls, reverse: bool, steps: int, done: int, count: int) -> Chunk:
        """The next so many of all steps, after those that are done."""
        if reverse:
            end = steps - done
            return cls(end - count, end, end - 1, -1)
        return cls(done, done + count, done, 1)


class _Form(NamedTuple):
    """What calls of one form share: they differ in addresses, and in what ``Options`` says.

    Attributes:
        chunk: steps per chunk of the projection.
        inputs: how many of them the kernel multiplies itself; 0 where the host does.
        at_once: all of the projection is one matmul, and rows as they come will do.
        single: one step, whose recurrent matmul is the host's too: packing the weights would cost
            more than it saves.
        threads, units_split: for a kernel call, and whether they split the units, not the rows.
        sizes: bytes of scratch memory, workspace and packed weights of each direction.
        constants: what tables point at: hyperparameters, and projected gates that are all 0.
        tables: an argument table per direction, with all that does not change.
    """

    kernel: cpu.Kernel
    chunk: int
    inputs: int
    at_once: bool
    single: bool
    threads: int
    sizes: list[int]
    constants: tuple[Array, ...]
    tables: list[cpu.Table]


@functools.lru_cache(maxsize=256)
def _form(
    kernel: cpu.Kernel,
    plan: Plan,
    steps: int,
    batch: int,
    reverse: tuple[bool, ...],
    entering: int | None,
    resets: bool,
    sparse: bool,
    threads: int,
) -> _Form:
    cell, directions, project = plan.cell, len(reverse), entering is not None
    chunk = max(1, steps)
    if project:
        chunk = chunk_steps(plan, steps, batch * directions, CHUNK_BYTES)
    # The primitive multiplies by its own kernel always: its bits do not depend on the host.
    alone = [(l.name, l.outputs) for l in cell.linears] == [(RECURRENT, cell.gates)]
    alone = alone and cell.linears[0].operand.op == "state"
    single = project and steps == 1 and alone and not resets
    width = len(cell.gates) * plan.hidden_size
    at_once = chunk >= steps and (single or _padded(plan, width) == width)
    forward = kernel.projecting is not None
    inputs = 0
    if entering and forward and not single and projects(plan, steps * batch, entering, sparse):
        inputs = entering
    work = chunk * batch * max(0 if single else kernel.work + width * inputs, 64 * plan.hidden_size)
    # Of a mask with many holes the typical step has few rows, and many steps fewer still.
    rows = batch // 4 if sparse else batch
    input_bytes = width * inputs * plan.itemsize
    threads, units_split = share(kernel, work, rows, directions, threads, input_bytes)
    workspace = kernel.workspace(batch)
    hyper, zeros = cpu.hyperparameters(plan), np.zeros(width if inputs else 0, plan.dtype)
    common = cpu.Table(kernel.index)
    common.set(
        batch=batch, row_group=_row_group(batch), workspace_stride=workspace,
        units_split=units_split, yield_to=cpu.pool.yield_address(),
        hyper=hyper.__array_interface__["data"][0],
    )  # fmt: skip
    tables = []
    for backwards in reverse:
        tables.append(common.copy())
        tables[-1].set(time_step=-1 if backwards else 1)
    packed = [0 if single else n * plan.itemsize for n in kernel.packed_elements]
    if inputs:
        entry = kernel.projection(inputs)
        packed.append(entry.packed_elements * plan.itemsize)
        block, (at, _) = (
            entry.geometry.inner_block(plan.itemsize),
            zeros.__array_interface__["data"],
        )
        for table in tables:
            table.set(inputs=inputs, input_block=block, x=at)
    sizes = [workspace * threads, *packed] * directions
    constants = hyper, zeros
    return _Form(kernel, chunk, inputs, at_once, single, threads, sizes, constants, tables)


def projects(plan: Plan, rows: int | None, inputs: int, sparse: bool = False) -> bool:
    """Whether the forward kernel had better multiply so many inputs itself, for so many rows of all
    steps (None: not known yet).

    The projection of all steps at once reads its weight once, but writes the gates to memory and
    has the kernel read them there. Where both weights stay in a core's own cache, the kernel had
    better multiply the input too; if there is the work to make up for packing one more weight.
    And so it had where a mask has many holes, which the projection of all steps cannot leave out.
    """
    recurrent = cpu.compiled(plan).projecting
    if recurrent is None or (rows is not None and rows < WORTH_PACKING):
        return False
    both = len(plan.cell.gates) * plan.hidden_size * (inputs + recurrent.inner)
    # The rows need room there too.
    return sparse or both * plan.itemsize <= 0.7 * NEAR_CACHE


def _sparse(mask: Array | None) -> bool:
    """Whether a mask lets so few rows of steps pass that it pays to go without the others."""
    return mask is not None and int(mask.sum()) < FILLED * mask.shape[0] * mask.shape[1]


def share(
    kernel: cpu.Kernel, work: int, rows: int, directions: int, threads: int, input_bytes: int = 0
) -> tuple[int, bool]:
    """How many threads a call of so much work is worth, and whether they split the units;
    ``input_bytes`` are those of the input's weight, where the kernel multiplies it.
    """
    if threads == 1 or work * directions < WORTH_A_THREAD:
        return 1, False
    each = threads // directions if threads % directions == 0 else threads
    near = kernel.packed_bytes + input_bytes <= NEAR_CACHE
    few = rows < (HARDLY_ANY_ROWS if near else FEW_ROWS) * each
    return threads, kernel.units_splittable and few and 1 < each <= kernel.tiles


def chunk_steps(plan: Plan, steps: int, rows: int, limit: int) -> int:
    """Steps per chunk of the projection, such that its gates take about ``limit`` bytes at most."""
    width = len(plan.cell.gates) * plan.hidden_size * plan.itemsize
    count = max(1, -(-steps * rows * width // limit))
    return max(1, -(-steps // count))


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
        self.x, self.steps, self.batch = x, x.shape[0], x.shape[1]
        # The backward pass runs against each direction.
        self.reverse = tuple([w.reverse is not backward for w in weights])
        self.form = _form(
            cpu.compiled(plan, backward), plan, self.steps, self.batch, self.reverse,
            None if weights[0].ih is None else x.shape[2], options.resets is not None,
            _sparse(options.mask), options.threads,
        )  # fmt: skip
        self.calls = [table.copy() for table in self.form.tables]
        self.backward = backward

    def __enter__(self) -> _Run:
        """Takes memory, sets what stays the same for all chunks, and packs the weights."""
        host, options, form = self.host, self.options, self.form
        self.block, places = cpu.scratch.take(form.sizes)
        blocks = len(form.sizes) // len(self.calls)
        for d, (w, call) in enumerate(zip(self.weights, self.calls, strict=True)):
            bias_x, place = self._address(w.bias_ih), d * blocks
            call.set(
                workspace=places[place], training=options.training, seed=_signed(options.seed),
                stream=2 * options.stream + d, repeat=options.repeat,
                static=self._address(w.static), bias_x=bias_x, bias_h=self._address(w.bias_hh),
            )  # fmt: skip
            if w.recurrent_mask is not None:
                call.set(recurrent_mask=host.pointer(w.recurrent_mask))
            for i, param in enumerate(w.params):
                call.set(**{f"param{i}": host.pointer(param)})
            for k, linear in enumerate(() if form.single else self.plan.cell.linears):
                weight, bias = w.matmul(linear)
                biases = (0, 0) if self.backward else (bias_x, self._address(bias))
                packed, strides = places[place + 1 + k], host.strides(weight)
                source = host.pointer(weight)
                cpu.pack(form.kernel, k, packed, source, strides, *biases, options.threads)
                call.set(**{f"weights{k}": packed})
            if form.inputs:
                self._pack_input(call, places[place + blocks - 1], w)
        return self

    def _pack_input(self, call: cpu.Table, packed: int, w: Weights) -> None:
        """Packs the weight of the input for a kernel that multiplies it itself."""
        form, source, strides = self.form, self.host.pointer(w.ih), self.host.strides(w.ih)
        number, threads = form.kernel.projection(form.inputs).number, self.options.threads
        biases = self._address(w.bias_ih), self._address(w.bias_hh)
        cpu.pack(form.kernel, number, packed, source, strides, *biases, threads, form.inputs)
        call.set(weights_x=packed)

    def __exit__(self, *_: object) -> None:
        cpu.scratch.give_back(self.block)

    def point_resets(self, values: Sequence[Sequence[Array]]) -> None:
        """Where resets find what they restore: ``[H]`` for all rows, or ``[B, H]``."""
        for call, own in zip(self.calls, values, strict=True):
            for i, value in enumerate(own):
                row = value.shape[1] if len(value.shape) == 2 else 0
                call.set(**{f"reset{i}": self.host.pointer(value), f"reset{i}_b": row})

    def chunks(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Steps done and steps to do, chunk by chunk of what lies between so many steps of the
        forward pass. The backward pass has the same chunks, the last one first.
        """
        chunk = self.form.chunk
        if not self.backward:
            for done in range(begin, end, chunk):
                yield done, min(chunk, end - done)
            return
        for done in reversed(range(begin, end, chunk)):
            count = min(chunk, end - done)
            yield self.steps - done - count, count

    def span(self, d: int, done: int, count: int) -> Chunk:
        return Chunk.of(self.reverse[d], self.steps, done, count)

    def point(
        self, d: int, name: str, array: Array, index: int, sign: int, column: int = 0
    ) -> None:
        """Lets ``name`` start at ``array[index, :, column:]`` and step ``sign`` through its first
        axis.
        """
        time, row = self.host.strides(array)[:2]
        address = self.host.pointer(array) + (index * time + column) * self.plan.itemsize
        self.calls[d].point(name, address, sign * time, row)

    def point_rows(self, d: int, name: str, array: Array, width: int, time: int, sign: int) -> None:
        """The same for a matrix ``[time * batch, width]``."""
        row = self.batch * width
        address = self.host.pointer(array) + time * row * self.plan.itemsize
        self.calls[d].point(name, address, sign * row, width)

    def write(self, array: Array, slot: int, column: int, h: int, value: Array | float) -> None:
        """``array[slot, :, column : column + h] = value``, which is ``[B, h]`` or a number."""
        size = self.batch * h * self.plan.itemsize
        whole, number = array.shape[2] == h, isinstance(value, float)
        # One move of memory where it can be: a framework's assignment takes several microseconds.
        if whole and number and value == 0.0:
            ctypes.memset(self.host.pointer(array) + slot * size, 0, size)
        elif whole and not number and self.host.strides(value) == (h, 1):
            ctypes.memmove(self.host.pointer(array) + slot * size, self.host.pointer(value), size)
        else:
            array[slot, :, column : column + h] = value

    def read(self, array: Array, slot: int, column: int, out: Array, d: int) -> None:
        """``out[d] = array[slot, :, column : column + h]``, where h is the width of ``out``."""
        h = out.shape[2]
        if array.shape[2] == h:
            size, pointer = self.batch * h * self.plan.itemsize, self.host.pointer
            ctypes.memmove(pointer(out) + d * size, pointer(array) + slot * size, size)
        else:
            out[d] = array[slot, :, column : column + h]

    def point_flags(self, d: int, span: Chunk) -> None:
        for name, array in (("mask", self.options.mask), ("resets", self.options.resets)):
            if array is not None:
                address = self.host.pointer(array) + span.time * self.batch
                self.calls[d].set(**{name: address, f"{name}_t": span.sign * self.batch})

    def run(self, count: int) -> None:
        for call in self.calls:
            call.start(count)
        cpu.run(self.form.kernel, self.calls, self.form.threads)

    def _address(self, array: Array | None) -> int:
        return 0 if array is None else self.host.pointer(array)


def forward(
    host: Host, plan: Plan, x: Array, weights: Sequence[Weights], options: Options, *, keep: bool
) -> tuple[Array, list[Array], Saved | None]:
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
        outputs ``[T, B, D * size]``, the final states ``[D, B, size]`` in declared order, and
        ``Saved`` or None.
    """
    if options.mask is not None and options.resets is not None:
        # What lies under a mask never matters, a reset no more than an input.
        options = replace(options, resets=options.resets & options.mask)
    run = _Run(host, plan, weights, options, x, backward=False)
    steps, segment = run.steps, _segment(run) if keep else run.steps
    everything = keep and segment == steps
    # Outputs zeroed under a mask are not the hidden states: these then need memory of their own,
    # all or two steps.
    apart = options.mask is not None and not options.repeat
    memory = _Memory(run, steps, everything, everything or not apart)
    memory.begin([w.initial for w in weights])
    hidden, states, values = memory.hidden, memory.states, memory.values
    out = host.empty((steps, *hidden.shape[1:])) if apart else hidden[1 : steps + 1]
    resets = [] if options.resets is None else [reset_values(host.empty, plan, w) for w in weights]
    if keep and not everything:
        hidden, states, values = _borders(run, -(-steps // segment))
    with run:
        if resets:
            run.point_resets(resets)
        for begin in range(0, steps, max(1, segment)):
            if keep and not everything:
                memory.copy(begin, hidden, states, begin // segment)
            _advance(run, memory, begin, min(begin + segment, steps), out if apart else None)
    saved = Saved(x, weights, options, hidden, states, values, resets) if keep else None
    return out, memory.after(steps), saved


def check_checkpoint(value: Any) -> str | int | None:
    """The value, if ``Options.checkpoint`` takes it."""
    number = isinstance(value, int) and not isinstance(value, bool)
    if value is None or value == "sqrt" or (number and value > 0):
        return value
    raise ValueError(
        f"checkpoint: given {value!r}; expected 'sqrt', a number of steps from 1, or None to keep "
        "all that the backward pass needs."
    )


def segment_steps(wished: str | int | None, steps: int, chunk: int) -> int:
    """Steps of which the backward pass needs all at once, with ``Options.checkpoint``.

    They are whole chunks of the projection. So every matmul is the one that it would be without
    checkpoints, and so are the bits; and shorter ones would save nothing beside a chunk's buffer.
    """
    if wished is None:
        return steps
    if wished == "sqrt":
        wished = math.isqrt(steps)
    assert isinstance(wished, int), wished
    return min(steps, max(1, -(-wished // chunk)) * chunk)


def _segment(run: _Run) -> int:
    return segment_steps(run.options.checkpoint, run.steps, run.form.chunk)


class _Memory:
    """What the steps of a run hand on, and leave for the backward pass; see ``Saved``.

    States whose sequence nobody reads have two slots, which take turns.

    Attributes:
        origin, steps: of the steps of the run, in its order, those that this is of.
    """

    def __init__(self, run: _Run, steps: int, keep: bool, whole: bool) -> None:
        host, plan, states = run.host, run.plan, run.plan.cell.states
        self.run, self.origin, self.steps, batch = run, 0, steps, run.batch
        self.widths = [plan.sizes[state.size] for state in states]
        self.whole = [whole, *[keep and state.name in plan.states for state in states[1:]]]
        slots, new = (steps + 1 + any(run.reverse), host.lasting) if whole else (2, host.empty)
        self.hidden = new((slots, batch, len(run.weights) * self.widths[0]))
        self.states: list[list[Array | None]] = []
        for _ in run.weights:
            self.states.append([None])
            for width, all_of_it in zip(self.widths[1:], self.whole[1:], strict=True):
                slots, new = (steps + 1, host.lasting) if all_of_it else (2, host.empty)
                self.states[-1].append(new((slots, batch, width)))
        saved = steps, batch, run.form.kernel.saved_width
        self.values = [host.lasting(saved) for _ in run.weights] if keep else []
        self.products: list[Array] = []  # of a single step; they must live as long as it runs
        # The gates of all steps, or room for those of a chunk, or none.
        project = run.weights[0].ih is not None
        self.at_once = run.form.at_once or not project
        self.gates: list[Any] = []
        if run.form.inputs:
            return
        if self.at_once:
            self.gates = [host.project(run.x, w.ih) if project else run.x for w in run.weights]
        else:
            width = len(plan.cell.gates) * plan.hidden_size
            self.gates = [_Rows(host, plan, run.form.chunk * batch, width) for _ in run.weights]

    def time(self, d: int) -> int:
        """The first time that this is of, for one direction."""
        end = self.origin + self.steps
        return self.run.steps - end if self.run.reverse[d] else self.origin

    def place(self, d: int, i: int, done: int) -> tuple[Array, int, int, int]:
        """Where state i lies after so many steps: array, slot, first column and width."""
        slot = (done - self.origin) & 1
        if self.whole[i]:
            slot = done - self.origin
            if self.run.reverse[d]:
                slot = self.steps - slot + (i == 0)
        if i:
            return self.states[d][i], slot, 0, self.widths[i]
        return self.hidden, slot, d * self.widths[0], self.widths[0]

    def begin(self, initial: Sequence[Sequence[Array | float]]) -> None:
        """Writes the states before the first step, per direction."""
        for d, own in enumerate(initial):
            for i, value in enumerate(own):
                self.run.write(*self.place(d, i, self.origin), value)

    def after(self, done: int) -> list[Array]:
        """Copies of the states after so many steps, ``[D, B, size]`` each."""
        directions, found = len(self.states), []
        for i, width in enumerate(self.widths):
            found.append(self.run.host.empty((directions, self.run.batch, width)))
            for d in range(directions):
                array, slot, column, _ = self.place(d, i, done)
                self.run.read(array, slot, column, found[i], d)
        return found

    def copy(
        self, done: int, hidden: Array, states: Sequence[Sequence[Array | None]], slot: int
    ) -> None:
        """Copies the states after so many steps to a slot of arrays such as ``_borders`` makes."""
        for i, value in enumerate(self.after(done)):
            for d, others in enumerate(states):
                column = 0 if i else d * self.widths[0]
                self.run.write(others[i] if i else hidden, slot, column, self.widths[i], value[d])

    def point(self, d: int, done: int) -> None:
        """Lets the kernel begin after so many steps."""
        for i in range(len(self.widths)):
            array, slot, column, _ = self.place(d, i, done)
            whole = self.whole[i]
            back = self.run.reverse[d] if whole else slot
            self.run.point(d, f"state{i}", array, slot, -1 if back else 1, column)
            if not whole:
                self.run.calls[d].set(**{f"state{i}_flip": 1})


def _borders(run: _Run, count: int) -> tuple[Array, list[list[Array | None]], list[Array]]:
    """``Saved.hidden``, ``states`` and ``values`` of so many segments."""
    host, batch = run.host, run.batch
    widths = [run.plan.sizes[state.size] for state in run.plan.cell.states]
    hidden = host.empty((count, batch, len(run.weights) * widths[0]))
    states: list[list[Array | None]] = [
        [None, *[host.empty((count, batch, width)) for width in widths[1:]]] for _ in run.weights
    ]
    return hidden, states, [host.empty((0, batch, run.form.kernel.saved_width)) for _ in states]


def _advance(run: _Run, memory: _Memory, begin: int, end: int, out: Array | None) -> None:
    """Runs all directions from after ``begin`` steps to after ``end`` steps."""
    host, x, batch = run.host, run.x, run.batch
    for done, count in run.chunks(begin, end):
        for d, w in enumerate(run.weights):
            span = run.span(d, done, count)
            if run.form.inputs:
                run.point(d, "input", x, span.time, span.sign)
            elif memory.at_once:
                run.point(d, "x", memory.gates[d], span.time, span.sign)
            else:
                gates = memory.gates[d]
                part = x[span.begin : span.end].reshape(count * batch, x.shape[2])
                host.matmul(part, w.ih.T, gates[count * batch])  # type: ignore[union-attr]
                time = span.time - span.begin
                run.point_rows(d, "x", gates.whole, gates.padded, time, span.sign)
            if run.form.single:
                width = len(run.plan.cell.gates) * run.plan.hidden_size
                product = _product(host, w.initial[0], w.hh, (batch, width))
                memory.products.append(product)
                run.calls[d].set(product=host.pointer(product), product_b=width)
            memory.point(d, done)
            if out is not None:
                first = memory.widths[0]
                run.point(d, "out", out, span.time, span.sign, d * first)
            if memory.values:
                time = span.time - memory.time(d)
                run.point(d, "saved", memory.values[d], time, span.sign)
            run.point_flags(d, span)
            run.calls[d].set(time=span.time)
        run.run(count)


def _product(host: Host, operand: Array | float, weight: Array, shape: tuple[int, int]) -> Array:
    """The recurrent matmul of a single step."""
    if isinstance(operand, float) and operand == 0.0:
        return host.zeros(shape)
    if isinstance(operand, float):
        value, operand = operand, host.empty((shape[0], weight.shape[1]))
        operand[:] = value
    return host.project(operand, weight)


class Factors(NamedTuple):
    """The gradient of the weight of a matmul inside the steps is ``outputs.T @ operand``.

    Attributes:
        outputs: gradients of the matmul's outputs, ``[T * B, out]``; None where they are those of
            the projected gates.
        operand: what it multiplied, ``[T * B, in]``; None where that is the first state before
            each step, as it was without resets.
    """

    outputs: Array | None
    operand: Array | None


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
        dy: gradient of the outputs ``[T, B, D*H]``, last axis contiguous, or None.
        dfinal: per direction the gradients of the final states ``[B, H]``, None where there is
            none.
        need_x, need_weights: whether those gradients are wanted.
        factors: gets per direction, for each matmul inside a step, what its weight's gradient is
            the product of, for hosts that multiply themselves. Without checkpoints, and where the
            input comes projected: then they are of all steps.

    Returns:
        the gradient of ``x`` (of the projected gates where ``Weights.ih`` is None) or None, and per
        direction a ``Weights`` of gradients; ``initial``, ``static`` and, with resets, ``reset``
        are ``[B, H]``.
    """
    x, weights, options = saved.x, saved.weights, saved.options
    run = _Run(host, plan, weights, options, x, backward=True)
    cell, batch = plan.cell, run.batch
    first = plan.sizes[cell.states[0].size]
    width, rows = len(cell.gates) * plan.hidden_size, run.form.chunk * batch
    project = weights[0].ih is not None
    dx = host.empty(tuple(x.shape)) if need_x or not project else None
    sums = [
        _Sums(host, plan, x.shape[:2], w, need_weights, dfinal[d], bool(saved.reset))
        for d, w in enumerate(weights)
    ]
    # Buffers of a chunk, per direction: gradients of the projected gates, then for each matmul
    # those of its outputs and what it multiplied, where they are not at hand.
    dgates = [_Rows(host, plan, rows, width) if project else None for _ in weights]
    split = {k: l for k, l in enumerate(cell.linears) if not plan.shares_gradient(l)}
    apart = {
        k: l
        for k, l in enumerate(cell.linears)
        if saved.reset or l.operand.op != "state" or l.operand.attrs[0] != cell.state_names[0]
    }
    later = factors is not None
    dr = [
        {
            k: _Rows(host, plan, rows, len(l.outputs) * plan.sizes[l.out_size], later)
            for k, l in split.items()
        }
        for _ in weights
    ]
    operands = [
        {k: _Rows(host, plan, rows, plan.sizes[l.in_size], later) for k, l in apart.items()}
        for _ in weights
    ]
    if factors is not None:
        need_weights = False
        for own_dr, own_operands in zip(dr, operands, strict=True):
            pairs = [(own_dr.get(k), own_operands.get(k)) for k in range(len(cell.linears))]
            factors.append([Factors(*[p if p is None else p.whole for p in q]) for q in pairs])
    written: set[int] = set()

    with run:
        if saved.reset:
            run.point_resets(saved.reset)
        for total, call in zip(sums, run.calls, strict=True):
            total.point(call)
        for done, count, part in _parts(run, saved):
            spans = [run.span(d, done, count) for d in range(len(weights))]
            for d, span in enumerate(spans):
                local, reverse = span.time - span.begin, weights[d].reverse
                if dgates[d] is None:
                    run.point(d, "dx", dx, span.time, span.sign)
                named = {f"dr{k}": r for k, r in dr[d].items()}
                named |= {f"operand{k}": r for k, r in operands[d].items()}
                for name, buffer in {"dx": dgates[d], **named}.items():
                    if buffer is not None:
                        rows = buffer.whole
                        run.point_rows(d, name, rows, buffer.padded, local, span.sign)
                time = span.time - part.times[d]
                run.point(d, "saved", part.values[d], time, span.sign)
                if dy is not None:
                    run.point(d, "dy", dy, span.time, span.sign, d * first)
                # state[t] is read before step t and, one step of the direction on, after it.
                on, begin = -span.sign, time + (2 if reverse else 0)
                run.point(d, "state0", part.hidden, begin, span.sign, d * first)
                run.calls[d].set(state0_next=on * host.strides(part.hidden)[0])
                for i, sequence in enumerate(part.states[d]):
                    if sequence is not None and cell.states[i].name in plan.states:
                        run.point(d, f"state{i}", sequence, time + reverse, span.sign)
                        run.calls[d].set(**{f"state{i}_next": on * host.strides(sequence)[0]})
                run.point_flags(d, span)
                run.calls[d].set(time=span.time)
            run.run(count)

            for d, (begin, end, _, _) in enumerate(spans):
                rows = count * batch
                dg = dx[begin:end].reshape(rows, width) if dgates[d] is None else dgates[d][rows]  # type: ignore[index]
                if need_weights:
                    inputs = _unmasked(host, x, options.mask, begin, end) if project else None
                    shift = (2 if weights[d].reverse else 0) - part.times[d]
                    hidden = part.hidden[
                        begin + shift : end + shift, :, d * first : (d + 1) * first
                    ]
                    pairs = [
                        (
                            dr[d][k][rows] if k in split else dg,
                            operands[d][k][rows] if k in apart else hidden.reshape(rows, first),
                        )
                        for k in range(len(cell.linears))
                    ]
                    sums[d].add(dg, inputs, pairs)
                if run.form.single:
                    dh = dr[d][0][rows] if split else dg
                    host.matmul_add(dh, weights[d].hh, sums[d].states[0])
                if project and dx is not None:
                    _project_back(host, dg, weights[d].ih, dx, begin, end, written)
    return dx, [total.result() for total in sums]


class _Part(NamedTuple):
    """What the backward pass reads of a part of the sequence; see ``Saved``.

    ``times``: the first that it is of, per direction.
    """

    hidden: Array
    states: list[list[Array | None]]
    values: list[Array]
    times: list[int]


def _parts(run: _Run, saved: Saved) -> Iterator[tuple[int, int, _Part]]:
    """Chunk by chunk as ``run.chunks``, with what is needed there: kept, or computed again."""
    host, plan, weights, steps = run.host, run.plan, saved.weights, run.steps
    segment = _segment(run)
    if segment == steps:
        whole = _Part(saved.hidden, saved.states, saved.values, [0] * len(weights))
        for done, count in run.chunks(0, steps):
            yield done, count, whole
        return
    again = _Run(host, plan, weights, saved.options, saved.x, backward=False)
    memory = _Memory(again, segment, True, True)
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
            _advance(again, memory, begin, end, None)
            times = [memory.time(d) for d in range(len(weights))]
            part = _Part(memory.hidden, memory.states, memory.values, times)
            for done, count in run.chunks(begin, end):
                yield done, count, part


class _Rows:
    """A buffer for the rows of a chunk, ``[rows, width]``; ``dense`` if others read it whole."""

    def __init__(self, host: Host, plan: Plan, rows: int, width: int, dense: bool = False) -> None:
        self.width, self.padded = width, width if dense else _padded(plan, width)
        self.whole = host.empty((rows, self.padded))

    def __getitem__(self, rows: int) -> Array:
        if self.whole.shape[0] == rows and self.width == self.padded:
            return self.whole
        return self.whole[:rows, : self.width]


def _unmasked(host: Host, x: Array, mask: Array | None, begin: int, end: int) -> Array:
    """Rows of the input.

    What lies under a mask may be NaN, and NaN times a zero gradient is NaN.
    """
    part = x[begin:end] if mask is None else host.masked(x[begin:end], mask[begin:end])
    return part.reshape((end - begin) * x.shape[1], x.shape[2])


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
        shape: Sequence[int],
        w: Weights,
        need: bool,
        dfinal: Sequence[Array | None],
        resets: bool,
    ) -> None:
        cell, h, (steps, batch) = plan.cell, plan.hidden_size, shape
        self.host, self.plan, self.fresh = host, plan, True
        self.states = [host.zeros((batch, plan.sizes[s.size])) for s in cell.states]
        for total, given in zip(self.states, dfinal, strict=True):
            if given is not None:
                total[:] = given
        self.resets = [host.zeros(tuple(d.shape)) for d in self.states] if resets else None
        groups = -(-batch // _row_group(batch))
        self.params = host.zeros((groups, len(cell.params) * h)) if cell.params else None
        self.static = host.zeros((batch, h)) if w.static is not None else None
        # The first chunk overwrites, if there is one.
        new = host.empty if steps else host.zeros
        self.ih = new(tuple(w.ih.shape)) if need and w.ih is not None else None
        self.bias_ih = (
            host.zeros((len(cell.gates) * h,)) if need and w.bias_ih is not None else None
        )
        self.matmuls = {
            l.weight: _MatmulSum(host, plan, l, *w.matmul(l), steps) for l in cell.linears if need
        }

    def point(self, call: cpu.Table) -> None:
        for i, total in enumerate(self.states):
            call.set(**{f"dstate{i}": self.host.pointer(total)})
        for i, total in enumerate(self.resets or ()):
            call.set(**{f"dreset{i}": self.host.pointer(total)})
        for name, array in (("dparam", self.params), ("dstatic", self.static)):
            if array is not None:
                call.set(**{name: self.host.pointer(array)})

    def add(self, dg: Array, x: Array | None, pairs: Sequence[tuple[Array, Array]]) -> None:
        """Adds a chunk: gradients of the projected gates, what was projected, and for each matmul
        the gradients of its outputs and its operand.
        """
        fresh, self.fresh = self.fresh, False
        if self.ih is not None:
            (self.host.matmul if fresh else self.host.matmul_add)(dg.T, x, self.ih)
        total = None
        if self.bias_ih is not None:
            total = dg.sum(0)
            self.bias_ih += total
        for l, (d, operand) in zip(self.plan.cell.linears, pairs, strict=True):
            self.matmuls[l.weight].add(l, d, operand, total if d is dg else None, fresh)

    def result(self) -> Weights:
        h, params = self.plan.hidden_size, self.plan.cell.params
        total = None if self.params is None else self.params.sum(0)
        found: dict[str, Array | None] = {}
        for name, matmul in self.matmuls.items():
            found[name], found[f"{name}_bias"] = matmul.weight, matmul.bias
        return Weights(
            ih=self.ih,
            hh=found.pop(RECURRENT, None),
            bias_ih=self.bias_ih,
            bias_hh=found.pop(f"{RECURRENT}_bias", None),
            params=[total[i * h : (i + 1) * h] for i in range(len(params))],  # type: ignore[index]
            initial=self.states,
            reset=self.resets,
            static=self.static,
            linears=found,
        )


class _MatmulSum:
    """The gradients of a weight and a bias, of one matmul or of several that share them.

    Both have rows for every declared output; one that the cell does not use has gradient 0.
    """

    def __init__(
        self, host: Host, plan: Plan, linear: Linear, weight: Array, bias: Array | None, steps: int
    ) -> None:
        self.host = host
        self.whole = linear.heads == 1 and linear.outputs == linear.declared
        self.weight = (host.empty if self.whole and steps else host.zeros)(tuple(weight.shape))
        self.bias = None if bias is None else host.zeros(tuple(bias.shape))
        self.size = plan.sizes[linear.out_size]

    def add(self, l: Linear, d: Array, operand: Array, total: Array | None, fresh: bool) -> None:
        """Adds a chunk of one matmul; ``total`` is the sum of the rows of ``d``, where known."""
        size = self.size
        if self.bias is not None and total is None:
            total = d.sum(0)
        if self.whole:
            (self.host.matmul if fresh else self.host.matmul_add)(d.T, operand, self.weight)
            if self.bias is not None:
                self.bias += total
            return
        out, into = size // l.heads, operand.shape[1] // l.heads
        blocks = self.weight.reshape(l.heads, len(l.declared) * out, into)
        for n, output in enumerate(l.outputs):
            k = l.declared.index(output)
            if self.bias is not None:
                self.bias[k * size : (k + 1) * size] += total[n * size : (n + 1) * size]  # type: ignore[index]
            for head in range(l.heads):
                column = n * size + head * out
                block = blocks[head, k * out : (k + 1) * out]
                part = operand[:, head * into : (head + 1) * into]
                self.host.matmul_add(d[:, column : column + out].T, part, block)


def shapes(cell: Cell, sizes: dict[str, int], width: int, bias: bool) -> dict[str, tuple[int, ...]]:
    """Name and shape of what one direction of one layer learns, in the order of creation."""
    gates = len(cell.gates) * sizes["H"]
    recurrent = any(l.name == RECURRENT for l in cell.linears)
    found: dict[str, tuple[int, ...]] = {"weight_ih": (gates, width)}
    if recurrent:
        found["weight_hh"] = (gates, sizes[cell.states[0].size])
    if bias:
        found["bias_ih"] = (gates,)
        if recurrent:
            found["bias_hh"] = (gates,)
    for l in cell.linears:
        if l.name != RECURRENT:
            found[f"weight_{l.name}"] = l.shape(sizes)
            if l.bias:
                found[f"bias_{l.name}"] = (len(l.declared) * sizes[l.out_size],)
    return found | dict.fromkeys(cell.param_names, (sizes["H"],))


def saved_width(plan: Plan) -> int:
    """Values that the forward pass saves of a step and row, see ``Saved``."""
    return cpu.compiled(plan, False).saved_width


def keeps_state(plan: Plan, i: int) -> bool:
    """Whether it keeps the sequence of state i > 0, without checkpoints."""
    return plan.cell.states[i].name in plan.states


def reset_values(empty: Callable[[tuple[int, ...]], Array], plan: Plan, w: Weights) -> list[Array]:
    """What resets restore: as given, else the declared initial values."""
    if w.reset is not None:
        return list(w.reset)
    values = []
    for state in plan.cell.states:
        value = empty((plan.sizes[state.size],))
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
