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
    """The arrays of an archive, by name.

    Args:
        file: open to read.
        check: is given the headers, and raises where they are not those that are wanted.

    Raises:
        Damaged: where the file is no such archive, or not whole.
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
    """A file that is no archive of arrays, or not whole."""


@contextmanager
def _damage() -> Iterator[None]:
    """Turns the errors of ``zipfile``, its decompressors and NumPy's parser of headers into one.

    A failing disk keeps its OSError. Of these EINVAL is no fault of a disk, but of a damaged file,
    which says that bytes lie where no file has any.
    """
    try:
        yield
    except Exception as error:
        failing = isinstance(error, OSError) and error.errno not in (None, errno.EINVAL)
        if failing or isinstance(error, MemoryError):
            raise
        raise Damaged(str(error) or type(error).__name__) from error


def _header(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Header:
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # NumPy's two
        raise ValueError(f"{info.filename} is compressed by method {info.compress_type}")
    with archive.open(info) as member:
        version = npy.read_magic(member)
        if version != (1, 0):  # the later ones are for names of fields
            raise ValueError(f"{info.filename} is of version {version}")
        try:
            shape, _, dtype = npy.read_array_header_1_0(member)
        except MemoryError as error:  # so Python's parser says that brackets are too deep
            raise ValueError(f"the header of {info.filename} is no Python literal") from error
    if dtype.hasobject:
        raise ValueError(f"{info.filename} holds pickled objects")
    return Header(shape, dtype)


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Array:
    with archive.open(info) as member:
        array = npy.read_array(member, allow_pickle=False)
        # Zipfile compares the checksum once the end is reached.
        if member.read(1):
            raise ValueError(f"{info.filename} goes on behind its array")
    return array
