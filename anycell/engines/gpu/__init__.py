"""The GPU engine: plans as Triton kernels, on arrays of any framework.

It takes arrays whose addresses a ``GpuHost`` knows, shapes and a stream, and imports no framework;
Triton is imported when the first kernel is built. ``anycell/layer/gpu.py`` makes layers of it.

Three tiers, chosen by ``capacity``:

- tier 3 (``step``, ``steps``): one step per launch, between matmuls of the framework; any cell, any
  size;
- tier 1 (``resident``): one launch per sequence, all weights on chip; small hidden sizes;
- tier 2 (``cooperative``): one launch per sequence, the weights spread on chip over many programs,
  which exchange h every step; large hidden sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from anycell.engines.gpu import capacity
from anycell.engines.gpu.capacity import Choice, Device
from anycell.engines.gpu.cooperative import print_cooperative
from anycell.engines.gpu.launch import Launch
from anycell.engines.gpu.refusals import Refused
from anycell.engines.gpu.resident import print_resident
from anycell.engines.gpu.step import Step, print_step
from anycell.engines.gpu.steps import run_plainly
from anycell.engines.gpu.text import Printed, Variant, symbol
from anycell.plan import Plan

Array = Any


class GpuHost(Protocol):
    """The operations of a framework that the engine needs, on arrays of a device.

    Arrays slice and assign as NumPy's do (``a[i:j] = b`` rounds to the dtype of ``a``), and have
    ``shape``, ``reshape`` and ``mT``. ``wide`` arrays are float32, others of the plan's dtype.

    Attributes:
        dtype: the framework's dtype for the plan.
        wide_states: False: states are kept in the plan's dtype, and only at borders in float32.
        ordinal: the number of the device in CUDA.
        tf32: whether matmuls may round float32 operands to 19 bits.
        limits: the device's properties for ``capacity``; None if kernels are interpreted.
        tier: forces a tier; None lets ``capacity`` choose.
        replay: runs a call of tier 3 like ``steps.run_plainly``, but from captured graphs of
            launches. None launches step by step.
        trouble: an int32 in memory that host and device both reach; kernels of tier 2 set it when
            their programs give up waiting for one another.
        patience: the nanoseconds after which a program gives up.
    """

    wide_states: bool
    dtype: Any
    ordinal: int
    tf32: bool
    limits: Device | None
    tier: int | None
    replay: Callable[[Step, Work], None] | None
    trouble: Array
    patience: int

    def stream(self) -> int:
        """CUDA's handle of the current stream; 0 for the default stream."""
        ...

    def empty(self, shape: tuple[int, ...], wide: bool = False) -> Array: ...

    def zeros(self, shape: tuple[int, ...], wide: bool = False) -> Array: ...

    def rounded(self, array: Array) -> Array:
        """The array in the plan's dtype, contiguous; the array itself if it is so already."""
        ...

    def numbers(self, values: Sequence[float]) -> Array:
        """A float32 array on the device."""
        ...

    def integers(self, values: Sequence[int]) -> Array:
        """An int64 array on the device; values are taken modulo 2**64."""
        ...

    def flags(self, count: int) -> Array:
        """An array of ``count`` zeros, int32."""
        ...

    def table(self, count: int) -> Array:
        """An array of ``count`` int64, which need not be initialized."""
        ...

    # What ``anycell.layer.contract`` needs: see ``anycell.layer.Arrays``.

    def fit(self, array: Array, layout: int, wide: bool = False) -> Array | None: ...

    def layout(self, arrays: Mapping[Any, Array]) -> tuple[Any, ...]: ...

    def as_flags(self, array: Array) -> Array | None: ...

    def pointer(self, array: Array) -> int: ...

    def strides(self, array: Array) -> tuple[int, ...]:
        """The strides in elements."""
        ...

    def matmul(self, a: Array, b: Array, out: Array) -> None:
        """``out = a @ b`` for (batches of) matrices of any strides; ``out`` may be wide."""
        ...

    def matmul_add(self, a: Array, b: Array, out: Array) -> None:
        """``out += a @ b``, likewise."""
        ...

    def summed(self, array: Array) -> Array:
        """The sum of the rows of a matrix: wide, and never rounded on the way."""
        ...

    def by_head(self, array: Array, heads: int) -> Array:
        """``[B, outputs, heads * size]`` as ``[heads, B, outputs * size]``."""
        ...

    def masked(self, x: Array, mask: Array) -> Array:
        """A copy of ``x [T, B, I]`` with 0 where ``mask [T, B]`` is 0, even in place of NaN."""
        ...


class Span(NamedTuple):
    """An array over time: the index of its first step, and which way time goes."""

    array: Array
    first: int
    sign: int
    column: int = 0

    def at(self, t: int, width: int) -> Array:
        """``[B, width]`` of step t."""
        return self.array[self.first + self.sign * t, :, self.column : self.column + width]

    def over(self, begin: int, steps: int, width: int) -> Array:
        """``[steps, B, width]`` from step ``begin`` on, in order of the array."""
        first = self.first + self.sign * begin
        first = min(first, first + self.sign * (steps - 1))
        return self.array[first : first + steps, :, self.column : self.column + width]

    def values(self, name: str, host: GpuHost) -> dict[str, Any]:
        """The arguments of kernels for this array."""
        time, row = host.strides(self.array)[:2]
        start = self.first * time + self.column
        arguments = {name: self.array, f"{name}__0": start, f"{name}__t": self.sign * time}
        return {**arguments, f"{name}__b": row}


class Work(NamedTuple):
    """A call of a step's kernels over some steps.

    Attributes:
        host: the framework's arrays.
        values: what kernels take besides spans.
        spans: arrays over time, by name.
        draws: for random masks: seed, stream, time of the first step, time per step.
        weights: per matmul ``[outputs * out, in]`` or ``[heads, outputs * out / heads,
            in / heads]``, of the outputs that the cell uses.
    """

    host: GpuHost
    plan: Plan
    variant: Variant
    values: dict[str, Any]
    spans: Mapping[str, Span]
    weights: Sequence[Array]
    batch: int
    steps: int
    draws: tuple[int, int, int, int] | None = None

    def all_values(self) -> dict[str, Any]:
        """All values, by name of the argument."""
        arguments = dict(self.values, batch=self.batch, count=self.steps)
        arguments |= {f"weight{k}": weight for k, weight in enumerate(self.weights)}
        if self.draws is not None:
            arguments["draws"] = self.host.integers(self.draws)
        for name, span in self.spans.items():
            arguments |= span.values(name, self.host)
        return {symbol(name): value for name, value in arguments.items()}

    def part(self, begin: int, steps: int, turn: int) -> Work:
        """The call of some of the steps, after ``turn`` turns."""
        spans = {n: s._replace(first=s.first + s.sign * begin) for n, s in self.spans.items()}
        draws = self.draws
        if draws is not None:
            draws = (*draws[:2], draws[2] + begin * draws[3], draws[3])
        values = {**self.values, "turn": turn}
        if "done" in values:
            values["done"] += begin
        return self._replace(values=values, spans=spans, steps=steps, draws=draws)

    def launch(self, printed: Printed, values: Mapping[str, Any]) -> Launch:
        """A kernel, ready to start."""
        return Launch(printed, values, grid(printed, self.plan, self.batch), self.host)


def grid(printed: Printed, plan: Plan, batch: int) -> tuple[int, int]:
    """Programs of a kernel: tiles of the rows, tiles of the units."""
    rows, lanes = printed.tile
    return -(-batch // rows), -(-plan.sizes[printed.size] // lanes)


def run(kernels: Step | Printed, work: Work) -> int:
    """Runs a call; returns by how many turns the buffers that take turns have moved on."""
    if isinstance(kernels, Printed):
        if kernels.cooperative and work.host.limits is None:
            return _run_interpreted(kernels, work)
        work.launch(kernels, work.all_values())(0)
        return 1
    (work.host.replay or run_plainly)(kernels, work)
    return work.steps + work.variant.backward


def _run_interpreted(kernel: Printed, work: Work) -> int:
    """Runs tier 2 with one step per launch: the interpreter runs one program after the other, so
    none may wait for a later one. The last launch collects what the last step owes.
    """
    for t in range(work.steps + work.variant.backward):
        part = work.part(t, int(t < work.steps), work.values["turn"] + t)
        part.values.update(behind=int(t > 0), close=int(t == work.steps))
        part.launch(kernel, part.all_values())(0)
    return work.steps + work.variant.backward


def sources(plan: Plan, backward: bool) -> Iterator[str]:
    """Yields the texts of a plan's kernels, for training without masks; they are for reading.

    First come the kernels of tier 3, then those of other tiers if any card has room for them.
    """
    cards = capacity.DEVICES
    for passes in (False, True)[: 1 + backward]:
        variant = Variant.training(plan.cell, passes)
        for stage in print_step(plan, variant).stages:
            yield from (kernel.source for kernel in stage.kernels)
        choices = [capacity.choose(plan, card, passes) for card in cards]
        for tier in (1, 2):
            choice = next((c for c in choices if c.tier == tier), None)
            if choice is not None:
                yield print_whole(plan, variant, choice).source


def print_whole(plan: Plan, variant: Variant, choice: Choice) -> Printed:
    """The kernel of all steps, in tier 1 or 2."""
    if choice.part is not None:
        return print_cooperative(plan, variant, choice.part, choice.precision)
    return print_resident(plan, variant, choice.warps, choice.precision)


__all__ = ["Work", "Variant", "GpuHost", "Refused", "Span", "grid", "print_whole", "run", "sources"]
