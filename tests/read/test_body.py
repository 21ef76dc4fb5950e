"""What the readers of all frameworks share: kinds, values, rows, functions of operands.

NumPy's table stands for all: reading a step also proves it, on the reference engine.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from anycell.numpy.loops import _Call, loop
from anycell.numpy.mirror import Mirror
from anycell.read import Body, Equation, Refused, Values, Variable, leaves, mapped

T, B, H = 4, 3, 6
RANDOM = np.random.default_rng(0)
X, STATE = RANDOM.normal(size=(T, B, H)), RANDOM.normal(size=(B, H))
W, HEADS = RANDOM.normal(size=(H, H)) / 3, RANDOM.normal(size=(2, 3, 3)) / 2
ORDER = np.array([3, 0, 5, 1, 4, 2])


def read(step: Callable[[Any, Any], Any], x: Any = X, state: Any = STATE) -> str:
    """The text of a step, which is proved."""
    run = loop(step)
    call = _Call(run, x, state)
    call.record(Mirror(vars(run), "step", call.stand_in([])))
    return call.read(None).body.reading.text


def of_heads(h: Any) -> Any:
    return np.einsum("bni,nio->bno", h.reshape(B, 2, 3), HEADS).reshape(B, H)


# Functions of a state, and what the text of the cell has for them.
ROWS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "einsum": (lambda h: np.einsum("oi,bi->bo", W, h), "r.g0"),
    "einsum of heads": (of_heads, "heads=2"),
    "matrices of leading axes": (
        lambda h: np.matmul(h.reshape(B, 2, 1, 3), HEADS).reshape(B, H),
        "linear(",
    ),
    "one matrix for all rows": (lambda h: np.matmul(h.reshape(B, 1, H), W[None])[:, 0], "r.g0"),
    "transposed": (lambda h: (W @ h.T).T, "r.g0"),
    "dot": (lambda h: h + h.dot(W[0])[:, None], "sum("),
    "cumsum": (lambda h: h.cumsum(-1) * 0.1, "r.g0"),
    "positions": (lambda h: h[:, ORDER] + h * 0.5, "r.g0"),
    "taken": (lambda h: np.take(h, ORDER[:3], axis=1).repeat(2, 1), "s.s0"),
    "minimum": (lambda h: h - h.min(-1, keepdims=True), "max("),
    "deviation": (lambda h: h / (1 + h.std(-1, keepdims=True)), "sqrt(mean("),
    "variance of a sample": (lambda h: h / (1 + h.var(-1, keepdims=True, ddof=1)), "sum("),
    "clip": (lambda h: np.clip(h * 2, -1.0, 1.0), "minimum(maximum("),
    "clip on one side": (lambda h: np.clip(h, a_min=0.0, a_max=None), "maximum("),
    "power of two": (lambda h: np.exp2(-h * h), "exp("),
    "square root": (lambda h: np.power(h * h + 1, 0.5) * 0.5, "sqrt("),
    "negative zero": (lambda h: np.where(h > 9, -0.0, h), "where(s.s0 > 9, -0.0, s.s0)"),
    "large number": (lambda h: np.minimum(h, 1e30), "minimum(s.s0, 1e+30)"),
    "cube": (lambda h: np.power(h, 3) * 0.1, "s.s0 * s.s0 * s.s0"),
    "finite": (lambda h: np.where(np.isfinite(h), h, 0.0) * 0.5, "where("),
    "condition of conditions": (
        lambda h: np.where(np.where(h > 0, h < 1, h < -1), h, 0.5 * h),
        "|",
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows(name: str) -> None:
    function, part = ROWS[name]

    def step(x: Any, h: Any) -> Any:
        h = 0.5 * function(h) + x
        return h, h

    assert part in read(step)


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "of a state": (lambda h: h @ (h.T @ h), "the matrix of this product depends on a state"),
    "repeated letters": (lambda h: np.einsum("bi,bi->b", h, W[:B])[:, None] * h, "of its own"),
    "sum of one operand": (lambda h: np.einsum("bi,ij->b", h, W)[:, None] * h, "einsum"),
    "three operands": (lambda h: np.einsum("bi,ij,jk->bk", h, W, W), "einsum"),
    "rows that are summed": (lambda h: np.ones((B, B)) @ h, "the batch by a matrix"),
    "cumsum of all": (lambda h: h + h.cumsum()[:H], "cumsum of all axes"),
    "no row of the table": (lambda h: np.arctan(h), "no cell has np.arctan"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    function, says = REFUSED[name]

    def step(x: Any, h: Any) -> Any:
        h = 0.5 * function(h) + x
        return h, h

    with pytest.raises(Refused, match=says):
        read(step)


def test_products_of_x_are_computed_before_the_loop() -> None:
    """They are no sum or multiple of x, though each factor is."""

    def step(x: Any, h: Any) -> Any:
        h = 0.5 * h + (x @ W) * (1 - x) / (2 + x)
        return h, h

    assert "return 0.5 * s.s0 + x.g0" in read(step)


def test_a_state_that_stays_is_a_weight() -> None:
    def step(x: Any, state: Any) -> Any:
        h, w = state
        h = np.tanh(x + h @ w)
        return h, (h, w)

    assert "return tanh(r.g0 + x.g0)" in read(step, X, (STATE, W))
    with pytest.raises(Refused, match="returns its state as it was"):
        read(lambda x, h: (x, h))


V = np.tanh(W + 1)  # further weights


def test_a_product_of_a_state_is_the_recurrent_projection() -> None:
    """Of any state, which is the first then. Its outputs have the order of the gates that they are
    added to, and resets restore what they did.
    """

    def step(inputs: Any, state: Any) -> Any:
        (x, done), (c, h) = inputs, state
        c, h = np.where(done[:, None], 0.5, c), np.where(done[:, None], V[0], h)
        both = h @ np.hstack([W, V])
        c = np.tanh(both[:, H:] + x) * c + np.tanh(both[:, :H] + x @ W)
        h = np.tanh(c)
        return h, (c, h)

    text = read(step, (X, X[..., 0] > 0), (STATE, V[:B]))
    assert 'gates="g0 g1", state="s1 s0"' in text and "linear" not in text
    assert "tanh(r.g0 + x.g0) * s.s0" in text and "tanh(r.g1 + x.g1)" in text


@pytest.mark.parametrize(
    ("gate", "expected"),
    [
        (lambda x, r, h: x + r + V[0] * h, "r.g0 + x.g0 + p.b0 * s.s0"),
        (lambda x, r, h: x + (V[0] * h + r), "p.b0 * s.s0 + (r.g0 + x.g0)"),
        (lambda x, r, h: r - V[0] * h + x, "r.g0 + x.g0 - p.b0 * s.s0"),
        (lambda x, r, h: V[0] * h - r + x, "p.b0 * s.s0 - r.g0 + x.g0"),
    ],
)
def test_a_gate_is_added_to_its_product(gate: Any, expected: str) -> None:
    """Which a kernel accumulates onto it, whatever else is in the sum."""
    assert f"tanh({expected})" in read(lambda x, h: (h, np.tanh(gate(x, h @ W, h))))


@pytest.mark.parametrize(
    ("product", "expected"),
    [
        (lambda h: (h @ W) * 0.5, "r.g0"),
        (lambda h: np.tanh(h) @ W, 'linear(tanh(s.s0), "w0")'),  # of what is no state
        (lambda h: h @ np.hstack([W, V]) @ np.ones((12, 6)), "linear("),  # of another size
        (lambda h: np.tanh(h @ W) + h @ V, "linear("),  # of more outputs than there are gates
    ],
)
def test_other_products_have_names(product: Any, expected: str) -> None:
    assert expected in read(lambda x, h: (h, np.tanh(x + product(h))))


# -- equations -------------------------------------------------------------------------------------
def variable() -> Variable:
    return Variable((2,), "float64")


def test_kinds() -> None:
    """Counters go before the loop, unless a state of the loop enters them."""
    w, x, h, count, kept, late = (variable() for _ in range(6))
    made = [variable() for _ in range(5)]
    wx, new, noise = made[0], made[1], made[4]
    equations = [
        Equation("mul", (w, x), {}, [wx]),
        Equation("add", (h, wx), {}, [new]),
        Equation("add", (count, 1), {}, [made[2]]),
        Equation("add", ([late, h],), {}, [made[3]]),
        Equation("draw", (), {}, [noise], random=True),
    ]
    states, after = [h, count, kept, late], [new, made[2], kept, made[3]]
    body = Body([w], [x], states, [new, kept], after, equations)
    body.sort(early=[1, 2, 3])
    assert (body.moving, body.ahead) == ([0, 3], [1])
    kinds = [v.kind for v in (w, x, h, count, kept, late, *made)]
    assert kinds == ["F", "X", "S", "X", "F", "S", "X", "S", "X", "S", "X"]
    assert body.needed([new]) == equations[:2] and body.needed([new], [wx]) == equations[1:2]
    assert body.sources([made[3]], {h, late, wx}) == {h, late}
    assert body.seen() == [0]


def test_values_are_computed_once_and_however_deep() -> None:
    runs = []

    def execute(equation: Equation, values: Values) -> list[Any]:
        runs.append(equation)
        return [values[equation.operands[0]] + 1]

    first, elsewhere, alone = variable(), variable(), variable()
    last = first
    for _ in range(3000):
        before, last = last, variable()
        Equation("add", (before, 1), {}, [last])
    values = Values({first: 0}, execute, lambda v: 7 if v is elsewhere else None)
    assert values[last] == values[last] == len(runs) == 3000
    assert values[elsewhere] == 7
    with pytest.raises(KeyError):
        values[alone]


def test_of_several_results_some_may_be_known() -> None:
    whole, parts, total = variable(), [variable(), variable()], variable()
    Equation("split", (whole,), {}, parts)
    Equation("neg", (parts[1],), {}, [total])

    def execute(equation: Equation, values: Values) -> list[Any]:
        value = values[equation.operands[0]]
        return [-value] if equation.op == "neg" else [value + 1, value + 2]

    values = Values({whole: 1, parts[0]: 9}, execute)
    assert values[total] == -3 and values[parts[0]] == 9


def test_trees() -> None:
    tree = {"b": (1, [None, 2.0]), "a": 3}
    assert list(leaves(tree)) == [3, 1, 2.0] and list(leaves(tree, float)) == [2.0]
    assert mapped(str, tree) == {"b": ("1", [None, "2.0"]), "a": "3"}
    assert list(mapped(str, tree)) == ["b", "a"]
