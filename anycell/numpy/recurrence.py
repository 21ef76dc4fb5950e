"""The primitive: any cell over a sequence of projected inputs, on NumPy arrays.

It is what lies between the two large matmuls of a layer, the input projection before and the weight
gradients after. Layers with weights, gradients and training are in ``anycell.numpy``,
``anycell.torch`` and the other frontends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from anycell import layer
from anycell.engines import cpu, reference
from anycell.lang.cell import Cell
from anycell.numpy import check
from anycell.numpy.host import host_of
from anycell.plan import Plan, plan
from anycell.plan.dtype import dtypes

Array = npt.NDArray[np.floating]
Flags = npt.NDArray[np.bool_]
Shape = tuple[int, ...]


def recurrence(
    cell: Cell,
    gates_x: Array,
    weights: Mapping[str, Array | None],
    state: Sequence[Array | None] | Array | None = None,
    params: Mapping[str, Array] | None = None,
    *,
    mask: npt.ArrayLike | None = None,
    lengths: npt.ArrayLike | None = None,
    resets: npt.ArrayLike | None = None,
    reset_state: Sequence[Array | None] | Array | None = None,
    masked_output: str = "zero",
    recurrent_mask: Array | None = None,
    static: Array | None = None,
    reverse: bool = False,
    training: bool = False,
    seed: int | None = None,
    engine: str | None = None,
) -> tuple[Array, tuple[Array, ...]]:
    """Runs ``cell`` over a sequence whose input projection is done.

    All arrays have one dtype, float32, float64 or 16 bits, and any strides.

    Args:
        cell: a cell of G gates; its hidden size H follows from ``gates_x``.
        gates_x: ``[T, B, G*H]``, the input projection of each gate, in the declared order.
        weights: of the matmuls inside a step, by name. ``weight_hh`` is ``[G*H, H]``, for all
            gates; any other ``weight_<name>`` ``[out, in]`` or ``[heads, out/heads, in/heads]``,
            where out counts all outputs of the matmul, one after the other. Biases, where there
            are any: ``bias_hh``, ``bias_<name>``.
        state: ``[B, size]`` per state (for one state one array will do); None, for all or for one
            of them, starts from the declared initial value.
        params: the cell's per-unit parameters by name, ``[H]``.
        mask: ``[T, B]``, False where a step does not exist: it holds the state, and what lies
            beneath never matters.
        lengths: ``[B]``, the number of steps of each row: a mask in short. With ``mask``, a step
            exists where both say so.
        resets: ``[T, B]``, True where the state is reset before the step.
        reset_state: what resets restore, ``[size]`` or ``[B, size]`` per state; None restores the
            declared initial value.
        masked_output: "zero", or "repeat" for the held state.
        recurrent_mask: ``[B, H]``, or ``[G, B, H]`` for one per gate; multiplies the hidden state
            that enters the recurrent matmul.
        static: ``[B, H]``, the input given once per sequence, for a cell that declares it.
        reverse: from the last step to the first; a row with a length starts at its own end.
        training: random masks (``keep``) are drawn from ``seed``, instead of their mean taken.
        seed: 0 to 2**64 - 1; the same numbers on every engine.
        engine: "cpu" or "reference"; None takes what the plan says, see ``anycell.explain``.

    Returns:
        the outputs ``[T, B, size of the first state]`` and a tuple of the final states.

    Raises:
        ValueError, TypeError: naming the argument, what was given and what was expected.

    Example:
        >>> from anycell.cells import GRU
        >>> rng = np.random.default_rng(0)
        >>> gates_x = rng.normal(size=(10, 2, 3 * 8))
        >>> weights = {"weight_hh": rng.normal(size=(3 * 8, 8))}
        >>> outputs, (h,) = recurrence(GRU, gates_x, weights, lengths=[10, 4])
        >>> outputs.shape, np.array_equal(h[1], outputs[3, 1])
        ((10, 2, 8), True)
    """
    steps, rows, hidden = _problem(cell, gates_x)
    dtype, gates = gates_x.dtype, len(cell.gates)
    matmuls = _matmuls(cell, weights)
    states = _per_state(cell, "state", state)
    restored = _per_state(cell, "reset_state", reset_state)
    size = reference.sizes(cell, hidden, matmuls, states)

    for l in cell.linears:
        bias = (len(l.declared) * size[l.out_size],)
        _check(f"weights[{l.weight!r}]", matmuls[l.weight], dtype, l.shape(size))
        _check(f"weights[{l.bias_name!r}]", matmuls.get(l.bias_name), dtype, bias)
    for s, value, reset in zip(cell.states, states, restored, strict=True):
        _check(f"state {s.name!r}", value, dtype, (rows, size[s.size]))
        _check(f"reset_state {s.name!r}", reset, dtype, (rows, size[s.size]), (size[s.size],))
    params = _names("params", params or {}, cell.param_names)
    for name, value in params.items():
        _check(f"params[{name!r}]", value, dtype, (hidden,))
    if (static is None) is not (cell.static is None):
        raise ValueError(
            f"static: given {'none' if static is None else 'an array'}, "
            f"expected {'none' if cell.static is None else 'one'}: see cell {cell.name}."
        )
    _check("static", static, dtype, (rows, hidden))
    into = size[cell.states[0].size]
    if recurrent_mask is not None and "weight_hh" not in matmuls:
        named = ", ".join(l.name for l in cell.linears) or "none"
        raise ValueError(
            f"recurrent_mask: given for cell {cell.name}, which has no matmul behind `r` to mask "
            f"(its matmuls: {named}); expected None. Draw the mask in the cell, with keep()."
        )
    _check("recurrent_mask", recurrent_mask, dtype, (rows, into), (gates, rows, into))
    if engine == "gpu":
        raise ValueError(
            "engine='gpu'; expected 'cpu', 'reference' or None, for NumPy arrays are on the CPU."
        )
    chosen = plan(layer.stepped(cell, recurrent_mask), hidden, dtype.name, engine, size)

    call = reference.Recurrence(
        cell,
        gates_x,
        matmuls,
        states,
        params,
        static=static,
        mask=_mask(mask, lengths, steps, rows),
        resets=None if resets is None else check.flags("resets", resets, (steps, rows)),
        reset_state=restored,
        masked_output=_choice("masked_output", masked_output, "zero", "repeat"),
        recurrent_mask=recurrent_mask,
        reverse=_choice("reverse", reverse, False, True),
        training=_choice("training", training, False, True),
        seed=_seed(cell, training, seed),
    )
    return _fused(chosen, call) if chosen.engine == "cpu" else call.forward()


def _fused(plan: Plan, call: reference.Recurrence) -> tuple[Array, tuple[Array, ...]]:
    """The call on the CPU engine."""
    arrays = {
        "x": call.gates_x,
        "static": call.static,
        "mask": call.mask,
        "resets": call.resets,
        "recurrent_mask": call.recurrent_mask,
        **call.weights,
        **call.params,
    }
    for kind, values in (("state", call.state), ("reset_state", call.reset_state)):
        for state, value in zip(plan.cell.states, values or (), strict=bool(values)):
            arrays[f"{kind} {state.name}"] = None if value is None else value[None]
    options = layer.Options(
        reverse=(call.reverse,),
        repeat=call.masked_output == "repeat",
        training=call.training,
        seed=call.seed or 0,
        threads=cpu.pool.threads(),
    )
    host = host_of(plan.dtype)
    outputs, finals, _ = layer.forward(host, plan, arrays, options, keep=False)
    return outputs, tuple([final[0] for final in finals])


# ---- arguments -----------------------------------------------------------------------------------


def _problem(cell: Cell, gates_x: Array) -> tuple[int, int, int]:
    """T, B and H."""
    if not isinstance(cell, Cell):
        raise TypeError(
            f"cell: given {type(cell).__name__}, expected a cell made by @anycell.cell."
        )
    if gates_x is None:
        raise TypeError("gates_x: given None, expected a NumPy array of shape (T, B, gates * H).")
    _check("gates_x", gates_x, None)
    gates = len(cell.gates)
    if gates_x.ndim != 3 or gates_x.shape[2] % gates or not gates_x.shape[2]:
        raise ValueError(
            f"gates_x: given shape {gates_x.shape}, expected (T, B, {gates} * H): "
            f"cell {cell.name} has the gates {' '.join(cell.gates)}."
        )
    steps, rows, width = gates_x.shape
    return steps, rows, width // gates


def _check(name: str, value: Any, dtype: np.dtype[Any] | None, *shapes: Shape) -> None:
    """That a value is None, or an array of the dtype (None: of any that is known) and one shape."""
    if value is None:
        return
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{name}: given {type(value).__name__}, expected a NumPy array.")
    if not value.dtype.isnative or (dtype is None and value.dtype.name not in dtypes("cpu")):
        expected = ", ".join(dtypes("cpu"))
        raise TypeError(f"{name}: given dtype {value.dtype}, expected one of {expected}.")
    if dtype is not None and value.dtype != dtype:
        raise TypeError(
            f"{name}: given dtype {value.dtype}, expected {dtype}, the dtype of gates_x; "
            f"convert one of them, as in {name.split('[')[0]}.astype(np.{dtype})."
        )
    if shapes and value.shape not in shapes:
        expected = " or ".join(map(str, shapes))
        raise ValueError(f"{name}: given shape {value.shape}, expected {expected}.")


def _names(what: str, given: Any, required: Sequence[str], optional: Sequence[str] = ()) -> Any:
    """``given``, if it is a dictionary with all the required names and no unknown one."""
    if not isinstance(given, Mapping):
        raise TypeError(f"{what}: given {type(given).__name__}, expected a dictionary.")
    known = [*required, *optional]
    wrong = [f"unknown {name!r}" for name in given if name not in known]
    wrong += [f"no {name!r}" for name in required if given.get(name) is None]
    if wrong:
        expected = ", ".join(map(repr, known)) or "no names"
        raise ValueError(f"{what}: given {', '.join(wrong)}; expected {expected}.")
    return given


def _matmuls(cell: Cell, weights: Any) -> Mapping[str, Array | None]:
    names = [l.weight for l in cell.linears]
    biases = [l.bias_name for l in cell.linears if l.bias]
    # A gate's bias may be part of its input projection; the bias of linear() is nowhere else.
    required = [l.bias_name for l in cell.linears if l.bias and not l.recurrent]
    _names("weights", weights, [*names, *required], biases)
    for l in cell.linears:
        weight, axes = weights[l.weight], 2 if l.heads == 1 else 3
        _check(f"weights[{l.weight!r}]", weight, None)
        if weight.ndim != axes:
            raise ValueError(
                f"weights[{l.weight!r}]: given shape {weight.shape}, expected {axes} axes: "
                f"{'(out, in)' if l.heads == 1 else '(heads, out/heads, in/heads)'}."
            )
    return weights


def _per_state(cell: Cell, name: str, given: Any) -> list[Array | None]:
    """One entry per state."""
    if given is None:
        return [None] * len(cell.states)
    if isinstance(given, np.ndarray) and len(cell.states) == 1:
        return [given]
    names = " ".join(cell.state_names)
    if isinstance(given, np.ndarray) or not isinstance(given, Sequence):
        raise TypeError(
            f"{name}: given {type(given).__name__}, expected a tuple, one array per state: {names}."
        )
    if len(given) != len(cell.states):
        raise ValueError(f"{name}: given {len(given)}, expected {len(cell.states)}: {names}.")
    for s, value in zip(cell.states, given, strict=True):
        _check(f"{name} {s.name!r}", value, None)
        if value is not None and value.ndim not in (1, 2):
            raise ValueError(
                f"{name} {s.name!r}: given shape {value.shape}, expected (B, {s.size})."
            )
    return list(given)


def _mask(mask: Any, lengths: Any, steps: int, rows: int) -> Flags | None:
    """Where a step exists, by mask and by length; None if everywhere."""
    valid = None if mask is None else check.flags("mask", mask, (steps, rows))
    if lengths is not None:
        within = np.arange(steps)[:, None] < check.lengths("lengths", lengths, rows, steps)
        valid = within if valid is None else valid & within
    return valid


def _seed(cell: Cell, training: bool, seed: Any) -> int | None:
    if seed is None:
        if training and cell.keeps:
            raise ValueError(
                f"seed: given None, expected an integer: in training cell {cell.name} draws masks."
            )
        return None
    return check.integer("seed", seed, 0, (1 << 64) - 1)


def _choice(name: str, given: Any, *expected: Any) -> Any:
    for value in expected:
        if given is value or (isinstance(given, (str, np.bool_)) and given == value):
            return value
    raise ValueError(f"{name}: given {given!r}, expected {' or '.join(map(repr, expected))}.")


__all__ = ["recurrence"]
