"""The order of a program: stages of products, reductions, and loops over units.

The level of a value is how many products and reductions it takes one after the other. Values that
one stage leaves to another are arrays; all others live inside one turn of a loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from anycell.exporter.program import Array, Place, Program, padded
from anycell.lang.expr import Expr, topological
from anycell.lang.ops import is_boolean, is_reduction

LEAVES = "input", "state", "param"


class Product(NamedTuple):
    """``to = bias + sum of weights[k] @ operands[k]``, for all products of the same operands.

    Attributes:
        weights: ``[in, out]`` for each operand; ``out`` counts all products side by side, each
            filled up to whole vectors.
    """

    operands: tuple[Expr, ...]
    weights: tuple[Array, ...]
    bias: Array
    to: Place


class Fold(NamedTuple):
    """Reductions of as many units each."""

    nodes: list[Expr]


class Loop(NamedTuple):
    """Values computed unit by unit: arguments before their users; and where some are stored."""

    size: int
    nodes: list[Expr]
    stores: list[tuple[Expr, Place]]


@dataclass
class Schedule:
    """The stages of a step, in order.

    Attributes:
        places: where the values are that one stage leaves to another, and the leaves.
        rooms: the arrays between stages, with their lengths.
    """

    stages: list[Product | Fold | Loop] = field(default_factory=list)
    places: dict[Expr, Place] = field(default_factory=dict)
    rooms: dict[str, int] = field(default_factory=dict)

    def room(self, size: int) -> Place:
        """A new array."""
        name = f"v{len(self.rooms)}"
        self.rooms[name] = size
        return Place(name, 0, size)


def schedule(program: Program) -> Schedule:
    """Orders a program."""
    done, level, size = Schedule(), dict[Expr, int](), dict[Expr, int]()
    order = topological([program.output, *(memory.new for memory in program.memories)])
    for node in order:
        level[node] = max((level[arg] for arg in node.args), default=0) + _apart(node)
        size[node] = program.size(node, size)
    # A layer's states are replaced together, once nothing reads their old values any more.
    stores: dict[tuple[int, int], list[tuple[Expr, Place]]] = {}
    for layer in range(len(program.ends)):
        memories = [memory for memory in program.memories if memory.layer == layer]
        sizes = {memory.at.size for memory in memories}
        last = max(level[n] for n in topological(m.new for m in memories)) + (len(sizes) > 1)
        for memory in memories:
            stores.setdefault((last, memory.at.size), []).append((memory.new, memory.at))
    out = Place("out", 0, program.outputs)
    stores.setdefault((level[program.output], out.size), []).append((program.output, out))

    # Each value is computed where it is read, if one loop alone reads it, else as early as it can.
    loops: dict[tuple[int, int], list[Expr]] = {key: [] for key in stores}
    readers: dict[Expr, set[tuple[int, int]]] = {node: set() for node in order}
    kept, apart = dict.fromkeys(program.ends), list[Expr]()
    for key, pairs in stores.items():
        for node, _ in pairs:
            readers[node].add(key)
    for node in reversed(order):
        if _apart(node):
            apart.append(node)
            kept |= dict.fromkeys(node.args)
            continue
        if node.op in LEAVES or (node.op == "const" and node not in kept):
            continue
        homes = set(readers[node])
        if not is_boolean(node):
            if node in kept or len(homes) != 1 or min(homes)[1] != size[node]:
                homes = {(level[node], size[node])}
            if readers[node] - homes:
                kept[node] = None
        for home in homes:
            loops.setdefault(home, []).append(node)
            for arg in node.args:
                readers[arg].add(home)

    for node in order:
        if node.op in LEAVES:
            done.places[node] = _leaf(program, node, size[node])
    for key in sorted({(level[node], 0) for node in apart} | set(loops)):
        if key[1] == 0:
            now = [node for node in reversed(apart) if level[node] == key[0]]
            done.stages += _products(program, done, [n for n in now if n.op == "linear"])
            folds: dict[tuple[int, int], list[Expr]] = {}
            for node in now:
                if is_reduction(node):
                    done.places[node] = done.room(size[node])
                    folds.setdefault(node.attrs, []).append(node)
            done.stages += map(Fold, folds.values())
            continue
        nodes, written = loops[key][::-1], list(stores.get(key, []))
        for node in nodes:
            if node in kept:
                place = next((p for n, p in written if n is node and p.array == "state"), None)
                if place is None:
                    place = done.room(key[1])
                    written.append((node, place))
                done.places[node] = place
        done.stages.append(Loop(key[1], nodes, written))
    return done


def _apart(node: Expr) -> bool:
    """Whether a value is computed by a stage of its own."""
    return node.op == "linear" or is_reduction(node)


def _leaf(program: Program, node: Expr, size: int) -> Place:
    match node.op:
        case "input":
            return Place("in", node.attrs[0], size)
        case "state":
            return program.memories[node.attrs[0]].at
    return Place(f"p{node.attrs[0]}", 0, size)


def _products(program: Program, done: Schedule, nodes: Sequence[Expr]) -> list[Product]:
    """One stage for all products of the same operands."""
    groups: dict[tuple[Expr, ...], list[Expr]] = {}
    for node in nodes:
        groups.setdefault(node.args, []).append(node)
    stages = []
    for operands, members in groups.items():
        blocks = [[program.matrices[k] for k in node.attrs] for node in members]
        sizes = [len(block[0][1]) for block in blocks]
        ends = list(itertools.accumulate(padded(size, program.lanes) for size in sizes))
        weights = [np.zeros((w.shape[1], ends[-1]), np.float32) for w, _ in blocks[0]]
        bias, to = np.zeros(ends[-1], np.float32), done.room(ends[-1])
        for node, block, size, first in zip(members, blocks, sizes, [0, *ends], strict=False):
            done.places[node] = Place(to.array, first, size)
            for all_, (weight, added) in zip(weights, block, strict=True):
                all_[:, first : first + size] = weight.T
                bias[first : first + size] += added
        stages.append(Product(operands, tuple(weights), bias, to))
    return stages
