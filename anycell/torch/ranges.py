"""Ranges for profilers, under the name of the cell."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.profiler import record_function

from anycell.lang.cell import Cell

_NONE: AbstractContextManager[Any] = nullcontext()


def span(cell: Cell, what: str) -> AbstractContextManager[Any]:
    """``with span(cell, "forward"): ...`` is a range where a profiler looks on, else nothing."""
    if not torch._C._autograd._profiler_enabled():  # a range alone takes microseconds
        return _NONE
    return record_function(f"anycell.{cell.name}.{what}")
