"""``anycell.torch.scan``: that of torch, and fused."""

import random
import re
from collections import OrderedDict, deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from loop_cells import B, H, I, T, check_trees, lstm
from torch import Tensor, nn

import anycell
from anycell.torch import explain_scan, scan
from anycell.torch.reading.surroundings import Surroundings

pytestmark = pytest.mark.usefixtures("torch_in_float64")


@pytest.mark.filterwarnings("ignore")  # torch's own, in Dynamo
@pytest.mark.sample(2)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dim", [0, 1, -2])
def test_scan_is_that_of_torch(dim: int, reverse: bool) -> None:
    of_torch = pytest.importorskip("torch._higher_order_ops.scan").scan
    weight = torch.randn(I + H, 4 * H, requires_grad=True)
    x = torch.randn(3, 3, I).requires_grad_()
    state = {name: torch.randn(3, H, requires_grad=True) for name in "hc"}

    def step(carry: Any, x: Any) -> Any:
        h, c = lstm((torch.cat([x["x"], carry["h"]], -1) @ weight).chunk(4, -1), carry["c"])
        return {"h": h, "c": c}, (h.clone(), x["x"].sum(-1) * c[:, 0])

    def ours() -> Any:
        return scan(step, state, {"x": x}, dim=dim, reverse=reverse)

    def gradients(made: Any) -> Any:
        total = sum((t.sin() * (k + 1)).sum() for k, t in enumerate(pytree.tree_leaves(made)))
        return torch.autograd.grad(total, [weight, x, state["h"]])

    expected = of_torch(step, state, {"x": x}, dim=dim, reverse=reverse)
    for _ in range(3):
        made = ours()
        assert pytree.tree_structure(made) == pytree.tree_structure(expected)
        check_trees(made, expected)
        check_trees(gradients(made), gradients(expected))


def test_scan_sees_new_variables() -> None:
    """A function that is made again in each call is read once."""
    x, h = torch.randn(T, B, H), torch.zeros(B, H)

    def run(gain: float, weight: Tensor, module: nn.Module) -> Tensor:
        def step(h: Tensor, x: Tensor) -> Any:
            h = torch.tanh(module(h) + x @ weight) * gain
            return h, h

        expected = h
        for t in range(T):
            expected, _ = step(expected, x[t])
        last, output = scan(step, h, x)
        check_trees(last, expected)
        check_trees(output[-1], expected)
        return last

    module = nn.Linear(H, H)
    for gain in (1.0, 0.5):
        for _ in range(4):
            weight = torch.randn(H, H, requires_grad=True)
            (gradient,) = torch.autograd.grad(run(gain, weight, module).sum(), weight)
            assert gradient.abs().sum() > 0
    run(1.0, weight, nn.Linear(H, H))


WEIGHT = torch.randn(H, H, dtype=torch.float64)


def test_scan_sees_what_an_object_reads() -> None:
    """A tensor among the variables of the file, in a method that is called."""

    class Step:
        gain = 0.5

        def __call__(self, h: Tensor, x: Tensor) -> Any:
            h = torch.tanh(h @ WEIGHT + x) * self.gain
            return h, h

    x, h, step = torch.randn(T, B, H), torch.zeros(B, H), Step()
    assert explain_scan(step, h, x).startswith("A fused kernel runs this body.")
    expected = h
    for t in range(T):
        expected, _ = step(expected, x[t])
    check_trees(scan(step, h, x)[0], expected)


COUNT = 0
DICE = random.Random(), np.random.RandomState(0), np.random.default_rng(0), torch.Generator()


def count() -> float:
    global COUNT
    COUNT += 1
    return float(COUNT)


class Counting:
    count = 0

    def __call__(self) -> float:
        self.count += 1
        return float(self.count)


def nested() -> Any:
    number = 0.0

    def increased() -> float:
        nonlocal number
        number += 1.0
        return number

    return increased


NUMBER = "a number here follows"
EFFECTS = {
    "global": lambda: (count, NUMBER),
    "closure": lambda: (nested(), NUMBER),
    "object": lambda: (Counting(), NUMBER),
    "random": lambda: (lambda: random.random() < 0.1, "draws from Python's random"),
    "numpy": lambda: (lambda: np.random.rand() < 0.1, r"draws from numpy\.random"),
    "Random": lambda: (lambda: DICE[0].random() < 0.1, "draws from Python's random"),
    "RandomState": lambda: (lambda: DICE[1].rand() < 0.1, r"draws from numpy\.random"),
    "Generator": lambda: (lambda: DICE[2].random() < 0.1, r"draws from numpy\.random"),
    "torch": lambda: (lambda: torch.rand((), generator=DICE[3]), r"aten\.sort"),
}


@pytest.mark.parametrize("name", EFFECTS)
def test_a_step_with_effects_runs_as_often_as_in_a_loop(name: str) -> None:
    """Reading it leaves no trace, and no branch that was not taken is forgotten."""

    def restart() -> Any:
        global COUNT
        COUNT = 0
        random.seed(4)
        np.random.seed(4)
        DICE[0].seed(4), DICE[1].seed(4), DICE[3].manual_seed(4)
        DICE[2].bit_generator.state = np.random.default_rng(4).bit_generator.state
        return EFFECTS[name]()

    weight, x, h = torch.randn(I, I), torch.randn(40, B, I), torch.zeros(B, I)
    number, says = restart()

    def step(h: Tensor, x: Tensor) -> Any:
        factor = number()
        h = torch.tanh(h @ weight + x)
        if name == "torch":
            h = h.sort(-1).values * factor
        elif factor is not False:
            h = h / (1.0 + factor)
        return h, h

    made = scan(step, h, x)
    assert re.search(says, explain_scan(step, h, x))
    number, _ = restart()
    outputs = []
    for x_t in x:
        h, y = step(h, x_t)
        outputs.append(y)
    assert torch.equal(made[1], torch.stack(outputs))


def counted() -> None:
    global COUNT
    COUNT += 1


class Log:
    def __init__(self) -> None:
        self.queue, self.table, self.numbers = deque[int](), OrderedDict(n=0), np.zeros(2)
        self.inner = SimpleNamespace(n=0)


CHANGES: dict[str, tuple[Any, str]] = {
    "COUNT": (lambda log: counted(), "changes COUNT"),
    "deque": (lambda log: log.queue.append(1), "changes a deque"),
    "table": (lambda log: log.table.update(n=log.table["n"] + 1), "changes a OrderedDict"),
    "inner": (lambda log: vars(log.inner).update(n=log.inner.n + 1), "changes a dict"),
    "array": (lambda log: np.add(log.numbers, 1, out=log.numbers), "changes an array"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_step_that_changes_what_is_around_it_is_refused(name: str) -> None:
    """Though no result follows it. Reading it changes nothing."""
    global COUNT
    COUNT, h, x, log = 0, torch.zeros(B, I), torch.randn(40, B, I), Log()
    change, says = CHANGES[name]

    def step(h: Tensor, x: Tensor) -> Any:
        change(log)
        h = torch.tanh(h + x)
        return h, h

    for calls in (40, 80):
        scan(step, h, x)
        counts = COUNT, len(log.queue), log.table["n"], log.inner.n, log.numbers.mean()
        assert max(counts) == sum(counts) == calls
    assert says in explain_scan(step, h, x)


def test_outputs_that_combine_all_rows_are_computed_for_each_step() -> None:
    weight = torch.randn(I, I, requires_grad=True)
    h, x = torch.zeros(B, I), torch.randn(40, B, I)

    def step(h: Tensor, x: Tensor) -> Any:
        h = torch.tanh(h @ weight + x)
        return h, (h.sum(), h.mean(0), h[0], x.max(), h - h.mean(0))

    made = scan(step, h, x)
    assert explain_scan(step, h, x).startswith("A fused kernel")
    outputs = []
    for x_t in x:
        h, y = step(h, x_t)
        outputs.append(y)
    check_trees(made, (h, tuple(map(torch.stack, zip(*outputs, strict=True)))))


def test_scan_of_nothing() -> None:
    h = torch.zeros(B, H)
    assert scan(lambda c, x: (c, x), h, []) == (h, [])


def test_explain_scan_shows_the_cell_or_the_reason() -> None:
    x, h = torch.randn(B, T, H), torch.zeros(B, H)

    def read(h: Tensor, x: Tensor) -> Any:
        h = torch.tanh(x + 0.5 * h)
        return h, h

    def refused(h: Tensor, x: Tensor) -> Any:
        return h.sort().values + x, x

    said = explain_scan(read, h, x, dim=1)
    assert said.startswith("A fused kernel runs this body.\n\nThe cell that was read:\n\n")
    text = said.split("\n\n", 2)[2]
    cell = anycell.lang.text.from_text(text[: text.index("\nread")])
    assert [state.name for state in cell.states] == ["h"] and "float64" in said
    said = explain_scan(refused, h, x, dim=1)
    assert said.startswith("A loop over the steps runs this body: test_scan.py:")
    with torch.autocast("cpu"):
        assert "autocast" in explain_scan(read, h, x, dim=1)
    assert explain_scan(read, h, []) == "A loop over the steps runs this body: there are no steps"
    with pytest.raises(ValueError, match="dim: given 3"):
        explain_scan(read, h, x, dim=3)


def test_explain_scan_names_a_cell_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from anycell.torch.reading.planned import ReadStep

    slow = anycell.torch.Engine("torch", "it has none")
    monkeypatch.setattr(ReadStep, "engine", slow)
    said = explain_scan(
        lambda h, x: (torch.sin(h + x),) * 2, torch.zeros(B, H), torch.zeros(50, B, H)
    )
    assert said.endswith("runs this body: no kernel runs its cell: it has none")


def test_scan_walks_around_a_step_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in calls of few steps, which run as they are written; another step is walked."""
    walks: list[Any] = []
    of = Surroundings.of
    monkeypatch.setattr(Surroundings, "of", lambda *step: walks.append(step[0]) or of(*step))

    def make() -> Any:
        def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(x + 0.5 * h)
            return h, h

        return step

    step, other = make(), make()
    for steps in (1, 20, 1, 20, 20, 20, 1):
        scan(step, torch.zeros(2, 6), torch.randn(steps, 2, 6))
    assert walks == [step]
    scan(other, torch.zeros(2, 6), torch.randn(1, 2, 6))
    assert walks == [step, other]


def test_scan_sees_a_tensor_that_becomes_a_number() -> None:
    factor: Any = torch.tensor(0.5)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x + factor * h)
        return h, h

    x = torch.randn(20, 2, 6)
    for value in (torch.tensor(0.5), 0.25, torch.tensor(0.125)):
        factor = value
        for _ in range(4):
            h = torch.zeros(2, 6)
            expected = [h := step(h, part)[0] for part in x]
            check_trees(scan(step, torch.zeros(2, 6), x), (h, torch.stack(expected)))
