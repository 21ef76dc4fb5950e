"""Recurrent steps as people write them in JAX, for ``tests/read/test_jax.py``.

Each function draws the numbers of a program and returns ``(program, weights, init, xs)``, where
``program(scan, weights, init, xs)`` returns a tree of results. What is not in the three trees is
constant. Most programs are ``over_time`` of a step.

One file, because it is a list of cells, each of which is read by itself.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from corpus import BATCH, HIDDEN, INPUT, STEPS, Corpus, Numbers
from flax import nnx
from jax import lax

B, T, I, H = BATCH, STEPS, INPUT, HIDDEN
corpus = Corpus()
reads, either, refused = corpus.reads, corpus.either, corpus.refused


def over_time(step: Any) -> Any:
    """The program that scans ``step(weights, state, x)``."""
    return lambda scan, p, init, xs: scan(functools.partial(step, p), init, xs)


# -- LSTMs --------------------------------------------------------------------------------------
@reads
def lstm_one_matrix(n: Numbers) -> Any:
    def step(p: Any, state: Any, x: Any) -> Any:
        h, c = state
        gates = jnp.concatenate([x, h], axis=-1) @ p["w"] + p["b"]
        i, g, f, o = jnp.split(gates, 4, axis=-1)
        c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    p = {"w": n(I + H, 4 * H), "b": n(4 * H)}
    return over_time(step), p, (n(B, H), n(B, H)), n(T, B, I)


@reads
def lstm_gate_by_gate(n: Numbers) -> Any:
    """One matrix for each gate, on [h, x], from the left, as in the deep-learning course."""

    def lstm_cell_forward(p: Any, carry: Any, xt: Any) -> Any:
        a_prev, c_prev = carry
        concat = jnp.concatenate((a_prev.T, xt.T), axis=0)
        ft = jax.nn.sigmoid(jnp.dot(p["Wf"], concat) + p["bf"])
        it = jax.nn.sigmoid(jnp.dot(p["Wi"], concat) + p["bi"])
        cct = jnp.tanh(jnp.dot(p["Wc"], concat) + p["bc"])
        c_next = ft * c_prev.T + it * cct
        ot = jax.nn.sigmoid(jnp.dot(p["Wo"], concat) + p["bo"])
        a_next = (ot * jnp.tanh(c_next)).T
        logits = a_next @ p["Wy"] + p["by"]
        return (a_next, c_next.T), jax.nn.softmax(logits)

    p = {f"W{g}": n(H, H + I) for g in "fico"} | {f"b{g}": n(H, 1) for g in "fico"}
    p |= {"Wy": n(H, 2), "by": n(2)}
    return over_time(lstm_cell_forward), p, (n(B, H), n(B, H)), n(T, B, I)


@reads
def lstm_vmapped_body(n: Numbers) -> Any:
    def program(scan: Any, p: Any, init: Any, xs: Any) -> Any:
        wi, wh, b = p

        def one(hc: Any, x: Any) -> Any:
            h, c = hc
            z = wi @ x + wh @ h + b
            f, i, o, u = z[:H], z[H : 2 * H], z[2 * H : 3 * H], z[3 * H :]
            c = nn.sigmoid(f) * c + nn.sigmoid(i) * nn.tanh(u)
            return nn.sigmoid(o) * nn.tanh(c), c

        def step(hc: Any, x: Any) -> Any:
            hc = jax.vmap(one)(hc, x)
            return hc, hc[0]

        return scan(step, init, xs)

    return program, (n(4 * H, I), n(4 * H, H), n(4 * H)), (n(B, H), n(B, H)), n(T, B, I)


@reads
def lstm_vmap_outside(n: Numbers) -> Any:
    """The scan is of one sequence, and the batch comes from ``vmap`` around it."""

    def program(scan: Any, p: Any, init: Any, xs: Any) -> Any:
        def step(carry: Any, x: Any) -> Any:
            h, c = carry
            ifgo = jnp.hstack([x, h]) @ p["kernel"] + p["bias"]
            i, f, g, o = jnp.split(ifgo, 4)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        return jax.vmap(lambda s, x: scan(step, s, x))(init, xs)

    p = {"kernel": n(I + H, 4 * H), "bias": n(4 * H)}
    return program, p, (n(B, H), n(B, H)), n(B, T, I)


class LSTMState(NamedTuple):
    hidden: Any
    cell: Any


@reads
def lstm_peephole_coupled(n: Numbers) -> Any:
    """Peepholes on all gates; what is let in is what is not kept."""

    def step(p: Any, s: LSTMState, x: Any) -> Any:
        pre = jnp.einsum("bi,igh->gbh", x, p["wx"]) + jnp.einsum("bk,kgh->gbh", s.hidden, p["wh"])
        f = jax.nn.sigmoid(pre[0] + s.cell * p["peep"][0] + p["b"][0])
        z = jnp.tanh(pre[1] + p["b"][1])
        c = f * s.cell + (1.0 - f) * z
        o = jax.nn.sigmoid(pre[2] + c * p["peep"][1] + p["b"][2])
        new = LSTMState(hidden=o * jnp.tanh(c), cell=c)
        return new, new.hidden

    p = {"wx": n(I, 3, H), "wh": n(H, 3, H), "peep": n(2, H), "b": n(3, H)}
    return over_time(step), p, LSTMState(n(B, H), n(B, H)), n(T, B, I)


@reads
def lstm_projected(n: Numbers) -> Any:
    """LSTMP, whose hidden state has another size than its cell."""

    def step(p: Any, s: Any, x: Any) -> Any:
        z = (x @ p["W"] + s["r"] @ p["R"] + p["b"]).reshape(-1, 4, H)
        i, f, o, g = (z[:, k] for k in range(4))
        c = jax.nn.sigmoid(f) * s["c"] + jax.nn.sigmoid(i) * jnp.tanh(g)
        r = (jax.nn.sigmoid(o) * jnp.tanh(c)) @ p["P"]
        return {"r": r, "c": c}, r

    p = {"W": n(I, 4 * H), "R": n(3, 4 * H), "b": n(4 * H), "P": n(H, 3)}
    return over_time(step), p, {"r": n(B, 3), "c": n(B, H)}, n(T, B, I)


@reads
def lstm_layer_norm(n: Numbers) -> Any:
    """Layer normalisation by hand, of the projections apart and of the cell."""

    def norm(v: Any, gain: Any, bias: Any) -> Any:
        mean = jnp.mean(v, axis=-1, keepdims=True)
        var = jnp.mean(jnp.square(v - mean), axis=-1, keepdims=True)
        return gain * (v - mean) * lax.rsqrt(var + 1e-5) + bias

    def step(p: Any, state: Any, x: Any) -> Any:
        h, c = state
        z = norm(x @ p["wx"], *p["nx"]) + norm(h @ p["wh"], *p["nh"])
        i, j, f, o = jnp.split(z, 4, 1)
        c = c * jax.nn.sigmoid(f + 1.0) + jax.nn.sigmoid(i) * jnp.tanh(j)
        h = jnp.tanh(norm(c, *p["nc"])) * jax.nn.sigmoid(o)
        return (h, c), h

    p = {"wx": n(I, 4 * H), "wh": n(H, 4 * H)}
    p |= {"nx": (n(4 * H), n(4 * H)), "nh": (n(4 * H), n(4 * H)), "nc": (n(H), n(H))}
    return over_time(step), p, (n(B, H), n(B, H)), n(T, B, I)


@reads
def lstm_multiplicative(n: Numbers) -> Any:
    def step(p: Any, state: Any, x: Any) -> Any:
        c, h = state
        m = (x @ p["wmx"]) * (h @ p["wmh"])
        z = x @ p["wx"] + m @ p["wh"] + p["b"]
        i, f, o, u = jnp.array_split(z, 4, axis=1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(u)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (c, h), h

    p = {"wmx": n(I, H), "wmh": n(H, H), "wx": n(I, 4 * H), "wh": n(H, 4 * H), "b": n(4 * H)}
    return over_time(step), p, (n(B, H), n(B, H)), n(T, B, I)


@reads
def lstm_time_aware(n: Numbers) -> Any:
    """T-LSTM: the short-term part of the cell fades with the time since the last event."""

    def step(p: Any, state: Any, inp: Any) -> Any:
        x, dt = inp
        h, c = state
        short = jnp.tanh(c @ p["wd"] + p["bd"])
        decay = 1.0 / jnp.log(math.e + dt)
        c = (c - short) + short * decay[:, None]
        z = x @ p["w"] + h @ p["u"] + p["b"]
        f, i, o, g = (z[..., k * H : (k + 1) * H] for k in range(4))
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    p = {"wd": n(H, H), "bd": n(H), "w": n(I, 4 * H), "u": n(H, 4 * H), "b": n(4 * H)}
    return over_time(step), p, (n(B, H), n(B, H)), (n(T, B, I), n.positive(T, B))


@reads
def lstm_phased(n: Numbers) -> Any:
    """Phased LSTM: a rhythmic gate opens the state, driven by a time stamp."""

    ratio, leak = 0.3, 0.01

    def step(p: Any, state: Any, inp: Any) -> Any:
        x, t = inp
        h, c = state
        phi = jnp.mod(t - p["shift"], p["tau"]) / p["tau"]
        k = jnp.where(phi < ratio / 2, 2 * phi / ratio, leak * phi)
        k = jnp.where((phi >= ratio / 2) & (phi < ratio), 2 - 2 * phi / ratio, k)
        z = jnp.concatenate([x, h], 1) @ p["w"] + p["b"]
        i, f, o, g = jnp.split(z, 4, axis=1)
        new_c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        c = k * new_c + (1 - k) * c
        new_h = jax.nn.sigmoid(o) * jnp.tanh(new_c)
        h = k * new_h + (1 - k) * h
        return (h, c), h

    p = {"w": n(I + H, 4 * H), "b": n(4 * H), "tau": n.positive(H) + 1, "shift": n.positive(H)}
    times = np.cumsum(n.positive(T, B, 1), axis=0)
    return over_time(step), p, (n(B, H), n(B, H)), (n(T, B, I), times)


@reads
def lstm_two_stacked_residual(n: Numbers) -> Any:
    """Two cells in one step, the second around a residual connection, and a readout."""

    def cell(p: Any, state: Any, x: Any) -> Any:
        h, c = state
        i, f, g, o = jnp.split(jnp.dot(x, p["ih"]) + jnp.dot(h, p["hh"]) + p["b"], 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * jnp.tanh(c), c

    def step(params: Any, states: Any, x: Any) -> Any:
        out, new = x, []
        for p, state in zip(params["layers"], states, strict=True):
            state = cell(p, state, out)
            new.append(state)
            out = out + state[0] if out.shape == state[0].shape else state[0]
        return tuple(new), out @ params["head"]

    layers = [{"ih": n(k, 4 * H), "hh": n(H, 4 * H), "b": n(4 * H)} for k in (I, H)]
    init = ((n(B, H), n(B, H)), (n(B, H), n(B, H)))
    return over_time(step), {"layers": layers, "head": n(H, 2)}, init, n(T, B, I)


@reads
def slstm_heads(n: Numbers) -> Any:
    """sLSTM of xLSTM: exponential gates with a stabiliser, and a matrix for each head."""
    heads, size = 2, H // 2

    def step(p: Any, carry: Any, x: Any) -> Any:
        c, nrm, h, m = carry
        rec = jnp.einsum("bnd,nde->bne", h.reshape(B, heads, size), p["r"])
        rec = rec.reshape(B, heads, 4, size).transpose(0, 2, 1, 3).reshape(B, 4 * H)
        zt, it, ft, ot = jnp.split(x @ p["w"] + rec + p["b"], 4, axis=-1)
        logf = jax.nn.log_sigmoid(ft)
        new_m = jnp.maximum(logf + m, it)
        i = jnp.exp(it - new_m)
        f = jnp.exp(logf + m - new_m)
        c = f * c + i * jnp.tanh(zt)
        nrm = f * nrm + i
        h = jax.nn.sigmoid(ot) * c / nrm
        return (c, nrm, h, new_m), h

    p = {"w": n(I, 4 * H), "r": n(heads, size, 4 * size), "b": n(4 * H)}
    return over_time(step), p, (n(B, H), n.positive(B, H), n(B, H), n(B, H)), n(T, B, I)


@reads
def nas_cell(n: Numbers) -> Any:
    def step(p: Any, carry: Any, x: Any) -> Any:
        h, c = carry
        a = jnp.split(h @ p["wh"] + p["b"], 8, axis=-1)
        u = jnp.split(x @ p["wx"], 8, axis=-1)
        s, t, r = jax.nn.sigmoid, jnp.tanh, jax.nn.relu
        l1 = [s(u[0] + a[0]), r(u[1] + a[1]), s(u[2] + a[2]), r(u[3] * a[3])]
        l1 += [t(u[4] + a[4]), s(u[5] + a[5]), t(u[6] + a[6]), s(u[7] + a[7])]
        l2 = [t(l1[0] * l1[1]), t(l1[2] + l1[3]), t(l1[4] * l1[5]), s(l1[6] + l1[7])]
        l2[0] = t(l2[0] + c)
        c = l2[0] * l2[1]
        h = t(c * t(l2[2] + l2[3]))
        return (h, c), h

    p = {"wh": n(H, 8 * H), "wx": n(I, 8 * H), "b": n(8 * H)}
    return over_time(step), p, (n(B, H), n(B, H)), n(T, B, I)


@reads
def lstm_refine_gate(n: Numbers) -> Any:
    """UR-LSTM: a second gate bends the forget gate."""

    def step(p: Any, carry: Any, x: Any) -> Any:
        h, c = carry
        f, r, u, o = jnp.split(jnp.concatenate([x, h], -1) @ p["w"], 4, axis=-1)
        f = jax.nn.sigmoid(f + p["fb"])
        r = jax.nn.sigmoid(r - p["fb"])
        g = 2 * r * f + (1 - 2 * r) * f**2
        c = g * c + (1 - g) * jnp.tanh(u)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    return over_time(step), {"w": n(I + H, 4 * H), "fb": n(H)}, (n(B, H), n(B, H)), n(T, B, I)


@either
def on_lstm(n: Numbers) -> Any:
    """Ordered neurons: gates that are cumulated softmaxes."""

    def cumax(v: Any) -> Any:
        return jnp.cumsum(jax.nn.softmax(v, axis=-1), axis=-1)

    def step(p: Any, carry: Any, x: Any) -> Any:
        h, c = carry
        z = x @ p["w"] + h @ p["u"] + p["b"]
        mf, mi, f, i, o, g = jnp.split(z, 6, axis=-1)
        mf, mi = cumax(mf), 1 - cumax(mi)
        overlap = mf * mi
        f = jax.nn.sigmoid(f) * overlap + (mf - overlap)
        i = jax.nn.sigmoid(i) * overlap + (mi - overlap)
        c = f * c + i * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    p = {"w": n(I, 6 * H), "u": n(H, 6 * H), "b": n(6 * H)}
    return over_time(step), p, (n(B, H), n(B, H)), n(T, B, I)


# -- GRUs ---------------------------------------------------------------------------------------
@reads
def gru_textbook(n: Numbers) -> Any:
    def step(params: Any, H_: Any, X: Any) -> Any:
        W_xz, W_hz, b_z, W_xr, W_hr, b_r, W_xh, W_hh, b_h = params
        Z = jax.nn.sigmoid(jnp.matmul(X, W_xz) + jnp.matmul(H_, W_hz) + b_z)
        R = jax.nn.sigmoid(jnp.matmul(X, W_xr) + jnp.matmul(H_, W_hr) + b_r)
        tilde = jnp.tanh(jnp.matmul(X, W_xh) + jnp.matmul(R * H_, W_hh) + b_h)
        H_ = Z * H_ + (1 - Z) * tilde
        return H_, H_

    p = [a for _ in range(3) for a in (n(I, H), n(H, H), n(H))]
    return over_time(step), p, n(B, H), n(T, B, I)


@reads
def gru_reset_after(n: Numbers) -> Any:
    """As cuDNN computes it: two biases, the reset gate behind the product; gates by reshape."""

    def step(p: Any, h: Any, x: Any) -> Any:
        gi = (x @ p["w_ih"].T + p["b_ih"]).reshape(x.shape[0], 3, H)
        gh = (h @ p["w_hh"].T + p["b_hh"]).reshape(h.shape[0], 3, H)
        rz = jax.nn.sigmoid(gi[:, :2] + gh[:, :2])
        r, z = rz[:, 0], rz[:, 1]
        new = jnp.tanh(gi[:, 2] + r * gh[:, 2])
        h = new + z * (h - new)
        return h, h

    p = {"w_ih": n(3 * H, I), "w_hh": n(3 * H, H), "b_ih": n(3 * H), "b_hh": n(3 * H)}
    return over_time(step), p, n(B, H), n(T, B, I)


@reads
def gru_einsum_gates(n: Numbers) -> Any:
    def step(p: Any, h: Any, x: Any) -> Any:
        xp = jnp.einsum("...i,ghi->...gh", x, p["x"]) + p["b"]
        zr = jax.nn.sigmoid(xp[..., :2, :] + jnp.einsum("...k,ghk->...gh", h, p["zr"]))
        z, r = jnp.moveaxis(zr, -2, 0)
        a = jnp.tanh(xp[..., 2, :] + jnp.einsum("...k,hk->...h", r * h, p["a"]))
        h = (1 - z) * h + z * a
        return h, jnp.sum(h, axis=-1)

    p = {"x": n(3, H, I), "b": n(3, H), "zr": n(2, H, H), "a": n(H, H)}
    return over_time(step), p, n(B, H), n(T, B, I)


@reads
def gru_resets_of_episodes(n: Numbers) -> Any:
    """The recurrent part of a policy: the state starts anew where an episode is done."""

    def unroll(p: Any, h: Any, step: Any) -> Any:
        obs, done = step
        h = jnp.where(done[:, None], jnp.zeros_like(h), h)
        e = jax.nn.relu(obs @ p["embed"] + p["be"])
        z, r, a_x = jnp.split(e @ p["wi"] + p["bi"], 3, axis=1)
        hz, hr, ha = jnp.split(h @ p["wh"], 3, axis=1)
        z, r = jax.nn.sigmoid(z + hz), jax.nn.sigmoid(r + hr)
        h = (1 - z) * jnp.tanh(a_x + r * ha) + z * h
        actor = jax.nn.relu(h @ p["a1"]) @ p["a2"]
        critic = jax.nn.relu(h @ p["c1"]) @ p["c2"]
        return h, (jax.nn.log_softmax(actor), jnp.squeeze(critic, axis=-1))

    p = {"embed": n(I, 7), "be": n(7), "wi": n(7, 3 * H), "bi": n(3 * H), "wh": n(H, 3 * H)}
    p |= {"a1": n(H, 4), "a2": n(4, 2), "c1": n(H, 4), "c2": n(4, 1)}
    return over_time(unroll), p, n(B, H), (n(T, B, I), n.flags(T, B))


@reads
def gru_reset_to_learned(n: Numbers) -> Any:
    """A reset to a state that is learned, by a float flag."""

    def step(p: Any, h: Any, inp: Any) -> Any:
        x, first = inp
        h = first[:, None] * p["h0"] + (1.0 - first[:, None]) * h
        z, r = jnp.split(jax.nn.sigmoid(jnp.concatenate([h, x], -1) @ p["w"]), 2, -1)
        n_ = jnp.tanh(jnp.concatenate([r * h, x], -1) @ p["wn"])
        h = z * h + (1 - z) * n_
        return h, h

    p = {"h0": n(H), "w": n(H + I, 2 * H), "wn": n(H + I, H)}
    return over_time(step), p, n(B, H), (n(T, B, I), n.flags(T, B).astype(float))


@reads
def gru_lengths(n: Numbers) -> Any:
    """Rows of several lengths: a state stays where its row is over, and outputs are zero there."""

    def program(scan: Any, p: Any, init: Any, xs: Any) -> Any:
        x, lengths = xs
        steps = jnp.arange(x.shape[0])

        def step(h: Any, inp: Any) -> Any:
            x, t = inp
            xz, xr, xn = jnp.split(x @ p["wx"] + p["b"], 3, axis=-1)
            hz, hr, hn = jnp.split(h @ p["wh"], 3, axis=-1)
            z, r = jax.nn.sigmoid(xz + hz), jax.nn.sigmoid(xr + hr)
            new = (1 - z) * jnp.tanh(xn + r * hn) + z * h
            alive = (t < lengths)[:, None]
            return jnp.where(alive, new, h), jnp.where(alive, new, 0.0)

        return scan(step, init, (x, steps))

    p = {"wx": n(I, 3 * H), "wh": n(H, 3 * H), "b": n(3 * H)}
    return program, p, n(B, H), (n(T, B, I), np.array([4, 1, 3], np.int32))


@reads
def gru_d(n: Numbers) -> Any:
    """GRU-D: missing values decay from the last one towards the mean, and the state decays too."""

    def step(p: Any, carry: Any, inp: Any) -> Any:
        h, last = carry
        x, m, d = inp
        gx = jnp.exp(-jnp.maximum(0.0, d * p["wgx"] + p["bgx"]))
        gh = jnp.exp(-jnp.maximum(0.0, d @ p["wgh"] + p["bgh"]))
        last = m * x + (1 - m) * last
        xh = m * x + (1 - m) * (gx * last + (1 - gx) * p["mean"])
        h = gh * h
        v = jnp.concatenate([xh, h, m], axis=1)
        z = jax.nn.sigmoid(v @ p["wz"])
        r = jax.nn.sigmoid(v @ p["wr"])
        c = jnp.tanh(jnp.concatenate([xh, r * h, m], axis=1) @ p["wc"])
        h = (1 - z) * h + z * c
        return (h, last), h

    k = I + H + I
    p = {"wgx": n(I), "bgx": n(I), "wgh": n(I, H), "bgh": n(H), "mean": n(I)}
    p |= {"wz": n(k, H), "wr": n(k, H), "wc": n(k, H)}
    xs = (n(T, B, I), n.flags(T, B, I).astype(float), n.positive(T, B, I))
    return over_time(step), p, (n(B, H), n(B, I)), xs


@reads
def gru_minimal(n: Numbers) -> Any:
    """The minimal gated unit, with clipped lines in place of sigmoids."""

    def hard(v: Any) -> Any:
        return jnp.clip(0.2 * v + 0.5, 0.0, 1.0)

    def step(p: Any, h: Any, x: Any) -> Any:
        f = hard(x @ p["wf"] + h @ p["uf"] + p["bf"])
        g = jnp.tanh(x @ p["wh"] + (f * h) @ p["uh"] + p["bh"])
        h = (1 - f) * h + f * g
        return h, h

    p = {"wf": n(I, H), "uf": n(H, H), "bf": n(H), "wh": n(I, H), "uh": n(H, H), "bh": n(H)}
    return over_time(step), p, n(B, H), n(T, B, I)


@reads
def gru_fast(n: Numbers) -> Any:
    """FastGRNN: one product for gate and candidate, low-rank, with two scalars learned."""

    def program(scan: Any, p: Any, init: Any, xs: Any) -> Any:
        w, u = p["w1"] @ p["w2"], p["u1"] @ p["u2"]

        def step(h: Any, x: Any) -> Any:
            pre = x @ w + h @ u
            z = jax.nn.sigmoid(pre + p["bz"])
            g = jnp.tanh(pre + p["bg"])
            zeta, nu = jax.nn.sigmoid(p["zeta"]), jax.nn.sigmoid(p["nu"])
            h = (zeta * (1 - z) + nu) * g + z * h
            return h, h

        return scan(step, init, xs)

    p = {"w1": n(I, 2), "w2": n(2, H), "u1": n(H, 2), "u2": n(2, H)}
    p |= {"bz": n(H), "bg": n(H), "zeta": n(), "nu": n()}
    return program, p, n(B, H), n(T, B, I)


# -- Simple and continuous-time networks --------------------------------------------------------
@reads
def elman_softmax(n: Numbers) -> Any:
    def step(p: Any, h: Any, x: Any) -> Any:
        h = jax.nn.relu(jnp.dot(x, p["Wx"]) + jnp.dot(h, p["Wh"]) + p["bh"])
        return h, jax.nn.softmax(jnp.dot(h, p["Wy"]) + p["by"], axis=-1)

    p = {"Wx": n(I, H), "Wh": n(H, H), "bh": n(H), "Wy": n(H, 3), "by": n(3)}
    return over_time(step), p, n(B, H), n(T, B, I)


@reads
def jordan(n: Numbers) -> Any:
    """What is fed back is the output."""

    def step(p: Any, y: Any, x: Any) -> Any:
        h = jnp.tanh(jnp.concatenate([x, y], axis=1) @ p["w"] + p["b"])
        y = jax.nn.sigmoid(h @ p["v"] + p["c"])
        return y, (y, h)

    p = {"w": n(I + 2, H), "b": n(H), "v": n(H, 2), "c": n(2)}
    return over_time(step), p, n(B, 2), n(T, B, I)


@reads
def echo_state(n: Numbers) -> Any:
    """A leaky reservoir whose weights are constants; only the readout is learned."""
    w_in, w = n(I, 7), n(7, 7)
    w = w * (0.9 / np.abs(np.linalg.eigvals(w)).max())

    leak = 0.3

    def step(p: Any, s: Any, u: Any) -> Any:
        s = (1 - leak) * s + leak * jnp.tanh(u @ w_in + s @ w)
        return s, jnp.concatenate([u, s], axis=-1) @ p

    return over_time(step), n(I + 7, 2), n(B, 7), n(T, B, I)


@reads
def clockwork(n: Numbers) -> Any:
    """Units of three clocks; an integer in the carry counts the steps."""
    periods = np.repeat(np.array([1, 2, 4]), H // 3)

    def program(scan: Any, p: Any, init: Any, xs: Any) -> Any:
        block = jnp.asarray(periods[:, None] >= periods[None, :], jnp.float64)

        def step(carry: Any, x: Any) -> Any:
            t, h = carry
            new = jnp.tanh(x @ p["wi"] + h @ (p["wh"] * block) + p["b"])
            h = jnp.where(t % periods == 0, new, h)
            return (t + 1, h), h

        return scan(step, (jnp.int32(0), init), xs)

    return program, {"wi": n(I, H), "wh": n(H, H), "b": n(H)}, n(B, H), n(T, B, I)


@reads
def ct_rnn(n: Numbers) -> Any:
    """Continuous time, Euler's method with four steps inside of each."""

    def program(scan: Any, p: Any, init: Any, xs: Any) -> Any:
        tau = jax.nn.softplus(p["tau"]) + 1.0

        def step(h: Any, x: Any) -> Any:
            for _ in range(4):
                dh = (-h + jnp.tanh(h @ p["w"] + x @ p["u"] + p["b"])) / tau
                h = h + 0.25 * dh
            return h, h

        return scan(step, init, xs)

    return program, {"w": n(H, H), "u": n(I, H), "b": n(H), "tau": n(H)}, n(B, H), n(T, B, I)


@reads
def liquid_time_constant(n: Numbers) -> Any:
    """The fused solver of liquid time-constant networks, with one matrix of synapses."""

    def step(p: Any, v: Any, inp: Any) -> Any:
        x, elapsed = inp
        dt = elapsed[:, None] / 3
        for _ in range(3):
            f = jax.nn.sigmoid(x @ p["wx"] + v @ p["wh"] + p["b"])
            v = (v + dt * f * p["A"]) / (1.0 + dt * (jnp.exp(p["log_inv_tau"]) + f))
        return v, v

    p = {"wx": n(I, H), "wh": n(H, H), "b": n(H), "A": n(H), "log_inv_tau": n(H)}
    return over_time(step), p, n(B, H), (n(T, B, I), n.positive(T, B))


@either
def liquid_synapses(n: Numbers) -> Any:
    """As its authors have it: a sigmoid for each pair of neurons."""

    def step(p: Any, v: Any, x: Any) -> Any:
        act = p["w"] * jax.nn.sigmoid(p["sigma"] * (v[:, :, None] - p["mu"]))
        num, den = jnp.sum(act * p["erev"], axis=1), jnp.sum(act, axis=1)
        v = (p["cm"] * v + p["leak"] + num + x @ p["win"]) / (p["cm"] + 1.0 + den)
        return v, v

    p = {"w": n.positive(H, H), "sigma": n(H, H), "mu": n(H, H), "erev": n(H, H)}
    p |= {"cm": n.positive(H), "leak": n(H), "win": n(I, H)}
    return over_time(step), p, n(B, H), n(T, B, I)


@reads
def ode_runge_kutta(n: Numbers) -> Any:
    """The classic method of Runge and Kutta for a field with two layers; a jitted helper."""

    def program(scan: Any, p: Any, init: Any, xs: Any) -> Any:
        @jax.jit
        def field(y: Any, u: Any) -> Any:
            return jnp.tanh(jnp.concatenate([y, u], -1) @ p["w1"] + p["b1"]) @ p["w2"]

        def step(y: Any, u: Any) -> Any:
            dt = 0.1
            k1 = field(y, u)
            k2 = field(y + dt / 2 * k1, u)
            k3 = field(y + dt / 2 * k2, u)
            k4 = field(y + dt * k3, u)
            y = y + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            return y, y

        return scan(step, init, xs)

    p = {"w1": n(3 + I, H), "b1": n(H), "w2": n(H, 3)}
    return program, p, n(B, 3), n(T, B, I)


@either
def inner_fori_loop(n: Numbers) -> Any:
    def step(p: Any, h: Any, x: Any) -> Any:
        drive = x @ p["u"]
        h = lax.fori_loop(0, 3, lambda k, h: h + 0.1 * (jnp.tanh(h @ p["w"] + drive) - h), h)
        return h, h

    return over_time(step), {"w": n(H, H), "u": n(I, H)}, n(B, H), n(T, B, I)


@reads
def recurrent_highway(n: Numbers) -> Any:
    """A recurrent highway network of depth three; x enters at the first layer only."""

    def step(p: Any, s: Any, x: Any) -> Any:
        for layer, (w, b) in enumerate(p["r"]):
            z = s @ w + b
            if layer == 0:
                z = z + x @ p["w"]
            h, t = jnp.split(z, 2, axis=-1)
            h, t = jnp.tanh(h), jax.nn.sigmoid(t)
            s = h * t + s * (1 - t)
        return s, s

    p = {"w": n(I, 2 * H), "r": [(n(H, 2 * H), n(2 * H)) for _ in range(3)]}
    return over_time(step), p, n(B, H), n(T, B, I)


@reads
def antisymmetric(n: Numbers) -> Any:
    def program(scan: Any, p: Any, init: Any, xs: Any) -> Any:
        w, v, b, vz, bz = p
        m = jnp.triu(w, 1) - jnp.triu(w, 1).T - 0.01 * jnp.eye(H)

        def step(h: Any, x: Any) -> Any:
            mh = h @ m
            h = h + 0.1 * jax.nn.sigmoid(mh + x @ vz + bz) * jnp.tanh(mh + x @ v + b)
            return h, h

        return scan(step, init, xs)

    return program, (n(H, H), n(I, H), n(H), n(I, H), n(H)), n(B, H), n(T, B, I)


@reads
def oscillators(n: Numbers) -> Any:
    """coRNN: positions and velocities of driven oscillators."""

    dt, gamma, eps = 0.05, 2.7, 4.7

    def step(p: Any, state: Any, x: Any) -> Any:
        y, z = state["y"], state["z"]
        inner = jnp.concatenate([x, y, z], axis=1) @ p["w"] + p["b"]
        z = z + dt * (jnp.tanh(inner) - gamma * y - eps * z)
        y = y + dt * z
        return {"y": y, "z": z}, y

    p = {"w": n(I + 2 * H, H), "b": n(H)}
    return over_time(step), p, {"y": n(B, H), "z": n(B, H)}, n(T, B, I)


@reads
def orthogonal_by_cayley(n: Numbers) -> Any:
    """The recurrent matrix is a function of what is learned, and is made within the step."""

    def step(p: Any, h: Any, x: Any) -> Any:
        a = p["a"] - p["a"].T
        q = jnp.linalg.solve(jnp.eye(H) + a, jnp.eye(H) - a)
        z = h @ q + x @ p["u"]
        h = jnp.sign(z) * jax.nn.relu(jnp.abs(z) + p["b"])
        return h, h

    return over_time(step), {"a": n(H, H), "u": n(I, H), "b": n(H)}, n(B, H), n(T, B, I)


@reads
def weight_norm(n: Numbers) -> Any:
    def normed(v: Any, g: Any) -> Any:
        return g * v / jnp.linalg.norm(v, axis=0)

    def step(p: Any, h: Any, x: Any) -> Any:
        h = jnp.tanh(x @ normed(*p["x"]) + h @ normed(*p["h"]) + p["b"])
        return h, h

    p = {"x": (n(I, H), n(H)), "h": (n(H, H), n(H)), "b": n(H)}
    return over_time(step), p, n(B, H), n(T, B, I)


@reads
def independent_units(n: Numbers) -> Any:
    """IndRNN: a vector in place of the recurrent matrix."""

    def program(scan: Any, p: Any, init: Any, xs: Any) -> Any:
        step = lambda h, x: (jax.nn.relu(x @ p["w"] + p["u"] * h + p["b"]),) * 2  # noqa: E731
        return scan(step, init, xs)

    return program, {"w": n(I, H), "u": n(H), "b": n(H)}, n(B, H), n(T, B, I)


@reads
def multiplicative_integration(n: Numbers) -> Any:
    def step(p: Any, h: Any, x: Any) -> Any:
        wx, uh = x @ p["w"], h @ p["u"]
        h = jnp.tanh(p["alpha"] * wx * uh + p["b1"] * uh + p["b2"] * wx + p["b"])
        return h, h

    p = {"w": n(I, H), "u": n(H, H)} | {k: n(H) for k in ("alpha", "b1", "b2", "b")}
    return over_time(step), p, n(B, H), n(T, B, I)


@reads
def legendre_memory(n: Numbers) -> Any:
    """LMU: a fixed linear memory of what is written into it, one number a step, and a state."""
    order = 4
    q = np.arange(order)
    i, j = np.meshgrid(q, q, indexing="ij")
    a_bar = np.eye(order) + 0.2 * np.where(i < j, -1, (-1.0) ** (i - j + 1)) * (2 * q[:, None] + 1)
    b_bar = 0.2 * (2 * q + 1) * (-1.0) ** q

    def step(p: Any, carry: Any, x: Any) -> Any:
        h, m = carry
        u = x @ p["ex"] + h @ p["eh"] + m @ p["em"]
        m = m @ a_bar.T + u[:, None] * b_bar
        h = jnp.tanh(x @ p["wx"] + h @ p["wh"] + m @ p["wm"])
        return (h, m), h

    p = {"ex": n(I), "eh": n(H), "em": n(order)}
    p |= {"wx": n(I, H), "wh": n(H, H), "wm": n(order, H)}
    return over_time(step), p, (n(B, H), n(B, order)), n(T, B, I)


# -- Networks without a recurrent matrix --------------------------------------------------------
@reads
def simple_recurrent_unit(n: Numbers) -> Any:
    def step(p: Any, c: Any, x: Any) -> Any:
        u, f, r = jnp.split(x @ p["w"], 3, axis=-1)
        f = jax.nn.sigmoid(f + p["vf"] * c + p["bf"])
        r = jax.nn.sigmoid(r + p["vr"] * c + p["br"])
        c = f * c + (1 - f) * u
        return c, r * c + (1 - r) * x

    p = {"w": n(H, 3 * H)} | {k: n(H) for k in ("vf", "vr", "bf", "br")}
    return over_time(step), p, n(B, H), n(T, B, H)


@reads
def quasi_recurrent(n: Numbers) -> Any:
    """QRNN: gates are convolutions over two steps, so that the last input is a state."""

    def step(p: Any, carry: Any, x: Any) -> Any:
        prev, c = carry
        both = jnp.stack([prev, x], axis=1)
        z, f, o = jnp.split(jnp.einsum("bki,kio->bo", both, p["w"]) + p["b"], 3, axis=-1)
        f = jax.nn.sigmoid(f)
        c = f * c + (1 - f) * jnp.tanh(z)
        return (x, c), jax.nn.sigmoid(o) * c

    return over_time(step), {"w": n(2, I, 3 * H), "b": n(3 * H)}, (n(B, I), n(B, H)), n(T, B, I)


@reads
def min_lstm(n: Numbers) -> Any:
    def step(p: Any, h: Any, x: Any) -> Any:
        f = jax.nn.sigmoid(x @ p["wf"])
        i = jax.nn.sigmoid(x @ p["wi"])
        total = f + i
        h = (f / total) * h + (i / total) * (x @ p["wh"])
        return h, h

    return over_time(step), {k: n(I, H) for k in ("wf", "wi", "wh")}, n(B, H), n(T, B, I)


@reads
def delay_line(n: Numbers) -> Any:
    """The last three inputs, as a buffer that is shifted, and a network on all of it."""

    def step(p: Any, carry: Any, x: Any) -> Any:
        buffer, h = carry
        buffer = jnp.concatenate([buffer[:, 1:], x[:, None, :]], axis=1)
        h = jnp.tanh(buffer.reshape(B, -1) @ p["w"] + h @ p["u"])
        return (buffer, h), h

    return over_time(step), {"w": n(3 * I, H), "u": n(H, H)}, (n(B, 3, I), n(B, H)), n(T, B, I)


@reads
def exponential_average(n: Numbers) -> Any:
    """A scalar for each row: a running mean and variance that scale what comes in."""

    def program(scan: Any, p: Any, init: Any, xs: Any) -> Any:
        rate = jax.nn.sigmoid(p["rate"])

        def step(carry: Any, x: Any) -> Any:
            mean, var, h = carry
            level = jnp.mean(x, axis=-1)
            mean = rate * mean + (1 - rate) * level
            var = rate * var + (1 - rate) * (level - mean) ** 2
            z = (x - mean[:, None]) / jnp.sqrt(var + 1e-3)[:, None]
            h = jnp.tanh(z @ p["w"] + h @ p["u"])
            return (mean, var, h), h

        return scan(step, init, xs)

    p = {"rate": n(), "w": n(I, H), "u": n(H, H)}
    return program, p, (n(B), n.positive(B), n(B, H)), n(T, B, I)


# -- Dropout, noise, keys -----------------------------------------------------------------------
@reads
def dropout_variational(n: Numbers) -> Any:
    """One mask of x and one of h for all steps, drawn outside."""
    keep_x, keep_h = n.flags(B, I, likely=0.7) / 0.7, n.flags(B, H, likely=0.7) / 0.7

    def step(p: Any, carry: Any, x: Any) -> Any:
        h, c = carry
        gates = (x * keep_x) @ p["w"] + (h * keep_h) @ p["u"] + p["b"]
        i, f, g, o = jnp.split(gates, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    p = {"w": n(I, 4 * H), "u": n(H, 4 * H), "b": n(4 * H)}
    return over_time(step), p, (n(B, H), n(B, H)), n(T, B, I)


@reads
def dropout_key_in_carry(n: Numbers) -> Any:
    """A key in the carry is split at each step; the mask falls on what is fed back."""

    def program(scan: Any, p: Any, init: Any, xs: Any) -> Any:
        def step(carry: Any, x: Any) -> Any:
            key, h = carry
            key, sub = jax.random.split(key)
            kept = jax.random.bernoulli(sub, 0.8, h.shape)
            dropped = jnp.where(kept, h / 0.8, 0)
            h = jnp.tanh(x @ p["w"] + dropped @ p["u"])
            return (key, h), h

        (_, last), ys = scan(step, (jax.random.key(7), init), xs)
        return last, ys

    return program, {"w": n(I, H), "u": n(H, H)}, n(B, H), n(T, B, I)


@reads
def zoneout_keys_as_inputs(n: Numbers) -> Any:
    def program(scan: Any, p: Any, init: Any, xs: Any) -> Any:
        keys = jax.random.split(jax.random.PRNGKey(3), T)

        def step(h: Any, inp: Any) -> Any:
            x, key = inp
            z, g = jnp.split(jnp.concatenate([x, h], -1) @ p["w"] + p["b"], 2, -1)
            new = h + jax.nn.sigmoid(z) * (jnp.tanh(g) - h)
            stay = jax.random.uniform(key, h.shape) < 0.2
            h = jnp.where(stay, h, new)
            return h, h

        return scan(step, init, (xs, keys))

    return program, {"w": n(I + H, 2 * H), "b": n(2 * H)}, n(B, H), n(T, B, I)


@reads
def noise_of_a_folded_key(n: Numbers) -> Any:
    """Noise on the state: its key comes from the number of the step."""

    def program(scan: Any, p: Any, init: Any, xs: Any) -> Any:
        root = jax.random.key(11)

        def step(carry: Any, x: Any) -> Any:
            t, h = carry
            noise = jax.random.normal(jax.random.fold_in(root, t), h.shape)
            h = 0.9 * h + 0.1 * jnp.tanh(x @ p["w"] + h @ p["u"]) + 0.05 * p["sigma"] * noise
            return (t + 1, h), h

        return scan(step, (0, init), xs)

    return program, {"w": n(I, H), "u": n(H, H), "sigma": n(H)}, n(B, H), n(T, B, I)


# -- Shapes and trees ---------------------------------------------------------------------------
@reads
def embedding_of_tokens(n: Numbers) -> Any:
    def step(p: Any, h: Any, token: Any) -> Any:
        h = jnp.tanh(p["table"][token] @ p["w"] + h @ p["u"] + p["b"])
        return h, h @ p["table"].T

    p = {"table": n(9, H), "w": n(H, H), "u": n(H, H), "b": n(H)}
    return over_time(step), p, n(B, H), n.integers(T, B, below=9)


@reads
def one_hot_characters(n: Numbers) -> Any:
    def step(p: Any, h: Any, char: Any) -> Any:
        x = jax.nn.one_hot(char, 7, dtype=h.dtype)
        h = jnp.tanh(x @ p["Wxh"] + h @ p["Whh"] + p["bh"])
        return h, h @ p["Why"] + p["by"]

    p = {"Wxh": n(7, H), "Whh": n(H, H), "bh": n(H), "Why": n(H, 7), "by": n(7)}
    return over_time(step), p, n(B, H), n.integers(T, B, below=7)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["fast", "slow"], meta_fields=["name"]
)
@dataclasses.dataclass
class TwoSpeeds:
    fast: Any
    slow: Any
    name: str = "two"


@reads
def nested_states(n: Numbers) -> Any:
    """A tree of states: dataclass, dictionary and list, of three sizes."""

    def step(p: Any, s: TwoSpeeds, x: Any) -> Any:
        fast = jnp.tanh(x @ p["xf"] + s.fast["h"] @ p["ff"] + s.slow[0] @ p["sf"])
        trace = 0.5 * s.fast["trace"] + fast[:, :2]
        slow = 0.9 * s.slow[0] + 0.1 * jnp.tanh(jnp.concatenate([fast, trace], 1) @ p["fs"])
        return TwoSpeeds({"h": fast, "trace": trace}, [slow]), {"fast": fast, "slow": slow}

    p = {"xf": n(I, H), "ff": n(H, H), "sf": n(3, H), "fs": n(H + 2, 3)}
    return over_time(step), p, TwoSpeeds({"h": n(B, H), "trace": n(B, 2)}, [n(B, 3)]), n(T, B, I)


@reads
def states_as_one_array(n: Numbers) -> Any:
    """[h, c] stacked in one array [2, B, H], as some keep them."""

    def step(p: Any, hc: Any, x: Any) -> Any:
        h, c = hc
        i, f, o, g = jnp.moveaxis((x @ p["w"] + h @ p["u"]).reshape(B, H, 4), -1, 0)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return jnp.stack([h, c]), h

    return over_time(step), {"w": n(I, 4 * H), "u": n(H, 4 * H)}, n(2, B, H), n(T, B, I)


@reads
def features_first(n: Numbers) -> Any:
    """States and inputs are columns: [H, B]."""

    def step(p: Any, h: Any, x: Any) -> Any:
        h = jnp.tanh(p["w"] @ jnp.vstack((h, x)) + p["b"][:, None])
        return h, p["v"] @ h

    return over_time(step), {"w": n(H, H + I), "b": n(H), "v": n(2, H)}, n(H, B), n(T, I, B)


@reads
def agents_and_batch(n: Numbers) -> Any:
    """Two axes in front of the features: batch and agents, which share weights."""

    def step(p: Any, h: Any, x: Any) -> Any:
        h = jnp.tanh(x @ p["w"] + h @ p["u"] + p["b"])
        return h, h

    return over_time(step), {"w": n(I, H), "u": n(H, H), "b": n(H)}, n(B, 2, H), n(T, B, 2, I)


@reads
def bidirectional(n: Numbers) -> Any:
    def program(scan: Any, p: Any, init: Any, xs: Any) -> Any:
        def run(p: Any, h0: Any, reverse: bool) -> Any:
            def step(h: Any, x: Any) -> Any:
                z, g = jnp.split(x @ p["w"] + h @ p["u"], 2, axis=-1)
                z = jax.nn.sigmoid(z)
                h = z * h + (1 - z) * jnp.tanh(g)
                return h, h

            return scan(step, h0, xs, reverse=reverse)

        (last_f, ys_f), (last_b, ys_b) = run(p[0], init[0], False), run(p[1], init[1], True)
        return jnp.concatenate([ys_f, ys_b], axis=-1), last_f + last_b

    p = [{"w": n(I, 2 * H), "u": n(H, 2 * H)} for _ in range(2)]
    return program, p, (n(B, H), n(B, H)), n(T, B, I)


@reads
def decoder_without_inputs(n: Numbers) -> Any:
    """No xs but a length: the output of a step is the input of the next."""

    def program(scan: Any, p: Any, init: Any, xs: Any) -> Any:
        def step(carry: Any, _: Any) -> Any:
            h, y = carry
            h = jnp.tanh(y @ p["w"] + h @ p["u"])
            y = h @ p["v"]
            return (h, y), y

        return scan(step, init, None, length=T)

    return program, {"w": n(2, H), "u": n(H, H), "v": n(H, 2)}, (n(B, H), n(B, 2)), ()


@reads
def teacher_forcing(n: Numbers) -> Any:
    """The true last output or the predicted one enters, as a flag for each step says."""

    def step(p: Any, carry: Any, inp: Any) -> Any:
        h, guess = carry
        truth, forced = inp
        y = jnp.where(forced, truth, guess)
        h = jnp.tanh(jnp.concatenate([y, h], axis=-1) @ p["w"])
        guess = h @ p["v"] + p["c"]
        return (h, guess), guess

    p = {"w": n(2 + H, H), "v": n(H, 2), "c": n(2)}
    return over_time(step), p, (n(B, H), n(B, 2)), (n(T, B, 2), n.flags(T))


@reads
def codebook_readout(n: Numbers) -> Any:
    """Attention over slots that are weights: products and a softmax, no memory that changes."""

    def step(p: Any, h: Any, x: Any) -> Any:
        scores = jax.nn.softmax((h @ p["q"]) @ p["keys"].T / np.sqrt(4), axis=-1)
        read = scores @ p["values"]
        h = jnp.tanh(x @ p["w"] + h @ p["u"] + read)
        return h, (h, scores)

    p = {"q": n(H, 4), "keys": n(5, 4), "values": n(5, H), "w": n(I, H), "u": n(H, H)}
    return over_time(step), p, n(B, H), n(T, B, I)


@reads
def context_of_each_row(n: Numbers) -> Any:
    """What a row is about enters each step and never changes: one array for each row."""

    def step(p: Any, h: Any, x: Any) -> Any:
        z = jax.nn.sigmoid(x @ p["wz"] + h @ p["uz"])
        g = jnp.tanh(x @ p["wg"] + h @ p["ug"] + p["context"])
        h = z * h + (1 - z) * g
        return h, h

    p = {k: n(I, H) for k in ("wz", "wg")} | {k: n(H, H) for k in ("uz", "ug")}
    return over_time(step), p | {"context": n(B, H)}, n(B, H), n(T, B, I)


@either
def attention_over_encoder(n: Numbers) -> Any:
    """A decoder that attends with additive scores to outputs of an encoder, which stay."""

    def step(p: Any, h: Any, x: Any) -> Any:
        energy = jnp.tanh(p["encoded"] @ p["we"] + (h @ p["wd"])[:, None, :]) @ p["v"]
        context = jnp.einsum("bs,bsk->bk", jax.nn.softmax(energy, axis=-1), p["encoded"])
        h = jnp.tanh(jnp.concatenate([x, context], axis=-1) @ p["w"] + h @ p["u"])
        return h, h

    p = {"encoded": n(B, 5, 3), "we": n(3, 4), "wd": n(H, 4), "v": n(4)}
    return over_time(step), p | {"w": n(I + 3, H), "u": n(H, H)}, n(B, H), n(T, B, I)


@reads
def carry_through(n: Numbers) -> Any:
    """Weights and what never changes ride in the carry, as some write it."""

    def program(scan: Any, p: Any, init: Any, xs: Any) -> Any:
        def step(carry: Any, x: Any) -> Any:
            params, h = carry
            h = jax.nn.gelu(x @ params["w"] + h @ params["u"] + params["b"])
            return (params, h), h

        (_, last), ys = scan(step, (p, init), xs)
        return last, ys

    return program, {"w": n(I, H), "u": n(H, H), "b": n(H)}, n(B, H), n(T, B, I)


@reads
def deep_transition(n: Numbers) -> Any:
    """A transition of two layers, with silu, layer norm by jax.nn and elu."""

    def step(p: Any, h: Any, x: Any) -> Any:
        a = jax.nn.silu(jnp.concatenate([h, x], axis=-1) @ p["w1"] + p["b1"])
        a = jax.nn.standardize(a, axis=-1, epsilon=1e-6)
        h = h + jax.nn.elu(a @ p["w2"])
        return h, h

    return over_time(step), {"w1": n(H + I, 7), "b1": n(7), "w2": n(7, H)}, n(B, H), n(T, B, I)


@reads
def trees_of_updates(n: Numbers) -> Any:
    """The new state by ``tree_map`` over a tree, and auxiliary sums of it."""

    def step(p: Any, state: Any, x: Any) -> Any:
        keep = jax.tree.map(lambda s, a: jax.nn.sigmoid(a) * s, state, p["a"])
        push = jax.tree.map(lambda w: x @ w, p["w"])
        state = jax.tree.map(jnp.add, keep, push)
        return state, sum(jnp.sum(s**2, axis=-1) for s in jax.tree.leaves(state))

    p = {"a": {"l": n(3), "r": n(H)}, "w": {"l": n(I, 3), "r": n(I, H)}}
    return over_time(step), p, {"l": n(B, 3), "r": n(B, H)}, n(T, B, I)


@either
def loss_in_carry(n: Numbers) -> Any:
    """A running loss over the batch, in the carry beside the state."""

    def program(scan: Any, p: Any, init: Any, xs: Any) -> Any:
        def step(carry: Any, inp: Any) -> Any:
            h, loss = carry
            x, y = inp
            h = jnp.tanh(x @ p["w"] + h @ p["u"])
            loss = loss + jnp.mean((h @ p["v"] - y) ** 2)
            return (h, loss), None

        return scan(step, (init, jnp.zeros(())), xs)

    p = {"w": n(I, H), "u": n(H, H), "v": n(H, 2)}
    return program, p, n(B, H), (n(T, B, I), n(T, B, 2))


# -- Libraries ----------------------------------------------------------------------------------
def _flax(n: Numbers, cell: nn.Module, state: Any) -> Any:
    shapes = jax.eval_shape(cell.init, jax.random.key(0), state, np.zeros((B, I)))
    weights = jax.tree.map(lambda leaf: n(*leaf.shape), shapes)

    def program(scan: Any, p: Any, init: Any, xs: Any) -> Any:
        return scan(lambda carry, x: cell.apply(p, carry, x), init, xs)

    return program, weights, state, n(T, B, I)


@reads
def flax_lstm(n: Numbers) -> Any:
    return _flax(n, nn.LSTMCell(H, param_dtype=float), (n(B, H), n(B, H)))


@reads
def flax_optimized_lstm(n: Numbers) -> Any:
    return _flax(n, nn.OptimizedLSTMCell(H, param_dtype=float), (n(B, H), n(B, H)))


@reads
def flax_gru(n: Numbers) -> Any:
    return _flax(n, nn.GRUCell(H, param_dtype=float), n(B, H))


@reads
def flax_mgu(n: Numbers) -> Any:
    return _flax(n, nn.MGUCell(H, param_dtype=float), n(B, H))


class NormedGRU(nn.Module):
    """A cell of one's own, of layers of Flax."""

    features: int

    @nn.compact
    def __call__(self, h: Any, x: Any) -> Any:
        both = jnp.concatenate([x, h], axis=-1)
        gates = nn.Dense(2 * self.features, param_dtype=float, name="gates")(both)
        gates = nn.LayerNorm(param_dtype=float)(gates)
        z, r = jnp.split(nn.sigmoid(gates), 2, axis=-1)
        both = jnp.concatenate([x, r * h], axis=-1)
        g = nn.Dense(self.features, use_bias=False, param_dtype=float)(both)
        g = nn.RMSNorm(param_dtype=float)(g)
        h = (1 - z) * h + z * nn.tanh(g)
        return h, nn.Dense(2, param_dtype=float)(h)


@reads
def flax_own_cell(n: Numbers) -> Any:
    return _flax(n, NormedGRU(H), n(B, H))


def _nnx(n: Numbers, cell: Any, init: Any) -> Any:
    graph, state = nnx.split(cell)
    weights = jax.tree.map(lambda leaf: n(*leaf.shape), nnx.to_pure_dict(state))

    def program(scan: Any, p: Any, init: Any, xs: Any) -> Any:
        nnx.replace_by_pure_dict(state, p)
        model = nnx.merge(graph, state)
        return scan(lambda carry, x: model(carry, x), init, xs)

    return program, weights, init, n(T, B, I)


class Leaky(nnx.Module):
    """A leaky cell of NNX with two layers and a readout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inp = nnx.Linear(I, H, param_dtype=float, rngs=rngs)
        self.rec = nnx.Linear(H, H, use_bias=False, param_dtype=float, rngs=rngs)
        self.norm = nnx.LayerNorm(H, param_dtype=float, rngs=rngs)
        self.leak = nnx.Param(jnp.zeros(H, float))
        self.out = nnx.Linear(H, 2, param_dtype=float, rngs=rngs)

    def __call__(self, h: Any, x: Any) -> Any:
        a = nnx.sigmoid(self.leak[...])
        h = a * h + (1 - a) * nnx.tanh(self.norm(self.inp(x) + self.rec(h)))
        return h, self.out(h)


@reads
def nnx_own_cell(n: Numbers) -> Any:
    return _nnx(n, Leaky(nnx.Rngs(0)), n(B, H))


@reads
def nnx_gru(n: Numbers) -> Any:
    return _nnx(n, nnx.GRUCell(I, H, param_dtype=float, rngs=nnx.Rngs(0)), n(B, H))


@reads
def nnx_lstm(n: Numbers) -> Any:
    cell = nnx.OptimizedLSTMCell(I, H, param_dtype=float, rngs=nnx.Rngs(0))
    return _nnx(n, cell, (n(B, H), n(B, H)))


def _equinox(n: Numbers, cell: Any) -> tuple[Any, Any]:
    """The arrays of a module, drawn anew, and the rest of it."""
    arrays, rest = eqx.partition(cell, eqx.is_array)
    return jax.tree.map(lambda leaf: n(*leaf.shape), arrays), rest


@reads
def equinox_gru(n: Numbers) -> Any:
    weights, rest = _equinox(n, eqx.nn.GRUCell(I, H, key=jax.random.key(0)))

    def program(scan: Any, p: Any, init: Any, xs: Any) -> Any:
        cell = eqx.combine(p, rest)

        def step(h: Any, x: Any) -> Any:
            h = jax.vmap(cell)(x, h)
            return h, h

        return scan(step, init, xs)

    return program, weights, n(B, H), n(T, B, I)


@reads
def equinox_lstm_of_one_sequence(n: Numbers) -> Any:
    """The documented example of a network for one sequence, under a ``vmap`` for the batch."""
    weights, rest = _equinox(n, eqx.nn.LSTMCell(I, H, key=jax.random.key(0)))
    weights = {"cell": weights, "head": n(H)}

    def program(scan: Any, p: Any, init: Any, xs: Any) -> Any:
        cell = eqx.combine(p["cell"], rest)

        def model(x: Any, state: Any) -> Any:
            (h, _), _ = scan(lambda s, x: (cell(x, s), None), state, x)
            return jax.nn.sigmoid(h @ p["head"])

        return jax.vmap(model)(xs, init)

    return program, weights, (n(B, H), n(B, H)), n(B, T, I)


class Gated(eqx.Module):
    """A cell of one's own of Equinox, for one row."""

    kernel: Any
    norm: Any
    scale: Any
    depth: int = eqx.field(static=True)

    def __call__(self, h: Any, x: Any) -> Any:
        for _ in range(self.depth):
            a, b = jnp.split(self.kernel(jnp.concatenate([x, h])), 2)
            h = self.norm(h + self.scale * jax.nn.sigmoid(a) * jnp.tanh(b))
        return h, jnp.max(jnp.abs(h))


@reads
def equinox_own_cell(n: Numbers) -> Any:
    kernel = eqx.nn.Linear(I + H, 2 * H, key=jax.random.key(0))
    cell = Gated(kernel, eqx.nn.LayerNorm(H), jnp.ones(()), 2)
    weights, rest = _equinox(n, cell)

    def program(scan: Any, p: Any, init: Any, xs: Any) -> Any:
        cell = eqx.combine(p, rest)
        return scan(lambda h, x: jax.vmap(cell)(h, x), init, xs)

    return program, weights, n(B, H), n(T, B, I)


# -- What cannot be read ------------------------------------------------------------------------
@refused()
def turing_memory(n: Numbers) -> Any:
    """Content addressing of a memory that is a state."""

    def step(p: Any, carry: Any, x: Any) -> Any:
        h, memory = carry
        key = h @ p["k"]
        w = jax.nn.softmax(jnp.einsum("bms,bs->bm", memory, key))
        read = jnp.einsum("bm,bms->bs", w, memory)
        h = jnp.tanh(jnp.concatenate([x, read, h], axis=-1) @ p["w"])
        memory = memory * (1 - 0.1 * w[..., None]) + w[..., None] * (h @ p["a"])[:, None]
        return (h, memory), h

    p = {"k": n(H, 3), "w": n(I + 3 + H, H), "a": n(H, 3)}
    return over_time(step), p, (n(B, H), n(B, 4, 3)), n(T, B, I)


@refused()
def fast_weights(n: Numbers) -> Any:
    """The recurrent matrix is a state, a sum of outer products."""

    def step(p: Any, carry: Any, x: Any) -> Any:
        h, a = carry
        z = x @ p["w"] + h @ p["u"]
        h = jnp.tanh(z + jnp.einsum("bij,bj->bi", a, jnp.tanh(z)))
        a = 0.9 * a + 0.5 * h[:, :, None] * h[:, None, :]
        return (h, a), h

    return over_time(step), {"w": n(I, H), "u": n(H, H)}, (n(B, H), n(B, H, H)), n(T, B, I)


@refused()
def attention_over_history(n: Numbers) -> Any:
    """All hidden states so far lie in the carry, and each step attends to them."""

    def program(scan: Any, p: Any, init: Any, xs: Any) -> Any:
        def step(carry: Any, x: Any) -> Any:
            t, past, h = carry
            scores = jnp.einsum("tbh,bh->bt", past, h @ p["q"])
            scores = jnp.where(jnp.arange(T) < t, scores, -1e9)
            context = jnp.einsum("bt,tbh->bh", jax.nn.softmax(scores), past)
            h = jnp.tanh(x @ p["w"] + context @ p["u"])
            past = lax.dynamic_update_index_in_dim(past, h, t, 0)
            return (t + 1, past, h), h

        return scan(step, (0, jnp.zeros((T, B, H)), init), xs)

    return program, {"q": n(H, H), "w": n(I, H), "u": n(H, H)}, n(B, H), n(T, B, I)


@refused("cond|rows")
def branch_on_data(n: Numbers) -> Any:
    def step(p: Any, h: Any, x: Any) -> Any:
        new = jnp.tanh(x @ p["w"] + h @ p["u"])
        h = lax.cond(jnp.sum(new) > 0, lambda v: v * 0.5, lambda v: v - p["b"], new)
        return h, h

    return over_time(step), {"w": n(I, H), "u": n(H, H), "b": n(H)}, n(B, H), n(T, B, I)


@refused("while")
def loop_until_settled(n: Numbers) -> Any:
    """A fixed point by a loop of unknown length; its derivative is not asked for."""

    def step(p: Any, h: Any, x: Any) -> Any:
        drive = lax.stop_gradient(x @ p["w"])
        u = lax.stop_gradient(p["u"])

        def body(s: Any) -> Any:
            return s[0] + 1, jnp.tanh(drive + 0.1 * s[1] @ u)

        start = (0, lax.stop_gradient(h))
        _, settled = lax.while_loop(lambda s: jnp.sum(s[1]) < s[0], body, start)
        h = 0.5 * h + jnp.tanh(x @ p["w"]) * settled
        return h, h

    return over_time(step), {"w": n(I, H), "u": n(H, H)}, n(B, H), n(T, B, I)


@refused()
def batch_norm(n: Numbers) -> Any:
    """Statistics over the batch: rows mix."""

    def step(p: Any, h: Any, x: Any) -> Any:
        z = h @ p["u"]
        z = p["g"] * (z - z.mean(0)) / jnp.sqrt(z.var(0) + 1e-5)
        h = jnp.tanh(x @ p["w"] + z)
        return h, h

    return over_time(step), {"w": n(I, H), "u": n(H, H), "g": n(H)}, n(B, H), n(T, B, I)


@jax.custom_vjp
def spike(v: Any) -> Any:
    return (v > 0).astype(v.dtype)


spike.defvjp(lambda v: (spike(v), v), lambda v, g: (g / (1 + 10 * jnp.abs(v)) ** 2,))


@refused("custom_vjp|derivative")
def spiking(n: Numbers) -> Any:
    """Leaky integrate-and-fire neurons with a surrogate gradient."""

    def step(p: Any, carry: Any, x: Any) -> Any:
        v, s = carry
        v = 0.9 * v * (1 - s) + x @ p["w"] + s @ p["u"]
        s = spike(v - 0.3)
        return (v, s), s

    return over_time(step), {"w": n(I, H), "u": n(H, H)}, (n(B, H), np.zeros((B, H))), n(T, B, I)


@jax.custom_jvp
def scaled_tanh(v: Any) -> Any:
    return 1.7159 * jnp.tanh(v)


@scaled_tanh.defjvp
def _(primals: Any, tangents: Any) -> Any:
    y = scaled_tanh(primals[0])
    return y, tangents[0] * jnp.clip(1 - y * y, 0.1, 1.0)


@refused("custom_jvp|derivative")
def own_derivative(n: Numbers) -> Any:
    def step(p: Any, h: Any, x: Any) -> Any:
        h = scaled_tanh(x @ p["w"] + h @ p["u"])
        return h, h

    return over_time(step), {"w": n(I, H), "u": n(H, H)}, n(B, H), n(T, B, I)


@refused("sort|top_k")
def winners_take_all(n: Numbers) -> Any:
    """Only the two largest units stay."""

    def step(p: Any, h: Any, x: Any) -> Any:
        z = jnp.tanh(x @ p["w"] + h @ p["u"])
        least = lax.top_k(z, 2)[0][:, -1:]
        h = jnp.where(z >= least, z, 0.0)
        return h, h

    return over_time(step), {"w": n(I, H), "u": n(H, H)}, n(B, H), n(T, B, I)


@refused("sort")
def sorted_state(n: Numbers) -> Any:
    def step(p: Any, h: Any, x: Any) -> Any:
        h = jnp.tanh(x @ p["w"] + jnp.sort(h, axis=-1) @ p["u"])
        return h, h

    return over_time(step), {"w": n(I, H), "u": n(H, H)}, n(B, H), n(T, B, I)


@refused("float16|bits|cast")
def half_inside(n: Numbers) -> Any:
    def step(p: Any, h: Any, x: Any) -> Any:
        z = (x @ p["w"] + h @ p["u"]).astype(jnp.float16)
        h = jnp.tanh(z).astype(h.dtype)
        return h, h

    return over_time(step), {"w": n(I, H), "u": n(H, H)}, n(B, H), n(T, B, I)


@refused()
def greedy_decoder(n: Numbers) -> Any:
    """The likeliest token goes back in, through a table."""

    def program(scan: Any, p: Any, init: Any, xs: Any) -> Any:
        def step(carry: Any, _: Any) -> Any:
            h, token = carry
            h = jnp.tanh(p["table"][token] + h @ p["u"])
            logits = h @ p["v"]
            return (h, jnp.argmax(logits, -1)), logits

        return scan(step, (init, jnp.zeros(B, int)), None, length=T)

    return program, {"table": n(7, H), "u": n(H, H), "v": n(H, 7)}, n(B, H), ()


@refused("fft.* Instead: a product")
def by_fourier(n: Numbers) -> Any:
    """A convolution as a product of transforms, which are complex."""

    def step(p: Any, h: Any, x: Any) -> Any:
        turned = jnp.fft.irfft(jnp.fft.rfft(h) * jnp.fft.rfft(p["kernel"]), n=H)
        h = jnp.tanh(x @ p["w"] + turned)
        return h, h

    return over_time(step), {"w": n(I, H), "kernel": n(H)}, n(B, H), n(T, B, I)


@refused("complex")
def linear_recurrent_unit(n: Numbers) -> Any:
    """LRU: a complex diagonal."""

    def program(scan: Any, p: Any, init: Any, xs: Any) -> Any:
        lam = jnp.exp(-jnp.exp(p["nu"]) + 1j * jnp.exp(p["theta"]))

        def step(s: Any, x: Any) -> Any:
            s = lam * s + (x @ p["b"]).astype(s.dtype)
            return s, (s @ p["c"].astype(s.dtype)).real

        last, ys = scan(step, init.astype(complex), xs)
        return last.real, ys

    p = {"nu": n(H), "theta": n(H), "b": n(I, H), "c": n(H, 2)}
    return program, p, n(B, H), n(T, B, I)


@refused()
def printed(n: Numbers) -> Any:
    """A side effect in each step, which must happen."""

    def step(p: Any, h: Any, x: Any) -> Any:
        h = jnp.tanh(x @ p["w"] + h @ p["u"])
        jax.debug.callback(lambda v: None, h)
        return h, h

    return over_time(step), {"w": n(I, H), "u": n(H, H)}, n(B, H), n(T, B, I)


@refused()
def kalman_filter(n: Numbers) -> Any:
    """A covariance in the state, and its inverse in each step."""

    def step(p: Any, carry: Any, z: Any) -> Any:
        m, cov = carry
        m, cov = p["F"] @ m, p["F"] @ cov @ p["F"].T + 0.1 * jnp.eye(2)
        s = p["H"] @ cov @ p["H"].T + 0.2 * jnp.eye(3)
        gain = jnp.linalg.solve(s, p["H"] @ cov).T
        m = m + gain @ (z - p["H"] @ m)
        cov = cov - gain @ p["H"] @ cov
        return (m, cov), m

    return over_time(step), {"F": n(2, 2), "H": n(3, 2)}, (n(2), np.eye(2)), n(T, 3)
