"""``LSTM`` and ``GRU``: ``torch.nn``'s own, with another forward."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from anycell import cells
from anycell.lang.cell import Cell
from anycell.torch.arguments import describe
from anycell.torch.functional import (
    Engine,
    States,
    Weights,
    autocast,
    fused_plan,
    memory,
    traced,
    transformed,
)
from anycell.torch.recurrent import Recurrent

Lengths = Tensor | Sequence[int]


class _DropIn(Recurrent):
    """What ``LSTM`` and ``GRU`` do instead of their parent's forward.

    Whatever they do not take is the parent's, its errors included. They add no attribute to an instance,
    so that a module turns from one class into the other by ``__class__`` alone (``accelerate``).
    """

    _parent: type[nn.RNNBase]
    _all_weights: list[list[str]]
    _parameters: dict[str, Any]
    weight_ih_l0: Tensor
    input_size: int
    hidden_size: int
    num_layers: int
    proj_size: int
    bidirectional: bool

    @property
    def engine(self) -> Engine:
        """What runs this layer, and why."""
        if self.proj_size:
            return Engine("torch", "no fused kernel for proj_size as yet")
        plan = fused_plan(self.cell, self.hidden_size, self.weight_ih_l0)
        return Engine("torch", plan) if isinstance(plan, str) else Engine("cpu", plan.reason)

    def _ours(
        self,
        x: Any,
        states: Sequence[Any] | None,
        mask: Tensor | None,
        lengths: Lengths | None,
        resets: Tensor | None,
    ) -> tuple[Tensor, States] | None:
        """Output and final states, or None where the parent's forward has the answer, or the error."""
        extras = {"mask": mask, "lengths": lengths, "resets": resets}
        extra = mask is not None or lengths is not None or resets is not None
        if extra and (self.proj_size or isinstance(x, PackedSequence)):
            name, value = next((n, v) for n, v in extras.items() if v is not None)
            what = "proj_size" if self.proj_size else "a PackedSequence, which has its own lengths"
            raise ValueError(
                f"{name}: given {describe(value)}; expected None with {what}. "
                "Pass a padded tensor to a layer without projection."
            )
        if not self._fits(x, states):
            return None
        if not extra and not transformed():
            plan = fused_plan(self.cell, self.hidden_size, self.weight_ih_l0)
            if isinstance(plan, str) or traced() or autocast() or not memory(x):
                return None
        return self._run(x, states and tuple(states), mask, lengths, resets)

    def _fits(self, x: Any, states: Sequence[Any] | None) -> bool:
        """Whether input and state are as torch wants them."""
        if not isinstance(x, Tensor) or x.dim() not in (2, 3) or self.proj_size:
            return False
        batched, weight = x.dim() == 3, self.weight_ih_l0
        time = int(batched and self.batch_first)
        if x.shape[time] == 0 or x.shape[-1] != self.input_size or not _alike(x, weight):
            return False
        if states is None:
            return True
        rows = (x.shape[1 - time],) if batched else ()
        shape = (self.num_layers * (1 + self.bidirectional), *rows, self.hidden_size)
        return len(states) == len(self.cell.states) and all(
            isinstance(s, Tensor) and s.shape == shape and _alike(s, weight) for s in states
        )

    def _weights(self) -> list[list[Weights]]:
        mine = self._parameters
        found = [
            # A parametrised weight is no longer a parameter, but computed by an attribute.
            Weights(*[mine[name] if name in mine else getattr(self, name) for name in names])
            for names in self._all_weights
        ]
        step = 1 + self.bidirectional
        return [found[k : k + step] for k in range(0, len(found), step)]

    def __prepare_scriptable__(self) -> nn.Module:
        """TorchScript gets the parent's forward, on the same parameters."""
        plain = copy.copy(self)
        plain.__class__ = self._parent  # type: ignore[assignment]
        return plain  # type: ignore[return-value]


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.device == b.device and (a.dtype == b.dtype or autocast())


class LSTM(_DropIn, nn.LSTM):
    r"""``torch.nn.LSTM`` on a fused kernel: same constructor, weights, ``state_dict``, shapes and errors.

        i_t, f_t, o_t = sigmoid(W_i. x_t + b_i. + W_h. h_{t-1} + b_h.)        each with its own rows
        g_t = tanh(W_ig x_t + b_ig + W_hg h_{t-1} + b_hg)
        c_t = f_t c_{t-1} + i_t g_t
        h_t = o_t tanh(c_t)

    ``forward(input, hx=None, *, mask=None, lengths=None, resets=None)`` returns ``(output, (h_n, c_n))`` as
    torch's does. What torch's does not have, laid out as the input, ``[T, B]`` or ``[B, T]`` if ``batch_first``:
        mask: bool, False where a step does nothing: the state is held, the output is zero, and what lies
            there has no influence, not even NaN.
        lengths: integers ``[B]``, how many steps of each row count; the reverse direction starts there.
        resets: bool, True where zeros replace the state before the step, as where an episode starts.

    Runs fused: float32 and float64 on the CPU. Runs as torch's own layer: other dtypes and devices, autocast,
    ``proj_size``, PackedSequence, and under tracing (jit, export). ``engine`` says which, and why. Under
    ``torch.func`` and for second derivatives it runs step by step.

    Raises:
        what ``torch.nn.LSTM`` raises; TypeError or ValueError for the three arguments above.

    Example:
        >>> lstm = LSTM(input_size=3, hidden_size=8, num_layers=2)
        >>> isinstance(lstm, torch.nn.LSTM)
        True
        >>> output, (h, c) = lstm(torch.zeros(5, 2, 3), lengths=[5, 3])
        >>> output.shape, h.shape
        (torch.Size([5, 2, 8]), torch.Size([2, 2, 8]))
    """

    cell: Cell = cells.LSTM
    _parent = nn.LSTM

    def forward(  # type: ignore[override]
        self,
        input: Tensor,
        hx: tuple[Tensor, Tensor] | None = None,
        *,
        mask: Tensor | None = None,
        lengths: Lengths | None = None,
        resets: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        ours = self._ours(input, hx, mask, lengths, resets)
        return super().forward(input, hx) if ours is None else ours


class GRU(_DropIn, nn.GRU):
    r"""``torch.nn.GRU`` on a fused kernel: same constructor, weights, ``state_dict``, shapes and errors.

        r_t, z_t = sigmoid(W_i. x_t + b_i. + W_h. h_{t-1} + b_h.)              each with its own rows
        n_t = tanh(W_in x_t + b_in + r_t (W_hn h_{t-1} + b_hn))
        h_t = (1 - z_t) n_t + z_t h_{t-1}

    ``forward(input, hx=None, *, mask=None, lengths=None, resets=None)`` returns ``(output, h_n)`` as torch's
    does. The further arguments, what runs fused, and the errors are those of ``LSTM``.

    Example:
        >>> gru = GRU(input_size=3, hidden_size=8, batch_first=True)
        >>> output, h = gru(torch.zeros(2, 5, 3), lengths=[5, 3])
        >>> output.shape, h.shape
        (torch.Size([2, 5, 8]), torch.Size([1, 2, 8]))
    """

    cell: Cell = cells.GRU
    _parent = nn.GRU

    def forward(  # type: ignore[override]
        self,
        input: Tensor,
        hx: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        lengths: Lengths | None = None,
        resets: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        ours = self._ours(input, None if hx is None else (hx,), mask, lengths, resets)
        if ours is None:
            return super().forward(input, hx)
        output, (final,) = ours
        return output, final
