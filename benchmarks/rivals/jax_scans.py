"""Loops over time by hand, in ``lax.scan``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from anycell.bench.jax_layers import Weights, stacked
from anycell.bench.problem import Problem
from anycell.bench.tasks import Contender, Unsupported


def _lstm(w: Weights, x: Any, r: Any, h: Any, c: Any) -> Any:
    i, f, g, o = jnp.split(x + r, 4, -1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def _peephole(w: Weights, x: Any, r: Any, h: Any, c: Any) -> Any:
    i, f, g, o = jnp.split(x + r, 4, -1)
    new = jax.nn.sigmoid(f + w["p_f"] * c) * c + jax.nn.sigmoid(i + w["p_i"] * c) * jnp.tanh(g)
    return jax.nn.sigmoid(o + w["p_o"] * new) * jnp.tanh(new), new


def _gru(w: Weights, x: Any, r: Any, h: Any, c: Any) -> Any:
    (x_r, x_z, x_n), (r_r, r_z, r_n) = jnp.split(x, 3, -1), jnp.split(r, 3, -1)
    z = jax.nn.sigmoid(x_z + r_z)
    n = jnp.tanh(x_n + jax.nn.sigmoid(x_r + r_r) * r_n)
    return (1 - z) * n + z * h, c


STEPS = {
    "LSTM": _lstm, "PeepholeLSTM": _peephole, "GRU": _gru,
    "RNN": lambda w, x, r, h, c: (jnp.tanh(x + r), c),
}  # fmt: skip


def scan(problem: Problem) -> Contender:
    """``lax.scan`` over a step by hand, behind one projection of the input of all steps."""
    if problem.cell.origin not in STEPS:
        raise Unsupported(f"no step of {problem.cell.name} by hand")
    step = STEPS[problem.cell.origin]

    def direction(w: Weights, x: Any, reverse: bool) -> Any:
        hidden = w["weight_hh"].T
        zeros = jnp.zeros((x.shape[1], hidden.shape[0]), x.dtype)
        gates = x @ w["weight_ih"].T + w["bias_ih"]

        def one(states: Any, gates: Any) -> Any:
            states = step(w, gates, states[0] @ hidden + w["bias_hh"], *states)
            return states, states[0]

        return jax.lax.scan(one, (zeros, zeros), gates, reverse=reverse)[1]

    return stacked(problem, direction)
