"""The operations that a layer asks of a framework, and the arrays that its backward pass needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from anycell.engines.cpu.check import Bounds, reach

Array = Any


class Arrays(Protocol):
    """Operations of a framework that ``contract`` needs; arrays have ``shape`` and ``dtype``."""

    dtype: Any
    wide_states: bool  # whether all states but the first are kept in the dtype of ``wide`` arrays

    def fit(self, array: Array, layout: int, wide: bool = False) -> Array | None:
        """Returns the array, or a contiguous copy if its layout differs, or if its address or
        strides are not multiples of its element size. Returns None for dtypes other than this one
        (or with ``wide``, the one of ``wide`` arrays), and for other devices.
        """
        ...

    def layout(self, arrays: Mapping[Any, Array]) -> tuple[Any, ...]:
        """A hashable key of all that ``fit`` looks at, for all arrays except flags."""
        ...

    def as_flags(self, array: Array) -> Array | None:
        """Returns bool or uint8 flags as contiguous uint8; None for other dtypes and devices."""
        ...


class Host(Arrays, Protocol):
    """The operations of a framework that a layer on the CPU needs, on arrays of the plan's dtype.
    A layer on a GPU needs ``anycell.engines.gpu.GpuHost``.

    ``trace`` is None, or for arrays that have no memory yet, the function that puts a pass into the
    framework's graph: it takes what ``Recipe.run`` takes, and returns the arrays that the pass will
    make.

    Arrays must also slice, assign (``a[i:j] = b``), ``reshape`` and ``sum(0)`` as in NumPy.
    """

    trace: Any

    @property
    def blas(self) -> int:
        """The address of the library's Fortran gemm for this dtype; 0 if there is none."""
        ...

    @property
    def wide(self) -> Host:
        """The host for the dtype of the cell's arithmetic; this host if its dtype is the same."""
        ...

    @property
    def eight_bits(self) -> Arrays:
        """The host for 8-bit weights."""
        ...

    def widen(self, array: Array) -> Array:
        """Returns the array in the dtype of ``wide``; the array itself if it has that dtype."""
        ...

    def narrow(self, array: Array) -> Array:
        """Returns the array in this host's dtype; the array itself if it has that dtype."""
        ...

    def empty(self, shape: tuple[int, ...]) -> Array: ...

    def zeros(self, shape: tuple[int, ...]) -> Array: ...

    def lasting(self, shape: tuple[int, ...]) -> Array:
        """An array like ``empty``'s, for values of every step; see ``engines.cpu.memory``."""
        ...

    def template(self, shape: tuple[int, ...]) -> Array:
        """A stand-in for an array of that shape, with at most one number; for ``like``."""
        ...

    def like(self, array: Array) -> Array:
        """An array like ``empty``'s, with the shape of a contiguous array or a ``template``; made
        in half the time.
        """
        ...

    def split(self, array: Array, sizes: Sequence[int]) -> Sequence[Array]:
        """The parts of an array of one axis, of these sizes."""
        ...

    def misaligned(self, arrays: Iterable[Array]) -> bool:
        """Whether the address of any array is not a multiple of its element size."""
        ...

    def pointer(self, array: Array) -> int: ...

    def pointers(self, arrays: Iterable[Array]) -> Iterable[int]: ...

    def strides(self, array: Array) -> tuple[int, ...]:
        """The strides of an array that fits, in elements."""
        ...


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


def extent(host: Host, array: Array) -> Bounds:
    """The address of an array's first byte, and the address after its last byte."""
    address, axes = host.pointer(array), zip(array.shape, host.strides(array), strict=True)
    for span in reach("", address, array.dtype.itemsize, 1, tuple(axes)):
        return span.first, span.last
    return address, address
