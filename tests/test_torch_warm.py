"""Calls without gradients that run as earlier ones did: ``anycell/torch/warm.py``."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import anycell
import anycell.torch
from anycell import cells, compress
from anycell.torch import warm

Module = Any
MODULES: dict[str, Callable[[], Module]] = {
    "LSTM": lambda: anycell.torch.LSTM(5, 8),
    "LSTM of three layers, both directions": lambda: anycell.torch.LSTM(
        5, 8, 3, bidirectional=True, batch_first=True
    ),
    "LSTM with a projection": lambda: anycell.torch.LSTM(5, 8, 2, proj_size=3),
    "LSTM without biases": lambda: anycell.torch.LSTM(5, 8, bias=False),
    "LSTM in float64": lambda: anycell.torch.LSTM(5, 8, dtype=torch.float64),
    "LSTM with dropout": lambda: anycell.torch.LSTM(5, 8, 2, dropout=0.5).eval(),
    "GRU": lambda: anycell.torch.GRU(5, 8, 2, batch_first=True),
    "peepholes": lambda: anycell.torch.RNN(cells.PeepholeLSTM, 5, 8, bidirectional=True),
    "layer norm": lambda: anycell.torch.RNN(cells.LayerNormLSTM, 5, 8, 2),
    "zoneout in evaluation": lambda: anycell.torch.RNN(cells.ZoneoutLSTM, 5, 8).eval(),
    "heads": lambda: anycell.torch.RNN(cells.sLSTM, 5, 8),
    "8 bits": lambda: compress.quantize(anycell.torch.LSTM(5, 8, 2)),
}


@pytest.fixture
def hits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether each call of the operator found a record."""
    calls: list[bool] = []
    play = warm.play

    def counted(*arguments: Any) -> Any:
        results = play(*arguments)
        calls.append(bool(results))
        return results

    monkeypatch.setattr(warm, "play", counted)
    yield calls


def flat(results: Any) -> list[torch.Tensor]:
    if isinstance(results, torch.Tensor):
        return [results]
    return [tensor for part in results for tensor in flat(part)]


def same(one: Any, other: Any) -> None:
    """Both have the same structure, layouts and bits."""
    assert type(one) is type(other)
    for a, b in zip(flat(one), flat(other), strict=True):
        assert a.stride() == b.stride() and torch.equal(a, b)


def problem(module: Module, batched: bool = True) -> tuple[torch.Tensor, Any]:
    """x and a state of a module."""
    dtype = module._like.dtype
    rows = (3,) if batched else ()
    x = torch.randn((3, 4, 5) if batched else (4, 5), dtype=dtype)
    x = x if not batched or module.batch_first else x.swapaxes(0, 1).contiguous()
    count = module.num_layers * (1 + module.bidirectional)
    sizes = dict(module._sizes)
    states = tuple(
        torch.rand(count, *rows, sizes[s.size], dtype=dtype) for s in module.cell.states
    )
    return x, states if len(states) > 1 else states[0]


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("given", [True, False])
def test_a_second_call_has_the_bits_of_the_first(
    name: str, batched: bool, given: bool, hits: list[bool]
) -> None:
    torch.manual_seed(0)
    module = MODULES[name]()
    x, state = problem(module, batched)
    arguments = (x, state) if given else (x,)
    with torch.no_grad():
        results = [module(*arguments) for _ in range(3)]
        x.mul_(2)  # not a constant
        other = module(*arguments)
        with anycell.threads(2):  # another form, which is learnt by itself
            same(other, module(*arguments))
    same(results[0], results[1])
    same(results[0], results[2])
    assert not torch.equal(results[0][0], other[0])
    assert hits[-3:] == [True] * 3
