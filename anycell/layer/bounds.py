"""Checks the memory that a pass will touch, chunk by chunk, before it runs: ``ANYCELL_CHECK=1``.

Python repeats the walk of the driver, on the same tables. For each chunk it compares the arrays of
the door's table and each operand of a product with the bounds of their memory (``cpu.check``).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence

from anycell.engines import cpu
from anycell.engines.cpu import driver
from anycell.engines.cpu.check import Axes, Bounds, inside, product_axes, reach
from anycell.layer.arguments import Array
from anycell.layer.framework import extent
from anycell.layer.recipe import Placed, Recipe


def check_pass(recipe: Recipe, call: bytes, arrays: Sequence[Array], block: cpu.Block) -> None:
    """Checks that a pass stays within its arrays.

    Args:
        call: see ``driver.OBJECTS`` and ``driver.CALL``; with addresses.
        arrays: of the recipe's slots, in order.
        block: the scratch memory of the call.

    Raises:
        AssertionError: naming the array, the bytes that the pass would touch, and its bounds.
    """
    addresses = array("Q", call)[len(driver.OBJECTS) + len(driver.CALL) :]
    limits = [extent(recipe.host, array) for array in arrays]
    limits.append((block.address, block.address + block.size))
    limits += [(0, 0)] * (len(addresses) - len(limits))  # numbers that point to no array
    limits += [limit for _, limit in recipe.kept]
    walk = _Walk(recipe, block.address + recipe.table, addresses, limits)
    for run in recipe.passes:
        walk.run(run)


class _Walk:
    """The walk, on tables that are filled in as for the driver. Its methods correspond to those of
    ``driver.Driver``.

    Args:
        table: the address that the tables will have.
        addresses, limits: of arrays, by their numbers in ``recipe.arrays``.
    """

    def __init__(
        self, recipe: Recipe, table: int, addresses: Sequence[int], limits: Sequence[Bounds]
    ) -> None:
        self.table, self.entries = table, recipe.template[:]
        for at, number, offset in recipe.places:
            # Modulo 2**64, as in native code.
            self.entries[at] = (addresses[number] + offset + (1 << 63)) % (1 << 64) - (1 << 63)
        self.limits = {at: limits[number] for at, number in recipe.arrays.items()}

    def row(self, names: Iterable[str], at: int) -> tuple[dict[str, int], dict[str, Bounds]]:
        """A row of the tables by the names of its entries, and the bounds of the arrays whose
        addresses it holds.
        """
        places = {name: at + i for i, name in enumerate(names)}
        return (
            {name: self.entries[place] for name, place in places.items()},
            {name: self.limits[place] for name, place in places.items() if place in self.limits},
        )

    def set(self, run: Placed, **values: int) -> None:
        """Sets entries of the door's table."""
        for name, value in values.items():
            self.entries[run.base + run.kernel.shared[name]] = value

    def run(self, run: Placed) -> None:
        """Checks a pass, segment by segment."""
        table, _ = self.row(driver.PASS, run.table)
        first, last, segment = table["first"], table["last"], table["segment"]
        for slot in range(max(1, -(-(last - first) // max(1, segment)))):
            begin = first + slot * segment
            end = min(begin + segment, last)
            if table["moves"]:
                self.move(run, "base", slot)
                if not table["backward"]:
                    self.door(run, begin, 0)
                    self.move(run, "rest", 0)
            if run.again is not None:
                for placed in (run, run.again):
                    self.set(placed, origin=begin, span=end - begin)
                self.chunks(run.again, begin, end)
            self.chunks(run, begin, end)

    def move(self, run: Placed, name: str, slot: int) -> None:
        """Sets the entries that change before a segment."""
        for i in range(self.row(driver.PASS, run.table)[0]["moves"]):
            at = run.table + len(driver.PASS) + i * len(driver.MOVE)
            move, limits = self.row(driver.MOVE, at)
            place = (move["place"] - self.table) // 8
            self.entries[place] = move[name] + slot * move["step"]
            if name in limits:
                self.limits[place] = limits[name]

    def door(self, run: Placed, begin: int, count: int) -> None:
        """Checks a call of the door."""
        self.set(run, begin=begin, count=count)
        kernel, base = run.kernel, run.base
        _, shared = self.row(kernel.shared, base)
        directions = [self.row(kernel.each, base + first)[1] for first in run.firsts]
        entries = self.entries[base : base + kernel.first(len(run.firsts))]
        cpu.check.check(kernel, entries, (shared, directions))

    def chunks(self, run: Placed, begin: int, end: int) -> None:
        """Checks the chunks between two steps of the forward pass."""
        table, _ = self.row(driver.PASS, run.table)
        first = run.table + len(driver.PASS) + table["moves"] * len(driver.MOVE)
        for done in range(begin, max(end, begin + 1), table["chunk"]):
            count = min(table["chunk"], end - done)
            self.door(run, table["steps"] - done - count if table["backward"] else done, count)
            for i in range(table["before"] + table["after"]) if count else ():
                self.product(run, first + i * len(driver.PRODUCT), done, count)

    def product(self, run: Placed, at: int, done: int, count: int) -> None:
        """Checks the operands of a product."""
        row, limits = self.row(driver.PRODUCT, at)
        of_call, _ = self.row(run.kernel.shared, run.base)
        origin, span, steps, batch = (of_call[n] for n in ("origin", "span", "steps", "batch"))
        time = steps - done - count if row["reverse"] else done
        window = time - (steps - origin - span if row["reverse"] else origin)
        along, kind, types = row["along"], row["kind"], run.plan.types
        if along != 1:
            row["inner" if along else "rows"] = count * batch
        rows, columns = row["rows"], row["columns"]
        sizes = types.storage.bytes, types.weights.bytes, types.accumulate.bytes
        axes: Mapping[str, Axes]
        if kind == driver.SUM:
            axes = {"a": ((rows, row["a_rows"]), (columns, 1)), "c": ((columns, 1),)}
        elif kind == driver.GATHER:
            of_x = (count, row["a_inner"]), (batch, row["a_rows"]), (columns, 1)
            axes = {"a": of_x, "b": ((rows, 1),), "c": ((rows, row["c_rows"]), (columns, 1))}
            axes = {**axes, "scales": ((rows, row["b_columns"]), (columns, 1))}
            sizes = types.storage.bytes, 1, types.storage.bytes
        else:
            axes = product_axes(row)
            if kind == driver.UNSCALED:  # a scale follows each row
                axes = {**axes, "c": ((rows, row["c_rows"]), (columns + 1, 1))}
        for name, size in zip([*"abc", "scales"], [*sizes, sizes[0]], strict=True):
            if name in axes and row[name]:  # 0 where there are no flags, or no other rows
                moved = time * row.get(f"{name}_time", 0) + window * row.get(f"{name}_window", 0)
                for touched in reach(name, row[name] + moved, size, 1, axes[name]):
                    inside(touched, limits.get(name))
