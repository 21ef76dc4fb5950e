"""Which tier runs a cell: a model of what fits on a device, a pure function of sizes.

Tier 1 holds every weight of a step in a multiprocessor's shared memory for the whole sequence, and
states, gates and their gradients in registers. So it is chosen where

- the weights, as padded tiles, and the operands of the matmuls fit in shared memory, and
- the float32 tiles that are alive at once fit in the registers of the threads.

Everything else runs on tier 3. The constants come from what the compiler reports for kernels
compiled ahead of time, and ``tests/test_gpu.py`` holds the model against it: they say that a kernel
fits, not that it is fast. No choice has been timed yet.
"""

from __future__ import annotations

from typing import NamedTuple

from anycell.engines.gpu.resident import LEAST
from anycell.engines.gpu.text import power_of_two
from anycell.plan import Plan


class Device(NamedTuple):
    """What the model knows of a device.

    Attributes:
        capability: 90 for an H100.
        shared: bytes of shared memory that one program may have.
        registers: of 32 bits, of a multiprocessor; a thread has at most 255.
        processors: multiprocessors.
    """

    name: str
    capability: int
    shared: int
    registers: int
    processors: int


DEVICES = (
    Device("A100", 80, 163 << 10, 1 << 16, 108),
    Device("RTX 4090", 89, 99 << 10, 1 << 16, 128),
    Device("H100", 90, 227 << 10, 1 << 16, 132),
    Device("H200", 90, 227 << 10, 1 << 16, 132),
    Device("B200", 100, 227 << 10, 1 << 16, 148),
)


class Choice(NamedTuple):
    """What runs, and why.

    Attributes:
        tier: 1 or 3.
        warps: of a program of tier 1, of 32 threads each.
        reason: in words.
    """

    tier: int
    warps: int
    reason: str


WARPS = (4, 8, 16)
# Numbers of tiles that a thread can hold beside addresses and temporaries. Dots of float32, which
# the matrix units do not do, take registers for their operands.
NUMBERS = {"float32": 64, "bfloat16": 160, "float16": 160}


def choose(
    plan: Plan, device: Device | None, backward: bool = False, tier: int | None = None
) -> Choice:
    """The tier for a plan; the two passes choose each for itself.

    Args:
        device: None, where kernels are interpreted, takes tier 3.
        tier: forces 1 or 3.

    Raises:
        ValueError: for a tier that is not there.
    """
    if tier not in (None, 1, 3):
        raise ValueError(f"tier={tier!r}; expected 1, 3 or None.")
    room, count = NUMBERS[plan.dtype], tiles(plan, backward)
    # A warp's part of a dot is eight units wide: more warps than that would all do the same.
    most = max(WARPS[0], _widest(plan) // 8)
    warps = next((w for w in WARPS if w <= most and count * _each(plan, w) <= room), 0)
    if tier is not None:
        return Choice(tier, warps or WARPS[-1], "asked for")
    if device is None:
        return Choice(3, 0, "no card")
    needed = shared_bytes(plan, backward)
    if needed > device.shared:
        reason = f"the weights of a step take {needed:,} bytes of {device.shared:,} on chip"
        return Choice(3, 0, reason)
    if not warps:
        return Choice(3, 0, f"{count} tiles of a step do not fit in registers")
    return Choice(1, warps, f"all weights on chip: {needed:,} of {device.shared:,} bytes")


def shared_bytes(plan: Plan, backward: bool) -> int:
    """Shared memory of a program of tier 1: weights, and operands on their way to the dots."""
    size = 4 if plan.dtype == "float32" else 2
    total = operands = 0
    for l in plan.cell.linears:
        out, into = (power_of_two(plan.sizes[s], LEAST) for s in (l.out_size, l.in_size))
        total += len(l.outputs) * out * into * size
        passing = len(l.outputs) * out if backward else into
        operands = max(operands, LEAST * max(passing, 2 * into) * size)
    return total + operands


def tiles(plan: Plan, backward: bool) -> int:
    """Tiles of rows times units that are alive at once in tier 1, by rule of thumb."""
    cell, states = plan.cell, 2 * len(plan.cell.states)
    if backward:
        sums = len(cell.params) + (cell.static is not None)
        return len(cell.gates) + len(plan.saved) + sums + states + 4
    apart = len(cell.gates) - len(cell.fused)  # gates whose two projections are two values
    return 2 * len(cell.gates) + apart + len(cell.params) + states + 4


def _each(plan: Plan, warps: int) -> int:
    """Units of a tile for each thread."""
    return -(-LEAST * _widest(plan) // (32 * warps))


def _widest(plan: Plan) -> int:
    """Units of the widest tile."""
    return max(power_of_two(size, LEAST) for size in plan.sizes.values())


def table(plan: Plan) -> list[tuple[str, str, str]]:
    """Per device, and for both passes, the tier and why."""
    return [
        (device.name, "backward" if backward else "forward", f"tier {c.tier}: {c.reason}")
        for device in DEVICES
        for backward in (False, True)
        for c in [choose(plan, device, backward)]
    ]


__all__ = ["DEVICES", "Choice", "Device", "choose", "shared_bytes", "table", "tiles"]
