"""Contenders on torch tensors: torch's own layers, ours, and loops over time."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anycell.torch
from anycell import compress
from anycell.bench.numpy_layers import recurrence, recurrence_arguments
from anycell.bench.problem import Problem, by_direction
from anycell.bench.tasks import Array, Contender, Mode, Task, Unsupported
from anycell.engines.reference import Recurrence
from anycell.layer import steps
from anycell.layer.signature import of_layer
from anycell.plan import Layer, Options
from anycell.plan.dtype import DTYPES

Weights = Mapping[str, Tensor]  # of one direction of one layer
Scan = Callable[[Tensor, Weights, bool], Tensor]  # [T, B, in] -> [T, B, H], backwards if True


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


def _task(
    module: Any, problem: Problem, kind: Any, around: Callable[[], Any], training: bool = False
) -> Task:
    """A task: a forward pass in dtype ``kind`` within ``around()``, in training a backward pass."""
    x = torch.from_numpy(problem.x).to(kind, copy=True).requires_grad_(training)
    static = {} if problem.static is None else {"static": torch.from_numpy(problem.static).to(kind)}
    leaves = {"x": x, **dict(module.named_parameters())} if training else {}
    arriving = functools.cache(torch.from_numpy(problem.dy).to)  # in the dtype of the output

    def work() -> Any:
        with around():
            result = module(x, **static)
        output = result[0] if isinstance(result, tuple) else result
        if not training:
            return output
        # The gradient of (output * dy).sum(), without timing that sum.
        output.backward(arriving(output.dtype))
        return output.detach()

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


NO_KERNEL = ("not implemented for", "could not create a primitive")


def as_torch_has(contender: Contender) -> Contender:
    """Makes tasks raise `Unsupported` when PyTorch has no kernel for a dtype on this machine."""

    def checked(work: Callable[[], Any]) -> Any:
        try:
            return work()
        except RuntimeError as error:
            if any(words in str(error) for words in NO_KERNEL):
                raise Unsupported(str(error).partition("\n")[0]) from None
            raise

    for task in contender.tasks.values():
        task.work = functools.partial(checked, task.work)
    return contender


def _load(module: Any, problem: Problem) -> Any:
    module = module.to(getattr(torch, problem.wide))
    module.load_state_dict({k: torch.from_numpy(v) for k, v in problem.weights.items()})
    return module


def theirs(problem: Problem) -> Contender:
    """``torch.nn.LSTM``, ``GRU``, ``RNN``."""
    build = functools.partial(_nn_module, problem)
    return as_torch_has(from_module(build, problem, quantize=_quantized))


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
    name = problem.cell.name
    if not problem.cell.classic or name not in ("LSTM", "GRU", "RNN"):
        raise Unsupported(f"torch.nn has no {name}")
    return _load(getattr(nn, name)(problem.shape.I, problem.shape.H, **problem.flags), problem)


def ours(problem: Problem) -> Contender:
    """The layers that replace ``torch.nn.LSTM`` and ``GRU``; ``RNN(cell, ...)`` for other cells."""
    frontend: Any = anycell.torch
    cell, shape = problem.cell, problem.shape

    def build() -> Any:
        if cell.classic and cell.name in ("LSTM", "GRU"):
            layer = getattr(frontend, cell.name)
        else:
            layer = functools.partial(frontend.RNN, cell.definition)
        return _load(layer(shape.I, shape.H, **problem.flags), problem)

    contender = from_module(build, problem, quantize=compress.quantize)
    if [l.name for l in cell.definition.linears] == ["hh"] and not problem.types.quantized:
        contender.tasks["recurrence"] = recurrence(problem)
    return contender


class Loop(nn.Module):
    """Layers and directions around a scan, with ``torch.nn``'s parameter names.

    Args:
        scan: runs one direction; None runs the cell's graph, operation by operation, in torch.
    """

    def __init__(self, problem: Problem, scan: Scan | None = None) -> None:
        super().__init__()
        self.cell, self.sizes = problem.cell.definition, tuple(problem.sizes.items())
        self.scan = scan
        for name, value in problem.weights.items():
            self.register_parameter(name, nn.Parameter(torch.from_numpy(value.copy())))
        shape, learned = problem.shape, dict(self.named_parameters())
        self.stack = by_direction(learned, shape)
        self.layers = [of_layer(self.cell, learned, k, shape.D) for k in range(shape.L)]

    def forward(self, x: Tensor, static: Tensor | None = None) -> Tensor:
        """``[T, B, I] -> [T, B, D * H]``."""
        seed = None
        if self.training and self.cell.keeps:  # drawn as the fused layer draws it: the same masks
            seed = int(torch.randint(2**63 - 1, ()))
        for k, layer in enumerate(self.stack):
            if self.scan is not None:
                outputs = [self.scan(x, w, d == 1) for d, w in enumerate(layer)]
            else:
                reverse = (False, True)[: len(layer)]
                options = Options(reverse, training=seed is not None, seed=seed or 0, stream=k)
                arrays = {"x": x, "static": static, **self.layers[k]}
                runs = steps.directions(Layer(self.cell, self.sizes, options), arrays, F.linear)
                outputs = [run.forward()[0] for run in runs]
            x = torch.cat(outputs, 2) if len(outputs) > 1 else outputs[0]
        return x


def reference(problem: Problem, mode: Mode) -> dict[str, Array]:
    """Computes output, in training all gradients too, in float64, by ``torch.nn`` or a loop."""
    if mode == "recurrence":
        cell, *arrays = recurrence_arguments(problem, "float64")
        layer = Layer(cell, tuple(problem.sizes.items()))
        return {"output": Recurrence(layer, *arrays).forward()[0]}
    try:
        task = from_module(lambda: _nn_module(problem), problem, "float64").task(mode)
    except Unsupported:
        task = from_module(lambda: Loop(problem), problem, "float64").task(mode)
    task.prepare()
    task.call()
    return task.results()
