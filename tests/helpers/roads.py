"""Choices of a pass that do not change its results; tests cover both sides of each choice."""

from collections.abc import Callable

from anycell.engines import cpu
from anycell.engines.cpu.driver import FEW
from anycell.layer.pass_tables import PassTables


def _entry(run: PassTables, name: str) -> int:
    return run.draft.cells[run.base + run.kernel.shared[name]]


def _few(run: PassTables) -> bool:
    weight = run.directions[0]["weight_ih"]
    return run.by_weight(weight if run.backward else weight.T) == FEW


ROADS: dict[str, Callable[[PassTables], bool]] = {
    "the kernel multiplies the input": lambda run: run.inputs > 0,
    "a single step": lambda run: run.single,
    "a single step of few rows": lambda run: run.single and _few(run),
    "steps of one row": lambda run: run.single and run.steps > 1,
    "several chunks": lambda run: run.chunk < run.steps,
    "several threads": lambda run: run.parts > 1,
    "threads split the units": lambda run: _entry(run, "units_split") > 0,
    "threads pack the weights": lambda run: (
        run.bytes_packed > cpu.WORTH_SPREADING * run.kernel.itemsize
    ),
}
