"""The PyTorch layers, against ``torch.nn`` if it has them, else against separate plain calls.

One file, because all of it compares pairs of layers by the functions at its top.
"""

import copy
import doctest
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tolerances import LIMITS, NO_WORSE_THAN, ONE_ULP, assert_close, error

torch = pytest.importorskip("torch")

import torch.utils.checkpoint as checkpointing  # noqa: E402
from torch_layers import (  # noqa: E402
    CELLS,
    LAYERS,
    STATES,
    Gated,
    Odd,
    Zoned,
    assert_same,
    assert_same_error,
    by_name,
    fused,
    lacks,
    of_torchscript,
    run,
    twins,
)

import anycell  # noqa: E402
import anycell.torch as at  # noqa: E402
from anycell import cells  # noqa: E402

nn, Tensor = torch.nn, torch.Tensor
AWKWARD = [(5, 3, 1), (1, 4, 7), (9, 1, 33), (4, 5, 100), (1, 1, 1)]  # T, B, H


# -- LSTM and GRU are torch's ----------------------------------------------------------------------
FLAGS = [
    {},
    {"bias": False},
    {"num_layers": 2},
    {"bidirectional": True},
    {"batch_first": True},
    {"num_layers": 3, "bidirectional": True, "batch_first": True},
    {"num_layers": 2, "bias": False, "bidirectional": True},
]


@pytest.mark.parametrize("flags", FLAGS, ids=lambda f: "-".join(map(str, f)) or "plain")
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("with_state", [False, True], ids=["", "state"])
@pytest.mark.sample(every=3)
def test_flags(kind: str, flags: dict[str, Any], with_state: bool) -> None:
    ours, theirs = twins(kind, 5, 9, **flags, dtype=torch.float64)
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    batch = 3 if flags.get("batch_first") else 4
    first = flags.get("num_layers", 1) * (2 if flags.get("bidirectional") else 1)
    state = tuple(torch.randn(first, batch, 9, dtype=torch.float64) for _ in range(STATES[kind]))
    given = (state if len(state) > 1 else state[0]) if with_state else None
    assert fused(ours(x)[0])
    assert_same(run(ours, x, given), run(theirs, x, given), "float64")
    assert ours(x)[0].stride() == theirs(x)[0].stride()


@pytest.mark.parametrize("sizes", AWKWARD, ids=str)
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.sample(every=7)
def test_float32(kind: str, sizes: tuple[int, int, int]) -> None:
    """Median errors over several draws are within the limits and comparable to torch's.

    A single number near zero has no relative precision, here or in torch.
    """
    steps, rows, hidden = sizes
    errors: dict[str, list[tuple[float, float]]] = {}
    for _ in range(9 if hidden > 1 else 49):  # errors of few numbers need many draws
        x = torch.randn(steps, rows, 6)
        ours, theirs = LAYERS[kind][0](6, hidden), LAYERS[kind][1](6, hidden)
        theirs.load_state_dict(ours.state_dict())
        found, own = run(ours, x), run(theirs, x)
        ref = run(theirs.double(), x.double())
        for name, value in ref.items():
            pair = (error(result[name].numpy(), value.numpy()) for result in (found, own))
            errors.setdefault(name, []).append(tuple(pair))
    for name, pairs in errors.items():
        mine, vendor = np.median(pairs, axis=0)
        limit = LIMITS["float32", "gradient" if name.startswith("d ") else "forward"]
        assert mine <= min(limit, max(NO_WORSE_THAN * vendor, ONE_ULP)), name


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("batch_first", [False, True])
def test_unbatched(kind: str, batch_first: bool) -> None:
    flags = {"num_layers": 2, "bidirectional": True, "batch_first": batch_first}
    ours, theirs = twins(kind, 3, 5, **flags, dtype=torch.float64)
    x = torch.randn(6, 3, dtype=torch.float64)
    state = tuple(torch.randn(4, 5, dtype=torch.float64) for _ in range(STATES[kind]))
    given = state if len(state) > 1 else state[0]
    assert_same(run(ours, x), run(theirs, x), "float64")
    assert_same(run(ours, x, given), run(theirs, x, given), "float64")


@pytest.mark.parametrize("kind", LAYERS)
def test_same_draws(kind: str) -> None:
    """Initial weights and the dropout between layers are the same for the same seed."""
    ours, theirs = twins(kind, 4, 8, num_layers=3, dropout=0.4, bidirectional=True)
    assert isinstance(ours, type(theirs))
    for (name, mine), (other, its) in zip(
        ours.named_parameters(), theirs.named_parameters(), strict=True
    ):
        assert name == other and torch.equal(mine, its)
    x, outputs = torch.randn(5, 3, 4), []
    for layer in (ours, theirs):
        torch.manual_seed(1)
        outputs.append(layer(x)[0].detach())
    assert_close(*outputs, "float32", "forward")
    assert not torch.equal(ours(x)[0], ours(x)[0])
    ours.eval()
    assert torch.equal(ours(x)[0], ours(x)[0])


@pytest.mark.parametrize("kind", LAYERS)
def test_checkpoints(kind: str) -> None:
    flags = {"num_layers": 2, "bidirectional": True, "dtype": torch.float64}
    ours, theirs = (layer(3, 5, **flags) for layer in LAYERS[kind])
    general = at.RNN(getattr(cells, kind), 3, 5, **flags)
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    assert list(ours.state_dict()) == list(theirs.state_dict()) == list(general.state_dict())
    for source, target in ((theirs, ours), (theirs, general), (ours, theirs), (general, ours)):
        for parameter in source.parameters():
            nn.init.normal_(parameter)
        target.load_state_dict(source.state_dict(), strict=True)
        assert_same(run(target, x), run(source, x), "float64")


@pytest.mark.parametrize("kind", LAYERS)
def test_errors_are_torchs(kind: str) -> None:
    ours, theirs = twins(kind, 3, 5, num_layers=2)
    x, h = torch.randn(4, 2, 3), torch.randn(2, 2, 5)
    pack = (lambda s: (s, s)) if kind == "LSTM" else (lambda s: s)
    calls: list[tuple[Any, ...]] = [
        (torch.randn(4, 2, 4),),
        (torch.randn(3),),
        (torch.randn(1, 1, 1, 3),),
        (x.double(),),
        (torch.randn(0, 2, 3),),
        (x, pack(h[:1])),
        (x, pack(h[:, :1])),
        (x, pack(h[..., :3])),
        (x, pack(h[0])),
        (x[:, 0], pack(h)),
        (x, pack(h.double())),
        ("x",),
    ]
    for arguments in calls:
        assert_same_error(ours, theirs, *arguments)
    refused = []
    for bad in ({"hidden_size": 0}, {"dropout": 2.0}, {"num_layers": 0}, {"bias": 1}):
        said = []
        for layer in LAYERS[kind]:
            try:
                layer(**{"input_size": 3, "hidden_size": 5, **bad})
            except (ValueError, TypeError) as error:
                said.append(str(error))
        assert said in ([], 2 * said[:1])
        refused += said[:1]
    assert len(refused) >= 2  # torch 2.4 takes some of them


# -- autograd --------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.sample(1)
def test_gradient_penalty(kind: str) -> None:
    """create_graph=True works if the input depends on a weight of the same layer."""
    found = []
    for layer in twins(kind, 3, 3, dtype=torch.float64):
        base = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 2, 3)
        x = (base @ layer.weight_hh_l0[:3]).sin()
        output, _ = layer(x)
        (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        (output.sum() + slope.square().sum()).backward()
        found.append({name: p.grad for name, p in layer.named_parameters()})
    for name, value in found[0].items():
        assert_close(value, found[1][name], "float64", "gradient", name)


@pytest.mark.parametrize("kind", CELLS, **by_name)
@pytest.mark.sample(every=2)
def test_backward_twice(kind: Any) -> None:
    layer = at.RNN(kind, 3, 5, num_layers=2, bidirectional=True)
    output, _ = layer(torch.randn(6, 2, 3), lengths=[6, 4], resets=torch.rand(6, 2) < 0.3)
    loss, gradients = output.square().sum(), []
    for keep_graph in (True, True, False):
        layer.zero_grad()
        loss.backward(retain_graph=keep_graph)
        gradients.append([p.grad.clone() for p in layer.parameters()])
    for again in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], again, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("kind", LAYERS)
def test_edits_between_forward_and_backward(kind: str) -> None:
    layer, x = twins(kind, 3, 5)[0], torch.randn(4, 2, 3)
    changes: list[Callable[[Tensor], object]] = [
        lambda output: output.mul_(2.0),
        lambda output: torch.no_grad()(layer.weight_hh_l0.add_)(1.0),
    ]
    for change in changes:
        output, _ = layer(x)
        change(output)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()
    _, final = layer(x)  # final states are copies, which users may edit
    first = final[0] if kind == "LSTM" else final
    first.mul_(2.0).sum().backward()


@pytest.mark.parametrize("kind", LAYERS)
def test_partial_gradients(kind: str) -> None:
    """Only requested gradients are computed, from only the results that are used."""
    ours, theirs = twins(kind, 3, 5, num_layers=2, bidirectional=True, dtype=torch.float64)
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    for wanted in ("weight_hh_l0", "bias_ih_l1_reverse", None):
        found = []
        for layer in (ours, theirs):
            layer.zero_grad(), layer.requires_grad_(False)
            leaf = x.clone().requires_grad_() if wanted is None else layer.get_parameter(wanted)
            leaf.requires_grad_()
            _, final = layer(leaf if wanted is None else x)
            last = final[-1] if kind == "LSTM" else final
            found.append(torch.autograd.grad(last[2].sum(), leaf)[0])
        assert_close(*found, "float64", "gradient")
    ours.weight_hh_l0.requires_grad_()
    output, _ = ours(x)
    assert output.requires_grad  # from the parameter that still wants one
    with torch.no_grad():
        assert not ours(x)[0].requires_grad
    with torch.inference_mode():
        assert ours(x)[0].is_inference()
        assert torch.equal(ours(x)[0], output)


def test_saved_tensor_hooks() -> None:
    layer, x = at.LSTM(3, 5), torch.randn(4, 2, 3)
    plain = run(layer, x)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy().copy(), torch.from_numpy):
        hooked = run(layer, x)
    assert all(torch.equal(value, hooked[name]) for name, value in plain.items())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", [at.LSTM, at.GRU], ids=["LSTM", "GRU"])
def test_activation_checkpoints(kind: Any, reentrant: bool) -> None:
    """PyTorch's own checkpoints let each saved tensor be read only once."""
    layer, found = kind(3, 5, 2), []
    checkpoint = functools.partial(checkpointing.checkpoint, use_reentrant=reentrant)
    for call in (layer, functools.partial(checkpoint, layer)):
        x = torch.linspace(-1, 1, 24).reshape(4, 2, 3).requires_grad_()
        layer.zero_grad()
        call(x)[0].square().sum().backward()
        found.append([x.grad, *[p.grad.clone() for p in layer.parameters()]])
    assert all(map(torch.equal, *found))


# -- RNN(cell) -------------------------------------------------------------------------------------
def test_parameters_and_initial_values() -> None:
    layer = at.RNN(Odd, 3, 16, num_layers=2, bidirectional=True)
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    assert shapes["weight_ih_l1_reverse"] == (64, 32) and shapes["weight_hh_l0"] == (64, 16)
    assert shapes["w_l0"] == shapes["b_l1_reverse"] == (16,)
    assert torch.equal(layer.b_l0, torch.full((16,), 0.25)) and layer.w_l0.abs().max() <= 0.25
    torch.nn.init.zeros_(layer.b_l0)
    layer.reset_parameters()
    assert torch.equal(layer.b_l0, torch.full((16,), 0.25))
    assert not any("bias" in name for name in at.RNN(cells.LayerNormLSTM, 3, 4).state_dict())
    assert not any("bias" in name for name in at.RNN(cells.GRU, 3, 4, bias=False).state_dict())


def test_declared_initial_state() -> None:
    layer, x = at.RNN(Odd, 3, 5), torch.randn(4, 2, 3)
    state = torch.zeros(1, 2, 5), torch.full((1, 2, 5), 0.5)
    assert torch.equal(layer(x)[0], layer(x, state)[0])
    single = at.RNN(cells.GRU, 3, 5)
    output, final = single(x)
    assert isinstance(final, Tensor) and torch.equal(final[0], output[-1])
    assert torch.equal(single(x, final)[0], single(x, (final,))[0])


def test_options_without_a_batch() -> None:
    """Without a batch, arguments per row have no axis of rows."""
    flags, projected = {"bidirectional": True}, at.RNN(cells.LSTMP, 3, 5, P=4, bidirectional=True)
    calls: list[tuple[Any, dict[str, Any]]] = [
        (at.LSTM(3, 5, **flags, batch_first=True), {"lengths": [2, 6, 3]}),
        (at.GRU(3, 5, **flags), {"lengths": [2, 6, 3]}),
        (at.RNN(Gated, 3, 5), {"static": torch.randn(3, 5)}),
        (projected, {"recurrent_mask": torch.rand(3, 4)}),
        (projected, {"recurrent_mask": torch.rand(4, 3, 4)}),
    ]
    for layer, options in calls:
        x, axis = torch.randn(6, 3, 3), 1
        if layer.batch_first:
            x, axis = x.transpose(0, 1), 0
        output, _ = layer(x, **options)
        ((name, given),) = options.items()
        for row in range(3):
            own = {name: given[row] if isinstance(given, list) else given[..., row, :]}
            alone, _ = layer(x.select(axis, row), **own)
            assert_close(alone.detach(), output.select(axis, row).detach(), "float32", "forward")


def test_random_masks_follow_torchs_seed() -> None:
    layer, x = at.RNN(Zoned, 3, 5, num_layers=2, bidirectional=True), torch.randn(4, 2, 3)
    torch.manual_seed(1)
    first, second = layer(x)[0], layer(x)[0]
    torch.manual_seed(1)
    assert torch.equal(layer(x)[0], first) and not torch.equal(first, second)
    state = torch.get_rng_state()
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])
    assert torch.equal(torch.get_rng_state(), state)


@of_torchscript
def test_random_masks_of_the_composite_are_the_engines() -> None:
    layer = at.RNN(Zoned, 3, 5, num_layers=2, bidirectional=True, dtype=torch.float64)
    x = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(1)
    output, _ = layer(x)
    torch.manual_seed(1)
    again, _ = torch.func.functional_call(layer, {}, (x,)), None
    torch.manual_seed(1)
    ref, tangent = torch.func.jvp(lambda x: layer(x)[0], (x.detach(),), (torch.ones_like(x),))
    assert fused(output) and fused(again[0])
    assert_close(output.detach(), ref.detach(), "float64", "forward")
    (first,) = torch.autograd.grad(output.sum(), x, retain_graph=True)
    (second,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    assert_close(first, second.detach(), "float64", "gradient")
    assert_close(tangent.sum().detach(), first.sum(), "float64", "gradient")


def test_repr() -> None:
    assert repr(at.RNN(cells.PeepholeLSTM(coupled=True), 3, 8)) == (
        "RNN(PeepholeLSTM(coupled=True), 3, 8)"
    )
    layer = at.RNN(cells.GRU, 3, 8, 2, False, True, 0.5, True)
    assert repr(layer) == (
        "RNN(GRU(), 3, 8, num_layers=2, bias=False, batch_first=True, dropout=0.5, "
        "bidirectional=True)"
    )
    assert repr(at.RNN(cells.LSTMP, 3, 8, P=4)) == "RNN(LSTMP(), 3, 8, P=4)"
    assert repr(at.LSTM(3, 8, 2)) == "LSTM(3, 8, num_layers=2)"
    assert repr(at.RNNCell(cells.GRU, 3, 8)) == "RNNCell(GRU(), 3, 8)"


# -- single steps ----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["LSTMCell", "GRUCell"])
def test_cells_are_torchs(name: str) -> None:
    """They override nothing, so torch's own tests cover their results and errors."""
    ours, theirs = getattr(at, name), getattr(nn, name)
    assert issubclass(ours, theirs) and ours(3, 5).engine.name == "torch"
    for method in ("__init__", "__call__", "forward"):
        assert getattr(ours, method) is getattr(theirs, method)


@pytest.mark.parametrize("rows", [None, 0, 1, 4, 33])
@pytest.mark.parametrize("form", range(4))
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.sample(every=3)
def test_a_single_step(kind: str, form: int, rows: int | None) -> None:
    """Results and errors are torch's, with or without a batch, for all options of the layer."""
    options: Any = [
        {},
        {"bias": False, "batch_first": True},
        {"num_layers": 2, "bidirectional": True, "dropout": 0.5},
        {"num_layers": 2, "batch_first": True, "dtype": torch.float64},
    ][form]
    ours, theirs = twins(kind, 3, 5, **options)
    batch = () if rows is None else (rows,)
    shape = (*batch, 1, 3) if "batch_first" in options else (1, *batch, 3)
    x, layers = torch.randn(shape, dtype=options.get("dtype")), options.get("num_layers", 1)
    first = layers * (1 + ("bidirectional" in options))
    states = tuple(torch.randn(first, *batch, 5).to(x) for _ in range(STATES[kind]))
    for state in (None, states if len(states) > 1 else states[0]):
        found = []
        for layer in (ours, theirs):
            torch.manual_seed(0)  # of dropout
            found.append(run(layer, x, state))
        for resets in (None, torch.ones(x.shape[:-1])):
            assert fused(ours(x, state, resets=resets)[0])
        assert_same(*found, str(x.dtype).removeprefix("torch."))
    for bad in (x[..., :2], x.half(), x.flatten()[0] if rows else x[..., :1]):
        assert_same_error(ours, theirs, bad)


@pytest.mark.parametrize("kind", CELLS, **by_name)
@pytest.mark.sample(every=2)
def test_rnn_cell(kind: Any) -> None:
    step, whole = (
        at.RNNCell(kind, 3, 5, dtype=torch.float64),
        at.RNN(kind, 3, 5, dtype=torch.float64),
    )
    whole.load_state_dict({f"{name}_l0": value for name, value in step.state_dict().items()})
    x, state, outputs = torch.randn(4, 2, 3, dtype=torch.float64), None, []
    for t in range(4):
        state = step(x[t], state)
        outputs.append(state[0] if isinstance(state, tuple) else state)
    assert_close(torch.stack(outputs).detach(), whole(x)[0].detach(), "float64", "forward")
    for shape in ((5,), (0, 5)):
        new = step(torch.zeros(*shape[:-1], 3, dtype=torch.float64))
        assert (new[0] if isinstance(new, tuple) else new).shape == shape


# -- modules as torch has them ---------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_copies(kind: str) -> None:
    layer = at.RNN(cells.PeepholeLSTM, 3, 5, 2) if kind == "RNN" else LAYERS[kind][0](3, 5, 2)
    x = torch.randn(4, 2, 3)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):
        assert type(other) is type(layer) and torch.equal(other(x)[0], layer(x)[0])
        assert all(a is not b for a, b in zip(other.parameters(), layer.parameters(), strict=True))
        other.double()(x.double())
        assert layer.weight_hh_l1.dtype == torch.float32


@pytest.mark.parametrize("make", [lambda: at.LSTM(3, 5), lambda: at.RNN(cells.LSTM, 3, 5)])
def test_replaced_weights(make: Callable[[], Any]) -> None:
    layer, plain, x = make(), nn.LSTM(3, 5), torch.randn(4, 2, 3)
    others = {name: torch.randn_like(p) for name, p in layer.named_parameters()}
    plain.load_state_dict(others)
    found = torch.func.functional_call(layer, others, (x,))[0]
    assert_close(found.detach(), plain(x)[0].detach(), "float32", "forward")
    nn.utils.parametrizations.weight_norm(layer, "weight_hh_l0")
    nn.utils.parametrizations.weight_norm(plain, "weight_hh_l0")
    plain.load_state_dict(layer.state_dict())
    assert fused(layer(x)[0])
    assert_same(run(layer, x), run(plain, x), "float32")


def test_hooks_and_defaults() -> None:
    layer, seen = at.LSTM(3, 5), []
    layer.register_forward_hook(lambda module, args, out: seen.append(out[0].shape))
    layer.weight_hh_l0.register_hook(lambda gradient: gradient * 0)
    x = torch.randn(4, 2, 3)
    layer(x)[0].sum().backward()
    assert seen == [(4, 2, 5)] and not layer.weight_hh_l0.grad.any()
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        assert layer(x)[0].device.type == "cpu"
        assert at.RNN(cells.GRU, 3, 5).weight_ih_l0.device.type == "meta"
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def test_deterministic_mode() -> None:
    """In this mode, torch fills new memory with NaN, which must not reach results."""
    layer, x = at.LSTM(3, 5, num_layers=2, bidirectional=True), torch.randn(4, 2, 3)
    plain = run(layer, x, lengths=[4, 2])
    torch.use_deterministic_algorithms(True)
    try:
        strict = run(layer, x, lengths=[4, 2])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(value, strict[name]) for name, value in plain.items())


# -- what is torch's own, or the composite's -------------------------------------------------------
def test_other_paths_of_the_drop_ins() -> None:
    x = torch.randn(4, 2, 3)
    meta = at.GRU(3, 5, device="meta")
    assert meta(x.to("meta"))[0].shape == (4, 2, 5) and "meta" in meta.engine.reason
    layer, ref = twins("LSTM", 3, 5)
    with torch.autocast("cpu", torch.bfloat16):
        for output in (layer(x)[0], layer(x, lengths=[4, 2])[0], layer(x.bfloat16())[0]):
            assert output.dtype == torch.bfloat16
        assert lacks(ref, torch.bfloat16) or ref(x)[0].dtype == torch.bfloat16
        assert at.RNN(cells.LSTM, 3, 5)(x.bfloat16())[0].dtype == torch.bfloat16
        wide, _ = twins("LSTM", 3, 5, dtype=torch.float64)
        assert wide(x.double())[0].dtype == torch.float64


@pytest.mark.parametrize("hidden", [1, 5])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.sample(every=3)
def test_gradients_that_are_negatives_in_memory(kind: str, hidden: int) -> None:
    """Autograd passes such gradients from complex numbers."""
    layer = at.RNN(cells.PeepholeLSTM, 3, hidden) if kind == "RNN" else getattr(at, kind)(3, hidden)
    output, final = layer(torch.randn(4, 2, 3))
    ends = [output, *(final if isinstance(final, tuple) else (final,))]
    arriving, weights = [torch.randn_like(t) for t in ends], list(layer.parameters())
    right = torch.autograd.grad(ends, weights, arriving, retain_graph=True)
    negatives = [torch._neg_view(-t) for t in arriving]
    for a, b in zip(torch.autograd.grad(ends, weights, negatives), right, strict=True):
        assert torch.equal(a, b)


def test_a_step_of_negatives_in_memory() -> None:
    layer, x = at.LSTM(3, 5).prepare(), torch.randn(2, 3)
    with torch.no_grad():
        output, state = layer.step(x)
        again, _ = layer.step(torch._neg_view(-x))
        assert_close(again, output, "float32", "forward")
        after, _ = layer.step(x, state)
        again, _ = layer.step(x, tuple(torch._neg_view(-s) for s in state))
        assert_close(again, after, "float32", "forward")


@pytest.mark.parametrize("engine", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.sample(every=3)
def test_16_bits_run_fused_and_step_by_step(dtype: torch.dtype, engine: str) -> None:
    layer, x = at.RNN(cells.PeepholeLSTM, 3, 5).to(dtype), torch.randn(4, 2, 3).to(dtype)
    assert layer.engine.name == "cpu"
    weights = {name.replace("_l0", ""): p for name, p in layer.named_parameters()}
    output, _ = at.recurrence(cells.PeepholeLSTM, x, weights, engine=engine)
    ref, _ = copy.deepcopy(layer).double()(x.double())
    assert output.dtype == dtype
    name = str(dtype).removeprefix("torch.")
    assert_close(output.float().detach(), ref.detach(), name, "forward")
    if engine == "cpu":
        assert torch.equal(layer(x)[0], output)


@of_torchscript
@pytest.mark.parametrize("kind", ["LSTM", "RNN"])
def test_function_transforms(kind: str) -> None:
    layer = at.LSTM(3, 5) if kind == "LSTM" else at.RNN(cells.PeepholeLSTM, 3, 5)
    layer = layer.double()
    x = torch.randn(2, 4, 3, 3, dtype=torch.float64)
    ref = torch.stack([layer(one)[0] for one in x]).detach()
    found = torch.func.vmap(lambda one: layer(one)[0])(x)
    assert_close(found.detach(), ref, "float64", "forward")
    one = x[0].clone().requires_grad_()
    jacobians = [
        torch.func.jacrev(lambda x: layer(x)[0].sum(0))(one),
        torch.func.jacfwd(lambda x: layer(x)[0].sum(0))(one),
        torch.autograd.functional.jacobian(lambda x: layer(x)[0].sum(0), one),
        torch.autograd.functional.jacobian(lambda x: layer(x)[0].sum(0), one, vectorize=True),
    ]
    for other in jacobians[1:]:
        assert_close(other.detach(), jacobians[0].detach(), "float64", "gradient")
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x[0], torch.ones_like(x[0]))
        tangent = torch.autograd.forward_ad.unpack_dual(layer(dual)[0]).tangent
    total = jacobians[0].sum((-3, -2, -1))
    assert_close(tangent.sum(0).detach(), total.detach(), "float64", "gradient")


# -- errors of our own -----------------------------------------------------------------------------
X = (4, 2, 3)
H = (1, 2, 5)
BAD_CALLS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("RNN", {"x": [1.0]}, TypeError, r"x: given list.*torch.float32 \[time, batch, 3\].*padded"),
    ("RNN", {"x": np.zeros(X)}, TypeError, r"x: given ndarray float64 \[4, 2, 3\];.*numpy\(x\)\."),
    ("RNN", {"x": (4, 2, 4)}, ValueError, r"x: given torch.float32 \[4, 2, 4\].*batch, 3\]"),
    ("RNN", {"x": (3,)}, ValueError, r"x: given torch.float32 \[3\].*\[time, batch, 3\]"),
    ("RNN", {"x": (0, 2, 3)}, ValueError, r"x: given .*\[0, 2, 3\].*one step or more"),
    ("RNN", {"x": torch.zeros(X).double()}, ValueError,
     r"x: given torch.float64.*layer.to\(torch.fl"),
    ("RNN", {"x": torch.zeros(X).long()}, ValueError, r"x: given .*x.to\(torch.float32\)\.$"),
    ("RNN", {"hx": None}, TypeError, r"hx: given None; .*Did you mean state\?"),
    ("RNN", {"x": torch.zeros(X, device="meta")}, ValueError, r"x: given on meta; expected on cpu"),
    ("RNN", {"state": torch.zeros(H)}, TypeError, r"state: given .*expected a tuple \(h, c\)"),
    ("RNN", {"state": (torch.zeros(H),) * 3}, TypeError, r"state: given tuple.*tuple \(h, c\)"),
    ("RNN", {"state": (torch.zeros(H), None)}, TypeError, r"state: given None.*state 'c'"),
    ("RNN", {"state": (torch.zeros(H), torch.zeros(2, 2, 5))}, ValueError, r"state: .*\[1, 2, 5\]"),
    ("RNN", {"state": (torch.zeros(H).double(),) * 2}, ValueError, r"state: given torch.float64"),
    ("any", {"reset_state": torch.zeros(H)}, TypeError, r"reset_state: given .*tuple \(h, c\)"),
    ("any", {"recurrent_mask": torch.zeros(3, 5)}, ValueError, r"recurrent_mask: .*\[2, 5\]"),
    ("any", {"recurrent_mask": [1.0]}, TypeError, r"recurrent_mask: given list .*Pass a tensor"),
    ("any", {"recurrent_mask": np.ones((2, 5))}, TypeError, r"torch.from_numpy\(recurrent_mask\)"),
    ("any", {"return_states": "d"}, ValueError, r"return_states: given 'd'.*cell LSTM: h, c"),
    ("RNN", {"static": torch.zeros(2, 5)}, TypeError, r"static: .*cell LSTM declares no static"),
    ("any", {"masked_output": "nan"}, ValueError, r"masked_output: given 'nan'; expected 'zero'"),
    ("any", {"mask": [True]}, TypeError, r"mask: given list.*torch.bool \[4, 2\].*as_tensor"),
    ("any", {"mask": torch.zeros(4, 2)}, TypeError, r"mask: given torch.float32.*mask.bool\(\)"),
    ("any", {"mask": torch.zeros(2, 4).bool()}, ValueError, r"mask: given .*\[2, 4\].*mask.t\(\)"),
    ("any", {"resets": torch.zeros(4).bool()}, ValueError, r"resets: given .*\[4\].*One flag per"),
    ("any", {"mask": torch.zeros(4, 2, device="meta").bool()}, ValueError, r"mask: given on meta"),
    ("any", {"lengths": [1, 5]}, ValueError, r"lengths: given a length of 5; expected 0 to 4"),
    ("any", {"lengths": [-1, 4]}, ValueError, r"lengths: given a length of -1"),
    ("any", {"lengths": [1, 2, 3]}, ValueError, r"lengths: given .* \[3\]; .*integers \[2\]"),
    ("any", {"lengths": [1.5, 2.0]}, TypeError, r"lengths: given torch.float32.*lengths.long"),
    ("any", {"lengths": "all"}, TypeError, r"lengths: given str 'all'.*list of int"),
]  # fmt: skip


@pytest.mark.parametrize(("layer", "arguments", "kind", "message"), BAD_CALLS, ids=str)
def test_bad_calls(
    layer: str, arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    arguments = {"x": X, **arguments}
    x = arguments.pop("x")
    x = torch.zeros(x) if isinstance(x, tuple) else x
    with pytest.raises(kind, match=message):
        at.RNN(cells.LSTM, 3, 5)(x, **arguments)
    if layer == "any":
        with pytest.raises(kind, match=message):
            at.LSTM(3, 5)(x, **arguments)


def test_batch_first_errors_name_its_axes() -> None:
    layer = at.RNN(cells.LSTM, 3, 5, batch_first=True)
    with pytest.raises(ValueError, match=r"expected torch.bool \[4, 2\], \(batch, time\)"):
        layer(torch.zeros(X), mask=torch.zeros(3, 3).bool())
    with pytest.raises(ValueError, match=r"expected torch.float32 \[batch, time, 3\]"):
        layer(torch.zeros(4, 2, 9))


BAD_LAYERS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"cell": nn.LSTM}, TypeError, "cell: given type .*expected a cell.*anycell.cells.LSTM"),
    ({"cell": "LSTM"}, TypeError, "cell: given str 'LSTM'"),
    ({"hidden_size": 0}, ValueError, "hidden_size: given 0; expected an int from 1"),
    ({"input_size": 3.0}, TypeError, "input_size: given float 3.0; expected an int"),
    ({"num_layers": True}, TypeError, "num_layers: given bool True"),
    ({"dropout": 1.5}, ValueError, r"dropout: given 1.5; expected a number in \[0, 1\]"),
    ({"dropout": np.nan}, ValueError, r"dropout: given nan; expected a number in \[0, 1\]"),
    ({"bias": "no"}, TypeError, "bias: given str 'no'; expected True or False"),
    ({"dtype": torch.int32}, TypeError, "dtype: given dtype torch.int32; expected a floating"),
    ({"dtype": torch.complex64}, TypeError, "dtype: given dtype torch.complex64; expected a"),
    ({"dtype": "float32"}, TypeError, "dtype: given str 'float32'; .*Pass one, .*torch.float32"),
    ({"proj_size": 2}, TypeError, "proj_size: given 2; expected no such argument.*spelling"),
    ({"hidden": 2, "hidden_size": None}, TypeError, "hidden: given 2; .*spelling"),
    ({"cell": cells.LSTMP}, TypeError, "P: given nothing; expected the size P that cell LSTMP"),
]


@pytest.mark.parametrize(("arguments", "kind", "message"), BAD_LAYERS, ids=str)
def test_bad_layers(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    arguments = {"cell": cells.LSTM, "input_size": 3, "hidden_size": 5, **arguments}
    with pytest.raises(kind, match=message):
        at.RNN(**arguments)
    if not {"dropout", "num_layers"} & arguments.keys():
        with pytest.raises(kind, match=message):
            at.RNNCell(**arguments)


@pytest.mark.parametrize("name", ["batch_first", "bidirectional"])
def test_flags_of_a_layer_are_no_words(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name}: given str 'no'; expected True or False"):
        at.RNN(cells.LSTM, 3, 5, **{name: "no"})


def test_sizes_in_place_of_a_cell() -> None:
    """The error helps users who pass sizes first, as to ``torch.nn.RNN`` and ``RNNCell``."""
    for name in ("RNN", "RNNCell"):
        with pytest.raises(TypeError, match=rf"cell: given int 3; .*: {name}\(cells.RNN, 3, 4\)\."):
            getattr(at, name)(3, 4)
        with pytest.raises(TypeError, match=r"hidden_size: given None.*Pass hidden_size\."):
            getattr(at, name)(cells.LSTM, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: at.GRU(3, units=4), r"^units: .*; GRU takes input_size, .* mean hidden_size\?"),
        (lambda: at.LSTM(3), r"^hidden_size: given nothing; .*; LSTM takes .* Pass hidden_size\."),
        (lambda: at.RNN(cells.LSTM, units=4), "^input_size: given nothing; .*; RNN takes cell, in"),
        (lambda: at.RNN(cells.LSTM, 3, units=4), r"^units: given 4; .* Did you mean hidden_size\?"),
        (
            lambda: at.Feedback(at.GRU(3, 4), nn.Linear(4, 3), reset_state=torch.zeros(3)),
            r"^reset_state: given Tensor; .*; Feedback takes layer, readout\. Leave it out\.",
        ),
        (lambda: at.LSTM(*range(12)), "positional arguments"),
        (lambda: at.LSTM(3, 4, dtype="x"), "^(?!dtype)"),  # of torch's own constructor
    ],
)
def test_errors_about_names_of_a_constructor(call: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


def test_other_errors() -> None:
    with pytest.warns(UserWarning, match="num_layers=1"):
        at.RNN(cells.LSTM, 3, 5, dropout=0.5)
    engine = anycell.cell(gates="a", state="h", params="engine")(lambda x, r, s, p: x.a * p.engine)
    with pytest.raises(ValueError, match=r"has a parameter named 'engine'.*Rename"):
        at.RNNCell(engine, 3, 5)
    with pytest.raises(ValueError, match=r"x: given torch.float32 \[2, 4\]; expected .*\[2, 3\]"):
        at.RNNCell(cells.LSTM, 3, 5)(torch.zeros(2, 4))
    with pytest.raises(TypeError, match=r"static: given None; expected torch.float32"):
        at.RNN(Gated, 3, 5)(torch.zeros(X))
    for layer in (at.LSTM(3, 5), at.RNN(cells.LSTM, 3, 5)):
        layer.weight_hh_l0 = nn.Parameter(torch.zeros(20, 4))
        with pytest.raises(
            ValueError, match=r"weight_hh: given shape \(20, 4\); expected \(20, 5\)"
        ):
            layer(torch.zeros(X))


# -- threads and examples --------------------------------------------------------------------------
@pytest.mark.usefixtures("two_threads")
def test_same_bits_for_any_number_of_threads() -> None:
    layer, x = at.LSTM(16, 64, bidirectional=True), torch.randn(9, 40, 16)
    two = run(layer, x)
    torch.set_num_threads(1)
    one = run(layer, x)
    torch.set_num_threads(2)
    for name in ("output", "final 0", "final 1"):
        assert torch.equal(one[name], two[name]), name


@pytest.mark.parametrize("name", sorted({*at.__all__} - {"Engine", *at.named.LAYERS}))
def test_example_in_the_docstring(name: str) -> None:
    runner = doctest.DocTestRunner()
    scope = {**vars(at), "anycell": anycell, "torch": torch, "nn": nn}
    (example,) = doctest.DocTestFinder(recurse=False).find(getattr(at, name), name, globs=scope)
    assert runner.run(example).attempted and not runner.failures
