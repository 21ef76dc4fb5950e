"""The parts that ``anycell.export`` takes from modules of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from anycell import lang
from anycell.lang.expr import Expr
from anycell.layer.checks import refuse
from anycell.layer.parts import Affine, FedBack, Part, Pointwise, Recurrent
from anycell.torch.compress import TorchCompression
from anycell.torch.feedback import Feedback

KINDS = nn.Module
Make = Callable[[Any], Callable[..., Expr]]
# Modules without weights, and the functions of the cell language that they are.
FUNCTIONS: dict[type[nn.Module], Make] = {
    nn.ELU: lambda m: lambda v: lang.elu(v, m.alpha),
    nn.GELU: lambda m: lambda v: lang.gelu(v, m.approximate),
    nn.Hardsigmoid: lambda m: lang.hard_sigmoid,
    nn.Hardtanh: lambda m: lambda v: lang.clip(v, m.min_val, m.max_val),
    nn.LeakyReLU: lambda m: lambda v: lang.leaky_relu(v, m.negative_slope),
    nn.LogSigmoid: lambda m: lang.log_sigmoid,
    nn.ReLU: lambda m: lang.relu,
    nn.Sigmoid: lambda m: lang.sigmoid,
    nn.SiLU: lambda m: lang.silu,
    nn.Softmax: lambda m: lang.softmax,
    nn.Softplus: lambda m: (
        lambda v: lang.where(m.beta * v > m.threshold, v, lang.softplus(m.beta * v) / m.beta)
    ),
    nn.Softsign: lambda m: lang.softsign,
    nn.Tanh: lambda m: lang.tanh,
}
# In evaluation these return their input.
NOTHING = (nn.Identity, nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout)


def parts(model: Any) -> Iterator[Part]:
    """The parts of a module, in order."""
    kind = type(model)
    if any(array.is_meta for array in (*model.parameters(), *model.buffers())):
        hint = "Call model.to_empty(device='cpu'), and load its weights."
        refuse("model", "weights on the device 'meta'", "weights that have values", hint)
    if kind is nn.Sequential:
        for module in model.children():
            yield from parts(module)
    elif isinstance(model, Feedback):
        yield FedBack(Recurrent.of(model.layer), Affine(model.readout.weight, model.readout.bias))
    elif isinstance(model, TorchCompression.layers):
        yield Recurrent.of(model)
    elif kind is nn.Linear:
        yield Affine(model.weight, model.bias)
    elif kind is nn.LayerNorm and len(model.normalized_shape) == 1:
        yield _norm(model)
    elif kind in FUNCTIONS and getattr(model, "dim", -1) in (-1, 2):
        yield Pointwise(FUNCTIONS[kind](model))
    elif kind not in NOTHING:
        known = ", ".join(module.__name__ for module in (*FUNCTIONS, *NOTHING[:2]))
        expected = f"Sequential, layers of anycell.torch, Feedback, Linear, LayerNorm, {known}"
        hint = (
            "Export a list of the layers in their order, [layer, readout]. anycell.torch.accelerate"
            " turns layers of torch.nn into ours."
        )
        refuse("model", f"the module {model!r}", expected, hint, TypeError)


def _norm(model: Any) -> Pointwise:
    """Layer normalisation, with what it learns."""
    arrays = tuple(array for array in (model.weight, model.bias) if array is not None)

    def normalised(v: Expr, gain: Any = 1.0, shift: Any = 0.0) -> Expr:
        return gain * lang.layer_norm(v, model.eps) + shift

    return Pointwise(normalised, arrays)
