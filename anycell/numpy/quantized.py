"""Layers with weights of 8 bits; ``anycell.compress.quantize`` makes them."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from anycell.layer import ENDS
from anycell.layer.rounding import Error, arguments, described, rounded
from anycell.numpy.base import Array
from anycell.numpy.feedback import Feedback
from anycell.numpy.layers import RNN, State
from anycell.plan import Plan, plan, scales_of

KINDS = RNN, Feedback


class Quantized(RNN):
    """A layer whose weights have 8 bits, for inference: calls, steps and files as those of ``RNN``.

    Arrays, by name: each weight as int8, its scales ``{name}_scales`` with a number for each of its
    outputs, and all others as they were.

    Attributes:
        error: relative, of the output over the data that ``quantize`` was given; None without.

    Raises:
        ValueError: for a cell that no kernel runs, and for layers of 16 or 64 bits.
        NotImplementedError: for a call with ``training=True``.
    """

    def __init__(self, layer: RNN) -> None:
        if isinstance(layer, Quantized):
            raise ValueError("layer: given one that is quantized; expected one of float32.")
        if layer.dtype != np.float32:
            raise ValueError(
                f"layer: given dtype {layer.dtype}; expected float32, from which weights are "
                "rounded. Copy its parameters to a float32 layer."
            )
        self.__dict__.update(layer.__getstate__())
        self._writes, self.error = 0, None
        parameters: dict[str, Any] = {}
        for name, array in layer.parameters.items():
            if array.ndim > 1:
                parameters[name], parameters[f"{name}_scales"] = rounded(array)
            else:
                parameters[name] = array.copy()
        self._parameters = parameters
        assert self.plan.engine == "cpu"

    error: float | None
    rounded = True  # as anycell.compress asks

    @property
    def plan(self) -> Plan:
        """How the layer runs: ``plan.engine``, and ``plan.reason``."""
        return plan(self.cell, self.hidden_size, "int8", "cpu", self.sizes)

    def __repr__(self) -> str:
        shown = super().__repr__().removesuffix(f", dtype={self.dtype.name!r})")
        return f"{shown}; {described(self.arrays, self.error)})"

    def _learned(self, k: int) -> dict[str, Array]:
        arrays = {}
        for end in ENDS[: len(self._suffixes[k])]:
            for name in self._shapes(0):
                place = f"{name}_l{k}{end}"
                arrays[name + end] = self._parameters[place]
                if f"{place}_scales" in self._parameters:
                    arrays[scales_of(name) + end] = self._parameters[f"{place}_scales"]
        return arrays

    def forward(self, x: npt.ArrayLike, *args: Any, **options: Any) -> tuple[Array, State]:
        """As ``RNN.forward``, without training."""
        if options.get("training"):
            self._refuse()
        return super().forward(x, *args, **options)

    def backward(self, grad_output: npt.ArrayLike, grad_state: State | None = None) -> NoReturn:
        """There is none."""
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
    if isinstance(model, Feedback):  # copies, which draw the same steps
        run, result = copy.copy(model), copy.copy(model)
        result.layer, result.readout = small, copy.deepcopy(model.readout)
        for each in (run, result):
            each._saved, each._generator = None, copy.deepcopy(model._generator)
        result._learned()  # or why its readout cannot be rounded
    if data is not None:
        error = Error()
        for batch in data:
            given, named = arguments(batch)
            outputs = (which.forward(*given, **named)[0] for which in (result, run))
            error.add(*(output.astype(np.float64) for output in outputs))
        small.error = error.relative
    return result
