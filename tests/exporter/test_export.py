"""``anycell.export``: what a C compiler makes of it computes what Python computes."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exported import (
    CC,
    EVERY,
    FURTHER,
    HERE,
    Array,
    Everything,
    compiled,
    decaying,
    load,
    perturbed,
    run,
    sizes_of,
    symbols,
)
from guarded import guarded
from problems import Rows, Sized, Tied
from random_cells import random_cell
from tolerances import assert_close

import anycell
from anycell import Cell, cell, cells, numpy
from anycell import lang as f
from anycell.exporter import machine
from anycell.exporter.blob import CODES
from anycell.exporter.model import Model
from anycell.exporter.program import WEIGHTS
from anycell.layer.parts import Recurrent
from anycell.numpy import RNN, Dense
from tests.project.test_docs import blocks

GUIDE = "docs/guides/deploying.md"

pytestmark = pytest.mark.skipif(
    shutil.which("gcc") is None, reason="needs gcc: apt-get install gcc"
)


@pytest.mark.parametrize("cell", [*EVERY, *FURTHER], ids=repr)
@pytest.mark.sample(every=9)
def test_every_cell_in_two_layers(cell: Cell, tmp_path: Path, rng: np.random.Generator) -> None:
    layer = perturbed(RNN(cell, 3, 6, num_layers=2, dtype="float64", **sizes_of(cell)), rng)
    x, further = rng.standard_normal((9, 1, 3)).astype(np.float32), {}
    row = x[:, 0]
    if cell.static:
        width = {"1": 1, **layer.sizes}[cell.static_size]
        further["static"] = rng.standard_normal((1, width)).astype(np.float32)
        row = np.concatenate([row, np.repeat(further["static"], 9, 0)], 1)
    library = compiled(layer, tmp_path)
    expected = layer.forward(x, **further)[0][:, 0]
    assert_close(run(library, row), expected, "float32", "forward")
    assert np.array_equal(run(library, row, blocks=4), run(library, row))


@pytest.mark.parametrize("target", ["c", HERE[-1]])
@pytest.mark.parametrize("ones", [False, True])
@pytest.mark.sample(every=3)
def test_a_random_cell(
    ones: bool, target: str, seed: int, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Against the graph node by node, whose ``run`` other tests compare with layers."""
    layer = perturbed(RNN(random_cell(seed, 6, ones), 3, 6, dtype="float64"), rng)
    check(layer, target, tmp_path, rng)


def check(model: RNN, target: str, folder: Path, rng: np.random.Generator) -> None:
    """Compares a library with the graph, sample by sample and in blocks."""
    program = Model([Recurrent.of(model)])
    x = rng.standard_normal((9, program.inputs)).astype(np.float32)
    library = compiled(model, folder, target=target)
    out = run(library, x)
    assert_close(out, program.run(x), "float32", "forward")
    assert np.array_equal(run(library, x, blocks=4), out)
    assert np.array_equal(run(library, x, blocks=0), out)


@cell(gates="i f g o", state="h c", static="e")
def Fed(x: Any, r: Any, s: Any, e: Any) -> Any:
    """Large weights of four gates, and a loop that reads the sample."""
    i, f_, g, o = x + r
    c = f.sigmoid(f_) * s.c + f.sigmoid(i) * f.tanh(g) * e
    return f.sigmoid(o) * f.tanh(c), c


# Cells that differ in stages, and numbers of units: of a part of a vector, of several in a loop.
# Large weights are read by units, unless a stage has few of their gates, or the last units of the
# output are a part of a vector.
OBJECTS = [
    (cells.LSTM, 64), (cells.LayerNormGRU, 33), (cells.LSTMP, 20), (cells.sLSTM(heads=2), 6),
    (cells.NAS, 1), (Everything, 24), (Rows, 7), (Sized, 100), (Tied, 8), (cells.LSTM, 61),
    (Fed, 61), (Fed, 64), (cells.GRU, 72),
]  # fmt: skip


@pytest.mark.parametrize("target", HERE)
@pytest.mark.parametrize(("cell", "units"), OBJECTS, ids=repr)
@pytest.mark.sample(every=7)  # each target
def test_machine_code(
    cell: Cell, units: int, target: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    layer = RNN(cell, 3, units, num_layers=2, seed=0, **sizes_of(cell))
    check(layer, target, tmp_path, rng)


# The second one has a static input, and states of one number.
@pytest.mark.parametrize("target", ["c", *HERE])
@pytest.mark.parametrize("cell", [cells.LSTMP, Rows, Sized], ids=repr)
@pytest.mark.sample(every=5)  # each target
def test_layers_in_both_directions(
    cell: Cell, target: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    """They run over a whole sequence; what comes before and after, too."""
    options = {"dtype": "float64", **sizes_of(cell)}
    first, last = Dense(3, 4, dtype="float64", seed=0), RNN(cells.GRU, 6, 5, dtype="float64")
    both = perturbed(RNN(cell, 4, 6, num_layers=3, bidirectional=True, **options), rng)
    x, further = rng.standard_normal((9, 1, 3)).astype(np.float32), {}
    row = x[:, 0]
    if cell.static:
        width = {"1": 1, **both.sizes}[cell.static_size]
        further["static"] = rng.standard_normal((1, width)).astype(np.float32)
        row = np.concatenate([row, np.repeat(further["static"], 9, 0)], 1)
    middle = both.forward(first.forward(x), **further)[0]
    between = Dense(middle.shape[-1], 6, dtype="float64", seed=1)
    expected = last.forward(between.forward(middle))[0][:, 0]
    library = compiled([first, both, between, last], tmp_path, target=target)
    assert_close(run(library, row), expected, "float32", "forward")
    header = library.with_suffix(".h").read_text(encoding="utf-8")
    assert "model_process" in header and "model_step" not in header
    x4 = rng.standard_normal((9, 1, 4)).astype(np.float32)
    begins = compiled([both, between], tmp_path / "begins", target=target)  # no layer before it
    row = np.concatenate([x4[:, 0], row[:, 3:]], 1)
    expected = between.forward(both.forward(x4, **further)[0])[:, 0]
    assert_close(run(begins, row), expected, "float32", "forward")
    alone = compiled(perturbed(RNN(cells.GRU, 3, 6, bidirectional=True), rng), tmp_path / "alone")
    assert "MODEL_MEMORY 0\n" in alone.with_suffix(".h").read_text(encoding="utf-8")


@cell(gates="a", state="h")
def Mean(x: Any, r: Any, s: Any) -> Any:
    """A matmul of one number in place of many."""
    return f.tanh(x.a + r.a + f.linear(f.mean(s.h), "up"))


ROUNDED = [cells.LSTM, cells.LSTMP, cells.sLSTM(heads=2), Mean]


@pytest.mark.parametrize("target", ["c", *HERE])
@pytest.mark.parametrize("cell", ROUNDED, ids=repr)
@pytest.mark.sample(every=7)  # each target
def test_weights_of_8_bits(
    cell: Cell, target: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    """They give Python's numbers, up to an integer that is rounded in another way."""
    layer = perturbed(RNN(cell, 3, 6, num_layers=2, **sizes_of(cell)), rng)
    small = anycell.compress.quantize(layer)
    x = rng.standard_normal((9, 1, 3)).astype(np.float32)
    x[3] = 0.0
    library = compiled(small, tmp_path, target=target)
    expected, real = small.forward(x)[0][:, 0], layer.forward(x)[0][:, 0]
    error = np.abs(run(library, x[:, 0]) - expected)
    assert np.median(error) < 1e-5 and error.max() < 1e-2
    assert np.median(np.abs(real - expected)) > 1e-4, "it is not the layer of float32"
    x[5] = np.inf
    out = run(library, x[:, 0])
    assert np.isfinite(out[:5]).all() and np.isnan(out[5:]).all()


@pytest.mark.parametrize("target", ["c", *HERE])
def test_weights_of_16_bits(target: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """They give the numbers of a layer with rounded weights, and take half the memory."""
    layer = perturbed(RNN(cells.GRU, 3, 33), rng)
    code = [tmp_path / weights for weights in WEIGHTS]
    for folder in code:
        library = compiled(layer, folder, target=target, weights=folder.name)
    for name, parameter in layer.parameters.items():
        if name.startswith("weight"):
            bits = parameter.view(np.uint32)
            bits[...] = bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000
    x = rng.standard_normal((9, 1, 3)).astype(np.float32)
    assert_close(run(library, x[:, 0]), layer.forward(x)[0][:, 0], "float32", "forward")
    real, half = ((folder / "model.o").stat().st_size for folder in code)
    assert real - half > 2 * 3 * 33 * 33


@pytest.mark.slow
@pytest.mark.parametrize("target", HERE)
def test_weights_of_8_bits_are_faster(target: str, tmp_path: Path) -> None:
    layer = numpy.LSTM(1, 64, seed=0)
    models = layer, anycell.compress.quantize(layer)
    kinds = [compiled(m, tmp_path / str(k), target=target) for k, m in enumerate(models)]
    x, times = np.zeros((2000, 1), np.float32), np.zeros((9, 2))
    for k in range(18):
        before = time.process_time()
        run(kinds[k % 2], x)
        times[k // 2, k % 2] = time.process_time() - before
    real, integers = times.min(0)
    assert integers < real


@pytest.mark.parametrize("target", ["c", *HERE])
@pytest.mark.sample(every=3)
def test_weights_in_a_file(target: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """The file of a model with other weights takes the place of the first, without a compiler."""
    layers = [perturbed(RNN(cells.LSTMP, 3, 6, num_layers=2, P=5), rng) for _ in "ab"]
    x, results = rng.standard_normal((9, 3)).astype(np.float32), []
    for k, layer in enumerate(layers):
        inside = compiled(layer, tmp_path / f"inside{k}", target=target)
        apart = compiled(layer, tmp_path / f"apart{k}", target=target, blob=True)
        results.append(run(inside, x))
        assert np.array_equal(run(apart, x, blocks=2), results[k])
    shutil.copy(tmp_path / "apart0/model.bin", apart.with_suffix(".bin"))
    assert np.array_equal(run(apart, x), results[0])
    assert not np.array_equal(*results)


@pytest.mark.parametrize("count", [2000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("target", ["c", HERE[-1]])
def test_wrong_weights(target: str, count: int, tmp_path: Path, rng: np.random.Generator) -> None:
    """Each fault has a number, and nothing is read that is not there."""
    kinds = [RNN(cells.GRU, 2, units, seed=0) for units in (6, 7)]
    library, other = (
        compiled(k, tmp_path / str(n), target=target, blob=True) for n, k in enumerate(kinds)
    )
    right, strange = (np.fromfile(of.with_suffix(".bin"), np.uint8) for of in (library, other))
    state = np.full(200, np.nan, np.float32)

    def code(weights: Array, align: int = 4) -> str:
        place = guarded(weights.shape, np.uint8, True, align)
        place[...] = weights
        said = load(library, state, place)
        assert np.isnan(state).all() == (said != 0), "the state is changed only if all is well"
        return ("", *CODES)[said]

    changed = {at: right.copy() for at in (0, 4, 8, 12, 16, 20, len(right) - 1)}
    for at, weights in changed.items():
        weights[at] ^= 1
    names = ["NO_WEIGHTS", "OTHER_VERSION", *["OTHER_MODEL"] * 3, *["DAMAGED"] * 2]
    assert [code(weights) for weights in changed.values()] == names
    assert code(strange) == "OTHER_MODEL"
    assert {code(right[: 4 * n]) for n in range(len(right) // 4)} == {"TRUNCATED"}
    header = library.with_suffix(".h").read_text(encoding="utf-8")
    assert all(f"MODEL_{name}" in header for name in CODES)
    spoilt, place = right.copy(), guarded((len(right) + 4,), np.uint8, True)
    for _ in range(count):
        spoilt[...] = right
        at = rng.integers(0, 24 if rng.random() < 0.5 else len(right), rng.integers(1, 4))
        spoilt[at] = rng.integers(0, 256, len(at))
        end, shift = rng.integers(0, len(right) + 1), 4 * (rng.random() < 0.9)
        end = len(right) if rng.random() < 0.5 else end
        moved = place[shift : shift + end] if shift else place[1 : 1 + end]
        moved[...] = spoilt[:end]
        same = shift and end == len(right) and np.array_equal(spoilt, right)
        assert (load(library, state, moved) == 0) == same
    assert code(right) == ""
    assert load(library, state, place[1:][: len(right)]) == 1 + CODES.index("MISALIGNED")


# How the files of each format begin: with a name, and the number of the machine behind it.
FORMATS = {
    **dict.fromkeys(("x86-64", "x86-64-avx2", "x86-64-avx512"), b"\x7fELF\x02>"),
    "aarch64": b"\x7fELF\x02\xb7", "riscv64": b"\x7fELF\x02\xf3",
    **dict.fromkeys(("armv7", "cortex-m4", "cortex-m55"), b"\x7fELF\x01("),
    "x86-64-macos": b"\xcf\xfa\xed\xfe\x07\x00\x00\x01",
    "aarch64-macos": b"\xcf\xfa\xed\xfe\x0c\x00\x00\x01",
    "x86-64-windows": b"d\x86", "aarch64-windows": b"d\xaa", "wasm32": b"\x00asm",
}  # fmt: skip


@pytest.mark.parametrize("target", machine.PLATFORMS)
def test_every_target_compiles(target: str, tmp_path: Path) -> None:
    """With the functions of the header, and no others where GNU's ``nm`` can read the format."""
    layer = RNN(cells.PeepholeLSTM, 3, 6, num_layers=2, seed=0)
    file, *_ = anycell.export(layer, tmp_path, target=target, name="net")
    code, begin = file.read_bytes(), FORMATS[target]
    elf = begin[:1] == b"\x7f"
    assert code[:5] + code[18:19] == begin if elf else code.startswith(begin)
    functions = {f"net_{n}" for n in ("version", "state_size", "reset", "step", "process")}
    assert all(function.encode() in code for function in functions)
    assert b"memcpy" not in code and b"memset" not in code
    if elf or target == "x86-64-windows":
        kinds = symbols(file)
        assert {name for name, kind in kinds.items() if kind == "T"} == functions
        # Microsoft's marker of files with floating point, which every program has.
        assert {name for name, kind in kinds.items() if kind == "U"} <= {"_fltused"}


SCRIPT = """
import { readFileSync } from "node:fs";
import { load, INPUTS, OUTPUTS } from "./net.mjs";

const bytes = readFileSync("net.wasm"), x = JSON.parse(readFileSync("x.json"));
const weights = BLOB ? [readFileSync("net.bin")] : [];
const stream = await load(bytes, ...weights), other = await load(bytes, ...weights);
let said = "";
if (BLOB) await load(bytes, weights[0].subarray(1)).catch((error) => said = error.message);
if (BLOB && said !== "weights: no weights") throw new Error(said);
const half = WHOLE ? 0 : INPUTS * Math.floor(x.length / INPUTS / 2);
const blocks = [x.slice(0, half), x.slice(half)].map((part) => [...stream.process(part)]);
try { stream.process(x.slice(0, INPUTS + 1)); said = ""; } catch (error) { said = error.message; }
const expected = `x: given ${INPUTS + 1} numbers, expected ${INPUTS} a step`;
if (INPUTS > 1 && said !== expected) throw new Error(said);
stream.reset();
const all = [stream, other].map((one) => [...one.process(x)]);
console.log(JSON.stringify([blocks.flat(), ...all, OUTPUTS]));
"""


def in_node(layer: RNN, x: Array, folder: Path, blob: bool = False) -> Array:
    """Exports a layer to WebAssembly, and runs it in Node: in blocks, again, and another stream."""
    options = {"target": "wasm32", "name": "net", "blob": blob}
    names = [file.name for file in anycell.export(layer, folder, **options)]
    assert names[:2] == ["net.o", "net.wasm"] and "net.mjs" in names
    (folder / "x.json").write_text(json.dumps(x.ravel().tolist()))
    whole = str(layer.bidirectional).lower()
    script = SCRIPT.replace("WHOLE", whole).replace("BLOB", str(blob).lower())
    (folder / "run.mjs").write_text(script)
    said = subprocess.run(["node", "run.mjs"], cwd=folder, capture_output=True, text=True)
    assert not said.returncode, said.stderr
    *outputs, width = json.loads(said.stdout)
    first, *others = (np.reshape(np.array(out, np.float32), (-1, width)) for out in outputs)
    assert all(np.array_equal(first, other) for other in others)
    return first


needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="apt-get install nodejs")


@needs_node
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize(("cell", "units"), [(cells.LSTM, 8), (Everything, 24), (Rows, 150)])
@pytest.mark.sample(every=3)
def test_webassembly(
    cell: Cell, units: int, both: bool, tmp_path: Path, rng: np.random.Generator
) -> None:
    """It runs without a linker; in the last case in memory that has to grow."""
    layer = RNN(cell, 3, units, num_layers=2, bidirectional=both, seed=0, **sizes_of(cell))
    program, steps = Model([Recurrent.of(layer)]), 200 if units > 100 else 9
    x = 0.3 * rng.standard_normal((steps, program.inputs)).astype(np.float32)
    assert_close(in_node(layer, x, tmp_path, both), program.run(x), "float32", "forward")


@cell(gates="a", state="h")
def Turning(x: Any, r: Any, s: Any) -> Any:
    """Angles of any size, which take products of 128 bits."""
    return f.sin(x.a) + 0.5 * f.cos(x.a)


@pytest.mark.parametrize("target", ["c", HERE[-1], pytest.param("wasm32", marks=needs_node)])
def test_many_turns(target: str, tmp_path: Path) -> None:
    layer = RNN(Turning, 1, 6, bias=False)
    layer.parameters["weight_ih_l0"][:, 0] = range(1, 7)
    x = np.array([[0.0], [3.0], [1e5], [-7e6], [2.0**80]], np.float32)
    if target == "wasm32":
        out = in_node(layer, x, tmp_path)
    else:
        out = run(compiled(layer, tmp_path, target=target), x)
    assert_close(out, Model([Recurrent.of(layer)]).run(x), "float32", "forward")


CPLUSPLUS = """
#include "model.hpp"
#include <cstdio>

int main() {
    model::Stream one, other;
    float in[model::Stream::inputs] = {0.5f}, out[4];
    for (float *to = out; to < out + 3; to++) one.step(in, to);
    one.reset();
    one.process(in, out + 3, 1);
    other.step(in, out + 1);
    std::printf("%d", out[0] == out[1] && out[0] == out[3] && out[0] != out[2]);
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++: apt-get install g++")
def test_streams_of_cplusplus(tmp_path: Path) -> None:
    anycell.export([RNN(cells.GRU, 1, 6, seed=0), Dense(6, 1, seed=1)], tmp_path)
    (tmp_path / "main.cpp").write_text(CPLUSPLUS, encoding="utf-8")
    flags = ["-std=c++11", *CC[2:]]
    for command in ([*CC, "-c", "model.c"], ["g++", *flags, "main.cpp", "model.o", "-o", "main"]):
        subprocess.run(command, cwd=tmp_path, check=True)
    assert subprocess.run(["./main"], cwd=tmp_path, capture_output=True).stdout == b"1"


def test_a_compiler_that_reorders_sums_is_told_not_to(tmp_path: Path) -> None:
    anycell.export(RNN(cells.GRU, 3, 6, seed=0), tmp_path)
    command = ["gcc", "-ffast-math", "-c", "model.c"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert said.returncode and "compile this file without -ffast-math" in said.stderr
    subprocess.run([*command, "-fno-fast-math"], cwd=tmp_path, check=True)


def test_code_is_short(tmp_path: Path) -> None:
    layers = [numpy.LSTM(1, 20, seed=0), Dense(20, 1, seed=1)]
    for target in [target for target, begin in FORMATS.items() if begin[:1] == b"\x7f"]:
        file, *_ = anycell.export(layers, tmp_path, target=target, blob=True)
        said = subprocess.run(["size", "-A", file], capture_output=True, text=True).stdout
        assert sum(map(int, re.findall(r"\.(?:text|rodata)\S* +(\d+)", said))) < 12 << 10


ALLOCATIONS = """
#include "model.h"
#include <stdio.h>

void *__libc_malloc(size_t size);
static int count;
void *malloc(size_t size) { return count++, __libc_malloc(size); }
void *calloc(size_t size, size_t count) { (void)size, (void)count; return malloc(0); }

int main(void) {
    static float state[MODEL_STATE_SIZE], in[9 * MODEL_INPUTS], out[9 * MODEL_OUTPUTS];
    static void *volatile one;
    one = malloc(1);
    const int before = count;
    model_reset(state);
    model_step(state, in, out);
    model_process(state, in, out, 9);
    return 10 * before + count - before;
}
"""


@pytest.mark.parametrize("target", ["c", *HERE])
@pytest.mark.sample(2)
def test_nothing_is_allocated(target: str, tmp_path: Path) -> None:
    """The program returns 10 for a call of its own, and 1 more for any other one."""
    layer = RNN(Everything, 3, 24, num_layers=2, seed=0)
    compiled(layer, tmp_path, target=target)
    (tmp_path / "main.c").write_text(ALLOCATIONS, encoding="utf-8")
    subprocess.run(["gcc", "main.c", "model.o", "-lm", "-o", "main"], cwd=tmp_path, check=True)
    assert subprocess.run(["./main"], cwd=tmp_path).returncode == 10


# With SYSTEM, Linux ends a process at any call of the system but those that read, write and exit.
ALONE = """
#include "model.h"
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

static void alone(int allocates) AMONG {
    static float state[MODEL_STATE_SIZE], in[9 * MODEL_INPUTS], out[9 * MODEL_OUTPUTS];
    model_reset(state);
    model_step(state, in, out);
    model_process(state, in, out, 9);
    if (allocates)
        *(volatile char *)malloc(1 << 22) = 0;
}

int main(int count, char **arguments) {
    (void)arguments;
    if (SYSTEM && prctl(PR_SET_SECCOMP, 1))
        return 2;
    alone(count > 1);
    syscall(SYS_exit, 0);
}
"""


# Who ends the program, and what it then returns.
ENDED = {
    "the system": (["gcc", "-DSYSTEM=1", "-DAMONG="], -signal.SIGKILL),
    "RealtimeSanitizer": (
        ["clang", "-DSYSTEM=0", "-DAMONG=__attribute__((nonblocking))", "-fsanitize=realtime"], 43
    ),
}  # fmt: skip


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a mode of Linux")
@pytest.mark.parametrize("by", ENDED)
@pytest.mark.parametrize("target", ["c", *HERE])
def test_nothing_is_asked_of_the_system(target: str, by: str, tmp_path: Path) -> None:
    """No lock that waits, no file, no memory. A program that allocates is ended."""
    compiler, end = ENDED[by]
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"needs {compiler[0]}, from version 20 on")
    compiled(RNN(Everything, 3, 24, num_layers=2, seed=0), tmp_path, target=target)
    (tmp_path / "main.c").write_text(ALONE, encoding="utf-8")
    command = [*compiler, "main.c", "model.o", "-lm", "-o", "main"]
    if subprocess.run(command, cwd=tmp_path).returncode:
        assert compiler[0] == "clang"
        pytest.skip("this clang has no RealtimeSanitizer: it needs version 20, and its compiler-rt")
    called = [subprocess.run(["./main", *more], cwd=tmp_path) for more in ([], ["allocating"])]
    if called[0].returncode == 2:
        pytest.skip("this system refuses the mode")
    assert [call.returncode for call in called] == [0, end]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["c", *HERE])
def test_silence_is_not_slower(target: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """A state that decays for 10^6 samples takes no longer than one that does not."""
    library = compiled(decaying(20), tmp_path, target=target)
    noise, silence = rng.standard_normal((10**6, 1)).astype(np.float32), np.zeros((10**6, 1))
    silence[0], times = 1.0, []
    for x in [noise, silence] * 5:
        before = time.process_time()
        run(library, x)
        times.append(time.process_time() - before)
    assert min(times[1::2]) < 1.2 * min(times[::2])


@pytest.mark.parametrize("target", ["c", *HERE])
def test_small_numbers_become_0(target: str, tmp_path: Path) -> None:
    """In steps as in blocks, in the state and in a sample; else a step leaves the mode alone."""
    library = compiled(decaying(), tmp_path, target=target)
    x = np.r_[1.0, np.zeros(200), 1e-39, np.zeros(9), 2e-38][:, None]
    out = run(library, x, blocks=0)
    assert np.array_equal(out, run(library, x))
    assert (out[:99] != 0).all() and not out[130:-1].any()


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("units", [3, 8, 20, 61])
@pytest.mark.sample(every=3)
def test_one_output(units: int, weights: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """Lanes hold the inputs of a readout of one number, not its outputs."""
    layers = [perturbed(RNN(cells.LSTM, 2, units), rng), Dense(units, 1, seed=1)]
    x, outs = rng.standard_normal((9, 2)).astype(np.float32), list[Array]()
    for target in ("c", *HERE):
        library = compiled(layers, tmp_path / target, target=target, weights=weights)
        outs.append(run(library, x))
        assert np.array_equal(run(library, x, blocks=0), outs[-1])
        assert_close(outs[-1], outs[0].astype(np.float64), "float32", "forward")


@pytest.mark.parametrize("target", ["c", *HERE])
def test_sigmoid_and_tanh(target: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """They are within 4e-7, never beyond their limits, which they reach, and odd."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("anycell.torch")
    first = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(first.weight)
    x = np.sort(np.exp(rng.uniform(-20, 4, 50_000)).astype(np.float32))
    x = np.concatenate([-x[::-1], [0.0], x, [np.inf, -np.inf, np.nan]])[:, None]
    for name, exact in (("Tanh", np.tanh), ("Sigmoid", lambda v: 1 / (1 + np.exp(-v)))):
        model = torch.nn.Sequential(first, getattr(torch.nn, name)())
        out = run(compiled(model, tmp_path / name, target=target), x)
        assert np.isnan(out[-1, 0]) and out[-3, 0] == 1.0
        out, inside = out[:-3], x[:-3].astype(np.float64)
        assert out.max() == 1.0 and out.min() == (0.0 if name == "Sigmoid" else -1.0)
        error = np.abs(out - exact(inside))
        assert error.max() < 4e-7
        if name == "Tanh":
            assert (error <= 5e-7 * np.abs(exact(inside))).all()
            assert np.array_equal(out, -out[::-1])


@pytest.mark.parametrize("target", ["c", HERE[-1]])
def test_functions_of_large_numbers(target: str, tmp_path: Path) -> None:
    """Up to the largest, they are torch's in float64: its GELU of float32 overflows before."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("anycell.torch")
    nn, first = torch.nn, torch.nn.Linear(1, 16, bias=False)
    nn.init.ones_(first.weight)
    sizes = np.float32([0.0, 1e-40, 1e-30, 88, 100, 1e5, 1e13, 1e20, 1.7e38, 3.4028234e38])
    x = np.concatenate([sizes, -sizes])[:, None]
    for k, function in enumerate((
        nn.ELU(0.7), nn.GELU(), nn.GELU("tanh"), nn.Hardsigmoid(), nn.Hardtanh(-0.3, 0.6),
        nn.LeakyReLU(), nn.LogSigmoid(), nn.Sigmoid(), nn.SiLU(), nn.Softsign(), nn.Tanh(),
        nn.Softplus(2.0, 1.0),
    )):  # fmt: skip
        model = nn.Sequential(first, function)
        out = run(compiled(model, tmp_path / str(k), target=target), x)
        with torch.no_grad():
            expected = model.double()(torch.from_numpy(x).double()).numpy()
        first.float()
        assert np.allclose(out, expected, rtol=1e-5, atol=1e-30), function


def test_what_is_refused(tmp_path: Path) -> None:
    """In a sentence, and before anything is written."""
    layer, folder = RNN(cells.LSTM, 3, 6), tmp_path / "out"
    for model, options, words in (
        ([layer, Dense(5, 2)], {}, "layer 1 of 5 inputs; expected 6, the outputs of the layer"),
        ([], {}, "model: given no layer with weights"),
        (3, {}, "model: given int; expected a layer or model"),
        ([layer, anycell.numpy.BatchNorm(6)], {}, "BatchNorm(6"),
        (layer, {"weights": "int4"}, "weights: given 'int4'; expected one of float32, bfloat16"),
        (layer, {"target": "pdp11"}, "target: given 'pdp11'; expected one of c, x86-64"),
        (layer, {"name": "My net"}, "name: given 'My net'; expected a name that C accepts"),
        (layer, {"name": "float"}, "name: given 'float'; expected a name that C accepts"),
        (layer, {"name": "stdio"}, "and no word or header of C or C++"),
        (layer, {"name": 3}, "name: given 3; expected a name that C accepts"),
    ):
        with pytest.raises((TypeError, ValueError), match=re.escape(words)):
            anycell.export(model, folder, **options)
    assert not folder.exists()


def test_the_program_of_the_guide(tmp_path: Path, rng: np.random.Generator) -> None:
    layers = [numpy.LSTM(1, 6, seed=0, dtype="float64"), Dense(6, 1, dtype="float64", seed=1)]
    anycell.export(layers, tmp_path / "exported", name="net")
    program, _ = blocks(GUIDE, "c")
    (tmp_path / "main.c").write_text(program, encoding="utf-8")
    (command,) = blocks(GUIDE, "sh")
    subprocess.run(["gcc", *command.split()[1:]], cwd=tmp_path, check=True)
    x = rng.standard_normal((150, 1, 1)).astype(np.float32)
    typed = "\n".join(map(repr, x.ravel().tolist()))
    said = subprocess.run(["./main"], cwd=tmp_path, input=typed, capture_output=True, text=True)
    expected = layers[1].forward(layers[0].forward(x)[0]).ravel()
    assert_close(np.array(said.stdout.split(), float), expected, "float32", "forward")
    if shutil.which("g++"):  # blocks of samples against the whole sequence
        (program,) = blocks(GUIDE, "cpp")
        (tmp_path / "main.cpp").write_text(program, encoding="utf-8")
        for line in ("gcc -c exported/net.c", "g++ -Iexported main.cpp net.o -lm -o main"):
            subprocess.run(line.split(), cwd=tmp_path, check=True)
        said = subprocess.run(["./main"], cwd=tmp_path, input=x.tobytes(), capture_output=True)
        assert_close(np.frombuffer(said.stdout, np.float32), expected, "float32", "forward")


@needs_node
def test_the_script_of_the_guide(tmp_path: Path) -> None:
    layer = RNN(cells.LSTM, 1, 6, seed=0)
    anycell.export(layer, tmp_path, name="net", target="wasm32")
    (script,) = blocks(GUIDE, "js")
    script = (
        'import { readFileSync } from "node:fs";\n'
        "globalThis.fetch = async (file) => ({ arrayBuffer: async () => readFileSync(file) });\n"
        f"{script}console.log(JSON.stringify([...out]));"
    )
    (tmp_path / "main.mjs").write_text(script, encoding="utf-8")
    said = subprocess.run(["node", "main.mjs"], cwd=tmp_path, capture_output=True, text=True)
    expected = layer.forward(np.float32([[[0.1]], [[0.2]]]))[0].ravel()
    assert_close(np.array(json.loads(said.stdout)), expected, "float32", "forward")


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs CMake: apt-get install cmake")
@pytest.mark.parametrize("target", ["c", HERE[0]])
def test_cmake_builds_and_tests_it(target: str, tmp_path: Path) -> None:
    anycell.export(RNN(cells.GRU, 3, 6, seed=0), tmp_path, target=target, name="gru")
    for command in ("cmake -B build .", "cmake --build build", "ctest --test-dir build"):
        done = subprocess.run(command.split(), cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "100% tests passed, 0 tests failed out of 1" in done.stdout
