"""``ANYCELL_CHECK=1``: what a pass will touch, chunk by chunk, before the driver runs it.

The same walk as the driver's, in Python: the door's tables are laid out for each chunk and held
against the bounds of their arrays (``cpu.check``), and so is each operand of a product.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from anycell.engines import cpu
from anycell.engines.cpu import driver
from anycell.engines.cpu.check import Axes, Bounds, inside, product_axes, reach
from anycell.layer.arguments import Array, Host

if TYPE_CHECKING:
    from anycell.layer.recipe import Recipe, Row, View
    from anycell.layer.run import Run


def extent(host: Host, array: Array) -> Bounds:
    """The first byte of an array and that behind its last."""
    address, axes = host.pointer(array), zip(array.shape, host.strides(array), strict=True)
    for span in reach("", address, array.dtype.itemsize, 1, tuple(axes)):
        return span.first, span.last
    return address, address


def check_pass(recipe: Recipe, call: bytes, arrays: Sequence[Array], block: cpu.Block) -> None:
    """Checks that a pass stays within its arrays.

    Args:
        call: see ``driver.CALL``.
        arrays: of the recipe's slots, in order.
        block: the memory that is given back.

    Raises:
        AssertionError: naming the array, what would be touched, and what may be.
    """
    limits = [extent(recipe.host, array) for array in arrays]
    limits.append((block.address, block.address + block.size))
    addresses = array("Q", call)[len(driver.CALL) :]
    limits += [(0, 0)] * (len(addresses) - len(limits))  # numbers that point to no array
    limits += [limit for _, limit in recipe.kept]
    table = recipe.template[:]
    for at, address, offset in recipe.places:
        # As the native code adds: modulo 2**64.
        table[at] = (addresses[address] + offset + (1 << 63)) % (1 << 64) - (1 << 63)
    for run in recipe.runs:
        _check_run(recipe, run, table, limits)


def _check_run(recipe: Recipe, run: Run, table: array[int], limits: list[Bounds]) -> None:
    walks = [_Walk(recipe, one, table, limits) for one in (run, run.again) if one is not None]
    moved = walks[-1]
    steps = run.steps - run.begin
    for slot in range(-(-steps // run.segment_length) if steps else 1):
        begin = run.begin + slot * run.segment_length
        end = min(begin + run.segment_length, run.steps)
        moved.move(run, slot)
        if run.again is None and run.moves:
            walks[0].door(begin, 0)
            moved.rest(run)
        for walk in walks if run.again else ():
            walk.set(origin=begin, span=end - begin)
        for walk in walks:
            walk.chunks(begin, end)


class _Walk:
    """The walk through one of the passes, on a copy of its door's table."""

    def __init__(self, recipe: Recipe, run: Run, table: array[int], limits: list[Bounds]) -> None:
        self.recipe, self.run, self.limits = recipe, run, limits
        self.entries = table[run.base : run.base + len(run.form.entries)]
        self.bounds: tuple[dict[str, Bounds], list[dict[str, Bounds]]] = (
            self._of(run.shared), [self._of(views) for views in run.each]
        )  # fmt: skip
        self.products: list[tuple[int, dict[str, Any], tuple[View, ...]]] = run.products

    def _of(self, views: Any) -> dict[str, Bounds]:
        return {name: self.limits[self.recipe.place[view.slot]] for name, view in views.items()}

    def address(self, view: View) -> int:
        """The address of a view's first element. Its array has no negative strides."""
        return self.limits[self.recipe.place[view.slot]][0] + view.offset

    def set(self, **values: int) -> None:
        """Sets entries of the whole call."""
        for name, value in values.items():
            self.entries[self.run.kernel.shared[name]] = value

    def move(self, run: Run, slot: int) -> None:
        """Sets what the driver sets before a segment."""
        self.before = self.entries[:], [named.copy() for named in self.bounds[1]]
        for row in run.moves:
            at, base = self._moved(row), row["base"]
            first = base if isinstance(base, int) else self.address(base)
            self.entries[at] = first + slot * row["step"]  # type: ignore[operator]
        for d, name, view in run.moved:
            self.bounds[1][d] |= self._of({name: view})

    def rest(self, run: Run) -> None:
        """Sets what the driver sets after it has the states before a segment."""
        for row in run.moves:
            at = self._moved(row)
            self.entries[at] = self.before[0][at]
        self.bounds[1][:] = self.before[1]

    def _moved(self, row: Row) -> int:
        """The entry that a row of ``driver.MOVE`` sets."""
        return row["place"].offset // 8 - self.run.base  # type: ignore[union-attr]

    def door(self, begin: int, count: int) -> None:
        """Checks a call of the door."""
        self.set(begin=begin, count=count)
        cpu.check.check(self.run.kernel, self.entries, self.bounds)

    def chunks(self, begin: int, end: int) -> None:
        """Checks the chunks between two steps of the forward pass."""
        run = self.run
        for done in range(begin, max(end, begin + 1), run.form.chunk):
            count = min(run.form.chunk, end - done)
            self.door(run.steps - done - count if run.backward else done, count)
            for d, row, views in self.products if count else ():
                self.product(d, row, views, done, count)

    def product(
        self, d: int, row: dict[str, Any], views: tuple[View, ...], done: int, count: int
    ) -> None:
        """Checks the operands of a product."""
        run, at = self.run, self.run.kernel.shared
        reverse, steps = run.options.reverse[d], run.steps
        time = steps - done - count if reverse else done
        origin, span = self.entries[at["origin"]], self.entries[at["span"]]
        window = time - (steps - origin - span if reverse else origin)
        chunk = count * run.batch
        rows = chunk if row["along"] == 0 else row["rows"]
        inner, columns = chunk if row["along"] == 2 else row["inner"], row["columns"]
        axes: Mapping[str, Axes]
        if row["kind"] == driver.SUM:
            axes = {"a": ((rows, row["a_rows"]), (columns, 1)), "c": ((columns, 1),)}
        elif row["kind"] == driver.GATHER:
            of_x = (count, row["a_inner"]), (run.batch, row["a_rows"]), (columns, 1)
            axes = {"a": of_x, "b": ((rows, 1),), "c": ((rows, row["c_rows"]), (columns, 1))}
        else:
            axes = product_axes({**row, "rows": rows, "inner": inner})
        for name, view in zip("abc", views, strict=True):
            if name in axes and view.slot >= 0:
                first = self.address(view) + time * view.time + window * view.window
                for touched in reach(name, first, view.size, 1, axes[name]):
                    inside(touched, self.limits[self.recipe.place[view.slot]])
