"""``RNN(cell, ...)`` as a module of Equinox."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import equinox

from anycell.jax import layers
from anycell.jax.layers import Prepared
from anycell.jax.modules import Arguments, call_of_module
from anycell.lang.cell import Cell
from anycell.layer.checks import refuse

if TYPE_CHECKING:
    from typing_extensions import Unpack


class RNN(equinox.Module):
    """``anycell.jax.RNN`` as a module of Equinox.

    Args:
        cell, input_size, hidden_size, options: as ``anycell.jax.RNN`` takes them.
        key: of ``jax.random``, draws the parameters.
        dtype: of the parameters.
        inference: whether random masks and dropout are off; ``equinox.nn.inference_mode`` sets it.

    Attributes:
        params: by the names of ``anycell.jax.RNN``.

    Example:
        >>> layer = RNN(anycell.cells.PeepholeLSTM, 3, 8, key=jax.random.key(0))
        >>> output, (h, c) = layer(jax.numpy.zeros((5, 2, 3)), lengths=[5, 3])
        >>> output.shape, layer.params["p_i_l0"].shape
        ((5, 2, 8), (8,))
    """

    params: dict[str, Any]
    layers: Any = equinox.field(static=True)
    inference: bool

    def __init__(
        self,
        cell: Cell,
        input_size: int,
        hidden_size: int | None = None,
        *,
        key: Any,
        dtype: Any = "float32",
        inference: bool = False,
        **options: Unpack[Arguments],
    ) -> None:
        self.layers = layers.RNN(cell, input_size, hidden_size, **options)
        self.params = self.layers.init(key, dtype)
        self.inference = inference

    @call_of_module(
        params="The module holds them.", seed="Pass key=.",
        training="Use equinox.nn.inference_mode.",
    )  # fmt: skip
    def __call__(
        self, x: Any, state: Any = None, *, key: Any = None, **options: Any
    ) -> tuple[Any, ...]:
        """Runs whole sequences: takes x, the state and the options of ``anycell.jax.RNN``, and
        returns what it returns. x may have a batch, ``[T, B, input_size]``, or none,
        ``[T, input_size]``, as under ``jax.vmap``.

        Args:
            key: seeds dropout and the cell's random masks, if it is not for inference.
        """
        training = self.layers.draws and not self.inference
        if training and key is None:
            cell = self.layers.cell.name
            hint = f"In training a layer of {cell} draws masks; equinox.nn.inference_mode ends it."
            refuse("key", "None", "a key of jax.random", hint)
        return self.layers(self.params, x, state, training=training, seed=key, **options)

    def initial_state(self, batch: int | None) -> Any:
        """The state from which a call without one starts; see ``anycell.jax.RNN``."""
        return self.layers.initial_state(batch, self.params["weight_ih_l0"].dtype)

    def prepare(self) -> Prepared:
        """Packs the weights as they are now for ``step``; see ``anycell.jax.RNN``."""
        return self.layers.prepare(self.params)

    def step(
        self, x: Any, state: Any = None, *, prepared: Prepared | None = None, **options: Any
    ) -> tuple[Any, Any]:
        """Runs one step, in evaluation; see ``anycell.jax.RNN``.

        Args:
            prepared: what ``prepare`` returned; None for a step, with gradients, by the parameters.
        """
        params = self.params if prepared is None else prepared
        return self.layers.step(params, x, state, **options)
