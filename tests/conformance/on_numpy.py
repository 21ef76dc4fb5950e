"""NumPy: ``anycell.numpy.RNN``, ``LSTM`` and ``GRU``, and ``anycell.recurrence``."""

from typing import Any
from unittest import mock

import numpy as np
from problems import Array, Arrays, Problem

import anycell
import anycell.numpy as an
from anycell import cells
from anycell.numpy import passes
from anycell.plan import DTYPES
from tests.conformance.frontend import Frontend


def made(problem: Problem, kind: Any, *cell: Any) -> an.RNN:
    sizes = {name: size for name, size in problem.sizes.items() if name != "H"}
    layer = kind(
        *cell, problem.inputs, problem.sizes["H"], problem.layers, bias=problem.bias,
        bidirectional=len(problem.reverse) > 1, dtype=problem.dtype, **sizes,
    )  # fmt: skip
    layer.set_parameters(problem.learned)
    return layer


def one(arrays: list[Array]) -> Any:
    """Returns states as layers take them: a tuple, the array of a single state, or None."""
    return (tuple(arrays) if len(arrays) > 1 else arrays[0]) if arrays else None


def named(problem: Problem, what: str, arrays: Any) -> Arrays:
    arrays = arrays if isinstance(arrays, tuple) else (arrays,)
    names = (f"{what} {name}" for name in problem.cell.state_names)
    return dict(zip(names, arrays, strict=True))


def by_layer(problem: Problem, layer: an.RNN | None = None) -> Arrays:
    layer = layer or made(problem, an.RNN, problem.cell)
    state = one(problem.group("state"))
    options = {**problem.options, "reset_state": one(problem.group("reset_state"))}
    output, final, *sequences = layer.forward(problem.arrays["x"], state, training=True, **options)
    arriving = {n: problem.arrays[f"d sequence {n}"] for n in (sequences or [()])[0]}
    d_x, d_state = layer.backward(
        problem.arrays["d output"], one(problem.group("d final")), arriving
    )
    solution = {"output": output, "d x": d_x, **named(problem, "final", final)}
    solution |= {f"sequence {n}": a for found in sequences for n, a in found.items()}
    solution |= {f"d {name}": grad for name, grad in layer.grads.items()}
    if state is not None:
        solution |= named(problem, "d state", d_state)
    if layer.grad_reset_state is not None:
        solution |= named(problem, "d reset_state", layer.grad_reset_state)
    if layer.grad_static is not None:
        solution["d static"] = layer.grad_static
    return solution


def by_named_layer(problem: Problem) -> Arrays:
    return by_layer(problem, made(problem, getattr(an, problem.cell.name)))


def by_composite(problem: Problem) -> Arrays:
    with mock.patch.object(passes, "fused", passes.composite):
        return by_layer(problem)


def by_step(problem: Problem) -> Arrays:
    layer, outputs = made(problem, an.RNN, problem.cell), []
    state = one(problem.group("state"))
    layer.prepare()
    for t, x in enumerate(problem.arrays["x"]):
        options = {**problem.options, "reset_state": one(problem.group("reset_state"))}
        if "resets" in options:
            options["resets"] = options["resets"][t]
        output, state = layer.step(x, state, **options)
        outputs.append(output)
    return {"output": np.stack(outputs), **named(problem, "final", state)}


def by_recurrence(problem: Problem, engine: str = "cpu") -> Arrays:
    arrays = {name.removesuffix("_l0"): array for name, array in problem.arrays.items()}
    weight, bias = arrays["weight_ih"], arrays.get("bias_ih")
    x, dtype = arrays["x"], arrays["x"].dtype
    if DTYPES[problem.dtype].mixed:  # NumPy would round each sum as it goes
        x, weight, bias = (None if a is None else a.astype("float64") for a in (x, weight, bias))
    with np.errstate(invalid="ignore"):  # NaN lies under masks
        gates = x @ weight.T
    matmuls = [name for l in problem.cell.linears for name in (l.weight, l.bias_name)]
    outputs, final = anycell.recurrence(
        problem.cell,
        (gates if bias is None else gates + bias).astype(dtype),
        {name: arrays[name] for name in matmuls if name in arrays},
        [state[0] for state in problem.group("state")] or None,
        {name: arrays[name] for name in problem.cell.param_names},
        reverse=problem.reverse[0],
        engine=engine,
        **{**problem.options, "reset_state": [s[0] for s in problem.group("reset_state")] or None},
    )
    return {"output": outputs, **named(problem, "final", tuple(s[None] for s in final))}


ONCE = "the derived backward pass is of first order"
LAYER = {
    "keep": "its gradients are those of training, where random masks are drawn",
    "reverse": "a layer runs forwards, or both ways",
    "second derivatives": ONCE,
}
PRIMITIVE = dict.fromkeys(
    ("gradients", "second derivatives"), "it runs forwards; layers derive it"
) | dict.fromkeys(("layers", "bidirectional"), "it is one direction of one layer")
PRIMITIVE |= {"return_states": "layers give the states of every step"}
FRONTENDS = [
    Frontend("numpy.RNN", by_layer, LAYER, None, by_step),
    Frontend("numpy.LSTM and GRU", by_named_layer, LAYER, (cells.LSTM, cells.GRU), alike=True),
    Frontend("numpy step by step", by_composite, LAYER, variant=True, fused=False),
    Frontend("recurrence", by_recurrence, PRIMITIVE, alike=True),
    Frontend(
        "recurrence by reference",
        lambda p: by_recurrence(p, "reference"),
        PRIMITIVE,
        variant=True,
        fused=False,
    ),
]
