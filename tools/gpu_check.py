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

One file, because the parts, the processes that run them and the tables of their results share the
names of parts and the layout of the files in between.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
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
DEVICE = "H200,90,232448,65536,132"  # for which kernels are compiled if the card does not say


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
    smoke = [
        (tier, passes, dtype, exchange)
        for dtype in ("bfloat16", "float32")
        for tier, exchange in (("2", "flags"), ("2", "data"), ("1", "flags"), ("3", "flags"))
        for passes in ("forward", "backward")
        if (dtype, exchange) != ("float32", "data")
    ]
    checks = [Command("-".join(("smoke", *words)), tool("gpu_smoke", *words)) for words in smoke]
    sanitized = [
        Command(
            f"sanitizer-{tier}",
            ("compute-sanitizer", "--error-exitcode", "9",
             *tool("gpu_smoke", tier, "forward", "bfloat16")),
            fails=(9,),
        )
        for tier in "123"
    ]  # fmt: skip
    engine = ("tests/test_gpu.py", "tests/test_torch_gpu.py")
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
            "tests", pytest("tests", "gpu and not slow", *of_a_card()), needs=("pytest",)),)),
        Part("engine", 35, 90, (Command(
            "engine", pytest("engine", "not gpu and not slow", *engine), needs=("pytest",)),)),
        Part("sanitizer", 20, 60, tuple(sanitized)),
        Part("rest", 20, 540, (Command(
            "rest", tool("gpu_bench", "--cases", "rest", *bench), goes_on=True),)),
    ]  # fmt: skip


def of_a_card() -> list[str]:
    """The files with tests that are marked so, what programs do to layers first."""
    paths = (ROOT / "tests").glob("test_*.py")
    marked = [str(p.relative_to(ROOT)) for p in paths if "@pytest.mark.gpu\n" in p.read_text()]
    return ["tests/test_torch_card.py", *sorted({*marked} - {"tests/test_torch_card.py"})]


def cores() -> int:
    """Processes that run at once."""
    return max(2, min(12, (os.cpu_count() or 1) - 2))


def pytest(name: str, marks: str, *files: str) -> tuple[str, ...]:
    """Tests, some a day of those that are many alike; workers where there are any."""
    words = [sys.executable, "-m", "pytest", *files, "-m", marks, "--days", "4", "-v", "-rfE"]
    words += ["--tb=short", "-W", "default", "-p", "no:cacheprovider", "--durations=10"]
    words += ["-o", "faulthandler_timeout=45"]  # then a test says where it is
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
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    found = {**os.environ, **settings, "PYTHONPATH": os.pathsep.join(paths)}
    found.pop("TRITON_INTERPRET", None)
    return found


def tell(text: str) -> None:
    """On the screen, if anyone still listens."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


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
        tell(f"\n{text}")
        self.temporary.cleanup()
        return not any(failed(record) for record in self.records)

    def _stop(self, number: int, _: Any) -> None:
        self.stopping = f"stopped by {signal.Signals(number).name}"

    def run_part(self, part: Part, seconds: float) -> None:
        """All of its processes, as many at a time as there are cores for."""
        end = time.monotonic() + seconds
        tell(f"== {part.name}, at most {max(0.0, seconds):.0f} seconds")
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
                        self.record(part, command, "lost the card", process.begin)
                        continue
                self.record(part, command, result(process, status), process.begin)
                if command.essential and status == NO_CARD:
                    self.stopping = "no card"
            if time.monotonic() - self.archived > ARCHIVED:
                self.archive()
            time.sleep(0.02)

    def start(self, command: Command, end: float, done: dict[str, int]) -> Process | None:
        """None if there is no such program."""
        values = {
            "seconds": f"{max(1.0, end - time.monotonic() - 8):.0f}",
            "device": Results.read(self.files).card.get("device", DEVICE),
            "folder": str(self.files),
        }
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

    def record(self, part: Part, command: Command, result: str, begin: float) -> None:
        """The end of a process, on the screen and in a file."""
        seconds = round(time.monotonic() - begin, 1) if begin else 0.0
        line = {"part": part.name, "name": command.name, "result": result, "seconds": seconds}
        self.records.append(line)
        self.note(line)
        tell(f"   {command.name}: {result}, {seconds:.0f} s")

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
            tell(f"   no archive: {error}")


def result(process: Process, status: int) -> str:
    """In words."""
    if process.ended:
        return process.ended
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    if status and process.command.fails is not None and status not in process.command.fails:
        return "refused"
    return f"failed, status {status}" if status else "passed"


def failed(record: dict[str, Any]) -> bool:
    """A tool that is not there, or refuses this card, is no failure."""
    return record["result"] not in ("passed", "refused", "missing")


def lost_after(file: Path) -> int:
    """Cases until the card was lost, as the last line says."""
    lost = [line["done"] for line in lines_of(file.read_text(errors="replace")) if "lost" in line]
    return lost[-1] if lost else 0


def commit() -> str:
    """Of this checkout, if it is one."""
    try:
        words = ["git", "-C", str(ROOT), "log", "-1", "--format=%h %cs"]
        return subprocess.run(words, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


# -- reading ---------------------------------------------------------------------------------------
def lines_of(text: str) -> list[dict[str, Any]]:
    """The lines that are JSON."""
    found = []
    for line in text.splitlines():
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found


class Results(NamedTuple):
    """What a run has left: the text of each file, by its name without folder and ending."""

    texts: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> Results:
        """From a folder or from an archive."""
        if path.is_dir():
            files = {f.name: f.read_bytes() for f in sorted(path.iterdir()) if f.is_file()}
        else:
            files = {}
            with tarfile.open(path) as archive:
                for member in archive:
                    file = archive.extractfile(member)
                    if file is not None:
                        files[Path(member.name).name] = file.read()
        kept = {n: text.decode(errors="replace") for n, text in files.items()}
        return cls({Path(n).stem: text for n, text in kept.items() if not n.endswith(".xml")})

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Of JSON, that a process has printed."""
        return lines_of(self.texts.get(name, ""))

    @property
    def card(self) -> dict[str, Any]:
        """All that is known of the card."""
        return {key: value for line in self.lines("card") for key, value in line.items()}

    @property
    def notes(self) -> dict[str, Any]:
        """Of the run as a whole."""
        notes = [line for line in self.lines("parts") if "part" not in line]
        return {key: value for line in notes for key, value in line.items()}

    @property
    def records(self) -> list[dict[str, Any]]:
        """A line for each process that has ended."""
        return [line for line in self.lines("parts") if "part" in line]


def sections(results: Results) -> Iterator[tuple[str, list[str], int]]:
    """Titles, lines of Markdown, and characters of these in a summary: together some 9,500."""
    for title, of_section, share in (
        ("Card", of_card, 900),
        ("Parts", of_parts, 1200),
        ("Targets", of_targets, 1100),
        ("Smoke: the largest error, as a part of its limit", of_smoke, 1200),
        ("Exchange: microseconds per step, by programs", of_exchange, 900),
        ("Microseconds per step, forward / forward+backward", of_timings, 1900),
        ("Stress", of_stress, 600),
        ("Tests", of_tests, 900),
        ("What failed", of_failures, 1000),
    ):
        lines = []
        try:
            lines += of_section(results)
        except Exception as error:  # a line that nobody expected; the archive has it
            lines.append(f"unreadable: {type(error).__name__}: {error}")
        yield title, lines, share


def summary(results: Results) -> str:
    """The whole story in few characters; what one section leaves over, those after it have."""
    text, room = "# tools/gpu_check.py\n", 0
    for title, lines, share in sections(results):
        room += share
        kept = [f"\n## {title}\n"]
        for k, line in enumerate(lines):
            if sum(map(len, kept)) + len(kept) + len(line) > room - 60:
                kept.append(f"... {len(lines) - k} more lines: --read results.tar.gz")
                break
            kept.append(line)
        text += "\n".join(kept) + "\n"
        room -= sum(map(len, kept)) + len(kept)
    return text


def markdown(results: Results) -> str:
    """All of it."""
    return "\n".join(f"## {title}\n\n" + "\n".join(lines) + "\n"
                     for title, lines, _ in sections(results))  # fmt: skip


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    """Lines of Markdown."""
    yield f"| {' | '.join(header)} |"
    yield "|---" * len(header) + "|"
    for row in rows:
        yield f"| {' | '.join(str(value).replace('|', '/') for value in row)} |"


def of_card(results: Results) -> Iterator[str]:
    card, notes = results.card, results.notes
    smi, busy = card.get("nvidia_smi", {}), card.get("busy", {})
    if isinstance(smi, str):
        yield f"nvidia-smi: {smi.strip()[:200]}"
        smi = {}
    busy = {} if isinstance(busy, str) else busy
    yield (
        f"{card.get('card', 'no card')}, sm_{card.get('capability', '?')}, "
        f"{card.get('processors', '?')} multiprocessors, driver {smi.get('driver_version', '?')}, "
        f"{card.get('cores', '?')} cores"
    )
    yield (
        f"torch {card.get('torch', '?')}, Triton {card.get('triton', '?')}, CUDA "
        f"{card.get('cuda', '?')}, cuDNN {card.get('cudnn', '?')}, Python {card.get('python', '?')}"
    )
    yield (
        f"compute mode {smi.get('compute_mode', '?')}, MIG {smi.get('mig.mode.current', '?')}, "
        f"MPS {card.get('mps', '?')}; clocks {smi.get('clocks.sm', '?')} idle, "
        f"{busy.get('clocks.sm', '?')} busy, {smi.get('clocks.max.sm', '?')} at most; "
        f"{busy.get('temperature.gpu', '?')} C, {busy.get('power.draw', '?')}"
    )
    yield (
        f"{notes.get('begin', '?')}, commit {notes.get('commit') or '?'}, "
        f"{notes.get('seconds', '?')} seconds"
    )
    if "multiplies" in card and not card["multiplies"]:
        yield "This card multiplies matrices wrongly."


def of_parts(results: Results) -> Iterator[str]:
    rows = []
    for part, group in itertools.groupby(results.records, lambda record: record["part"]):
        records = list(group)
        seconds = f"{max(record['seconds'] for record in records):.0f}"
        if len(records) > 1:
            good = sum(record["result"] == "passed" for record in records)
            rows.append((part, f"{good} of {len(records)} passed", seconds))
            records = [record for record in records if record["result"] != "passed"]
            rows += [(f"- {r['name']}", r["result"], f"{r['seconds']:.0f}") for r in records]
        else:
            rows.append((part, records[0]["result"], seconds))
    yield from table(("part", "result", "seconds"), rows)


def of_smoke(results: Results) -> Iterator[str]:
    rows = []
    for name in sorted(results.texts):
        if name.startswith("smoke-"):
            lines = results.lines(name)
            told = [f"{line['cell']} {smoke(line)}" for line in lines if "cell" in line]
            rows.append((*name.split("-")[1:], "; ".join(told) or "nothing was said"))
    yield from table(("tier", "pass", "dtype", "exchange", "error / limit"), rows)


def smoke(line: dict[str, Any]) -> str:
    if "worst" in line:
        return f"{line['worst']:.3g} ({line['of']})"
    said = f"refused: {line['refused']}" if "refused" in line else line.get("error", "?")
    return str(said)[:100]


def of_exchange(results: Results) -> Iterator[str]:
    lines = results.lines("exchange")
    counts = sorted({line["programs"] for line in lines})
    kinds = list(dict.fromkeys(line["kind"] for line in lines))
    by_place = {(line["kind"], line["programs"]): line for line in lines}

    def shown(line: dict[str, Any]) -> str:
        if "us_per_step" in line:
            return f"{line['us_per_step']:.2f}{'' if line.get('right') else ', wrong'}"
        return "-" if "skipped" in line else "error"

    rows = [(kind, *[shown(by_place.get((kind, n), {})) for n in counts]) for kind in kinds]
    yield from table(("kind", *map(str, counts)), rows)
    yield from {f"- {line['kind']}: {line['error'][:150]}": 0 for line in lines if "error" in line}


def of_timings(results: Results) -> Iterator[str]:
    names = ("torch", "anycell", "anycell, data", "drop-in", "loop", "loop, graph")
    passes = ("forward", "forward+backward")
    rows: dict[tuple[str, ...], dict[tuple[str, str], str]] = {}
    said = []
    for line in results.lines("targets") + results.lines("rest"):
        if "skipped" in line:
            said.append(f"- {line['skipped']} more cases: {line['why']}")
            continue
        shape = "x".join(str(line[k]) for k in "TBIH")
        shape += f", {line['L']} layers" * (line["L"] > 1) + ", both ways" * (line["D"] > 1)
        key = line["cell"], line["dtype"], shape
        if "us_per_step" in line:
            text = f"{line['us_per_step']:.2f}"
            text += f" (t{line['tier']})" if line.get("tier") else ""
            rows.setdefault(key, {})[line["contender"], line["pass"]] = text
        else:
            wrong = f"error {line['wrong']:.2g}" if "wrong" in line else None
            why = wrong or line.get("error") or f"lost the card: {line.get('lost')}"
            whom = [line[name] for name in ("contender", "pass") if name in line]
            said.append(f"- {', '.join([*key, *whom])}: {why[:150]}")
    shown = []
    for key, times in rows.items():
        both = [[times.get((name, one), "-") for one in passes] for name in names]
        shown.append((*key, *["-" if two == ["-", "-"] else " / ".join(two) for two in both]))
    yield from table(("cell", "dtype", "TxBxIxH", *names), shown)
    yield from said


def of_targets(results: Results) -> Iterator[str]:
    """What is hoped for, of ``cells`` with 768 units and 16 rows in bfloat16."""
    times = {
        (line["cell"], line["pass"], line["contender"]): line["us_per_step"]
        for line in results.lines("targets")
        if "us_per_step" in line and (line["dtype"], line["H"], line["B"]) == ("bfloat16", 768, 16)
    }
    rows: list[tuple[str, float | None, str, float]] = []

    def ratio(a: tuple[str, str, str], b: tuple[str, str, str]) -> float | None:
        return times[a] / times[b] if a in times and b in times else None

    for passes, most in (("forward", 1.5), ("forward+backward", 4.0)):
        ours = ("LSTM", passes, "anycell")
        rows.append((f"LSTM, {passes}: microseconds", times.get(ours), "<=", most))
        for name in ("anycell", "drop-in"):
            theirs = ratio(("LSTM", passes, "torch"), ("LSTM", passes, name))
            rows.append((f"LSTM, {passes}: torch.nn / {name}", theirs, ">=", 0.95))
        for cell in ("PeepholeLSTM", "Own"):
            rows.append((f"{cell}, {passes}: / our LSTM", ratio((cell, passes, "anycell"), ours),
                         "<=", 1.15))  # fmt: skip
        for cell in ("LSTM", "PeepholeLSTM", "Own"):
            loop = ratio((cell, passes, "loop"), (cell, passes, "anycell"))
            rows.append((f"{cell}, {passes}: loop / ours", loop, ">=", 10.0))
    shown = []
    for what, value, sign, bound in rows:
        if value is None:
            shown.append((what, "-", f"{sign} {bound:g}", "not measured"))
        else:
            met = value <= bound if sign == "<=" else value >= bound
            shown.append((what, f"{value:.2f}", f"{sign} {bound:g}", "met" if met else "missed"))
    yield from table(("bfloat16, H=768, B=16", "measured", "hoped for", ""), shown)


def of_stress(results: Results) -> Iterator[str]:
    rows = []
    for line in results.lines("stress"):
        passes = "both passes" if line["train"] else "forward"
        said = line.get("error") or line.get("refused") or line.get("why_fewer") or "all launches"
        numbers = [line.get(name, "-") for name in ("launches", "wrong", "gave_up")]
        rows.append((line["hidden"], line["steps"], passes, *numbers, said[:150]))
    yield from table(("H", "T", "", "launches", "wrong", "gave up", ""), rows)


# As pytest says with workers that a test begins, and a result, with workers and without.
BEGUN = re.compile(r"^\S+\.py::.* $")
SAID = re.compile(r"^\[gw\d+\] \[ *\d+%\] ([A-Z]+) (\S.*)$|^(\S+::.*?) ([A-Z]{5,})\b")


def of_tests(results: Results) -> Iterator[str]:
    for name in ("tests", "engine"):
        text = results.texts.get(name)
        if text is None:
            continue
        counts: dict[str, int] = {}
        begun = dict.fromkeys(line.strip() for line in text.splitlines() if BEGUN.match(line))
        for match in map(SAID.match, text.splitlines()):
            if match:
                outcome = match[1] or match[4]
                counts[outcome] = counts.get(outcome, 0) + 1
                begun.pop((match[2] or match[3]).strip(), None)
        told = ", ".join(f"{n} {outcome.lower()}" for outcome, n in sorted(counts.items()))
        yield f"{name}: {told or 'none ran'}"
        yield from [f"- not finished: {test[:180]}" for test in begun]
        yield from [f"- {line[:200]}" for line in text.splitlines()
                    if line.startswith(("FAILED ", "ERROR ")) and "::" in line]  # fmt: skip


def of_failures(results: Results) -> Iterator[str]:
    """The last words of each process that failed. Of JSON, which the tables have, only errors."""
    last = {record["name"]: record["result"] for record in results.records if failed(record)}
    for name, outcome in last.items():
        text = results.texts.get(name, "")
        errors = [str(line["error"]) for line in lines_of(text) if "error" in line]
        plain = [line for line in text.strip().splitlines() if not line.startswith("{")]
        tail = [*dict.fromkeys(errors), *plain][-6:]
        if tail:
            yield f"{name}: {outcome}"
            yield from [f"    {line[:160]}" for line in tail]


# -- without a card --------------------------------------------------------------------------------
HANGS = "import time; print('begins', flush=True); time.sleep(600)"
DEAF = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + HANGS
DEAFER = "import faulthandler; faulthandler.disable()\n" + DEAF.replace(
    "SIG_IGN)", "SIG_IGN); signal.signal(signal.SIGABRT, signal.SIG_IGN)"
)
DIES = "import os, signal; print('begins', flush=True); os.kill(os.getpid(), signal.SIGKILL)"
LEAVES = (
    "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c',"
    " 'import time; time.sleep(600)']); print('{\"child\": %d}' % child.pid)"
)


def stand_in(name: str, text: str, *words: str, **options: Any) -> Command:
    """A process that behaves in a certain way."""
    text = textwrap.dedent(text).replace("{", "{{").replace("}", "}}")
    return Command(name, (sys.executable, "-c", text, *words), **options)


def says(*lines: dict[str, Any], status: int = 0) -> str:
    """A program that prints lines of JSON."""
    texts = [json.dumps(line) for line in lines]
    return f"import sys\nfor line in {texts!r}: print(line)\nsys.exit({status})"


def dry_plan() -> list[Part]:
    """The parts of ``plan``, as stand-ins: all that may become of a process becomes of one."""
    case = {"name": "target", "cell": "LSTM", "dtype": "bfloat16", "T": 1024, "B": 16, "I": 768,
            "H": 768, "L": 1, "D": 1}  # fmt: skip
    passes = ("forward", "forward+backward")
    times = [
        {**case, "cell": cell, "pass": p, "contender": who, "us_per_step": us * (1 + k),
         "quartiles": [us, us], "peak_bytes": 1, **({"tier": 2} if who == "anycell" else {})}
        for cell in ("LSTM", "PeepholeLSTM", "Own")
        for k, p in enumerate(passes)
        for who, us in (("torch", 2.0), ("anycell", 1.25), ("loop", 90.0))
    ]  # fmt: skip
    lost = [
        {**case, "contender": "anycell", "error": "RuntimeError: CUDA error"},
        {**case, "lost": "RuntimeError: CUDA error: an illegal memory access", "done": 1},
    ]
    smoke = {"tier": 2, "passes": "forward", "dtype": "bfloat16", "cell": "LSTM"}
    verbose = (
        "print('tests/test_a.py::test_a[x y] ')\nprint('tests/test_a.py::test_d ')\n"
        "print('[gw0] [ 33%] PASSED tests/test_a.py::test_a[x y] ')\n"
        "print('tests/test_a.py::test_b FAILED   [ 66%]')\n"
        "print('[gw1] [100%] SKIPPED tests/test_a.py::test_c')\n"
        "print('FAILED tests/test_a.py::test_b - AssertionError: no')\nraise SystemExit(1)"
    )
    card = [
        {"python": "3.12.0", "cores": 16}, {"nvidia_smi": "no such tool", "mps": "none"},
        {"torch": "2.11.0", "triton": "3.6.0", "cuda": "13.0"},
        {"card": "a stand-in", "capability": 90, "processors": 132}, {"device": DEVICE},
    ]  # fmt: skip
    return [
        Part("card", 4, 4, (stand_in("card", says(*card), essential=True),)),
        Part("smoke", 5, 8, (
            stand_in("smoke-2-forward-bfloat16-flags",
                     says({**smoke, "worst": 0.31, "of": "output", "seconds": 1.0})),
            stand_in("smoke-2-backward-bfloat16-flags",
                     says({**smoke, "worst": 31.0, "of": "d x", "seconds": 1.0}, status=1)),
            stand_in("smoke-1-forward-bfloat16-flags", "print('begins')\nraise ValueError('no')"),
            stand_in("smoke-1-backward-bfloat16-flags", HANGS),
            stand_in("smoke-3-forward-bfloat16-flags", DEAF),
            stand_in("smoke-3-backward-bfloat16-flags", DEAFER),
            stand_in("smoke-3-forward-float32-flags", DIES),
            stand_in("smoke-2-forward-float32-flags", says({**smoke, "refused": "no kernels"})),
        ), each=1.0),
        Part("ahead", 3, 5, (stand_in("ahead", LEAVES),)),
        Part("exchange", 3, 5, (stand_in("exchange", says(
            {"kind": "barrier", "programs": 8, "us_per_step": 1.0, "right": True},
            {"kind": "barrier", "programs": 96, "skipped": "48 multiprocessors"},
            {"kind": "numbers", "programs": 8, "us_per_step": 1.5, "right": False},
            {"kind": "numbers", "programs": 96, "error": "RuntimeError: refused"}, status=1)),)),
        # The card is lost in the first and the second case; the third goes well.
        Part("targets", 5, 8, (stand_in("targets", f"""
            import json, sys
            after = int(sys.argv[-1]) if "--after" in sys.argv else 0
            for line in {lost!r} if after < 2 else {times!r}: print(json.dumps(line))
            sys.exit(70 if after < 2 else 0)""", goes_on=True),)),
        Part("stress", 3, 5, (stand_in("stress", says(
            {"hidden": 512, "steps": 4, "train": False, "share": 0.5, "launches": 9, "wrong": 1,
             "gave_up": 0, "why_fewer": None}, {"hidden": 768, "steps": 4, "train": True,
             "share": 0.5, "error": "RuntimeError: CUDA error"}, status=1)),)),
        Part("tests", 3, 5, (
            stand_in("tests", "", needs=("a_module_that_is_not_there",)),
            stand_in("engine", verbose),
        )),
        Part("sanitizer", 3, 5, (
            Command("sanitizer-1", ("a-tool-that-is-not-there",)),
            stand_in("sanitizer-2", "raise SystemExit(255)", fails=(9,)),
            stand_in("sanitizer-3", "raise SystemExit(9)", fails=(9,)),
        )),
        Part("none", 0, 0, (stand_in("none", says()),)),
        Part("rest", 2, 2, (stand_in("rest", HANGS),)),
    ]  # fmt: skip


def main() -> None:
    """Runs, or reads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("out/gpu"))
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--read", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    parts = plan()
    if args.plan:
        for part in parts:
            print(f"{part.name}: {part.seconds:g} seconds, at most {part.most:g}")
            for command in part.commands:
                print(f"    {' '.join(command.words)}")
        print(f"{sum(part.seconds for part in parts):g} seconds")
    elif args.read:
        print(markdown(Results.read(args.read)))
    elif args.dry_run:
        global GRACE, ARCHIVED
        GRACE, ARCHIVED = (0.5, 0.5), 0.5
        sys.exit(not Check(dry_plan(), args.folder).run())
    else:
        sys.exit(not Check(parts, args.folder).run())


if __name__ == "__main__":
    main()
