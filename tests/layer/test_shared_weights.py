"""Matmuls of one name share a weight: against plain PyTorch, and wherever weights are handled."""

from typing import Any

import numpy as np
import pytest
from gpu import by_gpu
from problems import Tied, assert_right, by_cpu, random_problem
from tolerances import assert_close

import anycell
from anycell import CellError, cell, linear, sigmoid, tanh
from anycell.engines.cpu import isa
from anycell.engines.cpu.layout import Layout
from anycell.plan import plan

torch = pytest.importorskip("torch")
F = torch.nn.functional


@cell(gates="tau a", state="h")
def LiquidTime(x: Any, r: Any, s: Any, *, steps: int = 3) -> Any:
    """The semi-implicit solver of Hasani et al., *Liquid Time-constant Networks*, 2021."""
    v = s.h
    for _ in range(steps):
        f = sigmoid(x.tau + linear(v, "w", bias=True))
        v = (v + 0.25 * f * x.a) / (1.25 + 0.25 * f)
    return v


@cell(gates="h t", state="h")
def Highway(x: Any, r: Any, s: Any, *, depth: int = 3, heads: int = 1) -> Any:
    """Zilly et al., *Recurrent Highway Networks*, 2017, with one weight for all depths."""
    y = s.h
    for k in range(depth):
        h, t = linear(y, "r", gates="h t", heads=heads)
        if k == 0:
            h, t = h + x.h, t + x.t
        t = sigmoid(t)
        y = t * tanh(h) + (1 - t) * y
    return y


def liquid(x: Any, h: Any, w: dict[str, Any]) -> Any:
    tau, a = x.chunk(2, -1)
    for _ in range(3):
        f = torch.sigmoid(tau + F.linear(h, w["weight_w_l0"], w["bias_w_l0"]))
        h = (h + 0.25 * f * a) / (1.25 + 0.25 * f)
    return h


def highway(x: Any, y: Any, w: dict[str, Any]) -> Any:
    for k in range(3):
        h, t = (F.linear(y, w["weight_r_l0"]) + (x if k == 0 else 0)).chunk(2, -1)
        t = torch.sigmoid(t)
        y = t * torch.tanh(h) + (1 - t) * y
    return y


@pytest.mark.parametrize(("of", "step"), [(LiquidTime, liquid), (Highway, highway)], ids=["l", "h"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.sample(1)
def test_cells_that_use_a_weight_several_times(of: Any, step: Any, dtype: str) -> None:
    """Outputs and all gradients, against autograd in float64."""
    torch.manual_seed(0)
    number = getattr(torch, dtype)
    layer = anycell.torch.RNN(of, 3, 7, dtype=number)
    assert layer.engine.name == "cpu"
    names = [name for name, _ in layer.named_parameters()]
    assert len([name for name in names if name.startswith("weight_")]) == 2
    x = torch.randn(9, 5, 3, dtype=number, requires_grad=True)
    d = torch.randn(9, 5, 7, dtype=number)
    output, _ = layer(x)
    found = torch.autograd.grad(output, [x, *layer.parameters()], d)

    wide = [a.detach().double().requires_grad_() for a in (x, *layer.parameters())]
    w = dict(zip(names, wide[1:], strict=True))
    h, out = torch.zeros(5, 7, dtype=torch.float64), []
    for part in F.linear(wide[0], w["weight_ih_l0"], w["bias_ih_l0"]):
        h = step(part, h, w)
        out.append(h)
    right = torch.stack(out)
    assert_close(output.detach().double().numpy(), right.detach().numpy(), dtype, "forward")
    for value, wanted in zip(found, torch.autograd.grad(right, wide, d.double()), strict=True):
        assert_close(value.double().numpy(), wanted.numpy(), dtype, "gradient")


@pytest.mark.parametrize("of", [Tied, Highway(heads=3)], ids=repr)
@pytest.mark.parametrize("threads", [1, 2])
def test_masks_resets_heads_and_threads(of: Any, threads: int, rng: np.random.Generator) -> None:
    problem = random_problem(of, (9, 5, 6), rng, masked=True, resets=True)
    assert_right(by_cpu(problem, threads=threads), problem)


def test_on_a_gpu(rng: np.random.Generator) -> None:
    problem = random_problem(Tied, (3, 4, 6), rng, masked=True).astype("float32")
    assert_right(by_gpu(problem), problem)


def test_the_weight_is_packed_once() -> None:
    one, six = (
        Layout(plan(LiquidTime(steps=k), 33, "float32"), backward, isa.current())
        for k, backward in ((1, False), (6, False))
    )
    assert len(six.matmuls) == 6 and len(six.packing) == 1
    assert one.packed_bytes == six.packed_bytes


def test_one_product_however_often_it_is_written() -> None:
    @cell(gates="a")
    def Twice(x, r, s):  # type: ignore[no-untyped-def]
        return tanh(x.a + linear(s.h, "w") * linear(s.h, "w"))

    assert [l.name for l in Twice.linears] == ["w"]


@pytest.mark.parametrize(
    ("first", "second", "shown"),
    [
        ({"size": "R"}, {}, "size=None\\): .* this cell has linear.*size='R'"),
        ({}, {"heads": 2}, "heads=2, .* this cell has linear.*heads=1"),
        ({"bias": True}, {}, "bias=False, .* this cell has linear.*bias=True"),
        ({"gates": "a b"}, {}, "gates=None, .* this cell has linear.*gates='a b'"),
    ],
)
def test_other_arguments_under_one_name(first: Any, second: Any, shown: str) -> None:
    with pytest.raises(CellError, match=f"linear\\(..., 'w', .*{shown}.*\n.*another name"):

        @cell(gates="a")
        def Wrong(x, r, s):  # type: ignore[no-untyped-def]
            linear(s.h, "w", **first)
            return tanh(x.a + linear(x.a, "w", **second))


def test_other_sizes_under_one_name() -> None:
    with pytest.raises(CellError, match=r"sizes do not match: .*linear.* size P"):

        @cell(gates="a", state="h c:P")
        def Wrong(x, r, s):  # type: ignore[no-untyped-def]
            return tanh(x.a + linear(s.h, "w") + linear(s.c, "w")), s.c


def test_smaller_layers(rng: np.random.Generator) -> None:
    """Factors share as their weight does; units go from the one weight; 8 bits round it once."""
    layer = anycell.numpy.RNN(Highway, 3, 16, seed=0, dtype="float64")
    x = rng.standard_normal((6, 2, 3))
    output, _ = layer.forward(x)
    full = anycell.compress.factorize(layer, 16)
    assert {n for n in full.parameters if "_r_" in n} == {"weight_r_u_l0", "weight_r_v_l0"}
    assert_close(full.forward(x)[0], output, "float64", "forward")
    single = anycell.numpy.RNN(Highway, 3, 16, seed=0)
    small = anycell.compress.quantize(single, data=[x.astype("float32")])
    assert small.arrays["weight_r_l0"].dtype == "int8" and small.error < 0.02
    anycell.compress.shrink(layer, 8)
    assert layer.parameters["weight_r_l0"].shape == (16, 8)


def test_checkpoints_and_steps(rng: np.random.Generator) -> None:
    x = torch.randn(9, 2, 3, dtype=torch.float64)
    torch.manual_seed(0)
    layer = anycell.torch.RNN(LiquidTime, 3, 7, dtype=torch.float64)
    again = anycell.torch.RNN(LiquidTime, 3, 7, dtype=torch.float64, checkpoint="sqrt")
    again.load_state_dict(layer.state_dict())
    gradients = []
    for one in (layer, again):
        output, _ = one(x)
        gradients.append(torch.autograd.grad(output.square().sum(), list(one.parameters())))
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)
    state = None
    with torch.no_grad():
        for t in range(3):
            stepped, state = layer.step(x[t], state)
    assert_close(stepped.numpy(), output[2].detach().numpy(), "float64", "forward")
