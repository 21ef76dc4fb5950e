"""The order of a program: stages of products, reductions, and loops over units.

The level of a value is how many products and reductions it takes one after the other. Values that
one stage leaves to another are arrays; all others live inside one turn of a loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
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
        scales: ``[out]`` for each operand whose weights are integers.
    """

    operands: tuple[Expr, ...]
    weights: tuple[Array, ...]
    scales: tuple[Array | None, ...]
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


Key = tuple[int, int]  # a loop: its level, and the size of its values


class Schedule:
    """The stages of a step, in order.

    Attributes:
        places: where the values are that one stage leaves to another, and the leaves.
        rooms: the arrays between stages, with their lengths.
    """

    def __init__(self, program: Program) -> None:
        self.program, self.stages = program, list[Product | Fold | Loop]()
        self.places, self.rooms = dict[Expr, Place](), dict[str, int]()
        self.order = topological([program.output, *(memory.new for memory in program.memories)])
        self.level, self.size = dict[Expr, int](), dict[Expr, int]()
        for node in self.order:
            below = max((self.level[arg] for arg in node.args), default=0)
            self.level[node] = below + _apart(node)
            self.size[node] = program.size(node, self.size)
            if node.op in LEAVES:
                self.places[node] = _leaf(program, node, self.size[node])
        stores = self._stores()
        loops, kept = self._loops(stores)
        apart = [node for node in self.order if _apart(node)]
        for level in range(1 + max(key[0] for key in loops)):
            now = [node for node in apart if self.level[node] == level]
            self._products([node for node in now if node.op == "linear"])
            self._folds([node for node in now if is_reduction(node)])
            for key in sorted(key for key in loops if key[0] == level):
                self._loop(key[1], loops[key], kept, list(stores.get(key, ())))

    def _room(self, size: int) -> Place:
        """A new array."""
        name = f"v{len(self.rooms)}"
        self.rooms[name] = size
        return Place(name, 0, size)

    def _stores(self) -> dict[Key, list[tuple[Expr, Place]]]:
        """The values that each loop must store: new states, and the output. A layer's states are
        replaced together, once nothing reads their old values any more.
        """
        program, stores = self.program, dict[Key, list[tuple[Expr, Place]]]()
        for layer in range(len(program.ends)):
            memories = [memory for memory in program.memories if memory.layer == layer]
            sizes = {memory.at.size for memory in memories}
            last = max(self.level[node] for node in topological(m.new for m in memories))
            for memory in memories:
                key = last + (len(sizes) > 1), memory.at.size
                stores.setdefault(key, []).append((memory.new, memory.at))
        out = Place("out", 0, program.outputs)
        stores.setdefault((self.level[program.output], out.size), []).append((program.output, out))
        return stores

    def _loops(
        self, stores: dict[Key, list[tuple[Expr, Place]]]
    ) -> tuple[dict[Key, list[Expr]], dict[Expr, None]]:
        """The values that each loop computes, and those that other stages read.

        A value is computed where it is read, if one loop alone reads it, else as early as it can
        be; a condition wherever it is read.
        """
        loops: dict[Key, list[Expr]] = {key: [] for key in stores}
        readers: dict[Expr, set[Key]] = {node: set() for node in self.order}
        for key, pairs in stores.items():
            for node, _ in pairs:
                readers[node].add(key)
        kept = dict.fromkeys(self.program.ends)
        for node in self.order:
            kept |= dict.fromkeys(node.args if _apart(node) else ())
        for node in reversed(self.order):
            if _apart(node) or node.op in LEAVES or (node.op == "const" and node not in kept):
                continue
            homes = set(readers[node])
            if not is_boolean(node):
                if node in kept or len(homes) != 1 or min(homes)[1] != self.size[node]:
                    homes = {(self.level[node], self.size[node])}
                if readers[node] - homes:
                    kept[node] = None
            for home in homes:
                loops.setdefault(home, []).insert(0, node)
                for arg in node.args:
                    readers[arg].add(home)
        return loops, kept

    def _loop(
        self, size: int, nodes: list[Expr], kept: dict[Expr, None],
        stores: list[tuple[Expr, Place]],
    ) -> None:  # fmt: skip
        """Adds a loop; a value that others read goes to an array unless it is a state."""
        states = {node: place for node, place in reversed(stores) if place.array == "state"}
        for node in nodes:
            if node in kept:
                if node not in states:
                    states[node] = self._room(size)
                    stores.append((node, states[node]))
                self.places[node] = states[node]
        self.stages.append(Loop(size, nodes, stores))

    def _folds(self, nodes: Sequence[Expr]) -> None:
        """Adds a stage for all reductions of as many units."""
        folds: dict[tuple[int, ...], list[Expr]] = {}
        for node in nodes:
            self.places[node] = self._room(self.size[node])
            folds.setdefault(node.attrs, []).append(node)
        self.stages += map(Fold, folds.values())

    def _products(self, nodes: Sequence[Expr]) -> None:
        """Adds a stage for all products of the same operands."""
        matrices = self.program.matrices
        groups: dict[tuple[tuple[Expr, bool], ...], list[Expr]] = {}
        for node in nodes:
            integers = (matrices[k].scales is not None for k in node.attrs)
            groups.setdefault((*zip(node.args, integers, strict=True),), []).append(node)
        for operands, members in groups.items():
            blocks = [[matrices[k] for k in node.attrs] for node in members]
            sizes = [len(block[0].bias) for block in blocks]
            ends = list(itertools.accumulate(padded(size, self.program.lanes) for size in sizes))
            weights = [np.zeros((m.weight.shape[1], ends[-1]), np.float32) for m in blocks[0]]
            scales = [np.zeros(ends[-1], np.float32) if of else None for _, of in operands]
            bias = np.zeros(ends[-1], np.float32)
            to = self._room(ends[-1] - padded(sizes[-1], self.program.lanes) + sizes[-1])
            for node, block, size, first in zip(members, blocks, sizes, [0, *ends], strict=False):
                self.places[node] = Place(to.array, first, size)
                columns = slice(first, first + size)
                for weight, of, part in zip(weights, scales, block, strict=True):
                    weight[:, columns] = part.weight.T
                    bias[columns] += part.bias
                    if of is not None:
                        of[columns] = part.scales
            values = tuple(operand for operand, _ in operands)
            self.stages.append(Product(values, (*weights,), (*scales,), bias, to))


def _apart(node: Expr) -> bool:
    """Whether a value is computed by a stage of its own."""
    return node.op == "linear" or is_reduction(node)


def _leaf(program: Program, node: Expr, size: int) -> Place:
    match node.op:
        case "input":
            return Place(node.attrs[0], node.attrs[1], size)
        case "state":
            return program.memories[node.attrs[0]].at
    return Place(f"p{node.attrs[0]}", 0, size)
