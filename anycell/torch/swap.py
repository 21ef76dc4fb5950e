"""The table of ``torch.nn``'s layers and anycell's classes that replace them."""

from __future__ import annotations

import abc
from typing import Any
from weakref import WeakValueDictionary

from torch import nn

from anycell.torch.dropin import GRU, LSTM, DropIn
from anycell.torch.step import GRUCell, LSTMCell

_SWAPS: dict[type[nn.Module], type[DropIn]] = {nn.LSTM: LSTM, nn.GRU: GRU}
_STEPS: dict[type, type[nn.Module]] = {LSTMCell: nn.LSTMCell, GRUCell: nn.GRUCell}
_SUBCLASSES: WeakValueDictionary[type[nn.Module], type[Any]] = WeakValueDictionary()
# Names of its parent that a subclass may override, and still be swapped.
_HARMLESS = {
    "_apply", "_replicate_for_data_parallel", "extra_repr", "flatten_parameters", "reset_parameters"
}  # fmt: skip
# Names, besides those that torch's layers define, that a call uses on its way to forward, that
# forward reads, or that make classes and instances.
_ON_THE_WAY = {
    "__call__", "__getattr__", "__getattribute__", "__getnewargs__", "__getnewargs_ex__",
    "__init_subclass__", "__new__", "__reduce__", "__reduce_ex__", "_call_impl", "_flat_weights",
    "_slow_forward", "_wrapped_call_impl",
}  # fmt: skip


def refusal(module: nn.Module) -> str | None:
    """Returns why a module is left as it is, or None if ``swap`` may be called."""
    if isinstance(module, DropIn):
        return "it is anycell's"
    parent = _parent(type(module))
    if parent is None:
        return (
            "only nn.LSTM and nn.GRU are swapped; anycell.torch.RNN with anycell.cells.RNN runs "
            "fused with the same weights"
            if isinstance(module, nn.RNN)
            else "only nn.LSTM and nn.GRU are swapped"
        )
    if "forward" in vars(module):
        return "its forward has been replaced on the instance"
    defined: dict[str, type] = {}
    for kind in reversed(type(module).__mro__):
        if kind in parent.__mro__ or kind.__module__ in ("abc", "typing"):
            continue
        if kind.__module__.startswith("torch."):
            return f"{kind.__module__} has changed its class: accelerate the model before that"
        if type(kind) not in (type, abc.ABCMeta):
            return f"its class {kind.__name__} has a metaclass, {type(kind).__name__}"
        defined |= dict.fromkeys(vars(kind), kind)
    inherited = {n for base in (parent, nn.RNNBase) for n in vars(base) if not n.startswith("__")}
    for name in sorted((_ON_THE_WAY | inherited) - _HARMLESS):
        if name in defined:
            return f"its class {defined[name].__name__} has a {name} of its own"
    places: tuple[Any, ...] = (vars(module), module._parameters, module._buffers, module._modules)
    attributes = {*defined, *(name for place in places for name in place)}
    for name in sorted(attributes & (set(dir(_SWAPS[parent])) - set(dir(parent)))):
        return f"it has an attribute {name!r}, which in anycell's {parent.__name__} is another"
    return None


def swap(module: nn.Module) -> None:
    """Turns a layer of torch that is not refused into anycell's; only its class changes."""
    module.__class__ = swapped(type(module))


def back(module: nn.Module) -> None:
    """Turns a layer or cell of anycell's into its counterpart in torch, if it has one.

    Classes that users derived from ours, or that torch made, stay: they have no counterpart.
    """
    kind: Any = type(module)
    replaced = kind in (LSTM, GRU) or vars(kind).get("__reduce_ex__") is _reduce
    parent = kind._parent if replaced and "_parent" in vars(kind) else _STEPS.get(kind)
    if parent is not None:
        module.__class__ = parent
        for name in ("_prepared", "checkpoint"):
            vars(module).pop(name, None)


def swapped(kind: type[nn.Module]) -> type[Any]:
    """Returns the class for modules of ``kind``; for a subclass, one derived from it and ours."""
    if kind in _SWAPS:
        return _SWAPS[kind]
    made = _SUBCLASSES.get(kind)
    if made is None:
        parent = _parent(kind)
        assert parent is not None
        namespace = {
            name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")
        }
        namespace |= {"_parent": kind, "__reduce_ex__": _reduce}
        made = _SUBCLASSES[kind] = type(kind.__name__, (kind, _SWAPS[parent]), namespace)
    return made


def _parent(kind: type[nn.Module]) -> type[nn.Module] | None:
    return next((parent for parent in _SWAPS if issubclass(kind, parent)), None)


def _reduce(self: Any, protocol: Any) -> Any:
    """Pickles the name of the subclass, from which ``_new`` makes this class again."""
    kind = type(self)
    if "_parent" not in vars(kind):  # a class derived from it, as parametrisations make
        return object.__reduce_ex__(self, protocol)
    return _new, (kind._parent,), *object.__reduce_ex__(self, 2)[2:]


def _new(kind: type[nn.Module]) -> Any:
    return object.__new__(swapped(kind))
