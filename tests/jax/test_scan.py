"""``anycell.jax.scan``: bodies read as cells, or ``jax.lax.scan`` with a reason.

One file, because tests of semantics and modules use what those of cells define.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from tolerances import LIMITS, assert_close, error

jax = pytest.importorskip("jax")
jnp, nn, lax = jax.numpy, jax.nn, jax.lax

import anycell.jax as aj  # noqa: E402
from anycell.jax import scanning  # noqa: E402

X64 = jax if hasattr(jax, "enable_x64") else jax.experimental
T, B, I, H = 5, 3, 4, 6
ROOT = Path(__file__).parents[2]
DRAWS = np.random.default_rng(0)


def draw(*shape: int) -> np.ndarray:
    return DRAWS.normal(size=shape) * 0.5


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults of the reader are errors here."""
    monkeypatch.setattr(scanning, "STRICT", True)


class Case(NamedTuple):
    make: Callable[[Any], Callable[..., Any]]  # weights -> f
    weights: Any
    init: Any
    xs: Any


CASES: dict[str, Case] = {}


def case(weights: Any, init: Any = None, xs: Any = None) -> Callable[..., Any]:
    def keep(make: Any) -> Any:
        CASES[make.__name__] = Case(
            make, weights, draw(B, H) if init is None else init, draw(T, B, I) if xs is None else xs
        )
        return make

    return keep


W, U = draw(I, H), draw(H, H)
PAIR = draw(B, H), draw(B, H)


def lstm(gates: Any, c: Any) -> Any:
    i, f, g, o = gates
    c = nn.sigmoid(f + 1.0) * c + nn.sigmoid(i) * jnp.tanh(g)
    return nn.sigmoid(o) * jnp.tanh(c), c


# ---- cells ---------------------------------------------------------------------------------------
@case([draw(I + H, 4 * H), draw(4 * H)], PAIR)
def one_matrix(w: Any) -> Any:
    def f(carry: Any, x: Any) -> Any:
        h, c = carry
        h, c = lstm(jnp.split(jnp.hstack([x, h]) @ w[0] + w[1], 4, axis=1), c)
        return (h, c), h

    return f


@case({k: draw(*s) for n in "ifgo" for k, s in ((f"W{n}", (I, H)), (f"U{n}", (H, H)))}, PAIR)
def matrix_of_each_gate(w: Any) -> Any:
    def f(carry: Any, x: Any) -> Any:
        h, c = lstm([carry[0] @ w[f"U{n}"] + x @ w[f"W{n}"] for n in "ifgo"], carry[1])
        return (h, c), h

    return f


@case([draw(I, H * 4), draw(H, H * 4)], PAIR)
def interleaved_gates(w: Any) -> Any:
    def f(carry: Any, x: Any) -> Any:
        a = (x @ w[0] + carry[0] @ w[1]).reshape(B, H, 4)
        h, c = lstm([a[..., k] for k in range(4)], carry[1])
        return (h, c), c

    return f


@case([draw(4, H, I), draw(4, H, H), draw(4, H)], PAIR)
def einsum_of_gates(w: Any) -> Any:
    def f(carry: Any, x: Any) -> Any:
        a = jnp.einsum("ghi,bi->gbh", w[0], x) + jnp.einsum("ghk,bk->gbh", w[1], carry[0])
        h, c = lstm(a + w[2][:, None], carry[1])
        return (h, c), None

    return f


class Memory(NamedTuple):
    h: Any
    c: Any


@case([draw(I, 4 * H), draw(H, 4 * H), draw(3, H)], Memory(*PAIR))
def peepholes(w: Any) -> Any:
    def f(s: Memory, x: Any) -> Any:
        i, f, g, o = jnp.split(x @ w[0] + s.h @ w[1], 4, -1)
        i, f = i + w[2][0] * s.c, f + w[2][1] * s.c
        h, c = lstm([i, f, g, o], s.c)
        return Memory(h, c), {"h": h, "more": nn.softmax(c)}

    return f


@case([draw(I, 3 * H), draw(H, 3 * H), draw(2, 3 * H)])
def gru(w: Any) -> Any:
    def f(h: Any, x: Any) -> Any:
        xr, xz, xn = jnp.array_split(x @ w[0] + w[2][0], 3, 1)
        hr, hz, hn = jnp.array_split(h @ w[1] + w[2][1], 3, 1)
        z = nn.sigmoid(xz + hz)
        h = z * h + (1 - z) * jnp.tanh(xn + nn.sigmoid(xr + hr) * hn)
        return h, h

    return f


@case([draw(I, 3 * H), draw(H, 3 * H), 1 + draw(3 * H)])
def norms(w: Any) -> Any:
    def norm(v: Any) -> Any:
        return (v - v.mean(-1, keepdims=True)) / jnp.sqrt(v.var(-1, keepdims=True) + 1e-5)

    def f(h: Any, x: Any) -> Any:
        a, b, c = jnp.split(w[2] * norm(x @ w[0] + h @ w[1]), 3, -1)
        c = c * lax.rsqrt(jnp.mean(jnp.square(c), -1, keepdims=True) + 1e-6)
        h = nn.sigmoid(a) * h + nn.silu(b) * jnp.tanh(c)
        return h, nn.standardize(h)

    return f


@case([W, U, draw(H)])
def time_constants(w: Any) -> Any:
    def f(h: Any, x: Any) -> Any:
        rate = 1 / (1 + nn.softplus(w[2]))
        h = h + rate * (-h + jnp.tanh(x @ w[0] + h @ w[1]))
        return h, jnp.sum(h, axis=-1)

    return f


@case([W, draw(H)])
def rectifiers(w: Any) -> Any:
    def f(h: Any, x: Any) -> Any:
        h = nn.relu(x @ w[0] + w[1] * h) - nn.leaky_relu(h, 0.1) + nn.relu6(h + 1) / 3
        return h, h

    return f


@case([W, U])
def functions(w: Any) -> Any:
    def f(h: Any, x: Any) -> Any:
        a = x @ w[0] + h @ w[1]
        h = nn.gelu(a) + nn.gelu(a, approximate=False) + nn.elu(a, 0.7) * nn.soft_sign(h)
        h = jnp.sin(h) + jnp.cos(a) * nn.log_sigmoid(a) + jnp.exp(-(a**2)) / (2 + a**3 / 9) ** 2
        return h / 4 + nn.mish(h) / 9, jnp.log1p(h * h)

    return f


@case([draw(I, 2 * H), draw(H, 2 * H)])
def cumulative_softmax(w: Any) -> Any:
    def f(h: Any, x: Any) -> Any:
        a, b = jnp.split(x @ w[0] + h @ w[1], 2, -1)
        h = jnp.cumsum(nn.softmax(a, -1), -1) * h + nn.softmax(h) * jnp.tanh(b)
        return h, jnp.argmax(h, -1)

    return f


@case([W, U], (draw(B, H), np.array([1, 2], np.uint32), 0))
def zoneout_and_counter(w: Any) -> Any:
    def f(carry: Any, x: Any) -> Any:
        h, key, t = carry
        key, now = jax.random.split(key)
        new = jnp.tanh(x @ w[0] + h @ w[1]) * 0.9**t
        h = jnp.where(jax.random.bernoulli(now, 0.3, h.shape), h, new)
        return (h, key, t + 1), (h, t)

    return f


@case([W, U], None, (draw(T, B, I), DRAWS.random((T, B)) < 0.4))
def episodes(w: Any) -> Any:
    def f(h: Any, inputs: Any) -> Any:
        x, done = inputs
        h = jnp.where(done[:, None], 0.0, h)
        h = jnp.tanh(x @ w[0] + h @ w[1])
        return h, h

    return f


@case([W, U], None, (draw(T, B, I), DRAWS.random((T, B)) < 0.6))
def padding(w: Any) -> Any:
    def f(h: Any, inputs: Any) -> Any:
        x, valid = inputs
        h = jnp.where(valid[:, None], jnp.tanh(x @ w[0] + h @ w[1]), h)
        return h, h

    return f


@case([draw(2 * H, I), draw(2 * H, H)])
def mapped_over_rows(w: Any) -> Any:
    def one(h: Any, x: Any) -> Any:
        z, n = jnp.split(w[0] @ x + w[1] @ h, 2)
        return h + nn.sigmoid(z) * (jnp.tanh(n) - h)

    def f(h: Any, x: Any) -> Any:
        h = jax.vmap(one)(h, x)
        return h, h

    return f


@case([W, U, draw(H, 2)], draw(H), draw(T, I))
def no_batch(w: Any) -> Any:
    def f(h: Any, x: Any) -> Any:
        h = jnp.tanh(x @ w[0] + h @ w[1])
        return h, h @ w[2]

    return f


@case([draw(2, I, 3), draw(2, 3, 3)], draw(B, 2, 3), draw(T, B, I))
def heads(w: Any) -> Any:
    def f(h: Any, x: Any) -> Any:
        h = jnp.tanh(jnp.einsum("bi,nid->bnd", x, w[0]) + jnp.einsum("bnd,nde->bne", h, w[1]))
        return h, h

    return f


@case([W, U, draw(H, H)], draw(2, B, H))
def layers_in_one_carry(w: Any) -> Any:
    def f(carry: Any, x: Any) -> Any:
        low = jnp.tanh(x @ w[0] + carry[0] @ w[1])
        high = jnp.tanh(low @ w[2] + carry[1] @ w[1].T)
        return jnp.stack([low, high]), high

    return f


@case([W, U], (draw(B, H), np.zeros((B, H), bool), draw(B, I)))
def booleans_and_the_input_before(w: Any) -> Any:
    def f(carry: Any, x: Any) -> Any:
        h, seen, before = carry
        h = jnp.tanh((x - before) @ w[0] + jnp.where(seen, h, h / 2) @ w[1])
        return (h, seen | (h > 0.3), x), (h, seen)

    return f


@case([draw(7, I), W, U], None, DRAWS.integers(0, 7, (T, B)))
def tokens(w: Any) -> Any:
    def f(h: Any, token: Any) -> Any:
        h = jnp.tanh(nn.relu(w[0][token]) @ w[1] + h @ w[2])
        return h, h

    return f


@case([W, U, draw(B, H)])
def context_of_each_row(w: Any) -> Any:
    def f(h: Any, x: Any) -> Any:
        h = jnp.tanh(x @ w[0] + h @ w[1] + w[2]) * jnp.exp(w[2])
        return h, h

    return f


@case([draw(I, 1), draw(2)], draw(B, 1))
def one_unit(w: Any) -> Any:
    def f(h: Any, x: Any) -> Any:
        h = jnp.tanh(x @ w[0] + w[1][0] * h + w[1][1])
        return h, h

    return f


@case([draw(I, H), draw(H, 2), draw(2, H)], (draw(B, H), draw(B, 2), draw(B)))
def sizes(w: Any) -> Any:
    def f(carry: Any, x: Any) -> Any:
        h, small, age = carry
        small = jnp.tanh(h @ w[1]) + small / 2
        h = jnp.tanh(x @ w[0] + small @ w[2]) * jnp.exp(-nn.softplus(age))[:, None]
        return (h, small, age + 0.1 * small[:, 0]), age

    return f


@case([W, U])
def checkpointed(w: Any) -> Any:
    @jax.checkpoint
    def f(h: Any, x: Any) -> Any:
        h = jnp.tanh(x @ w[0] + lax.stop_gradient(h) @ w[1] + h)
        return h, h

    return f


@case([W, U, np.array([3, 0, -1, 1, 0, 2])], draw(B, H))
def picked(w: Any) -> Any:
    """Units at positions of an array, which come in any order and more than once."""
    turned = np.array([[5, 4, 3], [0, 1, 2]])

    def f(h: Any, x: Any) -> Any:
        pairs = h[:, turned].transpose(0, 2, 1).reshape(B, H)
        ends = [lax.dynamic_slice_in_dim(h, start, 3, 1) for start in (1, 9)]
        h = jnp.tanh(x @ w[0] + jnp.take(h, w[2] % H, axis=-1) @ w[1] + pairs)
        return h + jnp.concatenate(ends, -1) / 2, None

    return f


def trial(run: Any, at: Case) -> Any:
    """Results and the gradients of all arrays."""

    def loss(weights: Any, init: Any, xs: Any) -> Any:
        results = run(at.make(weights), init, xs)
        reals = [a for a in jax.tree.leaves(results) if jnp.issubdtype(a.dtype, jnp.floating)]
        return sum(jnp.sum(jnp.sin(a + i) * (1 + a)) for i, a in enumerate(reals)), results

    both = jax.value_and_grad(loss, (0, 1, 2), has_aux=True, allow_int=True)
    return jax.jit(both)(at.weights, at.init, at.xs)


def compare(mine: Any, theirs: Any) -> None:
    ((_, mine), mine_d), ((_, theirs), theirs_d) = mine, theirs
    assert jax.tree.structure(mine) == jax.tree.structure(theirs)
    for kind, one, other in (("forward", mine, theirs), ("gradient", mine_d, theirs_d)):
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            if a.dtype == jax.dtypes.float0:
                continue
            if jnp.issubdtype(a.dtype, jnp.floating):
                assert_close(np.atleast_1d(a), np.atleast_1d(b), str(a.dtype), kind)
            else:
                assert np.array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample(every=16)
def test_cells_of_many_styles(name: str) -> None:
    check_read(CASES[name])


def check_read(case: Case) -> None:
    with X64.enable_x64(True):
        at = jax.tree.map(jnp.asarray, case._replace(make=0))._replace(make=case.make)
        told = aj.explain_scan(at.make(at.weights), at.init, at.xs)
        assert told.startswith("A fused kernel runs this body."), told
        compare(trial(aj.scan, at), trial(lax.scan, at))


def test_places_turns_and_choices_that_are_fixed() -> None:
    def make(w: Any) -> Any:
        def f(h: Any, x: Any) -> Any:
            v = jnp.tanh(x @ w[0] + h @ w[1]).at[:, 2].set(0.5).at[:, 1:3].add(h[:, :2])
            v = lax.dynamic_update_slice(v.at[:, 0].mul(0.5), h[:, :2], (0, 4))
            v = lax.fori_loop(0, 2, lambda k, v: jnp.tanh(v @ w[1]) / (k + 1), v)
            v, parts = lax.scan(lambda v, k: (v + k, v * k), v, jnp.arange(2.0), reverse=True)
            v = jnp.select([v > 0.5, v < -0.5], [v * 0.2, h], v + parts[1])
            v = lax.switch(1, [jnp.sin, jnp.tanh], lax.cond(True, jnp.cos, jnp.sin, v))
            return v, v

        return f

    check_read(Case(make, [W, U], draw(B, H), draw(T, B, I)))


CORNERS = {
    "maximum": lambda h: jnp.maximum(h, 0), "minimum": lambda h: jnp.minimum(h, 1.0),
    "both": lambda h: jnp.maximum(h, h**3), "clip": lambda h: jnp.clip(h, -1.0, 1.0),
    "clamp": lambda h: lax.clamp(-1.0, h, 1.0), "abs": jnp.abs, "relu": nn.relu,
    "relu6": lambda h: nn.relu6(h * 6), "leaky": nn.leaky_relu, "elu": nn.elu, "celu": nn.celu,
    "selu": nn.selu, "softplus": nn.softplus, "soft_sign": nn.soft_sign, "sign": jnp.sign,
    "hard_tanh": nn.hard_tanh, "hard_sigmoid": lambda h: nn.hard_sigmoid(h * 3),
    "hard_silu": nn.hard_silu, "square": jnp.square, "power": lambda h: jnp.abs(h) ** 2.5,
    "where": lambda h: jnp.where(h > 0, h, 2 * h), "softmax": lambda h: nn.softmax(h * h),
    "largest": lambda h: h * (h.max(-1, keepdims=True) + 2 * h.min(-1, keepdims=True)),
    "not finite": lambda h: jnp.where(jnp.isfinite(h), h, 0),
    "log of a sum": lambda h: jnp.logaddexp(h, h**3),
}  # fmt: skip


@pytest.mark.parametrize("part", range(4))
@pytest.mark.sample(1)
def test_derivatives_at_corners(part: int) -> None:
    """JAX gives half of the gradient to each of two equal numbers, all of it at abs(0), ..."""
    functions = dict(list(CORNERS.items())[part::4])

    def f(carry: Any, _: Any) -> Any:
        return {name: function(carry[name]) for name, function in functions.items()}, None

    start = jnp.array([[-1.0, 0.0, 1.0, 0.0, 1.0, -1.0], [0.0, 0.0, 1.0, 1.0, -1.0, -1.0]])
    init = dict.fromkeys(functions, start)
    told = aj.explain_scan(f, init, length=1)
    assert told.startswith("A fused kernel"), told

    def total(run: Any, init: Any) -> Any:
        return sum(jnp.sum(a * jnp.arange(H)) for a in run(f, init, length=1)[0].values())

    theirs, mine = (jax.grad(total, 1)(run, init) for run in (lax.scan, aj.scan))
    for name in functions:
        assert error(mine[name], theirs[name]) <= LIMITS["float32", "gradient"], name


# ---- the semantics of lax.scan -------------------------------------------------------------------
WEIGHTS = {"w": draw(I, H).astype("f"), "u": draw(H, H).astype("f")}
XS, START = draw(T, B, I).astype("f"), draw(B, H).astype("f")


def plain(weights: Any) -> Any:
    def f(h: Any, x: Any) -> Any:
        h = jnp.tanh(x @ weights["w"] + h @ weights["u"])
        return h, h

    return f


def fused_by(f: Any, *arguments: Any, **options: Any) -> bool:
    return aj.explain_scan(f, *arguments, **options).startswith("A fused kernel")


def agree(mine: Any, theirs: Any) -> None:
    assert jax.tree.structure(mine) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert getattr(a, "weak_type", False) == getattr(b, "weak_type", False)
        if jnp.issubdtype(a.dtype, jnp.floating):
            assert_close(np.atleast_1d(a), np.atleast_1d(b), str(a.dtype), "gradient")
        else:
            assert np.array_equal(a, b)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("unroll", [1, 2, True])
def test_reverse_and_unroll(reverse: bool, unroll: int) -> None:
    options = {"reverse": reverse, "unroll": unroll}
    agree(*(run(plain(WEIGHTS), START, XS, **options) for run in (aj.scan, lax.scan)))


@pytest.mark.parametrize("name", ["episodes", "padding"])
def test_conditions_in_reverse(name: str) -> None:
    at = jax.tree.map(lambda a: a.astype("f") if a.dtype == float else a, CASES[name][1:])
    f = CASES[name].make(at[0])
    assert "resets=" in aj.explain_scan(f, *at[1:]) or "mask" in aj.explain_scan(f, *at[1:])
    agree(*(run(f, *at[1:], reverse=True) for run in (aj.scan, lax.scan)))


def test_without_xs_and_with_few_steps() -> None:
    f = lambda carry, _: ((jnp.sin(carry[0] + 0.1), carry[1] + 1), carry)  # noqa: E731
    for length in (4, 1, 0):
        agree(*(run(f, (START, 0), None, length) for run in (aj.scan, lax.scan)))
    agree(*(run(plain(WEIGHTS), START, XS[:0]) for run in (aj.scan, lax.scan)))
    assert "no steps" in aj.explain_scan(plain(WEIGHTS), START, XS[:0])
    with jax.disable_jit():
        agree(*(run(plain(WEIGHTS), START, XS) for run in (aj.scan, lax.scan)))


@pytest.mark.parametrize("init", [0, 0.5, True, np.int8(1), np.arange(3), np.float16(1)])
def test_carries_that_no_cell_has(init: Any) -> None:
    f = lambda c, x: (c | (x > 0) if init is True else c + c, c)  # noqa: E731
    xs = np.arange(3.0, dtype="f")
    if np.result_type(init) != np.float16:
        assert "runs this body: test_scan.py:" in aj.explain_scan(f, init, xs)
    agree(*(run(f, init, xs) for run in (aj.scan, lax.scan)))


@pytest.mark.parametrize(
    "f, init, xs, length",
    [
        (lambda c, x: (c.astype(jnp.int32), x), START, XS, None),
        (lambda c, x: (c, c, x), START, XS, None),
        (lambda c, x: ((c, c), x), START, XS, None),
        (lambda c, x: (c, x), START, XS, 3),
        (lambda c, x: (c, x), START, None, None),
        (lambda c, x: (c @ c, x), START, XS, None),
        (lambda c, x: 1 / 0, START, XS, None),
        ("no function", START, XS, None),
        (lambda c, x: (c, x), "no array", XS, None),
        (lambda c, x: (c + 1, x) if c.sum() > 0 else (c, x), START, XS, None),
    ],
)
def test_errors_are_those_of_lax_scan(f: Any, init: Any, xs: Any, length: Any) -> None:
    with pytest.raises(Exception) as theirs:
        lax.scan(f, init, xs, length)
    with pytest.raises(theirs.type) as mine:
        aj.scan(f, init, xs, length)
    assert str(mine.value).splitlines()[0] == str(theirs.value).splitlines()[0]


def test_f_is_traced_as_often_as_by_lax_scan() -> None:
    """And read and tried once for the same f and shapes, with other arrays each time."""
    calls: list[int] = []
    counts = []

    def f(h: Any, x: Any) -> Any:
        calls.append(1)
        return plain(WEIGHTS)(h, x)

    for run in (lax.scan, aj.scan):
        run(f, START, XS)
        run(f, START + 1, XS)
        run(f, START[:2], XS[:, :2])
        counts.append(len(calls))
        jax.clear_caches()
    assert counts[1] == 2 * counts[0]
    scanning.read_body.cache_clear()
    loss = jax.jit(lambda w, x: aj.scan(plain(w), START, x)[0].sum())
    loss(WEIGHTS, XS)
    before = len(scanning._PROVED)
    jax.jit(lambda w, x: aj.scan(plain(w), START, x)[0].max())(WEIGHTS, XS)
    assert len(scanning._PROVED) == before and scanning.read_body.cache_info().misses == 2


def loss(run: Any, weights: Any, start: Any, xs: Any) -> Any:
    last, ys = run(plain(weights), start, xs)
    return jnp.sum(last) + jnp.sum(ys**2)


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize(
    "derive",
    [
        lambda f, *a: jax.grad(f, (0, 1, 2))(*a),
        lambda f, *a: jax.jvp(f, a, a),
        lambda f, *a: jax.grad(lambda *b: jnp.sum(jax.grad(f, 2)(*b) ** 2), 1)(*a),
        lambda f, *a: jax.jvp(lambda x: jax.grad(f, 2)(*a[:2], x), (a[2],), (a[2],)),
        lambda f, *a: jax.linearize(lambda x: f(*a[:2], x), a[2])[1](a[2]),
        lambda f, *a: jax.grad(jax.checkpoint(f), 0)(*a),
        lambda f, *a: jax.vmap(f, (None, None, 0))(*a[:2], jnp.stack([a[2], -a[2]])),
        lambda f, *a: jax.vmap(f, (0, None, None))(jax.tree.map(lambda w: w[None], a[0]), *a[1:]),
        lambda f, *a: jax.vmap(jax.grad(f, 1), (None, 0, None))(
            a[0], jnp.stack([a[1], -a[1]]), a[2]
        ),
        lambda f, *a: jax.lax.map(lambda x: f(*a[:2], x), jnp.stack([a[2], -a[2]])),
    ],
    ids="grad jvp second forward-over-reverse linearize checkpoint inputs weights each map".split(),
)
@pytest.mark.sample(every=4)
def test_transformations(derive: Any, jit: bool) -> None:
    with X64.enable_x64(True):
        arguments = jax.tree.map(lambda a: jnp.asarray(a, float), (WEIGHTS, START, XS))
        results = []
        for run in (aj.scan, lax.scan):
            of = lambda *a, run=run: derive(lambda *b: loss(run, *b), *a)  # noqa: E731
            results.append((jax.jit(of) if jit else of)(*arguments))
        agree(*results)


def test_scans_within_scans() -> None:
    def outer(run: Any) -> Any:
        def f(h: Any, x: Any) -> Any:
            h, ys = run(plain(WEIGHTS), h, x)
            return h, ys

        return f

    xs = jnp.stack([XS, -XS])
    agree(lax.scan(outer(aj.scan), START, xs), lax.scan(outer(lax.scan), START, xs))
    agree(aj.scan(outer(lax.scan), START, xs), lax.scan(outer(lax.scan), START, xs))
    assert "no cell has scan" in aj.explain_scan(outer(lax.scan), START, xs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.sample(1)
def test_16_bits(dtype: str) -> None:
    small = jax.tree.map(lambda a: jnp.asarray(a, dtype), (WEIGHTS, START, XS))
    assert fused_by(plain(small[0]), *small[1:])
    mine, theirs = (run(plain(small[0]), *small[1:]) for run in (aj.scan, lax.scan))
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        assert_close(a, b, dtype, "forward")


def test_shard_map_takes_the_loop() -> None:
    from jax.sharding import PartitionSpec as P

    kinds = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("rows",), axis_types=kinds)
    told = []

    def run(h: Any, x: Any) -> Any:
        told.append(aj.explain_scan(plain(WEIGHTS), h, x))
        return aj.scan(plain(WEIGHTS), h, x)[0]

    parts = {"mesh": mesh, "in_specs": (P("rows"), P(None, "rows")), "out_specs": P("rows")}
    last = jax.shard_map(run, **parts)(START, XS)
    agree(np.asarray(last), np.asarray(lax.scan(plain(WEIGHTS), START, XS)[0]))
    assert "shard_map" in told[0]


# ---- what is not read ----------------------------------------------------------------------------
@jax.custom_vjp
def spike(v: Any) -> Any:
    return (v > 0).astype(v.dtype)


spike.defvjp(lambda v: (spike(v), v), lambda v, d: (d / (1 + abs(v)),))


@jax.custom_jvp
def relu(v: Any) -> Any:
    return jnp.maximum(v, 0)


relu.defjvps(lambda d, y, v: 2 * d)
REFUSED = {
    "matrix of this product depends on a state": lambda h, x: h @ (h.T @ h),
    "takes the sum over the rows of the batch": lambda h, x: (h - h.mean(0)) @ WEIGHTS["u"],
    "no cell has while": lambda h, x: lax.fori_loop(0, x[0, 0].astype(int), lambda i, a: a + 1, h),
    "jnp.where": lambda h, x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, h),
    "custom_vjp": lambda h, x: spike(h),
    "relu has a derivative of its own": lambda h, x: relu(h),
    "picks units of a state at positions that change": lambda h, x: (
        jnp.take_along_axis(h, (x[:, :1] > 0).astype(int), 1) + h
    ),
    "this takes or changes units of a state": lambda h, x: (
        h + lax.dynamic_slice_in_dim(h, (x[0, 0] > 0) * 1, 1, 1)
    ),
    "positions that are not known": lambda h, x: h.at[:, (x[0, 0] > 0).astype(int)].set(0.0),
    "add at several positions": lambda h, x: h.at[:, jnp.arange(2) * 0].add(1.0),
    "the place of a largest number": lambda h, x: h * jnp.argmax(h, -1)[:, None],
    "of a largest number": lambda h, x: h * jnp.argmax(jnp.stack([h > 0, x[:, :1] > h]), 0),
    "a loop of few turns": lambda h, x: lax.fori_loop(0, 300, lambda k, v: jnp.sin(v), h),
    "converted from float32 to bfloat16": lambda h, x: h.astype(jnp.bfloat16).astype(jnp.float32),
    "numbers of int32 from a state": lambda h, x: (h * 3).astype(int).astype(jnp.float32),
    "without sorting": lambda h, x: jnp.sort(h),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refusals_name_the_line_and_what_to_write(reason: str) -> None:
    body = REFUSED[reason]
    f = lambda h, x: (body(h, x), None)  # noqa: E731
    told = aj.explain_scan(f, START, XS)
    assert told.startswith("jax.lax.scan runs this body: test_scan.py:"), told
    assert reason in told, told
    agree(aj.scan(f, START, XS), lax.scan(f, START, XS))


def test_effects_stay_in_the_loop(capfd: pytest.CaptureFixture[str]) -> None:
    def f(h: Any, x: Any) -> Any:
        jax.debug.print("step {}", h[0, 0])
        return jnp.sin(h), None

    told = aj.explain_scan(f, START, XS)
    assert "test_scan.py:" in told and "this step has side effects" in told
    aj.scan(f, START, XS)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("step") == T


def test_a_reading_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Say, if the table took one function for another."""
    from anycell.jax import table

    monkeypatch.setitem(table.TABLE, "sin", "cos")
    monkeypatch.setattr(scanning, "_PROVED", {})
    f = lambda h, x: (jnp.sin(h) + x.sum(), None)  # noqa: E731
    told = aj.explain_scan(f, START, XS)
    assert "the reading was tried against the step, from random states" in told
    agree(aj.scan(f, START, XS), lax.scan(f, START, XS))


def test_a_fault_of_the_reader_means_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise KeyError("a fault")

    monkeypatch.setattr(scanning, "Body", fails)
    scanning.read_body.cache_clear()
    f = lambda h, x: (jnp.cos(h), None)  # noqa: E731
    with pytest.raises(KeyError, match="a fault"):
        aj.scan(f, START, XS)
    monkeypatch.setattr(scanning, "STRICT", False)
    assert "KeyError('a fault')" in aj.explain_scan(f, START, XS)
    agree(aj.scan(f, START, XS), lax.scan(f, START, XS))


def test_what_no_kernel_runs_takes_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    from anycell.jax import read

    slow = SimpleNamespace(plan=SimpleNamespace(engine="reference", reason="it has none"))
    monkeypatch.setattr(read, "planned", lambda *_: slow)
    f = lambda h, x: (jnp.cos(h) + x.sum(), None)  # noqa: E731
    assert "no kernel runs its cell: it has none" in aj.explain_scan(f, START, XS)
    agree(aj.scan(f, START, XS), lax.scan(f, START, XS))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert "default device is of the kind gpu" in aj.explain_scan(plain(WEIGHTS), START, XS)


@pytest.mark.parametrize(
    ("steps", "rows", "units", "apart", "read"),
    [
        (1, 1, 512, False, False), (2, 1, 512, False, True), (1, 1, 511, False, True),
        (1, 2, 512, False, True), (8, 1, 512, True, False), (9, 1, 512, True, True),
        (4, 2, 512, True, False), (5, 2, 512, True, True),
    ],
)  # fmt: skip
def test_few_steps_of_few_rows_and_large_weights(
    steps: int, rows: int, units: int, apart: bool, read: bool
) -> None:
    """A kernel would have to join the weights of each gate."""
    weight = jnp.asarray(np.random.default_rng(0).normal(size=(units, units)) / 40, jnp.float32)
    parts = [weight[:, : units // 2], weight[:, units // 2 :]] if apart else [weight]

    def f(h: Any, x: Any) -> Any:
        h = jnp.tanh(x + jnp.concatenate([h @ part for part in parts], 1))
        return h, h

    xs, start = jnp.ones((steps, rows, units)), jnp.zeros((rows, units))
    said = aj.explain_scan(f, start, xs)
    assert said.startswith("A fused kernel") if read else "so few steps" in said
    agree(aj.scan(f, start, xs), lax.scan(f, start, xs))


@pytest.mark.parametrize("read", [False, True], ids=["outer products", "sums"])
def test_memories_that_only_grow_by_products_of_x(read: bool) -> None:
    """XLA computes such products where it adds them; a kernel would read them from memory."""
    weight = jnp.asarray(np.random.default_rng(0).normal(size=(16, 4)), jnp.float32)

    def f(memory: Any, x: Any) -> Any:
        keys, queries = x[:, :16], x[:, 16:32]
        new = keys @ weight if read else keys[:, :, None] * queries[:, None]
        memory = 0.9 * memory + (new[:, :, None] if read else new)
        return memory, memory.sum(1)

    xs = jnp.asarray(np.random.default_rng(1).normal(size=(7, 3, 32)), jnp.float32)
    start = jnp.zeros((3, 4, 1) if read else (3, 16, 16), jnp.float32)
    said = aj.explain_scan(f, start, xs)
    assert said.startswith("A fused kernel") if read else "XLA's loop is faster" in said
    agree(aj.scan(f, start, xs), lax.scan(f, start, xs))


@pytest.mark.parametrize("extreme", [jnp.max, pytest.param(jnp.min, marks=pytest.mark.more)])
def test_extremes_keep_their_derivative(extreme: Any) -> None:
    """XLA may compute an operand once more to compare it with the extreme, in another way; then no
    element equals it, and JAX's derivative is lost, or NaN.
    """

    def f(h: Any, x: Any) -> Any:
        less = x - jnp.mean(x, axis=-1)[..., None]
        of_x = extreme(jnp.split(less, 3, axis=-1)[2], axis=1, keepdims=True)
        of_x = jnp.where(extreme(x.astype(int), axis=-1) > -9, of_x[:, 0], 0.0)
        spread = h / jnp.sqrt(jnp.var(h, axis=-1, keepdims=True) + 0.01)
        return jnp.tanh(h + x), (of_x, extreme(spread.reshape(3, 2, 3), axis=(0, 2)))

    def total(scan: Any, h: Any, xs: Any) -> Any:
        return sum(jnp.sum(3 * y) for y in scan(f, h, xs)[1])

    def loop(f: Any, h: Any, xs: Any) -> Any:
        outputs = []
        for x in xs:
            h, y = f(h, x)
            outputs.append(y)
        return h, [jnp.stack(parts) for parts in zip(*outputs, strict=True)]

    for seed in range(3):
        h, *xs = np.random.default_rng(seed).normal(size=(6, 3, 6)).astype(np.float32)
        slopes = jax.jit(jax.grad(functools.partial(total, aj.scan), (0, 1)))(h, jnp.stack(xs))
        agree(slopes, jax.grad(functools.partial(total, loop), (0, 1))(h, jnp.stack(xs)))


def test_outputs_ask_for_no_states_that_they_do_not_need() -> None:
    """Only sequences of states that outputs read are computed."""
    carry = (START, START + 1)
    f = lambda c, x: ((jnp.sin(c[0]), jnp.tanh(c[1] + c[0])), c[1] * 2)  # noqa: E731
    text = str(jax.make_jaxpr(lambda: aj.scan(f, carry, None, 4))())
    assert text.count("anycell_layer") == 1
    agree(aj.scan(f, carry, None, 4), lax.scan(f, carry, None, 4))


PRODUCTS: dict[str, tuple[Any, bool]] = {  # of x with a weight, and whether it is transposed
    "plain": (lambda x, w: x @ w, False),
    "transposed": (lambda x, w: x @ w.T, True),
    "of each row": (lambda x, w: jax.vmap(lambda row: w @ row)(x), True),
    "gates": (lambda x, w: jnp.hstack([x @ w[:, :1], x @ -w[:, 1:]]), False),
    "permuted": (lambda x, w: (x @ w)[:, jnp.array([2, 0, 1, 5, 4, 3])], False),
    "scaled": (lambda x, w: x @ (2 * w).T / 3, True),
    "constants": (lambda x, w: x @ w + jnp.ones_like(x) @ w, False),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.sample(every=2)
def test_weights_are_read_as_they_are_stored(name: str) -> None:
    """No program transposes a weight that one matrix of the body is."""
    product, turned = PRODUCTS[name]
    weights = [jnp.asarray(draw(I, H)), jnp.asarray(draw(H, H))]
    weights = [w.T for w in weights] if turned else weights

    def f(w: Any, h: Any, x: Any) -> Any:
        h = jnp.tanh(product(x, w[0]) + product(h, w[1]))
        return h, h

    def results(scan: Any, w: Any, h: Any, x: Any) -> Any:
        loss = lambda *a: jnp.sum(jnp.sin(scan(functools.partial(f, a[0]), *a[1:])[1]))  # noqa: E731
        return jax.value_and_grad(loss, (0, 1, 2))(w, h, x)

    assert fused_by(functools.partial(f, weights), START, XS)
    ours, theirs = (jax.jit(functools.partial(results, s)) for s in (aj.scan, lax.scan))
    agree(ours(weights, START, XS), theirs(weights, START, XS))
    if name in ("plain", "transposed", "of each row"):
        program = ours.lower(weights, START, XS).compile().as_text()
        assert not re.findall(r"= f32\[\d+,\d+\]\S* (?:transpose|copy)\(", program)


# ---- Flax and Equinox ----------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["LSTMCell", "OptimizedLSTMCell", "GRUCell", "SimpleCell"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"time_major": True, "return_carry": True},
        {"reverse": True, "keep_order": True},
        {"return_carry": True, "seq_lengths": np.array([2, 5, 3])},
    ],
)
@pytest.mark.sample(every=5)
def test_cells_of_flax(kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    nnx = pytest.importorskip("flax.nnx")
    from anycell.jax.nnx import Loop

    read, taken = scanning.read_body, []
    cell = getattr(nnx, kind)(I, H, rngs=nnx.Rngs(0))
    x = jnp.swapaxes(XS, 0, 1) if not options.get("time_major") else XS
    mine, theirs = (made(cell)(x, **options) for made in (Loop, nnx.RNN))
    agree(mine, theirs)

    def total(layer: Any) -> Any:
        return sum(jnp.sum(a**2) for a in jax.tree.leaves(layer(x, **options)))

    agree(*(jax.tree.leaves(nnx.grad(total)(made(cell))) for made in (Loop, nnx.RNN)))
    monkeypatch.setattr(scanning, "read_body", lambda *body: taken.append(read(*body)) or taken[-1])
    Loop(cell)(x, **options)
    assert [isinstance(one, str) for one in taken] == [False]


def test_dropout_of_a_flax_cell_is_carried() -> None:
    nnx = pytest.importorskip("flax.nnx")
    from anycell.jax.nnx import Loop

    class Cell(nnx.SimpleCell):
        def __init__(self, rngs: Any) -> None:
            super().__init__(I, H, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, carry: Any, x: Any) -> Any:
            return super().__call__(self.dropout(carry), x)

    x = jnp.swapaxes(XS, 0, 1)
    results = []
    for made in (Loop, nnx.RNN):
        cell = Cell(nnx.Rngs(0))
        counts = nnx.state(cell, nnx.RngCount)
        results.append((made(cell)(x), made(cell)(x), counts))
    agree(*results)
    assert not np.array_equal(results[0][0], results[0][1])


def test_the_example_of_equinox() -> None:
    """A model as its documentation has it: a GRU cell in ``scan``, and a linear layer."""
    eqx = pytest.importorskip("equinox")

    class Model(eqx.Module):
        cell: Any
        linear: Any
        scan: Any = eqx.field(static=True)

        def __call__(self, x: Any) -> Any:
            h = jnp.zeros(self.cell.hidden_size)
            h, _ = self.scan(lambda h, x: (self.cell(x, h), None), h, x)
            return jax.nn.sigmoid(self.linear(h))

    def loss(run: Any) -> Any:
        keys = jax.random.split(jax.random.key(0))
        model = Model(eqx.nn.GRUCell(I, H, key=keys[0]), eqx.nn.Linear(H, 1, key=keys[1]), run)
        of = eqx.filter_value_and_grad(lambda m, x: jnp.mean(jax.vmap(m)(x)))
        value, gradients = eqx.filter_jit(of)(model, jnp.swapaxes(XS, 0, 1))
        return value, jax.tree.leaves(gradients)

    cell = eqx.nn.GRUCell(I, H, key=jax.random.key(0))
    assert fused_by(lambda h, x: (cell(x, h), None), START[0], XS[:, 0])
    agree(loss(aj.scan), loss(lax.scan))


@pytest.mark.parametrize("kind", ["GRUCell", "OptimizedLSTMCell"])
@pytest.mark.sample(1)
def test_cells_of_linen_with_resets(kind: str) -> None:
    """As agents have them: the state starts anew where an episode is over."""
    cell = getattr(pytest.importorskip("flax.linen"), kind)(features=H)
    keys = jax.random.split(jax.random.key(0))
    carry = jax.tree.map(lambda a: a + 0.5, cell.initialize_carry(keys[0], (B, I)))
    params = cell.init(keys[1], carry, XS[0])
    xs = XS, jnp.arange(T * B).reshape(T, B) % 4 == 1

    def make(params: Any) -> Any:
        def step(carry: Any, x: Any) -> Any:
            x, done = x
            clear = functools.partial(jnp.where, done[:, None])
            carry = jax.tree.map(lambda a: clear(jnp.zeros_like(a), a), carry)
            return cell.apply(params, carry, x)

        return step

    assert fused_by(make(params), carry, xs)
    compare(*(trial(run, Case(make, params, carry, xs)) for run in (aj.scan, lax.scan)))


# ---- a program -----------------------------------------------------------------------------------
def ppo(package: str) -> Any:
    """``examples/ppo_jax.py`` with ``scan`` of a package, and smaller."""
    text = (ROOT / "examples" / "ppo_jax.py").read_text(encoding="utf-8")
    assert text.count("from anycell.jax import scan\n") == 1
    text = text.replace("from anycell.jax import scan\n", f"from {package} import scan\n")
    module = ModuleType("ppo_jax")
    exec(compile(text, "ppo_jax.py", "exec"), vars(module))
    vars(module).update(ENVIRONMENTS=8, STEPS=6, UNITS=7, LAST=3)
    return module


def test_the_agent_is_read() -> None:
    """Its loss and gradients, where episodes begin within the rollout, changed by one import."""
    results = []
    for package in ("anycell.jax", "jax.lax"):
        agent = ppo(package)
        shape, rng = (agent.STEPS, agent.ENVIRONMENTS), np.random.default_rng(0)
        shapes = jax.eval_shape(agent.initialised, jax.random.key(0))
        params = {k: jnp.asarray(rng.normal(size=v.shape) / 3, "f4") for k, v in shapes.items()}
        seen, *rest = (jnp.asarray(rng.normal(size=s), "f4") for s in ((*shape, 2), *[shape] * 5))
        begins, action = (jnp.asarray(rng.random(shape) < p) for p in (0.2, 0.5))
        rollout = agent.Transition(seen, begins, action.astype(int), *rest[:3], begins)
        start = jnp.ones((agent.ENVIRONMENTS, agent.UNITS))
        derived = jax.jit(jax.value_and_grad(agent.loss))
        results.append(derived(params, start, rollout, *rest[3:]))
        step = functools.partial(agent.gru, params)
        assert fused_by(step, start, (jnp.ones((*shape, agent.UNITS)), begins))
    agree(*results)
    assert begins[1:].any()


@pytest.mark.slow
def test_the_agent_trains_as_with_lax_scan() -> None:
    """Loops of steps, epochs and minibatches around the network's, in one jitted function."""
    train = [
        jax.jit(ppo(package).train, static_argnums=1) for package in ("anycell.jax", "jax.lax")
    ]
    assert "anycell_layer" in str(train[0].trace(jax.random.key(0), 3).jaxpr)
    agree(*(run(jax.random.key(0), 3) for run in train))
