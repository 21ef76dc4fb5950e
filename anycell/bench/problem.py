"""One problem, the same numbers for every contender: cell, shape, inputs, weights.

Weights are a dictionary with ``torch.nn``'s names and layouts, because every contender can read those.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from anycell.bench.errors import UsageError, did_you_mean
from anycell.bench.shapes import Shape

Array = npt.NDArray[np.floating]

# Cells whose equations the peers know by heart: number of gates, per-unit parameters.
CLASSICS: dict[str, tuple[int, tuple[str, ...]]] = {
    "LSTM": (4, ()),
    "GRU": (3, ()),
    "RNN": (1, ()),
    "PeepholeLSTM": (4, ("p_i", "p_f", "p_o")),
}


@dataclass(frozen=True)
class CellSpec:
    """A cell by name; ``origin`` is what a fresh process needs to find it again."""

    name: str
    origin: str
    definition: Any = field(default=None, compare=False, repr=False)

    @property
    def classic(self) -> bool:
        return self.definition is None or (self.name in CLASSICS and self.name == self.origin)

    @property
    def gates(self) -> int:
        if self.definition is not None:
            return len(self.definition.gates)
        return CLASSICS[self.name][0]


def find_cell(origin: str) -> CellSpec:
    """A built-in cell by its name, or a user's by ``path/to/file.py:Name``."""
    if ":" in origin:
        path, _, name = origin.rpartition(":")
        return CellSpec(name, origin, _from_file(Path(path), name))
    try:
        cells: Any = importlib.import_module("anycell.cells")
    except ModuleNotFoundError:
        cells = None
    definition = getattr(cells, origin, None)
    if definition is None and origin not in CLASSICS:
        known = sorted({*CLASSICS, *(n for n in vars(cells or object) if n[0].isupper())})
        raise UsageError(
            f"unknown cell {origin!r}{did_you_mean(origin, known)}; "
            "a cell of your own is --cell path/to/file.py:Name"
        )
    return CellSpec(origin, origin, definition)


def _from_file(path: Path, name: str) -> Any:
    if not path.is_file():
        raise UsageError(f"--cell {path}:{name}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"_anycell_bench_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"--cell {path}:{name}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # so that inspect and linecache find the cell's source
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        known = [key for key in vars(module) if not key.startswith("_")]
        raise UsageError(f"{path} defines no {name!r}{did_you_mean(name, known)}")
    return getattr(module, name)


@dataclass(frozen=True)
class Problem:
    cell: CellSpec
    shape: Shape
    dtype: str = "float32"
    threads: int = 1
    seed: int = 0

    @cached_property
    def weights(self) -> dict[str, Array]:
        """Everything trainable, by ``torch.nn``'s names."""
        if not self.cell.classic:
            return self._weights_of_layer()
        gates, params = CLASSICS[self.cell.name]
        shape, rng, weights = self.shape, np.random.default_rng([self.seed, 0]), {}
        for layer in range(shape.L):
            size = shape.I if layer == 0 else shape.D * shape.H
            for direction in range(shape.D):
                suffix = f"_l{layer}" + "_reverse" * direction
                wide = gates * shape.H
                sizes = {
                    "weight_ih": (wide, size),
                    "weight_hh": (wide, shape.H),
                    "bias_ih": (wide,),
                    "bias_hh": (wide,),
                } | {name: (shape.H,) for name in params}
                weights |= {name + suffix: self._uniform(rng, size) for name, size in sizes.items()}
        return weights

    @cached_property
    def x(self) -> Array:
        shape = self.shape
        return self._normal(1, (shape.T, shape.B, shape.I))

    @cached_property
    def dy(self) -> Array:
        """The loss is ``(output * dy).sum()``."""
        shape = self.shape
        return self._normal(2, (shape.T, shape.B, shape.D * shape.H))

    def _normal(self, stream: int, size: tuple[int, ...]) -> Array:
        # A stream for each array, so that none depends on which was asked for first.
        return np.random.default_rng([self.seed, stream]).standard_normal(size).astype(self.dtype)

    def _uniform(self, rng: np.random.Generator, size: tuple[int, ...]) -> Array:
        bound = self.shape.H**-0.5
        return rng.uniform(-bound, bound, size).astype(self.dtype)

    def _weights_of_layer(self) -> dict[str, Array]:
        """The cell's own initial weights, jittered: a gain of exactly 1 would hide its gradient."""
        torch: Any = importlib.import_module("torch")
        anycell_torch: Any = importlib.import_module("anycell.torch")
        torch.manual_seed(self.seed)
        layer = anycell_torch.RNN(
            self.cell.definition,
            self.shape.I,
            self.shape.H,
            num_layers=self.shape.L,
            bidirectional=self.shape.D == 2,
        )
        rng = np.random.default_rng([self.seed, 0])
        initial = {name: value.numpy() for name, value in layer.state_dict().items()}
        return {
            name: value.astype(self.dtype) + self._uniform(rng, value.shape)
            if value.ndim == 1
            else value.astype(self.dtype)
            for name, value in initial.items()
        }
