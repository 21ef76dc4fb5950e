"""The operations that a layer asks of a framework, and the arrays that its backward pass needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

Array = Any


class Arrays(Protocol):
    """Operations of a framework that ``contract`` needs; arrays have ``shape`` and ``dtype``."""

    dtype: Any
    wide_states: bool  # whether states but the first are kept in the dtype of ``wide`` ones

    def fit(self, array: Array, layout: int, wide: bool = False) -> Array | None:
        """The array, or a contiguous copy where it does not lie so, or where its address or its
        strides are no whole elements; None for another dtype than this one (or that of ``wide``
        ones), and on other devices.
        """
        ...

    def layout(self, arrays: Mapping[Any, Array]) -> tuple[Any, ...]:
        """All that ``fit`` looks at, of all arrays but flags; something to look up."""
        ...

    def as_flags(self, array: Array) -> Array | None:
        """Flags, bool or uint8, as contiguous uint8; None for all else, and on other devices."""
        ...


class Host(Arrays, Protocol):
    """The operations of a framework that a layer on the CPU needs, on arrays of the plan's dtype.
    On a GPU it asks for ``anycell.engines.gpu.Host``.

    Besides these, arrays must slice, assign (``a[i:j] = b``), ``reshape`` and ``sum(0)`` as NumPy's
    do.
    """

    library: str  # whose matmul is another one than ours, see ``products``

    @property
    def blas(self) -> int:
        """The address of its Fortran gemm of this dtype; 0 for none."""
        ...

    @property
    def wide(self) -> Host:
        """The host of what the cell computes in; this one itself where that is the same dtype."""
        ...

    @property
    def eight_bits(self) -> Arrays:
        """The host of weights of 8 bits."""
        ...

    def widen(self, array: Array) -> Array:
        """The array in that dtype; itself where it has it."""
        ...

    def narrow(self, array: Array) -> Array:
        """The array in the dtype of this host; itself where it has it."""
        ...

    def empty(self, shape: tuple[int, ...]) -> Array: ...

    def zeros(self, shape: tuple[int, ...]) -> Array: ...

    def lasting(self, shape: tuple[int, ...]) -> Array:
        """An array as of ``empty``, for values of every step; see ``engines.cpu.memory``."""
        ...

    def template(self, shape: tuple[int, ...]) -> Array:
        """Stands for an array of that shape, but holds at most one number; for ``like``."""
        ...

    def like(self, array: Array) -> Array:
        """An array as of ``empty``, of the shape of a contiguous array or of a ``template``. It
        takes half as long as ``empty``.
        """
        ...

    def rows(self, array: Array) -> Sequence[Array]:
        """The parts of an array along its first axis."""
        ...

    def misaligned(self, arrays: Iterable[Array]) -> bool:
        """Whether one of them begins at no multiple of the bytes of its elements."""
        ...

    def pointer(self, array: Array) -> int: ...

    def pointers(self, arrays: Iterable[Array]) -> Iterable[int]: ...

    def strides(self, array: Array) -> tuple[int, ...]:
        """In elements, of an array that fits."""
        ...


# The arrays of one direction, by the names of ``signature`` without ``_reverse``; its states and
# what resets restore without the axis of directions. What was not given is not there.
Direction = dict[str, Array]


class Kept(NamedTuple):
    """The arrays that the forward pass keeps for the backward pass, which only reads them.

    Attributes:
        hidden: ``[T+1 or T+2, B, D*size]``: the first state; initial values in the first slot, or
            the last where a direction is reversed.
        states: per direction, the sequences ``[T+1, B, size]`` of the other states that the plan
            keeps; None for the others.
        values: per direction ``[T, B, n]``, the values that the plan saves.

    Of S segments, with ``checkpoint``, only the states before the first step of each are
    kept: ``hidden [S, B, D*size]`` and all other states, ``[S, B, size]``, in the order in which a
    direction runs; ``values`` are of no steps.
    """

    hidden: Array
    states: Sequence[Sequence[Array | None]]
    values: Sequence[Array]

    def flat(self) -> list[Array]:
        """All arrays in a row."""
        states = [array for sequences in self.states for array in sequences if array is not None]
        return [self.hidden, *self.values, *states]

    def border(self, d: int, slot: int, width: int) -> list[Array]:
        """The states of a direction before a segment; ``width`` is the first state's."""
        others = [sequence[slot] for sequence in self.states[d] if sequence is not None]
        return [self.hidden[slot, :, d * width : (d + 1) * width], *others]

    @classmethod
    def of(cls, arrays: Sequence[Array], states: Sequence[bool], directions: int) -> Kept:
        """The inverse of ``flat``; ``states`` says which of them are kept.

        Raises:
            ValueError: for another number of arrays.
        """
        expected = 1 + directions * (1 + sum(states))
        if len(arrays) != expected:
            raise ValueError(f"kept arrays: given {len(arrays)}; expected {expected}.")
        hidden, *values = arrays[: 1 + directions]
        rest = iter(arrays[1 + directions :])
        sequences = [[next(rest) if kept else None for kept in states] for _ in range(directions)]
        return cls(hidden, sequences, values)


class Factors(NamedTuple):
    """The gradient of the weight of a matmul inside the steps is ``outputs.T @ operand``.

    Attributes:
        outputs: gradients of the matmul's outputs, ``[T * B, out]``; None where they are those of
            the projected gates.
        operand: what it multiplied, ``[T * B, in]``; None where that is the first state before
            each step, as it was without resets.
    """

    outputs: Array | None
    operand: Array | None
