"""What the files of cells share: the list of a framework's cells, and the numbers of each.

The cells of ``cells_jax.py``, ``cells_torch.py`` and ``cells_keras.py`` are written as people write
them, without a look at what the readers of anycell know. What a test asks of a cell is right
results, whether it is read or not; and of most, that they are read, or refused with a reason.
"""

import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tolerances import assert_close

BATCH, STEPS, INPUT, HIDDEN = 3, 4, 5, 6


class Numbers:
    """Draws the arrays of one cell, the same ones in each process."""

    def __init__(self, name: str) -> None:
        self.random = np.random.default_rng(zlib.crc32(name.encode()))

    def __call__(self, *shape: int, scale: float = 0.5) -> np.ndarray:
        """Normal numbers."""
        return np.asarray(self.random.normal(size=shape) * scale)

    def positive(self, *shape: int, low: float = 0.2, high: float = 1.5) -> np.ndarray:
        return self.random.uniform(low, high, shape)

    def flags(self, *shape: int, likely: float = 0.4) -> np.ndarray:
        return self.random.random(shape) < likely

    def integers(self, *shape: int, below: int) -> np.ndarray:
        return self.random.integers(0, below, shape).astype(np.int32)


@dataclass
class Entry:
    """A cell: the function that makes it with its numbers, and what should become of it."""

    name: str
    make: Callable[[Numbers], Any]
    reads: bool | None  # None: either, as long as the results are right
    reason: str = ""  # words of the refusal, a regular expression

    def __call__(self) -> Any:
        return self.make(Numbers(self.name))


def cell(mark: Any, start: Any, *arguments: Any, **options: Any) -> Callable[[Any], Any]:
    """Enters a class of cells, which are made with these arguments.

    Args:
        mark: says what should become of it: ``reads``, ``either`` or ``refused(...)``.
        start: (numbers, cell) -> what a test gets.
    """

    def keep(kind: Any) -> Any:
        make = lambda n: start(n, kind(*arguments, **options))  # noqa: E731
        make.__name__ = kind.__name__
        mark(make)
        return kind

    return keep


@dataclass
class Corpus:
    entries: list[Entry] = field(default_factory=list)

    def _add(self, reads: bool | None, reason: str = "") -> Callable[[Any], Any]:
        def keep(make: Any) -> Any:
            self.entries.append(Entry(make.__name__, make, reads, reason))
            return make

        return keep

    def reads(self, make: Any) -> Any:
        """Marks a cell that must be read."""
        return self._add(True)(make)

    def either(self, make: Any) -> Any:
        """Marks a cell that may be read or refused."""
        return self._add(None)(make)

    def refused(self, reason: str = "") -> Callable[[Any], Any]:
        """Marks a cell that must be refused."""
        return self._add(False, reason)

    @property
    def names(self) -> list[str]:
        return [entry.name for entry in self.entries]


def check_results(ours: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Asserts that a cell's results through a door are those of the plain loop, in float64."""
    assert set(ours) == set(expected)
    for name, ref in expected.items():
        kind = "gradient" if name.startswith("gradient") else "forward"
        assert ours[name].dtype == ref.dtype, f"{name}: {ours[name].dtype}, expected {ref.dtype}"
        assert_close(ours[name], ref, ref.dtype, kind, name)


def check_verdict(entry: Entry, reason: str | None) -> None:
    """Asserts that a cell was read or refused as it should be, and why.

    Args:
        reason: why the plain loop ran; None if the cell was read.
    """
    if reason is None:
        assert entry.reads is not False, f"{entry.name} was read"
        return
    assert not entry.reads, f"{entry.name} was refused: {reason}"
    assert re.search(r"cells_\w+\.py:\d+", reason), f"no line of the cell in: {reason}"
    if entry.reads is False:
        assert re.search(entry.reason, reason), f"nothing of {entry.reason} in: {reason}"
