"""Programs of users, in short: what projects with recurrent code of their own keep (their
parameters, their layouts, their training), and the call that takes the place of the loop.

Each is held against its own loop over the steps, in float64: results and gradients.
"""

from collections.abc import Callable
from typing import Any

import torch
from tolerances import assert_close
from torch import Tensor, nn
from torch.nn.functional import linear, softplus
from torch_layers import tensors_of, weighted

import anycell.torch as at
from anycell import cell, cells, sigmoid, tanh

STEPS, ROWS, INPUTS, UNITS = 9, 4, 3, 6
F64: dict[str, Any] = {"dtype": torch.float64}


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, **F64)


def own(*shape: int) -> nn.Parameter:
    """A parameter of the user's."""
    return nn.Parameter(randn(*shape) * 0.4)


def assert_same(ours: Callable[[], Any], loop: Callable[[], Any], learned: list[Tensor]) -> None:
    """Results, and gradients of what is learned."""
    solved = []
    for program in (ours, loop):
        results = tensors_of(program())
        solved.append((results, torch.autograd.grad(weighted(results), learned)))
    for kind, found, right in zip(("forward", "gradient"), *solved, strict=True):
        for a, b in zip(found, right, strict=True):
            assert_close(a.detach().numpy(), b.detach().numpy(), "float64", kind)


def test_parameters_of_the_users_own() -> None:
    """A cell of one's own in a module whose ``state_dict`` others load: one matrix, one bias."""

    @cell(gates="f g", state="h", params="decay")
    def Leaky(x: Any, r: Any, s: Any, p: Any) -> Any:
        keep = sigmoid(x.f + r.f) * p.decay
        return keep * s.h + (1.0 - keep) * tanh(x.g + r.g)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.W, self.b, self.tau = own(2 * UNITS, INPUTS + UNITS), own(2 * UNITS), own(UNITS)

        def forward(self, x: Tensor) -> Tensor:
            w_x, w_h = self.W.split([INPUTS, UNITS], dim=1)
            weights = {"weight_ih": w_x, "weight_hh": w_h, "bias_ih": self.b}
            weights["decay"] = torch.exp(-softplus(self.tau))
            return at.recurrence(Leaky, x, weights)[0]

        def loop(self, x: Tensor) -> Tensor:
            h, outputs = x.new_zeros(x.shape[1], UNITS), []
            for step in x:
                f, g = linear(torch.cat([step, h], 1), self.W, self.b).chunk(2, 1)
                keep = torch.sigmoid(f) * torch.exp(-softplus(self.tau))
                h = keep * h + (1 - keep) * torch.tanh(g)
                outputs.append(h)
            return torch.stack(outputs)

    model, x = Model(), randn(STEPS, ROWS, INPUTS)
    assert list(model.state_dict()) == ["W", "b", "tau"]
    assert_same(lambda: model(x), lambda: model.loop(x), list(model.parameters()))


def test_weights_laid_out_as_keras_has_them() -> None:
    """Transposed, one bias; turning them is a view, and gradients go to the user's tensors."""
    kernel, recurrent, bias = own(INPUTS, 4 * UNITS), own(UNITS, 4 * UNITS), own(4 * UNITS)
    x = randn(STEPS, ROWS, INPUTS)

    def ours() -> Any:
        weights = {"weight_ih": kernel.T, "weight_hh": recurrent.T, "bias_ih": bias}
        return at.recurrence(cells.LSTM, x, weights)

    def loop() -> Any:
        h = c = x.new_zeros(ROWS, UNITS)
        outputs = []
        for step in x:
            i, f, g, o = (step @ kernel + h @ recurrent + bias).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(h)
        return torch.stack(outputs), (h, c)

    assert_same(ours, loop, [kernel, recurrent, bias])


def test_a_gradient_step_inside_the_graph() -> None:
    """MAML: weights after a step of the inner loop, and second derivatives through it."""
    layer, head = nn.GRU(INPUTS, UNITS, **F64), own(UNITS)
    support, query = randn(STEPS, ROWS, INPUTS), randn(STEPS, ROWS, INPUTS)

    def program(run: Callable[[Tensor, dict[str, Tensor]], Tensor]) -> Tensor:
        weights = {n.removesuffix("_l0"): p for n, p in layer.named_parameters()}
        inner = (run(support, weights) @ head).square().mean()
        slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        fast = {n: w - 0.5 * g for (n, w), g in zip(weights.items(), slopes, strict=True)}
        return (run(query, fast) @ head).square()

    def ours() -> Tensor:
        return program(lambda x, weights: at.recurrence(cells.GRU, x, weights)[0])

    def loop() -> Tensor:
        def run(x: Tensor, weights: dict[str, Tensor]) -> Tensor:
            named = {f"{n}_l0": w for n, w in weights.items()}
            return torch.func.functional_call(layer, named, (x,))[0]

        return program(run)

    assert_same(ours, loop, [*layer.parameters(), head])
