"""``accelerate(model)``: the layers of ``keras.layers`` inside a model become anycell's."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import keras
from keras.src.saving import object_registration  # the name of a class has no public setter

from anycell.explanation import Found, log_swapped, often
from anycell.keras.backends import trace_anew
from anycell.keras.cell import RNNCell
from anycell.keras.feedback import Feedback
from anycell.keras.layers import CALLS, GRU, LSTM, RNN, Fused, OfCell, SimpleRNN, changed, read_of
from anycell.keras.reading import elsewhere
from anycell.layer.compression import replaced

Model = TypeVar("Model", bound=keras.layers.Layer)
_SWAPS: dict[type[keras.layers.RNN], type[Fused]] = {
    keras.layers.LSTM: LSTM,
    keras.layers.GRU: GRU,
    keras.layers.SimpleRNN: SimpleRNN,
    keras.layers.RNN: OfCell,
}
_BACK: dict[type, type[keras.layers.RNN]] = {ours: kind for kind, ours in _SWAPS.items()}
_CELLS = (*CALLS, keras.layers.StackedRNNCells)
# Names that a subclass may define and still be swapped.
_HARMLESS = {"__init__", "get_config", "from_config", "__doc__", "__module__", "__qualname__"}
_HARMLESS |= {"__annotations__", "__firstlineno__", "__static_attributes__"}
logger = logging.getLogger("anycell")


def accelerate(model: Model) -> Model:
    """Turns the recurrent layers of Keras inside ``model`` into anycell's, in place.

    These are every ``LSTM``, ``GRU`` and ``SimpleRNN``, and every ``RNN`` of one of their cells, of
    an ``RNNCell``, or of a cell of your own whose step can be read as it is written, also within
    ``Bidirectional``, ``TimeDistributed`` and nested models. The layers stay the same objects and
    change only their class. So weights, states, the optimizer, ``trainable``, dtype policies and
    all references to them stay, and files of weights fit as before. A compiled model stays
    compiled, and traces its steps again; your own ``tf.function`` that has called the model keeps
    its graph. XLA is turned off if it was to compile the steps and cannot call kernels here. A
    layer of a subclass gets a class that derives from the subclass and from anycell's layer, and is
    saved as a layer of the subclass. Subclasses with their own ``call`` or other methods, and
    layers of cells that cannot be read, are left alone.

    Each layer is logged under "anycell" at level INFO, and a warning if no layer is anycell's;
    ``recurrent_layers`` returns the same list.

    Args:
        model: any model, or any layer, whose inner layers exist: if ``build`` makes them, build it
            first.

    Returns:
        the same model.

    Raises:
        TypeError: if ``model`` is not a layer of Keras.

    Example:
        >>> model = keras.Sequential([keras.layers.LSTM(8, name="memory")])
        >>> print(*recurrent_layers(accelerate(model)))
        memory: LSTM of anycell runs on cpu (fused kernel, 1 matmul a step)
    """
    _check(model)
    for _, layer in _walk(model):
        if isinstance(layer, keras.layers.RNN) and _refusal(layer) is None:
            kind: Any = type(layer)
            _become(layer, _swapped(kind, isinstance(layer.cell, RNNCell)))
    for _, layer in _walk(model):
        trace_anew(layer)
    log_swapped(recurrent_layers(model), logger)
    return model


def restore(model: Model) -> Model:
    """Turns anycell's layers inside ``model`` into Keras's own if Keras has them, in place.

    This undoes ``accelerate``, to save a model for machines without anycell. The layers stay the
    same objects, with their current weights. A compiled model stays compiled, and traces its steps
    again; XLA stays turned off until the next ``compile``. Keras has every ``LSTM``, ``GRU`` and
    ``SimpleRNN``, also of a subclass that ``accelerate`` has turned, and every ``RNN`` of one of
    Keras's cells. Layers that Keras does not have stay, and are logged under "anycell" as
    warnings: ``RNN(cell, units)``, the layers of the built-in cells, the layer of a ``Feedback``,
    layers of 8 bits and your own subclasses of anycell's layers.

    Args:
        model: any model, or any layer.

    Returns:
        the same model.

    Raises:
        TypeError: if ``model`` is not a layer of Keras.

    Example:
        >>> model = accelerate(keras.Sequential([keras.layers.LSTM(8, name="memory")]))
        >>> type(restore(model).layers[0]) is keras.layers.LSTM
        True
    """
    _check(model, "restore")
    layers = list(_walk(model))
    fed = [layer.layer for _, layer in layers if isinstance(layer, Feedback)]
    for name, layer in layers:
        kind = _BACK.get(type(layer))
        if kind is not None and layer not in fed:
            _become(layer, kind)
        elif isinstance(layer, Fused):
            stays = f"{name or 'the model'}: {_kind(layer)} stays"
            logger.warning("%s: Keras has no layer in its place", stays)
    for _, layer in _walk(model):
        trace_anew(layer)
    return model


def recurrent_layers(model: keras.layers.Layer, *args: Any, **kwargs: Any) -> list[Found]:
    """Lists every recurrent layer of ``model``, what runs it, and why; also cells outside a layer.

    The list of a model's layers does not show which of them its code calls in a loop. If further
    arguments are given, ``model(*args, **kwargs)`` is called once, and once before if it is not
    built. Each entry then says how often its layer was called, with how many steps. A
    ``tf.function`` that was traced before hides the calls within it.

    Args:
        model: any model, or any layer.
        args, kwargs: the arguments of a call of the model.

    Raises:
        TypeError: if ``model`` is not a layer of Keras.

    Example:
        >>> model = keras.Sequential([keras.layers.GRU(8, name="memory")])
        >>> print(*recurrent_layers(model))
        memory: GRU of keras runs on keras (accelerate(model) has not been called)
        >>> [layer] = recurrent_layers(model, keras.ops.zeros((2, 5, 3)))
        >>> layer.calls
        1
    """
    _check(model)
    watched = bool(args or kwargs)
    if watched and not model.built:  # its first call makes weights, and calls the layers twice
        model(*args, **kwargs)
    layers = [
        (name, layer)
        for name, layer in _walk(model)
        if isinstance(layer, (keras.layers.RNN, *_CELLS))
    ]
    calls = _watch(model, [layer for _, layer in layers], args, kwargs) if watched else []
    entries = []
    for k, (name, layer) in enumerate(layers):
        engine, reason = _engine(layer)
        if watched:
            reason += often(calls[k], isinstance(layer, _CELLS), "anycell.keras.RNN")
        count = len(calls[k]) if watched else None
        entries.append(Found(name, _kind(layer), engine, reason, count))
    return entries


def _engine(layer: Any) -> tuple[str, str]:
    """The engine that runs a layer or cell, and why."""
    if isinstance(layer, Fused):
        return layer.engine
    if isinstance(layer, keras.layers.RNN):
        return "keras", _refusal(layer) or "accelerate(model) has not been called"
    return "keras", "one step, in a loop of the model's own; keras.layers.RNN(cell) can be swapped"


def _watch(model: Any, layers: Sequence[Any], args: Any, kwargs: Any) -> list[list[int]]:
    """Calls the model once; returns the number of steps of each call of each layer."""
    calls: list[list[int]] = [[] for _ in layers]

    def watched(layer: Any, steps: list[int]) -> Callable[..., Any]:
        call = layer.call

        @functools.wraps(call)
        def counted(x: Any, *args: Any, **kwargs: Any) -> Any:
            steps.append(1 if isinstance(layer, _CELLS) else x.shape[1])
            return call(x, *args, **kwargs)

        return counted

    pairs = zip(layers, calls, strict=True)
    with replaced([(layer, "call", watched(layer, steps)) for layer, steps in pairs]):
        model(*args, **kwargs)
    return calls


def _walk(layer: Any, name: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """Yields every layer once, with its path, but not the cells of recurrent layers."""
    seen = set() if seen is None else seen
    if id(layer) in seen:
        return
    seen.add(id(layer))
    yield name, layer
    if isinstance(layer, keras.layers.RNN):
        return
    for inner in layer._layers:
        yield from _walk(inner, f"{name}/{inner.name}".lstrip("/"), seen)


def _become(layer: Any, kind: type[keras.layers.RNN] | type[Fused]) -> None:
    layer.__class__ = kind
    layer._call_signature = inspect.signature(layer.call)  # Keras reads it when a layer is made


@functools.cache
def _swapped(kind: type[keras.layers.RNN], of_anycell: bool) -> type[Fused]:
    """Returns the class for layers of ``kind``, whose cells are anycell's or Keras's."""
    base = _base(kind)
    fused = RNN if of_anycell else _SWAPS[base]
    if kind is base:
        return fused
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    if of_anycell:  # RNN(cell, units) takes other arguments than the subclass
        made = "__init__", "get_config", "from_config"
        names |= {name: inspect.getattr_static(kind, name) for name in made}
    derived: type[Fused] = type(kind.__name__, (fused, kind), names)
    # Files store the name of the subclass, so that reading them makes a layer of the subclass.
    object_registration.GLOBAL_CUSTOM_NAMES[derived] = keras.saving.get_registered_name(kind)
    _BACK[derived] = kind
    return derived


def _base(kind: type[keras.layers.RNN]) -> type[keras.layers.RNN]:
    """Returns the first class that can be swapped among ``kind`` and its base classes."""
    return next(base for base in kind.__mro__ if base in _SWAPS)


def _refusal(layer: keras.layers.RNN) -> str | None:
    """Returns why a layer of Keras is left as it is, or None if it can be swapped."""
    kind = type(layer)
    if isinstance(layer, Fused):
        return "it is anycell's"
    if kind not in _SWAPS and kind.__module__.startswith("keras."):
        return "only LSTM, GRU, SimpleRNN and RNN of one of their cells are swapped"
    parents = kind.__mro__[: kind.__mro__.index(_base(kind))]
    overridden = {name for parent in parents for name in vars(parent)} - _HARMLESS
    if overridden:
        return f"a subclass with {', '.join(sorted(overridden))} of its own"
    replaced = {n for n in ("call", "inner_loop") if n in vars(layer)}
    if replaced:
        return f"its {' and '.join(sorted(replaced))} has been replaced on the instance"
    why = changed(layer.cell)
    if why is None or _base(kind) is not keras.layers.RNN:
        return why
    step, later = read_of(layer, False), elsewhere(layer.cell) is None and not layer.built
    return step if isinstance(step, str) and not later else None


def _kind(layer: keras.layers.Layer) -> str:
    """Names a layer's class and its owner; of a subclass also the class that it derives from."""
    kind = type(layer)
    whose = ("anycell.", "anycell") if isinstance(layer, Fused) else ("keras.", "keras")
    known = next((k for k in kind.__mro__ if k.__module__.startswith(whose[0])), kind)
    name = f"{known.__name__} of {whose[1]}"
    return name if known.__name__ == kind.__name__ else f"{kind.__name__} ({name})"


def _check(model: object, asked: str = "accelerate") -> None:
    if not isinstance(model, keras.layers.Layer):
        hint = f"Call it first: {asked}(Model())." if isinstance(model, type) else "Pass a model."
        kind = model.__name__ if isinstance(model, type) else type(model).__name__
        raise TypeError(f"model: given {kind}; expected a model or layer of Keras. {hint}")
