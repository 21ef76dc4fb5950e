"""The words of an error about an argument: what was given, what was expected, and what to do."""

from __future__ import annotations

from typing import NoReturn


def refuse(
    name: str, given: str, expected: str, hint: str = "", error: type[Exception] = ValueError
) -> NoReturn:
    """Raises the error about an argument."""
    raise error(f"{name}: given {given}; expected {expected}. {hint}".rstrip())
