"""Recurrent steps written in PyTorch, through ``anycell.torch.loop``, against a loop over time.

Outputs, last states and the gradients of weights, initial states and inputs are compared in
float64. The cells are in ``cells_torch.py``, written by another hand than the reader.
"""

import copy
from typing import Any

import numpy as np
import pytest
from corpus import Entry, Numbers, check_results, check_verdict

torch = pytest.importorskip("torch")

from cells_torch import corpus  # noqa: E402
from loop_cells import check_trees  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

import anycell.torch as at  # noqa: E402
from tools import random_steps  # noqa: E402


def plain_loop(module: Any) -> Any:
    """The loop that ``anycell.torch.loop`` takes the place of."""

    def run(x: Any, state: Any) -> Any:
        outputs = []
        for t in range(pytree.tree_leaves(x)[0].shape[0]):
            new = module(pytree.tree_map(lambda leaf, t=t: leaf[t], x), state)
            if pytree.tree_structure(new) == pytree.tree_structure(state):
                new = pytree.tree_leaves(new)[0], new
            output, state = new
            outputs.append(output)
        return pytree.tree_map(lambda *leaves: torch.stack(leaves), *outputs), state

    return run


def results(made: Any, loop: Any) -> dict[str, np.ndarray]:
    """The outputs and last states of a loop, and the gradients of all that it is called with."""
    module, x, state = made
    module = copy.deepcopy(module)
    leaves, tree = pytree.tree_flatten((x, state))
    leaves = [leaf.detach().clone() for leaf in leaves]
    wanted = {f"argument {k}": leaf for k, leaf in enumerate(leaves) if leaf.is_floating_point()}
    for leaf in wanted.values():
        leaf.requires_grad_()
    wanted |= dict(module.named_parameters())
    torch.manual_seed(0)
    out = loop(module)(*pytree.tree_unflatten(leaves, tree))
    floats = [leaf for leaf in pytree.tree_leaves(out) if leaf.is_floating_point()]
    random = Numbers("cotangents")
    total = sum((leaf * torch.as_tensor(random(*leaf.shape))).sum() for leaf in floats)
    slopes = torch.autograd.grad(total, list(wanted.values()), allow_unused=True)
    got = {f"output {k}": leaf.detach().numpy() for k, leaf in enumerate(floats)}
    for (name, leaf), slope in zip(wanted.items(), slopes, strict=True):
        slope = torch.zeros_like(leaf) if slope is None else slope
        got[f"gradient of {name}"] = slope.numpy()
    return got


@pytest.mark.sample(every=15)
@pytest.mark.parametrize("entry", corpus.entries, ids=corpus.names)
def test_cell(entry: Entry) -> None:
    loops = []

    def door(module: Any) -> Any:
        loops.append(at.loop(module))
        return loops[-1]

    made = entry()
    check_results(results(made, door), results(made, plain_loop))
    (engine,) = (loop.engine for loop in loops)
    check_verdict(entry, engine.reason if engine.name == "torch" else None)


@pytest.mark.sample(2)
@pytest.mark.parametrize("number", range(60))
def test_random_step(number: int, seed: int) -> None:
    outcome = random_steps.check("torch", seed + number)
    assert not outcome.error and not outcome.wrong, (
        f"{outcome.error}{outcome.wrong}\n{outcome.source}"
    )


# -- what may change between calls ----------------------------------------------------------------
GAIN = 0.5


def gain() -> float:
    return GAIN


class Mutable(torch.nn.Module):
    """A leaky cell of all that a module may keep: numbers, buffers, lists, modules, globals."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.rec = torch.nn.Linear(5, 6), torch.nn.Linear(6, 6, bias=False)
        self.leak, self.options = 0.3, {"scale": 1.0, "sizes": [2, 4]}
        self.register_buffer("mask", torch.ones(6))
        self.offset = torch.zeros(6, dtype=torch.float64)
        self.activation = torch.tanh
        self.norm: Any = torch.nn.Identity()
        self.drop = torch.nn.Dropout(1.0)
        self.double()

    def forward(self, x: Any, h: Any) -> Any:
        a, b = (self.inp(x) + self.rec(h)).split(self.options["sizes"], dim=-1)
        new = self.activation(torch.cat([a, -b], -1) + self.offset) * self.options["scale"]
        new = self.norm(new * self.mask) * gain() + self.drop(x.sum(-1, keepdim=True))
        return (1 - self.leak) * h + self.leak * new


class Shifted(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x + 0.25


def _new_global(module: Any) -> None:
    global GAIN
    GAIN += 1.0


def _patched(module: Any) -> None:
    module.forward = lambda x, h: torch.sigmoid(module.rec(h) + module.inp(x))


CHANGES = {
    "a number": lambda m: setattr(m, "leak", 0.7),
    "a number in a dictionary": lambda m: m.options.update(scale=2.0),
    "a number in a list in a dictionary": lambda m: m.options["sizes"].reverse(),
    "a buffer in place": lambda m: m.mask[:3].zero_(),
    "another buffer": lambda m: setattr(m, "mask", torch.arange(6.0).double()),
    "a tensor in place": lambda m: m.offset.add_(1.0),
    "another tensor": lambda m: setattr(m, "offset", torch.ones(6).double()),
    "a function": lambda m: setattr(m, "activation", torch.sin),
    "a module": lambda m: setattr(m, "norm", Shifted()),
    "a weight in place": lambda m: m.rec.weight.data.mul_(-1),
    "another weight": lambda m: setattr(m.rec, "weight", torch.nn.Parameter(m.rec.weight.T * 2)),
    "evaluation": lambda m: m.eval(),
    "a global": _new_global,
    "its own forward": _patched,
    "a hook": lambda m: m.rec.register_forward_hook(lambda _, args, out: out * 2),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.sample(every=4)
def test_a_change_between_calls_is_seen(change: Any) -> None:
    module, x = Mutable(), torch.randn(4, 3, 5, dtype=torch.float64)
    loop, h = at.loop(module), torch.randn(3, 6, dtype=torch.float64)
    check_trees(loop(x, h), plain_loop(module)(x, h))
    before = loop(x, h)[1]
    change(module)
    expected = plain_loop(module)(x, h)
    assert not torch.allclose(before, expected[1])
    check_trees(loop(x, h), expected)


def test_a_variable_with_the_name_of_an_attribute_is_none_that_the_step_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = at.loop(Mutable())
    x, h = torch.randn(4, 3, 5, dtype=torch.float64), torch.zeros(3, 6, dtype=torch.float64)
    for number in range(3):
        monkeypatch.setitem(globals(), "leak", number)
        loop(x, h)
    assert len(loop._readings.plans) == 1


@pytest.mark.parametrize("shape", [(9, 3), (1, 3), (4, 1), (2, 5)], ids=str)
def test_clocks_and_thresholds_after_the_proof(shape: tuple[int, int]) -> None:
    """What changes only after some steps, or far from where random numbers lie."""

    class Late(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = torch.nn.GRUCell(5, 6).double()

        def forward(self, x: Any, state: Any) -> Any:
            t, h = state
            new = self.cell(x, h)
            new = torch.where(t >= 5, -new, new)
            new = torch.where(new.abs() > 0.95, new * 3, new)
            return new, (t + 1, new)

    module, (steps, rows) = Late(), shape
    x = 3 * torch.randn(steps, rows, 5, dtype=torch.float64)
    state = torch.tensor(0), torch.randn(rows, 6, dtype=torch.float64)
    for _ in range(2):
        ours, expected = at.loop(module)(x, state), plain_loop(module)(x, state)
        check_trees(ours, expected)
        state = expected[1]


def test_one_loop_for_many_shapes() -> None:
    """Sizes, dtypes, strides, gradients wanted or not: the loop is as its module each time."""
    module = torch.nn.LSTMCell(5, 6).double()
    loop, plain = at.loop(module), plain_loop(module)
    for rows, steps in ((3, 4), (1, 1), (7, 2), (3, 9)):
        x = torch.randn(rows, steps, 5, dtype=torch.float64).transpose(0, 1)
        wide = torch.randn(rows, 12, dtype=torch.float64)
        state = wide[:, ::2], wide[:, 1::2]
        check_trees(loop(x, state), plain(x, state))
        with torch.no_grad():
            check_trees(loop(x, state), plain(x, state))
    module.float()
    x, state = x.float(), tuple(s.float() for s in state)
    check_trees(loop(x, state), plain(x, state))
    module.weight_hh.requires_grad_(False)
    loop(x, state)[0].sum().backward()
    assert module.weight_hh.grad is None and module.weight_ih.grad is not None
