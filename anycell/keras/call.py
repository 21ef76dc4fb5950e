"""One run of a layer over a sequence, as every backend takes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from anycell.lang.cell import Cell

Tensor = Any  # of the backend


@dataclass(frozen=True)
class Call:
    """What a run says beside its tensors.

    Attributes:
        cell, hidden_size: the step, and H.
        sizes: of states that declare another, by their symbol.
        reverse: from the last step to the first; everything stays at its place in time.
        repeat: outputs of masked steps repeat the held state; otherwise they are 0.
        sequences: whether the outputs of all steps are wanted.
        training: random masks are drawn.
        unroll: a hint to the step-by-step engine.
    """

    cell: Cell
    hidden_size: int
    sizes: tuple[tuple[str, int], ...] = ()
    reverse: bool = False
    repeat: bool = True
    sequences: bool = True
    training: bool = False
    unroll: bool = False

    def size(self, symbol: str) -> int:
        """What a size symbol of the cell stands for."""
        return self.hidden_size if symbol == "H" else dict(self.sizes)[symbol]


class Inputs(NamedTuple):
    """The tensors of a run, of one dtype, float32 or float64; None where absent.

    Attributes:
        x: ``[T, B, I]``, or the projected gates ``[T, B, G*H]`` where there is no ``kernel``.
        kernel: ``[I, G*H]``.
        recurrent_kernel: ``[H, G*H]``.
        bias, recurrent_bias: ``[G*H]``.
        params: the cell's, ``[H]`` each, in its order.
        linears: of further matmuls inside a step, as ``engines.reference`` names and shapes them.
        initial: the states, ``[B, size]`` each.
        static: ``[B, H]``.
        mask, resets: bool ``[T, B]``.
        recurrent_mask: ``[B, H]``, or ``[G, B, H]`` for one per gate.
        seed: ``[2]`` integers, as ``keras.random.SeedGenerator`` draws them, of the random masks.
    """

    x: Tensor
    kernel: Tensor
    recurrent_kernel: Tensor
    bias: Tensor
    recurrent_bias: Tensor
    params: tuple[Tensor, ...]
    linears: tuple[tuple[str, Tensor], ...]
    initial: tuple[Tensor, ...]
    static: Tensor = None
    mask: Tensor = None
    resets: Tensor = None
    recurrent_mask: Tensor = None
    seed: Tensor = None


def number(seed: Any) -> int:
    """One number, as the kernels take it, for the two of a seed of Keras's."""
    low, high = (int(part) for part in seed)
    return low + high * 2**31


Result = tuple[Tensor, tuple[Tensor, ...]]  # outputs ``[T, B, H]`` or None, and the final states
