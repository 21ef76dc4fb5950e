"""When torch's own layer is the faster one. The rules only; the drop-in modules make the call.

Measured on the CPU, see ``docs/performance.md``; on a GPU nothing has been measured. The rule
speaks of cells that the vendor's library knows, with none of our own arguments.
"""

from __future__ import annotations

from anycell import cells
from anycell.lang.cell import Cell


def exception(cell: Cell) -> str | None:
    """Which calls of a layer torch's own operators should run, and why; None if there are none.

    A fused kernel packs the recurrent weights first, which pays from the second step on; torch's
    cells read them where they lie.
    """
    if cell in (cells.LSTM, cells.GRU):
        return "a single step is torch's own"
    return None


def wins(cell: Cell, steps: int) -> bool:
    """Whether a call is such an exception."""
    return steps == 1 and cell in (cells.LSTM, cells.GRU)


def wins_on_gpu(cell: Cell) -> str | None:
    """Why torch's own layer, which is cuDNN's, should run this cell on a GPU, or None.

    Of the cells that it knows, and in calls with none of our own arguments.
    """
    if cell in (cells.LSTM, cells.LSTMP, cells.GRU):
        return "cuDNN's layer; our kernels have not been measured against it"
    return None
