"""``anycell.export`` of models of each frontend: what it takes of them, and what it refuses."""

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
from exported import HERE, compiled, perturbed, run
from tolerances import assert_close

import anycell
from anycell import cells, cli
from anycell.exporter.program import WEIGHTS
from anycell.numpy import RNN, Dense, Feedback, Standardise

pytestmark = pytest.mark.skipif(
    shutil.which("gcc") is None, reason="needs gcc: apt-get install gcc"
)


@pytest.mark.parametrize("framework", ["torch", "keras"])
def test_weights_of_8_bits_of(framework: str, tmp_path: Path, rng: np.random.Generator) -> None:
    module = pytest.importorskip(framework)
    x = rng.standard_normal((9, 1, 3)).astype(np.float32)
    if framework == "torch":
        layer = anycell.compress.quantize(anycell.torch.LSTM(3, 6, proj_size=4))
        model, expected = layer, layer(module.from_numpy(x))[0][:, 0].detach().numpy()
    else:
        layers = [module.Input((None, 3)), anycell.keras.LSTM(6, return_sequences=True)]
        model = module.Sequential([*layers, module.layers.Dense(2)])
        model = anycell.compress.quantize(model)
        expected = module.ops.convert_to_numpy(model(x.swapaxes(0, 1)))[0]
    error = np.abs(run(compiled(model, tmp_path), x[:, 0]) - expected)
    assert np.median(error) < 1e-5 and error.max() < 1e-2


def test_layers_of_numpy(tmp_path: Path, rng: np.random.Generator) -> None:
    series = rng.normal(3.0, 2.0, (9, 1, 3))
    scale = Standardise(3, "float64").fit(series)
    layer = perturbed(RNN(cells.LSTM, 3, 6, dtype="float64"), rng)
    readout = Dense(6, 2, dtype="float64", seed=1)
    expected = readout.forward(layer.forward(scale.forward(series))[0])[:, 0]
    library = compiled([scale, layer, readout], tmp_path, name="forecast")
    assert library.name == "forecast.so"
    assert_close(run(library, series[:, 0]), expected, "float32", "forward")


@anycell.cell(gates="a", state="h")
def Blind(x: Any, r: Any, s: Any) -> Any:
    return anycell.tanh(r.a)


@pytest.mark.parametrize("blob", [False, True])
def test_feedback_that_a_cell_ignores(blob: bool, tmp_path: Path, rng: np.random.Generator) -> None:
    """No table is written that nothing reads: a compiler would warn of it."""
    model = Feedback(perturbed(RNN(Blind, 3, 6), rng), Dense(6, 2, seed=1))
    x = rng.standard_normal((5, 1, 3)).astype(np.float32)
    expected = model.forward(x, forced=np.arange(5) % 2 == 0)[0][:, 0]
    rows = np.concatenate([x[:, 0], np.arange(5)[:, None] % 2], 1)
    library = compiled(model, tmp_path, target="c", blob=blob)
    assert_close(run(library, rows), expected, "float32", "forward")


@pytest.mark.parametrize("target", ["c", *HERE])
@pytest.mark.parametrize("weights", [*WEIGHTS, "int8"])
@pytest.mark.sample(every=3)
def test_feedback(weights: str, target: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """The last input says where the readout takes the place of the series, which may be NaN."""
    model = Feedback(perturbed(RNN(cells.GRU, 3, 6), rng), Dense(6, 2, seed=1))
    first, x = Standardise(3), rng.standard_normal((9, 1, 3)).astype(np.float32)
    first.fit(5.0 * x)
    options = {} if weights == "int8" else {"weights": weights}
    if weights == "int8":
        model = anycell.compress.quantize(model)
    elif weights == "bfloat16":
        for part in (model.layer, model.readout):
            for name, parameter in part.parameters.items():
                if name.startswith("weight"):
                    bits = parameter.view(np.uint32)
                    bits[...] = bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000
    forced = np.arange(9) % 3 == 0
    x[4, 0, 2], x[5, 0, 2] = 1000.0, 0.0
    expected = model.forward(first.forward(x), forced=forced)[0][:, 0]
    rows = np.concatenate([x[:, 0], ~forced[:, None]], 1)
    rows[~forced, :2] = np.nan
    library = compiled([first, model], tmp_path, target=target, **options)
    error = np.abs(run(library, rows) - expected)
    assert np.median(error) < 1e-5 and error.max() < (1e-2 if weights == "int8" else 1e-5)


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
    x, forced = torch.from_numpy(rng.standard_normal((9, 1, 2))).double(), torch.arange(9) % 3 == 0
    with torch.no_grad():
        expected = model(x, forced=forced)[0][:, 0].numpy()
    rows = np.concatenate([x[:, 0].numpy(), ~forced[:, None].numpy()], 1)
    assert_close(run(compiled(model, tmp_path), rows), expected, "float32", "forward")


def test_a_sequential_of_keras(tmp_path: Path, rng: np.random.Generator) -> None:
    keras = pytest.importorskip("keras")
    layers, ours = keras.layers, anycell.keras
    model = keras.Sequential([
        keras.Input((None, 3)), ours.RNN(cells.PeepholeLSTM, 7, return_sequences=True),
        layers.LayerNormalization(), layers.Dense(6, "gelu"), layers.Dropout(0.5),
        layers.Activation("softmax"), ours.GRU(7, reset_after=False, return_sequences=True),
        layers.LayerNormalization(scale=False), ours.LSTM(7, return_sequences=True),
        *map(layers.Activation, ("selu", "mish", "leaky_relu", "hard_silu")),
        layers.Dense(2, use_bias=False),
    ])  # fmt: skip
    x = rng.standard_normal((1, 9, 3)).astype(np.float32)
    expected = keras.ops.convert_to_numpy(model(x))[0]
    assert_close(run(compiled(model, tmp_path), x[0]), expected, "float32", "forward")
    model.save(tmp_path / "net.keras")
    saved = [str(tmp_path / "net.keras"), "--out", str(tmp_path / "again")]
    assert cli.main(["export", *saved]) == 0
    assert (tmp_path / "again/model.c").read_text() == (tmp_path / "model.c").read_text()
    both = keras.Sequential([
        keras.Input((None, 3)), layers.Bidirectional(ours.LSTM(7, return_sequences=True)),
        layers.Dense(2),
    ])  # fmt: skip
    expected = keras.ops.convert_to_numpy(both(x))[0]
    assert_close(run(compiled(both, tmp_path / "both"), x[0]), expected, "float32", "forward")
    forced, model = np.arange(9) % 3 == 0, ours.Feedback(ours.LSTM(7), layers.Dense(1))
    model(x)
    rows = np.concatenate([x[0], ~forced[:, None]], 1)
    small = anycell.compress.quantize(model)
    for fed, most in (model, 1e-6), (small, 1e-2):
        expected = keras.ops.convert_to_numpy(fed(x, forced=forced))[0]
        error = np.abs(run(compiled(fed, tmp_path / str(most)), rows) - expected)
        assert np.median(error) < 1e-5 and error.max() < most


@pytest.mark.parametrize("target", ["c", HERE[-1]])
@pytest.mark.parametrize("kind", ["backwards", "both", "turned"])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.sample(every=3)
def test_directions_of_keras(
    whole: bool, kind: str, target: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Layers that go backwards, and both orders of two: rows are Keras's, or the last row is what
    layers return that do not return sequences.
    """
    keras = pytest.importorskip("keras")
    layers, first = keras.layers, kind != "both"

    def one(backwards: bool) -> Any:
        options = {"return_sequences": whole, "return_state": kind == "backwards"}
        return anycell.keras.RNN(cells.PeepholeLSTM, 7, go_backwards=backwards, **options)

    layer, readout = one(first), layers.Dense(2)
    if kind != "backwards":
        layer = layers.Bidirectional(layer, backward_layer=one(not first))
    x = rng.standard_normal((1, 9, 3)).astype(np.float32)
    results = layer(x)
    expected = readout(results if kind != "backwards" else results[0])
    library = compiled([layer, readout], tmp_path, target=target)
    assert "model_step" not in library.with_suffix(".h").read_text(encoding="utf-8")
    out = run(library, x[0])
    expected = keras.ops.convert_to_numpy(expected)[0]
    assert_close(out if whole else out[-1], expected, "float32", "runtime")


@pytest.mark.slow
def test_a_model_of_torch_alone(tmp_path: Path) -> None:
    """Nothing but anycell itself has been imported."""
    pytest.importorskip("torch")
    processes.python(
        "import anycell, torch; net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh());"
        f"assert anycell.export([net], {str(tmp_path)!r})",
    )


def test_what_is_refused_of_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    nn, layer = torch.nn, anycell.torch.GRU(3, 6)
    for module in (nn.LSTM(6, 6), nn.Conv1d(6, 6, 3), nn.LayerNorm((2, 3)), nn.Softmax(0)):
        with pytest.raises(TypeError, match=re.escape(f"the module {module!r}; expected")):
            anycell.export(nn.Sequential(layer, module), tmp_path)
    with pytest.raises(ValueError, match="model: given weights on the device 'meta'; expected"):
        anycell.export(nn.Sequential(layer, nn.Linear(6, 2, device="meta")), tmp_path)


def test_what_is_refused_of_keras(tmp_path: Path) -> None:
    keras = pytest.importorskip("keras")
    layers, inputs = keras.layers, keras.Input((None, 3))
    other = layers.Bidirectional(
        anycell.keras.GRU(7), backward_layer=anycell.keras.GRU(7, "relu", go_backwards=True),
        name="other",
    )  # fmt: skip
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
        (other, "other, whose layers are of different cells or sizes"),
        (layers.Bidirectional(layers.GRU(7), name="both"), "the layer both"),
        (
            layers.Bidirectional(anycell.keras.GRU(7), merge_mode="sum"),
            "with merge_mode='sum'; expected 'concat'",
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=re.escape(words)):
            anycell.export(keras.Sequential([inputs, layer]), tmp_path)
