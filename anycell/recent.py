"""Tables of limited size, from which the oldest entry goes."""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


def add_recent(table: dict[Key, Value], key: Key, value: Value, most: int) -> Value:
    """Adds an entry to a table of at most ``most``; returns the value that the table has for it,
    which is another thread's if that was faster.

    A table that is full loses its oldest entry: to forget all would make everything that is in use
    again.
    """
    for oldest in list(table)[: max(0, len(table) + 1 - most)]:
        table.pop(oldest, None)
    return table.setdefault(key, value)
