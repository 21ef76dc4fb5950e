"""Pads a ``PackedSequence``, which has rows of several lengths step by step, and packs it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from anycell.layer.checks import describe, refuse
from anycell.plan import ARRAYS, REALS
from anycell.torch.framework import Torch
from anycell.torch.observers import transformed

# The arguments of a call that only a padded x takes: a packed one has its own lengths.
_PADDED = {*ARRAYS}.difference(REALS, ("resets", "return_states"))


def parts(packed: PackedSequence) -> tuple[Tensor, Tensor]:
    """Returns the values, and how many rows each step has. Reads both by index: the compiler of
    PyTorch 2.4 mistakes the attributes for something else.
    """
    return packed[0], packed[1]


class Packing(NamedTuple):
    """The layout of a ``PackedSequence``: the places of its rows. It does what ``layers.Layout``
    does.

    Attributes:
        packed: the sequence.
        like: its values, ``[N, ...]``.
        steps: T of the padded tensor.
        first: ``(B,)``, the batch axis of tensors that have no axis of steps.
        mask: bool ``[T, B]``, rows in the order of packing; None if all rows have T steps.
        places: the index of each packed row among T * B, ``[N]``; None if all rows have T steps.
    """

    packed: PackedSequence
    like: Tensor
    steps: int
    first: tuple[int]
    mask: Tensor | None = None
    places: Tensor | None = None

    @classmethod
    def of(cls, packed: PackedSequence) -> Packing:
        """The packing of a sequence, from its ``batch_sizes``, which are on the CPU."""
        data, sizes = parts(packed)
        steps, rows = len(sizes), int(sizes[0])
        if int(sizes[-1]) == rows:
            return cls(packed, data, steps, (rows,))
        mask = torch.arange(rows, device=sizes.device) < sizes.unsqueeze(1)
        places = mask.flatten().nonzero().squeeze(1).to(data.device)
        return cls(packed, data, steps, (rows,), mask.to(data.device), places)

    def enter(
        self, x: PackedSequence, arrays: Mapping[str, Tensor], arguments: Mapping[str, Any]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Pads x, and orders the rows of the other tensors as it; mask and resets are added."""
        for name, value in arguments.items():
            if value is not None and name in _PADDED:
                expected = "None with a PackedSequence, which has its own lengths"
                hint = "Pass a padded tensor, or leave it out."
                refuse(name, describe(value), expected, hint)
        tensors = {}
        for name, t in arrays.items():
            for_all = name.startswith("reset_state ") and t.dim() == 2  # one value for all rows
            tensors[name] = t if for_all else _rows(t, self.packed[2])
        if self.mask is not None:
            tensors["mask"] = self.mask
        if arguments.get("resets") is not None:
            tensors["resets"] = self.flags("resets", arguments["resets"])
        return self.pad(parts(x)[0]), tensors

    def leave(
        self, output: Tensor, final: Sequence[Tensor], others: Sequence[Tensor]
    ) -> tuple[PackedSequence, tuple[Tensor, ...], list[PackedSequence]]:
        """Packs the sequences, and orders the rows of the final states as users' tensors."""
        packed, *values = [
            PackedSequence(self.pack(t), *self.packed[1:]) for t in (output, *others)
        ]
        return packed, tuple([_rows(s, self.packed[3]) for s in final]), values

    def pad(self, data: Tensor) -> Tensor:
        """Pads ``[N, ...]`` to ``[T, B, ...]``, with zeros, which the mask hides."""
        if self.places is not None:
            data = _spread(data, self.places, self.steps * self.first[0])
        return data.unflatten(0, (self.steps, *self.first))

    def pack(self, padded: Tensor) -> Tensor:
        """Packs ``[T, B, ...]`` to ``[N, ...]``."""
        rows = padded.flatten(0, 1)
        if self.places is None:
            return rows
        if transformed():
            return rows.index_select(0, self.places)
        return _Gather.apply(rows, self.places)

    def flags(self, name: str, value: Any) -> Tensor:
        """Unpacks flags per step, packed as the input is, to bool ``[T, B]``."""
        if not isinstance(value, PackedSequence):
            expected, hint = "a PackedSequence, like the input", "Pack it like the input."
            refuse(name, describe(value), expected, hint, TypeError)
        pairs = zip(value[1:], self.packed[1:], strict=True)
        if not all(a is b or (a is not None and b is not None and a.equal(b)) for a, b in pairs):
            hint = "Pack both with the same lengths and enforce_sorted."
            refuse(name, "a PackedSequence of other lengths or order", "those of the input", hint)
        flags = Torch.booleans(name, value.data, f"torch.bool [{len(self.like)}]")
        return self.pad(flags).contiguous()


def _rows(t: Tensor, order: Tensor | None) -> Tensor:
    """Reorders the rows of ``[..., B, size]``."""
    return t if order is None else t.index_select(-2, order)


def _spread(rows: Tensor, places: Tensor, count: int) -> Tensor:
    """Moves rows to their places among ``count``, of which the others are zeros."""
    return rows.new_zeros(count, *rows.shape[1:]).index_copy(0, places, rows)


class _Gather(torch.autograd.Function):
    """Takes rows from their places. Autograd's own gradient of ``index_select`` adds up row by row,
    ten times as slowly; this one has no rules for torch.func and forward mode.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.count = len(rows)
        return rows.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return _spread(gradient, places, ctx.count), None
