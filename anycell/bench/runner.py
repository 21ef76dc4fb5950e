"""Runs the benchmark: for each cell and shape, it builds, checks and times all contenders."""

from __future__ import annotations

import copy
import functools
import itertools
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from anycell.bench import gate, machine, memory, probe
from anycell.bench.contenders import make, posed
from anycell.bench.numpy_layers import blas_threads
from anycell.bench.problem import CellSpec, Problem
from anycell.bench.results import Entry, Report, Row, Settings
from anycell.bench.shapes import Shape
from anycell.bench.stats import median
from anycell.bench.tasks import Contender, Task, Unsupported
from anycell.bench.timing import interleave, once
from anycell.bench.torch_layers import reference
from anycell.plan.dtype import DTYPES

OUR_THREADS = "ANYCELL_NUM_THREADS"
ALONE_S = 1.0  # for the runs of a contender alone, which needs no rounds with others
Say = Callable[[str], object]


def run(
    settings: Settings, say: Say = lambda _: None, done: Callable[[Row], object] = lambda _: None
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
                    done(row)
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
        entry.status, entry.reason = "unsupported", str(error)
    except gate.Wrong as error:
        entry.status, entry.reason = "wrong", str(error)
    except Exception as error:
        entry.status, entry.reason = "failed", _brief(error)


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
                built[name] = contender = make(name, problem)
                entry.engine = contender.engine and contender.engine._asdict()
                entry.remarks += [f"{name}: {contender.remark}"] * bool(contender.remark)

        @functools.cache
        def wanted(cell: CellSpec) -> gate.Arrays:
            self.say(f"{cell.name} {shape.name}: float64 reference")
            # Training has the results of inference too.
            return reference(replace(problem, cell=cell), settings.modes[-1])

        for mode in settings.modes:
            row = Row(cell.name, mode, shape, settings.subject, problem.flops(mode))
            row.entries, running = copy.deepcopy(entries), dict[str, Task]()
            with ExitStack() as around:
                for name, contender in built.items():
                    with refusing(row.entries[name]):
                        task = contender.task(mode)
                        around.enter_context(contender.around())
                        own = posed(name, problem)
                        self.check(row, name, task, wanted(own.cell), own.dtype)
                        running[name] = task
                if settings.subject in running:  # without it there is nothing to compare with
                    self.time(row, running)
            if settings.subject in running:
                self.probe(row, problem, [name for name in running if built[name].again])
            yield row

    def check(self, row: Row, name: str, task: Task, want: gate.Arrays, dtype: str) -> None:
        """Times the first call; raises `gate.Wrong` if its results are."""
        self.say(f"{row.title}: checking {name}")
        entry = row.entries[name]
        entry.first_call_ms = once(task) * 1e3
        want = want if row.mode == "training" else {"output": want["output"]}
        entry.errors = gate.errors(task.results(), want)
        gate.check(entry.errors, dtype, 1.0 if name.startswith("anycell") else gate.PEERS)

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

    def probe(self, row: Row, problem: Problem, names: list[str]) -> None:
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

        for name in names:
            entry = row.entries[name]
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
