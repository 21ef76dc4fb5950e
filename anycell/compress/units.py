"""The parts of a layer's arrays that belong to one unit; they follow from the cell's graph.

The size symbols of a cell say what the axes of every array count: ``weight_ih`` has axes of hidden
units, once per gate, and of inputs; a projection in ``state="h:P c"`` has axes of P and H units. To
remove a unit, take the others along each axis that counts units of its size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from anycell.lang.cell import INPUT, Cell
from anycell.lang.expr import REDUCTIONS
from anycell.lang.namespaces import Array, namespace

Indices = npt.NDArray[np.int64]


class Axes(NamedTuple):
    """The units that the axes of an array count.

    A matrix is ``[rows, columns]``, or ``[heads, rows / heads, columns / heads]`` if heads split
    both; a vector is ``[rows]``.

    Attributes:
        blocks: the size symbol of the units in each block of rows, one per gate, or output of a
            matmul.
        columns: the size symbol along the columns; None for a vector.
        heads: the number of diagonal blocks.
    """

    blocks: tuple[str, ...]
    columns: str | None = None
    heads: int = 1


def axes(cell: Cell) -> dict[str, Axes]:
    """The axes of each array that one direction of a layer may learn, by its name."""
    gates = tuple(cell.gate_sizes.values())
    counted = {"weight_ih": Axes(gates, INPUT), "bias_ih": Axes(gates)}
    for l in cell.linears:
        outputs = (l.out_size,) * len(l.declared)
        counted[l.weight] = Axes(outputs, l.in_size, l.heads)
        counted[l.bias_name] = Axes(outputs)
    counted |= {param.name: Axes((param.size,)) for param in cell.params}
    return {name: counted[name] for name in cell.learned}


def parts(cell: Cell, size: str) -> int:
    """Counts the parts, made by heads and groups, that must keep equally many units."""
    counts = [l.heads for l in cell.linears if size in (l.in_size, l.out_size)]
    counts += [
        node.attrs[0] for node, s in cell.sizes.items() if node.op in REDUCTIONS and s == size
    ]
    return math.lcm(1, *counts)


def taken(counted: Axes, sizes: Mapping[str, int], kept: Mapping[str, Indices]) -> tuple[Any, ...]:
    """Returns the index that takes what belongs to the kept units: ``array[taken(...)]``.

    Args:
        counted: the axes of the array.
        sizes: by size symbol, before units are removed.
        kept: the units that stay, ascending, for each size that loses some.
    """

    def places(*blocks: str) -> Indices:
        """The rows or columns that stay, by place in their head: ``[heads, kept]``."""
        parts = []
        for size in blocks:
            stays = np.zeros(sizes[size], bool)
            stays[kept.get(size, slice(None))] = True
            parts.append(stays.reshape(counted.heads, -1))
        rows = np.concatenate(parts, 1)
        return np.stack([np.flatnonzero(row) for row in rows])  # all heads keep equally many

    rows = places(*counted.blocks)
    if counted.columns is None:
        return (rows[0],)
    columns = places(counted.columns)
    if counted.heads == 1:
        return rows[0][:, None], columns[0]
    return np.arange(counted.heads)[:, None, None], rows[:, :, None], columns[:, None, :]


def sums(counted: Axes, sizes: Mapping[str, int], square: Array, size: str) -> list[Array]:
    """Returns sums for each unit of a size, ``[units]``: of a weight's squares in its rows, in its
    columns, and minus the squares in both; no sums if no axis counts such units.
    """
    assert counted.columns is not None
    xp, heads, totals, at = namespace(square), counted.heads, [], 0
    square = xp.reshape(square, (heads, -1, sizes[counted.columns] // heads))
    if counted.columns == size:
        totals.append(xp.sum(square, 1))
    for block in counted.blocks:
        rows = square[:, at : at + sizes[block] // heads]
        at += sizes[block] // heads
        if block == size:
            totals.append(xp.sum(rows, 2))
            if counted.columns == size:  # weights in both a row and a column of the unit
                totals.append(-xp.diagonal(rows, 0, 1, 2))
    return [xp.reshape(total, (sizes[size],)) for total in totals]


def select(norms: npt.NDArray[np.floating], count: int, split: int) -> Indices:
    """Returns the ``count`` units of the largest norms, ascending; equally many per part."""
    width = len(norms) // split
    order = np.argsort(-norms.reshape(split, width), axis=1, kind="stable")[:, : count // split]
    return np.sort(order + width * np.arange(split)[:, None], axis=None).astype(np.int64)
