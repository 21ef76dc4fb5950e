"""Calls of so few steps that they take less time as they are written than on a kernel."""

from __future__ import annotations

SHORT = "so few steps take less time as they are written"
# As measured: the steps of few numbers that a framework runs while it calls a kernel; of NumPy, the
# functions that they call, of PyTorch with gradients, the operations. Without, it calls a kernel as
# fast as the loop.
MOST = {"numpy": 40, "tensorflow": 12, "torch": 14.5}
_FEW = 8192  # numbers in the states: with more, a step's time is theirs, not that of its calls


def short(framework: str, steps: int, numbers: int, calls: float = 1) -> bool:
    """Whether the framework's own loop takes less time than a kernel.

    Args:
        framework: of ``MOST``.
        numbers: in the states before the first step.
        calls: the functions that a step calls, where they count.
    """
    one = steps == 1 and framework != "torch"
    return one or steps * calls * max(numbers, _FEW) <= MOST[framework] * _FEW


# As measured, of XLA: with large weights its loop takes less time than a kernel for one step of one
# row, and for few steps if the kernel's weights are joined of several, a matrix for each gate.
_ROWS, _WEIGHTS = 8, 1 << 18


def large(steps: int, rows: int, numbers: int, joined: bool) -> bool:
    """Whether XLA's loop takes less time on so few steps of large weights than a kernel.

    Args:
        numbers: in all weights.
        joined: whether a weight of the kernel is joined of several.
    """
    return numbers >= _WEIGHTS and steps * rows <= (_ROWS if joined else 1)
