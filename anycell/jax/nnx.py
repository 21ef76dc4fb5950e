"""Modules for Flax: ``anycell.jax.nnx.RNN``. Importing it imports Flax."""

from __future__ import annotations

from typing import Any

from anycell.requirement import require

require("flax", "anycell.jax.nnx", "flax")

from flax import nnx  # noqa: E402

from anycell.jax import layers  # noqa: E402
from anycell.jax.streaming import Prepared  # noqa: E402
from anycell.lang.cell import Cell  # noqa: E402


class RNN(nnx.Module):
    """``anycell.jax.RNN`` as a module of Flax NNX, whose parameters are attributes of type
    ``nnx.Param``, by the names of ``anycell.jax.RNN``.

    Args:
        cell, input_size, hidden_size, options: as ``anycell.jax.RNN`` takes them.
        rngs: ``params`` draws the parameters; ``dropout`` seeds dropout and the cell's random
            masks, with a new key at each call in training.
        dtype: of the parameters.

    A call takes x, the state and the options of ``anycell.jax.RNN``, and returns what it returns.
    The module trains unless it is ``deterministic``, which ``eval()`` sets and ``train()`` unsets.

    Example:
        >>> from flax import nnx
        >>> layer = RNN(anycell.cells.PeepholeLSTM, 3, 8, rngs=nnx.Rngs(0))
        >>> output, (h, c) = layer(jax.numpy.zeros((5, 2, 3)), lengths=[5, 3])
        >>> output.shape, layer.p_i_l0.shape
        ((5, 2, 8), (8,))
    """

    def __init__(
        self,
        cell: Cell,
        input_size: int,
        hidden_size: int | None = None,
        *,
        rngs: nnx.Rngs,
        dtype: Any = "float32",
        **options: Any,
    ) -> None:
        self.layers = layers.RNN(cell, input_size, hidden_size, **options)
        for name, value in self.layers.init(rngs.params(), dtype).items():
            setattr(self, name, nnx.Param(value))
        # Its own, so that modules made from one ``rngs`` do not count each other's calls.
        self.rngs = nnx.Rngs(dropout=rngs.dropout()) if self.layers.draws else None
        self.deterministic = False

    def __call__(self, x: Any, state: Any = None, **options: Any) -> tuple[Any, ...]:
        """Runs whole sequences; see ``anycell.jax.RNN``."""
        training = {"training": not self.deterministic} | options
        if training["training"] and self.rngs is not None:
            training = {"seed": self.rngs.dropout()} | training
        return self.layers(self._params(), x, state, **training)

    def initial_state(self, batch: int | None) -> Any:
        """The state from which a call without one starts; see ``anycell.jax.RNN``."""
        return self.layers.initial_state(batch, self._params()["weight_ih_l0"].dtype)

    def prepare(self) -> Prepared:
        """Packs the weights as they are now for ``step``; see ``anycell.jax.RNN``."""
        return self.layers.prepare(self._params())

    def step(
        self, x: Any, state: Any = None, *, prepared: Prepared | None = None, **options: Any
    ) -> tuple[Any, Any]:
        """Runs one step, in evaluation; see ``anycell.jax.RNN``.

        Args:
            prepared: what ``prepare`` returned; None for a step, with gradients, by the parameters.
        """
        params = self._params() if prepared is None else prepared
        return self.layers.step(params, x, state, **options)

    def _params(self) -> dict[str, Any]:
        return {name: getattr(self, name)[...] for name in self.layers.shapes}
