"""PyTorch's tensors as the GPU engine wants them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from anycell.engines.gpu import launch
from anycell.engines.gpu.capacity import Device
from anycell.torch.graphs import Replays, captured
from anycell.torch.host import as_flags, fit, layout


class DeviceHost:
    """Tensors of one dtype on one device; the matmuls are torch's.

    On the CPU, where kernels run in Triton's interpreter, it differs in nothing but speed.

    Attributes:
        dtype: of the plan.
        device: where all tensors are.
        tier: of kernels; None lets ``capacity`` choose.
        patience: nanoseconds that programs of a kernel wait for one another.
        exchange: how they tell each other what is there, by ``"flags"`` or by the ``"data"``.
    """

    tier: int | None = None
    patience = 10_000_000_000
    exchange = "flags"  # until a card has compared them

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device

    @functools.cached_property
    def limits(self) -> Device | None:
        """The properties of the device that ``capacity`` knows; None on the CPU."""
        if self.device.type != "cuda":
            return None
        return launch.limits(self.ordinal)

    @functools.cached_property
    def ordinal(self) -> int:
        """The number of the device, as CUDA counts; 0 on the CPU."""
        if self.device.type != "cuda":
            return 0
        index = self.device.index
        return torch.cuda.current_device() if index is None else index

    @property
    def tf32(self) -> bool:
        """Whether torch's own matmuls may round float32 to TF32. Of torch's two settings the older
        one is an error to read once a program has made use of the newer one.
        """
        if self.device.type != "cuda" or self.dtype is not torch.float32:
            return False
        matmul = torch.backends.cuda.matmul
        if hasattr(matmul, "fp32_precision"):  # since PyTorch 2.9
            return matmul.fp32_precision == "tf32"
        return matmul.allow_tf32

    @functools.cached_property
    def replay(self) -> Replays | None:
        """Graphs of launches, on a card."""
        return Replays(captured) if self.device.type == "cuda" else None

    def run(self, run: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """A pass of a layer, run where the tensors are."""
        if self.device.type != "cuda":
            return run(self, *arguments, **named)
        with torch.cuda.device(self.device):
            return run(self, *arguments, **named)

    def stream(self) -> int:
        """The current stream of the device."""
        if self.device.type != "cuda":
            return 0
        return torch.cuda.current_stream(self.device).cuda_stream

    wide_states = False  # see Arrays; with checkpoints they are

    def empty(self, shape: tuple[int, ...], wide: bool = False) -> Tensor:
        """Memory that is written before it is read."""
        return torch.empty(shape, dtype=torch.float32 if wide else self.dtype, device=self.device)

    def zeros(self, shape: tuple[int, ...], wide: bool = False) -> Tensor:
        """Zeros."""
        return torch.zeros(shape, dtype=torch.float32 if wide else self.dtype, device=self.device)

    def rounded(self, array: Tensor, copy: bool = False) -> Tensor:
        """The array in the plan's dtype."""
        return array.to(self.dtype, copy=copy).contiguous()

    def numbers(self, values: Sequence[float]) -> Tensor:
        """A float32 tensor."""
        return self._filled(values, torch.float32)

    def integers(self, values: Sequence[int]) -> Tensor:
        """An int64 tensor, of numbers taken modulo 2**64."""
        signed = [(v + (1 << 63)) % (1 << 64) - (1 << 63) for v in values]
        return self._filled(signed, torch.int64)

    def _filled(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        """Number by number: a copy from the host would wait for all that is on the stream, and
        none may be captured in a CUDA graph.
        """
        found = torch.empty(len(values), dtype=dtype, device=self.device)
        for place, value in zip(found, values, strict=True):
            place.fill_(value)
        return found

    def flags(self, count: int) -> Tensor:
        """An array of ``count`` zeros, int32."""
        return torch.zeros(count, dtype=torch.int32, device=self.device)

    def blank(self, array: Tensor) -> None:
        """Sets all bits."""
        array.view(torch.int32 if array.itemsize == 4 else torch.int16).fill_(-1)

    def table(self, count: int) -> Tensor:
        """An array of ``count`` int64."""
        return torch.empty(count, dtype=torch.int64, device=self.device)

    @functools.cached_property
    def trouble(self) -> Tensor:
        """An int32 that kernels write while the host reads it: pinned memory, on a card."""
        # Of the host's, whatever torch.set_default_device says; and to write it later, under
        # inference_mode or not, it must come from neither.
        with torch.inference_mode(False):
            pinned = self.device.type == "cuda"
            return torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=pinned)

    def fit(self, array: Tensor, layout: int, wide: bool = False) -> Tensor | None:
        """The tensor, or a contiguous copy; None for another dtype or device."""
        known = array.dtype is self.dtype or (wide and array.dtype is torch.float32)
        return fit(array, layout) if known and array.device == self.device else None

    layout = staticmethod(layout)

    def as_flags(self, array: Tensor) -> Tensor | None:
        """Flags as contiguous uint8; None for another dtype or device."""
        return as_flags(array) if array.device == self.device else None

    def pointer(self, array: Tensor) -> int:
        """The address of an array."""
        return array.data_ptr()

    def strides(self, array: Tensor) -> tuple[int, ...]:
        """In elements."""
        return array.stride()

    def matmul(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        """``out = a @ b``."""
        if a.dtype == out.dtype:
            torch.matmul(a, b, out=out)
        elif a.is_cuda and _WIDE_RESULTS:
            multiply = torch.mm if a.dim() == 2 else torch.bmm
            multiply(a, b, out_dtype=out.dtype, out=out)
        else:  # of two 16-bit numbers the product is exact in float32
            torch.matmul(a.to(out.dtype), b.to(out.dtype), out=out)

    def matmul_add(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        """``out += a @ b``."""
        if a.dtype == out.dtype:
            (out.addmm_ if a.dim() == 2 else out.baddbmm_)(a, b)
            return
        product = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        self.matmul(a, b, product)
        out += product

    def summed(self, array: Tensor) -> Tensor:
        """The sum of the rows, in float32."""
        return array.sum(0, dtype=torch.float32)

    def turned(self, array: Tensor) -> Tensor:
        """The last two axes exchanged."""
        return array.transpose(-1, -2)

    def by_head(self, array: Tensor, heads: int) -> Tensor:
        """``[B, outputs, heads * size]`` as ``[heads, B, outputs * size]``."""
        rows, outputs, width = array.shape
        split = array.reshape(rows, outputs, heads, width // heads).permute(2, 0, 1, 3)
        return split.reshape(heads, rows, outputs * (width // heads))  # of no rows, too

    def masked(self, x: Tensor, mask: Tensor) -> Tensor:
        """A copy with 0 where the mask is 0."""
        return x.masked_fill(~mask.bool().unsqueeze(-1), 0.0)


# Whether torch multiplies 16-bit matrices into float32 (since 2.8).
_WIDE_RESULTS = "dtype_out" in torch.ops.aten.mm.overloads()


@functools.lru_cache(maxsize=64)
def host_of(dtype: torch.dtype, device: torch.device) -> DeviceHost:
    """The host of tensors like these."""
    return DeviceHost(dtype, device)
