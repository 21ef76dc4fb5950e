"""One problem, the same numbers for every contender: cell, shape, inputs, weights.

Arrays are float64 if that dtype is measured, else float32; contenders of 16 and 8 bits round them.
Weights are a dictionary with ``torch.nn``'s names and layouts: every contender can read those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from anycell import usage
from anycell.bench.shapes import Shape
from anycell.lang.cell import Cell
from anycell.layer import parameters
from anycell.layer.checks import declared_sizes
from anycell.plan.dtype import DTYPES, Dtype

Array = npt.NDArray[np.floating]
V = TypeVar("V")


@dataclass(frozen=True)
class CellSpec:
    """A cell by name; ``origin`` is what another process needs to find it again."""

    name: str
    origin: str
    definition: Cell = field(compare=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return find_cell, (self.origin,)


def find_cell(origin: str) -> CellSpec:
    """A built-in cell by its name, or a user's by ``path/to/file.py:Name``."""
    return CellSpec(origin.rpartition(":")[2], origin, usage.find_cell(origin))


def rounds(dtype: str) -> bool:
    """Whether contenders of this dtype round the problem's arrays, to 16 or 8 bits."""
    types = DTYPES[dtype]
    return types.operands is not types.math


def suffix(layer: int, direction: int) -> str:
    """The suffix of ``torch.nn``'s weight names for a direction of a layer."""
    return f"_l{layer}" + "_reverse" * direction


def by_direction(weights: Mapping[str, V], shape: Shape) -> list[list[dict[str, V]]]:
    """The weights of each layer and direction, by their names without suffix."""

    def part(end: str) -> dict[str, V]:
        return {name.removesuffix(end): v for name, v in weights.items() if name.endswith(end)}

    return [[part(suffix(l, d)) for d in range(shape.D)] for l in range(shape.L)]


@dataclass(frozen=True)
class Problem:
    """A problem for every contender. Arrays are made when first used, from the seed alone."""

    cell: CellSpec
    shape: Shape
    dtype: str = "float32"
    threads: int = 1
    seed: int = 0

    def __getstate__(self) -> dict[str, Any]:
        """The fields, without the arrays, which another process makes again."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def shrunk(self, most: int) -> Problem:
        """Returns this problem with at most so many steps and rows."""
        shape = replace(self.shape, T=min(self.shape.T, most), B=min(self.shape.B, most))
        return replace(self, shape=shape)

    @property
    def types(self) -> Dtype:
        """The dtypes of storage and of math that the name of the dtype stands for."""
        return DTYPES[self.dtype]

    @property
    def wide(self) -> str:
        """The dtype of the arrays."""
        return self.types.math.name

    @property
    def others(self) -> dict[str, int]:
        """The sizes that the cell declares besides H: half of H, like most projections."""
        return dict.fromkeys(declared_sizes(self.cell.definition), max(1, self.shape.H // 2))

    @property
    def sizes(self) -> dict[str, int]:
        """All sizes that the cell declares."""
        return {"H": self.shape.H, **self.others}

    @property
    def flags(self) -> dict[str, Any]:
        """Keyword arguments of our layers: number of layers, directions, and further sizes."""
        return {"num_layers": self.shape.L, "bidirectional": self.shape.D == 2, **self.others}

    @property
    def width(self) -> int:
        """The size of an output of one direction."""
        return self.sizes[self.cell.definition.states[0].size]

    def flops(self, mode: str) -> int:
        """Two times the multiply-adds of the matmuls of one forward pass; three times that in
        training. The recurrence counts only its matmuls in one layer and direction.
        """
        cell, shape, sizes = self.cell.definition, self.shape, self.sizes
        rows = 2 * shape.T * shape.B
        step = sum(
            len(l.outputs) * sizes[l.out_size] * sizes[l.in_size] // l.heads for l in cell.linears
        )
        if mode == "recurrence":
            return rows * step
        inputs = shape.I + (shape.L - 1) * shape.D * self.width
        once = rows * shape.D * (len(cell.gates) * shape.H * inputs + shape.L * step)
        return 3 * once if mode == "training" else once

    @cached_property
    def weights(self) -> dict[str, Array]:
        """Everything trainable, by ``torch.nn``'s names: U(-1/sqrt(H), 1/sqrt(H)), as there.

        Parameters are near their initial values, not at them: a gain of exactly 1 would hide a
        mistake. They differ by a fraction of it, so that small gains stay small: a layer norm with
        a recurrent gain of 1 makes a chaotic system, in which no two float32 programs agree after a
        few hundred steps.
        """
        shape, cell, bound = self.shape, self.cell.definition, self.shape.H**-0.5
        rng, weights = np.random.default_rng([self.seed, 0]), dict[str, Array]()
        initial = {param.name: param.initial for param in cell.params}
        whole = shape.I, cell.bias, shape.L, shape.D
        for name, size in parameters(cell, self.sizes, *whole):
            part = rng.uniform(-bound, bound, size)
            start = initial.get(name.rpartition("_l")[0])
            weights[name] = (start * (1.0 + part) if start else part).astype(self.wide)
        return weights

    @cached_property
    def x(self) -> Array:
        return self._normal(1, (self.shape.T, self.shape.B, self.shape.I))

    @cached_property
    def dy(self) -> Array:
        """The gradient of the output; the loss is ``(output * dy).sum()``."""
        shape = self.shape
        return self._normal(2, (shape.T, shape.B, shape.D * self.width))

    @cached_property
    def static(self) -> Array | None:
        """The input per sequence, for a cell that declares one."""
        if self.cell.definition.static is None:
            return None
        return self._normal(3, (self.shape.B, self.shape.H))

    def _normal(self, stream: int, size: tuple[int, ...]) -> Array:
        # A stream for each array, so that none depends on which was asked for first.
        return np.random.default_rng([self.seed, stream]).standard_normal(size).astype(self.wide)
