"""The primitive: any cell over a sequence of projected inputs, on NumPy arrays.

It does what lies between the two large matmuls of a layer, the input projection before and the
weight gradients after. Layers with weights, gradients and training are in ``anycell.numpy``,
``anycell.torch`` and the other frontends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from anycell.lang.cell import Cell
from anycell.layer import primitive
from anycell.layer.checks import check_cell, refuse
from anycell.layer.layers import Stack
from anycell.layer.primitive import Call, check_input, check_rest, fit_arrays, learned_by_name
from anycell.numpy import passes, threads
from anycell.numpy.framework import Strict
from anycell.numpy.typed import RecurrenceArguments
from anycell.plan import Layer, plan, takes
from anycell.plan.dtype import dtypes

if TYPE_CHECKING:
    from typing_extensions import Unpack

Array = npt.NDArray[np.floating]


# There is no backward pass to save memory for, and the input is projected.
_WITHOUT = "checkpoint", "gates", "return_states"


@takes(RecurrenceArguments, about=primitive.__doc__)
def recurrence(
    cell: Cell,
    gates_x: Array,
    weights: Mapping[str, Array | None],
    state: Sequence[Array | None] | Array | None = None,
    params: Mapping[str, Array] | None = None,
    **arguments: Unpack[RecurrenceArguments],
) -> tuple[Array, tuple[Array, ...]]:
    """Runs ``cell`` over a sequence whose input projection is done.

    All arrays have one dtype, float32, float64 or 16 bits, and any strides.

    Args:
        {cell}
        gates_x: ``[T, B, W]``, the input projection of each gate, in the declared order. W is the
            sum of the gates' sizes, G*H where each has H units.
        weights: weights of the matmuls in a step, by name. ``weight_hh`` has rows for all gates of
            size H, and a column for each unit of the first state; any other ``weight_<name>`` is
            ``[out, in]`` or ``[heads, out/heads, in/heads]``, where out counts all outputs of the
            matmul, one after the other. Biases, where there are any: ``bias_hh``, ``bias_<name>``.
        {state}
        params: the cell's parameters by name, ``[size]``.
        engine: "cpu" or "reference"; None takes the plan's choice, see ``anycell.explain``.
        {arguments}

    Returns:
        {output final}

    Raises:
        ValueError, TypeError: naming the argument, what was given and what was expected.

    Example:
        >>> from anycell.cells import GRU
        >>> rng = np.random.default_rng(0)
        >>> gates_x = rng.normal(size=(10, 2, 3 * 8))
        >>> weights = {"weight_hh": rng.normal(size=(3 * 8, 8))}
        >>> outputs, (h,) = recurrence(GRU, gates_x, weights, lengths=[10, 4])
        >>> outputs.shape, np.array_equal(h[1], outputs[3, 1])
        ((10, 2, 8), True)
    """
    check_cell(cell)
    names = [name for name in cell.learned if name not in ("weight_ih", "bias_ih")]
    learned = learned_by_name(Strict, cell, names, weights, params)
    check_input(Strict, cell, "gates_x", gates_x, projected=True)
    if not gates_x.dtype.isnative or gates_x.dtype.name not in dtypes("cpu"):
        expected = f"one of {', '.join(dtypes('cpu'))}"
        refuse("gates_x", f"dtype {gates_x.dtype}", expected, "Convert it.", TypeError)
    rows = gates_x.shape[1]
    states, sizes = fit_arrays(Strict, cell, gates_x, learned, rows, gates_x, state, arguments)
    options, seed = check_rest(recurrence, arguments, without=_WITHOUT)
    if options.training and cell.keeps and seed is None:
        refuse("seed", "None", "an int", f"Pass a seed: in training cell {cell.name} draws masks.")
    options = options._replace(seed=seed or 0, threads=threads.current())
    chosen = plan(cell, sizes["H"], gates_x.dtype.name, arguments.get("engine"), sizes)
    layer = Layer(cell, tuple(sizes.items()), options, plan=chosen)
    stack = Stack(Strict, lambda one, on: passes.run(one, on, keep=False)[:3], layer, [learned])
    output, final = Call(layer, gates_x, learned, states, seed).results(stack, arguments)
    return output, final
