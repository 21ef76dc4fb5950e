"""The PyTorch layers as modules: weights that others rewrite, files, optimizers, profilers."""

import copy
import cProfile
import pstats
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tolerances import NO_WORSE_THAN_16, assert_close, error  # noqa: E402
from torch.nn.utils import parametrizations, prune  # noqa: E402
from torch_layers import LAYERS, assert_same, fused, lacks, of_torchscript, run, twins  # noqa: E402

import anycell.torch as at  # noqa: E402
from anycell import cells, compress  # noqa: E402
from anycell.engines import cpu  # noqa: E402
from anycell.torch.operators.native import table  # noqa: E402

nn, Tensor = torch.nn, torch.Tensor
FLAGS = {"num_layers": 2, "bidirectional": True, "dtype": torch.float64}


# -- what nn.LSTM has beside forward ---------------------------------------------------------------
@pytest.mark.parametrize("kind", LAYERS)
def test_attributes_of_torchs_layers(kind: str) -> None:
    ours, theirs = twins(kind, 3, 5, **FLAGS)
    assert isinstance(ours, type(theirs)) and vars(ours).keys() == vars(theirs).keys()
    assert ours._all_weights == theirs._all_weights
    assert ours.flatten_parameters() is None
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    changes: list[Callable[[Any], Any]] = [
        lambda layer: None,
        lambda layer: layer.float().double(),
        lambda layer: layer.load_state_dict(copy.deepcopy(layer.state_dict()), assign=True),
        lambda layer: setattr(layer, "weight_hh_l1", nn.Parameter(layer.weight_hh_l1.data * 2)),
        lambda layer: layer.reset_parameters(),
        lambda layer: layer.share_memory(),
    ]
    for change in changes:
        for layer in (ours, theirs):
            torch.manual_seed(3)
            change(layer)
        own = [getattr(ours, name) for names in ours._all_weights for name in names]
        assert all(a is b for a, b in zip(own, ours._flat_weights, strict=True))
        listed = [w for weights in ours.all_weights for w in weights]
        assert all(a is b for a, b in zip(own, listed, strict=True))
        assert_same(run(ours, x), run(theirs, x), "float64")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "LSTMCell", "GRUCell"])
def test_torchs_table_of_modules(kind: str) -> None:
    """Every call, and every error, that PyTorch lists for its tests of the layer."""
    pytest.importorskip("expecttest")
    from torch.testing._internal.common_modules import module_db

    (info,) = [info for info in module_db if info.module_cls is getattr(nn, kind)]
    setting: dict[str, Any] = {"device": "cpu", "dtype": torch.float64, "training": True}
    for entry in info.module_inputs_func(info, **setting, requires_grad=True):
        found = []
        for module in (getattr(at, kind), getattr(nn, kind)):
            torch.manual_seed(0)
            init, call = entry.constructor_input, entry.forward_input
            layer = module(*init.args, **init.kwargs).double()
            outputs = torch.utils._pytree.tree_leaves(layer(*call.args, **call.kwargs))
            outputs = [t for t in outputs if t.is_floating_point()]  # of a packed one, its data
            total = sum(t.square().sum() for t in outputs)
            found.append([*outputs, *torch.autograd.grad(total, list(layer.parameters()))])
        for ours, theirs in zip(*found, strict=True):
            assert_close(ours.detach(), theirs.detach(), "float64", "gradient", entry.desc)
    for entry in info.module_error_inputs_func(info, **setting, requires_grad=False):
        said, bad = [], entry.module_error_input
        for module in (getattr(at, kind), getattr(nn, kind)):
            with pytest.raises(entry.error_type, match=entry.error_regex) as caught:
                init, call = bad.constructor_input, bad.forward_input
                module(*init.args, **init.kwargs)(*call.args, **call.kwargs)
            said.append(str(caught.value))
        assert said[0] == said[1]


def old_weight_norm(layer: Any) -> None:
    with pytest.warns(FutureWarning, match="weight_norm"):
        nn.utils.weight_norm(layer, "weight_hh_l0")


def removed(change: Callable[[Any], None], remove: Callable[[Any], Any]) -> Callable[[Any], None]:
    def both(layer: Any) -> None:
        change(layer)
        remove(layer)

    return both


REWRITES: dict[str, Callable[[Any], Any]] = {
    "weight_norm": lambda layer: parametrizations.weight_norm(layer, "weight_hh_l0"),
    "old weight_norm": old_weight_norm,
    "removed weight_norm": removed(
        lambda layer: parametrizations.weight_norm(layer, "weight_ih_l0"),
        lambda layer: nn.utils.parametrize.remove_parametrizations(layer, "weight_ih_l0"),
    ),
    "spectral_norm": lambda layer: parametrizations.spectral_norm(layer, "weight_hh_l1_reverse"),
    "old spectral_norm": lambda layer: nn.utils.spectral_norm(layer, "weight_hh_l0"),
    "orthogonal": lambda layer: parametrizations.orthogonal(layer, "weight_hh_l0"),
    "pruning": lambda layer: prune.l1_unstructured(layer, "weight_hh_l0", 0.5),
    "pruning, made permanent": removed(
        lambda layer: prune.random_unstructured(layer, "weight_ih_l1", 0.3),
        lambda layer: prune.remove(layer, "weight_ih_l1"),
    ),
}


@pytest.mark.parametrize("rewrite", REWRITES)
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.sample(every=3)
def test_rewritten_weights(kind: str, rewrite: str) -> None:
    """What others put in the place of a weight runs fused, and gets its gradients."""
    ours, theirs = twins(kind, 3, 5, **FLAGS)
    for layer in (ours.eval(), theirs.eval()):  # in training spectral_norm changes at each look
        torch.manual_seed(2)
        REWRITES[rewrite](layer)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    for _ in range(2):
        assert_same(run(ours, x), run(theirs, x), "float64")
    assert fused(ours(x)[0])
    try:
        copy.deepcopy(theirs)
    except RuntimeError:  # torch refuses it while the weight is a result, not a parameter
        return
    assert torch.equal(copy.deepcopy(ours)(x)[0], ours(x)[0])


@pytest.mark.parametrize("kind", LAYERS)
def test_safetensors(kind: str, tmp_path: Any) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    ours, theirs = LAYERS[kind][0](3, 5, 2), LAYERS[kind][1](3, 5, 2)
    x, path = torch.randn(4, 2, 3), tmp_path / "layer.safetensors"
    safetensors.save_model(theirs, path)
    safetensors.load_model(ours, path)
    assert safetensors.load_file(path).keys() == ours.state_dict().keys()
    assert_same(run(ours, x), run(theirs, x), "float32")
    safetensors.save_model(ours, path)
    safetensors.load_model(theirs, path)


# -- torch.func ------------------------------------------------------------------------------------
ALL = {**{kind: make for kind, (make, _) in LAYERS.items()}, "RNN": at.RNN}


def make(kind: str, *args: Any, **kwargs: Any) -> Any:
    cell = (cells.PeepholeLSTM,) if kind == "RNN" else ()
    return ALL[kind](*cell, *args, **kwargs, dtype=torch.float64)


@of_torchscript
@pytest.mark.parametrize("kind", ALL)
def test_ensembles_and_gradients_per_sample(kind: str) -> None:
    """vmap over the weights of several layers, and over the rows of a gradient."""
    layers = [make(kind, 3, 5, num_layers=2, bidirectional=True) for _ in range(3)]
    x, weights = torch.randn(4, 2, 3, dtype=torch.float64), dict(layers[0].named_parameters())

    def call(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(layers[0], weights, (x,))[0]

    stacked, _ = torch.func.stack_module_state(layers)
    together = torch.func.vmap(call, in_dims=(0, None))(stacked, x)
    for layer, output in zip(layers, together, strict=True):
        assert_close(output.detach(), layer(x)[0].detach(), "float64", "forward")

    def loss(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        return call(weights, row).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 1))(weights, x)
    for row in range(2):
        alone = torch.autograd.grad(loss(weights, x[:, row]), weights.values())
        for name, value in zip(weights, alone, strict=True):
            assert_close(found[name][row].detach(), value, "float64", "gradient", name)


@of_torchscript
@pytest.mark.parametrize("kind", ALL)
def test_jvp_of_the_weights(kind: str) -> None:
    """The derivative along a direction is the gradient times that direction."""
    layer, x = make(kind, 3, 5, bidirectional=True), torch.randn(4, 2, 3, dtype=torch.float64)
    weights = {name: p.detach() for name, p in layer.named_parameters()}
    along = {name: torch.randn_like(p) for name, p in weights.items()}
    _, tangent = torch.func.jvp(
        lambda w: torch.func.functional_call(layer, w, (x,))[0].square().sum(), (weights,), (along,)
    )
    gradients = torch.autograd.grad(layer(x)[0].square().sum(), layer.parameters())
    total = sum((g * along[n]).sum() for g, n in zip(gradients, weights, strict=True))
    assert_close(tangent, total, "float64", "gradient")


# -- profiler --------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [lambda: at.LSTM(3, 5), lambda: at.RNN(cells.PeepholeLSTM, 3, 5)])
def test_profiler_ranges_have_the_name_of_the_cell(make: Callable[[], Any]) -> None:
    layer, x = make(), torch.randn(4, 2, 3)
    name = layer.cell.name
    with torch.profiler.profile() as profiler:
        layer(x)[0].sum().backward()
    seen = {event.key for event in profiler.key_averages()}
    assert {f"anycell.{name}.forward", f"anycell.{name}.backward"} <= seen


# -- training --------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.sample(1)
def test_same_bits_every_time(kind: str) -> None:
    """Training twice from one seed gives the same parameters, bit for bit."""
    found = []
    for _ in range(2):
        torch.manual_seed(4)
        layer = LAYERS[kind][0](8, 40, 2, dropout=0.3, bidirectional=True)
        optimizer = torch.optim.AdamW(layer.parameters(), 1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            layer(torch.randn(20, 33, 8), lengths=torch.randint(0, 21, (33,)))[
                0
            ].square().mean().backward()
            optimizer.step()
        found.append([p.detach() for p in layer.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.sample(1)
def test_autocast_trains(kind: str) -> None:
    """Under autocast as torch's layer: gradients of float32 parameters, as near as torch's, and as
    near as they must be where torch's does not run.
    """
    ours, theirs = twins(kind, 3, 5, batch_first=True)
    right = copy.deepcopy(theirs).double()
    peers = () if lacks(theirs, torch.bfloat16) else (theirs,)
    x, found = torch.randn(2, 4, 3), []
    for layer in (ours, right, *peers):
        with torch.autocast("cpu", torch.bfloat16, enabled=layer is not right):
            x = x.to(layer.weight_ih_l0.dtype)
            loss = layer(x)[0].to(x).square().mean()
        loss.backward()
        found.append([p.grad for p in layer.parameters()])
    for a, ref, *others in zip(*found, strict=True):
        assert a.dtype == torch.float32
        assert_close(a, ref, "bfloat16", "gradient")
        assert all(error(a, ref) <= NO_WORSE_THAN_16 * error(b, ref) for b in others)


# -- sharded weights -------------------------------------------------------------------------------
class Spread(Tensor):
    """Has what a ``DTensor`` is known by; test_distributed.py has real ones."""

    device_mesh = "two processes"


def spread(layer: Any, *names: str) -> Any:
    for name in names:
        setattr(layer, name, nn.Parameter(getattr(layer, name).detach().as_subclass(Spread)))
    return layer


def test_sharded_weights_are_not_quantized() -> None:
    sharded = spread(at.LSTM(3, 8), "weight_hh_l0")
    flat = at.LSTM(3, 8)
    flat.weight_hh_l0 = nn.Parameter(torch.zeros(5))  # as torch's older FSDP, or DeepSpeed
    for layer, here in ((sharded, r"Spread \[32, 8\]"), (flat, r"Tensor \[5\]")):
        says = (
            rf"given one whose weight_hh_l0 is sharded over processes, here {here}; "
            r"expected the whole weight, \[32, 8\]\. Quantize the model first, then shard it"
        )
        for model in (layer, nn.Sequential(layer)):
            with pytest.raises(ValueError, match=says):
                compress.quantize(model)
    for change in (lambda: compress.factorize(sharded, 2), lambda: compress.shrink(sharded, 4)):
        with pytest.raises(ValueError, match=r"weights are sharded.*Compress the layer first"):
            change()


def test_distributed_tensors_beside_plain_ones() -> None:
    layer, x = at.RNN(cells.PeepholeLSTM, 3, 8), torch.randn(4, 2, 3)
    state = torch.zeros(1, 2, 8), torch.zeros(1, 2, 8)
    right, weights = layer(x, state)[0], [name for name, _ in layer.named_parameters()]

    def assert_refused(name: str, plain: str, *given: Any, **further: Any) -> None:
        says = rf"{name}: given a DTensor; expected plain tensors, or DTensors for {plain} and all"
        with pytest.raises(TypeError, match=says):
            layer(*given, **further)

    there, around = x.as_subclass(Spread), tuple(s.as_subclass(Spread) for s in state)
    assert_refused("x", "weight_ih", there, around)
    spread(layer, *weights)
    assert_refused("state h", "x", x, around)
    assert_refused("weight_ih", "x", x, state)
    assert_refused("x", "state h", there)
    assert_refused("x", "resets", there, around, resets=torch.zeros(4, 2))
    output = layer(there, around)[0].as_subclass(Tensor)
    assert_close(output.detach(), right.detach(), "float32", "forward")


# -- the price of a call ---------------------------------------------------------------------------
@pytest.mark.skipif(table() is None, reason="before PyTorch 2.10 calls pass through Python")
@pytest.mark.parametrize(("gradients", "most"), [(False, 11), (True, 38)])
def test_a_call_is_few_calls(gradients: bool, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Python functions, as a profiler counts them: what a small layer takes follows from it."""
    monkeypatch.setattr(cpu.check, "ON", False)
    layer, x = at.LSTM(64, 128), torch.randn(20, 4, 64)
    profile = cProfile.Profile(builtins=False)
    with torch.set_grad_enabled(gradients):
        for _ in range(3):
            layer(x)
        profile.enable()
        layer(x)
        profile.disable()
    assert pstats.Stats(profile).total_calls <= most
