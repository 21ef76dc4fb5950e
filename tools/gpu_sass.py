"""Reads the machine code of a step: what a kernel's loop over time does, by its instructions.

    python tools/gpu_sass.py                              LSTM, 768 units, 16 rows, both passes
    python tools/gpu_sass.py --cell GRU --hidden 512      another one
    python tools/gpu_sass.py --listing                    with those on memory and matrices
    python tools/gpu_sass.py --json                       a line of JSON for each pass

It compiles ahead of time and disassembles with the tools that come with Triton; no card is needed.
The time of a step is a model, no measurement: see ``Model``.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpu_compile import CARDS, EVERY, printed

from anycell.engines.gpu import build, capacity
from anycell.plan import plan


class Model(NamedTuple):
    """Assumptions about a card, from data sheets and what others have measured on an H100.

    Attributes:
        clock: cycles in a microsecond.
        trip: microseconds of a trip to the second-level cache, under load.
        trips: of an exchange: the release of a flag, its sight, what it stands for; one more where
            loads are used before the wait, and where some follow matrix instructions.
        latency: cycles until a matrix instruction's sums may enter the next one.
        matrix: cycles that a scheduler needs for one (of 16 x 8 x 16).
        instruction: cycles from one instruction of a warp to the next, where each needs the one
            before or nearly so.
        second_level, shared: bytes in a cycle of one multiprocessor.
        schedulers: of a multiprocessor.
    """

    clock: float = 1755
    trip: float = 0.5
    trips: int = 3
    latency: int = 33
    matrix: int = 8
    instruction: float = 2.5
    second_level: int = 64
    shared: int = 128
    schedulers: int = 4


class Instruction(NamedTuple):
    """One of SASS.

    Attributes:
        operation: with its modifiers, ``LDG.E.128.STRONG.GPU``.
        operands: as text.
        address, target: its own, and where it jumps to.
    """

    address: int
    operation: str
    operands: tuple[str, ...]
    text: str
    target: int | None

    @property
    def name(self) -> str:
        """Without modifiers."""
        return self.operation.partition(".")[0]

    @property
    def numbers(self) -> int:
        """Registers that a load or store moves."""
        if self.name == "LDSM":
            return int(self.operation.rpartition(".")[2])
        return {"64": 2, "128": 4}.get(
            next((m for m in self.operation.split(".") if m in ("64", "128")), ""), 1
        )

    def written(self) -> set[int]:
        """Numbers of the registers that it writes."""
        stores = self.name in ("STG", "STS", "BAR", "MEMBAR", "BRA", "RED", "ST", "CCTL")
        found = re.match(r"R(\d+)", self.operands[0]) if self.operands and not stores else None
        if found is None:
            return set()
        wide = self.numbers if self.name in ("LDG", "LDS", "LDSM") else 1
        wide = 4 if self.name == "HMMA" else 2 if ".WIDE" in self.operation else wide
        wide = 2 if self.name == "CS2R" and ".32" not in self.operation else wide
        return set(range(int(found[1]), int(found[1]) + wide))

    def read(self) -> set[int]:
        """Numbers of the registers that it reads."""
        first = 0 if self.name in ("STG", "STS", "RED", "ST") else 1
        found = set[int]()
        for n, operand in enumerate(self.operands[first:]):
            for number in re.findall(r"\bR(\d+)", operand):
                wide = 1
                if self.name == "HMMA":
                    wide = (4, 2, 4)[n]
                elif ".64" in operand or ".WIDE" in self.operation:
                    wide = 2
                elif self.name in ("STG", "STS") and n == 1:
                    wide = self.numbers
                found |= set(range(int(number), int(number) + wide))
        return found


class Facts(NamedTuple):
    """Of the loop over time of one kernel.

    Attributes:
        matrices: matrix instructions of a warp.
        chains: of these, each of which adds to what the one before it has summed.
        longest: matrix instructions of a chain.
        ldsm, lds, sts, ldg, stg, bar, membar: instructions of a warp by kind.
        arriving: bytes that a program loads past the first-level cache.
        early_uses: loads of this step that something uses before the programs wait for one another.
        before, after: loads issued before that, and from then on to the last matrix instruction.
        late: loads past the first-level cache that are issued only after the first matrix
            instruction, whose operands they may have waited for.
        tail: instructions from the last matrix instruction to the flag's release.
        loop: instructions of a step.
        microseconds: of a step, by the model.
    """

    cell: str
    kernel: str
    hidden: int
    batch: int
    triton: str
    part: str
    warps: int
    registers: int
    spilled: int
    shared: int
    matrices: int
    chains: int
    longest: int
    ldsm: int
    lds: int
    sts: int
    ldg: int
    stg: int
    bar: int
    membar: int
    arriving: int
    early_uses: int
    before: int
    after: int
    late: int
    tail: int
    loop: int
    microseconds: float


def main() -> None:
    """Both passes of a cell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cell", default="LSTM", choices=list(EVERY))
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--capability", type=int, default=90, choices=list(CARDS))
    parser.add_argument("--passes", nargs="+", default=["forward", "backward"])
    parser.add_argument("--listing", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    for way in args.passes:
        about = args.cell, args.hidden, args.batch, args.capability, way == "backward"
        facts, steps = examined(*about)
        if args.json:
            print(json.dumps(facts._asdict()), flush=True)
            continue
        print(*(f"{name:>14}  {value}" for name, value in facts._asdict().items()), sep="\n")
        if args.listing:
            print(*listing(steps), sep="\n")


def examined(
    name: str, hidden: int, batch: int, capability: int, backward: bool
) -> tuple[Facts, list[Instruction]]:
    """The facts, and the loop, of a kernel of tier 2 in 16 bits."""
    import triton

    cell = EVERY[name]
    device = CARDS[capability]
    one = plan(cell, hidden, "bfloat16", "gpu", {})
    choice = capacity.choose(one, device, backward, 2, batch)
    (kernel,) = printed(one, choice, backward)
    aligned = frozenset(name for name, kind in kernel.arguments if kind != "i32")
    binary = build.binary(kernel, capability, aligned)
    steps = loop(instructions(binary.cubin))
    used = build.usage(binary.cubin)
    about = {
        "cell": name, "kernel": kernel.name, "hidden": hidden, "batch": batch,
        "triton": triton.__version__, "part": str(choice.part), "warps": kernel.warps,
        "registers": used["REG"], "spilled": build.spilled(binary.cubin), "shared": binary.shared,
    }  # fmt: skip
    return Facts(**about, **counted(steps, kernel.warps, Model())), steps


def instructions(cubin: bytes) -> list[Instruction]:
    """The machine code of the one kernel in a cubin."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [str(tool), "-sass", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = []
    for line in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", said):
        text = line[1]
        words = re.sub(r"^@!?U?P\w+\s+", "", text)
        operation, _, operands = words.partition(" ")
        target = re.search(r"0x([0-9a-f]+)\s*$", text) if operation.startswith("BRA") else None
        found.append(
            Instruction(
                int(line[0], 16),
                operation,
                tuple(o.strip() for o in operands.split(",") if o.strip()),
                text,
                int(target[1], 16) if target else None,
            )
        )
    return found


def loop(code: Sequence[Instruction]) -> list[Instruction]:
    """What is repeated every step: of the loops with matrix instructions the longest."""
    places = {step.address: n for n, step in enumerate(code)}
    found = [
        list(code[places[step.target] : n + 1])
        for n, step in enumerate(code)
        if step.target is not None and step.target <= step.address and step.target in places
    ]
    return max((l for l in found if any(s.name == "HMMA" for s in l)), key=len)


def counted(steps: Sequence[Instruction], warps: int, model: Model) -> dict[str, float]:
    """What a loop has of each kind, and the model's time."""
    matrices = [n for n, step in enumerate(steps) if step.name == "HMMA"]
    chains, longest = chains_of(steps)
    begin, end = spin(steps)
    loads = [n for n, step in enumerate(steps) if step.name == "LDG" and not begin <= n <= end]
    arriving = [n for n in loads if n > end and "STRONG" in steps[n].operation]
    released = next(n for n in range(matrices[-1], len(steps)) if releases(steps[n]))

    def count(name: str) -> int:
        return sum(step.name == name for step in steps)

    found: dict[str, float] = {
        "matrices": len(matrices),
        "chains": chains,
        "longest": longest,
        **{name.lower(): count(name) for name in ("LDSM", "LDS", "STS", "LDG", "STG", "BAR")},
        "membar": count("MEMBAR"),
        "arriving": sum(steps[n].numbers for n in arriving) * 4 * 32 * warps,
        "early_uses": early_uses(steps, begin),
        "before": sum(n < begin for n in loads),
        "after": sum(end < n < matrices[-1] for n in loads),
        "late": sum(n > matrices[0] for n in arriving),
        "tail": released - matrices[-1],
        "loop": len(steps),
    }
    shares = warps / model.schedulers
    each = max(model.instruction, shares)  # cycles for an instruction of all warps
    from_shared = sum(s.numbers for s in steps if s.name == "LDSM") * 4 * 32 * warps / model.shared
    others = sum(s.numbers for s in steps if s.name in ("LDS", "STS")) * 4 * 32 * warps
    trips = model.trips + (found["early_uses"] > 0) + (found["late"] > 0)
    cycles = (
        found["arriving"] / model.second_level
        + max(longest * model.latency, len(matrices) * shares * model.matrix, from_shared)
        + others / model.shared
        + (found["tail"] + matrices[0] - end) * each
    )
    found["microseconds"] = round(cycles / model.clock + trips * model.trip, 2)
    return found


def chains_of(steps: Sequence[Instruction]) -> tuple[int, int]:
    """How many chains of matrix instructions there are, and how long the longest is, by following
    the registers of their sums, also where these are moved.
    """
    depth = dict[int, int]()
    begun = longest = 0
    for step in steps:
        written = step.written()
        if step.name == "HMMA":
            sums = re.match(r"R(\d+)", step.operands[3])
            before = depth.get(int(sums[1]), 0) if sums else 0
            begun += before == 0
            longest = max(longest, before + 1)
            depth |= dict.fromkeys(written, before + 1)
            continue
        moved = re.match(r"R(\d+)", step.operands[1]) if step.name == "MOV" else None
        carried = depth.get(int(moved[1]), 0) if moved else 0
        depth |= dict.fromkeys(written, carried)
    return begun, longest


def spin(steps: Sequence[Instruction]) -> tuple[int, int]:
    """Where programs wait: first and last instruction of the loop that reads flags, or data that
    stand for them; nowhere, (0, 0), if there is none.
    """
    places = {step.address: n for n, step in enumerate(steps)}
    for n, step in enumerate(steps[:-1]):
        begin = places.get(step.target, n + 1) if step.target is not None else n + 1
        if begin <= n and any(s.name == "LDG" for s in steps[begin : n + 1]):
            return begin, n
    return 0, 0


def early_uses(steps: Sequence[Instruction], begin: int) -> int:
    """Loads of this step that are used before the programs wait."""
    loaded, used = dict[int, int](), set[int]()
    for n, step in enumerate(steps[:begin]):
        used |= {loaded[r] for r in step.read() if r in loaded}
        for register in step.written():
            loaded.pop(register, None)
        if step.name == "LDG":
            loaded |= dict.fromkeys(step.written(), n)
    return len(used)


def releases(step: Instruction) -> bool:
    """Whether it gives others what the step has computed: a flag, or else the data itself."""
    return step.name in ("MEMBAR", "ATOMG", "RED") or (
        step.name == "ST" or (step.name == "STG" and "STRONG" in step.operation)
    )


def listing(steps: Sequence[Instruction]) -> Iterator[str]:
    """The instructions on memory and matrices, runs of the same kind as one line."""
    kinds = ("LDG", "STG", "LDS", "LDSM", "STS", "HMMA", "BAR", "MEMBAR", "ATOMG", "BRA", "MUFU")
    run: list[tuple[int, Instruction]] = []
    for n, step in [*enumerate(s for s in steps), (len(steps), steps[-1]._replace(operation="-"))]:
        if run and (step.name in kinds or step.operation == "-") and step.name != run[0][1].name:
            first, last = run[0], run[-1]
            yield f"{first[0]:5}  {first[1].text}" + f"   x {len(run)}, to {last[0]}" * (
                len(run) > 1
            )
            run = []
        if step.name in kinds:
            run.append((n, step))


if __name__ == "__main__":
    main()
