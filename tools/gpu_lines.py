"""Shared by the GPU engine's tools: arguments, lines of JSON, their tables.

Its import puts the checkout's ``anycell`` on the path; PyTorch is imported only when needed.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

Line = dict[str, Any]


def arguments(doc: str | None, seconds: float | None = None) -> argparse.ArgumentParser:
    """A parser; with ``seconds``, it has an option ``--seconds`` with that default."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    if seconds is not None:
        parser.add_argument("--seconds", type=float, default=seconds)
    return parser


def need_card(tool: str) -> None:
    """Ends the process if PyTorch sees no card."""
    import torch

    if not torch.cuda.is_available():
        print(f"{tool}: no CUDA card here.", file=sys.stderr, flush=True)
        sys.exit(1)


def say(line: Line) -> None:
    """Prints a line of JSON at once."""
    print(json.dumps(line), flush=True)


def tried(run: Callable[..., Line], *given: Any) -> Line:
    """Calls ``run``; returns its line, or a line with its error."""
    try:
        return run(*given)
    except Exception as error:
        return {"error": told(error)}


def told(error: BaseException) -> str:
    """The type of an error, and the beginning of its message."""
    return f"{type(error).__name__}: {error}"[:400]


def over(seconds: float) -> str:
    """The reason why a tool stopped early."""
    return f"{seconds:g} seconds were over"


def lines_of(text: str) -> list[Line]:
    """The lines of a text that are JSON objects."""
    found = []
    for line in text.splitlines():
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    """Yields the lines of a Markdown table."""
    yield f"| {' | '.join(header)} |"
    yield "|---" * len(header) + "|"
    for row in rows:
        yield f"| {' | '.join(str(value).replace('|', '/') for value in row)} |"


def host_of_card(dtype: Any) -> Any:
    """The GPU engine's host of tensors on the current card."""
    import torch

    from anycell.torch.framework import TorchDevice

    return TorchDevice(dtype, torch.device("cuda", torch.cuda.current_device()))
