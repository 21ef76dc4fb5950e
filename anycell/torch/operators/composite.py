"""A layer as differentiable torch operations: the input projection, then the reference engine.

It is slow, and can do everything that torch can: it serves traces, derivatives that
operators do not have, and the cells, dtypes and devices for which there is no fused kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anycell.engines.reference import Recurrence
from anycell.layer import steps
from anycell.plan import Layer
from anycell.plan.layer import OPTIONS, SEED, changed
from anycell.refusal import refuse

States = tuple[Tensor, ...]
Arrays = Mapping[str, Tensor]  # named as in ``layer.signature``; absent tensors have no entry
Result = tuple[Tensor, States, States]  # see ``steps.Results``


def composite(layer: Layer, arrays: Arrays, loop: steps.Scan = Recurrence.sequences) -> Result:
    """Runs a layer step by step."""
    if torch._C._get_tracing_state() is not None:
        # The trace unrolls the loop over the steps. ``unbind`` makes it fail on an input of more.
        arrays = {**arrays, "x": torch.stack(arrays["x"].unbind())}
    layer = changed(layer, OPTIONS, changed(layer.options, SEED, _number(layer.options.seed)))
    return steps.run(layer, steps.directions(layer, arrays, F.linear), loop)


def _number(seed: Any) -> int:
    """Returns a seed as a number: the masks are drawn outside of torch."""
    try:
        return int(seed)
    except RuntimeError:  # a trace would repeat one mask
        given = "random masks in a trace of a call that runs step by step"
        hint = "Call eval() first, or leave out what makes the call run so, such as return_states."
        refuse("keep", given, "none, or a call that runs as an operator", hint)
