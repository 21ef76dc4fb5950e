"""The part of ``anycell.compress`` that knows the layers of ``anycell.torch``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from anycell.lang.cell import Cell
from anycell.layer import view as views
from anycell.layer.checks import describe, refuse
from anycell.layer.view import View
from anycell.torch.dropin import GRU, LSTM
from anycell.torch.rnn import RNN

KINDS = (RNN, LSTM, GRU)
READOUTS = "torch.nn.Linear modules with in_features={}"


def view_of(layer: Any) -> View:
    """Returns a view of the layer; refuses layers whose parameters cannot be replaced."""
    check_plain("layer", layer)
    weights: Any = layer._weights(layer.cell)
    return View((layer,), layer._layer(), weights, weights)


def reads(readout: Any) -> list[Tensor]:
    """The weights ``[out, in]`` by which a readout multiplies its input."""
    check_plain("readouts", readout)
    return [readout.weight] if isinstance(readout, nn.Linear) else []


def check_plain(name: str, module: Any) -> None:
    """Refuses parametrized modules, which hold other parameters than the layer's own."""
    if isinstance(module, nn.Module) and parametrize.is_parametrized(module):
        given = f"{type(module).__name__} with parametrizations"
        hint = "Call torch.nn.utils.parametrize.remove_parametrizations first."
        refuse(name, given, "plain parameters", hint)


def take(
    view: View,
    readouts: Sequence[nn.Linear],
    taken: Sequence[tuple[nn.Parameter, tuple[Any, ...]]],
    optimizer: torch.optim.Optimizer | None,
    size: str,
    count: int,
) -> None:
    """Replaces parameters, their gradients and their state in an optimizer by the kept entries.

    The parameters are new objects, because graphs of earlier passes still hold the old shapes.
    """
    (layer,), parameters = view.parts, [parameter for parameter, _ in taken]
    if size == "H" and count <= getattr(layer, "proj_size", 0):
        expected = f"more than proj_size, {layer.proj_size}, as torch.nn.LSTM requires"
        refuse("keep", f"{count} units", expected, 'Keep more, or shrink it first: size="P".')
    if len(set(parameters)) < len(parameters):
        expected = "a parameter for each, because both places would have to keep the same units"
        given, hint = "one with a parameter in two places", "Give each its own copy first."
        refuse("layer", given, expected, hint)
    if optimizer is not None:
        _check(optimizer, parameters)
    smaller: dict[Tensor, nn.Parameter] = {}
    for parameter, index in taken:
        places = tuple(torch.from_numpy(np.array(part)).to(parameter.device) for part in index)
        new = smaller[parameter] = nn.Parameter(parameter.detach()[places], parameter.requires_grad)
        if parameter.grad is not None:
            new.grad = parameter.grad[places]
        if optimizer is not None and parameter in optimizer.state:
            optimizer.state[new] = {
                name: value[places] if getattr(value, "shape", None) == parameter.shape else value
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
        setattr(layer, "hidden_size" if size == "H" else "proj_size", count)
        layer.flatten_parameters()
    else:
        layer.sizes[size] = count
        layer.hidden_size = layer.sizes["H"]
    layer.__dict__.pop("_prepared", None)


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
    views.check_optimizer(optimizer, not held.isdisjoint(parameters), not foreign, remedy)


def like(view: View, cell: Cell, sizes: Mapping[str, int], learned: Mapping[str, Any]) -> RNN:
    """Makes a layer of another cell with those sizes and parameters; all else is as in the view."""
    (layer,) = view.parts
    first, arguments = layer.weight_ih_l0, views.told(layer, sizes)
    new = RNN(cell, **arguments, device="meta", dtype=first.dtype)  # draws no initial values
    new = new.to_empty(device=first.device)
    with torch.no_grad():
        for name, parameter in new.named_parameters():
            parameter.copy_(torch.as_tensor(learned[name]))
            parameter.requires_grad_(getattr(learned[name], "requires_grad", True))
    return new.train(layer.training)
