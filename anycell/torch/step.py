"""``LSTMCell``, ``GRUCell`` and ``RNNCell(cell, ...)``: one time step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from anycell import cells
from anycell.lang.cell import Cell
from anycell.torch.arguments import (
    check_layer,
    check_states,
    check_static,
    check_tensor,
)
from anycell.torch.composite import Call, Inputs, Options, States
from anycell.torch.dropin import Scriptable
from anycell.torch.functional import (
    Engine,
    autocast,
    fused_plan,
    layer,
    memory,
    traced,
    transformed,
)
from anycell.torch.recurrent import draw_seed, shapes
from anycell.torch.rnn import initialise, learned


class _Step:
    """Mixin of the modules that run one step. It adds no attribute to an instance."""

    cell: Cell
    hidden_size: int
    training: bool
    weight_ih: Tensor

    def _step(self, x: Tensor, states: States | None, static: Tensor | None = None) -> States:
        """The new states of ``x``, ``[B, input]`` or ``[input]``."""
        batched = x.dim() == 2
        if not batched:
            x, static = x.unsqueeze(0), None if static is None else static.unsqueeze(0)
            states = states and tuple(s.unsqueeze(0) for s in states)
        draws = self.training and bool(self.cell.keeps)
        options = Options(training=self.training, seed=draw_seed() if draws else 0)
        call = Call(self.cell, self.hidden_size, options)
        initial = states and tuple(s.unsqueeze(0) for s in states)
        _, final = layer(call, Inputs(x.unsqueeze(0), static, initial, None, [learned(self)]))
        return tuple(s[0] if batched else s[0, 0] for s in final)


class _DropInCell(Scriptable, _Step):
    """What ``LSTMCell`` and ``GRUCell`` do instead of their parent's forward."""

    input_size: int

    @property
    def engine(self) -> Engine:
        """What runs this cell, and why."""
        plan = fused_plan(self.cell, self.hidden_size, self.weight_ih)
        return Engine("torch", plan) if isinstance(plan, str) else Engine("cpu", plan.reason)

    def _ours(self, x: Any, states: tuple[Any, ...] | None) -> States | None:
        """The new states; None where the parent has the answer, or the error."""
        if autocast() or traced() or transformed() or self.engine.name == "torch":
            return None
        if not isinstance(x, Tensor) or x.dim() not in (1, 2) or x.shape[-1] != self.input_size:
            return None
        wanted = (*x.shape[:-1], self.hidden_size)
        if states is not None and len(states) != len(self.cell.states):
            return None
        if not all(isinstance(s, Tensor) and s.shape == wanted for s in states or ()):
            return None
        dtype = self.weight_ih.dtype
        if not all(memory(t, dtype) for t in (x, *(states or ()))):
            return None
        return self._step(x, states)


class LSTMCell(_DropInCell, nn.LSTMCell):
    """``torch.nn.LSTMCell``: one step of ``LSTM``; its constructor, weights, shapes and errors.

    Example:
        >>> h, c = LSTMCell(input_size=3, hidden_size=8)(torch.zeros(2, 3))
        >>> h.shape, c.shape
        (torch.Size([2, 8]), torch.Size([2, 8]))
    """

    cell: Cell = cells.LSTM
    _parent = nn.LSTMCell

    def forward(  # type: ignore[override]
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> States:
        """The new ``(h, c)`` from input ``[B, input_size]`` and the old, ``[B, H]`` each."""
        ours = self._ours(input, None if hx is None else tuple(hx))
        return super().forward(input, hx) if ours is None else ours


class GRUCell(_DropInCell, nn.GRUCell):
    """``torch.nn.GRUCell``: one step of ``GRU``; its constructor, weights, shapes and errors.

    Example:
        >>> h = GRUCell(input_size=3, hidden_size=8)(torch.zeros(2, 3))
        >>> h.shape
        torch.Size([2, 8])
    """

    cell: Cell = cells.GRU
    _parent = nn.GRUCell

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """The new h from input ``[B, input_size]`` and the old, ``[B, H]``."""
        ours = self._ours(input, None if hx is None else (hx,))
        return super().forward(input, hx) if ours is None else ours[0]


class RNNCell(_Step, nn.Module):
    """One step of any cell, as ``RNN(cell, ...)`` runs it.

    Args:
        cell, input_size, hidden_size, bias, device, dtype, sizes: as for ``RNN``.

    ``forward(x, state=None, *, static=None)`` takes ``[B, input_size]`` or, with no batch,
    ``[input_size]``, the state as a tuple in the cell's order, ``[B, H]`` each (of one state the
    tensor itself; default: what the cell declares), and the cell's static input ``[B, H]``; it
    gives the new state in the same form.

    Parameters: as of ``RNN``, without the number of the layer: ``weight_ih``, ``weight_hh``,
    ``bias_ih``, ``bias_hh``, and the cell's own by their names.

    Raises:
        TypeError, ValueError: with the argument, what was given, what is expected, and what to do.

    Example:
        >>> cell = RNNCell(anycell.cells.PeepholeLSTM, input_size=3, hidden_size=8)
        >>> h, c = cell(torch.zeros(2, 3))
        >>> h.shape, c.shape
        (torch.Size([2, 8]), torch.Size([2, 8]))
    """

    def __init__(
        self,
        cell: Cell,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        **sizes: int,
    ) -> None:
        super().__init__()
        check_layer(cell, {"input_size": input_size, "hidden_size": hidden_size}, sizes)
        self.cell = cell
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.bias = bool(bias) and cell.bias
        self.sizes = {"H": hidden_size, **sizes}
        for name, shape in shapes(cell, self.sizes, input_size, self.bias).items():
            empty = torch.empty(shape, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(empty))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Gives every parameter its initial value, drawn anew where it is random."""
        declared = {p.name: p.initial for p in self.cell.params}
        for name, parameter in self.named_parameters():
            initialise(parameter, declared.get(name), self.hidden_size)

    @property
    def engine(self) -> Engine:
        """What runs this cell, and why."""
        plan = fused_plan(self.cell, self.hidden_size, self.weight_ih)
        return Engine("reference", plan) if isinstance(plan, str) else Engine("cpu", plan.reason)

    def extra_repr(self) -> str:
        """The arguments that are not the default."""
        shown = f"{self.cell!r}, {self.input_size}, {self.hidden_size}"
        return shown if self.bias == self.cell.bias else f"{shown}, bias={self.bias}"

    def forward(
        self,
        x: Tensor,
        state: Tensor | States | None = None,
        *,
        static: Tensor | None = None,
    ) -> Tensor | States:
        """The new state; see the class."""
        rows = tuple(x.shape[:-1]) if isinstance(x, Tensor) and x.dim() == 2 else ()
        check_tensor("x", x, (*rows, self.input_size), "one step of the input", self.weight_ih)
        states = check_states("state", state, self.cell, self.sizes, rows, x)
        static = check_static(self.cell, static, (*rows, self.hidden_size), x)
        final = self._step(x, states, static)
        return final if len(final) > 1 else final[0]
