"""Cells of Keras on its torch backend: read by the reader of ``anycell.torch``."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

keras = pytest.importorskip("keras")
if keras.backend.backend() != "torch":
    pytest.skip("about Keras on torch", allow_module_level=True)
import torch  # noqa: E402
from keras_layers import number  # noqa: E402
from tolerances import assert_close  # noqa: E402

import anycell.keras as ak  # noqa: E402
from anycell import cells  # noqa: E402
from anycell.keras import backends  # noqa: E402
from anycell.torch.reading.planned import ReadStep  # noqa: E402

ops = keras.ops
B, T, I, H = 3, 4, 2, 6


@keras.saving.register_keras_serializable("tests of Keras on torch")
class Leaky(keras.layers.Layer):
    """A leaky unit, around a step that tests choose."""

    state_size = H

    def __init__(self, step: Callable[..., Any] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.step = step

    def build(self, shape: Any) -> None:
        self.w = self.add_weight(shape=(shape[-1], H), name="w")
        self.u = self.add_weight(shape=(H, H), name="u")
        self.calls = self.add_weight(shape=(), name="calls", initializer="zeros", trainable=False)

    def call(self, inputs: Any, states: Any) -> Any:
        (h,) = states
        new = ops.tanh(ops.matmul(inputs, self.w) + ops.matmul(h, self.u))
        h = 0.5 * h + new if self.step is None else self.step(self, h, new)
        return h, [h]


def both(step: Any = None, **options: Any) -> tuple[Any, Any]:
    """anycell's layer and Keras's, of one cell."""
    cell = Leaky(step)
    options = {"return_sequences": True, **options}
    made = [kind(cell, **options) for kind in (ak.RNN, keras.layers.RNN)]
    for layer in made:
        layer.build((B, None, I))
    return made[0], made[1]


def assert_alike(pair: tuple[Any, Any], x: Any) -> None:
    """Outputs, and the gradients of x and of all variables."""
    found = []
    for layer in pair:
        x = torch.tensor(x, dtype=torch.float32).requires_grad_()
        output = layer(x)
        wanted = [x, *(v.value for v in layer.trainable_variables)]
        found.append([output, *torch.autograd.grad(output.sin().sum(), wanted)])
        x = number(x)
    for mine, theirs in zip(*found, strict=True):
        assert_close(number(mine), number(theirs), "float32", "gradient")


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the calls of steps that were read."""
    counted: list[int] = []
    replay = ReadStep.replay

    def counting(self: Any, call: Any, tensors: Any) -> Any:
        counted.append(call.rows)
        return replay(self, call, tensors)

    monkeypatch.setattr(ReadStep, "replay", counting)
    return counted


def test_variables_are_read_in_every_call(rng: np.random.Generator, replays: list[int]) -> None:
    pair = both()
    for number_of_call in range(4):
        pair[0].cell.u.assign(0.3 * rng.normal(size=(H, H)))
        if number_of_call == 3:  # as ``model.to`` does
            new = torch.nn.Parameter(pair[0].cell.u.value.detach() * 0.5)
            vars(pair[0].cell.u)["_value"] = new
        assert_alike(pair, rng.normal(size=(B + number_of_call, T, I)))
    assert replays == [B, B + 1, B + 2, B + 3]
    copied = copy.deepcopy(pair[0])
    copied.cell.u.assign(0.0 * copied.cell.u)
    x = torch.ones(B, T, I)
    assert_close(number(pair[0](x)), number(pair[1](x)), "float32", "forward")
    assert np.abs(number(copied(x)) - number(pair[0](x))).max() > 1e-3


def test_frozen_variables(rng: np.random.Generator, replays: list[int]) -> None:
    pair = both()
    for trainable in (True, False, True):
        pair[0].cell.u.trainable = trainable
        assert_alike(pair, rng.normal(size=(B, T, I)))
        output = pair[0](torch.ones(B, T, I))
        output.sum().backward()
        assert (pair[0].cell.u.value.grad is not None) is trainable
        pair[0].cell.zero_grad(set_to_none=True)
        pair[0].cell.u.value.grad = None
    assert len(replays) == 6


def _of_large_batches(cell: Any, h: Any, new: Any) -> Any:
    return h + new if len(new) * H > 50 else 0.5 * new


def test_a_branch_on_the_size_of_the_batch(rng: np.random.Generator, replays: list[int]) -> None:
    """Its loop runs for the sizes that it was not read for."""
    pair = both(_of_large_batches)
    for rows in (B, 50, B, 50):
        assert_alike(pair, rng.normal(size=(rows, T, I)))
    assert replays == [B, B]


def _counts(cell: Any, h: Any, new: Any) -> Any:
    cell.calls.assign_add(1.0)
    return h + new


def _branches(cell: Any, h: Any, new: Any) -> Any:
    return h + new if float(ops.stop_gradient(ops.sum(new))) > 0.0 else new


def _of_rows(cell: Any, h: Any, new: Any) -> Any:
    return new - ops.mean(h, axis=0, keepdims=True)


REFUSED = {
    _counts: "",
    _branches: "for a branch or a number",
    _of_rows: "over the rows of the batch",
}


@pytest.mark.parametrize("step", REFUSED)
def test_what_is_not_read_runs_in_keras_loop(
    step: Any, rng: np.random.Generator, replays: list[int]
) -> None:
    pair = both(step)
    name, reason = pair[0].engine
    assert name == "keras" and REFUSED[step] in reason, reason
    assert reason.startswith("the cell Leaky cannot be read: test_torch.py:"), reason
    assert float(pair[0].cell.calls.value) == 0.0  # reading has no effect
    assert_alike(pair, rng.normal(size=(B, T, I)))
    assert not replays


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own
def test_where_a_reading_cannot_run_keras_loop_does(replays: list[int]) -> None:
    pair, x = both(), torch.ones(B, T, I)
    expected = number(pair[1](x))
    with ak.step_by_step():
        assert np.array_equal(number(pair[0](x)), expected)
    _, tangent = torch.func.jvp(lambda x: pair[0](x), (x,), (x,))
    _, right = torch.func.jvp(lambda x: pair[1](x), (x,), (x,))
    assert np.array_equal(number(tangent), number(right))
    with torch.autocast("cpu", torch.bfloat16):
        assert np.array_equal(number(pair[0](x)), number(pair[1](x)))
    value = ops.zeros((H, H))
    with keras.StatelessScope(state_mapping=[(pair[0].cell.u, value)]):
        assert np.array_equal(number(pair[0](x)), number(pair[1](x)))
    assert not replays
    assert_close(number(pair[0](x)), expected, "float32", "forward")
    assert replays == [B]


def test_a_stateful_layer_trains(rng: np.random.Generator, replays: list[int]) -> None:
    """Keras overwrites the states before the backward pass."""
    pair = both(stateful=True)
    for _ in range(2):
        assert_alike(pair, rng.normal(size=(B, T, I)))
    assert replays == [B, B]


# -- a card ----------------------------------------------------------------------------------------
def test_layers_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of ``anycell.torch``; here the engine of cards runs on the CPU."""
    gpu = pytest.importorskip("gpu")
    from problems import assert_solved, draw
    from shim import launches

    from tests.conformance import on_keras

    gpu.choose_gpu(monkeypatch)
    monkeypatch.setattr(gpu.TorchDevice, "tier", 1)
    problem = draw(cells.PeepholeLSTM, (3, 3, 4, 9), ("state", "mask", "resets"), "float32")
    with launches(monkeypatch) as launched:
        assert_solved(on_keras.by_layer()(problem), problem)
        assert launched
        monkeypatch.setattr(backends.home(), "gpu_visible", lambda: True)
        assert ak.RNN(cells.PeepholeLSTM, H).engine.name == "gpu"
        reason = ak.RNN(cells.PeepholeLSTM, H, dtype="float64").engine.reason
        assert "float64" in reason
