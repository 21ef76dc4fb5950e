"""What can go wrong before anything is measured, told kindly."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Collection
from types import ModuleType


class UsageError(Exception):
    """Something was asked for that does not exist; the message is all that the user needs."""


class Unsupported(Exception):
    """This contender has no such layer, as ``torch.nn`` has none for a user's cell: shown as -."""


def did_you_mean(word: str, known: Collection[str]) -> str:
    """The tail of an error message: the nearest known words, then all of them.

    >>> did_you_mean("depar", ["deepar", "ocr"])
    ' (did you mean deepar?); choose from: deepar, ocr'
    """
    lowered = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), lowered, n=2)
    hint = f" (did you mean {' or '.join(lowered[name] for name in near)}?)" if near else ""
    return f"{hint}; choose from: {', '.join(known)}"


def need(module: str, purpose: str) -> ModuleType:
    """Import an optional package, or say which command installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A missing package *inside* an installed one is a different problem; do not hide it.
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        package = module.split(".")[0]
        raise UsageError(
            f"{purpose} needs {package}, which is not installed: pip install 'anycell[bench]'"
        ) from None
