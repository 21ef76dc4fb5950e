"""A module of WebAssembly that runs, from an object file: no linker is needed.

LLVM writes addresses as they are where the file is loaded alone, with its data from address 0 on.
All that it lacks are exports. Sines of large angles import a product of 128 bits, which the script
has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

CUSTOM, IMPORTS, FUNCTIONS, EXPORTS, DATA = 0, 2, 3, 7, 11  # numbers of sections
FUNCTION = b"\0"  # what a name of a function is followed by
AFTER_EXPORTS = 8, 9, 12, 10, DATA  # sections follow each other in a fixed order


def runnable(code: bytes, functions: Sequence[str]) -> tuple[bytes, int]:
    """Returns the module, and the end of its data in memory.

    Args:
        code: the object file.
        functions: the names under which its last functions are exported.
    """
    parts, end, added, defined = [code[:8]], 0, False, 0
    for number, content in _sections(code):
        if number == CUSTOM:
            continue
        if number == IMPORTS:
            defined += content.count(_text("__multi3") + FUNCTION)
        if number == FUNCTIONS:
            defined += _read(content, 0)[0]
        if number in AFTER_EXPORTS and not added:
            named = enumerate(functions, defined - len(functions))
            exports = (_text(name) + FUNCTION + _leb(k) for k, name in named)
            parts.append(_section(EXPORTS, _leb(len(functions)) + b"".join(exports)))
            added = True
        parts.append(_section(number, content))
        end = _end(content) if number == DATA else end
    return b"".join(parts), end


def _sections(code: bytes) -> Iterator[tuple[int, bytes]]:
    at = 8
    while at < len(code):
        size, begin = _read(code, at + 1)
        yield code[at], code[begin : begin + size]
        at = begin + size


def _end(content: bytes) -> int:
    """The end of the last segment of data: each has a 0, ``i32.const`` address, ``end``, bytes."""
    (count, at), end = _read(content, 0), 0
    for _ in range(count):
        address, at = _read(content, at + 2)
        size, at = _read(content, at + 1)
        end, at = max(end, address + size), at + size
    return end


def _read(code: bytes, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, the lowest first, and where it ends."""
    value, shift = 0, 0
    while True:
        value |= (code[at] & 127) << shift
        shift, at = shift + 7, at + 1
        if code[at - 1] < 128:
            return value, at


def _leb(value: int) -> bytes:
    """The number in this form."""
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + _leb(value >> 7)


def _text(name: str) -> bytes:
    return _leb(len(name)) + name.encode()


def _section(number: int, content: bytes) -> bytes:
    return bytes([number]) + _leb(len(content)) + content
