"""Compares the bits that layers compute with the bits of another revision.

    python tools/same_bits.py                       # this tree with its last commit
    python tools/same_bits.py --revision HEAD~3     # ... with any other revision
    python tools/same_bits.py --threads 1 --only "GRU .*float64"

Both revisions solve the same problems, each by its own adapters of ``tests/conformance``, in a
process for each revision and number of threads, and digest every result and gradient. The script
prints the arrays that differ, and exits with 1 if there are any. It reads the other revision from
git.
"""

import argparse
import functools
import hashlib
import io
import itertools
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
DTYPES = ("float32", "float64")
# T, B, I and H: on both sides of each decision that `ROADS` of `tests/helpers/roads.py` lists.
SMALL = (7, 3, 5, 9)
SIZES = (
    SMALL, (1, 4, 6, 8), (4, 1, 100, 160), (300, 2, 3, 16), (600, 16, 4, 64), (20, 2, 24, 200),
    (40, 24, 300, 160),
)  # fmt: skip
# Features of a call, as ``problems.draw`` names them.
CALLS = tuple(map(str.split, (
    "", "state", "state mask", "lengths repeat", "state resets", "no bias", "recurrent_mask",
    "state mask lengths resets", "layers bidirectional lengths",
)))  # fmt: skip

Digests = dict[str, dict[str, str]]  # per layer, per array


def layers() -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Every layer to compare: its name, and a function that computes its arrays."""
    from problems import draw

    from anycell import cells
    from tests.conformance import on_numpy, on_torch

    some = [cells.LSTM, cells.GRU, cells.PeepholeLSTM]
    every = [getattr(cells, name) for name in cells.__all__]
    cases = dict.fromkeys([
        *itertools.product(some, SIZES, map(tuple, (CALLS[0], CALLS[-1]))),
        *itertools.product(some, [SMALL], map(tuple, CALLS)),
        *itertools.product(every, [SMALL], [tuple(CALLS[-2])]),
    ])  # fmt: skip
    for frontend in on_torch.FRONTENDS + on_numpy.FRONTENDS:
        for (cell, size, has), dtype in itertools.product(cases, DTYPES):
            if frontend.fused and frontend.runs(cell, *has):
                shape = "T{} B{} I{} H{}".format(*size)
                name = f"{frontend} {cell.name} {shape} {dtype} {' '.join(has)}".strip()
                drawn = functools.partial(draw, cell, size, has, dtype, solvable=False)
                yield name, functools.partial(solved, frontend.solve, drawn)
                if frontend.steps and not has:
                    yield f"{name} steps", functools.partial(solved, frontend.steps, drawn)


def solved(solve: Callable[[Any], dict[str, Any]], drawn: Callable[[], Any]) -> dict[str, Any]:
    return solve(drawn())


def digest(array: Any) -> str:
    """A digest of an array's dtype, shape and bits."""
    described = f"{array.dtype} {array.shape} ".encode()
    return hashlib.sha256(described + np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def digests(only: str) -> Digests:
    """The digests of all arrays of all layers whose names match, by the imported anycell."""
    return {
        name: {of: digest(array) for of, array in solve().items()}
        for name, solve in layers()
        if re.search(only, name)
    }


def digests_of(tree: Path, threads: int, only: str, cache: Path) -> Digests:
    """The digests of the ``anycell`` in a directory, computed in a process of its own."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tree), str(tree / "tests" / "helpers")]),
        "OMP_NUM_THREADS": str(threads),
        "ANYCELL_NUM_THREADS": str(threads),
        "ANYCELL_CACHE_DIR": str(cache),
    }
    command = [sys.executable, str(Path(__file__).resolve()), "--print", "--only", only]
    done = subprocess.run(command, env=env, cwd=tree, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"The layers do not run with the anycell in {tree}; see above.")
    answer = json.loads(done.stdout)
    if Path(answer["package"]).parent != tree.resolve():
        raise SystemExit(f"{answer['package']} was imported; expected the anycell in {tree}.")
    return dict(answer["digests"])


def extract(revision: str, into: Path) -> None:
    """Writes the package and the tests of a revision into a directory."""
    command = ["git", "-C", str(ROOT), "archive", "--format=tar", revision, "anycell", "tests"]
    done = subprocess.run(command, capture_output=True)
    if done.returncode:
        raise SystemExit(f"git archive {revision}: {done.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(into)


def differences(before: Digests, now: Digests) -> dict[str, list[str]]:
    """The arrays that differ or that only one revision has, by layer."""
    found = {}
    for layer in sorted({*before, *now}):
        old, new = before.get(layer, {}), now.get(layer, {})
        names = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
        if names:
            found[layer] = names
    return found


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--revision", default="HEAD", help="default: %(default)s")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="default: 1 2")
    parser.add_argument("--only", default="", help="a pattern of names of layers")
    parser.add_argument("--print", action="store_true", help="print digests, compare nothing")
    options = parser.parse_args(argv)
    if options.print:
        import anycell

        package = str(Path(anycell.__file__).parent)
        print(json.dumps({"package": package, "digests": digests(options.only)}))
        return 0
    different = False
    with tempfile.TemporaryDirectory() as scratch:
        earlier, cache = Path(scratch, "earlier"), Path(scratch, "cache")
        earlier.mkdir()
        extract(options.revision, earlier)
        for threads in options.threads:
            before = digests_of(earlier, threads, options.only, cache)
            now = digests_of(ROOT, threads, options.only, cache)
            found = differences(before, now)
            for layer, names in found.items():
                print(f"{layer}, {threads} threads: {', '.join(names)}")
            arrays = sum(map(len, now.values()))
            print(
                f"threads: {threads}; layers: {len(now)}, arrays: {arrays}; "
                f"layers that differ from {options.revision}: {len(found)}",
                flush=True,
            )
            different |= bool(found)
    return int(different)


if __name__ == "__main__":
    sys.exit(main())
