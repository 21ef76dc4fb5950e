"""``loop`` again and again: nothing is recorded anew, and no result is that of an earlier step.

One file, because the steps read its variables, which one fixture restores.
"""

import abc
import copy
import dataclasses
import functools
import math
import pickle
import types
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import pytest
from tolerances import LIMITS, error

from anycell.numpy import loop, loops, mirror
from anycell.numpy.loops import leaves
from anycell.read.short import MOST

T, B, H = 100, 4, 4
Kind = TypeVar("Kind")
DRAWS = np.random.default_rng(0)


def draw(*shape: int) -> np.ndarray:
    return DRAWS.normal(size=shape) * 0.5


X, START = draw(T, B, H), draw(B, H)
W, SCALE, FLAG, LIST, TABLE = draw(H, H), 0.5, True, [0.5, 0.25], {"a": 0.5, "b": 0.25}
MODULE = types.ModuleType("weights")
ZERO_D, PERMUTED = np.array(0.5), np.array([2, 0, 1, 3])
NAMES = {"a", "b"}


def squash(v: Any, scale: float = 0.5, *, shift: float = 0.25) -> Any:
    return np.tanh(v * scale + shift)


def other(v: Any, scale: float = 0.5, *, shift: float = 0.25) -> Any:
    return np.sin(v * scale - shift)


class Pair(NamedTuple):
    h: Any
    c: Any


class Base:
    leak = 0.5

    def gate(self, v: Any) -> Any:
        return np.tanh(v * self.leak)


class Cell(Base):
    kind = "tanh"

    def __init__(self) -> None:
        self.weight, self.bias, self.layers = draw(H, H), draw(H), [draw(H, H), draw(H, H)]
        self.params, self.gain, self.training = {"u": draw(H, H)}, 0.5, False
        self.inner, self.missing = types.SimpleNamespace(), None

    @property
    def doubled(self) -> float:
        return 2 * self.gain

    @staticmethod
    def scaled(v: Any) -> Any:
        return v * 0.75

    @classmethod
    def named(cls, v: Any) -> Any:
        return np.tanh(v) if cls.kind == "tanh" else np.sin(v)

    def gate(self, v: Any) -> Any:
        v = super().gate(v) * self.doubled
        return v if self.missing is None else v + self.missing

    def __call__(self, x: Any, h: Any) -> tuple[Any, Any]:
        for layer in self.layers:
            h = self.gate(x @ self.weight + h @ layer + self.bias)
        h = self.scaled(h @ self.params["u"]) * (0.5 if self.training else 1)
        if hasattr(self, "noise"):
            h = h + self.noise
        h = self.named(h * getattr(self, "rate", 1.0))
        return h, h


@dataclasses.dataclass
class Plain:
    weight: np.ndarray
    rate: float = 0.5

    def step(self, x: Any, h: Any) -> tuple[Any, Any]:
        h = np.tanh(x + self.rate * (h @ self.weight))
        return h, h


class Slots:
    __slots__ = ("rate",)

    def __init__(self) -> None:
        self.rate = 0.5

    def __call__(self, x: Any, h: Any) -> tuple[Any, Any]:
        h = np.tanh(x + self.rate * h)
        return h, h


class Lazy:
    def __getattr__(self, name: str) -> Any:
        return SCALE if name == "rate" else object.__getattribute__(self, name)

    def __call__(self, x: Any, h: Any) -> tuple[Any, Any]:
        h = np.tanh(x + self.rate * h)
        return h, h


def of(body: Callable[[Any, Any], Any]) -> Callable[[], Any]:
    """What makes a step that computes its new state alone."""

    def make() -> Any:
        fresh = types.FunctionType(
            body.__code__, body.__globals__, "body", body.__defaults__, body.__closure__
        )

        def step(x: Any, h: Any) -> tuple[Any, Any]:
            h = fresh(x, h)
            return h, h

        step.body = fresh  # type: ignore[attr-defined]
        return step

    return make


def closed(value: Any) -> Any:
    def step(x: Any, h: Any) -> tuple[Any, Any]:
        if value is None:
            return x, np.sin(h)
        h = np.tanh(x + (h * value if isinstance(value, float) else h @ value))
        return h, h

    def put(new: Any) -> None:
        nonlocal value
        value = new

    step.put = put  # type: ignore[attr-defined]
    return step


def put(name: str, value: Any) -> Callable[[Any], None]:
    return lambda _: globals().__setitem__(name, value)


def attribute(name: str, value: Any) -> Callable[[Any], None]:
    return lambda step: setattr(step, name, value)


def plain(x: Any, h: Any) -> tuple[Any, Any]:
    h = np.tanh(x + h)
    return h, h


def code(step: Any) -> None:
    step.__code__ = (lambda x, h: (np.sin(h), np.sin(h + x))).__code__


# By what is changed: what makes a step, and what changes what the step reads.
CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "global number": (of(lambda x, h: np.tanh(x + SCALE * h)), put("SCALE", 0.75)),
    "sign of zero": (of(lambda x, h: np.tanh(x + h * math.copysign(1, SCALE))), put("SCALE", -0.0)),
    "global flag": (of(lambda x, h: np.tanh(x + h) if FLAG else np.sin(x + h)), put("FLAG", False)),
    "flag as a number": (of(lambda x, h: np.tanh(x + h * (FLAG is True))), put("FLAG", 1)),
    "new global": (of(lambda x, h: np.tanh(x + h * max(0.5, 0.1))), put("max", min)),
    "global array": (of(lambda x, h: np.tanh(x + h @ W)), lambda _: W.__imul__(2)),
    "array of ints": (of(lambda x, h: np.tanh(x + h[:, PERMUTED])),
                      lambda _: PERMUTED.__setitem__(0, 1)),
    "array without axes": (of(lambda x, h: np.tanh(x + h * ZERO_D)),
                           lambda _: ZERO_D.__imul__(2)),
    "another array": (of(lambda x, h: np.tanh(x + h @ W)), put("W", draw(H, H))),
    "another shape": (of(lambda x, h: np.tanh(x + h * W * W.shape[0])), put("W", draw(1, 1))),
    "another dtype": (of(lambda x, h: np.tanh(x + h @ W)), lambda _: put("W", W.astype("f"))(_)),
    "array as a number": (of(lambda x, h: np.tanh(x + h * W)), put("W", 2.0)),
    "element of a list": (of(lambda x, h: np.tanh(x + h * LIST[0])),
                          lambda _: LIST.__setitem__(0, 2.0)),
    "length of a list": (of(lambda x, h: np.tanh(x + h * len(LIST))), lambda _: LIST.append(2.0)),
    "entry of a dictionary": (of(lambda x, h: np.tanh(x + h * TABLE["b"])),
                              lambda _: TABLE.update(b=2.0)),
    "order of a dictionary": (of(lambda x, h: np.tanh(x + h * next(iter(TABLE.values())))),
                              lambda _: TABLE.update(a=TABLE.pop("a"))),
    "set": (of(lambda x, h: np.tanh(x + h * len(NAMES))), lambda _: NAMES.add("c")),
    "default": (of(lambda x, h, k=0.5: np.tanh(x + h * k)),
                lambda step: setattr(step.body, "__defaults__", (2.0,))),
    "default of a helper": (of(lambda x, h: squash(x + h)),
                            lambda _: setattr(squash, "__defaults__", (2.0,))),
    "keyword default": (of(lambda x, h: squash(x + h)),
                        lambda _: squash.__kwdefaults__.update(shift=2.0)),
    "keyword defaults": (of(lambda x, h: squash(x + h)),
                         lambda _: setattr(squash, "__kwdefaults__", {"shift": 2.0})),
    "code of a helper": (of(lambda x, h: squash(x + h)),
                         lambda _: setattr(squash, "__code__", other.__code__)),
    "another helper": (of(lambda x, h: squash(x + h)), put("squash", other)),
    "code": (lambda: types.FunctionType(plain.__code__, globals()), code),
    "attribute of a function": (of(lambda x, h: np.tanh(x + h * getattr(squash, "k", 1))),
                                lambda _: setattr(squash, "k", 3)),
    "variable of a module": (of(lambda x, h: np.tanh(x + h * MODULE.k)), attribute("k", 2.0)),
    "function of numpy": (of(lambda x, h: np.tanh(np.reciprocal(3 + x + h))),
                          attribute("reciprocal", np.sin)),
    "variable of a closure": (lambda: closed(0.5), lambda step: step.put(2.0)),
    "closure of an array": (lambda: closed(W), lambda step: step.put(draw(H, H))),
    "closure of None": (lambda: closed(None), lambda step: step.put(0.5)),
    "weight": (Cell, attribute("weight", draw(H, H))),
    "number": (Cell, attribute("gain", 0.75)),
    "mode": (Cell, attribute("training", True)),
    "new attribute": (Cell, attribute("noise", 0.5)),
    "new number": (Cell, attribute("rate", 0.5)),
    "attribute before that of the class": (Cell, attribute("leak", 0.1)),
    "method of an object": (Cell, attribute("gate", np.tanh)),
    "attribute of None": (Cell, attribute("missing", 0.5)),
    "deleted attribute": (Cell, lambda cell: delattr(cell, "bias") or setattr(cell, "bias", 0.5)),
    "attributes": (Cell, lambda cell: setattr(cell, "__dict__", vars(Cell()))),
    "class": (Cell, attribute("__class__", type("Third", (Cell,), {"leak": 0.1}))),
    "variable of the class": (Cell, lambda _: setattr(Cell, "kind", "sin")),
    "variable of a base": (Cell, lambda _: setattr(Base, "leak", 0.1)),
    "new variable of the class": (Cell, lambda _: setattr(Cell, "leak", 0.1)),
    "method": (Cell, lambda _: setattr(Cell, "gate", lambda self, v: np.sin(v))),
    "method of a base": (Cell, lambda _: setattr(Base, "gate", lambda self, v: np.sin(v))),
    "property": (Cell, lambda _: setattr(Cell, "doubled", property(lambda self: 0.1))),
    "static method": (Cell, lambda _: setattr(Cell, "scaled", staticmethod(np.sin))),
    "layer in a list": (Cell, lambda cell: cell.layers.__setitem__(0, draw(H, H))),
    "fewer layers": (Cell, lambda cell: cell.layers.pop()),
    "twice the same layer": (Cell, lambda cell: cell.layers.__setitem__(0, cell.layers[1])),
    "weight in a dictionary": (Cell, lambda cell: cell.params.update(u=draw(H, H))),
    "weight in place": (Cell, lambda cell: cell.weight.__imul__(3)),
    "number of a dataclass": (
        lambda: Plain(W).step, lambda step: setattr(step.__self__, "rate", 2.0)
    ),
    "number of a partial": (
        lambda: functools.partial(lambda x, h, k: (np.sin(h), np.sin(x + h * k)), k=0.5),
        lambda step: step.keywords.update(k=2.0),
    ),
    "__getattr__": (Lazy, put("SCALE", 2.0)),
}  # fmt: skip
READ = (
    "global array",
    "another array",
    "weight",
    "weight in place",
    "layer in a list",
    "weight in a dictionary",
    "closure of an array",
)  # not recorded anew


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the tests change."""
    for name in ("SCALE", "FLAG", "squash", "W"):
        monkeypatch.setitem(globals(), name, globals()[name])
    monkeypatch.setitem(globals(), "W", W.copy())
    for name in ("LIST", "TABLE", "NAMES", "ZERO_D", "PERMUTED"):
        monkeypatch.setitem(globals(), name, globals()[name].copy())
    monkeypatch.setitem(globals(), "max", max)
    monkeypatch.delitem(globals(), "max")
    copied = types.FunctionType(squash.__code__, globals(), "squash", squash.__defaults__)
    copied.__kwdefaults__ = {"shift": 0.25}
    monkeypatch.setitem(globals(), "squash", copied)
    monkeypatch.setattr(MODULE, "k", 0.5, raising=False)
    monkeypatch.setattr(np, "reciprocal", np.reciprocal)
    for kind, names in ((Cell, ("kind", "gate", "doubled", "scaled")), (Base, ("leak", "gate"))):
        for name in names:
            monkeypatch.setattr(kind, name, vars(kind)[name])
    monkeypatch.setattr(Cell, "leak", 0.5, raising=False)
    monkeypatch.delattr(Cell, "leak")


class Counted(loops._Call):
    """Counts recordings."""

    count = 0

    def record(self, step: Any) -> None:
        Counted.count += 1
        super().record(step)


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> type[Counted]:
    Counted.count = 0
    monkeypatch.setattr(loops, "_Call", Counted)
    return Counted


def check(run: Any, x: Any = X, state: Any = START) -> None:
    results = run(x, state)
    for result, exact in zip(leaves(results), leaves(run._loop(x, state)), strict=True):
        assert np.shape(result) == np.shape(exact)
        assert error(np.asarray(result), np.asarray(exact)) <= LIMITS["float64", "forward"]


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_step_is_not_that_of_before(name: str, recordings: type[Counted]) -> None:
    make, change = CHANGES[name]
    step = make()
    run = loop(step)
    for _ in range(3):
        check(run)
        assert run.reason is None, run.reason
    assert recordings.count == 1
    change({"variable of a module": MODULE, "function of numpy": np}.get(name, step))
    check(run)
    check(run)
    assert (recordings.count == 1) == (name in READ)


def test_what_has_not_changed_is_not_recorded(recordings: type[Counted]) -> None:
    """Of other numbers of steps neither; equal numbers are no change."""
    cell = Cell()
    run = loop(cell)
    for steps in (T, T // 2, T, 2 * T, T // 2, T // 2):
        check(run, draw(steps, B, H), draw(B, H))
        cell.gain = float("0.5")
        assert run.reason is None
    assert recordings.count == 1
    check(run, draw(T, 1, H), draw(1, H))
    assert recordings.count == 2


def test_modes_by_turns_are_recorded_once(recordings: type[Counted]) -> None:
    cell = Cell()
    run = loop(cell)
    for training in (True, False, True, False):
        cell.training = training
        check(run)
    assert recordings.count == 2


EFFECTS: dict[str, Callable[[], Any]] = {}


def effect(make: Callable[[], Any]) -> Callable[[], Any]:
    EFFECTS[make.__name__] = make
    return make


@effect
def counts_in_a_closure() -> Any:
    count = 0

    def step(x: Any, h: Any) -> tuple[Any, Any]:
        nonlocal count
        count += 1
        h = np.tanh(x + h)
        return h, h

    return step


@effect
def counts_in_an_attribute() -> Any:
    class Counting:
        count = 0

        def __call__(self, x: Any, h: Any) -> tuple[Any, Any]:
            self.count += 1
            h = np.tanh(x + h)
            return h, h

    return Counting()


@effect
def counts_in_its_class() -> Any:
    class Counting:
        count = 0

        def __call__(self, x: Any, h: Any) -> tuple[Any, Any]:
            type(self).count += 1
            h = np.tanh(x + h)
            return h, h

    return Counting()


@effect
def appends() -> Any:
    seen: list[Any] = []

    def step(x: Any, h: Any) -> tuple[Any, Any]:
        seen.append(1)
        h = np.tanh(x + h)
        return h, h

    return step


@effect
def writes_a_global() -> Any:
    def step(x: Any, h: Any) -> tuple[Any, Any]:
        global COUNT
        COUNT = 1
        h = np.tanh(x + h)
        return h, h

    return step


@effect
def edits_an_array() -> Any:
    seen = np.zeros(3, int)

    def step(x: Any, h: Any) -> tuple[Any, Any]:
        seen[0] += 1
        h = np.tanh(x + h)
        return h, h

    return step


@effect
def writes_a_module() -> Any:
    def step(x: Any, h: Any) -> tuple[Any, Any]:
        MODULE.count = 1
        h = np.tanh(x + h)
        return h, h

    return step


@effect
def writes_an_attribute_of_a_function() -> Any:
    def step(x: Any, h: Any) -> tuple[Any, Any]:
        squash.count = getattr(squash, "count", 0) + 1
        h = np.tanh(x + h)
        return h, h

    return step


@effect
def writes_past_its_class() -> Any:
    class Frozen:
        def __init__(self) -> None:
            self.count = 0

        def __call__(self, x: Any, h: Any) -> tuple[Any, Any]:
            object.__setattr__(self, "count", self.count + 1)
            h = np.tanh(x + h)
            return h, h

    return Frozen()


@effect
def deletes() -> Any:
    class Deleting:
        def __call__(self, x: Any, h: Any) -> tuple[Any, Any]:
            self.other = 1
            del self.other
            h = np.tanh(x + h)
            return h, h

    return Deleting()


@effect
def imports() -> Any:
    def step(x: Any, h: Any) -> tuple[Any, Any]:
        import math

        h = np.tanh(x + h * math.pi)
        return h, h

    return step


@effect
def reads_its_variables() -> Any:
    def step(x: Any, h: Any) -> tuple[Any, Any]:
        h = np.tanh(x + h * globals()["SCALE"])
        return h, h

    return step


@effect
def reads_its_attributes() -> Any:
    class Reading:
        rate = 0.5

        def __init__(self) -> None:
            self.gain = 0.5

        def __call__(self, x: Any, h: Any) -> tuple[Any, Any]:
            h = np.tanh(x + h * getattr(self, "__dict__")["gain"])  # noqa: B009
            return h, h

    return Reading()


@effect
def reads_the_time() -> Any:
    import time

    def step(x: Any, h: Any) -> tuple[Any, Any]:
        h = np.tanh(x + h * (time.time() > 0))
        return h, h

    return step


@effect
def catches_everything() -> Any:
    def step(x: Any, h: Any) -> tuple[Any, Any]:
        try:
            scale = LIST.__class__.__name__ and np.random.default_rng(0).random()
        except Exception:
            scale = 2.0
        h = np.tanh(x + h * scale)
        return h, h

    return step


@effect
def reads_a_long_list() -> Any:
    numbers = [0.5] * 300

    def step(x: Any, h: Any) -> tuple[Any, Any]:
        h = np.tanh(x + h * numbers[-1])
        return h, h

    return step


@effect
def reads_slots() -> Any:
    return Slots()


@pytest.mark.parametrize("name", EFFECTS)
def test_steps_that_do_more_run_as_they_are(name: str, recordings: type[Counted]) -> None:
    """They are recorded again where what they have read is another, but not in all calls."""
    run = loop(EFFECTS[name]())
    for _ in range(loops._RESTLESS + 2):
        run(X[:3], START)
        assert run.reason is not None
    assert recordings.count <= loops._RESTLESS
    check(run)


def test_refused_steps_are_not_recorded_again(recordings: type[Counted]) -> None:
    cell = Cell()
    run = loop(cell)
    cell.missing = draw(B, 2 * H)[:, ::2].astype("f").astype("d")
    cell.noise = draw(B, H)
    run = loop(lambda x, h: (h, np.sort(h)) if FLAG else (h, np.tanh(h)))
    for _ in range(3):
        check(run)
        assert "np.sort" in str(run.reason)
    assert recordings.count == 1
    globals()["FLAG"] = False
    check(run)
    assert run.reason is None


def test_restless_numbers_run_step_by_step(recordings: type[Counted]) -> None:
    cell = Plain(W)
    run = loop(cell.step)
    for k in range(2 * loops._RESTLESS):
        cell.rate = 0.5 + k / 64
        check(run)
    assert "keep what changes in an array" in str(run.reason)
    assert recordings.count == loops._RESTLESS


def test_errors_that_numpy_is_asked_for_are_raised() -> None:
    def step(x: Any, h: Any) -> tuple[Any, Any]:
        h = np.tanh(x + h) + np.exp(x - 1000)
        return h, h

    run = loop(step)
    check(run)
    assert run.reason is None
    with np.errstate(all="raise"), pytest.raises(FloatingPointError):
        run(X, START)


def test_memory_may_lie_otherwise() -> None:
    start = np.broadcast_to(draw(1), (H, H))

    class Held:
        weight = start

        def __call__(self, x: Any, h: Any) -> tuple[Any, Any]:
            h = np.tanh(x + h @ self.weight.T.reshape(H, H))
            return h[:, None][:, 0] * 2, h

    cell = Held()
    run = loop(cell)
    for new in (start, start, draw(H, H), draw(H, H).T, draw(H, 2 * H)[:, ::2], start):
        cell.weight = new
        check(run)
        check(run, np.asfortranarray(X), START[::-1])
        assert run.reason is None


def test_outputs_that_no_state_is_and_what_comes_back_as_it_was() -> None:
    def step(x: Any, state: Any) -> tuple[Any, Any]:
        h, fixed = state["h"], state["fixed"]
        h = np.tanh(x["a"] + h @ W + fixed)
        return Pair(h @ W, (x["a"] > 0, [h.sum(-1)])), {"fixed": fixed, "h": h}

    run, x, state = loop(step), {"a": X}, {"h": START, "fixed": draw(H)}
    for _ in range(3):
        outputs, last = run(x, state)
        assert run.reason is None
        assert type(outputs) is Pair and list(last) == ["fixed", "h"]
        assert last["fixed"] is state["fixed"]
        check(run, x, state)


@pytest.mark.parametrize("function", [np.shape, np.ndim, np.size])
def test_numbers_of_a_shape(function: Any) -> None:
    run = loop(lambda x, h: (h, np.tanh(x + h * np.size(function(x)))))
    check(run)
    assert run.reason is None


def test_an_error_of_the_step_is_its_own() -> None:
    run = loop(lambda x, h: (h, h.nothing))
    with pytest.raises(AttributeError, match=r"ndarray.*nothing"):
        run(X, START)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda v: pickle.loads(pickle.dumps(v))]
)
def test_copies_are_of_the_step_alone(copied: Any) -> None:
    run = loop(plain)
    check(run)
    other = copied(run)
    check(other)
    assert other.step is plain and other._known.keys() == run._known.keys()


def test_another_step_in_its_place() -> None:
    run = loop(Plain(W).step)
    check(run)
    run.step = plain
    check(run)


@pytest.mark.parametrize(("steps", "read"), [(2, False), (3, True)])
def test_few_steps_run_as_they_are(steps: int, read: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a step of many calls are fewer."""
    monkeypatch.setitem(MOST, "numpy", 56)
    run = loop(Cell())
    check(run)
    run(X[:steps], START)
    assert (run.text is not None) == read


BIG = draw(40, 40)


def test_a_step_that_catches_what_recording_refuses_runs_as_it_is() -> None:
    def step(x: Any, h: Any) -> tuple[Any, Any]:
        try:
            scale = float(BIG[0, 0])
        except Exception:
            scale = 0.5
        h = np.tanh(x + h * scale)
        return h, h

    run = loop(step)
    BIG[0, 0] = 0.5
    check(run)
    BIG[0, 0] = 0.25
    check(run)


@pytest.mark.parametrize(
    "read",
    [lambda: str(BIG[0, 0]) == "0.5", lambda: BIG[0, 0] in {0.5}, lambda: BIG[0, 0].is_integer()],
)
def test_a_number_that_is_read_in_another_way(read: Any) -> None:
    def step(x: Any, h: Any) -> tuple[Any, Any]:
        h = np.tanh(x + h) if read() else np.sin(x - h)
        return h, h

    run = loop(step)
    for number in (0.5, 0.25, 0.5, 3.0, 3.5):
        BIG[0, 0] = number
        check(run)


@pytest.mark.parametrize(
    "chosen",
    [
        lambda: BIG[BIG > 0], lambda: np.where(BIG > 0)[0], lambda: np.unique(BIG > 0),
        lambda: np.repeat(BIG[0], (BIG[0] > 0) * 1),
    ],
)  # fmt: skip
def test_shapes_that_numbers_decide(chosen: Any) -> None:
    def step(x: Any, h: Any) -> tuple[Any, Any]:
        h = np.tanh(x + h * chosen().sum())
        return h, h

    run = loop(step)
    for share in (0.5, 0.5, 0.5, 0.9, 0.1, 0.1):
        BIG[:] = DRAWS.random(BIG.shape) - share
        check(run)
    run = loop(lambda x, h: (h, np.tanh(h + x[x > 0].sum())))
    for share in (0.5, 0.9):
        check(run, DRAWS.random(X.shape) - share)


def test_what_the_step_keeps_of_its_first_call_is_read() -> None:
    """A step that changes what is around it runs as it is written, until it changes nothing."""

    class Keeping:
        def __init__(self) -> None:
            self.weight = draw(H, H)

        def __call__(self, x: Any, h: Any) -> tuple[Any, Any]:
            if not hasattr(self, "both"):
                self.both = np.concatenate([self.weight, self.weight])
            h = np.tanh(np.concatenate([x, h], -1) @ self.both)
            return h, h

    cell = Keeping()
    run = loop(cell)
    check(run)
    assert "assigns to both" in str(run.reason)
    for _ in range(2):
        check(run)
        assert run.reason is None
    cell.both = -cell.both
    check(run)


@pytest.mark.parametrize("longest", [0, 512])
def test_long_work_after_a_kernel_is_not_recorded(
    longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "_LONG", longest)
    run = loop(lambda x, h: (np.sin(h) + x, np.tanh(x + h)))
    for _ in range(4):
        check(run, draw(T, B, H))
    (known,) = next(iter(run._known.values()))
    assert isinstance(known.read.tapes[T], bool) == (longest == 0)


@pytest.mark.parametrize("count", [mirror._MOST, mirror._MOST + 1])
def test_whole_numbers_are_compared_or_arrays_of_the_call(
    count: int, recordings: type[Counted]
) -> None:
    """The numbers of small arrays decide what a step does; those of large ones cannot."""
    numbers = np.ones(count, int)
    run = loop(lambda x, h: (h, np.tanh(x + h * numbers.sum())))
    for value in (1, 1, 0):
        numbers[:] = value
        check(run)
        assert run.reason is None
    assert recordings.count == (2 if count == mirror._MOST else 1)


def test_a_class_of_abstract_methods_is_read() -> None:
    class Abstract(abc.ABC, Generic[Kind]):
        gain = 0.5

        @abc.abstractmethod
        def gate(self, v: Any) -> Any: ...

    class Concrete(Abstract[int]):
        def gate(self, v: Any) -> Any:
            return np.tanh(v * self.gain)

        def __call__(self, x: Any, h: Any) -> tuple[Any, Any]:
            h = self.gate(x + h)
            return h, h

    run = loop(Concrete())
    for gain in (0.5, 0.25):
        Abstract.gain = gain
        check(run)
        assert run.reason is None


@pytest.mark.parametrize(
    "write",
    [
        lambda a: np.copyto(a, a + 1),
        lambda a: np.dot(np.eye(H), a + 1, a),
        lambda a: np.clip(a + 1, -9, 999, out=a),
        lambda a: np.put(a, range(H), a + 1),
        lambda a: np.putmask(a, a < 999, a + 1),
    ],
)
def test_arrays_of_the_step_are_written_as_often_as_it_writes(write: Callable[[Any], Any]) -> None:
    count, entered = np.zeros(H), X.copy()

    def step(x: Any, h: Any) -> tuple[Any, Any]:
        write(count)
        h = np.tanh(x + h * count)
        write(x[0])
        return h, h

    run = loop(step)
    run(entered, START)
    assert run.reason is not None
    np.testing.assert_array_equal(count, T)
    np.testing.assert_array_equal(entered[:, 0], X[:, 0] + 1)


def test_functions_of_weights_alone_are_those_of_numpy() -> None:
    run = loop(lambda x, h: (h, np.tanh(x + h @ (W / np.linalg.norm(W, 2)))))
    for scale in (1, 3):
        W[:] *= scale
        check(run)
        assert run.reason is None


def test_a_reason_names_what_a_class_has() -> None:
    class Counting:
        def __call__(self, x: Any, h: Any) -> tuple[Any, Any]:
            object.__setattr__(self, "count", 1)
            return h, np.tanh(x + h)

    run = loop(Counting())
    check(run)
    assert "reads __call__ (a function that uses __setattr__)" in str(run.reason)
