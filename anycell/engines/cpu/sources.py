"""A hash of the code that prints kernels, by which a kernel on disk is found without its text.

Printing the text takes ten times as long as all other work to load a kernel that is on disk.
"""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache

PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# Whole directories, so that a new file is never forgotten.
PARTS = ("lang", "plan", os.path.join("engines", "cpu"))


def files(package: str) -> list[str]:
    """The files that determine a kernel's text, relative to the package."""
    names = (os.path.join(part, n) for part in PARTS for n in os.listdir(f"{package}/{part}"))
    return sorted(name for name in names if name.endswith(".py"))


def digest(package: str) -> str:
    """A hash of those files."""
    whole = hashlib.sha256()
    for name in files(package):
        with open(os.path.join(package, name), "rb") as file:
            text = file.read()
        whole.update(f"{name}\0{len(text)}\0".encode())
        whole.update(text)
    return whole.hexdigest()


def _stamps() -> list[tuple[object, ...]] | None:
    try:
        states = [(name, os.stat(os.path.join(PACKAGE, name))) for name in files(PACKAGE)]
    except OSError:
        return None
    return [(name, s.st_size, s.st_ino, s.st_mtime_ns, s.st_ctime_ns) for name, s in states]


_IMPORTED = _stamps()


@lru_cache(maxsize=1)
def fingerprint() -> str | None:
    """The hash of the code that this process runs; None if it is unknown.

    It is unknown without source files (in a zip archive, or with bytecode alone), or if one was
    edited after its import: text printed by old source must not have the new source's hash.
    """
    try:
        now = digest(PACKAGE)
    except OSError:
        return None
    return now if _stamps() == _IMPORTED else None
