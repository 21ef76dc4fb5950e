"""The weights of layers of Keras by the names, and in the layout, of other frontends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import numpy.typing as npt
from keras import ops

from anycell.keras.call import Tensor
from anycell.keras.cell import RNNCell, learned
from anycell.lang.cell import Cell
from anycell.lang.namespaces import namespace
from anycell.layer.checks import refuse
from anycell.layer.signature import ENDS
from anycell.plan import Layer, Options

Array = npt.NDArray[Any]
REWRITE = (
    "Write its step as an @anycell.cell, for anycell.keras.RNN(cell, units); layer.text has it if "
    "the cell was read."
)


class Weight(NamedTuple):
    """A variable in the layout of ``anycell.layer.signature``: ``[out, in]``; Keras transposes it.

    Attributes:
        row: the index of a bias, if the variable has two; None for the whole variable.
    """

    variable: Any
    row: int | None = None

    def turned(self, array: Any) -> Any:
        """Returns the weight's part of an array like the variable, in that layout, or back."""
        if self.row is not None:
            return array[self.row]
        return namespace(array).swapaxes(array, -1, -2) if len(array.shape) > 1 else array

    @property
    def value(self) -> Tensor:
        """A tensor."""
        return self.turned(ops.convert_to_tensor(self.variable))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in that layout."""
        return tuple(self.value.shape)

    def take(self, array: Array, index: tuple[Any, ...]) -> Array:
        """Returns elements of an array of the variable's shape, by an index of that layout."""
        if self.row is not None:
            return array[:, index[0]]
        return self.turned(self.turned(array)[index])

    def assign(self, value: Any) -> None:
        """Sets the weight to an array of that layout, or to a number."""
        array = np.array(self.variable.numpy())
        self.turned(array)[...] = value
        self.variable.assign(array)


def known(layer: Any) -> Cell:
    """The cell of a layer in anycell's language; refuses a layer that has none."""
    step: Cell | str = layer._step()
    if isinstance(step, str):
        refuse("layer", f"{layer.name}: {step}", "one whose step and weights are known", REWRITE)
    return step


def directions(layer: Any) -> Sequence[Any]:
    """The layer, or both layers of ``Bidirectional``.

    Raises:
        ValueError: for a layer that is not built, whose step is unknown, or whose directions are
            not concatenated.
    """
    parts: tuple[Any, ...] = (layer,)
    if isinstance(layer, keras.layers.Bidirectional):
        parts = layer.forward_layer, layer.backward_layer
        if layer.merge_mode != "concat":
            given = f"Bidirectional with merge_mode={layer.merge_mode!r}"
            refuse("layer", given, "'concat', where each direction has outputs of its own")
    for part in parts:
        if not hasattr(part, "_step"):
            hint = "anycell.keras.accelerate turns those of Keras into ours."
            given = f"{layer.name}, a layer of Keras"
            refuse("layer", given, "a layer of anycell.keras", hint)
        known(part)
        if not part.cell.built:
            raise ValueError(f"layer: given {layer.name}, which has no weights yet. Call it first.")
    return parts


def described(layer: Any) -> Layer:
    """The cell, the sizes, the directions and the masked output of a layer."""
    first, *others = parts = directions(layer)
    alike = first._step(), first._sizes()
    if any((part._step(), part._sizes()) != alike for part in others):
        given = f"{layer.name}, whose layers are of different cells or sizes"
        refuse("layer", given, "Bidirectional of two layers of one cell and size")
    masked = "zero" if first.zero_output_for_mask else "repeat"
    return Layer(*alike, Options(tuple(part.go_backwards for part in parts), masked))


def weights_of(layer: Any, parts: bool = False) -> dict[str, Any]:
    """The weights of a layer by the names of ``anycell.layer.signature``; with ``parts``, also
    those that are parts of another weight, and the scales of integers.
    """
    weights: dict[str, Any] = {}
    for part, end in zip(directions(layer), ENDS, strict=False):
        cell, named = part.cell, learned(part.cell)
        bias = named.pop("bias_ih", None)
        weights |= {name + end: Weight(v) for name, v in named.items()}
        rows = () if bias is None else (None,) if len(bias.shape) == 1 else (0, 1)
        for name, row in zip(("bias_ih", "bias_hh"), rows, strict=False):
            weights[name + end] = Weight(bias, row)
        if parts:
            scales = getattr(cell, "_scales", {})
            weights |= {name + end: ops.convert_to_tensor(of) for name, of in scales.items()}
        if parts and not isinstance(cell, RNNCell):  # a GRU that resets before the matmul has one
            further = part._further()
            weights |= {name + end: ops.transpose(kernel) for name, kernel in further.items()}
    return weights
