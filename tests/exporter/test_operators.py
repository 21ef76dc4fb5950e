"""``anycell.export(program, target="torch")``: layers as operators of a library, for C++."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exported import EVERY, FURTHER, sizes_of
from tolerances import assert_close

import anycell
from anycell import Cell, cells
from anycell.exporter import operators
from tests.project.test_docs import blocks

torch = pytest.importorskip("torch")
packaged: Any = pytest.importorskip("anycell.torch.packaged")

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs cc: apt-get install gcc")
GUIDE = "docs/guides/deploying.md"
Dim = torch.export.Dim


class Model(torch.nn.Module):
    """A layer whose call has these arrays by name, and options."""

    def __init__(self, layer: Any, *names: str, **options: Any) -> None:
        super().__init__()
        self.layer, self.names, self.options = layer, names, options

    def forward(self, x: Any, *arrays: Any) -> Any:
        return self.layer(x, **dict(zip(self.names, arrays, strict=True)), **self.options)


def program_of(model: Any, inputs: tuple[Any, ...], dynamic: Any = None) -> Any:
    return torch.export.export(model.eval(), inputs, dynamic_shapes=dynamic)


def with_operators(program: Any, folder: Path) -> Any:
    """A module that runs a program with operators of a library in place of its layers."""
    layers = packaged.operators_of(program, operators.Operator)
    library = folder / f"{layers[0].name}.so"
    operators.write(layers, "anycell_test", library, packaged.LIBRARIES)
    return packaged.substituted(program, "anycell_test", layers, library).module()


def same(module: Any, model: Any, *inputs: Any) -> None:
    """Compares all results; torch projects the input, so that last bits may differ."""
    of_both = (torch.utils._pytree.tree_leaves(m(*inputs)) for m in (module, model))
    for result, expected in zip(*of_both, strict=True):
        kind = str(expected.dtype).removeprefix("torch.")
        assert result.shape == expected.shape
        assert_close(result.detach().numpy(), expected.detach().numpy(), kind, "forward")


@pytest.mark.parametrize("cell", [*EVERY, *FURTHER], ids=repr)
@pytest.mark.sample(1)
def test_every_cell(cell: Cell, tmp_path: Path, rng: np.random.Generator) -> None:
    """From states, with lengths and resets, in both directions, for any number of rows."""
    layer = anycell.torch.RNN(cell, 3, 6, num_layers=2, bidirectional=True, **sizes_of(cell))
    with torch.no_grad():
        for weight in layer.parameters():
            weight += 0.3 * torch.from_numpy(rng.standard_normal(weight.shape)).to(weight)
    names = "lengths", "resets", "state"
    model = Model(layer, *names, *["static"] * (cell.static is not None))

    def inputs(steps: int, rows: int) -> tuple[Any, ...]:
        width = {"1": 1, **layer.sizes}
        states = tuple([torch.randn(4, rows, width[s.size]).abs() for s in cell.states])
        further = [torch.randn(rows, width[cell.static_size])] if cell.static else []
        state: Any = states if len(states) > 1 else states[0]
        lengths = torch.randint(0, steps + 1, (rows,))
        return torch.randn(steps, rows, 3), lengths, torch.rand(steps, rows) < 0.2, state, *further

    rows = Dim("rows", min=2, max=4096)
    of_states: Any = tuple([{1: rows}] * len(cell.states)) if len(cell.states) > 1 else {1: rows}
    further = ({0: rows},) * (cell.static is not None)
    # With both directions and a mask, resets depend on the number of steps in another way.
    dynamic = {"x": {1: rows}, "arrays": ({0: rows}, {1: rows}, of_states, *further)}
    module = with_operators(program_of(model, inputs(7, 2), dynamic), tmp_path)
    for count in (2, 5, 33):
        same(module, model, *inputs(7, count))


def test_any_steps_and_further_options(tmp_path: Path) -> None:
    """Float64, weights that the program computes, states that resets restore, held outputs."""
    steps, rows = Dim("steps", max=4096), Dim("rows", max=4096)
    gru = anycell.torch.RNN(cells.GRU, 3, 7, dtype=torch.float64)
    gru = torch.nn.utils.parametrizations.weight_norm(gru, "weight_hh_l0")
    model = Model(gru, "mask", masked_output="repeat")
    x, mask = torch.randn(4, 2, 3).double(), torch.rand(4, 2) < 0.5
    dynamic = {"x": {0: steps, 1: rows}, "arrays": ({0: steps, 1: rows},)}
    module = with_operators(program_of(model, (x, mask), dynamic), tmp_path)
    for t, b in ((4, 2), (1, 3), (40, 5)):
        same(module, model, torch.randn(t, b, 3).double(), torch.rand(t, b) < 0.5)
    lstm = anycell.torch.RNN(cells.LSTM, 3, 7, batch_first=True)
    model = Model(lstm, "resets", "reset_state")
    state = torch.randn(1, 2, 7), torch.randn(1, 2, 7)
    inputs = torch.randn(2, 9, 3), torch.rand(2, 9) < 0.3, state
    same(with_operators(program_of(model, inputs), tmp_path), model, *inputs)


def test_a_library_of_another_model(tmp_path: Path) -> None:
    """Is told apart by the names of its operators; tensors that do not fit are errors."""
    layer, x = anycell.torch.RNN(cells.GRU, 3, 7), torch.zeros(4, 2, 3)
    with_operators(program_of(layer, (x,)), tmp_path)
    other = anycell.torch.RNN(cells.GRU, 3, 33)
    names = {
        packaged.operators_of(program_of(model, (x,)), operators.Operator)[0].name
        for model in (layer, other)
    }
    assert len(names) == 2
    ours = [getattr(torch.ops.anycell_test, n, None) for n in names]
    (operator,) = [op for op in ours if op is not None]
    tensors = [torch.zeros(4, 2, 21), torch.zeros(1, dtype=torch.uint8), *[torch.zeros(21)] * 2]
    for first in (tensors[0], torch.zeros(4, 21)):
        with pytest.raises(RuntimeError, match=r"does not fit|three axes"):
            operator(first, *tensors[1:])


class Computed(torch.nn.Module):
    """Weights that follow from an input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = anycell.torch.RNN(cells.GRU, 3, 7)

    def forward(self, x: Any, scale: Any) -> Any:
        weights = {n: p * scale for n, p in self.layer.named_parameters()}
        return torch.func.functional_call(self.layer, weights, (x,))


def test_what_is_refused(tmp_path: Path) -> None:
    x, layer = torch.zeros(4, 2, 3), anycell.torch.RNN(cells.GRU, 3, 7)
    program = program_of(layer, (x,))
    dropout = anycell.torch.RNN(cells.ZoneoutLSTM, 3, 7).train()
    for model, options, words in (
        (layer, {}, "model: given RNN; expected an ExportedProgram for 'torch'"),
        (program_of(torch.nn.Linear(3, 7), (x,)), {}, "LSTM and GRU are operators of torch"),
        (torch.export.export(dropout, (x,)), {}, "a layer in training"),
        (program_of(layer.half(), (x.half(),)), {}, "a layer in float16 on cpu"),
        (program_of(Computed(), (x, torch.ones(()))), {}, "follows from the input scale"),
        (program, {"weights": "bfloat16"}, "weights, blob: given 'bfloat16', False"),
        (program, {"target": "c"}, "target='torch'"),
    ):
        with pytest.raises((TypeError, ValueError), match=re.escape(words)):
            anycell.export(model, tmp_path / "out", **{"target": "torch", **options})
    assert not (tmp_path / "out").exists()


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of(anycell.torch.RNN(cells.GRU, 3, 7), (torch.zeros(4, 2, 3),))
    layers = packaged.operators_of(program, operators.Operator)
    for compiler, words in (("no-such-cc", "a C compiler"), ("false", "does not link")):
        monkeypatch.setenv("CC", compiler)
        with pytest.raises((ValueError, RuntimeError), match=words):
            operators.write(layers, "anycell_test", tmp_path / "test.so", packaged.LIBRARIES)


@pytest.mark.filterwarnings("ignore")  # AOTInductor's own, of several kinds
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++: apt-get install g++")
def test_the_program_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in C++ on LibTorch runs a package without Python; it takes minutes to compile."""
    monkeypatch.chdir(tmp_path)
    (example,) = [block for block in blocks(GUIDE, "py") if 'target="torch"' in block]
    names: dict[str, Any] = {"torch": torch, "anycell": anycell, "cells": cells}
    exec(example, names)
    (program,) = blocks(GUIDE, r"c\+\+")
    Path("main.cpp").write_text(program, encoding="utf-8")
    folder = packaged.LIBRARIES.parent
    includes = [f"-I{folder}/include", f"-I{folder}/include/torch/csrc/api/include"]
    libraries = [f"-L{folder}/lib", f"-Wl,-rpath,{folder}/lib", "-ltorch", "-ltorch_cpu", "-lc10"]
    options = ["-std=c++20", *includes, "-Wl,--no-as-needed", *libraries, "-ldl"]
    subprocess.run(["g++", "main.cpp", *options, "-o", "main"], check=True)
    said = subprocess.run(["./main"], capture_output=True, text=True, check=True).stdout
    expected = names["model"](torch.ones(50, 1, 3))
    last = np.float32(expected.detach().numpy().flat[-1])
    assert_close(np.float32(said), last, "float32", "forward")
