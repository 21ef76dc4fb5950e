"""Checkpoints: the bits of a run that keeps everything, in less memory."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from problems import draw
from processes import HAS_TORCH, needs_torch, python

import anycell.numpy as an
from anycell import cells

if HAS_TORCH:
    import torch
    from torch_layers import LAYERS, run

    import anycell.torch as at
    from anycell.torch.operators import functional
    from tests.conformance.on_torch import by_function, by_module, module

STEPS, ROWS = 11, 3


@pytest.fixture(autouse=True)
def _short_chunks(set_layer: Callable[..., None]) -> None:
    """Chunks of two steps: a segment is one chunk or more."""
    set_layer(chunk_steps=lambda *_: 2)


# ---- PyTorch -------------------------------------------------------------------------------------
CELLS = (
    "LSTM GRU PeepholeLSTM LayerNormLSTM ZoneoutLSTM VariationalLSTM LSTMP NAS sLSTM GRUD".split()
)


CALLS = [
    (),
    ("state",),
    ("lengths", "repeat"),
    ("mask", "lengths", "state"),
    ("resets", "reset_state"),
    ("resets", "mask", "state", "repeat"),
]


@needs_torch
@pytest.mark.parametrize("directions", [(), ("bidirectional",)], ids=["", "both"])
@pytest.mark.parametrize("name", CELLS)
@pytest.mark.sample(every=7)
def test_same_bits(name: str, directions: tuple[str, ...]) -> None:
    cell = getattr(cells, name)
    for has in CALLS:
        problem = draw(cell, (STEPS, ROWS, 4, 6), (*has, *directions, "layers"))
        layer, solutions = module(problem, (cell,)).train(), []
        for layer.checkpoint in (None, 1, 5, "sqrt", STEPS):
            torch.manual_seed(1)  # of random masks
            solutions.append(by_module(layer, problem, None))
        for other in solutions[1:]:
            for what, value in other.items():
                assert np.array_equal(value, solutions[0][what]), (has, what)


@needs_torch
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.sample(1)
def test_drop_in_layers(kind: str) -> None:
    layer = LAYERS[kind][0](4, 5, 2, dropout=0.5, batch_first=True, checkpoint=4)
    assert "checkpoint=4" in repr(layer)
    x, found = torch.randn(ROWS, STEPS, 4), []
    for checkpoint in (4, None):
        layer.checkpoint = checkpoint
        torch.manual_seed(1)
        found.append(run(layer, x))
    assert "checkpoint" not in repr(layer)
    for what, value in found[0].items():
        assert torch.equal(value, found[1][what]), what


@needs_torch
def test_recurrent_masks_and_states(set_layer: Callable[..., None]) -> None:
    set_layer(chunk_steps=lambda *_: 1)
    has = ("recurrent_mask per gate", "bidirectional", "state", "return_states")
    problem = draw(cells.LSTM, (STEPS, ROWS, 4, 6), has)
    plain = by_function(functional.run_layer)(problem)
    for checkpoint in (2, "sqrt"):
        again = by_function(functional.run_layer, checkpoint=checkpoint)(problem)
        assert all(np.array_equal(value, again[name]) for name, value in plain.items())


@needs_torch
def test_packed_sequences() -> None:
    layer, x = at.RNN(cells.LSTM, 4, 5, bidirectional=True), torch.randn(STEPS, ROWS, 4)
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, [3, STEPS, 6], enforce_sorted=False)
    found = []
    for layer.checkpoint in (None, 4):
        output, _ = layer(packed)
        found.append(torch.autograd.grad(output.data.square().sum(), list(layer.parameters())))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@needs_torch
def test_what_autograd_keeps() -> None:
    """Besides x and the weights: the states at the borders, and neither output nor saved values."""
    layer, x = at.RNN(cells.LSTM, 4, 5), torch.randn(STEPS, ROWS, 4)
    own = {id(x), *map(id, layer.parameters())}
    kept: list[Any] = []
    for layer.checkpoint in (None, 4):
        kept.append([])
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept[-1].append(t) or t, lambda t: t
        ):
            layer(x)
    everything, borders = ([t for t in each if id(t) not in own] for each in kept)
    assert sum(t.numel() for t in everything) >= STEPS * ROWS * 5 * 5
    segments = -(-STEPS // 4)
    assert sorted(t.numel() for t in borders) == [0, segments * ROWS * 5, segments * ROWS * 5]


@needs_torch
@pytest.mark.slow
def test_again_and_twice() -> None:
    """A second backward of one graph, and a second derivative."""
    layer = at.RNN(cells.GRU, 2, 3, bidirectional=True, dtype=torch.float64, checkpoint=3)
    x = torch.randn(5, 2, 2, dtype=torch.float64, requires_grad=True)
    output, _ = layer(x)
    weight = torch.randn_like(output)
    first, second = (
        torch.autograd.grad((output * weight).sum(), x, retain_graph=True)[0] for _ in range(2)
    )
    assert torch.equal(first, second)
    assert torch.autograd.gradcheck(lambda x: layer(x)[0], (x,))
    assert torch.autograd.gradgradcheck(lambda x: layer(x)[0], (x,))


@needs_torch
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cell", [cells.LSTM, cells.GRU], ids=repr)
def test_compiled(cell: Any) -> None:
    layer = at.RNN(cell, 4, 5, checkpoint="sqrt")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for steps in (STEPS, 7, 9):
        x = torch.randn(steps, ROWS, 4, requires_grad=True)
        found = []
        for run in (layer, compiled):
            output, _ = run(x)
            found.append([output, *torch.autograd.grad(output.sum(), [x, *layer.parameters()])])
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


PEAK = """
import resource, torch, anycell.torch as at
T, B, H = 8192, 8, 512
layer = at.LSTM(H, H, checkpoint={checkpoint!r})
x, weight = torch.randn(T, B, H), torch.randn(T, B, H)
layer(x[:64])[0].backward(weight[:64])  # what is loaded and compiled once
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
layer(x)[0].backward(weight)
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@needs_torch
@pytest.mark.slow
def test_peak_memory() -> None:
    pytest.importorskip("resource")
    plain, less = (
        int(python(PEAK.format(checkpoint=c)).rpartition("peak")[2]) for c in (None, "sqrt")
    )
    assert less <= 0.3 * plain, (less, plain)


# ---- NumPy ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("bidirectional", [False, True], ids=["", "both"])
@pytest.mark.parametrize("name", ["LSTM", "ZoneoutGRU"])
def test_same_bits_in_numpy(name: str, bidirectional: bool) -> None:
    rng, found = np.random.default_rng(0), []
    x, lengths = rng.standard_normal((STEPS, ROWS, 4)), [STEPS, 0, 5]
    resets = rng.random((STEPS, ROWS)) < 0.3
    for checkpoint in (None, 1, 5, "sqrt"):
        layer = an.RNN(
            getattr(cells, name), 4, 6, 2, dropout=0.3, bidirectional=bidirectional, seed=0,
            dtype="float64", checkpoint=checkpoint,
        )  # fmt: skip
        assert ("checkpoint" in repr(layer)) is (checkpoint is not None)
        output, state = layer.forward(x, lengths=lengths, resets=resets, training=True)
        dx, dstate = layer.backward(output, state)
        results = [output, dx, *np.atleast_1d(state), *np.atleast_1d(dstate)]
        found.append([*results, *layer.grads.values()])
    for other in found[1:]:
        assert all(np.array_equal(*pair) for pair in zip(found[0], other, strict=True))


@pytest.mark.parametrize("given", [0, -1, True, 2.5, "all"], ids=str)
def test_errors(given: Any) -> None:
    message = "checkpoint: given .*; expected 'sqrt', a positive number of steps, or None"
    with pytest.raises(ValueError, match=message):
        an.LSTM(4, 5, checkpoint=given)
    if not HAS_TORCH:
        return
    with pytest.raises(ValueError, match=message):
        at.RNN(cells.LSTM, 4, 5, checkpoint=given)
    with pytest.raises(ValueError, match=message):
        at.GRU(4, 5, checkpoint=given)
    layer = at.LSTM(4, 5)
    layer.checkpoint = given
    with pytest.raises(ValueError, match=message):
        layer(torch.zeros(3, 2, 4))
