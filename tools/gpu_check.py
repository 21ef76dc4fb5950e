"""Everything that needs a CUDA card, in one go and within nine minutes on 16 cores.

    python tools/gpu_check.py [DIRECTORY]           runs it; results go there, out/gpu by default
    python tools/gpu_check.py --plan                the parts, their seconds and commands
    python tools/gpu_check.py --read results.tar.gz the tables of an earlier run, as Markdown
    python tools/gpu_check.py --dry-run [DIRECTORY] the same on stand-ins, some of which fail, hang,
                                                    are missing or die; needs no card

It needs a PyTorch with CUDA and Triton; pytest and pytest-xdist for the tests. Each part is a
process or several of its own, and whatever becomes of it, the next one follows: what fails, hangs
or is missing is named. What a process prints is kept from the moment it prints it: DIRECTORY has
``results.tar.gz``, written anew every few seconds, and the summary that also ends the output. A
signal to end (SIGTERM, SIGINT) ends the part that runs, and then all is written as at the end.

The seconds of a part are what it may take at worst. What one leaves over goes to those after it, up
to their ``most``. The exit status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / "tools"
TOLD = 10_000  # characters of the summary
ARCHIVED = 15.0  # seconds between two archives
NO_CARD, LOST = 3, 70  # exit statuses of ``gpu_card.py``, of ``gpu_bench.py``


class Command(NamedTuple):
    """One process.

    Attributes:
        name: of the file with its output.
        words: the command; "{seconds}", "{device}" and "{folder}" are filled in.
        needs: modules without which it cannot run.
        fails: statuses that count as a failure, others but 0 as a refusal; None for all.
        goes_on: after status 70, a lost card, it is started again with ``--after``.
        essential: with status 3 it says that nothing else can run.
    """

    name: str
    words: tuple[str, ...]
    needs: tuple[str, ...] = ()
    fails: tuple[int, ...] | None = None
    goes_on: bool = False
    essential: bool = False


class Part(NamedTuple):
    """Processes that run side by side.

    Attributes:
        seconds: that the plan has for it.
        most: that it may take, if those before it left time over.
        each: that one of its processes may take.
    """

    name: str
    seconds: float
    most: float
    commands: tuple[Command, ...]
    each: float = float("inf")


def tool(name: str, *words: str) -> tuple[str, ...]:
    return sys.executable, str(TOOLS / f"{name}.py"), *words


def plan() -> list[Part]:
    """What matters most first. On a card, with 16 cores, at most 540 seconds."""
    jobs = str(cores())
    smoke = itertools.product(("bfloat16", "float32"), "213", ("forward", "backward"))
    checks = [
        Command(f"smoke-{tier}-{passes}-{dtype}", tool("gpu_smoke", tier, passes, dtype))
        for dtype, tier, passes in smoke
    ]
    sanitized = [
        Command(
            f"sanitizer-{tier}",
            ("compute-sanitizer", "--error-exitcode", "9",
             *tool("gpu_smoke", tier, "forward", "bfloat16")),
            fails=(9,),
        )
        for tier in "123"
    ]  # fmt: skip
    cards = ("tests/test_gpu.py", "tests/test_torch_gpu.py", "tests/test_torch_card.py")
    bench = ("--seconds", "{seconds}")
    return [
        # name, seconds, most
        Part("card", 120, 120, (Command("card", tool("gpu_card"), essential=True),)),
        Part("smoke", 60, 90, tuple(checks), each=60),
        Part("ahead", 40, 60, (Command("ahead", tool(
            "gpu_ahead", "--jobs", jobs, "--device", "{device}", *bench)),)),
        Part("exchange", 25, 45, (Command("exchange", tool("gpu_exchange", *bench)),)),
        Part("targets", 85, 160, (Command(
            "targets", tool("gpu_bench", "--cases", "targets", *bench), goes_on=True),)),
        Part("stress", 45, 60, (Command("stress", tool("gpu_stress", *bench)),)),
        Part("tests", 90, 170, (Command(
            "tests", pytest("tests", "gpu and not slow", *cards), needs=("pytest",)),)),
        Part("engine", 35, 90, (Command(
            "engine", pytest("engine", "not gpu and not slow", *cards[:2]), needs=("pytest",)),)),
        Part("sanitizer", 20, 60, tuple(sanitized)),
        Part("rest", 20, 540, (Command(
            "rest", tool("gpu_bench", "--cases", "rest", *bench), goes_on=True),)),
    ]  # fmt: skip


def cores() -> int:
    """Processes that run at once."""
    return max(1, min(12, (os.cpu_count() or 1) - 2))


def pytest(name: str, marks: str, *files: str) -> tuple[str, ...]:
    """Tests, some a day of those that are many alike; workers where there are any."""
    words = [sys.executable, "-m", "pytest", *files, "-m", marks, "--days", "4", "-v", "-rfE"]
    words += ["--tb=short", "-W", "default", "-p", "no:cacheprovider", "--durations=10"]
    words += [f"--junitxml={{folder}}/{name}.xml"]
    if importlib.util.find_spec("xdist") is not None:
        words += ["-n", str(cores()), "--dist", "worksteal", "--max-worker-restart", "100"]
    return tuple(words)


# -- running ---------------------------------------------------------------------------------------


class Process:
    """A command that runs, whose output goes to a file.

    It has until ``end``; then it is interrupted, so that Python says where it was; then aborted,
    for which ``faulthandler`` says it; then killed, with all that it has started.
    """

    def __init__(self, command: Command, words: Sequence[str], file: Path, end: float) -> None:
        self.command, self.file, self.begin, self.end = command, file, time.monotonic(), end
        self.steps = [(signal.SIGINT, GRACE[0]), (signal.SIGABRT, GRACE[1])]
        self.ended = ""  # by whom
        with file.open("ab") as output:
            self.child = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                cwd=ROOT, env=environment(), start_new_session=True,
            )  # fmt: skip

    def poll(self) -> int | None:
        """Its exit status; until it has one, sees to it that it keeps to its time."""
        status = self.child.poll()
        if status is None and time.monotonic() >= self.end:
            self.ended = self.ended or "out of time"
            if self.steps:
                number, grace = self.steps.pop(0)
                self.end = time.monotonic() + grace
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.child.pid, number)
            else:
                self._kill()
                status = self.child.wait()
        if status is not None:
            self._kill()  # what it may have left behind
        return status

    def stop(self) -> None:
        """Soon."""
        self.ended, self.end = "stopped", 0.0
        self.steps = [(number, min(grace, 2.0)) for number, grace in self.steps]

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)


GRACE = (10.0, 3.0)  # seconds after an interrupt, after an abort


def environment() -> dict[str, str]:
    """Of all processes: one cache of kernels, and no interpreter."""
    settings = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "PYTHONPATH": str(ROOT)}
    found = {**os.environ, **settings}
    found.pop("TRITON_INTERPRET", None)
    return found


class Check:
    """A run of a plan.

    Args:
        folder: where the archive and the summary go.
        seconds: of the whole plan; None for the sum of its parts.
    """

    def __init__(self, parts: Sequence[Part], folder: Path, seconds: float | None = None) -> None:
        self.parts, self.folder = parts, folder
        self.begin, self.stopping = time.monotonic(), ""
        planned = sum(part.seconds for part in parts)
        self.scale = 1.0 if seconds is None else seconds / planned
        self.records: list[dict[str, Any]] = []
        self.archived = 0.0
        folder.mkdir(parents=True, exist_ok=True)
        self.temporary = tempfile.TemporaryDirectory(prefix="gpu_check-")
        self.work = Path(self.temporary.name)
        self.files = self.work / "results"
        self.files.mkdir()
        for variable in ("TRITON_CACHE_DIR", "ANYCELL_CACHE_DIR"):
            os.environ.setdefault(variable, str(self.work / variable.lower()))

    def run(self) -> bool:
        """Whether nothing failed."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)
        self.note({"begin": time.strftime("%Y-%m-%d %H:%M:%S"), "commit": commit()})
        planned = 0.0
        for part in self.parts:
            planned += part.seconds * self.scale
            left = self.begin + planned - time.monotonic()
            self.run_part(part, min(part.most * self.scale, left))
            self.archive()
        self.note({"seconds": round(time.monotonic() - self.begin)})
        self.archive()
        text = summary(Results.read(self.files))
        (self.folder / "summary.txt").write_text(text, encoding="utf-8")
        print(f"\n{text}")
        self.temporary.cleanup()
        return all(r["result"] in ("passed", "refused", "missing") for r in self.records)

    def _stop(self, number: int, _: Any) -> None:
        self.stopping = f"stopped by {signal.Signals(number).name}"

    def run_part(self, part: Part, seconds: float) -> None:
        """All of its processes, as many at a time as there are cores for."""
        end = time.monotonic() + seconds
        print(f"== {part.name}, at most {max(0.0, seconds):.0f} seconds", flush=True)
        waiting, running, done = list(part.commands), list[Process](), dict[str, int]()
        while waiting or running:
            if self.stopping:
                for process in running:
                    if process.ended != "stopped":
                        process.stop()
            while waiting and len(running) < cores():
                command = waiting.pop(0)
                why = self.stopping or ("no time left" if time.monotonic() >= end else "")
                why = why or self.missing(command)
                if why:
                    self.record(part, command, why, 0.0)
                    continue
                started = self.start(command, min(end, time.monotonic() + part.each), done)
                running += [started] if started else []
                if not started:
                    self.record(part, command, "missing", 0.0)
            for process in list(running):
                status = process.poll()
                if status is None:
                    continue
                running.remove(process)
                command = process.command
                if status == LOST and command.goes_on and time.monotonic() < end:
                    cases = lost_after(process.file)
                    if cases:
                        done[command.name] = done.get(command.name, 0) + cases
                        waiting.insert(0, command)
                        self.record(part, command, "lost the card", process.begin, goes_on=True)
                        continue
                self.record(part, command, result(process, status), process.begin)
                if command.essential and status == NO_CARD:
                    self.stopping = "no card"
            if time.monotonic() - self.archived > ARCHIVED:
                self.archive()
            time.sleep(0.02)

    def start(self, command: Command, end: float, done: dict[str, int]) -> Process | None:
        """None if there is no such program."""
        values = {"seconds": f"{max(1.0, end - time.monotonic() - 8):.0f}",
                  "device": self.card().get("device", DEVICE), "folder": str(self.files)}  # fmt: skip
        words = [word.format(**values) for word in command.words]
        if command.name in done:
            words += ["--after", str(done[command.name])]
        try:
            return Process(command, words, self.files / f"{command.name}.txt", end)
        except OSError as error:
            (self.files / f"{command.name}.txt").write_text(f"{error}\n", encoding="utf-8")
            return None

    def missing(self, command: Command) -> str:
        """What it needs and is not installed."""
        absent = [name for name in command.needs if importlib.util.find_spec(name) is None]
        if absent:
            text = f"{', '.join(absent)} not installed\n"
            (self.files / f"{command.name}.txt").write_text(text, encoding="utf-8")
        return "missing" if absent else ""

    def card(self) -> dict[str, Any]:
        """What is known of it so far."""
        return Results.read(self.files).card

    def record(
        self, part: Part, command: Command, result: str, begin: float, goes_on: bool = False
    ) -> None:
        """The end of a process, on the screen and in a file."""
        seconds = round(time.monotonic() - begin, 1) if begin else 0.0
        line = {"part": part.name, "name": command.name, "result": result, "seconds": seconds}
        self.records.append({**line, "result": "passed"} if goes_on else line)
        self.note(line)
        print(f"   {command.name}: {result}, {seconds:.0f} s", flush=True)

    def note(self, line: dict[str, Any]) -> None:
        """A line that stays, whatever comes."""
        with (self.files / "parts.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def archive(self) -> None:
        """All that there is so far, in the place of the archive before."""
        self.archived = time.monotonic()
        draft, target = self.folder / "results.tar.gz.part", self.folder / "results.tar.gz"
        try:
            with tarfile.open(draft, "w:gz") as archive:
                archive.add(self.files, arcname="results")
            os.replace(draft, target)
        except OSError as error:  # a file grew while it was read, or the disk is full
            print(f"   no archive: {error}", flush=True)
