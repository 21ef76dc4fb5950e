"""``python -m anycell``: bench, explain, export, doctor, cache, demo."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

from anycell.engines.cpu.pool import MOST
from anycell.machine import usable_cores
from anycell.plan.dtype import DTYPES, dtypes
from anycell.requirement import install
from anycell.usage import UsageError, built_in, did_you_mean, find_cell, find_cells, find_model

Handler = Callable[[argparse.Namespace], int]
DEMO = Path(__file__).resolve().parents[1] / "examples" / "demo.py"  # in a checkout only
# Written out, because only the command imports the benchmark. RIVALS are in a checkout only.
PEERS = (
    "torch.nn anycell.numpy anycell-LSTM anycell-float32 anycell.keras keras keras-xla anycell.jax "
    "flax".split()
)
RIVALS = (
    "torch-loop torch-compile numpy-loop onnxruntime onnxruntime-calm openvino keras-loop tf-block "
    "jax-scan".split()
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns 0, or 1 if a result or a check is wrong, or 2 for wrong usage."""
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments)
    handler: Handler | None = getattr(options, "handler", None)
    if rest and handler is not demo:
        size = f"; a hidden size is --hidden {rest[0]}" if rest[0].isdecimal() else ""
        unknown = f"unknown arguments: {' '.join(rest)}"
        getattr(options, "command", parser).error(unknown + size * (handler is explain))
    options.rest = rest
    if handler is None:
        parser.print_help()
        return 0
    try:
        return handler(options)
    except UsageError as error:
        print(f"anycell: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("anycell: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has stopped reading, like `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


class Parser(argparse.ArgumentParser):
    """argparse that says what is wrong without printing the whole usage first."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\ntry: {self.prog} --help\n")


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser of all commands and their options."""
    import anycell

    parser = Parser(prog="anycell", description="Any recurrent cell, at fused-kernel speed.")
    parser.add_argument("--version", action="version", version=f"anycell {anycell.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")
    for handler, text, add in (
        (bench, "measure against torch.nn and others, after checking that results agree", _bench),
        (explain, "what becomes of a cell: equations, backward, kernel", _explain),
        (export, "a trained model as a C library: source, header, test, CMakeLists.txt", _export),
        (doctor, "what is installed, what is used, and whether it works", None),
        (cache, "where compiled kernels are kept, and how large they are; clear it", _cache),
        (demo, "train a model on a real series, and draw what came out", None),
    ):
        # A command without help works, but is not listed.
        shown: dict[str, Any] = {"help": text} if handler is not demo or DEMO.is_file() else {}
        about = text[0].upper() + text[1:] + "."
        command = commands.add_parser(handler.__name__, description=about, **shown)
        command.set_defaults(handler=handler, command=command)
        if add is not None:
            add(command)
    return parser


def _require(who: str, packages: Iterable[str], remedy: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise UsageError(f"{who} needs {package}, which is not installed: {remedy}")


# -- argument types: argparse puts their messages after the name of the option ---------------------


def names(text: str) -> list[str]:
    """``a,b`` -> ``["a", "b"]``."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise argparse.ArgumentTypeError("expected names separated by commas")
    return parts


def positive(kind: type[int] | type[float]) -> Callable[[str], Any]:
    """A number above zero."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
        return value

    return parse


def size(text: str) -> tuple[str, int]:
    """``P=64``: a size symbol of a cell and its number."""
    symbol, _, number = text.partition("=")
    if not symbol.isidentifier():
        raise argparse.ArgumentTypeError(f"expected a size such as P=64, got {text!r}")
    return symbol, positive(int)(number)


# -- bench -----------------------------------------------------------------------------------------


def _bench(parser: argparse.ArgumentParser) -> None:
    cores = usable_cores()
    modes = ("inference", "training", "both", "recurrence")
    listed: dict[str, Any] = {"type": names, "metavar": "A,B"}
    seconds: dict[str, Any] = {"type": positive(float), "metavar": "S"}
    add = parser.add_argument
    add(
        "--quick",
        action="store_true",
        help="a first look, in minutes: a few small shapes, short runs, no fresh processes",
    )
    add("--shapes", **listed, help="all (default), some by name, or sizes as T20B4I64H128[L2][D2]")
    add("--mode", choices=modes, default="both", help="what to time (default: both)")
    add("--cells", **listed, help="built-in cells (default: LSTM,GRU)")
    add(
        "--cell",
        action="append",
        default=[],
        metavar="FILE.py:NAME",
        help="a cell of your own; may be repeated",
    )
    add(
        "--dtype",
        choices=dtypes("cpu", quantized=True),
        default="float32",
        help="of inputs and weights (default: float32); training in 16 bits is of float32 layers "
        "under autocast; int8 is weights of 8 bits, inference only",
    )
    all_cores = f"for everybody (default: {cores}, as many as there are cores)"
    add("--threads", type=positive(int), default=cores, metavar="N", help=all_cores)
    some = (
        f"all of the subject's framework, or some of {', '.join(PEERS)}; in a checkout also "
        f"{', '.join(RIVALS)} (default: torch.nn, and torch-loop in a checkout)"
    )
    add("--peers", **listed, help=some)
    add(
        "--subject",
        default="anycell",
        metavar="NAME",
        help="the contender that all others are compared with (default: anycell)",
    )
    rounds = "time for the runs of one line of a table, 5 rounds at least (default: 5)"
    add("--seconds", **seconds, help=rounds)
    limit = "give up a torch.compile after this many seconds (default: 120)"
    add("--compile-limit", **seconds, default=120.0, help=limit)
    add("--memory", action="store_true", help="also measure the memory of a training step (Linux)")
    off: dict[str, Any] = {"action": "store_false"}
    add("--no-alone", dest="alone", **off, help="do not time each also alone, in a fresh process")
    first = "do not time first calls in fresh processes"
    add("--no-first-call", dest="first_call", **off, help=first)
    add(
        "--out",
        type=Path,
        default=Path("out/bench"),
        metavar="DIR",
        help="folder for bench.json and bench.png (default: out/bench)",
    )


def bench(options: argparse.Namespace) -> int:
    """Runs the benchmark, prints the tables and writes the files."""
    _require("bench", ("torch",), install("bench"))  # checks all results, and is the first peer
    if options.threads > MOST:
        raise UsageError(f"--threads {options.threads}: expected at most {MOST}")
    if sys.stderr.isatty():
        print("anycell: importing torch", file=sys.stderr, flush=True)
    from anycell.bench import chart, estimate, machine, problem, report, runner, shapes
    from anycell.bench.contenders import CONTENDERS, DEFAULT_PEERS, ON_TENSORFLOW, PACKAGES

    peers = options.peers or list(DEFAULT_PEERS)
    if peers == ["all"]:
        # Only of the subject's framework: if both ran, each would wait for the other's threads.
        tensorflow = options.subject in ON_TENSORFLOW
        known = [name for name in CONTENDERS if (name in ON_TENSORFLOW) is tensorflow]
        peers = [name for name in known if name != options.subject]
    for option, name in [("--subject", options.subject), *(("--peers", peer) for peer in peers)]:
        if name not in CONTENDERS:
            raise UsageError(f"{option}: unknown {name!r}{did_you_mean(name, list(CONTENDERS))}")
        extra = "tensorflow" if name in ON_TENSORFLOW else "bench"
        _require(name, PACKAGES.get(name, ()), install(extra))
    if DTYPES[options.dtype].quantized:
        if options.mode not in ("inference", "both"):
            raise UsageError(
                f"--mode {options.mode}: weights of 8 bits are for inference only; leave it out"
            )
        options.mode = "inference"
    classic = options.cells or ([] if options.cell else ["LSTM", "GRU"])
    options.shapes = options.shapes or (shapes.QUICK if options.quick else ["all"])
    options.seconds = options.seconds or (0.5 if options.quick else 5.0)
    if options.quick:
        options.alone = options.first_call = False
    as_given = "dtype threads subject seconds compile_limit alone first_call memory".split()
    settings = runner.Settings(
        cells=[problem.find_cell(name) for name in [*classic, *options.cell]],
        shapes=shapes.select(options.shapes),
        modes=runner.MODES if options.mode == "both" else [options.mode],
        peers=peers,
        **{name: getattr(options, name) for name in as_given},
    )
    try:
        options.out.mkdir(parents=True, exist_ok=True)  # fails before it measures
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"--out {options.out} cannot be used: {reason}") from None
    if warning := machine.busy(machine.describe()):
        print(f"anycell: {warning}", file=sys.stderr)
    with runner.all_threads(settings.threads):
        costs = estimate.seconds(settings)
    hurry = "" if options.quick or sum(costs) < 120 else "; --quick takes a few minutes"
    plan = f"{len(costs)} row{'s' * (len(costs) != 1)}, about {estimate.duration(sum(costs))}"
    print(f"anycell: {plan}{hurry}", file=sys.stderr, flush=True)
    with progress(costs) as (say, advance):
        result = runner.run(settings, say, advance)
    report.show(result)
    written = [report.write_json(result, options.out)]
    try:
        if (picture := chart.draw(result, options.out)) is not None:
            written.append(picture)
    except UsageError as error:  # the numbers are written; only the chart is missing
        print(f"anycell: {error}", file=sys.stderr)
    print("written:", ", ".join(map(str, written)))
    return 0 if result.ok else 1


@contextmanager
def progress(costs: Sequence[float]) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """Yields ``say``, which shows the current work, and ``advance``, which counts finished rows: by
    a bar in a terminal if rich is installed, else by a line per row, on stderr.

    Args:
        costs: the estimated seconds of each row, which give the remaining time.
    """
    from anycell.bench.estimate import duration

    total, done, current, left = len(costs), 0, "", ""
    began = time.perf_counter()
    bar = _bar(total) if sys.stderr.isatty() and importlib.util.find_spec("rich") else None

    def show() -> None:
        if bar is not None:
            bar.update(bar.task_ids[0], completed=done, description=current, left=left)
            bar.refresh()

    def say(text: str) -> None:
        nonlocal current
        current = text
        show()

    def advance() -> None:
        nonlocal done, left
        done += 1
        spent = (time.perf_counter() - began) / sum(costs[:done])
        left = f"about {duration(spent * sum(costs[done:]))} left" if done < total else ""
        show()
        if bar is None:
            row = current.partition(":")[0]
            print(f"{done}/{total} {row}{', ' * bool(left)}{left}", file=sys.stderr, flush=True)

    with bar or nullcontext():
        yield say, advance


def _bar(total: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        BarColumn(24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
        TextColumn("{task.description}"),
        console=Console(stderr=True),
        transient=True,
        # Redrawn only on news: a refreshing thread would run during a measurement.
        auto_refresh=False,
    )
    bar.add_task("", total=total, left="")
    return bar


# -- explain ---------------------------------------------------------------------------------------


def _explain(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "cell",
        nargs="?",
        help="a built-in cell, or path/to/file.py:Name; without it, or its name, a list of cells",
    )
    add("--hidden", type=positive(int), default=256, metavar="H", help="hidden size (default: 256)")
    add("--dtype", choices=dtypes("cpu"), default="float32", help="(default: float32)")
    add("--size", type=size, action="append", default=[], metavar="P=64", help="another size")
    add("--llvm", action="store_true", help="also the kernel's LLVM text")
    add("--assembly", action="store_true", help="also the machine's assembly")
    drawn = (
        "instead of the page, the graphs of a step and of its backward pass; without FILE, print"
    )
    add("--svg", nargs="?", const="-", metavar="FILE", help=drawn)


def explain(options: argparse.Namespace) -> int:
    """Prints the page of ``anycell.explain``, or a list of cells."""
    import anycell

    if options.svg and options.cell is None:
        raise UsageError("--svg draws one cell: anycell explain CELL --svg FILE")
    if options.cell is None or options.cell.endswith(".py"):
        listed = find_cells(options.cell) if options.cell else built_in()
        if not listed:
            raise UsageError(f"{options.cell} has no cell; expected a function under @anycell.cell")
        for name, cell in sorted(listed.items()):
            about = (cell.__doc__ or "").strip().partition("\n")[0]
            print(f"{name:<22} {about}".rstrip())
        return 0
    cell = find_cell(options.cell)
    asked = {"llvm": options.llvm, "assembly": options.assembly}
    try:
        page = anycell.explain(cell, options.hidden, options.dtype, **asked, **dict(options.size))
    except (TypeError, ValueError) as error:  # sizes that the cell does not have
        raise UsageError(str(error)) from error
    if options.svg in (None, "-"):
        print(page.svg() if options.svg else page)
        return 0
    try:
        Path(options.svg).write_text(page.svg(), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--svg {options.svg}: {error.strerror or error}") from None
    return 0


# -- export ----------------------------------------------------------------------------------------


def _export(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", help="path/to/file.py:NAME of a model or a list of layers, or a .keras file")
    add("--out", type=Path, required=True, metavar="DIR", help="folder for the files")
    targets = "c for C99 source (default), or a machine: x86-64-avx2, aarch64, cortex-m4, ..."
    add("--target", default="c", metavar="T", help=targets)
    add("--name", default="model", help="of the files and functions (default: model)")
    add("--weights", default="float32", metavar="W", help="float32 (default) or bfloat16")
    add("--blob", action="store_true", help="weights in a file of their own")


def export(options: argparse.Namespace) -> int:
    """Writes the files of ``anycell.export``, and prints their names."""
    import anycell

    try:
        arguments = {name: getattr(options, name) for name in ("target", "name", "weights", "blob")}
        files = anycell.export(find_model(options.model), options.out, **arguments)
    except (TypeError, ValueError) as error:  # a layer or a name that cannot be exported
        raise UsageError(" ".join(str(error).split())) from error
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"--out {options.out} cannot be used: {reason}") from None
    print("written:", ", ".join(map(str, files)))
    return 0


# -- doctor ----------------------------------------------------------------------------------------


def doctor(_: argparse.Namespace) -> int:
    """Prints what ``anycell.doctor`` finds."""
    from anycell.doctor import main

    return main()


# -- cache -----------------------------------------------------------------------------------------


def _cache(parser: argparse.ArgumentParser) -> None:
    choices, about = ("info", "path", "clear"), "what to do (default: info)"
    parser.add_argument("action", nargs="?", choices=choices, default="info", help=about)


def cache(options: argparse.Namespace) -> int:
    """Prints where kernels are kept and how large they are, or deletes them."""
    from anycell import cache

    path = cache.path()
    if options.action == "path":
        print(path)
        return 0
    try:
        sizes = cache.clear() if options.action == "clear" else cache.kept()
    except FileNotFoundError:
        sizes = []
    except OSError as error:
        raise UsageError(f"{path} cannot be used: {error.strerror or error}") from None
    count = f"{len(sizes)} kernel{'s' * (len(sizes) != 1)}, {sum(sizes) / 1e6:.1f} MB"
    print(f"{path}: {count}{' deleted' * (options.action == 'clear')}")
    if options.action == "info":
        print(f"At most {cache.LIMIT / 1e6:.0f} MB are kept; the oldest go first.")
        try:
            enabled = cache.enabled()
        except ValueError as error:  # ANYCELL_CACHE is neither 0 nor 1
            raise UsageError(str(error)) from error
        if not enabled:
            print("Switched off by ANYCELL_CACHE=0: kernels are neither read from it nor kept.")
    return 0


# -- demo ------------------------------------------------------------------------------------------


def demo(options: argparse.Namespace) -> int:
    """Runs ``examples/demo.py`` of the source tree, with all further arguments."""
    if not DEMO.is_file():
        raise UsageError(
            "the demo is a script of the source tree, not of the installed package:\n"
            "  clone the repository, then run: make demo"
        )
    _require("demo", ("matplotlib", "rich", "statsmodels"), "make demo installs it")
    # In another process, because the script reads its arguments and imports its neighbours.
    return subprocess.call([sys.executable, str(DEMO), *options.rest])
