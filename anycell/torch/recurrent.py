"""What the modules share: from a user's tensors to ``[T, B, ...]``, through layers, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from anycell.lang.cell import RECURRENT, Cell
from anycell.torch.arguments import Layout
from anycell.torch.composite import Call, Inputs, Options, States, Weights
from anycell.torch.functional import autocast, stack

Lengths = Tensor | Sequence[int]
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
            block = sizes[l.out_size] // l.heads, sizes[l.in_size] // l.heads
            found[f"weight_{l.name}"] = block if l.heads == 1 else (l.heads, *block)
            if l.bias:
                found[f"bias_{l.name}"] = (sizes[l.out_size],)
    return found | dict.fromkeys(cell.param_names, (sizes["H"],))


class Recurrent:
    """Mixin of the modules that run whole sequences. It adds no attribute to an instance."""

    cell: Cell
    hidden_size: int
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
        *,
        mask: Tensor | None = None,
        lengths: Lengths | None = None,
        resets: Tensor | None = None,
        reset_state: States | None = None,
        static: Tensor | None = None,
        masked_output: str = "zero",
    ) -> tuple[Tensor, States]:
        """Input and states, which have been checked, through the layers."""
        if autocast():  # what other layers hand on may be of 16 bits; this one keeps to its weights
            dtype = self.weight_ih_l0.dtype
            x, static = x.to(dtype), None if static is None else static.to(dtype)
            state, reset_state = (_each(s, lambda t: t.to(dtype)) for s in (state, reset_state))
        batched = x.dim() == 3
        if not batched:
            x, static = x.unsqueeze(1), None if static is None else static.unsqueeze(0)
            state, reset_state = (_each(s, lambda t: t.unsqueeze(1)) for s in (state, reset_state))
        elif self.batch_first:
            x = x.transpose(0, 1)
        options = _TRAINING if self.training else _EVALUATION
        draws = self.training and bool(self.cell.keeps)
        if draws or mask is not None or lengths is not None or resets is not None:
            layout = Layout(x.shape[0], x.shape[1], self.batch_first, batched, x.device)
            options = Options(
                mask=layout.valid(mask, lengths),
                resets=None if resets is None else layout.flags("resets", resets),
                masked_output=masked_output,
                training=self.training,
                seed=draw_seed() if draws else 0,
            )
        weights = self._weights()
        call = Call(self.cell, self.hidden_size, options)
        inputs = Inputs(x, static, state, reset_state, weights[0])
        if autocast():
            with torch.autocast(x.device.type, enabled=False):
                output, final = stack(call, inputs, weights, self.dropout)
        else:
            output, final = stack(call, inputs, weights, self.dropout)
        if not batched:
            return output.squeeze(1), tuple(s.squeeze(1) for s in final)
        return (output.transpose(0, 1) if self.batch_first else output), final


def draw_seed() -> int:
    """The seed of one call's random masks, from torch's default generator."""
    return int(torch.empty((), dtype=torch.int64).random_())


def _each(states: States | None, change: Callable[[Tensor], Tensor]) -> States | None:
    return states and tuple(map(change, states))
