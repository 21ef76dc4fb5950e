"""A call of kernels over some steps, and its arrays over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from anycell.engines.gpu.arrays import Array, DeviceArrays
from anycell.engines.gpu.text import Printed, Variant, symbol
from anycell.plan import Plan


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

    def values(self, name: str, host: DeviceArrays) -> dict[str, Any]:
        """The arguments of kernels for this array."""
        time, row = host.strides(self.array)[:2]
        start = self.first * time + self.column
        arguments = {name: self.array, f"{name}__0": start, f"{name}__t": self.sign * time}
        return {**arguments, f"{name}__b": row}


class Work(NamedTuple):
    """A call of a step's kernels over some steps.

    Attributes:
        host: the framework's arrays, or a draft's, which have no addresses yet.
        values: what kernels take besides spans.
        spans: arrays over time, by name.
        draws: for random masks: seed, stream, time of the first step, time per step.
        weights: per matmul ``[outputs * out, in]`` or ``[heads, outputs * out / heads,
            in / heads]``, of the outputs that the cell uses.
    """

    host: Any
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


def grid(printed: Printed, plan: Plan, batch: int) -> tuple[int, int]:
    """Programs of a kernel: tiles of the rows, tiles of the units."""
    rows, lanes = printed.tile
    return -(-batch // rows), -(-plan.sizes[printed.size] // lanes)
