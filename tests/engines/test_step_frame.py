"""The frame of a step: its derivative, as the engines print it, is the derivative."""

import itertools
import operator
from typing import Any

import pytest
import torch
from tolerances import assert_close
from torch import Tensor

from anycell.plan.step import evaluate, frame

OPS: dict[str, Any] = {"where": torch.where, "add": operator.add, "const": torch.tensor}
ROWS = 8


@pytest.mark.parametrize(
    ("mask", "resets", "separate"), [*itertools.product((False, True), repeat=3)]
)
def test_the_derivative_of_the_frame(mask: bool, resets: bool, separate: bool) -> None:
    """Around a function whose derivative is known; rows under the mask have no resets."""
    around, numbers = frame(mask, resets, separate and mask), torch.Generator().manual_seed(0)

    def draw() -> Tensor:
        return torch.randn(ROWS, 2, generator=numbers, dtype=torch.float64)

    valid = torch.tensor([True, False] * (ROWS // 2))[:, None]
    reset = torch.tensor([True, False, False, False] * (ROWS // 4))[:, None]
    leaves = {"valid": valid, "reset": reset}

    def of(name: str, **values: Tensor) -> Tensor:
        value: Tensor = evaluate(around[name], {**leaves, **values}, OPS)
        return value

    before, restored, d_after, d_output = draw(), draw(), draw(), draw()
    given = before.requires_grad_(), restored.requires_grad_()
    entered = of("entered", before=before, restored=restored)
    new = entered.sin()
    results = (
        of("after", new=new, entered=entered),
        of("output", after=of("after", new=new, entered=entered)),
    )
    expected = torch.autograd.grad(
        results, given, (d_after, d_output), allow_unused=True, materialize_grads=True
    )
    arriving = {"d_after": d_after, "d_output": d_output}
    d_function = entered.detach().cos() * of("alive", value=of("d_new", **arriving))
    d_entered = of("d_entered", d_function=d_function, d_held=of("d_held", **arriving))
    for name, gradient in zip(("d_before", "d_restored"), expected, strict=True):
        found = of(name, d_entered=d_entered).expand_as(gradient)
        assert_close(found.double(), gradient, "float64", "gradient", name)


def test_a_call_without_flags_has_no_frame() -> None:
    around = frame(False, False, False)
    leaves = {"before": 1.0, "new": 2.0, "after": 2.5, "value": 3.0}
    names = {"entered": 1.0, "after": 2.0, "output": 2.5, "alive": 3.0}
    assert {name: evaluate(around[name], leaves, {}) for name in names} == names
