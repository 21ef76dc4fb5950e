"""Trees of tuples, lists and dictionaries, the last in the order of their keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

Tree = Any


def leaves(tree: Tree, sort: Any = object) -> Iterator[Any]:
    """The leaves of a sort; None is no leaf."""
    if isinstance(tree, dict):
        tree = [tree[key] for key in sorted(tree)]
    if _joins(tree):
        for part in tree:
            yield from leaves(part, sort)
    elif tree is not None and isinstance(tree, sort):
        yield tree


def mapped(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """The tree with other leaves."""
    kind = type(tree)
    if kind is tuple or kind is list:  # mostly
        return kind([mapped(function, part) for part in tree])
    if isinstance(tree, dict):
        by_key = {key: mapped(function, tree[key]) for key in sorted(tree)}
        return kind((key, by_key[key]) for key in tree)
    if not _joins(tree):
        return None if tree is None else function(tree)
    return kind(*[mapped(function, part) for part in tree])


def filled(tree: Tree, values: Iterable[Any], sort: Any = object) -> Tree:
    """The tree with these values in place of its leaves of a sort."""
    left = iter(values)
    any_sort = sort is object  # calls a function less for each leaf
    return mapped(lambda leaf: next(left) if any_sort or isinstance(leaf, sort) else leaf, tree)


def _joins(tree: Tree) -> bool:
    return type(tree) in (tuple, list) or hasattr(type(tree), "_fields")
