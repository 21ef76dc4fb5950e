"""Runs the benchmark: for each cell and shape, build everybody, check everybody, time everybody."""

from __future__ import annotations

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
from anycell.bench.contenders import (
    DEFAULT_PEERS,
    SUBJECT,
    blas_threads,
    make,
    posed,
    reference,
)
from anycell.bench.errors import Unsupported
from anycell.bench.problem import CellSpec, Problem
from anycell.bench.shapes import Shape
from anycell.bench.stats import geometric_mean, iqr, median, paired_ratio
from anycell.bench.tasks import Contender, Mode, Task
from anycell.bench.timing import interleave, once
from anycell.plan.dtype import DTYPES

MODES: tuple[Mode, ...] = ("inference", "training")
OUR_THREADS = "ANYCELL_NUM_THREADS"
APART = 1.1  # times in turns and alone that differ by more than this factor do not agree
ALONE_S = 1.0  # for the runs of a contender alone, where there is no other to be compared with
Status = Literal["ok", "wrong", "unsupported", "failed", "skipped"]


@dataclass(frozen=True)
class Settings:
    """What to measure; see ``python -m anycell bench --help``."""

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
    fresh_process_ms: dict[str, float] | None = None  # extra cost of the first call, cold and warm
    peak_bytes: int | None = None
    engine: tuple[str, str] | None = None  # what ran it, and why
    remarks: list[str] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    samples_ms: list[float] = field(default_factory=list)
    alone_samples_ms: list[float] = field(default_factory=list)  # in a process of its own

    @property
    def timed(self) -> bool:
        return self.status == "ok" and bool(self.samples_ms)

    @property
    def median_ms(self) -> float:
        return median(self.samples_ms)

    @property
    def iqr_ms(self) -> float:
        return iqr(self.samples_ms)

    @property
    def worst_errors(self) -> list[float]:
        """That of the output, and in training the largest of a gradient."""
        gradients = [error for name, error in self.errors.items() if name != "output"]
        output = [self.errors["output"]] if "output" in self.errors else []
        return output + ([max(gradients)] if gradients else [])

    @property
    def alone_ms(self) -> float | None:
        return median(self.alone_samples_ms) if self.alone_samples_ms else None

    @property
    def disagrees(self) -> bool | None:
        """Whether it takes another time in turns than alone; nothing without both."""
        if not self.timed or self.alone_ms is None:
            return None
        return max(self.median_ms / self.alone_ms, self.alone_ms / self.median_ms) > APART

    def refuse(self, status: Status, reason: str) -> None:
        """No speed for this one: whatever was timed is dropped."""
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
    gflops: float = float("nan")
    entries: dict[str, Entry] = field(default_factory=dict)

    @property
    def bound_ms(self) -> float:
        """The time of the matmuls alone at the rate of a large one, measured around this row."""
        return self.flops / self.gflops * 1e-6

    @property
    def over_bound(self) -> float | None:
        """How many times the bound our time is."""
        ours = self.entries[self.subject]
        return ours.median_ms / self.bound_ms if ours.timed else None

    def ratio(self, peer: str, alone: bool = False) -> float | None:
        """The peer's time over ours: above 1 we are faster. Nothing without two valid timings."""
        ours, theirs = self.entries[self.subject], self.entries.get(peer)
        if theirs is None or not (ours.timed and theirs.timed):
            return None
        if alone:
            if theirs.alone_ms is None or ours.alone_ms is None:
                return None
            return theirs.alone_ms / ours.alone_ms
        return paired_ratio(theirs.samples_ms, ours.samples_ms)


@dataclass
class Report:
    """All that came out."""

    settings: Settings
    machine: dict[str, Any]
    date: str
    rows: list[Row] = field(default_factory=list)
    matmul_gflops: float = float("nan")
    interrupted: bool = False

    @property
    def ok(self) -> bool:
        """All was measured, everybody's results were right, and every contender that exists ran."""
        statuses = {entry.status for row in self.rows for entry in row.entries.values()}
        return not self.interrupted and not statuses & {"wrong", "failed"}

    def tables(self) -> Iterator[tuple[str, Mode, list[Row]]]:
        """The rows of each cell and mode, in the order asked for."""
        for cell in self.settings.cells:
            for mode in self.settings.modes:
                yield (
                    cell.name,
                    mode,
                    [row for row in self.rows if (row.cell, row.mode) == (cell.name, mode)],
                )

    @staticmethod
    def geometric_mean(rows: Sequence[Row], peer: str, alone: bool = False) -> float | None:
        ratios = [ratio for row in rows if (ratio := row.ratio(peer, alone)) is not None]
        return geometric_mean(ratios) if ratios else None


class CompileLimit(BaseException):
    """Raised into a compilation that takes too long; not an Exception, which compilers swallow."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """`CompileLimit` after this many seconds, where this thread can have an alarm clock."""
    main = threading.current_thread() is threading.main_thread()
    if seconds is None or not hasattr(signal, "setitimer") or not main:
        yield
        return

    def ring(*_: object) -> None:
        raise CompileLimit

    before = signal.signal(signal.SIGALRM, ring)
    # It rings again: a compiler may be where an exception is ignored, as in a destructor.
    signal.setitimer(signal.ITIMER_REAL, seconds, 5.0)
    try:
        with warnings.catch_warnings():  # an interrupted backward pass complains, at length
            warnings.simplefilter("ignore")
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


Say = Callable[[str], object]


def run(
    settings: Settings, say: Say = lambda _: None, done: Callable[[], object] = lambda: None
) -> Report:
    """The whole benchmark. `say` hears what is being done, `done` is called after each row."""
    now = datetime.now(timezone.utc).isoformat("T", "seconds")
    report = Report(settings, machine.describe(), now)
    with all_threads(settings.threads):
        matmul = machine.Matmul(DTYPES[settings.dtype].storage.name)
        try:
            for cell in settings.cells:
                for shape in settings.shapes:
                    for row in _rows(settings, cell, shape, matmul, say):
                        report.rows.append(row)
                        done()
        except KeyboardInterrupt:  # what took minutes to measure is still worth showing
            report.interrupted = True
        report.matmul_gflops = matmul.gflops
    return report


@contextmanager
def all_threads(threads: int) -> Iterator[None]:
    """So many threads for everybody: us, here and in processes that start, torch and BLAS."""
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


def _rows(
    settings: Settings, cell: CellSpec, shape: Shape, matmul: machine.Matmul, say: Say
) -> Iterator[Row]:
    problem = Problem(cell, shape, settings.dtype, settings.threads, settings.seed)
    built: dict[str, Contender | Entry] = {}
    for name in settings.contenders:
        try:
            built[name] = make(name, problem)
        except Unsupported as error:
            built[name] = Entry("unsupported", str(error))
        except Exception as error:  # a contender that cannot be built must not end the benchmark
            built[name] = Entry("failed", _brief(error))

    wanted = _References(problem, settings.modes, say)
    for mode in settings.modes:
        row = Row(cell.name, mode, shape, settings.subject, problem.flops(mode))
        running: dict[str, Task] = {}
        with ExitStack() as around:
            for name, contender in built.items():
                if isinstance(contender, Entry):
                    row.entries[name] = Entry(contender.status, contender.reason)
                    continue
                want = wanted.get(posed(name, problem).cell, mode)
                say(f"{cell.name} {shape.name} {mode}: checking {name}")
                dtype = posed(name, problem).dtype
                entry, task = _check(contender, name, mode, want, dtype, settings, around)
                row.entries[name] = entry
                if task is not None:
                    running[name] = task
            if settings.subject in running:  # without us there is nothing to compare with
                _time(row, running, matmul, settings, say)
        if settings.subject in running:
            _probe(row, problem, settings, say)
        yield row


class _References:
    """The float64 results of a problem, by cell and mode, computed when first asked for."""

    def __init__(self, problem: Problem, modes: Sequence[Mode], say: Say) -> None:
        self.problem, self.say = problem, say
        self.largest: Mode = "training" if "training" in modes else "inference"
        self.found: dict[tuple[str, Mode], gate.Arrays] = {}

    def get(self, cell: CellSpec, mode: Mode) -> gate.Arrays:
        source = mode if mode == "recurrence" else self.largest
        key = cell.origin, source
        if key not in self.found:
            self.say(f"{cell.name} {self.problem.shape.name} {mode}: float64 reference")
            self.found[key] = reference(replace(self.problem, cell=cell), source)
        all_arrays = self.found[key]
        return all_arrays if mode == "training" else {"output": all_arrays["output"]}


def _check(
    contender: Contender,
    name: str,
    mode: Mode,
    want: gate.Arrays,
    dtype: str,
    settings: Settings,
    around: ExitStack,
) -> tuple[Entry, Task | None]:
    """The first call, timed, and the correctness gate on its results."""
    entry = Entry(engine=contender.engine)
    if contender.remark is not None:
        entry.remarks.append(f"{name}: {contender.remark}")
    limit = settings.compile_limit if name == "torch-compile" else None
    slack = 1.0 if name.startswith("anycell") else gate.PEERS
    try:
        task = contender.task(mode)
        around.enter_context(contender.around())
        with time_limit(limit):
            entry.first_call_ms = once(task) * 1e3
        verdict = gate.judge(task.results(), want, dtype, slack)
    except Unsupported as error:
        entry.refuse("unsupported", str(error))
    except CompileLimit:
        entry.refuse("skipped", f"not compiled after {limit:.0f} s (--compile-limit)")
    except Exception as error:  # one failing contender must not end the benchmark
        entry.refuse("failed", _brief(error))
    else:
        entry.errors = verdict.errors
        if limit is not None:
            entry.remarks.append(f"{name} took {entry.first_call_ms / 1e3:.1f} s to compile")
        if verdict.problem is None:
            return entry, task
        entry.refuse("wrong", verdict.problem)
    return entry, None


def _time(
    row: Row, running: Mapping[str, Task], matmul: machine.Matmul, settings: Settings, say: Say
) -> None:
    title = f"{row.cell} {row.shape.name} {row.mode}"
    rates = matmul.sample()
    samples = interleave(
        running, settings.seconds, on_round=lambda n: say(f"{title}: timing, round {n}")
    )
    rates += matmul.sample()
    row.gflops = median(rates)
    for name, seconds in samples.items():
        row.entries[name].samples_ms = [1e3 * s for s in seconds]


def _probe(row: Row, problem: Problem, settings: Settings, say: Say) -> None:
    title = f"{row.cell} {row.shape.name} {row.mode}"
    subject = row.entries[settings.subject]
    if settings.first_call:
        say(f"{title}: first call in a fresh process")
        try:
            subject.fresh_process_ms = probe.first_call(settings.subject, problem, row.mode)
        except probe.ProbeError as error:
            subject.remarks.append(str(error))
    weighed = settings.memory and row.mode == "training" and memory.supported()
    for name, entry in row.entries.items():
        if entry.status != "ok" or name == "torch-compile":  # which would compile for minutes
            continue
        try:
            if settings.alone:
                say(f"{title}: {name} alone")
                seconds = min(settings.seconds, ALONE_S)
                entry.alone_samples_ms = probe.alone(name, problem, row.mode, seconds)
            if weighed:
                say(f"{title}: memory of {name}")
                entry.peak_bytes = probe.step_memory(name, problem)
        except probe.ProbeError as error:
            entry.remarks.append(str(error))


def _brief(error: BaseException) -> str:
    """One line: what, and where it came from."""
    lines = str(error).strip().splitlines()
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {lines[0] if lines else ''}{where}"
