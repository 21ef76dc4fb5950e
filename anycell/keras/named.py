"""A layer for every cell of ``anycell.cells`` whose name no layer of Keras has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from anycell import named
from anycell.keras.cell import as_given
from anycell.keras.layers import RNN


class Named(named.Named, RNN):
    """``RNN`` of one cell, with a config that does not name the cell."""

    def __init__(self, units: int, **kwargs: Any) -> None:
        super().__init__(units, **as_given(kwargs))

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


LAYERS = named.layers(Named, "anycell.keras", ("LSTM", "GRU", "RNN"))
for _layer in LAYERS.values():
    keras.saving.register_keras_serializable("anycell")(_layer)
globals().update(LAYERS)
__all__ = [*LAYERS]
