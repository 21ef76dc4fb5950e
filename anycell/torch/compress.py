"""The layers of ``anycell.torch`` as ``anycell.compress`` sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from anycell.lang.cell import Cell
from anycell.torch.composite import Arrays
from anycell.torch.dropin import GRU, LSTM
from anycell.torch.rnn import RNN

KINDS = (RNN, LSTM, GRU)


def opened(layer: Any) -> Any:
    """What has its cell, and says how many layers and directions there are."""
    return layer


def sizes(layer: Any) -> dict[str, int]:
    """By size symbol."""
    return {"H": layer.hidden_size, **dict(layer._sizes)}


def check(layer: Any, readouts: Sequence[Any], width: int) -> None:
    """That the readouts read outputs of that width, and that parameters can be replaced."""
    if isinstance(readouts, nn.Module):
        raise TypeError("readouts: given a module; expected a list of them.")
    for readout in readouts:
        if not isinstance(readout, nn.Linear) or readout.in_features != width:
            raise TypeError(
                f"readouts: given {readout!r}; expected torch.nn.Linear modules with "
                f"in_features={width}, the width of the layer's output."
            )
    for module in (layer, *readouts):
        if parametrize.is_parametrized(module):
            raise ValueError(
                f"{type(module).__name__}: given a module with parametrizations; expected plain "
                "parameters. Call torch.nn.utils.parametrize.remove_parametrizations first."
            )


def weights(layer: Any) -> list[Arrays]:
    """What each layer learns."""
    arrays: list[Arrays] = layer._weights()
    return arrays


learned = weights


def readers(readouts: Sequence[nn.Linear]) -> list[Tensor]:
    """Their weights ``[out, in]``."""
    return [readout.weight for readout in readouts]


def square(weight: Tensor) -> Tensor:
    """Of every number."""
    return weight * weight


def norms(squares: Sequence[Tensor]) -> Tensor:
    """The roots, with the slope 0 at 0: a unit that is gone stays where it is."""
    total = torch.stack(list(squares))
    tiny = torch.finfo(total.dtype).tiny
    return torch.where(total > 0, total.clamp_min(tiny).sqrt(), 0.0)


def numbers(values: Tensor) -> Any:
    """As an array of NumPy."""
    return values.detach().to("cpu", torch.float64).numpy()


def take(
    layer: Any,
    readouts: Sequence[nn.Linear],
    taken: Sequence[tuple[nn.Parameter, tuple[Any, ...]]],
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """New parameters by the same names, their gradients, and an optimizer in which they stand.

    New ones, because graphs of earlier passes still know the shapes of the old.
    """
    _check(taken, optimizer)
    smaller: dict[nn.Parameter, nn.Parameter] = {}
    for parameter, index in taken:
        places = tuple(torch.from_numpy(np.array(part)).to(parameter.device) for part in index)
        new = nn.Parameter(parameter.detach()[places].clone(), parameter.requires_grad)
        if parameter.grad is not None:
            new.grad = parameter.grad[places].clone()
        smaller[parameter] = new
        if optimizer is not None and parameter in optimizer.state:
            optimizer.state[new] = {
                name: value[places].clone()
                if isinstance(value, Tensor) and value.shape == parameter.shape
                else value
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


def _check(
    taken: Sequence[tuple[nn.Parameter, tuple[Any, ...]]], optimizer: torch.optim.Optimizer | None
) -> None:
    """That each parameter stands for itself, and that the optimizer can go on with smaller ones."""
    parameters = [parameter for parameter, _ in taken]
    if len(set(parameters)) < len(parameters):
        raise ValueError(
            "layer: given one with a parameter in two places; expected a parameter for each, since "
            "units of both places would have to be the same. Give each its own copy first."
        )
    if optimizer is None:
        return
    kind, held = type(optimizer).__name__, {p for g in optimizer.param_groups for p in g["params"]}
    if held.isdisjoint(parameters):
        raise ValueError(
            f"optimizer: given {kind} of none of the parameters; expected the one that trains the "
            "layer. Leave it out if there is none."
        )
    foreign = isinstance(optimizer, torch.optim.LBFGS)  # its state is of all parameters in a row
    for parameter in parameters:
        for value in optimizer.state.get(parameter, {}).values():
            single = not isinstance(value, Tensor) or value.dim() == 0
            foreign = foreign or not (single or value.shape == parameter.shape)
    if foreign:
        raise ValueError(
            f"optimizer: given {kind}, whose state does not follow each number of a parameter; "
            "expected one such as Adam or SGD. Leave it out, and make a new one for the smaller "
            "parameters."
        )


def resize(layer: Any, size: str, count: int) -> None:
    """The layer's own idea of its sizes."""
    if isinstance(layer, nn.RNNBase):
        setattr(layer, "hidden_size" if size == "H" else "proj_size", count)
        layer.flatten_parameters()
    else:
        layer.sizes[size] = count
        layer.hidden_size = layer.sizes["H"]
    layer.__dict__.pop("_prepared", None)


def like(layer: Any, cell: Cell, sizes: Mapping[str, int], learned: Mapping[str, Any]) -> RNN:
    """A layer of another cell with those sizes and parameters, tensors or arrays of NumPy; all else
    is the layer's.
    """
    first = layer.weight_ih_l0
    others: dict[str, Any] = {name: size for name, size in sizes.items() if name != "H"}
    new = RNN(
        cell,
        layer.input_size,
        sizes["H"],
        layer.num_layers,
        batch_first=layer.batch_first,
        dropout=layer.dropout,
        bidirectional=layer.bidirectional,
        device="meta",  # draws no initial values
        dtype=first.dtype,
        checkpoint=layer.checkpoint,
        **others,
    ).to_empty(device=first.device)
    with torch.no_grad():
        for name, parameter in new.named_parameters():
            value = learned[name]
            parameter.copy_(torch.as_tensor(value))
            parameter.requires_grad_(getattr(value, "requires_grad", True))
    return new.train(layer.training)
