"""Runs all programs of a cooperative kernel (tier 2) at once, in Triton's interpreter.

    python tests/helpers/exchange.py        prints the results as JSON

The interpreter runs such programs by turns. Here each program of a launch is a process of its own,
and all share memory: they exchange h, the gradients of the gates and row reductions through the
same loads, stores and flags as on a card. This is a script, because a process with threads, such as
a test runner, should not fork.

It fails if programs that run at once compute other results than programs that run by turns.
"""

import functools
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))
import numpy as np
from gpu import Poisoned, by_gpu  # before anything else that may import Triton
from problems import Arrays, Problem, assert_right, assert_same, is_float, random_problem
from triton.runtime import interpreter

from anycell import Cell, cells
from anycell.engines.gpu import Printed
from anycell.engines.gpu.interpreter import Interpreter, Turns
from anycell.layer import gpu as device
from anycell.torch.framework import TorchDevice


class Shared(Poisoned):
    """A host whose arrays are the same memory in all processes."""

    absent: tuple[int, int, bool] | None = None  # one that never runs, and its pass
    patience = 200_000_000  # about ten seconds: a look takes longer than it counts
    made: list[Any]

    def like(self, array: Any) -> Any:
        self.made.append(super().like(array).share_memory_())
        return self.made[-1]

    def block(self, count: int) -> Any:
        return super().block(count).share_memory_()

    @functools.cached_property
    def trouble(self) -> Any:
        return TorchDevice.trouble.func(self).share_memory_()


def start_at_once(
    self: Interpreter, printed: Printed, grid: tuple[int, ...], parameters: Any
) -> None:
    """Replaces ``Interpreter.start``: programs that wait for one another run at once."""
    if not printed.cooperative:
        return start(self, printed, grid, parameters)
    children = []
    for place in itertools.product(*map(range, grid)):
        group, program, _ = place
        if (group, program, printed.name.startswith("backward")) == Shared.absent:
            continue
        child = os.fork()
        if child == 0:
            pretend(place, grid)
            time.sleep(0.2 * program)  # the others have to wait
            start(self, printed, (1, 1), parameters)
            os._exit(0)
        children.append(child)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0


start = Interpreter.start


def pretend(place: tuple[int, int, int], shape: tuple[int, int, int]) -> None:
    """Makes this process run one program of a grid."""
    builder = interpreter.interpreter_builder
    set_place, set_shape = builder.set_grid_idx, builder.set_grid_dim
    builder.set_grid_idx = lambda *_: set_place(*place)
    builder.set_grid_dim = lambda *_: set_shape(*shape)
    Turns.barrier = lambda _: time.sleep(0.002)  # type: ignore[method-assign]


def together(problem: Problem, **options: Any) -> Arrays:
    """Solves a problem by all programs at once."""
    Shared.made = []
    with mock.patch.object(Interpreter, "start", start_at_once):
        return by_gpu(problem, tier=2, host_class=Shared, **options)


def make(
    cell: Cell, shape: tuple[int, int, int], dtype: str = "float32", **options: Any
) -> Problem:
    """Returns a float32 problem; for a dtype of 16 bits, its numbers are exact in that dtype."""
    problem = random_problem(cell, shape, np.random.default_rng(5), "float32", **options)
    if dtype == "float32":
        return problem
    return problem.map(lambda _, a: a.astype(dtype).astype("float32") if is_float(a) else a)


def compare(problem: Problem, **options: Any) -> Arrays:
    """Asserts the same bits at once as by turns."""
    solution = together(problem, **options)
    assert_same(solution, by_gpu(problem, tier=2, **options), *solution)
    return solution


def right() -> None:
    """Compares two or three programs, for several cells, dtypes, chunks of time and segments."""
    hard = {"masked": True, "resets": True}
    problem = make(cells.PeepholeLSTM, (5, 4, 18), **hard)
    assert_right(compare(problem), problem)
    # Chunks of time reuse the memory of gradients, and segments reuse the memory of h.
    problem = make(cells.LSTM, (5, 3, 18), reverse=True, masked=True)
    problem["x"][:] = np.nan_to_num(problem["x"])
    whole, device.CHUNK_BYTES = device.CHUNK_BYTES, 2 * problem["x"][0].nbytes
    solution = compare(problem, projected=True, checkpoint=3)
    device.CHUNK_BYTES = whole
    del solution["d weight_ih_l0"]  # not in the problem
    assert_right(solution, problem)
    for cell in (cells.LayerNormLSTM, cells.MultiplicativeLSTM, cells.VariationalLSTM):
        compare(make(cell, (3, 4, 18), **hard))
    for units in (34, 17):  # three programs, and two; an odd number of units
        compare(make(cells.GRU, (4, 17, units), "float16", **hard), dtype="float16")


def absent(backward: bool, cell: Cell = cells.PeepholeLSTM) -> dict[str, Any]:
    """Returns what the other programs leave behind if one program never runs."""
    problem = make(cell, (5, 4, 18))
    Shared.absent, Shared.patience = (0, 1, backward), 40_000_000
    found: dict[str, Any] = {}
    try:
        together(problem, backwards=2)
    except RuntimeError as error:
        found["error"] = str(error)
    hidden = Shared.made[0]  # [T + 1, B, H]
    found["h"] = [bool(h.isfinite().all()) for h in hidden[:, :, :16]]
    if backward:  # the gates' gradients; the forward pass saves an array of the same size
        _, dx, *_ = [a for a in Shared.made if a.shape == (5, 4, 72)]
        found["d_gates"] = [bool(d.isfinite().all()) for d in dx[:, :, :16]]
    Shared.absent = None
    return found


def main() -> None:
    """Runs all comparisons, then both passes with an absent program."""
    right()
    found = {way: absent(way == "backward") for way in ("forward", "backward")}
    found["inner"] = absent(False, cells.MultiplicativeLSTM)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
