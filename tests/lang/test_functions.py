"""The functions of the language in cells that run: against PyTorch, forward and backward."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gpu import by_gpu
from problems import assert_right, random_problem
from tolerances import assert_close

import anycell
from anycell import Cell, cell

torch = pytest.importorskip("torch")
F = torch.nn.functional

Function = Callable[[Any], Any]
FUNCTIONS: dict[str, tuple[Function, Function]] = {
    "sin": (anycell.sin, torch.sin),
    "cos": (anycell.cos, torch.cos),
    "erf": (anycell.erf, torch.erf),
    "silu": (anycell.silu, F.silu),
    "gelu": (anycell.gelu, F.gelu),
    "gelu tanh": (
        lambda v: anycell.gelu(v, approximate="tanh"),
        lambda v: F.gelu(v, approximate="tanh"),
    ),
    "gelu True": (lambda v: anycell.gelu(v, True), lambda v: F.gelu(v, approximate="tanh")),
    "elu": (anycell.elu, F.elu),
    "elu alpha": (lambda v: anycell.elu(v, 0.3), lambda v: F.elu(v, 0.3)),
    "leaky_relu": (anycell.leaky_relu, F.leaky_relu),
    "leaky_relu slope": (lambda v: anycell.leaky_relu(v, 0.2), lambda v: F.leaky_relu(v, 0.2)),
    "softsign": (anycell.softsign, F.softsign),
    "softmax": (anycell.softmax, lambda v: v.softmax(-1)),
    "softmax groups": (
        lambda v: anycell.softmax(v, 3),
        lambda v: v.unflatten(-1, (3, -1)).softmax(-1).flatten(-2),
    ),
    "pow": (
        lambda v: anycell.pow(1.5 + anycell.tanh(v), v),
        lambda v: torch.pow(1.5 + torch.tanh(v), v),
    ),
    "** 2.5": (lambda v: abs(v) ** 2.5, lambda v: abs(v) ** 2.5),
    "** 0.5": (lambda v: (1 + v * v) ** 0.5, lambda v: (1 + v * v) ** 0.5),
    "2 **": (lambda v: 2**v, lambda v: 2**v),
}


def leaky(function: Function) -> Cell:
    """A cell that sees the function's values, also those far from 0."""

    @cell(gates="a", state="h")
    def Sees(x, r, s):  # type: ignore[no-untyped-def]
        return 0.5 * s.h + 0.25 * function(x.a + r.a)

    return Sees


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.more)])
@pytest.mark.sample(every=9)
def test_functions_are_those_of_torch(name: str, dtype: str) -> None:
    """On the fused kernel. x has an exact 0, where functions have their corners."""
    ours, theirs = FUNCTIONS[name]
    generator = torch.Generator().manual_seed(1)
    number = getattr(torch, dtype)
    layer = anycell.torch.RNN(leaky(ours), 2, 6, bias=False, dtype=number)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    assert layer.engine.name == "cpu"
    x = 3 * torch.randn(5, 4, 2, generator=generator, dtype=number)
    x[0, 0] = 0.0
    d = torch.randn(5, 4, 6, generator=generator, dtype=torch.float64)

    def plain(number: Any) -> list[Any]:
        leaves = [a.detach().to(number).requires_grad_() for a in (x, *layer.parameters())]
        (of_x, enter, recur), h, out = leaves, torch.zeros(4, 6, dtype=number), []
        for step in of_x:
            h = 0.5 * h + 0.25 * theirs(step @ enter.T + h @ recur.T)
            out.append(h)
        output = torch.stack(out)
        return [output.detach(), *torch.autograd.grad(output, leaves, d.to(number))]

    x.requires_grad_()
    wanted = plain(torch.float64)
    output, _ = layer(x)
    found = [output.detach(), *torch.autograd.grad(output, [x, *layer.parameters()], d.to(number))]
    for value, right in zip(found, wanted, strict=True):
        kind = "forward" if right is wanted[0] else "gradient"
        assert_close(value.numpy(), right.numpy(), dtype, kind, name)


@cell(gates="a b", state="h")
def Several(x, r, s):  # type: ignore[no-untyped-def]
    """All ops whose functions have more than a line on a GPU."""
    turned = anycell.sin(3.0 * x.a) * anycell.cos(x.b + r.b)
    return 0.5 * s.h + 0.3 * turned + 0.2 * anycell.erf(x.a) * (1.5 + anycell.tanh(x.b)) ** x.a


def test_on_a_gpu(rng: np.random.Generator) -> None:
    pytest.importorskip("triton")
    problem = random_problem(Several, (3, 4, 6), rng).astype("float32")
    assert_right(by_gpu(problem), problem)


SIDES = [0.0, -0.0, 0.5, 1.0, -1.0, 1.5, 2.0, 3.0, -3.0, 2.0**24, np.inf, -np.inf, np.nan, -2.5]


def test_powers_on_a_gpu_have_the_rules_of_c() -> None:
    """Of all pairs, as on the CPU: in one step, whose weights and biases are zero."""
    pytest.importorskip("triton")

    @cell(gates="a b", state="h", bias=False)
    def Power(x, r, s):  # type: ignore[no-untyped-def]
        return x.a**x.b

    pairs = np.array(list(itertools.product(SIDES, SIDES)), np.float32)
    problem = random_problem(Power, (1, 1, len(pairs)), np.random.default_rng(0)).astype("float32")
    problem = problem.but({"x": pairs.T.reshape(1, 1, -1)})
    found = by_gpu(problem)["output"].ravel()
    with np.errstate(all="ignore"):
        wanted = np.power(*pairs.T)
    numbers = ~np.isnan(wanted)
    assert np.array_equal(np.isnan(found), ~numbers)
    finite = np.isfinite(wanted)
    assert np.array_equal(found[numbers & ~finite], wanted[numbers & ~finite])
    assert_close(found[finite], wanted[finite], "float32", "forward")
    assert np.array_equal(np.signbit(found)[numbers], np.signbit(wanted)[numbers])


def test_elu_keeps_its_digits_near_zero() -> None:
    """exp(v) - 1 would have lost all but three of them."""
    layer = anycell.numpy.RNN(leaky(anycell.elu), 1, 1, bias=False)
    layer.set_parameters({"weight_ih_l0": [[1.0]], "weight_hh_l0": [[0.0]]})
    output, _ = layer.forward(torch.full((1, 1, 1), -1e-4).numpy())
    right = 0.25 * torch.expm1(torch.tensor(-1e-4, dtype=torch.float64))
    assert abs(output.item() / right.item() - 1) < 1e-6
