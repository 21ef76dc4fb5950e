"""``ANYCELL_CHECK=1``: checks that a native call stays within the arrays that it is given.

Kernels do no bounds checks. With this switch, every address of an argument table comes with the
bounds of the array that it points into. The bytes that the kernel will touch follow from the table
alone. Just before each call, of any caller, these bytes are asserted to lie within the bounds.
The tests run with this switch.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from anycell import environment
from anycell.engines.cpu import gemm
from anycell.plan import scales_of

if TYPE_CHECKING:
    from anycell.engines.cpu.kernel import Kernel

ON = environment.switch("ANYCELL_CHECK", False)

Axes = tuple[tuple[int, int], ...]  # counts and strides
Bounds = tuple[int, int]  # the addresses of the first byte, and of the byte after the last
# Bounds of a call's arrays, by the names of entries: of the whole call, and of each direction.
CallBounds = tuple[dict[str, Bounds], list[dict[str, Bounds]]]


class Span(NamedTuple):
    """The byte addresses [first, last) of an array that a kernel touches, and its element size."""

    name: str
    first: int
    last: int
    size: int


def check(kernel: Kernel, entries: array[int], bounds: CallBounds | None) -> None:
    """Checks that a call stays within its arrays. The door fills the tables of the kernel and of
    packing; the bytes that the call will touch are then compared with the bounds.

    Args:
        entries: the call's table.
        bounds: of the arrays that the table's addresses point into.

    Raises:
        AssertionError: names the argument, the bytes it would touch, and the array's size.
    """
    assert bounds is not None, "the bounds of the call's arrays are missing"
    shared, each = bounds
    at = kernel.shared
    entries[at["lay_out"]] = 1
    kernel.door(entries.buffer_info()[0])
    entries[at["lay_out"]] = 0
    for d in range(entries[at["directions"]]):
        here = {name: entries[kernel.first(d) + place] for name, place in kernel.each.items()}
        whole = {name: entries[place] for name, place in at.items()}
        known = {**shared, **each[d]}
        for span in touched(kernel, whole, here, _laid_out(kernel, entries, d)):
            inside(span, known.get(span.name))


def check_product(
    sizes: tuple[int, int, int], entries: array[int], bounds: tuple[Bounds, ...]
) -> None:
    """Checks that a matmul stays within its arrays.

    Args:
        sizes: bytes per element of A, B and C.
        entries: the table of the call, see ``gemm``.
        bounds: of A, B and C.

    Raises:
        AssertionError: as in ``check``.
    """
    table = dict(zip(gemm.ENTRIES, entries, strict=True))
    operands = product_axes(table).items()
    for (name, axes), size, limits in zip(operands, sizes, bounds, strict=True):
        for span in reach(name, table[name], size, 1, axes):
            inside(span, limits)


def product_axes(table: Mapping[str, int]) -> Mapping[str, Axes]:
    """Returns the axes of A, B and C of a matmul; A and B must each have an axis of stride 1."""
    rows, columns, inner = (table[name] for name in ("rows", "columns", "inner"))
    axes = {
        "a": ((rows, table["a_rows"]), (inner, table["a_inner"])),
        "b": ((inner, table["b_inner"]), (columns, table["b_columns"])),
        "c": ((rows, table["c_rows"]), (columns, 1)),
    }
    for name, ((_, first), (_, second)) in axes.items():
        dense = 1 in (first, second) or not (rows and columns and inner)
        assert dense, f"{name}: strides {first} and {second}, neither is 1"
    return axes


def _laid_out(kernel: Kernel, entries: array[int], d: int) -> dict[str, int]:
    """A kernel's own table, as the door has filled it."""
    scratch = entries[kernel.shared["scratch"]]
    address = ctypes.c_int64.from_address(scratch + 8 * (1 + d)).value
    table = (ctypes.c_int64 * len(kernel.index)).from_address(address)
    return {name: table[place] for name, place in kernel.index.items()}


def inside(span: Span, bounds: Bounds | None) -> None:
    """Checks that a span lies within bounds.

    Raises:
        AssertionError: as in ``check``.
    """
    name, first, last, size = span
    assert bounds is not None, f"{name}: the bounds of its array are missing"
    low, high = bounds
    assert low <= first <= last <= high, (
        f"{name}: the kernel would touch bytes {first - low} to {last - low} of an array of "
        f"{high - low} bytes"
    )
    whole = first == last or first % size == 0
    assert whole, f"{name}: address {first:#x} is not a multiple of {size} bytes"


def reach(name: str, address: int, size: int, width: int, axes: Axes) -> Iterator[Span]:
    """Yields the bytes of ``width`` elements along (count, stride) axes; nothing for address 0."""
    if address and all(count > 0 for count, _ in axes):
        far = [(count - 1) * stride for count, stride in axes]
        first, last = sum(min(0, f) for f in far), sum(max(0, f) for f in far) + width
        yield Span(name, address + size * first, address + size * last, size)


def touched(
    kernel: Kernel, call: Mapping[str, int], each: Mapping[str, int], table: Mapping[str, int]
) -> Iterator[Span]:
    """Yields the bytes that a call touches in one direction, named by the call's entries.

    Args:
        call, each: the call's entries for all directions, and for this direction.
        table: the kernel's own entries.
    """
    steps, batch = table["steps"], table["batch"]
    groups = -(-batch // max(1, table["row_group"]))
    for argument, described in kernel.arrays.items():
        name, address = argument.removeprefix("param "), table[argument]
        size = described.number.bytes
        width = table["inputs"] if argument == "input" else described.width
        row = table.get(f"{argument} rows", width)
        if argument == "gates" and table["inputs"]:
            name = "scratch"  # a row of zeros
        if "T" in described.axes:
            slots = steps
            if f"{argument} turns" in table:  # forward: before each step, and after the last
                slots = 2 if table[f"{argument} turns"] else steps + 1
            axes = (slots, table[f"{argument} steps"]), (batch, row)
            yield from reach(name, address, size, width, axes)
            after = table.get(f"{argument} next", 0)  # backward: the state after each step
            yield from reach(name, address and address + size * after, size, width, axes)
        else:
            count = {"B": batch, "R": groups, "": 1}[described.axes]
            yield from reach(name, address, size, width, ((count, row),))
    if batch:
        size = call["scratch_bytes"]
        yield from reach("scratch", call["scratch"], 1, size, ())
        yield from reach("packed", call["packed"], 1, call["packed_bytes"], ())
    if call["pack"]:
        yield from _weights(kernel, call, each)
    # The door itself copies initial and final states; backward, gradients of the final states.
    for entry, described in kernel.copied.items():
        if each.get(entry):
            columns = described.width, each[f"{entry} columns"]
            axes = (batch, each[f"{entry} rows"]), columns
            yield from reach(entry, each[entry], described.number.bytes, 1, axes)


def _weights(kernel: Kernel, call: Mapping[str, int], each: Mapping[str, int]) -> Iterator[Span]:
    """Yields the bytes that packing reads."""
    shapes = dict(kernel.weights)
    if call.get("inputs"):
        shapes["weight_ih"] = 1, kernel.plan.gates_width, call["inputs"]
    for name, shape in shapes.items():
        if call["packed"]:
            strides = (each[f"{name} {axis}"] for axis in ("heads", "rows", "columns"))
            axes = tuple(zip(shape, strides, strict=True))
            weights = kernel.plan.types.weights
            yield from reach(name, each[name], weights.bytes, 1, axes)
            if kernel.plan.types.quantized:
                scales, outputs = scales_of(name), math.prod(shape[:-1])
                yield from reach(scales, each[scales], kernel.itemsize, outputs, ())
