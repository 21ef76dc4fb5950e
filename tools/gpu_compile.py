"""Compiles the GPU engine's kernels ahead of time, without the cards that they are for, and reports
registers, spills, shared memory and matrix instructions.

    python tools/gpu_compile.py                          the whole grid: cells, tiers, dtypes, cards
    python tools/gpu_compile.py --cells LSTM --tiers 1   part of the grid
    python tools/gpu_compile.py --directions 2           the twins that run both directions at once
    python tools/gpu_compile.py --json --jobs 2          lines of JSON

The Triton that Python finds compiles; PYTHONPATH selects another one (see tools/gpu_tritons.py).
Kernels of tiers 1 and 2 have the largest hidden size that the capacity model allows (in tier 2, a
multiple of 128, or 64) on the smallest card of each capability; kernels of tier 2 have 16 rows and
128. If a kernel does not fit, the model's next choice is compiled, as in the engine.
"""

import itertools
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import NamedTuple

from gpu_lines import arguments, say

from anycell import Cell, cells
from anycell.engines.gpu import build, capacity, print_whole
from anycell.engines.gpu.step import print_step
from anycell.engines.gpu.text import Printed, Variant
from anycell.plan import Plan, plan

EVERY = {c.name: c for c in vars(cells).values() if isinstance(c, Cell)}
# A cell of each kind: four gates, a bundle of three, row reductions, heads, two matmuls in a row.
FEW = "LSTM GRU LayerNormLSTM sLSTM MultiplicativeLSTM".split()
# The smallest card of each capability: what fits it fits its siblings. 75 and 120 get few cells.
CARDS = {
    capability: min(
        (d for d in capacity.DEVICES if d.capability == capability), key=lambda d: d.processors
    )
    for capability in sorted({d.capability for d in capacity.DEVICES})
}
GRID = {75: FEW, 80: list(EVERY), 90: list(EVERY), 100: list(EVERY), 120: FEW}
SIZES = {1: (512, 256, 128, 64, 32, 16), 2: (*range(2048, 0, -128), 64), 3: (500,)}
BATCHES = {1: (16,), 2: (16, 128), 3: (16,)}


class Report(NamedTuple):
    """The compiler's report on a kernel; numbers are None if the compiler failed."""

    triton: str
    cell: str
    tier: int
    hidden: int
    batch: int
    dtype: str
    capability: int
    kernel: str
    warps: int
    rows: int  # of a program's tile
    limit: int  # of shared memory
    choice: int  # index among the capacity model's choices; the best is 0
    registers: int | None = None
    spilled: int | None = None  # bytes of each thread's local memory
    shared: int | None = None
    hidden_arguments: int | None = None  # those that Triton adds
    matrices: str = "-"  # the matrix instructions
    seconds: float = 0.0  # of compilation; almost 0 if Triton's cache has the kernel
    fits: bool = False  # by ``build.Binary.misfit`` and the bytes spilled
    error: str = ""


def main() -> int:
    """Prints a line for each kernel; returns 1 if no form of some kernel fits."""
    parser = arguments(__doc__)
    parser.add_argument("--cells", nargs="+", choices=list(EVERY))
    parser.add_argument("--tiers", nargs="+", type=int, default=list(SIZES))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--capabilities", nargs="+", type=int, choices=list(CARDS))
    parser.add_argument("--largest", type=int, default=1 << 20, help="hidden size of tiers 1 and 2")
    parser.add_argument("--directions", type=int, default=1, help="of a layer, in one launch")
    parser.add_argument("--choices", type=int, default=4, help="how many are tried of a kernel")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    grid = {c: args.cells or GRID[c] for c in args.capabilities or GRID if c in CARDS}
    points = [
        (tier, capability, dtype, cell)
        # The quickest tier comes first, for every cell, so that a run cut short covers every
        # cell.
        for tier in sorted(args.tiers, reverse=True)
        for capability, names in grid.items()
        for dtype in args.dtypes
        for cell in names
    ]
    begun, count, unfit = time.perf_counter(), 0, 0
    for forms in run(points, args.largest, args.directions, args.choices, args.jobs):
        for report in forms:
            if args.json:
                say(report._asdict())
            else:
                print(sentence(report), flush=True)
        count, unfit = count + len(forms), unfit + (not forms[-1].fits)
    seconds = time.perf_counter() - begun
    print(f"{count} kernels in {seconds:.0f} s; {unfit} do not fit", file=sys.stderr)
    return int(unfit > 0)


def run(
    points: Iterable[tuple[int, int, str, str]],
    largest: int,
    directions: int,
    choices: int,
    jobs: int,
) -> Iterator[list[Report]]:
    """Yields the reports on the forms of each kernel of these points, up to the first that fits."""
    with ProcessPoolExecutor(jobs) as pool:
        version = pool.submit(triton_version).result()
        runs = [
            pool.submit(first_that_fits, forms)
            for point in points
            for forms in kernels(*point, largest, choices, version, directions)
        ]
        for one in as_completed(runs):
            yield one.result()


def triton_version() -> str:
    """The version of Triton. Call it in another process: this one needs no Triton."""
    import triton

    return triton.__version__


def kernels(
    tier: int,
    capability: int,
    dtype: str,
    name: str,
    largest: int,
    most: int,
    triton: str = "3.9",
    directions: int = 1,
) -> Iterator[list[tuple[Printed, Report]]]:
    """Yields all kernels of both passes of a cell, each as a list of at most ``most`` forms that
    the model chooses, the best first.

    Args:
        directions: of a layer, which one launch runs.
    """
    cell = EVERY[name]
    card = CARDS[capability]._replace(compiler=build.release(triton))
    for backward, batch in itertools.product((False, True), BATCHES[tier]):
        for hidden in SIZES[tier]:
            if tier != 3 and hidden > largest:
                continue
            sizes = {s: hidden // 2 for s in cell.sizes.values() if s != "H"}
            tf32 = dtype == "tf32"  # float32 that may round to TF32
            one = plan(cell, hidden, "float32" if tf32 else dtype, "gpu", sizes)
            wanted = 3 if tier == 3 else None
            choices = capacity.choices(one, card, backward, wanted, batch, tf32, directions)
            if choices[0].tier == tier and choices[0].twins == (1 if tier == 3 else directions):
                forms = dict[tuple[Printed, ...], int]()
                for number, choice in enumerate(choices):
                    same_launch = choice.twins == choices[0].twins
                    if choice.tier == tier and same_launch and len(forms) < most:
                        # Of choices with the same text, only the first counts.
                        forms.setdefault(printed(one, choice, backward), number)
                for same in zip(*forms, strict=True):
                    yield [
                        (kernel, Report(
                            triton, name, tier, hidden, batch, dtype, capability, kernel.name,
                            kernel.warps, kernel.tile[0], card.shared, number,
                        ))
                        for kernel, number in zip(same, forms.values(), strict=True)
                    ]  # fmt: skip
                break


def printed(one: Plan, choice: capacity.Choice, backward: bool) -> tuple[Printed, ...]:
    """The training kernels of a plan, with a bias and random masks."""
    variant = Variant.training(one.cell, backward, input_bias=not backward)
    if choice.tier != 3:
        return (print_whole(one, variant, choice),)
    return print_step(one, variant).all


def first_that_fits(forms: list[tuple[Printed, Report]]) -> list[Report]:
    """The reports on a kernel's forms, up to the first that fits."""
    reports = []
    for kernel, report in forms:
        reports.append(compiled(kernel, report))
        if reports[-1].fits:
            break
    return reports


def compiled(kernel: Printed, report: Report) -> Report:
    """Compiles a kernel with aligned arguments, as in a large layer, and returns its report."""
    aligned = frozenset(name for name, kind in kernel.arguments if kind != "i32")
    begin = time.perf_counter()
    try:
        binary = build.binary(kernel, report.capability, aligned)
    except Exception as error:  # the reports on other kernels go on
        return report._replace(error=" ".join(f"{type(error).__name__}: {error}".split()))
    seconds = round(time.perf_counter() - begin, 1)
    spilled = build.spilled(binary.cubin)
    matrices = [name for name in ("wgmma", "tcgen05.mma", "mma.sync") if name in binary.ptx]
    return report._replace(
        registers=build.usage(binary.cubin)["REG"],
        spilled=spilled,
        shared=binary.shared,
        hidden_arguments=binary.hidden,
        matrices=matrices[0] if matrices else "-",
        seconds=seconds,
        fits=binary.misfit(report.limit) is None and spilled <= build.MOST_SPILLED,
    )


def sentence(report: Report) -> str:
    """A report as a line of text."""
    what = f"sm_{report.capability} {report.dtype} {report.cell} H={report.hidden}"
    what = f"{what} B={report.batch} {report.kernel}, choice {report.choice}"
    if report.error:
        return f"{what}: FAILS, {report.error}"
    said = f"{report.registers} registers, {report.spilled} of {build.MOST_SPILLED} bytes spilled, "
    said += f"shared {report.shared:,} of {report.limit:,}, {report.matrices}, {report.seconds} s"
    return f"{what}: {said}{'' if report.fits else ', DOES NOT FIT'}"


if __name__ == "__main__":
    sys.exit(main())
