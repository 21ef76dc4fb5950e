"""Draws graphs of expressions as SVG, in layers from what enters down to the results.

Numbers and hyperparameters appear inside the operation that reads them. Nodes of a layer are
ordered by the mean position of their neighbours (Sugiyama, Tagawa & Toda, 1981); long edges run
through points in the layers between.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from anycell.lang.expr import Expr, label, shared_name, topological

SIGNS = {"add": "+", "sub": "−", "mul": "×", "div": "÷", "lt": "<", "le": "≤", "gt": ">", "ge": "≥"}
ENDS = {"sub": ("", "−"), "div": ("", "÷"), "where": ("if", "then", "else")}
STEP, HEIGHT, GAP = 62, 26, 16  # between layers; of a node; between nodes
TITLE = 30  # the height of a title
INLINED = ("const", "hyper")
# Every rule is of this class, because a page that has the picture in its text applies them all.
STYLE = "".join(
    f".cell-graph {rule}"
    for rule in (
        "text{font:13px sans-serif;text-anchor:middle;fill:#222}",
        ".title{font-weight:bold;text-anchor:start}",
        ".paper{fill:#fff}",
        "g rect{fill:#fff;stroke:#8a8f98}",
        ".gate rect{fill:#dbe7fb;stroke:#4a76c4}",
        ".state rect{fill:#dff2e1;stroke:#3f9a4c}",
        ".new rect{fill:#a9dfb1;stroke:#2c7a38;stroke-width:2}",
        ".param rect{fill:#fdebd0;stroke:#d08a20}",
        ".static rect{fill:#fdebd0;stroke:#d08a20}",
        ".saved rect{fill:#eceef1;stroke:#8a8f98}",
        ".matmul rect{fill:#e9dffa;stroke:#7d55c7}",
        ".edge{fill:none;stroke:#6b7078;stroke-width:1.2}",
        "marker path{fill:#6b7078}",
        ".end{font-size:11px;fill:#8a4b00}",
    )
)


@dataclass(eq=False)
class Node:
    """A box of the picture, or a point that an edge goes through.

    Attributes:
        text: the text of the box; None for a point.
        kind: its class in the picture.
        level: its layer.
        x: the position of its middle.
    """

    text: str | None
    kind: str
    level: int = 0
    x: float = 0.0

    @property
    def width(self) -> float:
        return 6.0 if self.text is None else max(30.0, 7.6 * len(self.text) + 14)


Graph = tuple[dict[Hashable, Node], list[tuple[Hashable, Hashable, str]]]


def text(node: Expr) -> tuple[str, str]:
    """The text and the kind of a node."""
    name = label(node)
    if node.op in ("state", "param", "static"):
        return name or "", node.op
    if node.op in ("x", "preact") or (node.op == "linear" and name):
        return name or "", "gate"
    if node.op == "linear":
        matmul, output = shared_name(node.attrs[0]), node.attrs[1]
        return f"W_{matmul}" + (f", {output}" if output != matmul else ""), "matmul"
    operands = [label(arg) if arg.op in INLINED else "·" for arg in node.args]
    if node.op == "linear_t":
        return f"@ W_{shared_name(node.attrs[0])}", "matmul"
    if node.op in SIGNS:
        sign = SIGNS[node.op]
        return (sign if operands == ["·", "·"] else f"{operands[0]} {sign} {operands[1]}"), "op"
    alone = all(arg == "·" for arg in operands)
    return (node.op if alone else f"{node.op}({', '.join(map(str, operands))})"), "op"


def graph(roots: list[tuple[str, Expr, str]], known: dict[Expr, tuple[str, str]]) -> Graph:
    """The graph of everything that the roots depend on; a root is a name, a node and a kind.

    Args:
        known: texts and kinds of nodes whose arguments are not drawn.
    """
    nodes = topological([node for _, node, _ in roots], known.__contains__)
    order = [node for node in nodes if node.op not in INLINED]
    boxes: dict[Hashable, Node] = {node: Node(*known.get(node, text(node))) for node in order}
    edges: list[tuple[Hashable, Hashable, str]] = []
    for node in order:
        args = () if node in known else node.args
        ends = ENDS.get(node.op, ()) if not any(a.op in INLINED for a in args) else ()
        for i, arg in enumerate(args):
            if arg.op not in INLINED:
                edges.append((arg, node, ends[i] if ends else ""))
        above = [boxes[arg].level for arg in args if arg in boxes]
        boxes[node].level = max(above, default=-1) + 1
    for name, node, kind in roots:
        if node in boxes:  # a constant is no box
            boxes[name] = Node(name, kind, boxes[node].level + 1)
            edges.append((node, name, ""))
    for node in reversed(order):  # as far down as its readers permit
        boxes[node].level = min(boxes[b].level for a, b, _ in edges if a is node) - 1
    top = min((box.level for box in boxes.values()), default=0)
    for box in boxes.values():
        box.level -= top
    return boxes, edges


def svg(*parts: tuple[str, Graph]) -> str:
    """One picture of several graphs, one below the other, each under its title."""
    drawn = [_drawn(title, graph) for title, graph in parts if graph[0]]  # numbers alone have none
    width, height, shapes = max((width for width, _, _ in drawn), default=0.0), 0.0, []
    for _, below, text in drawn:
        shapes.append(f'<g transform="translate(0 {height:.0f})">{text}</g>')
        height += below
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" class="cell-graph" role="img" '
        f'aria-label="{escape("; ".join(title for title, _ in parts))}"><style>{STYLE}</style>'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" '
        'markerHeight="6" orient="auto"><path d="M0 0 8 4 0 8z"/></marker></defs>'
        f'<rect class="paper" width="100%" height="100%"/>{"".join(shapes)}</svg>'
    )


def _drawn(title: str, drawn: Graph) -> tuple[float, float, str]:
    """Width and height of a graph under its title, and its elements."""
    boxes, edges = drawn
    layers: list[list[Node]] = [[] for _ in range(max(b.level for b in boxes.values()) + 1)]
    for box in boxes.values():
        layers[box.level].append(box)
    paths = []
    for a, b, end in edges:
        start, stop = boxes[a], boxes[b]
        points = [Node(None, "", level) for level in range(start.level + 1, stop.level)]
        for point in points:
            layers[point.level].append(point)
        paths.append(([start, *points, stop], end))
    width = max(_place(layers, [path for path, _ in paths]), 8.0 * len(title))
    text = f'<text class="title" x="8" y="{TITLE - 10}">{escape(title)}</text>'
    lines = "".join(_edge(path, end) for path, end in paths)
    shapes = "".join(map(_box, boxes.values()))
    return width, TITLE + STEP * (len(layers) - 1) + HEIGHT + 12, text + lines + shapes


def _place(layers: list[list[Node]], paths: list[list[Node]]) -> float:
    """Places the nodes; returns the width of the picture."""
    above: dict[Node, list[Node]] = {node: [] for layer in layers for node in layer}
    below: dict[Node, list[Node]] = {node: [] for layer in layers for node in layer}
    for path in paths:
        for a, b in pairwise(path):
            below[a].append(b)
            above[b].append(a)
    for layer in layers:
        _apart(layer, {node: float(i) for i, node in enumerate(layer)})
    for sweep in range(24):
        down = sweep % 2 == 0
        for layer in layers if down else reversed(layers):
            wanted = {}
            for node in layer:
                near = (above if down else below)[node]
                near = above[node] + below[node] if sweep >= 20 else near
                wanted[node] = sum(n.x for n in near) / len(near) if near else node.x
            if sweep < 20:
                layer.sort(key=wanted.__getitem__)
            _apart(layer, wanted)
    left = min(node.x - node.width / 2 for layer in layers for node in layer) - 4
    for layer in layers:
        for node in layer:
            node.x -= left
    return max(node.x + node.width / 2 for layer in layers for node in layer) + 4


def _apart(layer: list[Node], wanted: dict[Node, float]) -> None:
    """Places the nodes of a layer near their wanted places, in order and without overlap."""
    edge = float("-inf")
    for node in layer:
        node.x = max(wanted[node], edge + node.width / 2)
        edge = node.x + node.width / 2 + GAP
    shift = sum(wanted[node] - node.x for node in layer) / max(1, len(layer))
    for node in layer:
        node.x += shift


def _middle(node: Node) -> float:
    return TITLE + STEP * node.level + HEIGHT / 2 + 4


def _edge(path: list[Node], end: str) -> str:
    start, stop = path[0], path[-1]
    x, y = start.x, _middle(start) + HEIGHT / 2
    drawn = f"M{x:.0f} {y:.0f}"
    for node in path[1:]:
        to = _middle(node) - (HEIGHT / 2 if node is stop else 0)
        bend = (to - y) / 2
        drawn += f"C{x:.0f} {y + bend:.0f} {node.x:.0f} {to - bend:.0f} {node.x:.0f} {to:.0f}"
        x, y = node.x, to
    note = ""
    if end:
        side = 6 if path[-2].x <= stop.x else -6
        place = f'x="{stop.x + (path[-2].x - stop.x) * 0.22 - side:.0f}" y="{y - 10:.0f}"'
        note = f'<text class="end" {place}>{end}</text>'
    return f'<path class="edge" d="{drawn}" marker-end="url(#tip)"/>{note}'


def _box(box: Node) -> str:
    y = _middle(box)
    return (
        f'<g class="{box.kind}"><rect x="{box.x - box.width / 2:.0f}" y="{y - HEIGHT / 2:.0f}" '
        f'width="{box.width:.0f}" height="{HEIGHT}" rx="7"/>'
        f'<text x="{box.x:.0f}" y="{y + 4.5:.0f}">{escape(box.text or "")}</text></g>'
    )
