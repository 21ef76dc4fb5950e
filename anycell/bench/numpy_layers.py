"""Our layers without a framework, and our primitive."""

from __future__ import annotations

import functools
import importlib.util
from contextlib import nullcontext
from typing import Any

import anycell
from anycell.bench.problem import Problem, by_direction
from anycell.bench.tasks import Array, Contender, Mode, Task, Unsupported
from anycell.numpy.check import numpy_dtype
from anycell.usage import need


def blas_threads(threads: int) -> Any:
    """A context in which NumPy's BLAS has this many threads; without the package threadpoolctl,
    which only contenders on NumPy need, as many as it has.
    """
    if importlib.util.find_spec("threadpoolctl") is None:
        return nullcontext()
    module: Any = need("threadpoolctl", "the benchmark")
    return module.threadpool_limits(limits=threads, user_api="blas")


def ours(problem: Problem) -> Contender:
    """Our layer without a framework; in 16 bits it also trains in 16 bits."""
    cell, shape = problem.cell.definition, problem.shape
    if cell.keeps:
        raise Unsupported(f"{problem.cell.name} draws random masks, here from NumPy's generator")
    dtype = problem.types.storage.name
    layer = anycell.numpy.RNN(
        cell, shape.I, shape.H, dtype=dtype, seed=problem.seed, **problem.flags
    )
    layer.set_parameters(problem.weights)
    if problem.types.quantized:
        layer = anycell.compress.quantize(layer)
    x, dy = (array.astype(layer.dtype) for array in (problem.x, problem.dy))
    static = None if problem.static is None else problem.static.astype(layer.dtype)

    def train() -> dict[str, Array]:
        output, _ = layer.forward(x, static=static, training=True)
        return {"output": output, "x": layer.backward(dy)[0]}

    tasks: dict[Mode, Task] = {"inference": Task(lambda: layer.forward(x, static=static)[0])}
    if not problem.types.quantized:
        tasks["training"] = Task(train, lambda kept: {**kept, **layer.grads})
    return Contender(tasks, functools.partial(blas_threads, problem.threads), layer.engine)


def recurrence(problem: Problem, dtype: str | None = None, engine: str | None = None) -> Task:
    """The primitive alone: one direction of the first layer, with its input already projected."""
    kind, wide = numpy_dtype(dtype or problem.dtype), dtype or problem.wide
    first = by_direction(problem.weights, problem.shape)[0][0]
    w = {name: value.astype(wide) for name, value in first.items()}
    x = problem.x.astype(wide)
    gates = (x @ w["weight_ih"].T + w.get("bias_ih", x.dtype.type(0))).astype(kind)
    cell, w = problem.cell.definition, {name: value.astype(kind) for name, value in w.items()}
    weights = {name: value for name, value in w.items() if name in ("weight_hh", "bias_hh")}
    params = {name: w[name] for name in cell.param_names}
    return Task(lambda: anycell.recurrence(cell, gates, weights, None, params, engine=engine)[0])
