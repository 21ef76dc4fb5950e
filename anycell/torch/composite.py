"""A layer as differentiable torch operations: the input projection, then the reference engine.

Slow, and able to do everything torch can: it serves double backward, vmap, forward-mode derivatives
and tracing, and the cells, dtypes and devices that no fused kernel carries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from anycell.engines import reference
from anycell.lang.cell import Cell
from anycell.layer import ENDS, Options

States = tuple[Tensor, ...]
Sizes = tuple[tuple[str, int], ...]
Arrays = Mapping[str, Tensor]  # by the names of ``anycell.layer.signature``; no name without one


class Call(NamedTuple):
    """What the call of a layer says besides its tensors.

    Attributes:
        sizes: what the other size symbols of the cell stand for, in pairs.
    """

    cell: Cell
    hidden_size: int
    options: Options
    sizes: Sizes = ()


def composite(call: Call, arrays: Arrays) -> tuple[Tensor, States]:
    """Output ``[T, B, directions * size]`` and final states of a layer, step by step."""
    cell, options, x, get = call.cell, call.options, arrays["x"], arrays.get
    mask = get("mask")
    if mask is not None:  # NaN under a mask must not reach the weights' gradient
        x = torch.where(mask.unsqueeze(-1), x, torch.zeros_like(x))
    if torch._C._get_tracing_state() is not None:
        # The loop over the steps becomes part of the trace. There it must not run on more of them.
        x = torch.stack(x.unbind())
    outputs, finals = [], []
    for d, (end, reverse) in enumerate(zip(ENDS, options.reverse, strict=False)):
        weight, bias = get(f"weight_ih{end}"), get(f"bias_ih{end}")
        gates = x if weight is None else F.linear(x, weight, bias)
        if weight is None and bias is not None:
            gates = x + bias
        states, reset_states = (
            [None if s is None else s[d] for s in (get(f"{kind} {n}") for n in cell.state_names)]
            for kind in ("state", "reset_state")
        )
        weights = {n: get(n + end) for l in cell.linears for n in (l.weight, l.bias_name)}
        output, final = reference.run(
            cell,
            gates,
            weights,
            states,
            {name: arrays[name + end] for name in cell.param_names},
            static=get("static"),
            mask=mask,
            resets=get("resets"),
            reset_state=reset_states,
            masked_output="repeat" if options.repeat else "zero",
            recurrent_mask=get("recurrent_mask"),
            reverse=reverse,
            training=options.training,
            seed=options.seed,
            stream=2 * options.stream + d,
        )
        outputs.append(output)
        finals.append(final)
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
    return output, tuple(torch.stack(parts) for parts in zip(*finals, strict=True))
