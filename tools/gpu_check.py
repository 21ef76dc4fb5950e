"""Runs everything that needs a CUDA card, within nine minutes on 16 cores.

    python tools/gpu_check.py [DIRECTORY]      all parts; results go there, out/gpu by default
    python tools/gpu_check.py --parts A,B      only these parts

It needs a PyTorch with CUDA and Triton, pytest and pytest-xdist for the tests, and a TensorFlow
with CUDA for its part. Each part is a process, and the next part follows in any case: the tables
name parts that fail, hang or are missing. A file of DIRECTORY receives the output of each part at
once; the tables are in ``summary.md`` and end the output. SIGTERM and SIGINT end the running part;
then the tables are written as usual.

The plan gives each part a number of seconds. Time that a part does not use goes to later parts, up
to their ``most``. The exit status is 1 if anything failed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpu_lines import ROOT, arguments, lines_of, need_card, table

LOST = 70  # the exit status of ``gpu_bench.py`` when the card no longer answers


class Part(NamedTuple):
    """A process.

    Attributes:
        seconds: the plan's time for it.
        most: the seconds it may take if earlier parts left time over.
        words: the command; "{seconds}" and "{folder}" are filled in.
        needs: a module that it requires.
    """

    name: str
    seconds: float
    most: float
    words: tuple[str, ...]
    needs: str = "torch"


class Result(NamedTuple):
    """What became of a part: "passed", "missing", or a failure in words."""

    name: str
    outcome: str
    seconds: float


def plan() -> list[Part]:
    """The parts, the most important first: at most 540 seconds on a card with 16 cores."""
    bench = python("tools/gpu_bench.py", "--seconds", "{seconds}")
    ahead = python("tools/gpu_ahead.py", "--seconds", "{seconds}", "--jobs", str(cores()))
    sanitizer = "compute-sanitizer", "--error-exitcode", "9"
    of_engine = "engines/test_gpu", "engines/test_gpu_twins", "torch/test_gpu"
    every_tier = "tests/torch/test_card.py", "-m", "gpu", "-k", "test_batches_of_any_size"
    return [
        Part("card", 10, 20, ("nvidia-smi",)),
        Part("doctor", 110, 110, python("-m", "anycell", "doctor")),
        Part("ahead", 60, 90, ahead),
        Part("targets", 95, 160, (*bench, "--cases", "targets")),
        Part("tests", 180, 300, pytest("gpu and not slow", *of_a_card()), "pytest"),
        Part("keras", 15, 60, python("tools/gpu_keras.py"), "tensorflow"),
        Part("engine", 30, 90, pytest(
            "not gpu and not slow", *[f"tests/{name}.py" for name in of_engine]), "pytest"),
        Part("sanitizer", 30, 90, (*sanitizer, *python("-m", "pytest", *every_tier)), "pytest"),
        Part("rest", 10, 540, (*bench, "--cases", "rest")),
    ]  # fmt: skip


def python(*words: str) -> tuple[str, ...]:
    return sys.executable, *words


def of_a_card() -> list[str]:
    """The files with tests marked ``gpu``; ``torch/test_card.py`` comes first."""
    paths = (ROOT / "tests").rglob("test_*.py")
    marked = [str(p.relative_to(ROOT)) for p in paths if "@pytest.mark.gpu\n" in p.read_text()]
    return ["tests/torch/test_card.py", *sorted({*marked} - {"tests/torch/test_card.py"})]


def cores() -> int:
    """The number of processes that run at once."""
    return max(2, min(12, (os.cpu_count() or 1) - 2))


def pytest(marks: str, *files: str) -> tuple[str, ...]:
    """A pytest command: a day's share of slow cases and grids, on pytest-xdist's workers if any."""
    words = ["-m", "pytest", *files, "-m", marks, "--days", "4", "-v", "-rfE", "--tb=short"]
    words += ["-W", "default", "-p", "no:cacheprovider", "--durations=10"]
    words += ["-o", "faulthandler_timeout=45"]  # then a test prints its stack
    if importlib.util.find_spec("xdist") is not None:
        words += ["-n", str(cores()), "--dist", "worksteal", "--max-worker-restart", "100"]
    return python(*words)


# -- running ---------------------------------------------------------------------------------------
# The signals to a process whose time is over, and the seconds it has after each: at an interrupt,
# Python prints its stack; at an abort, ``faulthandler`` does. Then the process is killed.
LAST_WORDS = ((signal.SIGINT, 10.0), (signal.SIGABRT, 3.0), (signal.SIGKILL, None))


def environment() -> dict[str, str]:
    """The environment of all processes, without Triton's interpreter."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    settings["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # or one process takes the card's memory
    found = {**os.environ, **settings, "PYTHONPATH": os.pathsep.join(paths)}
    found.pop("TRITON_INTERPRET", None)
    return found


class Check:
    """A run of a plan, whose results go to a folder."""

    def __init__(self, parts: Sequence[Part], folder: Path) -> None:
        self.parts, self.folder, self.stopping = parts, folder, ""
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.iterdir():
            file.unlink()

    def run(self) -> bool:
        """Runs all parts and writes the tables; returns whether nothing failed."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self.stop)
        begin, planned, results = time.monotonic(), 0.0, list[Result]()
        for part in self.parts:
            planned += part.seconds
            started = time.monotonic()
            end = min(started + part.most, begin + planned)
            outcome = self.stopping or self.outcome(part, end)
            results.append(Result(part.name, outcome, round(time.monotonic() - started, 1)))
            print(f"{part.name}: {outcome}, {results[-1].seconds:.0f} s", flush=True)
        (self.folder / "summary.md").write_text(text := summary(results, self.folder))
        print(f"\n{text}")
        return not any(map(failed, results))

    def stop(self, number: int, _: Any = None) -> None:
        self.stopping = f"stopped by {signal.Signals(number).name}"

    def outcome(self, part: Part, end: float) -> str:
        """Runs a part; if it loses the card, again after the case at fault."""
        if importlib.util.find_spec(part.needs) is None:
            return "missing"
        file, after = self.folder / f"{part.name}.txt", 0
        while time.monotonic() < end:
            values = {"seconds": f"{max(1.0, end - time.monotonic() - 8):.0f}"}
            words = [word.format(**values) for word in part.words]
            said = self.process(words + ["--after", str(after)] * (after > 0), file, end)
            done = [line["done"] for line in lines_of(file.read_text()) if "lost" in line]
            if said != f"failed, status {LOST}" or sum(done) == after:
                return said
            after = sum(done)
        return "out of time" if after else "no time left"

    def process(self, words: Sequence[str], file: Path, end: float) -> str:
        """Runs a process until ``end``; returns its result in words."""
        with file.open("ab") as output:
            try:
                child = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    cwd=ROOT, env=environment(), start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                output.write(f"{error}\n".encode())
                return "missing"
        while child.poll() is None and time.monotonic() < end and not self.stopping:
            time.sleep(0.02)
        ended = (self.stopping or "out of time") if child.poll() is None else ""
        for number, grace in LAST_WORDS:
            if child.poll() is None:
                os.kill(child.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(grace)
        with contextlib.suppress(ProcessLookupError):  # and any children it left behind
            os.killpg(child.pid, signal.SIGKILL)
        status = child.wait()
        if status < 0:
            return ended or f"killed by {signal.Signals(-status).name}"
        return ended or (f"failed, status {status}" if status else "passed")


def failed(result: Result) -> bool:
    """Whether a result is a failure: a missing tool is not."""
    return result.outcome not in ("passed", "missing")


# -- reading ---------------------------------------------------------------------------------------
def summary(results: Sequence[Result], folder: Path) -> str:
    """The parts, the times of layers, and the last lines of what failed, as Markdown."""
    texts = {file.stem: file.read_text(errors="replace") for file in folder.glob("*.txt")}
    lines = ["## Parts", "", *table(Result._fields, results), "", "## Microseconds per step", ""]
    lines += of_timings(texts.get("targets", "") + texts.get("rest", ""))
    for result in filter(failed, results):
        last = texts.get(result.name, "").strip().splitlines()[-20:]
        lines += ["", f"## {result.name}: {result.outcome}", "", *[f"    {l[:160]}" for l in last]]
    return "\n".join(lines) + "\n"


def of_timings(text: str) -> Iterator[str]:
    """Forward / forward+backward of each contender, and what could not be timed."""
    names = ("torch", "anycell", "drop-in", "loop", "loop, graph")
    passes = ("forward", "forward+backward")
    rows: dict[tuple[str, ...], dict[tuple[str, str], str]] = {}
    said = []
    for line in lines_of(text):
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


def main() -> None:
    """Runs the check."""
    parser = arguments(__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("out/gpu"))
    parser.add_argument("--parts", help="names, with commas between; all by default")
    args = parser.parse_args()
    parts = plan()
    if args.parts:
        names = args.parts.split(",")
        if unknown := {*names} - {part.name for part in parts}:
            parser.error(f"no parts of these names: {sorted(unknown)}")
        parts = [part for part in parts if part.name in names]
    need_card("gpu_check")
    sys.exit(not Check(parts, args.folder).run())


if __name__ == "__main__":
    main()
