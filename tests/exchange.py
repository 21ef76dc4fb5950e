"""Runs the programs of a cooperative kernel (tier 2) all at once, in Triton's interpreter.

    python tests/exchange.py            prints what came out, as JSON

The interpreter runs one program after the other, which could only wait for each other forever. Here
each program of a launch is a process of its own, all on shared memory: they exchange h, and the
gradients of the gates, through the same loads, stores and flags as on a card. A script, because a
process with threads, as a test runner's is, had better not fork.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import numpy as np
from gpu import Poisoned, by_gpu  # before anything else that may import Triton
from problems import Arrays, Problem, assert_right, assert_same, random_problem
from triton.runtime import interpreter

from anycell import cells
from anycell.engines import gpu
from anycell.engines.gpu import Call, Printed
from anycell.torch.device import DeviceHost


class Shared(Poisoned):
    """Its arrays are the same memory in all processes."""

    absent: tuple[tuple[int, int], ...] = ()  # programs that never run
    made: list[Any]

    def empty(self, *args: Any, **options: Any) -> Any:
        self.made.append(super().empty(*args, **options).share_memory_())
        return self.made[-1]

    def zeros(self, *args: Any, **options: Any) -> Any:
        return super().zeros(*args, **options).share_memory_()

    def flags(self, count: int) -> Any:
        return super().flags(count).share_memory_()

    @functools.cached_property
    def trouble(self) -> Any:
        return DeviceHost.trouble.func(self).share_memory_()


def run_at_once(kernel: Printed, call: Call) -> int:
    """In the place of ``_run_interpreted``: one launch of all steps."""
    launch = call.launch(kernel, call.all_values())
    groups, programs = launch.grid
    launch.grid = (1, 1)
    children = []
    for group in range(groups):
        for program in range(programs):
            if (group, program) in call.host.absent:  # type: ignore[attr-defined]
                continue
            child = os.fork()
            if child == 0:
                pretend((group, program, 0), (groups, programs, 1))
                launch(0)
                os._exit(0)
            children.append(child)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
    return 1


def pretend(place: tuple[int, int, int], shape: tuple[int, int, int]) -> None:
    """This process runs one program of a grid."""
    builder = interpreter.interpreter_builder
    set_place, set_shape = builder.set_grid_idx, builder.set_grid_dim
    builder.set_grid_idx = lambda *_: set_place(*place)
    builder.set_grid_dim = lambda *_: set_shape(*shape)
    # After a launch all arrays are copied back, here onto themselves, over what others write.
    interpreter.GridExecutor._restore_args_dev = lambda *_: None


def together(problem: Problem) -> Arrays:
    """The problem, solved by all programs at once."""
    Shared.made = []
    one_by_one, gpu._run_interpreted = gpu._run_interpreted, run_at_once
    try:
        return by_gpu(problem, tier=2, host_class=Shared)
    finally:
        gpu._run_interpreted = one_by_one


def main() -> None:
    """Two programs, and so two processes; then one of them never comes."""
    options = {"masked": True, "resets": True}
    rng = np.random.default_rng(5)
    problem = random_problem(cells.PeepholeLSTM, (5, 4, 18), rng, "float32", **options)
    solution = together(problem)
    assert_right(solution, problem)
    one_by_one = by_gpu(problem, tier=2)  # which adds gradients of parameters in another order
    assert_same(solution, one_by_one, *[n for n in solution if not n.startswith("d params")])

    found: dict[str, Any] = {}
    Shared.absent, Shared.patience = ((0, 1),), 20_000_000
    try:
        together(problem)
    except RuntimeError as error:
        found["error"] = str(error)
    hidden = Shared.made[0]  # [T + 1, B, H]
    found["finite"] = bool(hidden[1, :, :16].isfinite().all())
    found["lost"] = bool(hidden[2:, :, :16].isnan().all())
    print(json.dumps(found))


if __name__ == "__main__":
    main()
