"""The operations of a framework that the GPU engine needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from anycell.engines.gpu.capacity import Device
from anycell.lang.cell import Cell

Array = Any


class GpuHost(Protocol):
    """The operations of a framework that the engine needs, on arrays of a device.

    Arrays slice and assign as NumPy's do (``a[i:j] = b`` rounds to the dtype of ``a``), and have
    ``shape``, ``reshape`` and ``mT``. ``wide`` arrays are float32, others of the plan's dtype.

    Attributes:
        dtype: the framework's dtype for the plan.
        wide_states: False: states are kept in the plan's dtype, and only at borders in float32.
        ordinal: the number of the device in CUDA.
        limits: the device's properties for ``capacity``; None if kernels are interpreted.
        tier: forces a tier; None lets ``capacity`` choose.
        replay: runs a call of tier 3 like ``steps.run_plainly``, but from captured graphs of
            launches. None launches step by step.
        trouble: an int32 in memory that host and device both reach; kernels of tier 2 set it when
            their programs give up waiting for one another.
        patience: the nanoseconds after which a program gives up.
    """

    wide_states: bool
    dtype: Any
    ordinal: int
    limits: Device | None
    tier: int | None
    replay: Callable[..., None] | None
    trouble: Array
    patience: int

    def tf32(self, cell: Cell) -> bool:
        """Whether a cell's matmuls may round float32 operands to 19 bits."""
        ...

    def stream(self) -> int:
        """CUDA's handle of the current stream; 0 for the default stream."""
        ...

    def empty(self, shape: tuple[int, ...], wide: bool = False) -> Array: ...

    def zeros(self, shape: tuple[int, ...], wide: bool = False) -> Array: ...

    def rounded(self, array: Array) -> Array:
        """The array in the plan's dtype, contiguous; the array itself if it is so already."""
        ...

    def numbers(self, values: Sequence[float]) -> Array:
        """A float32 array on the device."""
        ...

    def integers(self, values: Sequence[int]) -> Array:
        """An int64 array on the device; values are taken modulo 2**64."""
        ...

    def flags(self, count: int) -> Array:
        """An array of ``count`` zeros, int32."""
        ...

    def table(self, count: int) -> Array:
        """An array of ``count`` int64, which need not be initialized."""
        ...

    # What ``anycell.layer.contract`` needs: see ``anycell.layer.Arrays``.

    def fit(self, array: Array, layout: int, wide: bool = False) -> Array | None: ...

    def layout(self, arrays: Mapping[Any, Array]) -> tuple[Any, ...]: ...

    def as_flags(self, array: Array) -> Array | None: ...

    def pointer(self, array: Array) -> int: ...

    def strides(self, array: Array) -> tuple[int, ...]:
        """The strides in elements."""
        ...

    def matmul(self, a: Array, b: Array, out: Array) -> None:
        """``out = a @ b`` for (batches of) matrices of any strides; ``out`` may be wide."""
        ...

    def matmul_add(self, a: Array, b: Array, out: Array) -> None:
        """``out += a @ b``, likewise."""
        ...

    def summed(self, array: Array) -> Array:
        """The sum of the rows of a matrix: wide, and never rounded on the way."""
        ...

    def by_head(self, array: Array, heads: int) -> Array:
        """``[B, outputs, heads * size]`` as ``[heads, B, outputs * size]``."""
        ...

    def masked(self, x: Array, mask: Array) -> Array:
        """A copy of ``x [T, B, I]`` with 0 where ``mask [T, B]`` is 0, even in place of NaN."""
        ...
