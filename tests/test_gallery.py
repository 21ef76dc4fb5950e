"""The gallery of the site: every cell has been trained, and has a page with its graph."""

import itertools
import json
import re
import sys
from pathlib import Path

import pytest

from anycell import cells
from anycell.lang.expr import topological

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import gallery
import site_gallery
import site_graph
from site_markdown import markdown


def test_every_cell_has_results() -> None:
    """`make gallery` must run when a cell is added, and when one learns other arrays."""
    results = json.loads(gallery.RESULTS.read_text(encoding="utf-8"))
    assert sorted(results) == sorted(cells.__all__)
    for name, result in results.items():
        parameters, _ = gallery.train(getattr(cells, name), 0, 0)
        assert result["parameters"] == parameters, name
        assert len(result["errors"]) == len(gallery.SEEDS)


def test_training_learns() -> None:
    _, errors = gallery.train(cells.GRU, 100, 0)
    assert len(errors) == 100 // gallery.EVERY + 1
    assert errors[-1] < 0.8 * errors[0]


@pytest.mark.parametrize("name", cells.__all__)
def test_the_graph(name: str) -> None:
    """All nodes are drawn, apart from each other, and below what they read."""
    cell = getattr(cells, name)
    boxes, edges = site_graph.graph(cell)
    drawn = [node for node in topological(cell.next) if node.op not in site_graph.INLINED]
    assert len(boxes) == len(drawn) + len(cell.states)
    assert all(boxes[a].level < boxes[b].level for a, b, _ in edges)
    picture = site_graph.svg(cell)
    assert picture.count("<rect") == len(boxes)
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
    assert "engine: " in page


def test_docstrings_become_markdown() -> None:
    text = "A layer.\n\na, b = x + y\n\nArgs:\n    one, two: numbers,\n        both.\n\nLast."
    shown = [line for line in markdown(text).splitlines() if line]
    equations = ["```text", "a, b = x + y", "```"]
    assert shown == ["A layer.", *equations, "**Args:**", "- `one`, `two`: numbers, both.", "Last."]
