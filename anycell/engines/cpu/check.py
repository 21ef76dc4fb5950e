"""``ANYCELL_CHECK=1``: what a native call will touch is held against the arrays that it was given.

Kernels do no bounds checks. With this switch every address of an argument table comes with the
bounds of the array that it points into. The bytes that the kernel is to touch follow from the table
alone, and must lie within them: this is asserted just before the call, whoever filled the table.
The tests run under it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from anycell import environment

if TYPE_CHECKING:
    from anycell.engines.cpu.kernel import Kernel

ON = environment.switch("ANYCELL_CHECK", False)

Bounds = tuple[int, int]  # the address of the first byte, and that behind the last


class Span(NamedTuple):
    """What a kernel touches of an array: the first byte, that behind the last, and the size of an
    element.
    """

    name: str
    first: int
    last: int
    size: int


def check(
    kernel: Kernel,
    index: Mapping[str, int],
    entries: Sequence[int],
    bounds: Mapping[str, Bounds],
    threads: int,
) -> None:
    """That a call stays within its arrays.

    Args:
        index, entries: of its argument table: the place of each name, and what is there.
        bounds: of the arrays that addresses point into.
        threads: that run it.

    Raises:
        AssertionError: naming the argument, what the kernel would touch, and what it may.
    """
    table = {name: entries[place] for name, place in index.items()}
    for span in touched(kernel, table, threads):
        inside(span, bounds.get(span.name))


def inside(span: Span, bounds: Bounds | None) -> None:
    """That a span lies within bounds.

    Raises:
        AssertionError: as ``check``.
    """
    name, first, last, size = span
    assert bounds is not None, f"{name}: nobody said where its array lies"
    low, high = bounds
    assert low <= first <= last <= high, (
        f"{name}: the kernel would touch bytes {first - low} to {last - low} of an array of "
        f"{high - low}"
    )
    whole = first == last or first % size == 0
    assert whole, f"{name}: address {first:#x} is no multiple of {size} bytes"


def reach(
    name: str, address: int, size: int, width: int, axes: tuple[tuple[int, int], ...]
) -> Iterator[Span]:
    """``width`` elements of so many bytes along axes of (count, stride); nothing of no address."""
    if address and all(count > 0 for count, _ in axes):
        far = [(count - 1) * stride for count, stride in axes]
        first, last = sum(min(0, f) for f in far), sum(max(0, f) for f in far) + width
        yield Span(name, address + size * first, address + size * last, size)


def touched(kernel: Kernel, table: Mapping[str, int], threads: int) -> Iterator[Span]:
    """What a call touches."""
    steps, batch, real = table["steps"], table["batch"], kernel.itemsize
    groups = -(-batch // max(1, table["row_group"]))
    for name in ("mask", "resets"):
        yield from reach(name, table[name], 1, batch, ((steps, table[f"{name}_t"]),))
    for name, (kind, width) in kernel.extents.items():
        address, row = table[name], table.get(f"{name}_b", width)
        if kind == "steps":
            slots = steps
            if f"{name}_flip" in table:  # forward: the state before each step, and after the last
                slots = 2 if table[f"{name}_flip"] else steps + 1
            axes = (slots, table[f"{name}_t"]), (batch, row)
            width = table["inputs"] if name == "input" else width
            yield from reach(name, address, real, width, axes)
            after = table.get(f"{name}_next", 0)  # backward: the state after each step
            yield from reach(name, address and address + real * after, real, width, axes)
        else:
            count = {"rows": batch, "groups": groups, "once": 1}[kind]
            yield from reach(name, address, real, width, ((count, row),))
    if not batch:
        return
    places = ((threads, table["workspace_stride"]),)
    yield from reach("workspace", table["workspace"], 1, kernel.workspace(batch), places)
    for k, elements in enumerate(kernel.packed_elements):
        yield from reach(f"weights{k}", table[f"weights{k}"], real, elements, ())
    if table.get("weights_x"):
        elements = kernel.projection(table["inputs"]).packed_elements
        yield from reach("weights_x", table["weights_x"], real, elements, ())
