"""Layers with weights of 8 bits; ``anycell.compress.quantize`` makes them."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from anycell.layer.checks import refuse
from anycell.layer.rounding import described, measure, rounded
from anycell.numpy.feedback import Feedback
from anycell.numpy.layers import RNN
from anycell.plan import Options, Plan, plan

KINDS = RNN, Feedback


class Quantized(RNN):
    """A layer with weights of 8 bits, for inference; it is called, stepped and saved like ``RNN``.

    Arrays, by name: each weight as int8, its scales ``{name}_scales``, one number for each output,
    and all other arrays unchanged.

    Attributes:
        error: the relative error of the output over the data of ``quantize``; None without data.

    Raises:
        ValueError: for a cell that no kernel runs, and for layers of 16 or 64 bits.
        NotImplementedError: for a call with ``training=True``.
    """

    def __init__(self, layer: RNN) -> None:
        if isinstance(layer, Quantized):
            raise ValueError("layer: given a quantized layer; expected a float32 layer.")
        if layer.dtype != np.float32:
            hint = "Copy its parameters to a float32 layer."
            expected = "float32, from which weights are rounded"
            refuse("layer", f"dtype {layer.dtype}", expected, hint)
        self.__dict__.update(layer.__getstate__())
        self._parameters = {}
        parameters: dict[str, Any] = self._parameters
        for name, array in layer.parameters.items():
            parameters[name] = array.copy()
            if array.ndim > 1:
                parameters[name], parameters[f"{name}_scales"] = rounded(array, name)
        assert self.plan.engine == "cpu"

    error: float | None = None
    rounded = True  # read by anycell.compress

    @property
    def plan(self) -> Plan:
        """The plan of the layer: ``plan.engine``, and ``plan.reason``."""
        return plan(self.cell, self.hidden_size, "int8", "cpu", self.sizes)

    def __repr__(self) -> str:
        shown = super().__repr__().removesuffix(f", dtype={self.dtype.name!r})")
        return f"{shown}; {described(self.arrays, self.error)})"

    def _options(self, training: Any, **arguments: Any) -> Options:
        if training:
            self._refuse()
        return super()._options(training, **arguments)

    def backward(self, grad_output: npt.ArrayLike, *args: Any) -> NoReturn:
        """Raises NotImplementedError: weights of 8 bits have no gradients."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise NotImplementedError(
            "training: given True, or a call of backward(), for weights of 8 bits, which have no "
            "gradients. Train the float32 layer, and quantize it afterwards."
        )


def quantize(model: RNN | Feedback, data: Iterable[Any] | None) -> Quantized | Feedback:
    """See ``anycell.compress.quantize``."""
    layer = model.layer if isinstance(model, Feedback) else model
    small, run = Quantized(layer), model
    result: Any = small
    if isinstance(model, Feedback):  # copies that force the same random steps
        run, result = copy.copy(model), copy.copy(model)
        result.layer, result.readout = small, copy.deepcopy(model.readout)
        for fed in (run, result):
            fed._saved, fed._generator = None, copy.deepcopy(model._generator)
        rounded(result.readout.parameters["weight"], "weight", "readout")  # raises if it cannot be
    if data is not None:
        runs = [(run, result, small)]
        measure(run, runs, "forward", lambda results: results[0].astype(np.float64), data)
    return result
