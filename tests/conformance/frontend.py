"""What an adapter says of a frontend."""

from collections.abc import Callable
from dataclasses import dataclass, field

from problems import Arrays, Problem

from anycell import Cell


@dataclass(frozen=True)
class Frontend:
    """A way to run a layer.

    Attributes:
        solve: results and gradients of a problem, as ``problem.by_reference`` names them. With a
            second argument, an array for each gradient's name, the gradients of the sum of all
            gradients times these.
        lacks: what it does not have, and why: of ``problems.draw``'s words and of "gradients",
            "second derivatives", "float64", "keep" (cells that draw random masks), "prepare" (steps
            on packed weights), "static steps", "stepped resets", "no steps", "held start" (outputs
            that repeat a state given), "negative strides".
        cells: those that it runs; None for any.
        steps: outputs and final states of a problem, called one step at a time.
        alike: whether it reaches the layers of another frontend by its own arguments alone; ``make
            test`` takes a sample.
        variant: another way through layers of another frontend; ``make test`` takes a sample.
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
        """Whether it has such problems."""
        needs = {*has, *(["keep"] if cell.keeps else []), *(["static"] if cell.static else [])}
        return (self.cells is None or cell in self.cells) and not self.lacks.keys() & needs
