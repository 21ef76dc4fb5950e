"""``LSTMCell``, ``GRUCell`` and ``RNNCell(cell, ...)``: one time step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from anycell import cells
from anycell.explanation import Explained
from anycell.lang.cell import Cell
from anycell.layer import shapes
from anycell.layer.checks import refuse
from anycell.layer.signature import state_names
from anycell.plan import Engine, Layer, Options
from anycell.torch.framework import Torch
from anycell.torch.observers import autocast
from anycell.torch.operators import ops
from anycell.torch.operators.composite import States
from anycell.torch.operators.functional import run_layer
from anycell.torch.operators.warm import again, learn, quiet
from anycell.torch.recurrent import draw_seed, layer_of, leaf, learned
from anycell.torch.rnn import OfCell

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from anycell.lang.declare import SizeArguments

_ONE_STEP = Engine("torch", "a single step reads the weights once: packing them first does not pay")
# By name and key: a compiler sees no more of a cell. None of these cells has hyperparameters.
_OPERATORS = {
    (cell.name, cell.key): operator
    for cell, operator in (
        (cells.LSTM, torch.lstm_cell),
        (cells.GRU, torch.gru_cell),
        (cells.RNN, torch.rnn_tanh_cell),
        (cells.RNN(nonlinearity="relu"), torch.rnn_relu_cell),
    )
}


class DropInCell(Explained):
    """The base of ``LSTMCell`` and ``GRUCell``."""

    engine = _ONE_STEP

    def _layer(self) -> Layer:
        me: Any = self
        return layer_of(me.cell, (("H", me.hidden_size),), me.weight_ih)


class LSTMCell(DropInCell, nn.LSTMCell):
    """``torch.nn.LSTMCell``, one step of ``LSTM``, which torch runs for now.

    Example:
        >>> h, c = LSTMCell(input_size=3, hidden_size=8)(torch.zeros(2, 3))
        >>> h.shape, c.shape
        (torch.Size([2, 8]), torch.Size([2, 8]))
    """

    cell: Cell = cells.LSTM
    if TYPE_CHECKING:

        def __call__(self, input: Tensor, hx: Any = None) -> tuple[Tensor, Tensor]: ...


class GRUCell(DropInCell, nn.GRUCell):
    """``torch.nn.GRUCell``, one step of ``GRU``, which torch runs for now.

    Example:
        >>> h = GRUCell(input_size=3, hidden_size=8)(torch.zeros(2, 3))
        >>> h.shape
        torch.Size([2, 8])
    """

    cell: Cell = cells.GRU
    if TYPE_CHECKING:

        def __call__(self, input: Tensor, hx: Tensor | None = None) -> Tensor: ...


class RNNCell(OfCell):
    """One step of any cell, as ``RNN(cell, ...)`` runs it.

    Args:
        cell, input_size, hidden_size, bias, device, dtype, sizes: as for ``RNN``.

    ``forward(x, state=None, static=None)`` takes ``[B, input_size]`` or, without a batch,
    ``[input_size]``; the state as a tuple in the cell's order, ``[B, H]`` each (the tensor itself
    for one state; default: what the cell declares); and the cell's static input ``[B, H]``. It
    returns the new state in the same form. Under ``torch.autocast`` it computes in the dtype of its
    weights: autocast would round the state to 16 bits between steps, which layers do not do. A call
    is a sequence of one step: masks that a cell draws once per sequence are drawn at each call.

    Parameters: as in ``RNN``, without the number of the layer: ``weight_ih``, ``weight_hh``,
    ``bias_ih``, ``bias_hh``, and the cell's own parameters by their names.

    Raises:
        TypeError, ValueError: with the argument, what was given, what is expected, and what to do.

    Example:
        >>> cell = RNNCell(anycell.cells.PeepholeLSTM, input_size=3, hidden_size=8)
        >>> h, c = cell(torch.zeros(2, 3))
        >>> h.shape, c.shape
        (torch.Size([2, 8]), torch.Size([2, 8]))
    """

    weight_ih: Tensor
    _first = "weight_ih"
    if TYPE_CHECKING:

        def __call__(self, x: Tensor, state: Any = None, static: Tensor | None = None) -> Any: ...

    def __init__(
        self,
        cell: Cell,
        input_size: int,
        hidden_size: int | None = None,  # so that an error of RNNCell(3, 4) is about the cell
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        **sizes: Unpack[SizeArguments],
    ) -> None:
        super().__init__()
        self._describe("RNNCell", cell, input_size, hidden_size, bias, sizes)
        taken = [name for name in cell.param_names if name in dir(self)]
        if taken:
            given = f"{cell.name}, which has a parameter named {taken[0]!r}"
            expected = "no parameter with the name of an attribute of RNNCell"
            refuse("cell", given, expected, "Rename the parameter in the cell.")
        named = shapes(cell, self.sizes, self.input_size, self.bias)
        self._create(named.items(), device, dtype)

    @property
    def engine(self) -> Engine:
        """The engine that runs this cell, and why."""
        known = (self.cell.name, self.cell.key) in _OPERATORS
        return _ONE_STEP if known else super().engine

    def forward(
        self, x: Tensor, state: Tensor | States | None = None, static: Tensor | None = None
    ) -> Tensor | States:
        """Returns the new state; see the class."""
        if isinstance(x, Proxy):
            return leaf(self, x, state, static=static)
        known_to_torch = (self.cell.name, self.cell.key) in _OPERATORS
        alone, arguments = quiet() and not known_to_torch, {"static": static}
        if alone:
            known = again(self, "cell", x, state, arguments)
            if known is not None:
                return known
        rows = tuple(x.shape[:-1]) if isinstance(x, Tensor) and x.dim() == 2 else ()
        axes = "one step of the input" if rows else f"or [B, {self.input_size}], one step"
        Torch.check_array("x", x, (*rows, self.input_size), axes, self.weight_ih)
        states: States = ()
        if state is not None:
            states = Torch.check_states("state", state, self.cell, self.sizes, rows, x)
        shape = (*rows, self.sizes[self.cell.static_size])
        static = Torch.check_static(self.cell, static, shape, x)
        tensors = [x, static, *states]
        if not rows:
            tensors = [t if t is None else t.unsqueeze(0) for t in tensors]
        if autocast():
            tensors = [t if t is None else t.to(self.weight_ih.dtype) for t in tensors]
            with torch.autocast(x.device.type, enabled=False):
                new = self._step(*tensors)
        else:
            new = self._step(*tensors)
        if not rows:
            new = tuple(s.squeeze(0) for s in new)
        results = new if len(new) > 1 else new[0]
        if alone:
            learn(self, "cell", x, state, arguments, results)
        return results

    def _step(self, x: Tensor, static: Tensor | None, *states: Tensor) -> States:
        """Returns the new states, ``[B, size]``, by torch's operator for the cell if one exists."""
        cell = self.cell
        operator: Any = _OPERATORS.get((cell.name, cell.key))
        if operator is not None:
            states = states or (x.new_zeros(x.shape[0], self.hidden_size),) * len(cell.states)
            weights, names = learned(self, cell), ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            state = states if len(states) > 1 else states[0]
            new = operator(x, state, *[weights.get(name) for name in names])
            return new if len(states) > 1 else (new,)
        draws = self.training and ops.draws(cell)
        options = Options(training=self.training, seed=draw_seed() if draws else 0)
        arrays = {"x": x.unsqueeze(0), **learned(self, cell)}
        if static is not None:
            arrays["static"] = static
        named = zip(state_names("state", cell), states, strict=True) if states else ()
        for name, state in named:
            arrays[name] = state.unsqueeze(0)
        _, final, _ = run_layer(Layer(cell, self._sizes, options), arrays)
        return tuple([s.squeeze(0) for s in final])
