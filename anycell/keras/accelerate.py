"""``accelerate(model)``: the layers of ``keras.layers`` inside a model become anycell's."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import keras

from anycell.keras.cell import RNNCell
from anycell.keras.layers import GRU, LSTM, RNN, Fused, OfCell, SimpleRNN, changed

Model = TypeVar("Model", bound=keras.layers.Layer)
_SWAPS: dict[type[keras.layers.RNN], type[Fused]] = {
    keras.layers.LSTM: LSTM,
    keras.layers.GRU: GRU,
    keras.layers.SimpleRNN: SimpleRNN,
    keras.layers.RNN: OfCell,
}
_CELLS = (
    keras.layers.LSTMCell,
    keras.layers.GRUCell,
    keras.layers.SimpleRNNCell,
    keras.layers.StackedRNNCells,
    RNNCell,
)
logger = logging.getLogger("anycell")


@dataclass(frozen=True)
class Found:
    """A recurrent layer of a model.

    Attributes:
        name: its path in the model, by the layers' names; "" for the model itself.
        kind: its class, and whose.
        engine: what runs it: "cpu", "cudnn", "composite" or "keras"; see ``layer.engine``.
        reason: why.
    """

    name: str
    kind: str
    engine: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name or 'the model'}: {self.kind} runs on {self.engine} ({self.reason})"


def accelerate(model: Model) -> Model:
    """Turns the recurrent layers of Keras inside ``model`` into anycell's, in place.

    That is every ``LSTM``, ``GRU`` and ``SimpleRNN``, and ``RNN`` of one of their cells or of an
    ``RNNCell``, also within ``Bidirectional``, ``TimeDistributed`` and nested models. The layers
    stay the same objects and change only their class. So weights, states, the optimizer,
    ``trainable``, dtype policies and all references to them stay, and files of weights fit as
    before. A compiled model stays compiled, and traces its steps anew; a ``tf.function`` of yours
    that has called the model keeps the graph that it has. Where XLA was to compile the steps, it
    is turned off: it calls no kernels. Subclasses, and cells that have been changed, are left
    alone.

    Each layer is logged under "anycell" at level INFO; ``recurrent_layers`` gives the same list.

    Args:
        model: any model, or any layer, whose layers have been made: of a subclass that makes them
            in ``build``, one that is built.

    Returns:
        the same model.

    Raises:
        TypeError: if ``model`` is not a layer of Keras.

    Example:
        >>> model = keras.Sequential([keras.layers.LSTM(8, name="memory")])
        >>> print(*recurrent_layers(accelerate(model)))
        memory: LSTM of anycell runs on cpu (fused kernel, matmuls in a step: 1)
    """
    _check(model)
    for _, layer in _walk(model):
        if isinstance(layer, keras.layers.RNN) and _refusal(layer) is None:
            kind = RNN if isinstance(layer.cell, RNNCell) else _SWAPS[type(layer)]
            layer.__class__ = kind
    for _, layer in _walk(model):
        _trace_anew(layer)
    for found in recurrent_layers(model):
        logger.info("%s", found)
    return model


def recurrent_layers(model: keras.layers.Layer) -> list[Found]:
    """Every recurrent layer of ``model``, what runs it, and why; also cells outside of a layer.

    Example:
        >>> print(*recurrent_layers(keras.Sequential([keras.layers.GRU(8, name="memory")])))
        memory: GRU of keras runs on keras (accelerate(model) has not been called)
    """
    _check(model)
    found = []
    for name, layer in _walk(model):
        kind = type(layer).__name__
        if isinstance(layer, Fused):
            found.append(Found(name, f"{kind} of anycell", *layer.engine))
        elif isinstance(layer, keras.layers.RNN):
            reason = _refusal(layer) or "accelerate(model) has not been called"
            found.append(Found(name, f"{kind} of {_whose(layer)}", "keras", reason))
        elif isinstance(layer, _CELLS):
            reason = "one step, in a loop of the model's own; keras.layers.RNN(cell) can be swapped"
            found.append(Found(name, f"{kind} of {_whose(layer)}", "keras", reason))
    return found


def _walk(layer: Any, name: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """Every layer once, with its path; cells of recurrent layers are theirs."""
    seen = set() if seen is None else seen
    if id(layer) in seen:
        return
    seen.add(id(layer))
    yield name, layer
    if isinstance(layer, keras.layers.RNN):
        return
    for inner in layer._layers:
        yield from _walk(inner, f"{name}/{inner.name}".lstrip("/"), seen)


def _refusal(layer: keras.layers.RNN) -> str | None:
    """Why a layer of Keras is left as it is."""
    kind = type(layer)
    if isinstance(layer, Fused):
        return "it is anycell's"
    if kind not in _SWAPS:
        base = next(base for base in kind.__mro__ if base in _SWAPS)
        if kind.__module__.startswith("keras."):
            return "only LSTM, GRU, SimpleRNN and RNN of one of their cells are swapped"
        return (
            f"a subclass of keras.layers.{base.__name__}, which may have a call of its own; "
            f"derive it from anycell.keras.{base.__name__}"
        )
    replaced = {n for n in ("call", "inner_loop") if n in vars(layer)}
    if replaced:
        return f"its {' and '.join(sorted(replaced))} has been replaced on the instance"
    return changed(layer.cell)


def _trace_anew(layer: keras.layers.Layer) -> None:
    """What a compiled model has traced has the old layers in it."""
    if not isinstance(layer, keras.Model):
        return
    layer.train_function = layer.test_function = layer.predict_function = None
    if (
        layer.compiled
        and layer.jit_compile
        and not all(inner.supports_jit for inner in layer._flatten_layers())
    ):
        layer.jit_compile = False


def _whose(layer: keras.layers.Layer) -> str:
    return type(layer).__module__.partition(".")[0]


def _check(model: object) -> None:
    if not isinstance(model, keras.layers.Layer):
        hint = "Call it first: accelerate(Model())." if isinstance(model, type) else "Pass a model."
        given = model.__name__ if isinstance(model, type) else type(model).__name__
        raise TypeError(f"model: given {given}; expected a model or layer of Keras. {hint}")
