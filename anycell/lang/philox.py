"""The random numbers behind ``keep``: Philox4x32-10, a counter turned into bits.

Every engine draws these numbers, so that a seed means the same masks everywhere, and the backward
pass draws them again instead of storing them. The convention:

    counter = (unit, row of the batch, time step, stream << 8 | index // 4)
    key     = (seed & 0xFFFFFFFF, seed >> 32)
    uniform = (word[index % 4] >> 8) * 2**-24                      exact in float32
    kept    = uniform < rate                                       compared in float32

``index`` numbers the cell's ``keep`` calls in the order they were traced, and ``stream`` the layers
and directions that share a seed. The time step counts from the start of the whole sequence,
whichever piece of it runs and in whichever direction; a mask ``per="sequence"`` has step 0.

Source: Salmon, Moraes, Dror & Shaw, *Parallel Random Numbers: As Easy as 1, 2, 3*, 2011.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # what the key grows by each round: golden ratio, sqrt(3) - 1
ROUNDS = 10

_HALF, _LOW = np.uint32(16), np.uint32(0xFFFF)


def philox4x32(counter: Sequence[Any], key: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
    """The four words of each counter; its four parts broadcast against each other.

    Args:
        counter, key: uint32, arrays of any framework. JAX has no integers of 64 bits by default.
    """
    a, b, c, d = counter
    low, high = key
    with np.errstate(over="ignore"):
        for _ in range(ROUNDS):
            (high_a, low_a), (high_c, low_c) = map(_product, (a, c), MULTIPLIERS)
            a, b, c, d = high_c ^ b ^ low, low_c, high_a ^ d ^ high, low_a
            low, high = low + np.uint32(WEYL[0]), high + np.uint32(WEYL[1])
    return a, b, c, d


def _product(x: Any, factor: int) -> tuple[Any, Any]:
    """The high and the low words of a product, by halves of the factors."""
    (x0, x1), (f0, f1) = ((n & _LOW, n >> _HALF) for n in (x, np.uint32(factor)))
    middle = x1 * f0 + (x0 * f0 >> _HALF)
    high = x1 * f1 + (middle >> _HALF) + ((x0 * f1 + (middle & _LOW)) >> _HALF)
    return high, x * np.uint32(factor)


def uniform(
    seed: int, stream: int, index: int, step: Any, rows: int, units: int
) -> npt.NDArray[np.float32]:
    """Uniform numbers in [0, 1) for mask ``index``: ``[rows, units]``, or ``[T, rows, units]``.

    Args:
        step: the time step, or a one-dimensional array of T of them.

    Example:
        >>> uniform(seed=7, stream=0, index=0, step=0, rows=1, units=3)
        array([[0.9545971 , 0.40696037, 0.00607508]], dtype=float32)
    """
    steps = np.asarray(step, np.uint32)
    counter = np.arange(units), np.arange(rows)[:, None], steps[..., None, None]
    parts = *counter, stream << 8 | index // 4, seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    *counter_, low, high = (np.asarray(part, np.uint32) for part in parts)
    words = philox4x32(counter_, (low, high))
    word = np.broadcast_to(words[index % 4], (*steps.shape, rows, units))
    return (word >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
