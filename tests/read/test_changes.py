"""What a step reads from elsewhere may change between calls: the next call sees it."""

import io
import itertools
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tolerances import assert_close

from anycell.lang.declare import MOST
from anycell.numpy import loop as numpy_loop

torch = pytest.importorskip("torch")
from torch import Tensor, nn  # noqa: E402

from anycell.torch import explain_scan, loop, scan  # noqa: E402

X, H = torch.randn(6, 2, 3), torch.randn(2, 5)


def by_hand(step: Any, state: Any = H) -> Tensor:
    outputs = []
    for x in X:
        output, state = step(x, state)
        outputs.append(output)
    return torch.stack(outputs)


class Base(nn.Module):
    leak = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = nn.Linear(3, 5), nn.Linear(5, 5)
        self.config = types.SimpleNamespace(scale=1.0)

    @property
    def rate(self) -> float:
        return 0.5 * self.leak

    @staticmethod
    def act(value: Tensor) -> Tensor:
        return torch.tanh(value)


def cell_of() -> tuple[nn.Module, dict[str, Callable[[], None]]]:
    """A cell, and functions that change something which it reads."""
    temperature = 1.0

    class Cell(Base):
        def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            value = self.w(x) * self.leak + self.u(h) * self.config.scale + self.rate
            h = self.act(value / temperature)
            return h, h

    cell = Cell()

    def enclosed() -> None:
        nonlocal temperature
        temperature = 3.0

    def set_rate() -> None:
        Cell.rate = property(lambda self: 2.0)  # type: ignore[assignment,method-assign]

    return cell, {
        "enclosed": enclosed,
        "class": lambda: setattr(Cell, "leak", 2.0),
        "base": lambda: setattr(Base, "leak", 3.0),
        "method": lambda: setattr(Cell, "act", staticmethod(torch.sigmoid)),
        "property": set_rate,
        "object": lambda: setattr(cell.config, "scale", 4.0),
    }


@pytest.mark.parametrize("change", ["enclosed", "class", "base", "method", "property", "object"])
def test_modules(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Base, "leak", 1.0)
    cell, changes = cell_of()
    layer = loop(cell)
    for _ in range(4):  # read, recorded, learnt, replayed
        before = layer(X, H)[0]
    assert_close(before.detach(), by_hand(cell).detach(), "float32", "forward")
    changes[change]()
    after = layer(X, H)[0]
    assert_close(after.detach(), by_hand(cell).detach(), "float32", "forward")
    assert layer.engine.name == "cpu", layer.engine.reason
    assert (after - before).abs().max() > 1e-3


def test_objects_around_a_function() -> None:
    config, weight = (
        types.SimpleNamespace(scale=1.0, inner=types.SimpleNamespace(n=1.0)),
        X[0].T @ H,
    )

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x @ weight * config.scale + h * config.inner.n)
        return h, h

    for name in ("", "scale", "n"):
        if name:
            setattr(config if name == "scale" else config.inner, name, 0.25)
        turned = by_hand(lambda x, h: step(h, x))
        for _ in range(4):
            assert_close(scan(step, H, X)[1].detach(), turned.detach(), "float32", "forward")


def test_a_function_itself() -> None:
    """Its defaults, its code, and what an object gets of its own that its class has."""

    class Config:
        scale = 1.0

    config = Config()

    def step(h: Tensor, x: Tensor, gain: float = 1.0, *, k: float = 0.5) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x * gain * config.scale + k * h)
        return h, h

    def other(h: Tensor, x: Tensor, gain: float = 1.0, *, k: float = 0.5) -> tuple[Tensor, Tensor]:
        h = torch.sin(x * gain * config.scale + k * h)
        return h, h

    for change in (
        lambda: None,
        lambda: setattr(step, "__defaults__", (3.0,)),
        lambda: step.__kwdefaults__.update(k=0.75),
        lambda: setattr(step, "__kwdefaults__", {"k": 0.25}),
        lambda: setattr(config, "scale", 0.25),
        lambda: setattr(step, "__code__", other.__code__),
    ):
        change()
        expected = by_hand(lambda x, h: step(h, x), X[0]).detach()
        for _ in range(4):
            assert_close(scan(step, X[0], X)[1].detach(), expected, "float32", "forward")


@pytest.mark.parametrize("size", [4, 40])
@pytest.mark.parametrize("kind", [list, set, dict])
def test_what_is_in_a_container(kind: Any, size: int) -> None:
    """A few things are guarded one by one, many together."""

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            numbers = range(1, size + 1)
            self.factors: Any = dict.fromkeys(numbers, 0.01) if kind is dict else kind(numbers)

        def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            factors = self.factors
            total = sum(factors.values()) if kind is dict else sum(factors) / 400
            h = torch.tanh(x * total + 0.5 * h)
            return h, h

    cell = Cell()
    layer, change = loop(cell), {
        list: lambda: cell.factors.__setitem__(size // 2, 900),
        set: lambda: (cell.factors.remove(1), cell.factors.add(900)),
        dict: lambda: cell.factors.update({1: 2.25}),
    }  # fmt: skip
    for _ in range(4):
        before = layer(X, X[0])[0]
    change[kind]()
    after = layer(X, X[0])[0]
    assert_close(after.detach(), by_hand(cell, X[0]).detach(), "float32", "forward")
    assert layer.engine.name == "cpu", layer.engine.reason
    assert (after - before).abs().max() > 1e-3


@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_steps_that_write_into_their_state(framework: str) -> None:
    tanh = torch.tanh if framework == "torch" else np.tanh

    def write(x: Any, state: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        state["h"] = tanh(x + state["h"])
        return state["h"], state

    class Cell(nn.Module):
        def forward(self, x: Any, state: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return write(x, state)

    cell = Cell()
    if framework == "torch":
        layer: Any = loop(cell)
        output, _ = layer(X, {"h": X[0]})
        reason = layer.engine.reason
    else:
        layer = numpy_loop(write)
        output, _ = layer(X.numpy(), {"h": X[0].numpy()})
        reason = layer.reason
    assert "changes the dictionary or list that holds its state" in reason
    tanh = torch.tanh
    assert_close(output, by_hand(cell, {"h": X[0]}).detach(), "float32", "forward")


@pytest.mark.parametrize(("steps", "engine"), [(MOST - 1, "cpu"), (MOST, "torch")])
def test_delays_are_states(steps: int, engine: str) -> None:
    """A kernel has a bit for each state; more than a word of them would crash it."""

    class Delay(nn.Module):
        def forward(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
            h, kept = state
            h = torch.tanh(x + 0.5 * h + kept[:, -1])
            return h, (h, torch.cat([h[:, None], kept[:, :-1]], 1))

    cell, state = Delay(), (X[0], torch.randn(2, steps, 3))
    layer = loop(cell)
    assert_close(layer(X, state)[0].detach(), by_hand(cell, state).detach(), "float32", "forward")
    assert layer.engine.name == engine
    assert engine == "cpu" or f"may have {MOST}" in layer.engine.reason


class Slots:
    __slots__ = ("count",)
    count: int


class Shared:
    count = 0


def counter() -> Iterator[int]:
    count = 0
    while True:
        count += 1
        yield count


def counting(kind: str) -> tuple[Callable[[Any], Any], Callable[[], int]]:
    """What a step does, and how often it has done it."""
    slots, text, numbers, ticks = Slots(), io.StringIO(), counter(), itertools.count()
    slots.count = Shared.count = 0

    def tick(module: Any) -> None:
        tick.count += 1  # type: ignore[attr-defined]

    tick.count = 0  # type: ignore[attr-defined]
    of_object = [iter(range(1000))]
    return {
        "slots": (lambda m: setattr(slots, "count", slots.count + 1), lambda: slots.count),
        "class": (lambda m: setattr(Shared, "count", Shared.count + 1), lambda: Shared.count),
        "of its class": (lambda m: None, lambda: 0),
        "function": (tick, lambda: tick.count),  # type: ignore[attr-defined]
        "text": (lambda m: text.write("x"), lambda: len(text.getvalue())),
        "generator": (lambda m: next(numbers), lambda: next(numbers) - 1),
        "iterator": (lambda m: next(ticks), lambda: int(repr(ticks)[6:-1])),
        "in a list": (lambda m: next(of_object[0]), lambda: next(of_object[0])),
        "of the module": (lambda m: None, lambda: 0),
        "print": (lambda m: print("x"), lambda: 0),
    }[kind]


KINDS = (
    "slots", "class", "of its class", "function", "text", "generator", "iterator", "in a list",
    "of the module", "print",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_effects_happen_as_often_as_written(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    effect, count = counting(kind)

    stream = io.StringIO()

    class Cell(nn.Module):
        count = 0

        def __init__(self) -> None:
            super().__init__()
            self.effect, self.stream = effect, stream if kind == "of the module" else None

        def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            self.effect(self)
            if self.stream is not None:
                self.stream.write("x")
            if kind == "of its class":
                type(self).count += 1
            h = torch.tanh(x + 0.5 * h)
            return h, h

    layer = loop(Cell())
    for _ in range(3):
        before = count() + Cell.count + len(stream.getvalue())
        layer(X, X[0])
        made = count() + Cell.count + len(stream.getvalue()) - before
        made += capsys.readouterr().out.count("x")
        took = int(kind in ("generator", "in a list"))  # to look at it takes one
        assert made == len(X) + took, layer.engine.reason
    assert layer.engine.name == "torch"
    says = "changes count|reads .*, whose changes nobody sees|prints"
    assert re.search(says, layer.engine.reason), layer.engine.reason


def test_what_objects_and_classes_have() -> None:
    """Numbers in slots, of classes and of functions are read, and a change of them is seen."""
    slots = Slots()

    def gain() -> int:
        return 0

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x * slots.count + h * Shared.count / 8 + gain.count)  # type: ignore[attr-defined]
        return h, h

    slots.count, Shared.count, gain.count = 1, 2, 3  # type: ignore[attr-defined]
    for thing in (None, slots, Shared, gain):
        if thing is not None:
            thing.count += 1  # type: ignore[attr-defined]
        expected = by_hand(lambda x, h: step(h, x), X[0]).detach()
        for _ in range(4):
            assert_close(scan(step, X[0], X)[1].detach(), expected, "float32", "forward")
    assert "fused" in explain_scan(step, X[0], X).partition("\n")[0]
