"""The arrays that ``Feedback`` of every frontend hands to a cell that ``with_feedback`` made.

The cell has one more gate, the last, and x one more number, the last, which says to this gate where
x is free: 1, and 0 elsewhere. A row that is rounded to 8 bits is rounded by its largest number.
There the last one is as large as that, and at least ``LEAST``, so that neither it nor the others
are lost.
"""

from __future__ import annotations

from anycell.plan import scales_of

# What has rows for every gate, and what the rows of the one more gate are filled with.
BY_GATE = {"weight_ih": 0, "weight_hh": 0, "bias_ih": 0, "bias_hh": 0}
BY_GATE |= {scales_of("weight_ih"): 1, scales_of("weight_hh"): 0}
LEAST = 1e-19  # 127 over it is a float32, and so is what a row of that size is scaled by

__all__ = ["BY_GATE", "LEAST"]
