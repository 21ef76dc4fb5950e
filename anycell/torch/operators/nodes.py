"""Layers in exports to ONNX: torch's own operators, where exporters know the node for a cell, and
torch's scan for other cells, which the newer exporter turns into a ``Scan``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from anycell import cells
from anycell.engines.reference import Recurrence
from anycell.layer import steps
from anycell.layer.signature import ENDS
from anycell.plan import Layer
from anycell.torch.observers import exporting
from anycell.torch.operators.composite import Arrays, Result

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
    known_steps = isinstance(x.shape[0], int)
    if scans(x.shape[0]) and (layer.cell.name == "RNN" or not known_steps):
        return None  # the newer exporter would unroll one, and write the number of steps of others
    zeros = x.new_zeros(len(ends), x.shape[1], layer.size("H"))
    states = [zeros if arrays.get(name) is None else arrays[name] for name in names]
    first: Any = states if len(states) > 1 else states[0]
    settings = "bias_ih" in arrays, 1, 0.0, False, len(ends) == 2, False
    output, *final = operator(x, first, weights, *settings)
    return output, tuple(final), ()


_OTHERS = "weights", "params", "static", "reset_state", "recurrent_mask"  # the same at each step


def scans(steps: Any) -> bool:
    """Whether so many steps become a ``Scan``: the newer exporter knows torch's scan."""
    one = isinstance(steps, int) and steps == 1
    return exporting() and hasattr(torch.ops.higher_order, "scan") and not one


def scan(run: Recurrence, names: Sequence[str]) -> tuple[Any, Any]:
    """Runs one direction by torch's scan: a graph of one step, for any number of steps."""
    step, start, sequences = steps.one_step(run, names)
    reverse = run.layer.options.reverse[run.direction]
    first = [array.clone() for array in start]
    others, tree = pytree.tree_flatten({name: getattr(run, name) for name in _OTHERS})
    places = [k for k, leaf in enumerate(others) if isinstance(leaf, torch.Tensor)]
    over_time = [array.flip(0) if reverse else array for array in sequences.values()]
    carried, now = len(first), len(first) + len(over_time)

    def body(*given: torch.Tensor) -> list[torch.Tensor]:
        leaves = others.copy()
        for k, tensor in zip(places, given[now:], strict=True):
            leaves[k] = tensor
        parts = dict(zip(sequences, given[carried:now], strict=True))
        final, after = step(given[:carried], parts, **pytree.tree_unflatten(leaves, tree))
        return [result.clone() for result in (*final, *after)]  # none may be another, or an input

    operator: Any = torch.ops.higher_order.scan
    # An export has no gradients, and torch's scan cannot derive them for rows of unknown number.
    inputs = pytree.tree_map(torch.Tensor.detach, (first, over_time, [others[k] for k in places]))
    results = operator(body, *inputs)
    after = [values.flip(0) if reverse else values for values in results[carried:]]
    return after, results[: len(run.cell.states)]
