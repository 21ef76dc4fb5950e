"""``accelerate(model)``: the layers of ``torch.nn`` inside a model become anycell's."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from anycell.explanation import Found, log_swapped, often
from anycell.layer.checks import describe
from anycell.torch import swap
from anycell.torch.dropin import DropIn
from anycell.torch.feedback import Feedback
from anycell.torch.rnn import RNN
from anycell.torch.step import GRUCell, LSTMCell, RNNCell

Model = TypeVar("Model", bound=nn.Module)
_OURS = DropIn, RNN, LSTMCell, GRUCell, RNNCell
_STEPS = nn.RNNCellBase, RNNCell
_NAMES = "LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell", "RNNBase", "RNNCellBase"
_PUBLIC = "anycell.torch.", "torch."
_IN_PLACE_OF_A_LOOP = {
    nn.LSTMCell: "anycell.torch.LSTM",
    nn.GRUCell: "anycell.torch.GRU",
    nn.RNNCell: "anycell.torch.RNN with anycell.cells.RNN",
}
logger = logging.getLogger("anycell")


def accelerate(model: Model) -> Model:
    """Turns every ``nn.LSTM`` and ``nn.GRU`` inside ``model`` into anycell's, in place.

    The modules stay the same objects and change only their class. So parameters, hooks, training
    flag, dtype, device, optimizers and all references to them stay, and checkpoints fit as before.
    A module of a subclass gets a class that derives from the subclass and from anycell's layer. A
    subclass that overrides ``forward``, or anything else that torch's ``forward`` relies on, is
    left alone. Each layer is logged under "anycell" at level INFO, and a warning if no layer is
    anycell's; ``recurrent_layers`` returns the same list, with the reason why a layer was left
    alone.

    Args:
        model: any module; it may be an ``nn.LSTM`` itself.

    Returns:
        the same model.

    Raises:
        TypeError: if ``model`` is not a module.

    Example:
        >>> model = nn.Sequential(nn.Flatten(2), nn.LSTM(3, 8))
        >>> [layer] = recurrent_layers(accelerate(model))
        >>> f"{layer.name}: {layer.kind} runs on {layer.engine}"
        '1: LSTM of anycell runs on cpu'
    """
    _check(model)
    for module in model.modules():
        if swap.refusal(module) is None:
            swap.swap(module)
    log_swapped(recurrent_layers(model), logger)
    return model


def restore(model: Model) -> Model:
    """Turns every ``LSTM`` and ``GRU`` of anycell inside ``model`` into torch's own, in place.

    This undoes ``accelerate``, for code that compares classes, such as ``quantize_dynamic``, and
    for machines without anycell. The modules stay the same objects, with their current weights;
    ``LSTMCell`` and ``GRUCell`` become torch's too. Layers for which torch has no class stay, and
    are logged under "anycell" as warnings: ``RNN``, ``RNNCell``, the layer of a ``Feedback``,
    layers of 8 bits, your own subclasses of anycell's layers, and modules whose class torch has
    changed since, as parametrisations do.

    Args:
        model: any module; it may be a layer itself.

    Returns:
        the same model.

    Raises:
        TypeError: if ``model`` is not a module.

    Example:
        >>> model = accelerate(nn.Sequential(nn.LSTM(3, 8)))
        >>> type(restore(model)[0]) is nn.LSTM
        True
    """
    _check(model, "restore")
    fed = {module.layer for module in model.modules() if isinstance(module, Feedback)}
    for name, module in model.named_modules():
        if module not in fed:
            swap.back(module)
        if isinstance(module, _OURS):
            stays = f"{name or 'the model'}: {_kind(module)} stays"  # type: ignore[arg-type]
            logger.warning("%s: torch has no layer in its place", stays)
    return model


def recurrent_layers(model: nn.Module, *args: Any, **kwargs: Any) -> list[Found]:
    """Lists every recurrent layer and cell of ``model``, the engine that runs it, and why.

    The list of a model's modules does not show which of them its code calls in a loop. If further
    arguments are given, ``model(*args, **kwargs)`` is called once, without gradients and in the
    model's current mode. Each entry then says how often its module was called, with how many steps.

    Args:
        model: any module.
        args, kwargs: the arguments of a call of the model.

    Raises:
        TypeError: if ``model`` is not a module.

    Example:
        >>> print(*recurrent_layers(nn.ModuleDict({"rnn": nn.GRU(3, 8)})))
        rnn: GRU of torch runs on torch (accelerate(model) has not been called)
        >>> [layer] = recurrent_layers(nn.GRU(3, 8), torch.zeros(5, 2, 3))
        >>> layer.calls
        1
    """
    _check(model)
    modules = {name: module for name, module in model.named_modules() if _recurrent(module)}
    calls = _watch(model, modules, args, kwargs) if args or kwargs else {}
    layers = []
    for name, module in modules.items():
        engine, reason = _engine(module)
        steps = calls.get(name)
        if steps is not None:
            reason += often(steps, isinstance(module, _STEPS), "anycell.torch.RNN")
        count = None if steps is None else len(steps)
        layers.append(Found(name, _kind(module), engine, reason, count))
    return layers


def _check(model: object, asked: str = "accelerate") -> None:
    if not isinstance(model, nn.Module):
        hint = f"Call it first: {asked}(Model())." if isinstance(model, type) else "Pass a model."
        raise TypeError(f"model: given {describe(model)}; expected a torch.nn.Module. {hint}")


# -- what there is ---------------------------------------------------------------------------------


def _recurrent(module: nn.Module) -> bool:
    known = isinstance(module, (nn.RNNBase, nn.RNNCellBase, *_OURS))
    return known or _compiled(module) or _quantized(module)


def _compiled(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule) and module.original_name in _NAMES


def _quantized(module: nn.Module) -> bool:
    kind = type(module)
    return kind.__module__.startswith("torch.ao.nn.") and kind.__name__ in _NAMES


def _kind(module: nn.Module) -> str:
    """Names a module's class and its owner; of a subclass also the class that it derives from."""
    if isinstance(module, torch.jit.ScriptModule):
        return f"{module.original_name} of TorchScript"
    kind = type(module)
    public = [base for base in kind.__mro__ if base.__module__.startswith(_PUBLIC)]
    derived = [base for base in public if base.__name__ in _NAMES]
    whose = "anycell" if isinstance(module, _OURS) else "torch"
    known = f"{derived[0].__name__} of {whose}"
    return known if kind is derived[0] else f"{kind.__name__} ({known})"


def _engine(module: Any) -> tuple[str, str]:
    """The engine that runs a module, and why."""
    if isinstance(module, _OURS):
        return module.engine
    if _compiled(module):
        return "torch", "TorchScript has compiled torch's own layer"
    if _quantized(module):
        return "torch", "torch has quantized it"
    if isinstance(module, nn.RNNBase):
        return "torch", swap.refusal(module) or "accelerate(model) has not been called"
    one = [name for kind, name in _IN_PLACE_OF_A_LOOP.items() if isinstance(module, kind)]
    call = f"call {one[0]} once, or " if one else ""
    return "torch", (
        "one step, called by the model's own code and as fast as ours; in place of a loop over "
        f"time {call}write the loop's body as a cell for anycell.torch.RNN"
    )


# -- what one call of the model does ---------------------------------------------------------------


def _watch(
    model: nn.Module, modules: Mapping[str, nn.Module], args: Any, kwargs: Any
) -> dict[str, list[int]]:
    """Calls the model once; returns the number of steps of each call of each module."""
    calls: dict[str, list[int]] = {}
    hooks = []
    for name, module in modules.items():
        if not _compiled(module):
            calls[name] = []
            note = functools.partial(_note, calls[name])
            hooks.append(module.register_forward_pre_hook(note, with_kwargs=True))
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _note(calls: list[int], module: Any, args: Any, kwargs: Any) -> None:
    x = args[0] if args else kwargs.get("input", kwargs.get("x"))
    if isinstance(module, _STEPS):
        calls.append(1)
    elif isinstance(x, PackedSequence):
        calls.append(len(x.batch_sizes))
    else:
        calls.append(x.shape[1 if x.dim() == 3 and module.batch_first else 0])
