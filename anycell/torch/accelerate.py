"""``accelerate(model)``: the layers of ``torch.nn`` inside a model become anycell's."""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from anycell.explanation import Found, log_swapped, often
from anycell.layer.checks import describe
from anycell.torch import swap
from anycell.torch.dropin import DropIn
from anycell.torch.feedback import Feedback
from anycell.torch.loops import loop
from anycell.torch.rnn import RNN
from anycell.torch.step import GRUCell, LSTMCell, RNNCell

Model = TypeVar("Model", bound=nn.Module)
_OURS = DropIn, RNN, LSTMCell, GRUCell, RNNCell, loop
_STEPS = nn.RNNCellBase, RNNCell
_NAMES = "LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell", "RNNBase", "RNNCellBase"
_PUBLIC = "anycell.torch.", "torch."
_IN_PLACE_OF_A_LOOP = {
    nn.LSTMCell: "anycell.torch.LSTM",
    nn.GRUCell: "anycell.torch.GRU",
    nn.RNNCell: "anycell.torch.RNN with anycell.cells.RNN",
}
_STEP = (
    "one step of the model's own loop; called {} times: in place of the loop call "
    "anycell.torch.loop(module) once, with all steps"
)
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
    Modules of your own that such a call runs as the steps of a loop, ``y, state = module(x,
    state)``, are listed too.

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
    inside = {
        id(part) for m in model.modules() if isinstance(m, loop) for part in m.module.modules()
    }
    named = {name: m for name, m in model.named_modules() if id(m) not in inside}
    known = {name for name, module in named.items() if _recurrent(module)}
    calls = _watch(model, named, known, args, kwargs) if args or kwargs else {}
    bodies = [name for name, steps in calls.items() if steps and name not in known]
    layers = []
    for name, module in named.items():
        steps = calls.get(name)
        count = None if steps is None else len(steps)
        if name in known:
            engine, reason = _engine(module)
            if steps is not None:
                reason += often(steps, isinstance(module, _STEPS), "anycell.torch.RNN")
            layers.append(Found(name, _kind(module), engine, reason, count))
        elif count and count > 1 and not any(_below(name, other) for other in bodies):
            layers.append(Found(name, type(module).__name__, "torch", _STEP.format(count), count))
    return layers


def _below(name: str, other: str) -> bool:
    """Whether a module is a part of another."""
    return name != other and (not other or name.startswith(f"{other}."))


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
    if isinstance(module, loop):
        return f"loop({type(module.module).__name__}) of anycell"
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
    replacements = [name for kind, name in _IN_PLACE_OF_A_LOOP.items() if isinstance(module, kind)]
    call = f"call {replacements[0]} once, or " if replacements else ""
    return "torch", (
        "one step, called by the model's own code and as fast as ours; in place of a loop over "
        f"time {call}let anycell.torch.loop(module) run the module that is the loop's body"
    )


# -- what one call of the model does ---------------------------------------------------------------


def _watch(
    model: nn.Module, named: Mapping[str, nn.Module], known: Collection[str], args: Any, kwargs: Any
) -> dict[str, list[int]]:
    """Calls the model once; returns the number of steps of each call of each module that hooks can
    see: of the ``known`` recurrent ones, and of others that are called as steps are.
    """
    calls: dict[str, list[int]] = {}
    hooks = []
    for name, module in named.items():
        if not isinstance(module, torch.jit.ScriptModule):
            note = functools.partial(_note if name in known else _look, calls.setdefault(name, []))
            hooks.append(module.register_forward_hook(note, with_kwargs=True))
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _look(calls: list[int], _: Any, args: Any, kwargs: Any, made: Any) -> None:
    """Notes a call that takes an input and a state, and returns an output and such a state."""
    values = [*args, *kwargs.values()]
    if len(values) == 2 and isinstance(made, (tuple, list)) and len(made) == 2:
        before, after = (
            [t.shape for t in pytree.tree_leaves(tree) if isinstance(t, Tensor)]
            for tree in (values[1], made[1])
        )
        if before and before == after:
            calls.append(1)


def _note(calls: list[int], module: Any, args: Any, kwargs: Any, made: Any) -> None:
    x = args[0] if args else kwargs.get("input", kwargs.get("x"))
    if isinstance(module, _STEPS):
        calls.append(1)
    elif isinstance(module, loop):
        x = pytree.tree_leaves(x)[0]
        calls.append(x.shape[1 if x.dim() > 2 and module.batch_first else 0])
    elif isinstance(x, PackedSequence):
        calls.append(len(x.batch_sizes))
    else:
        calls.append(x.shape[1 if x.dim() == 3 and module.batch_first else 0])
