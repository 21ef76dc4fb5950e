"""PyTorch: ``RNN``, the drop-ins ``LSTM`` and ``GRU``, ``recurrence``, and the layer function."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from problems import Array, Arrays, Problem
from torch import Tensor
from torch.func import functional_call

import anycell.torch as at
from anycell import cells
from anycell.layer import Options
from anycell.layer.sequences import besides_output, by_name
from anycell.numpy.check import numpy_dtype
from anycell.plan import Layer
from anycell.torch.operators.composite import composite
from anycell.torch.operators.functional import run_layer
from tests.conformance.frontend import Frontend

Tensors = dict[str, Tensor]


def tensor_of(array: Array) -> Tensor:
    """Returns the array as a tensor that shares its memory."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def array_of(tensor: Tensor) -> Array:
    """Returns a tensor of any device as an array."""
    tensor = tensor.detach().cpu()
    if tensor.dtype is torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(numpy_dtype("bfloat16"))
    return tensor.numpy()


def derive(
    call: Callable[[Tensors], Tensors], problem: Problem, along: Arrays | None, device: str = "cpu"
) -> Arrays:
    tensors = {name: tensor_of(a).to(device) for name, a in problem.arrays.items()}
    arriving = {name: tensors.pop(name) for name in list(tensors) if name.startswith("d ")}
    fixed = ("recurrent_mask",)
    leaves = {n: t for n, t in tensors.items() if t.is_floating_point() and n not in fixed}
    for tensor in leaves.values():
        tensor.requires_grad_()
    results, wanted = call(tensors), list(leaves.values())
    # Step by step, the output of a sequence without steps depends on no tensor, and that of some
    # random cells neither.
    ends = {name: t for name, t in results.items() if t.requires_grad}
    weighted = [arriving[f"d {name}"] for name in ends]
    grads = (
        [torch.zeros_like(t) for t in wanted]
        if not ends
        else torch.autograd.grad(
            [*ends.values()],
            wanted,
            weighted,
            create_graph=along is not None,
            materialize_grads=True,
        )
    )
    if along is not None:
        ahead = [torch.from_numpy(along[name]) for name in leaves]
        grads, results = torch.autograd.grad(grads, wanted, ahead, materialize_grads=True), {}
    results |= {f"d {name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {name: array_of(tensor) for name, tensor in results.items()}


def named(problem: Problem, output: Tensor, final: Any, sequences: Any = None) -> Tensors:
    final = final if isinstance(final, tuple) else (final,)
    names = [f"final {name}" for name in problem.cell.state_names]
    found = {f"sequence {name}": tensor for name, tensor in (sequences or {}).items()}
    return {"output": output, **dict(zip(names, final, strict=True)), **found}


def states(problem: Problem, tensors: Tensors, kind: str = "state") -> Any:
    """Returns states as modules take them: a tuple, the tensor of a single state, or None."""
    names = (f"{kind} {name}" for name in problem.cell.state_names)
    given = tuple(tensors[name] for name in names if name in tensors)
    return (given if len(given) > 1 else given[0]) if given else None


def module(problem: Problem, cell: tuple[Any, ...] = ()) -> Any:
    kind = at.RNN if cell else {cells.LSTM: at.LSTM, cells.GRU: at.GRU}[problem.cell]
    sizes = {name: size for name, size in problem.sizes.items() if name != "H"}
    return kind(
        *cell, problem.inputs, problem.sizes["H"], problem.layers, bias=problem.bias,
        bidirectional=len(problem.reverse) > 1, dtype=getattr(torch, problem.dtype), **sizes,
    ).eval()  # fmt: skip


def by_module(made: Any, problem: Problem, along: Arrays | None) -> Arrays:
    def call(tensors: Tensors) -> Tensors:
        options = {n: tensors.get(n, value) for n, value in problem.options.items()}
        if "reset_state" in options:
            options["reset_state"] = states(problem, tensors, "reset_state")
        learned = {name: tensors[name] for name in problem.learned}
        arguments = tensors["x"], states(problem, tensors)
        return named(problem, *functional_call(made, learned, arguments, options))

    return derive(call, problem, along)


def by_rnn(problem: Problem, along: Arrays | None = None) -> Arrays:
    return by_module(module(problem, (problem.cell,)), problem, along)


def by_drop_in(problem: Problem, along: Arrays | None = None) -> Arrays:
    return by_module(module(problem), problem, along)


def by_function(
    run: Any, device: str = "cpu", projected: bool = False, **options: Any
) -> Callable[..., Arrays]:
    """Solves problems by the function that all layers call; with ``projected``, on gates."""

    def solve(problem: Problem, along: Arrays | None = None) -> Arrays:
        said = Options(problem.reverse, "repeat" if problem.repeat else "zero", **options)
        wanted = problem.cell.state_names if problem.group("d sequence") else ()
        besides = besides_output(wanted, problem.cell)
        layer = Layer(problem.cell, tuple(problem.sizes.items()), said, sequences=besides)

        def function(tensors: Tensors) -> Tensors:
            arrays = {name.replace("_l0", ""): tensor for name, tensor in tensors.items()}
            if arrays.pop("lengths", None) is not None:  # modules turn lengths into a mask
                arrays["mask"] = torch.from_numpy(problem.valid)
            if projected:
                weight, bias = arrays.pop("weight_ih"), arrays.pop("bias_ih", None)
                x = torch.nan_to_num(arrays["x"])  # keeps NaN under masks off the weight
                arrays["x"] = torch.nn.functional.linear(x, weight, bias)
            output, final, found = run(layer, arrays)
            return named(problem, output, final, by_name(wanted, problem.cell, output, found))

        return derive(function, problem, along, device)

    return solve


def by_recurrence(problem: Problem, along: Arrays | None = None, projected: bool = False) -> Arrays:
    """Solves problems by the public function, on the caller's tensors."""

    def call(tensors: Tensors) -> Tensors:
        tensors = {name.removesuffix("_l0"): tensor for name, tensor in tensors.items()}
        options = {n: tensors.get(n, value) for n, value in problem.options.items()}
        if (restored := first(problem, tensors, "reset_state")) is not None:
            options["reset_state"] = restored
        weights = {name: tensors[name] for name in problem.cell.learned if name in tensors}
        x, options["gates"] = tensors["x"], None
        if projected:
            weight, bias = weights.pop("weight_ih"), weights.pop("bias_ih", None)
            gates = torch.nn.functional.linear(torch.nan_to_num(x), weight, bias)
            x, options["gates"] = None, gates
        state = first(problem, tensors, "state")
        reverse = problem.reverse[0]
        output, final, *sequences = at.recurrence(
            problem.cell, x, weights, state, reverse=reverse, **options
        )
        return named(problem, output, tuple(value[None] for value in final), *sequences)

    return derive(call, problem, along)


def first(problem: Problem, tensors: Tensors, kind: str) -> list[Tensor] | None:
    """The states of the only direction, or None."""
    names = (f"{kind} {name}" for name in problem.cell.state_names)
    return [tensors[name][0] for name in names if name in tensors] or None


def by_step(made: Any, problem: Problem) -> Arrays:
    tensors = {name: tensor_of(array) for name, array in problem.arrays.items()}
    for name, parameter in made.named_parameters():
        parameter.data = tensors[name]  # as it lies in memory
    made.prepare()
    state, outputs = states(problem, tensors), []
    always = {"static": tensors["static"]} if "static" in tensors else {}
    if (restored := states(problem, tensors, "reset_state")) is not None:
        always["reset_state"] = restored
    with torch.no_grad():
        for t, x in enumerate(tensors["x"]):
            resets = {"resets": tensors["resets"][t]} if "resets" in tensors else {}
            output, state = made.step(x, state, **always, **resets)
            outputs.append(output)
    results = named(problem, torch.stack(outputs), state)
    return {name: array_of(tensor) for name, tensor in results.items()}


DIRECTIONS = "a layer runs forwards, or both ways"
AS_TORCH = "torch.nn refuses sequences without a step"
RNN = {
    "reverse": DIRECTIONS,
    "no steps": AS_TORCH,
    "negative strides": "PyTorch has no such tensors",
}
ONE, ONE_WAY = "it is one layer", "it is one direction"
AS_THEY_ARE = {"prepare": "steps read the weights as they are"}
FRONTENDS = [
    Frontend(
        "torch.RNN", by_rnn, RNN | AS_THEY_ARE, None,
        lambda p: by_step(module(p, (p.cell,)), p),
    ),
    Frontend(
        "torch.LSTM and GRU", by_drop_in, RNN | AS_THEY_ARE,
        (cells.LSTM, cells.GRU), lambda p: by_step(module(p), p),
    ),
    Frontend(
        "torch.recurrence", by_recurrence, {"layers": ONE, "bidirectional": ONE_WAY}, alike=True,
    ),
    Frontend(
        "torch.recurrence, projected", partial(by_recurrence, projected=True),
        {"layers": ONE, "bidirectional": ONE_WAY}, alike=True, variant=True,
    ),
    Frontend(
        "the layer of torch", by_function(run_layer), {"layers": ONE}, alike=True, variant=True
    ),
    Frontend(
        "the layer of torch, projected", by_function(run_layer, projected=True),
        {"layers": ONE, "bidirectional": "the directions would have gates of their own"},
        alike=True, variant=True,
    ),
    Frontend(
        "torch step by step", by_function(composite), {"layers": ONE},
        variant=True, fused=False,
    ),
]  # fmt: skip
