"""The parts that ``anycell.export`` takes from models of Keras."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
from keras import activations, layers

from anycell import lang
from anycell.keras.cells import ACTIVATIONS, activation_name
from anycell.keras.feedback import Feedback
from anycell.keras.layers import Fused
from anycell.keras.weights import Weight
from anycell.lang.expr import Expr
from anycell.layer.checks import refuse
from anycell.layer.parts import Affine, FedBack, Part, Pointwise, Recurrent

KINDS = keras.layers.Layer
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
    """The activation of a layer, if it is not linear."""
    if layer.activation is activations.softmax:  # which no gate has
        yield Pointwise(lang.softmax)
        return
    name = activation_name(layer.activation)
    if name is None:
        expected = ", ".join(["softmax", *ACTIVATIONS])
        refuse("model", f"{layer.name} with the activation {layer.activation!r}", expected)
    if name != "linear":
        yield Pointwise(ACTIVATIONS[name])


def _norm(layer: Any) -> Pointwise:
    """Layer normalisation, with what it learns."""
    names = [name for name in ("gamma", "beta") if getattr(layer, name) is not None]
    arrays = tuple(Weight(getattr(layer, name)) for name in names)

    def normalised(v: Expr, *learned: Expr) -> Expr:
        by_name = dict(zip(names, learned, strict=True))
        normal = lang.layer_norm(v, layer.epsilon)
        return by_name.get("gamma", 1.0) * normal + by_name.get("beta", 0.0)

    return Pointwise(normalised, arrays)
