"""A layer step by step: the reference engine on the arrays of a call, by their public names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from anycell.engines.reference import Recurrence
from anycell.layer.arguments import Array
from anycell.layer.signature import ENDS
from anycell.plan import Layer


def directions(
    layer: Layer,
    arrays: Mapping[str, Array],
    linear: Callable[[Array, Array, Array | None], Array],
) -> list[Recurrence]:
    """A run of the reference engine for each direction of a layer.

    Args:
        arrays: by the names of ``signature``; None stands for an array that is not given. Without
            ``weight_ih``, x is projected already. mask and resets are booleans.
        linear: computes ``x @ weight.T + bias`` from ``(x, weight, bias)``; the bias may be None.
    """
    cell, get, x, runs = layer.cell, arrays.get, arrays["x"], []

    def of(kind: str, d: int) -> list[Any]:
        values = (get(f"{kind} {name}") for name in cell.state_names)
        return [None if value is None else value[d] for value in values]

    for d, end in enumerate(ENDS[: len(layer.options.reverse)]):
        weight, bias = get(f"weight_ih{end}"), get(f"bias_ih{end}")
        gates = x if weight is None else linear(x, weight, bias)
        run = Recurrence(
            layer,
            gates + bias if weight is None and bias is not None else gates,
            {n: get(n + end) for l in cell.linears for n in (l.weight, l.bias_name)},
            of("state", d),
            {name: arrays[name + end] for name in cell.param_names},
            static=get("static"),
            mask=get("mask"),
            resets=get("resets"),
            reset_state=of("reset_state", d),
            recurrent_mask=get("recurrent_mask"),
            direction=d,
        )
        runs.append(run)
    return runs
