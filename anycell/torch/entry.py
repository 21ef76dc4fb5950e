"""The entrance to all that computes: ranges for profilers, and no autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.profiler import record_function

from anycell.lang.cell import Cell

Result = TypeVar("Result")

autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled


def enter(cell: Cell, what: str, run: Callable[..., Result], *arguments: Any) -> Result:
    """``run(*arguments)``, in a range under the name of the cell where a profiler looks on.

    Under autocast a matmul gives another dtype than the kernels read. What autocast asks for has
    been done by now; but a backward pass, or a program from export, can be called within it, too.
    """
    if autocast():
        with torch._C._DisableAutocast():
            return _ranged(cell, what, run, *arguments)
    if not torch._C._autograd._profiler_enabled():  # a range alone takes microseconds
        return run(*arguments)
    return _ranged(cell, what, run, *arguments)


def _ranged(cell: Cell, what: str, run: Callable[..., Result], *arguments: Any) -> Result:
    with record_function(f"anycell.{cell.name}.{what}"):
        return run(*arguments)
