"""Who looks on at a call: compilers, traces, transformations and modes of torch.

A native call reads and writes memory behind torch's back. So it runs only where nobody needs to see
operations. The rule fails safe: any mode on torch's stacks, known or not, must see them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from anycell.refusal import refuse

# The types of plain memory. Others see their operations; with tracers' they may be operators.
ORDINARY = (Tensor, torch.nn.Parameter)
TRACERS = (FakeTensor, FunctionalTensor)

autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled


def constant(function: Callable[..., Any]) -> Any:
    """Does ``torch.compiler.assume_constant_result`` without its import of Dynamo, which takes as
    long as the import of torch.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def observed() -> bool:
    """Returns whether tensors may be more or less than their memory: under a compiler, an exporter,
    a trace, ``torch.func``, forward-mode derivatives, or a mode.
    """
    return (
        torch.compiler.is_dynamo_compiling()
        or exporting()
        or torch._C._get_tracing_state() is not None
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        # ``watched`` again, which would be a further call of each layer
        or torch._C._len_torch_dispatch_stack() > 0
        or (torch._C._len_torch_function_stack() > 0 and watched())
    )


def compiled() -> bool:
    """Whether torch.compile, or a strict torch.export, traces the call."""
    # Not an alias of torch's: after a graph break, Dynamo looks at each function by itself.
    return torch.compiler.is_dynamo_compiling()


def traced() -> bool:
    """Whether export or jit records the call, so that pointers mean nothing."""
    return exporting() or torch._C._get_tracing_state() is not None


def left_alone(function: Any) -> None:
    """Makes Dynamo run a function, and all that it calls, uncompiled outside of its graphs. It
    changes nothing within, and nothing before PyTorch 2.7.
    """
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))


class Transforms(NamedTuple):
    """The transforms of ``torch.func`` and forward-mode derivatives around a call.

    Attributes:
        gradients: whether they take gradients.
        derived: whether they take gradients or forward-mode derivatives.
        elements: how many elements their vmaps have.
    """

    gradients: bool
    derived: bool
    elements: int


@constant  # Dynamo enters torch.func's transforms while it traces them, and guards them itself
def transformed() -> bool:
    """Whether tensors carry more than memory: torch.func's transforms, or forward-mode tangents."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def transforms() -> Transforms | None:
    """The derivatives and vmaps around a call; None if there are none, or others, or if somebody
    looks on.
    """
    kinds: Any = torch._C._functorch
    stack = kinds.get_interpreter_stack() or ()
    grad, vmap, forwards = (getattr(kinds.TransformType, n) for n in ("Grad", "Vmap", "Jvp"))
    used, duals = [one.key() for one in stack], forward_ad._current_level >= 0
    if not (stack or duals) or {*used} - {grad, vmap, forwards} or traced() or watched():
        return None
    if used.count(forwards) > 1:  # within the derivative of a Function, PyTorch has no other
        return None
    vmaps = [kinds.CVmapInterpreterPtr(one) for one in stack if one.key() == vmap]
    derived = grad in used or forwards in used or duals
    return Transforms(grad in used, derived, math.prod(one.batchSize() for one in vmaps))


def mapped(tensor: Tensor) -> bool:
    """Whether a tensor differs from element to element of a vmap."""
    return any(map(torch._C._functorch.is_batchedtensor, _within(tensor)))


def mapped_tangent(tensor: Tensor) -> bool:
    """Whether a dual number's tangent differs from element to element of a vmap of autograd's own,
    as in ``torch.autograd.functional.jacobian(strategy="forward-mode")``; it knows no operators.
    """
    if forward_ad._current_level < 0 or torch._C._are_functorch_transforms_active():
        return False
    tangent = forward_ad.unpack_dual(tensor).tangent
    return tangent is not None and torch._C._functorch.is_legacy_batchedtensor(tangent)


def requires_grad(tensor: Tensor) -> bool:
    """Whether a tensor, or what it wraps for a transform, requires a gradient."""
    return any(one.requires_grad for one in _within(tensor))


def _within(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor, and those that it wraps."""
    kinds = torch._C._functorch
    yield tensor
    while kinds.is_functorch_wrapped_tensor(tensor):
        yield (tensor := kinds.get_unwrapped(tensor))


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor within one that a transform wrapped which has ended."""
    return torch._C._functorch.unwrap_if_dead(tensor)


def watched() -> bool:
    """Whether a mode sees torch's operations, or calls of its functions: torch's own, as those of
    ``make_fx``, FakeTensor and FlopCounterMode, or a user's.
    """
    if torch._C._len_torch_dispatch_stack() > 0:
        return True
    # ``torch.device`` and ``torch.set_default_device`` only say where new tensors go.
    return not all(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())


def unlike_memory(
    arriving: Sequence[Tensor | None], saved: Iterable[Tensor], types: tuple[type, ...]
) -> bool:
    """Whether a backward pass reads what is not mere memory: in a vmap over gradients, as for a
    Jacobian, or a tensor of another type than these.

    Raises:
        ValueError: in a trace of what comes before autograd. It takes all that a backward pass
            reads for constants; torch's own operations give a wrong graph.
    """
    if torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch):
        hint = "Trace it without pre_dispatch: the values that it reads would be constants."
        refuse("backward", "a trace with pre_dispatch=True", "a trace that sees autograd", hint)
    if any(map(_batched, arriving)):
        return True
    return not {*map(type, saved), *map(type, arriving)}.issubset((*types, type(None)))


def _batched(gradient: Tensor | None) -> bool:
    kinds = torch._C._functorch
    return gradient is not None and (
        kinds.is_functorch_wrapped_tensor(gradient)
        or kinds.is_legacy_batchedtensor(gradient)
        or mapped_tangent(gradient)
    )


exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)
