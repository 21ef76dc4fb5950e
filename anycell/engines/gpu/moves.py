"""Kernels that copy, fill and add arrays: what a pass does between its large kernels and matmuls.

So a recipe needs no other functions of the driver than launches, which a graph can capture too.
"""

from __future__ import annotations

import functools

from anycell.engines.gpu.text import Printed, source

ELEMENTS = 1024  # of a program
AXES = 3
# bfloat16 from and to float32, to nearest and ties to even, in integers: Triton's interpreter cuts
# bits off, and takes subnormal numbers for others.
_WIDEN = "({}.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)"
_ROUND = """\
    bits = value.to(tl.uint32, bitcast=True)
    bits = tl.where(value == value, bits + 32767 + ((bits >> 16) & 1), 0x7FC00000)
    value = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)"""


@functools.cache
def print_move(to: str, of: str | None, masked: bool = False, adds: bool = False) -> Printed:
    """The kernel that assigns to an array ``y`` of three axes.

    Args:
        to, of: Triton's types of its numbers and of those of the array ``x`` that it reads; without
            ``x`` it fills ``y`` with the float32 number that has these ``bits``.
        masked: whether flags ``m``, one for each row of the last axis, say where to put zeros.
        adds: whether it adds to ``y``.
    """
    arguments = {"y": f"*{to}"} | ({"x": f"*{of}"} if of else {"bits": "i32"})
    arguments |= {"m": "*u8"} if masked else {}
    names = ["count", "n1", "n2", *(f"{a}{i}" for a in ("yx" if of else "y") for i in range(AXES))]
    # Unsigned, as in ``print_fill``, so that their values make no further kernels.
    arguments |= dict.fromkeys(names, "u64")
    wide = of != to or adds  # whether it computes in float32
    lines = [
        *(f"{name} = {name}.to(tl.int64)" for name in names),
        f"k = tl.program_id(0).to(tl.int64) * {ELEMENTS} + tl.arange(0, {ELEMENTS})",
        "inside = k < count",
        "row, column = k // n2, k % n2",
        "y_at = y + (row // n1 * y0 + row % n1 * y1 + column * y2)",
    ]
    if of:
        where = "x + (row // n1 * x0 + row % n1 * x1 + column * x2)"
        lines.append(f"value = {_load(where, of if wide else None)}")
    else:
        lines += [
            f"value = tl.zeros([{ELEMENTS}], tl.int32) + bits",
            "value = value.to(tl.float32, bitcast=True)",
        ]
    if masked:
        lines.append("value = tl.where(tl.load(m + row, mask=inside, other=0) != 0, value, 0.0)")
    if adds:
        lines.append(f"value += {_load('y_at', to)}")
    body = "\n".join(f"    {line}" for line in lines)
    if to == "bf16" and wide:
        body += f"\n{_ROUND}"
    body += "\n    tl.store(y_at, value, mask=inside)"
    text = source("move", "Copies, fills or adds an array.", arguments, body)
    return Printed("move", text, tuple(arguments.items()), (1, ELEMENTS), "", 4)


@functools.cache
def print_sum() -> Printed:
    """The kernel that sums the rows of a float32 matrix ``x``, which is dense."""
    arguments = {"y": "*fp32", "x": "*fp32", "rows": "i32", "columns": "u64"}
    body = f"""\
    k = tl.program_id(0).to(tl.int64) * {ELEMENTS} + tl.arange(0, {ELEMENTS})
    columns = columns.to(tl.int64)
    total = tl.zeros([{ELEMENTS}], tl.float32)
    for row in range(0, rows):
        total += tl.load(x + (row * columns + k), mask=k < columns, other=0.0)
    tl.store(y + k, total, mask=k < columns)"""
    text = source("sum_rows", "Sums the rows of a matrix.", arguments, body)
    return Printed("sum_rows", text, tuple(arguments.items()), (1, ELEMENTS), "", 4)


@functools.cache
def print_draws() -> Printed:
    """The kernel that fills the table of random masks, ``keep`` in ``library``, from ``words`` in
    memory: the seed, the low word first, and the stream.
    """
    arguments = {"table": "*i64", "words": "*u32"} | dict.fromkeys(
        ("stream", "time", "step"), "u64"
    )
    body = """\
    low, high = tl.load(words).to(tl.int64), tl.load(words + 1).to(tl.int64)
    tl.store(table, low | (high << 32))
    tl.store(table + 1, tl.load(words + 2).to(tl.int64) + stream.to(tl.int64))
    tl.store(table + 2, time.to(tl.int64))
    tl.store(table + 3, step.to(tl.int64))"""
    text = source("draws", "Fills the table of random masks.", arguments, body)
    return Printed("draws", text, tuple(arguments.items()), (1, 1), "", 1)


def _load(where: str, kind: str | None) -> str:
    """Loads a tile; as float32 if the type of its numbers is given."""
    text = f"tl.load({where}, mask=inside, other=0.0)"
    if kind == "bf16":
        return _WIDEN.format(text)
    return f"{text}.to(tl.float32)" if kind else text
