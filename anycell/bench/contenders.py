"""Who runs. Each contender gets the same problem and gives back arrays under the same names.

A contender is built once per problem and then asked for two *tasks*, inference and training. A task has
``prepare`` (not timed: gradients set to None), ``call`` (timed) and ``results`` (for the gate).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from anycell.bench.errors import Unsupported, need
from anycell.bench.problem import Problem

Array = npt.NDArray[np.floating]
Mode = Literal["inference", "training"]


@dataclass
class Task:
    """Something to run: unprepared by default."""

    call: Callable[[], object]
    results: Callable[[], dict[str, Array]]
    prepare: Callable[[], object] = lambda: None


@dataclass
class Contender:
    """A layer that is ready to run; `around` holds the settings that its calls need, such as threads."""

    inference: Task
    training: Task | None = None
    around: Callable[[], AbstractContextManager[object]] = nullcontext

    def task(self, mode: Mode) -> Task:
        task = self.inference if mode == "inference" else self.training
        if task is None:
            raise Unsupported(f"no {mode}")
        return task


# -- contenders on torch tensors ----------------------------------------------------------------------


def from_module(module: Any, problem: Problem, dtype: str | None = None) -> Contender:
    """Any ``module(x)`` that gives the output, or a tuple that starts with it, as ``torch.nn`` does."""
    import torch

    kind = getattr(torch, dtype or problem.dtype)
    module = module.to(kind)
    x = torch.from_numpy(problem.x).to(kind)
    dy = torch.from_numpy(problem.dy).to(kind)
    leaf = x.clone().requires_grad_()
    parameters = dict(module.named_parameters())
    kept: list[Any] = [None]

    def forward(source: Any) -> Any:
        output = module(source)
        return output[0] if isinstance(output, tuple) else output

    def infer() -> None:
        with torch.inference_mode():
            kept[0] = forward(x)

    def train() -> None:
        # The gradient of (output * dy).sum(), without timing that sum.
        output = forward(leaf)
        output.backward(dy)
        kept[0] = output.detach()

    def prepare(training: bool) -> None:
        module.train(training)
        kept[0] = leaf.grad = None
        for parameter in parameters.values():
            parameter.grad = None
        if problem.cell.definition.keeps:  # the same random masks for everybody
            torch.manual_seed(problem.seed)

    def gradients() -> dict[str, Array]:
        found = {"output": kept[0].numpy(), "x": leaf.grad.numpy()}
        # A parameter without a gradient stays absent: the gate says which one is missing.
        return found | {k: p.grad.numpy() for k, p in parameters.items() if p.grad is not None}

    return Contender(
        Task(infer, lambda: {"output": kept[0].numpy()}, lambda: prepare(False)),
        Task(train, gradients, lambda: prepare(True)),
    )


def _load(module: Any, problem: Problem) -> Any:
    import torch

    module = module.to(getattr(torch, problem.dtype))
    module.load_state_dict({k: torch.from_numpy(v) for k, v in problem.weights.items()})
    return module


def _sizes(problem: Problem) -> dict[str, Any]:
    shape = problem.shape
    return {"num_layers": shape.L, "bidirectional": shape.D == 2}


def torch_nn(problem: Problem) -> Contender:
    """``torch.nn.LSTM``, ``GRU``, ``RNN``."""
    return from_module(_nn_module(problem), problem)


def _nn_module(problem: Problem) -> Any:
    from torch import nn

    name = problem.cell.name
    if not problem.cell.classic or name not in ("LSTM", "GRU", "RNN"):
        raise Unsupported(f"torch.nn has no {name}")
    return _load(getattr(nn, name)(problem.shape.I, problem.shape.H, **_sizes(problem)), problem)


def anycell_torch(problem: Problem) -> Contender:
    """The layer that replaces ``torch.nn``'s for LSTM and GRU, ``RNN(cell, ...)`` for every other."""
    frontend: Any = importlib.import_module("anycell.torch")
    name, shape = problem.cell.name, problem.shape
    if problem.cell.classic and name in ("LSTM", "GRU"):
        module = getattr(frontend, name)(shape.I, shape.H, **_sizes(problem))
    else:
        module = frontend.RNN(problem.cell.definition, shape.I, shape.H, **_sizes(problem))
    return from_module(_load(module, problem), problem)


def torch_loop(problem: Problem) -> Contender:
    """A Python loop over time: by hand for the classics, the op graph step by step for other cells."""
    return from_module(_loop_module(problem), problem)


def torch_compile(problem: Problem) -> Contender:
    """The same loop under ``torch.compile``; its first call compiles, for minutes where T is large."""
    import torch

    module = _loop_module(problem)
    module.compile(fullgraph=False, dynamic=False)
    torch._dynamo.reset()
    return from_module(module, problem)


def _loop_module(problem: Problem) -> Any:
    from anycell.bench.torch_loops import Loop

    return Loop(problem)


# -- contenders on NumPy arrays ------------------------------------------------------------------------


def numpy_loop(problem: Problem) -> Contender:
    """The LSTM from scratch: a Python loop over time, backward by hand."""
    from anycell.bench.numpy_loops import SCANS, Stack

    if not problem.cell.classic or problem.cell.name not in SCANS:
        raise Unsupported(f"no NumPy loop for {problem.cell.name}")
    stack = Stack(problem.cell.name, problem.weights, problem.shape.L, problem.shape.D)
    kept: dict[str, Array] = {}

    def infer() -> None:
        kept["output"] = stack.forward(problem.x)

    def train() -> None:
        kept["output"] = stack.forward(problem.x, keep=True)
        kept.update(stack.backward(problem.dy))

    return Contender(
        Task(infer, lambda: {"output": kept["output"]}, kept.clear),
        Task(train, lambda: dict(kept), kept.clear),
        lambda: blas_threads(problem.threads),
    )


def onnxruntime(problem: Problem) -> Contender:
    """The same weights as an ONNX graph; inference in float32 is all that ONNX Runtime has."""
    if problem.dtype != "float32":
        raise Unsupported(f"ONNX Runtime has no {problem.dtype} recurrent layers")
    from anycell.bench.onnx_graph import build

    model = build(problem)
    runtime: Any = need("onnxruntime", "the onnxruntime peer")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = problem.threads
    options.inter_op_num_threads = 1
    session = runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    feed, kept = {"x": problem.x}, [np.empty(0)]

    def infer() -> None:
        kept[0] = session.run(None, feed)[0]

    return Contender(Task(infer, lambda: {"output": kept[0]}))


@contextmanager
def blas_threads(threads: int) -> Iterator[None]:
    """NumPy's BLAS with so many threads, where threadpoolctl is there to say so."""
    try:
        from threadpoolctl import threadpool_limits
    except ModuleNotFoundError:
        yield
        return
    with threadpool_limits(limits=threads, user_api="blas"):
        yield


# -- the list --------------------------------------------------------------------------------------------

SUBJECT = "anycell"
CONTENDERS: dict[str, Callable[[Problem], Contender]] = {
    SUBJECT: anycell_torch,
    "torch.nn": torch_nn,
    "torch-loop": torch_loop,
    "torch-compile": torch_compile,
    "numpy-loop": numpy_loop,
    "onnxruntime": onnxruntime,
}
DEFAULT_PEERS = ("torch.nn", "torch-loop")
PACKAGES = {"onnxruntime": ("onnx", "onnxruntime")}  # beyond NumPy and PyTorch


def make(name: str, problem: Problem) -> Contender:
    """The contender of that name on this problem; `Unsupported` where it has no such layer."""
    return CONTENDERS[name](problem)


def reference(problem: Problem, mode: Mode) -> dict[str, Array]:
    """Output, and in training all gradients, in float64: by ``torch.nn``, or else by the plain loop."""
    try:
        module = _nn_module(problem)
    except Unsupported:
        module = _loop_module(problem)
    task = from_module(module, problem, "float64").task(mode)
    task.prepare()
    task.call()
    return task.results()
