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

Word = npt.NDArray[np.uint32]


def philox4x32(counter: Sequence[Any], key: tuple[int, int]) -> tuple[Word, Word, Word, Word]:
    """The four words of each counter; its four parts broadcast against each other."""
    a, b, c, d = (np.asarray(part, np.uint32) for part in counter)
    low, high = key
    for _ in range(ROUNDS):
        left = a.astype(np.uint64) * np.uint64(MULTIPLIERS[0])
        right = c.astype(np.uint64) * np.uint64(MULTIPLIERS[1])
        a = _high(right) ^ b ^ np.uint32(low)
        b = right.astype(np.uint32)
        c = _high(left) ^ d ^ np.uint32(high)
        d = left.astype(np.uint32)
        low, high = (low + WEYL[0]) & 0xFFFFFFFF, (high + WEYL[1]) & 0xFFFFFFFF
    return a, b, c, d


def _high(product: npt.NDArray[np.uint64]) -> Word:
    return (product >> np.uint64(32)).astype(np.uint32)


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
    counter = (
        np.arange(units, dtype=np.uint32),
        np.arange(rows, dtype=np.uint32)[:, None],
        steps[..., None, None],
        stream << 8 | index // 4,
    )
    words = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
    word = np.broadcast_to(words[index % 4], (*steps.shape, rows, units))
    return (word >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
