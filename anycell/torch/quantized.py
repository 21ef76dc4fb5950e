"""Layers with weights of 8 bits; ``anycell.compress.quantize`` makes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from anycell.lang.cell import Cell
from anycell.layer.checks import refuse
from anycell.layer.compression import arguments, sharded
from anycell.layer.rounding import described, integers, rounded_weights
from anycell.layer.signature import of_layer
from anycell.torch.framework import Torch
from anycell.torch.operators.composite import Arrays
from anycell.torch.rnn import RNN


class Quantized(RNN):
    """A layer whose weights have 8 bits, for inference on the CPU: calls and steps as of ``RNN``.

    The buffers are, by name: each weight as int8, its scales ``{name}_scales`` with a number for
    each output of the weight, and all other parameters unchanged, in float32.

    The layer runs with the real weights that the integers stand for if a gradient of x or of a
    state is wanted, under ``torch.func``, on other devices, and in other dtypes
    (``layer.bfloat16()``).

    Attributes:
        error: the output's relative error over the data given to ``quantize``; None without data.

    Example:
        >>> from anycell import compress
        >>> layer = compress.quantize(LSTM(3, 8))
        >>> layer.weight_hh_l0.dtype, layer.weight_hh_l0_scales.shape
        (torch.int8, torch.Size([32]))
    """

    def __init__(self, layer: Any) -> None:
        inputs = arguments(layer, dict(layer._sizes)) | {"checkpoint": None}
        super().__init__(layer.cell, **inputs, device="meta")
        self.training, arrays = layer.training, {}
        for name, parameter in self.named_parameters():
            array = arrays[name] = getattr(layer, name).detach().clone()
            if sharded(array) or array.shape != parameter.shape:
                held = f"{type(array).__name__} {list(array.shape)}"
                given = f"one whose {name} is sharded over processes, here {held}"
                expected = f"the whole weight, {list(parameter.shape)}"
                refuse("model", given, expected, "Quantize the model first, then shard it.")
        self._parameters.clear()
        for name, array in rounded_weights(arrays).items():
            self.register_buffer(name, array)

    error: float | None = None
    rounded = True  # which anycell.compress reads

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Refuses floats, which a copy would truncate to integers, most of them to 0."""
        for name, buffer in self._buffers.items():
            saved = state_dict.get(prefix + name)
            integers = buffer is not None and buffer.dtype is torch.int8
            if integers and saved is not None and saved.dtype is not torch.int8:
                args[-1].append(  # what load_state_dict raises
                    f"{prefix}{name}: given {saved.dtype}; expected torch.int8, because this layer "
                    "is quantized. Load into the float32 layer, and quantize that layer."
                )
                return
        super()._load_from_state_dict(state_dict, prefix, *args)

    def reset_parameters(self) -> None:
        """Does nothing: the layer draws no initial values."""

    def flatten_parameters(self) -> None:
        """Does nothing; models that call this method of ``torch.nn.LSTM`` keep working."""

    def extra_repr(self) -> str:
        """The arguments that are not the default, and what is quantized."""
        return f"{super().extra_repr()}; {described(self._buffers, self.error)}"

    @property
    def _like(self) -> Tensor:
        return self._buffers["weight_ih_l0_scales"]  # type: ignore[return-value]

    def _weights(self, cell: Cell) -> list[Arrays]:
        layers, ends = range(self.num_layers), 1 + self.bidirectional
        return [of_layer(cell, self._buffers, k, ends) for k in layers]


class Rounding(nn.Module):
    """Rounds a weight like ``quantize``; gradients pass as if it were not rounded."""

    def forward(self, weight: Tensor) -> Tensor:
        """``scale * round(weight / scale)``."""
        with torch.no_grad():
            whole, scales = integers(Torch.xp, weight)
            error = whole * scales.unsqueeze(-1) - weight
        return weight + error
