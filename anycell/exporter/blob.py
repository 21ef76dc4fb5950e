"""The weights of a model as one piece of memory, which a program checks before it reads them.

Words of 32 bits, the lowest byte first: what marks such a file, the version of the functions, two
words for the program that the weights belong to, the length in bytes, and a checksum. Arrays
follow, each from a multiple of 64 bytes on.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from anycell.exporter.program import VERSION

MAGIC = int.from_bytes(b"acel", "little")
LINE = 64  # bytes of the header, and what arrays begin at a multiple of
POINTER = 2  # numbers at the beginning of a state that hold the address of the weights
SEED, FACTOR = 2166136261, 16777619  # of the checksum, FNV-1a of words with shifts
# What a check returns, in this order: 0 if all is well.
CODES = "MISALIGNED", "TRUNCATED", "NO_WEIGHTS", "OTHER_VERSION", "OTHER_MODEL", "DAMAGED"


class Blob:
    """Weights that are collected while a program is printed.

    Attributes:
        words: what a header must begin with, once all is printed.
    """

    def __init__(self) -> None:
        self.content, self.words = bytearray(LINE), list[int]()

    def add(self, array: npt.NDArray[Any]) -> int:
        """Appends an array; returns its first byte."""
        first = len(self.content)
        self.content += array.astype(array.dtype.newbyteorder("<")).tobytes()
        self.content += bytes(-len(self.content) % LINE)
        return first

    def seal(self, text: str) -> None:
        """Ends the collection; the program that the weights belong to is known by its text."""
        digest = struct.unpack("<2I", hashlib.sha256(text.encode()).digest()[:8])
        self.words = [MAGIC, VERSION, *digest, len(self.content)]

    def file(self) -> bytes:
        """The file."""
        total = SEED
        for word in np.frombuffer(self.content, "<u4", offset=4 * len(self.words) + 4).tolist():
            total = (total ^ word) * FACTOR % 2**32
            total ^= total >> 15
        header = struct.pack("<6I", *self.words, total)
        return header.ljust(LINE, b"\0") + self.content[LINE:]
