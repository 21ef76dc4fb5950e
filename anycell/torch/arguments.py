"""What users pass, checked, and brought into the one form that engines read.

Every error names the argument, what was given, what is expected, and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anycell.lang.cell import Cell
from anycell.layer.checks import check_cell, check_sizes, integer, is_array, refuse
from anycell.layer.checks import describe as describe
from anycell.torch.entry import autocast
from anycell.torch.functional import memory, observed

# -- of constructors -------------------------------------------------------------------------------


def check_layer(
    module: str, cell: Any, input_size: Any, hidden_size: Any, sizes: Mapping[str, Any]
) -> dict[str, int]:
    """The arguments of a module, as of ``RNN``: what the size symbols of its cell stand for."""
    if isinstance(cell, int):  # a call of torch.nn's module of that name
        hint = f"Pass one of anycell.cells: {module}(cells.RNN, {cell}, {input_size})."
        expected = f"a cell, which anycell.torch.{module} takes first"
        refuse("cell", describe(cell), expected, hint, TypeError)
    check_cell(cell)
    integer("input_size", input_size)
    return check_sizes(cell, integer("hidden_size", hidden_size), sizes)


# -- of calls --------------------------------------------------------------------------------------


def check_tensor(name: str, value: Any, shape: Sequence[int], axes: str, like: Tensor) -> None:
    """``value`` must be a tensor of this shape, with dtype and device of ``like``."""
    right = isinstance(value, Tensor) and value.shape == tuple(shape)
    if right and value.dtype == like.dtype and value.device == like.device:
        return  # before it is written what is wanted, which takes longer than to look
    wanted = f"expected {like.dtype} {list(shape)}, {axes}"
    if not isinstance(value, Tensor):
        hint = f"Pass torch.from_numpy({name})." if is_array(value) else "Pass a tensor."
        raise TypeError(f"{name}: given {describe(value)}; {wanted}. {hint}")
    if value.shape != tuple(shape):
        raise ValueError(f"{name}: given {describe(value)}; {wanted}. Reshape or expand it.")
    if value.dtype != like.dtype and not autocast():
        hint = f"Convert it: {name}.to({like.dtype})."
        raise ValueError(f"{name}: given {describe(value)}; {wanted}. {hint}")
    check_device(name, value, like.device)


def check_device(name: str, value: Tensor, device: torch.device) -> None:
    """``value`` must be where the weights are."""
    if value.device != device:
        raise ValueError(
            f"{name}: given on {value.device}; expected on {device}, where the weights are. "
            f"Move it: {name}.to({str(device)!r})."
        )


def check_states(
    name: str,
    states: Any,
    cell: Cell,
    sizes: Mapping[str, int],
    first: tuple[int, ...],
    like: Tensor,
) -> tuple[Tensor, ...]:
    """States as a tuple; each must be ``[*first, size]``."""
    given = (states,) if isinstance(states, Tensor) else states
    if not isinstance(given, (tuple, list)) or len(given) != len(cell.states):
        names = ", ".join(cell.state_names)
        wanted = f"a tuple ({names})" if len(cell.states) > 1 else f"the tensor {names}"
        raise TypeError(
            f"{name}: given {describe(states)}; expected {wanted}, the state of cell {cell.name}. "
            "Pass what an earlier call returned, or leave it out."
        )
    for state, value in zip(cell.states, given, strict=True):
        axes = f"the state {state.name!r}"
        check_tensor(name, value, (*first, sizes[state.size]), axes, like)
    return tuple(given)


def check_static(cell: Cell, static: Any, shape: tuple[int, ...], like: Tensor) -> Any:
    """The input per sequence, which must be given just where the cell declares one."""
    if cell.static is not None:
        axes = f"the input {cell.static!r} of cell {cell.name}, once per sequence"
        check_tensor("static", static, shape, axes, like)
    elif static is not None:
        raise TypeError(
            f"static: given {describe(static)}; expected nothing, for cell {cell.name} declares no "
            'such input. Declare it, @cell(static="e"), or leave it out.'
        )
    return static


def check_recurrent_mask(
    cell: Cell, mask: Tensor, sizes: Mapping[str, int], rows: tuple[int, ...], like: Tensor
) -> None:
    """``[*rows, size]``, or ``[G, *rows, size]`` for one per gate, of a cell that has a matmul
    behind `r`.
    """
    if not any(l.recurrent for l in cell.linears):
        named = ", ".join(l.name for l in cell.linears) or "none"
        raise ValueError(
            f"recurrent_mask: given {describe(mask)}; expected None for cell {cell.name}, which "
            f"has no matmul behind `r` to mask (its matmuls: {named}). Draw the mask in the cell, "
            "with keep()."
        )
    shape = (*rows, sizes[cell.states[0].size])
    axes = f"of the state {cell.states[0].name!r}, with an axis of {len(cell.gates)} gates or not"
    if isinstance(mask, Tensor) and mask.dim() == len(shape) + 1:
        shape = (len(cell.gates), *shape)
    check_tensor("recurrent_mask", mask, shape, axes, like)


def check_return_states(cell: Cell, wanted: Any) -> tuple[str, ...]:
    """``return_states`` as names of states."""
    if wanted is None or isinstance(wanted, bool):
        return cell.state_names if wanted else ()
    names = (wanted,) if isinstance(wanted, str) else wanted
    if not isinstance(names, (tuple, list)) or not set(names) <= set(cell.state_names):
        raise ValueError(
            f"return_states: given {wanted!r}; expected names of states of cell {cell.name}, of "
            f"which it has {', '.join(cell.state_names)}. Pass True for all of them."
        )
    return tuple(names)


def check_masked_output(value: Any) -> bool:
    """Whether outputs of masked steps repeat the held state."""
    if not isinstance(value, str) or value not in ("zero", "repeat"):
        raise ValueError(
            f"masked_output: given {value!r}; expected 'zero' or 'repeat'. Leave it out for zeros."
        )
    return value == "repeat"


def as_flags(name: str, value: Tensor, wanted: str) -> Tensor:
    """``mask`` or ``resets`` as bool: of bool or uint8, and resets of 0 and 1 in any real dtype.

    Whether they are 0 and 1 is looked at on the CPU, outside of traces and transforms: elsewhere a
    look waits for the device, or there is nothing to see yet. There all but 0 is a reset.
    """
    if value.dtype not in (torch.bool, torch.uint8):
        if name != "resets" or value.is_complex():
            raise TypeError(f"{name}: given {describe(value)}; {wanted}. Cast it: {name}.bool().")
        if not observed() and memory(value) and value.is_cpu:
            flags = value.bool()
            if not torch.equal(flags.to(value.dtype), value):
                other = value[flags & (value != 1)]
                raise ValueError(
                    f"{name}: given {describe(value)} with a value of {other[0].item():g}; {wanted}"
                    f", or 0 and 1. Say which values are resets, as in {name} > 0.5."
                )
            return flags
    return value.bool()


def check_flags(
    name: str, value: Any, shape: tuple[int, ...], axes: str, device: torch.device
) -> Tensor:
    """``mask`` or ``resets`` as bool; ``value`` must be flags of this shape."""
    wanted = f"expected torch.bool {list(shape)}, {axes}"
    if not isinstance(value, Tensor):
        hint = f"Pass torch.as_tensor({name})."
        raise TypeError(f"{name}: given {describe(value)}; {wanted}. {hint}")
    if value.shape != shape:
        turned = len(shape) == 2 and value.shape == shape[::-1]
        hint = f"Turn it: {name}.t()." if turned else "One flag per step and row."
        raise ValueError(f"{name}: given {describe(value)}; {wanted}. {hint}")
    check_device(name, value, device)
    return as_flags(name, value, wanted)


@dataclass(frozen=True)
class Layout:
    """How the caller's tensors lie: T steps of B rows, which of them first, and where."""

    steps: int
    rows: int
    batch_first: bool
    batched: bool
    device: torch.device

    def valid(self, mask: Any, lengths: Any) -> Tensor | None:
        """``mask`` and ``lengths`` as one mask, bool ``[T, B]``."""
        if lengths is None:
            return None if mask is None else self.flags("mask", mask)
        within = self.within(lengths)
        return within if mask is None else within & self.flags("mask", mask)

    def flags(self, name: str, value: Any) -> Tensor:
        """``mask`` or ``resets``, laid out as the input, to bool ``[T, B]``."""
        shape: tuple[int, ...] = (self.steps, self.rows)
        axes = "(time, batch)"
        if not self.batched:
            shape, axes = (self.steps,), "(time)"
        elif self.batch_first:
            shape, axes = (self.rows, self.steps), "(batch, time)"
        value = check_flags(name, value, shape, axes, self.device)
        if not self.batched:
            value = value.unsqueeze(1)
        elif self.batch_first:
            value = value.t()
        # A copy: the backward pass reads it again, and the caller may have changed his by then.
        return value.clone(memory_format=torch.contiguous_format)

    def within(self, lengths: Any) -> Tensor:
        """``lengths`` as a mask, bool ``[T, B]``."""
        shape = (self.rows,) if self.batched else ()
        wanted = f"expected integers {list(shape)}, the number of steps of each row"
        try:
            # Of a list on the CPU, whatever torch.set_default_device says.
            given = (
                lengths if isinstance(lengths, Tensor) else torch.as_tensor(lengths, device="cpu")
            )
        except (TypeError, ValueError, RuntimeError):
            hint = "Pass a list of int, or a tensor."
            raise TypeError(f"lengths: given {describe(lengths)}; {wanted}. {hint}") from None
        inexact = given.is_floating_point() or given.is_complex() or given.dtype == torch.bool
        if inexact and given.numel():  # of no rows, [] is a list of integers too
            hint = "Cast them: lengths.long()."
            raise TypeError(f"lengths: given {describe(given)}; {wanted}. {hint}")
        given = given.long()  # unsigned ones know no minimum
        if given.shape != shape:
            hint = "One length per row of the input."
            raise ValueError(f"lengths: given {describe(given)}; {wanted}. {hint}")
        # A look elsewhere waits for the device, and in a graph there is nothing to see yet.
        if given.device.type == "cpu" and given.numel() and not torch.compiler.is_compiling():
            for bad in (int(given.min()), int(given.max())):
                if not 0 <= bad <= self.steps:
                    raise ValueError(
                        f"lengths: given a length of {bad}; expected 0 to {self.steps}, the steps "
                        f"of the input. Pad the input, or clamp: lengths.clamp(0, {self.steps})."
                    )
        steps = torch.arange(self.steps, device=self.device).unsqueeze(1)
        return steps < given.to(self.device).reshape(1, -1)
