"""Chooses the tier that runs a cell, by a model of what fits on a device: a pure function of sizes.

docs/internals.md, "Which tier", has the rules. The constants come from what the compiler says for
kernels compiled ahead of time, and ``tests/engines/test_gpu.py`` checks the model against it. The
model says that a kernel fits, not that it is fast.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

from anycell.engines.gpu.cooperative import Slice, programs_of, refusal, shape, sums_of
from anycell.engines.gpu.resident import LEAST
from anycell.engines.gpu.rounds import Rounds, rounds_of
from anycell.engines.gpu.text import Variant, power_of_two
from anycell.lang.cell import Linear
from anycell.lang.expr import Expr
from anycell.plan import Plan, recurrent_masks


class Device(NamedTuple):
    """The properties of a device that the model knows.

    Attributes:
        capability: 90 for an H100.
        shared: bytes of shared memory that one program may have.
        registers: 32-bit registers of a multiprocessor; a thread has at most 255.
        processors: multiprocessors.
        compiler: the release of the Triton that compiles for it.
    """

    name: str
    capability: int
    shared: int
    registers: int
    processors: int
    compiler: tuple[int, ...] = (3, 9)


DEVICES = (
    Device("T4", 75, 64 << 10, 1 << 16, 40),
    Device("A100", 80, 163 << 10, 1 << 16, 108),
    Device("RTX 4090", 89, 99 << 10, 1 << 16, 128),
    Device("H100", 90, 227 << 10, 1 << 16, 132),
    Device("H200", 90, 227 << 10, 1 << 16, 132),
    Device("B200", 100, 227 << 10, 1 << 16, 148),
    Device("RTX 5090", 120, 99 << 10, 1 << 16, 170),
)


class Choice(NamedTuple):
    """A choice, and its reason.

    Attributes:
        tier: 1, 2 or 3.
        reason: in words.
        warps: of a program of tier 1, with 32 threads each.
        part: what a program of tier 2 owns.
        precision: how its dots multiply float32, see ``WEIGHT``.
        twins: passes of a launch, such as the directions of a layer.
    """

    tier: int
    reason: str
    warps: int = 0
    part: Slice | None = None
    precision: str = "ieee"
    twins: int = 1

    def __str__(self) -> str:
        if self.tier == 3:
            return "tier 3"
        how = f", float32 as {self.precision}" * (self.precision != "ieee")
        how += f", {self.twins} passes in a launch" * (self.twins > 1)
        if self.part is not None:
            p = self.part
            return (
                f"tier 2 of {p.rows} rows x {p.units} units, {p.warps} warps; chunks of {p.chunk}, "
                f"{p.held} of them in registers, {p.ahead} at once{how}"
            )
        return f"tier 1 of {self.warps} warps{how}"


WARPS = (4, 8, 16)
# Bytes that a float32 weight takes on chip, by how dots multiply it, in Triton's words:
# "ieee" by the threads, without the matrix units;
# "tf32" by the matrix units, from operands rounded to 19 bits, if the framework allows it;
# "bf16x6" by the matrix units, from three bfloat16 that add up to each operand, with the six of
# their products that are not negligible in float32: as exact as a sum in float32.
WEIGHT = {"ieee": 4, "tf32": 4, "bf16x6": 6}
MATRICES = 80  # capability from which Triton uses the matrix units
# Numbers of tiles that a thread can hold besides addresses and temporaries, forward and backward:
# for 16 bits, and for each way to multiply float32, whose operands take registers too.
NUMBERS = {"16": (144, 160), "ieee": (64, 64), "tf32": (112, 128), "bf16x6": (80, 76)}
# The most multiply-adds of a thread in "ieee" dots, which are unrolled: with more, kernels compile
# for minutes, and spill. The most units of such a dot's operand: with more, they spill at once.
UNROLLED = 1024
UNROLLED_UNITS = 64
# For tier 2: rows and units of the tiles; bytes that a thread loads of a chunk's row; numbers that
# a thread may hold, of which some spill; how many of these are left to the compiler, one after the
# other, if a device refuses slices that leave fewer.
ROWS, UNITS = (16, 32), (16, 32)
LOADED = 16
SLICE_NUMBERS = 216
SURE = 206  # with more numbers most slices spill: tier 2 is not offered if all slices have more
SUMS = 96  # sums of a thread, over its warp's share of k: with more every release of Triton spills
LEFT = (0, 32, 64)
# The most numbers of a tile of a cell that reduces whole rows, and forward the most chunks of its
# products of three bfloat16: with more, kernels spill.
REDUCED, REDUCED_CHUNKS = 512, 3
# Before release YOUNG of Triton, sums take twice the shared memory on their way to the gates, and a
# program spills if a thread has more than OLD_UNITS units of its tile.
YOUNG, OLD_UNITS = (3, 5), 2
PARTED = (3, 6)  # the first release that multiplies float32 as three bfloat16
# What a multiprocessor does in a cycle, by data sheets and published measurements of an H100: bytes
# from the second-level cache, for one multiprocessor and for all together, bytes of shared memory,
# multiply-adds of 16 bits. The cycles that a load from the second-level cache takes.
SECOND_LEVEL, TOGETHER, SHARED, MULTIPLIED = 64, 3000, 128, 1024
TRIP = 500
TRIED = 2  # the most slices that are tried of one tile, each after the one before is refused
TRIES = 4  # the most choices of a tier: each that a device refuses has cost a compilation
BATCH = 16  # the batch in explanations


@functools.lru_cache(maxsize=1024)
def choices(
    plan: Plan,
    device: Device | None,
    backward: bool = False,
    tier: int | None = None,
    batch: int = BATCH,
    tf32: bool = False,
    twins: int = 1,
) -> tuple[Choice, ...]:
    """The choices that may run a plan, the best first, and finally tier 3, which runs any plan: if
    the device refuses a choice, the next takes its place. Forward and backward pass have their own.

    Args:
        device: None, if kernels are interpreted, takes tier 3.
        tier: forces 1, 2 or 3.
        batch: rows.
        tf32: whether dots may round float32 operands to 19 bits.
        twins: how many such passes there are, which one launch should run.

    Raises:
        ValueError: for an unknown tier, or a forced tier that cannot run the cell.
    """
    if tier not in (None, 1, 2, 3):
        raise ValueError(f"tier={tier!r}; expected 1, 2, 3 or None.")
    if tier == 3 or (device is None and tier is None):
        return (Choice(3, "asked for" if tier else "no card"),)
    if plan.types.mixed and device and device.capability < MATRICES and tier is None:
        why = f"Triton has no matrix instructions of 16 bits before sm_{MATRICES}"
        return (Choice(3, f"{why}; the framework's matmuls may have them"),)
    fits, reasons = list[Choice](), list[str]()
    tiers: dict[int, Callable[[int], list[Choice] | str]] = {
        1: lambda _: _resident(plan, device, backward, tf32, forced=tier == 1),
        2: functools.partial(_cooperative, plan, device, backward, tf32, batch),
    }
    for number, choices_of in tiers.items():
        if tier in (None, number):
            apart = ""  # why the passes of twins do not fit in a launch
            for count in sorted({1, twins}, reverse=True):
                fitting = choices_of(count)
                if not isinstance(fitting, str):
                    fits += [
                        c._replace(reason=c.reason + apart, twins=count) for c in fitting[:TRIES]
                    ]
                elif count > 1:
                    apart = f"; its {twins} passes one after the other: {fitting}"
                else:
                    reasons.append(fitting)
    if tier is not None:
        if not fits:
            raise ValueError(f"tier={tier} cannot run cell {plan.cell.name}: {reasons[0]}.")
        return tuple(fits)
    return *fits, Choice(3, "; ".join(reasons) or "any cell, any size")


def choose(*given: Any, **named: Any) -> Choice:
    """The best of ``choices`` for the same arguments."""
    return choices(*given, **named)[0]


def precisions(plan: Plan, device: Device | None, tf32: bool) -> list[str]:
    """The precisions of dots, the best first; for 16 bits there is no choice."""
    if plan.types.mixed or device is None or device.capability < MATRICES:
        return ["ieee"]
    if tf32:
        return ["tf32"]
    return ["ieee", "bf16x6"] if device.compiler >= PARTED else ["ieee"]


def _resident(
    plan: Plan, device: Device | None, backward: bool, tf32: bool, forced: bool
) -> list[Choice] | str:
    """The choices of tier 1, the fewest warps first; or why there are none."""
    count = tiles(plan, backward)
    registers = device.registers if device else DEVICES[0].registers
    # A warp's part of a dot is eight units wide: warps beyond that would repeat the work of others.
    most = max(WARPS[0], _widest(plan) // 8)

    def fitting(precision: str) -> list[int]:
        kind = "16" if plan.types.mixed else precision
        matrices = kind in ("tf32", "bf16x6")  # whose parts of float32 take more registers
        least = min(WARPS[1], most) if matrices else WARPS[0]

        def room(warps: int) -> int:  # with 16 warps each thread has half of the registers
            return NUMBERS[kind][backward] * min(256, registers // (32 * warps)) // 256

        return [
            w
            for w in WARPS
            if least <= w <= most
            and count * _each(plan, w) <= room(w)
            and (kind != "ieee" or _unrollable(plan, w))
        ]

    if forced or device is None:
        (precision, *_) = ways = precisions(plan, device, tf32)
        any_ = [(p, w) for p in ways for w in fitting(p)] or [(precision, WARPS[-1])]
        return [Choice(1, "asked for", w, precision=p) for p, w in any_]
    fits, reason = list[Choice](), ""
    for precision in precisions(plan, device, tf32):
        needed, warps = shared_bytes(plan, backward, precision), fitting(precision)
        if needed > device.shared:
            reason = f"the weights of a step take {needed:,} bytes of {device.shared:,} on chip"
        elif not warps:
            reason = reason or f"{count} tiles of a step do not fit in registers"
        else:
            why = f"all weights on chip: {needed:,} of {device.shared:,} bytes"
            fits += [Choice(1, why, w, precision=precision) for w in warps]
    return fits or reason


def _cooperative(
    plan: Plan, device: Device | None, backward: bool, tf32: bool, batch: int, twins: int
) -> list[Choice] | str:
    """The choices of tier 2 that fit, what should be fastest first; or why there are none."""
    why = refusal(plan)
    if why is not None:
        return why
    if device is None:
        return [Choice(2, "asked for", part=Slice(LEAST, LEAST, 2 * LEAST, 1, 2, 1))]
    precision = precisions(plan, device, tf32)[-1]
    if not plan.types.mixed and precision == "ieee":
        return "float32 is multiplied outside the matrix units"
    least, priced = 0, list[tuple[float, Choice]]()
    for rows, units in itertools.product(ROWS, UNITS):
        groups, programs = -(-batch // rows), programs_of(plan, units)
        count = twins * groups * programs
        parts = list(_parts(plan, device, rows, units, count, backward, precision))
        if parts:
            least = min(least or count, count)
        for part in parts if count <= device.processors else ():
            passes = f"{twins} x " * (twins > 1)
            reason = (
                f"{passes}{groups} x {programs} programs, of {rows} rows and {units} units each; "
                f"on chip: {slice_bytes(plan, part, backward, precision, device.compiler):,} of "
                f"{device.shared:,} bytes"
            )
            choice = Choice(2, reason, part=part, precision=precision)
            priced.append((cycles(plan, part, count, backward), choice))
    if priced:
        ordered = dict.fromkeys(choice for _, choice in sorted(priced, key=lambda pair: pair[0]))
        fits = _few(ordered)[:TRIES]
        parts = [choice.part for choice in fits if choice.part]
        numbers = min(slice_numbers(plan, part, backward) for part in parts)
        if numbers <= SURE:
            return fits
        return f"each thread of a program would hold {numbers} numbers, and spill"
    if not least:
        return "nor do the weights of a few units fit"
    return f"{batch} rows take {least} programs, of which {device.processors} run at once"


def _few(ordered: Iterable[Choice]) -> list[Choice]:
    """The best choices of each tile: if they are refused, others of the tile hardly fit."""
    tried = Counter[tuple[int, int]]()
    chosen = list[Choice]()
    for choice in ordered:
        if choice.part is not None and tried[choice.part[:2]] < TRIED:
            tried[choice.part[:2]] += 1
            chosen.append(choice)
    return chosen


def _parts(
    plan: Plan, device: Device, rows: int, units: int, programs: int, backward: bool, precision: str
) -> Iterator[Slice]:
    """The slices of a tile that are fastest by ``cycles``, for each number of warps, with all
    registers and with fewer.

    Products of three bfloat16 need 16 rows, eight warps or more, one chunk at a time and no weights
    in registers, and forward beside numbers of whole rows few chunks: otherwise kernels spill.
    """
    parted = precision == "bf16x6"
    if not plan.types.mixed and rows > (ROWS[0] if parted else ROWS[1]):
        return
    widest = max(product.columns for product in _products(plan, units, backward))
    if rows * widest > 32 * SUMS:
        return
    if rows * units > REDUCED and _numbers(plan, backward):
        return
    warps_of: tuple[int, ...] = WARPS[1::-1]
    if parted:  # with 16 warps a thread has too few registers for numbers of whole rows
        warps_of = WARPS[1:2] if _numbers(plan, backward) else WARPS[1:]
    ways = itertools.product(warps_of, LEFT[:1] if parted else LEFT)
    for warps, left in ways:
        if device.compiler < YOUNG and rows * units > 32 * warps * OLD_UNITS:
            continue
        chunk = warps * 4 * LOADED // plan.itemsize
        chunks = max(p.chunks(chunk) for p in _products(plan, units, backward))
        if parted and chunks > REDUCED_CHUNKS and not backward and _numbers(plan, backward):
            continue
        fitting = list[Slice]()
        for ahead in range(1, 2 if parted else chunks + 1):
            # Weights in registers need no shared memory: hold as many as there is room for.
            part = Slice(rows, units, chunk, ahead, warps, 0)
            room = SLICE_NUMBERS - left - slice_numbers(plan, part, backward)
            part = part._replace(held=0 if parted else _holding(plan, part, backward, room))
            needed = slice_bytes(plan, part, backward, precision, device.compiler)
            if room >= 0 and needed <= device.shared:
                fitting.append(part)
        if fitting:
            yield min(fitting, key=lambda part: cycles(plan, part, programs, backward))


class _Product(NamedTuple):
    """The matmuls of one operand: forward of a vector, backward of the gradients of outputs.

    Attributes:
        depth: the length of k.
        columns: of a slice's units, of all its matmuls.
    """

    depth: int
    columns: int

    def chunks(self, size: int) -> int:
        """Counts the chunks of k."""
        return -(-self.depth // size)

    def weights(self, part: Slice, begin: int, end: int) -> int:
        """Counts the weights of some chunks."""
        chunks = min(end, self.chunks(part.chunk)) - begin
        return max(0, chunks) * part.chunk * self.columns


@functools.lru_cache(maxsize=1024)
def _products(plan: Plan, units: int, backward: bool) -> tuple[_Product, ...]:
    """The products of a step, for slices of that many units."""
    found = dict[Expr | str, _Product]()
    for l in plan.cell.linears:
        depth, columns = shape(plan, l, units, backward)
        key = l.name if backward else l.operand
        others = found[key].columns if key in found else 0
        found[key] = _Product(depth, others + columns)
    return (*found.values(),)


def _held(plan: Plan, part: Slice, backward: bool) -> int:
    """Registers of a thread for weights."""
    held = sum(p.weights(part, 0, part.held) for p in _products(plan, part.units, backward))
    return held * plan.itemsize // (4 * 32 * part.warps)


def _holding(plan: Plan, part: Slice, backward: bool, room: int) -> int:
    """The most chunks of weights that the room in registers can hold."""
    products, held = _products(plan, part.units, backward), 0
    for chunks in sorted({p.chunks(part.chunk) for p in products}):
        # Products with fewer chunks are held already.
        columns = sum(p.columns for p in products if p.chunks(part.chunk) >= chunks)
        of_one = columns * LOADED * 4 // 128
        more = max(0, min(chunks - held, room // of_one))
        held, room = held + more, room - more * of_one
        if held < chunks:
            break
    return held


def cycles(plan: Plan, part: Slice, programs: int, backward: bool) -> float:
    """Estimated cycles of a multiprocessor for a step, without what all slices have in common:
    a key to order slices by.
    """
    trips = arriving = shared = multiplied = 0
    for p in _products(plan, part.units, backward):
        chunks = p.chunks(part.chunk)
        trips += -(-chunks // part.ahead)
        arriving += part.rows * p.depth * plan.itemsize
        shared += p.weights(part, part.held, chunks) * plan.itemsize
        shared += 2 * part.warps * part.rows * p.columns * 4  # sums
        multiplied += part.rows * p.columns * p.depth
    arriving += len(_numbers(plan, backward)) * part.rows * -(-plan.hidden_size // part.units) * 4
    return (
        trips * TRIP
        + max(arriving / SECOND_LEVEL, programs * arriving / TOGETHER)
        + shared / SHARED
        + multiplied * plan.itemsize / 2 / MULTIPLIED
    )


def slice_numbers(plan: Plan, part: Slice, backward: bool) -> int:
    """Registers of a thread of tier 2, without addresses and temporaries: the weights, and the
    larger of two sets: what arrives, the sums and what is carried; or the tiles of the cell.
    """
    widest = max(product.columns for product in _products(plan, part.units, backward))
    sums = part.rows * widest // 32 * sums_of(part.rows, widest)
    held = _held(plan, part, backward)
    arriving = part.ahead * part.rows * LOADED * 4 // 128
    # What is carried from step to step; what the next step reads is already loaded.
    cell = plan.cell
    carried = len(plan.saved) + len(cell.states) if backward else len(cell.gates)
    carried += (cell.static is not None) + recurrent_masks(plan)
    # A parameter, the sum of its gradient and what a step adds to that.
    carried += 3 * len(cell.params) * backward
    carried += len(cell.states) + 4 * bool(cell.keeps)  # words of random bits
    # What inner matmuls need besides, by the compiler's reports: addresses, backward those of what
    # they multiplied too, and values that outlive their products.
    carried += len(_rounds(plan, backward).matmuls) * (10 if backward else 2)
    copies = -(-part.rows * part.units // (32 * part.warps))
    carried *= copies
    # Of whole rows: results of reductions, and those that are saved.
    rows = len(_numbers(plan, backward)) + len(plan.saved_rows)
    rows *= -(-part.rows // (4 * part.warps))
    return held + max(sums + arriving + carried, tiles(plan, backward) * copies + rows)


def _rounds(plan: Plan, backward: bool) -> Rounds:
    """The rounds of programs of tier 2 in training."""
    return rounds_of(plan, Variant.training(plan.cell, backward))


def _numbers(plan: Plan, backward: bool) -> Collection[Expr]:
    """The numbers that programs of tier 2 exchange for row reductions."""
    return _rounds(plan, backward).numbers


def slice_bytes(
    plan: Plan,
    part: Slice,
    backward: bool,
    precision: str = "ieee",
    compiler: tuple[int, ...] = YOUNG,
) -> int:
    """Shared memory of a program of tier 2: weights that threads do not hold, and sums on their way
    to the gates.
    """
    products = _products(plan, part.units, backward)
    weights = sum(p.weights(part, part.held, p.depth) for p in products)
    weights *= _weight_bytes(plan, precision)
    outputs = (
        1 if backward else 1 << max(len(l.outputs) for l in plan.cell.linears).bit_length() - 1
    )
    sums = part.warps * part.rows * part.units * outputs * 4
    return weights + (sums if compiler >= YOUNG else 2 * sums)


def shared_bytes(plan: Plan, backward: bool, precision: str = "ieee") -> int:
    """Shared memory of a program of tier 1: weights, and operands on their way to the dots."""
    size = _weight_bytes(plan, precision)
    total = operands = 0
    for l in plan.cell.linears:
        out, into = _padded(plan, l)
        total += len(l.outputs) * out * into * size
        passing = len(l.outputs) * out if backward else into
        operands = max(operands, LEAST * max(passing, 2 * into) * size)
    return total + operands


def _padded(plan: Plan, l: Linear) -> list[int]:
    """Units of the tiles of tier 1 for a matmul's output and its operand."""
    return [power_of_two(plan.sizes[size], LEAST) for size in (l.out_size, l.in_size)]


def _weight_bytes(plan: Plan, precision: str) -> int:
    """Bytes of one weight on chip."""
    return plan.types.operands.bytes if plan.types.mixed else WEIGHT[precision]


def tiles(plan: Plan, backward: bool) -> int:
    """Tiles of rows times units that are alive at once in tier 1, by rule of thumb."""
    cell, states = plan.cell, 2 * len(plan.cell.states)
    if backward:
        sums = len(cell.params) + (cell.static is not None)
        saved = len(plan.saved) + len(plan.saved_rows) // 2
        return len(cell.gates) + saved + sums + states + 4
    apart = len(cell.gates) - len(cell.fused)  # gates whose two projections are two values
    words = 4 * bool(cell.keeps)  # of random bits, which are drawn at once
    return 2 * len(cell.gates) + apart + len(cell.params) + states + words + 4


def _unrollable(plan: Plan, warps: int) -> bool:
    """Whether the dots of float32 by the threads are short enough."""
    total = most = 0
    for l in plan.cell.linears:
        out, into = _padded(plan, l)
        total, most = total + len(l.outputs) * LEAST * out * into, max(most, out, into)
    return -(-total // (32 * warps)) <= UNROLLED and most <= UNROLLED_UNITS


def _each(plan: Plan, warps: int) -> int:
    """Numbers of a tile per thread. Warps beyond the width of a dot hold the same as others."""
    return -(-LEAST * _widest(plan) // (32 * min(warps, _widest(plan) // 8)))


def _widest(plan: Plan) -> int:
    """Units of the widest tile."""
    return max(power_of_two(size, LEAST) for size in plan.sizes.values())


def table(plan: Plan, batch: int = BATCH) -> list[tuple[str, str, str]]:
    """The tier and the reason, for each device and pass, and how two directions run."""
    lines = []
    for device, backward in itertools.product(DEVICES, (False, True)):
        one, two = (choose(plan, device, backward, batch=batch, twins=n) for n in (1, 2))
        how = two.reason.removeprefix(one.reason)  # why two are not one launch
        if two.twins > 1:
            how = "; both directions in a launch"
        way = "backward" if backward else "forward"
        lines.append((device.name, way, f"tier {one.tier}: {one.reason}{how}"))
    return lines
