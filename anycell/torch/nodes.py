"""Layers in exports to ONNX: torch's own operators, where exporters know the node for a cell."""

from __future__ import annotations

from typing import Any

import torch

from anycell import cells
from anycell.layer.signature import ENDS
from anycell.plan import Layer
from anycell.torch.composite import Arrays, Result

_OPERATORS: dict[str, Any] = {
    cells.LSTM.key: torch.lstm, cells.GRU.key: torch.gru, cells.RNN.key: torch.rnn_tanh,
    cells.RNN(nonlinearity="relu").key: torch.rnn_relu,
}  # fmt: skip
_WEIGHTS = "weight_ih", "weight_hh", "bias_ih", "bias_hh"


def run(layer: Layer, arrays: Arrays) -> Result | None:
    """Runs a layer by torch's operator; returns None if that cannot do what the call asks for."""
    operator, reverse = _OPERATORS.get(layer.cell.key), layer.options.reverse
    ends, x = ENDS[: len(reverse)], arrays["x"]
    weights = [arrays[n + end] for end in ends for n in _WEIGHTS if n + end in arrays]
    names = [f"state {name}" for name in layer.cell.state_names]
    known = {"x", *names, *(name + end for name in _WEIGHTS for end in ends)}
    present = {name for name, array in arrays.items() if array is not None}
    if operator is None or layer.sequences or reverse[0] or present - known:
        return None
    zeros = x.new_zeros(len(ends), x.shape[1], layer.size("H"))
    states = [zeros if arrays.get(name) is None else arrays[name] for name in names]
    first: Any = states if len(states) > 1 else states[0]
    settings = "bias_ih" in arrays, 1, 0.0, False, len(ends) == 2, False
    output, *final = operator(x, first, weights, *settings)
    return output, tuple(final), ()
