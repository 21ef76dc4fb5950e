"""Statistics of noisy timings: order statistics only, because one preempted run must not count."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence


def median(values: Sequence[float]) -> float:
    """The middle one; of an even number, the mean of the two."""
    return statistics.median(values)


def iqr(values: Sequence[float]) -> float:
    """Distance between the quartiles; 0 where there are too few values to have quartiles.

    >>> iqr([1.0, 2.0, 3.0, 4.0, 5.0])
    2.0
    """
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Median of the ratios round by round.

    Both runs of a round saw the same neighbours on the machine, so a slow spell cancels out, which
    it does not in a ratio of medians.

    >>> paired_ratio([2.0, 20.0, 2.2], [1.0, 10.0, 1.0])
    2.0
    """
    if len(numerator) != len(denominator):
        raise ValueError(f"unpaired samples: {len(numerator)} against {len(denominator)}")
    return median([a / b for a, b in zip(numerator, denominator, strict=True)])


def geometric_mean(values: Iterable[float]) -> float:
    """
    >>> geometric_mean([0.5, 2.0])
    1.0
    """
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs)) if logs else math.nan
