"""``ANYCELL_CHECK=1``: what a pass will touch, chunk by chunk, before the driver runs it.

The same walk as the driver's, in Python: the door's tables are laid out for each chunk and held
against the bounds of their arrays (``cpu.check``), and so is each matrix of a product.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from anycell.engines import cpu
from anycell.engines.cpu import driver
from anycell.engines.cpu.check import inside, reach

if TYPE_CHECKING:
    from anycell.layer.matrix import Matrix
    from anycell.layer.run import Run


def check_pass(run: Run) -> None:
    """Checks that a pass stays within its arrays.

    Raises:
        AssertionError: naming the array, what would be touched, and what may be.
    """
    segments = -(-run.steps // run.segment_length) if run.steps else 1
    for slot in range(segments):
        begin = slot * run.segment_length
        end = min(begin + run.segment_length, run.steps)
        moved = run.again or run
        for entry, first, step, _ in run.moves:
            ctypes.c_int64.from_address(entry).value = first + slot * step
        resting = [bounds.copy() for bounds in moved.bounds[1]]
        for d, name, moving in run.moved:
            moved.bounds[1][d][name] = moving
        if run.again is None and run.moves:
            _check_door(run, begin, 0)
            for entry, _, _, rest in run.moves:
                ctypes.c_int64.from_address(entry).value = rest
            moved.bounds[1][:] = resting
        for one in (run, run.again) if run.again else ():
            at = one.kernel.shared
            one.entries[at["origin"]], one.entries[at["span"]] = begin, end - begin
        for one in (run.again, run) if run.again else (run,):
            _check_chunks(one, begin, end)


def _check_chunks(run: Run, begin: int, end: int) -> None:
    for done in range(begin, max(end, begin + 1), run.form.chunk):
        count = min(run.form.chunk, end - done)
        _check_door(run, run.steps - done - count if run.backward else done, count)
        for d, row, matrices in run.checked if count else ():
            named = dict(zip(driver.PRODUCT, row, strict=True))
            _check_product(run, d, named, matrices, done, count)


def _check_door(run: Run, begin: int, count: int) -> None:
    at = run.kernel.shared
    run.entries[at["begin"]], run.entries[at["count"]] = begin, count
    cpu.check.check(run.kernel, run.entries, run.bounds)


def _check_product(
    run: Run, d: int, row: dict[str, int], matrices: tuple[Matrix, ...], done: int, count: int
) -> None:
    """Holds the matrices of a product against the bounds of their arrays."""
    steps, at, reverse = run.steps, run.kernel.shared, run.options.reverse[d]
    time = steps - done - count if reverse else done
    origin, span = run.entries[at["origin"]], run.entries[at["span"]]
    window = time - (steps - origin - span if reverse else origin)
    sizes = {"rows": row["rows"], "inner": row["inner"], "columns": row["columns"]}
    if row["along"] in (0, 2):
        sizes["rows" if row["along"] == 0 else "inner"] = count * run.batch
    rows, inner, columns = sizes["rows"], sizes["inner"], sizes["columns"]
    axes = {
        "a": ((rows, row["a_rows"]), (inner, row["a_inner"])),
        "b": ((inner, row["b_inner"]), (columns, row["b_columns"])),
        "c": ((rows, row["c_rows"]), (columns, 1)),
    }
    if row["kind"] == driver.SUM:
        axes = {"a": ((rows, row["a_rows"]), (columns, 1)), "c": ((columns, 1),)}  # type: ignore[dict-item]
    elif row["kind"] == driver.GATHER:
        of_x = (count, row["a_inner"]), (run.batch, row["a_rows"]), (columns, 1)
        axes |= {"a": of_x, "b": ((rows, 1),)}  # type: ignore[dict-item]
    else:
        for name, strides in (("a", ("a_rows", "a_inner")), ("b", ("b_inner", "b_columns"))):
            dense = 1 in [row[stride] for stride in strides] or not (rows and inner and columns)
            assert dense, f"{name}: strides {axes[name]}, neither is 1"
    for name, matrix in zip("abc", matrices, strict=True):
        if name in axes:
            first = row[name] + time * matrix.time + window * matrix.window
            for bytes_ in reach(name, row[name] and first, matrix.size, 1, axes[name]):
                inside(bytes_, matrix.bounds)
