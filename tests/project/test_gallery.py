"""The gallery of the site: every cell has been trained, and has a page with its graph."""

import itertools
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import anycell
from anycell import cells, drawing
from anycell.lang.expr import topological

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import gallery
import site_gallery
from site_markdown import markdown

RESULTS = json.loads(gallery.RESULTS.read_text(encoding="utf-8"))


def test_every_cell_has_results() -> None:
    """`make gallery` must run when a cell is added."""
    assert sorted(RESULTS) == sorted(cells.__all__)
    for name, result in RESULTS.items():
        assert sorted(result) == sorted(["speed", *gallery.problems(name)])
        for problem in gallery.problems(name):
            assert len(result[problem]["errors"]) == len(gallery.SEEDS)


@pytest.mark.parametrize("name", cells.__all__)
@pytest.mark.sample(every=9)
def test_results_are_of_what_a_cell_learns(name: str) -> None:
    """And when one learns other arrays."""
    for problem in gallery.problems(name):
        parameters, _ = gallery.train(getattr(cells, name), problem, 0, 0)
        assert RESULTS[name][problem]["parameters"] == parameters


@pytest.mark.parametrize("problem", gallery.PROBLEMS)
def test_a_constant_answer_has_the_error_of_the_page(problem: str) -> None:
    drawn, _, guess = gallery.PROBLEMS[problem]
    batch = drawn(np.random.default_rng(0), 4096)
    assert batch.x.shape[1] == batch.y.shape[1] == 4096
    assert batch.y.var() == pytest.approx(guess, rel=0.05)


@pytest.mark.parametrize("name, problem", [("GRU", "adding"), ("RNN", "copying")])
@pytest.mark.sample(1)
def test_training_learns(name: str, problem: str) -> None:
    _, errors = gallery.train(getattr(cells, name), problem, 100, 0)
    assert len(errors) == 100 // gallery.EVERY + 1
    assert errors[-1] < 0.8 * errors[0]


def test_a_cell_is_timed_against_a_loop() -> None:
    pytest.importorskip("torch")
    times = gallery.speed("MGU", 0.0)
    assert 0 < times["ours"] < times["loop"]


@pytest.mark.parametrize("name", cells.__all__)
def test_the_graph(name: str) -> None:
    """All nodes are drawn; a layer norm is one."""
    cell, sizes = getattr(cells, name), gallery.SIZES.get(name, {})
    boxes, _ = graph = anycell.explain(cell, **sizes).page.step_graph()
    if "LayerNorm" in name:
        assert len(boxes) < 0.6 * len(topological(cell.next))
        assert any("layer_norm" in str(box.text) for box in boxes.values())
    else:
        drawn = [node for node in topological(cell.next) if node.op not in drawing.INLINED]
        assert len(boxes) == len(drawn) + len(cell.states)
    assert_drawn(graph, len(boxes))


@pytest.mark.parametrize("name", cells.__all__)
def test_the_backward_graph(name: str) -> None:
    """It begins at what is saved and at gradients, and has each result of the backward pass."""
    cell, sizes = getattr(cells, name), gallery.SIZES.get(name, {})
    boxes, edges = graph = anycell.explain(cell, **sizes).page.backward_graph()
    assert_drawn(graph, len(boxes))
    first = {boxes[b].text for b in {*boxes} - {b for _, b, _ in edges}}
    last = {boxes[a].text for a in {*boxes} - {a for a, _, _ in edges}}
    page = str(anycell.explain(cell, gallery.UNITS, **sizes))
    derived = page.partition("backward, one step, derived")[2].partition("summed over rows")[0]
    for text in last:
        assert f"{text} = " in derived, text
    assert {f"d_{state}'" for state in cell.state_names} & first
    assert len(last) >= len(cell.gates)


def assert_drawn(graph: drawing.Graph, count: int) -> None:
    """So many boxes, apart from each other, and below what they read."""
    boxes, edges = graph
    assert len(boxes) == count
    assert all(boxes[a].level < boxes[b].level for a, b, _ in edges)
    picture = drawing.svg(("a graph", graph))
    assert picture.count("<rect x") == len(boxes)
    assert picture.count('class="edge"') == len(edges)
    rows: dict[str, list[tuple[float, float]]] = {}
    for x, y, width in re.findall(r'<rect x="(-?\d+)" y="(\d+)" width="(\d+)"', picture):
        rows.setdefault(y, []).append((float(x), float(x) + float(width)))
    for places in rows.values():
        places.sort()
        assert all(left[1] < right[0] for left, right in itertools.pairwise(places))


def test_a_page() -> None:
    pages = site_gallery.pages()
    assert set(pages) == {"index.md", *(f"{name}.md" for name in cells.__all__)}
    page = pages["PeepholeLSTM.md"]
    assert "def PeepholeLSTM(" in page and '"""' not in page
    assert "| `p_i_l0` | `[32]` |" in page
    assert "engine: " in page and page.count("<svg") == 3


def test_docstrings_become_markdown() -> None:
    text = "A layer.\n\na, b = x + y\n\nArgs:\n    one, two: numbers,\n        both.\n\nLast."
    shown = [line for line in markdown(text).splitlines() if line]
    equations = ["```text", "a, b = x + y", "```"]
    assert shown == ["A layer.", *equations, "**Args:**", "- `one`, `two`: numbers, both.", "Last."]
