"""When the host framework's own layer is the faster one. The rule only;
the frontend supplies the call.

Measured on the CPU, see ``docs/performance.md``. The rule speaks of cells that the vendor's library
knows, with none of our own arguments.
"""

from __future__ import annotations

from anycell import cells
from anycell.lang.cell import Cell

FEW_ROWS = 4


def wins(cell: Cell, steps: int, batch: int) -> str | None:
    """Why torch's own layer should run this call, or None if ours should.

    A fused kernel packs the recurrent weights first, which pays from the second step on. torch's
    GRU reads them where they lie; its LSTM packs as well, and slower.
    """
    if steps == 1 and batch <= FEW_ROWS and cell == cells.GRU:
        return "one step on few rows: reading the weights once, unpacked, is all the work"
    return None
