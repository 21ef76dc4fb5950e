"""Choices that devices have refused, so that each is asked once.

``capacity`` says what ought to fit. The compiler and the driver know better: a kernel may spill,
take more shared memory than there is, or have more programs than can run at once because other
processes use a part of the device. Then its launch raises ``Refused`` before any of it has run. The
refusal is remembered here, and the pass starts again with the next choice. A pass changes none of
its arguments, so the first attempt leaves no trace.
"""

from __future__ import annotations

from typing import NamedTuple

from anycell.engines.gpu.capacity import Choice, Device
from anycell.engines.gpu.text import Printed, Variant
from anycell.plan import Plan


class Refused(RuntimeError):
    """A kernel cannot run on this device; no part of it has run.

    Attributes:
        why: in words.
        programs: the least number of programs for which this holds; 0 for any.
    """

    def __init__(self, kernel: Printed, why: str, programs: int = 0) -> None:
        super().__init__(f"kernel {kernel.name} cannot run on this device: {why}.")
        self.why, self.programs = why, programs


class Refusal(NamedTuple):
    """A refusal as it is remembered.

    Attributes:
        device: the device that has refused.
        plan, variant, choice: what the kernel was printed for.
        instead: the choice that takes its place.
        why, programs: as in ``Refused``.
    """

    device: Device
    plan: Plan
    variant: Variant
    choice: Choice
    instead: Choice | None
    why: str
    programs: int

    def __str__(self) -> str:
        text = f"{self.device.name} refused {self.choice}, {self.variant.way}: {self.why}"
        return text if self.instead is None else f"{text}; next comes {self.instead}"


_remembered: dict[tuple[Device, Printed], Refusal] = {}


def remember(kernel: Printed, refusal: Refusal) -> None:
    """Remembers a refusal; of several refusals of a kernel, the one of fewest programs counts."""
    before = _remembered.get((refusal.device, kernel))
    if before is None or refusal.programs < before.programs:
        _remembered[refusal.device, kernel] = refusal


def refuses(device: Device | None, kernel: Printed, programs: int) -> bool:
    """Whether a device has refused to run this many programs of a kernel, or fewer."""
    refusal = _remembered.get((device, kernel)) if device and _remembered else None
    return refusal is not None and refusal.programs <= programs


def of_plan(plan: Plan) -> list[Refusal]:
    """The refused choices of a plan, in the order in which they were tried."""
    return [refusal for refusal in _remembered.values() if refusal.plan == plan]


def forget() -> None:
    """Forgets all refusals, so that devices are asked again."""
    _remembered.clear()
