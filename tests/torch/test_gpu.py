"""``anycell.torch`` layers on the GPU engine: their choice of an engine, and their results.

Without a card, kernels run in Triton's interpreter, on tensors of the CPU.
"""

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gpu import (  # before anything else that may import Triton
    CARD,
    CARDS,
    DEVICE,
    SLOW,
    choose_gpu,
    torch,
)
from problems import Adding, assert_solved, draw
from tolerances import assert_close
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch_layers import assert_same, given_to_forward, weighted

import anycell
from anycell import cells
from anycell.layer import Options
from anycell.layer import gpu as device
from anycell.plan import Layer, Plan, plan
from anycell.torch import dropin, recurrent
from anycell.torch.dropin import CUDNNS
from anycell.torch.framework import TorchDevice
from anycell.torch.operators import functional, fused, ops
from tests.conformance.on_torch import by_function

EIGHT = (("H", 8),)


def weight(kind: str, dtype: Any) -> Any:
    """A stub of a tensor on a kind of device, enough for the choice of an engine."""
    return SimpleNamespace(device=SimpleNamespace(type=kind), dtype=dtype)


def test_the_device_chooses_the_engine() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        found = functional.fused_plan(cells.PeepholeLSTM, EIGHT, weight("cuda", dtype))
        assert isinstance(found, Plan)
        assert (found.engine, found.dtype) == ("gpu", str(dtype).removeprefix("torch."))
    assert functional.fused_plan(cells.LSTM, EIGHT, weight("cpu", torch.float32)).engine == "cpu"
    for kind, dtype, why in (
        ("cuda", torch.float64, "no fused kernel for torch.float64 on the GPU as yet"),
        ("cpu", torch.int32, "no fused kernel for torch.int32 on the CPU as yet"),
        ("mps", torch.float32, "no fused kernel for device 'mps' as yet"),
    ):
        assert functional.fused_plan(cells.LSTM, EIGHT, weight(kind, dtype)) == why
    refused = functional.fused_plan(cells.LSTMP, EIGHT, weight("cuda", torch.float32))
    assert refused == "the size P of this cell is unknown"


def test_cudnn_runs_what_it_knows() -> None:
    for cell in (cells.LSTM, cells.GRU, cells.LSTMP):
        assert cell in CUDNNS
    for cell in (cells.PeepholeLSTM, cells.GRU(reset_after=False), cells.LSTM(coupled=True)):
        assert cell not in CUDNNS


@pytest.mark.parametrize(
    ("dtype", "tf32", "hidden", "steps", "ours"),
    [
        ("bfloat16", False, 64, 16, True),
        ("bfloat16", False, 768, 16, True),
        ("bfloat16", False, 768, 15, False),
        ("bfloat16", False, 4096, 16, False),
        ("float16", False, 64, 16, False),
        ("float16", False, 512, 16, True),
        ("float32", False, 64, 16, False),
        ("float32", False, 512, 16, False),
        ("float32", True, 64, 16, False),
        ("float32", True, 512, 16, True),
    ],
)
def test_what_is_faster_than_cudnn(
    dtype: str, tf32: bool, hidden: int, steps: int, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choice on an H100 depends on dtype, size and steps; in training, on both passes."""
    host = SimpleNamespace(limits=CARDS["H100"], tf32=lambda cell: tf32)
    monkeypatch.setattr(TorchDevice, "on", lambda *_: host)
    chosen = plan(cells.LSTM, hidden, dtype, "gpu")
    assert dropin._beats_cudnn(chosen, torch.device("cuda"), steps, 16) is ours
    projected = plan(cells.LSTMP, hidden, dtype, "gpu", {"P": 16})
    assert not dropin._beats_cudnn(projected, torch.device("cuda"), steps, 16)

    def tier(_: Any, limits: Any, backward: bool, **further: Any) -> Any:
        return SimpleNamespace(tier=3 if backward else 2)

    monkeypatch.setattr(dropin.capacity, "choose", tier)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            faster = dropin._beats_cudnn(chosen, torch.device("cuda"), 16, 16)
        assert faster is (not grad and (dtype != "float32" or tf32))


def test_which_calls_are_cudnns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps and rows are read in any layout; cuDNN runs packed sequences and compiled calls, but no
    layer with checkpoints.
    """
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(dropin, "_beats_cudnn", lambda _, __, *size: asked.append(size) or True)
    x, one = torch.zeros(5, 3, 2), plan(cells.LSTM, 4, "bfloat16", "gpu")
    for layer, array in (
        (anycell.torch.LSTM(2, 4), x),
        (anycell.torch.LSTM(2, 4, batch_first=True), x),
        (anycell.torch.GRU(2, 4, batch_first=True), x[:, 0]),
    ):
        assert not layer._is_cudnns(one, array, False)
        assert layer._is_cudnns(one, array, True)
    assert asked == [(5, 3), (3, 5), (5, 1)]
    layer, packed = anycell.torch.LSTM(2, 4), torch.nn.utils.rnn.pack_sequence([x[:, 0]])
    assert layer._is_cudnns(one, packed, False)
    layer.checkpoint = 2
    assert not layer._is_cudnns(one, packed, True)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Makes layers choose the GPU engine for tensors on any device; lists the passes that ran."""
    calls: list[str] = []

    def recorded(name: str) -> Any:
        function = getattr(device, name)

        def run(*args: Any, **options: Any) -> Any:
            calls.append(name)
            with np.errstate(all="ignore"):
                return function(*args, **options)

        return run

    choose_gpu(monkeypatch)
    passes = {name: recorded(name) for name in ("forward", "backward")}
    monkeypatch.setattr(fused, "gpu", SimpleNamespace(**{**vars(device), **passes}))
    ops._planned.cache_clear()
    yield calls
    ops._planned.cache_clear()


CASES: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (cells.PeepholeLSTM, {"bidirectional": True, "num_layers": 2}, {}),
    (cells.ZoneoutGRU, {"batch_first": True}, {"lengths": [4, 0, 2]}),
    (cells.LSTMP, {"P": 5}, {"mask": True, "resets": True, "masked_output": "repeat"}),
]


@pytest.mark.parametrize(("cell", "options", "arguments"), CASES, ids=["plain", "lengths", "flags"])
def test_layers(cell: Any, options: Any, arguments: Any, ran: list[str], seed: int) -> None:
    """Outputs and all gradients agree with the layer's own composite in float64."""
    layer = anycell.torch.RNN(cell, 3, 6, device=DEVICE, **options)
    shape = (3, 4) if options.get("batch_first") else (4, 3)
    given = dict(arguments)
    for name in ("mask", "resets"):
        if name in given:
            given[name] = torch.rand(shape, device=DEVICE) < 0.6
    x = torch.randn(*shape, 3, device=DEVICE, requires_grad=True)
    expected = results(layer, x, given, seed, fused=False)
    assert not ran
    assert_same(results(layer, x, given, seed, fused=True), expected, "float32")
    assert set(ran) == {"forward", "backward"}


def results(layer: Any, x: Any, given: Any, seed: int, fused: bool) -> dict[str, Any]:
    """Output, final states, and all gradients; in float64 if not fused."""
    torch.manual_seed(seed)  # of the random masks
    chosen = functional.fused_plan
    if not fused:
        layer, x = copy.deepcopy(layer).double(), x.detach().double().requires_grad_()
        functional.fused_plan = lambda *_: "asked for"
    try:
        output, final = layer(x, **given)
        states = final if isinstance(final, tuple) else (final,)
        total = weighted([output, *states])
        leaves = {"d x": x, **{f"d {name}": p for name, p in layer.named_parameters()}}
        gradients = torch.autograd.grad(total, leaves.values())
    finally:
        functional.fused_plan = chosen
    found = {"output": output, **{f"final {i}": s for i, s in enumerate(states)}}
    found |= zip(leaves, gradients, strict=True)
    return {name: value.detach().cpu() for name, value in found.items()}


def test_a_gradient_of_a_gradient(ran: list[str], seed: int) -> None:
    """The fused backward pass is differentiated by the composite."""
    layer = anycell.torch.RNN(cells.PeepholeLSTM, 2, 3, device=DEVICE)
    found = []
    for like in (layer, copy.deepcopy(layer).double()):  # no engine runs float64 on a card
        torch.manual_seed(seed)
        x = torch.randn(2, 2, 2).to(like.weight_ih_l0).requires_grad_()
        (first,) = torch.autograd.grad(like(x)[0].square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        found.append(second.detach().cpu())
        assert set(ran) == {"forward", "backward"}
    assert_close(*found, "float32", "gradient")


def test_autocast(ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As in ``torch.nn``, calls and results have 16 bits, and gradients the dtype of weights."""
    layer = anycell.torch.RNN(cells.LSTMP, 3, 6, P=5, device=DEVICE)
    x = torch.randn(4, 2, 3, device=DEVICE, requires_grad=True)
    expected, _ = layer(x)
    leaves = [x, *layer.parameters()]
    gradients = torch.autograd.grad(expected.sum(), leaves)
    if not CARD:  # without a card, autocast would keep the weights' dtype
        for module in (functional, recurrent):
            monkeypatch.setattr(module, "autocast_dtype", lambda _: torch.float16)
    with torch.autocast(DEVICE.type, torch.float16 if CARD else torch.bfloat16):
        output, final = layer(x)
    for state in (output, *final):
        assert state.dtype == torch.float16
    assert_close(output.detach().cpu(), expected.detach().cpu(), "float16", "forward")
    output.float().sum().backward()
    for leaf, gradient in zip(leaves, gradients, strict=True):
        assert leaf.grad.dtype == torch.float32
        assert_close(leaf.grad.cpu(), gradient.cpu(), "float16", "gradient")


def test_dtypes_under_autocast() -> None:
    def found(kind: str, dtype: Any) -> Any:
        return functional.autocast_dtype(weight(kind, dtype))

    assert found("cuda", torch.float32) == torch.float32
    torch.set_autocast_enabled("cuda", True)  # torch.autocast needs a card for it
    try:
        for dtype in (torch.float32, torch.bfloat16):
            assert found("cuda", dtype) == torch.get_autocast_dtype("cuda")
        assert found("cuda", torch.float64) == torch.float64
        assert found("cpu", torch.float32) == torch.float32
    finally:
        torch.set_autocast_enabled("cuda", False)


# -- checkpoints -----------------------------------------------------------------------------------
@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes chunks two steps long, so that a segment has one or more chunks."""
    monkeypatch.setattr(device, "chunk_steps", lambda *_: 2)
    monkeypatch.setattr(device, "BLOCKS", (1,))


HALF = {"dtype": torch.float16}
CHECKPOINTED: list[Any] = [
    (3, cells.PeepholeLSTM, {"bidirectional": True, **HALF}, {}),  # c is float32 between steps
    (3, cells.LSTMP, {"P": 5}, {"resets": True}),
    pytest.param(
        *(1, cells.ZoneoutLSTM, {"bidirectional": True}, {"mask": True, "resets": True}), marks=SLOW
    ),
    pytest.param(*(2, cells.LSTM, HALF, {"mask": True, "masked_output": "repeat"}), marks=SLOW),
]


@pytest.mark.parametrize(
    ("tier", "cell", "options", "arguments"),
    CHECKPOINTED,
    ids=["half", "projected", "resident", "shared"],
)
@pytest.mark.slow
def test_checkpoints(
    tier: int,
    cell: Any,
    options: Any,
    arguments: Any,
    ran: list[str],
    short_chunks: None,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checkpoints leave the same bits as a run that keeps everything."""
    monkeypatch.setattr(TorchDevice, "tier", tier)
    torch.manual_seed(seed)
    layer = anycell.torch.RNN(cell, 3, 18, device=DEVICE, **options)
    given = dict(arguments)
    for name in {"mask", "resets"} & given.keys():
        given[name] = torch.rand(5, 3, device=DEVICE) < 0.6
    x = torch.randn(5, 3, 3, device=DEVICE, dtype=options.get("dtype"), requires_grad=True)
    right = results(layer, x, given, seed, fused=True)
    for layer.checkpoint in (1, 4):
        for name, mine in results(layer, x, given, seed, fused=True).items():
            assert torch.equal(mine, right[name]), name


def test_what_checkpoints_keep(ran: list[str], short_chunks: None) -> None:
    """Checkpoints keep x, weights and states at segment borders, but no outputs or saved values."""
    layer = anycell.torch.RNN(cells.LSTM, 3, 5, device=DEVICE)
    x = torch.randn(7, 2, 3, device=DEVICE)
    own, kept = {id(x), *map(id, layer.parameters())}, []
    for layer.checkpoint in (None, 4):
        seen: list[Any] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):  # noqa: B023
            layer(x)
        kept.append(sorted(t.numel() for t in seen if id(t) not in own))
    everything, borders = kept
    assert sum(everything) >= 7 * 2 * 5 * 5
    assert borders == [0, 2 * 2 * 5, 2 * 2 * 5]


@pytest.mark.parametrize("cell", [cells.GRU(reset_after=False), cells.sLSTM(heads=2)], ids=repr)
def test_no_rows(cell: Any, ran: list[str]) -> None:
    """The first cell's recurrent matmul has an unused output; the second cell's has heads."""
    layer = anycell.torch.RNN(cell, 3, 4, device=DEVICE)
    x = torch.randn(2, 0, 3, device=DEVICE, requires_grad=True)
    output, _ = layer(x)
    gradients = torch.autograd.grad(output.sum(), [x, *layer.parameters()])
    assert ran == ["forward", "backward"] and output.shape == (2, 0, 4)
    assert not any(g.any() for g in gradients)


@pytest.mark.parametrize("tier", [3, pytest.param(1, marks=SLOW)])
@pytest.mark.parametrize("per_gate", [False, True], ids=["one", "per gate"])
@pytest.mark.parametrize("cell", [cells.LSTM, cells.GRU(reset_after=False), cells.LSTMP], ids=repr)
@pytest.mark.sample(1)
def test_recurrent_mask(
    cell: Any, per_gate: bool, tier: int, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keras's ``recurrent_dropout`` passes such masks to the layer function."""
    monkeypatch.setattr(TorchDevice, "tier", tier)
    mask = "recurrent_mask per gate" if per_gate else "recurrent_mask"
    has = (mask, "bidirectional", "state", "mask", "resets")
    problem = draw(cell, (6, 3, 4, 5), has, "float32")
    solution = by_function(functional.run_layer, DEVICE)(problem)
    assert ran == ["forward", "backward"]
    assert_solved(solution, problem)


@pytest.mark.parametrize(
    "held", [(), pytest.param(("repeat",), marks=pytest.mark.more)], ids=["", "held"]
)
@pytest.mark.parametrize("cell", [cells.LSTM, Adding], ids=repr)
def test_the_states_after_every_step(cell: Any, held: tuple[str, ...], ran: list[str]) -> None:
    """Both directions return their states; the backward pass of Adding does not read them."""
    has = ("bidirectional", "state", "mask", "return_states", *held)
    problem = draw(cell, (6, 3, 4, 5), has, "float32")
    solution = by_function(functional.run_layer, DEVICE)(problem)
    assert ran == ["forward"]  # the backward pass runs step by step
    assert_solved(solution, problem)


# -- torch.compile ---------------------------------------------------------------------------------
operators = pytest.mark.skipif(CARD and not ops.ON_CARDS, reason="PyTorch is too old")


@operators
def test_elements_with_weights_of_their_own(ran: list[str]) -> None:
    """Under ``vmap`` each runs by kernels, with the bits of a call by itself."""
    layers = [anycell.torch.RNN(cells.PeepholeLSTM, 2, 3, device=DEVICE) for _ in range(2)]
    weights, _ = torch.func.stack_module_state(layers)
    x = torch.randn(2, 2, 2, device=DEVICE)

    def output(weights: Any) -> Any:
        return torch.func.functional_call(layers[0], weights, (x,))[0]

    found, right = torch.func.vmap(output)(weights), torch.stack([one(x)[0] for one in layers])
    assert torch.equal(found, right) and ran == ["forward"] * 4
    gradients = torch.autograd.grad(found.square().sum(), list(weights.values()))
    right.square().sum().backward()
    for name, gradient in zip(weights, gradients, strict=True):
        every = [dict(one.named_parameters())[name].grad for one in layers]
        assert torch.equal(gradient, torch.stack(every)), name
    assert ran[4:] == ["backward"] * 4


@operators
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own compiler
@pytest.mark.parametrize("checkpoint", [None, 2])
@pytest.mark.sample(1)
def test_one_graph(checkpoint: Any, ran: list[str], short_chunks: None, seed: int) -> None:
    """The layer is one operator, also with random masks and flags, with a plain call's bits."""
    torch._dynamo.reset()
    torch.manual_seed(seed)
    layer = anycell.torch.RNN(cells.ZoneoutLSTM, 3, 5, checkpoint=checkpoint, **HALF).to(DEVICE)
    x = torch.randn(4, 2, 3, device=DEVICE, requires_grad=True, **HALF)
    given = {"lengths": torch.tensor([4, 2], device=DEVICE), "resets": x[:, :, 0] > 0.5}
    found = []
    for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(seed)  # of the random masks
        output, final = run(x, **given)
        total = weighted([output, *final])
        found.append([output, *final, *torch.autograd.grad(total, [x, *layer.parameters()])])
        assert {"forward", "backward"} <= set(ran)
        ran.clear()
    for mine, right in zip(*found, strict=True):
        assert torch.equal(mine, right)
    torch._dynamo.reset()


@operators
@pytest.mark.parametrize("cell", [cells.LSTM, cells.LSTMP, cells.GRU(reset_after=False)], ids=repr)
@pytest.mark.sample(1)
@pytest.mark.more
def test_shapes_foretold(cell: Any, ran: list[str]) -> None:
    """The operator predicts the shapes that it keeps for the backward pass, without running."""
    sizes = {"P": 3} if cell is cells.LSTMP else {}
    layer = anycell.torch.RNN(cell, 3, 5, bidirectional=True, device=DEVICE, **sizes)
    x, mask = torch.randn(4, 2, 3, device=DEVICE), torch.ones(4, 2, dtype=bool, device=DEVICE)
    call = Layer(cell, (("H", 5), *sizes.items()), Options((False, True), training=True))
    for flags in ({}, {"mask": mask}):
        arguments = given_to_forward(call, {"x": x, **flags, **layer._weights(layer.cell)[0]})
        torch.library.opcheck(
            torch.ops.anycell.run, (*arguments, True), test_utils=("test_schema", "test_faketensor")
        )


@operators
def test_a_card_that_is_not_there() -> None:
    """For fake tensors on a card, the operator predicts the results of the GPU engine."""
    layer = anycell.torch.RNN(cells.PeepholeLSTM, 3, 5)
    x, mode = torch.randn(4, 2, 3), FakeTensorMode()
    call = Layer(cells.PeepholeLSTM, (("H", 5),), Options(training=True))
    tensors, text, hyper = given_to_forward(call, {"x": x, **layer._weights(layer.cell)[0]})
    fake = [FakeTensor(mode, t.detach().to("meta", torch.bfloat16), "cuda:0") for t in tensors]
    text = (
        ops.read(text)._replace(dtype="bfloat16").text(hyper=False)
    )  # as the CPU has no kernel for it
    with mode, torch.no_grad():
        h, c, hidden, values, *states = torch.ops.anycell.run(fake, text, hyper, True)
    for found in (hidden, h, c, values, *states):
        assert found.device.type == "cuda" and found.dtype == torch.bfloat16
    assert hidden.shape == (5, 2, 5) and h.shape == c.shape == (1, 2, 5)
    assert values.shape[:2] == (4, 2) and [s.shape for s in states] == [(5, 2, 5)]
