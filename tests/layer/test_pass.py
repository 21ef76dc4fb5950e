"""A pass of a layer needs no Python: a C program calls it with its single table, forward and
backward, and gets the same bits as the layer. ``test_jax.py`` has XLA.
"""

import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from anycell import Cell, cells, layer
from anycell.engines.cpu import driver, hyperparameters, isa, jit
from anycell.engines.cpu.image import SUPPORTED, link
from anycell.engines.cpu.kernel import request
from anycell.engines.cpu.layout import Layout
from anycell.layer.recipe import Placed, Recipe
from anycell.numpy.check import numpy_dtype
from anycell.numpy.framework import Numpy
from anycell.plan import DTYPES, plan

Array = npt.NDArray[Any]
Case = tuple[Cell, str, dict[str, Any]]
STEPS, ROWS, INPUTS, UNITS = 7, 5, 9, 20

CASES: dict[str, Case] = {
    "both directions under a mask": (cells.LSTM, "float32", {"reverse": (False, True)}),
    "segments": (cells.GRU, "float64", {"checkpoint": 2}),
    "16 bits": (cells.LSTM, "float16", {}),
    "hyperparameters": (cells.LayerNormLSTM, "float32", {}),
    "random numbers": (cells.ZoneoutLSTM, "float32", {"training": True, "seed": 3}),
}


class Called(NamedTuple):
    """A pass that has run: its recipe, and copies of the arrays that it read and made."""

    recipe: Recipe
    options: layer.Options
    read: list[Array]
    made: list[Array]

    @property
    def runs(self) -> list[Placed]:
        """The pass itself, and the pass that recomputes the states of a segment."""
        return [run for one in self.recipe.passes for run in (one, one.again) if run is not None]

    def numbers(self) -> dict[str, int]:
        """The numbers of the call, besides arrays and memory."""
        return {"gang": 0, "first_row": 0, "seed": self.options.seed, "stream": self.options.stream}


def problem(rng: np.random.Generator, cell: Cell, dtype: str, how: Mapping[str, Any]) -> Any:
    """Draws the arrays and the options of a layer."""
    sizes, ends = {"H": UNITS}, ("", "_reverse")[: len(how.get("reverse", [0]))]
    shapes: dict[str, tuple[int, ...]] = {"x": (STEPS, ROWS, INPUTS)}
    for end in ends:
        learned = layer.shapes(cell, sizes, INPUTS, True)
        shapes |= {name + end: shape for name, shape in learned.items()}
    shapes |= {f"state {name}": (len(ends), ROWS, UNITS) for name in cell.state_names}
    arrays = {n: rng.standard_normal(s).astype(numpy_dtype(dtype)) for n, s in shapes.items()}
    if len(ends) > 1:
        arrays["mask"] = rng.random((STEPS, ROWS)) < 0.6
    return arrays, layer.Options(**how)


def passes(rng: np.random.Generator, case: Case) -> list[Called]:
    """Runs a layer, and returns its forward and its backward pass."""
    cell, dtype, how = case
    host, one, called = Numpy.of(dtype), plan(cell, UNITS, dtype), list[Called]()
    run = Recipe.run

    def watched(self: Recipe, given: list[Array], options: layer.Options) -> list[Array]:
        read = [array.copy() for array in given]
        made = run(self, given, options)
        called.append(Called(self, options, read, [array.copy() for array in made]))
        return made

    def poisoned(make: Callable[[Numpy, Any], Array]) -> Callable[[Numpy, Any], Array]:
        def filled(self: Numpy, what: Any) -> Array:
            array = make(self, what)
            array.view(np.uint8)[:] = 255  # as in C, so that unwritten bytes are equal
            return array

        return filled

    arrays, options = problem(rng, cell, dtype, how)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("anycell.layer.recipe.known", {})  # old ones hold unpatched functions
        patch.setattr(Recipe, "run", watched)
        for name in ("like", "lasting"):
            patch.setattr(Numpy, name, poisoned(getattr(Numpy, name)))
        out, finals, kept = layer.forward(host, one, arrays, options, keep=True)
        assert kept is not None
        layer.backward(host, one, arrays, options, kept, out.copy(), [f.copy() for f in finals])
    return called


def backward(run: Placed) -> bool:
    return "d_gates" in run.kernel.each


def objects(run: Placed) -> bytes:
    """The object file of a pass's kernel."""
    code = jit.stored(*request(Layout(run.plan, backward(run), isa.current())))
    assert code is not None
    return code


def test_a_kernel_refers_to_nothing_outside_itself(rng: np.random.Generator) -> None:
    """Otherwise a second process would have to load LLVM."""
    if not SUPPORTED:
        pytest.skip("the loader is for Linux on x86-64")
    for called in passes(rng, CASES["both directions under a mask"]):
        for run in called.runs:
            assert link(objects(run)) is not None


# -- C ---------------------------------------------------------------------------------------------
PROGRAM = """
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void take(void *to, int64_t bytes) {
    if (fread(to, 1, bytes, stdin) != (size_t)bytes) exit(2);
}

static int64_t number(void) {
    int64_t value;
    take(&value, sizeof value);
    return value;
}

static void *function(const char *library, const char *name) {
    void *code = dlopen(library, RTLD_NOW | RTLD_LOCAL), *symbol = code ? dlsym(code, name) : NULL;
    if (!symbol) exit(3);
    return symbol;
}

int main(int count, char **libraries) {
    int64_t length = number(), *template = malloc(8 * length);
    take(template, 8 * length);
    int64_t slots = number(), kind[slots], size[slots];
    char *address[slots];
    for (int64_t i = 0; i < slots; i++) {
        kind[i] = number(), size[i] = number();
        address[i] = aligned_alloc(64, (size[i] + 64) / 64 * 64);
        memset(address[i], kind[i] == 'z' ? 0 : 255, size[i]);
        if (kind[i] == 'r') take(address[i], size[i]);
        if (kind[i] == '#') address[i] = (char *)number();
    }
    int64_t rows = number(), *places = malloc(24 * rows);
    take(places, 24 * rows);
    for (int i = 2; i < count; i++) template[number()] = (int64_t)function(libraries[i], "door");
    int64_t table = number(), first = number(), call[2 + slots];
    int64_t form[] = {(int64_t)template, length, (int64_t)places, rows, first};
    call[0] = (int64_t)form;
    call[1] = (int64_t)address[table];
    memcpy(call + 2, address, 8 * slots);
    void (*execute)(int64_t *) = (void (*)(int64_t *))function(libraries[1], "execute");
    execute(call);
    for (int64_t i = 0; i < slots; i++)
        if (kind[i] == 'z' || kind[i] == 'm') fwrite(address[i], 1, size[i], stdout);
}
"""


def described(called: Called) -> bytes:
    """A pass for the C program: its table, targets and places of addresses, and doors."""
    recipe, words = called.recipe, list[bytes]()

    def say(*values: int) -> None:
        words.append(np.array(values, np.int64).tobytes())

    def slot(kind: str, bytes: int, content: Array | None = None) -> None:
        say(ord(kind), bytes)
        if content is not None:
            words.append(content.tobytes())

    table, hyper = np.array(recipe.template), [hyperparameters(run.plan) for run in called.runs]
    say(len(table), *table)
    read, numbers = (called.read, recipe.constants, hyper), called.numbers()
    first = len(read[0]) + len(called.made) + len(read[1])  # after these "block" and "table"
    say(first + 2 + len(numbers) + len(hyper))
    for array in called.read:
        slot("r", array.nbytes, array)
    for how, array in zip(recipe.hows, called.made, strict=True):
        slot("z" if how == "zeros" else "m", array.nbytes)
    for array in recipe.constants:
        slot("r", array.nbytes, array)
    slot("b", recipe.bytes), slot("b", 8 * len(table))
    for value in numbers.values():
        slot("#", 0, np.array([value]))
    for array in hyper:
        slot("r", array.nbytes, array)
    places = list(recipe.places)
    for i, run in enumerate(called.runs, first + 2 + len(numbers)):
        places.append((run.base + run.kernel.shared["hyper"], i, 0))
    say(len(places), *[value for place in places for value in place])
    for run in called.runs:
        (place,) = np.flatnonzero(table == run.kernel.address)
        say(place)
    say(first + 1, recipe.head[-1])
    return b"".join(words)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc: apt-get install gcc")
    folder = tmp_path_factory.mktemp("program")
    (folder / "main.c").write_text(PROGRAM)
    subprocess.run(["gcc", "-Wall", "-Werror", "main.c", "-o", "main"], cwd=folder, check=True)
    return folder / "main"


def shared(code: bytes, library: Path) -> Path:
    """Links an object file to a library."""
    library.with_suffix(".o").write_bytes(code)
    command = ["gcc", "-shared", library.with_suffix(".o"), "-o", library]
    subprocess.run(command, check=True)
    return library


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(3)
def test_a_c_program(rng: np.random.Generator, tmp_path: Path, program: Path, case: str) -> None:
    types = DTYPES[CASES[case][1]]
    both = passes(rng, CASES[case])
    code = jit.stored(*driver.request(types, isa.current()))
    assert code is not None
    native = shared(code, tmp_path / "driver.so")
    for called in both:
        doors = [
            shared(objects(run), tmp_path / f"{['forward', 'backward'][backward(run)]}.so")
            for run in called.runs
        ]
        command = [program, native, *doors]
        result = subprocess.run(command, input=described(called), capture_output=True, check=True)
        assert result.stdout == b"".join(array.tobytes() for array in called.made)
