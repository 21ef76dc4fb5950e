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


def check(call: Call, inputs: Inputs) -> None:
    """Refuses inputs, states, a mask, resets or a static input of another shape than ``Inputs``'s.

    Kernels find their way through memory by these shapes. Sizes that are not known as yet (None,
    in a graph) pass: they are checked again where they are known.

    Raises:
        ValueError: with the argument's name and the shapes given and expected, batch first.
    """
    steps, rows = inputs.x.shape[:2]
    states = call.cell.states
    if inputs.kernel is not None:
        width, meaning = inputs.kernel.shape[0], "rows, steps, features of the kernel"
        _expect("sequences", (rows, steps, inputs.x.shape[2]), (rows, steps, width), meaning)
    if len(inputs.initial) != len(states):
        raise ValueError(
            f"initial_state: given {len(inputs.initial)} tensor(s); expected {len(states)}. Pass "
            f"a list of the states of {call.cell.name}: {', '.join(call.cell.state_names)}."
        )
    for state, given in zip(states, inputs.initial, strict=True):
        size = call.size(state.size)
        _expect(f"initial_state, {state.name}", given.shape, (rows, size), "rows, size of state")
    if inputs.static is not None:
        _expect("static", inputs.static.shape, (rows, call.hidden_size), "rows, units")
    for name, flags in (("mask", inputs.mask), ("resets", inputs.resets)):
        if flags is not None:
            _expect(name, flags.shape[::-1], (rows, steps), "rows, steps")


def _expect(name: str, given: Any, expected: tuple[int | None, ...], meaning: str) -> None:
    if getattr(given, "rank", 0) is None:  # TensorFlow knows nothing of it as yet
        return
    sizes = tuple(given)
    pairs = zip(sizes, expected, strict=False)
    if len(sizes) != len(expected) or any(None not in (g, e) and g != e for g, e in pairs):
        raise ValueError(
            f"{name}: given shape {sizes}; expected {expected}, that is [{meaning}] of this call. "
            "Pass a tensor of that shape."
        )


def number(seed: Any) -> int:
    """One number, as the kernels take it, for the two of a seed of Keras's."""
    low, high = (int(part) for part in seed)
    return low + high * 2**31


Result = tuple[Tensor, tuple[Tensor, ...]]  # outputs ``[T, B, H]`` or None, and the final states
