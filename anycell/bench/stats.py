"""Statistics of noisy timings: order statistics only, because one preempted run must not count."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two in the middle; NaN without values."""
    return statistics.median(values) if values else math.nan


def iqr(values: Sequence[float]) -> float:
    """The distance between the quartiles: 0 for a single value, NaN without values.

    >>> iqr([1.0, 2.0, 3.0, 4.0, 5.0])
    2.0
    """
    if len(values) < 2:
        return 0.0 if values else math.nan
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """The median of the ratios round by round.

    Both runs of a round saw the same neighbours on the machine, so a slow spell cancels out, which
    it does not in a ratio of medians.

    >>> paired_ratio([2.0, 20.0, 2.2], [1.0, 10.0, 1.0])
    2.0
    """
    if len(numerator) != len(denominator):
        raise ValueError(f"unpaired samples: {len(numerator)} against {len(denominator)}")
    return median([a / b for a, b in zip(numerator, denominator, strict=True)])


def geometric_mean(values: Sequence[float]) -> float:
    """The mean of ratios; NaN without values.

    >>> geometric_mean([0.5, 2.0])
    1.0
    """
    return statistics.geometric_mean(values) if values else math.nan
