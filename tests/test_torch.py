"""The PyTorch layers: against ``torch.nn`` where it has them, else against separate plain calls."""

from __future__ import annotations

import copy
import io
import os
import pickle
import re
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tolerances import NO_WORSE_THAN, assert_close, error

torch = pytest.importorskip("torch")

import anycell  # noqa: E402
import anycell.torch as at  # noqa: E402
from anycell import cell, cells, keep, sigmoid, tanh  # noqa: E402

nn, Tensor = torch.nn, torch.Tensor
DTYPES = {"float32": torch.float32, "float64": torch.float64}
LAYERS = {"LSTM": (at.LSTM, nn.LSTM), "GRU": (at.GRU, nn.GRU)}
STATES = {"LSTM": 2, "GRU": 1}


@pytest.fixture(autouse=True)
def _seed(seed: int) -> None:
    torch.manual_seed(seed)


def twins(kind: str, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Our layer and torch's, made after the same seed."""
    made = []
    for layer in LAYERS[kind]:
        torch.manual_seed(7)
        made.append(layer(*args, **kwargs))
    return made[0], made[1]


def run(layer: Any, x: Tensor, state: Any = None, **arguments: Any) -> dict[str, Tensor]:
    """Output, final state, and the gradients of a random sum of them."""
    x = x.detach().clone().requires_grad_()
    given = () if state is None else state if isinstance(state, tuple) else (state,)
    given = tuple(s.detach().clone().requires_grad_() for s in given)
    layer.zero_grad()
    output, final = layer(x, (given if len(given) > 1 else given[0]) if given else None, **arguments)
    final = final if isinstance(final, tuple) else (final,)
    found = {"output": output, **{f"final {i}": s for i, s in enumerate(final)}}
    draw = torch.Generator().manual_seed(3)
    total = sum((v * torch.randn(v.shape, generator=draw).to(v)).sum() for v in found.values())
    total.backward()
    found |= {"d x": x.grad, **{f"d state {i}": s.grad for i, s in enumerate(given)}}
    found |= {f"d {name}": p.grad for name, p in layer.named_parameters()}
    return {name: value.detach() for name, value in found.items()}


def assert_same(ours: dict[str, Tensor], ref: dict[str, Tensor], dtype: str) -> None:
    assert ours.keys() == ref.keys()
    for name, value in ours.items():
        kind = "gradient" if name.startswith("d ") else "forward"
        assert_close(value.numpy(), ref[name].numpy(), dtype, kind, name)


def fused(value: Tensor) -> bool:
    """Whether the engine, under our autograd function, is what made a tensor."""
    seen, stack = set(), [value.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if "_Fused" in node.name():
            return True
        stack += [before for before, _ in node.next_functions]
    return False


# -- LSTM and GRU are torch's -----------------------------------------------------------------------

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


@pytest.mark.parametrize("sizes", [(5, 3, 1), (1, 4, 7), (9, 1, 33), (4, 5, 100), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("kind", LAYERS)
def test_float32(kind: str, sizes: tuple[int, int, int]) -> None:
    steps, rows, hidden = sizes
    ours, theirs = twins(kind, 6, hidden)
    x = torch.randn(steps, rows, 6)
    found, own = run(ours, x), run(theirs, x)
    ref = run(theirs.double(), x.double())
    assert_same(found, ref, "float32")
    for name, value in found.items():
        mine, vendor = (error(v.numpy(), ref[name].numpy()) for v in (value, own[name]))
        assert mine <= max(NO_WORSE_THAN * vendor, 2e-7), name


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
def test_no_rows(kind: str) -> None:
    ours, theirs = twins(kind, 3, 5, num_layers=2, bidirectional=True)
    found, ref = (run(layer, torch.randn(4, 0, 3)) for layer in (ours, theirs))
    assert {k: v.shape for k, v in found.items()} == {k: v.shape for k, v in ref.items()}
    assert all(not v.any() for k, v in found.items() if k.startswith("d "))


@pytest.mark.parametrize("kind", LAYERS)
def test_memory_layouts(kind: str) -> None:
    ours, theirs = twins(kind, 3, 5, dtype=torch.float64)
    for layer in (ours, theirs):
        layer.weight_hh_l0 = nn.Parameter(layer.weight_hh_l0.detach().t().contiguous().t())
        wide = layer.bias_hh_l0.detach().repeat_interleave(2)
        layer.bias_hh_l0 = nn.Parameter(wide[::2])
    numbers = torch.randn(8, 6, 10, dtype=torch.float64)
    states = torch.randn(1, 5, 6, 2, dtype=torch.float64)[..., 0].transpose(1, 2)
    for x in (numbers[::2, :, 1:4], numbers.permute(2, 1, 0)[:, :, 5:], numbers[:1, :, :3].expand(4, -1, -1)):
        given = (states, states) if kind == "LSTM" else states
        assert_same(run(ours, x, given), run(theirs, x, given), "float64")
    x = numbers[:, :, :3]
    for layer in (ours, theirs):
        layer.zero_grad()
        layer(x)[0].sum().backward()  # an expanded gradient, all strides 0
    assert_close(ours.weight_hh_l0.grad, theirs.weight_hh_l0.grad, "float64", "gradient")


@pytest.mark.parametrize("kind", LAYERS)
def test_same_draws(kind: str) -> None:
    """Initial weights and the dropout between layers, from the same seed."""
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
def test_loss_curves_coincide(kind: str) -> None:
    curves = []
    for layer in twins(kind, 3, 16, num_layers=2, dropout=0.2, dtype=torch.float64):
        torch.manual_seed(5)
        head = nn.Linear(16, 1, dtype=torch.float64)
        x, y = torch.randn(12, 8, 3, dtype=torch.float64), torch.randn(8, 1, dtype=torch.float64)
        model = nn.ModuleList([layer, head])
        optimizer, losses = torch.optim.Adam(model.parameters(), 1e-2), []
        for _ in range(8):
            optimizer.zero_grad()
            loss = (head(layer(x)[0][-1]) - y).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        curves.append(losses)
    np.testing.assert_allclose(*curves, rtol=1e-10)
    assert curves[0][-1] < curves[0][0]


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
        raised = []
        for layer in (ours, theirs):
            with pytest.raises(Exception) as caught:  # noqa: B017, PT011
                layer(*arguments)
            raised.append((type(caught.value), str(caught.value)))
        assert raised[0] == raised[1]
    for bad in ({"hidden_size": 0}, {"dropout": 2.0}, {"num_layers": 0}, {"bias": 1}):
        for layer in LAYERS[kind]:
            with pytest.raises((ValueError, TypeError)):
                layer(**{"input_size": 3, "hidden_size": 5, **bad})


# -- autograd ----------------------------------------------------------------------------------------


@cell(gates="i f g o", state="h c=0.5", params="w b=0.25")
def Odd(x: Any, r: Any, s: Any, p: Any, *, slope: float = 0.7) -> Any:
    """Gates used apart and together, a declared initial state, parameters."""
    c = sigmoid(x.f + r.f + p.w * s.c) * s.c + tanh(x.g + slope * r.g)
    return sigmoid(x.o + r.i) * tanh(c + p.b), c


@cell(gates="f g", state="h")
def Zoned(x: Any, r: Any, s: Any, *, rate: float = 0.6) -> Any:
    """Zoneout of a minimal gated unit."""
    f, g = x + r
    new = sigmoid(f) * s.h + (1 - sigmoid(f)) * tanh(g)
    kept = keep(rate)
    return kept * new + (1 - kept) * s.h


@cell(gates="h", state="h")
def Static(x: Any, r: Any, s: Any, e: Any) -> Any:
    return tanh(x.h + e * r.h)


Static = cell(gates="h", state="h", static="e")(Static.function) if hasattr(Static, "function") else Static
