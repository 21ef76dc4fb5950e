"""Runs tier 3: step after step the kernels, and the framework's matmuls between them.

Launches and matmuls use memory that is kept here: the table that kernels read (see ``step``),
weights, and what matmuls read and write. A call begins by loading these: a few launches fill the
table; the operands of the first step are copied, and for graphs also the weights. Steps copy
nothing. So a graph of some steps serves all calls of a form, whatever their arrays and length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anycell.engines.gpu.launch import Launch
from anycell.engines.gpu.step import (
    DONE,
    FILLED,
    Step,
    multiplied,
    print_advance,
    print_fill,
    staged,
)
from anycell.engines.gpu.text import NUMBERS
from anycell.engines.gpu.work import Work, grid
from anycell.lang.cell import Linear

Array = Any
# Steps of the graphs that a framework may capture, the longest first. Chunks of time consist of
# these; the steps that are left over are launched one by one.
BLOCKS = (64, 16)


def arguments(kernels: Step, work: Work) -> tuple[dict[str, int], list[int]]:
    """The numbers that launches of a call take, by name, and what the table holds, by place. Calls
    that differ in the numbers need launches of their own.
    """
    values = work._replace(draws=None).all_values()  # each draw has its place in the table
    values |= {DONE: 0} | {f"draws{n}": number for n, number in enumerate(work.draws or ())}
    table, odd = [], 0
    for name, kind in kernels.table:
        number = values[name]
        if kind[0] == "*":
            size = 1 if kind == "*u8" else NUMBERS[kind[1:]].bytes
            number = work.host.pointer(number) + values.get(f"{name}__0", 0) * size
            odd |= kind != "*u8" and number % 16 > 0
        table.append((number + (1 << 63)) % (1 << 64) - (1 << 63))
    values["odd"] = int(odd)
    names = {name for kernel in kernels.all for name, kind in kernel.arguments if kind == "i64"}
    return {name: values[name] for name in sorted(names)}, table


def anew(_: str, make: Callable[..., Array], *shape: Any) -> Array:
    """Makes memory for one call."""
    return make(*shape)


class Steps:
    """The steps of calls of one form on one stream: of the same kernels and ``numbers``.

    Args:
        work: one of the calls; its weights are used without a copy if ``memory`` is ``anew``.
        memory: makes an array from a name, a function and its arguments. Several forms may share
            arrays, since no call needs what another call has left there.
    """

    def __init__(
        self,
        kernels: Step,
        work: Work,
        numbers: Mapping[str, int],
        memory: Callable[..., Array] = anew,
    ) -> None:
        host, plan, variant = work.host, work.plan, work.variant
        self.host, self.variant = host, variant
        places = -(-len(kernels.table) // FILLED) * FILLED
        self.table = memory("table", host.table, places)
        values: dict[str, Any] = {**numbers, "table": self.table}
        self.weights: list[tuple[int, Array]] = []  # copies
        # Operands of the first step: each matmul, and the array that it reads.
        self.begins: list[tuple[Linear, Array]] = []
        multiply: dict[int, Callable[[], None]] = {}
        for k, l in enumerate(plan.cell.linears):
            if not multiplied(plan, variant, l):
                continue
            into, out = plan.sizes[l.in_size], len(l.outputs) * plan.sizes[l.out_size]
            names, widths = (f"operand{k}", f"product{k}"), (into, out)
            if variant.backward:
                names, widths = (f"outputs{k}", f"back{k}"), (out, into)
            for name, width, wide in zip(names, widths, (False, True), strict=True):
                heads = () if l.heads == 1 else (l.heads,)
                shape = (*heads, work.batch, width // l.heads)
                values[name] = memory(name, host.empty, shape, wide)
            left, result = (values[name] for name in names)
            weight = work.weights[k]
            if memory is not anew:
                weight = memory(f"weight{k}", host.empty, tuple(weight.shape), False)
                self.weights.append((k, weight))
            right = weight if variant.backward else weight.mT
            multiply[k] = functools.partial(host.matmul, left, right, result)
            if not variant.backward and not staged(plan, variant, l):
                self.begins.append((l, left))
        launch_of = {
            kernel: Launch(kernel, values, grid(kernel, plan, work.batch), host)
            for kernel in kernels.all
        }
        self.step: list[Callable[[int], None]] = []
        for stage in kernels.stages:
            self.step += [_at_any_step(multiply.pop(k)) for k in stage.matmuls]
            self.step += [launch_of[kernel] for kernel in stage.kernels]
        self.step += map(_at_any_step, multiply.values())  # of what this step hands to the next
        self.last = [launch_of[kernel] for kernel in kernels.close]
        self.count = Launch(print_advance(), values, (1, 1), host)
        self.launches = [*launch_of.values(), self.count]

    def load(self, work: Work, table: Sequence[int]) -> None:
        """Begins a call: loads the table, the weights, and what the first step multiplies."""
        for first in range(0, len(table), FILLED):
            part = [*table[first : first + FILLED], *[0] * FILLED][:FILLED]
            values = {f"value{n}": number for n, number in enumerate(part)}
            values |= {"table": self.table, "first": first}
            Launch(print_fill(), values, (1, 1), self.host)(0)
        for k, weight in self.weights:
            weight[:] = work.weights[k]
        for l, left in self.begins:
            (name,), size = l.operand.attrs, left.shape[-1] * l.heads
            first = name == work.plan.cell.state_names[0]
            state = work.spans["hidden" if first else f"sequence {name}"].at(0, size)
            if l.heads > 1:
                state = self.host.by_head(state.reshape(work.batch, 1, size), l.heads)
            left[:] = state

    def run(self, count: int) -> None:
        """Runs the next steps; the table does not count them yet."""
        self._here()
        for t in range(count):
            for part in self.step:
                part(t)

    def advance(self, count: int) -> None:
        """Counts steps as done."""
        self._here()
        self.count(count)

    def close(self, count: int) -> None:
        """Ends a call, ``count`` steps after those that the table counts."""
        self._here()
        for launch in self.last:
            launch(count)

    def _here(self) -> None:
        """Moves launches to the current stream, which is another one while a graph is captured."""
        stream = self.host.stream()
        for launch in self.launches:
            launch.stream = stream


def _at_any_step(run: Callable[[], None]) -> Callable[[int], None]:
    return lambda _: run()


def run_plainly(kernels: Step, work: Work) -> None:
    """Runs a call, launch by launch."""
    numbers, table = arguments(kernels, work)
    steps = Steps(kernels, work, numbers)
    steps.load(work, table)
    steps.run(work.steps)
    steps.close(work.steps)
