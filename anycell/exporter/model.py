"""A model as passes over a sequence, each a program for every step.

One pass from the first step on is the whole model, unless layers run in reverse: the first step of
such a layer needs the last row of what comes before, so each of its directions is a pass by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from anycell.exporter.blob import POINTER, Blob
from anycell.exporter.program import Program, Start, padded, width_of
from anycell.lang.cell import ONE
from anycell.layer.parts import Part, Recurrent, Simple, opened
from anycell.layer.signature import ENDS

CACHE = 1 << 15  # bytes: of larger weights a part stays cached from one step to the next


class Rows(NamedTuple):
    """Columns of the rows of all steps: the array, the first column, and the length of a row."""

    array: str
    column: int
    stride: int


class Pass(NamedTuple):
    """A program for every step, from the first on or from the last.

    Attributes:
        flipped: whether it leaves its outputs from the last row on.
        reads: what it reads besides the samples, rows that other passes have left.
    """

    program: Program
    reverse: bool
    flipped: bool
    reads: Rows | None
    writes: Rows


class Model:
    """The passes of a model.

    Attributes:
        inputs, outputs, state_size: how many numbers a step takes and gives, and all states have.
        memory: the arrays between passes, with the lengths of their rows; passes use them in turn.
        weights: one of ``WEIGHTS``.
        lanes: how many numbers a vector has; at most as many as given.
        turns: whether steps read weights in one order and in the other by turns; the last number of
            a state says whose turn it is.
        blob: where weights are if they are not in the program; each state begins with the address.
    """

    def __init__(
        self, parts: Iterable[Part], lanes: int = 1, weights: str = "float32", blob: bool = False
    ) -> None:
        simple = [part for whole in parts for part in opened(whole, "float32")]
        self.weights, self.lanes = weights, _filled(simple, lanes)
        self.passes, self.memory = list[Pass](), dict[str, int]()
        self.blob = Blob() if blob else None
        width = next(filter(None, map(width_of, simple)), 0)
        start = Start(width, padded(POINTER, self.lanes) * blob)
        reads: Rows | None = None
        layers, inputs = [*_layers(simple)], 0
        for k, (first, layer) in enumerate(layers):
            inputs = start.inputs if first else inputs  # the layers of a part share static inputs
            programs = list[Program]()
            for _, group in layer:
                start = start._replace(inputs=inputs)
                programs.append(Program(group, self.lanes, weights, start))
                start = start._replace(states=start.states + programs[-1].state_size)
            array, column = "out" if k + 1 == len(layers) else f"m{k % 2}", 0
            width = sum(program.outputs for program in programs)
            for program, (way, _) in zip(programs, layer, strict=True):
                self.passes.append(Pass(program, *way, reads, Rows(array, column, width)))
                column += program.outputs
            reads = Rows(array, 0, width)
            if array != "out":
                self.memory[array] = max(width, self.memory.get(array, 0))
            count = start.layer + len(layer[0][1])
            start = Start(programs[-1].inputs, start.states, count, width)
        self.inputs, self.outputs = start.inputs, start.width
        matrices = [matrix for of_pass in self.passes for matrix in of_pass.program.matrices]
        large = sum(matrix.weight.nbytes for matrix in matrices) > CACHE
        self.turns = large and self.lanes > 1 and not self.whole
        self.state_size = start.states + self.turns or 1  # C has no arrays of no numbers

    @property
    def whole(self) -> bool:
        """Whether it runs over whole sequences only, not step by step."""
        return len(self.passes) > 1 or self.passes[0].reverse

    def before(self, array: str) -> int:
        """The count of numbers of a step that lie before an array in the caller's memory."""
        return self.memory["m0"] if array == "m1" else 0

    def run(self, x: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
        """Computes it in float64: ``[T, inputs]`` to ``[T, outputs]``."""
        arrays = dict[str, Any]()
        for program, reverse, flipped, reads, (array, column, stride) in self.passes:
            order, to = (slice(None, None, -1 if back else 1) for back in (reverse, flipped))
            rows = x if reads is None else arrays[reads.array]
            if not column:
                arrays[array] = np.empty((len(x), stride))
            columns = slice(column, column + program.outputs)
            arrays[array][to, columns] = program.run(x[order], rows[order])
        result: npt.NDArray[np.float64] = arrays["out"]
        return result


def _filled(parts: Iterable[Simple], lanes: int) -> int:
    """The numbers of a vector: fewer if those of the largest state would be filled badly."""
    layers = [part.layer for part in parts if isinstance(part, Recurrent)]
    sizes = [{ONE: 1, **dict(of.sizes)}[state.size] for of in layers for state in of.cell.states]
    largest = max(sizes, default=lanes)
    while lanes > 4 and padded(largest, lanes) > 1.25 * largest:
        lanes //= 2
    return lanes


def _layers(
    parts: Sequence[Simple],
) -> Iterator[tuple[bool, Sequence[tuple[tuple[bool, bool], Sequence[Simple]]]]]:
    """The passes of each layer, with their parts and whether they run in reverse and are flipped;
    and whether the layer is the first of its part. What needs no passes of its own is one layer.
    """
    forwards = False, False
    pending = list[Simple]()
    for part in parts:
        if not isinstance(part, Recurrent) or not any(part.layer.options.reverse):
            pending.append(part)
            continue
        if pending:
            yield True, [(forwards, pending)]
        pending, reverse = [], part.layer.options.reverse
        for k, learned in enumerate(part.learned):
            by_direction = [
                (way, [part._replace(learned=[_of_direction(learned, d)])])
                for d, way in enumerate(zip(reverse, part.flipped or reverse, strict=True))
            ]
            yield not k, by_direction
    if pending or not parts:
        yield True, [(forwards, pending)]


def _of_direction(learned: Mapping[str, Any], d: int) -> dict[str, Any]:
    """The weights of one direction, without the end of the names."""
    return {
        name.removesuffix(ENDS[1]): weight
        for name, weight in learned.items()
        if name.endswith(ENDS[1]) == bool(d)
    }
