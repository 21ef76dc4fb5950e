"""What the layer function of ``anycell.torch`` takes beyond its modules: masks on the recurrent
connections, and input that is projected already. Keras's layers on torch call it so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tolerances import assert_close

from anycell import cells
from anycell.torch import functional
from anycell.torch.composite import Call, Inputs, Options, Weights, composite

STEPS, ROWS, SIZE, ENTERING = 6, 3, 5, 4
CELLS = [cells.LSTM, cells.GRU, cells.GRU(reset_after=False), cells.PeepholeLSTM, cells.LSTMP]


def problem(
    cell: Any,
    per_gate: bool,
    projected: bool,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    **options: Any,
) -> tuple[Call, Inputs]:
    """A layer of two directions, or of one, whose tensors all want gradients."""
    directions = 1 if projected else 2
    sizes = {"H": SIZE, "P": 3}
    width, first = len(cell.gates) * SIZE, sizes[cell.states[0].size]

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype, device=device, requires_grad=True)

    weights = []
    for _ in range(directions):
        linears = []
        for l in cell.linears:
            if l.name != "hh":
                linears += [(l.name, make(*l.shape(sizes))), (f"{l.name}_bias", None)]
        ih = None if projected else make(width, ENTERING)
        hh, bias = make(width, first), make(width)
        params = tuple([make(SIZE) for _ in cell.params])
        weights.append(Weights(ih, hh, bias, make(width), params, tuple(linears)))
    shape = (len(cell.gates), ROWS, first) if per_gate else (ROWS, first)
    mask = torch.bernoulli(torch.full(shape, 0.6, dtype=dtype, device=device)) / 0.6
    x = make(STEPS, ROWS, width if projected else ENTERING)
    call = Call(cell, SIZE, Options(recurrent_mask=mask, **options), sizes=(("P", 3),))
    initial = tuple(make(directions, ROWS, sizes[s.size]) for s in cell.states)
    return call, Inputs(x, None, initial, None, weights)


def solve(run: Any, call: Call, inputs: Inputs) -> list[torch.Tensor]:
    """Results and gradients."""
    output, final = run(call, inputs)
    assert inputs.initial is not None
    wanted = [inputs.x, *inputs.initial]
    for w in inputs.weights:
        every = (*w[:4], *w.params, *[t for _, t in w.linears])
        wanted += [t for t in every if t is not None]
    loss = (output * output.detach().cos()).sum() + sum((f**2).sum() for f in final)
    return [output, *final, *torch.autograd.grad(loss, wanted)]


@pytest.mark.parametrize("projected", [False, True], ids=["", "projected"])
@pytest.mark.parametrize("per_gate", [False, True], ids=["one", "per gate"])
@pytest.mark.parametrize("cell", CELLS, ids=repr)
def test_recurrent_mask(cell: Any, per_gate: bool, projected: bool, seed: int) -> None:
    torch.manual_seed(seed)
    valid = torch.rand(STEPS, ROWS) < 0.8
    call, inputs = problem(
        cell, per_gate, projected, mask=valid, resets=torch.rand(valid.shape) < 0.2
    )
    ran = []
    with pytest.MonkeyPatch.context() as patch:
        fused = functional.fused.run
        patch.setattr(functional.fused, "run", lambda *a: ran.append(a[1].engine) or fused(*a))
        ours = solve(functional.layer, call, inputs)
    assert ran == ["cpu"]
    for found, right in zip(ours, solve(composite, call, inputs), strict=True):
        assert_close(found.detach().numpy(), right.detach().numpy(), "float64", "gradient")


def test_recurrent_mask_twice_differentiable() -> None:
    torch.manual_seed(0)
    call, inputs = problem(cells.LSTM, True, False)
    x = inputs.x.detach()[:2].requires_grad_()

    def output(x: torch.Tensor) -> torch.Tensor:
        return functional.layer(call, inputs._replace(x=x))[0]

    assert torch.autograd.gradcheck(output, (x,))
    assert torch.autograd.gradgradcheck(output, (x,))


@pytest.mark.parametrize("checkpoint", [2, "sqrt"])
def test_recurrent_mask_with_checkpoints(checkpoint: Any, set_layer: Callable[..., None]) -> None:
    set_layer(chunk_steps=lambda *_: 1)
    call, inputs = problem(cells.LSTM, True, False)
    plain = solve(functional.layer, call, inputs)
    options = call.options._replace(checkpoint=checkpoint)
    again = solve(functional.layer, call._replace(options=options), inputs)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
