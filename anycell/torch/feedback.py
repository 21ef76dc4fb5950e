"""``Feedback``: a layer whose readout is its own next input."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from anycell.explanation import Explained
from anycell.lang.cell import Cell
from anycell.lang.transform import OUTPUT, with_feedback
from anycell.layer.checks import refuse
from anycell.layer.feedback import Fed, check_layer, check_width
from anycell.layer.layers import Arrays, Stack
from anycell.plan import Engine
from anycell.plan.layer import register
from anycell.refusal import explained
from anycell.torch.dropin import DropIn
from anycell.torch.framework import Torch
from anycell.torch.operators.functional import engine_of, fused_plan
from anycell.torch.recurrent import Lengths, refuse_more, stacked
from anycell.torch.rnn import RNN


class Feedback(Fed, Explained, nn.Module):
    r"""Runs a layer whose input is a series or, at steps without one, the layer's own readout.

        y_t     = W_readout output_t + b_readout
        input_t = [series_t where forced_t, else y_{t-1}; others_t]

    Forcing all steps is teacher forcing, ``readout(layer(x)[0])``; forcing no step is a free run;
    forcing steps by chance is scheduled sampling. Before the first step, y is the readout of the
    initial state.

    Args:
        layer: ``RNN``, ``LSTM`` or ``GRU`` of anycell.torch, of one layer and one direction.
        readout: ``torch.nn.Linear`` from the layer's output to the Y numbers of the series. Layer
            and readout stay modules of their own, with their own parameters.

    ``prepare`` and ``step`` run one step at a time, for serving forecasts.

    ``forward`` takes (pass all but the first two by name), and returns (y, final state):
        x: ``[T, B, input_size]``, or ``[B, T, input_size]`` if the layer is ``batch_first``, with
            the series in the first Y columns. Where a step is not forced, the series has no
            influence, and may be NaN.
        state, mask, lengths, resets, static: as in ``RNN``.
        forced: where the series is given: bool, laid out as x without its last axis, such as
            ``series.isfinite()``, or ``[T]``, the same for all rows. Or a number in [0, 1], the
            probability that a step of a row is forced; torch's default generator draws. Default:
            True, all steps.
        y: ``[T, B, Y]``, laid out as x; where no step runs, the output is zero and y the bias.
            The final state is that of the layer.

    Raises:
        TypeError, ValueError: with the argument, what was given, what is expected.

    Example:
        >>> layer, readout = RNN(anycell.cells.LSTM, 3, 8), torch.nn.Linear(8, 1)
        >>> y, (h, c) = Feedback(layer, readout)(torch.zeros(5, 2, 3), forced=0.5)
        >>> y.shape, h.shape
        (torch.Size([5, 2, 1]), torch.Size([1, 2, 8]))
    """

    framework = Torch

    @explained
    def __init__(self, layer: Any, readout: nn.Linear) -> None:
        super().__init__()
        remedy = "anycell.torch.accelerate turns layers of torch.nn into these."
        ours = isinstance(layer, (RNN, DropIn))
        check_layer(layer, ours, "RNN, LSTM or GRU of anycell.torch", remedy)
        width = dict(layer._sizes)[layer.cell.states[0].size]
        linear = isinstance(readout, nn.Linear) and type(readout).forward is nn.Linear.forward
        if not linear or readout.in_features != width:
            hint = "Its input is the output of the layer, and what it computes is fed back."
            refuse("readout", repr(readout), f"torch.nn.Linear({width}, ...)", hint)
        check_width(readout, readout.out_features, layer.input_size)
        self.layer, self.readout = layer, readout
        self._made = self._fed()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_made"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._made = self._fed()

    @property
    def engine(self) -> Engine:
        """The engine that runs the layer with its readout, and why."""
        layer = self._layer()
        return engine_of(fused_plan(layer.cell, layer.sizes, self._like))

    def _about(self) -> str:
        return f"Feedback of {self.layer._about()}"

    def _fed(self) -> tuple[Cell, Cell]:
        """Returns the layer's cell, and the cell with the readout fed back."""
        fed = with_feedback(self.layer.cell)
        register(fed)
        return self.layer.cell, fed

    @property
    def _like(self) -> Tensor:
        return self.layer._like

    @property
    def _width(self) -> int:
        return self.readout.out_features

    def _parts(self) -> tuple[Arrays, Tensor, Tensor | None]:
        (learned,) = self.layer._weights(self.layer.cell)
        return learned, self.readout.weight, self.readout.bias

    def _draw(self, like: Tensor) -> Tensor:
        return torch.rand(like.shape, device=like.device)

    def forward(
        self,
        x: Tensor,
        state: Any = None,
        *more: Any,
        forced: Tensor | float = True,
        mask: Tensor | None = None,
        lengths: Lengths | None = None,
        resets: Tensor | None = None,
        static: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """Returns y and the final state; see the class."""
        if more:
            refuse_more(more, "Feedback")
        layer = self.layer
        if self._made[0] is not layer.cell:  # replaced, for instance by other hyperparameters
            self._made = self._fed()

        def stack(learned: Arrays) -> Stack:
            sizes = (*layer._sizes, (OUTPUT, self._width))
            run = layer._call(self._made[1], {})._replace(sizes=sizes)
            return stacked(run, [learned], x, layer.batch_first)

        arguments = {"mask": mask, "lengths": lengths, "resets": resets, "static": static}
        _, output, final = self._run(x, state, forced, stack, **arguments)
        return self.readout(output), final

    if TYPE_CHECKING:

        def __call__(
            self, x: Tensor, state: Any = None, *, forced: Tensor | float = True,
            mask: Tensor | None = None, lengths: Lengths | None = None,
            resets: Tensor | None = None, static: Tensor | None = None,
        ) -> tuple[Tensor, Any]: ...  # fmt: skip

        def step(
            self, x: Tensor, state: Any = None, *, forced: Tensor | float = True,
            static: Tensor | None = None, resets: Tensor | None = None,
        ) -> tuple[Tensor, Any]: ...  # fmt: skip
