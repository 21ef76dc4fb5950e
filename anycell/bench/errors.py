"""What can go wrong before anything is measured, told kindly."""

from __future__ import annotations

import importlib
from types import ModuleType

from anycell.usage import UsageError


class Unsupported(Exception):
    """This contender has no such layer, as ``torch.nn`` has none for a user's cell: shown as -."""


def need(module: str, purpose: str, install: str = "'.[bench]'") -> ModuleType:
    """Import an optional package, or say which command installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A missing package *inside* an installed one is a different problem; do not hide it.
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        package = module.split(".")[0]
        raise UsageError(
            f"{purpose} needs {package}, which is not installed: pip install {install}"
        ) from None
