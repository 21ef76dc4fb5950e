"""Shared by the tests of the PyTorch layers."""

from typing import Any

import pytest
import torch
from tolerances import assert_close
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

import anycell.torch as at
from anycell import cell, cells, keep, sigmoid, tanh
from anycell.plan import Layer
from anycell.torch.operators import native, ops, passes
from anycell.torch.operators.composite import Arrays

LAYERS = {"LSTM": (at.LSTM, nn.LSTM), "GRU": (at.GRU, nn.GRU)}
STATES = {"LSTM": 2, "GRU": 1}
# torch compiles some of its own formulas with TorchScript, which is deprecated.
of_torchscript = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
# Old versions cannot trace one graph for any number of steps, drop-ins, or functions.
whole_graphs = pytest.mark.skipif(
    torch.__version__ < torch.torch_version.TorchVersion("2.8"), reason="PyTorch is too old"
)


def twins(kind: str, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Returns our layer and torch's, created with the same seed."""
    made = []
    for layer in LAYERS[kind]:
        torch.manual_seed(7)
        made.append(layer(*args, **kwargs))
    return made[0], made[1]


def lacks(layer: Any, dtype: torch.dtype) -> str | None:
    """Returns why torch's own layer does not run under autocast on this machine, or None if it
    does: without AVX-512, oneDNN has no LSTM of 16 bits.
    """
    try:
        with torch.autocast("cpu", dtype):
            layer(torch.zeros(1, 1, layer.input_size))
    except RuntimeError as error:
        if "could not create a primitive" not in str(error):
            raise
        return str(error).partition("\n")[0]
    return None


def tensors_of(value: Any) -> list[Tensor]:
    """Returns all tensors in arguments or results, including the data of packed sequences."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, PackedSequence):
        return [value.data]
    values = value.values() if isinstance(value, dict) else value
    several = isinstance(value, (tuple, list, dict))
    return [tensor for part in values for tensor in tensors_of(part)] if several else []


def weighted(tensors: list[Tensor]) -> Any:
    """Returns the sum of all numbers of the tensors, each times a factor of its own."""
    factors = [torch.linspace(-1, 1, t.numel()).view(t.shape).to(t) for t in tensors]
    return sum((t * factor).sum() for t, factor in zip(tensors, factors, strict=True))


def assert_same_error(ours: Any, theirs: Any, *arguments: Any) -> None:
    """Asserts that a call raises the same error in both layers."""
    raised = []
    for layer in (ours, theirs):
        with pytest.raises(Exception) as caught:
            layer(*arguments)
        raised.append((type(caught.value), str(caught.value)))
    assert raised[0] == raised[1]


def run(layer: Any, x: Any, state: Any = None, **arguments: Any) -> dict[str, Tensor]:
    """Returns output, final state, and the gradients of a random sum of both; x may be packed."""
    packed = x if isinstance(x, PackedSequence) else None
    x = (x if packed is None else x.data).detach().clone().requires_grad_()
    entering = x if packed is None else PackedSequence(x, *packed[1:])
    given = () if state is None else state if isinstance(state, tuple) else (state,)
    given = tuple(s.detach().clone().requires_grad_() for s in given)
    layer.zero_grad()
    hx = (given if len(given) > 1 else given[0]) if given else None
    output, final = layer(entering, hx, **arguments)
    if packed is not None:
        assert all(a is b for a, b in zip(output[1:], packed[1:], strict=True))
        output = output.data
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
    """Whether our autograd function, which runs the engine, computed a tensor."""
    seen, stack = set(), [value.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if "Fused" in node.name():
            return True
        stack += [before for before, _ in node.next_functions]
    return False


# -- cells --
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


@cell(gates="h", state="h", static="e")
def Gated(x: Any, r: Any, s: Any, e: Any) -> Any:
    """A cell whose static input scales the input's gate."""
    return tanh(e * x.h + r.h)


CELLS = [cells.LSTM, cells.GRU, cells.PeepholeLSTM, cells.LayerNormLSTM, Odd]
by_name = {"ids": lambda c: c.name}


def forget_forms() -> None:
    """What many other layers, and a change of the number of threads, do to forms in use."""
    passes._FORMS.clear()
    records = native.table()
    assert records is not None
    records.forget()


def given_to_forward(layer: Layer, arrays: Arrays) -> tuple[Any, ...]:
    """Returns the arguments with which ``ops.run`` calls the operator."""
    with pytest.MonkeyPatch.context() as patch:
        seen: list[tuple[Any, ...]] = []
        forward = torch.ops.anycell.forward
        patch.setattr(
            torch.ops.anycell, "forward", lambda *args: seen.append(args) or forward(*args)
        )
        ops.run(layer, arrays)
    return seen[0]
