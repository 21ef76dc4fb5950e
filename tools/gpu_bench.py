"""Times layers on a CUDA card: ours, torch.nn's (cuDNN), the drop-ins, which may choose cuDNN, and
loops over time as users write them.

    python tools/gpu_bench.py --seconds 300     as many cases as fit in five minutes
    python tools/gpu_bench.py --plan            the cases, in their order

Prints JSON: a line per cell, shape, dtype, pass and contender, with microseconds per step (the
median of interleaved runs, by CUDA events), the quartiles, the microseconds until all launches of a
call are queued, and the peak of allocated memory. For torch's own layer, a line also names the
kernel that takes the most time, which identifies the algorithm that cuDNN picked. "tf32" is float32
whose matmuls may round to TF32, ours and torch's.

Contenders are timed only if their results agree: otherwise a line reports the error in place of a
time. Lines also report exceptions, and how many cases were skipped for lack of time. Only a card
that no longer answers ends the run, with status 70; ``--after N`` skips the first N cases.
"""

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from gpu_lines import (
    Line,
    arguments,
    host_of_card,
    need_card,
    over,
    say,
    told,
)
from rivals import torch_loops

import anycell
from anycell import cells, sigmoid, tanh
from anycell.bench.shapes import all_shapes
from anycell.engines.gpu import capacity
from anycell.layer import steps
from anycell.plan import Layer, Options, plan


@anycell.cell(gates="i f g o", state="h c")
def Own(x, r, s):  # type: ignore[no-untyped-def]
    """A user-defined cell: new input replaces what f forgets, as far as i permits."""
    i, f, g, o = x + r
    f = sigmoid(f)
    c = f * s.c + (1 - f) * sigmoid(i) * tanh(g)
    return sigmoid(o) * tanh(c), c


def own_loop(x: torch.Tensor, weights: torch_loops.Weights, reverse: bool) -> torch.Tensor:
    """The loop of ``Own`` over time, operation by operation."""
    layer = Layer(Own, (("H", weights["weight_hh"].shape[1]),), Options((reverse,)))
    (run,) = steps.directions(layer, {"x": x, **weights}, torch.nn.functional.linear)
    output: torch.Tensor = run.forward()[0]
    return output


RUNS = 9
PASSES = ("forward", "forward+backward")
HIDDEN = (64, 128, 256, 512, 768, 1024, 1536, 2048)
BATCH = (1, 16, 64, 128, 256)
DTYPES = ("bfloat16", "float16", "float32", "tf32")
LOST = 70  # exit status: the card no longer answers
CELLS = {c.name: c for c in (cells.LSTM, cells.PeepholeLSTM, Own, cells.GRU, cells.LayerNormLSTM)}
LOOPS = {name: torch_loops.SCANS[name] for name in CELLS if name != "Own"}
LOOPS["Own"] = own_loop
LOOP_STEPS = 128  # of loops, whose time per step does not depend on the number of steps
# The largest difference between contenders, relative to the outputs of the first.
AGREE = {"float32": 1e-3, "tf32": 2e-2, "float16": 2e-2, "bfloat16": 5e-2}


class Case(NamedTuple):
    """A layer to time; ``name`` is "target", "grid", or a shape of ``shapes.json``."""

    name: str
    cell: str
    dtype: str
    T: int
    B: int
    I: int
    H: int
    L: int = 1
    D: int = 1


def cases() -> list[Case]:
    """All cases, the most important first."""
    first = [
        Case("target", cell, dtype, 1024, 16, 768, 768)
        for dtypes in (DTYPES[:1], DTYPES[2:])
        for cell in CELLS
        for dtype in dtypes
    ]
    first += [Case("target", c, "bfloat16", 1024, 16, 1536, 1536) for c in ("LSTM", "GRU")]
    shapes = [
        Case(s.name, cell, dtype, s.T, s.B, s.I, s.H, s.L, s.D)
        for dtype in DTYPES
        for s in all_shapes().values()
        for cell in ("LSTM", "GRU")
    ]
    grid = [
        Case("grid", cell, dtype, 1024, b, h, h)
        for dtype, b, h in itertools.product(DTYPES, BATCH, HIDDEN)
        for cell in ("LSTM", "GRU")
    ]
    # Shapes and grid alternate, so that a short run covers both.
    mixed = itertools.chain(*itertools.zip_longest(grid, shapes))
    return first + [case for case in mixed if case is not None]


def compared() -> list[Case]:
    """The cases that show whether a drop-in should leave a call to cuDNN."""
    shapes = [s for s in all_shapes().values() if s.name != "basecaller"]
    grid = [(16, 1024), (64, 512), (64, 1024), (256, 256), (1, 512), (128, 512)]
    some = ("rl-policy", "hydrology", "sb3", "codec", "stream")
    found = {
        cell: [
            Case(s.name, cell, dtype, s.T, s.B, s.I, s.H, s.L, s.D)
            for dtype in ("bfloat16", "float16", "float32")
            for s in shapes
            if cell == "LSTM" or s.name in some
        ]
        for cell in ("LSTM", "GRU")
    }
    sizes = itertools.product(("float16", "bfloat16"), grid)
    between = [Case("grid", "LSTM", dtype, 256, b, h, h) for dtype, (b, h) in sizes]
    return [*found["LSTM"], *between, *found["GRU"]]


def chosen(which: str) -> list[Case]:
    """All cases, the targets, the rest, or the cases of ``compared``."""
    if which == "compared":
        return compared()
    return [c for c in cases() if which == "all" or (c.name == "target") is (which == "targets")]


def main(words: list[str] | None = None) -> None:
    """Prints a line per measurement."""
    parser = arguments(__doc__, 300.0)
    parser.add_argument("--cases", choices=["all", "targets", "rest", "compared"], default="all")
    parser.add_argument("--after", type=int, default=0, help="leave out so many cases")
    parser.add_argument("--plan", action="store_true")
    args = parser.parse_args(words)
    todo = chosen(args.cases)[args.after :]
    if args.plan:
        for case in todo:
            say(case._asdict())
    else:
        need_card("gpu_bench")
        for line in within(args.seconds, todo, measured):
            say(line)
            if "lost" in line:
                sys.exit(LOST)


def within(
    seconds: float, todo: list[Case], measure: Callable[[Case], Iterator[Line]]
) -> Iterator[Line]:
    """Yields the lines of all cases that begin before the time is over. The last line counts the
    skipped cases, or says after how many cases the card stopped answering.
    """
    end = time.monotonic() + seconds
    for done, case in enumerate(todo):
        if time.monotonic() >= end:
            yield {"skipped": len(todo) - done, "why": over(seconds)}
            return
        lines = measure(case)
        while (line := _next(lines)) is not None:
            yield {**case._asdict(), **line}
            lost = lost_to(line)
            if lost is not None:
                yield {**case._asdict(), "lost": lost, "done": done + 1}
                return


def _next(lines: Iterator[Line]) -> Line | None:
    """The next line, which may report an error; None after the last."""
    try:
        return next(lines, None)
    except Exception as error:
        return {"error": told(error)}


def lost_to(line: Line) -> str | None:
    """The error of a card that no longer works, checked after a line with an error; or None."""
    if "error" not in line or not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        return told(error)
    return None


def measured(case: Case) -> Iterator[Line]:
    """Times both passes of all contenders for one case."""
    tf32 = case.dtype == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    card = {"card": torch.cuda.get_device_name()}
    x = torch.randn(case.T, case.B, case.I, device="cuda", dtype=dtype_of(case))
    agreeing, right = {}, None
    for name, layer in contenders(case).items():
        try:
            out = once(layer, x[:LOOP_STEPS])
            torch.cuda.synchronize()
        except Exception as error:
            yield {**card, "contender": name, "error": told(error)}
            continue
        right = out if right is None else right
        wrong = float((out - right).norm() / right.norm())
        if wrong <= AGREE[case.dtype]:
            agreeing[name] = layer
        else:
            yield {**card, "contender": name, "wrong": wrong}
    for train, passes in enumerate(PASSES):
        runs: dict[str, Callable[[], None]] = {}
        peaks, steps = {}, {}
        for name, layer in agreeing.items():
            steps[name] = min(case.T, LOOP_STEPS) if "loop" in name else case.T
            run = call(layer, x[: steps[name]], bool(train))
            try:
                run = graphed(run) if name == "loop, graph" else run
                peaks[name] = warmed(run)
                runs[name] = run
            except Exception as error:
                yield {**card, "contender": name, "pass": passes, "error": told(error)}
        for name, times in timed(runs).items():
            card_ms, host_us = zip(*times, strict=True)
            quartiles = [1e3 * t / steps[name] for t in statistics.quantiles(card_ms, n=4)]
            line = {
                **card,
                "contender": name,
                "pass": passes,
                "us_per_step": quartiles[1],
                "quartiles": [quartiles[0], quartiles[2]],
                "host_us_per_call": statistics.median(host_us),
                "peak_bytes": peaks[name],
            }
            if name.startswith("anycell"):
                line["tier"] = tier(case, bool(train))
                line["engine"] = str(agreeing[name].engine)
            if name == "torch":
                line["kernel"] = longest_kernel(runs[name])
            yield line


def once(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """The outputs of a layer, without gradients, in float32."""
    with torch.no_grad():
        return layer(x)[0].float()


def dtype_of(case: Case) -> torch.dtype:
    """The dtype of a case's tensors."""
    return getattr(torch, "float32" if case.dtype == "tf32" else case.dtype)


def tier(case: Case, backward: bool) -> int:
    """The tier that the capacity model chooses for our kernels."""
    cell, dtype = CELLS[case.cell], dtype_of(case)
    host = host_of_card(dtype)
    one = plan(cell, case.H, str(dtype).removeprefix("torch."), "gpu")
    return capacity.choose(one, host.limits, backward, batch=case.B, tf32=host.tf32(one.cell)).tier


def contenders(case: Case, device: str = "cuda") -> Line:
    """Layers by name, all with the same weights; torch's own comes first, if it has one."""
    options: Line = {"device": device, "dtype": dtype_of(case)}
    options |= {"num_layers": case.L, "bidirectional": case.D == 2}
    ours = anycell.torch.RNN(CELLS[case.cell], case.I, case.H, **options)
    found = {"anycell": ours}
    if hasattr(torch.nn, case.cell):
        theirs = getattr(torch.nn, case.cell)(case.I, case.H, **options)
        drop_in = getattr(anycell.torch, case.cell)(case.I, case.H, **options)
        for layer in (theirs, drop_in):
            layer.load_state_dict(ours.state_dict())
            layer.flatten_parameters()  # otherwise cuDNN copies weights in each call
        found = {"torch": theirs, **found, "drop-in": drop_in}
    if case.cell in LOOPS and case.L == case.D == 1 and case.B in (1, 16):
        found["loop"] = found["loop, graph"] = Loop(LOOPS[case.cell], ours)
    return found


class Loop:
    """A loop over time, on the weights of a layer."""

    def __init__(self, scan: torch_loops.Scan, layer: Any) -> None:
        self.scan, self.parameters = scan, layer.parameters
        self.weights = {n.removesuffix("_l0"): p for n, p in layer.named_parameters()}

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.scan(x, self.weights, False),)


def call(layer: Any, x: torch.Tensor, train: bool) -> Callable[[], None]:
    """The function to time."""

    def forward() -> None:
        with torch.no_grad():
            layer(x)

    def both() -> None:
        for parameter in layer.parameters():
            parameter.grad = None
        layer(x)[0].sum().backward()

    return both if train else forward


def graphed(run: Callable[[], None]) -> Callable[[], None]:
    """Captures a run as a CUDA graph; returns its replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def warmed(run: Callable[[], None]) -> int:
    """Warms a run up; returns its peak of memory."""
    for _ in range(2):
        run()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def timed(runs: dict[str, Callable[[], None]]) -> dict[str, list[tuple[float, float]]]:
    """The times of each run, interleaved: milliseconds on the card, microseconds on the host."""
    times = {name: list[tuple[float, float]]() for name in runs}
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(RUNS):
        for name, run in runs.items():
            called = time.perf_counter()
            begin.record()
            run()
            end.record()
            queued = time.perf_counter()
            torch.cuda.synchronize()
            times[name].append((begin.elapsed_time(end), 1e6 * (queued - called)))
    return times


def longest_kernel(run: Callable[[], None]) -> str:
    """The name of the kernel of a run that takes the most time on the card."""
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run()
            torch.cuda.synchronize()
        events = profile.key_averages()
        longest = max(events, key=lambda event: event.self_device_time_total, default=None)
    except Exception as error:  # a card may refuse its counters
        return told(error)
    return "none seen" if longest is None else longest.key


if __name__ == "__main__":
    main()
