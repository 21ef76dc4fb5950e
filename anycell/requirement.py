"""The version of the package, and errors about packages that are not installed."""

from __future__ import annotations

import importlib
import re
from importlib import metadata


def installed() -> str:
    """The installed version; ``0+unknown`` if the files were only copied."""
    try:
        return metadata.version("anycell")
    except metadata.PackageNotFoundError:
        return "0+unknown"


def install(extra: str) -> str:
    """The command that installs an extra, from the index for a release, else from the checkout."""
    released = re.fullmatch(r"(?!0\.0$)[\d.]+", installed())  # 0.0: no tag is known
    return f"pip install '{'anycell' if released else '.'}[{extra}]'"


def require(package: str, frontend: str, extra: str, otherwise: str = "") -> None:
    """Imports the framework of a frontend.

    Args:
        package: the framework, by the name that it is imported by.
        frontend: the frontend that needs it.
        extra: the extra of anycell that installs it.
        otherwise: a further remedy if a package that the framework needs is missing.

    Raises:
        ModuleNotFoundError: naming the module that is missing, and what to install.
    """
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        missing = (error.name or package).partition(".")[0]
        needs, instead = f"{frontend} needs {package}", install(extra)
        if missing != package:
            needs += f", and {package} needs {missing}"
            instead = f"pip install {missing}{otherwise}"
        raise ModuleNotFoundError(
            f"{needs}, which is not installed.\nInstead: {instead}.", name=error.name
        ) from error
