"""TensorFlow 1: its cells, run by its loops."""

import contextlib
from typing import Any

import numpy as np
import tensorflow as tf
from problems import Array, Arrays, Problem

import anycell.tf1 as t1
from anycell import Cell
from anycell.keras import step_by_step
from anycell.layer import ENDS
from anycell.tf1 import cells
from tests.conformance.frontend import Frontend

KINDS: dict[Cell, Any] = {
    cells.RNN: t1.BasicRNNCell,
    cells.GRU: t1.GRUCell,
    cells.LSTM: t1.LSTMCell,
    cells.PeepholeLSTM: lambda units, **more: t1.LSTMCell(units, True, **more),
    cells.ProjectedLSTM: lambda units, P, **more: t1.LSTMCell(units, num_proj=P, **more),
}


def places(problem: Problem, name: str) -> tuple[list[str], slice]:
    """The arrays that a variable holds, side by side or summed, and which rows of the first."""
    scope, _, last = name.rpartition("/")
    if scope == "projection":
        return ["weight_projection"], slice(None)
    border = (len(problem.cell.gates) - 1) * problem.sizes["H"]
    rows = {"gates": slice(0, border), "candidate": slice(border, None)}.get(scope, slice(None))
    names = {"kernel": ["weight_ih", f"weight_{scope or 'hh'}"], "bias": ["bias_ih", "bias_hh"]}
    return names.get(last, [last]), rows


def to_tf1(problem: Problem, name: str, behind: str, arrays: Arrays) -> Array:
    names, rows = places(problem, name)
    first, *others = (arrays[n + behind] for n in names if n + behind in arrays)
    if first.ndim == 1:
        return sum(others, first[rows])
    return np.concatenate([first[rows], *others], axis=1).T


def from_tf1(problem: Problem, name: str, behind: str, value: Array, into: Arrays) -> None:
    names, rows = places(problem, name)
    known = [n + behind for n in names if n + behind in problem.arrays]
    widths = [problem.arrays[n].shape[-1] for n in known]
    parts = np.split(value.T, np.cumsum(widths)[:-1], axis=1) if value.ndim > 1 else [value] * 2
    for n, part in zip(known, parts, strict=False):
        whole = n == known[0]
        into.setdefault(f"d {n}", np.zeros_like(problem.arrays[n]))
        into[f"d {n}"][rows if whole else slice(None)] = part


def made(problem: Problem, behind: str) -> Any:
    units = problem.sizes["H"]
    sizes = {name: size for name, size in problem.sizes.items() if name != "H"}
    cell = KINDS[problem.cell](units, dtype=problem.dtype, **sizes)
    cell.build(problem.inputs)
    for name, variable in cell.named.items():
        variable.assign(to_tf1(problem, name, behind, problem.arrays))
    return cell


def paired(cell: Any, state: list[Any]) -> Any:
    """The state as the cell takes it: c comes first."""
    return t1.LSTMStateTuple(*reversed(state)) if len(state) > 1 else (state or [None])[0]


def apart(state: Any) -> list[Any]:
    return [state.h, state.c] if isinstance(state, tuple) else [state]


def call(made: list[Any], problem: Problem, x: Any, states: list[Any]) -> list[Any]:
    """The output and final states ``[D, B, size]``."""
    begin = [paired(cell, [s[d] for s in states]) for d, cell in enumerate(made)]
    options = dict(problem.options)
    lengths = options.pop("lengths", None)
    if problem.reverse == (True,):
        output, final = made[0].run(x, *begin, lengths, reverse=True, **options)
        outputs, finals = (output,), (final,)
    elif len(made) == 1:
        output, final = t1.dynamic_rnn(*made, x, lengths, *begin, time_major=True, **options)
        outputs, finals = (output,), (final,)
    else:
        both = t1.bidirectional_dynamic_rnn
        outputs, finals = both(*made, x, lengths, *begin, time_major=True, **options)
    per_state = zip(*map(apart, finals), strict=True)
    return [tf.concat(outputs, 2), *map(tf.stack, per_state)]


def by_loops(graph: bool = False, steps: bool = False) -> Any:
    def solve(problem: Problem, along: Arrays | None = None) -> Arrays:
        with step_by_step() if steps else contextlib.nullcontext():
            return run(problem, along, graph)

    return solve


def run(problem: Problem, along: Arrays | None, graph: bool) -> Arrays:
    ends = [f"_l0{end}" for end in ENDS[: len(problem.reverse)]]
    cells_ = [made(problem, behind) for behind in ends]
    names = ["x", *[f"state {n}" for n in problem.cell.state_names]]
    names = [name for name in names if name in problem.arrays]
    results = ["output", *[f"final {name}" for name in problem.cell.state_names]]
    inside = [(n, b, v) for c, b in zip(cells_, ends, strict=True) for n, v in c.named.items()]
    learned = [variable for *_, variable in inside]

    def derived(*given: Any) -> Any:
        wanted = [*given, *learned]
        with contextlib.nullcontext() if along is None else tf.GradientTape() as outer:
            if outer is not None:
                outer.watch(given)
            with tf.GradientTape() as tape:
                tape.watch(given)
                values = call(cells_, problem, given[0], list(given[1:]))
            grads = tape.gradient(values, wanted, [problem.arrays[f"d {n}"] for n in results])
        if outer is not None:
            ahead = [along[name] for name in names]
            ahead += [to_tf1(problem, name, behind, along) for name, behind, _ in inside]
            grads = outer.gradient(grads, wanted, ahead, unconnected_gradients="zero")
        return values, grads

    function = tf.function(derived, autograph=False) if graph else derived
    values, grads = function(*[tf.constant(problem.arrays[name]) for name in names])
    solution = {} if along else dict(zip(results, values, strict=True))
    solution |= {f"d {name}": grad for name, grad in zip(names, grads, strict=False)}
    solution = {name: value.numpy() for name, value in solution.items()}
    for (name, behind, _), grad in zip(inside, grads[len(names) :], strict=True):
        from_tf1(problem, name, behind, grad.numpy(), solution)
    return solution


def by_step(problem: Problem) -> Arrays:
    cell, outputs = made(problem, "_l0"), []
    states = [tf.constant(s[0]) for s in problem.group("state")]
    state = paired(cell, states) if states else cell.zero_state(problem.shape[1])
    for x in problem.arrays["x"]:
        output, state = cell(tf.constant(x), state)
        outputs.append(output.numpy())
    finals = [f"final {name}" for name in problem.cell.state_names]
    last = [part.numpy()[None] for part in apart(state)]
    return {"output": np.stack(outputs), **dict(zip(finals, last, strict=True))}


LACKS = dict.fromkeys(
    ("mask", "resets", "reset_state", "repeat", "static", "recurrent_mask", "return_states"),
    "TensorFlow 1 has sequence_length alone",
) | {
    "stepped resets": "a step is a call of a cell",
    "prepare": "a step is operations of TensorFlow",
    "layers": "MultiRNNCell makes one cell of several",
    "no bias": "its cells have one",
    "16 bits": "TensorFlow 1's cells compute in the dtype of their variables",
}
FRONTENDS = [
    Frontend("tf1", by_loops(), LACKS, tuple(KINDS), by_step),
    Frontend("tf1 in a graph", by_loops(graph=True), LACKS, tuple(KINDS), variant=True),
    Frontend(
        "tf1 step by step", by_loops(steps=True), LACKS | {"no steps": "Keras's loop takes none"},
        tuple(KINDS), variant=True, fused=False,
    ),
]  # fmt: skip
