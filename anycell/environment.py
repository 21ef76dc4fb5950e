"""Environment variables: a value that a variable does not take is refused, never guessed at."""

from __future__ import annotations

import os


def switch(name: str, default: bool) -> bool:
    """Reads a variable that is 0 or 1; `default` where it is not set, or empty.

    Raises:
        ValueError: for any other value.
    """
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{name}={value!r}: expected 0 or 1. Set it to one of them, or unset it.")
    return value == "1" if value else default


def whole_number(name: str, most: int) -> int | None:
    """Reads a variable that is a whole number; None where it is not set, or empty.

    Raises:
        ValueError: for a value that is no whole number, less than 1, or above `most`.
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
    """The number from 1 to `most` that a text is, if it is one."""
    digits = text.strip().lstrip("0")
    # Python refuses to read thousands of digits.
    if not (digits.isascii() and digits.isdecimal()) or len(digits) > len(str(most)):
        return None
    return int(digits) if int(digits) <= most else None
