"""``RNN(cell, ...)``: layers of any cell."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.utils.rnn import PackedSequence

from anycell.explanation import Explained
from anycell.lang.cell import Cell
from anycell.layer import check_checkpoint, parameters
from anycell.layer.checks import (
    boolean,
    check_cell,
    check_sizes,
    describe,
    integer,
    number,
    refuse,
)
from anycell.layer.layers import AXES, check_input
from anycell.layer.signature import Shape
from anycell.named import shown
from anycell.plan import Engine, Layer, Returning, Sizes, takes
from anycell.plan.layer import register
from anycell.refusal import explained
from anycell.torch.framework import Torch
from anycell.torch.observers import compiled
from anycell.torch.operators.composite import States
from anycell.torch.operators.functional import engine_of, fused_plan
from anycell.torch.operators.warm import KNOWN, again, learn, quiet
from anycell.torch.packed import parts
from anycell.torch.recurrent import Recurrent, layer_of, leaf, stacked
from anycell.torch.typed import Arguments

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from anycell.lang.declare import SizeArguments
    from anycell.torch.typed import CellCall


class OfCell(Explained, nn.Module):
    """Module of a cell, whose weights are the module's parameters."""

    cell: Cell
    input_size: int
    hidden_size: int
    bias: bool
    sizes: dict[str, int]
    _first = "weight_ih_l0"  # the name of its first weight

    def _describe(
        self, name: str, cell: Any, input_size: Any, hidden_size: Any, bias: Any, sizes: Any
    ) -> None:
        """Sets the attributes of a module of that name from the arguments of its constructor."""
        if isinstance(cell, int):  # called with the arguments of torch.nn's module of that name
            hint = f"Pass one of anycell.cells: {name}(cells.RNN, {cell}, {input_size})."
            expected = f"a cell, which anycell.torch.{name} takes first"
            refuse("cell", describe(cell), expected, hint, TypeError)
        check_cell(cell, " A module that a loop calls is for anycell.torch.loop.")
        self.sizes = check_sizes(cell, hidden_size, sizes)
        self.input_size = integer("input_size", input_size)
        self.cell, self.hidden_size = cell, self.sizes["H"]
        register(cell)
        self.bias = boolean("bias", bias) and cell.bias

    def _create(self, named: Iterable[tuple[str, Shape]], device: Any, dtype: Any) -> None:
        """Makes the parameters of these names and shapes."""
        if dtype is not None and not getattr(dtype, "is_floating_point", False):
            hint = "Pass one, for instance torch.float32."
            refuse("dtype", describe(dtype), "a floating point dtype of torch", hint, TypeError)
        for name, shape in named:
            empty = torch.empty(shape, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(empty))
        self.reset_parameters()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        register(self.cell)

    def reset_parameters(self) -> None:
        """Gives every parameter its initial value, drawn anew where it is random: the declared
        value, or else torch's draw for recurrent layers.
        """
        declared, bound = {p.name: p.initial for p in self.cell.params}, self.hidden_size**-0.5
        for name, parameter in self.named_parameters():
            layered = self._first.endswith("_l0")
            value = declared.get(name.rpartition("_l")[0] if layered else name)
            if value is None:
                nn.init.uniform_(parameter, -bound, bound)
            else:
                nn.init.constant_(parameter, value)

    @property
    def engine(self) -> Engine:
        """Engine that runs this module, and why."""
        weight: Any = getattr(self, self._first)
        return engine_of(fused_plan(self.cell, self._sizes, weight))

    def _layer(self) -> Layer:
        return layer_of(self.cell, self._sizes, getattr(self, self._first))

    @property
    def _sizes(self) -> Sizes:
        return tuple(self.sizes.items())

    def extra_repr(self) -> str:
        """The arguments that are not the default."""
        return ", ".join(shown(self))

    def __prepare_scriptable__(self) -> NoReturn:
        name = type(self).__name__
        hint = (
            "Use torch.compile or torch.export, or torch.jit.trace for one number of steps. For "
            "cells.LSTM and cells.GRU, script anycell.torch.LSTM and GRU, or LSTMCell and GRUCell "
            "for one step, which load the same weights."
        )
        refuse("torch.jit.script", f"anycell's {name}", "modules of torch", hint, TypeError)


@takes(Arguments, Returning)
class RNN(Recurrent, OfCell):
    r"""Runs layers of any cell, as ``torch.nn.LSTM`` runs layers of one cell.

    With the cell's function f and H = ``hidden_size``, each direction of each layer computes

        x_t = W_ih input_t + b_ih              of all gates, [B, gates * H]
        r_t = W_hh s_{t-1} + b_hh              s is the first state, which is also the output
        state_t = f(x_t, r_t, state_{t-1}, p)

    Args:
        cell: what ``@anycell.cell`` made, for instance one of ``anycell.cells``.
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device,
            dtype: as in ``torch.nn.LSTM``. ``bias`` does nothing if the cell places its own biases.
        checkpoint: saves memory in training, but takes more time: the forward pass keeps only x and
            the states of every ``checkpoint`` steps ("sqrt": about sqrt(T) steps), and the backward
            pass computes the rest again, with the same bits. The number of steps is rounded up to
            whole chunks of 8 MiB of projected input, on a GPU of 64 MiB. It is also an attribute.
            Only fused layers use it.
        sizes: the sizes that states declare, by their symbols: ``P=64`` for ``state="h:P c"``.

    ``forward`` takes (pass all but the first two by name), and returns (output, final state):
        x: ``[T, B, input_size]``, ``[B, T, input_size]`` if ``batch_first``, or, without a batch,
            ``[T, input_size]``; or a ``PackedSequence``, and then output and resets are packed too.
        state: a tuple in the cell's order, ``[num_layers * D, B, H]`` each, D = 2 if bidirectional
            else 1; for one state, the tensor itself. Default: the values that the cell declares.
        {arguments}
        output: ``[T, B, D * H]``, laid out as x: the first state of the last layer.
        final state: as ``state``, after each row's last step.
        a third result, if ``return_states``: a dictionary by names of states, each of the last
            layer, ``[T, B, D * size]``, laid out as x; at masked steps see ``masked_output``.
            ``recurrence`` says which of these calls run fused.

    Parameters, shaped as torch's: ``weight_ih_l{k}``, ``weight_hh_l{k}``, ``bias_ih_l{k}``,
    ``bias_hh_l{k}`` with rows in the cell's order of gates, those of ``hh`` for gates of size H
    only; ``{name}_l{k}`` ``[size]`` for each parameter of the cell, ``weight_{name}_l{k}`` for each
    further matmul; names of the reverse direction end in ``_reverse``. ``RNN(cells.LSTM, ...)`` and
    ``torch.nn.LSTM`` load each other's checkpoints, as do ``RNN(cells.GRU, ...)`` and
    ``torch.nn.GRU``. Initial values are those that the cell declares, or U(-1/sqrt(H), 1/sqrt(H)),
    drawn in torch's order.

    All tensors must have the dtype and device of the weights. float32, bfloat16 and float16 run
    fused on the CPU and on a GPU with Triton, float64 on the CPU, others step by step; ``engine``
    says which, and why. Under ``torch.autocast`` for its device a layer uses autocast's dtype, like
    torch's own. Random masks (``keep``) take one seed per call from torch's default generator.

    Raises:
        TypeError, ValueError: with the argument, what was given, what is expected, and what to do.

    Example:
        >>> layer = RNN(anycell.cells.PeepholeLSTM, input_size=3, hidden_size=8)
        >>> output, (h, c) = layer(torch.zeros(5, 2, 3), lengths=[5, 3])
        >>> output.shape, h.shape, c.shape
        (torch.Size([5, 2, 8]), torch.Size([1, 2, 8]), torch.Size([1, 2, 8]))
    """

    if TYPE_CHECKING:
        __call__: CellCall

    @explained
    def __init__(
        self,
        cell: Cell,
        input_size: int,
        hidden_size: int | None = None,  # so that the error of RNN(3, 4) is about the missing cell
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Any = None,
        dtype: Any = None,
        checkpoint: str | int | None = None,
        **sizes: Unpack[SizeArguments],
    ) -> None:
        super().__init__()
        self._describe("RNN", cell, input_size, hidden_size, bias, sizes)
        self.num_layers = integer("num_layers", num_layers)
        self.batch_first = boolean("batch_first", batch_first)
        self.dropout = number("dropout", dropout, 0.0, 1.0, closed=True)
        if self.dropout and self.num_layers == 1:
            message = f"dropout={dropout} acts between layers; with num_layers=1 it does nothing."
            warnings.warn(message, stacklevel=3)
        self.bidirectional = boolean("bidirectional", bidirectional)
        self.checkpoint = check_checkpoint(checkpoint)
        directions = 1 + self.bidirectional
        named = parameters(
            cell, self.sizes, self.input_size, self.bias, self.num_layers, directions
        )
        self._create(named, device, dtype)

    @takes(Arguments, Returning)
    def forward(
        self,
        x: Tensor | PackedSequence,
        state: Tensor | States | None = None,
        *by_position: Any,
        **arguments: Any,
    ) -> tuple[Any, ...]:
        """Returns the output and the final state; see the class."""
        plain = not by_position and quiet() and KNOWN.issuperset(arguments)
        if plain:
            known = again(self, "call", x, state, arguments)
            if known is not None:
                return known
        elif not (by_position or arguments) and (known := self._compiled(x, state)) is not None:
            return known
        if by_position:
            arguments = self._named(by_position, arguments)
        if isinstance(x, Proxy):
            return leaf(self, x, state, **arguments)
        if isinstance(x, PackedSequence):
            if compiled():
                forward: Any = torch.compiler.disable(self.forward)
                return forward(x, state, **arguments)
            axes = "steps of all rows", self.input_size
            check_input(Torch, parts(x)[0], axes, self._like)
        else:
            check_input(Torch, x, (*AXES[self.batch_first], self.input_size), self._like)
            if x.shape[int(self.batch_first and x.dim() == 3)] == 0:
                refuse("x", describe(x), "one step or more", "Skip the call.")
        weights = self._weights(self.cell)
        layer = self._call(self.cell, arguments)
        stack = stacked(layer, weights, x, self.batch_first, self.dropout)
        results = stack.call(x, state, arguments)
        if plain:
            learn(self, "call", x, state, arguments, results)
        return results
