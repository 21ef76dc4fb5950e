"""A layer for every cell of ``anycell.cells`` that Keras has no name for."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import keras

from anycell import cells
from anycell.keras.cell import as_given
from anycell.keras.layers import RNN
from anycell.lang.cell import Cell

OF_KERAS = ("LSTM", "GRU", "RNN")


class Named(RNN):
    """``RNN`` of one cell, whose hyperparameters are arguments of the layer.

    Args:
        units: H.
        kwargs: hyperparameters of the cell, and all that ``RNN`` takes.
    """

    of: Cell

    def __init__(self, units: int, **kwargs: Any) -> None:
        names = (*self.of.hyper, *self.of.structure)
        given = as_given({k: kwargs.pop(k) for k in names if k in kwargs})
        super().__init__(self.of(**given), units, **kwargs)

    def get_config(self) -> dict[str, Any]:
        """All arguments, for ``from_config``."""
        config = super().get_config()
        return {**config.pop("cell")["given"], **config}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> Named:
        """The layer that ``get_config`` described."""
        return cls(**config)


def named(cell: Cell) -> type[Named]:
    """The layer of a cell, under its name."""
    doc = f"``RNN({cell.name}, units)``; see ``anycell.cells.{cell.name}``.\n\n"
    body = {"of": cell, "__doc__": doc + inspect.cleandoc(cell.__doc__ or "")}
    body["__module__"] = "anycell.keras"
    layer: type[Named] = keras.saving.register_keras_serializable("anycell")(
        type(cell.name, (Named,), body)
    )
    return layer


LAYERS = {name: named(getattr(cells, name)) for name in cells.__all__ if name not in OF_KERAS}
