"""What the modules share: from a user's tensors to ``[T, B, ...]``, through the layers, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anycell.lang.cell import RECURRENT, Cell
from anycell.torch.arguments import Layout
from anycell.torch.functional import Options, States, Weights, autocast, stack

_EVALUATION, _TRAINING = Options(), Options(training=True)


def shapes(cell: Cell, sizes: dict[str, int], width: int, bias: bool) -> dict[str, tuple[int, ...]]:
    """Name and shape of what one direction of one layer learns, in the order of creation."""
    gates = len(cell.gates) * sizes["H"]
    recurrent = any(l.name == RECURRENT for l in cell.linears)
    found: dict[str, tuple[int, ...]] = {"weight_ih": (gates, width)}
    if recurrent:
        found["weight_hh"] = (gates, sizes[cell.states[0].size])
    if bias:
        found["bias_ih"] = (gates,)
        if recurrent:
            found["bias_hh"] = (gates,)
    for l in cell.linears:
        if l.name != RECURRENT:
            rows, columns = sizes[l.out_size] // l.heads, sizes[l.in_size] // l.heads
            found[f"weight_{l.name}"] = (rows, columns) if l.heads == 1 else (l.heads, rows, columns)
            if l.bias:
                found[f"bias_{l.name}"] = (l.heads * rows,)
    return found | {name: (sizes["H"],) for name in cell.param_names}


class Recurrent:
    """Mixin of the modules that run whole sequences. It adds no attribute to an instance."""

    cell: Cell
    batch_first: bool
    dropout: float
    training: bool
    weight_ih_l0: Tensor

    def _weights(self) -> list[list[Weights]]:
        """Per layer, per direction."""
        raise NotImplementedError

    def _run(
        self,
        x: Tensor,
        state: States | None,
        mask: Tensor | None,
        lengths: Tensor | Sequence[int] | None,
        resets: Tensor | None,
        static: Tensor | None = None,
        masked_output: str = "zero",
    ) -> tuple[Tensor, States]:
        """Input and state, which have been checked, through the layers."""
        if autocast():  # the dtype is that of the weights
            with torch.autocast(x.device.type, enabled=False):
                dtype = self.weight_ih_l0.dtype
                x, state = x.to(dtype), state and tuple(s.to(dtype) for s in state)
                return self._run(x, state, mask, lengths, resets, static, masked_output)
        batched = x.dim() == 3
        if not batched:
            x = x.unsqueeze(1)
            state = state and tuple(s.unsqueeze(1) for s in state)
            static = static if static is None else static.unsqueeze(0)
        elif self.batch_first:
            x = x.transpose(0, 1)
        options = _TRAINING if self.training else _EVALUATION
        draws = self.training and bool(self.cell.keeps)
        if draws or not (mask is None and lengths is None and resets is None and static is None):
            layout = Layout(*x.shape[:2], self.batch_first, batched, x.device)
            options = Options(
                mask=layout.valid(mask, lengths),
                resets=None if resets is None else layout.flags("resets", resets),
                static=static,
                masked_output=masked_output,
                training=self.training,
                seed=_draw_seed() if draws else 0,
            )
        output, final = stack(self.cell, x, state, self._weights(), options, self.dropout)
        if not batched:
            return output.squeeze(1), tuple(s.squeeze(1) for s in final)
        return (output.transpose(0, 1) if self.batch_first else output), final


def _draw_seed() -> int:
    """The seed of one call's random masks, from torch's default generator."""
    return int(torch.empty((), dtype=torch.int64).random_())
