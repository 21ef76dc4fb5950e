"""Runs everything that needs a CUDA card, within nine minutes on 16 cores.

    python tools/gpu_check.py [DIRECTORY]      all parts; results go there, out/gpu by default
    python tools/gpu_check.py --parts A,B      only these parts
    python tools/gpu_check.py --plan           the parts, their seconds and commands
    python tools/gpu_check.py --read DIRECTORY the tables of an earlier run, as Markdown
    python tools/gpu_check.py --rehearse       without a card, the parts that show first what a card
                                               does: kernels interpreted, a stub of the driver

It needs a PyTorch with CUDA and Triton, pytest and pytest-xdist for the tests, and a TensorFlow
with CUDA for its part. Each part runs in one or more processes of its own, and the next part
follows in any case: the tables name parts that fail, hang or are missing. A file of DIRECTORY
receives the output of each process at once; the tables are in ``summary.md`` and end the output.
SIGTERM and SIGINT end the running part; then the tables are written as usual.

The plan gives each part a number of seconds. Time that a part does not use goes to later parts, up
to their ``most``. The exit status is 1 if anything failed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from gpu_lines import REHEARSAL, ROOT, Line, arguments, lines_of, rehearsing, table

TOOLS = ROOT / "tools"
NO_CARD, LOST = 3, 70  # exit statuses of ``gpu_card.py``, of ``gpu_bench.py``
DEVICE = "H200,90,232448,65536,132"  # kernels are compiled for it if the card is unknown


class Command(NamedTuple):
    """One process.

    Attributes:
        name: of the file with its output.
        words: the command; "{seconds}", "{device}" and "{folder}" are filled in.
        needs: modules that it requires.
        fails: statuses that are failures; other statuses but 0 are refusals. None for all.
        goes_on: whether it starts again with ``--after`` after status 70, a lost card.
        essential: whether no other command can run if it ends with status 3.
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
        seconds: the plan's time for it.
        most: the seconds it may take if earlier parts left time over.
        each: the seconds that one of its processes may take.
    """

    name: str
    seconds: float
    most: float
    commands: tuple[Command, ...]
    each: float = float("inf")


def tool(name: str, *words: str) -> tuple[str, ...]:
    return sys.executable, str(TOOLS / f"{name}.py"), *words


def plan() -> list[Part]:
    """The parts, the most important first: at most 540 seconds on a card with 16 cores."""
    jobs = str(cores())
    smoke = [
        (tier, passes, dtype)
        for dtype in ("bfloat16", "float32")
        for tier in "213"
        for passes in ("forward", "backward")
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
    of_engine = "engines/test_gpu", "engines/test_gpu_twins", "torch/test_gpu"
    engine = [f"tests/{name}.py" for name in of_engine]
    bench = ("--seconds", "{seconds}")
    return [
        # name, seconds, most
        Part("card", 120, 120, (Command("card", tool("gpu_card"), essential=True),)),
        Part("smoke", 60, 90, tuple(checks), each=60),
        Part("host", 15, 30, (Command("host", tool("gpu_host")),)),
        Part("frames", 15, 40, (Command("frames", tool("gpu_frames")),)),
        Part("ahead", 40, 60, (Command("ahead", tool(
            "gpu_ahead", "--jobs", jobs, "--device", "{device}", *bench)),)),
        Part("exchange", 20, 45, (Command("exchange", tool("gpu_exchange", *bench)),)),
        Part("targets", 85, 160, (Command(
            "targets", tool("gpu_bench", "--cases", "targets", *bench), goes_on=True),)),
        Part("stress", 40, 60, (Command("stress", tool("gpu_stress", *bench)),)),
        Part("tests", 90, 170, (Command(
            "tests", pytest("tests", "gpu and not slow", *of_a_card()), needs=("pytest",)),)),
        Part("keras", 10, 60, (Command(
            "keras", tool("gpu_keras"), needs=("tensorflow", "keras")),)),
        Part("engine", 20, 90, (Command(
            "engine", pytest("engine", "not gpu and not slow", *engine), needs=("pytest",)),)),
        Part("sanitizer", 15, 60, tuple(sanitized)),
        Part("rest", 10, 540, (Command(
            "rest", tool("gpu_bench", "--cases", "rest", *bench), goes_on=True),)),
    ]  # fmt: skip


def of_a_card() -> list[str]:
    """The files with tests marked ``gpu``; ``torch/test_card.py`` comes first."""
    paths = (ROOT / "tests").rglob("test_*.py")
    marked = [str(p.relative_to(ROOT)) for p in paths if "@pytest.mark.gpu\n" in p.read_text()]
    return ["tests/torch/test_card.py", *sorted({*marked} - {"tests/torch/test_card.py"})]


def cores() -> int:
    """The number of processes that run at once."""
    return max(2, min(12, (os.cpu_count() or 1) - 2))


def pytest(name: str, marks: str, *files: str) -> tuple[str, ...]:
    """A pytest command: a day's share of slow cases and grids, on pytest-xdist's workers if any."""
    words = [sys.executable, "-m", "pytest", *files, "-m", marks, "--days", "4", "-v", "-rfE"]
    words += ["--tb=short", "-W", "default", "-p", "no:cacheprovider", "--durations=10"]
    words += ["-o", "faulthandler_timeout=45"]  # then a test prints its stack
    words += [f"--junitxml={{folder}}/{name}.xml"]
    if importlib.util.find_spec("xdist") is not None:
        words += ["-n", str(cores()), "--dist", "worksteal", "--max-worker-restart", "100"]
    return tuple(words)


# -- running ---------------------------------------------------------------------------------------
# The signals to a process whose time is over, and the seconds it has after each: at an interrupt,
# Python prints its stack; at an abort, ``faulthandler`` does. Then the process is killed.
LAST_WORDS = ((signal.SIGINT, 10.0), (signal.SIGABRT, 3.0))


def environment() -> dict[str, str]:
    """The environment of all processes, with Triton's interpreter in a rehearsal only."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    found = {**os.environ, **settings, "PYTHONPATH": os.pathsep.join(paths)}
    found.pop("TRITON_INTERPRET", None)
    return found | ({"TRITON_INTERPRET": "1"} if rehearsing() else {})


class Check:
    """A run of a plan, whose results go to a folder."""

    def __init__(self, parts: Sequence[Part], folder: Path) -> None:
        self.parts, self.folder = parts, folder
        self.begin, self.stopping = time.monotonic(), ""
        self.lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.iterdir():
            file.unlink()

    def run(self) -> bool:
        """Runs all parts and writes the tables; returns whether nothing failed."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)
        self.note({"begin": time.strftime("%Y-%m-%d %H:%M:%S"), "commit": commit()})
        planned = 0.0
        for part in self.parts:
            planned += part.seconds
            end = min(time.monotonic() + part.most, self.begin + planned)
            print(f"== {part.name}, at most {end - time.monotonic():.0f} seconds", flush=True)
            with ThreadPoolExecutor(cores()) as pool:
                for command in part.commands:
                    pool.submit(self.run_command, part, command, end)
        self.note({"seconds": round(time.monotonic() - self.begin)})
        results = Results.read(self.folder)
        (self.folder / "summary.md").write_text(text := markdown(results), encoding="utf-8")
        print(f"\n{text}")
        return not any(map(failed, results.records))

    def _stop(self, number: int, _: Any) -> None:
        self.stopping = f"stopped by {signal.Signals(number).name}"

    def run_command(self, part: Part, command: Command, end: float) -> None:
        """Runs a process; each time it loses the card, starts it again after the case at fault."""
        after, status = 0, LOST
        end = min(end, time.monotonic() + part.each)
        while status == LOST:
            begin = time.monotonic()
            absent = [name for name in command.needs if importlib.util.find_spec(name) is None]
            why = self.stopping or ("no time left" if begin >= end else "missing" * bool(absent))
            result, status = (why, 0) if why else self.started(command, end, after)
            lost = lost_after(self.folder / f"{command.name}.txt") if status == LOST else 0
            if not (command.goes_on and lost and begin < end):
                status = 0 if status == LOST else status
            after += lost
            seconds = round(time.monotonic() - begin, 1)
            line = {"part": part.name, "name": command.name, "result": result, "seconds": seconds}
            self.note(line)
            print(f"   {command.name}: {result}, {seconds:.0f} s", flush=True)
        if command.essential and status == NO_CARD:
            self.stopping = "no card"

    def started(self, command: Command, end: float, after: int) -> tuple[str, int]:
        """Runs a process; returns its result in words, and its exit status."""
        values = {
            "seconds": f"{max(1.0, end - time.monotonic() - 8):.0f}",
            "device": Results.read(self.folder).card.get("device", DEVICE),
            "folder": str(self.folder),
        }
        words = [word.format(**values) for word in command.words]
        words += ["--after", str(after)] if after else []
        with (self.folder / f"{command.name}.txt").open("ab") as output:
            try:
                child = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    cwd=ROOT, env=environment(), start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                output.write(f"{error}\n".encode())
                return "missing", 0
        ended = ""
        for number, grace in (*LAST_WORDS, (signal.SIGKILL, 0.0)):
            while child.poll() is None and time.monotonic() < end and not self.stopping:
                time.sleep(0.02)
            if child.poll() is not None:
                break
            ended = ended or self.stopping or "out of time"
            os.kill(child.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(grace)
        with contextlib.suppress(ProcessLookupError):  # and any children it left behind
            os.killpg(child.pid, signal.SIGKILL)
        return ended or said(command, child.wait()), child.wait()

    def note(self, line: Line) -> None:
        """Appends a line to the file of records at once."""
        with self.lock, (self.folder / "parts.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def said(command: Command, status: int) -> str:
    """An exit status in words."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    if status == LOST and command.goes_on:
        return "lost the card"
    if status and command.fails is not None and status not in command.fails:
        return "refused"
    return f"failed, status {status}" if status else "passed"


def failed(record: Line) -> bool:
    """Whether a record is a failure: a missing tool, or one that refuses the card, is not."""
    return record["result"] not in ("passed", "refused", "missing")


def lost_after(file: Path) -> int:
    """The number of cases until the card was lost, from the last line that reports it."""
    lost = [line["done"] for line in lines_of(file.read_text(errors="replace")) if "lost" in line]
    return lost[-1] if lost else 0


def commit() -> str:
    """The commit of this checkout; "" outside of one."""
    try:
        words = ["git", "-C", str(ROOT), "log", "-1", "--format=%h %cs"]
        return subprocess.run(words, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


# -- reading ---------------------------------------------------------------------------------------
class Results(NamedTuple):
    """The files of a run: the text of each, by its name without folder and ending."""

    texts: dict[str, str]

    @classmethod
    def read(cls, folder: Path) -> Results:
        """Reads the files of a folder."""
        files = [file for ending in ("*.txt", "*.jsonl") for file in folder.glob(ending)]
        return cls({file.stem: file.read_text(errors="replace") for file in sorted(files)})

    def lines(self, name: str) -> list[Line]:
        """The lines of JSON that a process printed."""
        return lines_of(self.texts.get(name, ""))

    @property
    def card(self) -> Line:
        """All that is known of the card."""
        return {key: value for line in self.lines("card") for key, value in line.items()}

    @property
    def notes(self) -> Line:
        """The notes on the run as a whole."""
        notes = [line for line in self.lines("parts") if "part" not in line]
        return {key: value for line in notes for key, value in line.items()}

    @property
    def records(self) -> list[Line]:
        """The line of each process that has ended."""
        return [line for line in self.lines("parts") if "part" in line]


def markdown(results: Results) -> str:
    """All tables, with failures at the end."""
    sections = {
        "Card": of_card, "Parts": of_parts, "Targets": of_targets,
        "Smoke": partial(of_lines, prefix="smoke-"), "Stress": partial(of_lines, prefix="stress"),
        "Exchange": partial(of_lines, prefix="exchange"),
        "Microseconds of a call on the host": partial(of_lines, prefix="host"),
        "Frames of XLA": partial(of_lines, prefix="frames"),
        "Keras on TensorFlow": partial(of_lines, prefix="keras"),
        "Microseconds per step, forward / forward+backward": of_timings,
        "Tests": of_tests, "What failed": of_failures,
    }  # fmt: skip
    text = ""
    for title, of_section in sections.items():
        text += f"## {title}\n\n"
        try:
            for line in of_section(results):
                text += f"{line}\n"
        except Exception as error:  # an unexpected line; it remains in its file
            text += f"unreadable: {type(error).__name__}: {error}\n"
        text += "\n"
    return text


def of_card(results: Results) -> Iterator[str]:
    asked = results.card
    smi = asked.get("nvidia_smi", {})
    if isinstance(smi, str):
        yield f"nvidia-smi: {smi.strip()[:200]}"
    card, smi, busy, notes = (  # "?" where nothing is known
        defaultdict(lambda: "?", {} if isinstance(known, str) else known)
        for known in (asked, smi, asked.get("busy", {}), results.notes)
    )
    yield (
        f"{asked.get('card', 'no card')}, sm_{card['capability']}, {card['processors']} "
        f"multiprocessors, driver {smi['driver_version']}, {card['cores']} cores"
    )
    yield (
        f"torch {card['torch']}, Triton {card['triton']}, CUDA {card['cuda']}, "
        f"cuDNN {card['cudnn']}, Python {card['python']}"
    )
    yield (
        f"compute mode {smi['compute_mode']}, MIG {smi['mig.mode.current']}, MPS {card['mps']}; "
        f"clocks {smi['clocks.sm']} idle, {busy['clocks.sm']} busy, {smi['clocks.max.sm']} at "
        f"most; {busy['temperature.gpu']} C, {busy['power.draw']}"
    )
    yield f"{notes['begin']}, commit {notes['commit'] or '?'}, {notes['seconds']} seconds"
    if not card["multiplies"]:
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


def of_lines(results: Results, prefix: str) -> Iterator[str]:
    """A table of lines of JSON, a row each; the last column says why numbers are missing."""
    whys, rows = ("error", "refused", "skipped", "why_fewer"), list[Line]()
    for name in sorted(results.texts):
        for line in results.lines(name) if name.startswith(prefix) else ():
            why = "; ".join(f"{what}: {line[what]}" for what in whys if line.get(what))
            rows.append({n: v for n, v in line.items() if n not in whys} | {"": why[:150]})
    header = [*dict.fromkeys(name for row in rows for name in row if name), ""]
    yield from table(header, [[row.get(name, "-") for name in header] for row in rows])


def of_timings(results: Results) -> Iterator[str]:
    names = ("torch", "anycell", "drop-in", "loop", "loop, graph")
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
    """A table of measured times and their goals, with 768 units and 16 rows in bfloat16."""
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


# Lines of pytest's output: a test that begins, with workers; a result, with workers or without.
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
    """The last lines of each process that failed; of JSON lines, only the errors."""
    last = {record["name"]: record["result"] for record in results.records if failed(record)}
    for name, outcome in last.items():
        text = results.texts.get(name, "")
        errors = [str(line["error"]) for line in lines_of(text) if "error" in line]
        plain = [line for line in text.strip().splitlines() if not line.startswith("{")]
        tail = [*dict.fromkeys(errors), *plain][-6:]
        if tail:
            yield f"{name}: {outcome}"
            yield from [f"    {line[:160]}" for line in tail]


def main() -> None:
    """Runs the check, or prints its plan or the tables of an earlier run."""
    parser = arguments(__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("out/gpu"))
    parser.add_argument("--parts", help="names, with commas between; all by default")
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--read", type=Path)
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    parts = plan()
    if args.rehearse:
        os.environ[REHEARSAL] = "1"
        shown, long = ("smoke", "host", "frames"), {"seconds": 900.0, "most": 900.0, "each": 900.0}
        parts = [part._replace(**long) for part in parts if part.name in shown]
    if args.parts:
        names = args.parts.split(",")
        if unknown := {*names} - {part.name for part in parts}:
            parser.error(f"no parts of these names: {sorted(unknown)}")
        parts = [part for part in parts if part.name in names]
    if args.plan:
        for part in parts:
            print(f"{part.name}: {part.seconds:g} seconds, at most {part.most:g}")
            for command in part.commands:
                print(f"    {' '.join(command.words)}")
        print(f"{sum(part.seconds for part in parts):g} seconds")
    elif args.read:
        print(markdown(Results.read(args.read)))
    else:
        sys.exit(not Check(parts, args.folder).run())


if __name__ == "__main__":
    main()
