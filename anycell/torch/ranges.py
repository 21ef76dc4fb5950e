"""Ranges for profilers, under the name of the cell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.profiler import record_function

from anycell.lang.cell import Cell

Result = TypeVar("Result")


def ranged(cell: Cell, what: str, run: Callable[..., Result], *arguments: Any) -> Result:
    """``run(*arguments)``, in a range where a profiler looks on."""
    if not torch._C._autograd._profiler_enabled():  # a range alone takes microseconds
        return run(*arguments)
    with record_function(f"anycell.{cell.name}.{what}"):
        return run(*arguments)
