"""The rows of several passes, such as the directions of a layer, as those of one recipe, and the
launches of several calls.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from anycell.engines.gpu.player import NUMBER, Argument, Launched
from anycell.engines.gpu.refusals import Refused
from anycell.engines.gpu.twins import print_twins


def beside(columns: Sequence[list[Any]]) -> list[Any]:
    """The rows of all passes: one pass after the other, unless they launch twins. These are one
    launch each, after all that the passes do before, and so are moves that differ in addresses.
    """
    if not any(isinstance(row, Launched) and row.printed.apart for row in columns[0]):
        return [*itertools.chain(*columns)]
    rows = list[Any]()
    for parts in zip(*map(_between_twins, columns), strict=True):
        others = [before for before, _ in parts]
        if len({len(before) for before in others}) == 1:
            others = [_joined(same) for same in zip(*others, strict=True)]
        rows += itertools.chain(*others)
        twins = [one for _, one in parts if one is not None]
        if twins:
            rows.append(_together(twins))
    return rows


def _between_twins(rows: Iterable[Any]) -> Iterator[tuple[list[Any], Launched | None]]:
    """The rows before each launch of twins, and the launch; at last what follows all of them."""
    others: list[Any] = []
    for row in rows:
        if isinstance(row, Launched) and row.printed.apart:
            yield others, row
            others = []
        else:
            others.append(row)
    yield others, None


def _joined(rows: Sequence[Any]) -> list[Any]:
    """Joins rows of several passes to one launch if they are moves that differ in addresses."""
    moves = [row for row in rows if isinstance(row, Launched) and row.owner is None]
    if len(moves) < len(rows) or len({one.unplaced for one in moves}) > 1:
        return [*rows]
    return [_together([one._replace(printed=print_twins(one.printed)) for one in moves])]


def _together(twins: Sequence[Launched]) -> Launched:
    """Joins launches of several passes to one."""
    (printed, grid, first, owner), second = twins[0], twins[1].arguments
    names = {name: k for k, (name, _) in enumerate(printed.arguments)}
    places = [names[name] for name in printed.apart]
    distances = [_distance(first[k], second[k]) for k in places]
    for one, other in itertools.pairwise(twins):
        pairs = list(zip(one.arguments, other.arguments, strict=True))
        assert distances == [_distance(*pairs[k]) for k in places], printed.name
        assert all(a == b for k, (a, b) in enumerate(pairs) if k not in places), printed.name
    return Launched(printed, (*grid, len(twins)), (*first, *distances), owner)


def _distance(one: Argument, other: Argument) -> Argument:
    """The number to add to an argument of a pass for that of the next pass."""
    offset = other.offset - one.offset
    if one.slot == other.slot:
        return Argument(NUMBER, offset, offset)
    return Argument(other.slot, offset, one.known % 16 or other.known % 16, one.slot)


def of_calls(one: Launched, count: int, spacing: Sequence[int], device: int) -> list[Launched]:
    """A launch for several calls at once, or one for each, where the device refuses it or calls
    differ in more than addresses, as if one direction's weights were those of all calls.

    Args:
        spacing: by slot, the bytes from a call's array to that of the next call; 0 where all calls
            share it.
    """
    apart = [_bytes(argument, spacing) for argument in one.arguments]
    kinds = [kind for _, kind in one.printed.arguments]
    if not any(n for n, kind in zip(apart, kinds, strict=False) if kind[0] != "*"):
        *tiles, inside = (*one.grid, 1)[:3]
        printed = print_twins(one.printed, calls=True, inside=inside)
        distances = dict(zip([name for name, _ in printed.arguments], apart, strict=False))
        added = [Argument(NUMBER, n, n) for n in map(distances.__getitem__, printed.apart)]
        grid = *tiles, inside * count
        both = Launched(printed, grid, (*one.arguments, *added), one.owner)
        try:
            both.loaded(device)
        except Refused:
            pass
        else:
            return [both]
    pairs = list(zip(one.arguments, apart, strict=True))
    return [
        one._replace(arguments=tuple(_moved(argument, k * n) for argument, n in pairs))
        for k in range(count)
    ]


def _bytes(argument: Argument, spacing: Sequence[int]) -> int:
    """The bytes to add to an argument for the next call."""
    there, less = (0 if s == NUMBER else spacing[s] for s in (argument.slot, argument.less))
    return there - less


def _moved(argument: Argument, by: int) -> Argument:
    known = argument.known + (0 if argument.known % 16 else by)
    return argument._replace(offset=argument.offset + by, known=known)
