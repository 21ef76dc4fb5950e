"""PyTorch's tensors for the GPU engine."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from anycell import cells
from anycell.engines.gpu import launch
from anycell.engines.gpu.capacity import Device
from anycell.lang.cell import Cell
from anycell.torch.graphs import Replays, captured
from anycell.torch.host import as_flags, fit, layout

Returned = TypeVar("Returned")


class DeviceHost:
    """A ``GpuHost`` for tensors of one dtype on one device; torch does the matmuls.

    The device may be the CPU, where kernels run in Triton's interpreter: only the speed differs.

    Attributes:
        dtype: the plan's dtype.
        device: the device of all tensors.
        tier: the tier of kernels to run; None lets ``capacity`` choose.
        patience: how many nanoseconds the programs of a kernel wait for one another.
    """

    tier: int | None = None
    patience = 10_000_000_000

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device, self.on_card = dtype, device, device.type == "cuda"

    @functools.cached_property
    def limits(self) -> Device | None:
        return launch.limits(self.ordinal) if self.on_card else None

    @functools.cached_property
    def ordinal(self) -> int:
        """The index of the card; 0 on the CPU."""
        index = self.device.index if self.on_card else 0
        return torch.cuda.current_device() if index is None else index

    def tf32(self, cell: Cell) -> bool:
        """Whether torch's own loop of a cell may round float32 to TF32: for a layer of cuDNN's, as
        torch's setting for these says, otherwise as the one for matmuls says. torch has older
        settings too: reading one is an error once a program has used the newer one.
        """
        if not self.on_card or self.dtype is not torch.float32:
            return False
        cudnn, newer = torch.backends.cudnn, "fp32_precision"  # since PyTorch 2.9
        of_cudnn = cudnn.enabled and cell in (cells.LSTM, cells.GRU, cells.LSTMP)
        backend = cudnn.rnn if of_cudnn else torch.backends.cuda.matmul
        if hasattr(backend, newer):
            return backend.fp32_precision == "tf32"
        return cudnn.allow_tf32 if of_cudnn else backend.allow_tf32

    @functools.cached_property
    def replay(self) -> Replays | None:
        return Replays(captured) if self.on_card else None

    def run(self, run: Callable[..., Returned], *arguments: Any, **named: Any) -> Returned:
        """Runs a pass of a layer on the device of the tensors."""
        with torch.cuda.device(self.device) if self.on_card else contextlib.nullcontext():
            return run(self, *arguments, **named)

    def stream(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream if self.on_card else 0

    wide_states = False  # see GpuHost; with checkpoints, the kept states are wide

    def empty(self, shape: tuple[int, ...], wide: bool = False) -> Tensor:
        return torch.empty(shape, dtype=torch.float32 if wide else self.dtype, device=self.device)

    def zeros(self, shape: tuple[int, ...], wide: bool = False) -> Tensor:
        return torch.zeros(shape, dtype=torch.float32 if wide else self.dtype, device=self.device)

    def rounded(self, array: Tensor) -> Tensor:
        return array.to(self.dtype).contiguous()

    def numbers(self, values: Sequence[float]) -> Tensor:
        return self._filled(values, torch.float32)

    def integers(self, values: Sequence[int]) -> Tensor:
        signed = [(v + (1 << 63)) % (1 << 64) - (1 << 63) for v in values]
        return self._filled(signed, torch.int64)

    def _filled(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        """Fills a tensor number by number: a copy from the host would wait for all work on the
        stream, and a CUDA graph cannot capture a copy.
        """
        filled = torch.empty(len(values), dtype=dtype, device=self.device)
        for place, value in zip(filled, values, strict=True):
            place.fill_(value)
        return filled

    def flags(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self.device)

    def table(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int64, device=self.device)

    @functools.cached_property
    def trouble(self) -> Tensor:
        """An int32 that kernels write while the host reads it: pinned memory, on a card."""
        # On the host, whatever torch.set_default_device says. Made outside of inference_mode, so
        # that it can be written both inside and outside of it.
        with torch.inference_mode(False):
            return torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=self.on_card)

    def fit(self, array: Tensor, layout: int, wide: bool = False) -> Tensor | None:
        """The tensor, or a contiguous copy; None for another dtype or device."""
        known = array.dtype is self.dtype or (wide and array.dtype is torch.float32)
        return fit(array, layout) if known and array.device == self.device else None

    layout = staticmethod(layout)
    pointer, strides = staticmethod(Tensor.data_ptr), staticmethod(Tensor.stride)

    def as_flags(self, array: Tensor) -> Tensor | None:
        return as_flags(array) if array.device == self.device else None

    def matmul(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        if a.dtype == out.dtype:
            torch.matmul(a, b, out=out)
        elif a.is_cuda and _WIDE_RESULTS:
            multiply = torch.mm if a.dim() == 2 else torch.bmm
            multiply(a, b, out_dtype=out.dtype, out=out)
        else:  # float32 holds the product of two 16-bit numbers exactly
            torch.matmul(a.to(out.dtype), b.to(out.dtype), out=out)

    def matmul_add(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        if a.dtype == out.dtype:
            (out.addmm_ if a.dim() == 2 else out.baddbmm_)(a, b)
            return
        product = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        self.matmul(a, b, product)
        out += product

    def summed(self, array: Tensor) -> Tensor:
        return array.sum(0, dtype=torch.float32)

    def by_head(self, array: Tensor, heads: int) -> Tensor:
        rows, outputs, width = array.shape
        split = array.reshape(rows, outputs, heads, width // heads).permute(2, 0, 1, 3)
        return split.reshape(heads, rows, outputs * (width // heads))  # -1 would fail for no rows

    def masked(self, x: Tensor, mask: Tensor) -> Tensor:
        return x.masked_fill(~mask.bool().unsqueeze(-1), 0.0)


# Whether torch multiplies 16-bit matrices into float32 (since 2.8).
_WIDE_RESULTS = "dtype_out" in torch.ops.aten.mm.overloads()


@functools.lru_cache(maxsize=64)
def host_of(dtype: torch.dtype, device: torch.device) -> DeviceHost:
    """Returns the host of tensors of this dtype on this device."""
    return DeviceHost(dtype, device)
