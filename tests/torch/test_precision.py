"""``torch.set_float32_matmul_precision``: how far layers of float32 may round."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tolerances import error, limit
from torch import Tensor

import anycell.torch as at
from anycell import cells
from anycell.engines.cpu import isa
from tests.engines.test_tiles import KINDS, PAIRS

pytestmark = pytest.mark.skipif(
    "avx512vnni" not in isa.available(), reason="the emulation of tiles needs AVX512-VNNI"
)
LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "GRU": lambda: at.GRU(24, 40),
    "LSTM": lambda: at.LSTM(24, 40, num_layers=2, bidirectional=True),
    "sLSTM": lambda: at.RNN(cells.sLSTM(heads=2), 24, 40),
    "LayerNormGRU": lambda: at.RNN(cells.LayerNormGRU, 24, 40),
    "wide LSTM": lambda: at.LSTM(700, 400),  # weights too large for the kernel to project
}
layers = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def solve(layer: torch.nn.Module, x: Tensor, precision: str) -> dict[str, Any]:
    """The output, and all gradients."""
    torch.set_float32_matmul_precision(precision)
    x = x.detach().requires_grad_()
    output = layer(x)[0]
    inputs = {"x": x, **dict(layer.named_parameters())}
    weight = torch.linspace(-1, 1, output.numel(), dtype=x.dtype).view_as(output)
    gradients = torch.autograd.grad((output * weight).sum(), list(inputs.values()))
    with torch.no_grad():
        inference = layer(x)[0]
    solution = {"output": output.detach(), "inference": inference}
    return solution | {f"d {n}": d for n, d in zip(inputs, gradients, strict=True)}


@layers
@pytest.mark.parametrize("kind", KINDS + PAIRS)
@pytest.mark.sample(every=8)
def test_as_many_digits_as_torch_allows(kind: str, make: Callable[[], torch.nn.Module]) -> None:
    torch.manual_seed(0)
    layer = make()
    x = torch.randn(3, 18, next(iter(layer.parameters())).shape[1])
    exact = make().double()
    exact.load_state_dict(layer.state_dict())
    right = solve(exact, x.double(), "highest")
    with isa.force(kind):
        solutions = {p: solve(layer, x, p) for p in ("highest", "high", "medium", "high")}
        once = solve(layer, x, "high")  # weights that were packed for another precision
    for precision, solution in solutions.items():
        name = f"float32 {precision}".removesuffix(" highest")
        for key, value in solution.items():
            most = limit(name, "gradient" if key.startswith("d ") else "forward")
            assert error(value.numpy(), right[key].numpy(), ()) <= most, (precision, key)
    for key, value in once.items():
        assert torch.equal(value, solutions["high"][key]), key
    outputs = {solution["output"].numpy().tobytes() for solution in solutions.values()}
    assert len(outputs) == (2 if kind in PAIRS else 3)  # which have no gain of "high"


@layers
@pytest.mark.sample(1)
def test_other_dtypes_and_instruction_sets_heed_nothing(
    make: Callable[[], torch.nn.Module],
) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 3, next(iter(make().parameters())).shape[1])
    with isa.force("avx512vnni"):
        layer = make()
        high, highest = (solve(layer, x, p) for p in ("high", "highest"))
        assert all(torch.equal(value, highest[key]) for key, value in high.items())
    for dtype in (torch.float64, torch.float16):
        with isa.force(KINDS[-1]):
            layer = make().to(dtype)
            high, highest = (solve(layer, x.to(dtype), p) for p in ("high", "highest"))
            assert all(torch.equal(value, highest[key]) for key, value in high.items())


def test_threads_and_rows_beside_change_no_bit() -> None:
    layer, x = at.LSTM(24, 40), torch.randn(9, 21, 24)
    torch.set_float32_matmul_precision("high")
    threads = torch.get_num_threads()
    with isa.force(KINDS[-1]), torch.no_grad():
        try:
            outputs = []
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                outputs.append(layer(x)[0])
        finally:
            torch.set_num_threads(threads)
        assert all(torch.equal(output, outputs[0]) for output in outputs)
        for part in (slice(0, 1), slice(3, 20)):
            assert torch.equal(layer(x[:, part])[0], outputs[0][:, part])


def test_compiled_layers_heed_it_in_each_call() -> None:
    torch._dynamo.reset()  # the limit of recompilations counts other tests' layers too
    layer, x = at.RNN(cells.LSTM, 24, 40).eval(), torch.randn(9, 18, 24)
    compiled = torch.compile(layer, backend="eager")
    with isa.force(KINDS[-1]), torch.no_grad():
        results = {}
        for precision in ("highest", "high", "highest"):
            torch.set_float32_matmul_precision(precision)
            results[precision] = compiled(x)[0].numpy(), layer(x)[0].numpy()
    for ours, eager in results.values():
        assert np.array_equal(ours, eager)
    assert not np.array_equal(results["high"][0], results["highest"][0])
