"""The cache of compiled kernels, for the command line: where, how large, and how to empty it."""

from __future__ import annotations

import contextlib
import os
import re

from anycell.engines.cpu import jit

LIMIT, path, enabled = jit.LIMIT, jit.cache_directory, jit.enabled
_TEXT = re.compile(r"\w+_[0-9a-f]{16}\.py(\.[0-9a-f]{16})?")  # files of GPU kernels


def kept() -> list[int]:
    """Returns the size of each kernel in bytes.

    Raises:
        OSError: if the cache cannot be used.
    """
    return [*jit.kept(), *(os.stat(file).st_size for file in _texts())]


def clear() -> list[int]:
    """Deletes the kernels and unfinished drafts; returns the size of each in bytes.

    Files that do not look like ours stay. Kernels that are in use stay in memory.

    Raises:
        OSError: if the cache cannot be used.
    """
    with jit._Cache(path(), create=False) as cache:
        files = [file for file in cache.files() if cache.is_ours(file)]
        for file in files:
            cache._unlink(file.name)
    sizes = [file.size for file in files]
    for text in _texts():
        with contextlib.suppress(OSError):
            size = os.stat(text).st_size
            os.unlink(text)
            sizes.append(size)
    return sizes


def _texts() -> list[str]:
    """The paths of the files with Triton kernels."""
    try:
        with os.scandir(os.path.join(path(), "triton")) as listing:
            return [
                entry.path
                for entry in listing
                if _TEXT.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
            ]
    except OSError:
        return []
