"""``anycell.export``: what a C compiler makes of it computes what Python computes."""

import ctypes
import json
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from problems import Rows, Sized, Tied
from random_cells import random_cell
from tolerances import assert_close

import anycell
from anycell import Cell, cell, cells, cli, numpy
from anycell import lang as f
from anycell.engines.cpu import isa
from anycell.engines.cpu.ir import X86
from anycell.exporter import machine
from anycell.exporter.program import Program
from anycell.layer.parts import Recurrent
from anycell.numpy import RNN, Dense, Feedback, Standardise
from tests.project.test_docs import blocks

Array = npt.NDArray[Any]
CC = ["gcc", "-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", "-O2"]
MATH = {"sqrtf", "sinf", "cosf", "sincosf", "erff", "powf"}  # the functions that a library may call

pytestmark = pytest.mark.skipif(
    shutil.which("gcc") is None, reason="needs gcc: apt-get install gcc"
)

HERE = [f"x86-64{end}" for end, isa_ in (("", "generic"), ("-avx2", "avx2"), ("-avx512", "avx512"))
        if X86 and isa.runs(isa_)] or ["aarch64"]  # fmt: skip


def compiled(model: Any, folder: Path, **options: Any) -> Path:
    """Exports a model, and makes a library of it; the test program runs."""
    files = [file.name for file in anycell.export(model, folder, **options)]
    name = files[0].partition(".")[0]
    commands = [
        [*CC, "-fPIC", "-c", files[0]],
        [*CC, f"{name}_test.c", f"{name}.o", "-lm", "-o", "test"],
        ["./test"],
        ["gcc", "-shared", f"{name}.o", "-lm", "-o", f"{name}.so"],
    ]
    source = files[0].endswith(".c")
    for command in commands if source else commands[1:]:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    kinds = symbols(folder / f"{name}.o")
    assert {symbol for symbol, kind in kinds.items() if kind == "U"} <= (MATH if source else set())
    assert not set(kinds.values()) & set("bBdDC"), "no variables"
    return folder / f"{name}.so"


def symbols(file: Path) -> dict[str, str]:
    """The kinds of the symbols of an object file, as ``nm`` calls them."""
    said = subprocess.run(["nm", file], capture_output=True, text=True, check=True).stdout
    return {line[-1]: line[-2] for line in map(str.split, said.splitlines())}


def run(library: Path, x: Array, blocks: int = 1) -> Array:
    """Runs an exported model on ``[T, inputs]``, from its initial state, block by block."""
    header = library.with_suffix(".h").read_text(encoding="utf-8")
    sizes = {name: int(size) for name, size in re.findall(r"define \w+?_(\w+) (\d+)", header)}
    assert x.shape[1] == sizes["INPUTS"]
    functions, pointer = ctypes.CDLL(str(library)), np.ctypeslib.ndpointer(np.float32)
    reset, process, size = (
        getattr(functions, f"{library.stem}_{name}") for name in ("reset", "process", "state_size")
    )
    reset.argtypes, process.argtypes = [pointer], [pointer, pointer, pointer, ctypes.c_size_t]
    state = np.full(sizes["STATE_SIZE"] + 1, np.nan, np.float32)
    assert size() == 4 * sizes["STATE_SIZE"]
    reset(state)
    outputs = []
    for part in np.array_split(x.astype(np.float32), blocks):
        out = np.full((len(part) + 1, sizes["OUTPUTS"]), np.nan, np.float32)
        process(state, np.ascontiguousarray(part), out, len(part))
        assert np.isnan(out[-1]).all() and np.isnan(state[-1]), "it writes beyond its arrays"
        outputs.append(out[:-1])
    return np.concatenate(outputs)


def perturbed(layer: RNN, rng: np.random.Generator) -> RNN:
    """The layer with other numbers in all of its parameters, biases too."""
    for parameter in layer.parameters.values():
        parameter[...] = 0.4 * rng.standard_normal(parameter.shape)
    return layer


def sizes_of(cell: Cell) -> dict[str, int]:
    return {s: 3 + k for k, s in enumerate(sorted(cell.declared_sizes - {"H", "1"}))}


@cell(gates="a b", state="h c n=0.5 m")
def Everything(x: Any, r: Any, s: Any) -> Any:
    """Each function, reductions of groups, conditions, and states that change places."""
    a, b = f.clip(x.a + r.a, -1, 1), x.b + r.b
    far = (a > 0.1) & ~(b <= s.n) | (s.c == 0) | (a != a)
    v = f.where(far, f.softplus(a), f.log_sigmoid(b)) + 0.1 * f.log(1.5 + a) + f.sin(b) * f.cos(a)
    v = (
        v
        + f.maximum(f.relu(b), f.hard_sigmoid(a))
        - f.minimum(f.sqrt(f.abs(b)), f.erf(a))
        + f.exp(-f.abs(a)) ** 1.3
    )
    v = (
        v
        + f.where(b > 0, 1.0, -1.0) * f.softmax(v, groups=2)
        + f.max(v, groups=3)
        - f.sum(v, groups=2) / 9
        + f.mean(v)
    )
    h = f.tanh(f.where((a < 0) | (b >= 1), f.layer_norm(v, 0.1, groups=2), 0.5 * v)) * f.sigmoid(
        s.m
    )
    return h, s.n, s.c, 1.0


EVERY = [getattr(cells, name) for name in cells.__all__]
FURTHER = [Everything, Rows, Sized, Tied, cells.sLSTM(heads=2), cells.GRU(reset_after=False)]


@pytest.mark.parametrize("cell", [*EVERY, *FURTHER], ids=repr)
@pytest.mark.sample(every=2)
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
def test_a_random_cell(
    ones: bool, target: str, seed: int, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Against the graph node by node, whose ``run`` other tests compare with layers."""
    layer = perturbed(RNN(random_cell(seed, 6, ones), 3, 6, dtype="float64"), rng)
    check(layer, target, tmp_path, rng)


def check(model: RNN, target: str, folder: Path, rng: np.random.Generator) -> None:
    """Compares a library with the graph, sample by sample and in blocks."""
    program = Program([Recurrent.of(model)])
    x = rng.standard_normal((9, program.inputs)).astype(np.float32)
    library = compiled(model, folder, target=target)
    out = run(library, x)
    assert_close(out, program.run(x), "float32", "forward")
    assert np.array_equal(run(library, x, blocks=4), out)


# Cells that differ in stages, and numbers of units: of a part of a vector, of several in a loop.
OBJECTS = [
    (cells.LSTM, 64), (cells.LayerNormGRU, 33), (cells.LSTMP, 20), (cells.sLSTM(heads=2), 6),
    (cells.NAS, 1), (Everything, 24), (Rows, 7), (Sized, 100), (Tied, 8),
]  # fmt: skip


@pytest.mark.parametrize("target", HERE)
@pytest.mark.parametrize(("cell", "units"), OBJECTS, ids=repr)
@pytest.mark.sample(every=2)
def test_machine_code(
    cell: Cell, units: int, target: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    layer = RNN(cell, 3, units, num_layers=2, seed=0, **sizes_of(cell))
    check(layer, target, tmp_path, rng)


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
const stream = await load(bytes), other = await load(bytes);
const half = INPUTS * Math.floor(x.length / INPUTS / 2);
const blocks = [x.slice(0, half), x.slice(half)].map((part) => [...stream.process(part)]);
stream.reset();
const all = [stream, other].map((one) => [...one.process(x)]);
console.log(JSON.stringify([blocks.flat(), ...all, OUTPUTS]));
"""


def in_node(layer: RNN, x: Array, folder: Path) -> Array:
    """Exports a layer to WebAssembly, and runs it in Node: in blocks, again, and another stream."""
    names = [file.name for file in anycell.export(layer, folder, target="wasm32", name="net")]
    assert names[:2] == ["net.o", "net.wasm"] and names[-1] == "net.mjs"
    (folder / "x.json").write_text(json.dumps(x.ravel().tolist()))
    (folder / "run.mjs").write_text(SCRIPT)
    said = subprocess.run(["node", "run.mjs"], cwd=folder, capture_output=True, text=True)
    assert not said.returncode, said.stderr
    *outputs, width = json.loads(said.stdout)
    first, *others = (np.reshape(np.array(out, np.float32), (-1, width)) for out in outputs)
    assert all(np.array_equal(first, other) for other in others)
    return first


needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="apt-get install nodejs")


@needs_node
@pytest.mark.parametrize(("cell", "units"), [(cells.LSTM, 8), (Everything, 24), (Rows, 150)])
def test_webassembly(cell: Cell, units: int, tmp_path: Path, rng: np.random.Generator) -> None:
    """It runs without a linker; in the last case in memory that has to grow."""
    layer = RNN(cell, 3, units, num_layers=2, seed=0, **sizes_of(cell))
    program, steps = Program([Recurrent.of(layer)]), 200 if units > 100 else 9
    x = 0.3 * rng.standard_normal((steps, program.inputs)).astype(np.float32)
    assert_close(in_node(layer, x, tmp_path), program.run(x), "float32", "forward")


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
    assert_close(out, Program([Recurrent.of(layer)]).run(x), "float32", "forward")


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
    for target in HERE:
        file, *_ = anycell.export(layers, tmp_path, target=target)
        said = subprocess.run(["size", "-A", file], capture_output=True, text=True).stdout
        assert int(re.findall(r"\.text +(\d+)", said)[0]) < 12 << 10


def test_layers_of_numpy(tmp_path: Path, rng: np.random.Generator) -> None:
    series = rng.normal(3.0, 2.0, (9, 1, 3))
    scale = Standardise(3, "float64").fit(series)
    layer = perturbed(RNN(cells.LSTM, 3, 6, dtype="float64"), rng)
    readout = Dense(6, 2, dtype="float64", seed=1)
    expected = readout.forward(layer.forward(scale.forward(series))[0])[:, 0]
    library = compiled([scale, layer, readout], tmp_path, name="forecast")
    assert library.name == "forecast.so"
    assert_close(run(library, series[:, 0]), expected, "float32", "forward")


def test_feedback(tmp_path: Path, rng: np.random.Generator) -> None:
    """The last input says where the readout takes the place of the series."""
    layer = perturbed(RNN(cells.GRU, 3, 6, dtype="float64"), rng)
    model = Feedback(layer, Dense(6, 2, dtype="float64", seed=1))
    x, forced = rng.standard_normal((9, 1, 3)), np.arange(9) % 3 == 0
    expected = model.forward(x, forced=forced)[0][:, 0]
    rows = np.concatenate([x[:, 0], ~forced[:, None]], 1)
    rows[~forced, :2] = 0.0
    assert_close(run(compiled(model, tmp_path), rows), expected, "float32", "forward")


@pytest.mark.parametrize("target", ["c", HERE[0]])
def test_a_sequential_of_torch(target: str, tmp_path: Path, rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    nn, ours = torch.nn, anycell.torch
    first, last = ours.RNN(cells.PeepholeLSTM, 3, 6), ours.LSTM(6, 6, proj_size=4, num_layers=2)
    between = nn.Sequential(
        nn.Linear(6, 6), nn.ELU(0.7), nn.Linear(6, 6, bias=False), nn.GELU(),
        nn.GELU("tanh"), nn.Dropout(0.5), nn.Hardsigmoid(), nn.Hardtanh(-0.3, 0.6), nn.LeakyReLU(),
        nn.LayerNorm(6, elementwise_affine=False), nn.LogSigmoid(), nn.SiLU(), nn.Softsign(),
        nn.Softplus(2.0, 1.0), nn.Softmax(-1), nn.Identity(), nn.Tanh(), nn.ReLU(), nn.Sigmoid(),
    ).double().eval()  # fmt: skip
    norm, first, last = nn.LayerNorm(3).double(), first.double(), last.double()
    x = torch.from_numpy(rng.standard_normal((9, 1, 3)).astype(np.float32)).double()
    with torch.no_grad():
        expected = last(between(first(norm(x))[0]))[0][:, 0].numpy()
    library = compiled(nn.Sequential(norm, first, between, last), tmp_path, target=target)
    assert_close(run(library, x[:, 0].numpy()), expected, "float32", "forward")


def test_feedback_of_torch(tmp_path: Path, rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    model = anycell.torch.Feedback(anycell.torch.GRU(2, 6), torch.nn.Linear(6, 1)).double()
    x = torch.from_numpy(rng.standard_normal((9, 1, 2)).astype(np.float32)).double()
    with torch.no_grad():
        expected = model(x)[0][:, 0].numpy()
    rows = np.concatenate([x[:, 0].numpy(), np.zeros((9, 1))], 1)
    assert_close(run(compiled(model, tmp_path), rows), expected, "float32", "forward")


def test_a_sequential_of_keras(tmp_path: Path, rng: np.random.Generator) -> None:
    keras = pytest.importorskip("keras")
    layers, ours = keras.layers, anycell.keras
    model = keras.Sequential([
        keras.Input((None, 3)), ours.RNN(cells.PeepholeLSTM, 7, return_sequences=True),
        layers.LayerNormalization(), layers.Dense(6, "gelu"), layers.Dropout(0.5),
        layers.Activation("softmax"), ours.GRU(7, reset_after=False, return_sequences=True),
        layers.LayerNormalization(scale=False), ours.LSTM(7, return_sequences=True),
        layers.Dense(2, use_bias=False),
    ])  # fmt: skip
    x = rng.standard_normal((1, 9, 3)).astype(np.float32)
    expected = keras.ops.convert_to_numpy(model(x))[0]
    assert_close(run(compiled(model, tmp_path), x[0]), expected, "float32", "forward")
    model.save(tmp_path / "net.keras")
    saved = [str(tmp_path / "net.keras"), "--out", str(tmp_path / "again")]
    assert cli.main(["export", *saved]) == 0
    assert (tmp_path / "again/model.c").read_text() == (tmp_path / "model.c").read_text()
    feedback = ours.Feedback(ours.LSTM(7), layers.Dense(1))
    expected = keras.ops.convert_to_numpy(feedback(x))[0]
    rows = np.concatenate([x[0], np.zeros((9, 1), np.float32)], 1)
    assert_close(run(compiled(feedback, tmp_path / "fed"), rows), expected, "float32", "forward")


def test_what_is_refused(tmp_path: Path) -> None:
    """In a sentence, and before anything is written."""
    layer, folder = RNN(cells.LSTM, 3, 6), tmp_path / "out"
    for model, options, words in (
        ([layer, Dense(5, 2)], {}, "layer 1 of 5 inputs; expected 6, the outputs of the layer"),
        ([], {}, "model: given no layer with weights"),
        (3, {}, "model: given int; expected a layer or model"),
        ([layer, anycell.numpy.BatchNorm(6)], {}, "BatchNorm(6"),
        (RNN(cells.LSTM, 3, 6, bidirectional=True), {}, "which runs in reverse"),
        (anycell.compress.quantize(layer), {}, "weights in float32"),
        (layer, {"target": "pdp11"}, "target: given 'pdp11'; expected one of c, x86-64"),
        (layer, {"name": "My net"}, "name: given 'My net'; expected a name that C accepts"),
        (layer, {"name": "float"}, "name: given 'float'; expected a name that C accepts"),
        (layer, {"name": "stdio"}, "and no word or header of C or C++"),
        (layer, {"name": 3}, "name: given 3; expected a name that C accepts"),
    ):
        with pytest.raises((TypeError, ValueError), match=re.escape(words)):
            anycell.export(model, folder, **options)
    assert not folder.exists()


def test_what_is_refused_of_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    nn, layer = torch.nn, anycell.torch.GRU(3, 6)
    for module in (nn.LSTM(6, 6), nn.Conv1d(6, 6, 3), nn.LayerNorm((2, 3)), nn.Softmax(0)):
        with pytest.raises(TypeError, match=re.escape(f"the module {module!r}; expected")):
            anycell.export(nn.Sequential(layer, module), tmp_path)
    with pytest.raises(TypeError, match="before quantize"):
        anycell.export(anycell.compress.quantize(layer), tmp_path)


def test_what_is_refused_of_keras(tmp_path: Path) -> None:
    keras = pytest.importorskip("keras")
    layers, inputs = keras.layers, keras.Input((None, 3))
    backwards = anycell.keras.GRU(7, go_backwards=True, return_sequences=True, name="back")
    rms = layers.LayerNormalization(name="rms")
    rms.rms_scaling = True  # the argument warns
    whole = layers.Dense(2, name="whole")
    whole.build((None, None, 3))
    whole.quantize("int8")
    for layer, words in (
        (rms, "rms with rms_scaling=True"),
        (whole, "whole with weights of int8; expected real numbers"),
        (layers.Conv1D(2, 3, name="conv"), "the layer conv (Conv1D); expected Sequential"),
        (layers.Dense(2, keras.ops.square, name="odd"), "odd with the activation"),
        (backwards, "back with go_backwards=True"),
        (layers.Bidirectional(anycell.keras.GRU(7), name="both"), "the layer both"),
    ):
        with pytest.raises((TypeError, ValueError), match=re.escape(words)):
            anycell.export(keras.Sequential([inputs, layer]), tmp_path)


def test_the_program_of_the_guide(tmp_path: Path, rng: np.random.Generator) -> None:
    layers = [numpy.LSTM(1, 6, seed=0, dtype="float64"), Dense(6, 1, dtype="float64", seed=1)]
    anycell.export(layers, tmp_path / "exported", name="net")
    (program,) = blocks("docs/guides/deploying.md", "c")
    (tmp_path / "main.c").write_text(program, encoding="utf-8")
    (command,) = blocks("docs/guides/deploying.md", "sh")
    subprocess.run(["gcc", *command.split()[1:]], cwd=tmp_path, check=True)
    x = rng.standard_normal((9, 1, 1)).astype(np.float32)
    typed = "\n".join(map(repr, x.ravel().tolist()))
    said = subprocess.run(["./main"], cwd=tmp_path, input=typed, capture_output=True, text=True)
    expected = layers[1].forward(layers[0].forward(x)[0]).ravel()
    assert_close(np.array(said.stdout.split(), float), expected, "float32", "forward")


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs CMake: apt-get install cmake")
@pytest.mark.parametrize("target", ["c", HERE[0]])
def test_cmake_builds_and_tests_it(target: str, tmp_path: Path) -> None:
    anycell.export(RNN(cells.GRU, 3, 6, seed=0), tmp_path, target=target, name="gru")
    for command in ("cmake -B build .", "cmake --build build", "ctest --test-dir build"):
        done = subprocess.run(command.split(), cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "100% tests passed, 0 tests failed out of 1" in done.stdout


@pytest.mark.parametrize("target", ["c", HERE[0]])
def test_denormal_numbers_do_not_outlive_a_call(target: str, tmp_path: Path) -> None:
    """A decaying state becomes 0, and the caller's mode stays."""
    layer = RNN(cells.JANET, 1, 6, bias=False, seed=0)
    for name, parameter in layer.parameters.items():
        parameter[...] *= name != "weight_hh_l0"
    library = compiled(layer, tmp_path, target=target)
    x = np.zeros((400, 1), np.float32)
    x[0] = 1.0
    out = np.abs(run(library, x))
    if platform.machine() in ("x86_64", "AMD64", "aarch64", "arm64"):
        assert out[0].min() > 1e-3 and not out[-1].any()
        assert not ((out > 0) & (out < np.finfo(np.float32).tiny)).any()
    assert np.float32(1e-39) * np.ones(8, np.float32)[3] > 0, "the mode is as it was"
