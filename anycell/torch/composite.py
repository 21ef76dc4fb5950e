"""A layer as differentiable torch operations: the input projection, then the reference engine.

It is slow, and can do everything that torch can: it serves double backward, vmap, forward-mode
derivatives and tracing, and the cells, dtypes and devices for which there is no fused kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anycell.layer.steps import directions
from anycell.plan import Layer
from anycell.plan.layer import OPTIONS, SEED, changed
from anycell.refusal import refuse

States = tuple[Tensor, ...]
Arrays = Mapping[str, Tensor]  # named as in ``layer.signature``; absent tensors have no entry
# The output ``[T, B, directions * size]``, the final states ``[directions, B, size]``, and for each
# of ``Layer.sequences`` the values after every step, ``[T, B, directions * size]``.
Result = tuple[Tensor, States, States]


def composite(layer: Layer, arrays: Arrays) -> Result:
    """Runs a layer step by step."""
    x, mask = arrays["x"], arrays.get("mask")
    if mask is not None:  # NaN under a mask must not reach the weights' gradient
        x = torch.where(mask.unsqueeze(-1), x, torch.zeros_like(x))
    if torch._C._get_tracing_state() is not None:
        # The trace unrolls the loop over the steps. ``unbind`` makes it fail on an input of more.
        x = torch.stack(x.unbind())
    wanted = (layer.cell.state_names[0], *layer.sequences)
    layer = changed(layer, OPTIONS, changed(layer.options, SEED, _number(layer.options.seed)))
    runs = directions(layer, {**arrays, "x": x}, F.linear)
    sequences, finals = zip(*[run.sequences(wanted) for run in runs], strict=True)
    by_state = zip(*sequences, strict=True)  # the directions of a state are concatenated
    output, *others = [s[0] if len(s) == 1 else torch.cat(s, -1) for s in by_state]
    final = tuple(torch.stack(parts) for parts in zip(*finals, strict=True))
    return output, final, tuple(others)


def _number(seed: Any) -> int:
    """Returns a seed as a number: the masks are drawn outside of torch."""
    try:
        return int(seed)
    except RuntimeError:  # a trace would repeat one mask
        given = "random masks in a trace of a call that runs step by step"
        hint = "Call eval() first, or leave out what makes the call run so, such as return_states."
        refuse("keep", given, "none, or a call that runs as an operator", hint)
