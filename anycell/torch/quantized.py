"""Layers with weights of 8 bits; ``anycell.compress.quantize`` makes them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import PackedSequence
from torch.random import fork_rng

from anycell.lang.cell import Cell
from anycell.layer import view as views
from anycell.layer.checks import refuse
from anycell.layer.rounding import described, integers, measure, rounded
from anycell.layer.signature import of_layer
from anycell.torch import compress
from anycell.torch.composite import Arrays
from anycell.torch.feedback import Feedback
from anycell.torch.framework import Torch
from anycell.torch.rnn import RNN

KINDS = nn.Module


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
        if layer.weight_ih_l0.dtype is not torch.float32:
            given, hint = f"a layer of {layer.weight_ih_l0.dtype}", "Call model.float() first."
            refuse("model", given, "torch.float32, from which weights are rounded", hint)
        arguments = views.told(layer, dict(layer._sizes))
        super().__init__(layer.cell, **arguments | {"checkpoint": None}, device="meta")
        self.training = layer.training
        for name in list(self._parameters):
            array = getattr(layer, name).detach()
            if views.sharded(array) or array.shape != getattr(self, name).shape:
                held = f"{type(array).__name__} {list(array.shape)}"
                given = f"one whose {name} is sharded over processes, here {held}"
                expected = f"the whole weight, {list(getattr(self, name).shape)}"
                refuse("model", given, expected, "Quantize the model first, then shard it.")
            delattr(self, name)
            if array.dim() > 1:
                arrays = map(torch.from_numpy, rounded(array.cpu().numpy(), name))
                whole, scales = (made.to(array.device) for made in arrays)
                self.register_buffer(name, whole)
                self.register_buffer(f"{name}_scales", scales)
            else:
                self.register_buffer(name, array.clone())

    error: float | None = None
    rounded = True  # which anycell.compress reads

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Refuses floats, which a copy would truncate to integers, most of them to 0."""
        for name, buffer in self._buffers.items():
            given = state_dict.get(prefix + name)
            integers = buffer is not None and buffer.dtype is torch.int8
            if integers and given is not None and given.dtype is not torch.int8:
                args[-1].append(  # what load_state_dict raises
                    f"{prefix}{name}: given {given.dtype}; expected torch.int8, because this layer "
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


def quantize(model: nn.Module, data: Iterable[Any] | None) -> nn.Module:
    """See ``anycell.compress.quantize``."""
    layers = [module for module in model.modules() if is_layer(module)]
    if not layers:
        given = f"{type(model).__name__} without a float32 layer of anycell.torch"
        hint = "anycell.torch.accelerate turns layers of torch.nn into these."
        refuse("model", given, "RNN, LSTM or GRU in it", hint, TypeError)
    small = {layer: Quantized(layer) for layer in layers}
    if data is not None:
        _measure(model, small, data)
    if model in small:
        return small[model].eval()
    # The memo makes the copy take the quantized layers, so that no float weights are copied.
    memo = {id(layer): quantized for layer, quantized in small.items()}
    return copy.deepcopy(model, memo).eval()


def is_layer(module: Any) -> bool:
    """Whether a module is a layer of ours whose weights can be rounded."""
    return isinstance(module, compress.KINDS) and not isinstance(module, Quantized)


def _measure(model: nn.Module, small: dict[nn.Module, Quantized], data: Iterable[Any]) -> None:
    """Runs the model, and each quantized layer on the inputs of the layer that it replaces."""
    runs: list[tuple[nn.Module, nn.Module, Quantized]] = [(l, s, s) for l, s in small.items()]
    was_training = {module: module.training for module in model.modules()}
    for module in was_training:
        if isinstance(module, Feedback) and module.layer in small:
            twin = Feedback(small[module.layer], module.readout)
            runs.append((module, twin, small[module.layer]))

    def outputs(results: Any) -> Tensor:
        output = results[0]
        return (output.data if isinstance(output, PackedSequence) else output).double()

    def batches() -> Iterator[Any]:
        for batch in data:
            if isinstance(batch, list):
                given = f"a list of {len(batch)}, as loaders return inputs and targets"
                expected = "a tensor, or a tuple of the model's arguments"
                hint = "Pass the inputs alone: data=(x for x, _ in loader)."
                refuse("data", given, expected, hint, TypeError)
            yield batch

    devices = range(torch.cuda.device_count())
    for module in [*was_training, *(twin for _, twin, _ in runs), *small.values()]:
        module.training = False
    try:
        with torch.no_grad():
            measure(model, runs, "forward", outputs, batches(), lambda: fork_rng(devices))
    finally:
        for module, training in was_training.items():
            module.training = training


# -- training --------------------------------------------------------------------------------------


class Rounding(nn.Module):
    """Rounds a weight like ``quantize``; gradients pass as if it were not rounded."""

    def forward(self, weight: Tensor) -> Tensor:
        """``scale * round(weight / scale)``."""
        with torch.no_grad():
            whole, scales = integers(Torch.xp, weight)
            error = whole * scales.unsqueeze(-1) - weight
        return weight + error


def fake_quantize(layer: nn.Module) -> nn.Module:
    """See ``anycell.compress.fake_quantize``."""
    compress.check_plain("layer", layer)
    for name, parameter in list(layer.named_parameters(recurse=False)):
        if parameter.dim() > 1:
            parametrize.register_parametrization(layer, name, Rounding())
    return layer
