"""Times the exchange of tier 2 alone: the cost per step of communication between programs.

    python tools/gpu_exchange.py --seconds 30

In a step of this kernel, each program writes 16 rows of 16 numbers, then reads the numbers of all
programs once they are written. "barrier" writes and reads no numbers. Prints a line of JSON for
each number of programs: microseconds per step (the median of several differences between a long and
a short launch), and whether every step saw the numbers of the step before.

"step" is a layer of the smallest cell, with one gate: the exchange, and a matmul of 16 columns.
"programs" then assumes 16 units per program; "choice" names the actual number.
"""

import functools
import itertools
import statistics
import sys
import time
from typing import Any
from unittest import mock

import torch
from gpu_lines import arguments, host_of_card, milliseconds, need_card, over, say, tried

import anycell
from anycell import cells
from anycell.engines.gpu import capacity
from anycell.engines.gpu.launch import check_launch
from anycell.engines.gpu.player import NUMBER, Argument, Launched, Tables, compiled, failed
from anycell.engines.gpu.text import Printed, power_of_two
from anycell.plan import plan
from anycell.torch.framework import TorchDevice

PROGRAMS = (8, 16, 24, 32, 48, 64, 96, 128)
SHORT, LONG, RUNS = 256, 2304, 7
ROWS, UNITS, CHUNK, WARPS = 16, 16, 128, 4  # of a program, and what it reads at once

KERNEL = '''"""The exchange alone, of {programs} programs{kind}."""

import triton
import triton.language as tl

from anycell.engines.gpu.library import publish, wait


@triton.jit
def exchange(data, flags, trouble, patience, count):
    program = tl.program_id(1)
    rows = tl.arange(0, {rows})[:, None]
    units = tl.arange(0, {units})[None, :]
    lanes = tl.arange(0, {chunk})[None, :]
    peers = tl.arange(0, {lanes})
    peers = tl.where(peers < {programs}, peers, program)
    alive = tl.full([], 1, tl.int32)
    for t in range(0, count):
        if (t > 0) & (alive > 0):
            alive = wait(flags + ((t - 1) & 1) * {programs} + peers, t, patience)
{body}
        publish(flags + (t & 1) * {programs} + program, t + 1)
    if alive == 0:
        tl.store(trouble, 1)
'''
# Every program sums the numbers of all programs, and writes their mean plus 1: the step's number.
BODY = """
        before = data + t * {rows} * {width} + rows * {width}
        after = before + {rows} * {width}
        total = tl.zeros([{rows}], tl.float32)
        for first in tl.static_range(0, {width}, {chunk}):
            inside = first + lanes < {width}
            part = tl.load(before + first + lanes, mask=inside, other=0.0, cache_modifier=".cg")
            total += tl.sum(part, axis=1)
        mean = total[:, None] * {share} + 1.0 + units * 0.0
        tl.store(after + program * {units} + units, mean)""".lstrip("\n")


@functools.cache
def printed(programs: int, numbers: bool) -> Printed:
    """The kernel of ``programs`` programs, which exchange numbers or only wait for each other."""
    sizes = {
        "programs": programs, "rows": ROWS, "units": UNITS, "chunk": CHUNK,
        "width": programs * UNITS, "lanes": power_of_two(programs, 32 * WARPS),
        "share": 1.0 / (programs * UNITS),
    }  # fmt: skip
    body = BODY.format(**sizes) if numbers else ""
    kind = ", with numbers" if numbers else ""
    arguments = (
        ("data", "*fp32"), ("flags", "*i32"), ("trouble", "*i32"), ("patience", "i64"),
        ("count", "i32"),
    )  # fmt: skip
    source = KERNEL.format(**sizes, body=body, kind=kind)
    return Printed("exchange", source, arguments, (ROWS, UNITS), "H", WARPS, cooperative=True)


def main() -> None:
    """Times all kinds of exchange for all numbers of programs."""
    args = arguments(__doc__, 30.0).parse_args()
    need_card("gpu_exchange")
    end, good = time.monotonic() + args.seconds, True
    host = host_of_card(torch.bfloat16)
    for kind, programs in itertools.product(("barrier", "numbers", "step"), PROGRAMS):
        line: dict[str, Any] = {"kind": kind, "programs": programs}
        if programs > host.limits.processors:
            line["skipped"] = f"{host.limits.processors} multiprocessors"
        elif time.monotonic() > end:
            line["skipped"] = over(args.seconds)
        else:
            line |= tried(timed, kind, programs, host)
        say(line)
        good &= "error" not in line and line.get("right", True)
        if "error" in line:
            torch.cuda.synchronize()  # a lost card ends the run here
    sys.exit(not good)


def timed(kind: str, programs: int, host: TorchDevice) -> dict[str, Any]:
    """Measures microseconds per step, and checks the numbers."""
    line: dict[str, Any] = {}
    if kind == "step":
        runs = [least(programs, steps) for steps in (SHORT, LONG)]
        one = plan(cells.RNN, programs * UNITS, "bfloat16", "gpu")
        choice = capacity.choose(one, host.limits, tier=2, batch=ROWS)
        line["choice"], right = choice.reason, True  # it may use fewer programs
    else:
        values = {
            "data": torch.zeros(LONG + 1, ROWS, programs * UNITS, device=host.device),
            "flags": torch.zeros(2 * programs, dtype=torch.int32, device=host.device),
            "trouble": host.trouble,
            "patience": host.patience,
        }
        runs = [alone(kind, programs, steps, host, values) for steps in (SHORT, LONG)]
        runs[1]()
        torch.cuda.synchronize()
        seen = values["data"][:, 0, 0]
        right = not int(host.trouble[0])
        if kind == "numbers":
            right &= torch.equal(seen, torch.arange(LONG + 1.0, device=host.device))
    slopes = []
    for run in runs:
        run()
    for _ in range(RUNS):
        short, long = map(milliseconds, runs)
        slopes.append(1e3 * (long - short) / (LONG - SHORT))
    return {**line, "us_per_step": round(statistics.median(slopes), 3), "right": bool(right)}


def alone(kind: str, programs: int, steps: int, host: TorchDevice, values: dict[str, Any]) -> Any:
    """Returns a function that launches the kernel once, with flags that begin at zero."""
    kernel, values = printed(programs, kind == "numbers"), {**values, "count": steps}
    arguments = [values[name] for name, _ in kernel.arguments]
    numbers = [a if isinstance(a, int) else host.pointer(a) for a in arguments]
    launched = Launched(kernel, (1, programs), tuple(Argument(NUMBER, n, n) for n in numbers))
    tables, play = Tables([launched], [], host.ordinal, 0), compiled()

    def run() -> None:
        values["flags"].zero_()
        result = play(tables.address, b"", host.stream())
        check_launch(failed(result)[1], kernel, launched.grid)

    return run


def least(programs: int, steps: int) -> Any:
    """Returns a function that runs a layer of one gate forward, with 16 units per program."""
    width = programs * UNITS
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    layer = anycell.torch.RNN(cells.RNN, 16, width, **options)
    x = torch.randn(steps, ROWS, 16, **options)

    def run() -> None:
        with mock.patch.object(TorchDevice, "tier", 2), torch.no_grad():
            layer(x)

    return run


if __name__ == "__main__":
    main()
