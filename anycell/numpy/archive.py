"""``.npz`` archives, read with care.

Nothing in an archive is executed. Its headers are checked before any memory is allocated for it,
and no array is accepted before its checksum has been reached.
"""

from __future__ import annotations

import errno
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

Array = npt.NDArray[Any]


class Header(NamedTuple):
    """The header of an array, before the array is read."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def read(file: BinaryIO, check: Callable[[Mapping[str, Header]], None]) -> dict[str, Array]:
    """Reads the arrays of an archive, by name.

    Args:
        file: open to read.
        check: called with the headers; raises if they are not as expected.

    Raises:
        Damaged: if the file is not such an archive, or not complete.
    """
    with _damage():
        archive = zipfile.ZipFile(file)
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        if len(members) < len(archive.infolist()):
            raise ValueError("two arrays have one name")
        headers = {name: _header(archive, info) for name, info in members.items()}
    check(headers)
    with _damage():
        return {name: _array(archive, info) for name, info in members.items()}


class Damaged(ValueError):
    """A file that is not an archive of arrays, or not complete."""


@contextmanager
def _damage() -> Iterator[None]:
    """Turns errors of ``zipfile``, its decompressors and NumPy's header parser into ``Damaged``.

    OSErrors of a failing disk pass through. EINVAL is not one of them: it comes from a damaged
    file that points to impossible positions.
    """
    try:
        yield
    except Exception as error:
        failing = isinstance(error, OSError) and error.errno not in (None, errno.EINVAL)
        if failing or isinstance(error, MemoryError):
            raise
        raise Damaged(str(error) or type(error).__name__) from error


def _header(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Header:
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # NumPy's own
        raise ValueError(f"{info.filename} is compressed by method {info.compress_type}")
    with archive.open(info) as member:
        version = npy.read_magic(member)
        if version != (1, 0):  # later versions are for structured dtypes
            raise ValueError(f"{info.filename} is of version {version}")
        try:
            shape, _, dtype = npy.read_array_header_1_0(member)
        except MemoryError as error:  # Python's parser raises this for deeply nested brackets
            raise ValueError(f"the header of {info.filename} is no Python literal") from error
    if dtype.hasobject:
        raise ValueError(f"{info.filename} holds pickled objects")
    return Header(shape, dtype)


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Array:
    with archive.open(info) as member:
        array = npy.read_array(member, allow_pickle=False)
        # Zipfile compares the checksum only at the end.
        if member.read(1):
            raise ValueError(f"{info.filename} has more bytes than its array")
    return array
