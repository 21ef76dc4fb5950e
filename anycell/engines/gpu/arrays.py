"""The operations of a framework that the GPU engine needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from anycell.engines.gpu.capacity import Device

Array = Any


class DeviceArrays(Protocol):
    """A framework's arrays on a device; ``layer.DeviceFramework`` has further operations.

    Arrays slice and assign as NumPy's do (``a[i:j] = b`` rounds to the dtype of ``a``), and have
    ``shape`` and ``reshape``. ``wide`` arrays are float32, others of the plan's dtype.

    Attributes:
        ordinal: the number of the device in CUDA.
        limits: the device's properties for ``capacity``; None if kernels are interpreted.
        replay: runs a call of tier 3 like ``steps.run_plainly``, but from captured graphs of
            launches. None launches step by step.
    """

    @property
    def ordinal(self) -> int: ...

    @property
    def limits(self) -> Device | None: ...

    @property
    def replay(self) -> Callable[..., None] | None: ...

    def stream(self) -> int:
        """CUDA's handle of the current stream; 0 for the default stream."""
        ...

    def empty(self, shape: tuple[int, ...], wide: bool = False) -> Array:
        """An array of that shape, whose numbers may be anything."""
        ...

    def table(self, count: int) -> Array:
        """An array of ``count`` int64, which need not be initialized."""
        ...

    def pointer(self, array: Array, /) -> int:
        """The address of the first element."""
        ...

    def strides(self, array: Array, /) -> tuple[int, ...]:
        """The strides in elements."""
        ...

    def matmul(self, a: Array, b: Array, out: Array) -> None:
        """``out = a @ b`` for (batches of) matrices of any strides; ``out`` may be wide."""
        ...

    def by_head(self, array: Array, heads: int) -> Array:
        """``[B, outputs, heads * size]`` as ``[heads, B, outputs * size]``."""
        ...
