"""Exported programs: what a C compiler makes of them, and cells that they are tried with."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from guarded import guarded
from problems import Rows, Sized, Tied

import anycell
from anycell import Cell, cell, cells
from anycell import lang as f
from anycell.engines.cpu import isa
from anycell.engines.cpu.ir import X86
from anycell.numpy import RNN

Array = npt.NDArray[Any]
CC = ["gcc", "-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", "-O2"]
MATH = {"sqrtf", "sinf", "cosf", "sincosf", "erff", "powf"}  # the functions that a library may call

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
    if source and shutil.which("clang"):  # it finds inline functions that are not called
        commands.insert(0, ["clang", *CC[1:], "-fsyntax-only", files[0]])
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


def load(library: Path, state: Array, weights: Array) -> int:
    """What a library says of weights, whose bytes lie at any address."""
    function = getattr(ctypes.CDLL(str(library)), f"{library.stem}_load")
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    return int(function(state.ctypes.data, weights.ctypes.data, weights.nbytes))


def run(library: Path, x: Array, blocks: int = 1) -> Array:
    """Runs an exported model on ``[T, inputs]``, from its initial state, block by block; for 0
    blocks step by step.
    """
    header = library.with_suffix(".h").read_text(encoding="utf-8")
    sizes = {name: int(size) for name, size in re.findall(r"define \w+?_(\w+) (\d+)", header)}
    assert x.shape[1] == sizes["INPUTS"]
    functions, pointer = ctypes.CDLL(str(library)), np.ctypeslib.ndpointer(np.float32)
    reset, process, size = (
        getattr(functions, f"{library.stem}_{name}") for name in ("reset", "process", "state_size")
    )
    whole = "MEMORY" in sizes
    further = [np.full(sizes["MEMORY"] * len(x) + 1, np.nan, np.float32)] if whole else []
    reset.argtypes = [pointer]
    process.argtypes = [*[pointer] * 3, ctypes.c_size_t, *[pointer] * whole]
    state = np.full(sizes["STATE_SIZE"] + 1, np.nan, np.float32)
    assert size() == 4 * sizes["STATE_SIZE"]
    if "WEIGHTS_SIZE" in sizes:
        weights = np.fromfile(library.with_suffix(".bin"), np.uint8)
        assert len(weights) == sizes["WEIGHTS_SIZE"] and load(library, state, weights) == 0
    reset(state)
    outputs = []
    for part in np.array_split(x.astype(np.float32), blocks or len(x)):
        out = np.full((len(part) + 1, sizes["OUTPUTS"]), np.nan, np.float32)
        given = guarded(part.shape, np.float32, True)  # it reads nothing beyond
        given[...] = part
        if blocks:
            process(state, given, out, len(part), *further)
        else:
            step = getattr(functions, f"{library.stem}_step")
            step.argtypes = [pointer] * 3
            step(state, given, out)
        ends = out[-1], state[-1], *(memory[-1] for memory in further)
        assert all(np.isnan(end).all() for end in ends), "it writes beyond its arrays"
        outputs.append(out[:-1])
    return np.concatenate(outputs)


def perturbed(layer: RNN, rng: np.random.Generator) -> RNN:
    """The layer with other numbers in all of its parameters, biases too."""
    for parameter in layer.parameters.values():
        parameter[...] = 0.4 * rng.standard_normal(parameter.shape)
    return layer


def decaying(units: int = 6) -> RNN:
    """A layer whose state halves in silence."""
    layer = RNN(cells.JANET, 1, units, bias=False, seed=0)
    for name, parameter in layer.parameters.items():
        parameter[...] *= name != "weight_hh_l0"
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
