"""``recurrence``: one direction of one layer of any cell, on tensors that the user owns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from anycell.lang.cell import Cell
from anycell.layer import primitive
from anycell.layer.primitive import check_call
from anycell.plan import takes
from anycell.plan.layer import OPTIONS, SEED, changed, register
from anycell.torch.framework import Torch
from anycell.torch.observers import compiled, exporting
from anycell.torch.operators import ops
from anycell.torch.packed import parts
from anycell.torch.recurrent import draw_seed, stacked
from anycell.torch.typed import RecurrenceArguments

if TYPE_CHECKING:
    from typing_extensions import Unpack

Given = Tensor | None


@takes(RecurrenceArguments, about=primitive.__doc__)
def recurrence(
    cell: Cell,
    x: Tensor | PackedSequence | None,
    weights: Mapping[str, Given],
    state: Tensor | Sequence[Given] | None = None,
    params: Mapping[str, Given] | None = None,
    **arguments: Unpack[RecurrenceArguments],
) -> tuple[Any, ...]:
    r"""Runs ``cell`` over a sequence: one direction of one layer, whose tensors are the user's.

    It is differentiable, also twice, in every float tensor that it is given. ``anycell.recurrence``
    is the same for NumPy's arrays; ``RNN(cell, ...)`` is a module with layers and directions.

    Args:
        {cell}
        x: ``[T, B, I]``, or a ``PackedSequence`` of rows of I; then resets must be packed too. If
            ``weights`` have no ``weight_ih``, x must be projected already, like ``gates``.
        {weights state params}
        engine: "cpu", "gpu" or "reference" (step by step); None chooses the engine that fits.
        {arguments}

    Returns:
        {output final states}

    In training without a ``seed``, torch's default generator draws one. Resets other than 0 and 1
    are an error on the CPU; on other devices and in a trace, all values but 0 are resets.

    The same calls run fused as for ``RNN``: float32 and 16 bits on the CPU and on a GPU with
    Triton, float64 on the CPU, also derived twice and in ``torch.func``. Traces of jit, calls whose
    ``recurrent_mask`` requires a gradient, and a second derivative with such a mask or with
    ``return_states`` run step by step. On a GPU, so does a backward pass with
    a gradient of a sequence of ``return_states`` other than the output. ``checkpoint`` has no
    effect in calls that return such sequences.

    Raises:
        TypeError, ValueError: with the argument, what was given, what is expected, and what to do.

    Example:
        >>> weights = {"weight_ih": torch.randn(32, 3), "weight_hh": torch.randn(32, 8)}
        >>> output, (h, c), states = recurrence(
        ...     anycell.cells.LSTM, torch.zeros(5, 2, 3), weights, return_states="c"
        ... )
        >>> output.shape, c.shape, states["c"].shape
        (torch.Size([5, 2, 8]), torch.Size([2, 8]), torch.Size([5, 2, 8]))
    """
    engines = "cpu", "gpu", "reference"
    call = check_call(
        Torch, recurrence, cell, x, weights, state, params, arguments, unpack=_unpacked,
        engines=engines,
    )  # fmt: skip
    if not compiled():
        register(cell)
    options = call.layer.options
    options = changed(options, SEED, _seed(cell, options.training, call.seed))
    layer = changed(call.layer, OPTIONS, options)
    results = call.results
    if compiled() and isinstance(call.x, PackedSequence):
        results = torch.compiler.disable(results)
    return results(stacked(layer, [call.learned], call.x), arguments)


def _unpacked(name: str, series: Any) -> tuple[Any, int | None]:
    """The data of an input, and the rows of a packed one."""
    if not isinstance(series, PackedSequence):
        return series, None
    return parts(series)[0], int(parts(series)[1][0])


def _seed(cell: Cell, training: bool, seed: Any) -> Any:
    """Returns the seed of the random masks, or 0 if none are drawn; a tensor when traced."""
    if not (training and ops.draws(cell)):
        return 0
    if seed is None:
        return draw_seed()
    if compiled() or exporting():  # as a signed number of 64 bits, which has the same bits
        return torch.tensor(seed - (seed >> 63 << 64), dtype=torch.int64)
    return seed
