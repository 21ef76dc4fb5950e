"""Gives ``anycell.onnx.load`` layers of NumPy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from anycell.lang.cell import Cell
from anycell.numpy.base import Array
from anycell.numpy.layers import RNN

OPERATORS: dict[str, Any] = {}  # ONNX's own evaluator runs all


class Program:
    """A callable whose ``plan`` calls its parts; a part has the name that the plan gives it."""

    def __init__(self, plan: Any, parts: Iterable[Any]) -> None:
        self.plan, self.parts = plan, list(parts)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Calls the plan with the parts; see ``anycell.onnx.load``."""
        return self.plan(self.parts, *inputs, **named)

    def __getitem__(self, name: Any) -> Any:
        return self.parts[self.plan.index(name)]


def layer(cell: Cell, weights: Mapping[str, Array], **options: Any) -> RNN:
    """Makes a layer with these weights."""
    made = RNN(cell, **options, dtype=weights["weight_ih_l0"].dtype, initializer="zeros",
               recurrent_initializer="zeros")  # fmt: skip
    made.set_parameters(weights)
    return made
