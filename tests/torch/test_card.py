"""Layers in programs on a card: threads, streams, graphs, odd batches, long sequences.

Tests that are also meaningful without a card run in Triton's interpreter as well.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from gpu import (  # before anything else that may import Triton
    CARD,
    COMPILES,
    DEVICE,
    SLOW,
    choose_gpu,
    torch,
)
from processes import at_once, python
from tolerances import assert_close

import anycell
from anycell import cells
from anycell.torch.framework import TorchDevice
from anycell.torch.operators import ops
from tests.torch.test_gpu import results

gpu = pytest.mark.gpu
TIERS = (pytest.param(2, marks=SLOW), 1, pytest.param(3, marks=pytest.mark.more))


class Place(NamedTuple):
    """The place where a test runs, with its dtype and sizes."""

    name: str
    dtype: Any
    hidden: int
    batch: int
    steps: int

    def layer(self, cell: Any = cells.PeepholeLSTM, **options: Any) -> Any:
        """Returns a layer with 8 inputs."""
        return anycell.torch.RNN(
            cell, 8, self.hidden, device=DEVICE, **{"dtype": self.dtype, **options}
        )

    def input(self, *shape: int, grad: bool = True) -> Any:
        """Random numbers, ``[steps, batch, 8]`` by default."""
        shape = shape or (self.steps, self.batch, 8)
        return torch.randn(shape, device=DEVICE, dtype=self.dtype).requires_grad_(grad)

    @property
    def told(self) -> str:
        return str(self.dtype).removeprefix("torch.")


@pytest.fixture(params=["interpreter", pytest.param("card", marks=gpu)])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A card, with tiers of many programs and graphs of tier 3; without one, the interpreter."""
    torch.manual_seed(request.getfixturevalue("seed"))
    if request.param == "card":
        yield Place("card", torch.bfloat16, 64, 20, 40)
        return
    if CARD:
        pytest.skip("there is a card")
    choose_gpu(monkeypatch)
    ops._planned.cache_clear()
    with np.errstate(all="ignore"):
        yield Place("interpreter", torch.float32, 18, 3, 3)
    ops._planned.cache_clear()


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(TorchDevice, "tier", request.param)
    return request.param


def in_a_thread(run: Any) -> Any:
    """Runs a function in a thread that is new to CUDA; returns its result or raises its error."""

    def body() -> Any:
        with np.errstate(all="ignore"):
            return run()

    return at_once(body)[0]


def same(mine: dict[str, Any], right: dict[str, Any]) -> None:
    for name, value in right.items():
        assert torch.equal(mine[name], value), name


def assert_right(layer: Any, x: Any, given: dict[str, Any], place: Place, seed: int) -> None:
    """Asserts that outputs and gradients agree with the layer's own composite in float64."""
    expected = results(layer, x, given, seed, fused=False)
    for name, value in results(layer, x, given, seed, fused=True).items():
        kind = "gradient" if name.startswith("d ") else "forward"
        assert_close(value.double(), expected[name], place.told, kind, name, ())


# -- in both places --------------------------------------------------------------------------------
def test_threads_that_are_new_to_cuda(place: Place, tier: int, seed: int) -> None:
    """New threads can run both passes, or only the backward pass of another thread's graph."""
    layer, x = place.layer(), place.input()
    right = results(layer, x, {}, seed, fused=True)
    same(in_a_thread(lambda: results(layer, x, {}, seed, fused=True)), right)
    output, _ = layer(x)
    (dx,) = torch.autograd.grad(output.sum(), x, retain_graph=True)
    (again,) = in_a_thread(lambda: torch.autograd.grad(output.sum(), x))
    assert torch.equal(again, dx)


def test_inference_mode_comes_first(place: Place, tier: int) -> None:
    """Values that a layer keeps for later calls do not depend on the mode of their creation."""
    layer, x = place.layer(), place.input(grad=False)
    found = []
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        for _ in range(4):  # graphs of tier 3 are not made at once
            with mode():
                found.append(layer(x)[0].detach().clone())
    for output in found:
        assert torch.equal(output, found[0])


def test_batches_of_any_size(place: Place, tier: int, seed: int) -> None:
    """Numbers of rows that fill no tile follow each other, like the batches of a sampler."""
    layer = place.layer(cells.GRU)
    for batch in (1, 2, 3, 5, 8, 13, 16, 17, 31, 33, 64) if place.name == "card" else (1, 17):
        x = place.input(place.steps, batch, 8)
        lengths = torch.arange(batch) % (place.steps + 1)
        assert_right(layer, x, {"lengths": lengths.tolist()}, place, seed)


def test_nan_lies_under_masks(place: Place, tier: int, seed: int) -> None:
    layer, x = place.layer(cells.LSTM), place.input()
    mask = torch.rand(x.shape[:2], device=DEVICE) < 0.6
    clean = results(layer, x, {"mask": mask}, seed, fused=True)
    with torch.no_grad():
        x[~mask] = float("nan")
    found = results(layer, x, {"mask": mask}, seed, fused=True)
    same(found, clean)
    assert not found["d x"][~mask.cpu()].any()


def test_calls_leave_nothing_behind(place: Place, tier: int, seed: int) -> None:
    """The bits of a call do not depend on earlier calls with other lengths and weights."""
    layer, other = place.layer(), place.layer()
    x = place.input()
    right = results(layer, x, {}, seed, fused=True)
    for steps in (place.steps, place.steps + 1, 2):
        results(other, place.input(steps, place.batch, 8), {}, seed, fused=True)
        same(results(layer, x, {}, seed, fused=True), right)


# -- on a card -------------------------------------------------------------------------------------
ON_A_CARD = Place("card", torch.bfloat16, 64, 20, 40)


@gpu
def test_streams(tier: int, seed: int) -> None:
    """Two streams at once run calls of a layer each, and calls of one layer on both."""
    place = ON_A_CARD
    layers = [place.layer() for _ in range(2)]
    x = place.input(grad=False)
    with torch.no_grad():
        right = [layer(x)[0] for layer in layers]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    found: list[list[Any]] = [[], []]
    for _ in range(10):
        for k, stream in enumerate(streams):
            with torch.cuda.stream(stream), torch.no_grad():
                found[0].append((0, layers[0](x)[0]))
                found[k].append((k, layers[k](x)[0]))
    torch.cuda.synchronize()
    for k, output in [*found[0], *found[1]]:
        assert torch.equal(output, right[k])


@gpu
@pytest.mark.parametrize("own", [False, True], ids=["one stream", "a stream each"])
def test_threads_at_once(tier: int, own: bool, seed: int) -> None:
    place = ON_A_CARD
    layer, x = place.layer(), place.input()
    right = results(layer, x, {}, seed, fused=True)

    def run() -> None:
        with torch.cuda.stream(torch.cuda.Stream() if own else torch.cuda.current_stream()):
            for _ in range(10):
                output, _ = layer(x)
                (dx,) = torch.autograd.grad(output, x, torch.ones_like(output))
                assert torch.equal(output.cpu(), right["output"])
                assert torch.equal(dx, expected)

    output, _ = layer(x)
    (expected,) = torch.autograd.grad(output, x, torch.ones_like(output))
    torch.cuda.synchronize()
    at_once(*[run] * 4)


@gpu
def test_the_default_device(tier: int, seed: int) -> None:
    torch.set_default_device("cuda")
    try:
        layer = anycell.torch.RNN(cells.PeepholeLSTM, 8, 64, dtype=torch.bfloat16)
        x = torch.randn(40, 20, 8, dtype=torch.bfloat16, requires_grad=True)
        assert_right(layer, x, {"lengths": [20] * 20}, ON_A_CARD, seed)
    finally:
        torch.set_default_device(None)


@gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of torch's own
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_layers(tier: int, mode: str, seed: int) -> None:
    """Inductor compiles a function with other operations around the layer."""
    if not ops.ON_CARDS:
        pytest.skip("PyTorch is too old")
    torch._dynamo.reset()
    layer, x = ON_A_CARD.layer(), ON_A_CARD.input()

    def run(x: Any) -> Any:
        return layer(x * 2)[0] + 1

    compiled = torch.compile(run, mode=mode)
    right = run(x)
    (dx,) = torch.autograd.grad(right.float().square().sum(), x)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        output = compiled(x)
        (mine,) = torch.autograd.grad(output.float().square().sum(), x)
        assert_close(output.detach().double().cpu(), right.detach().double().cpu(), "bfloat16",
                     "forward")  # fmt: skip
        assert_close(mine.double().cpu(), dx.double().cpu(), "bfloat16", "gradient")
    torch._dynamo.reset()


@gpu
def test_a_graph_of_the_user_s(tier: int) -> None:
    """The user captures both passes, as in a training step, and replays them on other numbers."""
    layer, x = ON_A_CARD.layer(), ON_A_CARD.input()

    def run() -> tuple[Any, Any]:
        output, _ = layer(x)
        (dx,) = torch.autograd.grad(output, x, torch.ones_like(output))
        return output, dx

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, dx = run()
    for _ in range(3):
        with torch.no_grad():
            x.normal_()
        graph.replay()
        for mine, right in zip((output, dx), run(), strict=True):
            assert torch.equal(mine, right)


@gpu
@pytest.mark.parametrize("name", ["LSTM", "GRU"])
@pytest.mark.parametrize(
    ("dtype", "hidden", "engine"),
    [
        ("bfloat16", 64, "gpu"),
        ("bfloat16", 300, "gpu"),
        ("float16", 300, "gpu"),
        ("float16", 64, "torch"),
        ("float32", 64, "torch"),
    ],
)
def test_drop_ins(name: str, dtype: str, hidden: int, engine: str, seed: int) -> None:
    """Our kernels run if they are faster than cuDNN, and always with a mask."""
    options: dict[str, Any] = {"device": "cuda", "dtype": getattr(torch, dtype)}
    theirs = getattr(torch.nn, name)(8, hidden, bidirectional=True, **options)
    ours = getattr(anycell.torch, name)(8, hidden, bidirectional=True, **options)
    ours.load_state_dict(theirs.state_dict())
    assert ours.engine.name == engine
    x = torch.randn(40, 20, 8, **options)
    allowed = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        same, right = ours(x)[0], theirs(x)[0]
        masked, _ = ours(x, mask=torch.ones(40, 20, dtype=torch.bool, device="cuda"))
    finally:
        torch.backends.cudnn.allow_tf32 = allowed
    if engine == "torch":
        assert torch.equal(same, right)
    wanted = theirs.double()(x.double())[0]
    for found in (masked, *[same] * (engine == "gpu")):
        assert_close(found.detach().double().cpu(), wanted.detach().cpu(), dtype, "forward")


@gpu
def test_step_by_step_nothing_waits_for_the_host(seed: int) -> None:
    """float64 has no kernel; the constants of a cell are filled on the card."""
    layer = anycell.torch.RNN(cells.GRU, 8, 16, device="cuda", dtype=torch.float64)
    x = torch.randn(4, 3, 8, device="cuda", dtype=torch.float64)
    right, _ = layer(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found, _ = layer(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, right)


@gpu
@pytest.mark.parametrize("hidden", [18, 40, 64, 128, 200, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sizes_of_16_bits(dtype: str, hidden: int, seed: int) -> None:
    """With 2 layers, 32 rows, 72 steps and 40 units in float16, our results once differed from
    cuDNN's by far.
    """
    options: dict[str, Any] = {"num_layers": 2, "device": "cuda", "dtype": getattr(torch, dtype)}
    layer = anycell.torch.RNN(cells.LSTM, hidden, hidden, **options)
    theirs = torch.nn.LSTM(hidden, hidden, **options)
    theirs.load_state_dict(layer.state_dict())
    x = torch.randn(72, 32, hidden, device="cuda", dtype=options["dtype"])
    found = layer(x)[0].detach().double().cpu()
    wanted = theirs.double()(x.double())[0].detach().cpu()
    assert_close(found, wanted, dtype, "forward")


@gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_training_under_autocast(dtype: str, tier: int) -> None:
    """The losses of several steps are the same as without autocast."""
    x, wanted = torch.randn(40, 20, 8, device="cuda"), torch.randn(40, 20, 64, device="cuda")
    first = anycell.torch.RNN(cells.PeepholeLSTM, 8, 64, device="cuda").state_dict()
    losses = []
    for enabled in (False, True):
        layer = anycell.torch.RNN(cells.PeepholeLSTM, 8, 64, device="cuda")
        layer.load_state_dict(first)
        optimiser = torch.optim.SGD(layer.parameters(), lr=1.0)
        losses.append([])
        for _ in range(5):
            with torch.autocast("cuda", getattr(torch, dtype), enabled=enabled):
                output, _ = layer(x)
            loss = (output.float() - wanted).square().mean()
            losses[-1].append(loss.item())
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    plain, mixed = map(np.array, losses)
    assert plain[-1] < plain[0]
    assert_close(mixed, plain, dtype, "gradient", "losses", ())


@gpu
def test_more_than_32_bits_count() -> None:
    """A sequence saves more than 2^31 numbers: its end equals a short sequence that begins with the
    states at that time.
    """
    steps, batch, hidden, tail = 8400, 64, 1024, 64
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    layer = anycell.torch.RNN(cells.LSTM, 16, hidden, **options)
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("a small card, or a full one")
    assert steps * batch * 4 * hidden > 1 << 31
    x = torch.randn(steps, batch, 16, **options)
    with torch.no_grad():
        _, middle = layer(x[:-tail])
    found = []
    for given, state in ((x, None), (x[-tail:], middle)):
        leaf = given.clone().requires_grad_()
        output, _ = layer(leaf, state)
        (dx,) = torch.autograd.grad(output[-tail:].float().sum(), leaf)
        found.append((output[-tail:].detach().double().cpu(), dx[-tail:].double().cpu()))
        assert dx.isfinite().all()
    for mine, right, kind in zip(*found, ("forward", "gradient"), strict=True):
        assert_close(mine, right, "bfloat16", kind, kind, ())


KERAS = """
import sys
import keras, torch, numpy as np
import anycell.keras as ak
device = sys.argv[1]
rng = np.random.default_rng(0)
x = rng.standard_normal((5, 12, 8)).astype("float32")
found = []
for one in ("cpu", device):
    keras.utils.set_random_seed(1)
    with keras.device(one):
        layer, theirs = ak.PeepholeLSTM(32, return_sequences=True), keras.layers.Dense(1)
        inputs = torch.tensor(x, device=one, requires_grad=True)
        output = layer(inputs)
        assert output.device.type == torch.device(one).type
        loss = theirs(output).square().sum()
        (dx,) = torch.autograd.grad(loss, inputs)
        found.append((output.detach().cpu().numpy(), dx.cpu().numpy()))
print(layer.engine)
for mine, right in zip(*found):
    print(np.linalg.norm(mine - right) / np.linalg.norm(right))
"""


@pytest.mark.parametrize(
    "where", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=gpu)]
)
def test_keras_on_torch(where: str) -> None:
    """A Keras layer on the card, which still runs step by step, agrees with itself on the CPU."""
    pytest.importorskip("keras")
    env = {**COMPILES, "KERAS_BACKEND": "torch"}
    env |= {"CUDA_VISIBLE_DEVICES": ""} if where == "cpu" else {}
    engine, *errors = python(KERAS, where, PYTHONWARNINGS="ignore", **env).splitlines()
    assert f"name='{'composite' if where == 'cuda' else 'cpu'}'" in engine
    for found, kind in zip(errors, ("forward", "gradient"), strict=True):
        assert_close(1 + float(found), 1.0, "float32", kind)
