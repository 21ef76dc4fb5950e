"""Weights of 8 bits, for inference on the CPU, in layers of every framework.

See ``anycell.layer.rounding`` for the arithmetic.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any


def quantize(model: Any, *, data: Iterable[Any] | None = None) -> Any:
    """The same model with weights of 8 bits in its recurrent layers, for inference on the CPU.

    Args:
        model: a layer of ``anycell.torch`` (``RNN``, ``LSTM``, ``GRU``), ``anycell.keras`` or
            ``anycell.numpy``, a ``Feedback`` around one, or a ``torch.nn.Module`` or
            ``keras.Model`` that has such layers. It stays as it is.
        data: inputs on which to measure the error, one at least: each a batch, or a tuple of
            arguments, the last of which may be a dictionary of those with names. Never targets.
            Wrap a loader in a progress bar to see one.

    Returns:
        a ``Quantized`` layer, or a copy of the model with such layers in the place of its own (of a
        ``keras.Model`` by its config, not compiled); modules of torch in eval mode.
        Their ``error`` is that of the output over ``data``, by each layer's own input:
        ``norm(quantized - float) / norm(float)``; None without data, and of a layer that did not
        run.

    Raises:
        TypeError, ValueError: naming the argument, what was given and what was expected.

    Example:
        >>> import numpy as np
        >>> import anycell.numpy
        >>> layer = anycell.numpy.LSTM(3, 64, seed=0)
        >>> small = quantize(layer, data=[np.ones((20, 8, 3))])
        >>> small.arrays["weight_hh_l0"].dtype, small.error < 0.02
        (dtype('int8'), True)
    """
    for framework in ("keras", "torch", "numpy"):  # layers of Keras may be modules of torch
        if f"anycell.{framework}" in sys.modules:
            adapter = importlib.import_module(f"anycell.{framework}.quantized")
            if isinstance(model, adapter.KINDS):
                return adapter.quantize(model, None if data is None else _batches(data))
    raise TypeError(
        f"model: given {type(model).__name__}; expected a layer of anycell.torch, anycell.keras "
        "or anycell.numpy, or a torch.nn.Module or keras.Model with such layers."
    )


def _batches(data: Iterable[Any]) -> Iterator[Any]:
    empty = True
    for batch in data:
        empty = False
        yield batch
    if empty:
        raise ValueError(
            "data: given nothing to iterate over; expected a batch or more. A generator gives its "
            "batches once: make a new one, or leave data out."
        )


def fake_quantize(layer: Any) -> Any:
    """Has a layer of ``anycell.torch`` train with the weights that ``quantize`` would give it.

        forward     scale * round(w / scale)
        backward    as if the weight had not been rounded (straight through)

    Each weight gets a parametrization of ``torch.nn.utils.parametrize``; the layer runs fused.
    ``quantize`` takes it as it is.

    Args:
        layer: ``RNN``, ``LSTM`` or ``GRU`` of ``anycell.torch``, which is changed in place.

    Returns:
        the layer.

    Raises:
        TypeError, ValueError: for another kind of layer, or one that has parametrizations.

    Source: Jacob et al., *Quantization and Training of Neural Networks for Efficient
    Integer-Arithmetic-Only Inference*, 2018.
    """
    if "anycell.torch" in sys.modules:
        adapter = importlib.import_module("anycell.torch.quantized")
        if adapter.is_layer(layer):
            return adapter.fake_quantize(layer)
    raise TypeError(
        f"layer: given {type(layer).__name__}; expected RNN, LSTM or GRU of anycell.torch."
    )
