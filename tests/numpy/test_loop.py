"""Steps written in NumPy, read as cells: the same numbers as step by step, or a reason."""

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tolerances import LIMITS, assert_close, error

from anycell.lang.text import from_text
from anycell.numpy import loop
from anycell.numpy.loops import leaves
from anycell.read.short import MOST, SHORT
from tools import random_steps

T, B, I, H = 6, 3, 5, 8
DRAWS = np.random.default_rng(0)


def draw(*shape: int) -> np.ndarray:
    return DRAWS.normal(size=shape) * 0.5


W, U, R = draw(I, 4 * H), draw(H, 4 * H), draw(H, H)
BIAS, GAIN = draw(4 * H), draw(H)
STEPS: dict[str, tuple[Callable[..., Any], Any, Any]] = {}  # the step, x and the first state
X = draw(T, B, I)
FLAGS = DRAWS.random((T, B)) < 0.4


def step(x: Any, *state: Any) -> Callable[..., Any]:
    def keep(function: Callable[..., Any]) -> Callable[..., Any]:
        STEPS[function.__name__] = function, x, state[0] if len(state) == 1 else state
        return function

    return keep


def sigmoid(v: Any) -> Any:
    return 1 / (1 + np.exp(-v))


def normal(v: Any) -> Any:
    return (v - v.mean(-1, keepdims=True)) / np.sqrt(v.var(axis=-1, keepdims=True) + 1e-5)


def update(gates: Any, c: Any) -> Any:
    i, f, g, o = gates
    c = sigmoid(f + 1.0) * c + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(c), c


@step(X, draw(B, H), draw(B, H))
def concatenated(x: Any, s: Any) -> Any:
    h, c = s
    gates = np.concatenate([x, h], -1) @ np.concatenate([W, U]) + BIAS
    h, c = update(np.split(gates, 4, -1), c)
    return h, (h, c)


@step(X, draw(B, H), draw(B, H))
def reversed_concatenation(x: Any, s: Any) -> Any:
    h, c = s
    gates = np.concatenate([U, W]).T @ np.concatenate([h, x], axis=1).T
    h, c = update([gates[k * H : (k + 1) * H].T for k in range(4)], c)
    return h, (h, c)


@step(X, draw(B, H), draw(B, H))
def interleaved(x: Any, s: Any) -> Any:
    h, c = s
    gates = (x @ W + h @ U + BIAS).reshape(B, H, 4)
    h, c = update([gates[..., k] for k in range(4)], c)
    return h, (h, c)


@step(X, draw(B, H), draw(B, H))
def strides(x: Any, s: Any) -> Any:
    gates = x @ W + s[0] @ U + BIAS
    h, c = update([gates[:, k::4] for k in range(4)], s[1])
    return h, (h, c)


@step(X, draw(B, 2 * H))
def one_state(x: Any, s: Any) -> Any:
    h, c = update(np.hsplit(x @ W + s[:, :H] @ U, 4), s[:, H:])
    return c * 2, np.hstack([h, c])


@step(X, draw(B, H), draw(B, H))
def tiled(x: Any, s: Any) -> Any:
    h, c = update(np.split(np.tile(s[0], (1, 4)) * 0.3 + x @ W, 4, 1), s[1])
    return h, (h, c)


@step(X, draw(B, H), draw(B, H))
def norm_of_each_gate(x: Any, s: Any) -> Any:
    gates = normal((x @ W + s[0] @ U).reshape(B, 4, H))
    h, c = update([gates[:, k] for k in range(4)], s[1])
    return h, (h, c)


@step(X, draw(B, H), draw(B, H))
def norm_of_all_gates(x: Any, s: Any) -> Any:
    h, c = update(np.split(normal(x @ W + s[0] @ U), 4, 1), s[1])
    return h, (h, c)


@step(X, draw(B, H))
def norm_of_groups(x: Any, h: Any) -> Any:
    h = GAIN * normal(np.tanh(x @ W[:, :H] + h @ R).reshape(B, 2, H // 2)).reshape(B, H)
    return h, h


@step(X, draw(B, H))
def reset_before(x: Any, h: Any) -> Any:
    a = x @ W[:, : 3 * H] + BIAS[: 3 * H]
    r, z = np.split(sigmoid(a[:, : 2 * H] + h @ U[:, : 2 * H]), 2, 1)
    h = (1 - z) * np.tanh(a[:, 2 * H :] + (r * h) @ R) + z * h
    return h, h


@step(X, draw(B, H))
def product_of_differences(x: Any, h: Any) -> Any:
    h = np.tanh(-(x @ W[:, :H]) * GAIN / 2 + (h - x @ W[:, H : 2 * H]) @ R - 3)
    return h, h


@step(X, draw(B, H))
def nonlinear_input(x: Any, h: Any) -> Any:
    h = np.tanh(np.maximum(x @ W[:, :H], 0) @ R + h @ R)
    return h @ U, h


@step(X, draw(B, H))
def rolled_before_a_product(x: Any, h: Any) -> Any:
    h = np.tanh(x @ W[:, :H] + np.roll(h, 1, 1) @ R)
    return h, h


@step(X, draw(B, H))
def rolled_and_flipped(x: Any, h: Any) -> Any:
    h = np.tanh(x @ W[:, :H] + np.roll(h, 1, 1) * GAIN - h[:, ::-1] + h @ R)
    return h, h


@step(X, draw(B, H))
def unit_of_a_state(x: Any, h: Any) -> Any:
    z = sigmoid(x[:, :1] + h[:, :1])
    h = z * h + (1 - z) * np.tanh(x @ W[:, :H] + h @ R)
    return h, h


@step(X, draw(B, H), draw(B, 1))
def state_of_one_unit(x: Any, s: Any) -> Any:
    h = np.tanh(x @ W[:, :H] + s[0] @ R)
    n = s[1] * 0.9 + h.max(-1, keepdims=True)
    return h * n, (h, n)


@step(X[:, 0], draw(H))
def no_batch(x: Any, h: Any) -> Any:
    h = np.tanh(x @ W[:, :H] + h @ R)
    return h, h


@step((X, FLAGS), draw(B, H), draw(B, H))
def resets(x: Any, s: Any) -> Any:
    x, flags = x
    h = np.where(flags[:, None], 0.0, s[0])
    c = np.where(flags[:, None], GAIN, s[1])
    h, c = update(np.split(x @ W + h @ U, 4, -1), c)
    return h, (h, c)


@step((X, FLAGS), draw(B, H), draw(B, H))
def resets_of_one_state(x: Any, s: Any) -> Any:
    x, flags = x
    h, c = update(np.split(x @ W + np.where(flags[:, None], 0.0, s[0]) @ U, 4, -1), s[1])
    return h, (h, c)


@step((X, FLAGS), draw(B, H), draw(B, H))
def mask(x: Any, s: Any) -> Any:
    x, flags = x
    new = update(np.split(x @ W + s[0] @ U, 4, -1), s[1])
    h, c = (np.where(flags[:, None], a, b) for a, b in zip(new, s, strict=True))
    return h, (h, c)


@step((X, FLAGS), draw(B, H), draw(B, H))
def inverted_mask_and_resets(x: Any, s: Any) -> Any:
    x, flags = x
    h, c = (np.where(~flags[:, None], a, 0.0) for a in s)
    new = update(np.split(x @ W + h @ U, 4, -1), c)
    h, c = (np.where(flags[:, None], b, a) for a, b in zip(new, s, strict=True))
    return h, (h, c)


@step({"b": X, "a": [X * 2]}, draw(B, H))
def trees(x: Any, h: Any) -> Any:
    h = np.tanh(x["b"] @ W[:, :H] + x["a"][0] @ W[:, H : 2 * H] + h @ R)
    return {"z": h, "y": (h * 2, h.sum(-1))}, h


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, "float64") for name in STEPS]
    + [(name, "float32") for name in ("concatenated", "norm_of_all_gates", "mask")]
    + [("concatenated", "float16")],
)
@pytest.mark.sample(every=5)
def test_a_step_gives_the_numbers_of_its_loop(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, x, state = STEPS[name]
    run = loop(function)

    def cast(tree: Any, dtype: str) -> Any:
        if isinstance(tree, np.ndarray):
            return tree if tree.dtype == bool else tree.astype(dtype)
        if isinstance(tree, dict):
            return {key: cast(part, dtype) for key, part in tree.items()}
        return type(tree)([cast(part, dtype) for part in tree])

    def weights(dtype: str) -> None:
        for weight in ("W", "U", "R", "BIAS", "GAIN"):
            monkeypatch.setitem(globals(), weight, cast(globals()[weight], dtype))

    with np.errstate(all="ignore"):
        weights(dtype)
        x, state = cast(x, dtype), cast(state, dtype)
        results = run(x, state)
        assert run.reason is None and run.text is not None
        weights("float64")
        expected = run._loop(cast(x, "float64"), cast(state, "float64"))
    for result, exact in zip(leaves(results), leaves(expected), strict=True):
        assert result.dtype == dtype
        assert error(result, exact) <= LIMITS[dtype, "forward"]
    assert pickle.loads(pickle.dumps(from_text(run.text))) == from_text(run.text)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("resets", "resets="), ("mask", "mask="), ("inverted_mask_and_resets", "mask="),
        ("norm_of_groups", "mean(t1, groups=2)"), ("strides", "r.g0 + x.g0"),
        ("state_of_one_unit", "s1:1"), ("unit_of_a_state", "x.g0"),
    ],
)  # fmt: skip
def test_the_text_says(name: str, part: str) -> None:
    function, x, state = STEPS[name]
    run = loop(function)
    run(x, state)
    assert part in str(run.text)


@pytest.mark.parametrize("name", ["concatenated", "interleaved", "mask", "nonlinear_input"])
def test_x_goes_in_as_it_is(name: str) -> None:
    """The layer projects x: there is no array of all gates of all steps."""
    function, x, state = STEPS[name]
    run = loop(function)
    run(x, state)
    (read,) = run._read.values()
    assert not isinstance(read, str) and read.reading.projected


@pytest.mark.parametrize("count", [0, np.int32(3), np.array(1), np.arange(B)[:, None]])
def test_counters_are_computed_beforehand(count: Any) -> None:
    """Also those of Python; a state of flags goes with the floats."""

    def counted(x: Any, state: Any) -> Any:
        h, t, seen = state
        h = np.where(seen, h, np.tanh(h @ R + x.sum(-1, keepdims=True) * np.where(t % 2, 0.5, 2)))
        return (h, t), (h, t + 1, seen | (h > 0.9))

    run, state = loop(counted), (draw(B, H), count, np.zeros((B, H), bool))
    expected, results = run._loop(X, state), run(X, state)
    assert run.reason is None
    for result, exact in zip(leaves(results), leaves(expected), strict=True):
        assert np.asarray(result).dtype == np.asarray(exact).dtype
        assert error(result, exact) <= LIMITS["float64", "forward"]
    assert isinstance(results[1][1], int) == isinstance(count, int)


def _filled(h: Any) -> Any:
    new = np.empty((B, H))
    new[:] = h
    return new


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "branch": (lambda x, h: (h, np.tanh(h) if h.sum() > 0 else h), "branch on a number"),
    "over the batch": (lambda x, h: (h, np.tanh(h - h.mean(0))), "the rows of the batch"),
    "rows mixed": (lambda x, h: (h, h[::-1]), "the rows of the batch"),
    "own matrix": (lambda x, h: (h, np.tanh(h @ (h.T @ h))), "matrices of weights"),
    "another function": (lambda x, h: (h, np.sort(h)), "np.sort"),
    "method": (lambda x, h: (h, h.cumprod(-1)), "the method cumprod()"),
    "fewer bits": (lambda x, h: (h, h.astype(np.float16)), "a conversion from float64 to float16"),
    "other library": (lambda x, h: (h, float(h[0, 0]) * h), "a function that is not NumPy's"),
    "array of its own": (lambda x, h: (h, _filled(h)), "into an array that exists"),
    "constant": (lambda x, h: (np.ones(3), h), "depends neither on x nor on a state"),
    "counter of floats": (lambda x, s: (s[0], (np.tanh(s[0]), s[1] + (s[0] > 0).sum())), "int64"),
    "another dtype": (lambda x, h: (h, (h @ R.astype(np.complex128))), "to complex128"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_steps_run_as_they_are(name: str) -> None:
    function, part = REFUSED[name]
    run, h = loop(function), draw(B, H)
    h = (h, np.array(0)) if name == "counter of floats" else h
    expected = run._loop(X, h)
    results = run(X, h)
    assert run.text is None and part in str(run.reason)
    for result, exact in zip(leaves(results), leaves(expected), strict=True):
        np.testing.assert_array_equal(result, exact)


def test_edits_in_place_run_as_they_are() -> None:
    def edit(x: Any, h: Any) -> Any:
        h = np.tanh(h)
        h[:, 0] = 0
        return h, h

    run, h = loop(edit), draw(B, H)
    outputs, last = run(X, h)
    assert "np.where or np.concatenate" in str(run.reason)
    assert "test_loop.py:" in str(run.reason)
    np.testing.assert_array_equal(outputs[-1], last)


def test_steps_with_other_effects_run_as_they_are() -> None:
    """Their effects are those of the loop: of as many calls, in the order of the steps."""
    count, log, generator = [0], [], np.random.default_rng(0)

    def counts(x: Any, h: Any) -> Any:
        count[0] += 1
        h = np.tanh(x @ W[:, :H] + h * count[0])
        return h, h

    def logs(x: Any, h: Any) -> Any:
        h = np.tanh(x @ W[:, :H] + h)
        log.append(h.mean())
        return h, h

    def draws(x: Any, h: Any) -> Any:
        h = np.tanh(x @ W[:, :H] + h * generator.random(h.shape))
        return h, h

    def draws_from_all(x: Any, h: Any) -> Any:
        h = np.tanh(x @ W[:, :H] + h * np.random.rand(*h.shape))
        return h, h

    class Reservoir:
        seen = 0

        def __call__(self, x: Any, h: Any) -> Any:
            self.seen += 1
            h = np.tanh(x @ W[:, :H] + h)
            return h if self.seen > 3 else h * 0, h

    start, reservoir = draw(B, H), Reservoir()
    reasons = {
        counts: "changes what is around it",
        logs: "changes what is around it",
        draws: "reads generator (a Generator)",
        draws_from_all: "reads rand (a cython_function_or_method)",
        reservoir: "assigns to seen",
    }
    for step, reason in reasons.items():
        run = loop(step)
        for _ in range(2):
            outputs, _ = run(X, start)
            assert reason in str(run.reason)
    assert count[0] == len(log) == reservoir.seen == 2 * T and type(log[-1]) is np.float64
    reservoir.seen, h = 0, start
    run = loop(reservoir)
    assert not run(X, start)[0][:3].any() and run.step.seen == T
    expected = np.random.default_rng(0).random((2 * T, B, H))
    generator = np.random.default_rng(0)
    outputs, _ = loop(draws)(X, start)
    for x, output, factor in zip(X, outputs, expected, strict=False):
        h = np.tanh(x @ W[:, :H] + h * factor)
        np.testing.assert_array_equal(output, h)


def test_weights_have_the_numbers_of_each_call() -> None:
    class Cell:
        def __init__(self) -> None:
            self.weight, self.leak = draw(I + H, H), 0.5

        def __call__(self, x: Any, h: Any) -> Any:
            h = self.leak * h + np.tanh(np.concatenate([x, h], 1) @ self.weight)
            return h, h

    cell = Cell()
    run, h = loop(cell), draw(B, H)

    def check() -> None:
        results = run(X, h)
        assert run.reason is None
        for result, exact in zip(leaves(results), leaves(run._loop(X, h)), strict=True):
            assert error(result, exact) <= LIMITS["float64", "forward"]

    check()
    cell.weight *= -2
    check()
    cell.weight = draw(I + H, H)
    check()
    cell.leak = 0.25
    check()
    assert len(run._read) == 2  # one for each leak, which is a number in the text


def test_more_rows_and_steps_are_read_again_or_not_at_all() -> None:
    function, _, _ = STEPS["concatenated"]
    run = loop(function)
    for rows, steps in ((B, T), (B, 2 * T), (1, T), (7, 2)):
        x, state = draw(steps, rows, I), (draw(rows, H), draw(rows, H))
        results = run(x, state)
        assert run.reason is None
        for result, exact in zip(leaves(results), leaves(run._loop(x, state)), strict=True):
            assert error(result, exact) <= LIMITS["float64", "forward"]
    assert len(run._read) == 3


@pytest.mark.parametrize("units", [I, 0])
def test_arrays_without_numbers(units: int) -> None:
    """A batch without rows and a product over no units run as they are."""
    weight, also = draw(units, H), draw(units, H)

    def function(x: Any, h: Any) -> Any:
        h = np.tanh(x @ weight + (h[:, :units] * 2) @ also + h)
        return h, h

    run = loop(function)
    for rows in (0, B, 0):
        x, h = draw(T, rows, units), draw(rows, H)
        for result, exact in zip(run(x, h), run._loop(x, h), strict=True):
            assert error(result, exact) <= LIMITS["float64", "forward"]
        assert (run.reason is None) == (rows > 0 < units), run.reason


@pytest.mark.parametrize("x", [(), np.float64(1.0), (X, X[:2]), X[:0]])
def test_x_has_steps(x: Any) -> None:
    with pytest.raises(ValueError, match=r"x: given .*expected arrays \[T, ...\] of one T"):
        loop(STEPS["concatenated"][0])(x, (draw(B, H), draw(B, H)))


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(40))
def test_random_step(seed: int) -> None:
    outcome = random_steps.check("numpy", seed)
    assert not outcome.wrong and not outcome.error, outcome.source
    assert outcome.refusal is None, outcome.refusal


def test_a_step_is_a_function() -> None:
    with pytest.raises(TypeError, match="step: given"):
        loop(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("steps", "rows", "read"),
    [(1, 600, False), (8, B, False), (9, B, True), (4, 2048, False), (5, 2048, True)],
)
def test_few_steps_run_as_they_are(
    monkeypatch: pytest.MonkeyPatch, steps: int, rows: int, read: bool
) -> None:
    """Of many rows fewer."""
    monkeypatch.setitem(MOST, "numpy", 8)
    layer, x, h = loop(lambda x, h: 2 * (np.tanh(h),)), draw(steps, rows, H), draw(rows, H)
    layer(x, h)  # which finds that the step is one call of NumPy
    outputs, last = layer(x, h)
    expected, end = layer._loop(x, h)
    for one, right in ((outputs, expected), (last, end)):
        assert_close(one, right, "float64", "forward")
    assert layer.reason == (None if read else SHORT)


def test_few_steps_are_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For calls of one kind and number of steps, until the step is read anew."""
    monkeypatch.setitem(MOST, "numpy", 8)
    scale, asked = [2.0], list[int]()
    layer = loop(lambda x, h: (h, h + x * scale[0] if scale[0] < 3 else np.tanh(x + h) * 2))
    ready = layer._ready

    def counted(x: Any, *arguments: Any) -> Any:
        asked.append(len(x))
        return ready(x, *arguments)

    monkeypatch.setattr(layer, "_ready", counted)

    def run(steps: int, h: Any = None, x: Any = None) -> None:
        x, h = draw(steps, B, H) if x is None else x, draw(B, H) if h is None else h
        result = [layer(x, h), layer._loop(x, h)]
        for one, right in zip(*result, strict=True):
            assert_close(one, right, "float64", "forward")

    for steps in (20, 4, 4, 4, 3, 1, 1, 20):
        run(steps)
    assert asked == [20, 4, 3, 20] and layer.reason is None
    run(4, draw(2, H), draw(4, 2, H))  # unlike any that was read
    scale[0] = 4.0
    run(20)  # three calls of NumPy now, so that three steps are no longer few
    run(3)
    assert asked == [20, 4, 3, 20, 4, 20, 3] and layer.reason is None
    few = len(layer._short)
    layer(draw(1, B, H).view(np.recarray), draw(B, H))  # of a class of its own
    assert len(layer._short) == few
