"""A pass over a layer: its kernel, over chunks of time."""

from __future__ import annotations

from collections.abc import Iterator

from anycell.engines import cpu
from anycell.layer.arguments import (
    Array,
    Chunk,
    Direction,
    Entering,
    Host,
    Options,
    reset_values,
    segment_steps,
)
from anycell.layer.form import form_of, padded, sparse
from anycell.plan import Plan

# Entries of argument tables that point at arrays of a direction, and the names of these.
_PLACED = (
    ("static", "static"),
    ("recurrent_mask", "recurrent_mask"),
    ("bias_x", "bias_ih"),
    ("bias_h", "bias_hh"),
)


class Run:
    """A kernel that runs over chunks of time, with one argument table per direction."""

    def __init__(
        self,
        host: Host,
        plan: Plan,
        given: Entering,
        options: Options,
        backward: bool,
    ) -> None:
        self.host, self.plan, self.options, self.given = host, plan, options, given
        self.x, self.directions = given.x, given.directions
        self.steps, self.batch, width = given.x.shape
        # The backward pass runs against each direction.
        self.reverse = tuple([reverse is not backward for reverse in options.reverse])
        self.form = form_of(
            cpu.compiled(plan, backward), plan, self.steps, self.batch, self.reverse,
            width if given.projects else None, given.resets is not None,
            sparse(given.mask), options.threads,
        )  # fmt: skip
        self.calls = [table.copy() for table in self.form.tables]
        self.backward = backward

    def __enter__(self) -> Run:
        """Takes memory, sets what stays the same for all chunks, and packs the weights."""
        options, form = self.options, self.form
        self.block, places = cpu.scratch.take(form.sizes)
        blocks = len(form.sizes) // len(self.calls)
        if cpu.check.ON:
            for d, call in enumerate(self.calls):
                names = ["workspace", *[f"weights{k}" for k in range(blocks - 1)]]
                if form.inputs:
                    names[-1] = "weights_x"
                here = zip(names, places[d * blocks :], form.sizes[d * blocks :], strict=False)
                call.bounds.update({name: (at, at + size) for name, at, size in here})
        cell = self.plan.cell
        for d, (w, call) in enumerate(zip(self.directions, self.calls, strict=True)):
            place = d * blocks
            call.set(
                workspace=places[place], training=options.training, seed=_signed(options.seed),
                stream=2 * options.stream + d, repeat=options.repeat,
            )  # fmt: skip
            for entry, name in _PLACED:
                if name in w:
                    self.place(d, entry, w[name])
            for i, name in enumerate(cell.param_names):
                self.place(d, f"param{i}", w[name])
            bias_x, bias_h = (self._address(w, name) for name in ("bias_ih", "bias_hh"))
            for k, linear in enumerate(() if form.single else cell.linears):
                packed, biases = places[place + 1 + k], (0, 0)
                if not self.backward:
                    biases = bias_x, self._address(w, linear.bias_name)
                self._pack(k, packed, w[linear.weight], biases)
                call.set(**{f"weights{k}": packed})
            if form.inputs:
                number = form.kernel.projection(form.inputs).number
                packed = places[place + blocks - 1]
                self._pack(number, packed, w["weight_ih"], (bias_x, bias_h), form.inputs)
                call.set(weights_x=packed)
        return self

    def _address(self, w: Direction, name: str) -> int:
        return self.host.pointer(w[name]) if name in w else 0

    def _pack(
        self, number: int, packed: int, weight: Array, biases: tuple[int, int], inputs: int = 0
    ) -> None:
        """Packs a weight for the kernel's matmul of that number."""
        host = self.host
        bounds = extent(host, weight) if cpu.check.ON else None
        cpu.pack(
            self.form.kernel, number, packed, host.pointer(weight), host.strides(weight), *biases,
            self.options.threads, inputs, bounds,
        )  # fmt: skip

    def __exit__(self, *_: object) -> None:
        cpu.scratch.give_back(self.block)

    def point_resets(self) -> None:
        """Where resets find what they restore: ``[size]`` for all rows, or ``[B, size]``."""
        self.restored = [reset_values(self.host.empty, self.plan, w) for w in self.directions]
        for d, (call, values) in enumerate(zip(self.calls, self.restored, strict=True)):
            for i, value in enumerate(values):
                row = value.shape[1] if len(value.shape) == 2 else 0
                self.place(d, f"reset{i}", value)
                call.set(**{f"reset{i}_b": row})

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
        """Where so many steps of a direction lie, after those that are done."""
        return Chunk.of(self.reverse[d], self.steps, done, count)

    @property
    def segment(self) -> int:
        """Steps of which the backward pass needs all at once."""
        return segment_steps(self.options.checkpoint, self.steps, self.form.chunk)

    def place(self, d: int, name: str, array: Array, offset: int = 0) -> None:
        """Sets the address of an array, so many bytes from its start."""
        call = self.calls[d]
        call.entries[call.index[name]] = self.host.pointer(array) + offset
        if cpu.check.ON:
            call.bounds[name] = extent(self.host, array)

    def point(
        self, d: int, name: str, array: Array, index: int, sign: int, column: int = 0
    ) -> None:
        """Lets ``name`` start at ``array[index, :, column:]`` and step ``sign`` through its first
        axis.
        """
        time, row = self.host.strides(array)[:2]
        self.place(d, name, array, (index * time + column) * self.plan.itemsize)
        self.calls[d].step(name, sign * time, row)

    def point_rows(self, d: int, name: str, rows: Rows, chunk: Chunk) -> None:
        """The same for a buffer of the rows of a chunk."""
        width = rows.padded
        row, time = self.batch * width, chunk.time - chunk.begin
        self.place(d, name, rows.whole, time * row * self.plan.itemsize)
        self.calls[d].step(name, chunk.sign * row, width)

    def point_flags(self, d: int, span: Chunk) -> None:
        """Masks and resets of a chunk."""
        for name, array in (("mask", self.given.mask), ("resets", self.given.resets)):
            if array is not None:
                self.place(d, name, array, span.time * self.batch)
                self.calls[d].set(**{f"{name}_t": span.sign * self.batch})

    def run(self, count: int) -> None:
        """So many steps of all directions."""
        for call in self.calls:
            call.start(count)
        cpu.run(self.form.kernel, self.calls, self.form.threads)


def extent(host: Host, array: Array) -> cpu.check.Bounds:
    """The first byte of an array and that behind its last."""
    address, size = host.pointer(array), array.dtype.itemsize
    if 0 in array.shape:
        return address, address
    reach = [(n - 1) * s * size for n, s in zip(array.shape, host.strides(array), strict=True)]
    first, last = sum(min(0, r) for r in reach), sum(max(0, r) for r in reach)
    return address + first, address + last + size


class Rows:
    """A buffer for the rows of a chunk, ``[rows, width]``; ``dense`` if others read it whole."""

    def __init__(self, host: Host, plan: Plan, rows: int, width: int, dense: bool = False) -> None:
        self.width, self.padded = width, width if dense else padded(plan, width)
        self.whole = host.empty((rows, self.padded))

    def __getitem__(self, rows: int) -> Array:
        if self.whole.shape[0] == rows and self.width == self.padded:
            return self.whole
        return self.whole[:rows, : self.width]


def saved_width(plan: Plan) -> int:
    """Values that the forward pass saves of a step and row, see ``Kept``."""
    return cpu.compiled(plan, False).saved_width


def keeps_state(plan: Plan, i: int) -> bool:
    """Whether it keeps the sequence of state i > 0, without checkpoints."""
    return plan.cell.states[i].name in plan.states


def _signed(seed: int) -> int:
    """A seed of 64 bits as the signed number that the argument table holds."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed
