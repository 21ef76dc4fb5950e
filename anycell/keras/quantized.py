"""Layers with weights of 8 bits; ``anycell.compress.quantize`` makes them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from anycell.keras.call import Arrays, Tensor
from anycell.keras.cell import RNNCell
from anycell.keras.layers import CALLS, RNN
from anycell.layer.rounding import described
from anycell.plan import scales_of


@keras.saving.register_keras_serializable("anycell")
class QuantizedCell(RNNCell):
    """The weights and one step of a ``Quantized`` layer. The step computes in float32 with the real
    weights that the integers stand for.
    """

    numbers = "int8"  # the dtype that matmuls in a kernel multiply

    def build(self, input_shape: Sequence[int | None]) -> None:
        """Creates the weights, all 0, for inputs ``[B, input_shape[-1]]``."""
        self._scales: dict[str, Any] = {}  # by name
        super().build(input_shape)

    def _weight(self, name: str, shape: Any, role: str, initializer: Any = None) -> Any:
        add = functools.partial(self.add_weight, initializer="zeros", trainable=False)
        if role not in ("kernel", "recurrent"):
            return add(shape=shape, name=name)
        known = {"kernel": "weight_ih", "recurrent_kernel": "weight_hh"}
        place = scales_of(known.get(name, f"weight_{name.removesuffix('_kernel')}"))
        self._scales[place] = add(shape=(*shape[:-2], shape[-1]), name=f"{name}_scales")
        return add(shape=shape, name=name, dtype="int8")

    def _read(self, array: Any) -> Tensor:
        tensor = ops.convert_to_tensor(array)
        integers = keras.backend.standardize_dtype(tensor.dtype) == "int8"
        return tensor if integers else ops.cast(tensor, self.compute_dtype)

    def gather(self, x: Tensor, states: Sequence[Tensor], **more: Any) -> Arrays:
        """Returns the tensors of a run, including integers and scales."""
        scales = {name: ops.convert_to_tensor(s) for name, s in self._scales.items()}
        return {**super().gather(x, states, **more), **scales}


CALLS[QuantizedCell] = QuantizedCell.call


@keras.saving.register_keras_serializable("anycell")
class Quantized(RNN):
    """A layer whose weights have 8 bits, for inference on the CPU: calls and files as of ``RNN``.

    Weights: each kernel as int8, its scales ``{name}_scales`` with a number for each of its
    outputs, and all other weights unchanged, in float32. Nothing is trained. Under a tape, in
    training and in any step-by-step run the layer computes in float32 with the real weights that
    the integers stand for.

    Attributes:
        error: the output's relative error over the data given to ``quantize``; None without data.
    """

    _cell_class = QuantizedCell
    error: float | None = None
    rounded = True  # which anycell.compress reads

    def __repr__(self) -> str:
        arrays = {v.path.split("/")[-1]: np.empty(v.shape, v.dtype) for v in self.cell.weights}
        return f"<Quantized name={self.name}, {described(arrays, self.error)}>"
