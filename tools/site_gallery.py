"""The pages of the gallery: each built-in cell, from the cell itself and what training it gave."""

from __future__ import annotations

import inspect
import json
import math
import re
import statistics
from typing import Any

import site_graph
from gallery import EVERY, LENGTH, RATE, RESULTS, ROWS, SIZES, UNITS
from site_markdown import markdown

import anycell
from anycell import Cell, cells
from anycell.layer import parameters

GUESS, SOLVED = 1 / 6, 0.01
PROBLEM = (
    f"Two of {LENGTH} steps are marked; the answer is the sum of their values. Layers of {UNITS} "
    f"units see batches of {ROWS} sequences; Adam has the rate {RATE}. To guess the mean gives an "
    f"error of {GUESS:.2g}. Nothing is tuned for any cell: the figures say that a cell learns, "
    "not which one is best."
)
NOTES = {
    "GRUD": "This cell sees a third input, the time since the last mark.",
    "EALSTM": "The static input of this cell is zero, so that its input gate stays at 1/2.",
}
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
        result = results[name]
        last = statistics.median(run[-1] for run in result["errors"])
        rows.append(
            f"| [{name}]({name}.md) | {about} | {result['parameters']:,} "
            f"| {last:.2g} | {_solved(result['errors'])} |"
        )
    return "\n".join(
        [
            "# Gallery",
            "",
            "Each built-in cell has a page: its equations, its code, what a layer of it learns, "
            "the graph of its step, what `anycell.explain` says of it, and one small experiment.",
            "",
            f"The experiment is the adding problem. {PROBLEM}",
            "",
            "The table has the medians of three runs: the mean squared error at the end, and the "
            f"steps of training until it was below {SOLVED}. `make gallery` runs it again.",
            "",
            "| cell | | parameters | error | steps |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _solved(runs: list[list[float]]) -> str:
    """The median number of steps until a run's error is below the bound."""
    reached = [next((i for i, e in enumerate(run) if e < SOLVED), math.inf) for run in runs]
    middle = statistics.median(reached)
    return "not reached" if middle == math.inf else f"{middle * EVERY:.0f}"


def _page(cell: Cell, results: dict[str, Any]) -> str:
    sizes = SIZES.get(cell.name, {})
    code = re.sub(
        r'\n    """.*?"""', "", inspect.getsource(cell.function), count=1, flags=re.DOTALL
    )
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
            _drawn(site_graph.forward(cell), f"The graph of a step of {cell.name}"),
            "",
            "## The graph of its backward pass",
            "",
            BACKWARD,
            "",
            _drawn(
                site_graph.backward(cell, **sizes), f"The backward pass of a step of {cell.name}"
            ),
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
            "## The adding problem",
            "",
            f"{PROBLEM} {NOTES.get(cell.name, '')}",
            "",
            "In colour three runs of this cell, in grey those of the others; the dashed line is a "
            "guess of the mean:",
            "",
            f'<div class="curve">{curve(cell.name, results)}</div>',
            "",
            "## What becomes of it",
            "",
            f"`print(anycell.explain(cells.{cell.name}, {UNITS}"
            + "".join(f", {symbol}={size}" for symbol, size in sizes.items())
            + "))`:",
            "",
            f"```text\n{anycell.explain(cell, UNITS, **sizes)}\n```",
            "",
        ]
    )


def _drawn(graph: site_graph.Graph, title: str) -> str:
    return f'<div class="graph">{site_graph.svg(graph, title)}</div>'


def curve(name: str, results: dict[str, Any]) -> str:
    """The errors of all cells over the steps as SVG, those of one in colour."""
    width, height, left, bottom, low, high = 640, 300, 52, 40, 1e-4, 1.0
    count = max(len(run) for result in results.values() for run in result["errors"])

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
    for other, result in results.items():
        if other != name:
            parts += [line(run, "other") for run in result["errors"]]
    guess = y(GUESS)
    parts.append(
        f'<line class="guess" x1="{left}" x2="{width - 10}" y1="{guess:.0f}" y2="{guess:.0f}"/>'
    )
    parts += [line(run, "this") for run in results[name]["errors"]]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="Mean squared error of {name} over the steps of training">'
        f"{''.join(parts)}</svg>"
    )
