"""When torch's own layer is the faster one. The rules only; the drop-in modules make the call.

Measured on the CPU, see ``docs/performance.md``; on a GPU nothing has been measured. The rule
speaks of cells that the vendor's library knows, with none of our own arguments.
"""

from __future__ import annotations

from anycell import cells
from anycell.engines.cpu import pool
from anycell.lang.cell import Cell
from anycell.torch.entry import autocast


def exception(cell: Cell) -> str | None:
    """Says which calls of a layer torch's own operators run, and why; None if there are none.

    A fused kernel packs the recurrent weights first, which pays from the second step on; torch's
    cells read them where they lie. Under autocast there is no such call: torch's LSTM runs in 16
    bits on some processors only, and its GRU in float32.
    """
    if cell in (cells.LSTM, cells.GRU) and not autocast():
        return "a single step is torch's own, unless it has resets or another argument of ours"
    return None


def wins(cell: Cell, steps: int) -> bool:
    """Whether a call with none of our arguments is such an exception. In a forked child none is:
    torch's threads do not survive a fork.
    """
    return steps == 1 and exception(cell) is not None and not pool.FORKED


def wins_on_gpu(cell: Cell) -> str | None:
    """Why torch's own layer, which is cuDNN's, should run this cell on a GPU, or None.

    Of the cells that it knows, and in calls with none of our own arguments.
    """
    if cell in (cells.LSTM, cells.LSTMP, cells.GRU):
        return "cuDNN's layer; our kernels have not been measured against it"
    return None
