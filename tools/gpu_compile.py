"""Compiles the GPU engine's kernels ahead of time, for cards that need not be there, and reports
what the compiler says: registers, spills, shared memory, matrix instructions.

    python tools/gpu_compile.py                          every cell, tier, dtype and capability
    python tools/gpu_compile.py --cells LSTM --tiers 1   some of them
    python tools/gpu_compile.py --json --jobs 2          a line of JSON for each kernel
    python tools/gpu_compile.py --read FILE              such lines as a table of Markdown

Kernels of tiers 1 and 2 are compiled at the largest of some hidden sizes that the capacity model
allows, those of tier 2 for 16 rows and for 128.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
from anycell import Cell, cells
from anycell.engines.gpu import build, capacity, print_whole
from anycell.engines.gpu.step import print_step
from anycell.engines.gpu.text import Form, Printed
from anycell.plan import Plan, plan

EVERY = {c.name: c for c in vars(cells).values() if isinstance(c, Cell)}
# The smallest of each kind: what fits there fits its siblings.
CARDS = {80: "A100", 90: "H100", 100: "B200"}
SIZES = {1: (128, 64, 32, 16), 2: (2048, 1664, 1024, 768, 512, 256), 3: (500,)}
BATCHES = {1: (16,), 2: (16, 128), 3: (16,)}


class Report(NamedTuple):
    """What the compiler says of a kernel."""

    cell: str
    tier: int
    hidden: int
    batch: int
    dtype: str
    capability: int
    kernel: str
    warps: int
    rows: int  # of a program's tile
    registers: int
    spilled: int  # bytes of each thread's local memory
    shared: int
    limit: int  # of shared memory
    matrices: str  # which matrix instructions
    seconds: float  # that compiling took; next to none where Triton's cache had it


def main() -> None:
    """The report as a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", nargs="+", default=list(EVERY), choices=list(EVERY))
    parser.add_argument("--tiers", nargs="+", type=int, default=list(SIZES))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--capabilities", nargs="+", type=int, default=list(CARDS))
    parser.add_argument("--largest", type=int, default=1 << 20, help="hidden size of tiers 1 and 2")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--read", type=Path)
    args = parser.parse_args()
    if args.read:
        print("\n".join(markdown(args.read)))
        return
    if not args.json:
        print(*(f"{name:>10}" for name in Report._fields))
    # What is quickest first, by tier, for every cell: a run that is cut short has seen something of
    # each.
    grid = itertools.product(
        sorted(args.tiers, reverse=True), args.capabilities, args.dtypes, args.cells
    )
    with ProcessPoolExecutor(args.jobs) as pool:
        runs = [pool.submit(reports, *point, args.largest) for point in grid]
        for report in itertools.chain.from_iterable(run.result() for run in as_completed(runs)):
            if args.json:
                print(json.dumps(report._asdict()), flush=True)
            else:
                print(*(f"{value!s:>10}" for value in report), flush=True)


def markdown(path: Path) -> Iterator[str]:
    """Lines of JSON as a table: a row for each cell, tier and pass, a column for each card and
    dtype, with hidden size, registers, bytes spilled, shared memory and matrix instructions; of
    several kernels, as in tier 3, the most of each number.
    """
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    columns = sorted({(line["dtype"], line["capability"]) for line in lines})
    found: dict[tuple[Any, ...], dict[tuple[str, int], list[dict[str, Any]]]] = {}
    for line in lines:
        way = line["kernel"].partition("_")[0]
        row = found.setdefault((line["tier"], line["batch"], way, line["cell"]), {})
        row.setdefault((line["dtype"], line["capability"]), []).append(line)
    yield f"| tier | rows | pass | cell | {' | '.join(f'{d}, sm_{c}' for d, c in columns)} |"
    yield "|---" * (4 + len(columns)) + "|"
    for key in sorted(found):
        cells_ = []
        for column in columns:
            kernels_ = found[key].get(column)
            if kernels_ is None:
                cells_.append("-")
                continue
            hidden, matrices = kernels_[0]["hidden"], kernels_[0]["matrices"]
            most = [max(k[name] for k in kernels_) for name in ("registers", "spilled", "shared")]
            text = f"H={hidden}: {most[0]}, {most[1]}, {most[2] >> 10} KiB"
            cells_.append(text + f", {matrices}" * (matrices != "-"))
        yield f"| {' | '.join(map(str, key))} | {' | '.join(cells_)} |"


def reports(tier: int, capability: int, dtype: str, name: str, largest: int) -> list[Report]:
    """Of all kernels of a cell, of both passes."""
    cell, found = EVERY[name], list[Report]()
    device = next(d for d in capacity.DEVICES if d.name == CARDS[capability])
    for backward in (False, True):
        for batch in BATCHES[tier]:
            for hidden in SIZES[tier]:
                if tier != 3 and hidden > largest:
                    continue
                sizes = {s: hidden // 2 for s in cell.sizes.values() if s != "H"}
                one = plan(cell, hidden, dtype, "gpu", sizes)
                choice = capacity.choose(one, device, backward, 3 if tier == 3 else None, batch)
                if choice.tier == tier:
                    found += [
                        compiled(one, kernel, choice, device, batch)
                        for kernel in kernels(one, choice, backward)
                    ]
                    break
    return found


def kernels(one: Plan, choice: capacity.Choice, backward: bool) -> Iterator[Printed]:
    """The kernels of a plan in training, with a bias, masks drawn."""
    form = Form(
        backward,
        draw=bool(one.cell.keeps),
        keep=not backward,
        bias_x=not backward,
        biases=tuple(l.bias and not backward for l in one.cell.linears),
    )
    if choice.tier != 3:
        yield print_whole(one, form, choice)
        return
    step = print_step(one, form)
    for stage in step.stages:
        yield from stage.kernels
    yield from step.close


def compiled(
    one: Plan, kernel: Printed, choice: capacity.Choice, device: capacity.Device, batch: int
) -> Report:
    """The report on a kernel whose arguments are aligned, as they are in a large layer."""
    aligned = frozenset(name for name, kind in kernel.arguments if kind != "i32")
    begin = time.perf_counter()
    binary = build.binary(kernel, device.capability, aligned)
    seconds = round(time.perf_counter() - begin, 1)
    used = build.usage(binary.cubin)
    found = [name for name in ("wgmma", "tcgen05.mma", "mma.sync") if name in binary.ptx]
    return Report(
        one.cell.name, choice.tier, one.hidden_size, batch, one.dtype, device.capability,
        kernel.name, kernel.warps, kernel.tile[0], used["REG"], build.spilled(binary.cubin),
        binary.shared, device.shared, found[0] if found else "-", seconds,
    )  # fmt: skip


if __name__ == "__main__":
    main()
