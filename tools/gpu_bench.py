"""Times layers on a CUDA card: ours, torch.nn's (cuDNN), and the step-by-step composite.

    python tools/gpu_bench.py --json out/gpu/bench.jsonl     the whole grid, about five minutes
    python tools/gpu_bench.py --quick                        a few shapes

A line of JSON per cell, shape, dtype, pass and contender: microseconds per step (the median of
interleaved runs, by CUDA events), the quartiles, and the peak of allocated memory. Contenders must
agree before they are timed: an error beyond the tolerance is written in the place of a time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import anycell
from anycell import cells
from anycell.torch import functional

STEPS, RUNS = 1024, 9
HIDDEN = (64, 128, 256, 512, 768, 1024, 1536, 2048)
BATCH = (1, 16, 64, 128, 256)
DTYPES = ("bfloat16", "float16", "float32")
# How far contenders may be apart, relative to the first one's outputs.
AGREE = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 5e-2}


def main() -> None:
    """Prints, and writes, one line per measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_bench: no CUDA card here.")
    hidden, batch = ((128, 768), (16,)) if args.quick else (HIDDEN, BATCH)
    dtypes = DTYPES[:1] if args.quick else DTYPES
    card = torch.cuda.get_device_name()
    lines = (
        {"card": card, **line}
        for cell in (cells.LSTM, cells.GRU, cells.PeepholeLSTM, cells.LayerNormLSTM)
        for h in hidden
        for b in batch
        for dtype in dtypes
        for line in measured(cell, h, b, dtype)
    )
    with open(args.json or "/dev/null", "w", encoding="utf-8") as file:
        for line in lines:
            print(json.dumps(line), flush=True)
            print(json.dumps(line), file=file, flush=True)


def measured(cell: Any, h: int, b: int, dtype: str) -> Iterator[dict[str, Any]]:
    """Both passes of all contenders at one shape."""
    made = contenders(cell, h, dtype)
    x = torch.randn(STEPS, b, h, device="cuda", dtype=getattr(torch, dtype))
    shape = {"cell": cell.name, "T": STEPS, "B": b, "H": h, "dtype": dtype}
    right = None
    agreeing = {}
    for name, layer in made.items():
        with torch.no_grad():
            out = layer(x)[0].float()
        right = out if right is None else right
        wrong = float((out - right).norm() / right.norm())
        if wrong <= AGREE[dtype]:
            agreeing[name] = layer
        else:
            yield {**shape, "contender": name, "error": wrong}
    for train in (False, True):
        runs = {name: call(layer, x, train) for name, layer in agreeing.items()}
        for name, (times, peak) in timed(runs).items():
            first, median, last = statistics.quantiles(times, n=4)
            yield {
                **shape,
                "contender": name,
                "pass": "forward+backward" if train else "forward",
                "us_per_step": 1e3 * median / STEPS,
                "quartiles": [1e3 * first / STEPS, 1e3 * last / STEPS],
                "peak_bytes": peak,
            }


def contenders(cell: Any, h: int, dtype: str) -> dict[str, Any]:
    """Layers of the same weights by name, the simplest first."""
    options = {"device": "cuda", "dtype": getattr(torch, dtype)}
    ours = anycell.torch.RNN(cell, h, h, **options)
    found = {"anycell": ours}
    vendor = {"LSTM": torch.nn.LSTM, "GRU": torch.nn.GRU}.get(cell.name)
    if vendor is not None:
        theirs = vendor(h, h, **options)
        theirs.load_state_dict(ours.state_dict())
        found = {"torch": theirs, **found}
    if h <= 256:
        found["composite"] = Composite(ours)
    return found


class Composite:
    """Our layer, step by step with torch's operations."""

    def __init__(self, layer: Any) -> None:
        self.layer, self.parameters = layer, layer.parameters

    def __call__(self, x: torch.Tensor) -> Any:
        kept, functional.fused_plan = functional.fused_plan, lambda *_: "asked for"
        try:
            return self.layer(x)
        finally:
            functional.fused_plan = kept


def call(layer: Any, x: torch.Tensor, train: bool) -> Callable[[], None]:
    """What is timed."""

    def forward() -> None:
        with torch.no_grad():
            layer(x)

    def both() -> None:
        for parameter in layer.parameters():
            parameter.grad = None
        layer(x)[0].sum().backward()

    return both if train else forward


def timed(runs: dict[str, Callable[[], None]]) -> dict[str, tuple[list[float], int]]:
    """Milliseconds of each run, interleaved, and the peak of memory."""
    found: dict[str, tuple[list[float], int]] = {}
    for name, run in runs.items():
        for _ in range(2):
            run()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        found[name] = [], torch.cuda.max_memory_allocated()
    for _ in range(RUNS):
        for name, run in runs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            found[name][0].append(begin.elapsed_time(end))
    return found


if __name__ == "__main__":
    main()
