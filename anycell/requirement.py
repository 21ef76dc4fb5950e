"""The error of a frontend whose framework is not installed."""

from __future__ import annotations

import importlib


def require(package: str, frontend: str, extra: str, otherwise: str = "") -> None:
    """Imports the framework of a frontend.

    Args:
        package: the framework, by the name that it is imported by.
        frontend: who needs it.
        extra: the extra of anycell that installs it.
        otherwise: what else helps where the framework is there, but one of its own parts is not.

    Raises:
        ModuleNotFoundError: naming the module that is missing, and what to install.
    """
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        missing = (error.name or package).partition(".")[0]
        needs, install = f"{frontend} needs {package}", f"pip install '.[{extra}]'"
        if missing != package:
            needs += f", and {package} needs {missing}"
            install = f"pip install {missing}{otherwise}"
        raise ModuleNotFoundError(
            f"{needs}, which is not installed.\nInstead: {install}.", name=error.name
        ) from error
