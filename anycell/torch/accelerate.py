"""``accelerate(model)``: the layers of ``torch.nn`` inside a model become anycell's."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from anycell.torch.arguments import describe
from anycell.torch.dropin import GRU, LSTM, DropIn
from anycell.torch.rnn import RNN

Model = TypeVar("Model", bound=nn.Module)
_SWAPS: dict[type[nn.Module], type[DropIn]] = {nn.LSTM: LSTM, nn.GRU: GRU}
logger = logging.getLogger("anycell")


@dataclass(frozen=True)
class Found:
    """A recurrent layer of a model.

    Attributes:
        name: its path in the model, "" for the model itself.
        kind: its class, and whose.
        engine: what runs it, "cpu", "gpu", "reference" or "torch".
        reason: why.
    """

    name: str
    kind: str
    engine: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name or 'the model'}: {self.kind} runs on {self.engine} ({self.reason})"


def accelerate(model: Model) -> Model:
    """Turns every ``nn.LSTM`` and ``nn.GRU`` inside ``model`` into anycell's, in place.

    The modules stay the same objects and change only their class. So parameters, hooks, training
    flag, dtype, device, optimizers and all references to them stay, and checkpoints fit as before.
    What has a forward of its own is left alone. Each layer is logged under "anycell" at level INFO;
    ``recurrent_layers`` gives the same list.

    Args:
        model: any module, also one that is an ``nn.LSTM`` itself.

    Returns:
        the same model.

    Raises:
        TypeError: if ``model`` is not a module.

    Example:
        >>> model = nn.Sequential(nn.Flatten(2), nn.LSTM(3, 8))
        >>> print(*recurrent_layers(accelerate(model)))
        1: LSTM of anycell runs on cpu (fused kernel, 1 matmul a step)
    """
    _check(model)
    for module in model.modules():
        if type(module) in _SWAPS and _refusal(module) is None:
            module.__class__ = _SWAPS[type(module)]  # type: ignore[assignment]
    for found in recurrent_layers(model):
        logger.info("%s", found)
    return model


def recurrent_layers(model: nn.Module) -> list[Found]:
    """Every recurrent layer of ``model``, what runs it, and why.

    Example:
        >>> print(*recurrent_layers(nn.ModuleDict({"rnn": nn.GRU(3, 8)})))
        rnn: GRU of torch runs on torch (accelerate(model) has not been called)
    """
    _check(model)
    found = []
    for name, module in model.named_modules():
        if isinstance(module, (DropIn, RNN)):
            engine = module.engine
            found.append(Found(name, f"{type(module).__name__} of anycell", *engine))
        elif isinstance(module, nn.RNNBase):
            reason = _refusal(module) or "accelerate(model) has not been called"
            found.append(Found(name, f"{type(module).__name__} of torch", "torch", reason))
    return found


def _refusal(module: nn.Module) -> str | None:
    """Why a layer of torch is left as it is."""
    if type(module) not in _SWAPS:
        if isinstance(module, (nn.LSTM, nn.GRU)):
            return "a subclass, which may have a forward of its own"
        return "only nn.LSTM and nn.GRU are swapped"
    if "forward" in vars(module):
        return "its forward has been replaced on the instance"
    return None


def _check(model: object) -> None:
    if not isinstance(model, nn.Module):
        hint = "Call it first: accelerate(Model())." if isinstance(model, type) else "Pass a model."
        raise TypeError(f"model: given {describe(model)}; expected a torch.nn.Module. {hint}")
