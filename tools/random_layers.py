"""Random calls of layers through every public entrance of a framework, against the reference.

    python tools/random_layers.py --framework numpy --seed 1 --calls 2500
    python tools/random_layers.py --framework jax --seed 1 --calls 500 --seconds 300

A call is a layer of a built-in or a random cell in float32 or float64, of random sizes, with any
of what its entrance takes: states, masks, lengths, resets, further layers and directions. Entrances
are the adapters of ``tests/conformance``. Results and all gradients are compared with the reference
engine in float64, by the tolerances of the tests. Counted are the calls of each entrance; what is
wrong is printed with the seed that repeats it: ``--seed S --calls 1``.
"""

import argparse
import collections
import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]

FRAMEWORKS = ("numpy", "torch", "jax", "keras")
FEATURES = ("state", "mask", "lengths", "resets", "repeat", "no bias", "layers", "bidirectional")
GROUP = 10  # consecutive calls of one cell, size and dtype, for which kernels are compiled once


def check(frontends: list[Any], seed: int) -> tuple[str, str]:
    """Makes the call of a seed; returns the name of its entrance, and what is wrong or ""."""
    import problems
    from random_cells import random_cell, source

    from anycell import cells

    group = np.random.default_rng([seed // GROUP, 11])
    hidden, dtype = int(group.choice([7, 12, 33])), str(group.choice(["float32", "float64"]))
    name = str(group.choice(cells.__all__))
    built_in = group.random() < 0.5
    cell = getattr(cells, name) if built_in else random_cell(seed // GROUP, hidden)
    rng = np.random.default_rng([seed, 12])
    runs = [f for f in frontends if f.runs(cell, dtype)]
    frontend = runs[rng.integers(len(runs))]
    has = {word for word in FEATURES if rng.random() < 0.3 and frontend.runs(cell, word)}
    if "resets" in has and frontend.runs(cell, "reset_state") and rng.random() < 0.5:
        has.add("reset_state")
    if not {"mask", "lengths"} & has or not frontend.runs(cell, "held start"):
        has.discard("repeat")
    steps, rows, inputs = (int(rng.choice(sizes)) for sizes in ([1, 2, 5, 9], [1, 3, 8], [1, 4, 9]))
    try:
        problem = problems.random_layer(cell, (steps, rows, inputs, hidden), has, rng).astype(dtype)
        if not all(np.isfinite(array).all() for array in problem.right.values()):
            return "no call: not finite", ""
        solution = frontend.solve(problem)
        try:
            problems.assert_solved(solution, problem, "gradients" not in frontend.lacks)
        except AssertionError:
            # Looked at only now: it takes ten times as long as the call.
            if problems.solvable(problem, problems.NEARBY, rng):
                raise
            return "no call: ill-conditioned", ""
    except Exception as error:
        told = name if built_in else source(cell)
        shape = f"{dtype}, T {steps}, B {rows}, I {inputs}, H {hidden}, {sorted(has)}"
        return str(frontend), f"seed {seed}, {frontend}, {shape}: {error!r}\n{told}"
    return str(frontend), ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--framework", choices=FRAMEWORKS, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=np.inf, help="start no call after them")
    arguments = parser.parse_args()
    frontends = importlib.import_module(f"tests.conformance.on_{arguments.framework}").FRONTENDS
    counts, wrong, begin = collections.Counter[str](), 0, time.monotonic()
    for seed in range(arguments.seed, arguments.seed + arguments.calls):
        if time.monotonic() - begin > arguments.seconds:
            break
        entrance, difference = check(frontends, seed)
        counts[entrance] += 1
        wrong += bool(difference)
        if difference:
            print(difference, flush=True)
    for entrance, count in sorted(counts.items()):
        print(f"{count:6} {entrance}")
    print(f"{wrong} wrong, in {time.monotonic() - begin:.0f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
