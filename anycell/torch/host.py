"""PyTorch's tensors on the CPU for ``anycell.layer``."""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anycell.engines import cpu
from anycell.layer.signature import ANY, FLAGS, MATRIX, ROWS
from anycell.plan.dtype import DTYPES

_GEMM = {torch.float32: "sgemm_", torch.float64: "dgemm_"}
_CPU = torch.device("cpu")  # explicit: torch.set_default_device must not move our buffers


def fit(array: Tensor, layout: int) -> Tensor:
    """Returns the tensor, or a contiguous copy if it is unaligned or of another layout."""
    if array.data_ptr() % array.element_size():
        return array.clone(memory_format=torch.contiguous_format)
    if layout == ANY or array.is_contiguous():
        return array
    strides = array.stride()
    rows = layout == ROWS and (strides[-1] == 1 or array.shape[-1] < 2)
    return array if rows or (layout == MATRIX and 1 in strides[-2:]) else array.contiguous()


def layout(arrays: Mapping[Any, Tensor]) -> tuple[Any, ...]:
    """Returns all that ``fit`` looks at, for tensors but flags; of an address, its alignment."""
    key: list[Any] = []
    for name, t in arrays.items():
        if name not in FLAGS:
            key += name, t.shape, t.stride(), t.dtype, t.device, t.data_ptr() & 15
    return tuple(key)


def as_flags(array: Tensor) -> Tensor | None:
    """Flags as contiguous uint8."""
    if array.dtype not in (torch.bool, torch.uint8):
        return None
    return array.contiguous().view(torch.uint8)


def threads() -> int:
    """Returns the largest number of threads for a call, which is torch's."""
    return cpu.threads.within() or torch.get_num_threads()


@functools.cache
def _function(name: str) -> Any:
    """A function of PyTorch, or of a library that it is linked to; None where there is none."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return getattr(library, name)
    except (OSError, AttributeError):
        return None


@functools.cache
def _blas(name: str) -> int:
    """The address of a function of the MKL in PyTorch; 0 where there is none."""
    function = _function(name) if torch.backends.mkl.is_available() else None
    return 0 if function is None else ctypes.cast(function, ctypes.c_void_p).value or 0


class _Forks:
    """Keeps torch's operators usable in forked children.

    GNU's OpenMP runtime does not survive a fork: in a child, operators and MKL wait for threads
    that only the parent has. So before a fork the runtime ends its threads; both processes start
    new ones when they need them. Where it cannot (the runtime is older than GCC 9, or this process
    was forked before this import) torch gets one thread in the child.

    Attributes:
        safe: whether operators may use several threads in this process.
    """

    def __init__(self) -> None:
        self.safe, self._ended = True, False
        if cpu.pool.FORKED:
            self._settle()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(before=self._prepare, after_in_child=self._settle)

    def _prepare(self) -> None:
        pause = _function("omp_pause_resource_all")
        self._ended = pause is not None and pause(1) == 0  # omp_pause_soft

    def _settle(self) -> None:
        if not self._ended:
            self.safe = False
            torch.set_num_threads(1)


forks = _Forks()


class TorchHost:
    """A ``layer.Host`` for tensors of one dtype on the CPU; for 16 bits, ``wide`` is the host for
    the dtype in which cells compute.
    """

    wide_states, trace = True, None

    def __init__(self, dtype: torch.dtype, wide: TorchHost | None = None) -> None:
        self.dtype = dtype
        self.wide: TorchHost = self if wide is None else wide
        # Not methods, here and below: they run so often that one more Python call would matter.
        self.empty = functools.partial(torch.empty, dtype=dtype, device=_CPU)
        self.zeros = functools.partial(torch.zeros, dtype=dtype, device=_CPU)
        self._beyond = dtype.itemsize.__rmod__  # bytes beyond a whole number of elements

    @functools.cached_property
    def eight_bits(self) -> TorchHost:
        return TorchHost(torch.int8)

    def lasting(self, shape: tuple[int, ...]) -> Tensor:
        return torch.from_numpy(cpu.memory.empty(shape, f"i{self.dtype.itemsize}")).view(self.dtype)

    def fit(self, array: Tensor, layout: int, wide: bool = False) -> Tensor | None:
        if array.dtype is not (self.wide.dtype if wide else self.dtype) or not array.is_cpu:
            return None
        if array.is_contiguous() and not array.data_ptr() % array.element_size():
            return array
        return fit(array, layout)

    def as_flags(self, array: Tensor) -> Tensor | None:
        return as_flags(array) if array.is_cpu else None

    layout = staticmethod(layout)

    def widen(self, array: Tensor) -> Tensor:
        # If rows overlap, PyTorch's own order of axes may end with an axis that is not dense.
        dense = torch.contiguous_format
        return array if self.wide is self else array.to(self.wide.dtype, memory_format=dense)

    def narrow(self, array: Tensor) -> Tensor:
        return array if self.wide is self else array.to(self.dtype)

    @property
    def blas(self) -> int:
        """The address of a Fortran gemm of this dtype; 0 if there is none, and where it would wait
        for threads of a parent.
        """
        name = _GEMM.get(self.dtype)
        return _blas(name) if name and forks.safe else 0

    def template(self, shape: tuple[int, ...]) -> Tensor:
        if math.prod(shape) < 2:  # ``empty_like`` would keep the strides of 0 of the expanded one
            return self.empty(shape)
        return self.empty(()).expand(shape)

    def misaligned(self, arrays: Iterable[Tensor]) -> bool:
        return any(map(self._beyond, map(Tensor.data_ptr, arrays)))

    like = staticmethod(torch.empty_like)
    split = staticmethod(Tensor.split)
    pointer, pointers = staticmethod(Tensor.data_ptr), functools.partial(map, Tensor.data_ptr)
    strides = staticmethod(Tensor.stride)


HOSTS: dict[str, TorchHost] = {}  # by the names in ``DTYPES``
for _name, _types in DTYPES.items():
    _wide = HOSTS[_types.math.name] if _types.mixed else None
    HOSTS[_name] = HOSTS.get(_types.storage.name) or TorchHost(
        getattr(torch, _types.storage.name), _wide
    )
