"""The parts that ``anycell.export`` takes from models of Keras."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras import activations, layers

from anycell import lang
from anycell.keras.feedback import Feedback
from anycell.keras.layers import Fused
from anycell.keras.weights import Weight
from anycell.lang.expr import Expr
from anycell.layer.checks import refuse
from anycell.layer.parts import Affine, FedBack, Part, Pointwise, Recurrent

KINDS = keras.layers.Layer
# Activations, and the functions of the cell language that they are.
FUNCTIONS: dict[Any, Callable[..., Expr]] = {
    activations.elu: lang.elu, activations.exponential: lang.exp,
    activations.gelu: lang.gelu, activations.hard_sigmoid: lang.hard_sigmoid,
    activations.log_sigmoid: lang.log_sigmoid, activations.relu: lang.relu,
    activations.sigmoid: lang.sigmoid, activations.silu: lang.silu,
    activations.softmax: lang.softmax, activations.softplus: lang.softplus,
    activations.softsign: lang.softsign, activations.tanh: lang.tanh,
}  # fmt: skip
# In evaluation these return their input.
NOTHING = (layers.InputLayer, layers.Dropout, layers.GaussianNoise, layers.GaussianDropout)


def parts(model: Any) -> Iterator[Part]:
    """The parts of a layer or model, in order."""
    kind: Any = type(model)
    if kind is keras.Sequential:
        for layer in model.layers:
            yield from parts(layer)
    elif isinstance(model, Feedback):
        yield FedBack(Recurrent.of(model.layer), _affine(model.readout))
    elif isinstance(getattr(model, "forward_layer", model), Fused):
        # Of Bidirectional the second direction is flipped, back where the layer goes forwards.
        flipped = False, model.return_sequences
        part = Recurrent.of(model)
        yield part._replace(flipped=flipped[: len(part.layer.options.reverse)])
    elif kind is layers.Dense and model.built:
        yield _affine(model)
        yield from _activation(model)
    elif kind is layers.Activation:
        yield from _activation(model)
    elif kind is layers.LayerNormalization and model.built and list(model.axis) == [-1]:
        if getattr(model, "rms_scaling", False):
            refuse(
                "model", f"{model.name} with rms_scaling=True", "a layer that subtracts the mean"
            )
        yield _norm(model)
    elif kind not in NOTHING:
        expected = (
            "Sequential, layers of anycell.keras, Feedback, Dense, Activation or "
            "LayerNormalization over the last axis, all of them built"
        )
        hint = (
            "Export a list of the layers in their order. anycell.keras.accelerate turns layers of "
            "Keras into ours."
        )
        refuse("model", f"the layer {model.name} ({kind.__name__})", expected, hint, TypeError)


def load(path: str) -> Any:
    """The model of a ``.keras`` file."""
    return keras.saving.load_model(path)


def _affine(layer: Any) -> Affine:
    if not layer.built:
        raise ValueError(f"model: given {layer.name}, which has no weights yet. Call it first.")
    if mode := getattr(layer.dtype_policy, "quantization_mode", None):
        hint = "Export the model before quantize."
        refuse("model", f"{layer.name} with weights of {mode}", "real numbers", hint)
    return Affine(Weight(layer.kernel), None if layer.bias is None else Weight(layer.bias))


def _activation(layer: Any) -> Iterator[Part]:
    """The activation of a layer."""
    function = layer.activation
    if function in FUNCTIONS:
        yield Pointwise(FUNCTIONS[function])
    elif function is not activations.linear:
        known = ", ".join(known.__name__ for known in FUNCTIONS)
        refuse("model", f"{layer.name} with the activation {function!r}", f"linear, {known}")


def _norm(layer: Any) -> Pointwise:
    """Layer normalisation, with what it learns."""
    names = [name for name in ("gamma", "beta") if getattr(layer, name) is not None]
    arrays = tuple(Weight(getattr(layer, name)) for name in names)

    def normalised(v: Expr, *learned: Expr) -> Expr:
        by_name = dict(zip(names, learned, strict=True))
        normal = lang.layer_norm(v, layer.epsilon)
        return by_name.get("gamma", 1.0) * normal + by_name.get("beta", 0.0)

    return Pointwise(normalised, arrays)
