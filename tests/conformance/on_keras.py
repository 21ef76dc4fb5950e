"""Keras, on the backend of KERAS_BACKEND: ``RNN`` and the drop-ins, eager and in graphs."""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
from keras_layers import BACKEND, derive, double, number
from problems import LEARNED, Array, Arrays, Problem

import anycell.keras as ak
from anycell.keras.cells import GRU, LSTM, SimpleRNN
from anycell.plan import DTYPES
from tests.conformance.frontend import Frontend

DROP_INS = {LSTM: ak.LSTM, GRU: ak.GRU, SimpleRNN: ak.SimpleRNN}
BOTH = ["bias_ih_l0", "bias_hh_l0"]


def places(problem: Problem, weight: Any) -> list[str]:
    """The names of the problem's arrays that Keras stores in one weight."""
    name = weight.path.split("/")[-1]
    if name == "bias":
        cell, r = problem.cell, problem.cell.by_weight.get("weight_hh")
        fewer = r is not None and r.declared != cell.gates
        apart = fewer and not cell.fused.issuperset(r.declared)
        return [name for name in BOTH[: 2 - apart] if name in problem.arrays]
    if name == "recurrent_bias":
        return BOTH[1:]
    if name in ("kernel", "recurrent_kernel"):
        return ["weight_ih_l0" if name == "kernel" else "weight_hh_l0"]
    for ending, kind in (("_kernel", "weight_"), ("_bias", "bias_")):
        if name.endswith(ending):
            return [f"{kind}{name.removesuffix(ending)}_l0"]
    return [f"{name}_l0"]


def of_r(problem: Problem) -> Array:
    """The columns of the gates that have a recurrent projection."""
    cell, sizes = problem.cell, {**problem.sizes, "1": 1}
    columns = np.arange(cell.width(sizes))
    parts = [columns[p] for g, p in cell.places(sizes).items() if cell.gate_sizes[g] == "H"]
    return np.concatenate([*parts, columns[:0]])


def to_keras(problem: Problem, names: list[str], arrays: Mapping[str, Array], axes: int) -> Array:
    """Returns the value of one Keras weight, which may be the sum of both biases."""
    if names == BOTH and axes == 1:
        total = arrays[names[0]].copy()
        total[of_r(problem)] += arrays[names[1]]
        return total
    if names[0] in BOTH:
        return np.stack([arrays[n] for n in names]) if axes == 2 else arrays[names[0]]
    return arrays[names[0]].swapaxes(-1, -2) if axes > 1 else arrays[names[0]]


def from_keras(problem: Problem, names: list[str], value: Array) -> Arrays:
    if names == BOTH and value.ndim == 1:
        return {names[0]: value, names[1]: value[of_r(problem)]}
    apart = names[0] in BOTH and value.ndim == 2
    value = value if apart or value.ndim == 1 else value.swapaxes(-1, -2)
    return {name: value[k] if apart else value for k, name in enumerate(names)}


def made(problem: Problem, drop_in: bool) -> Any:
    sizes = {name: size for name, size in problem.sizes.items() if name != "H"}
    cell = () if drop_in else (problem.cell,)
    # Keras's initializers do not support bfloat16; its mixed policies keep variables in float32.
    policy = f"mixed_{problem.dtype}" if DTYPES[problem.dtype].mixed else problem.dtype
    layer = (DROP_INS[problem.cell] if drop_in else ak.RNN)(
        *cell, problem.sizes["H"], use_bias=problem.bias, dtype=policy,
        return_sequences=True, return_state=True, go_backwards=problem.reverse[0],
        zero_output_for_mask=not problem.repeat, **sizes,
    )  # fmt: skip
    layer.build((None, None, problem.inputs))
    for weight in layer.trainable_variables:
        value = to_keras(problem, places(problem, weight), problem.arrays, len(weight.shape))
        weight.assign(value)
    return layer


def turn(name: str, array: Array, reverse: bool, back: bool = False) -> Array:
    """Converts to Keras's layout, or back: batch first, steps as processed, one direction."""
    if name.startswith(("state", "final")):
        return array[None] if back else array[0]
    if array.ndim < 3:
        return array
    if name == "output" and reverse:
        array = np.flip(array, 1 if back else 0)
    return array.swapaxes(0, 1)


def by_layer(drop_in: bool = False, **ways: bool) -> Callable[..., Arrays]:
    def solve(problem: Problem, along: Arrays | None = None) -> Arrays:
        if BACKEND == "jax":  # which calls the kernels' recipes only where it traces
            on_jax().clear_cache()
        with double(problem.dtype):
            return run(made(problem, drop_in), problem, along, ways)

    return solve


def on_jax() -> Any:
    from anycell.keras import jax

    return jax._run


def run(layer: Any, problem: Problem, along: Arrays | None, ways: dict[str, bool]) -> Arrays:
    reverse, state_names = problem.reverse[0], problem.cell.state_names
    names = ["x", *[f"state {name}" for name in state_names], "static"]
    names = [name for name in names if name in problem.arrays]
    results = ["output", *[f"final {name}" for name in state_names]]
    options = {n: a for n, a in problem.options.items() if n not in ("static", "masked_output")}
    options |= {name: options[name].T for name in ("mask", "resets") if name in options}
    arriving = [turn(name, problem.arrays[f"d {name}"], reverse) for name in results]
    weights = layer.trainable_variables
    inside = [places(problem, weight) for weight in weights]

    def call(tensors: Any) -> list[Any]:
        given = dict(zip(names, tensors, strict=True))
        x, more = given.pop("x"), keras.tree.map_structure(keras.ops.convert_to_tensor, options)
        more |= {"static": given.pop("static")} if "static" in given else {}
        return list(layer(x, initial_state=list(given.values()) or None, **more))

    def loss(values: list[Any]) -> Any:
        weights = keras.tree.map_structure(keras.ops.convert_to_tensor, arriving)
        return sum(keras.ops.sum(v * w) for v, w in zip(values, weights, strict=True))

    def all_of(arrays: Arrays) -> list[Array]:
        ranks = [len(weight.shape) for weight in weights]
        pairs = zip(inside, ranks, strict=True)
        learned = [to_keras(problem, names, arrays, rank) for names, rank in pairs]
        return [turn(name, arrays[name], reverse) for name in names] + learned

    given = [turn(name, problem.arrays[name], reverse) for name in names]
    values, grads = derive(layer, call, loss, given, along=along and all_of(along), **ways)
    solution = {} if along else dict(zip(results, values, strict=True))
    solution |= {f"d {name}": grad for name, grad in zip(names, grads, strict=False)}
    solution = {
        name: turn(name.removeprefix("d "), number(value), reverse, back=True)
        for name, value in solution.items()
    }
    for place, grad in zip(inside, grads[len(names) :], strict=True):
        value = number(grad).astype(given[0].dtype, copy=False)  # float32, if variables are
        solution |= {f"d {n}": value for n, value in from_keras(problem, place, value).items()}
    return solution


def by_step(problem: Problem) -> Arrays:
    with double(problem.dtype):
        cell, outputs = made(problem, False).cell, []
        states = [keras.ops.convert_to_tensor(state[0]) for state in problem.group("state")]
        for x in problem.arrays["x"]:
            output, states = cell(keras.ops.convert_to_tensor(x), states)
            outputs.append(number(output))
    finals = [f"final {name}" for name in problem.cell.state_names]
    solution = dict(zip(finals, [number(state)[None] for state in states], strict=True))
    return {"output": np.stack(outputs), **solution}


def step_by_step(problem: Problem, along: Arrays | None = None) -> Arrays:
    with ak.step_by_step():
        return by_layer()(problem, along)


def by_recurrence(**ways: Any) -> Callable[..., Arrays]:
    """The primitive; with ``engine``, on that one, and with ``graph`` in a graph."""
    engine = ways.pop("engine", None)

    def solve(problem: Problem, along: Arrays | None = None) -> Arrays:
        cell = problem.cell
        names = sorted([name.removeprefix("d ") for name in problem.right if name[:2] == "d "])
        names.insert(0, names.pop(names.index("x")))
        results = ["output", *[f"final {name}" for name in cell.state_names]]
        results += [n for n in problem.right if n.startswith("sequence ")]
        apart = {"static", "recurrent_mask", "reset_state"}
        options = {n: a for n, a in problem.options.items() if n not in apart}
        mask = problem.arrays.get("recurrent_mask")

        def call(tensors: Any) -> list[Any]:
            for name, tensor in zip(names, tensors, strict=True):
                if LEARNED.search(name):  # whose sizes a graph must know
                    tensor.set_shape(problem.arrays[name].shape)
            named = dict(zip((n.removesuffix("_l0") for n in names), tensors, strict=True))
            state, reset = (
                [named[f"{kind} {n}"][0] for n in cell.state_names if f"{kind} {n}" in named]
                for kind in ("state", "reset_state")
            )
            learned = {n: named[n] for n in cell.learned if n in named}
            output, final, *others = ak.recurrence(
                cell, swap(named["x"]), learned, state or None,
                reverse=problem.reverse[0], engine=engine, reset_state=reset or None,
                static=named.get("static"), recurrent_mask=mask, **options,
            )  # fmt: skip
            wanted = [name.removeprefix("sequence ") for name in results[1 + len(final) :]]
            sequences = [output, *(others[0][name] for name in wanted)]
            output, *others = map(swap, sequences)
            return [output, *final, *others]

        def loss(values: list[Any]) -> Any:
            pairs = zip(values, results, strict=True)
            return sum(keras.ops.sum(v * arriving(name)) for v, name in pairs)

        def arriving(name: str) -> Any:
            return keras.ops.convert_to_tensor(turned(name, problem.arrays[f"d {name}"]))

        def turned(name: str, array: Array, back: bool = False) -> Array:
            """Converts to what ``derive`` takes, batch first, or back."""
            if name.startswith("final"):
                return array[None] if back else array[0]
            sequence = name == "x" or name.startswith(("output", "sequence "))
            return array.swapaxes(0, 1) if sequence else array

        def swap(tensor: Any) -> Any:
            return keras.ops.swapaxes(tensor, 0, 1)

        given = [turned(name, problem.arrays[name]) for name in names]
        second = None if along is None else [turned(name, along[name]) for name in names]
        with double(problem.dtype):
            none = keras.layers.Identity()  # has no weights
            values, grads = derive(none, call, loss, given, along=second, **ways)
        pairs = zip(results, values, strict=True) if along is None else ()
        solution = {name: turned(name, number(value), back=True) for name, value in pairs}
        pairs = zip(names, grads, strict=True)
        return solution | {f"d {n}": turned(n, number(g), back=True) for n, g in pairs}

    return solve


LACKS = {
    "lengths": "Keras says them by a mask",
    "reset_state": "resets restore what the cell declares",
    "recurrent_mask": "recurrent_dropout= draws them",
    "return_states": "return_sequences= are of the output",
    "bidirectional": "keras.layers.Bidirectional makes two layers of one",
    "layers": "each layer is one",
    "no steps": "Keras's loop takes none",
    "prepare": "a step is operations of the backend",
    "static steps": "RNNCell has no place for it",
    "stepped resets": "a step is a call of a cell",
    "held start": "before a row's first step Keras repeats zeros",
}
AS_KERAS = LACKS | {"static": "keras.layers has no place for it"}
INEXACT = {"float64": "Keras's matmul on torch is of float32"} if BACKEND == "torch" else {}
FRONTENDS = [
    Frontend(
        f"keras.RNN step by step on {BACKEND}", step_by_step, LACKS | INEXACT, None, by_step,
        variant=True, fused=False,
    ),
    Frontend(f"keras.RNN on {BACKEND}", by_layer(), LACKS),
    Frontend(f"keras drop-ins on {BACKEND}", by_layer(True), AS_KERAS, tuple(DROP_INS)),
]  # fmt: skip
PRIMITIVE = dict.fromkeys(("layers", "bidirectional"), "it is one direction of one layer")
if BACKEND == "tensorflow":
    FRONTENDS += [
        Frontend("keras.RNN in a graph", by_layer(graph=True), LACKS, variant=True),
        Frontend("keras.recurrence", by_recurrence(), PRIMITIVE),
        Frontend("keras.recurrence in a graph", by_recurrence(graph=True), PRIMITIVE, variant=True),
        Frontend(
            "keras.recurrence step by step", by_recurrence(engine="reference"),
            PRIMITIVE | {"no steps": LACKS["no steps"]}, variant=True, fused=False,
        ),
    ]  # fmt: skip
