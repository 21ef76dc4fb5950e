"""Checks the tensors that users pass, and brings them into the form that engines read.

Every error names the argument, what was given, what is expected, and what to do.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from anycell.layer import checks
from anycell.layer.checks import (
    Frontend,
    check_cell,
    check_sizes,
    describe,
    integer,
    is_array,
    refuse,
    remedy,
)
from anycell.torch.functional import memory
from anycell.torch.fused import autocast
from anycell.torch.observers import compiled, traced, watched


def check_layer(
    module: str, cell: Any, input_size: Any, hidden_size: Any, sizes: Mapping[str, Any]
) -> dict[str, int]:
    """Checks the arguments of a module such as ``RNN``; returns its sizes by their symbols."""
    if isinstance(cell, int):  # called with the arguments of torch.nn's module of that name
        hint = f"Pass one of anycell.cells: {module}(cells.RNN, {cell}, {input_size})."
        expected = f"a cell, which anycell.torch.{module} takes first"
        refuse("cell", describe(cell), expected, hint, TypeError)
    check_cell(cell)
    checks.check_names(cell, sizes)  # first, because a misspelt hidden_size is among ``sizes``
    integer("input_size", input_size)
    return check_sizes(cell, integer("hidden_size", hidden_size), sizes)


def check_tensor(
    name: str, value: Any, shape: Sequence[int | str], axes: str, like: Tensor
) -> Tensor:
    """Returns ``value``; refuses all but tensors of this shape and ``like``'s dtype and device. No
    tensor has a shape with words in it.
    """
    right = isinstance(value, Tensor) and value.shape == tuple(shape)
    if right and value.dtype == like.dtype and value.device == like.device:
        return value  # before ``expected`` is formatted, which takes longer than the checks
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
    check_device(name, value, like.device)
    return value


def check_device(name: str, value: Tensor, device: torch.device) -> None:
    """Refuses a tensor on another device than the weights."""
    if value.device != device:
        hint = f"Move it: {name}.to({str(device)!r})."
        refuse(name, f"on {value.device}", f"on {device}, where the weights are", hint)


def as_flags(name: str, value: Tensor, expected: str) -> Tensor:
    """Converts flags to bool: from bool or uint8, and for all but ``mask`` from any real dtype.

    Flags of other dtypes must be 0 or 1, if they can be read. If not, every value but 0 is True.
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


def check_flags(name: str, value: Any, shape: tuple[int, ...], axes: str, like: Tensor) -> Tensor:
    """Converts flags of this shape, such as ``mask`` or ``resets``, to bool; refuses all else."""
    expected = f"torch.bool {list(shape)}, {axes}"
    if not isinstance(value, Tensor):
        refuse(name, describe(value), expected, f"Pass torch.as_tensor({name}).", TypeError)
    if value.shape != shape:
        turned = len(shape) == 2 and value.shape == shape[::-1]
        hint = f"Transpose it: {name}.t()." if turned else "One flag per step and row."
        refuse(name, describe(value), expected, hint)
    check_device(name, value, like.device)
    return as_flags(name, value, expected)


def _readable(value: Tensor) -> bool:
    """Whether to check the values of a tensor. On another device than the CPU, a check would wait
    for the device; in a trace and under a mode there may be no values yet, or they would become
    constants; those that a vmap maps differ from one of its calls to the other.
    """
    unseen = not (compiled() or traced() or watched())
    mapped = torch._C._functorch.is_functorch_wrapped_tensor
    return unseen and memory(value) and value.is_cpu and not mapped(value)


def _counts(name: str, value: Any, expected: str) -> tuple[Tensor, bool]:
    """Returns ``lengths`` as integers, and whether to check their values."""
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


def _copy(flags: Tensor) -> Tensor:
    return flags.clone(memory_format=torch.contiguous_format)


def _below(steps: int, counts: Tensor, like: Tensor) -> Tensor:
    return torch.arange(steps, device=like.device).unsqueeze(1) < counts.to(like.device)


TORCH = Frontend(Tensor, check_tensor, check_flags, _counts, _copy, _below, torch)
check_states = functools.partial(checks.check_states, TORCH)
check_static = functools.partial(checks.check_static, TORCH)
check_recurrent_mask = functools.partial(checks.check_recurrent_mask, TORCH)
