"""Draws the graph of a cell's step as SVG, in layers from the inputs down to the new states.

Numbers and hyperparameters appear inside the operation that reads them. Nodes of a layer are
ordered by the mean position of their neighbours (Sugiyama, Tagawa & Toda, 1981); long edges run
through points in the layers between.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from gallery import UNITS

import anycell
from anycell import Cell
from anycell.lang.expr import Expr, label, topological

SIGNS = {"add": "+", "sub": "−", "mul": "×", "div": "÷", "lt": "<", "le": "≤", "gt": ">", "ge": "≥"}
ENDS = {"sub": ("", "−"), "div": ("", "÷"), "where": ("if", "then", "else")}
STEP, HEIGHT, GAP = 62, 26, 16  # between layers; of a node; between nodes
INLINED = ("const", "hyper")


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
        matmul, output = node.attrs
        return f"W_{matmul}" + (f", {output}" if output != matmul else ""), "matmul"
    given = [label(arg) if arg.op in INLINED else "·" for arg in node.args]
    if node.op == "linear_t":
        return f"@ W_{node.attrs[0]}", "matmul"
    if node.op in SIGNS:
        sign = SIGNS[node.op]
        return (sign if given == ["·", "·"] else f"{given[0]} {sign} {given[1]}"), "op"
    alone = all(arg == "·" for arg in given)
    return (node.op if alone else f"{node.op}({', '.join(map(str, given))})"), "op"


def forward(cell: Cell, **sizes: int) -> Graph:
    """The graph of a step, down to its new states."""
    states = anycell.explain(cell, UNITS, **sizes).page.folded()[-len(cell.states) :]
    return graph([(name, node, "new") for name, node in states], {})


def backward(cell: Cell, **sizes: int) -> Graph:
    """The graph of a step's backward pass, from saved values and arriving gradients."""
    page = anycell.explain(cell, UNITS, **sizes).page
    arriving = page.arriving().items()
    known = {n: (name, "state" if n.op == "grad" else "saved") for n, name in arriving}
    kinds = {"s": "new", "p": "param", "a": "gate", "x": "gate", "r": "gate"}
    roots = []
    for name, node in page.gradients():
        part = name.removeprefix("d_").partition(".")
        kind = "static" if name == f"d_{cell.static}" else "matmul"
        roots.append((name, node, kinds.get(part[0], kind) if part[1] else kind))
    return graph(roots, known)


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
    top = min(box.level for box in boxes.values())
    for box in boxes.values():
        box.level -= top
    return boxes, edges


def svg(drawn: Graph, title: str) -> str:
    """The picture."""
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
    width = _place(layers, [path for path, _ in paths])
    height = STEP * (len(layers) - 1) + HEIGHT + 8
    lines = [_edge(path, end) for path, end in paths]
    shapes = [_box(box) for box in boxes.values()]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" '
        f'width="{width:.0f}" height="{height}" role="img" aria-label="{escape(title)}">'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" '
        'markerHeight="6" orient="auto"><path d="M0 0 8 4 0 8z"/></marker></defs>'
        f"{''.join(lines)}{''.join(shapes)}</svg>"
    )


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
    return STEP * node.level + HEIGHT / 2 + 4


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
