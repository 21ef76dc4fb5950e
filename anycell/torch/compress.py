"""The part of ``anycell.compress`` that knows the layers of ``anycell.torch``."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import PackedSequence
from torch.random import fork_rng

from anycell.lang.cell import Cell
from anycell.layer.checks import describe, refuse
from anycell.layer.compression import Compression, arguments, check_optimizer, replaced
from anycell.torch.dropin import GRU, LSTM
from anycell.torch.feedback import Feedback
from anycell.torch.quantized import Quantized, Rounding
from anycell.torch.rnn import RNN

Taken = Sequence[tuple[nn.Parameter, tuple[Any, ...]]]


class TorchCompression(Compression, of=[nn.Module]):
    """See ``Compression``."""

    framework, kinds = "anycell.torch", "RNN, LSTM or GRU"
    remedy = "anycell.torch.accelerate turns layers of torch.nn into these."
    layers = RNN, LSTM, GRU
    readouts = "torch.nn.Linear modules with in_features={}"
    feedback = Feedback

    def weights(self, layer: Any) -> list[dict[str, Any]]:
        _check_plain("layer", layer)
        weights: list[dict[str, Any]] = layer._weights(layer.cell)
        return weights

    def reads(self, readout: Any) -> list[Tensor]:
        _check_plain("readouts", readout)
        return [readout.weight] if isinstance(readout, nn.Linear) else []

    def take(
        self, layer: Any, readouts: Any, taken: Taken, optimizer: Any, size: tuple[str, int]
    ) -> None:
        # The parameters are new objects: graphs of earlier passes still hold the old shapes.
        symbol, count = size
        if symbol == "H" and count <= getattr(layer, "proj_size", 0):
            expected = f"more than proj_size, {layer.proj_size}, as torch.nn.LSTM requires"
            refuse("keep", f"{count} units", expected, 'Keep more, or shrink it first: size="P".')
        if optimizer is not None:
            _check(optimizer, [parameter for parameter, _ in taken])
        smaller: dict[Tensor, nn.Parameter] = {}
        for parameter, index in taken:
            places = tuple(torch.from_numpy(np.array(part)).to(parameter.device) for part in index)
            values = parameter.detach()[places]
            new = smaller[parameter] = nn.Parameter(values, parameter.requires_grad)
            if parameter.grad is not None:
                new.grad = parameter.grad[places]
            if optimizer is not None and parameter in optimizer.state:
                shape = parameter.shape
                optimizer.state[new] = {
                    name: value[places] if getattr(value, "shape", None) == shape else value
                    for name, value in optimizer.state.pop(parameter).items()
                }
        for group in [] if optimizer is None else optimizer.param_groups:
            group["params"] = [smaller.get(parameter, parameter) for parameter in group["params"]]
        for module in (layer, *readouts):
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter in smaller:
                    setattr(module, name, smaller[parameter])
        for readout in readouts:
            readout.in_features = readout.weight.shape[1]
        if isinstance(layer, nn.RNNBase):
            setattr(layer, "hidden_size" if symbol == "H" else "proj_size", count)
            layer.flatten_parameters()
        else:
            layer.sizes[symbol] = count
            layer.hidden_size = layer.sizes["H"]

    def like(
        self, layer: Any, cell: Cell, sizes: Mapping[str, int], learned: Mapping[str, Any]
    ) -> RNN:
        first = layer.weight_ih_l0
        # Made without memory, it draws no initial values.
        new = RNN(cell, **arguments(layer, sizes), device="meta", dtype=first.dtype)
        new = new.to_empty(device=first.device)
        with torch.no_grad():
            for name, parameter in new.named_parameters():
                parameter.copy_(torch.as_tensor(learned[name]))
                parameter.requires_grad_(getattr(learned[name], "requires_grad", True))
        return new.train(layer.training)

    # -- weights of 8 bits -----------------------------------------------------------------------
    def within(self, model: nn.Module) -> list[nn.Module]:
        return list(model.modules())

    def quantized(self, layer: Any) -> Quantized:
        return Quantized(layer).eval()

    def copy(self, model: nn.Module, small: Mapping[Any, Quantized]) -> nn.Module:
        # The memo makes the copy take the quantized layers, so that no float weights are copied.
        memo = {id(layer): quantized for layer, quantized in small.items()}
        return copy.deepcopy(model, memo).eval()

    def output(self, results: Any) -> Tensor:
        output = results[0]
        return (output.data if isinstance(output, PackedSequence) else output).double()

    def beside(self) -> AbstractContextManager[Any]:
        return fork_rng(range(torch.cuda.device_count()))

    def measure(self, call: Any, runs: Any, data: Iterable[Any]) -> None:
        evaluated = [(module, "training", False) for module in call.modules()]
        with torch.no_grad(), replaced(evaluated):
            super().measure(call, runs, map(_inputs, data))

    def fake_quantize(self, layer: nn.Module) -> nn.Module:
        """See ``anycell.compress.fake_quantize``."""
        _check_plain("layer", layer)
        for name, parameter in list(layer.named_parameters(recurse=False)):
            if parameter.dim() > 1:
                parametrize.register_parametrization(layer, name, Rounding())
        return layer


def _check_plain(name: str, module: Any) -> None:
    """Refuses parametrized modules, which hold other parameters than the layer's own."""
    if isinstance(module, nn.Module) and parametrize.is_parametrized(module):
        given = f"{type(module).__name__} with parametrizations"
        hint = "Call torch.nn.utils.parametrize.remove_parametrizations first."
        refuse(name, given, "plain parameters", hint)


def _inputs(batch: Any) -> Any:
    """Refuses a batch with targets."""
    if isinstance(batch, list):
        given = f"a list of {len(batch)}, as loaders return inputs and targets"
        expected = "a tensor, or a tuple of the model's arguments"
        hint = "Pass the inputs alone: data=(x for x, _ in loader)."
        refuse("data", given, expected, hint, TypeError)
    return batch


def _check(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Refuses an optimizer that cannot go on with smaller parameters."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        hint = "Pass the object that trains the layer."
        refuse("optimizer", describe(optimizer), "an optimizer of torch.optim", hint, TypeError)
    held = {p for group in optimizer.param_groups for p in group["params"]}
    foreign = isinstance(optimizer, torch.optim.LBFGS)  # its state has all parameters in one vector
    for p in parameters:
        shapes = [getattr(v, "shape", ()) for v in optimizer.state.get(p, {}).values()]
        foreign |= any(shape not in ((), p.shape) for shape in shapes)
    remedy = "make a new one for the smaller parameters"
    check_optimizer(optimizer, not held.isdisjoint(parameters), not foreign, remedy)
