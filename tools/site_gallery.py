"""The pages of the gallery, one for each built-in cell, from the cell and its training results."""

from __future__ import annotations

import inspect
import json
import math
import re
import statistics
from typing import Any

from gallery import EVERY, PROBLEMS, RATE, RESULTS, ROWS, SIZES, UNITS, problems
from site_markdown import markdown

import anycell
from anycell import Cell, cells, drawing
from anycell.layer import parameters

SOLVED = 0.01
HOW = (
    f"Layers of {UNITS} units see batches of {ROWS} sequences; Adam has the rate {RATE}. Nothing "
    "is tuned for any cell: the figures say that a cell learns, not which one is best."
)
NOTES = {
    "EALSTM": "This cell knows one thing more: its static input depends on the rate of the sine.",
}
TIMED = (
    "Training in PyTorch, 32 steps of 16 rows, 64 inputs and 64 units, float32, one thread, in "
    "turns with a loop over the steps in Python. The loops of LSTM, GRU, RNN, PeepholeLSTM and "
    "LayerNormLSTM are written by hand, with one matmul a step; all others go through the graph of "
    "the cell, operation by operation."
)
LEGEND = (
    "Blue: projections of the gates; a.k is x.k + r.k, the input's and the recurrent one's sum. "
    "Green: states before the step, and new ones (h'). Orange: what each unit learns, and static "
    "inputs. Purple: further matmuls."
)
BACKWARD = (
    "anycell derives it from the step. Grey: what the step has saved. Green: gradients of the new "
    "states, which arrive from the output and the step after, and those of the states before "
    "(d_s), without what comes through a matmul. Blue, orange and purple: gradients of gates, of "
    "what each unit learns, and of further matmuls."
)


def names() -> list[str]:
    """The names of the pages."""
    return ["index.md", *(f"{name}.md" for name in cells.__all__)]


def pages() -> dict[str, str]:
    """The text of each page, by its name."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    texts = [_index(results), *(_page(getattr(cells, name), results) for name in cells.__all__)]
    return dict(zip(names(), texts, strict=True))


def _index(results: dict[str, Any]) -> str:
    rows = []
    for name in cells.__all__:
        about = markdown(inspect.getdoc(getattr(cells, name)) or "").splitlines()[0]
        suits = problems(name)[0]
        errors = results[name][suits]["errors"]
        last = statistics.median(run[-1] for run in errors)
        rows.append(
            f"| [{name}]({name}.md) | {about} | {_faster(results[name])} "
            f"| {suits} | {last:.2g} | {_solved(errors)} |"
        )
    return "\n".join(
        [
            "# Gallery",
            "",
            "Each built-in cell has a page: its equations, its code, what a layer of it learns, "
            "the graphs of its step and of its backward pass, how fast it is, one small "
            "experiment, and what `anycell.explain` says of it.",
            "",
            "| cell | what it is | times a loop's speed | problem | error | steps to solve it |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            "Each cell trains on the problem that suits it, of those below. The error is the mean "
            "squared one after 1000 steps of training, and the steps to solve it are those until "
            f"the error was below {SOLVED}: medians of three runs. `make gallery` runs all of it "
            "again, in minutes.",
            "",
            *(f"- **{name}**: {p.about}" for name, p in PROBLEMS.items()),
            "",
            HOW,
            "",
            TIMED,
            "",
        ]
    )


def _speed(result: dict[str, Any]) -> list[str]:
    ours, loop = (result["speed"][who] for who in ("ours", "loop"))
    times = f"{ours:g} ms, and the loop {loop:g} ms, on {result['speed']['on']}: "
    times += f"**{_faster(result)} times as fast**."
    return ["## Speed", "", f"{times} {TIMED}", ""]


def _faster(result: dict[str, Any]) -> str:
    return f"{result['speed']['loop'] / result['speed']['ours']:.1f}"


def _solved(runs: list[list[float]]) -> str:
    """The median number of steps until a run's error is below the bound."""
    reached = [next((i for i, e in enumerate(run) if e < SOLVED), math.inf) for run in runs]
    middle = statistics.median(reached)
    return "not reached" if middle == math.inf else f"{middle * EVERY:.0f}"


def _page(cell: Cell, results: dict[str, Any]) -> str:
    sizes, result = SIZES.get(cell.name, {}), results[cell.name]
    code = re.sub(
        r'\n    """.*?"""', "", inspect.getsource(cell.function), count=1, flags=re.DOTALL
    )
    page = anycell.explain(cell, UNITS, **sizes)
    learned = parameters(cell, {"H": UNITS, **sizes}, 2, cell.bias, 1, 1)
    return "\n".join(
        [
            f"# {cell.name}",
            "",
            markdown(inspect.getdoc(cell) or ""),
            "",
            f"[Arguments](../api/cells.md#anycell.cells.{cell.name}) and the [list of all "
            "cells](../cells.md#built-in).",
            "",
            "## Code",
            "",
            f"```python\n{code}```",
            "",
            "## The graph of a step",
            "",
            LEGEND,
            "",
            _drawn(f"A step of {cell.name}", page.page.step_graph()),
            "",
            "## The graph of its backward pass",
            "",
            BACKWARD,
            "",
            _drawn(f"The backward pass of a step of {cell.name}", page.page.backward_graph()),
            "",
            "## What a layer learns",
            "",
            f"For 2 inputs and {UNITS} units"
            + "".join(f", {symbol} = {size}" for symbol, size in sizes.items())
            + ":",
            "",
            "| array | shape |",
            "|---|---|",
            *(f"| `{name}` | `{list(shape)}` |" for name, shape in learned),
            "",
            *_speed(result),
            *_experiment(cell.name, problems(cell.name)[0], results),
            "## What becomes of it",
            "",
            f"`print(anycell.explain(cells.{cell.name}, {UNITS}"
            + "".join(f", {symbol}={size}" for symbol, size in sizes.items())
            + "))`:",
            "",
            f"```text\n{page}\n```",
            "",
        ]
    )


def _drawn(title: str, graph: drawing.Graph) -> str:
    return f'<div class="graph">{drawing.svg((title, graph))}</div>'


def _experiment(name: str, problem: str, results: dict[str, Any]) -> list[str]:
    text = f"{PROBLEMS[problem].about} {NOTES.get(name, '')} {HOW}"
    return [
        f"## An experiment: {problem}",
        "",
        text,
        "",
        "In colour three runs of this cell, in grey those of other cells; the dashed line is the "
        "best constant answer:",
        "",
        f'<div class="curve">{curve(name, problem, results)}</div>',
        "",
    ]


def curve(name: str, problem: str, results: dict[str, Any]) -> str:
    """An SVG of all cells' errors on a problem over the training steps, with one cell in colour."""
    runs = {
        cell: result[problem]["errors"] for cell, result in results.items() if problem in result
    }
    width, height, left, bottom, low, high = 640, 300, 52, 40, 1e-4, 1.0
    count = max(len(run) for each in runs.values() for run in each)

    def x(i: float) -> float:
        return left + (width - left - 10) * i / (count - 1)

    def y(error: float) -> float:
        part = math.log(min(max(error, low), high) / low) / math.log(high / low)
        return 10 + (height - bottom - 10) * (1 - part)

    def across(kind: str, error: float) -> str:
        place = f'x1="{left}" x2="{width - 10}" y1="{y(error):.0f}" y2="{y(error):.0f}"'
        return f'<line class="{kind}" {place}/>'

    def line(run: list[float], kind: str) -> str:
        points = " ".join(f"{x(i):.0f},{y(error):.1f}" for i, error in enumerate(run))
        return f'<polyline class="{kind}" points="{points}"/>'

    parts = []
    for power in range(-4, 1):
        at = y(10.0**power)
        parts.append(
            f'<line class="grid" x1="{left}" x2="{width - 10}" y1="{at:.0f}" y2="{at:.0f}"/>'
        )
        parts.append(f'<text class="left" x="{left - 6}" y="{at + 4:.0f}">{10.0**power:g}</text>')
    for i in range(0, count, 8):
        parts.append(f'<text x="{x(i):.0f}" y="{height - bottom + 18}">{i * EVERY}</text>')
    parts.append(f'<text x="{x((count - 1) / 2):.0f}" y="{height - 4}">steps of training</text>')
    for other, each in runs.items():
        if other != name:
            parts += [line(run, "other") for run in each]
    guess = y(PROBLEMS[problem].guess)
    parts.append(
        f'<line class="guess" x1="{left}" x2="{width - 10}" y1="{guess:.0f}" y2="{guess:.0f}"/>'
    )
    parts += [line(run, "this") for run in runs[name]]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="Mean squared error of {name} over the steps of training">'
        f"{''.join(parts)}</svg>"
    )
