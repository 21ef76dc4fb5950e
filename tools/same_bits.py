"""Compares the bits that a fixed set of layers computes with the bits of another revision.

    python tools/same_bits.py                       # this tree with 20390c5
    python tools/same_bits.py --revision HEAD~3     # ... with any other revision
    python tools/same_bits.py --threads 1 --only "GRU .*float64"

Both revisions run the layers of this file, in a process for each revision and number of threads,
and digest every output and gradient. The script prints the arrays that differ, and exits with 1 if
CHANGED does not explain one of them. It reads the other revision from git.
"""

import argparse
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).parents[1]
BASELINE = "20390c5"
DTYPES = ("float32", "float64")

Digests = dict[str, dict[str, str]]  # per layer, per array


class Changed(NamedTuple):
    """A known difference from BASELINE: patterns of names of layers and of arrays, and why."""

    layers: str
    arrays: str
    why: str


CHANGED = (
    Changed(
        "^torch steps| T1 ", "", "a single step of few rows multiplies by weights where they lie"
    ),
    Changed(" B1 ", "", "few steps of one row multiply by weights where they lie"),
    Changed("^(torch|numpy|recurrence)", "^grad bias", "rows are summed in blocks"),
    Changed("bidirectional (all|resets)", "", "resets start episodes in a reverse direction too"),
    Changed("^recurrence .* all", "reverse", "resets start episodes in a reverse direction too"),
    Changed("^numpy", "^grad ", "our matmul multiplies all of NumPy's"),
    # On AVX2, OpenBLAS adds sums of 18 in another order, but sums of 5 in the same order.
    Changed("^numpy .* 2 layers", "", "our matmul multiplies all of NumPy's"),
)


class Sizes(NamedTuple):
    """T, B, I and H of a call."""

    steps: int
    rows: int
    inputs: int
    hidden: int

    def __str__(self) -> str:
        return f"T{self.steps} B{self.rows} I{self.inputs} H{self.hidden}"


# These sizes lie on both sides of each decision that `ROADS` of `tests/helpers/roads.py` lists.
SMALL = Sizes(7, 3, 5, 9)
SINGLE = Sizes(1, 4, 6, 8)
KERNEL_PROJECTS = Sizes(300, 2, 3, 16)
CHUNKS = Sizes(600, 16, 4, 64)
SPLIT_UNITS = Sizes(20, 2, 24, 200)
SPLIT_ROWS = Sizes(40, 24, 300, 160)
ONE_ROW = Sizes(4, 1, 100, 160)
SIZES = (SMALL, SINGLE, ONE_ROW, KERNEL_PROJECTS, CHUNKS, SPLIT_UNITS, SPLIT_ROWS)

# Arguments of a call, by their names in both PyTorch and NumPy layers.
CALLS: dict[str, tuple[str, ...]] = {
    "": (),
    "state": ("state",),
    "mask": ("state", "mask"),
    "repeat": ("lengths", "masked_output"),
    "lengths": ("lengths",),
    "resets": ("state", "resets"),
    "all": ("state", "mask", "lengths", "resets"),
}
LAYERS: dict[str, dict[str, Any]] = {
    "": {},
    "2 layers, bidirectional": {"num_layers": 2, "bidirectional": True},
    "no bias": {"bias": False},
    "checkpoint": {"checkpoint": 3},
}
# Sizes that a cell needs besides the hidden size, and hyperparameters that change its graph.
FURTHER_SIZES = {"LSTMP": {"P": 5}}
VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "GRU": ({"reset_after": False},),
    "sLSTM": ({"heads": 3},),
}


class Layer(NamedTuple):
    """A layer, a call of it, and its name in the report."""

    frontend: str
    cell: str
    sizes: Sizes
    dtype: str
    options: str = ""
    call: str = ""
    hyperparameters: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """The unique name, which also seeds all numbers."""
        chosen = ", ".join(f"{name}={value}" for name, value in self.hyperparameters)
        words = [self.frontend, f"{self.cell}({chosen})" if chosen else self.cell]
        return " ".join([*words, str(self.sizes), self.dtype, self.options, self.call]).strip()

    @property
    def random(self) -> np.random.Generator:
        """A new generator of the layer's numbers."""
        return np.random.default_rng(zlib.crc32(self.name.encode()))


def layers() -> list[Layer]:
    """Every layer to compare, once."""
    return list(dict.fromkeys(combinations()))


def combinations() -> Iterator[Layer]:
    from anycell import cells

    for dtype in DTYPES:
        for sizes in SIZES:
            for frontend in ("torch", "torch.nn", "numpy"):
                for cell in ("LSTM", "GRU"):
                    yield Layer(frontend, cell, sizes, dtype)
                    yield Layer(frontend, cell, sizes, dtype, "2 layers, bidirectional", "lengths")
        for cell in cells.__all__:
            for chosen in ({}, *VARIANTS.get(cell, ())):
                for frontend in ("torch", "recurrence"):
                    hyperparameters = tuple(chosen.items())
                    yield Layer(frontend, cell, SMALL, dtype, "", "all", hyperparameters)
        for cell in ("LSTM", "GRU", "PeepholeLSTM"):
            for options in LAYERS:
                for call in CALLS:
                    for frontend in ("torch", "numpy"):
                        yield Layer(frontend, cell, SMALL, dtype, options, call)
            for sizes in (KERNEL_PROJECTS, CHUNKS, SPLIT_UNITS):
                for call in ("mask", "resets"):
                    yield Layer("torch", cell, sizes, dtype, "", call)
                yield Layer("torch", cell, sizes, dtype, "checkpoint", "lengths")
                for call in ("", "all", "recurrent_mask", "recurrent_mask per gate"):
                    yield Layer("recurrence", cell, sizes, dtype, "", call)
            for frontend in ("torch steps", "numpy steps"):
                yield Layer(frontend, cell, SMALL, dtype)


# -- a layer's numbers -----------------------------------------------------------------------------
def arguments(layer: Layer, cell: Any, random: np.random.Generator) -> dict[str, Any]:
    """The input and the other arguments of the call, as NumPy arrays."""
    steps, rows, inputs, hidden = layer.sizes
    options = LAYERS[layer.options]
    stacked = options.get("num_layers", 1) * (1 + options.get("bidirectional", False))
    x = random.normal(size=(steps, rows, inputs)).astype(layer.dtype)
    given: dict[str, Any] = {"x": x}
    named = CALLS.get(layer.call, ())
    if "state" in named:
        widths = state_widths(layer, cell, hidden)
        states = [random.normal(size=(stacked, rows, width)) for width in widths]
        given["state"] = tuple(state.astype(layer.dtype) for state in states)
    if "mask" in named:
        given["mask"] = random.random((steps, rows)) < 0.6
    if "lengths" in named:
        given["lengths"] = random.integers(0, steps + 1, rows)
        given["lengths"][0] = steps
    if "resets" in named:
        given["resets"] = random.random((steps, rows)) < 0.2
    if "masked_output" in named:
        given["masked_output"] = "repeat"
    if cell.static is not None:
        given["static"] = random.normal(size=(rows, hidden)).astype(layer.dtype)
    return given


def state_widths(layer: Layer, cell: Any, hidden: int) -> list[int]:
    sizes = {"H": hidden, **FURTHER_SIZES.get(layer.cell, {})}
    return [sizes[state.size] for state in cell.states]


def chosen_cell(layer: Layer) -> Any:
    from anycell import cells

    cell = getattr(cells, layer.cell)
    return cell(**dict(layer.hyperparameters)) if layer.hyperparameters else cell


def drawn(random: np.random.Generator, shapes: Mapping[str, tuple[int, ...]], layer: Layer) -> Any:
    """Draws parameters by name, uniform in +-1/sqrt(H)."""
    bound = layer.sizes.hidden**-0.5
    return {
        name: random.uniform(-bound, bound, shapes[name]).astype(layer.dtype)
        for name in sorted(shapes)
    }


# -- frontends -------------------------------------------------------------------------------------
def by_torch(layer: Layer) -> dict[str, Any]:
    """The arrays of ``anycell.torch.RNN``, or of the drop-in for torch's own layer."""
    import torch

    import anycell.torch as ours

    random, cell = layer.random, chosen_cell(layer)
    given = {name: tensor(value) for name, value in arguments(layer, cell, random).items()}
    options = {**LAYERS[layer.options], **FURTHER_SIZES.get(layer.cell, {})}
    options["dtype"] = getattr(torch, layer.dtype)
    *_, inputs, hidden = layer.sizes
    if layer.frontend == "torch.nn":
        module = getattr(ours, layer.cell)(inputs, hidden, **options)
    else:
        module = ours.RNN(cell, inputs, hidden, **options)
    parameters = dict(module.named_parameters())
    values = drawn(random, {name: tuple(p.shape) for name, p in parameters.items()}, layer)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensor(values[name]))
    torch.manual_seed(1)
    if layer.frontend == "torch steps":
        return torch_steps(module, given["x"])
    x, state = given.pop("x").requires_grad_(), given.pop("state", None)
    leaves = {"x": x, **parameters}
    if state is not None:
        state = tuple(s.requires_grad_() for s in state)
        leaves.update(zip((f"state {name}" for name in cell.state_names), state, strict=True))
        state = state if len(state) > 1 else state[0]
    if "static" in given:
        leaves["static"] = given["static"].requires_grad_()
    output, final = module(x, state, **given)
    finals = final if isinstance(final, tuple) else (final,)
    loss = sum((r * tensor(random.normal(size=r.shape))).sum() for r in (output, *finals))
    loss.backward()
    with torch.no_grad():
        inference, _ = module(x, state, **given)
    results = {"output": output, **numbered("final", finals), "inference": inference}
    results |= {f"grad {name}": leaf.grad for name, leaf in leaves.items()}
    return {name: value.detach().numpy() for name, value in results.items()}


def torch_steps(module: Any, x: Any) -> dict[str, Any]:
    """The outputs of ``step``, with weights packed by ``prepare``."""
    import torch

    module.eval()
    outputs, state = [], None
    with torch.no_grad():
        module.prepare()
        for step in x:
            output, state = module.step(step, state)
            outputs.append(output.numpy())
    return {"output": np.stack(outputs)}


def tensor(value: Any) -> Any:
    import torch

    if isinstance(value, tuple):
        return tuple(map(tensor, value))
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def by_numpy(layer: Layer) -> dict[str, Any]:
    """The arrays of ``anycell.numpy.RNN``."""
    import anycell.numpy as ours

    random, cell = layer.random, chosen_cell(layer)
    given = arguments(layer, cell, random)
    options = {**LAYERS[layer.options], **FURTHER_SIZES.get(layer.cell, {})}
    *_, inputs, hidden = layer.sizes
    rnn = ours.RNN(cell, inputs, hidden, dtype=layer.dtype, seed=1, **options)
    shapes = {name: value.shape for name, value in rnn.parameters.items()}
    rnn.set_parameters(drawn(random, shapes, layer))
    x, state = given.pop("x"), given.pop("state", None)
    if layer.frontend == "numpy steps":
        rnn.prepare()
        outputs, after = [], None
        for step in x:
            output, after = rnn.step(step, after)
            outputs.append(np.array(output))
        return {"output": np.stack(outputs)}
    alone = state is not None and len(state) == 1
    state = state[0] if alone else state
    inference, _ = rnn.forward(x, state, **given)
    output, final = rnn.forward(x, state, training=True, **given)
    finals = final if isinstance(final, tuple) else (final,)
    upstream = [random.normal(size=r.shape).astype(layer.dtype) for r in (output, *finals)]
    d_final = tuple(upstream[1:]) if len(finals) > 1 else upstream[1]
    d_x, d_state = rnn.backward(upstream[0], d_final)
    d_states = d_state if isinstance(d_state, tuple) else (d_state,)
    results = {"output": output, **numbered("final", finals), "inference": inference}
    results |= {"grad x": d_x, **numbered("grad state", d_states)}
    return results | {f"grad {name}": value for name, value in rnn.grads.items()}


def by_recurrence(layer: Layer) -> dict[str, Any]:
    """The arrays of ``anycell.recurrence``, with today's names of weights or ``BASELINE``'s."""
    import anycell

    random, cell = layer.random, chosen_cell(layer)
    given = arguments(layer, cell, random)
    _, rows, _, hidden = layer.sizes
    if "state" in given:
        given["state"] = tuple(state[0] for state in given["state"])
    if layer.call.startswith("recurrent_mask"):
        shape = (rows, hidden)
        shape = (len(cell.gates), *shape) if layer.call.endswith("per gate") else shape
        given["recurrent_mask"] = (random.random(shape) < 0.7).astype(layer.dtype)
    sizes = {"H": hidden, **FURTHER_SIZES.get(layer.cell, {})}
    now = "weight_hh" in (anycell.recurrence.__doc__ or "")
    weights = {}
    for linear in cell.linears:
        matrix = linear.shape(sizes)
        bias = (len(linear.declared) * sizes[linear.out_size],)
        for name, old, size in (
            (f"weight_{linear.name}", linear.name, matrix),
            (f"bias_{linear.name}", f"{linear.name}_bias", bias),
        ):
            if size is matrix or linear.bias:
                weights |= drawn(random, {name if now else old: size}, layer)
    params = drawn(random, dict.fromkeys(cell.param_names, (hidden,)), layer)
    steps = layer.sizes.steps
    gates_x = random.normal(size=(steps, rows, len(cell.gates) * hidden)).astype(layer.dtype)
    del given["x"]
    results = {}
    for reverse in (False, True):
        for training in (False, True):
            how = f"{'reverse ' if reverse else ''}{'training' if training else ''}".strip()
            outputs, finals = anycell.recurrence(
                cell, gates_x, weights, params=params, reverse=reverse, training=training, seed=1,
                **given,
            )  # fmt: skip
            results |= {f"output {how}": outputs, **numbered(f"final {how}", finals)}
    return results


def numbered(name: str, arrays: Iterable[Any]) -> dict[str, Any]:
    return {f"{name} {k}": array for k, array in enumerate(arrays)}


FRONTENDS: dict[str, Callable[[Layer], dict[str, Any]]] = {
    "torch": by_torch,
    "torch.nn": by_torch,
    "torch steps": by_torch,
    "numpy": by_numpy,
    "numpy steps": by_numpy,
    "recurrence": by_recurrence,
}


# -- digests, and their comparison -----------------------------------------------------------------
def digest(array: Any) -> str:
    """A digest of an array's dtype, shape and bits."""
    described = f"{array.dtype} {array.shape} ".encode()
    return hashlib.sha256(described + np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def digests(only: str) -> Digests:
    """The digests of all arrays of all layers whose names match, by the imported anycell."""
    return {
        layer.name: {name: digest(a) for name, a in FRONTENDS[layer.frontend](layer).items()}
        for layer in layers()
        if re.search(only, layer.name)
    }


def digests_of(package: Path, threads: int, only: str, cache: Path) -> Digests:
    """The digests of the ``anycell`` in a directory, computed in a process of its own."""
    env = {
        **os.environ,
        "PYTHONPATH": str(package),
        "OMP_NUM_THREADS": str(threads),
        "ANYCELL_NUM_THREADS": str(threads),
        "ANYCELL_CACHE_DIR": str(cache),
        "ANYCELL_MATMUL": "host",  # BASELINE always did; ours sums in another order
    }
    command = [sys.executable, str(Path(__file__).resolve()), "--print", "--only", only]
    done = subprocess.run(command, env=env, cwd=package, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"The layers do not run with the anycell in {package}; see above.")
    answer = json.loads(done.stdout)
    if Path(answer["package"]).parent != package.resolve():
        raise SystemExit(f"{answer['package']} was imported; expected the anycell in {package}.")
    return dict(answer["digests"])


def extract(revision: str, into: Path) -> None:
    """Writes the package of a revision into a directory."""
    command = ["git", "-C", str(ROOT), "archive", "--format=tar", revision, "anycell"]
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


def reason(layer: str, arrays: Iterable[str], changed: Iterable[Changed]) -> str | None:
    """The reasons why these arrays of a layer may differ; None if one array has no reason."""
    reasons = {}
    for name in arrays:
        found = (c.why for c in changed if re.search(c.layers, layer) and re.search(c.arrays, name))
        reasons[next(found, None)] = True
    return None if None in reasons else "; ".join(map(str, reasons))


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--revision", default=BASELINE, help="default: %(default)s")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="default: 1 2")
    parser.add_argument("--only", default="", help="a pattern of names of layers")
    parser.add_argument("--print", action="store_true", help="print digests, compare nothing")
    options = parser.parse_args(argv)
    if options.print:
        import anycell

        package = str(Path(anycell.__file__).parent)
        print(json.dumps({"package": package, "digests": digests(options.only)}))
        return 0
    changed = CHANGED if options.revision == BASELINE else ()
    unexplained = 0
    with tempfile.TemporaryDirectory() as scratch:
        earlier, cache = Path(scratch, "earlier"), Path(scratch, "cache")
        earlier.mkdir()
        extract(options.revision, earlier)
        for threads in options.threads:
            before = digests_of(earlier, threads, options.only, cache)
            now = digests_of(ROOT, threads, options.only, cache)
            different = differences(before, now)
            for layer, names in different.items():
                why = reason(layer, names, changed)
                unexplained += why is None
                print(f"{layer}, {threads} threads: {', '.join(names)}{f' ({why})' if why else ''}")
            arrays = sum(map(len, now.values()))
            print(
                f"threads: {threads}; layers: {len(now)}, arrays: {arrays}; "
                f"layers that differ from {options.revision}: {len(different)}",
                flush=True,
            )
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
