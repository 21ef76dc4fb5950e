"""``anycell.jax.scan``: bodies read as cells, or ``jax.lax.scan`` with a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from tolerances import assert_close

jax = pytest.importorskip("jax")
jnp, nn, lax = jax.numpy, jax.nn, jax.lax

import anycell.jax as aj  # noqa: E402
from anycell.jax import fused, scanning  # noqa: E402

X64 = jax if hasattr(jax, "enable_x64") else jax.experimental
T, B, I, H = 5, 3, 4, 6
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
@pytest.mark.sample(every=3)
def test_cells_of_many_styles(name: str) -> None:
    with X64.enable_x64(True):
        at = jax.tree.map(jnp.asarray, CASES[name]._replace(make=0))._replace(make=CASES[name].make)
        told = aj.explain_scan(at.make(at.weights), at.init, at.xs)
        assert told.startswith("A fused kernel runs this body."), told
        compare(trial(aj.scan, at), trial(lax.scan, at))


CORNERS = {
    "maximum": lambda h: jnp.maximum(h, 0), "minimum": lambda h: jnp.minimum(h, 1.0),
    "both": lambda h: jnp.maximum(h, h**3), "clip": lambda h: jnp.clip(h, -1.0, 1.0),
    "clamp": lambda h: lax.clamp(-1.0, h, 1.0), "abs": jnp.abs, "relu": nn.relu,
    "relu6": lambda h: nn.relu6(h * 6), "leaky": nn.leaky_relu, "elu": nn.elu, "celu": nn.celu,
    "selu": nn.selu, "softplus": nn.softplus, "soft_sign": nn.soft_sign, "sign": jnp.sign,
    "hard_tanh": nn.hard_tanh, "hard_sigmoid": lambda h: nn.hard_sigmoid(h * 3),
    "hard_silu": nn.hard_silu, "square": jnp.square, "power": lambda h: jnp.abs(h) ** 2.5,
    "where": lambda h: jnp.where(h > 0, h, 2 * h), "largest": lambda h: h * h.max(-1, keepdims=True),
    "softmax": lambda h: nn.softmax(h * h), "not finite": lambda h: jnp.where(jnp.isfinite(h), h, 0),
}  # fmt: skip


def test_derivatives_at_corners() -> None:
    """JAX gives half of the gradient to each of two equal numbers, all of it at abs(0), ..."""

    def f(h: Any, _: Any) -> Any:
        return sum((k + 1) * function(h) for k, function in enumerate(CORNERS.values())), None

    start = jnp.array([[-1.0, 0.0, 1.0, 0.0, 1.0, -1.0], [0.0, 0.0, 1.0, 1.0, -1.0, -1.0]])
    assert aj.explain_scan(f, start, length=1).startswith("A fused kernel")

    def gradient(run: Any, function: Any) -> Any:
        return jax.grad(lambda h: jnp.sum(run(lambda h, _: (function(h), None), h, length=1)[0]))

    for name, function in CORNERS.items():
        theirs = gradient(lax.scan, function)(start)
        mine = gradient(aj.scan, function)(start)
        assert np.allclose(mine, theirs, rtol=1e-5, atol=1e-6), name
