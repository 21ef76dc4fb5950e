"""What users pass, checked, and brought into the one form that engines read.

Every error names the argument, what was given, what is expected, and what to do.
"""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anycell.lang.cell import Cell


def describe(value: Any) -> str:
    """What was given, as an error message shows it."""
    if isinstance(value, Tensor):
        where = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"{value.dtype} {list(value.shape)}{where}"
    if isinstance(value, (tuple, list)) and any(isinstance(v, Tensor) for v in value):
        return f"{type(value).__name__} ({', '.join(map(describe, value))})"
    return f"{type(value).__name__} {value!r}"


def check_tensor(name: str, value: Any, shape: Sequence[int], axes: str, like: Tensor) -> None:
    """``value`` is a tensor of this shape, with dtype and device of ``like``."""
    wanted = f"expected {like.dtype} {list(shape)}, {axes}"
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: given {describe(value)}; {wanted}. Pass a tensor.")
    if value.shape != tuple(shape):
        raise ValueError(f"{name}: given {describe(value)}; {wanted}. Reshape or expand it.")
    if value.dtype != like.dtype:
        hint = f"Convert it: {name}.to({like.dtype})."
        raise ValueError(f"{name}: given {describe(value)}; {wanted}. {hint}")
    check_device(name, value, like.device)


def check_device(name: str, value: Tensor, device: torch.device) -> None:
    if value.device != device:
        raise ValueError(
            f"{name}: given on {value.device}; expected on {device}, where the weights are. "
            f"Move it: {name}.to({str(device)!r})."
        )


# -- of constructors -------------------------------------------------------------------------------------


def check_layer(cell: Any, sizes: Mapping[str, int], dropout: Any, **counts: Any) -> None:
    """The arguments of ``RNN`` and ``RNNCell``."""
    if not isinstance(cell, Cell):
        raise TypeError(
            f"cell: given {describe(cell)}; expected a Cell. "
            "Pass one of anycell.cells, for instance anycell.cells.LSTM, or decorate a function with @anycell.cell."
        )
    declared = {s.size for s in cell.states} | {s for l in cell.linears for s in (l.in_size, l.out_size)}
    declared.discard("H")
    for name in sizes.keys() - declared:
        has = ", ".join(sorted(declared)) or "no sizes but H"
        raise TypeError(
            f"{name}: given {sizes[name]!r}; expected no such argument: cell {cell.name} declares {has}. "
            "Check the spelling."
        )
    for name in declared - sizes.keys():
        raise TypeError(
            f"{name}: not given; expected the size that cell {cell.name} declares by this name. "
            f"Pass {name}=... beside hidden_size."
        )
    for name, value in {**counts, **sizes}.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}: given {describe(value)}; expected a positive int. Pass int({name}).")
        if value <= 0:
            raise ValueError(f"{name}: given {value}; expected a positive int. Pass 1 or more.")
    if isinstance(dropout, bool) or not isinstance(dropout, numbers.Real) or not 0 <= dropout <= 1:
        raise ValueError(
            f"dropout: given {dropout!r}; expected a number in [0, 1], the probability that an element "
            "between two layers is zeroed. Pass 0.0 for none."
        )
    if dropout and counts.get("num_layers") == 1:
        warnings.warn(
            f"dropout={dropout} acts between layers, and num_layers=1 has no such place.", stacklevel=3
        )


# -- of calls --------------------------------------------------------------------------------------------


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
        """``mask`` or ``resets``, bool and laid out as the input, to bool ``[T, B]``."""
        shape, axes = (self.steps, self.rows), "(time, batch)"
        if self.batch_first:
            shape, axes = (self.rows, self.steps), "(batch, time)"
        if not self.batched:
            shape, axes = (self.steps,), "(time)"
        wanted = f"expected torch.bool {list(shape)}, {axes}"
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: given {describe(value)}; {wanted}. Use torch.as_tensor({name}).")
        if value.dtype not in (torch.bool, torch.uint8):
            raise TypeError(f"{name}: given {describe(value)}; {wanted}. Cast it: {name}.bool().")
        if value.shape != shape:
            turned = self.batched and value.shape == shape[::-1]
            hint = f"Transpose it: {name}.t()." if turned else "Give one flag per step and row."
            raise ValueError(f"{name}: given {describe(value)}; {wanted}. {hint}")
        check_device(name, value, self.device)
        if not self.batched:
            value = value.unsqueeze(1)
        elif self.batch_first:
            value = value.t()
        return value.bool().contiguous()

    def within(self, lengths: Any) -> Tensor:
        """``lengths`` as a mask, bool ``[T, B]``."""
        shape = (self.rows,) if self.batched else ()
        wanted = f"expected integers {list(shape)}, the number of steps of each row"
        try:
            given = torch.as_tensor(lengths)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(
                f"lengths: given {describe(lengths)}; {wanted}. Pass a list of int or a tensor."
            ) from None
        if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
            raise TypeError(f"lengths: given {describe(given)}; {wanted}. Cast them: lengths.long().")
        if given.shape != shape:
            raise ValueError(f"lengths: given {describe(given)}; {wanted}. The batch has {self.rows} rows.")
        if given.device.type == "cpu" and given.numel():  # elsewhere a look at them waits for the device
            for bad in (int(given.min()), int(given.max())):
                if not 0 <= bad <= self.steps:
                    raise ValueError(
                        f"lengths: given a length of {bad}; expected 0 to {self.steps}, the steps of the input. "
                        f"Pad the input, or clamp them: lengths.clamp(0, {self.steps})."
                    )
        steps = torch.arange(self.steps, device=self.device).unsqueeze(1)
        return steps < given.to(self.device).reshape(1, -1)
