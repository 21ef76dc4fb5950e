"""Layers with weights of 8 bits; ``anycell.compress.quantize`` makes them."""

from __future__ import annotations

from typing import Any, NoReturn

from anycell.layer.rounding import described, rounded_weights
from anycell.numpy.framework import on_lines
from anycell.numpy.layers import RNN
from anycell.plan import Options, Plan, plan


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
        self.__dict__.update(layer.__getstate__())
        arrays = rounded_weights(layer.parameters)
        self._parameters = {name: on_lines(array) for name, array in arrays.items()}
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
            self.backward()
        return super()._options(training, **arguments)

    def backward(self, *args: Any, **arguments: Any) -> NoReturn:
        """Raises NotImplementedError: weights of 8 bits have no gradients."""
        raise NotImplementedError(
            "training: given True, or a call of backward(), for weights of 8 bits, which have no "
            "gradients. Train the float32 layer, and quantize it afterwards."
        )
