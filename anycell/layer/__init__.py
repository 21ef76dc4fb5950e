"""One layer of any cell, for every framework: input projection, recurrence, weight gradients.

Arrays belong to the framework and come through a small ``Host``; native code sees their addresses.
On a CPU a pass is one native call, which goes through the sequence in chunks of time, so that the
buffer between the matmuls and the recurrence stays in the cache and never becomes as long as the
sequence. An input projection that is small the kernel does (``projects``).

Time-major throughout: ``x [T, B, I]``, outputs ``[T, B, D*size]`` with D directions side
by side, size that of the first state.

    signature.py    the names and shapes of a layer's arrays
    checks.py       what users pass to a layer: checks, with one wording for every frontend
    arguments.py    what a layer is given, on a CPU or a GPU, and what its backward pass needs
    contract.py     what every array must be before a kernel gets its address
    schedule.py     chunks of time, and the segments of checkpoints
    sums.py         gradients that add up over time
    form.py         the chunk length, and what the kernel itself multiplies
    recipe.py       a pass on the CPU, drafted once: a call fills in addresses
    run.py          the draft: the tables of the door and of the driver
    forward.py, backward.py   the two passes on the CPU, which are this package's
    products.py     whose matmul multiplies
    bounds.py       a check of what a pass will touch
    gpu.py          the two passes on a GPU
    stream.py       one step at a time, on weights packed once
    sequences.py    the states after every step, where a call asks for them
    feedback.py     a readout that is fed back: what it adds to a layer's arrays, and its steps
    rounding.py     weights of 8 bits
    view.py         layers of every frontend, as anycell.compress sees them
"""

from anycell.layer import contract
from anycell.layer.arguments import (
    Array,
    Arrays,
    Direction,
    Entering,
    Factors,
    Host,
    Kept,
    initial,
    reset_values,
)
from anycell.layer.backward import backward, keeps_state
from anycell.layer.checks import check_checkpoint
from anycell.layer.form import projects, row_group
from anycell.layer.forward import forward
from anycell.layer.schedule import Chunk
from anycell.layer.signature import ENDS, names, of_a_matmul, parameters, places, shapes, stepped
from anycell.plan import Options

__all__ = [
    "ENDS",
    "Array",
    "Arrays",
    "Chunk",
    "Direction",
    "Entering",
    "Factors",
    "Host",
    "Kept",
    "Options",
    "backward",
    "check_checkpoint",
    "contract",
    "forward",
    "initial",
    "keeps_state",
    "names",
    "of_a_matmul",
    "parameters",
    "places",
    "projects",
    "reset_values",
    "row_group",
    "shapes",
    "stepped",
]
