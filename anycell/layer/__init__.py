"""One layer of any cell, for every framework: input projection, recurrence, weight gradients.

Arrays belong to the framework and come through a ``Framework``; native code sees their addresses.
On a CPU a pass is one native call, which goes through the sequence in chunks of time, so that the
buffer between the matmuls and the recurrence stays in the cache and never becomes as long as the
sequence. If its weights are small, the kernel itself computes the input projection (``projects``).

Time-major throughout: ``x [T, B, I]``, outputs ``[T, B, D*size]`` with D directions side
by side and the size of the first state.

``docs/internals.md`` says what each file does.
"""

from anycell.layer import contract
from anycell.layer.arguments import Array, Direction, Kept
from anycell.layer.backward import backward, keeps_state
from anycell.layer.checks import check_checkpoint
from anycell.layer.forward import forward
from anycell.layer.framework import DeviceFramework, Framework
from anycell.layer.heuristics import row_group
from anycell.layer.signature import ENDS, names, parameters, places, shapes, stepped
from anycell.plan import Options

__all__ = [
    "ENDS", "Array", "DeviceFramework", "Direction", "Framework", "Kept", "Options", "backward",
    "check_checkpoint", "contract", "forward", "keeps_state", "names", "parameters", "places",
    "row_group", "shapes", "stepped",
]  # fmt: skip
