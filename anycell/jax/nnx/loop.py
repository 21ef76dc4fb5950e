"""``Loop``: Flax's ``nnx.RNN``, fused where its cell can be read."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.recurrent import flip_sequences

from anycell.jax.scanning import scan


class Loop(nnx.RNN):
    """``flax.nnx.RNN`` of any cell of Flax, with ``anycell.jax.scan`` as its loop.

    It takes what ``nnx.RNN`` takes, at construction and in calls, and returns the same. Parameters
    are those of the cell, at the same places, so checkpoints load unchanged. ``state_axes`` and
    ``broadcast_rngs`` mean Flax's own loop.

    Example:
        >>> from flax import nnx
        >>> layer = Loop(nnx.LSTMCell(3, 8, rngs=nnx.Rngs(0)))
        >>> layer(jax.numpy.zeros((2, 5, 3))).shape
        (2, 5, 8)
    """

    def __init__(self, cell: Any, **options: Any) -> None:
        super().__init__(cell, **options)
        self.plain = not any(options.get(name) for name in ("state_axes", "broadcast_rngs"))

    def __call__(
        self, inputs: Any, *, initial_carry: Any = None, seq_lengths: Any = None,
        return_carry: bool | None = None, time_major: bool | None = None,
        reverse: bool | None = None, keep_order: bool | None = None, rngs: Any = None,
    ) -> Any:  # fmt: skip
        """Runs the cell over sequences, as ``nnx.RNN`` does."""
        if not self.plain:
            return super().__call__(
                inputs, initial_carry=initial_carry, seq_lengths=seq_lengths,
                return_carry=return_carry, time_major=time_major, reverse=reverse,
                keep_order=keep_order, rngs=rngs,
            )  # fmt: skip
        first = self.time_major if time_major is None else time_major
        backwards = self.reverse if reverse is None else reverse
        ordered = self.keep_order if keep_order is None else keep_order
        with_carry = self.return_carry if return_carry is None else return_carry
        axis = 0 if first else inputs.ndim - self.cell.num_feature_axes - 1
        batch = inputs.ndim - 1 - self.cell.num_feature_axes
        flip = functools.partial(
            flip_sequences, seq_lengths=seq_lengths, num_batch_dims=batch, time_major=first
        )
        if backwards:
            inputs = flip(inputs)
        if initial_carry is None:
            rngs = self.rngs if rngs is None else rngs
            rngs = rngs.carry.fork() if isinstance(rngs, nnx.Rngs) else rngs
            shape = (*inputs.shape[:axis], *inputs.shape[axis + 1 :])
            initial_carry = self.cell.initialize_carry(shape, rngs)
        last_of_each = seq_lengths is not None and with_carry
        carry, (carries, outputs) = self._scan(initial_carry, inputs, axis, last_of_each)
        if last_of_each:
            rows = jnp.arange(len(seq_lengths))
            carry = jax.tree.map(lambda a: a[seq_lengths - 1, rows], carries)
        if backwards and ordered:
            outputs = flip(outputs)
        return (carry, outputs) if with_carry else outputs

    def _scan(self, carry: Any, inputs: Any, axis: int, keep: bool) -> Any:
        """Runs the cell along an axis; what changes in it, as counts of dropout, is carried."""
        graph, params, changing = _split(self.cell)

        def step(carried: Any, x: Any) -> Any:
            carry, changing = carried
            cell = nnx.merge(graph, params, changing)
            carry, y = cell(carry, x)
            return (carry, _split(cell)[2]), (carry if keep else None, y)

        xs = jnp.moveaxis(inputs, axis, 0)
        (carry, changing), (carries, outputs) = scan(step, (carry, changing), xs)
        nnx.update(self.cell, changing)
        return carry, (carries, jnp.moveaxis(outputs, 0, axis))


def _split(cell: Any) -> Any:
    """How the cell is made, its parameters, and all else that it holds."""
    return nnx.split(cell, nnx.Param, ...)
