"""The GPU engine: plans as Triton kernels, on arrays of any framework.

It takes arrays whose addresses a ``DeviceArrays`` knows, shapes and a stream. It imports no
framework; Triton is imported when the first kernel is built. ``anycell/layer/gpu.py`` makes layers
of it.

Three tiers, chosen by ``capacity``:

- tier 3 (``step``, ``steps``): one step per launch, between matmuls of the framework; any cell, any
  size;
- tier 1 (``resident``): one launch per sequence, all weights on chip; small hidden sizes;
- tier 2 (``cooperative``): one launch per sequence, the weights spread on chip over many programs,
  which exchange h every step, and what else its matmuls multiply; large hidden sizes.
"""

from __future__ import annotations

from collections.abc import Iterator

from anycell.engines.gpu import capacity
from anycell.engines.gpu.arrays import DeviceArrays
from anycell.engines.gpu.capacity import Choice
from anycell.engines.gpu.cooperative import print_cooperative
from anycell.engines.gpu.refusals import Refused
from anycell.engines.gpu.resident import print_resident
from anycell.engines.gpu.step import print_step
from anycell.engines.gpu.steps import run_plainly
from anycell.engines.gpu.text import Printed, Variant
from anycell.engines.gpu.twins import print_twins
from anycell.engines.gpu.work import Span, Work, grid
from anycell.plan import Plan


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
        printed = print_cooperative(plan, variant, choice.part, choice.precision)
    else:
        printed = print_resident(plan, variant, choice.warps, choice.precision)
    return print_twins(printed) if choice.twins > 1 else printed


__all__ = [
    "Work",
    "Variant",
    "DeviceArrays",
    "Refused",
    "Span",
    "grid",
    "print_whole",
    "run_plainly",
    "sources",
]
