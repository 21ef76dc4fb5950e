"""``recurrence``: one direction of one layer of any cell, on tensors that the user owns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from anycell.lang.cell import Cell
from anycell.layer.checks import check_cell, choice
from anycell.layer.primitive import (
    arguments,
    check_input,
    input_of,
    learned_by_name,
    options_and_seed,
)
from anycell.layer.sequences import besides_output, by_name, check_return_states
from anycell.plan import OPTIONS, FunctionOptions, Layer, takes
from anycell.plan.layer import SEED, changed, register
from anycell.torch import ops
from anycell.torch.framework import Torch
from anycell.torch.observers import compiled, exporting
from anycell.torch.packed import parts
from anycell.torch.recurrent import Lengths, draw_seed, stacked

if TYPE_CHECKING:
    from typing_extensions import Unpack

Given = Tensor | None


@takes(OPTIONS)
def recurrence(
    cell: Cell,
    x: Tensor | PackedSequence | None,
    weights: Mapping[str, Given],
    state: Tensor | Sequence[Given] | None = None,
    params: Mapping[str, Given] | None = None,
    *,
    gates: Tensor | PackedSequence | None = None,
    mask: Tensor | None = None,
    lengths: Lengths | None = None,
    resets: Tensor | PackedSequence | None = None,
    reset_state: Tensor | Sequence[Given] | None = None,
    recurrent_mask: Tensor | None = None,
    static: Tensor | None = None,
    return_states: bool | str | Sequence[str] | None = None,
    engine: str | None = None,
    **options: Unpack[FunctionOptions],
) -> tuple[Any, ...]:
    r"""Runs ``cell`` over a sequence: one direction of one layer, whose tensors are the user's.

    It is differentiable, also twice, in every float tensor that it is given. ``anycell.recurrence``
    is the same for NumPy's arrays; ``RNN(cell, ...)`` is a module with layers and directions.

    Args:
        cell: a cell of G gates. Its hidden size H, and its other sizes, follow from the tensors.
        x: ``[T, B, I]``, or a ``PackedSequence`` of rows of I; then resets must be packed too. If
            ``weights`` have no ``weight_ih``, x must be projected already, like ``gates``.
        state: ``[B, size]`` per state, or the tensor itself for one state; None, for all states or
            one of them, is the declared value. ``reset_state`` may also be ``[size]``.
        params: the cell's parameters, if they are kept apart from the weights.
        engine: "cpu", "gpu" or "reference" (step by step); None chooses the engine that fits.
        {weights gates mask lengths resets reset_state static recurrent_mask return_states options}

    Returns:
        the output ``[T, B, size of the first state]``, packed like x, and a tuple of the final
        states ``[B, size]``. With ``return_states`` a third result: a dictionary of
        ``[T, B, size]`` by names of states, packed like x; at masked steps see ``masked_output``.

    In training without a ``seed``, torch's default generator draws one. Resets other than 0 and 1
    are an error on the CPU; on other devices and in a trace, all values but 0 are resets.

    The same calls run fused as for ``RNN``: float32 and 16 bits on the CPU and on a GPU with
    Triton, float64 on the CPU. ``torch.func``, traces, second derivatives and calls whose
    ``recurrent_mask`` requires a gradient run step by step. On a GPU, so does a backward pass with
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
    check_cell(cell)
    if not compiled():
        register(cell)
    params = {} if params is None else params
    named = learned_by_name(Torch, cell, cell.learned, weights=weights, params=params)
    name, series = input_of(x, gates, named)
    packed = isinstance(series, PackedSequence)
    data: Any = parts(series)[0] if packed else series
    check_input(Torch, cell, name, data, "weight_ih" not in named, packed)
    rows = int(parts(series)[1][0]) if packed else data.shape[1]
    like = named.get("weight_hh", [*named.values(), data][0])
    arrays, sizes = arguments(
        Torch, cell, data, named, rows, like, state, reset_state, static, recurrent_mask
    )
    Torch.check_array(name, data, data.shape, "as the weights", like)
    choice("engine", engine, None, "cpu", "gpu", "reference")
    how, seed = options_and_seed(options, recurrence)
    how = changed(how, SEED, _seed(cell, how.training, seed))
    wanted = check_return_states(cell, return_states)
    others = besides_output(wanted, cell)
    layer = Layer(cell, tuple(sizes.items()), how, engine=engine)
    of_steps = {"mask": mask, "lengths": lengths, "resets": resets}

    def run() -> Any:
        return stacked(layer, [named], series).sequence(series, arrays, of_steps, others)

    run = torch.compiler.disable(run) if packed and compiled() else run
    output, final, values = run()
    last = tuple([s.squeeze(0) for s in final])
    return (output, last, by_name(wanted, cell, output, values)) if wanted else (output, last)


def _seed(cell: Cell, training: bool, seed: Any) -> Any:
    """Returns the seed of the random masks, or 0 if none are drawn; a tensor when traced."""
    if not (training and ops.draws(cell)):
        return 0
    if seed is None:
        return draw_seed()
    if compiled() or exporting():  # as a signed number of 64 bits, which has the same bits
        return torch.tensor(seed - (seed >> 63 << 64), dtype=torch.int64)
    return seed
