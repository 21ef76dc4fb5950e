"""Functions of arrays that a reading needs, made of the few in which frameworks differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np


class Arrays:
    """The functions of arrays of a framework; each frontend has its own ``reshape``, ``broadcast``,
    ``transpose``, ``zeros``, ``constant``, ``cat`` and ``cast``.
    """

    reshape: Any
    broadcast: Any
    transpose: Any
    zeros: Any
    constant: Any
    cat: Any
    cast: Any

    @staticmethod
    def take(array: Any, axis: int, start: int, size: int) -> Any:
        """Neighbouring places of an axis."""
        if array.shape[axis] == size:
            return array
        return array[(slice(None),) * axis + (slice(start, start + size),)]

    @staticmethod
    def gather(array: Any, at: np.ndarray) -> Any:
        """Any places of the last axis."""
        return array[..., at]

    @classmethod
    def index(cls, array: Any, at: np.ndarray) -> Any:
        """The places ``at`` of the last axis."""
        if not neighbours(at):
            return cls.gather(array, at)
        return cls.take(array, len(array.shape) - 1, int(at[0]), len(at))

    @classmethod
    def block(cls, matrix: Any, rows: tuple[int, int], columns: tuple[int, int]) -> Any:
        """The transpose of a block of a matrix; of rows and columns, the first and the one after
        the last. A frontend may leave it to the kernel.
        """
        for axis, (first, end) in enumerate((rows, columns)):
            matrix = cls.take(matrix, axis, first, end - first)
        return cls.move(matrix, 0, 1)

    @classmethod
    def ordered(cls, array: Any, order: list[int]) -> Any:
        """The array with its axes in another order."""
        return array if order == sorted(order) else cls.transpose(array, order)

    @classmethod
    def move(cls, array: Any, axis: int, to: int) -> Any:
        """The array with one axis in another place."""
        order = list(range(len(array.shape)))
        order.insert(to, order.pop(axis))
        return cls.ordered(array, order)


def merged(parts: Iterable[Any], joined: Callable[[Any, Any], Any]) -> list[Any]:
    """The parts, with neighbours as one where ``joined`` makes one of two, not None."""
    whole: list[Any] = []
    for part in parts:
        both = joined(whole[-1], part) if whole else None
        whole[len(whole) - (both is not None) :] = [part if both is None else both]
    return whole


def neighbours(at: np.ndarray) -> bool:
    """Whether numbers follow each other."""
    return bool((at == at[0] + np.arange(len(at))).all())
