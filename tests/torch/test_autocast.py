"""Autocast where it meets our autograd functions and operators: within it torch's matmuls give
another dtype than kernels read, and nothing but the numbers would tell.
"""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tolerances import assert_close  # noqa: E402
from torch_layers import CELLS, Gated, by_name, fused, tensors_of  # noqa: E402

import anycell.torch as at  # noqa: E402
from anycell import cells  # noqa: E402

Tensor = torch.Tensor
DTYPES = [torch.bfloat16, torch.float16]


def total(results: Any) -> Tensor:
    parts = enumerate(tensors_of(results), 1)
    return torch.stack([k * t.float().square().sum() for k, t in parts]).sum()


def assert_same(ours: Any, theirs: Any) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype is b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [*CELLS, cells.JANET, Gated], **by_name)
@pytest.mark.sample(every=5)
def test_a_step(kind: Any, dtype: Any) -> None:
    """``RNNCell`` computes in the dtype of its weights, whatever that of its arguments."""
    module, count = at.RNNCell(kind, 3, 5), len(kind.states)
    x, *others = (torch.randn(4, n).to(dtype) for n in (3, *[5] * count, 5))
    leaves, results = list(module.parameters()), []
    for on in (False, True):
        x, *others = (t if on else t.float() for t in (x, *others))
        static = {} if kind.static is None else {"static": others[-1]}
        with torch.autocast("cpu", dtype, enabled=on):
            new = module(x, tuple(others[:count]) if count > 1 else others[0], **static)
            again = module(x, new, **static)  # as a loop has it
        results.append(
            [*tensors_of(new), *tensors_of(again), *torch.autograd.grad(total(again), leaves)]
        )
    assert {t.dtype for t in results[1]} == {torch.float32}
    assert_same(*results)


KINDS: dict[str, Callable[..., Any]] = {
    "LSTM": at.LSTM,
    "GRU": at.GRU,
    "RNN of LSTM": lambda *sizes, **options: at.RNN(cells.LSTM, *sizes, **options),
    "RNN of GRU": lambda *sizes, **options: at.RNN(cells.GRU, *sizes, **options),
    "RNN of PeepholeLSTM": lambda *sizes, **options: at.RNN(cells.PeepholeLSTM, *sizes, **options),
}


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(every=21)
def test_every_number_of_steps(kind: str, dtype: Any, bias: bool, gradients: bool) -> None:
    """It runs, in one dtype, also where torch's own layer does not, as without AVX-512."""
    layer, number = KINDS[kind](3, 5, bias=bias), str(dtype).removeprefix("torch.")
    right = copy.deepcopy(layer).double()
    for steps, rows in itertools.product((1, 2, 20), (2, 40)):
        x = torch.randn(steps, rows, 3).to(dtype).float()
        with torch.set_grad_enabled(gradients), torch.autocast("cpu", dtype):
            assert layer.engine.name == "cpu" and "torch" not in layer.engine.reason
            found = tensors_of(layer(x))
        assert {t.dtype for t in found} == {dtype}
        assert fused(found[0]) is gradients
        wanted = tensors_of(right(x.double()))
        for ours, theirs in zip(found, wanted, strict=True):
            assert_close(ours.detach().float(), theirs.detach(), number, "forward")
        if gradients:
            d = torch.autograd.grad(total(found), list(layer.parameters()))
            ref = torch.autograd.grad(total(wanted), list(right.parameters()))
            for ours, theirs in zip(d, ref, strict=True):
                assert ours.dtype == torch.float32
                assert_close(ours, theirs, number, "gradient")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_a_step_of_a_layer(kind: str, dtype: Any) -> None:
    """``step`` is a call of one step, prepared or not."""
    layer, x = KINDS[kind](3, 5), torch.randn(2, 3)
    with torch.no_grad(), torch.autocast("cpu", dtype):
        state, ref = layer(torch.randn(4, 2, 3))[1], layer(x[None])[0][0]
        for ready in (layer, layer.prepare()):
            output, _ = ready.step(x)
            assert torch.equal(output, ref) and output.dtype == dtype
            for after, before in zip(
                tensors_of(ready.step(x, state)[1]), tensors_of(state), strict=True
            ):
                assert after.dtype == before.dtype == dtype


def layers() -> dict[str, Callable[[], Any]]:
    return {
        "LSTM": lambda: at.LSTM(3, 5, 2),
        "RNN": lambda: at.RNN(cells.PeepholeLSTM, 3, 5, bidirectional=True),
        "checkpoint": lambda: at.RNN(cells.LSTM, 3, 5, checkpoint=2),
        "two matmuls": lambda: at.RNN(cells.MultiplicativeLSTM, 3, 5),
        "a step": lambda: at.RNNCell(cells.PeepholeLSTM, 3, 5),
        "a packed step": lambda: at.RNNCell(cells.MultiplicativeLSTM, 3, 5),
    }


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("kind", layers())
@pytest.mark.sample(every=5)
def test_a_backward_pass(kind: str, again: bool) -> None:
    """Begun within autocast, it has the bits of one begun outside, to be differentiated or not."""
    layer = layers()[kind]()
    shape = (8, 3) if "step" in kind else (2, 8, layer.input_size)
    x = torch.randn(shape, requires_grad=True)
    leaves, gradients = [x, *layer.parameters()], []
    for dtype in (None, *DTYPES):
        loss = total(layer(x))
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            gradients.append(torch.autograd.grad(loss, leaves, create_graph=again))
    for others in gradients[1:]:
        assert_same(others, gradients[0])


@pytest.mark.sample(4)
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("kind", ["RNN", "a step", "a packed step", "checkpoint", "two matmuls"])
def test_an_exported_program(kind: str, gradients: bool) -> None:
    """It computes as it was exported, whatever the context that it is called in."""
    layer = layers()[kind]()
    shape = (4, 3) if "step" in kind else (7, 4, layer.input_size)
    x = torch.randn(shape, requires_grad=gradients)
    program = torch.export.export(layer, (x,)).module()
    results = []
    for dtype in (None, *DTYPES):
        with (
            torch.autocast("cpu", dtype, enabled=dtype is not None),
            torch.set_grad_enabled(gradients),
        ):
            new = tensors_of(program(x))
            d = torch.autograd.grad(total(new), [x]) if gradients else ()
        results.append([*new, *d])
    for others in results[1:]:
        assert_same(others, results[0])
