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
from anycell.layer import ENDS, Options, shapes
from anycell.torch import functional
from anycell.torch.composite import Call, composite

STEPS, ROWS, SIZE, ENTERING = 6, 3, 5, 4
CELLS = [cells.LSTM, cells.GRU, cells.GRU(reset_after=False), cells.PeepholeLSTM, cells.LSTMP]


def problem(
    cell: Any,
    per_gate: bool,
    projected: bool,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    **flags: torch.Tensor,
) -> tuple[Call, dict[str, torch.Tensor]]:
    """A layer of two directions, or of one, whose tensors all want gradients."""
    directions = 1 if projected else 2
    sizes = {"H": SIZE, "P": 3}
    width, first = len(cell.gates) * SIZE, sizes[cell.states[0].size]

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype, device=device, requires_grad=True)

    arrays = {"x": make(STEPS, ROWS, width if projected else ENTERING), **flags}
    for end in ENDS[:directions]:
        learned = shapes(cell, sizes, ENTERING, True)
        if projected:
            del learned["weight_ih"]
        arrays |= {name + end: make(*shape) for name, shape in learned.items()}
    arrays |= {f"state {s.name}": make(directions, ROWS, sizes[s.size]) for s in cell.states}
    shape = (len(cell.gates), ROWS, first) if per_gate else (ROWS, first)
    mask = torch.bernoulli(torch.full(shape, 0.6, dtype=dtype, device=device)) / 0.6
    options = Options(reverse=(False, True)[:directions])
    return Call(cell, SIZE, options, (("P", 3),)), arrays | {"recurrent_mask": mask}


def solve(run: Any, call: Call, arrays: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Results and gradients."""
    output, final, _ = run(call, arrays)
    wanted = [t for t in arrays.values() if t.requires_grad]
    loss = (output * output.detach().cos()).sum() + sum((f**2).sum() for f in final)
    return [output, *final, *torch.autograd.grad(loss, wanted)]


@pytest.mark.parametrize("projected", [False, True], ids=["", "projected"])
@pytest.mark.parametrize("per_gate", [False, True], ids=["one", "per gate"])
@pytest.mark.parametrize("cell", CELLS, ids=repr)
def test_recurrent_mask(cell: Any, per_gate: bool, projected: bool, seed: int) -> None:
    torch.manual_seed(seed)
    valid = torch.rand(STEPS, ROWS) < 0.8
    call, arrays = problem(
        cell, per_gate, projected, mask=valid, resets=torch.rand(valid.shape) < 0.2
    )
    ran = []
    with pytest.MonkeyPatch.context() as patch:
        fused = functional.fused.run
        patch.setattr(functional.fused, "run", lambda *a: ran.append(a[1].engine) or fused(*a))
        ours = solve(functional.layer, call, arrays)
    assert ran == ["cpu"]
    for found, right in zip(ours, solve(composite, call, arrays), strict=True):
        assert_close(found.detach().numpy(), right.detach().numpy(), "float64", "gradient")


def test_recurrent_mask_twice_differentiable() -> None:
    torch.manual_seed(0)
    call, arrays = problem(cells.LSTM, True, False)
    x = arrays["x"].detach()[:2].requires_grad_()

    def output(x: torch.Tensor) -> torch.Tensor:
        return functional.layer(call, arrays | {"x": x})[0]

    assert torch.autograd.gradcheck(output, (x,))
    assert torch.autograd.gradgradcheck(output, (x,))


@pytest.mark.parametrize("checkpoint", [2, "sqrt"])
def test_recurrent_mask_with_checkpoints(checkpoint: Any, set_layer: Callable[..., None]) -> None:
    set_layer(chunk_steps=lambda *_: 1)
    call, arrays = problem(cells.LSTM, True, False)
    plain = solve(functional.layer, call, arrays)
    options = call.options._replace(checkpoint=checkpoint)
    again = solve(functional.layer, call._replace(options=options), arrays)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
