"""Environment variables: an invalid value is refused, never guessed at."""

from __future__ import annotations

import os


def switch(name: str, default: bool) -> bool:
    """Reads a variable that is 0 or 1; returns `default` if it is unset or empty.

    Raises:
        ValueError: for any other value.
    """
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{name}={value!r}: expected 0 or 1. Set it to one of them, or unset it.")
    return value == "1" if value else default


def whole_number(name: str, most: int) -> int | None:
    """Reads a variable that is a whole number; returns None if it is unset or empty.

    Raises:
        ValueError: for a value that is not a whole number from 1 to `most`.
    """
    value = os.environ.get(name, "")
    if not value:
        return None
    count = number(value, most)
    if count is None:
        raise ValueError(
            f"{name}={value!r}: expected a whole number from 1 to {most}. Set it to one of them, "
            "or unset it."
        )
    return count


def number(text: str, most: int) -> int | None:
    """Reads a whole number from 1 to `most`; returns None for any other text."""
    digits = text.strip().lstrip("0")
    # Python refuses to read thousands of digits.
    if not (digits.isascii() and digits.isdecimal()) or len(digits) > len(str(most)):
        return None
    return int(digits) if int(digits) <= most else None
