"""A layer as differentiable torch operations: the input projection, then the reference engine.

Slow, and able to do everything torch can: it serves double backward, vmap, forward-mode derivatives
and tracing, and the cells, dtypes and devices that no fused kernel carries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from anycell.layer.steps import directions
from anycell.plan import Call, Options

States = tuple[Tensor, ...]
Arrays = Mapping[str, Tensor]  # by the names of ``anycell.layer.signature``; no name without one


OPTIONS, SEQUENCES = map(Call._fields.index, ("options", "sequences"))
SEED, STREAM = map(Options._fields.index, ("seed", "stream"))
Record = TypeVar("Record", Call, Options)


def changed(record: Record, place: int, value: Any) -> Record:
    """``record._replace`` of one field: old PyTorch compiles a layer around this one, not that."""
    make: Any = type(record)
    fields = tuple(record)
    return make(*fields[:place], value, *fields[place + 1 :])


# Output ``[T, B, directions * size]``, the final states ``[directions, B, size]``, and of each of
# ``Call.sequences`` its values after each step, ``[T, B, directions * size]``.
Result = tuple[Tensor, States, States]


def composite(call: Call, arrays: Arrays) -> Result:
    """A layer, step by step."""
    x, mask = arrays["x"], arrays.get("mask")
    if mask is not None:  # NaN under a mask must not reach the weights' gradient
        x = torch.where(mask.unsqueeze(-1), x, torch.zeros_like(x))
    if torch._C._get_tracing_state() is not None:
        # The loop over the steps becomes part of the trace. There it must not run on more of them.
        x = torch.stack(x.unbind())
    wanted = (call.cell.state_names[0], *call.sequences)
    runs = directions(call.cell, {**arrays, "x": x}, call.options, F.linear)
    sequences, finals = zip(*[run.sequences(wanted) for run in runs], strict=True)
    by_state = zip(*sequences, strict=True)  # those of the directions lie side by side
    output, *others = [s[0] if len(s) == 1 else torch.cat(s, -1) for s in by_state]
    final = tuple(torch.stack(parts) for parts in zip(*finals, strict=True))
    return output, final, tuple(others)
