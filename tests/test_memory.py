"""The contract of memory: every array of every entry point, in every guise, on every road."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from guarded import Everything
from processes import python
from tolerances import assert_close
from torch.func import functional_call
from variants import variants

import anycell
import anycell.numpy as an
import anycell.torch as at
from anycell import cells, layer
from anycell.engines import cpu
from anycell.engines.cpu.isa import available
from anycell.numpy.host import NumpyHost
from anycell.plan import plan
from anycell.torch import dropin

Array = npt.NDArray[Any]
Arrays = dict[str, Array]


class Case(NamedTuple):
    """A call of a layer: the roads that it takes are those of ``test_both_sides_of_every_road``."""

    steps: int
    rows: int
    inputs: int
    hidden: int
    masked: bool = False

    def __str__(self) -> str:
        return "-".join(map(str, self[:4])) + ("-masked" if self.masked else "")


CASES = [
    Case(5, 3, 6, 8),  # the host projects all steps at once
    Case(40, 9, 6, 8),  # the kernel projects
    Case(5, 9, 6, 64, True),  # rows of a power of two are padded
    Case(40, 3, 6, 64),  # threads split the units
    Case(40, 40, 6, 33, True),  # threads split the rows; a mask with holes
    Case(1, 3, 6, 8),  # a single step, whose recurrent matmul is the host's
    Case(1, 40, 6, 8),  # which torch runs, of its own layers, by another operator for many rows
    Case(1, 40, 6, 33, True),
    Case(20, 16, 300, 160),  # weights too large for the kernel to project; packed by two threads
    Case(300, 24, 6, 64),  # several chunks, on warm memory
    Case(6, 0, 6, 8),
    Case(3, 70, 6, 8),  # several panels of rows, and groups of several rows
]
SLOW = {CASES[-3], CASES[-4]}
cases = pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] * (c in SLOW)) for c in CASES], ids=str
)


def draw(case: Case, shapes: dict[str, tuple[int, ...]], seed: int) -> Arrays:
    """Numbers for arrays of these shapes, and flags for masks and resets."""
    rng, arrays = np.random.default_rng(seed), {}
    for name, shape in shapes.items():
        if name in ("mask", "resets"):
            arrays[name] = rng.random(shape) < (0.5 if name == "mask" else 0.2)
        elif name == "lengths":
            arrays[name] = rng.integers(0, case.steps + 1, shape)
        else:
            arrays[name] = (0.5 * rng.standard_normal(shape)).astype(np.float32)
    return arrays


# -- entry points: from arrays by name to results by name ------------------------------------------


class Entry(NamedTuple):
    """A public entry point: the shapes of its arrays, and a call with them."""

    shapes: dict[str, tuple[int, ...]]
    call: Callable[[Arrays], Arrays]


def flags_of(case: Case, lead: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {"mask": lead, "resets": lead, "lengths": (case.rows,)} if case.masked else {}


def torch_module(case: Case, kind: str) -> Entry:
    """A module, its parameters and its gradients."""
    made: dict[str, Callable[[], Any]] = {
        "LSTM": lambda: at.LSTM(case.inputs, case.hidden, batch_first=True),
        "GRU": lambda: at.GRU(case.inputs, case.hidden, bidirectional=True),
        "RNN": lambda: at.RNN(Everything, case.inputs, case.hidden, P=case.hidden // 2 + 1),
    }
    module = made[kind]()
    lead = (case.rows, case.steps) if kind == "LSTM" else (case.steps, case.rows)
    widths = {"LSTM": [case.hidden] * 2, "GRU": [case.hidden]}.get(
        kind, [case.hidden // 2 + 1, case.hidden]
    )
    first = 2 if kind == "GRU" else 1
    states = {f"state {i}": (first, case.rows, n) for i, n in enumerate(widths)}
    shapes = {"x": (*lead, case.inputs), **states, **flags_of(case, lead)}
    if kind == "RNN":
        shapes["static"] = (case.rows, case.hidden)
        if case.masked:
            shapes |= {f"reset_{name}": shape for name, shape in states.items()}
    shapes |= {name: tuple(p.shape) for name, p in module.named_parameters()}
    shapes["d output"] = (*lead, first * widths[0])
    shapes |= {f"d {name}": shape for name, shape in states.items()}

    def call(arrays: Arrays) -> Arrays:
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        learned = [
            name for name, t in tensors.items() if t.is_floating_point() and name[:2] != "d "
        ]
        for name in learned:
            tensors[name].requires_grad_()
        own = {name: tensors[name] for name in tensors if "_l0" in name}
        states = tuple(t for name, t in tensors.items() if name.startswith("state"))
        reset = tuple(t for name, t in tensors.items() if name.startswith("reset_state"))
        further = {"mask", "resets", "lengths", "static"} & set(tensors)
        options: dict[str, Any] = {name: tensors[name] for name in further}
        if reset:
            options["reset_state"] = reset
        state = states if len(states) > 1 else states[0]
        output, final = functional_call(module, own, (tensors["x"], state), options)
        ends = (output, *(final if isinstance(final, tuple) else (final,)))
        arriving = [t for name, t in tensors.items() if name.startswith("d ")]
        grads = torch.autograd.grad(ends, [tensors[n] for n in learned], arriving)
        results = dict(zip(["output", *(f"final {i}" for i in range(9))], ends, strict=False))
        results |= {f"d {name}": g for name, g in zip(learned, grads, strict=True)}
        return {name: t.detach().numpy() for name, t in results.items()}

    return Entry(shapes, call)


def torch_step(case: Case, kind: str) -> Entry:
    """A step on weights that were packed before."""
    module = at.RNN(getattr(cells, kind), case.inputs, case.hidden, num_layers=2)
    states = {f"state {i}": (2, case.rows, case.hidden) for i in range(1 + (kind == "LSTM"))}

    def call(arrays: Arrays) -> Arrays:
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        for name, parameter in module.named_parameters():
            parameter.data = tensors[name]
        state = tuple(tensors[name] for name in states)
        with torch.no_grad():
            output, new = module.prepare().step(tensors["x"], state if len(state) > 1 else state[0])
        new = new if isinstance(new, tuple) else (new,)
        return {"output": output.numpy(), **{f"final {i}": s.numpy() for i, s in enumerate(new)}}

    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    return Entry({"x": (case.rows, case.inputs), **states, **shapes}, call)


def numpy_layer(case: Case, kind: str) -> Entry:
    """Forward and backward of a NumPy layer."""
    made: dict[str, Callable[[], Any]] = {
        "LSTM": lambda: an.LSTM(case.inputs, case.hidden, seed=0, batch_first=True),
        "RNN": lambda: an.RNN(Everything, case.inputs, case.hidden, seed=0, P=case.hidden),
    }
    module, lead = made[kind](), (case.steps, case.rows)
    lead = lead[::-1] if kind == "LSTM" else lead
    states = {f"state {i}": (1, case.rows, case.hidden) for i in range(2)}
    shapes = {"x": (*lead, case.inputs), **states, **flags_of(case, lead)}
    if kind == "RNN":
        shapes["static"] = (case.rows, case.hidden)
    shapes |= {"d output": (*lead, case.hidden), **{f"d {n}": shape for n, shape in states.items()}}

    def call(arrays: Arrays) -> Arrays:
        options = {n: arrays[n] for n in ("mask", "resets", "lengths", "static") if n in arrays}
        state = tuple(arrays[name] for name in states)
        output, final = module.forward(arrays["x"], state, training=True, **options)
        d_final = tuple(arrays[f"d {name}"] for name in states)
        dx, d_state = module.backward(arrays["d output"], d_final)
        results = {"output": output, "d x": dx, **{f"d {n}": g for n, g in module.grads.items()}}
        results |= {f"final {i}": s for i, s in enumerate(final)}
        return results | {f"d state {i}": s for i, s in enumerate(d_state)}

    return Entry(shapes, call)


def numpy_step(case: Case, kind: str) -> Entry:
    module = an.RNN(getattr(cells, kind), case.inputs, case.hidden, 2, seed=0).prepare()
    states = {f"state {i}": (2, case.rows, case.hidden) for i in range(1 + (kind == "LSTM"))}

    def call(arrays: Arrays) -> Arrays:
        state = tuple(arrays[name] for name in states)
        output, new = module.step(arrays["x"], state if len(state) > 1 else state[0])
        new = new if isinstance(new, tuple) else (new,)
        return {"output": output, **{f"final {i}": s for i, s in enumerate(new)}}

    return Entry({"x": (case.rows, case.inputs), **states}, call)


def recurrence(case: Case, kind: str) -> Entry:
    """The primitive on NumPy arrays."""
    one, h = (Everything if kind == "RNN" else getattr(cells, kind)), case.hidden
    size, gates = (case.hidden // 2 + 1 if kind == "RNN" else h), len(one.gates)
    widths = [size if s.size == "P" else h for s in one.states]
    shapes: dict[str, tuple[int, ...]] = {"gates_x": (case.steps, case.rows, gates * h)}
    for l in one.linears:
        sizes = {"H": h, "P": size}
        shapes[f"weights {l.weight}"] = l.shape(sizes)
        shapes[f"weights {l.bias_name}"] = (len(l.declared) * sizes[l.out_size],)
    shapes |= {f"params {name}": (h,) for name in one.param_names}
    shapes |= {f"state {i}": (case.rows, n) for i, n in enumerate(widths)}
    shapes |= flags_of(case, (case.steps, case.rows))
    if case.masked:
        shapes |= {f"reset_state {i}": (case.rows, n) for i, n in enumerate(widths)}
    else:
        shapes["recurrent_mask"] = (gates, case.rows, widths[0])
    if one.static:
        shapes["static"] = (case.rows, h)

    def call(arrays: Arrays) -> Arrays:
        def group(word: str) -> Arrays:
            return {n.split()[1]: a for n, a in arrays.items() if n.split()[0] == word}

        names = {"mask", "resets", "lengths", "recurrent_mask", "static"} & set(arrays)
        outputs, final = anycell.recurrence(
            one,
            arrays["gates_x"],
            group("weights"),
            list(group("state").values()),
            group("params"),
            reset_state=list(group("reset_state").values()) or None,
            **{name: arrays[name] for name in names},
        )
        return {"output": outputs, **{f"final {i}": s for i, s in enumerate(final)}}

    return Entry(shapes, call)


ENTRIES: list[tuple[Callable[[Case, str], Entry], str]] = [
    *((torch_module, kind) for kind in ("LSTM", "GRU", "RNN")),
    *((numpy_layer, kind) for kind in ("LSTM", "RNN")),
    *((recurrence, kind) for kind in ("LSTM", "RNN")),
    (torch_step, "LSTM"),
    (torch_step, "GRU"),
    (numpy_step, "LSTM"),
]
entries = pytest.mark.parametrize(
    "entry, kind", ENTRIES, ids=[f"{entry.__name__}-{kind}" for entry, kind in ENTRIES]
)


def check_variants(entry: Entry, case: Case, torchs: bool, seed: int) -> int:
    """That every guise of every array gives what a contiguous copy of it gives."""
    arrays = draw(case, entry.shapes, seed)
    plain, count = entry.call(dict(arrays)), 0
    for name, array in arrays.items():
        for guise, variant in variants(array, torchs):
            same = np.array_equal(variant, array)
            wanted = plain if same else entry.call({**arrays, name: variant.copy()})
            results = entry.call({**arrays, name: variant})
            for key, value in wanted.items():
                kind = "gradient" if key.startswith("d ") else "forward"
                assert_close(results[key], value, "float32", kind, f"{name}, {guise}: {key}", ())
            count += 1
    return count


@pytest.fixture
def two_threads() -> Iterator[None]:
    before, ours = torch.get_num_threads(), cpu.pool.threads()
    torch.set_num_threads(2)
    cpu.pool.set_threads(2)
    yield
    torch.set_num_threads(before)
    cpu.pool.set_threads(ours)


@entries
@cases
def test_every_guise_of_every_array(
    entry: Callable[[Case, str], Entry], kind: str, case: Case, seed: int, two_threads: None
) -> None:
    """Permuted, sliced, in steps, expanded, misaligned, backwards, in packed records."""
    torchs = entry.__name__.startswith("torch")
    if "step" in entry.__name__ and case.steps > 1:
        case = case._replace(steps=1)
    assert check_variants(entry(case, kind), case, torchs, seed) > (10 if case.rows else 5)


# What else an error may be about: another input is another call, in which all that comes per row or
# step is wrong instead; and sizes follow from states and weights alike.
ANY = "x:|gates_x|state|mask|resets|lengths|static|weights|params"
CALLED = {"x": ANY, "gates_x": ANY, "state": "state|weights", "d": "grad_"}


@entries
def test_every_array_that_is_another_one(
    entry: Callable[[Case, str], Entry], kind: str, seed: int
) -> None:
    """Of another shape, number of axes or dtype: refused, and the error says of which argument."""
    case, count = Case(40, 9, 6, 8, "step" not in entry.__name__), 0
    one, numpy = entry(case, kind), not entry.__name__.startswith("torch")
    arrays = draw(case, one.shapes, seed)
    for name, array in arrays.items():
        if not numpy and re.search(r"_l\d", name):
            continue  # parameters, which nobody passes to a call
        if not numpy and name.startswith("d "):
            continue  # autograd looks after these
        word = name.split()[0]
        others = [array[None], array.astype(np.complex64), array.astype(np.int16)]
        if numpy:
            others += [np.full(array.shape, "a"), np.full(array.shape, None)]
        for axis in range(array.ndim):
            others += [array.take(range(1, array.shape[axis]), axis), array.take(0, axis)]
            others += [np.concatenate([array, array], axis), array.take([], axis)]
        for other in others:
            if other.dtype == np.int16 and (numpy or word == "lengths"):
                continue  # NumPy's layers convert numbers, and lengths are integers
            if word == "reset_state" and other.ndim == 1:
                continue  # one value for all rows
            with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
                one.call({**arrays, name: np.asarray(other)})
            said = str(caught.value)
            if entry is not torch_module or kind == "RNN":  # drop-ins have torch's own errors
                assert "expected" in said, (name, other.shape, said)
                assert re.search(CALLED.get(word, word), said), (name, other.shape, said)
            count += 1
    assert count > 10


# -- roads -----------------------------------------------------------------------------------------

# Every number of the package by which a call takes another road, and the road; None where there is
# but one to the same numbers, or none at all.
THRESHOLDS = {
    "layer/form.py": {
        "CHUNK_BYTES": "several chunks",
        "WORTH_PACKING": "the kernel multiplies the input",
        "WEIGHTS_SHARE": "the kernel multiplies the input",
        "FILLED": "a mask with holes",
        "WORTH_A_THREAD": "several threads",
    },
    "torch/dropin.py": {"_FEW_ROWS": "torch's cells in place of its layer"},
    "engines/cpu/door.py": {
        "LINE": None,
        "WORTH_SPREADING": "threads pack the weights",
        "NEAR_CACHE": "threads split the units",
        "FEW_ROWS": "threads split the units",
        "HARDLY_ANY_ROWS": "threads split the units",
    },
    "engines/cpu/memory.py": {"SMALL": "warm memory", "GRAIN": None, "LIMIT": None},
    "engines/cpu/generator.py": {"PANEL": "several panels of rows", "AHEAD": None, "SPINS": None},
    "engines/cpu/pool.py": {"SPIN": None, "MOST": None, "PATIENCE": None},
    "stream.py": {"FORMS": None},
    "keras/host.py": {"LINE": None},
    "numpy/check.py": {"MOST": None},  # a size beyond which it is a mistake
}


def test_no_threshold_is_forgotten() -> None:
    """Numbers with a name at the top of a module that has a part in a call."""
    package = Path(anycell.__file__).parent
    files = [*package.glob("*.py"), *package.glob("layer/*.py"), *package.glob("torch/*.py")]
    files += [*package.glob("keras/*.py"), *package.glob("numpy/*.py")]
    files += [package / "engines/vendor.py"]
    files += [
        package / f"engines/cpu/{n}.py" for n in ("__init__", "door", "memory", "generator", "pool")
    ]
    elsewhere = {"device.py", "doctor.py", "explain.py", "philox.py", "layouts.py", "cli.py"}
    numbers: dict[str, set[str]] = {}
    for file in files:
        if file.name in elsewhere or file.name == "graphs.py":  # of a GPU, or of no call at all
            continue
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                if name.isupper() and _is_number(node.value):
                    numbers.setdefault(str(file.relative_to(package)), set()).add(name)
    assert numbers == {name: set(roads) for name, roads in THRESHOLDS.items()}


def _is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_number(node.left) and _is_number(node.right)
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float))


def test_both_sides_of_every_road(
    monkeypatch: pytest.MonkeyPatch, seed: int, two_threads: None
) -> None:
    """The cases above take every road, and every way round it."""
    taken: set[tuple[str, bool]] = set()

    def spy(module: Any, name: str, look: Callable[..., None]) -> None:
        function = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            look(result, *args)
            return result

        monkeypatch.setattr(module, name, call)

    def look_at_form(form: Any, *args: Any) -> None:
        taken.update((road, bool(on(form))) for road, on in layer.form.ROADS.items())
        taken.add(("a mask with holes", args[8]))
        taken.add(("several panels of rows", args[4] > 48))
        taken.add(("groups of several rows", layer.row_group(args[4]) > 1))

    spy(layer.run, "form_of", look_at_form)
    spy(cpu.memory, "empty", lambda a, *_: taken.add(("warm memory", a.base is not None)))
    cells_of_torch = "torch's cells in place of its layer"
    spy(dropin.vendor, "wins", lambda wins, *_: taken.add(("torch's own layer", wins)))
    spy(dropin.LSTM, "_by_vendor", lambda ours, *_: taken.add((cells_of_torch, ours is not None)))
    for entry, kind in [(numpy_layer, "LSTM"), (torch_module, "GRU"), (torch_module, "LSTM")]:
        for case in CASES:
            one = entry(case, kind)
            one.call(draw(case, one.shapes, seed))
    roads = {*layer.form.ROADS, "groups of several rows", "torch's own layer"}
    roads |= {road for table in THRESHOLDS.values() for road in table.values() if road}
    assert taken == set(itertools.product(roads, (True, False)))


# -- forbidden pages -------------------------------------------------------------------------------

GUARDED = "import guarded; from guarded import *; main({cells}, {sizes}, {every}, {seed})"


def test_kernels_stay_within_their_arrays(seed: int) -> None:
    """Between forbidden pages; a part of the cases, another one for each seed."""
    some = "[cells.LSTM, cells.GRU, cells.LayerNormLSTM, Everything]"
    said = python(GUARDED.format(cells=some, sizes=(7, 33), every=5, seed=seed))
    assert int(said.split()[-2]) >= 200


@pytest.mark.slow
@pytest.mark.parametrize("isa", available())
def test_kernels_stay_within_their_arrays_all(isa: str, seed: int) -> None:
    """All cells, and every instruction set."""
    some = "[*BUILT_IN, Everything]"
    said = python(GUARDED.format(cells=some, sizes="SIZES", every=3, seed=seed), ANYCELL_ISA=isa)
    assert int(said.split()[-2]) >= 2000


def test_forbidden_pages_end_the_process() -> None:
    """One number beyond an array, at its end or before its beginning."""
    for end, place in ((True, 4), (False, -1)):
        code = f"""
            import ctypes, guarded
            array = guarded.guarded((4,), "float32", {end})
            address = array.__array_interface__["data"][0] + 4 * {place}
            print(ctypes.c_float.from_address(address).value)
        """
        with pytest.raises(AssertionError, match=r"ended with -(7|11)"):
            python(code)


# -- ANYCELL_CHECK ---------------------------------------------------------------------------------


def test_native_calls_are_held_against_their_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer whose buffers are too short, or which takes what nobody has checked, is caught."""
    assert cpu.check.ON, "tests run under ANYCELL_CHECK=1"
    host, one = NumpyHost("float32"), plan(cells.LSTM, 8, "float32")
    x, w = np.zeros((40, 9, 6), "float32"), np.zeros((32, 8), "float32")
    named = {"weight_ih": np.zeros((32, 6), "float32"), "weight_hh": w}
    named |= {f"state {name}": np.zeros((9, 8), "float32") for name in "hc"}

    def forward(x: Array = x, **others: Array) -> None:
        given = layer.Entering(x, None, None, [{**named, **others}])
        monkeypatch.setattr(layer.contract, "entering", lambda *_: given)
        layer.forward(host, one, {}, layer.Options(), keep=True)

    forward()
    with pytest.raises(AssertionError, match="input: the kernel would touch"):
        forward(np.zeros((40, 6, 9), "float32").transpose(0, 2, 1)[:, :, ::-1])
    with pytest.raises(AssertionError, match="weight_hh: the kernel would touch"):
        forward(weight_hh=w[:, :7])
    with pytest.raises(AssertionError, match="no multiple of 4 bytes"):
        forward(dict(variants(x))["1 bytes past an element"])
