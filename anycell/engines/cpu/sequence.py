"""Prints a plan as LLVM text: one function that runs a whole sequence, forward or backward.

The two directions are printed alike. A step is a matmul whose result never leaves the cache,
followed by element-wise work on it:

    forward     results = state[t] @ W          then the cell: new states, what backward needs
    backward    results = d_gates[t+1] @ W'     then its derivative: d_gates[t], d_state

Weights are packed per *tile*, a few vectors of units with all gates side by side, so that a
register block of rows times one tile is the inner loop.

Most cells are that simple: the element-wise work on a span of units follows its tiles at once. If a
cell has row reductions or further matmuls, a panel of rows takes the step together: first its
matmuls, then several passes over the units of each row (``plan.passes``). A matmul inside the step
begins a new *stage*, after all rows of the panel have completed the passes before it.

Threads split either the batch rows or, with a barrier at each step, the units. Then each takes its
own piece of a step first, and afterwards pieces that no other thread has begun. The split changes
neither the operations on a row nor their order, so the bits do not depend on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from anycell.engines.cpu import tiles
from anycell.engines.cpu.door import Door
from anycell.engines.cpu.ir import Builder, Module, Value, Variable, constant
from anycell.engines.cpu.layout import PANEL, Layout
from anycell.engines.cpu.matmul import Blocks, print_packing, print_quantizing, print_staging
from anycell.engines.cpu.panel import Panel
from anycell.engines.cpu.rows import RowAt, Rows, Task
from anycell.engines.cpu.step import Step
from anycell.plan import LINE

Spans = tuple[Value, Value]  # of units, as a range: begin and end


def print_kernel(layout: Layout) -> Module:
    """Prints the module of a kernel."""
    types = layout.plan.types
    module = Module(layout.target, layout.real, types.short)
    blocks = [Blocks(layout, m) for m in layout.matmuls]
    for block in blocks:
        with module.part(f"blocks{block.matmul.number}"):
            block.print(module)
    with module.part("common"):
        if types.quantized:
            print_quantizing(module)
        else:
            for number in sorted({layout.operand_type(m) for m in layout.matmuls if m.staged}):
                print_staging(module, number, layout.geometry, types.operands.llvm)
    b = module.private("sequence", "ptr args, i64 part, i64 parts", vectors=layout.width)
    Sequence(b, layout, blocks).print()
    with module.part("common"):
        _print_all(module)
    print_packing(module, layout)
    Door(module, layout).print()
    return module


def _print_all(module: Module) -> None:
    """Prints ``run_all``: directions run side by side if they divide ``parts``, else in turn."""
    b = module.private("run_all", "ptr calls, i64 part, i64 parts")
    calls, part, parts = b.args
    count = b.load(calls, "i64")
    whole = (parts % count).eq(0)
    with b.when(whole) as otherwise:
        call = b.load(b.gep(calls, part % count + 1, "i64"), "ptr")
        b.call("sequence", call, part // count, parts // count)
    with otherwise, b.loop(0, count) as i:
        b.call("sequence", b.load(b.gep(calls, i + 1, "i64"), "ptr"), part, parts)


class Sequence:
    """The steps of a sequence, as one thread takes them.

    Attributes:
        groups: this thread's groups of rows, as a range: begin, end and step.
        split: whether threads split the units.
    """

    def __init__(self, b: Builder, layout: Layout, blocks: list[Blocks]) -> None:
        self.b, self.layout = b, layout
        self.rows = rows = Rows(b, layout)
        self.arg = arg = rows.arg
        _, part, parts = b.args
        self.split = split = arg["units_split"].ne(0)

        spans, zero, after = b.value(layout.geometry.spans), b.value(0), part + 1
        groups = (arg["batch"] + arg["row_group"] - 1) // arg["row_group"]
        # Long rows often come first, so under a mask the threads take groups in rotation.
        first_group, last_group = groups * part // parts, groups * after // parts
        self.groups = [
            b.select(split, all_, b.select(rows.optional["mask"], turn, block))
            for all_, turn, block in (
                (0, part, first_group), (groups, groups, last_group), (1, parts, 1)
            )
        ]  # fmt: skip
        self._share = lambda piece: spans * piece // parts
        self._own = [
            b.select(split, self._share(n), whole) for whole, n in ((zero, part), (spans, after))
        ]
        self._spans = list(map(b.variable, self._own))
        space = b.gep(arg["workspace"], part * arg["workspace_stride"] + LINE, "i8")
        self.panel = Panel(rows, blocks, space)
        self.step = Step(rows)
        self.steps = arg["steps"]
        if layout.backward:
            # A last round passes on the gradients from the first step's matmuls and resets, unless
            # the caller does the multiplication.
            last = b.value(1)
            if layout.matmuls:
                last = b.zext(rows.given(f"packed {layout.matmuls[0].linear.name}"), "i64")
            self.steps += last
        if layout.tiled:
            most = (groups + parts - 1) // parts * arg["row_group"]
            most = b.smin(b.select(split, arg["batch"], most), arg["batch"])
            tiles.configure(b, b.smax(b.smin(most, tiles.ROWS), 1), layout.plan.types.pieces)

    def print(self) -> None:
        """The loop over the steps."""
        b = self.b
        left = b.variable(0)
        with b.loop(0, self.steps) as t:
            if self.layout.row_wise:
                count = self._take_rows(t, None)
                with b.loop(0, count, PANEL) as first:
                    self._stages(t, first, b.smin(first + PANEL, count))
            else:
                with b.when(self.split & left.value.ne(0)) as otherwise:
                    pass
                with otherwise, self._pieces(t, left) as spans:
                    self._units(t, spans)
        if self.layout.tiled:
            tiles.release(b)

    def _units(self, t: Value, spans: Spans) -> None:
        """A step of this thread's rows, of the units in the spans."""
        b, panel, zero = self.b, self.panel, self.b.value(0)
        count = self._take_rows(t, spans)
        for m in self.layout.matmuls:
            panel.find(m, t, zero, count, zero)
        with b.loop(*spans) as span, b.loop(0, count, PANEL) as first:
            last = b.smin(first + PANEL, count)
            for m in self.layout.matmuls:
                panel.multiply(m, t, span, first, last)
            with b.loop(first, last) as place:
                self._row(t, place, first, span)

    @contextmanager
    def _pieces(self, t: Value, left: Variable) -> Iterator[Spans]:
        """Does the step by its body, which gets spans: all at once, or, if threads split the units,
        piece by piece. Then no thread starts step t + 1 before all pieces of step t are done.
        """
        b, arg, split, (_, part, parts) = self.b, self.arg, self.split, self.b.args
        stride = arg["workspace_stride"]
        piece = b.variable(part)
        for variable, value in zip(self._spans, self._own, strict=True):
            variable.value = value
        with b.repeat() as again:
            mine = b.variable(constant(1, "i1"))
            with b.when(split):
                word = b.gep(arg["workspace"], piece.value * stride, "i8")
                mine.value = b.atomic_turn(word, t, t + 1)
            with b.when(mine.value):
                first, last = (variable.value for variable in self._spans)
                yield first, last
                with b.when(split):
                    b.atomic_add(arg["done"], 1)
            piece.value = b.value(-1)
            with b.when(split):
                meet = b.load(b.gep(arg["gang"], 4, "i64"), "ptr")
                piece.value = b.call(
                    meet, arg["gang"], arg["done"], arg["workspace"], stride, t, part, parts,
                    returns="i64",
                )  # fmt: skip
                with b.when(piece.value >= 0):
                    for variable, end in zip(self._spans, (0, 1), strict=True):
                        variable.value = self._share(piece.value + end)
            again(piece.value >= 0)
        left.value = b.zext(piece.value < -1, "i64")

    def _take_rows(self, t: Value, spans: Spans | None) -> Value:
        """Lists and counts the rows of this thread that take step t: backward all rows; forward the
        unmasked rows, because the states of masked rows are held at once, in the spans or whole.
        """
        b, rows, group = self.b, self.rows, self.arg["row_group"]
        count = b.variable(0)

        def take(row: Value) -> None:
            place = count.value
            b.store(row, b.gep(self.panel.taken, place, "i64"))
            count.value = place + 1

        def take_or_hold(row: Value) -> None:
            at = RowAt(t, row)
            with b.when(rows.flagged("mask", at, unequal=False)) as otherwise:
                if spans is None:
                    rows.hold(at, None)
                else:
                    with b.loop(*spans) as span:
                        rows.hold(at, span)
            with otherwise:
                take(row)

        with b.loop(*self.groups) as n:
            begin = n * group
            with b.loop(begin, b.smin(begin + group, self.arg["batch"])) as row:
                (take if self.layout.backward else take_or_hold)(row)
        return count.value

    def _stages(self, t: Value, first: Value, last: Value) -> None:
        """A step of a panel of rows, stage by stage."""
        b, layout, panel = self.b, self.layout, self.panel
        for stage, begin in enumerate(layout.stages):
            inside = t < self.arg["steps"]
            with b.when(inside if stage else constant(1, "i1")):
                for m in layout.matmuls:
                    opens = m.linear.name in layout.passes[begin].matmuls
                    if opens or (stage == 0 and m.state is not None):
                        panel.find(m, t, first, last, first)
                        panel.multiply(m, t, None, first, last)
                with b.loop(first, last) as place:
                    self._row(t, place, first, None, stage)

    def _row(
        self, t: Value, place: Value, first: Value, span: Value | None, stage: int = 0
    ) -> None:
        """The work on one row: on the units of one span, or one stage of it on all of them."""
        b, rows, backward = self.b, self.rows, self.layout.backward
        at = RowAt(t, self.panel.row(place))
        group = at.row
        if backward and self.layout.cell.params:
            group = b.udiv(at.row, self.arg["row_group"])
        results, scratch = self.panel.results_of(place, first), self.panel.scratch_of(place, first)
        task = Task(at, span, results, scratch, group, constant(0, "i1"))
        if not backward or stage:
            self._row_step(task, stage)
            return
        with b.when(t > 0), b.when(rows.flagged("resets", RowAt(t - 1, at.row))):
            rows.divert_reset(task)
        with b.when(t < self.arg["steps"]) as otherwise:
            self._row_step(task, stage)
        with otherwise:
            rows.hand_on(task)

    def _row_step(self, task: Task, stage: int) -> None:
        b, rows = self.b, self.rows
        task = task._replace(reset=rows.flagged("resets", task.at))
        if not self.layout.backward:
            self.step.print(task, stage)
            return
        # A masked step only passes gradients on.
        with b.when(rows.flagged("mask", task.at, unequal=False)) as otherwise:
            if stage == len(self.layout.stages) - 1:
                rows.hold_gradients(task)
        with otherwise:
            self.step.print(task, stage)
