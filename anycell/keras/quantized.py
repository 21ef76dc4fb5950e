"""Layers with weights of 8 bits; ``anycell.compress.quantize`` makes them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import keras
import numpy as np
from keras import ops

from anycell.keras import compress
from anycell.keras.call import KERNELS, Arrays, Tensor
from anycell.keras.cell import RNNCell
from anycell.keras.feedback import Feedback
from anycell.keras.layers import CALLS, RNN, Fused
from anycell.keras.weights import view_of
from anycell.layer.checks import refuse
from anycell.layer.rounding import described, measure, replaced, rounded
from anycell.layer.view import numbers
from anycell.plan import scales_of

KINDS = keras.layers.Layer
_HERE = "anycell.keras.quantized"  # in a config, the place of a layer that is to be replaced


@keras.saving.register_keras_serializable("anycell")
class QuantizedCell(RNNCell):
    """The weights and one step of a ``Quantized`` layer. The step computes in float32 with the real
    weights that the integers stand for.
    """

    numbers = "int8"  # the dtype that matmuls in a kernel multiply

    def build(self, input_shape: Sequence[int | None]) -> None:
        """Creates the weights, all 0, for inputs ``[B, input_shape[-1]]``."""
        self._scales: dict[str, Any] = {}  # by the names of ``Arrays``
        super().build(input_shape)

    def _weight(self, name: str, shape: Any, role: str, initializer: Any = None) -> Any:
        add = functools.partial(self.add_weight, initializer="zeros", trainable=False)
        if role not in ("kernel", "recurrent"):
            return add(shape=shape, name=name)
        place = scales_of(KERNELS.get(name, f"weight_{name.removesuffix('_kernel')}"))
        self._scales[place] = add(shape=(*shape[:-2], shape[-1]), name=f"{name}_scales")
        return add(shape=shape, name=name, dtype="int8")

    def _read(self, array: Any) -> Tensor:
        tensor = ops.convert_to_tensor(array)
        integers = keras.backend.standardize_dtype(tensor.dtype) == "int8"
        return tensor if integers else ops.cast(tensor, self.compute_dtype)

    def gather(self, x: Tensor, states: Sequence[Tensor], **more: Any) -> Arrays:
        """Returns the tensors of a run, including integers and scales."""
        scales = {name: ops.convert_to_tensor(s) for name, s in self._scales.items()}
        return {**super().gather(x, states, **more), **scales}


CALLS[QuantizedCell] = QuantizedCell.call


@keras.saving.register_keras_serializable("anycell")
class Quantized(RNN):
    """A layer whose weights have 8 bits, for inference on the CPU: calls and files as of ``RNN``.

    Weights: each kernel as int8, its scales ``{name}_scales`` with a number for each of its
    outputs, and all other weights unchanged, in float32. Nothing is trained. Under a tape, in
    training and in any step-by-step run the layer computes in float32 with the real weights that
    the integers stand for.

    Attributes:
        error: the output's relative error over the data given to ``quantize``; None without data.
    """

    _cell_class = QuantizedCell
    error: float | None = None
    rounded = True  # which anycell.compress reads

    def __repr__(self) -> str:
        arrays = {v.path.split("/")[-1]: np.empty(v.shape, v.dtype) for v in self.cell.weights}
        return f"<Quantized name={self.name}, {described(arrays, self.error)}>"


def quantize(model: Any, data: Iterable[Any] | None) -> Any:
    """See ``anycell.compress.quantize``."""
    single = isinstance(model, Fused)
    layers = [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, Fused)
        and not isinstance(layer, Quantized)
        and (single or not isinstance(layer._step(), str))
    ]
    if not layers:
        given = f"{type(model).__name__} without a float32 layer of anycell.keras"
        hint = "anycell.keras.accelerate turns layers of Keras into these."
        refuse("model", given, "LSTM, GRU, SimpleRNN or RNN in it", hint, TypeError)
    small = [_quantized(layer) for layer in layers]
    if data is not None:
        _measure(model, layers, small, data)
    return small[0] if single else _with(model, layers, small)


def _quantized(layer: Any) -> Quantized:
    view = view_of(layer)
    for variable in layer.cell.weights:
        if variable.dtype != "float32" or layer.cell.compute_dtype != "float32":
            given = f"{layer.name} of {layer.dtype_policy.name}"
            hint = "Copy its weights to a layer of that dtype."
            refuse("model", given, "float32, from which weights are rounded", hint)
    cell, sizes, *_ = view.layer
    new = Quantized(cell, **compress.told(layer, cell, dict(sizes)))
    new.build(compress.input_shape(layer))
    (arrays,), scales = view.learned, new.cell._scales
    for name, weight in view_of(new).weights[0].items():
        # Keras has a single bias if both are only added: the other bias is 0.
        values: Any = numbers(arrays[name]) if name in arrays else 0.0
        if scales_of(name) in scales:
            values, of_rows = rounded(values, name)
            scales[scales_of(name)].assign(of_rows)
        weight.assign(values)
    return new


def _measure(model: Any, layers: list[Any], small: list[Quantized], data: Iterable[Any]) -> None:
    """Runs the model, and each quantized layer on the inputs of the layer that it replaces."""
    runs = list(zip(layers, small, small, strict=True))
    by_layer = dict(zip(layers, small, strict=True))
    for outer in model._flatten_layers():
        if isinstance(outer, Feedback) and outer.layer in by_layer:
            inner = by_layer[outer.layer]
            runs.append((outer, Feedback(inner, outer.readout), inner))

    def outputs(results: Any) -> Any:
        return ops.convert_to_numpy(results[1]).astype(np.float64)

    def call(*given: Any, **named: Any) -> None:
        if 1 < len(given) == len(getattr(model, "inputs", None) or ()):
            given = (list(given),)  # a model of several inputs takes them as one argument
        model(*given, **{"training": False, **named})

    measure(call, runs, "inner_loop", outputs, data)


def _with(model: Any, layers: list[Any], small: list[Quantized]) -> Any:
    """Copies the model by its config, with quantized layers in place of the float32 layers."""
    with ExitStack() as stack:
        for number, layer in enumerate(layers):
            config = {**layer.get_config(), _HERE: number}
            stack.enter_context(replaced(layer, "get_config", lambda config=config: config))
        config = keras.saving.serialize_keras_object(model)
    config = _replaced(config, [keras.saving.serialize_keras_object(layer) for layer in small])
    config.pop("compile_config", None)
    new = keras.saving.deserialize_keras_object(config, safe_mode=False)
    new.build_from_config(model.get_build_config() or {})
    instead: dict[int, Any] = {}
    for layer, quantized in zip(layers, small, strict=True):
        instead |= {id(layer): quantized, id(layer.cell): quantized.cell}
    for old, made in zip(model._flatten_layers(), new._flatten_layers(), strict=True):
        source = instead.get(id(old), old)
        if isinstance(made, Quantized):
            made.error = source.error
        theirs, ours = (
            [*l._trainable_variables, *l._non_trainable_variables] for l in (source, made)
        )
        for value, variable in zip(theirs, ours, strict=True):
            # A copy, because on JAX a model gives up its arrays, which would be the old model's.
            variable.assign(np.array(ops.convert_to_numpy(value)))
    return new


def _replaced(config: Any, small: list[Any]) -> Any:
    """Returns a config with the configs of quantized layers in their places."""
    if isinstance(config, list):
        return [_replaced(item, small) for item in config]
    if not isinstance(config, dict):
        return config
    inner = config.get("config")
    if isinstance(inner, dict) and _HERE in inner:
        # In a functional model, a layer's config also says how the layer is connected.
        return {**config, **small[inner[_HERE]]}
    return {key: _replaced(value, small) for key, value in config.items()}
