"""A hash of the code that prints kernels: by it a kernel on disk is found without its text.

Printing takes ten times as long as all else on the way to a kernel that is on disk.
"""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache

PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# Directories whole, so that a new file is never forgotten.
PARTS = ("lang", "plan", os.path.join("engines", "cpu"))


def files(package: str) -> list[str]:
    """The files that decide what a kernel's text is, relative to the package."""
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
    """The hash of the code that this process runs; None where that cannot be told.

    That is so without source files (a zip archive, bytecode alone), and where one was edited after
    it was imported: code printed by the old source must not go by the name of the new.
    """
    try:
        now = digest(PACKAGE)
    except OSError:
        return None
    return now if _stamps() == _IMPORTED else None
