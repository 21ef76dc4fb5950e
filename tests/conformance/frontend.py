"""The description of a frontend that its adapter gives."""

from collections.abc import Callable
from dataclasses import dataclass, field

from problems import Arrays, Problem

from anycell import Cell


@dataclass(frozen=True)
class Frontend:
    """A way to run a layer.

    Attributes:
        solve: returns results and gradients of a problem, named as in ``problems.by_reference``.
            With a second argument, an array for each gradient's name, returns the gradients of the
            sum of all gradients times these arrays.
        lacks: the features it does not have, and why: words of ``problems.draw``, "gradients",
            "second derivatives", "float64", "keep" (cells that draw random masks), "prepare" (steps
            on packed weights), "static steps", "stepped resets", "no steps", "held start" (outputs
            that repeat an initial state), "negative strides".
        cells: the cells that it runs; None for any.
        steps: returns outputs and final states of a problem, called one step at a time.
        alike: whether it differs from another frontend in its arguments alone; ``make test`` runs a
            sample of its cases.
        variant: whether it is another way through the layers of another frontend; sampled as well.
        fused: whether the kernels of the CPU engine run it.
    """

    name: str
    solve: Callable[..., Arrays]
    lacks: dict[str, str] = field(default_factory=dict)
    cells: tuple[Cell, ...] | None = None
    steps: Callable[[Problem], Arrays] | None = None
    alike: bool = False
    variant: bool = False
    fused: bool = True

    def __str__(self) -> str:
        return self.name

    def runs(self, cell: Cell, *has: str) -> bool:
        """Whether the frontend can run problems of this cell with these features."""
        needs = {*has, *(["keep"] if cell.keeps else []), *(["static"] if cell.static else [])}
        return (self.cells is None or cell in self.cells) and not self.lacks.keys() & needs
