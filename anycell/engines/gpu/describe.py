"""Describes a plan's GPU kernels, for ``anycell.explain``."""

from __future__ import annotations

from collections.abc import Iterator

from anycell.engines.gpu import capacity, refusals
from anycell.plan import Plan


def describe(plan: Plan) -> Iterator[str]:
    """A title, then a line for each card and refusal."""
    rows = capacity.BATCH
    yield f"which kernels for {rows} rows, by a model of what fits, not of what is fast"
    for card, name, why in capacity.table(plan):
        yield f"{card:8}  {name:8}  {why}"
    yield from map(str, refusals.of_plan(plan))
