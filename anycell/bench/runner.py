"""Runs the benchmark: for each cell and shape, it builds, checks and times all contenders."""

from __future__ import annotations

import functools
import itertools
import math
import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from anycell.bench import gate, machine, memory, probe
from anycell.bench.contenders import DEFAULT_PEERS, FLOAT32, SUBJECT, make, posed, reference
from anycell.bench.numpy_layers import blas_threads
from anycell.bench.problem import CellSpec, Problem
from anycell.bench.shapes import Shape
from anycell.bench.stats import geometric_mean, iqr, median, paired_ratio
from anycell.bench.tasks import Contender, Mode, Task, Unsupported
from anycell.bench.timing import interleave, once
from anycell.plan.dtype import DTYPES

MODES: tuple[Mode, ...] = ("inference", "training")
OUR_THREADS = "ANYCELL_NUM_THREADS"
APART = 1.1  # times in turns and alone that differ by more than this factor do not agree
FAR = 3.0  # ratios in turns and alone that differ by more than this factor mean a busy machine
ALONE_S = 1.0  # for the runs of a contender alone, which needs no rounds with others
Status = Literal["ok", "wrong", "unsupported", "failed", "skipped"]


@dataclass(frozen=True)
class Settings:
    """The cells, shapes and options of a run; see ``python -m anycell bench --help``."""

    cells: Sequence[CellSpec]
    shapes: Sequence[Shape]
    modes: Sequence[Mode] = MODES
    dtype: str = "float32"
    threads: int = 1
    subject: str = SUBJECT
    peers: Sequence[str] = DEFAULT_PEERS
    seconds: float = 5.0
    compile_limit: float = 120.0
    alone: bool = True
    first_call: bool = True
    memory: bool = False
    seed: int = 0

    @property
    def contenders(self) -> list[str]:
        return [self.subject, *(peer for peer in self.peers if peer != self.subject)]


@dataclass
class Entry:
    """One contender in one row."""

    status: Status = "ok"
    reason: str | None = None
    first_call_ms: float | None = None  # a fresh layer in this process, which is warm otherwise
    fresh_process_extra_ms: dict[str, float] | None = None  # of the first call, cold and warm
    training_peak_bytes: int | None = None
    engine: dict[str, str] | None = None  # name and reason of what ran it
    remarks: list[str] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    samples_ms: list[float] = field(default_factory=list)
    alone_samples_ms: list[float] = field(default_factory=list)  # in a process of its own

    @property
    def timed(self) -> bool:
        return bool(self.samples_ms)

    @property
    def median_ms(self) -> float:
        return median(self.samples_ms)

    @property
    def iqr_ms(self) -> float:
        return iqr(self.samples_ms)

    @property
    def alone_ms(self) -> float:
        return median(self.alone_samples_ms)

    @property
    def disagrees(self) -> bool | None:
        """Whether the times in turns and alone differ; None without both."""
        factor = self.median_ms / self.alone_ms
        return None if math.isnan(factor) else max(factor, 1 / factor) > APART

    def refuse(self, status: Status, reason: str) -> None:
        """Refuses the contender, and drops its timings."""
        self.status, self.reason = status, reason
        self.samples_ms.clear()


@dataclass
class Row:
    """One cell on one shape in one mode."""

    cell: str
    mode: Mode
    shape: Shape
    subject: str
    flops: int
    matmul_gflops: float = math.nan
    entries: dict[str, Entry] = field(default_factory=dict)

    @property
    def bound_ms(self) -> float:
        """The time of the matmuls alone at the rate of a large one, measured around this row."""
        return self.flops / self.matmul_gflops * 1e-6

    @property
    def title(self) -> str:
        return f"{self.cell} {self.shape.name} {self.mode}"

    @property
    def ours(self) -> Entry:
        return self.entries[self.subject]

    @property
    def over_bound(self) -> float:
        """Our time over the bound; NaN if it was not measured."""
        return self.ours.median_ms / self.bound_ms

    def ratio(self, peer: str, alone: bool = False) -> float | None:
        """The peer's time over ours: above 1 we are faster. None without two valid timings."""
        ours, theirs = self.ours, self.entries[peer]
        if not (ours.timed and theirs.timed):
            return None
        if not alone:
            return paired_ratio(theirs.samples_ms, ours.samples_ms)
        ratio = theirs.alone_ms / ours.alone_ms
        return None if math.isnan(ratio) else ratio

    def far(self, peer: str) -> bool:
        """Whether the ratios in turns and alone are so far apart that neither means anything."""
        turns, alone = self.ratio(peer), self.ratio(peer, alone=True)
        return turns is not None and alone is not None and max(turns / alone, alone / turns) > FAR


@dataclass
class Report:
    """The results of a run."""

    settings: Settings
    machine: dict[str, Any]
    date: str
    rows: list[Row] = field(default_factory=list)
    matmul_gflops: float = math.nan
    interrupted: bool = False

    @property
    def ok(self) -> bool:
        """Whether the run was not interrupted, no result was wrong, and no contender failed."""
        statuses = {entry.status for row in self.rows for entry in row.entries.values()}
        return not self.interrupted and not statuses & {"wrong", "failed"}

    def tables(self) -> Iterator[tuple[str, Mode, list[Row]]]:
        """The rows of each cell and mode, in the order asked for."""
        for cell, mode in itertools.product(self.settings.cells, self.settings.modes):
            rows = [row for row in self.rows if (row.cell, row.mode) == (cell.name, mode)]
            yield cell.name, mode, rows


def ratios(rows: Sequence[Row], peer: str, alone: bool = False) -> list[float]:
    """The ratios of a peer in all rows that have one."""
    return [ratio for row in rows if (ratio := row.ratio(peer, alone)) is not None]


def mean(rows: Sequence[Row], peer: str, alone: bool = False) -> float:
    """The geometric mean of a peer's ratios; NaN without ratios, or if one cannot be trusted."""
    if any(row.far(peer) for row in rows):
        return math.nan
    return geometric_mean(ratios(rows, peer, alone))


class CompileLimit(BaseException):
    """Raised into a compilation that takes too long; not an Exception: compilers swallow those."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raises `CompileLimit` after this many seconds, if this thread can set an alarm."""
    main = threading.current_thread() is threading.main_thread()
    if seconds is None or not hasattr(signal, "setitimer") or not main:
        yield
        return

    def ring(*_: object) -> None:
        raise CompileLimit(f"not compiled after {seconds:.0f} s (--compile-limit)")

    before = signal.signal(signal.SIGALRM, ring)
    # It rings again, because an exception may be ignored, for instance in a destructor.
    signal.setitimer(signal.ITIMER_REAL, seconds, 5.0)
    try:
        with warnings.catch_warnings():  # an interrupted backward pass warns at length
            warnings.simplefilter("ignore")
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


Say = Callable[[str], object]


def run(
    settings: Settings, say: Say = lambda _: None, done: Callable[[], object] = lambda: None
) -> Report:
    """Runs the whole benchmark. `say` is told the current work; `done` is called after each row."""
    now = datetime.now(timezone.utc).isoformat("T", "seconds")
    report = Report(settings, machine.describe(), now)
    with all_threads(settings.threads):
        bench = Bench(settings, say)
        try:
            for cell, shape in itertools.product(settings.cells, settings.shapes):
                for row in bench.rows(cell, shape):
                    report.rows.append(row)
                    done()
        except KeyboardInterrupt:  # what took minutes to measure is still worth showing
            report.interrupted = True
        report.matmul_gflops = bench.matmul.gflops
    return report


@contextmanager
def all_threads(threads: int) -> Iterator[None]:
    """Sets the threads of torch, BLAS and our kernels, of ours also in child processes."""
    import torch

    torch_before, ours_before = torch.get_num_threads(), os.environ.get(OUR_THREADS)
    torch.set_num_threads(threads)
    os.environ[OUR_THREADS] = str(threads)
    try:
        with blas_threads(threads):
            yield
    finally:
        torch.set_num_threads(torch_before)
        del os.environ[OUR_THREADS]
        if ours_before is not None:
            os.environ[OUR_THREADS] = ours_before


@contextmanager
def refusing(entry: Entry) -> Iterator[None]:
    """Makes an error inside refuse the contender, so that the benchmark goes on."""
    try:
        yield
    except Unsupported as error:
        entry.refuse("unsupported", str(error))
    except CompileLimit as error:
        entry.refuse("skipped", str(error))
    except Exception as error:
        entry.refuse("failed", _brief(error))


class Bench:
    """Makes rows, and holds what they share: settings, progress callback, large matmul."""

    def __init__(self, settings: Settings, say: Say) -> None:
        self.settings, self.say = settings, say
        self.matmul = machine.Matmul(DTYPES[settings.dtype].storage.name)

    def rows(self, cell: CellSpec, shape: Shape) -> Iterator[Row]:
        """Builds all contenders; then, in each mode, checks all and times those that pass."""
        settings, built = self.settings, dict[str, Contender]()
        problem = Problem(cell, shape, settings.dtype, settings.threads, settings.seed)
        entries = {name: Entry() for name in settings.contenders}
        for name, entry in entries.items():
            with refusing(entry):
                built[name] = make(name, problem)

        @functools.cache
        def wanted(cell: CellSpec, mode: Mode) -> gate.Arrays:
            self.say(f"{cell.name} {shape.name} {mode}: float64 reference")
            return reference(replace(problem, cell=cell), mode)

        for mode in settings.modes:
            row = Row(cell.name, mode, shape, settings.subject, problem.flops(mode))
            row.entries = {
                name: Entry(entry.status, entry.reason) for name, entry in entries.items()
            }
            running: dict[str, Task] = {}
            both = mode == "inference" and "training" in settings.modes
            with ExitStack() as around:
                for name, contender in built.items():
                    with refusing(row.entries[name]):
                        task = contender.task(mode)
                        around.enter_context(contender.around())
                        want = wanted(posed(name, problem).cell, "training" if both else mode)
                        want = want if mode == "training" else {"output": want["output"]}
                        self.say(f"{row.title}: checking {name}")
                        if self.check(row.entries[name], contender, name, task, want):
                            running[name] = task
                if settings.subject in running:  # without it there is nothing to compare with
                    self.time(row, running)
            if settings.subject in running:
                self.probe(row, problem)
            yield row

    def check(
        self, entry: Entry, contender: Contender, name: str, task: Task, want: gate.Arrays
    ) -> bool:
        """Times the first call; returns whether its results pass the correctness gate."""
        if contender.engine is not None:
            entry.engine = dict(zip(("name", "reason"), contender.engine, strict=True))
        if contender.remark is not None:
            entry.remarks.append(f"{name}: {contender.remark}")
        limit = self.settings.compile_limit if name == "torch-compile" else None
        with time_limit(limit):
            entry.first_call_ms = once(task) * 1e3
        if limit is not None:
            entry.remarks.append(f"{name} took {entry.first_call_ms / 1e3:.1f} s to compile")
        dtype = "float32" if name == FLOAT32 else self.settings.dtype
        slack = 1.0 if name.startswith("anycell") else gate.PEERS
        verdict = gate.judge(task.results(), want, dtype, slack)
        entry.errors = verdict.errors
        if verdict.problem is not None:
            entry.refuse("wrong", verdict.problem)
        return verdict.ok

    def time(self, row: Row, running: Mapping[str, Task]) -> None:
        """Times all contenders in turns, and the large matmul before and after."""
        rates = self.matmul.sample()
        samples = interleave(
            running,
            self.settings.seconds,
            on_round=lambda n: self.say(f"{row.title}: timing, round {n}"),
        )
        row.matmul_gflops = median(rates + self.matmul.sample())
        for name, seconds in samples.items():
            row.entries[name].samples_ms = [1e3 * s for s in seconds]

    def probe(self, row: Row, problem: Problem) -> None:
        """Takes the measurements that were asked for and need fresh processes."""
        settings, mode = self.settings, row.mode
        weighed = settings.memory and mode == "training" and memory.supported()

        def ask(what: str, measure: Callable[..., Any], *more: object) -> Any:
            self.say(f"{row.title}: {what} of {name} in a fresh process")
            try:
                return measure(name, problem, *more)
            except probe.ProbeError as error:
                entry.remarks.append(str(error))
                return None

        for name, entry in row.entries.items():
            if entry.status != "ok" or name == "torch-compile":  # which would compile for minutes
                continue
            if settings.first_call and name == settings.subject:
                entry.fresh_process_extra_ms = ask("first call", probe.first_call, mode)
            if settings.alone:
                seconds = min(settings.seconds, ALONE_S)
                entry.alone_samples_ms = ask("time", probe.alone, mode, seconds) or []
            if weighed:
                entry.training_peak_bytes = ask("memory", probe.step_memory)


def _brief(error: BaseException) -> str:
    """Describes an error in one line, with the place where it was raised."""
    lines = str(error).strip().splitlines()
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {lines[0] if lines else ''}{where}"
