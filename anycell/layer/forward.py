"""The forward pass of a layer."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from anycell.layer import contract
from anycell.layer.arguments import Array, Host, Kept, Options, initial
from anycell.layer.run import Rows, Run
from anycell.plan import Plan


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
    steps, segment = run.steps, run.segment if keep else run.steps
    everything = keep and segment == steps
    # Outputs zeroed under a mask are not the hidden states: these then need memory of their own,
    # all or two steps.
    zeroed = given.mask is not None and not options.repeat
    memory = Memory(run, steps, everything, everything or not zeroed)
    memory.begin([initial(plan, w) for w in given.directions])
    kept = Kept(memory.hidden, memory.states, memory.values)
    out = host.empty((steps, *kept.hidden.shape[1:])) if zeroed else kept.hidden[1 : steps + 1]
    if keep and not everything:
        kept = _borders(run, -(-steps // segment))
    with run:
        if given.resets is not None:
            run.point_resets()
        for begin in range(0, steps, max(1, segment)):
            if keep and not everything:
                memory.copy(begin, kept, begin // segment)
            advance(run, memory, begin, min(begin + segment, steps), out if zeroed else None)
    return out, memory.after(steps), kept if keep else None


class Memory:
    """What the steps of a run hand on, and leave for the backward pass; see ``Kept``.

    States whose sequence nobody reads have two slots, which take turns.

    Attributes:
        origin, steps: of the steps of the run, in its order, those that this is of.
    """

    def __init__(self, run: Run, steps: int, keep: bool, whole: bool) -> None:
        host, plan, states = run.host, run.plan, run.plan.cell.states
        self.run, self.origin, self.steps, batch = run, 0, steps, run.batch
        self.widths = [plan.sizes[state.size] for state in states]
        self.whole = [whole, *[keep and state.name in plan.states for state in states[1:]]]
        slots, new = (steps + 1 + any(run.reverse), host.lasting) if whole else (2, host.empty)
        self.hidden = new((slots, batch, len(run.directions) * self.widths[0]))
        self.states: list[list[Array | None]] = []
        for _ in run.directions:
            self.states.append([None])
            for width, all_of_it in zip(self.widths[1:], self.whole[1:], strict=True):
                slots, new = (steps + 1, host.lasting) if all_of_it else (2, host.empty)
                self.states[-1].append(new((slots, batch, width)))
        saved = steps, batch, run.form.kernel.saved_width
        self.values = [host.lasting(saved) for _ in run.directions] if keep else []
        self.products: list[Array] = []  # of a single step; they must live as long as it runs
        # The gates of all steps, or room for those of a chunk, or none.
        self.gates: list[Any] = []
        if run.form.inputs:
            return
        if run.form.at_once:
            projects = run.given.projects
            self.gates = [
                host.project(run.x, w["weight_ih"]) if projects else run.x for w in run.directions
            ]
        else:
            width = len(plan.cell.gates) * plan.hidden_size
            self.gates = [Rows(host, plan, run.form.chunk * batch, width) for _ in run.directions]

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

    def begin(self, states: Sequence[Sequence[Array | float]]) -> None:
        """Writes the states before the first step, per direction."""
        for d, values in enumerate(states):
            for i, value in enumerate(values):
                self._write(*self.place(d, i, self.origin), value)

    def after(self, done: int) -> list[Array]:
        """Copies of the states after so many steps, ``[D, B, size]`` each."""
        directions, found = len(self.states), []
        for i, width in enumerate(self.widths):
            found.append(self.run.host.empty((directions, self.run.batch, width)))
            for d in range(directions):
                array, slot, column, _ = self.place(d, i, done)
                self._read(array, slot, column, found[i], d)
        return found

    def copy(self, done: int, borders: Kept, slot: int) -> None:
        """Copies the states after so many steps to a slot of what ``_borders`` makes."""
        for i, value in enumerate(self.after(done)):
            for d, others in enumerate(borders.states):
                column, array = (0, others[i]) if i else (d * self.widths[0], borders.hidden)
                self._write(array, slot, column, self.widths[i], value[d])

    def point(self, d: int, done: int) -> None:
        """Lets the kernel begin after so many steps."""
        for i in range(len(self.widths)):
            array, slot, column, _ = self.place(d, i, done)
            whole = self.whole[i]
            back = self.run.reverse[d] if whole else slot
            self.run.point(d, f"state{i}", array, slot, -1 if back else 1, column)
            if not whole:
                self.run.calls[d].set(**{f"state{i}_flip": 1})

    def _write(self, array: Array, slot: int, column: int, h: int, value: Array | float) -> None:
        """``array[slot, :, column : column + h] = value``, which is ``[B, h]`` or a number."""
        host, size = self.run.host, self.run.batch * h * self.run.plan.itemsize
        whole, number = array.shape[2] == h, isinstance(value, float)
        # One move of memory where it can be: a framework's assignment takes several microseconds.
        if whole and number and value == 0.0:
            ctypes.memset(host.pointer(array) + slot * size, 0, size)
        elif whole and not number and host.strides(value) == (h, 1):
            ctypes.memmove(host.pointer(array) + slot * size, host.pointer(value), size)
        else:
            array[slot, :, column : column + h] = value

    def _read(self, array: Array, slot: int, column: int, out: Array, d: int) -> None:
        """``out[d] = array[slot, :, column : column + h]``, where h is the width of ``out``."""
        host, h = self.run.host, out.shape[2]
        if array.shape[2] == h:
            size = self.run.batch * h * self.run.plan.itemsize
            ctypes.memmove(host.pointer(out) + d * size, host.pointer(array) + slot * size, size)
        else:
            out[d] = array[slot, :, column : column + h]


def _borders(run: Run, count: int) -> Kept:
    """What is kept of so many segments."""
    host, batch = run.host, run.batch
    widths = [run.plan.sizes[state.size] for state in run.plan.cell.states]
    hidden = host.empty((count, batch, len(run.directions) * widths[0]))
    states = [
        [None, *[host.empty((count, batch, width)) for width in widths[1:]]] for _ in run.directions
    ]
    return Kept(
        hidden, states, [host.empty((0, batch, run.form.kernel.saved_width)) for _ in states]
    )


def advance(run: Run, memory: Memory, begin: int, end: int, out: Array | None) -> None:
    """Runs all directions from after ``begin`` steps to after ``end`` steps."""
    host, x, batch = run.host, run.x, run.batch
    for done, count in run.chunks(begin, end):
        for d, w in enumerate(run.directions):
            span = run.span(d, done, count)
            if run.form.inputs:
                run.point(d, "input", x, span.time, span.sign)
            elif run.form.at_once:
                run.point(d, "x", memory.gates[d], span.time, span.sign)
            else:
                gates = memory.gates[d]
                part = x[span.begin : span.end].reshape(count * batch, x.shape[2])
                host.matmul(part, w["weight_ih"].T, gates[count * batch])
                run.point_rows(d, "x", gates, span)
            if run.form.single:
                width = len(run.plan.cell.gates) * run.plan.hidden_size
                first = initial(run.plan, w)[0]
                product = _product(host, first, w["weight_hh"], (batch, width))
                memory.products.append(product)
                run.place(d, "product", product)
                run.calls[d].set(product_b=width)
            memory.point(d, done)
            if out is not None:
                run.point(d, "out", out, span.time, span.sign, d * memory.widths[0])
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
