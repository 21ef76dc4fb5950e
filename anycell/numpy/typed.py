"""Calls of layers as type checkers see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy.typing as npt

from anycell.numpy.base import Array
from anycell.plan import CallOptions, FunctionOptions

State = Array | tuple[Array, ...]  # a single array if the cell has one state
Names = Literal[True] | str | Sequence[str]


class Arrays(CallOptions, total=False):
    """The arguments by name of layers and of ``recurrence``."""

    mask: npt.ArrayLike | None
    lengths: npt.ArrayLike | None
    resets: npt.ArrayLike | None
    reset_state: State | Sequence[Array | None] | None
    static: npt.ArrayLike | None
    recurrent_mask: npt.ArrayLike | None


class Arguments(Arrays, total=False):
    """The arguments of a call by name, all but ``return_states``."""

    training: bool


class RecurrenceArguments(Arrays, FunctionOptions, total=False):
    """The arguments of ``recurrence`` by name; it has no gradients."""

    engine: str | None
