"""PyTorch's tensors for ``anycell.layer``: on the CPU, and on a device for the GPU engine."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from anycell import cells
from anycell.engines import cpu
from anycell.engines.gpu import launch
from anycell.engines.gpu.capacity import Device
from anycell.lang import namespaces
from anycell.lang.cell import Cell
from anycell.layer.checks import describe, is_array, refuse, remedy
from anycell.layer.framework import DeviceFramework, Framework
from anycell.layer.signature import ANY, FLAGS, MATRIX, ROWS, Shape
from anycell.torch.graphs import Replays, captured
from anycell.torch.observers import ORDINARY, autocast, compiled, traced, watched
from anycell.torch.threads import blas, forks

Returned = TypeVar("Returned")
# The engine that has the kernels for each type of device.
ENGINES = {"cpu": "cpu", "cuda": "gpu"}

_GEMM = {torch.float32: "sgemm_", torch.float64: "dgemm_"}
_CPU = torch.device("cpu")  # explicit: torch.set_default_device must not move our buffers


def _array(value: Any, like: Tensor) -> Tensor:
    # A copy from the host would wait for a card, and be a constant outside of the graph in a trace.
    if isinstance(value, (int, float)):
        return torch.full((), value, dtype=like.dtype, device=like.device)
    if isinstance(value, Tensor):  # asarray has had two meanings of a gradient's path
        return value.to(like.device, like.dtype)
    return torch.asarray(value, dtype=like.dtype, device=like.device)


NAMESPACE = namespaces.KNOWN["torch"] = namespaces.Namespace(
    torch,
    array=_array,
    cast=lambda array, dtype: array.to(getattr(torch, dtype)),
    sigmoid=torch.sigmoid,
    erf=torch.erf,
    stop_gradient=lambda array: array.detach(),
    round=torch.round,
    numbers=lambda array: array.detach().to("cpu", torch.float64).numpy(),
    # Above the threshold softplus returns its argument; at 40 that is exact even in float64.
    softplus=lambda array: torch.nn.functional.softplus(array, threshold=40.0),
    # Not by indexing: the gradient of each index would be an array of all steps.
    steps=torch.unbind,
    split=lambda array, sizes: torch.split(array, list(sizes), -1),
)


def memory(x: Tensor) -> bool:
    """Whether ``x`` is plain memory on a device with kernels, which excludes a FakeTensor."""
    return (
        type(x) in ORDINARY
        and x.device.type in ENGINES
        and x.layout is torch.strided
        and not x.is_neg()
    )


def _dense(array: Tensor, layout: int) -> Tensor:
    """The tensor, or a contiguous copy if it is unaligned or of another layout."""
    if array.data_ptr() % array.element_size():
        return array.clone(memory_format=torch.contiguous_format)
    if layout == ANY or array.is_contiguous():
        return array
    strides = array.stride()
    rows = layout == ROWS and (strides[-1] == 1 or array.shape[-1] < 2)
    return array if rows or (layout == MATRIX and 1 in strides[-2:]) else array.contiguous()


def _bytes(array: Tensor) -> Tensor | None:
    """Flags as contiguous uint8."""
    if array.dtype not in (torch.bool, torch.uint8):
        return None
    return array.contiguous().view(torch.uint8)


class Torch(Framework):
    """PyTorch's tensors of one dtype on the CPU."""

    kind, xp = Tensor, NAMESPACE
    dtype: torch.dtype
    empty: Any
    zeros: Any

    def __init__(self, dtype: torch.dtype, wide: Torch | None = None) -> None:
        super().__init__(dtype, wide)
        # Not methods, here and below: they run so often that one more Python call would matter.
        self.empty = functools.partial(torch.empty, dtype=dtype, device=_CPU)
        self.zeros = functools.partial(torch.zeros, dtype=dtype, device=_CPU)
        self._beyond = dtype.itemsize.__rmod__  # bytes beyond a whole number of elements

    @classmethod
    def dtype_named(cls, name: str) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, name)
        return dtype

    @property
    def blas(self) -> int:
        """The address of a Fortran gemm of this dtype; 0 if there is none, and where it would wait
        for threads of a parent.
        """
        name = _GEMM.get(self.dtype)
        return blas(name) if name and forks.safe else 0

    def fit(self, array: Tensor, layout: int, wide: bool = False) -> Tensor | None:
        if array.dtype is not (self.wide.dtype if wide else self.dtype) or not array.is_cpu:
            return None
        if array.is_contiguous() and not array.data_ptr() % array.element_size():
            return array
        return _dense(array, layout)

    def layout(self, arrays: Mapping[Any, Tensor]) -> tuple[Any, ...]:
        key: list[Any] = []
        for name, t in arrays.items():
            if name not in FLAGS:  # of an address, its alignment
                key += name, t.shape, t.stride(), t.dtype, t.device, t.data_ptr() & 15
        return tuple(key)

    def as_flags(self, array: Tensor) -> Tensor | None:
        return _bytes(array) if array.is_cpu else None

    def widen(self, array: Tensor) -> Tensor:
        # If rows overlap, PyTorch's own order of axes may end with an axis that is not dense.
        dense = torch.contiguous_format
        return array if self.wide is self else array.to(self.wide.dtype, memory_format=dense)

    def narrow(self, array: Tensor) -> Tensor:
        return array if self.wide is self else array.to(self.dtype)

    def lasting(self, shape: Shape) -> Tensor:
        return torch.from_numpy(cpu.memory.empty(shape, f"i{self.dtype.itemsize}")).view(self.dtype)

    def template(self, shape: Shape) -> Tensor:
        if math.prod(shape) < 2:  # ``empty_like`` would keep the strides of 0 of the expanded one
            return self.empty(shape)
        return self.empty(()).expand(shape)

    def misaligned(self, arrays: Iterable[Tensor]) -> bool:
        return any(map(self._beyond, map(Tensor.data_ptr, arrays)))

    like = staticmethod(torch.empty_like)
    split = staticmethod(Tensor.split)
    pointer, pointers = staticmethod(Tensor.data_ptr), functools.partial(map, Tensor.data_ptr)
    strides = staticmethod(Tensor.stride)

    # -- arguments of users' calls -----------------------------------------------------------------

    @classmethod
    def check_array(
        cls, name: str, value: Any, shape: Sequence[Any], axes: str, like: Tensor
    ) -> Tensor:
        """Returns ``value``; refuses all but tensors of this shape and ``like``'s dtype and
        device.
        """
        # Before ``expected`` is formatted, which takes longer than the checks, and which Dynamo
        # cannot do with sizes that it does not know.
        right = isinstance(value, Tensor) and value.shape == tuple(shape)
        if right and value.device == like.device and (value.dtype == like.dtype or autocast()):
            return value
        expected = f"{like.dtype} [{', '.join(map(str, shape))}], {axes}"
        if not isinstance(value, Tensor):
            hint = f"Pass torch.from_numpy({name})." if is_array(value) else "Pass a tensor."
            refuse(name, describe(value), expected, hint, TypeError)
        if value.shape != tuple(shape):
            hint = "Reshape or expand it."
            hint = remedy(value, len(shape), hint) if name == "x" else hint
            refuse(name, describe(value), expected, hint)
        if value.dtype != like.dtype and not autocast():
            hint = f"Convert it: {name}.to({like.dtype})."
            if name == "x" and value.is_floating_point():
                hint = f"{hint[:-1]}, or the layer: layer.to({value.dtype})."
            refuse(name, describe(value), expected, hint)
        cls.check_device(name, value, like.device)
        return value

    @classmethod
    def check_device(cls, name: str, value: Tensor, device: torch.device) -> None:
        """Refuses a tensor on another device than the weights."""
        if value.device != device:
            hint = f"Move it: {name}.to({str(device)!r})."
            refuse(name, f"on {value.device}", f"on {device}, where the weights are", hint)

    @classmethod
    def check_flags(
        cls, name: str, value: Any, shape: Sequence[Any], axes: str, like: Tensor
    ) -> Tensor:
        """Converts flags of this shape, such as ``mask`` or ``resets``, to bool; refuses all
        else.
        """
        expected = f"torch.bool {list(shape)}, {axes}"
        if not isinstance(value, Tensor):
            refuse(name, describe(value), expected, f"Pass torch.as_tensor({name}).", TypeError)
        if value.shape != shape:
            turned = len(shape) == 2 and value.shape == shape[::-1]
            hint = f"Transpose it: {name}.t()." if turned else "One flag per step and row."
            refuse(name, describe(value), expected, hint)
        cls.check_device(name, value, like.device)
        return cls.booleans(name, value, expected)

    @classmethod
    def booleans(cls, name: str, value: Tensor, expected: str) -> Tensor:
        """Converts flags to bool: from bool or uint8, and for all but ``mask`` from any real dtype.

        Flags of other dtypes must be 0 or 1, if they can be read. If not, every value but 0 is
        True.
        """
        if value.dtype not in (torch.bool, torch.uint8):
            if name == "mask" or value.is_complex():
                refuse(name, describe(value), expected, f"Cast it: {name}.bool().", TypeError)
            if _readable(value):
                flags = value.bool()
                if not torch.equal(flags.to(value.dtype), value):
                    other = value[flags & (value != 1)][0].item()
                    hint = f"Say which values are meant, as in {name} > 0.5."
                    given = f"{describe(value)} with a value of {other:g}"
                    refuse(name, given, f"{expected}, or 0 and 1", hint)
                return flags
        return value.bool()

    @classmethod
    def check_counts(cls, name: str, value: Any, expected: str) -> tuple[Tensor, bool]:
        try:
            # A list becomes a tensor on the CPU, whatever torch.set_default_device says.
            counts = value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")
        except (TypeError, ValueError, RuntimeError):
            counts = None
        if counts is None:
            refuse(name, describe(value), expected, "Pass a list of int, or a tensor.", TypeError)
        inexact = counts.is_floating_point() or counts.is_complex() or counts.dtype == torch.bool
        if inexact and counts.numel():  # [], the lengths of no rows, becomes a float tensor
            refuse(name, describe(counts), expected, f"Cast them: {name}.long().", TypeError)
        return counts.long(), _readable(counts)  # torch has no minimum of some unsigned dtypes

    @classmethod
    def copy_flags(cls, flags: Tensor) -> Tensor:
        return flags.clone(memory_format=torch.contiguous_format)

    @classmethod
    def below(cls, steps: int, counts: Tensor, like: Tensor) -> Tensor:
        return torch.arange(steps, device=like.device).unsqueeze(1) < counts.to(like.device)


def _readable(value: Tensor) -> bool:
    """Whether to check the values of a tensor. On another device than the CPU, a check would wait
    for the device; in a trace and under a mode there may be no values yet, or they would become
    constants; those that a vmap maps differ from one of its calls to the other.
    """
    unseen = not (compiled() or traced() or watched())
    mapped = torch._C._functorch.is_functorch_wrapped_tensor
    return unseen and memory(value) and value.is_cpu and not mapped(value)


class TorchDevice(DeviceFramework, Torch):
    """PyTorch's tensors of one dtype on one device; torch does the matmuls.

    The device may be the CPU, where kernels run in Triton's interpreter: only the speed differs.

    Attributes:
        device: the device of all tensors.
    """

    patience = 10_000_000_000

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        Framework.__init__(self, dtype)
        self.device, self.on_card = device, device.type == "cuda"

    @classmethod
    @functools.lru_cache(maxsize=64)
    def on(cls, dtype: str, device: torch.device) -> TorchDevice:
        """The framework for a layer of that dtype on that device."""
        return cls(cls.dtype_named(dtype), device)

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

    def empty(self, shape: tuple[int, ...], wide: bool = False) -> Tensor:
        return torch.empty(shape, dtype=torch.float32 if wide else self.dtype, device=self.device)

    def template(self, shape: Shape, wide: bool = False) -> Tensor:
        template = self.empty((), wide)
        # ``empty_like`` would keep the strides of 0 of an expanded tensor with fewer numbers.
        return template.expand(shape) if math.prod(shape) > 1 else self.empty(shape, wide)

    def block(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self.device)

    def typed(self, block: Tensor, dtype: str) -> Tensor:
        return block.view(self.dtype_named(dtype))

    def part(self, array: Tensor, shape: Shape, strides: Shape, offset: int) -> Tensor:
        return array.as_strided(shape, strides, array.storage_offset() + offset)

    def numbers(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.device)

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
        known = array.dtype is self.dtype or (wide and array.dtype is torch.float32)
        return _dense(array, layout) if known and array.device == self.device else None

    def as_flags(self, array: Tensor) -> Tensor | None:
        return _bytes(array) if array.device == self.device else None

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

    def summed(self, array: Tensor, total: Tensor) -> None:
        torch.sum(array, 0, dtype=torch.float32, out=total)

    def by_head(self, array: Tensor, heads: int) -> Tensor:
        rows, outputs, width = array.shape
        split = array.reshape(rows, outputs, heads, width // heads).permute(2, 0, 1, 3)
        return split.reshape(heads, rows, outputs * (width // heads))  # -1 would fail for no rows


# Whether torch multiplies 16-bit matrices into float32 (since 2.8).
_WIDE_RESULTS = "dtype_out" in torch.ops.aten.mm.overloads()
