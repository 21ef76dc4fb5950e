"""``RNN(cell, ...)`` as a module of Flax."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flax import nnx

from anycell.jax import layers
from anycell.jax.framework import check_key
from anycell.jax.layers import Prepared
from anycell.jax.modules import Arguments, call_of_module
from anycell.lang.cell import Cell
from anycell.layer.checks import boolean, describe, refuse

if TYPE_CHECKING:
    from typing_extensions import Unpack


class RNN(nnx.Module):
    """``anycell.jax.RNN`` as a module of Flax NNX, whose parameters are attributes of type
    ``nnx.Param``, by the names of ``anycell.jax.RNN``.

    Args:
        cell, input_size, hidden_size, options: as ``anycell.jax.RNN`` takes them.
        rngs: ``params`` draws the parameters; ``dropout`` seeds dropout and the cell's random
            masks, with a new key at each call in training.
        dtype: of the parameters.

    The module trains unless it is ``deterministic``, which ``eval()`` and
    ``nnx.view(model, deterministic=True)`` set, and ``train()`` unsets.

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
        **options: Unpack[Arguments],
    ) -> None:
        if not isinstance(rngs, nnx.Rngs):
            hint = "Pass nnx.Rngs(0), or nnx.Rngs of a key."
            refuse("rngs", describe(rngs), "nnx.Rngs", hint, TypeError)
        self.layers = layers.RNN(cell, input_size, hidden_size, **options)
        for name, value in self.layers.init(rngs.params(), dtype).items():
            setattr(self, name, nnx.Param(value))
        # Its own, so that modules made from one ``rngs`` do not count each other's calls.
        self.rngs = nnx.Rngs(dropout=rngs.dropout()) if self.layers.draws else None
        self.deterministic = False

    def set_view(self, deterministic: bool | None = None) -> None:
        """Sets the mode of a view: ``nnx.view`` calls it.

        Args:
            deterministic: whether random masks and dropout are off; None changes nothing.
        """
        if deterministic is not None:
            self.deterministic = deterministic

    @call_of_module(
        params="The module holds them.", seed="Pass rngs=.",
        training="Pass deterministic=, or call train() or eval().",
    )  # fmt: skip
    def __call__(
        self,
        x: Any,
        state: Any = None,
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | Any = None,
        **options: Any,
    ) -> tuple[Any, ...]:
        """Runs whole sequences: takes x, the state and the options of ``anycell.jax.RNN``, and
        returns what it returns.

        Args:
            deterministic: whether random masks and dropout are off; None takes the module's.
            rngs: ``dropout`` seeds this call in place of the module's; also a stream, or a key.
        """
        still = self.deterministic if deterministic is None else deterministic
        training, key = not boolean("deterministic", still), None
        if training and self.layers.draws:
            key = _key(self.rngs if rngs is None else rngs)
        return self.layers(self._params(), x, state, training=training, seed=key, **options)

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


def _key(rngs: Any) -> Any:
    if isinstance(rngs, nnx.Rngs):
        return rngs.dropout()
    if isinstance(rngs, nnx.RngStream):
        return rngs()
    return check_key("rngs", rngs, "nnx.Rngs, one of its streams, or a key of jax.random")
