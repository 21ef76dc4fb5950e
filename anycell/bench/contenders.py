"""The contenders. Each gets the same problem and returns arrays under the same names.

A contender is built once per problem and then asked for *tasks*, mostly inference and training. A
task has ``prepare`` (not timed: gradients set to None), ``call`` (timed) and ``results`` (for the
gate).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from anycell.bench.errors import Unsupported, need
from anycell.bench.problem import Problem, find_cell
from anycell.bench.tasks import Array, Contender, Mode, Task
from anycell.engines import reference as engine

# -- contenders on torch tensors -------------------------------------------------------------------


def from_module(module: Any, problem: Problem, dtype: str | None = None) -> Contender:
    """Any ``module(x)`` that returns the output, or a tuple that starts with it."""
    import torch

    kind = getattr(torch, dtype or problem.dtype)
    module = module.to(kind)
    x = torch.from_numpy(problem.x).to(kind)
    dy = torch.from_numpy(problem.dy).to(kind)
    given = {} if problem.static is None else {"static": torch.from_numpy(problem.static).to(kind)}
    leaf = x.clone().requires_grad_()
    parameters = dict(module.named_parameters())
    kept: list[Any] = [None]

    def forward(source: Any) -> Any:
        output = module(source, **given)
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
        # What has no gradient stays absent: the gate says which one is missing.
        leaves = {"x": leaf, **parameters}
        grads = {k: v.grad.numpy() for k, v in leaves.items() if v.grad is not None}
        return {"output": kept[0].numpy(), **grads}

    return Contender(
        {
            "inference": Task(infer, lambda: {"output": kept[0].numpy()}, lambda: prepare(False)),
            "training": Task(train, gradients, lambda: prepare(True)),
        },
        engine=getattr(module, "engine", None),
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
    """The layers that replace ``torch.nn.LSTM`` and ``GRU``; ``RNN(cell, ...)`` for other cells."""
    frontend: Any = importlib.import_module("anycell.torch")
    name, shape = problem.cell.name, problem.shape
    if problem.cell.classic and name in ("LSTM", "GRU"):
        module = getattr(frontend, name)(shape.I, shape.H, **_sizes(problem))
    else:
        flags = _sizes(problem) | problem.others
        module = frontend.RNN(problem.cell.definition, shape.I, shape.H, **flags)
    contender = from_module(_load(module, problem), problem)
    if [l.name for l in problem.cell.definition.linears] == ["hh"]:
        contender.tasks["recurrence"] = _recurrence(problem)
    return contender


def _recurrence(problem: Problem) -> Task:
    """The primitive alone: one direction of the first layer, its input projected before."""
    import anycell

    arguments = recurrence_arguments(problem)
    kept = [np.empty(0)]

    def call() -> None:
        kept[0], _ = anycell.recurrence(*arguments)

    return Task(call, lambda: {"output": kept[0]})


def recurrence_arguments(problem: Problem, dtype: str | None = None) -> tuple[Any, ...]:
    """Cell, projected inputs, weights, state and parameters, as the primitive takes them."""
    w = {
        name.removesuffix("_l0"): value.astype(dtype or problem.dtype)
        for name, value in problem.weights.items()
        if name.endswith("_l0")
    }
    cell = problem.cell.definition
    x = problem.x.astype(dtype or problem.dtype)
    gates = x @ w["weight_ih"].T + w.get("bias_ih", x.dtype.type(0))
    weights = {name: w[name] for name in ("weight_hh", "bias_hh") if name in w}
    return cell, gates, weights, None, {name: w[name] for name in cell.param_names}


def torch_loop(problem: Problem) -> Contender:
    """A Python loop over time: by hand for the classics, operation by operation for other cells."""
    return from_module(_loop_module(problem), problem)


def torch_compile(problem: Problem) -> Contender:
    """The same loop under ``torch.compile``; its first call compiles, minutes where T is large."""
    import torch

    if not problem.cell.classic:
        raise Unsupported(f"no loop for {problem.cell.name} that torch.compile could take whole")
    module = _loop_module(problem)
    module.compile(fullgraph=False, dynamic=False)
    torch._dynamo.reset()
    return from_module(module, problem)


def _loop_module(problem: Problem) -> Any:
    from anycell.bench.torch_loops import Loop

    return Loop(problem)


# -- contenders on TensorFlow's tensors ------------------------------------------------------------


def _of_keras(name: str) -> Callable[[Problem], Contender]:
    """A contender of ``keras_layers``, which imports TensorFlow."""

    def make(problem: Problem) -> Contender:
        # Those of some cells are PyTorch's, which may load Triton. It must be before TensorFlow:
        # both bring an LLVM, and Triton's aborts when it comes second.
        _ = problem.weights
        module: Any = importlib.import_module("anycell.bench.keras_layers")
        module.set_threads(problem.threads)
        contender: Contender = getattr(module, name)(problem)
        return contender

    return make


# -- contenders on NumPy arrays --------------------------------------------------------------------


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
        {
            "inference": Task(infer, lambda: {"output": kept["output"]}, kept.clear),
            "training": Task(train, lambda: dict(kept), kept.clear),
        },
        lambda: blas_threads(problem.threads),
    )


def anycell_numpy(problem: Problem) -> Contender:
    """The layer without a framework."""
    import anycell

    cell, shape = problem.cell.definition, problem.shape
    if cell.keeps:
        raise Unsupported(f"{problem.cell.name} draws random masks, here from NumPy's generator")
    flags = _sizes(problem) | problem.others
    layer = anycell.numpy.RNN(
        cell, shape.I, shape.H, dtype=problem.dtype, seed=problem.seed, **flags
    )
    layer.set_parameters(problem.weights)
    static = problem.static
    kept: dict[str, Array] = {}

    def infer() -> None:
        kept["output"], _ = layer.forward(problem.x, static=static)

    def train() -> None:
        kept["output"], _ = layer.forward(problem.x, static=static, training=True)
        kept["x"], _ = layer.backward(problem.dy)

    return Contender(
        {
            "inference": Task(infer, lambda: {"output": kept["output"]}, kept.clear),
            "training": Task(train, lambda: {**kept, **layer.grads}, kept.clear),
        },
        lambda: blas_threads(problem.threads),
        (layer.plan.engine, layer.plan.reason),
    )


def onnxruntime(problem: Problem, settings: Mapping[str, str] | None = None) -> Contender:
    """The same weights as an ONNX graph; inference in float32 is all that ONNX Runtime has.

    The weights are constants of the graph, which a session packs once. `settings` are entries of
    its configuration; by default all are ONNX Runtime's own, so that its threads spin while it runs
    as they do for its users.
    """
    if problem.dtype != "float32":
        raise Unsupported(f"ONNX Runtime has no {problem.dtype} recurrent layers")
    from anycell.bench.onnx_graph import build

    model = build(problem)
    runtime: Any = need("onnxruntime", "the onnxruntime peer")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = problem.threads
    options.inter_op_num_threads = 1
    for key, value in (settings or {}).items():
        options.add_session_config_entry(key, value)
    session = runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    feed, kept = {"x": problem.x}, [np.empty(0)]

    def infer() -> None:
        kept[0] = session.run(None, feed)[0]

    return Contender({"inference": Task(infer, lambda: {"output": kept[0]})})


@contextmanager
def blas_threads(threads: int) -> Iterator[None]:
    """NumPy's BLAS with this many threads, if threadpoolctl is installed."""
    try:
        from threadpoolctl import threadpool_limits
    except ModuleNotFoundError:
        yield
        return
    with threadpool_limits(limits=threads, user_api="blas"):
        yield


# -- the list --------------------------------------------------------------------------------------

SUBJECT = "anycell"
CALM = {"session.intra_op.allow_spinning": "0"}  # threads that sleep where they have no work
OUR_LSTM = "anycell-LSTM"  # what our own LSTM takes on the same shape: the price of another cell
CONTENDERS: dict[str, Callable[[Problem], Contender]] = {
    SUBJECT: anycell_torch,
    OUR_LSTM: anycell_torch,
    "anycell.numpy": anycell_numpy,
    "torch.nn": torch_nn,
    "torch-loop": torch_loop,
    "torch-compile": torch_compile,
    "numpy-loop": numpy_loop,
    "onnxruntime": onnxruntime,
    "onnxruntime-calm": functools.partial(onnxruntime, settings=CALM),
    "anycell.keras": _of_keras("ours"),
    "keras": _of_keras("theirs"),
    "keras-xla": _of_keras("xla"),
    "keras-loop": _of_keras("loop"),
    "tf-block": _of_keras("block"),
}
DEFAULT_PEERS = ("torch.nn", "torch-loop")
ON_TENSORFLOW = ("anycell.keras", "keras", "keras-xla", "keras-loop", "tf-block")
# Beyond NumPy and PyTorch.
PACKAGES = dict.fromkeys(("onnxruntime", "onnxruntime-calm"), ("onnx", "onnxruntime"))
PACKAGES |= dict.fromkeys(ON_TENSORFLOW, ("keras", "tensorflow"))


def make(name: str, problem: Problem) -> Contender:
    """The contender of that name, built; `Unsupported` where it has no such layer."""
    return CONTENDERS[name](posed(name, problem))


def posed(name: str, problem: Problem) -> Problem:
    """The problem that this contender solves: the same, except for our LSTM among other cells."""
    return replace(problem, cell=find_cell("LSTM")) if name == OUR_LSTM else problem


def reference(problem: Problem, mode: Mode) -> dict[str, Array]:
    """Output, in training all gradients too, in float64: by ``torch.nn``, or by the plain loop."""
    if mode == "recurrence":
        cell, gates, weights, state, params = recurrence_arguments(problem, "float64")
        return {"output": engine.run(cell, gates, weights, state, params)[0]}
    try:
        module = _nn_module(problem)
    except Unsupported:
        module = _loop_module(problem)
    task = from_module(module, problem, "float64").task(mode)
    task.prepare()
    task.call()
    return task.results()
