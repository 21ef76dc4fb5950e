"""A layer as differentiable torch operations: the input projection, then the reference engine.

Slow, and able to do everything torch can: it serves double backward, vmap, forward-mode derivatives
and tracing, and the cells, dtypes and devices that no fused kernel carries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from anycell.engines import reference
from anycell.lang.cell import RECURRENT, Cell, Linear, with_recurrent_mask

States = tuple[Tensor, ...]
Sizes = tuple[tuple[str, int], ...]


class Weights(NamedTuple):
    """What one direction of one layer learns.

    Attributes:
        ih: None where the input comes projected, in one direction.
        params: the cell's, in its order.
        linears: of further matmuls inside a step, by the names that the reference engine reads.
    """

    ih: Tensor | None
    hh: Tensor | None = None
    bias_ih: Tensor | None = None
    bias_hh: Tensor | None = None
    params: tuple[Tensor, ...] = ()
    linears: tuple[tuple[str, Tensor | None], ...] = ()

    def map(self, change: Callable[[Tensor], Tensor]) -> Weights:
        """``change(tensor)`` of all that are there."""

        def each(t: Any) -> Any:
            return None if t is None else change(t)

        ih, hh, bias_ih, bias_hh = map(each, self[:4])
        further = tuple([(name, each(t)) for name, t in self.linears])
        return Weights(ih, hh, bias_ih, bias_hh, tuple(map(each, self.params)), further)


def linear_names(cell: Cell) -> tuple[str, ...]:
    """The names in ``Weights.linears``: of each further matmul its weight, then their biases."""
    names = [l.name for l in cell.linears if l.name != RECURRENT]
    return *names, *[f"{name}_bias" for name in names]


class Options(NamedTuple):
    """What all layers of one call share.

    Attributes:
        mask, resets: bool ``[T, B]``, contiguous.
        masked_output: "zero" or "repeat".
        training: whether random masks are drawn, from ``seed``.
        checkpoint: of the fused engine, see ``layer.Options``.
        recurrent_mask: ``[B, size]`` or ``[G, B, size]``, multiplies what enters the recurrent
            matmul, in all directions; no gradient flows to it.
    """

    mask: Tensor | None = None
    resets: Tensor | None = None
    masked_output: str = "zero"
    training: bool = False
    seed: int = 0
    checkpoint: str | int | None = None
    recurrent_mask: Tensor | None = None


class Inputs(NamedTuple):
    """The tensors of a layer that gradients flow to; states are ``[directions, B, size]`` each."""

    x: Tensor
    static: Tensor | None
    initial: States | None  # None for what the cell declares
    reset: States | None  # what resets restore, likewise
    weights: Sequence[Weights]  # one per direction


class Call(NamedTuple):
    """What else the call of a layer says.

    Attributes:
        layer: its number.
        sizes: what the other size symbols of the cell stand for, in pairs.
    """

    cell: Cell
    hidden_size: int
    options: Options
    layer: int = 0
    sizes: Sizes = ()

    @property
    def stepped(self) -> Cell:
        """The cell that a kernel runs: with a recurrent mask, one that multiplies by it."""
        mask = self.options.recurrent_mask
        return self.cell if mask is None else with_recurrent_mask(self.cell, mask.dim() == 3)

    def shape(self, linear: Linear) -> tuple[int, ...]:
        """Of the weight of a matmul inside a step."""
        return linear.shape({"H": self.hidden_size, **dict(self.sizes)})


def composite(call: Call, inputs: Inputs) -> tuple[Tensor, States]:
    """Output ``[T, B, directions * size]`` and final states of a layer, step by step."""
    cell, options, x = call.cell, call.options, inputs.x
    if options.mask is not None:  # NaN under a mask must not reach the weights' gradient
        x = torch.where(options.mask.unsqueeze(-1), x, torch.zeros_like(x))
    if torch._C._get_tracing_state() is not None:
        # The loop over the steps becomes part of the trace. There it must not run on more of them.
        x = torch.stack(x.unbind())
    outputs, finals = [], []
    for d, w in enumerate(inputs.weights):
        if w.ih is not None:
            gates = F.linear(x, w.ih, w.bias_ih)
        else:
            gates = x if w.bias_ih is None else x + w.bias_ih
        output, final = reference.run(
            cell,
            gates,
            {"hh": w.hh, "hh_bias": w.bias_hh, **dict(w.linears)},
            inputs.initial and [s[d] for s in inputs.initial],
            dict(zip(cell.param_names, w.params, strict=True)),
            static=inputs.static,
            mask=options.mask,
            resets=options.resets,
            reset_state=inputs.reset and [s[d] for s in inputs.reset],
            masked_output=options.masked_output,
            recurrent_mask=options.recurrent_mask,
            reverse=d == 1,
            training=options.training,
            seed=options.seed,
            stream=2 * call.layer + d,
        )
        outputs.append(output)
        finals.append(final)
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
    return output, tuple(torch.stack(parts) for parts in zip(*finals, strict=True))
