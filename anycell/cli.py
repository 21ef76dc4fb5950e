"""``python -m anycell``: bench, explain, export, doctor, cache, demo."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from anycell.engines.cpu.pool import MOST
from anycell.machine import usable_cores
from anycell.plan.dtype import dtypes
from anycell.requirement import install
from anycell.usage import (
    UsageError,
    check_installed,
    find_cell,
    find_cells,
    find_model,
)

Handler = Callable[[argparse.Namespace], int]
DEMO = Path(__file__).resolve().parents[1] / "examples" / "demo.py"  # in a checkout only


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
    modes = "inference", "training", "both", "recurrence"
    listed: dict[str, Any] = {"type": names, "metavar": "A,B"}
    on: dict[str, Any] = {"action": "store_true"}
    add = parser.add_argument
    add("--quick", **on, help="in minutes: a few small shapes, short runs, no fresh processes")
    add("--shapes", **listed, help="all (default), some by name, or sizes as T20B4I64H128[L2][D2]")
    add("--mode", choices=modes, default="both", help="what to time (default: both)")
    add("--cells", **listed, help="built-in cells (default: LSTM,GRU)")
    own = "a cell of your own; may be repeated"
    add("--cell", action="append", default=[], metavar="FILE.py:NAME", help=own)
    of = (
        "of inputs and weights (default: float32); training in 16 bits is of float32 layers under "
        "autocast; int8 is weights of 8 bits, inference only"
    )
    add("--dtype", choices=dtypes("cpu", quantized=True), default="float32", help=of)
    all_cores = f"for everybody (default: {cores}, as many as there are cores)"
    add("--threads", type=positive(int), default=cores, metavar="N", help=all_cores)
    peers = (
        "torch.nn, anycell.numpy, anycell-LSTM, anycell-float32, in a checkout others too (a wrong "
        "name lists them), or all (default: torch.nn, and torch-loop in a checkout)"
    )
    add("--peers", **listed, help=peers)
    subject = "the contender that all others are compared with (default: anycell)"
    add("--subject", default="anycell", metavar="NAME", help=subject)
    rounds = "time for the runs of one line of a table, 5 rounds at least (default: 5)"
    add("--seconds", type=positive(float), metavar="S", help=rounds)
    add("--memory", **on, help="also measure the memory of a training step (Linux)")
    off: dict[str, Any] = {"action": "store_false"}
    add("--no-alone", dest="alone", **off, help="do not time each also alone, in a fresh process")
    first = "do not time first calls in fresh processes"
    add("--no-first-call", dest="first_call", **off, help=first)
    out = "folder for bench.json and bench.png (default: out/bench)"
    add("--out", type=Path, default=Path("out/bench"), metavar="DIR", help=out)


def bench(options: argparse.Namespace) -> int:
    """Measures layers, prints tables and writes files."""
    # It checks all results, and is the first peer.
    check_installed("bench", ["torch"], install("bench"))
    if options.threads > MOST:
        raise UsageError(f"--threads {options.threads}: expected at most {MOST}")
    if sys.stderr.isatty():
        print("anycell: importing torch", file=sys.stderr, flush=True)
    from anycell.bench import command

    return command.main(options)


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
        listed = find_cells(options.cell or "")
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
    check_installed("demo", ["matplotlib", "rich", "statsmodels"], "make demo installs it")
    # In another process, because the script reads its arguments and imports its neighbours.
    return subprocess.call([sys.executable, str(DEMO), *options.rest])
