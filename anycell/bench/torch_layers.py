"""Layers of PyTorch: its own and ours, and the reference in float64."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import anycell.torch
from anycell import compress
from anycell.bench.numpy_layers import recurrence
from anycell.bench.problem import Problem
from anycell.bench.tasks import Array, Contender, Mode, Task, Unsupported
from anycell.layer.signature import of_layer
from anycell.plan import Layer, Options
from anycell.plan.dtype import DTYPES
from anycell.torch.operators.composite import composite


def from_module(
    build: Callable[[], Any],
    problem: Problem,
    dtype: str | None = None,
    quantize: Callable[[Any], Any] | None = None,
) -> Contender:
    """Makes a contender of a ``module(x)`` that returns the output, or a tuple with it in front.

    In 16 bits, inference runs a module in that dtype, training a float32 module under autocast.
    In 8 bits there is only inference, with ``quantize(module)``.
    """
    types = DTYPES[dtype or problem.dtype]
    kind = getattr(torch, types.storage.name)
    module = build().to(kind)
    if types.quantized:
        if quantize is None:
            raise Unsupported(f"no {types.name}")
        module = quantize(module)
    tasks: dict[Mode, Task] = {"inference": _task(module, problem, kind, torch.inference_mode)}
    if types.mixed:
        autocast = functools.partial(torch.autocast, "cpu", kind)
        tasks["training"] = _task(build(), problem, torch.float32, autocast, training=True)
    elif not types.quantized:
        tasks["training"] = _task(module, problem, kind, nullcontext, training=True)
    return Contender(tasks, engine=getattr(module, "engine", None))


NO_KERNEL = ("not implemented for", "could not create a primitive")


def _task(
    module: Any, problem: Problem, kind: Any, around: Callable[[], Any], training: bool = False
) -> Task:
    """A task: a forward pass in dtype ``kind`` within ``around()``, in training a backward pass."""
    x = torch.from_numpy(problem.x).to(kind, copy=True).requires_grad_(training)
    static = {} if problem.static is None else {"static": torch.from_numpy(problem.static).to(kind)}
    leaves = {"x": x, **dict(module.named_parameters())} if training else {}
    arriving = functools.cache(torch.from_numpy(problem.dy).to)  # in the dtype of the output

    def work() -> Any:
        try:
            with around():
                result = module(x, **static)
            output = result[0] if isinstance(result, tuple) else result
            if not training:
                return output
            # The gradient of (output * dy).sum(), without timing that sum.
            output.backward(arriving(output.dtype))
            return output.detach()
        except RuntimeError as error:
            if any(words in str(error) for words in NO_KERNEL):  # for this dtype on this machine
                raise Unsupported(str(error).partition("\n")[0]) from None
            raise

    def ready() -> None:
        module.train(training)
        for leaf in leaves.values():
            leaf.grad = None
        if problem.cell.definition.keeps:  # the same random masks for everybody
            torch.manual_seed(problem.seed)

    def arrays(output: Any) -> dict[str, Array]:
        # Arrays without a gradient stay absent, and the gate names them.
        gradients = {k: v.grad for k, v in leaves.items() if v.grad is not None}
        # Arrays of 16 bits become float32, because NumPy has no bfloat16.
        kept = {"output": output, **gradients}.items()
        return {k: (v.float() if v.element_size() == 2 else v).numpy() for k, v in kept}

    return Task(work, arrays, ready)


def _load(module: Any, problem: Problem) -> Any:
    module = module.to(getattr(torch, problem.wide))
    module.load_state_dict({k: torch.from_numpy(v) for k, v in problem.weights.items()})
    return module


def theirs(problem: Problem) -> Contender:
    """``torch.nn.LSTM``, ``GRU``, ``RNN``."""
    return from_module(functools.partial(_nn_module, problem), problem, quantize=_quantized)


def _quantized(module: Any) -> Any:
    """Returns the module with weights of 8 bits, by PyTorch's own quantization."""
    model = torch.nn.Sequential(module)
    with warnings.catch_warnings():  # it will move to torchao, which has no recurrent layers yet
        warnings.simplefilter("ignore")
        (layer,) = torch.ao.quantization.quantize_dynamic(model, {type(module)}, torch.qint8)
    if type(layer) is type(module):
        raise Unsupported(f"torch.ao.quantization has no {type(module).__name__}")
    return layer


def _nn_module(problem: Problem) -> Any:
    name = problem.cell.origin
    if name not in ("LSTM", "GRU", "RNN"):
        raise Unsupported(f"torch.nn has no {problem.cell.name}")
    return _load(getattr(nn, name)(problem.shape.I, problem.shape.H, **problem.flags), problem)


def ours(problem: Problem) -> Contender:
    """The layers that replace ``torch.nn.LSTM`` and ``GRU``; ``RNN(cell, ...)`` for other cells."""
    cell, shape = problem.cell, problem.shape
    layer = functools.partial(anycell.torch.RNN, cell.definition)
    if cell.origin in ("LSTM", "GRU"):
        layer = getattr(anycell.torch, cell.origin)

    def build() -> Any:
        return _load(layer(shape.I, shape.H, **problem.flags), problem)

    contender = from_module(build, problem, quantize=compress.quantize)
    if [l.name for l in cell.definition.linears] == ["hh"] and not problem.types.quantized:
        contender.tasks["recurrence"] = recurrence(problem)
    return contender


class Loop(nn.Module):
    """Layers of a cell in operations of torch, step by step, with ``torch.nn``'s names."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.cell, self.sizes = problem.cell.definition, tuple(problem.sizes.items())
        for name, value in problem.weights.items():
            self.register_parameter(name, nn.Parameter(torch.from_numpy(value.copy())))
        shape, learned = problem.shape, dict(self.named_parameters())
        self.reverse = (False, True)[: shape.D]
        self.layers = [of_layer(self.cell, learned, k, shape.D) for k in range(shape.L)]

    def forward(self, x: Tensor, static: Tensor | None = None) -> Tensor:
        """``[T, B, I] -> [T, B, D * H]``."""
        seed, masked = 0, self.training and bool(self.cell.keeps)
        if masked:  # drawn as the fused layer draws it: the same masks
            seed = int(torch.randint(2**63 - 1, ()))
        for k, weights in enumerate(self.layers):
            options = Options(self.reverse, training=masked, seed=seed, stream=k)
            layer = Layer(self.cell, self.sizes, options)
            arrays = {"x": x, **weights} | ({} if static is None else {"static": static})
            x, *_ = composite(layer, arrays)
        return x


def reference(problem: Problem, mode: Mode) -> dict[str, Array]:
    """Computes output, in training all gradients too, in float64, by ``torch.nn`` or a loop."""

    def build() -> Any:
        try:
            return _nn_module(problem)
        except Unsupported:
            return Loop(problem)

    if mode == "recurrence":
        task = recurrence(problem, "float64", "reference")
    else:
        task = from_module(build, problem, "float64").task(mode)
    task.prepare()
    task.call()
    return task.results()
