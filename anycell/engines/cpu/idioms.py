"""Operations that are one instruction on some machines, and several or none on others: conversion
of 16-bit numbers, products of 8-bit and 16-bit numbers, and an approximate reciprocal.
"""

from __future__ import annotations

from anycell.engines.cpu.ir import Builder, Target, Value, constant, shape, vector, with_element


def widen(b: Builder, x: Value, number: str) -> Value:
    """Converts reals of type ``number`` to the real type of the module; ``x`` holds their bits."""
    if number == b.real:
        return b.bitcast(x, with_element(x.type, number))
    if number == "bfloat":
        bits = b.zext(x, "i32") << 16
        return b.bitcast(bits, with_element(x.type, "float"))
    if b.target.half:
        return b.fpext(b.bitcast(x, with_element(x.type, "half")), "float")
    # A product adjusts the exponent; it is exact for subnormal numbers too.
    bits = b.zext(x, "i32")
    size, sign = (bits & 0x7FFF) << 13, (bits & 0x8000) << 16
    real = b.bitcast(size, with_element(x.type, "float")) * 2.0**112
    finite = size < (0x7C00 << 13)
    size = b.select(finite, b.bits(real), size | (0xFF << 23))
    return b.bitcast(size | sign, with_element(x.type, "float"))


def narrow(b: Builder, x: Value, number: str) -> Value:
    """The inverse of ``widen``; rounds to nearest, ties to even."""
    if number == b.real:
        return b.bits(x)
    if number == "bfloat" and b.target.bfloat:
        return b.bits(b.fptrunc(x, "bfloat"))
    bits, nan = b.bits(x), b.compare("uno", x, x)
    if number == "bfloat":
        odd = bits >> 16 & 1
        rounded = (bits + 0x7FFF + odd) >> 16
        quiet = bits >> 16 | 0x40
        return b.trunc(b.select(nan, quiet, rounded), "i16")
    if b.target.half:
        return b.bits(b.fptrunc(x, "half"))
    size, sign = bits & 0x7FFFFFFF, (bits & (1 << 31)) >> 16
    odd = size >> 13 & 1
    normal = (size + (0xFFF - (112 << 23)) + odd) >> 13
    # Adding 1/2 leaves the subnormal number in the lowest bits of the sum.
    small = b.bitcast(size, x.type) + 0.5
    subnormal = b.bits(small) - (126 << 23)
    rounded = b.select(size < (113 << 23), subnormal, normal)
    # Halfway between the largest number and the next power of two, and above, it is infinite.
    infinite = size >= 0x477FF000
    rounded = b.select(infinite, 0x7C00, rounded)
    rounded = b.select(nan, 0x7E00, rounded)
    return b.trunc(rounded | sign, "i16")


def near_reciprocal(b: Builder, x: Value) -> Value | None:
    """1 / x with a relative error below 2^-14; None if no instruction is faster than a division."""
    lanes, kind = shape(x.type)
    if not b.target.x86 or b.target.bits < 512 or kind != "float" or lanes not in (16, 32):
        return None
    all_lanes, zeros = constant(-1, "i16"), constant(0.0, vector(16, "float"))
    total: Value | None = None
    for first in range(0, lanes, 16):
        part = x if lanes == 16 else b.shuffle(x, None, range(first, first + 16))
        name = "llvm.x86.avx512.rcp14.ps.512"
        near = b.intrinsic(name, part, zeros, all_lanes, overload=())
        total = near if total is None else b.shuffle(total, near, range(first + 16))
    return total


def dot(b: Builder, total: Value, unsigned: Value, signed: Value, bits: int = 8) -> Value:
    """Adds to each lane of ``total`` the four products of its unsigned bytes and its signed bytes.
    The sum is exact unless the lane overflows. Unsigned bytes of 7 ``bits`` take less time.
    """
    if b.target.dot and b.target.x86:
        return b.intrinsic(b.target.dot, total, unsigned, signed, overload=())
    if b.target.dot:
        return _dot_arm(b, total, unsigned, signed, bits)
    pairs = vector(2 * shape(total.type)[0], "i16")
    if b.target.x86 and b.target.bits > 128 and bits == 7:  # a pair of products has 16 bits
        names = {256: ("avx2.pmadd.ub.sw", "avx2.pmadd.wd"),
                 512: ("avx512.pmaddubs.w.512", "avx512.pmaddw.d.512")}  # fmt: skip
        numbers = (b.bitcast(x, vector(4 * b.lanes, "i8")) for x in (unsigned, signed))
        ones = b.bitcast(b.value(0x10001, total.type), pairs)
        of_pairs, of_four = (f"llvm.x86.{name}" for name in names[b.target.bits])
        summed = b.intrinsic(of_pairs, *numbers, returns=pairs, overload=())
        return total + b.intrinsic(of_four, summed, ones, returns=total.type, overload=())
    if b.target.x86:
        # Bytes 0 and 2 form one pair of 16-bit numbers, bytes 1 and 3 another.
        name = {128: "sse2.pmadd.wd", 256: "avx2.pmadd.wd", 512: "avx512.pmaddw.d.512"}
        halves = b.bitcast(signed, pairs)
        operands = (
            (unsigned & 0x00FF00FF, b.ashr(halves << 8, 8)),
            (unsigned >> 8 & 0x00FF00FF, b.ashr(halves, 8)),
        )
        for left, right in operands:
            products = b.intrinsic(
                f"llvm.x86.{name[b.target.bits]}", b.bitcast(left, pairs), right,
                returns=total.type, overload=(),
            )  # fmt: skip
            total += products
        return total
    for byte in range(4):
        left = unsigned >> (8 * byte) & 0xFF
        right = b.ashr(signed << (24 - 8 * byte), 24)
        total += left * right
    return total


def _dot_arm(b: Builder, total: Value, unsigned: Value, signed: Value, bits: int) -> Value:
    """``dot`` by an ARM instruction, which on some machines takes only signed bytes."""
    numbers = vector(4 * shape(total.type)[0], "i8")

    def add(total: Value, left: Value) -> Value:
        operands = (b.bitcast(x, numbers) for x in (left, signed))
        return b.intrinsic(b.target.dot, total, *operands, returns=total.type, overload=())

    if "usdot" in b.target.dot or bits == 7:
        return add(total, unsigned)
    # An unsigned byte is 128 more than the signed byte with the opposite top bit.
    of_128 = add(b.value(0, total.type), b.value(0x80808080, total.type))
    return add(total, unsigned ^ 0x80808080) - of_128


def in_pairs(target: Target, number: str) -> bool:
    """Whether one instruction adds two products of numbers of this type."""
    return bool(target.pairs) and number == "bfloat"


def dot_pairs(b: Builder, total: Value, left: Value, right: Value) -> Value:
    """Adds to each lane of ``total`` the two products of its bfloat16 numbers. Subnormal numbers
    count as 0.
    """
    assert b.target.pairs, b.target.name
    pairs = vector(2 * shape(total.type)[0], "bfloat")
    operands = (b.bitcast(x, pairs) for x in (left, right))
    return b.intrinsic(b.target.pairs, total, *operands, returns=total.type, overload=())
