"""Layers with weights of 8 bits; ``anycell.compress.quantize`` makes them."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from anycell.layer import ENDS
from anycell.layer.rounding import Error, arguments, described
from anycell.plan import scales_of
from anycell.torch import ops
from anycell.torch.composite import Arrays
from anycell.torch.dropin import GRU, LSTM
from anycell.torch.feedback import Feedback
from anycell.torch.functional import scales_of_rows, steps
from anycell.torch.rnn import RNN

KINDS = nn.Module


class Quantized(RNN):
    """A layer whose weights have 8 bits, for inference on the CPU: calls and steps as of ``RNN``.

    Buffers, by name: each weight as int8, its scales ``{name}_scales`` with a number for each of
    its outputs, and all others as they were, in float32.

    Where a gradient of x or of a state is wanted, under ``torch.func``, on other devices and in
    other dtypes (``layer.bfloat16()``) the layer runs with the real weights that the integers stand
    for.

    Attributes:
        error: relative, of the output over the data that ``quantize`` was given; None without.

    Example:
        >>> from anycell import compress
        >>> layer = compress.quantize(LSTM(3, 8))
        >>> layer.weight_hh_l0.dtype, layer.weight_hh_l0_scales.shape
        (torch.int8, torch.Size([32]))
    """

    def __init__(self, layer: Any) -> None:
        nn.Module.__init__(self)
        if layer.weight_ih_l0.dtype is not torch.float32:
            raise ValueError(
                f"model: given a layer of {layer.weight_ih_l0.dtype}; expected torch.float32, from "
                "which weights are rounded. Call model.float() first."
            )
        for name in (
            "cell", "input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout",
            "bidirectional", "training",
        ):  # fmt: skip
            setattr(self, name, getattr(layer, name))
        self.sizes = {"H": layer.hidden_size, **dict(layer._sizes)}
        self.checkpoint, self.error = None, None
        ops.register(self.cell)
        for k, arrays in enumerate(layer._weights()):
            for name, array in arrays.items():
                base = name.removesuffix(ENDS[1])
                place = f"{base}_l{k}{name[len(base) :]}"
                if array.dim() > 1:
                    integers, scales = rounded(array.detach())
                    self.register_buffer(place, integers)
                    self.register_buffer(f"{place}_scales", scales)
                else:
                    self.register_buffer(place, array.detach().clone())

    error: float | None
    rounded = True  # as anycell.compress asks

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Copying would cut floats down to integers, most of them to 0."""
        for name, buffer in self._buffers.items():
            given = state_dict.get(prefix + name)
            integers = buffer is not None and buffer.dtype is torch.int8
            if integers and given is not None and given.dtype is not torch.int8:
                args[-1].append(  # what load_state_dict raises
                    f"{prefix}{name}: given {given.dtype}; expected torch.int8, of a quantized "
                    "layer, which stays as it is. Load into the float32 layer, and quantize it."
                )
                return
        super()._load_from_state_dict(state_dict, prefix, *args)

    def reset_parameters(self) -> None:
        """There is nothing to draw."""

    def flatten_parameters(self) -> None:
        """There is nothing to flatten: models that call it of ``torch.nn.LSTM`` go on."""

    def extra_repr(self) -> str:
        """The arguments that are not the default, and what is quantized."""
        return f"{super().extra_repr()}; {described(self._buffers, self.error)}"

    @property
    def _like(self) -> Tensor:
        return self._buffers["weight_ih_l0_scales"]  # type: ignore[return-value]

    def _weights(self) -> list[Arrays]:
        return [self._of_layer(k) for k in range(self.num_layers)]

    def _of_layer(self, k: int) -> Arrays:
        buffers, arrays = self._buffers, {}
        for end in ENDS[: 1 + self.bidirectional]:
            for name in self.cell.learned:
                place = f"{name}_l{k}{end}"
                if place in buffers:
                    arrays[name + end] = buffers[place]
                if f"{place}_scales" in buffers:
                    arrays[scales_of(name) + end] = buffers[f"{place}_scales"]
        return arrays  # type: ignore[return-value]


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight ``[..., out, in]`` as integers, and their scales ``[..., out]``."""
    if not weight.isfinite().all():
        raise ValueError("model: given a weight with infinities or NaN; expected numbers.")
    scales = scales_of_rows(weight)
    return steps(weight, scales).to(torch.int8), scales.squeeze(-1)


def quantize(model: nn.Module, data: Iterable[Any] | None) -> nn.Module:
    """See ``anycell.compress.quantize``."""
    layers = {m: name for name, m in model.named_modules() if is_layer(m)}
    if not layers:
        raise TypeError(
            f"model: given {type(model).__name__} without a float32 layer of anycell.torch; "
            "expected RNN, LSTM or GRU in it. anycell.torch.accelerate turns those of torch.nn "
            "into ours."
        )
    small = {layer: Quantized(layer) for layer in layers}
    if data is not None:
        _measure(model, small, data)
    if model in small:
        return small[model].eval()
    # A copy in which the quantized layers already are: float weights are not copied in vain.
    memo = {id(layer): quantized for layer, quantized in small.items()}
    return copy.deepcopy(model, memo).eval()


def is_layer(module: Any) -> bool:
    """Whether it is a layer of ours whose weights can be rounded."""
    return isinstance(module, (RNN, LSTM, GRU)) and not isinstance(module, Quantized)


def _measure(model: nn.Module, small: dict[nn.Module, Quantized], data: Iterable[Any]) -> None:
    """Runs the model, and each quantized layer on what its own layer is given."""
    errors = {layer: Error() for layer in small}
    runs: dict[nn.Module, tuple[nn.Module, Error]] = {l: (small[l], errors[l]) for l in small}
    for module in model.modules():
        if isinstance(module, Feedback) and module.layer in small:
            twin = Feedback(small[module.layer], module.readout)
            runs[module] = twin, errors[module.layer]

    def drawn(feedback: Any, args: Any, kwargs: Any) -> Any:  # once, for both
        x = args[0] if args else kwargs["x"]
        return args, {**kwargs, "forced": feedback._forced(kwargs["forced"], x)}

    def compare(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        twin, error = runs[module]
        outputs = [twin(*args, **kwargs)[0], result[0]]
        outputs = [o.data if isinstance(o, nn.utils.rnn.PackedSequence) else o for o in outputs]
        error.add(*(output.double() for output in outputs))

    hooks = [module.register_forward_hook(compare, with_kwargs=True) for module in runs]
    hooks += [
        module.register_forward_pre_hook(drawn, with_kwargs=True)
        for module in runs
        if isinstance(module, Feedback)
    ]
    twins = [module for twin, _ in runs.values() for module in twin.modules()]
    was_training = {module: module.training for module in [*model.modules(), *twins]}
    try:
        for module in was_training:
            module.training = False
        with torch.no_grad():
            for batch in data:
                if isinstance(batch, list):
                    raise TypeError(
                        f"data: given a list of {len(batch)}, as a loader makes of inputs and "
                        "targets; expected a tensor, or a tuple of the model's arguments. Pass the "
                        "inputs alone: data=(x for x, _ in loader)."
                    )
                given, named = arguments(batch)
                model(*given, **named)
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in was_training.items():
            module.training = training
    for layer, quantized in small.items():
        quantized.error = errors[layer].relative


# -- training --------------------------------------------------------------------------------------


class Rounding(nn.Module):
    """A weight as ``quantize`` would round it; gradients pass as if it had not."""

    def forward(self, weight: Tensor) -> Tensor:
        """``scale * round(weight / scale)``."""
        with torch.no_grad():
            scales = scales_of_rows(weight)
            error = steps(weight, scales) * scales - weight
        return weight + error


def fake_quantize(layer: nn.Module) -> nn.Module:
    """See ``anycell.compress.fake_quantize``."""
    if parametrize.is_parametrized(layer):
        raise ValueError(
            f"layer: given {type(layer).__name__} with parametrizations; expected plain "
            "parameters. Call torch.nn.utils.parametrize.remove_parametrizations first."
        )
    for name, parameter in list(layer.named_parameters(recurse=False)):
        if parameter.dim() > 1:
            parametrize.register_parametrization(layer, name, Rounding())
    return layer
