"""Loads object files as executable code without LLVM. Importing LLVM takes longer than everything
else that a process does to get a kernel that is on disk.

Kernels refer to nothing outside themselves, so linking only puts the sections side by side in one
block and fills in the distances between them. A kernel may be several object files, one after the
other. Memory that code writes to, which only XLA's handler
has, lies behind all else, on pages of its own. LLVM's own loader handles object files that need
more, and all systems other than Linux on x86-64.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import struct
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

SUPPORTED = (
    sys.platform == "linux" and sys.maxsize > 1 << 32 and platform.machine().lower() == "x86_64"
)

# Constants of the ELF format and of its x86-64 supplement.
_RELOCATABLE, _X86_64 = 1, 62
_PROGBITS, _SYMTAB, _RELA, _NOBITS, _UNWIND = 1, 2, 4, 8, 0x70000001
_WRITE, _ALLOC = 1, 2
_DISTANCES = (2, 4)  # PC32, and PLT32, which is the same within one block


class _Section(NamedTuple):
    name: int
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    align: int
    entry: int


class Image(NamedTuple):
    """Linked code, which may lie anywhere in memory; ``fixed`` bytes of it are never written."""

    code: bytes
    symbols: dict[str, int]
    fixed: int


def objects(code: bytes) -> Iterator[bytes]:
    """Yields the object files of a kernel: LLVM writes the table of sections last."""
    while code:
        end = len(code)
        if code.startswith(b"\x7fELF\2\1"):
            size, count = struct.unpack_from("<HH", code, 58)
            end = struct.unpack_from("<Q", code, 40)[0] + size * count
        yield code[:end]
        code = code[end:]


class _Object:
    """An object file: its sections and symbols; the places of its sections in the image."""

    def __init__(self, code: bytes) -> None:
        self.code, self.places = code, dict[int, int]()
        (table,) = struct.unpack_from("<Q", code, 40)
        size, count = struct.unpack_from("<HH", code, 58)
        self.sections = [
            _Section(*struct.unpack_from("<IIQQQQIIQQ", code, table + i * size))
            for i in range(count)
        ]
        (listed,) = (section for section in self.sections if section.type == _SYMTAB)
        names = self.contents(self.sections[listed.link])
        self.symbols = [
            (names[name : names.index(b"\0", name)].decode(), where, value)
            for name, _, _, where, value, _ in struct.iter_unpack("<IBBHQQ", self.contents(listed))
        ]

    def contents(self, section: _Section) -> bytes:
        if section.type == _NOBITS:
            return bytes(section.size)
        return self.code[section.offset : section.offset + section.size]


def link(code: bytes) -> Image | None:
    """Links the object files of a kernel, and finds their symbols.

    Returns None if they need more than distances within the kernel: other relocations, or symbols
    from elsewhere.
    """
    kind, machine = struct.unpack_from("<HH", code, 16)
    if code[:6] != b"\x7fELF\2\1" or (kind, machine) != (_RELOCATABLE, _X86_64):
        return None
    files, image, fixed = list(map(_Object, objects(code))), bytearray(), 0
    for written in (0, _WRITE):
        for file, (number, section) in ((f, s) for f in files for s in enumerate(f.sections)):
            if not section.flags & _ALLOC or section.flags & _WRITE != written or not section.size:
                continue
            if section.type == _UNWIND:  # no exception crosses a kernel
                continue
            if section.type not in (_PROGBITS, _NOBITS):
                return None
            image += bytes(-len(image) % (section.align or 1))
            file.places[number] = len(image)
            image += file.contents(section)
        if not written:
            image += bytes(-len(image) % mmap.PAGESIZE)
            fixed = len(image)
    named = {
        name: file.places[where] + value
        for file in files
        for name, where, value in file.symbols
        if name and where in file.places
    }
    for file in files:
        for section in file.sections:
            if section.type != _RELA or section.info not in file.places:
                continue
            for offset, info, addend in struct.iter_unpack("<QQq", file.contents(section)):
                name, where, value = file.symbols[info >> 32]
                target = file.places[where] + value if where in file.places else named.get(name)
                if info & 0xFFFFFFFF not in _DISTANCES or target is None:
                    return None
                at = file.places[section.info] + offset
                struct.pack_into("<i", image, at, target + addend - at)
    return Image(bytes(image), named, fixed)


@lru_cache(maxsize=1)
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = pointer
    libc.mmap.argtypes = (pointer, size, number, number, number, ctypes.c_long)
    libc.mprotect.argtypes = (pointer, size, number)
    libc.munmap.argtypes = (pointer, size)
    return libc


def load(code: bytes, symbols: Sequence[str]) -> dict[str, int] | None:
    """Loads a kernel; returns the addresses of its functions, or None if LLVM must load it.

    The memory is never freed: a thread may still run its code, even while the interpreter exits.
    """
    linked = link(code) if SUPPORTED else None
    if linked is None:
        return None
    image, offsets, fixed = linked
    libc = _libc()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    base = libc.mmap(None, len(image), mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if base == ctypes.c_void_p(-1).value:
        return None
    ctypes.memmove(base, image, len(image))
    # No memory is ever writable and executable at once; some hardened systems refuse even this.
    if libc.mprotect(base, fixed, mmap.PROT_READ | mmap.PROT_EXEC):
        libc.munmap(base, len(image))
        return None
    return {symbol: base + offsets[symbol] for symbol in symbols}
