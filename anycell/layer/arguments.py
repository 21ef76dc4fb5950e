"""The arrays of a direction, and those that a backward pass needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

Array = Any


# The arrays of one direction, by the names of ``signature`` without ``_reverse``. States and what
# resets restore have no axis of directions. Arrays that were not given are absent.
Direction = dict[str, Array]


class Kept(NamedTuple):
    """The arrays that the forward pass keeps for the backward pass, which only reads them.

    Attributes:
        hidden: ``[T+1 or T+2, B, D*size]``: the first state. Its initial values are in the first
            slot, those of a reversed direction in the last.
        states: per direction, the sequences ``[T+1, B, size]`` of the other states that the plan
            keeps; None for the others.
        values: per direction ``[T, B, n]``, the values that the plan saves.

    With ``checkpoint``, only the states before each of the S segments are kept:
    ``hidden [S, B, D*size]`` and every other state, ``[S, B, size]``, in the order in which the
    direction runs. ``values`` then have no steps.
    """

    hidden: Array
    states: Sequence[Sequence[Array | None]]
    values: Sequence[Array]

    def flat(self) -> list[Array]:
        """All arrays in one list."""
        states = [array for sequences in self.states for array in sequences if array is not None]
        return [self.hidden, *self.values, *states]

    def border(self, d: int, slot: int, width: int) -> list[Array]:
        """The states of a direction before a segment; ``width`` is the size of the first state."""
        others = [sequence[slot] for sequence in self.states[d] if sequence is not None]
        return [self.hidden[slot, :, d * width : (d + 1) * width], *others]

    @classmethod
    def of(cls, arrays: Sequence[Array], states: Sequence[bool], directions: int) -> Kept:
        """The inverse of ``flat``; ``states`` says which states are kept.

        Raises:
            ValueError: for a wrong number of arrays.
        """
        expected = 1 + directions * (1 + sum(states))
        if len(arrays) != expected:
            raise ValueError(f"kept arrays: given {len(arrays)}; expected {expected}.")
        hidden, *values = arrays[: 1 + directions]
        rest = iter(arrays[1 + directions :])
        sequences = [[next(rest) if kept else None for kept in states] for _ in range(directions)]
        return cls(hidden, sequences, values)


class Factors(NamedTuple):
    """The factors of a weight's gradient, ``outputs.T @ operand``, for a matmul inside the steps.

    Attributes:
        outputs: gradients of the matmul's outputs, ``[T * B, out]``; None if they are the gradients
            of the projected gates.
        operand: what the matmul multiplied, ``[T * B, in]``; None if that is the first state before
            each step and there are no resets.
    """

    outputs: Array | None
    operand: Array | None
