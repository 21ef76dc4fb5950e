"""Layers of JAX on the CPU, ours and others', each in ``jax.jit``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import anycell.jax
from anycell.bench.numpy_layers import blas_threads
from anycell.bench.problem import Problem, by_direction
from anycell.bench.tasks import Array, Contender, Mode, Task, Unsupported
from anycell.machine import usable_cores

Weights = Mapping[str, Any]
Model = Callable[[Weights, Any], Any]  # the outputs for weights of torch's names, and x


def ours(problem: Problem) -> Contender:
    """``anycell.jax.RNN``."""
    shape, once = problem.shape, dict[str, Any]()
    layer = anycell.jax.RNN(problem.cell.definition, shape.I, shape.H, **problem.flags)
    if problem.static is not None:
        once["static"] = jnp.asarray(problem.static)
    contender = _contender(problem, lambda w, x: layer(w, x, **once)[0], layer.engine)
    contender.around = functools.partial(blas_threads, problem.threads)
    return contender


def flax(problem: Problem) -> Contender:
    """``nnx.RNN`` over Flax's optimized cell."""
    from flax import nnx

    if problem.cell.origin != "LSTM":
        raise Unsupported(f"Flax has no optimized {problem.cell.name}")

    def direction(w: Weights, x: Any, reverse: bool) -> Any:
        cell = nnx.OptimizedLSTMCell(w["weight_ih"].shape[1], problem.shape.H, rngs=nnx.Rngs(0))
        cell.dense_i.kernel = nnx.Param(w["weight_ih"].T)
        cell.dense_h.kernel = nnx.Param(w["weight_hh"].T)
        cell.dense_h.bias = nnx.Param(w["bias_ih"] + w["bias_hh"])
        return nnx.RNN(cell, time_major=True)(x, reverse=reverse, keep_order=True)

    return stacked(problem, direction)


def stacked(problem: Problem, direction: Callable[[Weights, Any, bool], Any]) -> Contender:
    """Layers of the problem by a function that runs one direction of one."""
    if problem.threads != usable_cores():
        raise Unsupported("XLA takes all cores")

    def model(weights: Weights, x: Any) -> Any:
        for directions in by_direction(weights, problem.shape):
            parts = [direction(w, x, bool(d)) for d, w in enumerate(directions)]
            x = jnp.concatenate(parts, -1)
        return x

    return _contender(problem, model)


def _contender(problem: Problem, model: Model, engine: Any = None) -> Contender:
    if problem.dtype != "float32":
        raise Unsupported(f"no {problem.dtype} on JAX here")
    weights = {name: jnp.asarray(value) for name, value in problem.weights.items()}
    x, dy = jnp.asarray(problem.x), jnp.asarray(problem.dy)

    def pulled(weights: Weights, x: Any, dy: Any) -> Any:
        y, pull_back = jax.vjp(model, weights, x)
        return y, pull_back(dy)

    def done(run: Callable[..., Any], *arrays: Any) -> Any:
        return jax.block_until_ready(run(*arrays))

    def arrays(results: Any) -> dict[str, Array]:
        y, (d_weights, d_x) = results
        named = {"output": y, "x": d_x, **d_weights}
        return {name: np.asarray(value) for name, value in named.items()}

    tasks: dict[Mode, Task] = {
        "inference": Task(
            functools.partial(done, jax.jit(model), weights, x),
            lambda y: {"output": np.asarray(y)},
        ),
        "training": Task(functools.partial(done, jax.jit(pulled), weights, x, dy), arrays),
    }
    return Contender(tasks, engine=engine)
