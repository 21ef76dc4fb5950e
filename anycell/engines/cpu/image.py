"""Loads object files as executable code without LLVM. Importing LLVM takes longer than everything
else that a process does to get a kernel that is on disk.

Kernels refer to nothing outside themselves, so linking only puts the sections side by side in one
block and fills in the distances between them. Memory that code writes to, which only XLA's handler
has, lies behind all else, on pages of its own. LLVM's own loader handles object files that need
more, and all systems other than Linux on x86-64.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import struct
import sys
from collections.abc import Sequence
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


def link(code: bytes) -> Image | None:
    """Links an object file, and finds its symbols.

    Returns None if the file needs more than distances within itself: other relocations, or symbols
    from elsewhere.
    """
    kind, machine = struct.unpack_from("<HH", code, 16)
    if code[:6] != b"\x7fELF\2\1" or (kind, machine) != (_RELOCATABLE, _X86_64):
        return None
    (table,) = struct.unpack_from("<Q", code, 40)
    size, count = struct.unpack_from("<HH", code, 58)
    sections = [
        _Section(*struct.unpack_from("<IIQQQQIIQQ", code, table + i * size)) for i in range(count)
    ]

    def contents(section: _Section) -> bytes:
        if section.type == _NOBITS:
            return bytes(section.size)
        return code[section.offset : section.offset + section.size]

    image, places, fixed = bytearray(), {}, 0
    for written in (0, _WRITE):
        for number, section in enumerate(sections):
            if not section.flags & _ALLOC or section.flags & _WRITE != written or not section.size:
                continue
            if section.type == _UNWIND:  # no exception crosses a kernel
                continue
            if section.type not in (_PROGBITS, _NOBITS):
                return None
            image += bytes(-len(image) % (section.align or 1))
            places[number] = len(image)
            image += contents(section)
        if not written:
            image += bytes(-len(image) % mmap.PAGESIZE)
            fixed = len(image)
    (listed,) = (section for section in sections if section.type == _SYMTAB)
    symbols = list(struct.iter_unpack("<IBBHQQ", contents(listed)))
    for section in sections:
        if section.type != _RELA or section.info not in places:
            continue
        for offset, info, addend in struct.iter_unpack("<QQq", contents(section)):
            _, _, _, where, value, _ = symbols[info >> 32]
            if info & 0xFFFFFFFF not in _DISTANCES or where not in places:
                return None
            at = places[section.info] + offset
            struct.pack_into("<i", image, at, places[where] + value + addend - at)
    names = contents(sections[listed.link])
    named = {
        names[name : names.index(b"\0", name)].decode(): places[where] + value
        for name, _, _, where, value, _ in symbols
        if name and where in places
    }
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
    """Loads an object file; returns the addresses of its functions, or None if LLVM must load it.

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
